"""Backward kernel that owns keys: a program takes one tile of keys and all rows that read it, level by level.

It makes dv, the gradient of the keys' bias (the gates'), dk of each level, and the gradient of the scores within a
block (d diag). ``backward.py`` launches it after the kernel that owns rows (``dq.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.gate_bias import gate_at, gates_from, row_shift
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.scores import product_gradient, scores
from attnzoo.kernels.common.tile_loads import load_tile, schedule

from .forward import level_tile


@triton.jit
def dkdv_scores(b_y, b_v, b_do, b_lse, b_delta, b_bias, b_shift, p_since, b_s, b_row, T, scale2, GATE: tl.constexpr,
                 HAS_SINCE: tl.constexpr, PREC: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """P and dS of one row tile; b_y = k q^T. # [BS, BT]"""
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PREC)  # in flight during exp2
    b_y = scores(b_y, scale2)
    if GATE != 0:
        b_lse -= b_shift  # from the frame of the row unit to that of the key tile
        b_y += b_bias[:, None]
    b_p = tl.exp2(b_y - b_lse[None, :])
    if MASK:
        m_y = (b_s[:, None] <= b_row[None, :]) & (b_row < T)[None, :]
        if HAS_SINCE:
            b_since = tl.load(p_since + b_row, mask=b_row < T, other=0)
            m_y = m_y & (b_s[:, None] >= b_since[None, :])
        b_p = tl.where(m_y, b_p, 0.0)
    return b_p, b_p * (b_dp - b_delta[None, :])


@triton.jit
def _row_gate(p_c, p_base, i, T, GATE: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr):
    """The running gate sum at the frame of row i's unit, in two parts, loaded one tile ahead. # float64, float32"""
    if GATE == 2:
        r = tl.minimum(i // RU * RU, T - 1)
        return tl.load(p_base + r // KU), tl.load(p_c + r)
    else:
        return tl.zeros([], tl.float64), tl.zeros([], tl.float32)


@triton.jit
def _load_rows(p_rows, b_row):
    """(lse, delta) of some rows. # [BT] each"""
    b_lse, b_delta = tl.split(tl.load(p_rows + b_row[:, None] * 2 + tl.arange(0, 2)[None, :]))
    return b_lse, b_delta


@triton.jit
def _row_tile(p_q, p_do, i_lb, Tq, r, i, i_h, o_t, o_k, o_v, stride_dt, T, H: tl.constexpr, K: tl.constexpr,
              V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """q (rows r of a level) and dO of the row tile at token i. # [BT, BK], [BT, BV]"""
    b_q = level_tile(p_q, i_lb, Tq, r, i_h, o_t, o_k, H, K, BK, T - i, False, MASK)
    b_do = load_tile(p_do + i * stride_dt.to(tl.int64), o_t, o_v, stride_dt, T - i, V, BV, MASK)
    return b_q, b_do


@launched
@triton.jit(do_not_specialize=["B", "T", "Tq", "Tk", "n_levels", "n_heads", "stride_lb", "stride_lh"])
def path_dkdv_portable_kernel(
    p_diag, p_qb, p_kb, p_q, p_k, p_v, p_do, p_rows, p_ddiag, p_dkb, p_dk, p_dv, p_dc, p_c, p_base, p_since, p_start,
    p_end, p_full, B, T, Tq, Tk, n_levels, n_heads, scale, scale2,
    stride_vb, stride_vt, stride_vh, stride_db, stride_dt, stride_dh, stride_ub, stride_ut, stride_uh, stride_lb,
    stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dK of each level and of the even blocks, d(diag), dV [B, T, G, V]; one program per key tile and key head.

    p_dc [n_levels + 1, B, H, T]: column sums of dS, own pair of blocks first; 0 before the call. Key tiles with the
    most rows (the first) run first.
    """
    G: tl.constexpr = H // REP
    i_s, i_bg = schedule(tl.cdiv(T, BS), n_heads)
    i_b32, i_g = i_bg // G, (i_bg % G).to(tl.int64)
    i_b = i_b32.to(tl.int64)
    s = i_s * BS
    s64 = s.to(tl.int64)
    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_s = s + o_s
    m_s = b_s < T
    n_u, n_t = tl.cdiv(T, KU), tl.cdiv(T, RU)
    b_v = load_tile(p_v + i_b * stride_vb + i_g * stride_vh + s64 * stride_vt, o_s, o_v, stride_vt, T - s, V, BV, True)
    b_k = load_tile(p_kb + ((i_b * T + s) * G + i_g) * K, o_s, o_k, G * K, T - s, K, BK, True)
    b_dk = tl.zeros([BS, BK], tl.float32)
    b_dv = tl.zeros([BS, BV], tl.float32)
    b_slope = tl.zeros([], tl.float32)

    # own pair of blocks
    for i_r in range(REP):
        i_h = i_g * REP + i_r
        i_bh = i_b * H + i_h
        p_rowsh = p_rows + i_bh * (n_t * RU) * 2
        p_sinceh = p_since + i_b * stride_lb + i_h.to(tl.int64) * stride_lh
        p_ch, p_baseh = p_c + i_bh * (n_u * KU), p_base + i_bh * (n_u + 1)
        b_ref = gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
        b_bias = b_s.to(tl.float32)
        if GATE != 0:
            b_bias = gates_from(p_ch, p_baseh, b_slope, b_s, b_ref, m_s, GATE, KU)
        b_shift = row_shift(p_ch, p_baseh, b_slope, b_ref, s, 0, T, GATE, RU, KU)
        b_dc = tl.zeros([BS], tl.float32)
        i_lo = s // BT * BT
        i_hi = tl.minimum(s // RU * RU + RU, n_u * KU)  # whole blocks: d(diag) is written past T too
        for i_n in tl.range(tl.cdiv(i_hi - i_lo, BT), num_stages=1):
            i = i_lo + i_n * BT
            b_row = i + o_t
            p_qt = p_qb + ((i_b * T + i) * H + i_h) * K
            b_q = load_tile(p_qt, o_t, o_k, H * K, T - i, K, BK, True)
            p_dot = p_do + i_b * stride_db + i_h * stride_dh + i.to(tl.int64) * stride_dt
            b_do = load_tile(p_dot, o_t, o_v, stride_dt, T - i, V, BV, True)
            own = i // KU == s // KU
            o_d = (((i_b * n_u + i // KU) * H + i_h) * KU + i % KU) * KU + s % KU
            o_d += o_t[None, :] * KU + o_s[:, None]  # [BS, BT]
            b_y = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)
            b_y = tl.where(own, tl.load(p_diag + o_d, mask=own & (b_row < T)[None, :], other=0.0), b_y)
            b_lse, b_delta = _load_rows(p_rowsh, b_row)
            b_p, b_ds = dkdv_scores(b_y, b_v, b_do, b_lse, b_delta, b_bias, b_shift, p_sinceh, b_s, b_row, T, scale2,
                                     GATE, HAS_SINCE, PREC, True)  # fmt: skip
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PREC)
            if GATE != 0:
                b_dc += tl.sum(b_ds, 1)
            b_ds = product_gradient(b_ds, b_y, scale2)
            tl.store(p_ddiag + o_d, b_ds * scale, mask=own)
            b_ds = tl.where(own, 0.0, b_ds)
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PREC)
        if GATE != 0:
            tl.store(p_dc + i_bh * T + b_s, b_dc, mask=m_s)
    if s // KU % 2 == 0:
        p_dkt = p_dkb + ((i_b * T + s) * G + i_g) * K + o_s[:, None] * (G * K) + o_k[None, :]
        tl.store(p_dkt, (b_dk * scale).to(p_dkb.dtype.element_ty), mask=m_s[:, None] & (o_k < K)[None, :])

    # levels
    for i_l in range(n_levels):
        h = RU << i_l
        u = s // (2 * h)
        r0 = (2 * u + 1) * h  # rows r0 .. r1
        r1 = tl.minimum(r0 + h, T)
        need = ((s // h) % 2 == 0) & (r0 < T)
        if HAS_START:
            first = s + BS
            for i_r in range(REP):
                first = tl.minimum(first, tl.load(p_start + (i_b * H + i_g * REP + i_r) * n_t + r0 // RU, mask=need,
                                                  other=2147483647))  # fmt: skip
            need = need & (first < s + BS)
        if need:
            i_lb = i_l * B + i_b32
            b_k = level_tile(p_k, i_lb, Tk, s - u * h, i_g, o_s, o_k, G, K, BK, BS, False, False)
            b_dk = tl.zeros([BS, BK], tl.float32)
            back = (u + 1) * h  # of a row: its token minus its packed row
            for i_r in range(REP):
                i_h = i_g * REP + i_r
                i_bh = i_b * H + i_h
                p_doh = p_do + i_b * stride_db + i_h * stride_dh
                p_rowsh = p_rows + i_bh * (n_t * RU) * 2
                p_sinceh = p_since + i_b * stride_lb + i_h.to(tl.int64) * stride_lh
                p_ch, p_baseh = p_c + i_bh * (n_u * KU), p_base + i_bh * (n_u + 1)
                b_ref = gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
                b_bias = b_s.to(tl.float32)
                if GATE != 0:
                    b_bias = gates_from(p_ch, p_baseh, b_slope, b_s, b_ref, m_s, GATE, KU)
                i_end, i_full = r1, r1
                if HAS_SINCE or HAS_START:
                    i_end = tl.minimum(r1, tl.load(p_end + i_bh * n_u + s // KU))
                    i_full = tl.minimum(r1, tl.load(p_full + i_bh * n_u + s // KU))
                i_mask = tl.maximum(
                    i_full // BT * BT, r0
                )  # from here the mask of since, a bound or the end of the rows
                b_dc = tl.zeros([BS], tl.float32)
                for i in tl.range(i_mask, i_end, BT, num_stages=1):
                    b_row = i + o_t
                    b_shift = row_shift(p_ch, p_baseh, b_slope, b_ref, i, 0, T, GATE, RU, KU)
                    b_q, b_do = _row_tile(p_q, p_doh, i_lb, Tq, i - back, i, i_h, o_t, o_k, o_v, stride_dt, T, H, K,
                                          V, BK, BV, True)  # fmt: skip
                    b_lse, b_delta = _load_rows(p_rowsh, b_row)
                    b_y = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)
                    b_p, b_ds = dkdv_scores(b_y, b_v, b_do, b_lse, b_delta, b_bias, b_shift, p_sinceh, b_s, b_row,
                                             T, scale2, GATE, HAS_SINCE, PREC, True)  # fmt: skip
                    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PREC)
                    if GATE != 0:
                        b_dc += tl.sum(b_ds, 1)
                    b_ds = product_gradient(b_ds, b_y, scale2)
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PREC)
                b_base, b_c = _row_gate(p_ch, p_baseh, r0, T, GATE, RU, KU)
                for i in range(r0, tl.minimum(i_mask, i_end), BT):
                    b_row = i + o_t
                    b_shift = (b_base + b_c - b_ref).to(tl.float32)
                    b_base, b_c = _row_gate(p_ch, p_baseh, i + BT, T, GATE, RU, KU)
                    b_q, b_do = _row_tile(p_q, p_doh, i_lb, Tq, i - back, i, i_h, o_t, o_k, o_v, stride_dt, T, H, K, V,
                                          BK, BV, False)  # fmt: skip
                    b_lse, b_delta = _load_rows(p_rowsh, b_row)
                    b_y = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)
                    b_p, b_ds = dkdv_scores(b_y, b_v, b_do, b_lse, b_delta, b_bias, b_shift, p_sinceh, b_s, b_row, T,
                                             scale2, GATE, HAS_SINCE, PREC, False)  # fmt: skip
                    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PREC)
                    if GATE != 0:
                        b_dc += tl.sum(b_ds, 1)
                    b_ds = product_gradient(b_ds, b_y, scale2)
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PREC)
                if GATE != 0:
                    tl.store(p_dc + ((i_l + 1) * B * H + i_bh) * T + b_s, b_dc, mask=m_s)
            p_dkt = p_dk + ((i_lb.to(tl.int64) * Tk + s - u * h) * G + i_g) * K
            p_dkt += o_s[:, None] * (G * K) + o_k[None, :]
            tl.store(p_dkt, (b_dk * scale).to(p_dk.dtype.element_ty), mask=(o_k < K)[None, :])
    p_dvt = p_dv + i_b * stride_ub + i_g * stride_uh + s64 * stride_ut + o_s[:, None] * stride_ut + o_v[None, :]
    tl.store(p_dvt, b_dv.to(p_dv.dtype.element_ty), mask=m_s[:, None] & (o_v < V)[None, :])
