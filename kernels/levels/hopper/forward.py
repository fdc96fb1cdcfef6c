"""Forward for Hopper, in Gluon: what the portable kernel computes, with the steps of FoX's Gluon forward.

A program owns a unit of 128 rows, which share every level. So their keys are the units before them, nearest first, each
from the keys of one level, and the level changes where the next unit's index differs from the rows' in a higher bit. A
level's q comes with the first of its keys, in place of the q of STAGES levels before: no level is without keys, so
that one has been read by the time there is room for the key tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E
from attnzoo.kernels.common.hopper.descriptors import gluon_descriptor
from attnzoo.kernels.common.hopper.forward_steps import (
    key_tiles,
    last_step,
    load_ring_keys,
    load_ring_values,
    softmax_step,
    start_scores,
    store_rows,
    tile_weights,
)
from attnzoo.kernels.common.hopper.gate_bias import gluon_bias_at, gluon_gate_at
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, head_block, row_strides
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.tile_loads import schedule
from attnzoo.kernels.levels.layout import UNIT
from attnzoo.kernels.levels.operands import LevelRows
from attnzoo.kernels.levels.plan import HOPPER_FORWARD


@gluon.jit
def _load(d_qb, d_kb, d_q, d_k, d_v, q_s, ring, p_c, p_base, p_since, p_start, i_b, i_h, i_u, B, T, n_levels,
          REP: gl.constexpr, BT: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr,
          HAS_START: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Loader: q where it changes, k and the bias of a key tile ahead of v of the tile before."""
    row, i_g, b_slope = i_u * BT, i_h // REP, gl.to_tensor(0.0)
    lo, full, mid, n_left, n_diag, start = key_tiles(p_since, p_start, i_u, row, gl.minimum(row + BT, T) - 1, BT, BT,
                                                     BT, HAS_SINCE, HAS_START)  # fmt: skip
    b_ref = gluon_gate_at(p_c, p_base, b_slope, row, GATE, KU)
    load_ring_values(d_v, ring, 0, i_b, row, i_g, STAGES)
    load_ring_keys(d_qb, d_kb, q_s, ring, 0, True, p_c, p_base, b_slope, b_ref, 0, i_b, row, row, row, i_h, i_g, T,
                   BT // 2, BT, KU, GATE, STAGES)  # fmt: skip
    j = 0
    for i in range(n_levels):
        node = i_u >> (i + 1)
        begin, last = gl.maximum((2 * node) << i, lo), ((2 * node + 1) << i) - 1
        if ((i_u >> i) & 1 == 1) & (begin <= last):
            j += 1
            r, back = row - ((node + 1) << i) * BT, (node << i) * BT
            for n in range(i_u - last, i_u - begin + 1):
                s = (i_u - n) * BT
                load_ring_keys(d_q, d_k, q_s, ring, j % STAGES, i_u - n == last, p_c, p_base, b_slope, b_ref, n,
                               i * B + i_b, r, s - back, s, i_h, i_g, T, BT // 2, BT, KU, GATE, STAGES)  # fmt: skip
                if n > 1:
                    load_ring_values(d_v, ring, n - 1, i_b, s + BT, i_g, STAGES)
    if i_u > lo:
        load_ring_values(d_v, ring, i_u - lo, i_b, lo * BT, i_g, STAGES)


@gluon.jit
def _pair_scores(w: gl.constexpr, q_s, ring, p_diag, b_row, T, BR: gl.constexpr, BS: gl.constexpr, BK: gl.constexpr,
                 STAGES: gl.constexpr, L_S: gl.constexpr):  # fmt: skip
    """Unscaled scores in the own pair of blocks: diag within the block, the blocks' carried q and k across."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    o_s = gl.arange(0, BS, gl.SliceLayout(0, L_S))
    m_own = (o_s // BR == w)[None, :]
    p_d = p_diag + (b_row % BR)[:, None] * BR + (o_s - w * BR)[None, :]
    b_y = gl.load(p_d, mask=m_own & (b_row < T)[:, None], other=0.0)  # [BR, BS]
    if w == 1:
        b_c = start_scores(q_s.index(w).reshape([BR, BK]), ring, 0, BR, BS, BK, STAGES, L_S)
        b_y = gl.where(m_own, b_y, warpgroup_mma_wait(0, [b_c]))
    else:
        mbarrier.wait(full_k.index(0), 0)
    return b_y


@gluon.jit
def _next(i_s, level, j):
    """The level after key unit i_s: the unit after its first key, and how many levels came before it."""
    first = level & (level - 1)
    return gl.where(i_s == first, first, level), gl.where(i_s == first, j + 1, j)


@gluon.jit
def _rows(w: gl.constexpr, q_s, ring, p_diag, p_o, p_rest, p_lse, p_c, p_base, p_since, p_start, p_sink, i_h, i_u, T,
          scale2, stride_d, stride_o, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
          KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr,
          HAS_REST: gl.constexpr, HAS_SINK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The w-th warpgroup's block of 64 rows."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    BR: gl.constexpr = BT // 2
    SINCE: gl.constexpr = HAS_SINCE or HAS_START
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    row = i_u * BT
    lo, full, mid, n_left, n_diag, start = key_tiles(p_since, p_start, i_u, row, gl.minimum(row + BT, T) - 1, BT, BT,
                                                     BT, HAS_SINCE, HAS_START)  # fmt: skip
    b_row = row + w * BR + gl.arange(0, BR, gl.SliceLayout(1, L_S))
    b_since = b_row * 0 + start
    if HAS_SINCE:
        b_since = gl.maximum(b_since, gl.load(p_since + b_row, mask=b_row < T, other=0))
    b_m = gl.full([BR], float("-inf"), gl.float32, gl.SliceLayout(1, L_S))
    b_l = gl.zeros([BR], gl.float32, gl.SliceLayout(1, L_S))
    if HAS_SINK:  # one more logit, without a value: moved to the frame of the row unit
        b_m = b_l + gl.load(p_sink + i_h).to(gl.float32) * TL_LOG2E
        if GATE != 0:
            b_slope = gl.to_tensor(0.0)
            b_ref = gluon_gate_at(p_c, p_base, b_slope, row, GATE, KU)
            b_m += gluon_bias_at(p_c, p_base, b_slope, b_ref, b_row, T, GATE, KU)
        b_l = gl.where(b_m == float("-inf"), 0.0, 1.0)
    b_o = gl.zeros([BR, BV], gl.float32, L_O)
    b_y = _pair_scores(w, q_s, ring, p_diag + (i_u * 2 + w) * stride_d, b_row, T, BR, BT, BK, STAGES, L_S)
    b_bias = bias_s.index(0).load(gl.SliceLayout(0, L_S))
    mbarrier.arrive(empty_k.index(0), count=1)
    b_p, b_a, b_m, b_l = tile_weights(
        b_y, b_m, b_l, b_bias, row, b_row, b_since, scale2, BR, BT, GATE, SINCE, L_S, True
    )
    b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
    mbarrier.wait(full_v.index(0), 0)
    level, j = i_u, 1
    n_full, n_all = gl.maximum(i_u - full, 0), i_u - lo
    for n in range(n_full):
        q_t = q_s.index(j % STAGES * 2 + w).reshape([BR, BK])
        b_o, b_ph, b_m, b_l = softmax_step(b_o, b_ph, b_m, b_l, q_t, ring, n, 0, b_row, b_since, scale2, BR, BT, BK, BV,
                                           GATE, SINCE, STAGES, L_S, L_O, False)  # fmt: skip
        level, j = _next(i_u - n - 1, level, j)
    if SINCE:
        for n in range(n_full, n_all):
            q_t = q_s.index(j % STAGES * 2 + w).reshape([BR, BK])
            b_o, b_ph, b_m, b_l = softmax_step(b_o, b_ph, b_m, b_l, q_t, ring, n, (i_u - n - 1) * BT, b_row, b_since,
                                               scale2, BR, BT, BK, BV, GATE, SINCE, STAGES, L_S, L_O, True)  # fmt: skip
            level, j = _next(i_u - n - 1, level, j)
    b_o = last_step(b_o, b_ph, ring, n_all, BT, BV, STAGES)
    store_rows(b_o, b_m, b_l, p_o, p_rest, p_lse, stride_o, row + w * BR, T, V, BR, BV, HAS_REST, L_S, L_O)


@launched
@gluon.jit(do_not_specialize=["B", "T", "n_levels", "n_heads", "stride_lb", "stride_lh"])
def path_fwd_hopper_kernel(
    d_qb, d_kb, d_q, d_k, d_v, p_diag, p_o, p_rest, p_lse, p_c, p_base, p_since, p_start, p_sink, B, T, n_levels,
    n_heads, scale2, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    H: gl.constexpr, REP: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
    KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr, HAS_REST: gl.constexpr,
    HAS_SINK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per unit of BT rows, the longest rows first."""
    n_t = gl.cdiv(T, BT)
    i_n, i_bh = schedule(n_t, n_heads)
    i_u, i_b, i_h = n_t - 1 - i_n, i_bh // H, i_bh % H
    dtype: gl.constexpr = d_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, BT // 2, 1, BK], d_q.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BT, 1, BK], d_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BT, 1, BV], d_v.layout)
    bias_s = gl.allocate_shared_memory(gl.float32, [STAGES, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(STAGES):
        mbarrier.init(full_k.index(b), count=1)
        mbarrier.init(full_v.index(b), count=1)
        mbarrier.init(empty_k.index(b), count=2)
        mbarrier.init(empty_v.index(b), count=2)
    ring = (k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v)
    i_b64, i_h64, n_u = i_b.to(gl.int64), i_h.to(gl.int64), gl.cdiv(T, KU)
    p_diag += (i_b64 * n_u * H + i_h) * (KU * KU)
    p_c += i_bh.to(gl.int64) * (n_u * KU)
    p_base += i_bh.to(gl.int64) * (n_u + 1)
    p_since += i_b64 * stride_lb + i_h64 * stride_lh
    p_start += i_bh.to(gl.int64) * n_t
    p_lse += i_bh.to(gl.int64) * T
    o_row = i_b64 * stride_ob + i_h64 * stride_oh
    p_o += o_row
    p_rest += o_row
    stride_d = gl.to_tensor(H * KU * KU).to(gl.int64)
    gl.warp_specialize(
        [
            (_rows, (0, q_s, ring, p_diag, p_o, p_rest, p_lse, p_c, p_base, p_since, p_start, p_sink, i_h, i_u, T,
                     scale2, stride_d, stride_ot, V, BK, BV, BT, KU, GATE, HAS_SINCE, HAS_START, HAS_REST, HAS_SINK,
                     STAGES)),
            (_rows, (1, q_s, ring, p_diag, p_o, p_rest, p_lse, p_c, p_base, p_since, p_start, p_sink, i_h, i_u, T,
                     scale2, stride_d, stride_ot, V, BK, BV, BT, KU, GATE, HAS_SINCE, HAS_START, HAS_REST, HAS_SINK,
                     STAGES)),
            (_load, (d_qb, d_kb, d_q, d_k, d_v, q_s, ring, p_c, p_base, p_since, p_start, i_b, i_h, i_u, B, T, n_levels,
                     REP, BT, KU, GATE, HAS_SINCE, HAS_START, STAGES)),
        ],
        [4, 1],  # warps, beside the four of the first
        [240, 24],  # registers per thread; the first gets what is left, 240
    )  # fmt: skip


def levels_forward_hopper(x: LevelRows, plan: Plan) -> None:
    """As ``portable.forward.levels_forward``, where the plan says so."""
    block, levels, v, o, lse, rows, o_rest, sink, options = x
    (B, T, H, K), (G, V) = block.q.shape, v.shape[2:]
    t = HOPPER_FORWARD[64 if max(K, V) <= 64 else 128]
    path_fwd_hopper_kernel[(cdiv(T, UNIT) * B * H,)](
        gluon_descriptor(block.q, UNIT // 2), gluon_descriptor(block.k, UNIT), gluon_descriptor(levels.q.flatten(0, 1),
        UNIT // 2), gluon_descriptor(levels.k.flatten(0, 1), UNIT), gluon_descriptor(v, UNIT), block.diag, o,
        o if o_rest is None else o_rest, lse, *rows.pointers(lse), lse if sink is None else sink, B, T,
        levels.q.shape[0], min(t.heads, B * H), options.scale * LOG2E, *o.stride()[:3],
        *row_strides(rows.first_visible), H=H, REP=H // G, V=V, BK=head_block(K), BV=head_block(V), BT=UNIT,
        KU=KEY_UNIT, GATE=x.gate, **rows.flags, HAS_REST=o_rest is not None, HAS_SINK=sink is not None,
        STAGES=t.num_stages, num_warps=t.num_warps,
    )  # fmt: skip
