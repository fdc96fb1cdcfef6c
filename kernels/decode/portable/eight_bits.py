"""Keys and values in 8 bits in kernels: what ``decode/eight_bits.py`` defines, to the bit.

EIGHT is 0 where pages hold other numbers, 2 where the GPU converts e4m3 itself, 1 where bits are moved instead: on
GPUs before compute capability 8.9, and in the interpreter, which rounds e4m3 wrongly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attnzoo.kernels.common.device import machine

CONVERTS = (8, 9)  # compute capability


def kind_of_bits(exponents: torch.Tensor | None) -> int:
    """EIGHT for pages with these exponents."""
    if exponents is None:
        return 0
    return 2 if machine(exponents.device).capability >= CONVERTS else 1


@triton.jit
def power_of_2(b_e):
    """2 to integers from -126 to 127, exactly. # float32"""
    return ((b_e.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encoded(b_x):
    """The bits [R, D] uint8 and exponents [R] int32 of rows [R, D] float32."""
    b_e = (tl.max(tl.abs(b_x), 1).to(tl.int32, bitcast=True) >> 23) - 134
    b_e = tl.minimum(tl.maximum(b_e, -120), 120)
    b_y = b_x * power_of_2(-b_e)[:, None]
    b_a = tl.abs(b_y)
    b_bits = b_a.to(tl.int32, bitcast=True)
    b_near = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - 960  # 8 exponents of 120
    b_small = (b_a * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF  # from 2^23 on floats are whole numbers
    b_near = tl.where(b_a < 0.015625, b_small, b_near)
    b_near = tl.where(b_a <= 448.0, b_near, 0x7F)  # NaN
    b_sign = (b_y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (b_near | b_sign).to(tl.uint8), b_e


@triton.jit
def decoded(b_x, EIGHT: tl.constexpr):
    """The numbers of bits, which every float of 16 bits holds exactly, as float16."""
    if EIGHT == 2:
        b_y = b_x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        b_16 = b_x.to(tl.uint16)
        b_y = (((b_16 & 0x80) << 8) | ((b_16 & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return b_y.to(tl.float16)


@triton.jit
def exponents_at(p_exponents, o_at, m_at, WHICH: tl.constexpr):
    """2 to the exponents of keys (WHICH 0) or values (1) at entries o_at of the pool; 1 where m_at is not. # float32"""
    return power_of_2(tl.load(p_exponents + o_at * 2 + WHICH, mask=m_at, other=0))
