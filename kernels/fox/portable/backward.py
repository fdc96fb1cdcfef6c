"""Backward kernels: one owns rows (dQ), one owns keys (dK, dV); nothing is added up across programs, so the
result does not depend on their order.

With P the weights, dP = dO V^T and delta_i = sum_j P_ij dP_ij:

    dS = P * (dP - delta),   dV = P^T dO,   dQ = scale dS K,   dK = scale dS^T Q,   d(bias) = dS.

With a softcap dQ and dK take dS times the slope of tanh (``common/scores.py``).

delta = dO . O holds for the exact output; the stored one is rounded, and the error, the same for a whole row, would
build up in the gate's suffix sums (1e-1 relative after 4096 tokens at a decay length of 8). The row kernel sees
sum_j dS_ij, which is 0 for the exact delta, so it corrects delta for the key kernel; with a sink of weight w the sum
is w delta. After that the gate's gradient needs the key side only.

Where the row's log-sum-exp has a gradient dlse of its own, dS = P * (dP - delta + dlse): delta - dlse takes delta's
place, and the sum over a row's keys is w (delta - dlse) + dlse.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attnzoo.kernels.common.approximate import log2
from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.forgetful_bias import (
    forgetful_bias,
    kept_weight,
    least_age,
    load_retention,
    retained,
    retention_slope,
    row_forgetful_bias,
    tokens_to_fall,
)
from attnzoo.kernels.common.forgotten import tiled_keys
from attnzoo.kernels.common.gate_bias import base_shift, const_gate, gate_at, gates_from, key_bias, row_shift
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.key_bounds import key_bounds
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import (
    addressable,
    can_describe,
    cdiv,
    dot_precision,
    gate_kind,
    head_block,
    retention_kind,
    retention_strides,
    row_strides,
    tile_descriptor,
)
from attnzoo.kernels.common.online_softmax import row_bounds
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.retention import numbers_of
from attnzoo.kernels.common.row_delta import row_delta_kernel, settle_delta
from attnzoo.kernels.common.scores import product_gradient, scores
from attnzoo.kernels.common.tile_loads import load_keys, load_tile, schedule
from attnzoo.kernels.fox.operands import FoxBackward, FoxSums


@triton.jit
def _dq_tile(b_dq, b_dr, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, b_slope, b_shift, i_b, s, i_g, o_s, o_k, o_v,
             b_pos, p_first, b_since, S, stride_ks, stride_vs, scale2, K: tl.constexpr, V: tl.constexpr,
             BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, HAS_SINCE: tl.constexpr, ROW_SUM: tl.constexpr,
             TMA: tl.constexpr, PREC: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr, p_keep, p_gone,
             rule):  # fmt: skip
    """dQ and row sums of dS from one key tile."""
    b_k = load_keys(p_k, i_b, s, i_g, o_s, o_k, stride_ks, S, K, BK, TMA, MASK)
    b_v = load_keys(p_v, i_b, s, i_g, o_s, o_v, stride_vs, S, V, BV, TMA, MASK)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)  # [BT, BS]
    b_y = scores(b_s, scale2)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PREC)  # [BT, BS]
    if GATE != 0:
        b_y += key_bias(p_c, b_slope, b_shift, s, o_s, GATE)[None, :]
    if KIND != 0:
        b_y += row_forgetful_bias(p_keep, p_gone, s, o_s, b_pos, p_first, S, rule, KIND, MASK)
    b_p = tl.exp2(b_y - b_lse[:, None])
    if MASK:
        m_y = (s + o_s)[None, :] <= b_pos[:, None]
        if HAS_SINCE:
            m_y = m_y & ((s + o_s)[None, :] >= b_since[:, None])
        b_p = tl.where(m_y, b_p, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])  # [BT, BS]
    if ROW_SUM:
        b_dr += tl.sum(b_ds, 1)
    b_ds = product_gradient(b_ds, b_s, scale2)
    b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PREC)
    return b_dq, b_dr


@launched
@triton.jit(do_not_specialize=["T", "S", "n_heads", "stride_lb", "stride_lh"])
def fox_dq_portable_kernel(
    p_q, p_k, p_v, p_do, p_rows, p_settled, p_w, p_dlse, p_dq, p_c, p_base, p_g, p_since, p_start, p_keep, p_gone, T, S,
    n_heads, scale, scale2, rule,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_db, stride_dt, stride_dh, stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DLSE: tl.constexpr,
    KIND: tl.constexpr, TMA: tl.constexpr, PREC: tl.constexpr, UNROUNDED: tl.constexpr,
):  # fmt: skip
    """dQ [B, T, H, K], and delta corrected in place, or UNROUNDED in p_settled; schedule and frame of the forward."""
    i_t, i_bh = schedule(tl.cdiv(T, BT), n_heads)
    i_t = tl.cdiv(T, BT) - 1 - i_t
    i_b32, i_h = i_bh // H, i_bh % H
    i_b = i_b32.to(tl.int64)
    off = S - T
    p_first = i_t * BT + off
    p_last = tl.minimum(i_t * BT + BT, T) - 1 + off
    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_pos = p_first + o_t
    r = (i_t * BT).to(tl.int64)
    m_t = i_t * BT + o_t < T
    if not TMA:
        p_k += i_b * stride_kb + (i_h // REP).to(tl.int64) * stride_kh
        p_v += i_b * stride_vb + (i_h // REP).to(tl.int64) * stride_vh
    p_qt = p_q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh + r * stride_qt
    p_dt = p_do + i_b * stride_db + i_h.to(tl.int64) * stride_dh + r * stride_dt
    b_q = load_tile(p_qt, o_t, o_k, stride_qt, T - i_t * BT, K, BK, True)
    b_do = load_tile(p_dt, o_t, o_v, stride_dt, T - i_t * BT, V, BV, True)
    p_r = i_bh.to(tl.int64) * T + i_t * BT + o_t
    row = i_bh.to(tl.int64) * (tl.cdiv(T, RU) * RU) + i_t * BT
    p_rows += row * 2
    b_lse, b_delta = tl.load(p_rows + o_t * 2), tl.load(p_rows + o_t * 2 + 1)
    p_settled = p_settled + row + o_t if UNROUNDED else p_rows + o_t * 2 + 1
    n_s = tl.cdiv(S, KU)
    p_c += i_bh.to(tl.int64) * (n_s * KU)
    p_base += i_bh.to(tl.int64) * (n_s + 1)
    p_since += i_b * stride_lb + i_h.to(tl.int64) * stride_lh
    i_bg, n_tiles = i_b32 * (H // REP) + i_h // REP, tl.cdiv(S, BS)
    p_keep += i_bg.to(tl.int64) * KIND * n_tiles * BS
    p_gone += i_bg * n_tiles
    b_slope = tl.zeros([], tl.float32)
    if GATE == 1:
        b_slope = const_gate(p_g, i_h)
    b_ref = gate_at(p_c, p_base, b_slope, i_t * BT // RU * RU + off, GATE, KU)
    b_since = b_pos
    if HAS_SINCE:
        b_since = tl.load(p_since + b_pos, mask=m_t, other=0)
    p_start += i_bh.to(tl.int64) * tl.cdiv(T, RU)
    near = least_age(rule, KIND)
    lo, full, mid, n_left, n_diag = row_bounds(
        p_since, p_start, i_t, p_first, p_last, BT, BS, RU, KU, HAS_SINCE, HAS_START, near
    )
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT], tl.float32)
    for i in range(n_left + n_diag):
        s = tl.where(i < n_diag, mid + i, lo + i - n_diag) * BS
        b_shift = base_shift(p_base, b_slope, b_ref, s, GATE, KU)
        b_dq, b_dr = _dq_tile(b_dq, b_dr, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, b_slope, b_shift, i_b32, s,
                              i_h // REP, o_s, o_k, o_v, b_pos, p_first, b_since, S, stride_ks, stride_vs, scale2, K, V,
                              BK, BV, GATE, HAS_SINCE, GATE != 0 or HAS_SINK, TMA, PREC, True, KIND, p_keep, p_gone,
                              rule)  # fmt: skip
    b_shift = base_shift(p_base, b_slope, b_ref, full * BS, GATE, KU)
    for i_s in range(full, mid):
        s = i_s * BS
        b_next = base_shift(p_base, b_slope, b_ref, s + BS, GATE, KU)
        b_dq, b_dr = _dq_tile(b_dq, b_dr, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, b_slope, b_shift, i_b32, s,
                              i_h // REP, o_s, o_k, o_v, b_pos, p_first, b_since, S, stride_ks, stride_vs, scale2, K, V,
                              BK, BV, GATE, HAS_SINCE, GATE != 0 or HAS_SINK, TMA, PREC, False, KIND, p_keep, p_gone,
                              rule)  # fmt: skip
        b_shift = b_next
    p_dqt = p_dq + ((i_b * T + i_t * BT) * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    tl.store(p_dqt, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_t[:, None] & (o_k[None, :] < K))
    if GATE != 0 or HAS_SINK:
        settle_delta(p_settled, p_w + p_r, p_dlse + p_r, b_delta, b_dr, m_t, HAS_SINK, HAS_DLSE)


@triton.jit
def _dkdv_tile(b_dk, b_dv, b_dc, b_db, b_df, b_k, b_v, b_bias, b_base, b_fade, p_q, p_do, p_rows, p_settled, p_since,
               p_start, b_shift, i_b, i, i_h, o_t, o_k, o_v, s, b_s, off, T, stride_qt, stride_dt, scale2,
               K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, RU: tl.constexpr,
               GATE: tl.constexpr, HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, TMA: tl.constexpr,
               PREC: tl.constexpr, UNROUNDED: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
               rule):  # fmt: skip
    """dK, dV, column sums of dS, or of its lags if gates are constant, and the gradient of retention, from the row tile
    that starts at row i.

    b_db, b_df: that gradient, of b_base and b_fade (``common/forgetful_bias.py``). With a rule and KIND 0 all biases
    are the same, a part of b_shift.
    """
    b_q = load_keys(p_q, i_b, i, i_h, o_t, o_k, stride_qt, T, K, BK, TMA, MASK)
    b_do = load_keys(p_do, i_b, i, i_h, o_t, o_v, stride_dt, T, V, BV, TMA, MASK)
    b_lse, b_delta = tl.split(tl.load(p_rows + (i + o_t)[:, None] * 2 + tl.arange(0, 2)[None, :]))  # [BT]
    if GATE != 0 or (KIND == 0 and rule is not None):
        b_lse -= b_shift  # from the frame of the row unit to that of the key tile
    b_x = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)  # [BS, BT]
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PREC)  # [BS, BT], in flight during exp2
    b_y = scores(b_x, scale2)
    if GATE != 0:
        b_y += b_bias[:, None]
    if KIND != 0:
        b_n = (off + i - s + o_t + 1).to(tl.float32)[None, :] - (b_s - s).to(tl.float32)[:, None]
        b_r = retained(b_base[:, None], b_fade[:, None], b_n, rule, KIND, MASK)
        if rule[3] is None:
            b_y += forgetful_bias(b_r, rule)
    b_p = tl.exp2(b_y - b_lse[None, :])  # [BS, BT]
    if KIND != 0 and rule[3] is not None:
        b_weight, b_slope = kept_weight(b_r, rule)
        b_p *= b_weight
        b_slope *= retention_slope(b_r, b_n, rule, KIND, MASK)
    if MASK:
        m_y = b_s[:, None] <= (off + i + o_t)[None, :]
        if HAS_SINCE:
            b_since = tl.load(p_since + off + i + o_t, mask=i + o_t < T, other=0)
            m_y = m_y & (b_s[:, None] >= b_since[None, :])
        if HAS_START:
            m_y = m_y & (b_s >= tl.load(p_start + i // RU))[:, None]
        b_p = tl.where(m_y, b_p, 0.0)
    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PREC)
    b_ds = b_p * (b_dp - b_delta[None, :])
    if GATE != 0:
        b_dy = b_ds
        if UNROUNDED:  # the gates' gradient alone takes delta corrected
            b_settled = tl.load(p_settled + i + o_t, mask=i + o_t < T, other=0.0)
            b_dy = b_p * (b_dp - b_settled[None, :])
        if GATE == 1:  # a constant gate counts once for each token of the lag
            b_dy *= ((off + i + o_t)[None, :] - b_s[:, None]).to(tl.float32)
        b_dc += tl.sum(b_dy, 1)
    if KIND != 0 and rule[3] is not None:
        b_slope *= b_ds
        b_db += tl.sum(b_slope, 1)
        if KIND == 2:
            b_df -= tl.sum(b_slope * log2(tl.maximum(b_n, 1.0) if MASK else b_n), 1)
    b_dsh = product_gradient(b_ds, b_x, scale2).to(b_q.dtype)
    b_dk = tl.dot(b_dsh, b_q, b_dk, input_precision=PREC)
    return b_dk, b_dv, b_dc, b_db, b_df


@launched
@triton.jit(do_not_specialize=["T", "S", "n_heads", "stride_lb", "stride_lh"])
def fox_dkdv_portable_kernel(
    p_q, p_k, p_v, p_do, p_rows, p_settled, p_dk, p_dv, p_dc, p_dr, p_c, p_base, p_g, p_since, p_start, p_end, p_full,
    p_keep, T, S, n_heads, scale, scale2, rule,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_db, stride_dt, stride_dh, stride_lb, stride_lh, stride_rb, stride_rs, stride_rh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, KIND: tl.constexpr, TMA: tl.constexpr, PREC: tl.constexpr,
    UNROUNDED: tl.constexpr,
):  # fmt: skip
    """dK [B, S, G, K], dV [B, S, G, V], column sums [B, H, S] of dS or its lags, the gradient of retention; one program
    per key tile and key head.

    Key tiles with the most rows (the first) run first.
    """
    G: tl.constexpr = H // REP
    i_s, i_bg = schedule(tl.cdiv(S, BS), n_heads)
    i_b32, i_g = i_bg // G, i_bg % G
    i_b = i_b32.to(tl.int64)
    off = S - T
    s = i_s * BS
    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_s = s + o_s  # [BS]
    s64 = s.to(tl.int64)
    b_k = load_tile(
        p_k + i_b * stride_kb + i_g.to(tl.int64) * stride_kh + s64 * stride_ks, o_s, o_k, stride_ks, S - s, K, BK, True
    )
    b_v = load_tile(
        p_v + i_b * stride_vb + i_g.to(tl.int64) * stride_vh + s64 * stride_vs, o_s, o_v, stride_vs, S - s, V, BV, True
    )
    b_dk = tl.zeros([BS, BK], tl.float32)
    b_dv = tl.zeros([BS, BV], tl.float32)
    b_db, b_df = tl.zeros([BS], tl.float32), tl.zeros([BS], tl.float32)
    b_base, b_fade = b_db, b_df
    if KIND != 0:
        b_base, b_fade = load_retention(
            p_keep + i_b * stride_rb + i_g.to(tl.int64) * stride_rh, b_s, S, stride_rs, KIND
        )
    i_lo = tl.maximum(s - off, 0) // BT * BT  # first row tile that sees the first key
    i_mid = s + BS - 1 - off + least_age(rule, KIND)  # from here every row is past every key, and may forget it
    i_mid = tl.cdiv(tl.maximum(i_mid, 0), BT) * BT
    i_gone = T  # from here every key is forgotten as far as it may be
    if KIND != 0:
        i_gone = s + BS - 1 - off + tokens_to_fall(b_base, b_fade, b_s < S, rule[5], KIND)
        i_gone = tl.cdiv(tl.maximum(i_gone, i_mid), BT) * BT
    for i_r in range(REP):
        i_h = i_g * REP + i_r
        i_bh = i_b * H + i_h
        p_qh, p_doh = p_q, p_do  # descriptors
        if not TMA:
            p_qh = p_q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh
            p_doh = p_do + i_b * stride_db + i_h.to(tl.int64) * stride_dh
        p_rowsh = p_rows + i_bh * (tl.cdiv(T, RU) * RU) * 2
        p_settledh = p_settled + i_bh * (tl.cdiv(T, RU) * RU)
        n_u = tl.cdiv(S, KU)
        p_ch = p_c + i_bh * (n_u * KU)
        p_baseh = p_base + i_bh * (n_u + 1)
        p_sinceh = p_since + i_b * stride_lb + i_h.to(tl.int64) * stride_lh
        p_starth = p_start + i_bh * tl.cdiv(T, RU)
        b_slope = tl.zeros([], tl.float32)
        if GATE == 1:
            b_slope = const_gate(p_g, i_h)
        b_ref = gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
        b_bias = b_s.to(tl.float32)
        if GATE != 0:
            b_bias = gates_from(p_ch, p_baseh, b_slope, b_s, b_ref, b_s < S, GATE, KU)
        i_end, i_full = T, T
        if HAS_SINCE or HAS_START:
            i_full = tl.load(p_full + i_bh * n_u + s // KU)
            i_end = tl.load(p_end + i_bh * n_u + tl.minimum((s + BS - 1) // KU, n_u - 1))
        i_mask = tl.maximum(i_full // BT * BT, i_mid)  # from here the mask of since, a bound or the end of the rows
        n_head = tl.cdiv(tl.maximum(tl.minimum(i_mid, i_end) - i_lo, 0), BT)
        n_tail = tl.cdiv(tl.maximum(i_end - i_mask, 0), BT)
        b_dc = tl.zeros([BS], tl.float32)
        for i_n in range(n_head + n_tail):
            i = tl.where(i_n < n_head, i_lo + i_n * BT, i_mask + (i_n - n_head) * BT)
            b_shift = row_shift(p_ch, p_baseh, b_slope, b_ref, i, off, S, GATE, RU, KU)
            b_dk, b_dv, b_dc, b_db, b_df = _dkdv_tile(
                b_dk, b_dv, b_dc, b_db, b_df, b_k, b_v, b_bias, b_base, b_fade, p_qh, p_doh, p_rowsh, p_settledh,
                p_sinceh, p_starth, b_shift, i_b32, i, i_h, o_t, o_k, o_v, s, b_s, off, T, stride_qt, stride_dt, scale2,
                K, V, BK, BV, RU, GATE, HAS_SINCE, HAS_START, TMA, PREC, UNROUNDED, True, KIND, rule)  # fmt: skip
        b_shift = row_shift(p_ch, p_baseh, b_slope, b_ref, i_mid, off, S, GATE, RU, KU)
        for i in range(i_mid, tl.minimum(tl.minimum(i_mask, i_end), i_gone), BT):
            b_next = row_shift(p_ch, p_baseh, b_slope, b_ref, i + BT, off, S, GATE, RU, KU)
            b_dk, b_dv, b_dc, b_db, b_df = _dkdv_tile(
                b_dk, b_dv, b_dc, b_db, b_df, b_k, b_v, b_bias, b_base, b_fade, p_qh, p_doh, p_rowsh, p_settledh,
                p_sinceh, p_starth, b_shift, i_b32, i, i_h, o_t, o_k, o_v, s, b_s, off, T, stride_qt, stride_dt, scale2,
                K, V, BK, BV, RU, GATE, HAS_SINCE, HAS_START, TMA, PREC, UNROUNDED, False, KIND, rule)  # fmt: skip
            b_shift = b_next
        if KIND != 0 and rule[3] is not None:  # rows for which all keys are as far forgotten as they ever are
            b_shift = row_shift(p_ch, p_baseh, b_slope, b_ref, i_gone, off, S, GATE, RU, KU)
            for i in range(i_gone, tl.minimum(i_mask, i_end), BT):
                b_next = row_shift(p_ch, p_baseh, b_slope, b_ref, i + BT, off, S, GATE, RU, KU)
                b_dk, b_dv, b_dc, b_db, b_df = _dkdv_tile(
                    b_dk, b_dv, b_dc, b_db, b_df, b_k, b_v, b_bias, b_base, b_fade, p_qh, p_doh, p_rowsh, p_settledh,
                    p_sinceh, p_starth, b_shift - rule[2], i_b32, i, i_h, o_t, o_k, o_v, s, b_s, off, T, stride_qt,
                    stride_dt, scale2, K, V, BK, BV, RU, GATE, HAS_SINCE, HAS_START, TMA, PREC, UNROUNDED, False, 0,
                    rule)  # fmt: skip
                b_shift = b_next
        if GATE != 0:
            tl.store(p_dc + i_bh * S + b_s, b_dc, mask=b_s < S)
    if KIND != 0:
        p_drt = p_dr + ((i_b * S + b_s) * G + i_g) * KIND
        tl.store(p_drt, b_db, mask=b_s < S)
        if KIND == 2:
            tl.store(p_drt + 1, b_df * (1.0 / TL_LOG2E), mask=b_s < S)
    m_s = (b_s < S)[:, None]
    p_dkt = p_dk + ((i_b * S + s64) * G + i_g) * K + o_s[:, None] * (G * K) + o_k[None, :]
    p_dvt = p_dv + ((i_b * S + s64) * G + i_g) * V + o_s[:, None] * (G * V) + o_v[None, :]
    tl.store(p_dkt, (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_s & (o_k < K)[None, :])
    tl.store(p_dvt, b_dv.to(p_dv.dtype.element_ty), mask=m_s & (o_v < V)[None, :])


def fox_backward(x: FoxBackward, plan: Plan) -> FoxSums:
    """Launch the backward kernels on what the forward pass saved, as far as gradients are wanted."""
    (q, k, v, log_decay, sink, options, retention, rule), (o, _, lse, rows, _) = x.given, x.made
    c, base, *limits = rows.pointers(lse)
    do, dlse, scale, unrounded = addressable(x.do), x.dlse, options.scale, x.unrounded
    (B, T, H, K), (S, G), V = q.shape, k.shape[1:3], v.shape[3]
    gate, has_sink = gate_kind(log_decay), sink is not None
    row_pairs = lse.new_empty((B, H, cdiv(T, ROW_UNIT) * ROW_UNIT, 2))
    settled = lse.new_empty(row_pairs.shape[:3]) if unrounded and gate else lse
    drow = torch.empty_like(lse) if has_sink or (gate and dlse is not None) else None
    dkey = lse.new_empty((B, H, S)) if gate else None
    dretention = None if retention is None else lse.new_empty(retention.shape)
    like = lse if unrounded else q
    dq, dk, dv = like.new_empty((B, T, H, K)), like.new_empty((B, S, G, K)), v.new_empty((B, S, G, V))
    flags: dict[str, Any] = {
        **x.given.dims, **rows.flags, "GATE": gate, "PREC": dot_precision(q.dtype), "RU": ROW_UNIT, "KU": KEY_UNIT,
        "UNROUNDED": unrounded, "KIND": retention_kind(retention),
    }  # fmt: skip
    gates = (c, base, lse if log_decay is None else log_decay)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *row_strides(rows.first_visible))
    p_keep, numbers = lse if retention is None else retention, numbers_of(rule, retention_kind(retention))
    p_w, p_dlse = lse if drow is None else drow, lse if dlse is None else dlse
    row_delta_kernel[(B * H * (row_pairs.shape[2] // 64),)](
        o, do, lse, p_dlse, row_pairs, p_w, *gates, lse if sink is None else sink, T, S, *o.stride()[:3],
        *do.stride()[:3], H=H, V=V, BV=head_block(V), BT=64, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate, HAS_SINK=has_sink,
        HAS_DLSE=dlse is not None,
    )  # fmt: skip
    if x.wanted.rows:
        t = plan.of("dq")
        tiled = (lse, lse) if retention is None or rule is None else tiled_keys(retention, rule, t.BS)
        tma = t.tma and can_describe(k, v)
        p_k, p_v = (tile_descriptor(k, t.BS), tile_descriptor(v, t.BS)) if tma else (k, v)
        fox_dq_portable_kernel[(cdiv(T, t.BT) * B * H,)](
            q, p_k, p_v, do, row_pairs, settled, p_w, p_dlse, dq, *gates, *limits, *tiled, T, S,
            min(t.heads, B * H), scale, options.scale2, numbers, *strides, **flags, BT=t.BT, BS=t.BS, HAS_SINK=has_sink,
            HAS_DLSE=dlse is not None, TMA=tma, num_warps=t.num_warps, num_stages=t.num_stages, maxnreg=t.maxnreg,
        )  # fmt: skip
    if x.wanted.keys:
        end, full = key_bounds(*rows[2:], B, T, H, S)[:2] if rows.bounded else limits
        t = plan.of("dkdv")
        tma = t.tma and can_describe(q, do)
        p_q, p_do = (tile_descriptor(q, t.BT), tile_descriptor(do, t.BT)) if tma else (q, do)
        fox_dkdv_portable_kernel[(cdiv(S, t.BS) * B * G,)](
            p_q, k, v, p_do, row_pairs, settled, dk, dv, lse if dkey is None else dkey,
            lse if dretention is None else dretention, *gates, *limits, end, full, p_keep, T, S, min(t.heads, B * G),
            scale, options.scale2, numbers, *strides, *retention_strides(retention), **flags,
            BT=t.BT, BS=t.BS, TMA=tma, num_warps=t.num_warps, num_stages=t.num_stages, maxnreg=t.maxnreg,
        )  # fmt: skip
    return FoxSums(dq, dk, dv, dkey, drow, dretention)
