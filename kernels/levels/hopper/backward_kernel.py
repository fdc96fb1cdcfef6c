"""Backward over the levels in one pass for Hopper, in Gluon: five products where ``dq`` and ``dkdv`` need seven.

FoX's pass, whose tiles it runs: a program owns the 128 keys of a unit, so that all of them
share their levels, and walks the rows of each level in turn. The loader's row tiles need not stop between levels; k^s
is loaded a level ahead, dK^s leaves through the place of its k^s, dV stays in registers. Not deterministic, and the
gate's gradient is column sums minus row sums, as there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attnzoo.kernels.common.hopper.backward_tile import add_tile, backward_tile, first_keys, load_rows
from attnzoo.kernels.common.hopper.gate_bias import gluon_bias_at, gluon_gate_at
from attnzoo.kernels.common.hopper.releases import tma_load, tma_store
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.tile_loads import schedule


@gluon.jit
def _stop(p_cut, i_bg, s, T, REP: gl.constexpr, BS: gl.constexpr, KU: gl.constexpr, HAS_START: gl.constexpr):
    """First row that pruning lets see none of the keys from s, in any query head."""
    stop = T
    if HAS_START:
        n_u = gl.cdiv(T, KU)
        stop = 0
        for i_r in range(REP):
            p_last = p_cut + (i_bg.to(gl.int64) * REP + i_r) * n_u + gl.minimum((s + BS - 1) // KU, n_u - 1)
            stop = gl.maximum(stop, gl.load(p_last))
    return stop


@gluon.jit
def _level(n, n_levels, s, stop, REP: gl.constexpr, RU: gl.constexpr):
    """The n-th level that is worked on; whether the keys from s have it: rows r0 .. r0 + h; and its node.

    Where query heads share keys, the longest comes first: then programs that begin together stay at the same rows of
    the same query head, which they find in the L2 cache.
    """
    i_l = n
    if REP > 1:
        i_l = n_levels - 1 - n
    h = RU << i_l
    u = s // (2 * h)
    r0 = (2 * u + 1) * h
    return i_l, ((s // h) % 2 == 0) & (r0 < stop), r0, h, u


@gluon.jit
def _bounds(p_end, p_full, i_bh, s, T, BS: gl.constexpr, KU: gl.constexpr, BOUNDED: gl.constexpr):
    """Rows from i_end on see none of the keys from s, rows before i_full all of them."""
    i_end, i_full = T, T
    if BOUNDED:
        n_u = gl.cdiv(T, KU)
        p_u = i_bh.to(gl.int64) * n_u
        i_end = gl.load(p_end + p_u + gl.minimum((s + BS - 1) // KU, n_u - 1))
        i_full = gl.load(p_full + p_u + s // KU)
    return i_end, i_full


@gluon.jit
def _level_rows(i_end, i_full, r0, h, T, BT: gl.constexpr, BOUNDED: gl.constexpr):
    """Row tiles of a level: n_mask of them, from i_tail, need a mask, then n_mid from r0 do not."""
    r1 = gl.minimum(r0 + h, T)
    i_tail = r0
    n_mask = r0 * 0
    n_mid = gl.cdiv(r1 - r0, BT)
    if BOUNDED:
        i_end = gl.minimum(r1, i_end)
        i_tail = gl.maximum(gl.minimum(r1, i_full) // BT * BT, r0)
        n_mask = gl.cdiv(gl.maximum(i_end - i_tail, 0), BT)
        n_mid = gl.cdiv(gl.maximum(gl.minimum(i_tail, i_end) - r0, 0), BT)
    return i_tail, n_mask, n_mid


@gluon.jit
def _row(n, r0, i_tail, n_mask, BT: gl.constexpr):
    """First row of the n-th tile."""
    return gl.where(n < n_mask, i_tail + n * BT, r0 + (n - n_mask) * BT)


@gluon.jit
def _load(d_q, d_k, d_v, d_do, d_lse, d_delta, rings, k_s, v_s, values_in, keys_in, keys_out, full, empty, p_c, p_base,
          p_since, p_start, p_cut, p_end, p_full, B, T, n_levels, i_b, i_g, s, stride_lb, stride_lh,
          REP: gl.constexpr, H: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr,
          GATE: gl.constexpr, HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Loader: v once, k^s per level; per row tile q^s, dO, lse, delta, first keys and the gates between the frames of
    rows and keys."""
    BOUNDED: gl.constexpr = HAS_SINCE or HAS_START
    mbarrier.expect(values_in, d_v.block_type.nbytes)
    tma_load(d_v, [i_b, s, i_g, 0], values_in, v_s)
    n_u = gl.cdiv(T, KU)
    i_bg = i_b * (H // REP) + i_g
    stop = _stop(p_cut, i_bg, s, T, REP, BS, KU, HAS_START)
    i_end, i_full = _bounds(p_end, p_full, i_bg * REP, s, T, BS, KU, BOUNDED)
    b_slope = gl.to_tensor(0.0)
    p_ch, p_baseh = p_c + (i_bg * REP).to(gl.int64) * (n_u * KU), p_base + (i_bg * REP).to(gl.int64) * (n_u + 1)
    b_ref = gluon_gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
    it = 0
    n_k = 0
    for n_l in range(n_levels):
        i_l, need, r0, h, u = _level(n_l, n_levels, s, stop, REP, RU)
        if need:
            i_lb = i_l * B + i_b
            back = (u + 1) * h  # of a row: its token minus its packed row
            b_k = n_k % 2
            mbarrier.wait(keys_out.index(b_k), (n_k // 2 & 1) ^ 1)
            mbarrier.expect(keys_in.index(b_k), d_k.block_type.nbytes)
            tma_load(d_k, [i_lb, s - u * h, i_g, 0], keys_in.index(b_k), k_s.index(b_k))
            n_k += 1
            for i_r in range(REP):
                i_h = i_g * REP + i_r
                i_bh = i_b * H + i_h
                if REP > 1:
                    i_end, i_full = _bounds(p_end, p_full, i_bh, s, T, BS, KU, BOUNDED)
                    p_ch, p_baseh = p_c + i_bh.to(gl.int64) * (n_u * KU), p_base + i_bh.to(gl.int64) * (n_u + 1)
                    b_ref = gluon_gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
                p_sinceh = p_since + i_b.to(gl.int64) * stride_lb + i_h.to(gl.int64) * stride_lh
                p_starth = p_start + i_bh.to(gl.int64) * gl.cdiv(T, RU)
                i_tail, n_mask, n_mid = _level_rows(i_end, i_full, r0, h, T, BT, BOUNDED)
                for n in range(n_mask + n_mid):
                    i = _row(n, r0, i_tail, n_mask, BT)
                    b_at = gluon_gate_at(p_ch, p_baseh, b_slope, i // RU * RU, GATE, KU)
                    b_first = first_keys(p_sinceh, i, i_full, T, HAS_SINCE, BT)
                    if HAS_START:
                        b_first = gl.maximum(b_first, gl.load(p_starth + i // RU, mask=i + BT > i_full, other=0))
                    load_rows(d_q, d_do, d_lse, d_delta, rings, full, empty, it, i_lb, i_b, i_bh, i_h, i, back, b_at,
                              b_ref, b_first, 0, GATE, BOUNDED, False, STAGES)  # fmt: skip
                    it += 1


@gluon.jit
def _reduce(d_dq, d_dk, dq_s, k_s, dq_full, dq_empty, dk_full, keys_out, p_cut, p_end, p_full, B, T, Tq, n_levels,
            i_b, i_g, s, REP: gl.constexpr, H: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr,
            KU: gl.constexpr, HAS_START: gl.constexpr, BOUNDED: gl.constexpr):  # fmt: skip
    """Reducer: adds each tile of dQ^s to the float32 buffer, where a tile is contiguous; copies dK^s out."""
    n_q = gl.cdiv(Tq, RU) * (RU // BT)
    i_bg = i_b * (H // REP) + i_g
    stop = _stop(p_cut, i_bg, s, T, REP, BS, KU, HAS_START)
    i_end, i_full = _bounds(p_end, p_full, i_bg * REP, s, T, BS, KU, BOUNDED)
    it = 0
    n_k = 0
    for n_l in range(n_levels):
        i_l, need, r0, h, u = _level(n_l, n_levels, s, stop, REP, RU)
        if need:
            i_lb = i_l * B + i_b
            back = (u + 1) * h
            for i_r in range(REP):
                i_h = i_g * REP + i_r
                if REP > 1:
                    i_end, i_full = _bounds(p_end, p_full, i_b * H + i_h, s, T, BS, KU, BOUNDED)
                i_tail, n_mask, n_mid = _level_rows(i_end, i_full, r0, h, T, BT, BOUNDED)
                for n in range(n_mask + n_mid):
                    i = _row(n, r0, i_tail, n_mask, BT)
                    row = ((i_lb * H + i_h) * n_q + (i - back) // BT) * dq_s.shape[0]
                    add_tile(d_dq, row, dq_s, dq_full, dq_empty, it)
                    it += 1
            b_k = n_k % 2
            mbarrier.wait(dk_full.index(b_k), n_k // 2 & 1)
            tma_store(d_dk, [i_lb, s - u * h, i_g, 0], k_s.index(b_k))
            tma.store_wait(0)
            mbarrier.arrive(keys_out.index(b_k), count=1)
            n_k += 1


@gluon.jit
def _bias(p_c, p_base, i_bh, b_s, s, T, GATE: gl.constexpr, KU: gl.constexpr):
    """c_ref - c of the keys b_s, in the frame of the first of them."""
    b_bias = b_s.to(gl.float32)
    if GATE != 0:
        n_u = gl.cdiv(T, KU)
        p_ch, p_baseh = p_c + i_bh * (n_u * KU), p_base + i_bh * (n_u + 1)
        b_slope = gl.to_tensor(0.0)
        b_ref = gluon_gate_at(p_ch, p_baseh, b_slope, s, GATE, KU)
        b_bias = gluon_bias_at(p_ch, p_baseh, b_slope, b_ref, b_s, T, GATE, KU)
    return b_bias


@gluon.jit
def _compute(d_dv, rings, k4_s, v4_s, ds_s, dq_s, values_in, keys_in, dk_full, full, empty, dq_full, dq_empty, p_own,
             p_sum, p_dc, p_c, p_base, p_cut, p_end, p_full, T, n_levels, i_b, i_g, s, scale, scale2,
             REP: gl.constexpr, H: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr,
             RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_START: gl.constexpr, BOUNDED: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Products and exponentials: each warpgroup holds dK^s and dV of 64 keys in registers."""
    W: gl.constexpr = gl.num_warps()
    M: gl.constexpr = BT // 16
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BT, 16])
    L_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BK, 16])
    L_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BV, 16])
    L_Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M, W // M], [16, BK * M // W, 16])
    v_s = v4_s.reshape([BS, BV])
    b_s = s + gl.arange(0, BS, gl.SliceLayout(1, L_S))
    i_bg = i_b * (H // REP) + i_g
    i_bh = i_bg.to(gl.int64) * REP
    stop = _stop(p_cut, i_bg, s, T, REP, BS, KU, HAS_START)
    i_end, i_full = _bounds(p_end, p_full, i_bh, s, T, BS, KU, BOUNDED)
    o_v = gl.arange(0, BS, gl.SliceLayout(1, L_V))[:, None] * BV + gl.arange(0, BV, gl.SliceLayout(0, L_V))[None, :]
    b_dv = gl.load(p_own + (i_bg.to(gl.int64) * (gl.cdiv(T, RU) * RU) + s) * BV + o_v)
    b_bias = _bias(p_c, p_base, i_bh, b_s, s, T, GATE, KU)
    b_dc = gl.zeros([BS], gl.float32, gl.SliceLayout(1, L_S))
    it = 0
    n_k = 0
    mbarrier.wait(values_in, 0)
    for n_l in range(n_levels):
        i_l, need, r0, h, u = _level(n_l, n_levels, s, stop, REP, RU)
        if need:
            b_k = n_k % 2
            mbarrier.wait(keys_in.index(b_k), n_k // 2 & 1)
            k_s = k4_s.index(b_k).reshape([BS, BK])
            b_dk = gl.zeros([BS, BK], gl.float32, L_K)
            for i_r in range(REP):
                i_hh = i_bh + i_r
                if REP > 1:
                    i_end, i_full = _bounds(p_end, p_full, i_hh, s, T, BS, KU, BOUNDED)
                    b_bias = _bias(p_c, p_base, i_hh, b_s, s, T, GATE, KU)
                    b_dc = gl.zeros([BS], gl.float32, gl.SliceLayout(1, L_S))
                p_sumh = p_sum + i_hh * (gl.cdiv(T, RU) * (RU // 2))
                i_tail, n_mask, n_mid = _level_rows(i_end, i_full, r0, h, T, BT, BOUNDED)
                if BOUNDED:
                    for n in range(n_mask):
                        b_dk, b_dv, b_dc = backward_tile(
                            b_dk, b_dv, b_dc, rings, k_s, v_s, ds_s, dq_s, full, empty, dq_full, dq_empty, it,
                            i_tail + n * BT, b_bias, b_s, p_sumh, 0, scale2, BT, BS, BK, BV, GATE, BOUNDED, False,
                            STAGES, L_S, L_K, L_V, L_Q, True)  # fmt: skip
                        it += 1
                for n in range(n_mid):
                    b_dk, b_dv, b_dc = backward_tile(
                        b_dk, b_dv, b_dc, rings, k_s, v_s, ds_s, dq_s, full, empty, dq_full, dq_empty, it, r0 + n * BT,
                        b_bias, b_s, p_sumh, 0, scale2, BT, BS, BK, BV, GATE, BOUNDED, False, STAGES, L_S, L_K, L_V,
                        L_Q, False)  # fmt: skip
                    it += 1
                if GATE != 0 and REP > 1:
                    gl.atomic_add(p_dc + i_hh * T + b_s, b_dc, sem="relaxed")
            k_s.store((b_dk * scale).to(k_s.dtype))
            fence_async_shared()
            mbarrier.arrive(dk_full.index(b_k), count=1)
            n_k += 1
    if GATE != 0 and REP == 1:
        gl.atomic_add(p_dc + i_bh * T + b_s, b_dc, mask=b_s < T, sem="relaxed")
    v_s.store(b_dv.to(v_s.dtype))
    fence_async_shared()
    tma_store(d_dv, [i_b, s, i_g, 0], v4_s)
    tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["B", "T", "Tq", "n_levels", "n_heads", "stride_lb", "stride_lh"])
def path_bwd_hopper_kernel(
    d_q, d_k, d_v, d_do, d_lse, d_delta, d_dq, d_dk, d_dv, p_own, p_sum, p_dc, p_c, p_base, p_since, p_start, p_cut,
    p_end, p_full, B, T, Tq, n_levels, n_heads, scale, scale2, stride_lb, stride_lh,
    H: gl.constexpr, REP: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr,
    RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dK of each level, dV from p_own on; adds to dQ of each level (unscaled), to column sums of dS [B, H, T] and to
    sums of dS per pair of rows [B, H, Tp / 2]. Units of keys with the most rows (the first) run first."""
    G: gl.constexpr = H // REP
    i_s, i_bg = schedule(gl.cdiv(T, RU) * (RU // BS), n_heads)
    s, i_b, i_g = i_s * BS, i_bg // G, i_bg % G
    dtype: gl.constexpr = d_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BT, 1, BK], d_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BT, 1, BV], d_do.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BT], d_lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BT], d_delta.layout)
    shift_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    first_s = gl.allocate_shared_memory(gl.int32, [STAGES, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = (q_s, do_s, lse_s, delta_s, shift_s, first_s, None)
    k_s = gl.allocate_shared_memory(dtype, [2, 1, BS, 1, BK], d_k.layout)
    v_s = gl.allocate_shared_memory(dtype, d_v.block_type.shape, d_v.layout)
    ds_s = gl.allocate_shared_memory(dtype, [BS, BT], gl.NVMMASharedLayout.get_default_for([BS, BT], dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, d_dq.block_type.shape, d_dq.layout)
    values_in = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_in = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_out = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dk_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(values_in, count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)
    for b in gl.static_range(2):
        mbarrier.init(keys_in.index(b), count=1)
        mbarrier.init(keys_out.index(b), count=1)
        mbarrier.init(dk_full.index(b), count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(full.index(b), count=2)  # rows, and what the loader says of them
        mbarrier.init(empty.index(b), count=1)
    gl.warp_specialize(
        [
            (_compute, (d_dv, rings, k_s, v_s, ds_s, dq_s, values_in, keys_in, dk_full, full, empty, dq_full, dq_empty,
                        p_own, p_sum, p_dc, p_c, p_base, p_cut, p_end, p_full, T, n_levels, i_b, i_g, s, scale, scale2,
                        REP, H, BK, BV, BT, BS, RU, KU, GATE, HAS_START, HAS_SINCE or HAS_START, STAGES)),
            (_load, (d_q, d_k, d_v, d_do, d_lse, d_delta, rings, k_s, v_s, values_in, keys_in, keys_out, full, empty,
                     p_c, p_base, p_since, p_start, p_cut, p_end, p_full, B, T, n_levels, i_b, i_g, s, stride_lb,
                     stride_lh, REP, H, BT, BS, RU, KU, GATE, HAS_SINCE, HAS_START, STAGES)),
            (_reduce, (d_dq, d_dk, dq_s, k_s, dq_full, dq_empty, dk_full, keys_out, p_cut, p_end, p_full, B, T, Tq,
                       n_levels, i_b, i_g, s, REP, H, BT, BS, RU, KU, HAS_START, HAS_SINCE or HAS_START)),
        ],
        [1, 1],  # warps
        [24, 24],  # registers per thread; the products' warps get what is left, 240
    )  # fmt: skip
