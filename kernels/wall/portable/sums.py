"""Places of blocks in the levels, and sums of blocks' gates, for the carries and their gradient."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_blocks(p, first, last, stride, o_n, K: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr):
    """Sum of the blocks' rows ``first`` to ``last`` (not with it). # [BC]"""
    b = tl.zeros([BC], tl.float32)
    for i in range(first, last, BN):
        o_i = i + tl.arange(0, BN)
        p_t = p + o_i.to(tl.int64)[:, None] * stride + o_n[None, :]
        b += tl.sum(tl.load(p_t, mask=(o_i < last)[:, None] & (o_n < K)[None, :], other=0.0), 0)
    return b


@triton.jit
def sibling_sum(p_sum, i_c, s, n_c, stride, o_n, K: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
                SIDE: tl.constexpr):  # fmt: skip
    """The log2 gates of the other one of two nodes of 2^s blocks, if block i_c is on that SIDE (0 left, 1 right)."""
    j = i_c >> s
    first = (j ^ 1) << s
    last = tl.minimum(first + (1 << s), n_c)
    return sum_blocks(p_sum, first, tl.where(j % 2 == SIDE, last, first), stride, o_n, K, BC, BN)


@triton.jit
def query_row(i_c, s, C: tl.constexpr):
    """Whether block i_c holds queries of scale s (of child size C 2^s), and the packed row of its first one."""
    h = C << s
    return (i_c >> s) % 2 == 1, i_c * C - (i_c * C // (2 * h) + 1) * h


@triton.jit
def key_row(i_c, s, T, C: tl.constexpr):
    """Whether block i_c holds keys of scale s that some row reads, and the packed row of its first one."""
    h = C << s
    u = i_c * C // (2 * h)
    return ((i_c >> s) % 2 == 0) & ((2 * u + 1) * h < T), i_c * C - u * h
