"""Adaptive Computation Pruning: where each row unit starts, found on the device.

Keys 0..b may be dropped for row i when (Lin et al., "Adaptive Computation Pruning for the Forgetting
Transformer", 2025, with the threshold of its section 3 for ``"paper"``)

    paper:  (c_i - c_b) + 2 U + log N <= log eps                          U >= every |logit|
    tail:   (c_i - c_b) + U_i - l_i + log n_b <= log eps                  U_i = scale |q_i| max_j |k_j|

with log n_b = log sum_{l <= b} exp(c_b - c_l) <= log N (the normaliser of gated linear attention) and l_i the
log-sum-exp of row i over the keys of its own row unit and NEAR key units before it, a lower bound of the whole row's
(within 4% of the blocks that the whole one would keep; s_ii alone keeps up to 25% more on local heads). Both drop at
most a mass eps of each row. A row unit takes its worst row, and the boundaries are made monotone by a suffix minimum
(which only prunes less). In log2 throughout.

A known bound of the logits takes the place of U and U_i where it is the smaller of the two. The longest key is
measured, which reads every key, or comes from a cache that keeps it (``running_gates.GateSums``).
``attnzoo.algebra.pruning.certified_starts`` is the same certificate in PyTorch, for the references and the forms.

As l_i <= U_i + log n over n keys, the tail bound drops nothing from rows with (c_i - c_0) - log n > log eps: l_i is not
computed for them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import LOG2E
from attnzoo.kernels.common.gate_bias import const_gate
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, head_block
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile

ROUNDING = 0.01  # of a sum of gates near ``none_above``, in log2 and far above what float32 loses there


@launched
@triton.jit(do_not_specialize=["R", "NS"])
def norm_max_kernel(p_x, p_max, p_base, R, NS, b_none, stride_b, stride_r, stride_h, H: tl.constexpr, D: tl.constexpr,
                    BD: tl.constexpr, BR: tl.constexpr, REP: tl.constexpr):  # fmt: skip
    """Largest |x|^2 per head of [B, R, H, D]; p_max [B, H] starts at 0.

    With REP query heads per head: not of heads whose query heads' sums of gates, p_base [B, H REP, NS + 1], all end
    above b_none.
    """
    i_bh, i_r = head_and_tile(tl.cdiv(R, BR))
    if REP != 0:
        b_least = tl.full([], float("inf"), tl.float64)
        for i in range(REP):
            b_least = tl.minimum(b_least, tl.load(p_base + (i_bh * REP + i).to(tl.int64) * (NS + 1) + NS))
        if b_least > b_none:
            return
    p_x += (i_bh // H).to(tl.int64) * stride_b + (i_bh % H).to(tl.int64) * stride_h + (i_r * BR).to(tl.int64) * stride_r
    b_x = load_tile(p_x, tl.arange(0, BR), tl.arange(0, BD), stride_r, R - i_r * BR, D, BD, True).to(tl.float32)
    tl.atomic_max(p_max + i_bh, tl.max(tl.sum(b_x * b_x, 1), 0))


@launched
@triton.jit(do_not_specialize=["R"])
def norm_raise_kernel(p_x, p_old, p_new, R, stride_b, stride_r, stride_h, H: tl.constexpr, D: tl.constexpr,
                      BD: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """The larger of p_old and the largest |x|^2 of a head, [B, H]; one program per head, for few rows."""
    i_bh = tl.program_id(0)
    p_x += (i_bh // H).to(tl.int64) * stride_b + (i_bh % H).to(tl.int64) * stride_h
    b_max = tl.load(p_old + i_bh)
    for r in range(0, R, BR):
        p_r = p_x + r * stride_r.to(tl.int64)
        b_x = load_tile(p_r, tl.arange(0, BR), tl.arange(0, BD), stride_r, R - r, D, BD, True).to(tl.float32)
        b_max = tl.maximum(b_max, tl.max(tl.sum(b_x * b_x, 1), 0))
    tl.store(p_new + i_bh, b_max)


def norm_max(x: Tensor, before: Tensor | None = None, *, base: Tensor | None = None, none: float = 0.0) -> Tensor:
    """Largest |x|^2 of each head of x [B, R, G, D], last dim contiguous, and of those ``before``. # [B, G] float32

    Args:
        base: [B, H, units + 1], sums of gates of ``gate_sums``: a head whose query heads' sums all end above ``none``
            (``none_above``) stays 0.
    """
    (B, R, G, D), strides = x.shape, x.stride()[:3]
    if before is None:
        longest = torch.zeros((B, G), dtype=torch.float32, device=x.device)
        rep, units = (0, 0) if base is None else (base.shape[1] // G, base.shape[2] - 1)
        norm_max_kernel[(B * G * cdiv(R, 128),)](
            x, longest, longest if base is None else base, R, units, none + ROUNDING, *strides, H=G, D=D,
            BD=head_block(D), BR=128, REP=rep,
        )  # fmt: skip
        return longest
    longest = torch.empty_like(before)
    norm_raise_kernel[(B * G,)](x, before, longest, R, *strides, H=G, D=D, BD=head_block(D), BR=16)
    return longest


@triton.jit
def tail_at(p_tails, p_base, b_slope, i_u, m, GATE: tl.constexpr, TAIL: tl.constexpr, KU: tl.constexpr):
    """log2 n_b - c_b (tail) or -c_b (paper) at the last key b of a block of units. # float64"""
    b = i_u * KU + KU - 1
    if GATE == 1:  # n_b = sum of 2^(g l) for l = 0..b: bounded by both closed forms
        x = -b * b_slope.to(tl.float64)
        if TAIL:
            log_n = tl.log2(b.to(tl.float32) + 1.0)
            log_n = tl.minimum(log_n, -tl.log2(tl.maximum(1.0 - tl.exp2(b_slope), 1.0e-30)))
            x += log_n.to(tl.float64)
    elif TAIL:
        x = tl.load(p_tails + i_u, mask=m, other=0.0)
    else:
        x = -tl.load(p_base + i_u + 1, mask=m, other=0.0)
    return x


@triton.jit
def need_rows(b_q, b_kmax, p_bound, i_h, b_lse, m_t, scale2, HAS_BOUND: tl.constexpr):
    """The bound U_i of a row's logits minus its log-sum-exp l_i (b_lse), for some rows. # [rows]"""
    b_q = b_q.to(tl.float32)
    b_u = scores(tl.sqrt(tl.sum(b_q * b_q, 1) * b_kmax) * 1.0001, scale2)
    if HAS_BOUND:
        b_u = tl.minimum(b_u, tl.load(p_bound + i_h).to(tl.float32) * TL_LOG2E)
    return tl.where(m_t, b_u - b_lse, float("-inf"))


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b)


@launched
@triton.jit(do_not_specialize=["T", "S", "NS", "n_steps"])
def prune_scan_kernel(p_need, p_base, p_g, p_tails, p_start, T, S, NS, log2_eps, n_steps, H: tl.constexpr,
                      RU: tl.constexpr, KU: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr,
                      TAIL: tl.constexpr):  # fmt: skip
    """First key [B, H, T / RU] of each row unit: a binary search per unit (the bound is monotone), suffix minimum.

    One program per head, BN units (BN * RU rows) at a time. NS: units that base and tails have room for.
    """
    i_bh = tl.program_id(0)
    n_t = tl.cdiv(T, RU)
    b_slope = tl.zeros([], tl.float32)
    if GATE == 1:
        b_slope = const_gate(p_g, i_bh % H)
    p_need += i_bh.to(tl.int64) * n_t
    p_start += i_bh.to(tl.int64) * n_t
    p_base += i_bh.to(tl.int64) * (NS + 1)
    p_tails += i_bh.to(tl.int64) * NS
    c_min = tl.full([], 2147483647, tl.int32)
    for i in range(tl.cdiv(n_t, BN)):
        o_t = n_t - (i + 1) * BN + tl.arange(0, BN)
        m_t = o_t >= 0
        b_need = tl.load(p_need + o_t, mask=m_t, other=float("inf"))
        lo, hi = o_t * 0, tl.where(m_t, (o_t * RU + S - T) // KU, 0)  # units before lo are dropped
        for _ in range(n_steps):
            mid = (lo + hi) // 2
            m = mid < hi
            m_drop = m & (b_need + tail_at(p_tails, p_base, b_slope, mid, m, GATE, TAIL, KU) <= log2_eps)
            lo, hi = tl.where(m_drop, mid + 1, lo), tl.where(m_drop | (mid >= hi), hi, mid)
        b_start = tl.where(m_t, lo * KU, 2147483647)
        b_start = tl.minimum(tl.associative_scan(b_start, 0, _minimum, reverse=True), c_min)
        tl.store(p_start + o_t, b_start, mask=m_t)
        c_min = tl.min(b_start, 0)


def none_above(log_eps: float, n: int) -> float:
    """The gate sum c_i - c_0 (log2) above which the tail bound drops nothing, where l_i is over n keys."""
    return log_eps * LOG2E + math.log2(n)
