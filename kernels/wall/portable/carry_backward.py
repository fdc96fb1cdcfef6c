r"""Gradients of q, k and the gates from those of the carried queries and keys.

A pair of row t and key j passes all gates between them, and the derivative of its score in each of them is the score
itself. Let the pair meet in a node whose left half holds j and whose right half holds t, with carried operands
:math:`\tilde q_t` and :math:`\tilde k_j` and gradients :math:`d\tilde q_t`, :math:`d\tilde k_j`. The gates between the
cut and t lie in the right half, those between j and the cut in the left one, and so, elementwise,

.. math:: da_l = \sum_{t \ge l} \tilde q_t\, d\tilde q_t \;\;(l \text{ right}), \qquad
          da_l = \sum_{j < l} \tilde k_j\, d\tilde k_j \;\;(l \text{ left}),

summed over the tokens of that half and then over the nodes. Nothing cancels: a gate that is closed gets exactly 0, and
no rounding travels further than the pairs that it belongs to. (The sum of q dq - k dk over all later tokens is the
same on paper; there the rounding of every pair after l would remain.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.channel_gates import (
    add_gates_of,
    gate_spans,
    load_channel_gates,
    meet,
    sum_channel_gates,
    to_nearest,
)
from attnzoo.kernels.common.device import machine, sums_over_loops
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.levels.layout import BLOCK, Leaves, Levels, level_count, tree_block

from .carry import LAUNCH, precision
from .sums import key_row, query_row, sibling_sum, sum_blocks


@triton.jit
def _load_level(p, i_lb, R, row, i_h, o_c, o_n, n, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Rows of a level [n_levels, B, R, H, K]; i_lb: level * B + batch. # [C, BC] float32"""
    return load_tile(p + ((i_lb * R + row) * H + i_h) * K, o_c, o_n, H * K, n, K, BK, True).to(tl.float32)


@triton.jit
def _read(p_start, i_c, s, QUERY: tl.constexpr, C: tl.constexpr, HAS_START: tl.constexpr):
    """Whether pruning leaves block i_c's part of scale s: where it does not, nobody wrote a gradient.

    First keys, of units of 128 rows, never move left: the first row of a node decides for its keys.
    """
    read = s >= 0
    if HAS_START and s > 0:
        j = i_c >> s
        if QUERY:
            read = tl.load(p_start + i_c * C // 128) < (j << s) * C
        else:
            read = tl.load(p_start + ((j + 1) << s) * C // 128) < (i_c + 1) * C
    return read


@launched
@triton.jit(do_not_specialize=["T", "B", "Tq", "Tk", "n_levels"])
def wall_carry_bwd_kernel(
    p_q, p_k, p_a, p_sum, p_ddiag, p_dqb, p_dkb, p_dlq, p_dlk, p_dq, p_dk, p_da, p_part, p_start, T, B, Tq, Tk,
    n_levels, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ab, stride_at, stride_ah,
    stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, stride_yh, stride_zb, stride_zt, stride_zh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, GATE: tl.constexpr, HAS_START: tl.constexpr, NP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq and dk, and with GATE the gates' gradient as far as it comes from their own block; a program per block.

    p_part [n_levels, B, nC, H, K] float32: what each block adds to the gates of its half of each level's nodes.
    """
    G: tl.constexpr = H // REP
    n_c = tl.cdiv(T, C)
    i_bg, i_c = head_and_tile(n_c)
    i_b, i_g = (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64)
    o_c = tl.arange(0, C)
    r, R = (i_c * C).to(tl.int64), T - i_c * C
    p_k += i_b * stride_kb + i_g * stride_kh + r * stride_kt
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        m_t = (o_c < R)[:, None] & (o_n < K)[None, :]
        b_dk = tl.zeros([C, BC], tl.float32)
        for i_r in range(REP):
            i_h = i_g * REP + i_r
            p_qh = p_q + i_b * stride_qb + i_h * stride_qh + r * stride_qt
            p_ah = p_a + i_b * stride_ab + i_h * stride_ah + r * stride_at
            b_a = load_channel_gates(p_ah, o_c, o_n, stride_at, R, K)
            p_d = p_ddiag + ((i_b * n_c + i_c) * H + i_h) * (C * C)
            p_sumh = p_sum + (i_b * n_c * H + i_h) * K
            p_starth = p_start + (i_b * H + i_h) * tl.cdiv(T, 128)
            b_own = tl.load(p_d + o_c * (C + 1), mask=o_c < R, other=0.0)
            p_d += o_c[:, None] * C + o_c[None, :]
            # First the queries, then the keys; and q, k and d(diag) are read where they are used: to spare registers.
            b_dq = b_own[:, None] * load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
            b_da = tl.zeros([C, BC], tl.float32)
            for i in tl.range(6, num_stages=1):  # within the block
                m_to, m_after = gate_spans(o_c, i)
                b_x = tl.exp2(sum_channel_gates(m_after, b_a, NP)) * load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
                b_d = tl.load(p_d, mask=meet(o_c, i) & (o_c < R)[:, None], other=0.0)
                b_d, b_x = to_nearest(b_d, PREC), to_nearest(b_x, PREC)
                b_y = tl.dot(b_d, b_x, input_precision=PREC) * tl.exp2(sum_channel_gates(m_to, b_a, NP))
                b_dq += b_y
                if GATE:
                    b_y *= load_tile(p_qh, o_c, o_n, stride_qt, R, K, BK, True)
                    b_da = add_gates_of(b_da, m_to, b_y, PREC)
            m_to, m_after = gate_spans(o_c, 6)
            b_e = sum_channel_gates(m_to, b_a, NP)
            b_sum = tl.zeros([C, BC], tl.float32)
            for s in range(n_levels + 1):  # between blocks
                here, row = query_row(i_c, s, C)
                if s > 0:
                    b_e += sibling_sum(p_sumh, i_c, s - 1, n_c, H * K, o_n, K, BC, BN, 1)[None, :]
                if here:
                    n = tl.where(_read(p_starth, i_c, s, True, C, HAS_START), R, 0)
                    if s == 0:
                        b_y = _load_level(p_dqb, i_b, T, r, i_h, o_c, o_n, n, H, K, BK)
                    else:
                        b_y = _load_level(p_dlq, (s - 1) * B + i_b, Tq, row, i_h, o_c, o_n, n, H, K, BK)
                    b_y *= tl.exp2(b_e)
                    b_dq += b_y
                    if GATE:
                        b_y *= load_tile(p_qh, o_c, o_n, stride_qt, R, K, BK, True)
                        b_sum += b_y
                        o_p = ((((s - 1) * B + i_b) * n_c + i_c) * H + i_h) * K + o_n
                        tl.store(p_part + o_p, tl.sum(b_y, 0), mask=(o_n < K) & (s > 0))
            p_x = p_dq + i_b * stride_xb + i_h * stride_xh + r * stride_xt
            p_x += o_c[:, None] * stride_xt + o_n[None, :]
            tl.store(p_x, b_dq.to(p_dq.dtype.element_ty), mask=m_t)
            if GATE:
                b_da = add_gates_of(b_da, m_to, b_sum, PREC)
            b_dk += b_own[:, None] * load_tile(p_qh, o_c, o_n, stride_qt, R, K, BK, True)
            for i in tl.range(6, num_stages=1):
                m_to, m_after = gate_spans(o_c, i)
                b_x = tl.exp2(sum_channel_gates(m_to, b_a, NP)) * load_tile(p_qh, o_c, o_n, stride_qt, R, K, BK, True)
                b_d = tl.load(p_d, mask=meet(o_c, i) & (o_c < R)[:, None], other=0.0)
                b_d, b_x = to_nearest(b_d, PREC), to_nearest(b_x, PREC)
                b_z = tl.dot(tl.trans(b_d), b_x, input_precision=PREC) * tl.exp2(sum_channel_gates(m_after, b_a, NP))
                b_dk += b_z
                if GATE:
                    b_z *= load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
                    b_da = add_gates_of(b_da, m_after, b_z, PREC)
            m_to, m_after = gate_spans(o_c, 6)
            b_e = sum_channel_gates(m_after, b_a, NP)
            b_sum = tl.zeros([C, BC], tl.float32)
            for s in range(n_levels + 1):
                here, row = key_row(i_c, s, T, C)
                if s > 0:
                    b_e += sibling_sum(p_sumh, i_c, s - 1, n_c, H * K, o_n, K, BC, BN, 0)[None, :]
                if here:
                    n = tl.where(_read(p_starth, i_c, s, False, C, HAS_START), R, 0)
                    if s == 0:
                        b_z = _load_level(p_dkb, i_b, T, r, i_h, o_c, o_n, n, H, K, BK)
                    else:
                        b_z = _load_level(p_dlk, (s - 1) * B + i_b, Tk, row, i_h, o_c, o_n, n, H, K, BK)
                    b_z *= tl.exp2(b_e)
                    b_dk += b_z
                    if GATE:
                        b_z *= load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
                        b_sum += b_z
                        o_p = ((((s - 1) * B + i_b) * n_c + i_c) * H + i_h) * K + o_n
                        tl.store(p_part + o_p, tl.sum(b_z, 0), mask=(o_n < K) & (s > 0))
            if GATE:
                b_da = add_gates_of(b_da, m_after, b_sum, PREC)
                p_z = p_da + i_b * stride_zb + i_h * stride_zh + r * stride_zt
                tl.store(p_z + o_c[:, None] * stride_zt + o_n[None, :], b_da, mask=m_t)
        p_y = p_dk + i_b * stride_yb + i_g * stride_yh + r * stride_yt
        p_y += o_c[:, None] * stride_yt + o_n[None, :]
        tl.store(p_y, b_dk.to(p_dk.dtype.element_ty), mask=m_t)


@launched
@triton.jit(do_not_specialize=["T", "B", "n_levels"])
def wall_gates_bwd_kernel(p_part, p_da, T, B, n_levels, stride_zb, stride_zt, stride_zh, H: tl.constexpr,
                          K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Adds to the gates' gradient of a block what comes from other blocks of its half of each level's node."""
    n_c = tl.cdiv(T, C)
    i_bh, i_c = head_and_tile(n_c)
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    b = tl.zeros([BK], tl.float32)
    for s in range(1, n_levels + 1):
        query, _ = query_row(i_c, s, C)
        key, _ = key_row(i_c, s, T, C)
        p_l = p_part + ((((s - 1) * B + i_b) * n_c) * H + i_h) * K
        first = (i_c >> s) << s  # the half: queries after the gate, or keys before it
        if query:
            b += sum_blocks(p_l, i_c + 1, tl.minimum(first + (1 << s), n_c), H * K, o_k, K, BK, BN)
        if key:
            b += sum_blocks(p_l, first, i_c, H * K, o_k, K, BK, BN)
    p_z = p_da + i_b * stride_zb + i_h * stride_zh + (i_c * C).to(tl.int64) * stride_zt
    p_z += o_c[:, None] * stride_zt + o_k[None, :]
    m = (i_c * C + o_c < T)[:, None] & (o_k < K)[None, :]
    tl.store(p_z, tl.load(p_z, mask=m, other=0.0) + b[None, :], mask=m)


def carry_backward(
    q: Tensor, k: Tensor, log_diag: Tensor, sums: Tensor, d_block: Leaves, d_levels: Levels,
    out: tuple[Tensor, Tensor, Tensor | None], start: Tensor | None,
) -> None:  # fmt: skip
    """Fill the gradients of q, k and log_diag from those of what ``carry`` made.

    Args:
        sums: m of the block, as ``carry`` left it.
        d_block: its diag is not read above the diagonal; of its q and k the rows of odd and of even blocks are read.
        out: gradients to fill, views with contiguous last dims; that of log_diag is float32, None where not wanted.
        start: [B, H, units] int32, first key of each 128 rows, where there is pruning: what it leaves out of
            ``d_levels`` is not read.
    """
    (B, T, H, K), G, (dq, dk, da) = q.shape, k.shape[2], out
    n_c, n, BK = cdiv(T, BLOCK), level_count(T), tree_block(K)
    part = sums if da is None else sums.new_empty((n, B, n_c, H, K))
    z = sums if da is None else da
    wall_carry_bwd_kernel[(n_c * B * G,)](
        q, k, log_diag, sums, d_block.diag, d_block.q, d_block.k, *d_levels, dq, dk, z, part,
        sums if start is None else start, T, B, d_levels.q.shape[2], d_levels.k.shape[2], n, *q.stride()[:3],
        *k.stride()[:3], *log_diag.stride()[:3], *dq.stride()[:3], *dk.stride()[:3], *z.stride()[:3], H=H, REP=H // G,
        K=K, BK=BK, C=BLOCK, GATE=da is not None, HAS_START=start is not None, **precision(q.dtype),
        **(LAUNCH | sums_over_loops(machine(q.device))),
    )  # fmt: skip
    if da is not None and n:
        wall_gates_bwd_kernel[(n_c * B * H,)](part, da, T, B, n, *da.stride()[:3], H=H, K=K, BK=BK, BN=16, C=BLOCK)
