"""The effective context: the number of newest keys that hold nearly all of a head's attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.oracle import default_scale
from attnzoo.algebra.pruning import Prune, first_kept_keys
from attnzoo.evaluation.layers import each_layer
from attnzoo.layer.attention import Attention
from attnzoo.layer.projected import Projected


@dataclass(frozen=True)
class EffectiveContext:
    """The effective context of each head on one window: the smallest number of newest keys that hold 1 - eps of a row's
    weight, median over the rows of the window (of an even number, the lower of the middle two).

    Row i has i keys, so a head that spreads its weight evenly has about half of the window. The weights are those over
    all keys, without a forget network.

    Args:
        tokens: tokens in the window.
        eps: share of a row's weight that may lie before these keys. A sink's weight does not count.
        layers: numbers of the softmax layers.
        heads: the effective context in tokens, per layer and head.
        bounds: an upper bound of the same by the certificate of pruning, from gates and norms alone (median over rows,
            at most the layer's window); None for layers without a scalar decay.
    """

    tokens: int
    eps: float
    layers: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    bounds: tuple[tuple[int, ...] | None, ...]


def measure_context(model: nn.Module, tokens: Tensor, eps: float = 0.01) -> EffectiveContext:
    """The effective context of each head of the softmax layers, in memory O(T).

    Args:
        model: as :func:`attnzoo.evaluation.layers.each_layer` takes it.
        tokens: one window of ids, ``[T]``.
        eps: share of a row's weight, in (0, 1).

    Raises:
        ValueError: eps out of range, or no softmax layer.
    """
    prune = Prune(eps)

    def measure(layer: Attention, core: Projected) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
        if layer.variant.side != "softmax":
            return None
        exact = replace(core, q=core.q.double(), k=core.k.double(), gate=core.gate.map(Tensor.double))
        lse = _row_sums(layer, exact, layer.config.window)
        heads = tuple(_newest_keys(layer, exact, lse, eps).tolist())
        return heads, _bound(layer, exact, lse, prune) if layer.variant.prunable else None

    found = each_layer(model, tokens, measure)
    if not found:
        raise ValueError("model: expected a softmax layer, whose rows have weights, got linear ones alone")
    layers, measured = zip(*found, strict=True)
    heads, bounds = zip(*measured, strict=True)
    return EffectiveContext(tokens.numel(), eps, layers, heads, bounds)


def _row_sums(layer: Attention, core: Projected, window: int | None) -> Tensor:
    """The log-sum-exp of each row over its newest ``window`` keys, ``[T, H]``."""
    form, options = layer.variant.forms["parallel"], {**layer.core_options, "window": window}
    _, lse = form(core.q, core.k, core.v[..., :1].double(), core.gate, **options, return_lse=True)
    return torch.as_tensor(lse)[0]


def _newest_keys(layer: Attention, core: Projected, lse: Tensor, eps: float) -> Tensor:
    """The median over rows of the number of newest keys that hold 1 - eps of the weight, by bisection, ``[H]``
    int64."""
    T, H = lse.shape
    low, high = torch.ones(H, dtype=torch.long), torch.full((H,), min(T, layer.config.window or T))
    while bool((low < high).any()):
        middle = (low + high) // 2
        for n in middle[low < high].unique().tolist():
            heads = ((middle == n) & (low < high)).nonzero()[:, 0]
            held = (_row_sums(layer, _some_heads(core, heads), n) - lse[:, heads.to(lse.device)]).exp()
            enough = (held >= 1 - eps).double().mean(0).cpu() >= 0.5
            high[heads] = torch.where(enough, n, high[heads])
            low[heads] = torch.where(enough, low[heads], n + 1)
    return low


def _some_heads(core: Projected, heads: Tensor) -> Projected:
    """The core's inputs for these heads alone, each with its own key/value head."""
    H, G, heads = core.q.shape[2], core.k.shape[2], heads.to(core.q.device)

    def pick(part: Tensor) -> Tensor:
        return part if part.shape[2] == 1 else part[:, :, heads if part.shape[2] == H else heads * G // H]

    gate = Gate(**{name: pick(getattr(core.gate, name)) for name in core.gate.parts})
    return replace(core, q=pick(core.q), k=pick(core.k), v=pick(core.v), gate=gate)


def _bound(layer: Attention, core: Projected, lse: Tensor, prune: Prune) -> tuple[int, ...]:
    scaled = core.q.transpose(1, 2) * (default_scale(core.q) if layer.scale is None else layer.scale)
    keys = _some_heads(core, torch.arange(core.q.shape[2])).k.transpose(1, 2)
    decay = core.gate.log_decay
    assert decay is not None  # a variant that prunes has a decay
    decay, bound = decay.transpose(1, 2), layer.logit_bound(torch.float64)
    first = first_kept_keys(scaled, keys, decay, prune, bound, lower=lse.T[None], rows=1, cols=1)[0]  # [H, T]
    rows = torch.arange(first.shape[1], device=first.device)
    kept = (rows - first + 1).clamp_max(layer.config.window or len(rows))
    return tuple(kept.median(-1).values.tolist())
