"""The share of blocks that pruning skips, per head and layer, and its cost in loss over a sweep of eps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.oracle import default_scale
from attnzoo.algebra.pruning import Prune, first_kept_keys, kept_fraction, keys_behind_closed
from attnzoo.evaluation.layers import each_layer
from attnzoo.evaluation.losses import TOKENS, Array, mean_and_error, token_losses
from attnzoo.forms.options import separated
from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.layer.attention import Attention
from attnzoo.layer.projected import Projected

LOCAL = 0.5  # a head that prunes more than this is called local


@dataclass(frozen=True)
class PrunedShares:
    """The pruned share of each head on one window.

    Args:
        step: updates of the weights before the measurement; None where unknown.
        tokens: tokens in the window.
        eps: weight that a row may lose.
        bound: tail or paper, as of :class:`attnzoo.Prune`.
        layers: numbers of the layers that can prune.
        heads: share of the visible blocks of 128 rows by 64 keys that pruning skips, per layer and head, in [0, 1).
    """

    step: int | None
    tokens: int
    eps: float
    bound: str
    layers: tuple[int, ...]
    heads: tuple[tuple[float, ...], ...]

    @property
    def share(self) -> float:
        """The mean pruned share over all heads of these layers."""
        return float(np.mean([share for layer in self.heads for share in layer]))

    @property
    def local(self) -> float:
        """The share of local heads: those that prune more than half of their blocks.

        Lin et al., "Adaptive Computation Pruning for the Forgetting Transformer" (2025), section 4.3, find most heads
        to be local (most is pruned) or global (little or nothing is), without a threshold; half is our choice.
        """
        return float(np.mean([share > LOCAL for layer in self.heads for share in layer]))


def measure_pruning(
    model: nn.Module, tokens: Tensor, prune: Prune | None = None, step: int | None = None
) -> PrunedShares:
    """The pruned share of each head on one window, whether or not the model's layers prune.

    Args:
        model: as :func:`attnzoo.evaluation.layers.each_layer` takes it.
        tokens: one window of ids, ``[T]``.
        prune: eps and bound; None for the defaults.
        step: updates of the weights before.

    Raises:
        ValueError: no layer can prune.
    """
    given = prune or Prune()

    def measure(layer: Attention, core: Projected) -> tuple[float, ...] | None:
        if not layer.variant.prunable:
            return None
        kept = heads_kept(layer, core, given) / heads_kept(layer, core, None)
        return tuple((1 - kept.double()).clamp_min(0).tolist())

    _check_prunable(model)
    found = each_layer(model, tokens, measure)
    layers, heads = zip(*found, strict=True)
    return PrunedShares(step, tokens.numel(), given.eps, given.bound, layers, heads)


def heads_kept(layer: Attention, core: Projected, prune: Prune | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The share of the causal blocks of 128 rows by 64 keys that are computed, per head, ``[H]``.

    For FoX and PaTH it is counted as their kernels prune; for other gates it follows from the certificate.

    Args:
        layer: one with a scalar decay.
        core: the inputs of its core for one row of tokens, B = 1.
        prune: eps and bound; None counts the blocks that causality, the window and borders allow.
        cu_seqlens: borders of packed sequences.
    """
    from attnzoo.kernels.fox import kept_fraction as kept_by_fox
    from attnzoo.kernels.path import kept_fraction as kept_by_path

    gate = core.gate.per_token(core.q)
    single = gate.w is None or gate.w.ndim == core.k.ndim  # one factor per token
    if not single or not {*gate.parts} <= {"log_decay", "w", "beta"}:
        first = _first_certified(layer, core, prune, cu_seqlens)
        return kept_fraction(first, core.q.shape[1], rows=ROW_UNIT, cols=KEY_UNIT)
    options: dict[str, Any] = {
        "log_decay": gate.log_decay,
        **layer.core_options,
        "cu_seqlens": cu_seqlens,
        "impl": "auto" if core.q.is_cuda else "reference",  # as attention itself runs
    }
    kept: Any = kept_by_fox if gate.w is None else kept_by_path
    if gate.w is not None:
        options |= {"w": gate.w, "beta": gate.beta}
    if prune is not None:
        options |= {"prune": prune, "logit_bound": layer.logit_bound(core.q.dtype)}
    share: Tensor = kept(core.q, core.k, **options)
    return share[0]


def _first_certified(layer: Attention, core: Projected, prune: Prune | None, cu_seqlens: Tensor | None) -> Tensor:
    """The first computed key of each block of rows, ``[1, H, blocks]``."""
    T, H, window = core.q.shape[1], core.q.shape[2], layer.config.window
    gate = separated(core.gate.per_token(core.q), core.q, None, cu_seqlens)
    decay = cast(Tensor, gate.log_decay).transpose(1, 2)
    starts = torch.arange(0, T, ROW_UNIT, device=core.q.device)
    first = keys_behind_closed(decay, starts)
    if prune is not None:
        near = min(window or KEY_UNIT, KEY_UNIT)  # the log-sum-exp over the newest keys is a lower bound of the row's
        form, values = layer.variant.forms["parallel"], core.v[..., :1].to(core.q.dtype)
        options = {**layer.core_options, "window": near}
        _, lse = form(core.q, core.k, values, gate, **options, return_lse=True)
        scaled = core.q.transpose(1, 2) * (default_scale(core.q) if layer.scale is None else layer.scale)
        keys, bound = expand_heads(core.k, H).transpose(1, 2), layer.logit_bound(core.q.dtype)
        first = first_kept_keys(
            scaled, keys, decay, prune, bound, lower=lse.transpose(1, 2), rows=ROW_UNIT, cols=KEY_UNIT
        )  # fmt: skip
    if window is not None:
        first = first.maximum(starts - window + 1)
    return first // KEY_UNIT * KEY_UNIT


@dataclass(frozen=True)
class EpsRow:
    """The measurements of a model whose layers prune by one eps.

    Args:
        eps: weight that a row may lose; None for no pruning.
        loss: mean nats per token over the windows.
        change: change of the loss by pruning, mean over the windows.
        error: standard error of the change; nan for one window.
        kept: share of the blocks that is computed, mean over the heads of the layers that prune, on the first window.
        seconds: time of a forward pass over the first batch of windows without the output head, the fastest of a few,
            by window.
    """

    eps: float | None
    loss: float
    change: float
    error: float
    kept: float
    seconds: float


@dataclass(frozen=True)
class EpsSweep:
    """Loss, share and time by eps.

    Args:
        tokens: tokens in a window.
        windows: number of windows.
        bound: tail or paper.
        rows: without pruning first, then by eps as given.
    """

    tokens: int
    windows: int
    bound: str
    rows: tuple[EpsRow, ...]


def sweep_eps(
    model: nn.Module, windows: Tensor, epsilons: Sequence[float], bound: Any = "tail", repeats: int = 3,
    batch_size: int | None = None,
) -> EpsSweep:  # fmt: skip
    """The loss, computed share and time by eps of pruning (figure 7 of the paper on pruning, with the time).

    Args:
        model: as :func:`attnzoo.evaluation.layers.each_layer` takes it; it is left as it was.
        windows: token ids ``[N, T + 1]``.
        epsilons: in (0, 1).
        bound: tail or paper.
        repeats: forward passes that are timed, at least 1.
        batch_size: windows in a forward pass; None: as many as have 16,384 tokens, at least one. FoX's kernels prune
            nothing where products are few (see :func:`attnzoo.kernels.fox.fox_attention`), though `kept` counts it.

    Raises:
        ValueError: no layer can prune, no window, or a number out of range.
    """
    _check_prunable(model)
    batch = max(1, TOKENS // (windows.shape[1] - 1)) if batch_size is None else batch_size
    if min(repeats, len(windows), batch) < 1:
        given = f"{repeats}, {len(windows)}, {batch}"
        raise ValueError(f"repeats, windows, batch_size: expected at least 1, got {given}")
    plain: Array | None = None
    rows = []
    for prune in (None, *(Prune(eps, bound) for eps in epsilons)):
        with pruning(model, prune):
            losses = token_losses(model, windows, batch)
            plain = losses if plain is None else plain
            seconds = window_seconds(model, windows[:batch, :-1], repeats)
            kept = share_kept(model, windows[0, :-1], prune)
        change, error = mean_and_error(losses - plain)
        rows.append(EpsRow(None if prune is None else prune.eps, float(losses.mean()), change, error, kept, seconds))
    return EpsSweep(windows.shape[1] - 1, len(windows), bound, tuple(rows))


def share_kept(model: nn.Module, tokens: Tensor, prune: Prune | None) -> float:
    """The share of the blocks of one window ``[T]`` that is computed, mean over the heads of the layers that prune."""
    return 1.0 if prune is None else 1 - measure_pruning(model, tokens, prune).share


def window_seconds(model: nn.Module, tokens: Tensor, repeats: int = 3) -> float:
    """The seconds of a forward pass over windows ``[B, T]`` without the output head, by window, the fastest of a
    few."""
    return min(forward_seconds(model, tokens) for _ in range(repeats)) / len(tokens)


@contextmanager
def pruning(model: nn.Module, prune: Prune | None) -> Iterator[None]:
    """A context in which every layer that can prune does so by ``prune``, or with None no layer prunes."""
    layers = _prunable(model)
    before = [layer.prune for layer in layers]
    try:
        for layer in layers:
            layer.prune = prune
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.prune = was


def _prunable(model: nn.Module) -> list[Attention]:
    return [layer for layer in model.modules() if isinstance(layer, Attention) and layer.variant.prunable]


def _check_prunable(model: nn.Module) -> None:
    if not _prunable(model):
        names = sorted({layer.variant.name for layer in model.modules() if isinstance(layer, Attention)})
        raise ValueError(f"model: expected a layer with a scalar decay, which is what prunes, got {', '.join(names)}")


@torch.inference_mode()
def forward_seconds(model: nn.Module, tokens: Tensor) -> float:
    """The seconds of a forward pass over tokens ``[B, T]``, without the output head."""
    device = next(model.parameters()).device
    tokens, run = tokens.to(device), getattr(model, "hidden", model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run(tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def default_epsilons(least: float = 1e-8, most: float = 0.1, count: int = 8) -> tuple[float, ...]:
    """Log-spaced values of eps, rising, with the default of :class:`attnzoo.Prune` among them.

    Raises:
        ValueError: numbers that are not in order in (0, 1), or fewer than two.
    """
    if not 0 < least < most < 1 or count < 2:
        raise ValueError(f"eps: expected 0 < least < most < 1 and a count of 2 or more, got {least}, {most}, {count}")
    steps = np.linspace(math.log(least), math.log(most), count)
    return tuple(sorted({*map(float, np.exp(steps)), Prune().eps}))
