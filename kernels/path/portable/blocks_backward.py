"""Gradients of the block level (``blocks.py``), one program per block and key head.

path_block_bwd_kernel starts from diag, qb and kb, and path_product_bwd_kernel from M and X; where the plan says so, the
first does all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.device import machine
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.levels.layout import BLOCK, Kept, Leaves, tree_block
from attnzoo.kernels.path.fits import block_backward_at_once

from .blocks import identity, zeros_as
from .inverse import launch, mm, mm_pair, power_of_two, two_pieces

Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@triton.jit
def _of_scores(p_da, b_acc, o_c, R, C: tl.constexpr, NG: tl.constexpr, DT: tl.constexpr):
    """tril(dA) of one query head, laid out as the product b_acc. # [C, C]"""
    m_a = (o_c[:, None] >= o_c[None, :] // 8 * 8) & (o_c < R)[:, None]  # entries that one load reads
    d_a = tl.load(p_da + o_c[:, None] * C + o_c[None, :], mask=m_a, other=0.0).to(tl.float32)
    d_a = tl.where(o_c[:, None] >= o_c[None, :], d_a, zeros_as(b_acc))
    return d_a.to(DT) if NG == 1 else d_a


@triton.jit
def _lower(b_y, o_c, NG: tl.constexpr, DT: tl.constexpr):
    """tril(b_y), rounded to DT if one piece is enough. # [C, C]"""
    b_y = tl.where(o_c[:, None] >= o_c[None, :], b_y, 0.0)
    return b_y.to(DT) if NG == 1 else b_y


@triton.jit
def _head_dq(p_da, p_dq, d_qb, b_w, b_k, b_x, b_xl, b_zt, o_c, o_k, stride_dqt, R, K: tl.constexpr, BK: tl.constexpr,
             C: tl.constexpr, NW: tl.constexpr, NG: tl.constexpr, NX: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """E = dqb W^T, dA and dQW of one query head # [C, C] each; dQ, stored."""
    cc, wide = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
    d_e = mm(d_qb, tl.trans(b_w), cc, 1, NW, DT)
    d_a = _of_scores(p_da, d_e, o_c, R, C, NG, DT)
    if NG == 1:
        d_e = d_e.to(DT)
    d_qw = mm(d_a, b_zt, mm_pair(d_e, b_x, b_xl, True, cc, NG, NX, DT), NG, NG, DT)
    b_eye = identity(d_qw, C, DT)
    d_qw = _lower(-d_qw, o_c, NG, DT)
    d_q = mm(d_qw, b_w, mm(d_a, b_k, mm(b_eye, d_qb, wide, 1, 1, DT), NG, 1, DT), NG, NW, DT)
    p_dq += o_c[:, None] * stride_dqt + o_k[None, :]
    tl.store(p_dq, d_q.to(p_dq.dtype.element_ty), mask=(o_c < R)[:, None] & (o_k < K)[None, :])
    return d_e, d_a, d_qw


@triton.jit
def _product_bwd(d_w, d_x, b_w, b_x, p_dm, p_v, p_beta, p_dbeta, o_c, o_k, R, stride_bt, stride_dbt,
                 K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NW: tl.constexpr, NG: tl.constexpr,
                 DT: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    """dW, and dbeta, stored: the gradient of M is added to dX and dW, and dX taken through the inverse. # [C, BK]

    All pointers are at the block.

    With F = -W dM^T and S = -diag(beta) tril(V^T (dX diag(beta)) V^T, -1):

        dX += F W^T      dW += (S + S^T) W + X^T F - X W dM      dbeta = diag(V^T dX) + diag(1 / beta) diag(S W W^T)

    What goes through V twice is of dtype DV, brought near 1: there roundings are amplified most.
    """
    m_c, m_k = o_c < R, o_k < K
    d_m = tl.load(p_dm + o_k[:, None] * K + o_k[None, :], mask=m_k[:, None] & m_k[None, :], other=0.0)  # [BK, BK]
    b_beta = tl.load(p_beta + o_c.to(tl.int64) * stride_bt, mask=m_c, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + o_c[:, None] * C + o_c[None, :])
    cc, wide = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
    b_f = -mm(b_w, tl.trans(d_m), wide, NW, NG, DT)
    b_wm = -mm(b_w, d_m, wide, NW, NG, DT)
    if NG == 1:
        b_f, b_wm = b_f.to(DT), b_wm.to(DT)
    d_x = mm(b_f, tl.trans(b_w), d_x, NG, NW, DT)
    s, inv = power_of_two(tl.max(tl.abs(d_x)))  # over rows, then columns, Triton 3.6 and 3.7 fail for Blackwell
    d_l = mm(tl.trans(b_v), d_x * inv, cc, NG, NG, DV)
    d_beta = tl.sum(tl.where(o_c[:, None] == o_c[None, :], d_l, 0.0), 1)
    d_l = tl.where(o_c[:, None] > o_c[None, :], -mm(d_l * b_beta[None, :], tl.trans(b_v), cc, NG, NG, DV), 0.0)
    d_beta = (d_beta + tl.sum(d_l * mm(b_w, tl.trans(b_w), cc, NW, NW, DT), 1)) * s
    d_s = d_l * (b_beta * s)[:, None]
    if NG == 1:
        d_s = d_s.to(DT)
    d_w = mm(tl.trans(b_x), b_f, d_w, NG, NG, DT)
    d_w = mm(tl.trans(d_s), b_w, mm(d_s, b_w, d_w, NG, NW, DT), NG, NW, DT)
    d_w = mm(b_x, b_wm, d_w, NG, NG, DT)
    tl.store(p_dbeta + o_c.to(tl.int64) * stride_dbt, d_beta.to(p_dbeta.dtype.element_ty), mask=m_c)
    return d_w


@launched
@triton.jit(do_not_specialize=["T", "B"])
def path_block_bwd_kernel(
    p_q, p_k, p_w, p_x, p_da, p_dqb, p_dkb, p_dq, p_dk, p_dw, p_dx, p_beta, p_v, p_dm, p_dbeta, T, B, N,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh,
    stride_dqb, stride_dqt, stride_dqh, stride_dkb, stride_dkt, stride_dkh,
    stride_dwb, stride_dwt, stride_dwh, stride_bb, stride_bt, stride_bh, stride_dbb, stride_dbt, stride_dbh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NW: tl.constexpr,
    NG: tl.constexpr, NX: tl.constexpr, DT: tl.constexpr, DV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dQ, dK, and the parts of dW and dX [B, nC, G, C, C] float32 that do not come from M, from diag, qb and kb; WHOLE:
    all of dW, and dbeta.

    Inputs are one piece (w NW), what follows from them NG. With QW = tril(Q W^T), WK = tril(W K^T, -1), E = dqb W^T:

        dQW = -tril(E X^T + dA Z^T)   dZ = -QW^T dA - W dkb^T   dX = -QW^T E + dZ WK^T   dWK = tril(X^T dZ, -1)
        dQ  = dqb + dA K + dQW W      dK = dkb + dA^T Q + dWK^T W
        dW  = dQW^T Q - (QW X)^T dqb + dWK K - Z dkb

    WK, Z, dZ and dWK are kept transposed: then each is the left factor where it was made, in registers.
    """
    REP: tl.constexpr = H // G
    n_c = tl.cdiv(T, C)
    i_bg, i_c = head_and_tile(n_c)
    i_b, i_g = (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64)
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_up = o_c[:, None] < o_c[None, :]
    r = (i_c * C).to(tl.int64)
    R = T - i_c * C
    p_w += i_b * stride_wb + i_g * stride_wh + r * stride_wt
    p_k += i_b * stride_kb + i_g * stride_kh + r * stride_kt
    p_dkb += ((i_b * T + r) * G + i_g) * K
    p_q += i_b * stride_qb + i_g * REP * stride_qh + r * stride_qt
    p_dqb += ((i_b * T + r) * H + i_g * REP) * K
    p_da += ((i_b * n_c + i_c) * H + i_g * REP) * (C * C)
    p_dq += i_b * stride_dqb + i_g * REP * stride_dqh + r * stride_dqt
    o_cc = ((i_b * n_c + i_c) * G + i_g) * (C * C) + o_c[:, None] * C + o_c[None, :]
    b_w = load_tile(p_w, o_c, o_k, stride_wt, R, K, BK, True)  # [C, BK]
    b_k = load_tile(p_k, o_c, o_k, stride_kt, R, K, BK, True)
    b_x = tl.load(p_x + o_cc)  # [C, C]
    b_xl = tl.load(p_x + B.to(tl.int64) * n_c * G * (C * C) + o_cc) if NX == 2 else b_x
    cc, wide = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
    b_wk = tl.where(m_up, mm(b_k, tl.trans(b_w), cc, 1, NW, DT), 0.0)
    b_kw = b_wk.to(DT) if NG == 1 else b_wk
    b_zt = mm_pair(b_kw, b_x, b_xl, True, cc, NG, NX, DT)
    if NG == 1:
        b_zt = b_zt.to(DT)
    d_k, d_w, d_zt = wide, wide, cc
    if REP == 1:
        b_q = load_tile(p_q, o_c, o_k, stride_qt, R, K, BK, True)
        d_qb = load_tile(p_dqb, o_c, o_k, H * K, R, K, BK, True)
        d_e, d_a, d_qw = _head_dq(p_da, p_dq, d_qb, b_w, b_k, b_x, b_xl, b_zt, o_c, o_k, stride_dqt, R, K, BK, C, NW,
                                  NG, NX, DT)  # fmt: skip
        b_qw = _lower(mm(b_q, tl.trans(b_w), cc, 1, NW, DT), o_c, NG, DT)
        d_x = mm(tl.trans(b_qw), d_e, cc, NG, NG, DT)
        d_zt = mm(tl.trans(d_a), b_qw, d_zt, NG, NG, DT)
    else:  # E = dqb W^T: of all heads together QW^T E is U W^T, with U = QW^T dqb
        b_u = wide
        for j in range(REP):
            b_q = load_tile(p_q + j * stride_qh, o_c, o_k, stride_qt, R, K, BK, True)
            d_qb = load_tile(p_dqb + j * K, o_c, o_k, H * K, R, K, BK, True)
            b_qw = mm(b_q, tl.trans(b_w), cc, 1, NW, DT)
            d_a, b_qw = _of_scores(p_da + j * (C * C), b_qw, o_c, R, C, NG, DT), _lower(b_qw, o_c, NG, DT)
            d_zt = mm(tl.trans(d_a), b_qw, d_zt, NG, NG, DT)
            d_k = mm(tl.trans(d_a), b_q, d_k, NG, 1, DT)
            b_u = mm(tl.trans(b_qw), d_qb, b_u, NG, 1, DT)
        if NG == 1:
            b_u = b_u.to(DT)
        d_x = mm(b_u, tl.trans(b_w), cc, NG, NW, DT)
    d_kb = load_tile(p_dkb, o_c, o_k, G * K, R, K, BK, True)
    d_zt = -mm(d_kb, tl.trans(b_w), d_zt, 1, NW, DT)
    if NG == 1:  # still two pieces: what is made of dZ goes through V again
        d_zt, d_zl = two_pieces(d_zt, DT)
        d_x = mm(tl.trans(d_zl), b_kw, -d_x, 1, 1, DT)
        d_kw = mm(d_zl, b_x, cc, 1, 1, DT)
    else:
        d_x, d_kw = -d_x, cc
    d_x = mm(tl.trans(d_zt), b_kw, d_x, NG, NG, DT)
    if not WHOLE:
        tl.store(p_dx + o_cc, d_x)
    d_kw = tl.where(m_up, mm_pair(d_zt, b_x, b_xl, False, d_kw, NG, NX, DT), 0.0)
    b_eye = identity(d_kw, C, DT)
    if NG == 1:
        d_kw = d_kw.to(DT)
    m_ck = (o_c < R)[:, None] & (o_k < K)[None, :]
    if REP == 1:
        d_k = mm(tl.trans(d_a), b_q, d_k, NG, 1, DT)
    d_k = mm(d_kw, b_w, mm(b_eye, d_kb, d_k, 1, 1, DT), NG, NW, DT)
    p_dk += i_b * stride_dkb + i_g * stride_dkh + r * stride_dkt + o_c[:, None] * stride_dkt + o_k[None, :]
    tl.store(p_dk, d_k.to(p_dk.dtype.element_ty), mask=m_ck)
    if REP == 1:
        d_w = mm(tl.trans(d_qw), b_q, d_w, NG, 1, DT)
        b_p = -mm_pair(b_qw, b_x, b_xl, False, cc, NG, NX, DT)
        if NG == 1:
            b_p = b_p.to(DT)
        d_w = mm(tl.trans(b_p), d_qb, d_w, NG, 1, DT)
    else:
        d_w = mm(tl.trans(-b_x), b_u, d_w, NG, NG, DT)
        if NX == 2:
            d_w = mm(tl.trans(-b_xl), b_u, d_w, NG, NG, DT)
    d_w = mm(tl.trans(d_kw), b_k, mm(tl.trans(-b_zt), d_kb, d_w, NG, 1, DT), NG, 1, DT)
    if WHOLE:
        p_dm += ((i_b * N + i_c) * G + i_g) * (K * K)
        p_v += ((i_b * n_c + i_c) * G + i_g) * (C * C)
        p_beta += i_b * stride_bb + i_g * stride_bh + r * stride_bt
        p_dbeta += i_b * stride_dbb + i_g * stride_dbh + r * stride_dbt
        d_w = _product_bwd(d_w, d_x, b_w, b_x, p_dm, p_v, p_beta, p_dbeta, o_c, o_k, R, stride_bt, stride_dbt, K, BK, C,
                           NW, NG, DT, DV)  # fmt: skip
    if REP > 1:  # last, for what was added up before takes the registers
        for j in range(REP):
            d_qb = load_tile(p_dqb + j * K, o_c, o_k, H * K, R, K, BK, True)
            _, _, d_qw = _head_dq(p_da + j * (C * C), p_dq + j * stride_dqh, d_qb, b_w, b_k, b_x, b_xl, b_zt, o_c, o_k,
                                  stride_dqt, R, K, BK, C, NW, NG, NX, DT)  # fmt: skip
            b_q = load_tile(p_q + j * stride_qh, o_c, o_k, stride_qt, R, K, BK, True)
            d_w = mm(tl.trans(d_qw), b_q, d_w, NG, 1, DT)
    p_dw += i_b * stride_dwb + i_g * stride_dwh + r * stride_dwt + o_c[:, None] * stride_dwt + o_k[None, :]
    tl.store(p_dw, d_w.to(p_dw.dtype.element_ty), mask=m_ck)


@launched
@triton.jit(do_not_specialize=["T", "N"])
def path_product_bwd_kernel(
    p_w, p_beta, p_v, p_x, p_dx, p_dm, p_part, p_dw, p_dbeta, T, N,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh, stride_pb, stride_pt, stride_ph,
    stride_dwb, stride_dwt, stride_dwh, stride_dbb, stride_dbt, stride_dbh,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, NW: tl.constexpr, NG: tl.constexpr,
    DT: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dW and dbeta: the gradient of M is added to the dX and dW (p_part) that path_block_bwd_kernel left."""
    n_c = tl.cdiv(T, C)
    i_bg, i_c = head_and_tile(n_c)
    i_b, i_g = (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64)
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    r = (i_c * C).to(tl.int64)
    R = T - i_c * C
    p_w += i_b * stride_wb + i_g * stride_wh + r * stride_wt
    i_cc = ((i_b * n_c + i_c) * G + i_g) * (C * C)
    o_cc = i_cc + o_c[:, None] * C + o_c[None, :]
    b_w = load_tile(p_w, o_c, o_k, stride_wt, R, K, BK, True)  # [C, BK]
    p_dm += ((i_b * N + i_c) * G + i_g) * (K * K)
    p_beta += i_b * stride_bb + i_g * stride_bh + r * stride_bt
    p_dbeta += i_b * stride_dbb + i_g * stride_dbh + r * stride_dbt
    d_w = _product_bwd(tl.zeros([C, BK], tl.float32), tl.load(p_dx + o_cc), b_w, tl.load(p_x + o_cc), p_dm, p_v + i_cc,
                       p_beta, p_dbeta, o_c, o_k, R, stride_bt, stride_dbt, K, BK, C, NW, NG, DT, DV)  # fmt: skip
    m_ck = (o_c < R)[:, None] & (o_k < K)[None, :]
    p_part += i_b * stride_pb + i_g * stride_ph + r * stride_pt + o_c[:, None] * stride_pt + o_k[None, :]
    d_w += tl.load(p_part, mask=m_ck, other=0.0)
    p_dw += i_b * stride_dwb + i_g * stride_dwh + r * stride_dwt + o_c[:, None] * stride_dwt + o_k[None, :]
    tl.store(p_dw, d_w.to(p_dw.dtype.element_ty), mask=m_ck)


def block_level_backward(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, d: Leaves, kept: Kept, out: Gradients | None = None
) -> Gradients:
    """Gradients of q, k, w and beta, given those of what block_level made of them.

    Args:
        d: d.diag is not used above the diagonal; d.m [B, nodes, G, K, K] begins with the leaves.
        kept: what block_level left.
        out: where to put dq, dk, dw, dbeta: views of any floating dtype, with contiguous last dims but for dbeta;
            default: new tensors in the inputs' dtypes. Without dw and dbeta d.m is not read.
    """
    B, T, H, K = q.shape
    G, exact = k.shape[2], q.dtype == torch.float32
    if out is None:
        out = q.new_empty(q.shape), k.new_empty(k.shape), w.new_empty(w.shape), beta.new_empty(beta.shape)
    dq, dk, dw, dbeta = out
    fine = q.dtype != torch.bfloat16
    w = kept.w
    n, pieces = cdiv(T, BLOCK), 2 if fine and w.dtype == torch.float32 else 1
    dtype = tl.float32 if exact else tl.float16 if fine else tl.bfloat16
    whole = dw is not None and block_backward_at_once(q.dtype, machine(q.device))
    dx = kept.v if whole else torch.empty_like(kept.v, dtype=torch.float32)
    part = dw if dw is not None and (whole or dw.dtype == torch.float32) else w.new_empty(w.shape, dtype=torch.float32)
    d_beta = beta if dbeta is None else dbeta
    path_block_bwd_kernel[(n * B * G,)](
        q, k, w, kept.x, d.diag, d.q, d.k, dq, dk, part, dx, beta, kept.v, d.m, d_beta, T, B, d.m.shape[1],
        *q.stride()[:3], *k.stride()[:3], *w.stride()[:3], *dq.stride()[:3], *dk.stride()[:3], *part.stride()[:3],
        *beta.stride(), *d_beta.stride(), H=H, G=G, K=K, BK=tree_block(K), C=BLOCK, NW=pieces, NG=2 if fine else 1,
        NX=1 if fine else 2, DT=dtype, DV=tl.float32 if exact else tl.float16, WHOLE=whole, num_stages=1,
        **launch("block_bwd", K),
    )  # fmt: skip
    if dw is not None and dbeta is not None and not whole:
        path_product_bwd_kernel[(n * B * G,)](
            w, beta, kept.v, kept.x, dx, d.m, part, dw, dbeta, T, d.m.shape[1], *w.stride()[:3], *beta.stride(),
            *part.stride()[:3], *dw.stride()[:3], *dbeta.stride(), G=G, K=K, BK=tree_block(K), C=BLOCK, NW=pieces,
            NG=2 if fine else 1, DT=dtype, DV=tl.float32 if exact else tl.float16, num_stages=1,
            **launch("product_bwd", K),
        )  # fmt: skip
    return out
