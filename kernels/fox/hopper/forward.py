"""Forward for Hopper, in Gluon: what the portable kernel computes, by warpgroups that do not wait for each other.

A program owns 128 rows. A loader warp copies k, v and the keys' gates into shared memory; two warpgroups own 64 rows
each and drift apart, so the exponentials of one run beside the products of the other, and in each the exponentials of
a key tile run beside the product of the last one's weights and v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, ROW_UNIT
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
from attnzoo.kernels.common.hopper.gate_bias import gluon_bias_at, gluon_gate_at, gluon_slope
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launching import cdiv, gate_kind, head_block, since_strides
from attnzoo.kernels.common.tile_loads import schedule
from attnzoo.kernels.fox.plan import HOPPER_FORWARD


@gluon.jit
def _tile_at(n, lo, full, mid, n_left, n_diag):
    """Index of the n-th key tile: the diagonal first, so that later tiles start from a good maximum."""
    i = gl.where(n < n_diag, mid + n, lo + n - n_diag)
    return gl.where(n < n_diag + n_left, i, full + n - n_diag - n_left)


@gluon.jit
def _load(d_q, d_k, d_v, q_s, ring, p_c, p_base, p_g, p_since, p_start, i_b, i_h, i_t, T, S, REP: gl.constexpr,
          BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
          HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Loader: q once; k and the bias of a key tile ahead of v of the tile before."""
    off = S - T
    p_first, p_last = i_t * BT + off, gl.minimum(i_t * BT + BT, T) - 1 + off
    lo, full, mid, n_left, n_diag, start = key_tiles(p_since, p_start, i_t, p_first, p_last, BT, BS, RU, HAS_SINCE,
                                                     HAS_START)  # fmt: skip
    b_slope = gluon_slope(p_g, i_h, GATE)
    b_ref = gluon_gate_at(p_c, p_base, b_slope, i_t * BT // RU * RU + off, GATE, KU)
    n_all = n_diag + n_left + gl.maximum(mid - full, 0)
    s_v = 0
    for n in range(n_all):
        s = _tile_at(n, lo, full, mid, n_left, n_diag) * BS
        load_ring_keys(d_q, d_k, q_s, ring, 0, n == 0, p_c, p_base, b_slope, b_ref, n, i_b, i_t * BT, s, s, i_h,
                       i_h // REP, S, BT // 2, BS, KU, GATE, STAGES)  # fmt: skip
        if n > 0:
            load_ring_values(d_v, ring, n - 1, i_b, s_v, i_h // REP, STAGES)
        s_v = s
    load_ring_values(d_v, ring, n_all - 1, i_b, s_v, i_h // REP, STAGES)


@gluon.jit
def _rows(w: gl.constexpr, q_s, ring, p_o, p_rest, p_lse, p_c, p_base, p_g, p_since, p_start, p_sink, i_b, i_h, i_t, T,
          S, scale2, H: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
          BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr,
          HAS_START: gl.constexpr, HAS_SINK: gl.constexpr, HAS_REST: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The w-th warpgroup's 64 rows."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    SINCE: gl.constexpr = HAS_SINCE or HAS_START
    BR: gl.constexpr = BT // 2
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BS, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    L_R: gl.constexpr = gl.SliceLayout(1, L_S)
    off = S - T
    p_first, p_last = i_t * BT + off, gl.minimum(i_t * BT + BT, T) - 1 + off
    lo, full, mid, n_left, n_diag, start = key_tiles(p_since, p_start, i_t, p_first, p_last, BT, BS, RU, HAS_SINCE,
                                                     HAS_START)  # fmt: skip
    b_pos = p_first + w * BR + gl.arange(0, BR, L_R)
    b_since = b_pos * 0 + start
    if HAS_SINCE:
        b_since = gl.maximum(b_since, gl.load(p_since + b_pos, mask=b_pos < S, other=0))
    b_m = gl.full([BR], float("-inf"), gl.float32, L_R)
    b_l = gl.zeros([BR], gl.float32, L_R)
    if HAS_SINK:  # one more logit, without a value: moved to the frame of the row unit
        b_m = b_l + gl.load(p_sink + i_h).to(gl.float32) * TL_LOG2E
        b_slope = gluon_slope(p_g, i_h, GATE)
        b_ref = gluon_gate_at(p_c, p_base, b_slope, i_t * BT // RU * RU + off, GATE, KU)
        if GATE != 0:
            b_m += gluon_bias_at(p_c, p_base, b_slope, b_ref, b_pos, S, GATE, KU)
        b_l = gl.where(b_m == float("-inf"), 0.0, 1.0)
    b_o = gl.zeros([BR, BV], gl.float32, L_O)
    q_t = q_s.index(w).reshape([BR, BK])
    n_mask = n_diag + n_left  # at least one: a row sees itself
    n_all = n_mask + gl.maximum(mid - full, 0)
    s = _tile_at(0, lo, full, mid, n_left, n_diag) * BS
    b_y = warpgroup_mma_wait(0, [start_scores(q_t, ring, 0, BR, BS, BK, STAGES, L_S)])
    b_bias = bias_s.index(0).load(gl.SliceLayout(0, L_S))
    mbarrier.arrive(empty_k.index(0), count=1)
    b_p, b_a, b_m, b_l = tile_weights(b_y, b_m, b_l, b_bias, s, b_pos, b_since, scale2, BR, BS, GATE, SINCE, L_S, True)
    b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
    mbarrier.wait(full_v.index(0), 0)
    for n in range(n_mask - 1):
        s = _tile_at(n + 1, lo, full, mid, n_left, n_diag) * BS
        b_o, b_ph, b_m, b_l = softmax_step(b_o, b_ph, b_m, b_l, q_t, ring, n, s, b_pos, b_since, scale2, BR, BS, BK, BV,
                                           GATE, SINCE, STAGES, L_S, L_O, True)  # fmt: skip
    for n in range(n_mask - 1, n_all - 1):
        b_o, b_ph, b_m, b_l = softmax_step(b_o, b_ph, b_m, b_l, q_t, ring, n, 0, b_pos, b_since, scale2, BR, BS, BK, BV,
                                           GATE, SINCE, STAGES, L_S, L_O, False)  # fmt: skip
    b_o = last_step(b_o, b_ph, ring, n_all - 1, BS, BV, STAGES)
    p_ot = (i_b.to(gl.int64) * T * H + i_h) * V
    store_rows(b_o, b_m, b_l, p_o + p_ot, p_rest + p_ot, p_lse, H * V, i_t * BT + w * BR, T, V, BR, BV, HAS_REST, L_S,
               L_O)  # fmt: skip


@gluon.jit(do_not_specialize=["T", "S", "n_heads", "stride_lb", "stride_lh"])
def fox_fwd_hopper_kernel(
    d_q, d_k, d_v, p_o, p_rest, p_lse, p_c, p_base, p_g, p_since, p_start, p_sink, T, S, n_heads, scale2, stride_lb,
    stride_lh,
    H: gl.constexpr, REP: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
    BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_SINCE: gl.constexpr,
    HAS_START: gl.constexpr, HAS_SINK: gl.constexpr, HAS_REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per BT rows, the longest rows first."""
    n_t = gl.cdiv(T, BT)
    i_n, i_bh = schedule(n_t, n_heads)
    i_t, i_b, i_h = n_t - 1 - i_n, i_bh // H, i_bh % H
    dtype: gl.constexpr = d_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, BT // 2, 1, BK], d_q.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BS, 1, BK], d_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BS, 1, BV], d_v.layout)
    bias_s = gl.allocate_shared_memory(gl.float32, [STAGES, BS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    p_c += i_bh.to(gl.int64) * (gl.cdiv(S, KU) * KU)
    p_base += i_bh.to(gl.int64) * (gl.cdiv(S, KU) + 1)
    p_since += i_b.to(gl.int64) * stride_lb + i_h * stride_lh
    p_start += i_bh.to(gl.int64) * gl.cdiv(T, RU)
    p_lse += i_bh.to(gl.int64) * T
    gl.warp_specialize(
        [
            (_rows, (0, q_s, ring, p_o, p_rest, p_lse, p_c, p_base, p_g, p_since, p_start, p_sink, i_b, i_h, i_t, T, S,
                     scale2, H, V, BK, BV, BT, BS, RU, KU, GATE, HAS_SINCE, HAS_START, HAS_SINK, HAS_REST, STAGES)),
            (_rows, (1, q_s, ring, p_o, p_rest, p_lse, p_c, p_base, p_g, p_since, p_start, p_sink, i_b, i_h, i_t, T, S,
                     scale2, H, V, BK, BV, BT, BS, RU, KU, GATE, HAS_SINCE, HAS_START, HAS_SINK, HAS_REST, STAGES)),
            (_load, (d_q, d_k, d_v, q_s, ring, p_c, p_base, p_g, p_since, p_start, i_b, i_h, i_t, T, S, REP, BT, BS, RU,
                     KU, GATE, HAS_SINCE, HAS_START, STAGES)),
        ],
        [4, 1],  # warps, beside the four of the first
        [240, 24],  # registers per thread; the first gets what is left, 240
    )  # fmt: skip


def fox_forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, sink: Tensor | None, c: Tensor | None,
    base: Tensor | None, since: Tensor | None, start: Tensor | None, scale: float, o_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``portable.forward.fox_forward``, where the plan says so."""
    B, T, H, K = q.shape
    S, G, V = k.shape[1], k.shape[2], v.shape[3]
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    BK, BV = head_block(K), head_block(V)
    t = HOPPER_FORWARD
    fox_fwd_hopper_kernel[(cdiv(T, t.BT) * B * H,)](
        gluon_descriptor(q, t.BT // 2), gluon_descriptor(k, t.BS), gluon_descriptor(v, t.BS), o,
        o if o_rest is None else o_rest, lse, lse if c is None else c, lse if base is None else base,
        lse if log_decay is None else log_decay, lse if since is None else since, lse if start is None else start,
        lse if sink is None else sink, T, S, min(t.heads, B * H), scale * LOG2E, *since_strides(since), H=H, REP=H // G,
        V=V, BK=BK, BV=BV, BT=t.BT, BS=t.BS, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate_kind(log_decay),
        HAS_SINCE=since is not None, HAS_START=start is not None, HAS_SINK=sink is not None,
        HAS_REST=o_rest is not None, STAGES=t.num_stages, num_warps=t.num_warps,
    )  # fmt: skip
    return o, lse
