"""Numbers of each row that a backward pass needs before its main kernels: log-sum-exp, delta, the weight of the sink.

delta is dO . O, the sum of P * dP over a row; ``fox/portable/backward.py`` says what it is for, and why it is settled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.gate_bias import const_gate, gate_at, gates_from
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile


@triton.jit
def sink_weight(p_sink, p_c, p_base, p_g, b_lse, o_r, i_bh, i_h, i_ref, T, S, KU: tl.constexpr, GATE: tl.constexpr):
    """Weight of the sink in rows o_r of one row unit, whose first row is i_ref. # [len(o_r)]"""
    b_y = tl.zeros_like(b_lse) + tl.load(p_sink + i_h).to(tl.float32) * TL_LOG2E
    if GATE != 0:
        n_s = tl.cdiv(S, KU)
        p_c += i_bh.to(tl.int64) * (n_s * KU)
        p_base += i_bh.to(tl.int64) * (n_s + 1)
        b_slope = tl.zeros([], tl.float32)
        if GATE == 1:
            b_slope = const_gate(p_g, i_h)
        b_ref = gate_at(p_c, p_base, b_slope, i_ref + S - T, GATE, KU)
        b_y += gates_from(p_c, p_base, b_slope, o_r + S - T, b_ref, o_r < T, GATE, KU)
    return tl.exp2(b_y - b_lse)


@triton.jit
def settle_delta(p_delta, p_w, p_dlse, b_delta, b_dr, m, HAS_SINK: tl.constexpr, HAS_DLSE: tl.constexpr):
    """Correct delta so that each row's dS over its keys adds up to what it must, w delta + dlse.

    b_dr is what it added up to. p_w holds the weight w of the sink, and after this the corrected sum.
    """
    b_w, b_dlse = tl.zeros_like(b_delta), tl.zeros_like(b_delta)
    if HAS_SINK:
        b_w = tl.load(p_w, mask=m, other=0.0)
    if HAS_DLSE:
        b_dlse = tl.load(p_dlse, mask=m, other=0.0)
    b_delta += b_dr - b_w * b_delta - b_dlse
    tl.store(p_delta, b_delta)
    if HAS_SINK or HAS_DLSE:
        tl.store(p_w, b_w * b_delta + b_dlse, mask=m)


@launched
@triton.jit(do_not_specialize=["T", "S"])
def row_delta_kernel(
    p_o, p_do, p_lse, p_dlse, p_rows, p_w, p_c, p_base, p_g, p_sink, T, S,
    stride_ob, stride_ot, stride_oh, stride_db, stride_dt, stride_dh,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr,
    GATE: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Pairs (lse, dO . O - dlse) per row, [B, H, Tp, 2] with Tp rounded up to RU; with a sink its weight [B, H, T]."""
    i_bh, i_t = head_and_tile(tl.cdiv(T, RU) * (RU // BT))
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    r = (i_t * BT).to(tl.int64)
    p_ot = p_o + i_b * stride_ob + i_h.to(tl.int64) * stride_oh + r * stride_ot
    p_dt = p_do + i_b * stride_db + i_h.to(tl.int64) * stride_dh + r * stride_dt
    b_o = load_tile(p_ot, o_t, o_v, stride_ot, T - i_t * BT, V, BV, True).to(tl.float32)
    b_do = load_tile(p_dt, o_t, o_v, stride_dt, T - i_t * BT, V, BV, True).to(tl.float32)
    o_r = i_t * BT + o_t
    p_r = i_bh.to(tl.int64) * T + o_r
    b_lse = tl.load(p_lse + p_r, mask=o_r < T, other=float("inf"))  # rows past T get weight 0
    p_rw = p_rows + (i_bh.to(tl.int64) * (tl.cdiv(T, RU) * RU) + o_r) * 2
    tl.store(p_rw, b_lse)
    b_delta = tl.sum(b_o * b_do, 1)
    if HAS_DLSE:  # dS = P * (dP - delta + dlse)
        b_delta -= tl.load(p_dlse + p_r, mask=o_r < T, other=0.0)
    tl.store(p_rw + 1, b_delta)
    if HAS_SINK:
        b_w = sink_weight(p_sink, p_c, p_base, p_g, b_lse, o_r, i_bh, i_h, i_t * BT // RU * RU, T, S, KU, GATE)
        tl.store(p_w + p_r, b_w, mask=o_r < T)
