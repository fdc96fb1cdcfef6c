"""Parts of the families' dense references: gate sums, visible keys, pruned blocks, the readout. No Triton here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.algebra.diagonal import halves
from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.pruning import certified_starts
from attnzoo.algebra.sums import running_sum, sum_to_the_end
from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.precision import wide_dtype


@overload
def segment_starts(cu_seqlens: Tensor, S: int) -> Tensor: ...
@overload
def segment_starts(cu_seqlens: Tensor | None, S: int) -> Tensor | None: ...
def segment_starts(cu_seqlens: Tensor | None, S: int) -> Tensor | None:
    """First position of each token's packed sequence: [S] int32 from cu_seqlens [N+1]; None for None."""
    if cu_seqlens is None:
        return None
    cu = cu_seqlens.to(torch.int64)
    index = torch.searchsorted(cu, torch.arange(S, device=cu.device), right=True) - 1
    return cu[index].to(torch.int32)


def running_sums(log_decay: Tensor | None, B: int, S: int, H: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Running sums c [B, H, S] float64 and closed [B, H, S]; closed gates add nothing to c."""
    if log_decay is None:
        return (
            torch.zeros(B, H, S, dtype=torch.float64, device=device),
            torch.zeros(B, H, S, dtype=torch.bool, device=device),
        )
    if log_decay.ndim == 1:
        log_decay = log_decay.expand(B, S, H)
    closed = is_closed(log_decay)
    g = log_decay.double().masked_fill(closed, 0.0)
    return running_sum(g, 1).transpose(1, 2), closed.transpose(1, 2)


def window_starts(valid: Tensor, window: int) -> Tensor:
    """The first key in each token's window of keys that exist, [B, S] int64, from valid [B, S] bool."""
    rank = valid.cumsum(1)
    return torch.searchsorted(rank, rank - window, right=True)


def first_visible(closed: Tensor, window: int | None, cu_seqlens: Tensor | None, valid: Tensor | None = None) -> Tensor:
    """First visible key of each position: [B, H, S]; a window counts the keys that exist."""
    S = closed.shape[-1]
    pos = torch.arange(S, device=closed.device)
    first = torch.where(closed, pos, 0).cummax(-1).values
    if window is not None:
        first = torch.maximum(first, pos - window + 1 if valid is None else window_starts(valid, window)[:, None])
    if cu_seqlens is not None:
        first = torch.maximum(first, segment_starts(cu_seqlens, S))
    return first


def summed_gates(
    log_decay: Tensor | None, q: Tensor, S: int, window: int | None, cu_seqlens: Tensor | None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``running_sums`` over S keys for the batch and heads of q, and ``first_visible`` of them."""
    c, closed = running_sums(log_decay, q.shape[0], S, q.shape[2], q.device)
    return c, first_visible(closed, window, cu_seqlens, valid)


def dense_readout(logits: Tensor, values: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the keys, and a sink, of logits [B, H, T, S] times values [B, H, S, V].

    Returns:
        [B, T, H, V] in the dtype of the values, 0 for rows without any key, and the log-sum-exp [B, T, H] in that of
        the logits, -inf for them.
    """
    S = logits.shape[-1]
    if sink is not None:
        logits = torch.cat([logits, sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    alone = (logits == -torch.inf).all(-1, keepdim=True)  # rows without any key: no weights
    weights = torch.softmax(logits.masked_fill(alone, 0.0), -1).masked_fill(alone, 0.0)[..., :S]
    lse = torch.logsumexp(logits.masked_fill(alone, 0.0), -1).masked_fill(alone[..., 0], -torch.inf)
    return rearrange(weights.to(values.dtype) @ values, "b h t v -> b t h v"), rearrange(lse, "b h t -> b t h")


def starts_by_scores(
    products: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, c: Tensor, first: Tensor,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """First key of each unit of ROW_UNIT rows, [B, H, ceil(T / ROW_UNIT)], in float64.

    The bounds of FoX's pruning: every transition has norm at most 1, so |q_i| |k_j| still bounds each score. The
    tail bound takes a row's log-sum-exp over its own block of KEY_UNIT keys and the one before it.

    Args:
        products: scores of float64 q and k, unscaled, [B, H, T, T].
        q: [B, T, H, K]; k: [B, T, G, K]; c, first: [B, H, T] running gate sums, first visible keys.
    """
    (_, T, H, K), prune = q.shape, options.prune
    assert prune is not None
    q64, k64, c, lower = q.detach().double(), k.detach().double(), c.detach(), None
    if prune.bound == "tail":
        pos = torch.arange(T, device=q.device)
        near = (pos // KEY_UNIT - 1) * KEY_UNIT
        seen = (pos <= pos[:, None]) & (pos >= near[:, None]) & (pos >= first[..., None])
        logits = options.scores(products(q64, k64), K) + c[..., :, None] - c[..., None, :]
        lower = torch.logsumexp(logits.masked_fill(~seen, -math.inf), -1)
    longest = repeat(k64.norm(dim=-1).amax(1), "b g -> b (g r) 1", r=H // k.shape[2])
    upper = options.scores(rearrange(q64.norm(dim=-1), "b t h -> b h t") * longest, K)
    return certified_starts(upper, c, prune, options.logit_bound, lower, rows=ROW_UNIT, cols=KEY_UNIT)


def attention_by_scores(
    products: Callable[..., Tensor], gates: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, *,
    log_decay: Tensor | None = None, compute_dtype: torch.dtype | None = None, **named: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense attention on whole sequences whose transitions act inside the scores. Memory O(T^2).

    Args:
        products: scores of q, k, the gates and the dtype of the operands of matrix products, [B, H, T, T], unscaled.
        gates: what these need besides q and k.
        compute_dtype: dtype of the operands of the matrix products (the softmax is float32 or better). Default: float64
            for float64 inputs, else float32.
        named: options as ``AttentionOptions``.

    Returns:
        [B, T, H, V] in q's dtype, and the log-sum-exp of each row [B, T, H], float32 or better.
    """
    (_, T, H, K), options = q.shape, AttentionOptions(**named)
    wide = wide_dtype(q.dtype)
    cd = wide if compute_dtype is None else compute_dtype
    c, first = summed_gates(log_decay, q, T, options.window, options.cu_seqlens)
    pos = torch.arange(T, device=q.device)
    visible = (pos <= pos[:, None]) & (pos >= first[..., None])  # [B, H, T, T]
    if options.prune is not None:
        exact = [x.detach().double() for x in gates]
        start = starts_by_scores(lambda q, k: products(q, k, *exact), q, k, c, first, options)
        visible = visible & (pos >= start.repeat_interleave(ROW_UNIT, -1)[..., :T, None])
    decay = (c[..., :, None] - c[..., None, :]).masked_fill(~visible, 0.0).to(wide)
    logits = (options.scores(products(q, k, *gates, compute_dtype), K) + decay).masked_fill(~visible, -math.inf)
    o, lse = dense_readout(logits, repeat(v.to(cd), "b t g v -> b (g r) t v", r=H // v.shape[2]), options.sink)
    return o.to(q.dtype), lse


def decayed_scores(q: Tensor, k: Tensor, log_diag: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
    """``sum_c q_ic k_jc exp(a_{j+1,c} + ... + a_ic)`` for j <= i, 0 above: [B, H, T, T], unscaled, float32 or better.

    Rows and keys meet in groups of 1, 2, 4, ... tokens, as factors that are decayed to the border between two groups.

    Args:
        compute_dtype: dtype of the operands of matrix products.
    """
    (_, T, H, _), G = q.shape, k.shape[2]
    wide = wide_dtype(q.dtype)
    cd, size = wide if compute_dtype is None else compute_dtype, 1 << max(1, (T - 1).bit_length())
    k = repeat(k, "b t g k -> b t (g r) k", r=H // G)
    qh, kh, a = (F.pad(rearrange(x.to(wide), "b t h k -> b h t k"), (0, 0, 0, size - T)) for x in (q, k, log_diag))
    out, m = (qh * kh).sum(-1)[..., None, None], 1  # [B, H, groups, m, m]
    while m < size:
        (_, late_q), (early_k, _) = halves(qh, m), halves(kh, m)
        before, after = halves(a, m)
        to_border = sum_to_the_end(F.pad(before[..., 1:, :], (0, 0, 0, 1)), -2)
        cross = (late_q * running_sum(after, -2).exp()).to(cd) @ (early_k * to_border.exp()).to(cd).mT
        first, second = out.unflatten(-3, (-1, 2)).unbind(-3)
        rows = torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross.to(wide), second], -1)
        out, m = torch.cat(rows, -2), 2 * m
    return out[..., 0, :T, :T]
