"""Which tile a program works on, and loads of tiles that end in the middle: what lies outside reads as 0."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(p, o_r, o_d, stride_r, R, D: tl.constexpr, BD: tl.constexpr, MASK_R: tl.constexpr):
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
def head_and_tile(n_tiles):
    """Head and tile of a program of a small kernel, all heads of a tile one after the other.

    One axis holds them all: CUDA's other axes end at 65535, which are 4 million tokens in tiles of 64.
    """
    n_heads = tl.num_programs(0) // n_tiles
    return tl.program_id(0) % n_heads, tl.program_id(0) // n_heads


@triton.jit
def schedule(n_blocks, n_heads):
    """Block and head of this program: groups of n_heads heads (they share the L2 cache), in a group block by block."""
    return nth(tl.program_id(0), tl.num_programs(0), n_blocks, n_heads)


@triton.jit
def nth(n, n_all, n_blocks, n_heads):
    """Block and head of the n-th of n_all tasks, in that order."""
    per = n_blocks * n_heads
    i_g = n // per
    n_last = tl.minimum(n_heads, n_all // n_blocks - i_g * n_heads)  # the last group may be smaller
    return n % per // n_last, i_g * n_heads + n % per % n_last


@triton.jit
def load_keys(p_x, i_b, s, i_g, o_s, o_d, stride, S, D: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr,
              MASK: tl.constexpr):  # fmt: skip
    """Rows s + o_s of one head of k or v, or of q or dO, by descriptor or by pointer. # [BS, BD]"""
    if TMA:  # reads 0 past S and past D
        b = p_x.load([i_b, s, i_g, 0]).reshape([o_s.shape[0], BD])
    else:
        b = load_tile(p_x + s * stride.to(tl.int64), o_s, o_d, stride, S - s, D, BD, MASK)
    return b


@triton.jit
def keys_there(p_valid, s, o_s, S, stride):
    """Which of the keys s + o_s exist (``p_valid`` of one batch). # [BS]"""
    return tl.load(p_valid + (s + o_s).to(tl.int64) * stride, mask=s + o_s < S, other=0) != 0
