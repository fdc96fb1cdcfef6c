"""Forward for Hopper, in Gluon: what the portable kernel computes, by warpgroups that do not wait for each other.

There are as many programs as multiprocessors. Each takes blocks of 128 rows, one after another, so that what a block
begins with is on its way while the last one's results are stored. A loader warp takes them, and copies q, k, v and the
keys' gates into shared memory; two warpgroups own 64 rows each and drift apart, so the exponentials of one run beside
the products of the other, and in each the exponentials of a key tile run beside the product of the last one's weights
and v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, ROW_UNIT
from attnzoo.kernels.common.device import multiprocessors
from attnzoo.kernels.common.hopper.descriptors import gluon_descriptor
from attnzoo.kernels.common.hopper.forward_steps import (
    key_tiles,
    last_step,
    load_ring_keys,
    load_ring_values,
    normalized,
    softmax_step,
    start_scores,
    store_lse,
    tile_weights,
)
from attnzoo.kernels.common.hopper.gate_bias import gluon_bias_at, gluon_gate_at, gluon_slope
from attnzoo.kernels.common.hopper.releases import barrier, tma_load, tma_store
from attnzoo.kernels.common.hopper.tasks import announce_task, announced
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, gate_kind, head_block, row_strides
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.common.tile_loads import nth
from attnzoo.kernels.fox.operands import FoxOperands
from attnzoo.kernels.fox.plan import HOPPER_FORWARD


@gluon.jit
def _tile_at(n, lo, full, mid, n_left, n_diag):
    """Index of the n-th key tile: the diagonal first, so that later tiles start from a good maximum."""
    i = gl.where(n < n_diag, mid + n, lo + n - n_diag)
    return gl.where(n < n_diag + n_left, i, full + n - n_diag - n_left)


@gluon.jit
def _task(n, n_all, n_heads, T, H: gl.constexpr, BT: gl.constexpr):
    """What the n-th task is about: row block, sequence and head; the longest rows of a head come first."""
    n_t = gl.cdiv(T, BT)
    i_n, i_bh = nth(n, n_all, n_t, n_heads)
    return n_t - 1 - i_n, i_bh // H, i_bh % H


@gluon.jit
def _of_head(p_c, p_base, p_since, p_start, i_b, i_h, T, S, stride_lb, stride_lh, H: gl.constexpr, RU: gl.constexpr,
             KU: gl.constexpr):  # fmt: skip
    """Where the gates' sums and the first keys of a head begin."""
    i_bh = i_b.to(gl.int64) * H + i_h
    n_u = gl.cdiv(S, KU)
    p_since += i_b.to(gl.int64) * stride_lb + i_h.to(gl.int64) * stride_lh
    return p_c + i_bh * (n_u * KU), p_base + i_bh * (n_u + 1), p_since, p_start + i_bh * gl.cdiv(T, RU)


@gluon.jit
def _load(d_q, d_k, d_v, q_s, ring, task_s, q_in, q_out, p_next, p_c, p_base, p_g, p_since, p_start, n_tasks, n_heads,
          T, S, stride_lb, stride_lh, REP: gl.constexpr, H: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr,
          RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Loader: takes tasks; of each q once, then k and the bias of a key tile ahead of v of the tile before."""
    off = S - T
    it = 0
    j = 0
    n_task = gl.program_id(0)
    while n_task < n_tasks:
        i_t, i_b, i_h = _task(n_task, n_tasks, n_heads, T, H, BT)
        p_ch, p_baseh, p_sinceh, p_starth = _of_head(p_c, p_base, p_since, p_start, i_b, i_h, T, S, stride_lb,
                                                     stride_lh, H, RU, KU)  # fmt: skip
        p_first, p_last = i_t * BT + off, gl.minimum(i_t * BT + BT, T) - 1 + off
        lo, full, mid, n_left, n_diag, start = key_tiles(p_sinceh, p_starth, i_t, p_first, p_last, BT, BS, RU,
                                                         HAS_SINCE, HAS_START)  # fmt: skip
        b_slope = gluon_slope(p_g, i_h, GATE)
        b_ref = gluon_gate_at(p_ch, p_baseh, b_slope, i_t * BT // RU * RU + off, GATE, KU)
        mbarrier.wait(q_out, (j & 1) ^ 1)
        announce_task(task_s, n_task, j)
        mbarrier.expect(q_in, 2 * d_q.block_type.nbytes)
        for w in gl.static_range(2):
            tma_load(d_q, [i_b, i_t * BT + w * (BT // 2), i_h, 0], q_in, q_s.index(w))
        n_all = n_diag + n_left + gl.maximum(mid - full, 0)
        s_v = 0
        for n in range(n_all):
            s = _tile_at(n, lo, full, mid, n_left, n_diag) * BS
            load_ring_keys(d_q, d_k, q_s, ring, 0, False, p_ch, p_baseh, b_slope, b_ref, it + n, i_b, i_t * BT, s, s,
                           i_h, i_h // REP, S, BT // 2, BS, KU, GATE, STAGES)  # fmt: skip
            if n > 0:
                load_ring_values(d_v, ring, it + n - 1, i_b, s_v, i_h // REP, STAGES)
            s_v = s
        it += n_all
        load_ring_values(d_v, ring, it - 1, i_b, s_v, i_h // REP, STAGES)
        n_task = gl.num_programs(0) + gl.atomic_add(p_next, 1, sem="relaxed")
        j += 1
    mbarrier.wait(q_out, (j & 1) ^ 1)
    announce_task(task_s, n_task, j)
    mbarrier.arrive(q_in, count=1)


@gluon.jit
def _store(b_o, b_m, b_l, d_o, d_rest, o_s, rest_s, p_lse, i_b, i_h, r, T, BR: gl.constexpr, BV: gl.constexpr,
           HAS_REST: gl.constexpr, L_S: gl.constexpr, L_O: gl.constexpr):  # fmt: skip
    """The results of BR rows from r on leave through shared memory while the next task begins."""
    b_o = normalized(b_o, b_l, L_O)
    b_oh = b_o.to(o_s.dtype)
    tma.store_wait(0)  # those of the task before
    barrier()
    o_s.reshape([BR, BV]).store(b_oh)
    if HAS_REST:  # what the rounding dropped
        rest_s.reshape([BR, BV]).store((b_o - b_oh.to(gl.float32)).to(o_s.dtype))
    fence_async_shared()
    tma_store(d_o, [i_b, r, i_h, 0], o_s)
    if HAS_REST:
        tma_store(d_rest, [i_b, r, i_h, 0], rest_s)
    store_lse(b_m, b_l, p_lse, r, T, BR, L_S)


@gluon.jit
def _rows(w: gl.constexpr, q_s, ring, task_s, q_in, q_out, d_o, d_rest, o_s, rest_s, p_lse, p_c, p_base, p_g, p_since,
          p_start, p_sink, n_tasks, n_heads, T, S, scale2, stride_lb, stride_lh, H: gl.constexpr, BK: gl.constexpr,
          BV: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
          HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr, HAS_SINK: gl.constexpr, HAS_REST: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """The w-th warpgroup's 64 rows of each task."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    SINCE: gl.constexpr = HAS_SINCE or HAS_START
    BR: gl.constexpr = BT // 2
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BS, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    L_R: gl.constexpr = gl.SliceLayout(1, L_S)
    off = S - T
    q_t = q_s.index(w).reshape([BR, BK])
    it = 0
    mbarrier.wait(q_in, 0)
    n_task, j = announced(task_s)
    while n_task < n_tasks:
        i_t, i_b, i_h = _task(n_task, n_tasks, n_heads, T, H, BT)
        p_ch, p_baseh, p_sinceh, p_starth = _of_head(p_c, p_base, p_since, p_start, i_b, i_h, T, S, stride_lb,
                                                     stride_lh, H, RU, KU)  # fmt: skip
        p_first, p_last = i_t * BT + off, gl.minimum(i_t * BT + BT, T) - 1 + off
        lo, full, mid, n_left, n_diag, start = key_tiles(p_sinceh, p_starth, i_t, p_first, p_last, BT, BS, RU,
                                                         HAS_SINCE, HAS_START)  # fmt: skip
        b_pos = p_first + w * BR + gl.arange(0, BR, L_R)
        b_since = b_pos * 0 + start
        if HAS_SINCE:
            b_since = gl.maximum(b_since, gl.load(p_sinceh + b_pos, mask=b_pos < S, other=0))
        b_m = gl.full([BR], float("-inf"), gl.float32, L_R)
        b_l = gl.zeros([BR], gl.float32, L_R)
        if HAS_SINK:  # one more logit, without a value: moved to the frame of the row unit
            b_m = b_l + gl.load(p_sink + i_h).to(gl.float32) * TL_LOG2E
            b_slope = gluon_slope(p_g, i_h, GATE)
            b_ref = gluon_gate_at(p_ch, p_baseh, b_slope, i_t * BT // RU * RU + off, GATE, KU)
            if GATE != 0:
                b_m += gluon_bias_at(p_ch, p_baseh, b_slope, b_ref, b_pos, S, GATE, KU)
            b_l = gl.where(b_m == float("-inf"), 0.0, 1.0)
        b_o = gl.zeros([BR, BV], gl.float32, L_O)
        n_mask = n_diag + n_left  # at least one: a row sees itself
        n_all = n_mask + gl.maximum(mid - full, 0)
        s = _tile_at(0, lo, full, mid, n_left, n_diag) * BS
        b_y = warpgroup_mma_wait(0, [start_scores(q_t, ring, it, BR, BS, BK, STAGES, L_S)])
        b_bias = bias_s.index(it % STAGES).load(gl.SliceLayout(0, L_S))
        mbarrier.arrive(empty_k.index(it % STAGES), count=1)
        b_p, b_a, b_m, b_l = tile_weights(b_y, b_m, b_l, b_bias, s, b_pos, b_since, scale2, BR, BS, GATE, SINCE, L_S,
                                          True)  # fmt: skip
        b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
        mbarrier.wait(full_v.index(it % STAGES), it // STAGES & 1)
        for n in range(n_mask - 1):
            s = _tile_at(n + 1, lo, full, mid, n_left, n_diag) * BS
            b_o, b_ph, b_m, b_l = softmax_step(b_o, b_ph, b_m, b_l, q_t, ring, it + n, s, b_pos, b_since, scale2, BR,
                                               BS, BK, BV, GATE, SINCE, STAGES, L_S, L_O, True)  # fmt: skip
        for n in range(n_mask - 1, n_all - 1):
            b_o, b_ph, b_m, b_l = softmax_step(b_o, b_ph, b_m, b_l, q_t, ring, it + n, 0, b_pos, b_since, scale2, BR,
                                               BS, BK, BV, GATE, SINCE, STAGES, L_S, L_O, False)  # fmt: skip
        mbarrier.arrive(q_out, count=1)  # no more scores: the next task's q may come
        it += n_all
        b_o = last_step(b_o, b_ph, ring, it - 1, BS, BV, STAGES)
        mbarrier.arrive(empty_v.index((it - 1) % STAGES), count=1)
        p_lseh = p_lse + (i_b.to(gl.int64) * H + i_h) * T
        r = i_t * BT + w * BR
        _store(b_o, b_m, b_l, d_o, d_rest, o_s.index(w), rest_s.index(w), p_lseh, i_b, i_h, r, T, BR, BV, HAS_REST, L_S,
               L_O)  # fmt: skip
        mbarrier.wait(q_in, (j + 1) & 1)
        n_task, j = announced(task_s)
    tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["n_tasks", "T", "S", "n_heads", "stride_lb", "stride_lh"])
def fox_fwd_hopper_kernel(
    d_q, d_k, d_v, d_o, d_rest, p_lse, p_next, p_c, p_base, p_g, p_since, p_start, p_sink, n_tasks, T, S, n_heads,
    scale2, stride_lb, stride_lh,
    H: gl.constexpr, REP: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, BS: gl.constexpr,
    RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one task per BT rows.

    ``p_next`` counts the tasks that programs have taken beyond their first.
    """
    dtype: gl.constexpr = d_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, BT // 2, 1, BK], d_q.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BS, 1, BK], d_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BS, 1, BV], d_v.layout)
    o_s = gl.allocate_shared_memory(dtype, [2, 1, BT // 2, 1, BV], d_o.layout)
    rest_s = o_s
    if HAS_REST:
        rest_s = gl.allocate_shared_memory(dtype, [2, 1, BT // 2, 1, BV], d_o.layout)
    bias_s = gl.allocate_shared_memory(gl.float32, [STAGES, BS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    task_s = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_in = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_out = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_in, count=1)
    mbarrier.init(q_out, count=2)
    for b in gl.static_range(STAGES):
        mbarrier.init(full_k.index(b), count=1)
        mbarrier.init(full_v.index(b), count=1)
        mbarrier.init(empty_k.index(b), count=2)
        mbarrier.init(empty_v.index(b), count=2)
    ring = (k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v)
    gl.warp_specialize(
        [
            (_rows, (0, q_s, ring, task_s, q_in, q_out, d_o, d_rest, o_s, rest_s, p_lse, p_c, p_base, p_g, p_since,
                     p_start, p_sink, n_tasks, n_heads, T, S, scale2, stride_lb, stride_lh, H, BK, BV, BT, BS, RU,
                     KU, GATE, HAS_SINCE, HAS_START, HAS_SINK, HAS_REST, STAGES)),
            (_rows, (1, q_s, ring, task_s, q_in, q_out, d_o, d_rest, o_s, rest_s, p_lse, p_c, p_base, p_g, p_since,
                     p_start, p_sink, n_tasks, n_heads, T, S, scale2, stride_lb, stride_lh, H, BK, BV, BT, BS, RU,
                     KU, GATE, HAS_SINCE, HAS_START, HAS_SINK, HAS_REST, STAGES)),
            (_load, (d_q, d_k, d_v, q_s, ring, task_s, q_in, q_out, p_next, p_c, p_base, p_g, p_since, p_start, n_tasks,
                     n_heads, T, S, stride_lb, stride_lh, REP, H, BT, BS, RU, KU, GATE, HAS_SINCE, HAS_START, STAGES)),
        ],
        [4, 1],  # warps, beside the four of the first
        [240, 24],  # registers per thread; the first gets what is left, 240
    )  # fmt: skip


def fox_forward_hopper(
    given: FoxOperands, rows: RowGates, plan: Plan, *, o_rest: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As ``portable.forward.fox_forward``, where the plan says so, which it does not of keys that may not exist."""
    q, k, v, log_decay, sink, options, *_ = given
    (B, T, H, K), (S, G), V, t = q.shape, k.shape[1:3], v.shape[3], HOPPER_FORWARD
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    n_tasks, taken = cdiv(T, t.BT) * B * H, q.new_zeros((1,), dtype=torch.int32)
    d_o = gluon_descriptor(o, t.BT // 2)
    d_rest = d_o if o_rest is None else gluon_descriptor(o_rest, t.BT // 2)
    c, base, since, start = rows.pointers(lse)
    fox_fwd_hopper_kernel[(min(n_tasks, multiprocessors(q.device)),)](
        gluon_descriptor(q, t.BT // 2), gluon_descriptor(k, t.BS), gluon_descriptor(v, t.BS), d_o, d_rest, lse, taken,
        c, base, lse if log_decay is None else log_decay, since, start, lse if sink is None else sink, n_tasks, T, S,
        min(t.heads, B * H), options.scale * LOG2E, *row_strides(rows.first_visible), H=H, REP=H // G,
        BK=head_block(K), BV=head_block(V), BT=t.BT, BS=t.BS, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate_kind(log_decay),
        **rows.flags, HAS_SINK=sink is not None, HAS_REST=o_rest is not None, STAGES=t.num_stages,
        num_warps=t.num_warps,
    )  # fmt: skip
    return o, lse
