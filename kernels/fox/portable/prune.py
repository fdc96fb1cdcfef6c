"""Adaptive Computation Pruning: where each row unit starts, found on the device.

Keys 0..b may be dropped for row i when (Lin et al., "Adaptive Computation Pruning for the Forgetting
Transformer", 2025, with the threshold of its section 3 for ``"paper"``)

    paper:  (c_i - c_b) + 2 U + log N <= log eps                          U >= every |logit|
    tail:   (c_i - c_b) + U_i - l_i + log n_b <= log eps                  U_i = scale |q_i| max_j |k_j|

with log n_b = log sum_{l <= b} exp(c_b - c_l) <= log N (the normaliser of gated linear attention) and l_i the
log-sum-exp of row i over the keys of its own row unit and NEAR key units before it, a lower bound of the whole row's
(within 1% of the blocks that the whole one would keep; s_ii alone keeps 10 to 20% more on local heads). Both drop at
most a mass eps of each row. A row unit takes its worst row, and the boundaries are made monotone by a suffix minimum
(which only prunes less). In log2 throughout.

As l_i <= U_i + log n over n keys, the tail bound drops nothing from rows with (c_i - c_0) - log n > log eps: l_i is not
computed for them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.fox.plan import KEY_UNIT, NEAR_UNITS, ROW_UNIT, dot_precision

from .forward import (
    LOG2E,
    _base_shift,
    _const_gate,
    _gate_at,
    _key_bias,
    _load_tile,
    gate_kind,
    head_block,
    left_strides,
)

SLACK = 1.0e-3  # log2 units added to the bound: covers the float32 rounding of norms and sums


@triton.jit(do_not_specialize=["R"])
def norm_max_kernel(p_x, p_max, R, stride_b, stride_r, stride_h, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
                    BR: tl.constexpr):  # fmt: skip
    """Largest |x|^2 per head of [B, R, H, D]; p_max [B, H] starts at 0."""
    i_bh, i_r = tl.program_id(0), tl.program_id(1)
    p_x += (i_bh // H).to(tl.int64) * stride_b + (i_bh % H) * stride_h + (i_r * BR).to(tl.int64) * stride_r
    b_x = _load_tile(p_x, tl.arange(0, BR), tl.arange(0, BD), stride_r, R - i_r * BR, D, BD, True).to(tl.float32)
    tl.atomic_max(p_max + i_bh, tl.max(tl.sum(b_x * b_x, 1), 0))


@triton.jit
def _tail_at(p_x, p_base, b_slope, i_u, m, GATE: tl.constexpr, TAIL: tl.constexpr, KU: tl.constexpr):
    """log2 n_b - c_b (tail) or -c_b (paper) at the last key b of a block of units. # float64"""
    b = i_u * KU + KU - 1
    if GATE == 1:  # n_b = sum of 2^(g l) for l = 0..b: bounded by both closed forms
        x = -b * b_slope.to(tl.float64)
        if TAIL:
            log_n = tl.log2(b.to(tl.float32) + 1.0)
            log_n = tl.minimum(log_n, -tl.log2(tl.maximum(1.0 - tl.exp2(b_slope), 1.0e-30)))
            x += log_n.to(tl.float64)
    elif TAIL:
        x = tl.load(p_x + i_u, mask=m, other=0.0)
    else:
        x = -tl.load(p_base + i_u + 1, mask=m, other=0.0)
    return x


@triton.jit
def _need_rows(b_q, b_kmax, p_bound, i_h, b_lse, m_t, scale2, HAS_BOUND: tl.constexpr):
    """U_i - l_i of some rows, l_i = b_lse. # [rows]"""
    b_q = b_q.to(tl.float32)
    b_u = tl.sqrt(tl.sum(b_q * b_q, 1) * b_kmax) * (scale2 * 1.0001)
    if HAS_BOUND:
        b_u = tl.minimum(b_u, tl.load(p_bound + i_h).to(tl.float32) * 1.4426950408889634)
    return tl.where(m_t, b_u - b_lse, float("-inf"))


@triton.jit(do_not_specialize=["T", "S", "stride_lb", "stride_lh"])
def prune_rows_kernel(
    p_q, p_k, p_qmax, p_kmax, p_bound, p_c, p_base, p_g, p_left, p_need, T, S, scale2, log2_s, b_none,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr,
    BR: tl.constexpr, GATE: tl.constexpr, TAIL: tl.constexpr, NEAR: tl.constexpr, HAS_BOUND: tl.constexpr,
    HAS_LEFT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Worst row of each row unit, [B, H, T / RU] float64: c_i + U_i - l_i (tail) or c_i + 2 U + log N (paper).

    b_none: the tail bound drops nothing from rows with c_i - c_0 above it.
    """
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    i_bg = i_b * (H // REP) + i_h // REP
    off = S - T
    p_first = i_t * RU + off
    o_t, o_s, o_k = tl.arange(0, BR), tl.arange(0, KU), tl.arange(0, BK)
    b_slope = tl.zeros([], tl.float32)
    if GATE == 1:
        b_slope = _const_gate(p_g, i_h)
    n_s = tl.cdiv(S, KU)
    p_c += i_bh.to(tl.int64) * (n_s * KU)
    p_base += i_bh.to(tl.int64) * (n_s + 1)
    b_c = _gate_at(p_c, p_base, b_slope, p_first, GATE, KU)
    if TAIL:  # worst row of U_i - l_i, with l_i in the frame of this unit
        b_worst = tl.full([], float("inf"), tl.float32)
        b_end = _gate_at(p_c, p_base, b_slope, tl.minimum(p_first + RU, S) - 1, GATE, KU)
        if b_end - _gate_at(p_c, p_base, b_slope, 0, GATE, KU) <= b_none:
            p_q += i_b * stride_qb + i_h * stride_qh
            p_k += i_b * stride_kb + (i_h // REP) * stride_kh
            p_left += i_b * stride_lb + i_h * stride_lh
            b_kmax = tl.load(p_kmax + i_bg)
            b_worst = tl.full([], float("-inf"), tl.float32)
            for i_r in range(RU // BR):
                r = i_t * RU + i_r * BR
                b_q = _load_tile(p_q + r * stride_qt.to(tl.int64), o_t, o_k, stride_qt, T - r, K, BK, True)
                b_pos, m_t = r + off + o_t, r + o_t < T
                b_left = b_pos * 0
                if HAS_LEFT:
                    b_left = tl.load(p_left + b_pos, mask=m_t, other=0)
                b_m = tl.full([BR], float("-inf"), tl.float32)
                b_l = tl.zeros([BR], tl.float32)
                for i_s in range(tl.maximum(p_first // KU - NEAR, 0), tl.cdiv(tl.minimum(r + off + BR, S), KU)):
                    s = i_s * KU
                    b_k = _load_tile(p_k + s * stride_ks.to(tl.int64), o_s, o_k, stride_ks, S - s, K, BK, True)
                    b_shift = _base_shift(p_base, b_slope, b_c, s, GATE, KU)
                    b_y = tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * scale2  # [BR, KU]
                    b_y += _key_bias(p_c, b_slope, b_shift, s, o_s, GATE)[None, :]
                    m_y = ((s + o_s)[None, :] <= b_pos[:, None]) & ((s + o_s)[None, :] >= b_left[:, None])
                    b_y = tl.where(m_y, b_y, float("-inf"))
                    b_mn = tl.maximum(b_m, tl.max(b_y, 1))
                    b_ms = tl.where(b_mn == float("-inf"), 0.0, b_mn)
                    b_l = b_l * tl.exp2(b_m - b_ms) + tl.sum(tl.exp2(b_y - b_ms[:, None]), 1)
                    b_m = b_mn
                b_row = _need_rows(b_q, b_kmax, p_bound, i_h, b_m + tl.log2(b_l), m_t, scale2, HAS_BOUND)
                b_worst = tl.maximum(b_worst, tl.max(b_row, 0))
    else:
        if HAS_BOUND:
            b_u = tl.load(p_bound + i_h).to(tl.float32) * 1.4426950408889634
        else:
            b_u = tl.sqrt(tl.load(p_qmax + i_bh) * tl.load(p_kmax + i_bg)) * (scale2 * 1.0001)
        b_worst = 2.0 * b_u + log2_s
    tl.store(p_need + i_bh.to(tl.int64) * tl.cdiv(T, RU) + i_t, b_c + b_worst.to(tl.float64))


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["T", "S", "n_steps"])
def prune_scan_kernel(p_need, p_base, p_g, p_x, p_start, T, S, log2_eps, n_steps, H: tl.constexpr, RU: tl.constexpr,
                      KU: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """First key [B, H, T / RU] of each row unit: a binary search per unit (the bound is monotone), suffix minimum.

    One program per head, BN units (BN * RU rows) at a time.
    """
    i_bh = tl.program_id(0)
    n_t, n_s = tl.cdiv(T, RU), tl.cdiv(S, KU)
    b_slope = tl.zeros([], tl.float32)
    if GATE == 1:
        b_slope = _const_gate(p_g, i_bh % H)
    p_need += i_bh.to(tl.int64) * n_t
    p_start += i_bh.to(tl.int64) * n_t
    p_base += i_bh.to(tl.int64) * (n_s + 1)
    p_x += i_bh.to(tl.int64) * n_s
    c_min = tl.full([], 2147483647, tl.int32)
    for i in range(tl.cdiv(n_t, BN)):
        o_t = n_t - (i + 1) * BN + tl.arange(0, BN)
        m_t = o_t >= 0
        b_need = tl.load(p_need + o_t, mask=m_t, other=float("inf"))
        lo, hi = o_t * 0, tl.where(m_t, (o_t * RU + S - T) // KU, 0)  # units before lo are dropped
        for _ in range(n_steps):
            mid = (lo + hi) // 2
            m = mid < hi
            m_drop = m & (b_need + _tail_at(p_x, p_base, b_slope, mid, m, GATE, TAIL, KU) <= log2_eps)
            lo, hi = tl.where(m_drop, mid + 1, lo), tl.where(m_drop | (mid >= hi), hi, mid)
        b_start = tl.where(m_t, lo * KU, 2147483647)
        b_start = tl.minimum(tl.associative_scan(b_start, 0, _minimum, reverse=True), c_min)
        tl.store(p_start + o_t, b_start, mask=m_t)
        c_min = tl.min(b_start, 0)


@triton.jit
def _first(p, n, bound, n_steps):
    """First index i < n with p[i] > bound (n if none) for a block of bounds; p is monotone."""
    lo, hi = bound * 0, bound * 0 + n
    for _ in range(n_steps):
        mid = (lo + hi) // 2
        m = mid < hi
        up = m & (tl.load(p + mid, mask=m, other=0) <= bound)
        lo, hi = tl.where(up, mid + 1, lo), tl.where(up | (mid >= hi), hi, mid)
    return lo


@triton.jit(do_not_specialize=["T", "S", "n_steps", "stride_lb", "stride_lh"])
def key_bounds_kernel(p_left, p_start, p_end, p_full, T, S, n_steps, stride_lb, stride_lh, H: tl.constexpr,
                      RU: tl.constexpr, KU: tl.constexpr, BU: tl.constexpr, HAS_LEFT: tl.constexpr,
                      HAS_START: tl.constexpr):  # fmt: skip
    """Per key unit [B, H, S / KU]: first row that sees none of it, first row that misses some of it."""
    i_bh, i_c = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    n_u = tl.cdiv(S, KU)
    o_u = i_c * BU + tl.arange(0, BU)
    b_end = o_u * 0 + T
    b_full = o_u * 0 + T
    if HAS_LEFT:
        p_l = p_left + i_b * stride_lb + i_h * stride_lh + (S - T)
        b_end = _first(p_l, T, o_u * KU + KU - 1, n_steps)
        b_full = _first(p_l, T, o_u * KU, n_steps)
    if HAS_START:
        n_t = tl.cdiv(T, RU)
        b_cut = tl.minimum(_first(p_start + i_bh.to(tl.int64) * n_t, n_t, o_u * KU, n_steps) * RU, T)
        b_end, b_full = tl.minimum(b_end, b_cut), tl.minimum(b_full, b_cut)
    p_u = i_bh.to(tl.int64) * n_u + o_u
    tl.store(p_end + p_u, b_end, mask=o_u < n_u)
    tl.store(p_full + p_u, b_full, mask=o_u < n_u)


def none_above(log_eps: float, n: int) -> float:
    """The gate sum c_i - c_0 (log2) above which the tail bound drops nothing, where l_i is over n keys."""
    return log_eps * LOG2E + math.log2(n)


def prune_starts(
    q: Tensor, k: Tensor, log_gate: Tensor, c: Tensor | None, base: Tensor | None, x: Tensor | None,
    left: Tensor | None, scale: float, *,
    bound: str, log_eps: float, logit_bound: Tensor | None,
) -> Tensor:  # fmt: skip
    """First key of each unit of ROW_UNIT query rows, a multiple of KEY_UNIT. No host synchronisation.

    Args:
        q, k: [B, T, H, K] and [B, S, G, K], last dim contiguous.
        log_gate: [B, S, H] with its sums c, base and x from ``gate_sums``, or [H] (None).
        logit_bound: [H], known bound of |logits| (natural units), or None to find it from the norms. The tail bound
            takes the smaller of both, and for fewer than ROW_UNIT rows this one alone.

    Returns:
        [B, H, ceil(T / ROW_UNIT)] int32, non-decreasing along the rows.
    """
    B, T, H, K = q.shape
    S, G = k.shape[1], k.shape[2]
    tail, gate, BK = bound == "tail", gate_kind(log_gate), head_block(K)
    wide = BK * q.element_size() > 256  # keep the tiles of small multiprocessors in their shared memory
    n_t = triton.cdiv(T, ROW_UNIT)
    start = torch.empty((B, H, n_t), dtype=torch.int32, device=q.device)
    need = torch.empty((B, H, n_t), dtype=torch.float64, device=q.device)
    norms = torch.zeros(B * (H + G), dtype=torch.float32, device=q.device)
    qmax, kmax = norms[: B * H], norms[B * H :]
    if tail and logit_bound is not None and T < ROW_UNIT:  # a pass over all keys would cost as much as these few rows
        kmax.fill_(torch.finfo(torch.float32).max)
    elif tail or logit_bound is None:
        norm_max_kernel[(B * G, triton.cdiv(S, 128))](k, kmax, S, *k.stride()[:3], H=G, D=K, BD=BK, BR=128)
    if not tail and logit_bound is None:
        norm_max_kernel[(B * H, triton.cdiv(T, 128))](q, qmax, T, *q.stride()[:3], H=H, D=K, BD=BK, BR=128)
    prune_rows_kernel[(B * H, n_t)](
        q, k, qmax, kmax, norms if logit_bound is None else logit_bound, norms if c is None else c,
        norms if base is None else base, log_gate, start if left is None else left, need, T, S, scale * LOG2E,
        math.log2(S), none_above(log_eps, ROW_UNIT + (NEAR_UNITS + 1) * KEY_UNIT), *q.stride()[:3], *k.stride()[:3],
        *left_strides(left), H=H, REP=H // G, K=K, BK=BK, RU=ROW_UNIT,
        KU=KEY_UNIT, BR=32 if wide else 128, GATE=gate, TAIL=tail, NEAR=NEAR_UNITS, HAS_BOUND=logit_bound is not None,
        HAS_LEFT=left is not None, PREC=dot_precision(q.dtype), num_warps=4, num_stages=1 if wide else 2,
    )  # fmt: skip
    prune_scan_kernel[(B * H,)](
        need, norms if base is None else base, log_gate, norms if x is None else x, start, T, S,
        log_eps * LOG2E - SLACK, triton.cdiv(S, KEY_UNIT).bit_length() + 1, H=H, RU=ROW_UNIT, KU=KEY_UNIT,
        BN=min(1024, max(16, triton.next_power_of_2(n_t))), GATE=gate, TAIL=tail,
    )  # fmt: skip
    return start


def key_bounds(left: Tensor | None, start: Tensor | None, B: int, T: int, H: int, S: int) -> tuple[Tensor, Tensor]:
    """The same boundaries seen from the keys, for the backward pass.

    Returns:
        end, full [B, H, ceil(S / KEY_UNIT)] int32: rows >= end see nothing of the unit, rows < full see all of it.
    """
    some = left if left is not None else start
    assert some is not None
    n_u = triton.cdiv(S, KEY_UNIT)
    end = torch.empty((B, H, n_u), dtype=torch.int32, device=some.device)
    full = torch.empty_like(end)
    key_bounds_kernel[(B * H, triton.cdiv(n_u, 128))](
        some if left is None else left, some if start is None else start, end, full, T, S, T.bit_length() + 1,
        *left_strides(left), H=H, RU=ROW_UNIT, KU=KEY_UNIT, BU=128, HAS_LEFT=left is not None,
        HAS_START=start is not None,
    )  # fmt: skip
    return end, full
