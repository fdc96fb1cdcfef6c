"""Forward kernel: online softmax over keys, in base 2, with the gate as a per-key bias.

Softmax ignores a constant per row, so row block I uses bias_j = c_ref - c_j, where c_ref is the running gate
sum at the first row of its 128-row unit: one value per key, none per row. The log-sum-exp is
kept in that frame ("of its row unit") and the backward kernels use it as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.fox.plan import KEY_UNIT, ROW_UNIT, dot_precision, tiles

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
def _schedule(n_blocks, n_heads):
    """Block and head of this program: groups of n_heads heads (they share the L2 cache), in a group block by block."""
    per = n_blocks * n_heads
    i_g = tl.program_id(0) // per
    n = tl.minimum(n_heads, tl.num_programs(0) // n_blocks - i_g * n_heads)  # the last group may be smaller
    return tl.program_id(0) % per // n, i_g * n_heads + tl.program_id(0) % per % n


@triton.jit
def _const_gate(p_g, i_h):
    """Log2 of a per-head constant gate; a closed one (-inf) becomes a finite number whose 2^g is 0."""
    return tl.maximum(tl.load(p_g + i_h).to(tl.float32), -1.0e4) * 1.4426950408889634


@triton.jit
def _gate_at(p_c, p_base, b_slope, pos, GATE: tl.constexpr, KU: tl.constexpr):
    """The running sum of log2 gates at one position. # float64"""
    if GATE == 2:
        b = tl.load(p_base + pos // KU) + tl.load(p_c + pos).to(tl.float64)
    elif GATE == 1:
        b = pos * b_slope.to(tl.float64)
    else:
        b = tl.zeros([], tl.float64)
    return b


@triton.jit
def _gates_from(p_c, p_base, b_slope, b_pos, b_ref, m, GATE: tl.constexpr, KU: tl.constexpr):
    """c_ref - c at a block of positions. # [len(b_pos)] float32"""
    if GATE == 2:
        b_base = tl.load(p_base + b_pos // KU, mask=m, other=0.0)
        b = (b_ref - b_base).to(tl.float32) - tl.load(p_c + b_pos, mask=m, other=0.0)
    else:
        b = (b_ref - b_pos * b_slope.to(tl.float64)).to(tl.float32)
    return b


@triton.jit
def _base_shift(p_base, b_slope, b_ref, s, GATE: tl.constexpr, KU: tl.constexpr):
    """c_ref minus the running sum before the key tile at s. # float32 scalar"""
    if GATE == 2:
        b = (b_ref - tl.load(p_base + s // KU)).to(tl.float32)
    elif GATE == 1:
        b = (b_ref - s * b_slope.to(tl.float64)).to(tl.float32)
    else:
        b = 0.0
    return b


@triton.jit
def _key_bias(p_c, b_slope, b_shift, s, o_s, GATE: tl.constexpr):
    """bias_j = c_ref - c_j of the keys s + o_s, all in one unit of KU keys. # [BS]"""
    return b_shift - (tl.load(p_c + s + o_s) if GATE == 2 else o_s.to(tl.float32) * b_slope)


@triton.jit
def _row_bounds(p_left, p_start, i_t, p_first, p_last, BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr,
                KU: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_START: tl.constexpr):  # fmt: skip
    """Key tiles of a row block, as tile indices: the left mask from lo, none from full, the causal one from mid.

    Returns lo, full, mid and the number of tiles in the first and last ranges. (An index times BS is a position
    that the compiler knows to be aligned.)
    """
    lo = 0
    left = 0
    if HAS_LEFT:
        lo = tl.load(p_left + p_first) // KU * (KU // BS)
        left = tl.load(p_left + p_last)
    if HAS_START:
        lo = tl.maximum(lo, tl.load(p_start + i_t * BT // RU) // BS)
    n_left = tl.cdiv(tl.maximum(left - lo * BS, 0), BS)
    full = lo + n_left
    mid = tl.maximum(full, (p_first + 1) // BS)
    n_diag = tl.maximum(tl.cdiv(p_last + 1, BS) - mid, 0)
    return lo, full, mid, n_left, n_diag


@triton.jit
def _keys(p_x, i_b, s, i_g, o_s, o_d, stride, S, D: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr,
          MASK: tl.constexpr):  # fmt: skip
    """Rows s + o_s of one head of k or v, by descriptor or by pointer. # [BS, BD]"""
    if TMA:  # reads 0 past S and past D
        b = p_x.load([i_b, s, i_g, 0]).reshape([o_s.shape[0], BD])
    else:
        b = _load_tile(p_x + s * stride.to(tl.int64), o_s, o_d, stride, S - s, D, BD, MASK)
    return b


@triton.jit
def _fwd_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_pos, b_left, scale2, GATE: tl.constexpr,
              HAS_LEFT: tl.constexpr, PREC: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One key tile of the online softmax; b_s = q k^T. # [BT, BS]"""
    b_y = b_s * scale2
    if GATE != 0:
        b_y += _key_bias(p_c, b_slope, b_shift, s, o_s, GATE)[None, :]
    if MASK:
        m_y = (s + o_s)[None, :] <= b_pos[:, None]
        if HAS_LEFT:
            m_y = m_y & ((s + o_s)[None, :] >= b_left[:, None])
        b_y = tl.where(m_y, b_y, float("-inf"))
    b_mn = tl.maximum(b_m, tl.max(b_y, 1))  # [BT]
    b_ms = tl.where(b_mn == float("-inf"), 0.0, b_mn) if MASK else b_mn  # a row that has seen no key yet
    b_p = tl.exp2(b_y - b_ms[:, None])  # [BT, BS]
    b_a = tl.exp2(b_m - b_ms)
    b_l = b_l * b_a + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_a[:, None], input_precision=PREC)  # [BT, BV]
    return b_o, b_mn, b_l


@triton.jit(do_not_specialize=["T", "S", "n_heads", "stride_lb", "stride_lh"])
def fox_fwd_kernel(
    p_q, p_k, p_v, p_o, p_low, p_lse, p_c, p_base, p_g, p_left, p_start, p_sink, T, S, n_heads, scale2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_START: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LOW: tl.constexpr, TMA: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per row block, the longest rows first."""
    i_t, i_bh = _schedule(tl.cdiv(T, BT), n_heads)
    i_t = tl.cdiv(T, BT) - 1 - i_t
    i_b32, i_h = i_bh // H, i_bh % H
    i_b, i_g = i_b32.to(tl.int64), i_h // REP
    off = S - T
    p_first = i_t * BT + off  # position of the first row
    p_last = tl.minimum(i_t * BT + BT, T) - 1 + off

    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_pos = p_first + o_t  # [BT]
    r = (i_t * BT).to(tl.int64)
    if not TMA:
        p_k += i_b * stride_kb + i_g * stride_kh
        p_v += i_b * stride_vb + i_g * stride_vh
    b_q = _load_tile(p_q + i_b * stride_qb + i_h * stride_qh + r * stride_qt, o_t, o_k, stride_qt, T - i_t * BT,
                     K, BK, True)  # fmt: skip
    n_s = tl.cdiv(S, KU)
    p_c += i_bh.to(tl.int64) * (n_s * KU)
    p_base += i_bh.to(tl.int64) * (n_s + 1)
    p_left += i_b * stride_lb + i_h * stride_lh
    b_slope = tl.zeros([], tl.float32)
    if GATE == 1:
        b_slope = _const_gate(p_g, i_h)
    p_ref = i_t * BT // RU * RU + off
    b_ref = _gate_at(p_c, p_base, b_slope, p_ref, GATE, KU)
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
        b_m = tl.zeros([BT], tl.float32) + b_sink
        if GATE != 0:
            b_m += _gates_from(p_c, p_base, b_slope, b_pos, b_ref, b_pos < S, GATE, KU)
        b_l = tl.where(b_m == float("-inf"), 0.0, 1.0)
    b_o = tl.zeros([BT, BV], tl.float32)
    for i in range(n_left + n_diag):  # the diagonal first: later tiles start from a good maximum
        s = tl.where(i < n_diag, mid + i, lo + i - n_diag) * BS
        b_shift = _base_shift(p_base, b_slope, b_ref, s, GATE, KU)
        b_k = _keys(p_k, i_b32, s, i_g, o_s, o_k, stride_ks, S, K, BK, TMA, True)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        b_v = _keys(p_v, i_b32, s, i_g, o_s, o_v, stride_vs, S, V, BV, TMA, True)
        b_o, b_m, b_l = _fwd_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_pos, b_left, scale2, GATE,
                                  HAS_LEFT, PREC, True)  # fmt: skip
    b_shift = _base_shift(p_base, b_slope, b_ref, full * BS, GATE, KU)
    for i_s in range(full, mid):
        s = i_s * BS
        b_next = _base_shift(p_base, b_slope, b_ref, s + BS, GATE, KU)  # one tile ahead: hides the load
        b_k = _keys(p_k, i_b32, s, i_g, o_s, o_k, stride_ks, S, K, BK, TMA, False)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        b_v = _keys(p_v, i_b32, s, i_g, o_s, o_v, stride_vs, S, V, BV, TMA, False)
        b_o, b_m, b_l = _fwd_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_pos, b_left, scale2,
                                  GATE, HAS_LEFT, PREC, False)  # fmt: skip
        b_shift = b_next
    m_t = i_t * BT + o_t < T
    b_o = b_o / b_l[:, None]
    p_ot = ((i_b * T + i_t * BT) * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
    m_o = m_t[:, None] & (o_v[None, :] < V)
    b_oh = b_o.to(p_o.dtype.element_ty)
    tl.store(p_o + p_ot, b_oh, mask=m_o)
    if HAS_LOW:  # what the rounding dropped
        tl.store(p_low + p_ot, (b_o - b_oh.to(tl.float32)).to(p_low.dtype.element_ty), mask=m_o)
    tl.store(p_lse + i_bh.to(tl.int64) * T + i_t * BT + o_t, b_m + tl.log2(b_l), mask=m_t)


def gate_kind(log_gate: Tensor | None) -> int:
    return GATE_NONE if log_gate is None else GATE_CONST if log_gate.ndim == 1 else GATE_FULL


def head_block(dim: int) -> int:
    """Smallest tile width that holds a head dim (tensor cores need 16)."""
    block: int = triton.next_power_of_2(dim)
    return max(16, block)


def left_strides(left: Tensor | None) -> tuple[int, int]:
    """Batch and head strides of left [B or 1, H or 1, S]; broadcast dims have stride 0."""
    if left is None:
        return 0, 0
    return left.stride(0) * (left.shape[0] > 1), left.stride(1) * (left.shape[1] > 1)


def can_describe(*xs: Tensor) -> bool:
    """Whether tensor descriptors can address these [B, R, H, D] tensors: 16-byte strides and base, no broadcast."""
    strides = [n * x.element_size() for x in xs for n in x.stride()[:3]]
    return all(n > 0 and n % 16 == 0 for n in strides) and all(x.data_ptr() % 16 == 0 for x in xs)


def describe(x: Tensor, rows: int) -> Any:
    """Descriptor of x [B, R, H, D] for tiles of ``rows`` tokens of one head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, head_block(x.shape[3])])


def fox_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, sink: Tensor | None, c: Tensor | None,
    base: Tensor | None, left: Tensor | None, start: Tensor | None, scale: float, low: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel. Shapes as in ``fox_attention``; last dims contiguous.

    Args:
        low: [B, T, H, V] in q's dtype, contiguous, filled with what the rounding of o dropped.

    Returns:
        o [B, T, H, V] in q's dtype; lse [B, H, T] float32, log2-sum-exp in the frame of the row unit.
    """
    B, T, H, K = q.shape
    S, G, V = k.shape[1], k.shape[2], v.shape[3]
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    t = tiles("fwd", max(K, V), q.dtype, q.device)
    tma = t.tma and can_describe(k, v)
    p_k, p_v = (describe(k, t.BS), describe(v, t.BS)) if tma else (k, v)
    fox_fwd_kernel[(triton.cdiv(T, t.BT) * B * H,)](
        q, p_k, p_v, o, o if low is None else low, lse, lse if c is None else c, lse if base is None else base,
        lse if log_gate is None else log_gate, lse if left is None else left, lse if start is None else start,
        lse if sink is None else sink, T, S, min(t.heads, B * H), scale * LOG2E, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *left_strides(left), H=H, REP=H // G, K=K, V=V, BK=head_block(K), BV=head_block(V), BT=t.BT,
        BS=t.BS, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate_kind(log_gate), HAS_LEFT=left is not None,
        HAS_START=start is not None, HAS_SINK=sink is not None, HAS_LOW=low is not None, TMA=tma,
        PREC=dot_precision(q.dtype), num_warps=t.num_warps, num_stages=t.num_stages, maxnreg=t.maxnreg,
    )  # fmt: skip
    return o, lse
