r"""Gradients of the block level with decays of the channels (decayed.py), in three kernels.

path_decayed_block_bwd_kernel starts from diag, qb and kb, path_decayed_product_bwd_kernel from M and X; they leave the
gradients of the four products of pairs and of Ŵ and W̌. path_decayed_pairs_bwd_kernel makes of them those of q, k, w
and the gates.

A gate lies between the tokens of a pair, and the derivative of what the pair contributes in it is that contribution
itself. So a gate's gradient is the sum of :math:`x\,dx` over the vectors x that pass it, group by group, as in
``wall/portable/carry_backward.py``: nothing cancels, and a gate that is closed gets exactly 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.channel_gates import add_gates, add_gates_of, load_gates, meet, spans
from attnzoo.kernels.common.tile_loads import load_tile
from attnzoo.kernels.path.levels import BLOCK, Leaves

from .blocks import Gradients
from .decayed import DecayedKept, block_of, carried, options


@triton.jit(do_not_specialize=["T", "B"])
def path_decayed_block_bwd_kernel(
    p_w, p_a, p_pairs, p_x, p_da, p_dqb, p_dkb, p_dpairs, p_back, p_forward, T, B,
    stride_wb, stride_wt, stride_wh, stride_ab, stride_at, stride_ah,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, NP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dQW, dWK and the parts of dX and of dŴ, dW̌ [B, T, H, K] float32 that do not come from M.

    p_dpairs [3, B, nC, H, C, C]: dQW, dWK, dX. With E = dqb Ŵ^T:

        dQW = -tril(E X^T + dA Z^T)   dZ = -QW^T dA - W̌ dkb^T   dX = -QW^T E + dZ WK^T   dWK = tril(X^T dZ, -1)
        dŴ  = -(QW X)^T dqb           dW̌ = -Z dkb
    """
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    p_w += i_b * stride_wb + i_h * stride_wh + r * stride_wt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    plane = B * tl.cdiv(T, C).to(tl.int64) * (H * C * C)
    row = ((i_b * T + r) * H + i_h) * K
    o_cc = i_n * (C * C) + o_c[:, None] * C + o_c[None, :]
    m_le = o_c[:, None] >= o_c[None, :]
    m_to, m_after = spans(o_c, 6)
    b_x, b_qw = tl.load(p_x + o_cc), tl.load(p_pairs + plane + o_cc)
    b_wk = tl.load(p_pairs + 2 * plane + o_cc)
    d_a = tl.load(p_da + o_cc, mask=m_le & (o_c < R)[:, None], other=0.0)
    d_e, d_z = tl.zeros([C, C], tl.float32), -tl.dot(tl.trans(b_qw), d_a, input_precision=PREC)
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        b_a = load_gates(p_a, o_c, o_n, stride_at, R, K)
        b_w = carried(p_w, add_gates(m_to, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
        d_y = load_tile(p_dqb + row, o_c, o_n, H * K, R, K, BK, True).to(tl.float32)
        d_e = tl.dot(d_y, tl.trans(b_w), d_e, input_precision=PREC)
        b_w = carried(p_w, add_gates(m_after, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
        d_y = load_tile(p_dkb + row, o_c, o_n, H * K, R, K, BK, True).to(tl.float32)
        d_z -= tl.dot(b_w, tl.trans(d_y), input_precision=PREC)
    b_z = tl.dot(b_x, b_wk, input_precision=PREC)
    d_qw = tl.dot(d_a, tl.trans(b_z), tl.dot(d_e, tl.trans(b_x), input_precision=PREC), input_precision=PREC)
    tl.store(p_dpairs + o_cc, tl.where(m_le, -d_qw, 0.0))
    d_wk = tl.dot(tl.trans(b_x), d_z, input_precision=PREC)
    tl.store(p_dpairs + plane + o_cc, tl.where(o_c[:, None] > o_c[None, :], d_wk, 0.0))
    d_x = tl.dot(d_z, tl.trans(b_wk), input_precision=PREC) - tl.dot(tl.trans(b_qw), d_e, input_precision=PREC)
    tl.store(p_dpairs + 2 * plane + o_cc, d_x)
    b_p = tl.trans(tl.dot(b_qw, b_x, input_precision=PREC))
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        o_x, m_x = row + o_c[:, None] * (H * K) + o_n[None, :], (o_c < R)[:, None] & (o_n < K)[None, :]
        d_y = tl.load(p_dqb + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(p_back + o_x, -tl.dot(b_p, d_y, input_precision=PREC), mask=m_x)
        d_y = tl.load(p_dkb + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(p_forward + o_x, -tl.dot(b_z, d_y, input_precision=PREC), mask=m_x)


@triton.jit(do_not_specialize=["T", "B", "N"])
def path_decayed_product_bwd_kernel(
    p_w, p_a, p_beta, p_ww, p_v, p_x, p_dm, p_dx, p_back, p_forward, p_dbeta, T, B, N,
    stride_wb, stride_wt, stride_wh, stride_ab, stride_at, stride_ah, stride_bb, stride_bt, stride_bh,
    stride_dbb, stride_dbt, stride_dbh,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, NP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dWW in the place of dX, dbeta, and what M adds to dŴ and dW̌.

    With F = -W̌ dM^T and S = -tril(V^T (dX diag(beta)) V^T, -1):

        dX += F Ŵ^T      dŴ += X^T F      dW̌ -= X Ŵ dM      dWW = diag(beta) S      dbeta = diag(V^T dX) + diag(S WW^T)

    What goes through V twice is not rounded to fewer bits: there roundings are amplified most.
    """
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    p_w += i_b * stride_wb + i_h * stride_wh + r * stride_wt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    p_dm += ((i_b * N + r // C) * H + i_h) * (K * K)
    row = ((i_b * T + r) * H + i_h) * K
    o_cc = i_n * (C * C) + o_c[:, None] * C + o_c[None, :]
    m_to, m_after = spans(o_c, 6)
    b_x, d_x = tl.load(p_x + o_cc), tl.load(p_dx + o_cc)
    for i in range(0, BK, BC):  # dM by rows, then by columns
        o_r = i + tl.arange(0, BC)
        o_i, m_i = row + o_c[:, None] * (H * K) + o_r[None, :], (o_c < R)[:, None] & (o_r < K)[None, :]
        b_f, b_g = tl.zeros([C, BC], tl.float32), tl.zeros([C, BC], tl.float32)
        for c in range(0, BK, BC):
            o_n = c + tl.arange(0, BC)
            b_a = load_gates(p_a, o_c, o_n, stride_at, R, K)
            m_k = (o_r < K)[:, None] & (o_n < K)[None, :]
            d_m = tl.load(p_dm + o_r[:, None] * K + o_n[None, :], mask=m_k, other=0.0).to(tl.float32)
            b_w = carried(p_w, add_gates(m_after, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
            b_f -= tl.dot(b_w, tl.trans(d_m), input_precision=PREC)
            d_m = tl.load(p_dm + o_n[:, None] * K + o_r[None, :], mask=tl.trans(m_k), other=0.0).to(tl.float32)
            b_w = carried(p_w, add_gates(m_to, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
            b_g = tl.dot(b_w, d_m, b_g, input_precision=PREC)
        d_y = tl.load(p_forward + o_i, mask=m_i, other=0.0) - tl.dot(b_x, b_g, input_precision=PREC)
        tl.store(p_forward + o_i, d_y, mask=m_i)
        b_a = load_gates(p_a, o_c, o_r, stride_at, R, K)
        b_w = carried(p_w, add_gates(m_to, b_a, NP), o_c, o_r, stride_wt, R, K, BK)
        d_x = tl.dot(b_f, tl.trans(b_w), d_x, input_precision=PREC)
        d_y = tl.dot(tl.trans(b_x), b_f, tl.load(p_back + o_i, mask=m_i, other=0.0), input_precision=PREC)
        tl.store(p_back + o_i, d_y, mask=m_i)
    p_beta += i_b * stride_bb + i_h * stride_bh + (r + o_c) * stride_bt
    b_beta = tl.load(p_beta, mask=o_c < R, other=0.0).to(tl.float32)
    b_v = tl.trans(tl.load(p_v + o_cc))
    d_l = tl.dot(b_v, d_x, input_precision="tf32x3")
    d_beta = tl.sum(tl.where(o_c[:, None] == o_c[None, :], d_l, 0.0), 1)
    d_l = -tl.dot(d_l * b_beta[None, :], b_v, input_precision="tf32x3")
    d_l = tl.where(o_c[:, None] > o_c[None, :], d_l, 0.0)
    d_beta += tl.sum(d_l * tl.load(p_ww + o_cc), 1)
    tl.store(p_dx + o_cc, d_l * b_beta[:, None])
    p_dbeta += i_b * stride_dbb + i_h * stride_dbh + (r + o_c) * stride_dbt
    tl.store(p_dbeta, d_beta.to(p_dbeta.dtype.element_ty), mask=o_c < R)


@triton.jit(do_not_specialize=["T", "B", "N"])
def path_decayed_pairs_bwd_kernel(
    p_q, p_k, p_w, p_a, p_da, p_dpairs, p_dqb, p_dkb, p_back, p_forward, p_dm, p_dq, p_dk, p_dw, p_dg, T, B, N,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh,
    stride_ab, stride_at, stride_ah, stride_dqb, stride_dqt, stride_dqh, stride_dkb, stride_dkt, stride_dkh,
    stride_dwb, stride_dwt, stride_dwh, stride_dgb, stride_dgt, stride_dgh,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, NP: tl.constexpr,
    PREC: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """dq, dk and, with ALL, dw and the gates' gradient, from those of the four products and of the carried q, k, w.

    First what later vectors give, then what earlier ones do; all is read where it is used, to spare registers.
    """
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    p_q += i_b * stride_qb + i_h * stride_qh + r * stride_qt
    p_k += i_b * stride_kb + i_h * stride_kh + r * stride_kt
    p_w += i_b * stride_wb + i_h * stride_wh + r * stride_wt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    p_dq += i_b * stride_dqb + i_h * stride_dqh + r * stride_dqt
    p_dk += i_b * stride_dkb + i_h * stride_dkh + r * stride_dkt
    p_dw += i_b * stride_dwb + i_h * stride_dwh + r * stride_dwt
    p_dg += i_b * stride_dgb + i_h * stride_dgh + r * stride_dgt
    p_dm += ((i_b * N + r // C) * H + i_h) * (K * K)
    row = ((i_b * T + r) * H + i_h) * K
    plane = B * tl.cdiv(T, C).to(tl.int64) * (H * C * C)
    o_n0 = i_n * (C * C) + o_c * (C + 1)
    p_qk, p_qw = p_da + i_n * (C * C) + o_c[:, None] * C + o_c[None, :], p_dpairs + i_n * (C * C)
    p_qw += o_c[:, None] * C + o_c[None, :]
    p_wk, p_ww = p_qw + plane, p_qw + 2 * plane
    d_qk = tl.load(p_da + o_n0, mask=o_c < R, other=0.0)[:, None]
    d_qw = tl.load(p_dpairs + o_n0)[:, None]
    m_all, m_past = spans(o_c, 6)
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        m_x = (o_c < R)[:, None] & (o_n < K)[None, :]
        o_x = row + o_c[:, None] * (H * K) + o_n[None, :]
        b_a = load_gates(p_a, o_c, o_n, stride_at, R, K)
        d_g = tl.zeros([C, BC], tl.float32)
        b_x = load_tile(p_q, o_c, o_n, stride_qt, R, K, BK, True).to(tl.float32)
        b_w = load_tile(p_w, o_c, o_n, stride_wt, R, K, BK, True).to(tl.float32)
        d_q = d_qk * load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True) + d_qw * b_w
        d_k, d_w = d_qk * b_x, d_qw * b_x
        for i in tl.range(6, num_stages=1):
            m_to, m_after = spans(o_c, i)
            m_i = meet(o_c, i)
            b_e, b_f = tl.exp2(add_gates(m_to, b_a, NP)), add_gates(m_after, b_a, NP)
            b_x = carried(p_k, b_f, o_c, o_n, stride_kt, R, K, BK)
            b_w = carried(p_w, b_f, o_c, o_n, stride_wt, R, K, BK)
            b_d = tl.load(p_qk, mask=m_i & (o_c < R)[:, None], other=0.0)
            b_y = tl.dot(b_d, b_x, input_precision=PREC)
            b_y = tl.dot(tl.load(p_qw, mask=m_i, other=0.0), b_w, b_y, input_precision=PREC) * b_e
            d_q += b_y
            if ALL:
                b_y *= load_tile(p_q, o_c, o_n, stride_qt, R, K, BK, True)
                b_z = tl.dot(tl.load(p_wk, mask=m_i, other=0.0), b_x, input_precision=PREC)
                b_z = tl.dot(tl.load(p_ww, mask=m_i, other=0.0), b_w, b_z, input_precision=PREC) * b_e
                d_w += b_z
                b_y += b_z * load_tile(p_w, o_c, o_n, stride_wt, R, K, BK, True)
                d_g = add_gates_of(d_g, m_to, b_y, PREC)
        b_e = tl.exp2(add_gates(m_all, b_a, NP))
        b_y = tl.load(p_dqb + o_x, mask=m_x, other=0.0).to(tl.float32) * b_e
        d_q += b_y
        p_t = p_dq + o_c[:, None] * stride_dqt + o_n[None, :]
        tl.store(p_t, d_q.to(p_dq.dtype.element_ty), mask=m_x)
        if ALL:
            b_y *= load_tile(p_q, o_c, o_n, stride_qt, R, K, BK, True)
            b_z = tl.load(p_back + o_x, mask=m_x, other=0.0) * b_e
            d_w += b_z
            b_y += b_z * load_tile(p_w, o_c, o_n, stride_wt, R, K, BK, True)
            d_g = add_gates_of(d_g, m_all, b_y, PREC)
        for i in tl.range(6, num_stages=1):
            m_to, m_after = spans(o_c, i)
            m_i = meet(o_c, i)
            b_e, b_f = add_gates(m_to, b_a, NP), tl.exp2(add_gates(m_after, b_a, NP))
            b_x = carried(p_q, b_e, o_c, o_n, stride_qt, R, K, BK)
            b_w = carried(p_w, b_e, o_c, o_n, stride_wt, R, K, BK)
            b_d = tl.load(p_qk, mask=m_i & (o_c < R)[:, None], other=0.0)
            b_y = tl.dot(tl.trans(b_d), b_x, input_precision=PREC)
            b_d = tl.load(p_wk, mask=m_i, other=0.0)
            b_y = tl.dot(tl.trans(b_d), b_w, b_y, input_precision=PREC) * b_f
            d_k += b_y
            if ALL:
                b_y *= load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
                b_d = tl.load(p_qw, mask=m_i, other=0.0)
                b_z = tl.dot(tl.trans(b_d), b_x, input_precision=PREC)
                b_d = tl.load(p_ww, mask=m_i, other=0.0)
                b_z = tl.dot(tl.trans(b_d), b_w, b_z, input_precision=PREC) * b_f
                d_w += b_z
                b_y += b_z * load_tile(p_w, o_c, o_n, stride_wt, R, K, BK, True)
                d_g = add_gates_of(d_g, m_after, b_y, PREC)
        b_f = tl.exp2(add_gates(m_past, b_a, NP))
        b_y = tl.load(p_dkb + o_x, mask=m_x, other=0.0).to(tl.float32) * b_f
        d_k += b_y
        p_t = p_dk + o_c[:, None] * stride_dkt + o_n[None, :]
        tl.store(p_t, d_k.to(p_dk.dtype.element_ty), mask=m_x)
        if ALL:
            b_y *= load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
            b_z = tl.load(p_forward + o_x, mask=m_x, other=0.0) * b_f
            d_w += b_z
            p_t = p_dw + o_c[:, None] * stride_dwt + o_n[None, :]
            tl.store(p_t, d_w.to(p_dw.dtype.element_ty), mask=m_x)
            b_y += b_z * load_tile(p_w, o_c, o_n, stride_wt, R, K, BK, True)
            d_g = add_gates_of(d_g, m_past, b_y, PREC)
            b_m = tl.load(p_dm + o_n * (K + 1), mask=o_n < K, other=0.0).to(tl.float32)
            d_g += (b_m * tl.exp2(tl.sum(b_a, 0)))[None, :]
            tl.store(p_dg + o_c[:, None] * stride_dgt + o_n[None, :], d_g, mask=m_x)


def decayed_backward(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_diag: Tensor, d: Leaves, kept: DecayedKept, out: Gradients,
    dgates: Tensor | None,
) -> None:  # fmt: skip
    """Fill the gradients of q, k, w, beta and log_diag, given those of what decayed_level made of them.

    Args:
        d: d.diag is not read above the diagonal; d.m [B, nodes, H, K, K] begins with the leaves.
        kept: what decayed_level left.
        out: dq, dk, dw, dbeta: views of any floating dtype, with contiguous last dims but for dbeta. Without dw and
            dbeta d.m is not read.
        dgates: that of log_diag, float32; None just where dw is.
    """
    (B, T, H, _), given = q.shape, options(q)
    dq, dk, dw, dbeta = out
    grid, gates = (triton.cdiv(T, BLOCK) * B * H,), (*w.stride()[:3], *log_diag.stride()[:3])
    dpairs = torch.empty_like(kept.pairs[1:])
    back, forward = (q.new_empty(q.shape, dtype=torch.float32) for _ in range(2))
    path_decayed_block_bwd_kernel[grid](
        w, log_diag, kept.pairs, kept.x, d.diag, d.q, d.k, dpairs, back, forward, T, B, *gates, **given
    )
    N, z, g = 0, dq, dq
    if dw is not None and dbeta is not None and dgates is not None:
        N, z, g = d.m.shape[1], dw, dgates
        path_decayed_product_bwd_kernel[grid](
            w, log_diag, beta, kept.pairs[3], kept.v, kept.x, d.m, dpairs[2], back, forward, dbeta, T, B, N, *gates,
            *beta.stride(), *dbeta.stride(), **given,
        )  # fmt: skip
    path_decayed_pairs_bwd_kernel[grid](
        q, k, w, log_diag, d.diag, dpairs, d.q, d.k, back, forward, d.m, dq, dk, z, g, T, B, N, *q.stride()[:3],
        *k.stride()[:3], *gates, *dq.stride()[:3], *dk.stride()[:3], *z.stride()[:3], *g.stride()[:3], **given,
        ALL=dw is not None,
    )  # fmt: skip
