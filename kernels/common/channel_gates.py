"""Sums of the channels' log gates over groups of tokens of a block.

Every sum starts or ends where it is used and is added up directly: it is never the difference of two longer ones. So
its error is relative to itself, strong gates cost weak ones nothing, and -inf needs no care.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.jit_constants import TL_LOG2E

UNIT = tl.constexpr(256.0)  # gates in 1/256 of a log2, so that float16 pieces lose nothing of weak ones ...
LEAST = tl.constexpr(-250.0)  # ... and hold the strongest, whose decay is 0 in float32


@triton.jit
def load_channel_gates(p_a, o_c, o_n, stride, R, K: tl.constexpr):
    """Log2 gates of a block's tokens. # [C, BC]"""
    m_a = (o_c < R)[:, None] & (o_n < K)[None, :]
    b_a = tl.load(p_a + o_c[:, None] * stride + o_n[None, :], mask=m_a, other=0.0)
    return tl.maximum(b_a * TL_LOG2E, LEAST)


@triton.jit
def gate_spans(o_c, i):
    """The masks of tokens l in t's group of 2^i tokens: up to t (included), and after t. # [C (t), C (l)] twice"""
    b_g = o_c >> i
    m_same = b_g[:, None] == b_g[None, :]
    return m_same & (o_c[:, None] >= o_c[None, :]), m_same & (o_c[:, None] < o_c[None, :])


@triton.jit
def meet(o_c, i):
    """Pairs of a row and an earlier key in neighbouring groups of 2^i, but in the same group of twice as many."""
    b_g = o_c >> i
    return (b_g % 2 == 1)[:, None] & (b_g[:, None] == b_g[None, :] + 1)


@triton.jit
def sum_channel_gates(m, b_a, NP: tl.constexpr):
    """Sums of log2 gates over a span, to 11 bits for each of NP pieces. # [C, BC]"""
    b_m, b_rest = m.to(tl.float16), b_a * UNIT
    b_hi = b_rest.to(tl.float16)
    b = tl.dot(b_m, b_hi)
    for _ in tl.static_range(NP - 1):
        b_rest -= b_hi.to(tl.float32)
        b_hi = b_rest.to(tl.float16)
        b = tl.dot(b_m, b_hi, b)
    return b * (1.0 / UNIT)


@triton.jit
def to_nearest(b, PREC: tl.constexpr):
    """A factor of a product of precision PREC, such that TF32, which cuts off 13 bits, rounds it to the nearest."""
    if PREC == "tf32":
        b_bits = b.to(tl.uint32, bitcast=True)
        b_near = tl.minimum((b_bits & 0x7FFFFFFF) + 0x1000, 0x7FFFFFFF)  # a NaN's bits and more may be a number's
        b = (b_near | (b_bits & 0x80000000)).to(tl.float32, bitcast=True)
    return b


@triton.jit
def add_gates_of(b_da, m, b_x, PREC: tl.constexpr):
    """b_da plus, for each gate, b_x of the tokens whose spans m hold it. # [C, BC]"""
    return tl.dot(tl.trans(m.to(tl.float32)), b_x, b_da, input_precision=PREC)
