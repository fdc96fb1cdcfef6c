"""Rows of queries and their logits over one step of keys, as all kernels of this family need them.

Rows are the T tokens of each of the R query heads of a key head. GATE says what gates there are: 0 none, 1 a constant
per head (its slope), 2 sums within pages and before them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.jit_constants import TL_CLOSED, TL_LOG2E
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.common.tile_loads import load_tile
from attnzoo.kernels.decode.portable.eight_bits import decoded, exponents_at


@triton.jit
def row_queries(p_q, i_b, o_t, o_h, o_k, m_r, stride_qb, stride_qt, stride_qh, K: tl.constexpr):
    """The queries of rows: tokens o_t of heads o_h of sequence i_b (int64). # [BT, BK]"""
    p_qr = p_q + (i_b * stride_qb + o_t * stride_qt + o_h.to(tl.int64) * stride_qh)[:, None] + o_k[None, :]
    return tl.load(p_qr, mask=m_r[:, None] & (o_k[None, :] < K), other=0.0)


@triton.jit
def row_sums(p_t, p_decay, p_sums, p_g, b_pos, o_h, o_rep, m_r, N, R: tl.constexpr, PAGE: tl.constexpr,
             GATE: tl.constexpr):  # fmt: skip
    """The running sum of log decays at each row [BT] float64 (GATE 2), and its log2 slope [BT] (GATE 1).

    p_t: the table of the rows' key head; p_sums: the sums before the pages of its first query head.
    """
    b_ref = tl.zeros([b_pos.shape[0]], tl.float64)
    b_slope = tl.zeros([b_pos.shape[0]], tl.float32)
    if GATE == 2:
        m_row = m_r & (b_pos >= 0)
        b_own = tl.load(p_t + b_pos // PAGE, mask=m_row, other=-1).to(tl.int64)
        p_own = p_decay + (b_own * PAGE + b_pos % PAGE) * R + o_rep
        b_ref = tl.load(p_sums + o_rep * N + b_pos // PAGE, mask=m_row, other=0.0)
        b_ref += tl.load(p_own, mask=m_row & (b_own >= 0), other=0.0).to(tl.float64)
    elif GATE == 1:
        # a closed one becomes a finite number whose 2^g is 0: no key before the row's own has a weight
        b_slope = tl.maximum(tl.load(p_g + o_h).to(tl.float32), TL_CLOSED) * TL_LOG2E
    return b_ref, b_slope


@triton.jit
def row_since(p_since, i_bh, b_pos, o_rep, o_t, m_r, T, window, HAS_SINCE: tl.constexpr):
    """The first key that each row may see, by its window and by closed gates; i_bh: the first query head. # [BT]"""
    b_since = b_pos - window + 1
    if HAS_SINCE:
        b_since = tl.maximum(b_since, tl.load(p_since + (i_bh + o_rep) * T + o_t, mask=m_r, other=0))
    return b_since


@triton.jit
def page_scores(b_q, p_k, p_exponents, at, rest, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
                EIGHT: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Products of rows with the keys from entry ``at`` of the pool on, of which ``rest`` exist. # [BT, BS]

    Float32 rows beside keys of 16 bits are two of 16 bits, one of what the other has lost.
    """
    b_k = load_tile(p_k + at * K, tl.arange(0, BS), tl.arange(0, BK), K, rest, K, BK, True)
    if EIGHT > 0:
        b_k = decoded(b_k, EIGHT).to(b_q.dtype)
    b_near = b_q.to(b_k.dtype)
    b_s = tl.dot(b_near, tl.trans(b_k), input_precision=PREC)
    if b_q.dtype != b_k.dtype:
        b_s = tl.dot((b_q - b_near.to(b_q.dtype)).to(b_k.dtype), tl.trans(b_k), b_s)
    if EIGHT > 0:
        o_s = tl.arange(0, BS)
        b_s *= exponents_at(p_exponents, at + o_s, o_s < rest, 0)[None, :]
    return b_s


@triton.jit
def page_values(b_w, p_v, p_exponents, at, rest, V: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
                EIGHT: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Weights [BT, BS] and values [BS, BV] of one dtype whose product is that of the weights b_w and the values.

    Of values in 8 bits it is DTYPE, that of the rows; their exponents go to the weights, which float16 would not hold.
    """
    o_s = tl.arange(0, BS)
    b_v = load_tile(p_v + at * V, o_s, tl.arange(0, BV), V, rest, V, BV, True)
    if EIGHT > 0:
        b_scale = exponents_at(p_exponents, at + o_s, o_s < rest, 1)
        b_v = decoded(b_v, EIGHT)
        if tl.float16 == DTYPE:
            b_v = (b_v.to(tl.float32) * b_scale[:, None]).to(DTYPE)
        else:
            b_w, b_v = b_w * b_scale[None, :], b_v.to(DTYPE)
    return b_w.to(b_v.dtype), b_v


@triton.jit
def page_logits(b_s, p_decay, p_sums, b_ref, b_slope, b_pos, b_since, o_rep, at, s, rest, N, scale2, R: tl.constexpr,
                BS: tl.constexpr, PAGE: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """Log2 logits from the scores of the keys s .. s + BS, of which ``rest`` exist, ``at`` in the pool. # [BT, BS]"""
    o_s = tl.arange(0, BS)
    b_y = scores(b_s, scale2)
    if GATE == 2:
        p_d, p_s = p_decay + at * R, p_sums + s // PAGE
        if R == 1:
            b_shift = (b_ref - tl.load(p_s)).to(tl.float32)
            b_decay = tl.load(p_d + o_s, mask=o_s < rest, other=0.0)[None, :]
        else:
            b_shift = (b_ref - tl.load(p_s + o_rep * N)).to(tl.float32)
            b_decay = tl.load(p_d + o_s[None, :] * R + o_rep[:, None], mask=o_s[None, :] < rest, other=0.0)
        b_y += (b_shift[:, None] - b_decay) * TL_LOG2E
    elif GATE == 1:
        b_y += (b_pos[:, None] - (s + o_s)[None, :]).to(tl.float32) * b_slope[:, None]
    m_y = (o_s < rest)[None, :] & ((s + o_s)[None, :] <= b_pos[:, None]) & ((s + o_s)[None, :] >= b_since[:, None])
    return tl.where(m_y, b_y, float("-inf"))
