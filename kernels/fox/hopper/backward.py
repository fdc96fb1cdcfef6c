"""Launch of the one-pass backward for Hopper (``backward_kernel``), with the kernels before and after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, ROW_UNIT
from attnzoo.kernels.common.head_order import head_order
from attnzoo.kernels.common.hopper.descriptors import gluon_descriptor, plain_descriptor
from attnzoo.kernels.common.key_bounds import key_bounds
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, describable, gate_kind, head_block, row_strides
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.row_delta import sink_weight
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.common.tile_order import tile_order
from attnzoo.kernels.fox.operands import FoxBackward, FoxSums
from attnzoo.kernels.fox.plan import HOPPER_BACKWARD, heads_apart

from .backward_kernel import fox_bwd_hopper_kernel


@launched
@triton.jit(do_not_specialize=["T", "S"])
def fox_bwd_rows_kernel(
    p_o, p_rest, p_do, p_lse, p_dlse, p_rows, p_delta, p_w, p_c, p_base, p_g, p_sink, T, S,
    stride_ob, stride_ot, stride_oh, stride_db, stride_dt, stride_dh,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr,
    GATE: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """lse and delta = dO . (O + o_rest) - dlse, [B, H, Tp] with Tp rounded up to RU.

    p_w: with a sink or dlse, the sum of dS over each row's keys: the sink's weight times delta, plus dlse.
    """
    i_bh, i_t = head_and_tile(tl.cdiv(T, RU) * (RU // BT))
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    r = (i_t * BT).to(tl.int64)
    p_ot = i_b * stride_ob + i_h.to(tl.int64) * stride_oh + r * stride_ot
    p_dt = p_do + i_b * stride_db + i_h.to(tl.int64) * stride_dh + r * stride_dt
    b_o = load_tile(p_o + p_ot, o_t, o_v, stride_ot, T - i_t * BT, V, BV, True).to(tl.float32)
    if HAS_REST:
        b_o += load_tile(p_rest + p_ot, o_t, o_v, stride_ot, T - i_t * BT, V, BV, True).to(tl.float32)
    b_do = load_tile(p_dt, o_t, o_v, stride_dt, T - i_t * BT, V, BV, True).to(tl.float32)
    o_r = i_t * BT + o_t
    p_r = i_bh.to(tl.int64) * T + o_r
    p_rp = i_bh.to(tl.int64) * (tl.cdiv(T, RU) * RU) + o_r
    b_lse = tl.load(p_lse + p_r, mask=o_r < T, other=float("inf"))  # rows past T get weight 0
    b_delta = tl.sum(b_o * b_do, 1)
    b_sum = tl.zeros([BT], tl.float32)
    if HAS_DLSE:
        b_sum += tl.load(p_dlse + p_r, mask=o_r < T, other=0.0)
        b_delta -= b_sum
    tl.store(p_rows + p_rp, b_lse)
    tl.store(p_delta + p_rp, b_delta)
    if HAS_SINK:
        b_w = sink_weight(p_sink, p_c, p_base, p_g, b_lse, o_r, i_bh, i_h, i_t * BT // RU * RU, T, S, KU, GATE)
        b_sum += b_w * b_delta
    if HAS_SINK or (HAS_DLSE and GATE != 0):
        tl.store(p_w + p_r, b_sum, mask=o_r < T)


@launched
@triton.jit(do_not_specialize=["T", "S"])
def fox_finish_kernel(
    p_tiles, p_dq, p_sum, p_w, p_dc, T, S, scale, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
    RU: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr, HAS_ROW: tl.constexpr,
):  # fmt: skip
    """dQ [B, T, H, K] in the inputs' dtype; E, beyond the share p_w, is taken off the columns."""
    i_bh, i_t = head_and_tile(tl.cdiv(T, BT))
    n_t = tl.cdiv(T, RU) * (RU // BT)
    b_x = tl.load(p_tiles + (i_bh.to(tl.int64) * n_t + i_t) * (BT * BK) + tl.arange(0, BT * BK))
    o_t, o_k = i_t * BT + tl.arange(0, BT), tl.arange(0, BK)
    m_t = o_t < T
    p_dqt = p_dq + (((i_bh // H).to(tl.int64) * T + o_t) * H + i_bh % H)[:, None] * K + o_k[None, :]
    b_dq = tile_order(b_x, BT, BK, M, N) * scale
    tl.store(p_dqt, b_dq.to(p_dq.dtype.element_ty), mask=m_t[:, None] & (o_k < K)[None, :])
    if GATE != 0:
        b_e = tl.load(p_sum + i_bh.to(tl.int64) * (n_t * BT // 2) + o_t // 2)
        if HAS_ROW:
            p_wp = p_w + i_bh.to(tl.int64) * T + o_t // 2 * 2
            b_e -= tl.load(p_wp, mask=m_t, other=0.0) + tl.load(p_wp + 1, mask=o_t // 2 * 2 + 1 < T, other=0.0)
        b_e = tl.where((o_t % 2 == 0) & (o_t == T - 1), b_e, 0.5 * b_e)  # a last row without a partner
        p_dct = p_dc + i_bh.to(tl.int64) * S + (S - T) + o_t
        tl.store(p_dct, tl.load(p_dct, mask=m_t, other=0.0) - b_e, mask=m_t)


@launched
@triton.jit(do_not_specialize=["S"])
def fox_keys_kernel(p_tiles, p_dk, p_dv, S, scale, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                    BK: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """dK [B, S, G, K] and dV [B, S, G, V] from tiles where heads have added up theirs; one program per tile."""
    i, N = tl.program_id(0), tl.num_programs(0)
    i_bg, i_s = i // tl.cdiv(S, BS), i % tl.cdiv(S, BS)
    o_s, o_k = i_s * BS + tl.arange(0, BS), tl.arange(0, BK)
    o_r = ((i_bg // G).to(tl.int64) * S + o_s) * G + i_bg % G
    for n in tl.static_range(2):
        b_x = tl.load(p_tiles + (n * N + i).to(tl.int64) * (BS * BK) + tl.arange(0, BS * BK))
        b_x = tile_order(b_x, BS, BK, BS // 16, 1)
        if n == 0:
            p_x, D, b_x = p_dk + o_r[:, None] * K + o_k[None, :], K, b_x * scale
        else:
            p_x, D = p_dv + o_r[:, None] * V + o_k[None, :], V
        tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=(o_s < S)[:, None] & (o_k < D)[None, :])


def fox_backward_hopper(x: FoxBackward, plan: Plan) -> FoxSums:
    """As ``portable.backward.fox_backward``, where the plan says so; all gradients are computed.

    The gate's gradient is not exact without ``o_rest`` [B, T, H, V], what the rounding of o dropped.
    Works on B H T K float32 numbers beside its results, and on 2 B G S K more where heads are apart. Not deterministic.
    """
    (q, k, v, log_decay, sink, options, *_), (o, _, lse, rows, o_rest) = x.given, x.made
    c, base, since, start = rows.pointers(lse)
    do, dlse, scale, unrounded = x.do, x.dlse, options.scale, x.unrounded
    (B, T, H, K), (S, G), V = q.shape, k.shape[1:3], v.shape[3]
    BK, BV = head_block(K), head_block(V)
    t = HOPPER_BACKWARD[max(BK, BV)]
    gate, has_sink = gate_kind(log_decay), sink is not None
    do = describable(do)
    n_t = cdiv(T, ROW_UNIT) * (ROW_UNIT // t.BT)
    of_rows, delta = lse.new_empty((B * H, n_t * t.BT)), lse.new_empty((B * H, n_t * t.BT))
    sums = lse.new_zeros((B * H, n_t * t.BT // 2)) if gate else lse
    has_row = has_sink or (gate != 0 and dlse is not None)
    drow = torch.empty_like(lse) if has_row else None
    dkey = lse.new_empty((B, H, S)) if gate else None
    dq_tiles = lse.new_zeros((B * H * n_t * t.BT * BK // 256, 256))  # dq in float32, tile by tile
    like = lse if unrounded else q
    dq, dk, dv = like.new_empty((B, T, H, K)), like.new_empty((B, S, G, K)), v.new_empty((B, S, G, V))
    gates = (c, base, lse if log_decay is None else log_decay)
    p_w, p_dc = lse if drow is None else drow, lse if dkey is None else dkey
    fox_bwd_rows_kernel[(B * H * (n_t * t.BT // 64),)](
        o, o if o_rest is None else o_rest, do, lse, lse if dlse is None else dlse, of_rows, delta, p_w, *gates,
        lse if sink is None else sink, T, S, *o.stride()[:3], *do.stride()[:3], H=H, V=V, BV=BV, BT=64, RU=ROW_UNIT,
        KU=KEY_UNIT, GATE=gate, HAS_SINK=has_sink, HAS_DLSE=dlse is not None, HAS_REST=o_rest is not None,
    )  # fmt: skip
    apart = heads_apart(T, H // G, K, V, rows.first_computed is not None)
    end, opened, order = lse, lse, head_order(rows.first_computed, G)
    if rows.bounded:
        bounds = key_bounds(*rows[2:], B, T, H, S)
        end, opened = bounds.end, bounds.open
    d_rows = [plain_descriptor(y, [1, t.BT]) for y in (of_rows, delta)]
    d_k, d_v, tile = gluon_descriptor(k, t.BS), gluon_descriptor(v, t.BS), [t.BT * BK // 256, 256]
    n_s, heads = cdiv(S, t.BS), B * H if apart else B * G
    if apart:  # query heads add up their parts of dk and dv in float32, tile by tile
        key_tiles = lse.new_zeros((2, B * G * n_s * t.BS * BK // 256, 256))
        d_dk, d_dv = (plain_descriptor(y, tile) for y in key_tiles)
    else:
        d_dk, d_dv = dk if unrounded else gluon_descriptor(dk, t.BS), gluon_descriptor(dv, t.BS)
    fox_bwd_hopper_kernel[(n_s * heads,)](
        gluon_descriptor(q, t.BT), d_k, d_v, gluon_descriptor(do, t.BT), *d_rows, plain_descriptor(dq_tiles, tile),
        d_dk, d_dv, sums, p_dc, *gates, since, start, lse if order is None else order, end, opened, T, S,
        min(t.heads, heads), scale, scale * LOG2E, *row_strides(rows.first_visible), H=H, REP=H // G, K=K, BK=BK,
        BV=BV, BT=t.BT, BS=t.BS, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate, **rows.flags, HAS_ORDER=order is not None,
        STAGES=t.num_stages, UNROUNDED=unrounded, APART=apart, num_warps=t.num_warps, maxnreg=t.maxnreg,
    )  # fmt: skip
    if apart:
        fox_keys_kernel[(n_s * B * G,)](key_tiles, dk, dv, S, scale, G=G, K=K, V=V, BK=BK, BS=t.BS, num_warps=8)
    M = t.BT // 16
    fox_finish_kernel[(B * H * cdiv(T, t.BT),)](
        dq_tiles, dq, sums, p_w, p_dc, T, S, scale, H=H, K=K, BK=BK, BT=t.BT, RU=ROW_UNIT, M=M, N=t.num_warps // M,
        GATE=gate, HAS_ROW=has_row, num_warps=8,
    )  # fmt: skip
    return FoxSums(dq, dk, dv, dkey, drow)
