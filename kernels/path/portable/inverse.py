"""Within a block of 64 tokens everything follows from one inverse, X = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta).

Here: how that inverse is made, matrix products whose factors are split into 16-bit pieces, and the launch options of
all kernels that work on the transitions. blocks.py makes X and uses it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.device import triton_version
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.levels.layout import BLOCK, Kept

# Warps and registers per thread of each kernel, for head dims up to 64 and up to 128.
LAUNCH: dict[str, tuple[tuple[int, int | None], tuple[int, int | None]]] = {
    "block": ((4, None), (4, None)),
    "block_bwd": ((4, None), (4, None)),
    "product_bwd": ((4, 128), (4, 168)),
    "tree": ((4, None), (8, 128)),
    "carry": ((4, None), (4, None)),
    "carry_bwd": ((4, None), (4, None)),
    "node": ((4, None), (4, None)),
}


def launch(part: str, K: int) -> dict[str, int | None]:
    """Launch options of a kernel."""
    num_warps, maxnreg = LAUNCH[part][K > 64]
    return {"num_warps": num_warps, "maxnreg": maxnreg if triton_version() >= (3, 4) else None}


@triton.jit
def power_of_two(m, LEAST: tl.constexpr = 1e-37):
    """Powers of two near m >= 0 (1 for an m up to LEAST), and their inverses."""
    s = (m.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    s = tl.where((s > LEAST) & (s < 1e38), s, 1.0)
    return s, 1.0 / s


@triton.jit
def row_scale(x):
    """Powers of two that bring the rows of x near 1, and their inverses. # [rows] each"""
    return power_of_two(tl.max(tl.abs(x.to(tl.float32)), 1))


@triton.jit
def tile_scale(x, LEAST: tl.constexpr = 1e-37):
    """A power of two near the largest entry of x (1 for one up to LEAST), and its inverse."""
    return power_of_two(tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0), LEAST)


@triton.jit
def mm(a, b, acc, NA: tl.constexpr, NB: tl.constexpr, DT: tl.constexpr):
    """acc + a b, computed with factors of dtype DT.

    A factor that one rounding to DT would spoil is split in two (NA = 2 for a, NB = 2 for b): its rounding and what the
    rounding dropped. The product of what was dropped on both sides is left out. A DT of float32 needs no splitting.
    """
    if DT == tl.float32:  # noqa: SIM300
        if tl.program_id(0) >= 0:  # always: a region of its own, after which its tiles leave shared memory
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        a1, b1 = a.to(DT), b.to(DT)
        acc = tl.dot(a1, b1, acc)
        if NA == 2:
            acc = tl.dot((a.to(tl.float32) - a1.to(tl.float32)).to(DT), b1, acc)
        if NB == 2:
            acc = tl.dot(a1, (b.to(tl.float32) - b1.to(tl.float32)).to(DT), acc)
    return acc


@triton.jit
def two_pieces(x, DT: tl.constexpr):
    """x as the sum of two numbers of dtype DT."""
    hi = x.to(DT)
    return hi, (x.to(tl.float32) - hi.to(tl.float32)).to(DT)


@triton.jit
def mm_pair(a, b, b_lo, TRANS: tl.constexpr, acc, NP: tl.constexpr, NX: tl.constexpr, DT: tl.constexpr):
    """acc + a (b + b_lo), or with its transpose; without b_lo if NX = 1."""
    acc = mm(a, tl.trans(b) if TRANS else b, acc, NP, NP, DT)
    if NX == 2:
        acc = mm(a, tl.trans(b_lo) if TRANS else b_lo, acc, NP, NP, DT)
    return acc


@triton.jit
def unit_rows(x, NP: tl.constexpr, DT: tl.constexpr):
    """The rows of x brought near 1 by powers of two, in dtype DT if one piece is enough, and these powers."""
    s, inv = row_scale(x)
    x = x.to(tl.float32) * inv[:, None]
    return x.to(DT) if NP == 1 else x, s


@triton.jit
def merge_blocks(b_l, b_x, h: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """Diagonal blocks of size 2h inverted, given those of size h: [[A, 0], [B, D]] has -D^-1 B A^-1 below. # [C, C]"""
    o_c = tl.arange(0, C)
    m_b = (o_c[:, None] // (2 * h) == o_c[None, :] // (2 * h)) & (o_c[:, None] // h != o_c[None, :] // h)
    b_t = mm(tl.where(m_b, -b_l, 0.0), b_x, tl.zeros([C, C], tl.float32), 2, 2, DT)
    return mm(b_x, b_t, b_x, 2, 2, DT)


@triton.jit
def unit_lower_inverse(b_l, p_l, C: tl.constexpr, DT: tl.constexpr):
    """(I + b_l)^-1 of a strictly lower triangular matrix: 16 x 16 blocks by rows, then pairs of blocks. # [C, C]

    A warp holds a block, each thread half of a column, so that no step crosses warps; rows of b_l are read back from
    p_l, which is overwritten.
    """
    N: tl.constexpr = C // 16
    o_c, o_n, o_s = tl.arange(0, C), tl.arange(0, N), tl.arange(0, 16)
    tl.store(p_l + o_c[:, None] * C + o_c[None, :], b_l)
    tl.debug_barrier()
    o_r = tl.arange(0, 8)[:, None, None] * 2 + tl.arange(0, 2)[None, None, :]  # rows of a block, [8, 1, 2]
    p_r = p_l + o_n[None, :, None] * (16 * C + 16) + o_r  # [8, N, 2]
    b_i = tl.where(o_r[:, :, :, None] == o_s[None, None, None, :], 1.0, tl.zeros([8, N, 2, 16], tl.float32))
    for i in tl.static_range(1, 16):
        b_r = tl.load(p_r + i * C, mask=o_r < i, other=0.0)[:, :, :, None]
        b_r = tl.sum(tl.sum(b_r * b_i, 0), 1)  # [N, 16]
        b_i = tl.where(o_r[:, :, :, None] == i, b_i - b_r[None, :, None, :], b_i)
    b_i = tl.reshape(tl.permute(b_i, (1, 0, 2, 3)), [N, 16, 16])
    b_x = tl.reshape(tl.broadcast_to(b_i[:, :, None, :], [N, 16, N, 16]), [C, C])
    b_x = tl.where(o_c[:, None] // 16 == o_c[None, :] // 16, b_x, b_l * 0.0)  # laid out as b_l
    b_x = merge_blocks(b_l, b_x, 16, C, DT)
    b_x = merge_blocks(b_l, b_x, 32, C, DT)
    return b_x


def new_kept(q: Tensor, w: Tensor) -> Kept:
    """Room for what block_level leaves for the backward pass."""
    B, T, G, _ = w.shape
    coarse = q.dtype == torch.bfloat16
    v = w.new_empty((B, cdiv(T, BLOCK), G, BLOCK, BLOCK), dtype=torch.float16 if coarse else torch.float32)
    x = v.new_empty((2, *v.shape), dtype=q.dtype) if coarse else torch.empty_like(v)
    return Kept(v, x, w.new_empty(w.shape, dtype=q.dtype) if coarse and w.dtype != q.dtype else w)
