"""Kernels of the tree of carried queries and keys: the products of its nodes, and their gradients.

The score of query i and key j is ``k_j^T R_{j+1} ... R_i q_i``. Cut the product anywhere between j and i and it is the
dot product of two vectors: the key carried forward to the cut and the query carried back to it. A binary tree over
blocks of 64 tokens chooses the cuts, so that many pairs share one. With 512 tokens, N3 being the product of the 64
factors of block 3 and N23 = N2 N3:

    scale 0     N0   N1   N2   N3   N4   N5   N6   N7
    scale 1       N01       N23       N45       N67

A query of block 7 and a key of block 0 meet in the middle. The key goes from the end of block 0 over block 1 and over
blocks 2 and 3; the query goes from the start of block 7 back over block 6 and over blocks 5 and 4:

    score = (N23^T N1^T k) . (N45 N6 q)        k at the end of its block, q at the start of its block

Each step of a carry is one product with one node; carry.py does them. A node is needed if some query after it reads a
key before it (here N0, N7, N01 and N67 are not); the others are left out.

The forward fills the nodes in one launch. One program multiplies each pair of leaves; of the two programs that fill the
children of a node, the one that finishes last goes on to fill the node. No program waits.

The backward makes the gradients of the nodes in one launch, too. The gradient of a node is a sum over the rows that it
carried, plus what arrives through the node above it. A program takes its node by a ticket, a counter in global memory
that hands out the nodes from the largest to the leaves, makes the sum, waits for the gradient of the node above and
adds its share. There is no deadlock, because a program waits only for one with a smaller ticket, which has started
already and itself waits, if at all, for a still smaller one.

No sum depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.levels.layout import BLOCK, Carried, Leaves, Levels, tree_block, tree_offset, tree_scales

from .inverse import launch, tile_scale

STAGES = {"tree": 2, "carry": 1, "carry_bwd": 2, "node": 3}  # of the pipelined loops, where float16 pieces fit


@triton.jit
def load_node(p, o_r, o_c, K: tl.constexpr):
    """Rows o_r and columns o_c of a matrix."""
    return tl.load(p + o_r[:, None] * K + o_c[None, :], mask=(o_r < K)[:, None] & (o_c < K)[None, :], other=0.0)


@triton.jit
def popcount(x):
    """Set bits of x >= 0."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return (x + (x >> 16)) & 63


@triton.jit
def scale_at(units, s):
    """``layout.tree_offset``: the sum of ceil(units / 2^i) over i < s, in closed form."""
    last = units - 1
    return s + 2 * (last - (last >> s)) - popcount(last & ((1 << s) - 1))


@triton.jit
def first_key_of(p_start, i_t, i_h, stride_sh, REP: tl.constexpr):
    """First key of units of rows i_t, the least over REP heads."""
    first = tl.load(p_start + i_h * REP * stride_sh + i_t)
    for j in range(1, REP):
        first = tl.minimum(first, tl.load(p_start + (i_h * REP + j) * stride_sh + i_t))
    return first


@triton.jit
def _needed(p_start, v, h, T, i_g, stride_sh, REP: tl.constexpr, HAS_START: tl.constexpr):
    """Whether rows after node v of size h read keys before it. First keys never move left: the next row decides."""
    end = (v + 1) * h
    first = 0
    if HAS_START:
        first = first_key_of(p_start, tl.minimum(end, T - 1) // 128, i_g, stride_sh, REP)
    return (end < T) & (first < v * h)


@triton.jit
def _add_product(b, p_x, p_y, plane_x, plane_y, o_k, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
                 TX: tl.constexpr, TY: tl.constexpr, NP: tl.constexpr, NS: tl.constexpr):  # fmt: skip
    """b + x y, each K x K, transposed if TX or TY, in NP pieces a plane apart. # [BK, BK]"""
    for c in tl.range(0, BK, BC, num_stages=NS):
        o_c = c + tl.arange(0, BC)
        b_x = tl.trans(load_node(p_x, o_c, o_k, K)) if TX else load_node(p_x, o_k, o_c, K)
        b_y = tl.trans(load_node(p_y, o_k, o_c, K)) if TY else load_node(p_y, o_c, o_k, K)
        b = tl.dot(b_x, b_y, b)
        if NP == 2:
            b_l = tl.trans(load_node(p_x + plane_x, o_c, o_k, K)) if TX else load_node(p_x + plane_x, o_k, o_c, K)
            b = tl.dot(b_l, b_y, b)
            b_l = tl.trans(load_node(p_y + plane_y, o_k, o_c, K)) if TY else load_node(p_y + plane_y, o_c, o_k, K)
            b = tl.dot(b_x, b_l, b)
    return b


@triton.jit
def _store_pieces(p, plane, b, m, NP: tl.constexpr):
    """b as NP pieces of p's dtype, a plane apart."""
    b_hi = b.to(p.dtype.element_ty)
    tl.store(p, b_hi, mask=m)
    if NP == 2:
        tl.store(p + plane, (b - b_hi.to(tl.float32)).to(p.dtype.element_ty), mask=m)


@launched
@triton.jit(do_not_specialize=["T", "n", "B", "N", "stride_sb", "stride_sh"])
def path_tree_kernel(
    p_node, p_done, p_start, T, n, B, N, stride_sb, stride_sh,
    G: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, NS: tl.constexpr,
    HAS_START: tl.constexpr,
):  # fmt: skip
    """Nodes of scales 1 .. n - 1 of a tree [2, B, N, G, K, K] from its leaves, those that some row needs; one program
    per pair of leaves.

    A needed node is full, and its children are needed too. p_done: [B, N, G] zeros, filled children of each node.
    """
    i_u, n_u = tl.program_id(0) // G, tl.cdiv(T, 128)
    i_g, i_b = tl.program_id(0) % G, tl.program_id(1).to(tl.int64)
    u = n_u // 2 + tl.where(i_u % 2 == 1, -1 - i_u // 2, i_u // 2)  # the last pairs belong to few nodes
    o_k = tl.arange(0, BK)
    m_k = (o_k < K)[:, None] & (o_k < K)[None, :]
    o_n = o_k[:, None] * K + o_k[None, :]
    plane = B * N.to(tl.int64) * (G * K * K)
    p_node += (i_b * N * G + i_g) * (K * K)
    p_done += i_b * N * G + i_g
    p_start += i_b * stride_sb
    at, size, s = 0, tl.cdiv(T, 64), 1  # where the children begin, how many there are
    go = True
    while go:
        go = _needed(p_start, u, 64 << s, T, i_g, stride_sh, REP, HAS_START)
        if go:
            p_l = p_node + (at + 2 * u).to(tl.int64) * (G * K * K)
            b = _add_product(tl.zeros([BK, BK], tl.float32), p_l, p_l + G * K * K, plane, plane, o_k, K, BK, BC, False,
                             False, 2, NS)  # fmt: skip
            _store_pieces(p_node + (at + size + u).to(tl.int64) * (G * K * K) + o_n, plane, b, m_k, 2)
            at, size, s, u = at + size, (size + 1) // 2, s + 1, u // 2
            go = s < n
            if go:
                tl.debug_barrier()  # all of the node is stored
                go = tl.atomic_add(p_done + (at + size + u) * G, 1, sem="acq_rel") == 1


@triton.jit
def _add_outer(b, p_x, p_y, o_r, o_k, R, stride, K: tl.constexpr, PREC: tl.constexpr):
    """b + x^T y over a tile of the R rows. # [BK, BK]"""
    o_x = o_r.to(tl.int64)[:, None] * stride + o_k[None, :]
    m = (o_r < R)[:, None] & (o_k < K)[None, :]
    return tl.dot(tl.trans(tl.load(p_x + o_x, mask=m, other=0.0)), tl.load(p_y + o_x, mask=m, other=0.0), b,
                  input_precision=PREC)  # fmt: skip


@launched
@triton.jit(do_not_specialize=["T", "Tq", "Tk", "B", "n", "N", "stride_sb", "stride_sh"])
def path_node_bwd_kernel(
    p_xq, p_xk, p_zq, p_zk, p_lq, p_lk, p_dq, p_dk, p_node, p_dm, p_dn, p_scale, p_start, T, Tq, Tk, B, n, N, stride_sb,
    stride_sh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    NS: tl.constexpr, HAS_START: tl.constexpr, NP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of the leaves [B, units, G, K, K], zeros where no row needs one, by way of those of the other nodes.

    A left child carries the queries of its sibling, a right child the keys of its sibling: each gives the sum of D x^T
    over those rows. D is what path_carry_bwd_kernel left in p_dq, p_dk and, for scale 0, in p_zq, p_zk.
    p_dn: the nodes above the leaves, [NP, B, N - units, G, K, K] in NP pieces, divided by a power of two.
    p_scale [B, (N - units) G + 1], zeros before the call: these powers, whose bits are 0 until the gradient is there,
    and the next ticket of the batch.
    """
    REP: tl.constexpr = H // G
    i_b = tl.program_id(1).to(tl.int64)
    units = tl.cdiv(T, 64)
    n_s = (N - units) * G
    p_scale += i_b * (n_s + 1)
    ticket = tl.atomic_add(p_scale + n_s, 1, sem="relaxed")
    i_g, i_n = ticket % G, N - 1 - ticket // G
    s, v = 0, i_n
    for t in range(n):
        up = (v >= units) & (s == t)
        s, v = tl.where(up, s + 1, s), tl.where(up, v - units, v)
        units = (units + 1) // 2
    units = tl.cdiv(T, 64)
    h = 64 << s
    u = (v // 2).to(tl.int64)
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    m_k = (o_k < K)[:, None] & (o_k < K)[None, :]
    o_n = o_k[:, None] * K + o_k[None, :]
    b = tl.zeros([BK, BK], tl.float32)
    p_start += i_b * stride_sb
    p_scale += i_g
    p_dn += (i_b * (N - units) * G + i_g) * (K * K)
    p_dm += ((i_b * units + i_n) * G + i_g) * (K * K) + o_n
    plane = B * (N - units).to(tl.int64) * (G * K * K)
    if _needed(p_start, v, h, T, i_g, stride_sh, REP, HAS_START):
        if v % 2 == 0:  # queries after the node, whose first key lies before it
            mid = (v + 1) * h
            n_r = tl.minimum(h, T - mid)
            if s == 0:
                p_x = p_xq + (i_b * T + mid) * (H * K)
                p_d = p_zq + (i_b * (tl.cdiv(T, 128) * 64) + u * 64) * (H * K)
            else:
                row = (((s - 1) * B + i_b) * Tq + u * h) * (H * K)
                p_x, p_d = p_lq + row, p_dq + row
            for i_h in range(i_g * REP, i_g * REP + REP):
                n_h = n_r
                if HAS_START:
                    p_s, n_u, n_h = p_start + i_h * stride_sh + mid // 128, tl.cdiv(n_r, 128), 0
                    for i in range(0, n_u, 128):
                        o_u = i + tl.arange(0, 128)
                        b_s = tl.load(p_s + o_u, mask=o_u < n_u, other=T)
                        n_h += tl.sum((b_s < v * h).to(tl.int32)) * 128
                    n_h = tl.minimum(n_h, n_r)
                for r in tl.range(0, n_h, BR, num_stages=NS):
                    b = _add_outer(b, p_d + i_h * K, p_x + i_h * K, r + o_r, o_k, n_h, H * K, K, PREC)
        else:  # keys before the node, from the first one that a row after it reads
            mid, begin = v * h, 0
            if s == 0:
                p_x = p_xk + (i_b * T + mid - h) * (G * K)
                p_d = p_zk + (i_b * (tl.cdiv(T, 128) * 64) + u * 64) * (G * K)
            else:
                row = (((s - 1) * B + i_b) * Tk + u * h) * (G * K)
                p_x, p_d = p_lk + row, p_dk + row
            if HAS_START:
                begin = tl.maximum(first_key_of(p_start, (mid + h) // 128, i_g, stride_sh, REP) - mid + h, 0) // BR * BR
            for r in tl.range(begin, h, BR, num_stages=NS):
                b = _add_outer(b, p_x + i_g * K, p_d + i_g * K, r + o_r, o_k, h, G * K, K, PREC)
        if (s + 1 < n) & _needed(p_start, v // 2, 2 * h, T, i_g, stride_sh, REP, HAS_START):
            above = scale_at(units, s + 1) + v // 2 - units
            bits = tl.atomic_add(p_scale + above * G, 0, sem="acquire")
            while bits == 0:
                bits = tl.atomic_add(p_scale + above * G, 0, sem="acquire")
            b_s = bits.to(tl.float32, bitcast=True)
            b *= 1.0 / b_s
            p_a = p_dn + above.to(tl.int64) * (G * K * K)
            p_s = p_node + ((i_b * N + (i_n - v + (v ^ 1))) * G + i_g) * (K * K)  # the sibling
            plane_s = B * N.to(tl.int64) * (G * K * K)
            if v % 2 == 1:  # left^T d
                b = _add_product(b, p_s, p_a, plane_s, plane, o_k, K, BK, BC, True, False, NP, NS)
            else:  # d right^T
                b = _add_product(b, p_a, p_s, plane, plane_s, o_k, K, BK, BC, False, True, NP, NS)
            b *= b_s
        if s == 0:
            tl.store(p_dm, b.to(p_dm.dtype.element_ty), mask=m_k)
        else:
            b_s, b_inv = tile_scale(b, 1e-25)  # so that a child may multiply its own share by 1 / b_s
            _store_pieces(p_dn + (i_n - units).to(tl.int64) * (G * K * K) + o_n, plane, b * b_inv, m_k, NP)
            tl.debug_barrier()  # all of it is stored
            tl.atomic_xchg(p_scale + (i_n - units) * G, b_s.to(tl.int32, bitcast=True), sem="release")
    elif s == 0:
        tl.store(p_dm, b.to(p_dm.dtype.element_ty), mask=m_k)


def node_options(part: str, K: int, fits: bool) -> dict[str, int | None]:
    """Tile width and launch options of a kernel.

    Args:
        fits: whether its operands are those that it was tuned for.
    """
    tuned = {"NS": STAGES[part]} if fits else {"NS": 1, "maxnreg": None}
    return {"BK": tree_block(K), **launch(part, K), **tuned}


def starts(start: Tensor | None, other: Tensor) -> tuple[Tensor, int, int]:
    """First keys and their strides, for a kernel that does not read them if there are none."""
    return (other, 0, 0) if start is None else (start, start.stride(0), start.stride(1))


def new_tree(q: Tensor, units: int, G: int) -> Tensor:
    """Room for the products of all nodes over some units, in two float16 pieces: [2, B, total, G, K, K].

    Two pieces hold 22 bits (with one, errors would grow with the square root of T); most readers need only the first.
    """
    shape = (2, q.shape[0], tree_offset(units, tree_scales(units)), G, q.shape[3], q.shape[3])
    return q.new_empty(shape, dtype=torch.float16)


def tree(nodes: Tensor, T: int, start: Tensor | None) -> None:
    """Fill a tree [2, B, total, G, K, K] over T tokens in place from its leaves."""
    _, B, N, G, K, _ = nodes.shape
    n, units = tree_scales(cdiv(T, BLOCK)), cdiv(T, BLOCK)
    if n == 1:
        return
    done = torch.zeros((B, N, G), dtype=torch.int32, device=nodes.device)
    p_start, *strides = starts(start, nodes)
    path_tree_kernel[(cdiv(units, 2) * G, B)](
        nodes, done, p_start, T, n, B, N, *strides, G=G, REP=1 if start is None else start.shape[1] // G, K=K, BC=32,
        HAS_START=start is not None, **node_options("tree", K, True),
    )  # fmt: skip


def node_gradients(block: Leaves, carried: Carried, zero: Levels, d: Levels, T: int, start: Tensor | None) -> Tensor:
    """Gradients of the leaves, [B, ceil(T / 64), G, K, K].

    Args:
        zero, d: what ``carry_backward`` left of D, for scale 0 and for the scales from 1 on.
    """
    nodes, (B, _, H, K), G = carried.nodes, block.q.shape, block.k.shape[2]
    N, units, bf16 = nodes.shape[2], cdiv(T, BLOCK), block.q.dtype == torch.bfloat16
    NP = 1 if bf16 else 2
    leaves = nodes.new_empty((B, units, G, K, K), dtype=torch.bfloat16 if bf16 else torch.float32)
    above = nodes.new_empty((NP, B, N - units, G, K, K))
    scale = torch.zeros((B, (N - units) * G + 1), dtype=torch.int32, device=nodes.device)
    p_start, *strides = starts(start, nodes)
    path_node_bwd_kernel[(N * G, B)](
        block.q, block.k, zero.q, zero.k, carried.levels.q, carried.levels.k, d.q, d.k, nodes, leaves, above, scale,
        p_start, T, d.q.shape[2], d.k.shape[2], B, tree_scales(units), N, *strides, H=H, G=G, K=K, BR=BLOCK,
        BC=32 if K <= 64 else 64, HAS_START=start is not None, NP=NP, PREC="tf32x3", **node_options("node", K, bf16),
    )  # fmt: skip
    return leaves
