"""Backward kernels.

With P the weights, dP = dO V^T and delta_i = dO_i . O_i:   dS = P * (dP - delta),   dV = P^T dO,
dQ = scale dS K,   dK = scale dS^T Q,   d(bias) = dS. Two schedules of the same tile:

- two kernels (deterministic): rows own dQ, keys own dK and dV; seven products per tile pair;
- one kernel (``fused``): keys own dK and dV, dQ is added up in float32 with atomics; five products.

Row and column sums of dS go to the gate's gradient (gates.gate_gradient).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fwd import LOG2E, _const_gate, _gate_at, _key_bias, _load_tile, _row_bounds, gate_kind, head_block, left_strides
from .prune import key_bounds
from .tuning import KEY_UNIT, ROW_UNIT, dot_precision, tiles


@triton.jit(do_not_specialize=["T", "S", "stride_ob", "stride_db"])
def fox_delta_kernel(
    p_o, p_do, p_lse, p_delta, p_ps, p_c, p_g, p_sink, T, S,
    stride_ob, stride_ot, stride_oh, stride_db, stride_dt, stride_dh,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, RU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINK: tl.constexpr,
):  # fmt: skip
    """delta [B, H, T] = dO . O per row; with a sink also its weight times delta."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    r = (i_t * BT).to(tl.int64)
    p_ot = p_o + i_b * stride_ob + i_h * stride_oh + r * stride_ot
    p_dt = p_do + i_b * stride_db + i_h * stride_dh + r * stride_dt
    b_o = _load_tile(p_ot, o_t, o_v, stride_ot, T - i_t * BT, V, BV, True).to(tl.float32)
    b_do = _load_tile(p_dt, o_t, o_v, stride_dt, T - i_t * BT, V, BV, True).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)  # [BT]
    o_r = i_t * BT + o_t
    p_r = i_bh.to(tl.int64) * T + o_r
    tl.store(p_delta + p_r, b_delta, mask=o_r < T)
    if HAS_SINK:
        p_ref = i_t * BT // RU * RU + S - T
        b_y = tl.zeros([BT], tl.float32) + tl.load(p_sink + i_h).to(tl.float32) * 1.4426950408889634
        if GATE == 2:
            p_c += i_bh.to(tl.int64) * 2 * S
            ref_hi, ref_lo = _gate_at(p_c, 0.0, p_ref, S, GATE)
            b_hi = tl.load(p_c + o_r + S - T, mask=o_r < T, other=0.0)
            b_lo = tl.load(p_c + S + o_r + S - T, mask=o_r < T, other=0.0)
            b_y += (ref_hi - b_hi) + (ref_lo - b_lo)
        elif GATE == 1:
            b_y += (p_ref - (o_r + S - T)).to(tl.float32) * _const_gate(p_g, i_h)
        b_lse = tl.load(p_lse + p_r, mask=o_r < T, other=float("inf"))
        tl.store(p_ps + p_r, tl.exp2(b_y - b_lse) * b_delta, mask=o_r < T)


@triton.jit
def _dq_tile(b_dq, b_dr, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, b_slope, s, o_s, o_k, o_v, b_pos, b_left,
             ref_hi, ref_lo, S, stride_ks, stride_vs, scale2, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
             BV: tl.constexpr, GATE: tl.constexpr, HAS_LEFT: tl.constexpr, PREC: tl.constexpr,
             MASK: tl.constexpr):  # fmt: skip
    """dQ and row sums of dS from one key tile."""
    b_k = _load_tile(p_k + s * stride_ks.to(tl.int64), o_s, o_k, stride_ks, S - s, K, BK, MASK)  # [BS, BK]
    b_v = _load_tile(p_v + s * stride_vs.to(tl.int64), o_s, o_v, stride_vs, S - s, V, BV, MASK)  # [BS, BV]
    b_y = tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * scale2  # [BT, BS]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PREC)  # [BT, BS]
    if GATE != 0:
        b_y += _key_bias(p_c, b_slope, s, o_s, ref_hi, ref_lo, S, GATE, MASK)[None, :]
    b_p = tl.exp2(b_y - b_lse[:, None])
    if MASK:
        m_y = (s + o_s)[None, :] <= b_pos[:, None]
        if HAS_LEFT:
            m_y = m_y & ((s + o_s)[None, :] >= b_left[:, None])
        b_p = tl.where(m_y, b_p, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])  # [BT, BS]
    if GATE != 0:
        b_dr += tl.sum(b_ds, 1)
    b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PREC)
    return b_dq, b_dr


@triton.jit(do_not_specialize=["T", "S", "stride_qb", "stride_kb", "stride_vb", "stride_db", "stride_lb", "stride_lh"])
def fox_dq_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dq, p_dr, p_c, p_g, p_left, p_start, T, S, scale, scale2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_db, stride_dt, stride_dh, stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_START: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dQ [B, T, H, K] and row sums of dS [B, H, T]; schedule and frame of the forward kernel."""
    n_t = tl.cdiv(T, BT)
    n_bh = tl.num_programs(0) // n_t
    i_t = n_t - 1 - tl.program_id(0) // n_bh
    i_bh = tl.program_id(0) % n_bh
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    off = S - T
    p_first = i_t * BT + off
    p_last = tl.minimum(i_t * BT + BT, T) - 1 + off
    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_pos = p_first + o_t
    r = (i_t * BT).to(tl.int64)
    m_t = i_t * BT + o_t < T
    p_k += i_b * stride_kb + (i_h // REP) * stride_kh
    p_v += i_b * stride_vb + (i_h // REP) * stride_vh
    p_qt = p_q + i_b * stride_qb + i_h * stride_qh + r * stride_qt
    p_dt = p_do + i_b * stride_db + i_h * stride_dh + r * stride_dt
    b_q = _load_tile(p_qt, o_t, o_k, stride_qt, T - i_t * BT, K, BK, True)
    b_do = _load_tile(p_dt, o_t, o_v, stride_dt, T - i_t * BT, V, BV, True)
    p_r = i_bh.to(tl.int64) * T + i_t * BT + o_t
    b_lse = tl.load(p_lse + p_r, mask=m_t, other=float("inf"))  # rows past T get weight 0
    b_delta = tl.load(p_delta + p_r, mask=m_t, other=0.0)
    p_c += i_bh.to(tl.int64) * 2 * S
    p_left += i_b * stride_lb + i_h * stride_lh
    b_slope = 0.0
    if GATE == 1:
        b_slope = _const_gate(p_g, i_h)
    ref_hi, ref_lo = _gate_at(p_c, b_slope, i_t * BT // RU * RU + off, S, GATE)
    b_left = b_pos
    if HAS_LEFT:
        b_left = tl.load(p_left + b_pos, mask=m_t, other=0)
    p_start += i_bh.to(tl.int64) * tl.cdiv(T, RU)
    lo, full, mid, n_left, n_diag = _row_bounds(
        p_left, p_start, i_t, p_first, p_last, BT, BS, RU, KU, HAS_LEFT, HAS_START
    )
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT], tl.float32)
    for i in range(0, n_left + n_diag):
        s = tl.where(i < n_diag, mid + i * BS, lo + (i - n_diag) * BS)
        b_dq, b_dr = _dq_tile(b_dq, b_dr, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, b_slope, s, o_s, o_k, o_v,
                              b_pos, b_left, ref_hi, ref_lo, S, stride_ks, stride_vs, scale2, K, V, BK, BV, GATE,
                              HAS_LEFT, PREC, True)  # fmt: skip
    for s in range(full, mid, BS):
        b_dq, b_dr = _dq_tile(b_dq, b_dr, b_q, b_do, b_lse, b_delta, p_k, p_v, p_c, b_slope, s, o_s, o_k, o_v,
                              b_pos, b_left, ref_hi, ref_lo, S, stride_ks, stride_vs, scale2, K, V, BK, BV, GATE,
                              HAS_LEFT, PREC, False)  # fmt: skip
    p_dqt = p_dq + ((i_b * T + i_t * BT) * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    tl.store(p_dqt, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_t[:, None] & (o_k[None, :] < K))
    if GATE != 0:
        tl.store(p_dr + p_r, b_dr, mask=m_t)


@triton.jit
def _dkdv_tile(b_dk, b_dv, b_dc, b_k, b_v, b_bias, p_q, p_do, p_r, p_dq, p_dr, p_c, b_slope, p_left, p_start,
               i, o_t, o_k, o_v, b_s, ref_hi, ref_lo, off, T, S, stride_qt, stride_dt, scale, scale2,
               H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               RU: tl.constexpr, GATE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_START: tl.constexpr,
               FUSED: tl.constexpr, PREC: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """dK, dV and column sums of dS from the row tile that starts at row i; FUSED also adds to dQ and row sums."""
    b_q = _load_tile(p_q + i * stride_qt.to(tl.int64), o_t, o_k, stride_qt, T - i, K, BK, MASK)  # [BT, BK]
    b_do = _load_tile(p_do + i * stride_dt.to(tl.int64), o_t, o_v, stride_dt, T - i, V, BV, MASK)  # [BT, BV]
    p_lse, p_delta = p_r
    if MASK:
        b_lse = tl.load(p_lse + i + o_t, mask=i + o_t < T, other=float("inf"))  # rows past T get weight 0
        b_delta = tl.load(p_delta + i + o_t, mask=i + o_t < T, other=0.0)
    else:
        b_lse, b_delta = tl.load(p_lse + i + o_t), tl.load(p_delta + i + o_t)
    b_y = tl.dot(b_k, tl.trans(b_q), input_precision=PREC) * scale2  # [BS, BT]
    if GATE != 0:  # from the frame of the row unit to that of the key tile
        row_hi, row_lo = _gate_at(p_c, b_slope, i // RU * RU + off, S, GATE)
        b_row = (row_hi - ref_hi) + (row_lo - ref_lo)
        if GATE == 1:
            b_row = b_row * b_slope
        b_y += b_bias[:, None]
        b_lse -= b_row
    b_p = tl.exp2(b_y - b_lse[None, :])  # [BS, BT]
    if MASK:
        m_y = b_s[:, None] <= (off + i + o_t)[None, :]
        if HAS_LEFT:
            b_left = tl.load(p_left + off + i + o_t, mask=i + o_t < T, other=0)
            m_y = m_y & (b_s[:, None] >= b_left[None, :])
        if HAS_START:
            m_y = m_y & (b_s >= tl.load(p_start + i // RU))[:, None]
        b_p = tl.where(m_y, b_p, 0.0)
    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PREC)
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PREC)  # [BS, BT]
    b_ds = b_p * (b_dp - b_delta[None, :])
    if GATE != 0:
        b_dc += tl.sum(b_ds, 1)
    b_dsh = b_ds.to(b_q.dtype)
    b_dk = tl.dot(b_dsh, b_q, b_dk, input_precision=PREC)
    if FUSED:
        b_dq = tl.dot(tl.trans(b_dsh), b_k, input_precision=PREC) * scale  # [BT, BK]
        p_dqt = p_dq + i * tl.cast(H * K, tl.int64) + o_t[:, None] * (H * K) + o_k[None, :]
        m_q = (i + o_t < T)[:, None] & (o_k < K)[None, :]
        tl.atomic_add(p_dqt, b_dq, mask=m_q, sem="relaxed")
        if GATE != 0:
            tl.atomic_add(p_dr + i + o_t, tl.sum(b_ds, 0), mask=i + o_t < T, sem="relaxed")
    return b_dk, b_dv, b_dc


@triton.jit(do_not_specialize=["T", "S", "stride_qb", "stride_kb", "stride_vb", "stride_db", "stride_lb", "stride_lh"])
def fox_dkdv_kernel(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dq, p_dr, p_dk, p_dv, p_dc, p_c, p_g, p_left, p_start, p_end, p_full,
    T, S, scale, scale2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_db, stride_dt, stride_dh, stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_START: tl.constexpr, FUSED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dK [B, S, G, K], dV [B, S, G, V], column sums of dS [B, H, S]; one program per key tile and key head.

    Key tiles with the most rows (the first) run first. FUSED: dQ [B, T, H, K] float32 and the row sums are
    added to with atomics, so their rounding depends on the order of the programs.
    """
    G: tl.constexpr = H // REP
    n_s = tl.cdiv(S, BS)
    n_bg = tl.num_programs(0) // n_s
    i_s = tl.program_id(0) // n_bg
    i_bg = tl.program_id(0) % n_bg
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    off = S - T
    s = i_s * BS
    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_s = s + o_s  # [BS]
    s64 = s.to(tl.int64)
    b_k = _load_tile(p_k + i_b * stride_kb + i_g * stride_kh + s64 * stride_ks, o_s, o_k, stride_ks, S - s, K, BK, True)
    b_v = _load_tile(p_v + i_b * stride_vb + i_g * stride_vh + s64 * stride_vs, o_s, o_v, stride_vs, S - s, V, BV, True)
    b_dk = tl.zeros([BS, BK], tl.float32)
    b_dv = tl.zeros([BS, BV], tl.float32)
    i_lo = tl.maximum(s - off, 0) // BT * BT  # first row tile that sees the first key
    i_mid = tl.cdiv(tl.maximum(s + BS - 1 - off, 0), BT) * BT  # from here every row is past every key
    for i_r in range(0, REP):
        i_h = i_g * REP + i_r
        i_bh = i_b * H + i_h
        p_qh = p_q + i_b * stride_qb + i_h * stride_qh
        p_doh = p_do + i_b * stride_db + i_h * stride_dh
        p_lseh, p_deltah, p_drh = p_lse + i_bh * T, p_delta + i_bh * T, p_dr + i_bh * T
        p_ch = p_c + i_bh * 2 * S
        p_lefth = p_left + i_b * stride_lb + i_h * stride_lh
        p_starth = p_start + i_bh * tl.cdiv(T, RU)
        p_dqh = p_dq + (i_b * T * H + i_h) * K
        b_slope = 0.0
        if GATE == 1:
            b_slope = _const_gate(p_g, i_h)
        ref_hi, ref_lo = _gate_at(p_ch, b_slope, s, S, GATE)
        b_bias = b_s.to(tl.float32)
        if GATE != 0:
            b_bias = _key_bias(p_ch, b_slope, s, o_s, ref_hi, ref_lo, S, GATE, True)
        i_end, i_full = T, T
        if HAS_LEFT or HAS_START:
            n_u = tl.cdiv(S, KU)
            i_full = tl.load(p_full + i_bh * n_u + s // KU)
            i_end = tl.load(p_end + i_bh * n_u + tl.minimum((s + BS - 1) // KU, n_u - 1))
        i_mask = tl.maximum(i_full // BT * BT, i_mid)  # from here the left mask, a bound or the end of the rows
        n_head = tl.cdiv(tl.maximum(tl.minimum(i_mid, i_end) - i_lo, 0), BT)
        n_tail = tl.cdiv(tl.maximum(i_end - i_mask, 0), BT)
        b_dc = tl.zeros([BS], tl.float32)
        for i_n in range(0, n_head + n_tail):
            i = tl.where(i_n < n_head, i_lo + i_n * BT, i_mask + (i_n - n_head) * BT)
            b_dk, b_dv, b_dc = _dkdv_tile(
                b_dk, b_dv, b_dc, b_k, b_v, b_bias, p_qh, p_doh, (p_lseh, p_deltah), p_dqh, p_drh, p_ch, b_slope,
                p_lefth, p_starth, i, o_t, o_k, o_v, b_s, ref_hi, ref_lo, off, T, S, stride_qt, stride_dt, scale,
                scale2, H, K, V, BK, BV, RU, GATE, HAS_LEFT, HAS_START, FUSED, PREC, True)  # fmt: skip
        for i in range(i_mid, tl.minimum(i_mask, i_end), BT):
            b_dk, b_dv, b_dc = _dkdv_tile(
                b_dk, b_dv, b_dc, b_k, b_v, b_bias, p_qh, p_doh, (p_lseh, p_deltah), p_dqh, p_drh, p_ch, b_slope,
                p_lefth, p_starth, i, o_t, o_k, o_v, b_s, ref_hi, ref_lo, off, T, S, stride_qt, stride_dt, scale,
                scale2, H, K, V, BK, BV, RU, GATE, HAS_LEFT, HAS_START, FUSED, PREC, False)  # fmt: skip
        if GATE != 0:
            tl.store(p_dc + i_bh * S + b_s, b_dc, mask=b_s < S)
    m_s = (b_s < S)[:, None]
    p_dkt = p_dk + ((i_b * S + s64) * G + i_g) * K + o_s[:, None] * (G * K) + o_k[None, :]
    p_dvt = p_dv + ((i_b * S + s64) * G + i_g) * V + o_s[:, None] * (G * V) + o_v[None, :]
    tl.store(p_dkt, (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_s & (o_k < K)[None, :])
    tl.store(p_dvt, b_dv.to(p_dv.dtype.element_ty), mask=m_s & (o_v < V)[None, :])


def fox_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, log_gate: Tensor | None, sink: Tensor | None,
    c: Tensor | None, left: Tensor | None, start: Tensor | None, scale: float, *, fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch the backward kernels on what the forward pass saved.

    Returns:
        dq, dk, dv in the inputs' dtype; with a gate, column sums [B, H, S] and row sums [B, H, T] of dS;
        with a sink, its gradient [H] float32.
    """
    B, T, H, K = q.shape
    S, G, V = k.shape[1], k.shape[2], v.shape[3]
    gate = gate_kind(log_gate)
    if do.stride(-1) != 1:
        do = do.contiguous()
    delta = torch.empty_like(lse)
    ps = torch.empty_like(lse) if sink is not None else lse
    flags: dict[str, Any] = dict(GATE=gate, HAS_LEFT=left is not None, HAS_START=start is not None, PREC=dot_precision(q.dtype))
    dims: dict[str, Any] = dict(H=H, REP=H // G, K=K, V=V, BK=head_block(K), BV=head_block(V), RU=ROW_UNIT, KU=KEY_UNIT)
    p_c, p_g = lse if c is None else c, lse if log_gate is None else log_gate
    p_left, p_start = lse if left is None else left, lse if start is None else start
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *left_strides(left))
    fox_delta_kernel[(triton.cdiv(T, 64), B * H)](
        o, do, lse, delta, ps, p_c, p_g, lse if sink is None else sink, T, S, *o.stride()[:3], *do.stride()[:3],
        H=H, V=V, BV=head_block(V), BT=64, RU=ROW_UNIT, GATE=gate, HAS_SINK=sink is not None,
    )  # fmt: skip
    dk, dv = k.new_empty((B, S, G, K)), v.new_empty((B, S, G, V))
    new = (torch.zeros if fused else torch.empty)
    dq = new((B, T, H, K), dtype=torch.float32 if fused else q.dtype, device=q.device)
    dkey = lse.new_empty((B, H, S)) if gate else None
    drow = new((B, H, T), dtype=torch.float32, device=q.device) if gate else None
    p_dc, p_dr = lse if dkey is None else dkey, lse if drow is None else drow
    end, full = lse, lse
    if left is not None or start is not None:
        end, full = key_bounds(left, start, B, T, H, S)
    scales = (scale, scale * LOG2E)
    if not fused:
        t = tiles("dq", max(K, V), q.dtype, q.device)
        fox_dq_kernel[(triton.cdiv(T, t.BT) * B * H,)](
            q, k, v, do, lse, delta, dq, p_dr, p_c, p_g, p_left, p_start, T, S, *scales, *strides,
            **dims, **flags, BT=t.BT, BS=t.BS, num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip
    t = tiles("fused" if fused else "dkdv", max(K, V), q.dtype, q.device)
    fox_dkdv_kernel[(triton.cdiv(S, t.BS) * B * G,)](
        q, k, v, do, lse, delta, dq, p_dr, dk, dv, p_dc, p_c, p_g, p_left, p_start, end, full, T, S, *scales, *strides,
        **dims, **flags, BT=t.BT, BS=t.BS, FUSED=fused, num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    dsink = -ps.sum((0, 2)) if sink is not None else None
    return dq.to(q.dtype), dk, dv, dkey, drow, dsink
