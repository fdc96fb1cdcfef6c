"""Backward in one pass for Hopper, in Gluon: five products where the two portable kernels need seven.

A program owns 128 keys, at head dims up to 64 half of them, for all query heads that share them or, if APART
(``plan.heads_apart``), for one of them. A loader warp copies q, dO and the rows' (lse, delta, first key) into shared
memory, a warpgroup for 64 keys each computes, and a reducer warp adds dQ of each tile, and if APART dK and dV at the
end, to float32 buffers by the bulk copy engine. So the order of these sums, and the last bits of what comes of them and
of the gate's gradient, vary between runs.

delta is not exact here (the portable backward says why it must be for the gate), so with E_i = sum_j dS_ij, which
should be 0, the gate's gradient takes column sums minus E: what delta's error adds to the columns of a row, E takes off
again at the row itself, and nothing drifts. (With a sink of weight w, E_i beyond w delta.) E is kept per pair of rows.
The forward pass keeps what the rounding of O drops (``o_rest``), which leaves the rounding of the weights as the only
error of delta.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from attnzoo.kernels.common.hopper.backward_tile import (
    add_tile,
    backward_tile,
    first_keys,
    hand_over,
    held_order,
    load_rows,
)
from attnzoo.kernels.common.hopper.gate_bias import gluon_bias_at, gluon_gate_at, gluon_slope
from attnzoo.kernels.common.hopper.releases import tma_load, tma_store
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.tile_loads import schedule


@gluon.jit
def _row_tiles(p_end, p_open, s, T, S, BT: gl.constexpr, BS: gl.constexpr, KU: gl.constexpr, BOUNDED: gl.constexpr):
    """Row tiles that see the keys from s: n_mask of them need a mask (n_head from i_lo, the rest from i_tail), then
    n_mid from i_mid do not. Rows before i_open see all keys up to their own that pruning leaves."""
    off = S - T
    i_lo = gl.maximum(s - off, 0) // BT * BT
    i_mid = gl.cdiv(gl.maximum(s + BS - 1 - off, 0), BT) * BT
    i_end, i_open = T, T
    if BOUNDED:
        i_open = gl.load(p_open + s // KU)
        i_end = gl.load(p_end + gl.minimum((s + BS - 1) // KU, gl.cdiv(S, KU) - 1))
    i_tail = gl.maximum(i_open // BT * BT, i_mid)
    n_head = gl.cdiv(gl.maximum(gl.minimum(i_mid, i_end) - i_lo, 0), BT)
    n_mask = n_head + gl.cdiv(gl.maximum(i_end - i_tail, 0), BT)
    n_mid = gl.cdiv(gl.maximum(gl.minimum(i_tail, i_end) - i_mid, 0), BT)
    return i_lo, i_tail, i_mid, n_head, n_mask, n_mid, i_open


@gluon.jit
def _row(n, tiles, BT: gl.constexpr):
    """First row of the n-th tile."""
    i_lo, i_tail, i_mid, n_head, n_mask, n_mid, i_open = tiles
    i = gl.where(n < n_head, i_lo + n * BT, i_tail + (n - n_head) * BT)
    return gl.where(n < n_mask, i, i_mid + (n - n_mask) * BT)


@gluon.jit
def _load(d_q, d_k, d_v, d_do, d_lse, d_delta, rings, k_s, v_s, keys_in, full, empty, p_c, p_base, p_g, p_since,
          p_start, p_end, p_open, i_b, i_g, i_q, s, T, S, stride_lb, stride_lh, HEADS: gl.constexpr, H: gl.constexpr,
          BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
          HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr, PARTLY: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Loader: k and v once; per row tile q, dO, lse, delta, first keys and the gates between the frames of rows and
    keys."""
    mbarrier.expect(keys_in, d_k.block_type.nbytes + d_v.block_type.nbytes)
    tma_load(d_k, [i_b, s, i_g, 0], keys_in, k_s)
    tma_load(d_v, [i_b, s, i_g, 0], keys_in, v_s)
    n_u, off = gl.cdiv(S, KU), S - T
    it = 0
    for i_r in range(HEADS):
        i_h = i_q + i_r
        i_bh = i_b * H + i_h
        p_unit = i_bh.to(gl.int64) * n_u
        tiles = _row_tiles(p_end + p_unit, p_open + p_unit, s, T, S, BT, BS, KU, HAS_SINCE or HAS_START)
        i_lo, i_tail, i_mid, n_head, n_mask, n_mid, i_open = tiles
        p_ch, p_baseh = p_c + p_unit * KU, p_base + p_unit + i_bh
        p_sinceh = p_since + i_b.to(gl.int64) * stride_lb + i_h.to(gl.int64) * stride_lh + off
        p_starth = p_start + i_bh.to(gl.int64) * gl.cdiv(T, RU)
        b_slope = gluon_slope(p_g, i_h, GATE)
        b_ref = gluon_gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
        for n in range(n_mask + n_mid):
            i = _row(n, tiles, BT)
            b_at = gluon_gate_at(p_ch, p_baseh, b_slope, gl.minimum(i // RU * RU + off, S - 1), GATE, KU)
            b_first = first_keys(p_sinceh, i, i_open, T, HAS_SINCE, BT)
            start = 0
            if PARTLY:
                start = gl.load(p_starth + i // RU)
            load_rows(d_q, d_do, d_lse, d_delta, rings, full, empty, it, i_b, i_b, i_bh, i_h, i, 0, b_at, b_ref,
                      b_first, start, GATE, HAS_SINCE, PARTLY, STAGES)  # fmt: skip
            it += 1


@gluon.jit
def _reduce(d_dq, d_dk, d_dv, dq_s, dq_full, dq_empty, p_end, p_open, i_b, i_g, i_q, s, T, S, HEADS: gl.constexpr,
            G: gl.constexpr, H: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr,
            BOUNDED: gl.constexpr, APART: gl.constexpr):  # fmt: skip
    """Reducer: adds each tile of dQ to the float32 buffer, where a tile is contiguous, and so dK and dV if APART."""
    n_u, n_t = gl.cdiv(S, KU), gl.cdiv(T, RU) * (RU // BT)
    it = 0
    for i_r in range(HEADS):
        i_bh = i_b * H + i_q + i_r
        p_unit = i_bh.to(gl.int64) * n_u
        tiles = _row_tiles(p_end + p_unit, p_open + p_unit, s, T, S, BT, BS, KU, BOUNDED)
        i_lo, i_tail, i_mid, n_head, n_mask, n_mid, i_open = tiles
        for n in range(n_mask + n_mid):
            i = _row(n, tiles, BT)
            add_tile(d_dq, (i_bh * n_t + i // BT) * dq_s.shape[0], dq_s, dq_full, dq_empty, it)
            it += 1
    if APART:
        PARTS: gl.constexpr = BS // BT
        n = ((i_b * G + i_g) * gl.cdiv(S, BS) + s // BS) * PARTS
        for i in gl.static_range(PARTS):
            add_tile(d_dk, (n + i) * dq_s.shape[0], dq_s, dq_full, dq_empty, it + i)
        for i in gl.static_range(PARTS):
            add_tile(d_dv, (n + i) * dq_s.shape[0], dq_s, dq_full, dq_empty, it + PARTS + i)


@gluon.jit
def _add(b_x, dq_s, dq_full, dq_empty, it, BS: gl.constexpr, BT: gl.constexpr):
    """Hands dK or dV to the reducer, as much at a time as a tile of dQ takes."""
    PARTS: gl.constexpr = BS // BT
    b_x = held_order(b_x, BS // 16, 1)
    parts = (b_x,)
    if PARTS == 2:
        parts = gl.split(gl.permute(gl.reshape(b_x, [2, dq_s.shape[0], dq_s.shape[1]]), [1, 2, 0]))
    for i in gl.static_range(PARTS):
        hand_over(parts[i], dq_s, dq_full, dq_empty, it + i)
    return it + PARTS


@gluon.jit
def _compute(d_dk, d_dv, rings, k4_s, v4_s, ds_s, dq_s, keys_in, full, empty, dq_full, dq_empty, p_sum, p_dc, p_c,
             p_base, p_g, p_end, p_open, i_b, i_g, i_q, s, T, S, scale, scale2, HEADS: gl.constexpr, H: gl.constexpr,
             K: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr,
             KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr,
             PARTLY: gl.constexpr, STAGES: gl.constexpr, UNROUNDED: gl.constexpr, APART: gl.constexpr):  # fmt: skip
    """Products and exponentials: each warpgroup holds dK and dV of 64 keys in registers."""
    W: gl.constexpr = gl.num_warps()
    M: gl.constexpr = BT // 16
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BT, 16])
    L_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BK, 16])
    L_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BV, 16])
    L_Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M, W // M], [16, BK * M // W, 16])
    k_s, v_s = k4_s.reshape([BS, BK]), v4_s.reshape([BS, BV])
    b_dk, b_dv = gl.zeros([BS, BK], gl.float32, L_K), gl.zeros([BS, BV], gl.float32, L_V)
    b_s = s + gl.arange(0, BS, gl.SliceLayout(1, L_S))
    n_u, off = gl.cdiv(S, KU), S - T
    it = 0
    for i_r in range(HEADS):
        i_h = i_q + i_r
        i_bh = i_b.to(gl.int64) * H + i_h
        p_ch, p_baseh = p_c + i_bh * (n_u * KU), p_base + i_bh * (n_u + 1)
        p_sumh = p_sum + i_bh * (gl.cdiv(T, RU) * (RU // 2))
        b_slope = gluon_slope(p_g, i_h, GATE)
        b_ref = gluon_gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
        b_bias = gluon_bias_at(p_ch, p_baseh, b_slope, b_ref, b_s, S, GATE, KU)
        tiles = _row_tiles(p_end + i_bh * n_u, p_open + i_bh * n_u, s, T, S, BT, BS, KU, HAS_SINCE or HAS_START)
        i_lo, i_tail, i_mid, n_head, n_mask, n_mid, i_open = tiles
        b_dc = gl.zeros([BS], gl.float32, gl.SliceLayout(1, L_S))
        mbarrier.wait(keys_in, 0)  # after the first time it is there
        for n in range(n_mask):
            b_dk, b_dv, b_dc = backward_tile(
                b_dk, b_dv, b_dc, rings, k_s, v_s, ds_s, dq_s, full, empty, dq_full, dq_empty, it, _row(n, tiles, BT),
                b_bias, b_s, p_sumh, off, scale2, BT, BS, BK, BV, GATE, HAS_SINCE, PARTLY, STAGES, L_S, L_K,
                L_V, L_Q, True)  # fmt: skip
            it += 1
        for n in range(n_mid):
            b_dk, b_dv, b_dc = backward_tile(
                b_dk, b_dv, b_dc, rings, k_s, v_s, ds_s, dq_s, full, empty, dq_full, dq_empty, it, i_mid + n * BT,
                b_bias, b_s, p_sumh, off, scale2, BT, BS, BK, BV, GATE, HAS_SINCE, PARTLY, STAGES, L_S, L_K,
                L_V, L_Q, False)  # fmt: skip
            it += 1
        if GATE != 0:
            gl.store(p_dc + i_bh * S + b_s, b_dc, mask=b_s < S)
    if APART:
        it = _add(b_dk, dq_s, dq_full, dq_empty, it, BS, BT)
        it = _add(b_dv, dq_s, dq_full, dq_empty, it, BS, BT)
    else:
        if UNROUNDED:  # d_dk is a pointer: float32 does not fit where k was
            o_s, o_k = gl.arange(0, BS, gl.SliceLayout(1, L_K)), gl.arange(0, BK, gl.SliceLayout(0, L_K))
            p_dk = d_dk + ((i_b.to(gl.int64) * S + s) * (H // HEADS) + i_g) * K
            m_k = (s + o_s < S)[:, None] & (o_k < K)[None, :]
            gl.store(p_dk + o_s[:, None] * (H // HEADS * K) + o_k[None, :], b_dk * scale, mask=m_k)
        else:
            k_s.store((b_dk * scale).to(k_s.dtype))
            fence_async_shared()
            tma_store(d_dk, [i_b, s, i_g, 0], k4_s)
        v_s.store(b_dv.to(v_s.dtype))
        fence_async_shared()
        tma_store(d_dv, [i_b, s, i_g, 0], v4_s)
        tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["T", "S", "n_heads", "stride_lb", "stride_lh"])
def fox_bwd_hopper_kernel(
    d_q, d_k, d_v, d_do, d_lse, d_delta, d_dq, d_dk, d_dv, p_sum, p_dc, p_c, p_base, p_g, p_since, p_start,
    p_order, p_end, p_open, T, S, n_heads, scale, scale2, stride_lb, stride_lh,
    H: gl.constexpr, REP: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
    BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr,
    HAS_START: gl.constexpr, HAS_ORDER: gl.constexpr, STAGES: gl.constexpr, UNROUNDED: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    """dK (UNROUNDED in float32), dV, column sums of dS [B, H, S]; adds to dQ (unscaled) and to sums of dS per pair of
    rows [B, H, Tp / 2]. If APART adds to dK (unscaled) and dV, too, tile by tile."""
    G: gl.constexpr = H // REP
    PARTLY: gl.constexpr = HAS_START and BS > KU  # pruning may drop some of a program's keys: it drops units of KU
    HEADS: gl.constexpr = 1 if APART else REP  # query heads of a program
    i_s, i_n = schedule(gl.cdiv(S, BS), n_heads)
    if HAS_ORDER:
        i_n = gl.load(p_order + i_n)
    s, i_b, i_q = i_s * BS, i_n // (H // HEADS), i_n % (H // HEADS) * HEADS
    i_g = i_q // REP
    dtype: gl.constexpr = d_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BT, 1, BK], d_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BT, 1, BV], d_do.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BT], d_lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BT], d_delta.layout)
    shift_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    first_s = gl.allocate_shared_memory(gl.int32, [STAGES, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    start_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = (q_s, do_s, lse_s, delta_s, shift_s, first_s, start_s)
    k_s = gl.allocate_shared_memory(dtype, d_k.block_type.shape, d_k.layout)
    v_s = gl.allocate_shared_memory(dtype, d_v.block_type.shape, d_v.layout)
    ds_s = gl.allocate_shared_memory(dtype, [BS, BT], gl.NVMMASharedLayout.get_default_for([BS, BT], dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, d_dq.block_type.shape, d_dq.layout)
    keys_in = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_in, count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(full.index(b), count=2)  # rows, and what the loader says of them
        mbarrier.init(empty.index(b), count=1)
    gl.warp_specialize(
        [
            (_compute, (d_dk, d_dv, rings, k_s, v_s, ds_s, dq_s, keys_in, full, empty, dq_full, dq_empty, p_sum, p_dc,
                        p_c, p_base, p_g, p_end, p_open, i_b, i_g, i_q, s, T, S, scale, scale2, HEADS, H, K, BK, BV,
                        BT, BS, RU, KU, GATE, HAS_SINCE, HAS_START, PARTLY, STAGES, UNROUNDED, APART)),
            (_load, (d_q, d_k, d_v, d_do, d_lse, d_delta, rings, k_s, v_s, keys_in, full, empty, p_c, p_base, p_g,
                     p_since, p_start, p_end, p_open, i_b, i_g, i_q, s, T, S, stride_lb, stride_lh, HEADS, H, BT, BS,
                     RU, KU, GATE, HAS_SINCE, HAS_START, PARTLY, STAGES)),
            (_reduce, (d_dq, d_dk, d_dv, dq_s, dq_full, dq_empty, p_end, p_open, i_b, i_g, i_q, s, T, S, HEADS, G, H,
                       BT, BS, RU, KU, HAS_SINCE or HAS_START, APART)),
        ],
        [1, 1],  # warps
        [24, 24],  # registers per thread; the products' warps get what is left, 240
    )  # fmt: skip
