"""Kernels around the one-pass backward over the levels: the own pair of blocks before it, dQ after it."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.gate_bias import gate_at, gates_from
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.row_delta import sink_weight
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.common.tile_order import tile_order
from attnzoo.kernels.levels.portable.dkdv import dkdv_scores


@triton.jit
def _level_of(p_start, i_l, i_t, HAS_START: tl.constexpr, RU: tl.constexpr):
    """Whether the queries of unit i_t read level i_l + 1, and the first of their packed rows."""
    h = RU << i_l
    u = i_t * RU // (2 * h)
    reads = (i_t * RU // h) % 2 == 1
    if HAS_START:
        reads = reads & (tl.load(p_start + i_t) < (2 * u + 1) * h)
    return reads, i_t * RU - (u + 1) * h


@triton.jit
def _rows(p_o, p_rest, p_do, p_lse, p_dlse, r, o_r, o_v, T, stride_ot, stride_dt, V: tl.constexpr, BV: tl.constexpr,
          HAS_REST: tl.constexpr, HAS_DLSE: tl.constexpr):  # fmt: skip
    """dO, lse (rows past T get weight 0) and delta = dO . (O + o_rest) - dlse of rows r + o_r of one head."""
    r64, n = r.to(tl.int64), T - r
    b_do = load_tile(p_do + r64 * stride_dt, o_r, o_v, stride_dt, n, V, BV, True)
    b_o = load_tile(p_o + r64 * stride_ot, o_r, o_v, stride_ot, n, V, BV, True).to(tl.float32)
    if HAS_REST:
        b_o += load_tile(p_rest + r64 * stride_ot, o_r, o_v, stride_ot, n, V, BV, True).to(tl.float32)
    b_lse = tl.load(p_lse + r + o_r, mask=o_r < n, other=float("inf"))
    b_delta = tl.sum(b_o * b_do.to(tl.float32), 1)
    if HAS_DLSE:
        b_delta -= tl.load(p_dlse + r + o_r, mask=o_r < n, other=0.0)
    return b_do, b_lse, b_delta


@triton.jit
def _store_rows(p, b, o_r, o_d, stride, n, D: tl.constexpr):
    p += o_r[:, None] * stride + o_d[None, :]
    tl.store(p, b.to(p.dtype.element_ty), mask=(o_r < n)[:, None] & (o_d < D)[None, :])


@triton.jit
def _add_pairs(p_sum, b_ds, C: tl.constexpr):
    """Sums of dS [keys, rows] over the keys, per pair of rows."""
    b_e = tl.sum(tl.reshape(tl.sum(b_ds, 0), [C // 2, 2]), 1)
    tl.atomic_add(p_sum + tl.arange(0, C // 2), b_e, sem="relaxed")


@launched
@triton.jit(do_not_specialize=["B", "T", "Tq", "n_levels", "stride_lb", "stride_lh"])
def path_pair_kernel(
    p_diag, p_qb, p_kb, p_v, p_o, p_rest, p_do, p_lse, p_rows, p_delta, p_ddiag, p_dqb, p_dkb, p_dv, p_tiles, p_sum,
    p_dc, p_w, p_dlse, p_sink, p_c, p_base, p_since, p_start, B, T, Tq, n_levels, scale, scale2, stride_vb, stride_vt,
    stride_vh, stride_ob, stride_ot, stride_oh, stride_db, stride_dt, stride_dh, stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RU: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr,
    HAS_REST: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DLSE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The own pair of blocks, one program per block of keys, and what the levels' pass starts from.

    Writes d(diag), dQ of odd blocks, dK of even ones, dV [B, G, Tp, BV] float32 and sums of dS per key [B, H, T]; lse
    and delta [B, H, Tp]; zeros into the tiles of dQ of each level (float32). Adds to sums of dS per pair of rows
    [B, H, Tp / 2]. Tp: T rounded up to RU. With a sink, or a gate and dlse, p_w gets what
    a row's dS must add up to, [B, H, T].
    """
    G: tl.constexpr = H // REP
    n_t, n_u = tl.cdiv(T, RU), tl.cdiv(T, C)
    n_b = n_t * (RU // C)
    i_bg, i_u = head_and_tile(n_b)
    i_b32, i_g = i_bg // G, (i_bg % G).to(tl.int64)
    i_b = i_b32.to(tl.int64)
    i_t = i_u // (RU // C)
    s = i_u * C
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    b_s = s + o_c
    s64 = s.to(tl.int64)
    p_v += i_b * stride_vb + i_g * stride_vh + s64 * stride_vt
    b_v = load_tile(p_v, o_c, o_v, stride_vt, T - s, V, BV, True)
    b_dv, b_dk = tl.zeros([C, BV], tl.float32), tl.zeros([C, BK], tl.float32)
    o_kb = ((i_b * T + s64) * G + i_g) * K
    meets = (s % RU == 0) & (s + C < T)  # the rows of an odd block
    for i_r in range(REP):
        i_h = i_g * REP + i_r
        i_bh = i_b * H + i_h
        p_oh, p_lowh = p_o + i_b * stride_ob + i_h * stride_oh, p_rest + i_b * stride_ob + i_h * stride_oh
        p_doh = p_do + i_b * stride_db + i_h * stride_dh
        p_sinceh = p_since + i_b * stride_lb + i_h.to(tl.int64) * stride_lh
        p_lseh, p_dlseh = p_lse + i_bh * T, p_dlse + i_bh * T
        for i_l in range(n_levels):  # while nothing else takes registers
            reads, r = _level_of(p_start + i_bh * n_t, i_l, i_t, HAS_START, RU)
            if reads:
                p_xt = p_tiles + (((i_l * B + i_b) * H + i_h) * (tl.cdiv(Tq, RU) * RU) + r + s % RU) * BK
                tl.store(p_xt + tl.arange(0, C * BK), tl.zeros([C * BK], tl.float32))
        b_do, b_lse, b_delta = _rows(p_oh, p_lowh, p_doh, p_lseh, p_dlseh, s, o_c, o_v, T, stride_ot, stride_dt, V, BV,
                                     HAS_REST, HAS_DLSE)  # fmt: skip
        o_row = i_bh * (n_t * RU) + b_s
        tl.store(p_rows + o_row, b_lse)
        tl.store(p_delta + o_row, b_delta)
        if HAS_SINK or (HAS_DLSE and GATE != 0):
            b_sum = tl.zeros([C], tl.float32)
            if HAS_SINK:
                b_sum = b_delta * sink_weight(p_sink, p_c, p_base, p_c, b_lse, b_s, i_bh, i_h, i_t * RU, T, T, C, GATE)
            if HAS_DLSE:
                b_sum += tl.load(p_dlseh + b_s, mask=b_s < T, other=0.0)
            tl.store(p_w + i_bh * T + b_s, b_sum, mask=b_s < T)
        b_bias = b_s.to(tl.float32)
        if GATE != 0:
            p_ch, p_baseh = p_c + i_bh * (n_u * C), p_base + i_bh * (n_u + 1)
            b_slope = tl.zeros([], tl.float32)
            b_ref = gate_at(p_ch, p_baseh, b_slope, i_t * RU, GATE, C)
            b_bias = gates_from(p_ch, p_baseh, b_slope, b_s, b_ref, b_s < T, GATE, C)
        o_d = ((i_b * n_u + i_u) * H + i_h) * (C * C) + o_c[None, :] * C + o_c[:, None]  # [keys, rows]
        b_y = tl.load(p_diag + o_d, mask=(b_s < T)[None, :], other=0.0)
        b_p, b_ds = dkdv_scores(b_y, b_v, b_do, b_lse, b_delta, b_bias, 0.0, p_sinceh, b_s, b_s, T, scale2, GATE,
                                 HAS_SINCE, PREC, True)  # fmt: skip
        tl.store(p_ddiag + o_d, b_ds * scale, mask=i_u < n_u)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PREC)
        b_dc = tl.sum(b_ds, 1)
        p_sumh = p_sum + i_bh * (n_t * RU // 2) + s // 2
        if GATE != 0:
            _add_pairs(p_sumh, b_ds, C)
        if meets:
            b_row = b_s + C
            b_do, b_lse, b_delta = _rows(p_oh, p_lowh, p_doh, p_lseh, p_dlseh, s + C, o_c, o_v, T, stride_ot,
                                         stride_dt, V, BV, HAS_REST, HAS_DLSE)  # fmt: skip
            o_q = ((i_b * T + s64 + C) * H + i_h) * K
            b_k = load_tile(p_kb + o_kb, o_c, o_k, G * K, C, K, BK, False)
            b_q = load_tile(p_qb + o_q, o_c, o_k, H * K, T - s - C, K, BK, True)
            b_y = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)
            b_p, b_ds = dkdv_scores(b_y, b_v, b_do, b_lse, b_delta, b_bias, 0.0, p_sinceh, b_s, b_row, T, scale2, GATE,
                                     HAS_SINCE, PREC, True)  # fmt: skip
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PREC)
            b_dsh = b_ds.to(b_q.dtype)
            b_dc += tl.sum(b_ds, 1)
            if GATE != 0:
                _add_pairs(p_sumh + C // 2, b_ds, C)
            b_dq = tl.dot(tl.trans(b_dsh), b_k, tl.zeros([C, BK], tl.float32), input_precision=PREC)
            _store_rows(p_dqb + o_q, b_dq * scale, o_c, o_k, H * K, T - s - C, K)
            if REP == 1:  # nothing is held for the next head
                b_one = tl.dot(b_dsh, b_q, input_precision=PREC)
                _store_rows(p_dkb + o_kb, b_one * scale, o_c, o_k, G * K, C, K)
            else:
                b_dk = tl.dot(b_dsh, b_q, b_dk, input_precision=PREC)
        if GATE != 0:
            tl.store(p_dc + i_bh * T + b_s, b_dc, mask=b_s < T)
    if meets and REP > 1:
        _store_rows(p_dkb + o_kb, b_dk * scale, o_c, o_k, G * K, C, K)
    tl.store(p_dv + (i_bg.to(tl.int64) * (n_t * RU) + s) * BV + o_c[:, None] * BV + o_v[None, :], b_dv)


@launched
@triton.jit(do_not_specialize=["B", "T", "Tq", "n_levels"])
def path_finish_kernel(
    p_tiles, p_dq, p_sum, p_w, p_dc, p_start, B, T, Tq, n_levels, scale, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr, RU: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr,
    HAS_START: tl.constexpr, HAS_ROW: tl.constexpr,
):  # fmt: skip
    """dQ of the levels, packed, in their dtype, where rows of the unit read them; what the sums of dS over rows are off
    is taken from the sums over columns."""
    n_t = tl.cdiv(T, RU)
    i_bh32, i_t = head_and_tile(n_t)
    i_bh = i_bh32.to(tl.int64)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    for i_l in range(n_levels):
        reads, r = _level_of(p_start + i_bh * n_t, i_l, i_t, HAS_START, RU)
        if reads:
            i_lb = i_l * B + i_bh // H
            p_xt = p_tiles + ((i_lb * H + i_bh32 % H) * (tl.cdiv(Tq, RU) * RU) + r) * BK + tl.arange(0, BT * BK)
            p_dqt = p_dq + (i_lb * Tq + r) * (H * K) + i_bh32 % H * K
            for i in range(RU // BT):
                b_dq = tile_order(tl.load(p_xt + i * BT * BK), BT, BK, M, N) * scale
                m_t = i_t * RU + i * BT + o_t < T
                p_t = p_dqt + (i * BT + o_t)[:, None] * (H * K) + o_k[None, :]
                tl.store(p_t, b_dq.to(p_dq.dtype.element_ty), mask=m_t[:, None] & (o_k < K)[None, :])
    if GATE != 0:
        o_r = i_t * RU + tl.arange(0, RU)
        b_e = tl.load(p_sum + i_bh * (n_t * RU // 2) + o_r // 2)
        if HAS_ROW:
            p_wp = p_w + i_bh * T + o_r // 2 * 2
            b_e -= tl.load(p_wp, mask=o_r < T, other=0.0) + tl.load(p_wp + 1, mask=o_r // 2 * 2 + 1 < T, other=0.0)
        b_e = tl.where((o_r % 2 == 0) & (o_r == T - 1), b_e, 0.5 * b_e)  # a last row without a partner
        p_dct = p_dc + i_bh * T + o_r
        tl.store(p_dct, tl.load(p_dct, mask=o_r < T, other=0.0) - b_e, mask=o_r < T)
