"""``common/gate_bias.py`` in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo.kernels.common.jit_constants import TL_CLOSED, TL_LOG2E


@gluon.jit
def gluon_slope(p_g, i_h, GATE: gl.constexpr):
    """Log2 of a per-head constant gate, as ``const_gate``; 0 for the other kinds."""
    b = gl.to_tensor(0.0)
    if GATE == 1:
        b_g = gl.load(p_g + i_h).to(gl.float32)
        b = gl.where(b_g <= TL_CLOSED, 0.0, b_g) * TL_LOG2E
    return b


@gluon.jit
def gluon_gate_at(p_c, p_base, b_slope, pos, GATE: gl.constexpr, KU: gl.constexpr):
    """The running sum of log2 gates at one position. # float64"""
    b = pos * b_slope.to(gl.float64)
    if GATE == 2:
        b = gl.load(p_base + pos // KU) + gl.load(p_c + pos).to(gl.float64)
    return b


@gluon.jit
def gluon_bias_at(p_c, p_base, b_slope, b_ref, b_s, S, GATE: gl.constexpr, KU: gl.constexpr):
    """bias_j = c_ref - c_j of the keys b_s."""
    b_bias = b_s.to(gl.float32)
    if GATE == 2:
        b_base = gl.load(p_base + b_s // KU, mask=b_s < S, other=0.0)
        b_bias = (b_ref - b_base).to(gl.float32) - gl.load(p_c + b_s, mask=b_s < S, other=0.0)
    elif GATE == 1:
        b_bias = (b_ref - b_s * b_slope.to(gl.float64)).to(gl.float32)
    return b_bias
