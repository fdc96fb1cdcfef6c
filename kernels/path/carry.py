"""Kernels of the tree of carries: node products, levels, and their derivatives (see transitions.py).

One program carries 128 tokens of a head through all levels; a level costs one K x K product where the bit of its unit
says so. On the way back it holds the running gradient D and leaves it, at each level, in the place of that level's own
gradient: a node's gradient is then the sum of D x^T over the rows that it carried, and no sum crosses programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.fox.fwd import head_block

from .blocks import _mm, _row_scale, launch
from .transitions import (
    BLOCK,
    UNIT,
    Block,
    Carried,
    Levels,
    level_count,
    level_rows,
    tree_nodes,
    tree_offset,
    tree_scales,
)


@triton.jit
def _node(p, o_k, K: tl.constexpr, BK: tl.constexpr):
    """One matrix. # [BK, BK]"""
    p += o_k[:, None] * K + o_k[None, :]
    return tl.load(p, mask=(o_k[:, None] < K) & (o_k[None, :] < K), other=0.0)


@triton.jit
def _mm_node(b_x, p, plane, o_k, TRANS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NP: tl.constexpr,
             DT: tl.constexpr):  # fmt: skip
    """b_x N or b_x N^T, the node at p in two pieces, a plane apart; with NP = 1 the first one does. # float32"""
    b_n = _node(p, o_k, K, BK)
    b = _mm(b_x, tl.trans(b_n) if TRANS else b_n, tl.zeros([b_x.shape[0], BK], tl.float32), NP, 1, DT)
    if NP == 2:
        b_n = _node(p + plane, o_k, K, BK)
        b = _mm(b_x, tl.trans(b_n) if TRANS else b_n, b, 1, 1, DT)
    return b


@triton.jit
def _part_of(p, o_r, o_c, K: tl.constexpr):
    """Rows o_r and columns o_c of a matrix."""
    return tl.load(p + o_r[:, None] * K + o_c[None, :], mask=(o_r < K)[:, None] & (o_c < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["n", "B", "N"])
def tree_kernel(p_child, p_node, n, B, N, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
                DT: tl.constexpr):  # fmt: skip
    """Nodes [2, B, ceil(n / 2), G, K, K] from their n children; one program per BC columns."""
    i_g, i_u, i_b = tl.program_id(0) % G, tl.program_id(0) // G, tl.program_id(1).to(tl.int64)
    o_k, o_c = tl.arange(0, BK), tl.program_id(2) * BC + tl.arange(0, BC)
    plane = B * N.to(tl.int64) * (G * K * K)
    p_child += ((i_b * N + 2 * i_u) * G + i_g) * (K * K)
    p_right = p_child + G * K * K
    p_node += ((i_b * N + i_u) * G + i_g) * (K * K) + o_k[:, None] * K + o_c[None, :]
    m_k = (o_k < K)[:, None] & (o_c < K)[None, :]
    if 2 * i_u + 1 < n:
        b_l, b_r = _node(p_child, o_k, K, BK), _part_of(p_right, o_k, o_c, K)
        b = _mm(b_l, b_r, tl.zeros([BK, BC], tl.float32), 1, 1, DT)
        b = _mm(_node(p_child + plane, o_k, K, BK), b_r, b, 1, 1, DT)
        b = _mm(b_l, _part_of(p_right + plane, o_k, o_c, K), b, 1, 1, DT)
        b_hi = b.to(DT)
        tl.store(p_node, b_hi, mask=m_k)
        tl.store(p_node + plane, (b - b_hi.to(tl.float32)).to(DT), mask=m_k)
    else:
        tl.store(p_node, _part_of(p_child, o_k, o_c, K), mask=m_k)
        tl.store(p_node + plane, _part_of(p_child + plane, o_k, o_c, K), mask=m_k)


@triton.jit
def _tile_scale(x):
    """A power of two near the largest entry of x, and its inverse."""
    m = tl.max(tl.max(tl.abs(x), 1), 0)
    s = (m.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    s = tl.where((s > 1e-37) & (s < 1e37), s, 1.0)
    return s, 1.0 / s


@triton.jit(do_not_specialize=["n", "B", "N"])
def tree_bwd_kernel(p_child, p_dchild, p_dnode, n, B, N, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                    BC: tl.constexpr, NP: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Adds the gradient that each child gets through its parent, in place; one program per BC columns."""
    i_g, i_v, i_b = tl.program_id(0) % G, tl.program_id(0) // G, tl.program_id(1).to(tl.int64)
    o_k, o_c = tl.arange(0, BK), tl.program_id(2) * BC + tl.arange(0, BC)
    plane = B * N.to(tl.int64) * (G * K * K)
    p_dnode += ((i_b * N + i_v // 2) * G + i_g) * (K * K)
    p_s = p_child + ((i_b * N + (i_v ^ 1)) * G + i_g) * (K * K)  # the sibling
    zeros = tl.zeros([BK, BC], tl.float32)
    if i_v % 2 == 1:  # dright = left^T d
        b_d = _part_of(p_dnode, o_k, o_c, K).to(tl.float32)
        s, inv = _tile_scale(b_d)
        b = _mm(tl.trans(_node(p_s, o_k, K, BK)), b_d * inv, zeros, 1, NP, DT)
        if NP == 2:
            b = _mm(tl.trans(_node(p_s + plane, o_k, K, BK)), b_d * inv, b, 1, 1, DT)
        b *= s
    elif i_v + 1 < n:  # dleft = d right^T
        b_d = _node(p_dnode, o_k, K, BK).to(tl.float32)
        s, inv = _tile_scale(b_d)
        b = _mm(b_d * inv, tl.trans(_part_of(p_s, o_c, o_k, K)), zeros, NP, 1, DT)
        if NP == 2:
            b = _mm(b_d * inv, tl.trans(_part_of(p_s + plane, o_c, o_k, K)), b, 1, 1, DT)
        b *= s
    else:
        b = _part_of(p_dnode, o_k, o_c, K).to(tl.float32)
    p_d = p_dchild + ((i_b * N + i_v) * G + i_g) * (K * K) + o_k[:, None] * K + o_c[None, :]
    m_k = (o_k < K)[:, None] & (o_c < K)[None, :]
    b += tl.load(p_d, mask=m_k, other=0.0).to(tl.float32)
    tl.store(p_d, b.to(p_dchild.dtype.element_ty), mask=m_k)


@triton.jit
def _first_row(p_start, i_t, i_h, stride_sh, QUERY: tl.constexpr, REP: tl.constexpr):
    """First key of a unit of rows, for a query head or for all those of a key head."""
    if QUERY:
        first = tl.load(p_start + i_h * stride_sh + i_t)
    else:
        first = tl.load(p_start + i_h * REP * stride_sh + i_t)
        for j in range(1, REP):
            first = tl.minimum(first, tl.load(p_start + (i_h * REP + j) * stride_sh + i_t))
    return first


@triton.jit
def _part(p_start, i_t, i_h, u, h, T, stride_sh, QUERY: tl.constexpr, REP: tl.constexpr, HAS_START: tl.constexpr):
    """Which tokens of a unit of 128, in node u of size h, take part in the level: those from the returned one on.

    Pruning drops queries whose first key is past the left sibling, and keys before the first key of all rows of the
    right sibling; first keys never move left, so its first row decides.
    """
    first = i_t * 128
    act = u % 2 == 1 if QUERY else (u % 2 == 0) & ((u + 1) * h < T)
    begin = tl.where(act, first, first + 128)
    if HAS_START:
        row = i_t if QUERY else tl.minimum((u + 1) * h, T - 1) // 128
        key = _first_row(p_start, row, i_h, stride_sh, QUERY, REP)
        begin = tl.maximum(begin, tl.where(key < u * h, first, first + 128) if QUERY else key)
    return begin


@triton.jit(do_not_specialize=["T", "Tr", "B", "n", "N", "stride_sb", "stride_sh"])
def carry_kernel(
    p_x, p_level, p_node, p_start, T, Tr, B, n, N, stride_sb, stride_sh,
    H: tl.constexpr, G: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, QUERY: tl.constexpr,
    HAS_START: tl.constexpr, NP: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Packed rows of the levels 1 .. n [n, B, Tr, H, K] from x [B, T, H, K] at the ends of its blocks."""
    BT: tl.constexpr = 128
    n_t = tl.cdiv(T, BT)
    i_t, i_bh = tl.program_id(0) % n_t, tl.program_id(0) // n_t
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    first = i_t * BT
    m_t = (first + o_t < T)[:, None] & (o_k < K)[None, :]
    o_x = o_t[:, None] * (H * K) + o_k[None, :]
    b_x = tl.load(p_x + ((i_b * T + first) * H + i_h) * K + o_x, mask=m_t, other=0.0).to(tl.float32)  # [BT, BK]
    b_s, b_inv = _row_scale(b_x)
    b_x = b_x * b_inv[:, None]
    p_node += (i_b * N * G + i_h // (H // G)) * (K * K)
    p_start += i_b * stride_sb
    plane = B * N.to(tl.int64) * (G * K * K)
    if first + 64 < T:  # to the ends of the unit: its second block's queries, its first block's keys
        p_n = p_node + (2 * i_t + 1 - QUERY).to(tl.int64) * (G * K * K)
        b_y = _mm_node(b_x, p_n, plane, o_k, QUERY, K, BK, NP, DT)
        b_x = tl.where(((o_t >= 64) == QUERY)[:, None], b_y, b_x)
    units = tl.cdiv(T, 64)
    for s in range(1, n + 1):
        u, h = i_t >> (s - 1), 64 << s
        p_node += units.to(tl.int64) * (G * K * K)
        units = (units + 1) // 2
        if _part(p_start, i_t, i_h, u, h, T, stride_sh, QUERY, REP, HAS_START) < first + BT:
            row = first - (u // 2 + QUERY) * h
            p = p_level + ((((s - 1) * B + i_b) * Tr + row) * H + i_h) * K + o_x
            tl.store(p, (b_x * b_s[:, None]).to(p_level.dtype.element_ty), mask=m_t)
            if s < n:
                p_n = p_node + (u ^ 1).to(tl.int64) * (G * K * K)
                b_x = _mm_node(b_x, p_n, plane, o_k, QUERY, K, BK, NP, DT)


@triton.jit
def _mm_node_back(b_d, p, plane, o_k, TRANS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NP: tl.constexpr,
                  DT: tl.constexpr):  # fmt: skip
    """_mm_node of gradients, their rows brought near 1 first. # float32"""
    b_s, b_inv = _row_scale(b_d)
    return _mm_node(b_d * b_inv[:, None], p, plane, o_k, TRANS, K, BK, NP, DT) * b_s[:, None]


@triton.jit(do_not_specialize=["T", "Tr", "B", "n", "N", "stride_sb", "stride_sh"])
def carry_bwd_kernel(
    p_d, p_level, p_zero, p_out, p_node, p_start, T, Tr, B, n, N, stride_sb, stride_sh,
    H: tl.constexpr, G: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, QUERY: tl.constexpr,
    HAS_START: tl.constexpr, NP: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradient [B, T, H, K] of x, from those of the levels and of level 0 (p_d [B, T, H, K]).

    The running gradient D, that of x at the next scale, replaces a level's own; level 0's goes to p_zero, packed.
    """
    BT: tl.constexpr = 128
    n_t = tl.cdiv(T, BT)
    i_t, i_bh = tl.program_id(0) % n_t, tl.program_id(0) // n_t
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    first = i_t * BT
    m_t = (first + o_t < T)[:, None] & (o_k < K)[None, :]
    o_x = o_t[:, None] * (H * K) + o_k[None, :]
    p_node += (i_b * N * G + i_h // (H // G)) * (K * K)
    p_start += i_b * stride_sb
    plane = B * N.to(tl.int64) * (G * K * K)
    b_d = tl.zeros([BT, BK], tl.float32)
    units = tl.cdiv(T, 64)
    at = 0  # nodes before those of scale s
    for s in range(n):
        at += (units + (1 << s) - 1) >> s
    for j in range(n):
        s = n - j
        u, h = i_t >> (s - 1), 64 << s
        begin = _part(p_start, i_t, i_h, u, h, T, stride_sh, QUERY, REP, HAS_START)
        if begin < first + BT:
            m_p = m_t
            if HAS_START:
                m_p = m_t & (first + o_t >= begin)[:, None]
            row = first - (u // 2 + QUERY) * h
            p = p_level + ((((s - 1) * B + i_b) * Tr + row) * H + i_h) * K + o_x
            b_g = tl.load(p, mask=m_p, other=0.0).to(tl.float32)
            if s < n:
                tl.store(p, b_d.to(p_level.dtype.element_ty), mask=m_t)
                p_n = p_node + (at + (u ^ 1)).to(tl.int64) * (G * K * K)
                b_d = _mm_node_back(b_d, p_n, plane, o_k, not QUERY, K, BK, NP, DT)
            b_d += b_g
        at -= (units + (1 << (s - 1)) - 1) >> (s - 1)
    p = ((i_b * T + first) * H + i_h) * K + o_x
    if first + 64 < T:
        m_h = ((o_t >= 64) == QUERY)[:, None]
        b_g = tl.load(p_d + p, mask=m_t & m_h, other=0.0).to(tl.float32)
        p_z = p_zero + ((i_b * (n_t * 64) + i_t * 64 - QUERY * 64) * H + i_h) * K + o_x
        tl.store(p_z, b_d.to(p_zero.dtype.element_ty), mask=m_t & m_h)
        p_n = p_node + (2 * i_t + 1 - QUERY).to(tl.int64) * (G * K * K)
        b_y = _mm_node_back(b_d, p_n, plane, o_k, not QUERY, K, BK, NP, DT)
        b_d = tl.where(m_h, b_y + b_g, b_d)
    tl.store(p_out + p, b_d.to(p_out.dtype.element_ty), mask=m_t)


@triton.jit
def _add_outer(b, p_x, p_y, m, PREC: tl.constexpr):
    """b + x^T y over a tile of rows. # [BK, BK]"""
    b_x, b_y = tl.load(p_x, mask=m, other=0.0), tl.load(p_y, mask=m, other=0.0)
    return tl.dot(tl.trans(b_x), b_y, b, input_precision=PREC)


@triton.jit(do_not_specialize=["T", "Tq", "Tk", "B", "n", "N", "stride_sb", "stride_sh"])
def node_bwd_kernel(
    p_xq, p_xk, p_zq, p_zk, p_lq, p_lk, p_dq, p_dk, p_out, p_start, T, Tq, Tk, B, n, N, stride_sb,
    stride_sh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, HAS_START: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of the nodes of scales 0 .. n - 1, [B, nodes, G, K, K]: sums of D x^T over the rows they carried.

    A left child carries the queries of its sibling, a right child the keys of its sibling. D is what carry_bwd_kernel
    left in p_dq, p_dk and, for scale 0, in p_zq, p_zk.
    """
    REP: tl.constexpr = H // G
    i_b, i_g = tl.program_id(1).to(tl.int64), tl.program_id(0) % G
    i_n = tl.num_programs(0) // G - 1 - tl.program_id(0) // G  # the largest nodes first
    s, v = 0, i_n
    units = tl.cdiv(T, 64)
    for t in range(n):
        up = (v >= units) & (s == t)
        s, v = tl.where(up, s + 1, s), tl.where(up, v - units, v)
        units = (units + 1) // 2
    h = 64 << s
    u = (v // 2).to(tl.int64)
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    m_k = (o_k < K)[None, :]
    b = tl.zeros([BK, BK], tl.float32)
    mid = (v // 2 * 2 + 1) * h  # first token of the right child
    p_start += i_b * stride_sb
    if v % 2 == 0:  # queries from mid on
        n_r = tl.minimum(h, T - mid)
        if s == 0:
            p_x, p_d = p_xq + (i_b * T + mid) * (H * K), p_zq + (i_b * (tl.cdiv(T, 128) * 64) + u * 64) * (H * K)
        else:
            row = (((s - 1) * B + i_b) * Tq + u * h) * (H * K)
            p_x, p_d = p_lq + row, p_dq + row
        for i_h in range(i_g * REP, i_g * REP + REP):
            n_h = n_r
            if HAS_START and s > 0:  # rows whose first key lies before mid
                n_h = 0
                for i in range(tl.cdiv(n_r, 128)):
                    near = tl.load(p_start + i_h * stride_sh + mid // 128 + i) < mid
                    n_h = tl.where(near, tl.minimum(i * 128 + 128, n_r), n_h)
            for r in range(0, n_h, BR):
                o_x = ((r + o_r).to(tl.int64) * H + i_h)[:, None] * K + o_k[None, :]
                b = _add_outer(b, p_d + o_x, p_x + o_x, (r + o_r < n_h)[:, None] & m_k, PREC)
    elif mid < T:  # keys before mid
        begin = 0
        if s == 0:
            p_x, p_d = p_xk + (i_b * T + mid - h) * (G * K), p_zk + (i_b * (tl.cdiv(T, 128) * 64) + u * 64) * (G * K)
        else:
            row = (((s - 1) * B + i_b) * Tk + u * h) * (G * K)
            p_x, p_d = p_lk + row, p_dk + row
            if HAS_START:
                begin = tl.maximum(_first_row(p_start, mid // 128, i_g, stride_sh, False, REP) - mid + h, 0) // BR * BR
        for r in range(begin, h, BR):
            o_x = ((r + o_r).to(tl.int64) * G + i_g)[:, None] * K + o_k[None, :]
            b = _add_outer(b, p_x + o_x, p_d + o_x, m_k, PREC)
    p_out += ((i_b * N + i_n) * G + i_g) * (K * K)
    tl.store(p_out + o_k[:, None] * K + o_k[None, :], b.to(p_out.dtype.element_ty), mask=(o_k < K)[:, None] & m_k)


def _tree(nodes: Tensor, units: int) -> None:
    """Fill a tree [2, B, total, G, K, K] in place from its first ``units`` nodes."""
    _, B, N, G, K, _ = nodes.shape
    for s in range(tree_scales(units) - 1):
        at, n = tree_offset(units, s), tree_nodes(units, s)
        tree_kernel[(triton.cdiv(n, 2) * G, B, triton.cdiv(K, 64))](
            nodes[:, :, at:], nodes[:, :, at + n :], n, B, N, G=G, K=K, BK=head_block(K), BC=min(64, head_block(K)),
            DT=tl.float16, **launch("tree", K),
        )  # fmt: skip


def _tree_backward(nodes: Tensor, dnodes: Tensor, units: int) -> None:
    """Add to each node's gradient, [B, total, G, K, K], what comes from above it."""
    _, B, N, G, K, _ = nodes.shape
    for s in reversed(range(tree_scales(units) - 1)):
        at, n = tree_offset(units, s), tree_nodes(units, s)
        tree_bwd_kernel[(n * G, B, triton.cdiv(K, 64))](
            nodes[:, :, at:], dnodes[:, at:], dnodes[:, at + n :], n, B, N, G=G, K=K, BK=head_block(K),
            BC=min(64, head_block(K)), NP=1 if dnodes.dtype == torch.bfloat16 else 2, DT=tl.float16,
            **launch("tree", K),
        )  # fmt: skip


def _options(x: Tensor, start: Tensor | None, nodes: Tensor, query: bool) -> dict[str, object]:
    """What carry_kernel and carry_bwd_kernel are compiled for."""
    H, K = x.shape[2:]
    G = nodes.shape[3]
    return {
        "H": H, "G": G, "REP": 1 if query or start is None else start.shape[1] // G, "K": K, "BK": head_block(K),
        "QUERY": query, "HAS_START": start is not None, "NP": 1 if x.dtype == torch.bfloat16 else 2, "DT": tl.float16,
        **launch("carry", K),
    }  # fmt: skip


def _starts(start: Tensor | None) -> tuple[int, int]:
    return (0, 0) if start is None else (start.stride(0), start.stride(1))


def carry(block: Block, start: Tensor | None = None) -> Carried:
    """As ``transitions.carry``, of a Block from ``blocks.block_level``; its tree is filled here.

    With ``start`` (int32, last dim contiguous) the carries that no row needs are not computed.
    """
    nodes, (B, T, H, K), G = block.m, block.q.shape, block.k.shape[2]
    n, (Tq, Tk) = level_count(T), level_rows(T)
    levels = Levels(block.q.new_empty((n, B, Tq, H, K)), block.k.new_empty((n, B, Tk, G, K)))
    if n:
        _tree(nodes, triton.cdiv(T, BLOCK))
        for x, level, query in ((block.q, levels.q, True), (block.k, levels.k, False)):
            carry_kernel[(triton.cdiv(T, UNIT) * B * x.shape[2],)](
                x, level, nodes, nodes if start is None else start, T, level.shape[2], B, n, nodes.shape[2],
                *_starts(start), **_options(x, start, nodes, query),
            )  # fmt: skip
    return Carried(levels, nodes)


def carry_backward(
    block: Block, carried: Carried, d: Levels, dq: Tensor, dk: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``transitions.carry_backward``: gradients of block.q and block.k in their dtypes, and of block.m
    ([B, total, G, K, K], the first ceil(T / 64) count). d is overwritten."""
    nodes, (B, T, H, K), G = carried.nodes, block.q.shape, block.k.shape[2]
    n, n_t, units, dtype = level_count(T), triton.cdiv(T, UNIT), triton.cdiv(T, BLOCK), block.q.dtype
    zero = Levels(dq.new_empty((B, n_t * BLOCK, H, K), dtype=dtype), dk.new_empty((B, n_t * BLOCK, G, K), dtype=dtype))
    out = torch.empty_like(block.q), torch.empty_like(block.k)
    for x, g, level, z, o, query in (
        (block.q, dq, d.q, zero.q, out[0], True),
        (block.k, dk, d.k, zero.k, out[1], False),
    ):
        carry_bwd_kernel[(n_t * B * x.shape[2],)](
            g, level, z, o, nodes, nodes if start is None else start, T, level.shape[2], B, n, nodes.shape[2],
            *_starts(start), **_options(x, start, nodes, query),
        )  # fmt: skip
    dnodes = nodes.new_empty(nodes.shape[1:], dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    node_bwd_kernel[(nodes.shape[2] * G, B)](
        block.q, block.k, zero.q, zero.k, carried.levels.q, carried.levels.k, d.q, d.k, dnodes,
        nodes if start is None else start, T, d.q.shape[2], d.k.shape[2], B, tree_scales(units),
        nodes.shape[2], *_starts(start), H=H, G=G, K=K, BK=head_block(K), BR=BLOCK,
        HAS_START=start is not None, PREC="tf32x3", **launch("node", K),
    )  # fmt: skip
    _tree_backward(nodes, dnodes, units)
    return out[0], out[1], dnodes
