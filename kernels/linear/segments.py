"""Segments of a sequence whose states are computed side by side, and the chunks that each segment needs.

The state before a segment is the sum of what earlier segments leave behind. A segment leaves out earlier chunks whose
keys weigh at most eps together in its first row, and so in all its rows; backwards, later chunks in which the segment's
last key weighs at most eps together. With eps = 0 that is what closed gates and the begins of packed sequences cut off.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.device import multiprocessors
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, power_of_2

RESIDENT = 4  # programs of a multiprocessor
LEAST_CHUNKS = 8  # of a segment
WORTHWHILE = 22  # segments that a GPU must have room for, as keys and values are read twice
WORTHWHILE_PACKED = 4  # the same for packed sequences, where few are


@launched
@triton.jit(do_not_specialize=["NC"])
def chunk_weights_kernel(p_c, p_since, p_total, p_keys, p_rows, NC, C: tl.constexpr, BN: tl.constexpr):
    """Per chunk: the log2 of what is left of the state before it, and the weights of its keys after it, and of the
    state before it in its rows, summed."""
    i_bh, o_n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    m_n, o_t = o_n < NC, tl.arange(0, C)
    p_c += i_bh * NC * C
    p_since += i_bh * NC * C
    b_last = tl.load(p_c + o_n * C + C - 1, mask=m_n, other=0.0)
    i_since = tl.load(p_since + o_n * C + C - 1, mask=m_n, other=-1)
    o_tile = o_n[:, None] * C + o_t[None, :]
    b_c = tl.load(p_c + o_tile, mask=m_n[:, None], other=0.0)
    b_keys = tl.where(o_t[None, :] >= i_since[:, None], tl.exp2(b_last[:, None] - b_c), 0.0)  # [BN, C]
    b_rows = tl.where(tl.load(p_since + o_tile, mask=m_n[:, None], other=-1) < 0, tl.exp2(b_c), 0.0)
    tl.store(p_total + i_bh * NC + o_n, tl.where(i_since < 0, b_last, -float("inf")), mask=m_n)
    tl.store(p_keys + i_bh * NC + o_n, tl.sum(b_keys, 1), mask=m_n)
    tl.store(p_rows + i_bh * NC + o_n, tl.sum(b_rows, 1), mask=m_n)


@launched
@triton.jit(do_not_specialize=["NC", "S", "L", "eps"])
def segment_spans_kernel(
    p_total, p_keys, p_rows, p_from, p_until, p_left, NC, S, L, eps, BN: tl.constexpr, FIRST: tl.constexpr,
    DLAST: tl.constexpr,
):  # fmt: skip
    """Per segment: the first chunk that it needs, the end of those that need the segment before it, and what it leaves
    of the state before it. With FIRST and DLAST a state counts as one more key and one more row."""
    i_bh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_n, i_n = tl.arange(0, BN), i_s * L
    p_total += i_bh * NC
    m_before, m_after = o_n < i_n, (o_n >= i_n) & (o_n < NC)
    b_total = tl.load(p_total + o_n, mask=o_n < NC, other=0.0)
    b_next = tl.load(p_total + o_n + 1, mask=o_n + 1 < i_n, other=0.0)
    b_w = tl.exp2(tl.cumsum(b_next, 0, reverse=True)) * tl.load(p_keys + i_bh * NC + o_n, mask=m_before, other=0.0)
    b_w = tl.cumsum(tl.where(m_before, b_w, 0.0), 0)
    if FIRST:
        b_w += tl.exp2(tl.sum(tl.where(m_before, b_total, 0.0), 0))
    b_last = tl.load(p_total + o_n - 1, mask=(o_n > i_n) & (o_n < NC), other=0.0)
    b_v = tl.exp2(tl.cumsum(b_last, 0)) * tl.load(p_rows + i_bh * NC + o_n, mask=m_after, other=0.0)
    b_v = tl.cumsum(tl.where(m_after, b_v, 0.0), 0, reverse=True)
    if DLAST:
        b_v += tl.exp2(tl.sum(tl.where(m_after, b_total, 0.0), 0))
    p_out = i_bh * S + i_s
    tl.store(p_from + p_out, tl.sum((m_before & (b_w <= eps)).to(tl.int32), 0))
    tl.store(p_until + p_out, NC - tl.sum((m_after & (b_v <= eps)).to(tl.int32), 0))
    tl.store(p_left + p_out, tl.exp2(tl.sum(tl.where(m_after & (o_n < i_n + L), b_total, 0.0), 0)))


@triton.jit
def needed(p_from, p_until, i_s, S, NC, GATED: tl.constexpr, BACK: tl.constexpr):
    """The first chunk that a segment needs; with BACK, the end of those that need it."""
    i_need = NC - NC
    if BACK:
        i_need += NC
        if GATED:
            i_need = tl.load(p_until + i_s + 1, mask=i_s + 1 < S, other=2147483647)
            i_need = tl.minimum(i_need, NC)
    elif GATED:
        i_need = tl.load(p_from + i_s)
    return i_need


@triton.jit
def needed_by_others(p_from, p_until, i_a, i_b, i_s, S, GATED: tl.constexpr, BACK: tl.constexpr):
    """The chunks from i_a to i_b of a segment that later segments need, with BACK that need earlier ones: none where
    there are none of these."""
    if BACK:
        if GATED:
            i_b = tl.minimum(i_b, tl.load(p_until + i_s))
        i_b = tl.where(i_s > 0, tl.maximum(i_a, i_b), i_a)
    else:
        if GATED:
            i_a = tl.maximum(i_a, tl.load(p_from + i_s + 1, mask=i_s + 1 < S, other=0))
        i_a = tl.where(i_s + 1 < S, tl.minimum(i_a, i_b), i_b)
    return i_a, i_b


@triton.jit
def left_before(b_s, p_parts, p_left, i_s, i_need, L, o_s, m_s, KV, GATED: tl.constexpr, BACK: tl.constexpr):
    """A tile of the state before a segment, with BACK of the gradient of that after it, from b_s before (after) the
    chunk ``i_need``: what the segments between leave is added up."""
    n = i_s - i_need // L
    if BACK:
        n = tl.cdiv(i_need, L) - 1 - i_s
    for i in range(n):
        i_p = i_s - n + i
        if BACK:
            i_p = i_s + n - i
        if GATED:
            b_s *= tl.load(p_left + i_p)
        b_s += tl.load(p_parts + i_p.to(tl.int64) * KV + o_s, mask=m_s, other=0.0)
    return b_s


class Segments(NamedTuple):
    """How a sequence of chunks is split: the number of segments, the chunks of one, and per sequence, head and segment
    what :func:`segment_spans_kernel` says of it (without gates nothing)."""

    many: int
    chunks: int
    begin: Tensor | None = None
    until: Tensor | None = None
    left: Tensor | None = None


def splits_from(device: torch.device) -> tuple[int, int]:
    """The most programs of a launch, and the fewest chunks of a sequence, that are split where all states are exact."""
    return RESIDENT * multiprocessors(device) // WORTHWHILE, LEAST_CHUNKS * WORTHWHILE


def split(programs: int, chunks: int, device: torch.device, packed: bool) -> Segments:
    """The segments of a sequence.

    Args:
        programs: that a launch would have without segments.
        chunks: of the sequence.
        device: whose multiprocessors are to be filled.
        packed: whether short sequences may be packed into it, which cut it.
    """
    least = WORTHWHILE_PACKED if packed else WORTHWHILE
    most = min(RESIDENT * multiprocessors(device) // programs, chunks // LEAST_CHUNKS)
    many = min(most, math.isqrt(2 * chunks)) if most >= least else 1  # a segment's chunks twice, then one by one
    length = max(1, cdiv(chunks, many))
    return Segments(max(1, cdiv(chunks, length)), length)


def spans(segments: Segments, c: Tensor, since: Tensor, chunk: int, eps: float, first: bool, last: bool) -> Segments:
    """The segments with what they need; c, since as ``chunks.ChunkGates``, ``first`` and ``last`` whether there is a
    state before the first token, and a gradient of that after the last."""
    B, H, NC = *c.shape[:2], c.shape[2] // chunk
    total, keys, rows = c.new_empty((3, B, H, NC)).unbind()
    chunk_weights_kernel[(B * H, cdiv(NC, 16))](c, since, total, keys, rows, NC, C=chunk, BN=16)
    left = c.new_empty((B, H, segments.many))
    begin, until = (torch.empty_like(left, dtype=torch.int32) for _ in range(2))
    BN = power_of_2(NC)
    segment_spans_kernel[(B * H, segments.many)](
        total, keys, rows, begin, until, left, NC, segments.many, segments.chunks, eps, BN=BN, FIRST=first,
        DLAST=last, num_warps=4 if BN <= 4096 else 16,
    )  # fmt: skip
    return segments._replace(begin=begin, until=until, left=left)
