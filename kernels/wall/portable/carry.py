r"""Kernels that carry queries and keys by the channels' decays, so that every score is a plain dot product.

The score of row t and key j is :math:`\sum_c q_{tc} k_{jc} \exp(a_{j+1,c} + \cdots + a_{tc})`. Cut the sum anywhere
between them: the query takes the decay from the cut to t, the key the decay from j to the cut. Both are at most 1,
whatever the gates are. The cuts are those of PaTH's tree (``levels/layout.py``), where each of them serves a whole
range of rows and a whole range of keys; there the carries are products of matrices, here they are elementwise, and
each is made from q or k in one step. Below the leaves the tree goes on: two tokens of a block of 64 meet in groups of
32, 16, ..., 1 tokens, each size with one product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.channel_gates import gate_spans, load_channel_gates, meet, sum_channel_gates, to_nearest
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, dot_precision
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.levels.layout import BLOCK, Leaves, Levels, level_count, level_rows, tree_block

from .sums import key_row, query_row, sibling_sum

# Channels and blocks at a time, and launch options, of the kernels of the carries.
LAUNCH = {"BC": 64, "BN": 16, "num_warps": 4, "num_stages": 1}


@launched
@triton.jit(do_not_specialize=["T"])
def wall_sums_kernel(p_a, p_sum, T, stride_ab, stride_at, stride_ah, H: tl.constexpr, K: tl.constexpr,
                     BK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Log2 gates of each block added up, [B, nC, H, K] float32."""
    n_c = tl.cdiv(T, C)
    i_bh, i_c = head_and_tile(n_c)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    p_a += i_b * stride_ab + i_h.to(tl.int64) * stride_ah + (i_c * C).to(tl.int64) * stride_at
    b_a = load_channel_gates(p_a, o_c, o_k, stride_at, T - i_c * C, K)
    tl.store(p_sum + ((i_b * n_c + i_c) * H + i_h) * K + o_k, tl.sum(b_a, 0), mask=o_k < K)


@launched
@triton.jit(do_not_specialize=["T", "B", "Tq", "Tk", "n_levels"])
def wall_carry_kernel(
    p_q, p_k, p_a, p_sum, p_diag, p_qb, p_kb, p_lq, p_lk, T, B, Tq, Tk, n_levels, stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh, stride_ab, stride_at, stride_ah,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, NP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scores within a block [B, nC, H, C, C] float32, and q and k [B, T, H, K] of all levels; a program per block."""
    n_c = tl.cdiv(T, C)
    i_bh, i_c = head_and_tile(n_c)
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    o_c = tl.arange(0, C)
    r, R = (i_c * C).to(tl.int64), T - i_c * C
    m_own = o_c[:, None] == o_c[None, :]
    p_q += i_b * stride_qb + i_h * stride_qh + r * stride_qt
    p_k += i_b * stride_kb + i_h // REP * stride_kh + r * stride_kt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    p_sum += (i_b * n_c * H + i_h) * K
    b_s = tl.zeros([C, C], tl.float32)
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        m_t = (o_c < R)[:, None] & (o_n < K)[None, :]
        b_a = load_channel_gates(p_a, o_c, o_n, stride_at, R, K)
        # q and k are read again where they are used: all at once would not fit the registers
        b_x = load_tile(p_q, o_c, o_n, stride_qt, R, K, BK, True).to(tl.float32)
        b_x *= load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
        b_s += tl.where(m_own, tl.sum(b_x, 1)[:, None], 0.0)
        for i in tl.range(6, num_stages=1):  # groups of 1, 2, ..., 32 tokens
            m_to, m_after = gate_spans(o_c, i)
            b_x = tl.exp2(sum_channel_gates(m_to, b_a, NP)) * load_tile(p_q, o_c, o_n, stride_qt, R, K, BK, True)
            b_y = tl.exp2(sum_channel_gates(m_after, b_a, NP)) * load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
            b_x, b_y = to_nearest(b_x, PREC), to_nearest(b_y, PREC)
            b_s += tl.where(meet(o_c, i), tl.dot(b_x, tl.trans(b_y), input_precision=PREC), 0.0)
        m_to, m_after = gate_spans(o_c, 6)
        o_x = o_c[:, None] * (H * K) + o_n[None, :]
        r_x = ((i_b * T + r) * H + i_h) * K
        b_e = sum_channel_gates(m_to, b_a, NP)
        b_x = load_tile(p_q, o_c, o_n, stride_qt, R, K, BK, True)
        tl.store(p_qb + r_x + o_x, (b_x * tl.exp2(b_e)).to(p_qb.dtype.element_ty), mask=m_t)
        for s in range(1, n_levels + 1):
            b_e += sibling_sum(p_sum, i_c, s - 1, n_c, H * K, o_n, K, BC, BN, 1)[None, :]
            here, row = query_row(i_c, s, C)
            if here:
                p_x = p_lq + ((((s - 1) * B + i_b) * Tq + row) * H + i_h) * K
                tl.store(p_x + o_x, (b_x * tl.exp2(b_e)).to(p_lq.dtype.element_ty), mask=m_t)
        b_e = sum_channel_gates(m_after, b_a, NP)
        b_x = load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
        tl.store(p_kb + r_x + o_x, (b_x * tl.exp2(b_e)).to(p_kb.dtype.element_ty), mask=m_t)
        for s in range(1, n_levels + 1):
            b_e += sibling_sum(p_sum, i_c, s - 1, n_c, H * K, o_n, K, BC, BN, 0)[None, :]
            here, row = key_row(i_c, s, T, C)
            if here:
                p_x = p_lk + ((((s - 1) * B + i_b) * Tk + row) * H + i_h) * K
                tl.store(p_x + o_x, (b_x * tl.exp2(b_e)).to(p_lk.dtype.element_ty), mask=m_t)
    o_s = ((i_b * n_c + i_c) * H + i_h) * (C * C) + o_c[:, None] * C + o_c[None, :]
    tl.store(p_diag + o_s, b_s)


def precision(dtype: torch.dtype) -> dict[str, Any]:
    """Pieces of gates and precision of float32 products within blocks: finer than the inputs are."""
    if dtype == torch.bfloat16:
        return {"NP": 2, "PREC": "tf32"}
    return {"NP": 3, "PREC": dot_precision(dtype) if dtype == torch.float32 else "tf32x3"}


def carry(q: Tensor, k: Tensor, log_diag: Tensor) -> tuple[Leaves, Levels]:
    """Queries and keys carried to the cuts of all levels, and the scores within blocks.

    Args:
        q, log_diag: [B, T, H, K], k: [B, T, G, K]; views with contiguous last dims.

    Returns:
        As ``levels/layout.py`` has them, for H key heads; m holds the log2 gates of each block added up,
        [B, nC, H, K] float32.
    """
    (B, T, H, K), G = q.shape, k.shape[2]
    n_c, n, (Tq, Tk) = cdiv(T, BLOCK), level_count(T), level_rows(T)
    new = q.new_empty
    sums = new((B, n_c, H, K), dtype=torch.float32)
    block = Leaves(new((B, n_c, H, BLOCK, BLOCK), dtype=torch.float32), new((B, T, H, K)), new((B, T, H, K)), sums)
    levels = Levels(new((n, B, Tq, H, K)), new((n, B, Tk, H, K)))
    BK, strides = tree_block(K), log_diag.stride()[:3]
    wall_sums_kernel[(n_c * B * H,)](log_diag, sums, T, *strides, H=H, K=K, BK=BK, C=BLOCK)
    wall_carry_kernel[(n_c * B * H,)](
        q, k, log_diag, *(sums, block.diag, block.q, block.k), *levels, T, B, Tq, Tk, n, *q.stride()[:3],
        *k.stride()[:3], *strides, H=H, REP=H // G, K=K, BK=BK, C=BLOCK, **precision(q.dtype), **LAUNCH,
    )  # fmt: skip
    return block, levels
