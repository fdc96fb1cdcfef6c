r"""Gradients of the block level with decays of the channels (decayed.py), in three kernels.

path_decayed_block_bwd_kernel starts from diag, qb and kb, path_decayed_product_bwd_kernel from M and X; they leave the
gradients of the four products of pairs and of Ŵ and W̌. path_decayed_pairs_bwd_kernel makes of them those of q, k, w
and the gates.

A gate lies between the tokens of a pair, and the derivative of what the pair contributes in it is that contribution
itself. So a gate's gradient is the sum of :math:`x\,dx` over the vectors x that pass it, group by group, as in
``wall/portable/carry_backward.py``: nothing cancels, and a gate that is closed gets exactly 0. Inside of calm groups
the pairs that lie after a gate are taken off: of at most 64 tokens, and with no closed gate among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.channel_gates import add_gates_of, gate_spans, load_channel_gates, sum_channel_gates
from attnzoo.kernels.common.device import machine, sums_over_loops
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.common.tile_loads import load_tile
from attnzoo.kernels.levels.layout import BLOCK, Leaves

from .blocks_backward import Gradients
from .decayed import DecayedKept, apart, block_of, calm_groups, decayed_options, decayed_rows, decays, pairs_of


@launched
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
    m_to, m_after = gate_spans(o_c, 6)
    p_x, p_da, p_qw, p_wk = p_x + o_cc, p_da + o_cc, p_pairs + plane + o_cc, p_pairs + 2 * plane + o_cc
    m_a = m_le & (o_c < R)[:, None]
    zeros = tl.zeros([C, C], tl.float32)  # matrices are read where they are used, to spare registers
    d_e, d_z = zeros, apart(tl.trans(tl.load(p_qw)), tl.load(p_da, mask=m_a, other=0.0), zeros, PREC)  # -dZ
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        b_a = load_channel_gates(p_a, o_c, o_n, stride_at, R, K)
        b_w = decayed_rows(p_w, sum_channel_gates(m_to, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
        d_y = load_tile(p_dqb + row, o_c, o_n, H * K, R, K, BK, True).to(tl.float32)
        d_e = apart(d_y, tl.trans(b_w), d_e, PREC)
        b_w = decayed_rows(p_w, sum_channel_gates(m_after, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
        d_y = load_tile(p_dkb + row, o_c, o_n, H * K, R, K, BK, True).to(tl.float32)
        d_z = apart(b_w, tl.trans(d_y), d_z, PREC)
    p_dpairs += o_cc
    d_x = apart(d_z, tl.trans(tl.load(p_wk)), apart(tl.trans(tl.load(p_qw)), d_e, zeros, PREC), PREC)
    tl.store(p_dpairs + 2 * plane, -d_x)
    d_z = apart(tl.trans(tl.load(p_x)), d_z, zeros, PREC)
    tl.store(p_dpairs + plane, tl.where(o_c[:, None] > o_c[None, :], -d_z, 0.0))
    b_z = apart(tl.load(p_x), tl.load(p_wk), zeros, PREC)
    d_e = apart(d_e, tl.trans(tl.load(p_x)), zeros, PREC)
    d_e = apart(tl.load(p_da, mask=m_a, other=0.0), tl.trans(b_z), d_e, PREC)
    tl.store(p_dpairs, tl.where(m_le, -d_e, 0.0))
    b_p = tl.trans(apart(tl.load(p_qw), tl.load(p_x), zeros, PREC))
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        o_x, m_x = row + o_c[:, None] * (H * K) + o_n[None, :], (o_c < R)[:, None] & (o_n < K)[None, :]
        d_y = tl.load(p_dqb + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(p_back + o_x, -apart(b_p, d_y, tl.zeros([C, BC], tl.float32), PREC), mask=m_x)
        d_y = tl.load(p_dkb + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(p_forward + o_x, -apart(b_z, d_y, tl.zeros([C, BC], tl.float32), PREC), mask=m_x)


@launched
@triton.jit(do_not_specialize=["T", "N"])
def path_decayed_product_bwd_kernel(
    p_w, p_a, p_beta, p_ww, p_v, p_x, p_dm, p_dx, p_back, p_forward, p_dbeta, T, N,
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
    m_to, m_after = gate_spans(o_c, 6)
    b_x, d_x = tl.load(p_x + o_cc), tl.load(p_dx + o_cc)
    for i in range(0, BK, BC):  # dM by rows, then by columns
        o_r = i + tl.arange(0, BC)
        o_i, m_i = row + o_c[:, None] * (H * K) + o_r[None, :], (o_c < R)[:, None] & (o_r < K)[None, :]
        b_f, b_g = tl.zeros([C, BC], tl.float32), tl.zeros([C, BC], tl.float32)
        for c in range(0, BK, BC):
            o_n = c + tl.arange(0, BC)
            b_a = load_channel_gates(p_a, o_c, o_n, stride_at, R, K)
            m_k = (o_r < K)[:, None] & (o_n < K)[None, :]
            d_m = tl.load(p_dm + o_r[:, None] * K + o_n[None, :], mask=m_k, other=0.0).to(tl.float32)
            b_w = decayed_rows(p_w, sum_channel_gates(m_after, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
            b_f -= tl.dot(b_w, tl.trans(d_m), input_precision=PREC)
            d_m = tl.load(p_dm + o_n[:, None] * K + o_r[None, :], mask=tl.trans(m_k), other=0.0).to(tl.float32)
            b_w = decayed_rows(p_w, sum_channel_gates(m_to, b_a, NP), o_c, o_n, stride_wt, R, K, BK)
            b_g = tl.dot(b_w, d_m, b_g, input_precision=PREC)
        d_y = tl.load(p_forward + o_i, mask=m_i, other=0.0) - tl.dot(b_x, b_g, input_precision=PREC)
        tl.store(p_forward + o_i, d_y, mask=m_i)
        b_a = load_channel_gates(p_a, o_c, o_r, stride_at, R, K)
        b_w = decayed_rows(p_w, sum_channel_gates(m_to, b_a, NP), o_c, o_r, stride_wt, R, K, BK)
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


@launched
@triton.jit(do_not_specialize=["T", "N"])
def path_decayed_pairs_bwd_kernel(
    p_x, p_y, p_z, p_a, p_dy, p_dz, p_dc, p_part, p_dx, p_dg, p_dm, T, N, stride_xb, stride_xt, stride_xh,
    stride_yb, stride_yt, stride_yh, stride_zb, stride_zt, stride_zh, stride_ab, stride_at, stride_ah,
    stride_dxb, stride_dxt, stride_dxh, stride_dgb, stride_dgt, stride_dgh,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, NP: tl.constexpr,
    PREC: tl.constexpr, EARLY: tl.constexpr, OWN: tl.constexpr, GATE: tl.constexpr, PART: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """dx from its products with y and z, which are later if x is EARLY, and with the vectors outside of the block.

    p_dy, p_dz: gradients of these products, [B, nC, H, C, C], of the later vector by rows; of OWN of them the diagonal
    counts, too. p_dc [B, T, H, K]: that of x as it is carried out of the block. With PART dx is added to p_part.
    With GATE what x adds to the gates' gradient: for the first vector (of OWN = 2) it is stored, for the others added,
    for the LAST one with what the whole block's decay gives.
    """
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    p_x += i_b * stride_xb + i_h * stride_xh + r * stride_xt
    p_y += i_b * stride_yb + i_h * stride_yh + r * stride_yt
    p_z += i_b * stride_zb + i_h * stride_zh + r * stride_zt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    p_dx += i_b * stride_dxb + i_h * stride_dxh + r * stride_dxt
    p_dg += i_b * stride_dgb + i_h * stride_dgh + r * stride_dgt
    p_dm += ((i_b * N + r // C) * H + i_h) * (K * K)
    row = ((i_b * T + r) * H + i_h) * K
    p_dy += i_n * (C * C)
    p_dz += i_n * (C * C)
    o_cc = o_c[:, None] * C + o_c[None, :]
    m_to, m_after = gate_spans(o_c, 6)
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        m_x = (o_c < R)[:, None] & (o_n < K)[None, :]
        o_x = row + o_c[:, None] * (H * K) + o_n[None, :]
        b_a = load_channel_gates(p_a, o_c, o_n, stride_at, R, K)
        b_x = load_tile(p_x, o_c, o_n, stride_xt, R, K, BK, True).to(tl.float32)
        b_e = tl.exp2(sum_channel_gates(m_after if EARLY else m_to, b_a, NP))
        d_y = tl.load(p_dc + o_x, mask=m_x, other=0.0).to(tl.float32) * b_e
        d_g = tl.zeros([C, BC], tl.float32)
        if GATE:
            d_g = add_gates_of(d_g, m_after if EARLY else m_to, d_y * b_x, PREC)
        d_x = d_y
        if OWN > 0:
            d_own = tl.load(p_dy + o_c * (C + 1), mask=o_c < R, other=0.0)[:, None]
            d_x += d_own * load_tile(p_y, o_c, o_n, stride_yt, R, K, BK, True)
        if OWN > 1:
            d_own = tl.load(p_dz + o_c * (C + 1), mask=o_c < R, other=0.0)[:, None]
            d_x += d_own * load_tile(p_z, o_c, o_n, stride_zt, R, K, BK, True)
        calm = calm_groups(b_a, C, BC)
        for n in tl.range(tl.maximum(calm - 1, 0), 6, num_stages=1):
            m_i, i, inside = pairs_of(o_c, n, calm)
            m_i, z = m_i & (o_c < R)[:, None], n >> 3  # z is 0: reads that depend on n stay here, out of registers
            b_e, b_f, m_upto, m_past = decays(b_a, o_c, i, inside, NP)
            if not EARLY:
                b_e, b_f = b_f, b_e
            b_d = tl.load(p_dy + o_cc, mask=m_i, other=0.0)
            b_y = decayed_rows(p_y + z, b_e, o_c, o_n, stride_yt, R, K, BK)
            d_y = tl.dot(tl.trans(b_d) if EARLY else b_d, b_y, input_precision=PREC)
            b_d = tl.load(p_dz + o_cc, mask=m_i, other=0.0)
            b_y = decayed_rows(p_z + z, b_e, o_c, o_n, stride_zt, R, K, BK)
            d_y = tl.dot(tl.trans(b_d) if EARLY else b_d, b_y, d_y, input_precision=PREC)
            d_y *= tl.exp2(b_f)
            d_x += d_y
            if GATE:
                d_y *= load_tile(p_x + z, o_c, o_n, stride_xt, R, K, BK, True)
                if EARLY:  # the factors of later vectors are multiplied before this gate: their pairs count against it
                    d_y = tl.where(inside, -d_y, d_y)
                    m_upto = (inside & m_upto) | ((not inside) & m_past)
                d_g = add_gates_of(d_g, m_upto, d_y, PREC)
        if PART:
            d_x += tl.load(p_part + o_x, mask=m_x, other=0.0)
        tl.store(p_dx + o_c[:, None] * stride_dxt + o_n[None, :], d_x.to(p_dx.dtype.element_ty), mask=m_x)
        if GATE:
            p_t = p_dg + o_c[:, None] * stride_dgt + o_n[None, :]
            if OWN < 2:
                d_g += tl.load(p_t, mask=m_x, other=0.0)
            if LAST:
                b_m = tl.load(p_dm + o_n * (K + 1), mask=o_n < K, other=0.0).to(tl.float32)
                d_g += (b_m * tl.exp2(tl.sum(b_a, 0)))[None, :]
            tl.store(p_t, d_g, mask=m_x)


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
    (B, T, H, _), given = q.shape, decayed_options(q)
    dq, dk, dw, dbeta = out
    grid, gates = (cdiv(T, BLOCK) * B * H,), (*w.stride()[:3], *log_diag.stride()[:3])
    of_pairs = given | sums_over_loops(machine(q.device))
    dpairs = torch.empty_like(kept.pairs[1:])
    back, forward = (q.new_empty(q.shape, dtype=torch.float32) for _ in range(2))
    path_decayed_block_bwd_kernel[grid](
        w, log_diag, kept.pairs, kept.x, d.diag, d.q, d.k, dpairs, back, forward, T, B, *gates, **given
    )
    N, g = 0, dq
    if dw is not None and dbeta is not None and dgates is not None:
        N, g = d.m.shape[1], dgates
        path_decayed_product_bwd_kernel[grid](
            w, log_diag, beta, kept.pairs[3], kept.v, kept.x, d.m, dpairs[2], back, forward, dbeta, T, N, *gates,
            *beta.stride(), *dbeta.stride(), **given,
        )  # fmt: skip

    def vector(
        x: Tensor, y: Tensor, dy: Tensor, dz: Tensor, carried: Tensor, dx: Tensor, early: bool, own: int,
        part: Tensor | None = None,
    ) -> None:  # fmt: skip
        path_decayed_pairs_bwd_kernel[grid](
            x, y, w, log_diag, dy, dz, carried, dx if part is None else part, dx, g, d.m, T, N, *x.stride()[:3],
            *y.stride()[:3], *gates, *dx.stride()[:3], *g.stride()[:3], **of_pairs, EARLY=early, OWN=own,
            GATE=dw is not None, PART=part is not None, LAST=part is not None,
        )  # fmt: skip

    vector(q, k, d.diag, dpairs[0], d.q, dq, False, 2)
    vector(k, q, d.diag, dpairs[1], d.k, dk, True, 1)
    if dw is not None:
        vector(w, k, dpairs[1], dpairs[2], back, back, False, 0)
        vector(w, q, dpairs[0], dpairs[2], forward, dw, True, 1, part=back)
