"""The forget gates of a trained model as matrices, and the pruning of each bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.pruning import Bound, Prune, first_kept_keys, kept_fraction
from attnzoo.algebra.sums import running_sum
from attnzoo.algebra.transitions import heads_first, scaled_queries
from attnzoo.evaluation.layers import each_layer
from attnzoo.evaluation.losses import Array
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.readout import logits_of
from attnzoo.layer.attention import Attention
from attnzoo.layer.projected import Projected

FADED = math.exp(-10.0)  # below this nothing of a key is left to see; also the default eps of the pruning
BOUNDS: tuple[Bound, ...] = ("tail", "paper")


@dataclass(frozen=True)
class PruneMap:
    """The pruning of one layer by one bound.

    Args:
        first: the first computed key, per head and block of rows, ``[H, blocks]``.
        kept: share of the visible blocks that is computed, per head, ``[H]``, in (0, 1].
        block: rows and keys per block.
    """

    first: Array
    kept: Array
    block: int


@dataclass(frozen=True)
class GateMap:
    """The forget gate of one layer on one held-out window.

    Args:
        layer: index of the layer.
        decay: exp(d_tj) at the sampled tokens, ``[H, S, S]``, 0 above the diagonal. A gate per channel is
            averaged over its channels.
        length: tokens that the S samples are evenly spaced over, from the start of the window.
        window: tokens in the window, all of which the pruning is measured on.
        prune: the pruning per bound, empty for a variant that cannot be pruned.
    """

    layer: int
    decay: Array
    length: int
    window: int
    prune: dict[str, PruneMap]


@torch.inference_mode()
def gate_maps(model: nn.Module, tokens: Tensor, samples: int = 128, block: int = 16) -> list[GateMap]:
    """The forget gates of every gated layer of ``model`` on one window.

    Args:
        model: a language model that holds :class:`~attnzoo.layer.attention.Attention` modules.
        tokens: one window of ids, ``[T]``.
        samples: rows and columns of each matrix (all T when it is shorter).
        block: rows and keys per pruning block.

    Returns:
        One map per layer whose gate decays; layers without a decay are left out.
    """
    cores = each_layer(model, tokens, lambda layer, core: (layer, core, gate_of_tokens(layer, core)))
    gated = [(index, *found) for index, found in cores if has_decay(found[2])]
    T = tokens.numel()
    length = max((_shown_length(gate, T) for *_, gate in gated), default=T)
    maps = []
    for index, layer, core, gate in gated:
        prune = {}
        if layer.variant.prunable:
            eps = (layer.prune or Prune()).eps
            prune = prune_maps(core.q, core.k, core.gate, SoftmaxOptions(**layer.core_options), eps, block)
        maps.append(GateMap(index, decay_matrix(gate.slice(0, length), samples), length, T, prune))
    return maps


def gate_of_tokens(layer: Attention, core: Projected) -> Gate:
    """The gate per token; where a token writes several times, that of its first sub-token, the only one with decays."""
    return core.gate.map(lambda part: part[:, :: layer.keys_per_token])


def has_decay(gate: Gate) -> bool:
    """Whether the gate has a decay, per head or per channel."""
    return bool(_logs(gate))


def _logs(gate: Gate) -> list[Tensor]:
    """The log-decays of the first sequence, each ``[T, H, channels or 1]``."""
    parts = [getattr(gate, name)[0] for name in gate.parts if PARTS[name].decays]
    return [part if part.ndim == 3 else part[..., None] for part in parts]


def _shown_length(gate: Gate, T: int) -> int:
    """The number of first tokens to draw, so that the decay of the longest-remembering head fills the picture."""
    decay = decay_matrix(gate, 128)
    reach = (decay > FADED).sum(2).mean(1).max() * T / decay.shape[1]
    length = 128
    while length < 2 * reach:
        length *= 2
    return min(length, T)


def decay_matrix(gate: Gate, samples: int) -> Array:
    """exp(d_tj) of the first sequence at evenly spaced tokens, ``[H, S, S]`` with S = min(samples, T).

    Raises:
        ValueError: a gate that decays nothing.
    """
    logs = _logs(gate)
    if not logs:
        known = " or ".join(name for name, part in PARTS.items() if part.decays)
        raise ValueError(f"gate: expected {known}, got {', '.join(gate.parts) or 'none'}")
    log = sum(logs[1:], logs[0])
    # A closed gate is -inf, and -inf minus -inf is nan in a difference of sums.
    total = running_sum(log.double().clamp_min(-1e4), 0)  # [T, H, channels]
    rows = torch.linspace(0, log.shape[0] - 1, min(samples, log.shape[0])).round().long()
    total = total[rows].movedim(1, 0)  # [H, S, channels]
    decay = torch.stack([(head[:, None] - head[None, :]).clamp_max(0).exp().mean(-1) for head in total])
    return np.asarray(decay.tril().cpu().numpy(), dtype=np.float64)


def prune_maps(q: Tensor, k: Tensor, gate: Gate, given: SoftmaxOptions, eps: float, block: int) -> dict[str, PruneMap]:
    """The pruning of the first sequence by each bound; q ``[B, T, H, K]``, k ``[B, T, G, K]``, a scalar decay.

    Blocks beyond a window count neither as computed nor as pruned.

    Raises:
        ValueError: a gate without one.
    """
    if gate.log_decay is None:
        raise ValueError("gate: expected log_decay, got none")
    T, window = q.shape[1], given.window
    oldest = torch.arange(0, T, block, device=q.device) - (T if window is None else window) + 1
    seen = (oldest.clamp_min(0) // block * block).expand(1, q.shape[2], -1)
    there = kept_fraction(seen, T, rows=block, cols=block)
    scaled, keys = scaled_queries(q[:1].double(), given.scale), heads_first(k[:1], q.shape[2], torch.float64)
    own = logits_of((scaled * keys).sum(-1), given)
    maps: dict[str, PruneMap] = {}
    for bound in BOUNDS:
        prune = Prune(eps=eps, bound=bound)
        gates = gate.log_decay[:1].transpose(1, 2)
        first = first_kept_keys(scaled, keys, gates, prune, lower=own, rows=block, cols=block)
        first = first.maximum(seen)
        kept = kept_fraction(first, T, rows=block, cols=block) / there
        maps[bound] = PruneMap(_numpy(first[0]), _numpy(kept), block)
    return maps


def _numpy(x: Tensor) -> Array:
    return np.asarray(x.double().cpu().numpy(), dtype=np.float64)
