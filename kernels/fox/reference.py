"""Forgetting attention written out densely: the definition the kernels are held to. No Triton here.

    o_i = sum_j softmax_j(scale q_i . k_j + c_i - c_j) v_j,     c = running sum of log_decay,     j <= i

Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.algebra.pruning import certified_starts
from attnzoo.kernels.common.calls import with_lse
from attnzoo.kernels.common.constants import KEY_UNIT, NEAR_UNITS, ROW_UNIT
from attnzoo.kernels.common.dense_reference import dense_readout, summed_gates
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.retention import Retention
from attnzoo.kernels.common.running_gates import GateSums
from attnzoo.precision import wide_dtype

ROWS = 8 * ROW_UNIT  # whose near keys are scored at once


def prune_starts_reference(
    q: Tensor, k: Tensor, c: Tensor, since: Tensor, options: AttentionOptions,
    valid: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """First key of each unit of ROW_UNIT rows, [B, H, ceil(T / ROW_UNIT)]: the kernels' certificate, in float64.

    The tail bound takes a row's log-sum-exp over the keys of its own row unit and of NEAR_UNITS key units before it.

    Args:
        q, k: [B, T, H, K] and [B, S, G, K]; c: [B, H, S] running gate sums; since: [B, H, S] first visible keys.
    """
    (_, T, H, K), prune, lower = q.shape, options.prune, None
    assert prune is not None
    q64 = rearrange(q.detach().double(), "b t h k -> b h t k")
    k64, c = repeat(k.detach().double(), "b s g k -> b (g r) s k", r=H // k.shape[2]), c.detach()
    if prune.bound == "tail":
        starts = range(0, max(T, 1), ROWS)
        rows = ((t, min(t + ROWS, T)) for t in starts)
        lower = torch.cat([_near_mass(q64, k64, c, since, valid, options, *span) for span in rows], -1)
    upper = options.scores(q64.norm(dim=-1) * k64.norm(dim=-1).amax(-1)[..., None], K)
    return certified_starts(upper, c, prune, options.logit_bound, lower, rows=ROW_UNIT, cols=KEY_UNIT)


def _near_mass(
    q: Tensor, k: Tensor, c: Tensor, since: Tensor, valid: Tensor | None, options: AttentionOptions, first: int,
    stop: int,
) -> Tensor:  # fmt: skip
    """Log-sum-exp of the rows from ``first``, which begins a row unit, to ``stop`` over the keys near them.

    q, k: [B, H, T, K] and [B, H, S, K], of which the result is [B, H, stop - first].
    """
    off = k.shape[2] - q.shape[2]
    rows = torch.arange(first, stop, device=q.device)
    pos = rows + off
    near = (rows // ROW_UNIT * ROW_UNIT + off) // KEY_UNIT * KEY_UNIT - NEAR_UNITS * KEY_UNIT
    here = slice(max(0, (first + off) // KEY_UNIT * KEY_UNIT - NEAR_UNITS * KEY_UNIT), stop + off)
    j = torch.arange(here.start, here.stop, device=q.device)
    seen = (j <= pos[:, None]) & (j >= near[:, None]) & (j >= since[..., first + off : stop + off, None])
    if valid is not None:
        seen = seen & valid[:, None, None, here]
    scores = options.scores(q[:, :, first:stop] @ k[:, :, here].mT, q.shape[3])
    logits = scores + c[..., first + off : stop + off, None] - c[..., None, here]
    return torch.logsumexp(logits.masked_fill(~seen, -math.inf), -1)


def fox_reference_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    valid: Tensor | None = None,
    gate_sums: GateSums | None = None,
    retention: Retention | None = None,
    compute_dtype: torch.dtype | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Dense forgetting attention and the rows' log-sum-exp; arguments as ``fox_attention``. Memory O(T S).

    Args:
        compute_dtype: of the operands of both matrix products (the softmax is float32 or better). Default: float64 for
            float64 inputs, else float32.
        named: options as ``AttentionOptions``.
    """
    (_, T, H, K), (S, G), options = q.shape, k.shape[1:3], AttentionOptions(**named)
    wide = wide_dtype(q.dtype)
    cd = wide if compute_dtype is None else compute_dtype
    c, since = summed_gates(log_decay, q, S, options.window, options.cu_seqlens, valid)
    if gate_sums is not None:
        c, seen = gate_sums.log_decay_sums()
        since = torch.maximum(since, seen)
    off = S - T
    pos = torch.arange(off, S, device=q.device)
    j = torch.arange(S, device=q.device)
    visible = (j <= pos[:, None]) & (j >= since[..., off:, None])  # [B, H, T, S]
    if valid is not None:
        visible = visible & valid[:, None, None, :]
        k, v = (x.masked_fill(~valid[..., None, None], 0.0) for x in (k, v))  # they may hold anything
    if options.prune is not None:
        near = since if retention is None else torch.maximum(since, j - (retention.rule.remembers - 1))
        start = prune_starts_reference(q, k, c, near, options, valid)
        visible = visible & (j >= start.repeat_interleave(ROW_UNIT, -1)[..., :T, None])
    qh = rearrange(q.to(cd), "b t h k -> b h t k")
    kh, vh = (repeat(x.to(cd), "b s g d -> b (g r) s d", r=H // G) for x in (k, v))
    decay = (c[..., off:, None] - c[..., None, :]).masked_fill(~visible, 0.0).to(wide)
    logits = options.scores((qh @ kh.mT).to(wide), K) + decay
    if retention is not None:
        logits = logits + retention.bias(pos[:, None] - j).repeat_interleave(H // G, 1)
    logits = logits.masked_fill(~visible, -math.inf)
    o, lse = dense_readout(logits, vh, options.sink)
    return o.to(q.dtype), lse


fox_reference = with_lse(fox_reference_with_lse)
