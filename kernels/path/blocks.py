"""Block level kernels: the UT transform of 64 tokens, forward and backward; one program per block and key head.

With y_a = beta_a R_1 .. R_{a-1} w_a the product of a block's first i factors is I - sum_{a <= i} y_a w_a^T, and

    Y = X W,   X = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta),   Z = X tril(W K^T, -1)
    qb = Q - tril(Q W^T) Y,   kb = K - Z^T W,   diag = tril(Q K^T - tril(Q W^T) Z),   M = I - Y^T W.

Entries of the inverse stay below 2 for unit w and beta <= 2, whatever the conditioning, so a float32 inverse is safe;
what follows multiplies it in pieces of 16 bits: M, whose errors add up along the sequence, in two, the rest as the
inputs ask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.fox.fwd import _load_tile, head_block
from attnzoo.kernels.fox.tuning import has_descriptors

from .transitions import BLOCK, Block, tree_offset, tree_scales


@triton.jit
def _mm(a, b, acc, NA: tl.constexpr, NB: tl.constexpr, DT: tl.constexpr):
    """acc + a b, with a as the sum of NA numbers of dtype DT and b of NB; float32 if DT is."""
    if DT == tl.float32:  # noqa: SIM300
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
def _row_scale(x):
    """Powers of two that bring the rows of x near 1, and their inverses. # [rows] each"""
    m = tl.max(tl.abs(x.to(tl.float32)), 1)
    s = (m.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    s = tl.where((s > 0.0) & (s < 1e38), s, 1.0)
    return s, 1.0 / s


@triton.jit
def _columns(p, b_x, o_c, o_n, stride, R, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr):
    """Columns o_n of the tile b_x that p points at: itself if it has no more."""
    return b_x if BK == BC else _load_tile(p, o_c, o_n, stride, R, K, BK, True)


@triton.jit
def _merge(b_l, b_x, h: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """Diagonal blocks of size 2h inverted, given those of size h: [[A, 0], [B, D]] has -D^-1 B A^-1 below. # [C, C]"""
    o_c = tl.arange(0, C)
    m_b = (o_c[:, None] // (2 * h) == o_c[None, :] // (2 * h)) & (o_c[:, None] // h != o_c[None, :] // h)
    b_t = _mm(tl.where(m_b, b_l, 0.0), b_x, tl.zeros([C, C], tl.float32), 2, 2, DT)
    return b_x - _mm(b_x, b_t, tl.zeros([C, C], tl.float32), 2, 2, DT)


@triton.jit
def _unit_lower_inverse(b_l, C: tl.constexpr, DT: tl.constexpr):
    """(I + b_l)^-1 of a strictly lower triangular matrix: rows of 16 x 16 blocks, then pairs of blocks. # [C, C]"""
    N: tl.constexpr = C // 16
    o_n, o_s = tl.arange(0, N), tl.arange(0, 16)
    m_d = o_n[:, None, None, None] == o_n[None, None, :, None]
    b_d = tl.sum(tl.where(m_d, tl.reshape(b_l, [N, 16, N, 16]), 0.0), 2)  # [N, 16, 16]
    b_i = tl.where(o_s[None, :, None] == o_s[None, None, :], 1.0, tl.zeros([N, 16, 16], tl.float32))
    for i in range(1, 16):
        m_i = (o_s == i)[None, :, None]
        b_r = tl.sum(tl.where(m_i, b_d, 0.0), 1)  # [N, 16]
        b_i = tl.where(m_i, b_i - tl.sum(b_r[:, :, None] * b_i, 1)[:, None, :], b_i)
    b_x = tl.reshape(tl.where(m_d, b_i[:, :, None, :], 0.0), [C, C])
    b_x = _merge(b_l, b_x, 16, C, DT)
    b_x = _merge(b_l, b_x, 32, C, DT)
    return b_x


@triton.jit(do_not_specialize=["T", "B", "N"])
def block_fwd_kernel(
    p_q, p_k, p_w, p_beta, p_diag, p_qb, p_kb, p_m, T, B, N,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh,
    stride_bb, stride_bt, stride_bh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NI: tl.constexpr,
    NW: tl.constexpr, NP: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """diag [B, nC, H, C, C], qb [B, T, H, K], kb [B, T, G, K]; M, the first nC of N nodes, in two pieces.

    q and k are NI pieces, w NW, what follows from them NP; rows are brought near 1 first.
    """
    n_c = tl.cdiv(T, C)
    i_c, i_bg = tl.program_id(0) % n_c, tl.program_id(0) // n_c
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    BC: tl.constexpr = min(BK, 64)
    REP: tl.constexpr = H // G
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_c, m_k = i_c * C + o_c < T, o_k < K
    m_lo, m_le = o_c[:, None] > o_c[None, :], o_c[:, None] >= o_c[None, :]
    r = (i_c * C).to(tl.int64)
    R = T - i_c * C
    p_w += i_b * stride_wb + i_g * stride_wh + r * stride_wt
    b_w = _load_tile(p_w, o_c, o_k, stride_wt, R, K, BK, True)  # [C, BK]
    p_k += i_b * stride_kb + i_g * stride_kh + r * stride_kt
    b_k = _load_tile(p_k, o_c, o_k, stride_kt, R, K, BK, True)
    p_q += i_b * stride_qb + i_g * REP * stride_qh + r * stride_qt
    b_q = _load_tile(p_q, o_c, o_k, stride_qt, R, K, BK, True)  # early: the inverse hides these loads
    b_beta = tl.load(p_beta + i_b * stride_bb + i_g * stride_bh + (r + o_c) * stride_bt, mask=m_c, other=0.0)
    b_beta = b_beta.to(tl.float32)
    zeros = tl.zeros([C, C], tl.float32)

    b_l = tl.where(m_lo, _mm(b_w, tl.trans(b_w), zeros, NW, NW, DT) * b_beta[:, None], 0.0)
    b_x = _unit_lower_inverse(b_l, C, DT) * b_beta[None, :]  # [C, C]
    b_ks, b_ki = _row_scale(b_k)
    b_ku = b_k.to(tl.float32) * b_ki[:, None]
    if NI == 1:
        b_ku = b_ku.to(DT)
    b_wk = tl.where(m_lo, _mm(b_w, tl.trans(b_ku), zeros, NW, NI, DT), 0.0)
    b_z = _mm(b_x, b_wk, zeros, NP, NP, DT)  # [C, C]
    p_m += ((i_b * N + i_c) * G + i_g) * (K * K)
    plane = B * N.to(tl.int64) * (G * K * K)
    p_kb += ((i_b * T + r) * G + i_g) * K
    for c in range(BK // BC):  # columns of Y and kb, rows of M
        o_n = c * BC + tl.arange(0, BC)
        b_wn = _columns(p_w, b_w, o_c, o_n, stride_wt, R, K, BK, BC)  # [C, BC]
        b_y = _mm(b_x, b_wn, tl.zeros([C, BC], tl.float32), 2, NW, DT)  # [C, BC]
        b_m = tl.where(o_n[:, None] == o_k[None, :], 1.0, tl.zeros([BC, BK], tl.float32))
        b_m = _mm(-tl.trans(b_y), b_w, b_m, 2, NW, DT)
        o_m = o_n[:, None] * K + o_k[None, :]
        m_m = (o_n < K)[:, None] & m_k[None, :]
        b_hi = b_m.to(DT)
        tl.store(p_m + o_m, b_hi, mask=m_m)
        tl.store(p_m + plane + o_m, (b_m - b_hi.to(tl.float32)).to(DT), mask=m_m)
        b_kn = _columns(p_k, b_k, o_c, o_n, stride_kt, R, K, BK, BC).to(tl.float32) * b_ki[:, None]
        b_kb = _mm(-tl.trans(b_z), b_wn, b_kn, NP, NW, DT) * b_ks[:, None]
        o_kb = o_c[:, None] * (G * K) + o_n[None, :]
        tl.store(p_kb + o_kb, b_kb.to(p_kb.dtype.element_ty), mask=m_c[:, None] & (o_n < K)[None, :])
    for j in range(REP):
        i_h = i_g * REP + j
        p_qh = p_q + j * stride_qh
        if REP > 1:
            b_q = _load_tile(p_qh, o_c, o_k, stride_qt, R, K, BK, True)
        b_qs, b_qi = _row_scale(b_q)
        b_qu = b_q.to(tl.float32) * b_qi[:, None]
        if NI == 1:
            b_qu = b_qu.to(DT)
        b_qw = tl.where(m_le, -_mm(b_qu, tl.trans(b_w), zeros, NI, NW, DT), 0.0)
        b_a = _mm(b_qw, b_z, _mm(b_qu, tl.trans(b_ku), zeros, NI, NI, DT), NP, NP, DT)
        p_a = p_diag + ((i_b * n_c + i_c) * H + i_h) * (C * C) + o_c[:, None] * C + o_c[None, :]
        tl.store(p_a, b_a * b_qs[:, None] * b_ks[None, :], mask=m_le)
        for c in range(BK // BC):
            o_n = c * BC + tl.arange(0, BC)
            b_wn = _columns(p_w, b_w, o_c, o_n, stride_wt, R, K, BK, BC)
            b_y = _mm(b_x, b_wn, tl.zeros([C, BC], tl.float32), NP, NW, DT)
            b_qn = _columns(p_qh, b_q, o_c, o_n, stride_qt, R, K, BK, BC).to(tl.float32) * b_qi[:, None]
            b_qb = _mm(b_qw, b_y, b_qn, NP, NP, DT) * b_qs[:, None]
            p_qt = p_qb + ((i_b * T + r) * H + i_h) * K + o_c[:, None] * (H * K) + o_n[None, :]
            tl.store(p_qt, b_qb.to(p_qb.dtype.element_ty), mask=m_c[:, None] & (o_n < K)[None, :])


@triton.jit
def _head_factors(p_q, p_dqb, p_da, b_w, b_x, b_z, o_c, o_k, stride_qt, R, H: tl.constexpr, K: tl.constexpr,
                  BK: tl.constexpr, C: tl.constexpr, NW: tl.constexpr, NF: tl.constexpr, NG: tl.constexpr,
                  DT: tl.constexpr):  # fmt: skip
    """Of one query head: tril(Q W^T), E = dqb W^T, dA and dQW = -tril(E X^T + dA Z^T). # [C, C] each"""
    cc = tl.zeros([C, C], tl.float32)
    m_le = o_c[:, None] >= o_c[None, :]
    b_q = _load_tile(p_q, o_c, o_k, stride_qt, R, K, BK, True)
    d_qb = _load_tile(p_dqb, o_c, o_k, H * K, R, K, BK, True)
    d_a = tl.load(p_da + o_c[:, None] * C + o_c[None, :], mask=m_le & (o_c < R)[:, None], other=0.0)
    b_qw = tl.where(m_le, _mm(b_q, tl.trans(b_w), cc, 1, NW, DT), 0.0)
    d_e = _mm(d_qb, tl.trans(b_w), cc, 1, NW, DT)
    d_qw = _mm(d_a, tl.trans(b_z), _mm(d_e, tl.trans(b_x), cc, NG, NF, DT), NG, NF, DT)
    d_qw = tl.where(m_le, -d_qw, 0.0)
    if NF == 1:
        b_qw = b_qw.to(DT)
    if NG == 1:
        d_e, d_a, d_qw = d_e.to(DT), d_a.to(DT), d_qw.to(DT)
    return b_qw, d_e, d_a, d_qw


@triton.jit(do_not_specialize=["T", "N"])
def block_bwd_kernel(
    p_q, p_k, p_w, p_beta, p_da, p_dqb, p_dkb, p_dm, p_dq, p_dk, p_dw, p_dbeta, T, N,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh,
    stride_bb, stride_bt, stride_bh, stride_dqb, stride_dqt, stride_dqh, stride_dkb, stride_dkt, stride_dkh,
    stride_dwb, stride_dwt, stride_dwh, stride_dbb, stride_dbt, stride_dbh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NW: tl.constexpr,
    NF: tl.constexpr, NG: tl.constexpr, DT: tl.constexpr, DI: tl.constexpr,
):  # fmt: skip
    """dQ, dK, dW, dbeta from the gradients of diag [B, nC, H, C, C], qb [B, T, H, K], kb [B, T, G, K] and M.

    Inputs are one piece (w NW), recomputed factors NF, gradients NG. With QW = tril(Q W^T), WK = tril(W K^T, -1),
    E = dqb W^T and V the inverse, X = V diag(beta), it works in C x C matrices:

        dQW = -tril(E X^T + dA Z^T)               dZ = -QW^T dA - W dkb^T          dWK = tril(X^T dZ, -1)
        dX  = -QW^T E - W dM^T W^T + dZ WK^T      S  = -diag(beta) tril(V^T (dX diag(beta)) V^T, -1)

    and then column by column (64 at a time):

        dQ = dqb + dA K + dQW W      dK = dkb + dA^T Q + dWK^T W      dY = -QW^T dqb - W dM^T
        dW = dQW^T Q + X^T dY + dWK K - Z dkb - X W dM + (S + S^T) W
    """
    BC: tl.constexpr = min(BK, 64)
    REP: tl.constexpr = H // G
    n_c = tl.cdiv(T, C)
    i_c, i_bg = tl.program_id(0) % n_c, tl.program_id(0) // n_c
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_c, m_k = i_c * C + o_c < T, o_k < K
    m_lo = o_c[:, None] > o_c[None, :]
    r = (i_c * C).to(tl.int64)
    R = T - i_c * C
    p_w += i_b * stride_wb + i_g * stride_wh + r * stride_wt
    p_k += i_b * stride_kb + i_g * stride_kh + r * stride_kt
    p_dkb += ((i_b * T + r) * G + i_g) * K
    p_dm += ((i_b * N + i_c) * G + i_g) * (K * K)
    p_q += i_b * stride_qb + i_g * REP * stride_qh + r * stride_qt
    p_dqb += ((i_b * T + r) * H + i_g * REP) * K
    p_da += ((i_b * n_c + i_c) * H + i_g * REP) * (C * C)
    b_w = _load_tile(p_w, o_c, o_k, stride_wt, R, K, BK, True)  # [C, BK]
    b_k = _load_tile(p_k, o_c, o_k, stride_kt, R, K, BK, True)
    d_kb = _load_tile(p_dkb, o_c, o_k, G * K, R, K, BK, True)
    b_beta = tl.load(p_beta + i_b * stride_bb + i_g * stride_bh + (r + o_c) * stride_bt, mask=m_c, other=0.0)
    b_beta = b_beta.to(tl.float32)
    cc = tl.zeros([C, C], tl.float32)

    b_s = tl.where(m_lo, _mm(b_w, tl.trans(b_w), cc, NW, NW, DI), 0.0)
    b_v = _unit_lower_inverse(b_s * b_beta[:, None], C, DI)
    b_wk = tl.where(m_lo, _mm(b_w, tl.trans(b_k), cc, NW, 1, DT), 0.0)
    b_x = b_v * b_beta[None, :]
    b_z = _mm(b_x, b_wk, cc, 2, 2, DT)
    if NF == 1:  # one piece is all that is read from here on
        b_x, b_z, b_wk = b_x.to(DT), b_z.to(DT), b_wk.to(DT)
    d_z = _mm(b_w, tl.trans(d_kb), cc, NW, 1, DT)
    d_x = cc
    for c in range(BK // BC):
        o_n = c * BC + tl.arange(0, BC)
        m_n = o_n < K
        d_m = tl.load(p_dm + o_n[:, None] * K + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        d_f = _mm(b_w, tl.trans(d_m), tl.zeros([C, BC], tl.float32), NW, NG, DT)
        d_x = _mm(d_f, tl.trans(_columns(p_w, b_w, o_c, o_n, stride_wt, R, K, BK, BC)), d_x, NG, NW, DT)
    if REP == 1:
        b_qw, d_e, d_a, d_qw = _head_factors(p_q, p_dqb, p_da, b_w, b_x, b_z, o_c, o_k, stride_qt, R, H, K, BK, C, NW,
                                             NF, NG, DT)  # fmt: skip
        d_x = _mm(tl.trans(b_qw), d_e, d_x, NF, NG, DT)
        d_z = _mm(tl.trans(b_qw), d_a, d_z, NF, NG, DT)
    else:
        for j in range(REP):
            b_qw, d_e, d_a, d_qw = _head_factors(p_q + j * stride_qh, p_dqb + j * K, p_da + j * C * C, b_w, b_x, b_z,
                                                 o_c, o_k, stride_qt, R, H, K, BK, C, NW, NF, NG, DT)  # fmt: skip
            d_x = _mm(tl.trans(b_qw), d_e, d_x, NF, NG, DT)
            d_z = _mm(tl.trans(b_qw), d_a, d_z, NF, NG, DT)
    d_z = -d_z
    d_x = _mm(d_z, tl.trans(b_wk), -d_x, NG, NF, DT)
    d_wk = tl.where(m_lo, _mm(tl.trans(b_x), d_z, cc, NF, NG, DT), 0.0)
    d_beta = tl.sum(b_v * d_x, 0)
    d_l = _mm(tl.trans(b_v), d_x * b_beta[None, :], cc, 2, 2, DT)
    d_l = tl.where(m_lo, -_mm(d_l, tl.trans(b_v), cc, 2, 2, DT), 0.0)
    b_s = _mm(b_w, tl.trans(b_w), cc, NW, NW, DI)  # again: cheaper than to keep it
    d_beta += tl.sum(d_l * b_s, 1)
    d_s = d_l * b_beta[:, None]
    d_s += tl.trans(d_s)
    if NG == 1:
        d_s, d_wk = d_s.to(DT), d_wk.to(DT)
    p_t = p_dbeta + i_b * stride_dbb + i_g * stride_dbh + (r + o_c) * stride_dbt
    tl.store(p_t, d_beta.to(p_dbeta.dtype.element_ty), mask=m_c)

    p_dq += i_b * stride_dqb + i_g * REP * stride_dqh + r * stride_dqt
    p_dk += i_b * stride_dkb + i_g * stride_dkh + r * stride_dkt
    p_dw += i_b * stride_dwb + i_g * stride_dwh + r * stride_dwt
    for c in range(BK // BC):
        o_n = c * BC + tl.arange(0, BC)
        m_n = o_n < K
        m_cn = m_c[:, None] & m_n[None, :]
        cn = tl.zeros([C, BC], tl.float32)
        d_m = tl.load(p_dm + o_n[:, None] * K + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        d_y = _mm(b_w, tl.trans(d_m), cn, NW, NG, DT)
        d_m = tl.load(p_dm + o_k[:, None] * K + o_n[None, :], mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_wn = _columns(p_w, b_w, o_c, o_n, stride_wt, R, K, BK, BC)  # [C, BC]
        b_kn = _columns(p_k, b_k, o_c, o_n, stride_kt, R, K, BK, BC)
        d_kn = _columns(p_dkb, d_kb, o_c, o_n, G * K, R, K, BK, BC)
        d_w = _mm(b_x, _mm(b_w, d_m, cn, NW, NG, DT), _mm(b_z, d_kn, cn, NF, 1, DT), NF, NG, DT)
        d_w = _mm(d_wk, b_kn, _mm(d_s, b_wn, -d_w, NG, NW, DT), NG, 1, DT)
        d_k = _mm(tl.trans(d_wk), b_wn, d_kn.to(tl.float32), NG, NW, DT)
        for j in range(REP):
            if REP > 1:
                b_qw, d_e, d_a, d_qw = _head_factors(p_q + j * stride_qh, p_dqb + j * K, p_da + j * C * C, b_w, b_x,
                                                     b_z, o_c, o_k, stride_qt, R, H, K, BK, C, NW, NF, NG,
                                                     DT)  # fmt: skip
            b_qn = _load_tile(p_q + j * stride_qh, o_c, o_n, stride_qt, R, K, BK, True)
            d_qn = _load_tile(p_dqb + j * K, o_c, o_n, H * K, R, K, BK, True)
            d_q = _mm(d_qw, b_wn, _mm(d_a, b_kn, d_qn.to(tl.float32), NG, 1, DT), NG, NW, DT)
            p_dqn = p_dq + j * stride_dqh + o_c[:, None] * stride_dqt + o_n[None, :]
            tl.store(p_dqn, d_q.to(p_dq.dtype.element_ty), mask=m_cn)
            d_y = _mm(tl.trans(b_qw), d_qn, d_y, NF, 1, DT)
            d_k = _mm(tl.trans(d_a), b_qn, d_k, NG, 1, DT)
            d_w = _mm(tl.trans(d_qw), b_qn, d_w, NG, 1, DT)
        d_w = _mm(tl.trans(b_x), -d_y, d_w, NF, NG, DT)
        tl.store(p_dk + o_c[:, None] * stride_dkt + o_n[None, :], d_k.to(p_dk.dtype.element_ty), mask=m_cn)
        tl.store(p_dw + o_c[:, None] * stride_dwt + o_n[None, :], d_w.to(p_dw.dtype.element_ty), mask=m_cn)


# Warps and registers per thread of each kernel, for head dims up to 64 and up to 128.
LAUNCH: dict[str, tuple[tuple[int, int | None], tuple[int, int | None]]] = {
    "block": ((4, None), (4, None)),
    "block_bwd": ((4, None), (4, None)),
    "tree": ((4, None), (4, None)),
    "carry": ((4, None), (8, None)),
    "node": ((4, None), (8, None)),
}


def launch(part: str, K: int) -> dict[str, int | None]:
    """Launch options of a kernel."""
    num_warps, maxnreg = LAUNCH[part][K > 64]
    return {"num_warps": num_warps, "maxnreg": maxnreg if has_descriptors() else None}


def new_tree(q: Tensor, units: int, G: int) -> Tensor:
    """Room for the products of all nodes over some units, in two float16 pieces: [2, B, total, G, K, K].

    Two pieces hold 22 bits (with one, errors would grow with the square root of T); most readers need only the first.
    """
    shape = (2, q.shape[0], tree_offset(units, tree_scales(units)), G, q.shape[3], q.shape[3])
    return q.new_empty(shape, dtype=torch.float16)


def block_level(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Block:
    """As ``transitions.block_level``, on views of any stride with contiguous last dims; diag above the diagonal is not
    written. w in q's dtype or float32, beta in any floating dtype. m is a tree (see new_tree) that carry fills."""
    B, T, H, K = q.shape
    G = k.shape[2]
    n = triton.cdiv(T, BLOCK)
    diag = q.new_empty((B, n, H, BLOCK, BLOCK), dtype=torch.float32)
    m = new_tree(q, n, G)
    qb, kb = q.new_empty((B, T, H, K)), k.new_empty((B, T, G, K))
    block_fwd_kernel[(n * B * G,)](
        q, k, w, beta, diag, qb, kb, m, T, B, m.shape[2], *q.stride()[:3], *k.stride()[:3], *w.stride()[:3],
        *beta.stride(), H=H, G=G, K=K, BK=head_block(K), C=BLOCK, NI=2 if q.dtype == torch.float32 else 1,
        NW=2 if w.dtype == torch.float32 else 1, NP=1 if q.dtype == torch.bfloat16 else 2, DT=tl.float16, num_stages=1,
        **launch("block", K),
    )  # fmt: skip
    return Block(diag, qb, kb, m)


def block_level_backward(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, d: Block, out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``transitions.block_level_backward``; d.diag above the diagonal is not read, d.m may be longer than nC.

    Args:
        out: where to put dq, dk, dw, dbeta: views of any floating dtype, with contiguous last dims but for dbeta;
            default: new tensors in the inputs' dtypes.
    """
    B, T, H, K = q.shape
    G, exact = k.shape[2], q.dtype == torch.float32
    dq, dk, dw, dbeta = tuple(x.new_empty(x.shape) for x in (q, k, w, beta)) if out is None else out
    fine = q.dtype != torch.bfloat16
    block_bwd_kernel[(triton.cdiv(T, BLOCK) * B * G,)](
        q, k, w, beta, d.diag, d.q, d.k, d.m, dq, dk, dw, dbeta, T, d.m.shape[1], *q.stride()[:3], *k.stride()[:3],
        *w.stride()[:3], *beta.stride(), *dq.stride()[:3], *dk.stride()[:3], *dw.stride()[:3], *dbeta.stride(), H=H,
        G=G, K=K, BK=head_block(K), C=BLOCK, NW=2 if w.dtype == torch.float32 else 1, NF=2 if fine else 1,
        NG=2 if fine else 1, DT=tl.float32 if exact else tl.float16 if fine else tl.bfloat16, DI=tl.float16,
        num_stages=1, **launch("block_bwd", K),
    )  # fmt: skip
    return dq, dk, dw, dbeta
