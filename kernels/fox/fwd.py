"""Forward kernel: online softmax over keys, in base 2, with the gate as a per-key bias.

Softmax ignores a constant per row, so row block I uses bias_j = c_ref - c_j, where c_ref is the running gate
sum at the first row of its 128-row unit: one value per key, none per row. The log-sum-exp is
kept in that frame ("of its row unit") and the backward kernels use it as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tuning import KEY_UNIT, ROW_UNIT, dot_precision, tiles

LOG2E = 1.4426950408889634
GATE_NONE, GATE_CONST, GATE_FULL = 0, 1, 2


@triton.jit
def _load_tile(p, o_r, o_d, stride_r, R, D: tl.constexpr, BD: tl.constexpr, MASK_R: tl.constexpr):
    """Rows o_r (local to p) of a [., D] matrix; columns and, if MASK_R, rows past R read as 0. # [BR, BD]"""
    p_t = p + o_r[:, None] * stride_r + o_d[None, :]
    if MASK_R and D < BD:
        b = tl.load(p_t, mask=(o_r[:, None] < R) & (o_d[None, :] < D), other=0.0)
    elif MASK_R:
        b = tl.load(p_t, mask=o_r[:, None] < R, other=0.0)
    elif D < BD:
        b = tl.load(p_t, mask=o_d[None, :] < D, other=0.0)
    else:
        b = tl.load(p_t)
    return b


@triton.jit
def _const_gate(p_g, i_h):
    """Log2 of a per-head constant gate; a closed one (-inf) becomes a finite number whose 2^g is 0."""
    return tl.maximum(tl.load(p_g + i_h).to(tl.float32), -1.0e4) * 1.4426950408889634


@triton.jit
def _gate_at(p_c, b_slope, pos, S, GATE: tl.constexpr):
    """The running gate sum at a position (scalar or block), as a (high, low) pair."""
    if GATE == 2:
        hi, lo = tl.load(p_c + pos), tl.load(p_c + S + pos)
    elif GATE == 1:
        hi, lo = pos.to(tl.float32), 0.0 * pos
    else:
        hi, lo = 0.0, 0.0
    return hi, lo


@triton.jit
def _key_bias(p_c, b_slope, s, o_s, ref_hi, ref_lo, S, GATE: tl.constexpr, MASK: tl.constexpr):
    """bias_j = c_ref - c_j of keys s + o_s, in log2. # [BS]"""
    if GATE == 2:
        if MASK:
            hi = tl.load(p_c + s + o_s, mask=s + o_s < S, other=0.0)
            lo = tl.load(p_c + S + s + o_s, mask=s + o_s < S, other=0.0)
        else:
            hi, lo = tl.load(p_c + s + o_s), tl.load(p_c + S + s + o_s)
        b = (ref_hi - hi) + (ref_lo - lo)
    elif GATE == 1:
        b = (ref_hi - (s + o_s).to(tl.float32)) * b_slope
    else:
        b = tl.zeros(o_s.shape, tl.float32)
    return b


@triton.jit
def _row_bounds(p_left, p_start, i_t, p_first, p_last, BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr,
                KU: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_START: tl.constexpr):  # fmt: skip
    """Key ranges of a row block: [lo, full) needs the left mask, [full, mid) no mask, [mid, ..) the causal one.

    Returns lo, full, mid and the number of tiles in the first and last ranges.
    """
    lo = 0
    left = 0
    if HAS_LEFT:
        lo = tl.load(p_left + p_first) // KU * KU
        left = tl.load(p_left + p_last)
    if HAS_START:
        lo = tl.maximum(lo, tl.load(p_start + i_t * BT // RU))
    n_left = tl.cdiv(tl.maximum(left - lo, 0), BS)
    full = lo + n_left * BS
    mid = full + tl.maximum(p_first + 1 - full, 0) // BS * BS
    n_diag = tl.cdiv(tl.maximum(p_last + 1 - mid, 0), BS)
    return lo, full, mid, n_left, n_diag


@triton.jit
def _fwd_tile(b_o, b_m, b_l, b_q, p_k, p_v, p_c, b_slope, s, o_s, o_k, o_v, b_pos, b_left, ref_hi, ref_lo, S,
              stride_ks, stride_vs, scale2, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
              GATE: tl.constexpr, HAS_LEFT: tl.constexpr, PREC: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One key tile of the online softmax."""
    b_k = _load_tile(p_k + s * stride_ks.to(tl.int64), o_s, o_k, stride_ks, S - s, K, BK, MASK)  # [BS, BK]
    b_y = tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * scale2  # [BT, BS]
    if GATE != 0:
        b_y += _key_bias(p_c, b_slope, s, o_s, ref_hi, ref_lo, S, GATE, MASK)[None, :]
    if MASK:
        m_y = (s + o_s)[None, :] <= b_pos[:, None]
        if HAS_LEFT:
            m_y = m_y & ((s + o_s)[None, :] >= b_left[:, None])
        b_y = tl.where(m_y, b_y, float("-inf"))
    b_mn = tl.maximum(b_m, tl.max(b_y, 1))  # [BT]
    if MASK:
        b_ms = tl.where(b_mn == float("-inf"), 0.0, b_mn)  # a row that has seen no key yet
    else:
        b_ms = b_mn
    b_p = tl.exp2(b_y - b_ms[:, None])  # [BT, BS]
    b_a = tl.exp2(b_m - b_ms)
    b_l = b_l * b_a + tl.sum(b_p, 1)
    b_v = _load_tile(p_v + s * stride_vs.to(tl.int64), o_s, o_v, stride_vs, S - s, V, BV, MASK)  # [BS, BV]
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_a[:, None], input_precision=PREC)  # [BT, BV]
    return b_o, b_mn, b_l


@triton.jit(do_not_specialize=["T", "S", "stride_qb", "stride_kb", "stride_vb", "stride_lb", "stride_lh"])
def fox_fwd_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_c, p_g, p_left, p_start, p_sink, T, S, scale2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_START: tl.constexpr, HAS_SINK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per row block, the longest rows first."""
    n_t = tl.cdiv(T, BT)
    n_bh = tl.num_programs(0) // n_t
    i_t = n_t - 1 - tl.program_id(0) // n_bh
    i_bh = tl.program_id(0) % n_bh
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    off = S - T
    p_first = i_t * BT + off  # position of the first row
    p_last = tl.minimum(i_t * BT + BT, T) - 1 + off

    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_pos = p_first + o_t  # [BT]
    r = (i_t * BT).to(tl.int64)
    p_k += i_b * stride_kb + (i_h // REP) * stride_kh
    p_v += i_b * stride_vb + (i_h // REP) * stride_vh
    b_q = _load_tile(p_q + i_b * stride_qb + i_h * stride_qh + r * stride_qt, o_t, o_k, stride_qt, T - i_t * BT,
                     K, BK, True)  # fmt: skip
    p_c += i_bh.to(tl.int64) * 2 * S
    p_left += i_b * stride_lb + i_h * stride_lh
    b_slope = 0.0
    if GATE == 1:
        b_slope = _const_gate(p_g, i_h)
    p_ref = i_t * BT // RU * RU + off
    ref_hi, ref_lo = _gate_at(p_c, b_slope, p_ref, S, GATE)
    b_left = b_pos
    if HAS_LEFT:
        b_left = tl.load(p_left + b_pos, mask=b_pos < S, other=0)
    n_u = tl.cdiv(T, RU)
    lo, full, mid, n_left, n_diag = _row_bounds(
        p_left, p_start + i_bh.to(tl.int64) * n_u, i_t, p_first, p_last, BT, BS, RU, KU, HAS_LEFT, HAS_START
    )
    b_m = tl.full([BT], float("-inf"), tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    if HAS_SINK:  # one more logit, without a value: moved to the frame of the row unit
        b_sink = tl.load(p_sink + i_h).to(tl.float32) * 1.4426950408889634
        if GATE == 2:
            c_hi = tl.load(p_c + b_pos, mask=b_pos < S, other=0.0)
            c_lo = tl.load(p_c + S + b_pos, mask=b_pos < S, other=0.0)
            b_m = b_sink + ((ref_hi - c_hi) + (ref_lo - c_lo))
        elif GATE == 1:
            b_m = b_sink + (p_ref - b_pos).to(tl.float32) * b_slope
        else:
            b_m = tl.zeros([BT], tl.float32) + b_sink
        b_l = tl.where(b_m == float("-inf"), 0.0, 1.0)
    b_o = tl.zeros([BT, BV], tl.float32)
    for i in range(0, n_left + n_diag):  # the diagonal first: later rows start from a good maximum
        s = tl.where(i < n_diag, mid + i * BS, lo + (i - n_diag) * BS)
        b_o, b_m, b_l = _fwd_tile(b_o, b_m, b_l, b_q, p_k, p_v, p_c, b_slope, s, o_s, o_k, o_v, b_pos, b_left,
                                  ref_hi, ref_lo, S, stride_ks, stride_vs, scale2, K, V, BK, BV, GATE, HAS_LEFT,
                                  PREC, True)  # fmt: skip
    for s in range(full, mid, BS):
        b_o, b_m, b_l = _fwd_tile(b_o, b_m, b_l, b_q, p_k, p_v, p_c, b_slope, s, o_s, o_k, o_v, b_pos, b_left,
                                  ref_hi, ref_lo, S, stride_ks, stride_vs, scale2, K, V, BK, BV, GATE, HAS_LEFT,
                                  PREC, False)  # fmt: skip
    m_t = i_t * BT + o_t < T
    b_o = b_o / b_l[:, None]
    p_ot = p_o + ((i_b * T + i_t * BT) * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
    tl.store(p_ot, b_o.to(p_o.dtype.element_ty), mask=m_t[:, None] & (o_v[None, :] < V))
    tl.store(p_lse + i_bh.to(tl.int64) * T + i_t * BT + o_t, b_m + tl.log2(b_l), mask=m_t)


def gate_kind(log_gate: Tensor | None) -> int:
    return GATE_NONE if log_gate is None else GATE_CONST if log_gate.ndim == 1 else GATE_FULL


def head_block(dim: int) -> int:
    """Smallest tile width that holds a head dim (tensor cores need 16)."""
    return max(16, triton.next_power_of_2(dim))


def left_strides(left: Tensor | None) -> tuple[int, int]:
    """Batch and head strides of left [B or 1, H or 1, S]; broadcast dims have stride 0."""
    if left is None:
        return 0, 0
    return left.stride(0) * (left.shape[0] > 1), left.stride(1) * (left.shape[1] > 1)


def fox_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, sink: Tensor | None, c: Tensor | None,
    left: Tensor | None, start: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel. Shapes as in ``fox_attention``; last dims contiguous.

    Returns:
        o [B, T, H, V] in q's dtype; lse [B, H, T] float32, log2-sum-exp in the frame of the row unit.
    """
    B, T, H, K = q.shape
    S, G, V = k.shape[1], k.shape[2], v.shape[3]
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    t = tiles("fwd", max(K, V), q.dtype, q.device)
    fox_fwd_kernel[(triton.cdiv(T, t.BT) * B * H,)](
        q, k, v, o, lse, lse if c is None else c, lse if log_gate is None else log_gate,
        lse if left is None else left, lse if start is None else start, lse if sink is None else sink,
        T, S, scale * LOG2E, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *left_strides(left),
        H=H, REP=H // G, K=K, V=V, BK=head_block(K), BV=head_block(V), BT=t.BT, BS=t.BS, RU=ROW_UNIT, KU=KEY_UNIT,
        GATE=gate_kind(log_gate), HAS_LEFT=left is not None, HAS_START=start is not None,
        HAS_SINK=sink is not None, PREC=dot_precision(q.dtype), num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return o, lse
