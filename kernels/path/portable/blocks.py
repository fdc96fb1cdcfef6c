"""The block level: what 64 tokens are to the tokens after and before them, in closed form.

With y_a = beta_a R_1 .. R_{a-1} w_a the product of a block's first i factors is I - sum_{a <= i} y_a w_a^T, and

    Y = X W,   X = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta),   Z = X tril(W K^T, -1)
    qb = Q - tril(Q W^T) Y,   kb = K - Z^T W,   diag = tril(Q K^T - tril(Q W^T) Z),   M = I - Y^T W.

One program per block and key head (of bf16 on Hopper that of hopper/blocks.py); blocks_backward.py has the gradients.
Latency bounds these kernels: what counts is how many instructions a program takes, and how few registers and how little
shared memory, so that two or three run on a multiprocessor.

Entries of the inverse stay below 2 for unit w and beta <= 2, so a float32 inverse is safe. What follows multiplies it
in pieces of 16 bits: M, whose errors add up along the sequence, in two, the rest as the inputs ask.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.device import machine
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.levels.layout import BLOCK, Kept, Leaves, tree_block
from attnzoo.kernels.path.fits import blocks_in_gluon

from .inverse import launch, mm, two_pieces, unit_lower_inverse, unit_rows
from .tree import new_tree


@triton.jit
def zeros_as(b_acc):
    """Zeros in the layout of the product b_acc."""
    return tl.where(tl.arange(0, b_acc.shape[0])[:, None] < 0, b_acc, 0.0)


@triton.jit
def identity(b_acc, C: tl.constexpr, DT: tl.constexpr):
    """I in the layout of the product b_acc, so that it stays in registers as a left factor. # [C, C]"""
    o_c = tl.arange(0, C)
    return tl.where(o_c[:, None] == o_c[None, :], 1.0, zeros_as(b_acc)).to(DT)


@triton.jit
def _store_product(p_m, plane, p_w, w_hi, w_lo, b_x, o_c, o_k, stride_wt, R, K: tl.constexpr, BK: tl.constexpr,
                   NW: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """M = I - Y^T W in two pieces of dtype DT, a plane apart; Y^T = W^T X^T, w in NW pieces."""
    x_hi, x_lo = two_pieces(b_x, DT)  # [C, C]
    for i in tl.static_range(0, BK, 64):  # rows of M at a time: all at once spill
        o_i = i + tl.arange(0, 64)
        v_hi, v_lo = two_pieces(load_tile(p_w, o_c, o_i, stride_wt, R, K, BK, True), DT)  # [C, 64]
        b_y = tl.dot(tl.trans(v_hi), tl.trans(x_hi))  # [64, C]
        b_y = tl.dot(tl.trans(v_hi), tl.trans(x_lo), b_y)
        if NW == 2:
            b_y = tl.dot(tl.trans(v_lo), tl.trans(x_hi), b_y)
        y_hi, y_lo = two_pieces(b_y, DT)
        b_m = tl.dot(y_hi, w_hi)  # [64, BK]
        b_m = tl.dot(y_lo, w_hi, b_m)
        if NW == 2:
            b_m = tl.dot(y_hi, w_lo, b_m)
        m_hi, m_lo = two_pieces(tl.where(o_i[:, None] == o_k[None, :], 1.0, 0.0) - b_m, DT)
        p_t, m_k = p_m + o_i[:, None] * K + o_k[None, :], (o_i < K)[:, None] & (o_k < K)[None, :]
        tl.store(p_t, m_hi, mask=m_k)
        tl.store(p_t + plane, m_lo, mask=m_k)


@launched
@triton.jit(do_not_specialize=["T", "B", "N"])
def path_block_fwd_kernel(
    p_q, p_k, p_w, p_beta, p_diag, p_qb, p_kb, p_m, p_kv, p_kx, p_kw, T, B, N,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh,
    stride_bb, stride_bt, stride_bh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NI: tl.constexpr,
    NW: tl.constexpr, NB: tl.constexpr, NP: tl.constexpr, KEEP: tl.constexpr, KW: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """diag [B, nC, H, C, C], qb = Q - (tril(Q W^T) X) W [B, T, H, K], kb [B, T, G, K], and M, the first nC of N nodes.

    With KEEP also V and X, X = V diag(beta), V = (I + diag(beta) tril(W W^T, -1))^-1, and with KW w in another dtype
    (``levels.Kept``). w is NW pieces, NB in what is made of q and k, which are NI; what follows from them is NP. The
    first term of qb and kb is a product with I: that puts the tile where the second one is added.
    """
    n_c = tl.cdiv(T, C)
    i_bg, i_c = head_and_tile(n_c)
    i_b, i_g = (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64)
    REP: tl.constexpr = H // G
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_ck = (i_c * C + o_c < T)[:, None] & (o_k < K)[None, :]
    r = (i_c * C).to(tl.int64)
    R = T - i_c * C
    p_w += i_b * stride_wb + i_g * stride_wh + r * stride_wt
    b_w = load_tile(p_w, o_c, o_k, stride_wt, R, K, BK, True)  # [C, BK]
    if KW:
        p_t = p_kw + ((i_b * T + r) * G + i_g) * K + o_c[:, None] * (G * K) + o_k[None, :]
        tl.store(p_t, b_w.to(p_kw.dtype.element_ty), mask=m_ck)
    b_beta = tl.load(p_beta + i_b * stride_bb + i_g * stride_bh + (r + o_c) * stride_bt, mask=o_c < R, other=0.0)
    b_beta = b_beta.to(tl.float32)
    zeros, wide = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
    w_hi, w_lo = two_pieces(b_w, DT)
    b_l = tl.dot(w_hi, tl.trans(w_hi))
    if NW == 2:
        b_l = tl.dot(w_lo, tl.trans(w_hi), b_l)
        b_l = tl.dot(w_hi, tl.trans(w_lo), b_l)
    b_l = tl.where(o_c[:, None] > o_c[None, :], b_l * b_beta[:, None], 0.0)
    b_v = unit_lower_inverse(b_l, p_diag + ((i_b * n_c + i_c) * H + i_g * REP) * (C * C), C, DT)
    b_x = b_v * b_beta[None, :]  # [C, C]
    if KEEP:
        o_cc = ((i_b * n_c + i_c) * G + i_g) * (C * C) + o_c[:, None] * C + o_c[None, :]
        tl.store(p_kv + o_cc, b_v.to(p_kv.dtype.element_ty))
        x_hi, x_lo = two_pieces(b_x, p_kx.dtype.element_ty)
        tl.store(p_kx + o_cc, x_hi)
        if p_kx.dtype.element_ty != tl.float32:
            tl.store(p_kx + B.to(tl.int64) * n_c * G * (C * C) + o_cc, x_lo)
    p_mt = p_m + ((i_b * N + i_c) * G + i_g) * (K * K)
    _store_product(p_mt, B * N.to(tl.int64) * (G * K * K), p_w, w_hi, w_lo, b_x, o_c, o_k, stride_wt, R, K, BK, NW, DT)
    p_k += i_b * stride_kb + i_g * stride_kh + r * stride_kt
    b_k = load_tile(p_k, o_c, o_k, stride_kt, R, K, BK, True)
    p_q += i_b * stride_qb + r * stride_qt
    b_k, b_ks = unit_rows(b_k, NI, DT)
    if NB == 1:
        b_w = b_w.to(DT)
    if NP == 1:
        b_x = b_x.to(DT)

    b_kw = tl.where(o_c[:, None] < o_c[None, :], -mm(b_k, tl.trans(b_w), zeros, NI, NB, DT), 0.0)
    b_eye = identity(b_kw, C, DT)
    b_z = mm(b_kw, tl.trans(b_x), zeros, NP, NP, DT)  # -Z^T
    if NP == 1:
        b_z = b_z.to(DT)
    b_kb = mm(b_z, b_w, mm(b_eye, b_k, wide, 1, NI, DT), NP, NB, DT) * b_ks[:, None]
    p_kb += ((i_b * T + r) * G + i_g) * K + o_c[:, None] * (G * K) + o_k[None, :]
    tl.store(p_kb, b_kb.to(p_kb.dtype.element_ty), mask=m_ck)
    for j in range(REP):
        i_h = i_g * REP + j
        b_q = load_tile(p_q + i_h * stride_qh, o_c, o_k, stride_qt, R, K, BK, True)
        b_q, b_qs = unit_rows(b_q, NI, DT)
        b_qw = tl.where(o_c[:, None] >= o_c[None, :], mm(b_q, tl.trans(b_w), zeros, NI, NB, DT), 0.0)
        if NP == 1:
            b_qw = b_qw.to(DT)
        b_a = mm(b_qw, tl.trans(b_z), mm(b_q, tl.trans(b_k), zeros, NI, NI, DT), NP, NP, DT)
        p_a = p_diag + ((i_b * n_c + i_c) * H + i_h) * (C * C) + o_c[:, None] * C + o_c[None, :]
        tl.store(p_a, b_a * b_qs[:, None] * b_ks[None, :], mask=o_c[:, None] >= o_c[None, :] // 4 * 4)  # four at once
        b_p = mm(b_qw, b_x, zeros, NP, NP, DT)
        b_q += 0.0  # a copy for the compiler: it enters shared memory here, once the products above have left it
        b_qb = mm(-b_p, b_w, mm(b_eye, b_q, wide, 1, NI, DT), NP, NB, DT) * b_qs[:, None]
        p_qt = p_qb + ((i_b * T + r) * H + i_h) * K + o_c[:, None] * (H * K) + o_k[None, :]
        tl.store(p_qt, b_qb.to(p_qb.dtype.element_ty), mask=m_ck)


def block_level(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, kept: Kept | None = None, out: Leaves | None = None
) -> Leaves:
    """The closed form of the blocks, with only the leaves of its tree m filled; ``carry`` fills the other nodes.

    Args:
        q, k, w, beta: [B, T, H, K], [B, T, G, K] twice, [B, T, G]; views with contiguous last dims (any for beta). w in
            q's dtype or float32, beta in any floating dtype.
        kept: filled for the backward pass (see ``inverse.new_kept``).
        out: where to put the result; default: new tensors.
    """
    B, T, H, K = q.shape
    G = k.shape[2]
    n = cdiv(T, BLOCK)
    if out is None:
        diag = q.new_empty((B, n, H, BLOCK, BLOCK), dtype=torch.float32)
        out = Leaves(diag, q.new_empty((B, T, H, K)), k.new_empty((B, T, G, K)), new_tree(q, n, G))
    pieces = 2 if w.dtype == torch.float32 else 1
    kernel: Any = path_block_fwd_kernel
    if blocks_in_gluon(K, q.dtype, machine(q.device)):
        from attnzoo.kernels.path.hopper.blocks import path_block_fwd_hopper_kernel as kernel

        options: dict[str, Any] = {"num_warps": 4}
    else:
        fine = q.dtype != torch.bfloat16
        options = {"C": BLOCK, "NI": 2 if q.dtype == torch.float32 else 1, "NB": pieces if fine else 1,
                   "NP": 2 if fine else 1, "DT": tl.float16, "num_stages": 1, **launch("block", K)}  # fmt: skip
    kv, kx, kw = kept or (w, w, w)
    kernel[(n * B * G,)](
        q, k, w, beta, out.diag, out.q, out.k, out.m, kv, kx, kw, T, B, out.m.shape[2], *q.stride()[:3],
        *k.stride()[:3], *w.stride()[:3], *beta.stride(), H=H, G=G, K=K, BK=tree_block(K), NW=pieces,
        KEEP=kept is not None, KW=kw.dtype != w.dtype, **options,
    )  # fmt: skip
    return out
