"""The divergence of retention from what later rows will need (``lesson.py``), and its gradient by key.

A program owns a tile of keys and meets its tiles of rows from the last to the first: the utility of a key at a row is
a mean over the rows from there on. It is kept as the logarithm of its largest weight, and the sums of weights and of
what they weigh beside it, for weights are powers of contributions, which float32 could not hold. A target needs the
utilities of all keys of a row: one launch adds them up to each row's unit, the next one computes them again and learns.
All logarithms are log2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.approximate import log2, reciprocal
from attnzoo.kernels.common.forgetful_bias import load_retention
from attnzoo.kernels.common.gate_bias import const_gate, gate_at, gates_from
from attnzoo.kernels.common.gate_sums import maximum
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile

NONE = tl.constexpr(-1e30)  # log of the weight of rows that are not there; infinities would make differences NaN
LEAST = tl.constexpr(-126.0)  # log of the least contribution
TINY = tl.constexpr(2.0**-126)


@triton.jit
def _join(b_w, b_z, b_n, b_w2, b_z2, b_n2):
    """Two logs of largest weights, with the sums of weights and of what they weigh relative to these, as one."""
    b_e, m = tl.exp2(-tl.abs(b_w - b_w2)), b_w > b_w2
    b_z = tl.where(m, b_z, b_z2) + b_e * tl.where(m, b_z2, b_z)
    b_n = tl.where(m, b_n, b_n2) + b_e * tl.where(m, b_n2, b_n)
    return tl.where(m, b_w, b_w2), b_z, b_n


@triton.jit
def _log_contributions(b_k, p_q, p_k, p_lse, p_c, p_base, p_g, p_since, i_b, i_g, i, b_s, b_t, o_s, o_t, o_k, s, T,
                       scale2, stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_lb, stride_lh,
                       H: tl.constexpr, REP: tl.constexpr, KREP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                       KU: tl.constexpr, GATE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """log2 of the sum over the query heads of the squared weights of keys b_s at rows b_t. # [BS, BT]"""
    b_x = tl.zeros([o_s.shape[0], o_t.shape[0]], tl.float32)
    for i_r in range(REP):
        i_h = (i_g * REP + i_r).to(tl.int64)
        i_bh = i_b * H + i_h
        p_qh = p_q + i_b * stride_qb + i_h * stride_qh + i.to(tl.int64) * stride_qt
        b_q = load_tile(p_qh, o_t, o_k, stride_qt, T - i, K, BK, True)  # [BT, BK]
        if KREP != REP:
            p_kh = p_k + i_b * stride_kb + i_h // KREP * stride_kh + s.to(tl.int64) * stride_ks
            b_k = load_tile(p_kh, o_s, o_k, stride_ks, T - s, K, BK, True)
        b_y = scores(tl.dot(b_k, tl.trans(b_q), input_precision=PREC), scale2)  # [BS, BT]
        b_y -= tl.load(p_lse + i_bh * T + b_t, mask=b_t < T, other=0.0)[None, :]
        if GATE != 0:
            n_u = tl.cdiv(T, KU)
            p_ch, p_baseh = p_c + i_bh * (n_u * KU), p_base + i_bh * (n_u + 1)
            b_slope = tl.zeros([], tl.float32)
            if GATE == 1:
                b_slope = const_gate(p_g, i_h)
            b_ref = gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
            b_y += gates_from(p_ch, p_baseh, b_slope, b_s, b_ref, b_s < T, GATE, KU)[:, None]
            b_y -= gates_from(p_ch, p_baseh, b_slope, b_t, b_ref, b_t < T, GATE, KU)[None, :]
            b_since = tl.load(p_since + i_b * stride_lb + i_h * stride_lh + b_t, mask=b_t < T, other=0)
            b_y = tl.where(b_s[:, None] >= b_since[None, :], b_y, NONE)
        b_x = 2.0 * b_y if REP == 1 else b_x + tl.exp2(2.0 * b_y)
    return b_x if REP == 1 else log2(tl.maximum(b_x, TINY))


@triton.jit
def _learn(b_rho, b_base, b_fade, b_age, KIND: tl.constexpr, MSE: tl.constexpr):
    """Divergence of retention from b_rho, and its derivatives by a key's base or rate, and fade. # [BS, BT] each"""
    b_no, b_late = 1.0 - b_rho, b_age
    if KIND == 2:
        b_late = log2(1.0 + tl.maximum(b_age, 0.0))
        b_x = b_base - b_fade * b_late
        b_e = tl.exp2(-tl.abs(b_x))
        b_1 = 1.0 + b_e
        b_part = reciprocal(b_1)
        b_r = tl.where(b_x > 0.0, 1.0, b_e) * b_part
        b_slope = b_e * b_part * b_part if MSE else 1.0
        b_each = b_no * tl.maximum(b_x, 0.0) - b_rho * tl.minimum(b_x, 0.0)  # and log b_1, of r as of 1 - r
    else:
        b_n = tl.maximum(b_age, 1.0)
        b_x = -b_base * b_n
        b_r = tl.exp2(b_x)
        b_y = b_x * (1.0 / TL_LOG2E)
        b_near = -b_y * (1 + b_y * (1 / 2 + b_y * (1 / 6 + b_y * (1 / 24 + b_y * (1 / 120 + b_y / 720)))))
        b_gone = tl.maximum(tl.where(b_y > -0.25, b_near, 1.0 - b_r), TINY)  # 1 - r, also where r is nearly 1
        b_slope = -b_r * b_n if MSE else -b_n * reciprocal(b_gone)
        b_1 = 1.0
        b_each = -b_rho * b_x - b_no * log2(b_gone)
    b_d = b_r - b_rho
    if MSE:
        b_each, b_slope = b_d * b_d, 2.0 * b_d * b_slope
    else:
        b_each += b_rho * log2(tl.maximum(b_rho, TINY) * b_1) + b_no * log2(tl.maximum(b_no, TINY) * b_1)
        b_each, b_slope = b_each * (1.0 / TL_LOG2E), b_d * b_slope
    return b_each, b_slope, b_slope * b_late * (-1.0 / TL_LOG2E)


@launched
@triton.jit(do_not_specialize=["T", "n_own"])
def retention_lesson_kernel(
    p_q, p_k, p_lse, p_value, p_output, p_keep, p_stop, p_unit, p_loss, p_dkeep, p_c, p_base, p_g, p_since, T, n_own,
    scale2, tau, fade, remembers,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_lb, stride_lh, stride_rb, stride_rs,
    stride_rh,
    H: tl.constexpr, REP: tl.constexpr, KREP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, KU: tl.constexpr,
    GATE: tl.constexpr, KIND: tl.constexpr, HAS_STOP: tl.constexpr, POOL: tl.constexpr, LARGEST: tl.constexpr,
    MSE: tl.constexpr, LEARNS: tl.constexpr, PREC: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Units of rows, or what keys learn from them; a program has every n_own-th tile of a head's keys.

    p_unit: [n_own, B, G, T] zeros, to which each program adds its keys' utilities, or the units [B, G, T] (LEARNS).
    p_loss [B, T, G], p_dkeep [B, T, G, KIND]: divergence of each key, summed over rows, and its gradient.
    tau: the temperature, in log2 units of a weight; fade: log2 of the discount.
    """
    G: tl.constexpr = H // REP
    i_bg, i_p = head_and_tile(n_own)
    n_bg = tl.num_programs(0) // n_own
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    p_keep += i_b * stride_rb + i_g.to(tl.int64) * stride_rh
    p_value += i_bg.to(tl.int64) * T
    p_output += i_bg.to(tl.int64) * T
    p_unit += i_bg.to(tl.int64) * T if LEARNS else (i_p * n_bg + i_bg).to(tl.int64) * T
    o_t = BT - 1 - tl.arange(0, BT)  # from last to first, as a scan in reverse turns each number around twice
    o_s, o_k = tl.arange(0, BS), tl.arange(0, BK)
    b_lag = o_t.to(tl.float32) * fade
    for i_s in range(i_p, tl.cdiv(T, BS), n_own):
        s = i_s * BS
        b_s = s + o_s
        b_value = tl.load(p_value + b_s, mask=b_s < T, other=0.0)
        b_base, b_fade = load_retention(p_keep, b_s, T, stride_rs, KIND)
        p_kh = p_k + i_b * stride_kb + (i_g * REP // KREP).to(tl.int64) * stride_kh + s.to(tl.int64) * stride_ks
        b_k = load_tile(p_kh, o_s, o_k, stride_ks, T - s, K, BK, True)  # [BS, BK]
        hi, b_stop = T, b_s * 0 + T
        if HAS_STOP:
            hi = tl.load(p_stop + tl.minimum(s + BS, T) - 1)
            b_stop = tl.load(p_stop + b_s, mask=b_s < T, other=0)
        b_wc, b_zc = tl.full([BS], NONE, tl.float32), tl.zeros([BS], tl.float32)  # of all rows from the next tile's on
        b_nc = b_zc
        b_loss = tl.zeros([BS, BT], tl.float32)  # sums over tiles, place by place: sums over rows are dear
        b_dbase, b_dfade = b_loss, b_loss
        first, last = s // BT, (hi - 1) // BT
        for i_n in range(last - first + 1):
            i = (last - i_n) * BT
            b_t = i + o_t
            b_x = _log_contributions(
                b_k, p_q, p_k, p_lse, p_c, p_base, p_g, p_since, i_b, i_g, i, b_s, b_t, o_s, o_t, o_k, s, T, scale2,
                stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_lb, stride_lh, H, REP, KREP, K,
                BK, KU, GATE, PREC)  # fmt: skip
            b_output = tl.load(p_output + b_t, mask=b_t < T, other=0.0)
            b_x = tl.maximum(b_x + b_value[:, None] - b_output[None, :], LEAST) + b_lag[None, :]
            m = (b_s[:, None] <= b_t[None, :]) & (b_t[None, :] < b_stop[:, None])
            m_begin = (o_t == 0)[None, :]
            b_n = tl.where(m, tl.exp2(b_x), 0.0)
            b_w = b_n * tau if POOL == 1 else b_x * tau
            b_w = tl.where(m, b_w, NONE)
            if POOL == 2:
                b_w = tl.maximum(tl.associative_scan(b_w, 1, maximum), b_wc[:, None])
                b_y = tl.exp2(b_w)
            else:
                b_z = tl.where(m, 1.0, 0.0)
                b_w, b_z, b_n = tl.associative_scan((b_w, b_z, b_n), 1, _join)
                b_w, b_z, b_n = _join(b_w, b_z, b_n, b_wc[:, None], b_zc[:, None], b_nc[:, None])
                b_zc = tl.sum(tl.where(m_begin, b_z, 0.0), 1)
                b_nc = tl.sum(tl.where(m_begin, b_n, 0.0), 1) * tl.exp2(BT * fade)
                b_y = b_n * reciprocal(tl.maximum(b_z, TINY))
            b_wc = tl.sum(tl.where(m_begin, b_w, 0.0), 1) + (0.0 if POOL == 1 else BT * fade * tau)
            b_y *= tl.exp2(-b_lag)[None, :]
            b_y = tl.where(m & (b_y > 2.8 * TINY), b_y, 0.0)  # the utility, 0 where all contributions are
            if not LEARNS:
                if LARGEST:
                    tl.atomic_max(p_unit + b_t, tl.max(b_y, 0), mask=b_t < T, sem="relaxed")
                else:
                    tl.atomic_add(p_unit + b_t, tl.sum(b_y, 0), mask=b_t < T, sem="relaxed")
            else:
                b_unit = tl.load(p_unit + b_t, mask=b_t < T, other=0.0)[None, :]
                if LARGEST:
                    b_rho = tl.minimum(b_y * reciprocal(tl.maximum(b_unit, TINY)), 1.0)
                else:
                    b_rho = b_y * reciprocal(tl.maximum(b_y + b_unit, TINY))
                b_age = (b_t[None, :] - b_s[:, None]).to(tl.float32)
                b_each, b_slope, b_steep = _learn(b_rho, b_base[:, None], b_fade[:, None], b_age, KIND, MSE)
                m &= b_age >= remembers
                b_loss += tl.where(m, b_each, 0.0)
                b_dbase += tl.where(m, b_slope, 0.0)
                if KIND == 2:
                    b_dfade += tl.where(m, b_steep, 0.0)
        if LEARNS:
            p_at = (i_b * T + b_s) * G + i_g
            tl.store(p_loss + p_at, tl.sum(b_loss, 1), mask=b_s < T)
            tl.store(p_dkeep + p_at * KIND, tl.sum(b_dbase, 1), mask=b_s < T)
            if KIND == 2:
                tl.store(p_dkeep + p_at * KIND + 1, tl.sum(b_dfade, 1), mask=b_s < T)
