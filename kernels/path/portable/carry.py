"""Kernels that carry queries and keys through the tree (tree.py says which tree), and their gradients back.

One program carries a block of 64 tokens of a head through all levels that they take part in, from the lowest to the
highest; each level costs one K x K product, but the lowest none where the block already is at that end of its unit. The
backward walks from the highest level to the lowest. It holds the running gradient D, the gradient of the rows as they
were after the carry to a level, and stores it over that level's own gradient. What a node's gradient needs is then all
there: it is the sum of D x^T over the rows x that the node carried, and one program can make it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.common.tile_order import held_tile
from attnzoo.kernels.levels.layout import (
    BLOCK,
    EVERYTHING,
    UNIT,
    Carried,
    Leaves,
    Levels,
    QueryGradientTiles,
    Wanted,
    level_count,
    level_rows,
)

from .inverse import mm, row_scale
from .tree import first_key_of, load_node, node_options, popcount, scale_at, starts, tree


@triton.jit
def _mm_node(b_x, p, plane, o_k, TRANS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NP: tl.constexpr,
             DT: tl.constexpr):  # fmt: skip
    """b_x N or b_x N^T, the node at p in two pieces, a plane apart; with NP = 1 the first one does. # float32"""
    b_n = load_node(p, o_k, o_k, K)
    b = mm(b_x, tl.trans(b_n) if TRANS else b_n, tl.zeros([b_x.shape[0], BK], tl.float32), NP, 1, DT)
    if NP == 2:
        b_n = load_node(p + plane, o_k, o_k, K)
        b = mm(b_x, tl.trans(b_n) if TRANS else b_n, b, 1, 1, DT)
    return b


@triton.jit
def _scaled(b, NP: tl.constexpr, DT: tl.constexpr):
    """Rows brought near 1, as _mm_node takes them in NP pieces of dtype DT, and what they were divided by."""
    b_s, b_inv = row_scale(b)
    b *= b_inv[:, None]
    return b_s, b.to(DT) if NP == 1 else b


@triton.jit
def _acts(p_start, i_t, i_h, T, n, stride_sh, QUERY: tl.constexpr, REP: tl.constexpr, HAS_START: tl.constexpr):
    """Levels that a unit of 128 tokens takes part in, bit s for level s + 1, and the first keys that these read.

    A query's bits are those of its unit's index, a key's those that are clear and have a right sibling. Pruning drops
    queries whose first key is past the left sibling, and keys before the first key of all rows of the right sibling
    (first keys never move left, so its first row decides): in both cases all levels from some one on.
    """
    o_s = tl.arange(0, 32)
    b_u = i_t >> o_s
    b_key = o_s * 0
    if QUERY:
        m_s = b_u % 2 == 1
        if HAS_START:
            m_s = m_s & (first_key_of(p_start, i_t, i_h, stride_sh, REP) < (b_u << o_s) * 128)
    else:
        b_right = (b_u + 1) << o_s
        m_s = (o_s < n) & (b_u % 2 == 0) & (b_right < tl.cdiv(T, 128))
        if HAS_START:
            b_key = first_key_of(p_start, tl.where(m_s, b_right, 0), i_h, stride_sh, REP)
            m_s = m_s & (b_key < i_t * 128 + 128)
    return tl.sum(tl.where(m_s, 1 << o_s, 0), 0), b_key


@triton.jit
def _top_bit(x):
    """Position of the highest set bit of 0 < x < 2^24."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _unit_row(i_t, s, QUERY: tl.constexpr):
    """First packed row of a unit in level s + 1."""
    return (i_t - (((i_t >> s) // 2 + QUERY) << s)) * 128


@triton.jit
def _order(n_u, n_heads, QUERY: tl.constexpr):
    """Block and head of a program, those of many levels first; and whether the block must be carried over the other one
    of its unit, as the second one's queries and the first one's keys must."""
    i_u = tl.program_id(0) // n_heads
    if QUERY:
        i_u = n_u - 1 - i_u
    return i_u, tl.program_id(0) % n_heads, (i_u % 2 == 1) == QUERY


@launched
@triton.jit(do_not_specialize=["T", "Tr", "B", "n", "N", "stride_sb", "stride_sh"])
def path_carry_kernel(
    p_x, p_level, p_node, p_start, T, Tr, B, n, N, stride_sb, stride_sh,
    H: tl.constexpr, G: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, QUERY: tl.constexpr,
    NS: tl.constexpr, HAS_START: tl.constexpr, NP: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Packed rows of the levels 1 .. n [n, B, Tr, H, K] from x [B, T, H, K] at the ends of its blocks."""
    C: tl.constexpr = 64
    units = tl.cdiv(T, C)
    i_u, i_bh, moves = _order(units, B * H, QUERY)
    i_b, i_h, i_t = (i_bh // H).to(tl.int64), i_bh % H, i_u // 2
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    act, _ = _acts(p_start + i_b * stride_sb, i_t, i_h, T, n, stride_sh, QUERY, REP, HAS_START)
    count = popcount(act)
    m_c = (i_u * C + o_c < T)[:, None] & (o_k < K)[None, :]
    o_x = o_c[:, None] * (H * K) + o_k[None, :]
    p_x += ((i_b * T + i_u * C) * H + i_h) * K
    p_level += ((i_b * Tr + i_u % 2 * C) * H + i_h) * K
    p_node += (i_b * N * G + i_h // (H // G)) * (K * K)
    plane = B * N.to(tl.int64) * (G * K * K)
    b_x = tl.load(p_x + o_x, mask=m_c & (count > 0), other=0.0).to(tl.float32)  # [C, BK]
    b_s, b_x = _scaled(b_x, NP, DT)
    i_n = i_u ^ 1  # first over the unit's other block
    if (count > 0) & (not moves):
        s = _top_bit(act & -act)
        p = p_level + (s * B * Tr.to(tl.int64) + _unit_row(i_t, s, QUERY)) * (H * K)
        tl.store(p + o_x, (b_x.to(tl.float32) * b_s[:, None]).to(p_level.dtype.element_ty), mask=m_c)
        i_n = scale_at(units, s + 1) + ((i_t >> s) ^ 1)
        act &= act - 1
    for _ in tl.range(tl.where(moves, 0, 1), count, num_stages=NS):
        b_y = _mm_node(b_x, p_node + i_n.to(tl.int64) * (G * K * K), plane, o_k, QUERY, K, BK, NP, DT)
        b_x = b_y.to(b_x.dtype)
        s = _top_bit(act & -act)
        p = p_level + (s * B * Tr.to(tl.int64) + _unit_row(i_t, s, QUERY)) * (H * K)
        tl.store(p + o_x, (b_y * b_s[:, None]).to(p_level.dtype.element_ty), mask=m_c)
        i_n = scale_at(units, s + 1) + ((i_t >> s) ^ 1)
        act &= act - 1


@triton.jit
def _down(act, b_key, i_u, o_c, meets, p_level, p_d, stride, BTr, QUERY: tl.constexpr, HAS_START: tl.constexpr):
    """One step of a walk from the highest level of a block down to level 0.

    Bit s of act stands for level s + 1, which is still to come; without any bit this step is level 0.

    Args:
        meets: whether the block has a gradient in level 0.

    Returns where the level keeps the block's gradient, which of its rows have one there [C], s, and act without this
    level.
    """
    last = act == 0
    s = _top_bit(act | last)
    p = tl.where(last, p_d, p_level + (s * BTr + _unit_row(i_u // 2, s, QUERY)) * stride)
    m = (o_c >= 0) & (meets | (act > 0))
    if HAS_START and not QUERY:
        m = m & ((i_u * 64 + o_c >= tl.sum(tl.where(tl.arange(0, 32) == s, b_key, 0), 0)) | last)
    return p, m, s, tl.where(last, 0, act - (1 << s))


@triton.jit
def _from_tiles(p_tiles, s, i_t, BH, Tr, C: tl.constexpr, BK: tl.constexpr, QUERY: tl.constexpr, WARPS: tl.constexpr):
    """A block's gradient in level s + 1, unscaled (``levels.Tiles``). # [C, BK]"""
    row = s * BH.to(tl.int64) * (tl.cdiv(Tr, 128) * 128) + _unit_row(i_t, s, QUERY)
    return held_tile(p_tiles + row * BK, C, BK, 4, WARPS // 4)


@launched
@triton.jit(do_not_specialize=["T", "Tr", "B", "n", "N", "stride_sb", "stride_sh"])
def path_carry_bwd_kernel(
    p_d, p_level, p_tiles, p_zero, p_out, p_node, p_start, T, Tr, B, n, N, scale, stride_sb, stride_sh,
    H: tl.constexpr, G: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, QUERY: tl.constexpr,
    NS: tl.constexpr, HAS_START: tl.constexpr, NP: tl.constexpr, WARPS: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradient [B, T, H, K] of x, from those of the levels and of level 0 (p_d [B, T, H, K]).

    Those of the levels are in p_level, or with WARPS in p_tiles (``levels.Tiles``). The running gradient D, that of x
    at the next scale, goes to p_level, in place of a level's own; level 0's goes to p_zero, packed.
    """
    C: tl.constexpr = 64
    units = tl.cdiv(T, C)
    i_u, i_bh, moves = _order(units, B * H, QUERY)
    i_b, i_h, i_t = (i_bh // H).to(tl.int64), i_bh % H, i_u // 2
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    act, b_key = _acts(p_start + i_b * stride_sb, i_t, i_h, T, n, stride_sh, QUERY, REP, HAS_START)
    count = popcount(act)
    meets = moves & (i_t * 128 + C < T)
    m_c = (i_u * C + o_c < T)[:, None] & (o_k < K)[None, :]
    o_x = o_c[:, None] * (H * K) + o_k[None, :]
    BTr = B * Tr.to(tl.int64)
    p_node += (i_b * N * G + i_h // (H // G)) * (K * K)
    plane = B * N.to(tl.int64) * (G * K * K)
    p_level += ((i_b * Tr + i_u % 2 * C) * H + i_h) * K
    at = ((i_b * T + i_u * C) * H + i_h) * K
    p_d += at
    p_tiles += ((i_b * H + i_h) * (tl.cdiv(Tr, 128) * 128) + i_u % 2 * C) * BK
    p, m, s, act = _down(act, b_key, i_u, o_c, meets, p_level, p_d, H * K, BTr, QUERY, HAS_START)
    b_s, b_y = tl.full([C], 1.0, tl.float32), tl.zeros([C, BK], tl.float32)
    b_x = b_y.to(DT) if NP == 1 else b_y
    products = tl.maximum(count - tl.where(moves, 0, 1), 0)
    for i in tl.range(0, products, num_stages=NS):
        b_d = (b_x * b_s[:, None]).to(p_level.dtype.element_ty)
        if WARPS:
            tl.store(p + o_x, b_d, mask=m_c & (i > 0))
            b_g = _from_tiles(p_tiles, s, i_t, B * H, Tr, C, BK, QUERY, WARPS) * scale
        else:
            b_g = tl.load(p + o_x, mask=m_c & m[:, None], other=0.0)  # before D takes its place
            tl.store(p + o_x, b_d, mask=m_c & (i > 0))
        b_s, b_x = _scaled(b_y * b_s[:, None] + b_g.to(tl.float32), NP, DT)
        p, m, s, act = _down(act, b_key, i_u, o_c, meets, p_level, p_d, H * K, BTr, QUERY, HAS_START)
        i_n = tl.where(i + 1 < count, scale_at(units, s + 1) + ((i_t >> s) ^ 1), i_u ^ 1).to(tl.int64)
        b_y = _mm_node(b_x, p_node + i_n * (G * K * K), plane, o_k, not QUERY, K, BK, NP, DT)
    b_y *= b_s[:, None]
    p_own, m_own = p + o_x, m_c & m[:, None]
    if WARPS:
        if moves:  # the gradient of level 0, which is in no tile
            b_y += tl.load(p_own, mask=m_own, other=0.0).to(tl.float32)
        else:
            if count > 0:
                b_y += _from_tiles(p_tiles, s, i_t, B * H, Tr, C, BK, QUERY, WARPS) * scale
    else:
        b_y += tl.load(p_own, mask=m_own, other=0.0).to(tl.float32)
    if moves:
        p = p_zero + ((i_b * (tl.cdiv(T, 128) * C) + i_t * C) * H + i_h) * K
    tl.store(p + o_x, (b_x * b_s[:, None]).to(p_zero.dtype.element_ty), mask=m_c & (products > 0))
    tl.store(p_out + at + o_x, b_y.to(p_out.dtype.element_ty), mask=m_c)


def _options(part: str, x: Tensor, start: Tensor | None, nodes: Tensor, query: bool) -> dict[str, object]:
    """Compile-time options of path_carry_kernel and path_carry_bwd_kernel."""
    H, K = x.shape[2:]
    G = nodes.shape[3]
    return {
        "H": H, "G": G, "REP": 1 if query or start is None else start.shape[1] // G, "K": K,
        "QUERY": query, "HAS_START": start is not None, "NP": 1 if x.dtype == torch.bfloat16 else 2,
        "DT": tl.float16, **node_options(part, K, x.dtype == torch.bfloat16),
    }  # fmt: skip


def carry(block: Leaves, start: Tensor | None = None, out: Levels | None = None) -> Carried:
    """The levels of a Leaves from ``blocks.block_level``; the nodes of its tree are filled here.

    With ``start`` (int32, last dim contiguous) the nodes and carries that no row needs are not computed; keys come by
    whole units of 128, as the one-pass backward reads them. ``out`` is where to put the levels.
    """
    nodes, (B, T, H, K), G = block.m, block.q.shape, block.k.shape[2]
    n, (Tq, Tk) = level_count(T), level_rows(T)
    levels = out or Levels(block.q.new_empty((n, B, Tq, H, K)), block.k.new_empty((n, B, Tk, G, K)))
    if n:
        tree(nodes, T, start)
        p_start, *strides = starts(start, nodes)
        for x, level, query in ((block.q, levels.q, True), (block.k, levels.k, False)):
            path_carry_kernel[(cdiv(T, BLOCK) * B * x.shape[2],)](
                x, level, nodes, p_start, T, level.shape[2], B, n, nodes.shape[2], *strides,
                **_options("carry", x, start, nodes, query),
            )  # fmt: skip
    return Carried(levels, nodes)


def carry_backward(
    block: Leaves, carried: Carried, d: Levels, dq: Tensor, dk: Tensor, start: Tensor | None = None,
    wanted: Wanted = EVERYTHING, tiles: QueryGradientTiles | None = None,
) -> tuple[Tensor, Tensor, Levels]:  # fmt: skip
    """Gradients of block.q and block.k in their dtypes, undefined where not wanted, and what ``tree.node_gradients``
    reads beside d: D of scale 0.

    Args:
        d: gradients of the levels; rows that do not exist or that no row needs are not read. Overwritten.
        tiles: those of the queries, if they are not in d.
        dq, dk: gradients of level 0: rows of odd blocks of q, rows of even blocks of k that another block follows; the
            other rows are not read.
    """
    nodes, (B, T, H, K), G = carried.nodes, block.q.shape, block.k.shape[2]
    n, n_t, dtype = level_count(T), cdiv(T, UNIT), block.q.dtype
    zero = Levels(dq.new_empty((B, n_t * BLOCK, H, K), dtype=dtype), dk.new_empty((B, n_t * BLOCK, G, K), dtype=dtype))
    out = torch.empty_like(block.q), torch.empty_like(block.k)
    p_start, *strides = starts(start, nodes)
    for x, g, level, z, o, query, read in (
        (block.q, dq, d.q, zero.q, out[0], True, wanted.queries),
        (block.k, dk, d.k, zero.k, out[1], False, wanted.keys),
    ):
        if not read:
            continue
        p_tiles, scale, warps = tiles if tiles is not None and query else (level, 1.0, 0)
        path_carry_bwd_kernel[(cdiv(T, BLOCK) * B * x.shape[2],)](
            g, level, p_tiles, z, o, nodes, p_start, T, level.shape[2], B, n, nodes.shape[2], scale, *strides,
            WARPS=warps, **_options("carry_bwd", x, start, nodes, query),
        )  # fmt: skip
    return *out, zero
