"""The online softmax: which key tiles a block of rows meets, one step over a key tile, and rows put together."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.gate_bias import key_bias
from attnzoo.kernels.common.scores import scores


@triton.jit
def row_bounds(p_since, p_start, i_t, p_first, p_last, BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr,
               KU: tl.constexpr, HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, near=0):  # fmt: skip
    """Key tiles of a row block, as tile indices: the mask of since from lo, none from full, the causal one from mid,
    where keys may be less than ``near`` tokens old.

    Returns lo, full, mid and the number of tiles in the first and last ranges. (An index times BS is a position
    that the compiler knows to be aligned.)
    """
    lo = 0
    since = 0
    if HAS_SINCE:
        lo = tl.load(p_since + p_first) // KU * (KU // BS)
        since = tl.load(p_since + p_last)
    if HAS_START:
        lo = tl.maximum(lo, tl.load(p_start + i_t * BT // RU) // BS)
    n_left = tl.cdiv(tl.maximum(since - lo * BS, 0), BS)
    full = lo + n_left
    mid = tl.maximum(full, (p_first + 1 - near) // BS)
    n_diag = tl.maximum(tl.cdiv(p_last + 1, BS) - mid, 0)
    return lo, full, mid, n_left, n_diag


@triton.jit
def weights_of(b_y, b_m, MASK: tl.constexpr = True):
    """Of logits b_y of rows whose largest so far is b_m: the largest with them, their weights, and the factor of what
    is there. MASK: a row may have seen no key yet. # [BT], [BT, BS], [BT]"""
    b_mn = tl.maximum(b_m, tl.max(b_y, 1))
    b_ms = tl.where(b_mn == float("-inf"), 0.0, b_mn) if MASK else b_mn
    return b_mn, tl.exp2(b_y - b_ms[:, None]), tl.exp2(b_m - b_ms)


@triton.jit
def put_together(b_o, b_m, b_l, p_part, p_lse, o_part, m_n, o_v, V):
    """A row with more of its parts, at places o_part of those that m_n says are there: output, largest logit and sum of
    weights. # [BV], [], []"""
    b_y = tl.load(p_lse + o_part, mask=m_n, other=float("-inf"))
    b_x = tl.load(p_part + o_part[:, None] * V + o_v[None, :],
                  mask=(b_y > float("-inf"))[:, None] & (o_v[None, :] < V), other=0.0)  # fmt: skip
    b_mn = tl.maximum(b_m, tl.max(b_y, 0))
    b_ms = tl.where(b_mn == float("-inf"), 0.0, b_mn)
    b_p, b_a = tl.exp2(b_y - b_ms), tl.exp2(b_m - b_ms)
    b_l = b_l * b_a + tl.sum(b_p, 0)
    return b_o * b_a + tl.sum(b_p[:, None] * b_x, 0), b_mn, b_l


@triton.jit
def softmax_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_pos, b_since, scale2, GATE: tl.constexpr,
                 HAS_SINCE: tl.constexpr, PREC: tl.constexpr, MASK: tl.constexpr, b_more=None):  # fmt: skip
    """One key tile of the online softmax; b_s = q k^T, to whose scores b_more is added if there. # [BT, BS]"""
    b_y = scores(b_s, scale2)
    if b_more is not None:
        b_y += b_more
    if GATE != 0:
        b_y += key_bias(p_c, b_slope, b_shift, s, o_s, GATE)[None, :]
    if MASK:
        m_y = (s + o_s)[None, :] <= b_pos[:, None]
        if HAS_SINCE:
            m_y = m_y & ((s + o_s)[None, :] >= b_since[:, None])
        b_y = tl.where(m_y, b_y, float("-inf"))
    b_m, b_p, b_a = weights_of(b_y, b_m, MASK)
    b_l = b_l * b_a + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_a[:, None], input_precision=PREC)  # [BT, BV]
    return b_o, b_m, b_l
