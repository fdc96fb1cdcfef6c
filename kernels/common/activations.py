"""Activations, norms and gates of heads' outputs within kernels, in float32."""

import triton
import triton.language as tl


@triton.jit
def log_sigmoid(x):
    """-log(1 + exp(-x)), with a small relative error however small it is. # float32"""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)  # log(1 + y) = 2 artanh(s), s <= 1/3
    z = s * s
    p = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z / 15))))))
    return tl.minimum(x, 0.0) - 2.0 * s * p


@triton.jit
def finished(b_o, m_o, p_scale, p_gate, n, eps, NORM: tl.constexpr, CENTRED: tl.constexpr, GATE: tl.constexpr,
             SWISH: tl.constexpr, GATE_FIRST: tl.constexpr):  # fmt: skip
    """n channels b_o, 0 where not m_o, after their norm and their gate, or the other way round. # [channels] float32

    p_scale, p_gate: where those of each channel are.
    """
    if GATE:
        b_x = tl.load(p_gate, mask=m_o, other=0.0).to(tl.float32)
        b_x = tl.sigmoid(b_x) * (b_x if SWISH else 1.0)
        if GATE_FIRST:
            b_o *= b_x
    if NORM:
        if CENTRED:
            b_o = tl.where(m_o, b_o - tl.sum(b_o, 0) / n, 0.0)
        b_scale = tl.load(p_scale, mask=m_o, other=0.0).to(tl.float32)
        b_o = b_o * tl.rsqrt(tl.sum(b_o * b_o, 0) / n + eps) * b_scale
    if GATE and not GATE_FIRST:
        b_o *= b_x
    return b_o
