"""Gate sums as the main kernels read them: a bias of each key, c_ref - c_j in log2.

c_ref is the sum at the first row of a unit of rows, their frame. A row's own sum is the same for all of its keys and
drops out of the softmax; the log-sum-exps that kernels store are in that frame (``rows.row_lse`` moves them out of it).
GATE says what gates there are: 0 none, 1 a constant per head (its slope), 2 one per token (c and base of
``gate_sums.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.jit_constants import TL_CLOSED, TL_LOG2E


@triton.jit
def const_gate(p_g, i_h):
    """Log2 of a per-head constant gate; 0 where it is closed, since the first visible keys cut the past off there."""
    b_g = tl.load(p_g + i_h).to(tl.float32)
    return tl.where(b_g <= TL_CLOSED, 0.0, b_g) * TL_LOG2E


@triton.jit
def gate_at(p_c, p_base, b_slope, pos, GATE: tl.constexpr, KU: tl.constexpr):
    """The running sum of log2 gates at one position. # float64"""
    if GATE == 2:
        b = tl.load(p_base + pos // KU) + tl.load(p_c + pos).to(tl.float64)
    elif GATE == 1:
        b = pos * b_slope.to(tl.float64)
    else:
        b = tl.zeros([], tl.float64)
    return b


@triton.jit
def gates_from(p_c, p_base, b_slope, b_pos, b_ref, m, GATE: tl.constexpr, KU: tl.constexpr):
    """c_ref - c at a block of positions. # [len(b_pos)] float32"""
    if GATE == 2:
        b_base = tl.load(p_base + b_pos // KU, mask=m, other=0.0)
        b = (b_ref - b_base).to(tl.float32) - tl.load(p_c + b_pos, mask=m, other=0.0)
    else:
        b = (b_ref - b_pos * b_slope.to(tl.float64)).to(tl.float32)
    return b


@triton.jit
def base_shift(p_base, b_slope, b_ref, s, GATE: tl.constexpr, KU: tl.constexpr):
    """c_ref minus the running sum before the key tile at s. # float32 scalar"""
    if GATE == 2:
        b = (b_ref - tl.load(p_base + s // KU)).to(tl.float32)
    elif GATE == 1:
        b = (b_ref - s * b_slope.to(tl.float64)).to(tl.float32)
    else:
        b = 0.0
    return b


@triton.jit
def key_bias(p_c, b_slope, b_shift, s, o_s, GATE: tl.constexpr):
    """bias_j = c_ref - c_j of the keys s + o_s, all in one unit of KU keys. # [BS]"""
    return b_shift - (tl.load(p_c + s + o_s) if GATE == 2 else o_s.to(tl.float32) * b_slope)


@triton.jit
def row_shift(p_c, p_base, b_slope, b_ref, i, off, S, GATE: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr):
    """Running gate sum at the frame of row i's unit minus b_ref. # float32 scalar"""
    if GATE == 0:
        b = 0.0
    else:
        b = (gate_at(p_c, p_base, b_slope, tl.minimum(i // RU * RU + off, S - 1), GATE, KU) - b_ref).to(tl.float32)
    return b
