"""Backward kernel that owns rows: a program takes one tile of rows and all keys that they read, level by level.

It makes dq of each level, and corrects delta by the row sums of dS (``backward.py`` says what for).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.gate_bias import base_shift, gate_at, key_bias
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.online_softmax import row_bounds
from attnzoo.kernels.common.row_delta import settle_delta
from attnzoo.kernels.common.scores import product_gradient, scores
from attnzoo.kernels.common.tile_loads import load_keys, load_tile, schedule

from .forward import base_at, level_keys, level_tile, pair_scores


@triton.jit
def _dq_tile(b_dq, b_dr, b_s, b_k, b_v, b_do, b_lse, b_delta, p_c, b_slope, b_shift, s, o_s, b_row, b_since, scale2,
             GATE: tl.constexpr, HAS_SINCE: tl.constexpr, ROW_SUM: tl.constexpr, PREC: tl.constexpr,
             MASK: tl.constexpr, m_own=None):  # fmt: skip
    """dQ and row sums of dS from one key tile; b_s = q k^T. Rows in m_own do not count for dQ, if it is there."""
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PREC)  # in flight during exp2
    b_y = scores(b_s, scale2)
    if GATE != 0:
        b_y += key_bias(p_c, b_slope, b_shift, s, o_s, GATE)[None, :]
    b_p = tl.exp2(b_y - b_lse[:, None])
    if MASK:
        m_y = (s + o_s)[None, :] <= b_row[:, None]
        if HAS_SINCE:
            m_y = m_y & ((s + o_s)[None, :] >= b_since[:, None])
        b_p = tl.where(m_y, b_p, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])  # [BT, BS]
    if ROW_SUM:
        b_dr += tl.sum(b_ds, 1)
    b_ds = product_gradient(b_ds, b_s, scale2)
    if m_own is not None:
        b_ds = tl.where(m_own[:, None], 0.0, b_ds)
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PREC), b_dr


@launched
@triton.jit(do_not_specialize=["B", "T", "Tq", "Tk", "n_levels", "n_heads", "stride_lb", "stride_lh"])
def path_dq_portable_kernel(
    p_diag, p_qb, p_kb, p_q, p_k, p_v, p_vd, p_do, p_rows, p_w, p_dlse, p_dqb, p_dq, p_c, p_base, p_since, p_start, B,
    T, Tq, Tk,
    n_levels, n_heads, scale, scale2, stride_vb, stride_vt, stride_vh, stride_db, stride_dt, stride_dh, stride_lb,
    stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DLSE: tl.constexpr, TMA: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dQ of each level and of the odd blocks, and delta corrected in place; schedule and frame of the forward."""
    G: tl.constexpr = H // REP
    ROW_SUM: tl.constexpr = GATE != 0 or HAS_SINK
    i_t, i_bh = schedule(tl.cdiv(T, BT), n_heads)
    i_t = tl.cdiv(T, BT) - 1 - i_t
    i_b32, i_h = i_bh // H, i_bh % H
    i_b, i_g, i_h64 = i_b32.to(tl.int64), i_h // REP, i_h.to(tl.int64)
    row = i_t * BT
    last = tl.minimum(row + BT, T) - 1
    o_t, o_s, o_p = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BP)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_row = row + o_t
    m_t = b_row < T
    row64 = row.to(tl.int64)
    p_v += i_b * stride_vb + i_h64 // REP * stride_vh
    p_vt = p_vd  # a descriptor
    if not TMA:
        p_vt = p_v
    p_do += i_b * stride_db + i_h64 * stride_dh + row64 * stride_dt
    b_do = load_tile(p_do, o_t, o_v, stride_dt, T - row, V, BV, True)
    p_rows += (i_bh.to(tl.int64) * (tl.cdiv(T, RU) * RU) + row) * 2
    b_lse, b_delta = tl.load(p_rows + o_t * 2), tl.load(p_rows + o_t * 2 + 1)
    n_u = tl.cdiv(T, KU)
    p_c += i_bh.to(tl.int64) * (n_u * KU)
    p_base += i_bh.to(tl.int64) * (n_u + 1)
    p_since += i_b * stride_lb + i_h64 * stride_lh
    p_start += i_bh.to(tl.int64) * tl.cdiv(T, RU)
    b_slope = tl.zeros([], tl.float32)
    b_ref = gate_at(p_c, p_base, b_slope, row // RU * RU, GATE, KU)
    b_since = b_row
    if HAS_SINCE:
        b_since = tl.load(p_since + b_row, mask=m_t, other=0)
    lo, full, _, _, _ = row_bounds(p_since, p_start, i_t, row, last, BT, BS, RU, KU, HAS_SINCE, HAS_START)
    first = 0
    if HAS_START:
        first = tl.load(p_start + row // RU)
    b_dr = tl.zeros([BT], tl.float32)

    # own pair of blocks: within a block only the row sums count, dS itself is the key kernel's
    pair = row // RU * RU
    p_diag += (i_b * n_u * H + i_h) * (KU * KU)
    p_qb += (i_b * T * H + i_h) * K
    p_kb += (i_b * T * G + i_g) * K
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_q = load_tile(p_qb + row64 * (H * K), o_t, o_k, H * K, T - row, K, BK, True)
    for i in tl.range(tl.cdiv(last + 1 - pair, BP), num_stages=1):  # or diag would be staged through shared memory
        s = pair + i * BP
        b_shift = base_shift(p_base, b_slope, b_ref, s, GATE, KU)
        b_k = load_tile(p_kb + s.to(tl.int64) * (G * K), o_p, o_k, G * K, T - s, K, BK, True)
        b_s = pair_scores(p_diag, b_q, b_k, b_row, s, o_p, T, H * KU * KU, PREC, KU)
        b_v = load_tile(p_v + s.to(tl.int64) * stride_vt, o_p, o_v, stride_vt, T - s, V, BV, True)
        m_own = b_row // KU == s // KU
        b_dq, b_dr = _dq_tile(b_dq, b_dr, b_s, b_k, b_v, b_do, b_lse, b_delta, p_c, b_slope, b_shift, s, o_p, b_row,
                              b_since, scale2, GATE, HAS_SINCE, ROW_SUM, PREC, True, m_own)  # fmt: skip
    p_dqt = p_dqb + ((i_b * T + row) * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    m_odd = m_t & (b_row // KU % 2 == 1)
    tl.store(p_dqt, (b_dq * scale).to(p_dqb.dtype.element_ty), mask=m_odd[:, None] & (o_k[None, :] < K))

    # levels
    for i in range(n_levels):
        h, u, begin, stop = level_keys(row, i, lo, BS, RU)
        if ((row // h) % 2 == 1) & (first < (2 * u + 1) * h):
            i_lb = i * B + i_b32
            r = row - (u + 1) * h
            b_q = level_tile(p_q, i_lb, Tq, r, i_h, o_t, o_k, H, K, BK, T - row, False, True)
            back = u * h  # of a key: its token minus its packed row
            mid = tl.minimum(tl.maximum(begin, full), stop)
            b_dq = tl.zeros([BT, BK], tl.float32)
            if HAS_SINCE:
                for i_s in range(begin, mid):
                    s = i_s * BS
                    b_shift = base_shift(p_base, b_slope, b_ref, s, GATE, KU)
                    b_k = level_tile(p_k, i_lb, Tk, s - back, i_g, o_s, o_k, G, K, BK, BS, TMA, False)
                    b_v = load_keys(p_vt, i_b32, s, i_g, o_s, o_v, stride_vt, T, V, BV, TMA, False)
                    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
                    b_dq, b_dr = _dq_tile(b_dq, b_dr, b_s, b_k, b_v, b_do, b_lse, b_delta, p_c, b_slope, b_shift, s,
                                          o_s, b_row, b_since, scale2, GATE, HAS_SINCE, ROW_SUM, PREC,
                                          True)  # fmt: skip
            b_base = base_at(p_base, mid * BS, GATE, KU)
            for i_s in range(mid, stop):
                s = i_s * BS
                b_shift = (b_ref - b_base).to(tl.float32)
                b_base = base_at(p_base, s + BS, GATE, KU)
                b_k = level_tile(p_k, i_lb, Tk, s - back, i_g, o_s, o_k, G, K, BK, BS, TMA, False)
                b_v = load_keys(p_vt, i_b32, s, i_g, o_s, o_v, stride_vt, T, V, BV, TMA, False)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
                b_dq, b_dr = _dq_tile(b_dq, b_dr, b_s, b_k, b_v, b_do, b_lse, b_delta, p_c, b_slope, b_shift, s, o_s,
                                      b_row, b_since, scale2, GATE, HAS_SINCE, ROW_SUM, PREC, False)  # fmt: skip
            p_dqt = p_dq + ((i_lb.to(tl.int64) * Tq + r) * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
            tl.store(p_dqt, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_t[:, None] & (o_k[None, :] < K))
    if ROW_SUM:
        p_r = i_bh.to(tl.int64) * T + b_row
        settle_delta(p_rows + o_t * 2 + 1, p_w + p_r, p_dlse + p_r, b_delta, b_dr, m_t, HAS_SINK, HAS_DLSE)
