"""Forward for Hopper, in Gluon: what the portable kernel computes, by warpgroups that do not wait for each other.

A program owns 128 rows. A loader warp copies k, v and the keys' gates into shared memory; two warpgroups own 64 rows
each and drift apart, so the exponentials of one run beside the products of the other, and in each the exponentials of
a key tile run beside the product of the last one's weights and v.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from attnzoo.kernels.fox.plan import HOPPER_FORWARD, KEY_UNIT, ROW_UNIT
from attnzoo.kernels.fox.portable.forward import LOG2E, _schedule, gate_kind, head_block, left_strides

from .backward_kernel import _bias_at, _gate_at, _slope, describe


@gluon.jit
def _key_tiles(p_left, p_start, i_t, p_first, p_last, BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr,
               HAS_LEFT: gl.constexpr, HAS_START: gl.constexpr):  # fmt: skip
    """Key tiles of a row block: n_diag from mid and n_left from lo need a mask, then those from full to mid do not.

    Also the first key that pruning keeps.
    """
    lo, left, start = 0, 0, 0
    if HAS_LEFT:
        lo = gl.load(p_left + p_first) // BS
        left = gl.load(p_left + p_last)
    if HAS_START:
        start = gl.load(p_start + i_t * BT // RU)
        lo = gl.maximum(lo, start // BS)
        left = gl.maximum(left, start)
    n_left = gl.cdiv(gl.maximum(left - lo * BS, 0), BS)
    full = lo + n_left
    mid = gl.maximum(full, (p_first + 1) // BS)
    n_diag = gl.maximum(gl.cdiv(p_last + 1, BS) - mid, 0)
    return lo, full, mid, n_left, n_diag, start


@gluon.jit
def _tile_at(n, lo, full, mid, n_left, n_diag):
    """Index of the n-th key tile: the diagonal first, so that later tiles start from a good maximum."""
    i = gl.where(n < n_diag, mid + n, lo + n - n_diag)
    return gl.where(n < n_diag + n_left, i, full + n - n_diag - n_left)


@gluon.jit
def _load_keys(d_q, d_k, q_s, ring, i_q, first, p_c, p_base, b_slope, b_ref, n, i_b, r, r_k, s, i_h, i_g, S,
               BR: gl.constexpr, BS: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """The n-th key tile, at key s: rows r_k of k, and bias_j = c_ref - c_j; if ``first``, q from row r on into i_q."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b = n % STAGES
    o_s = gl.arange(0, BS, gl.BlockedLayout([BS // 32], [32], [1], [0]))
    b_bias = _bias_at(p_c, p_base, b_slope, b_ref, s + o_s, S, GATE, KU)
    mbarrier.wait(empty_k.index(b), (n // STAGES & 1) ^ 1)
    tma.async_copy_global_to_shared(d_k, [i_b, r_k, i_g, 0], full_k.index(b), k_s.index(b))
    if first:
        for w in gl.static_range(2):
            tma.async_copy_global_to_shared(d_q, [i_b, r + w * BR, i_h, 0], full_k.index(b), q_s.index(2 * i_q + w))
    if GATE != 0:
        bias_s.index(b).store(b_bias)
        gl.thread_barrier()
    if first:  # last, for it also publishes the bias
        mbarrier.expect(full_k.index(b), d_k.block_type.nbytes + 2 * d_q.block_type.nbytes)
    else:
        mbarrier.expect(full_k.index(b), d_k.block_type.nbytes)


@gluon.jit
def _load_values(d_v, ring, n, i_b, s, i_g, STAGES: gl.constexpr):
    """v of the n-th key tile, at key s."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b = n % STAGES
    mbarrier.wait(empty_v.index(b), (n // STAGES & 1) ^ 1)
    mbarrier.expect(full_v.index(b), d_v.block_type.nbytes)
    tma.async_copy_global_to_shared(d_v, [i_b, s, i_g, 0], full_v.index(b), v_s.index(b))


@gluon.jit
def _load(d_q, d_k, d_v, q_s, ring, p_c, p_base, p_g, p_left, p_start, i_b, i_h, i_t, T, S, REP: gl.constexpr,
          BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
          HAS_LEFT: gl.constexpr, HAS_START: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Loader: q once; k and the bias of a key tile ahead of v of the tile before."""
    off = S - T
    p_first, p_last = i_t * BT + off, gl.minimum(i_t * BT + BT, T) - 1 + off
    lo, full, mid, n_left, n_diag, start = _key_tiles(p_left, p_start, i_t, p_first, p_last, BT, BS, RU, HAS_LEFT,
                                                      HAS_START)  # fmt: skip
    b_slope = _slope(p_g, i_h, GATE)
    b_ref = _gate_at(p_c, p_base, b_slope, i_t * BT // RU * RU + off, GATE, KU)
    n_all = n_diag + n_left + gl.maximum(mid - full, 0)
    s_v = 0
    for n in range(n_all):
        s = _tile_at(n, lo, full, mid, n_left, n_diag) * BS
        _load_keys(d_q, d_k, q_s, ring, 0, n == 0, p_c, p_base, b_slope, b_ref, n, i_b, i_t * BT, s, s, i_h, i_h // REP,
                   S, BT // 2, BS, KU, GATE, STAGES)  # fmt: skip
        if n > 0:
            _load_values(d_v, ring, n - 1, i_b, s_v, i_h // REP, STAGES)
        s_v = s
    _load_values(d_v, ring, n_all - 1, i_b, s_v, i_h // REP, STAGES)


@gluon.jit
def _scores(q_t, ring, n, BR: gl.constexpr, BS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
            L_S: gl.constexpr):  # fmt: skip
    """Starts the products of q and the n-th key tile. # [BR, BS]"""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b = n % STAGES
    zero = gl.zeros([BR, BS], gl.float32, L_S)
    mbarrier.wait(full_k.index(b), n // STAGES & 1)
    return warpgroup_mma(q_t, k_s.index(b).reshape([BS, BK]).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _max(b_y, BR: gl.constexpr, BS: gl.constexpr, L_R: gl.constexpr):
    """Maximum of each row, over a fourth of the columns at a time: one chain of a thread's values would be slower."""
    b_m = gl.max(gl.max(gl.reshape(b_y, [BR, 4, BS // 4]), 1), 1)
    return gl.convert_layout(b_m, L_R)


@gluon.jit
def _weights(b_y, b_m, b_l, b_bias, s, b_pos, b_left, scale2, BR: gl.constexpr, BS: gl.constexpr, GATE: gl.constexpr,
             LEFT: gl.constexpr, L_S: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Online softmax of one tile of scores, at key s: the weights, the factor of what came before, maximum and sum.

    Without a gate the maximum is taken before the scale, which is positive.
    """
    o_s = gl.arange(0, BS, gl.SliceLayout(0, L_S))
    if GATE != 0:
        b_y = b_y * scale2 + b_bias[None, :]
        scale2 = 1.0
    if MASK:
        m_y = (s + o_s)[None, :] <= b_pos[:, None]
        if LEFT:
            m_y = m_y & ((s + o_s)[None, :] >= b_left[:, None])
        b_y = gl.where(m_y, b_y, float("-inf"))
    b_mn = gl.maximum(b_m, _max(b_y, BR, BS, gl.SliceLayout(1, L_S)) * scale2)
    b_ms = b_mn
    if MASK:  # a row that has seen no key yet
        b_ms = gl.where(b_mn == float("-inf"), 0.0, b_mn)
    b_p = gl.exp2(b_y * scale2 - b_ms[:, None])
    b_a = gl.exp2(b_m - b_ms)
    return b_p, b_a, b_mn, b_l * b_a + gl.sum(b_p, 1)


@gluon.jit
def _step(b_o, b_ph, b_m, b_l, q_t, ring, n, s, b_pos, b_left, scale2, BR: gl.constexpr, BS: gl.constexpr,
          BK: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, LEFT: gl.constexpr, STAGES: gl.constexpr,
          L_S: gl.constexpr, L_O: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """The n-th tile's weights times v, beside the scores and the weights of the next one, at key s."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b, b_n = n % STAGES, (n + 1) % STAGES
    b_y = _scores(q_t, ring, n + 1, BR, BS, BK, STAGES, L_S)
    b_o = warpgroup_mma(b_ph, v_s.index(b).reshape([BS, BV]), b_o, is_async=True)
    b_bias = bias_s.index(b_n).load(gl.SliceLayout(0, L_S))
    b_y = warpgroup_mma_wait(1, [b_y])
    mbarrier.arrive(empty_k.index(b_n), count=1)
    b_p, b_a, b_m, b_l = _weights(b_y, b_m, b_l, b_bias, s, b_pos, b_left, scale2, BR, BS, GATE, LEFT, L_S, MASK)
    b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
    # A wait that can branch: without it ptxas moves the exponentials behind the wait for the product.
    mbarrier.wait(full_v.index(b_n), (n + 1) // STAGES & 1)
    b_o, b_l = warpgroup_mma_wait(0, [b_o, b_l])
    mbarrier.arrive(empty_v.index(b), count=1)
    b_o = b_o * gl.convert_layout(b_a, gl.SliceLayout(1, L_O))[:, None]
    return b_o, b_ph, b_m, b_l


@gluon.jit
def _last_step(b_o, b_ph, ring, n, BS: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):
    """The n-th tile's weights times v, where there is no next one."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b_o = warpgroup_mma(b_ph, v_s.index(n % STAGES).reshape([BS, BV]), b_o, is_async=True)
    return warpgroup_mma_wait(0, [b_o])


@gluon.jit
def _store_rows(b_o, b_m, b_l, p_o, p_low, p_lse, stride, r, T, V: gl.constexpr, BR: gl.constexpr, BV: gl.constexpr,
                HAS_LOW: gl.constexpr, L_S: gl.constexpr, L_O: gl.constexpr):  # fmt: skip
    """The results of BR rows from r on, where a row of p_o and p_low has ``stride`` elements."""
    L_W: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    L_R: gl.constexpr = gl.SliceLayout(1, L_S)
    b_o = b_o / gl.convert_layout(b_l, gl.SliceLayout(1, L_O))[:, None]
    b_oh = b_o.to(p_o.dtype.element_ty)
    o_t, o_v = r + gl.arange(0, BR, gl.SliceLayout(1, L_W)), gl.arange(0, BV, gl.SliceLayout(0, L_W))
    p_ot = o_t[:, None].to(gl.int64) * stride + o_v[None, :]
    m_o = (o_t < T)[:, None] & (o_v < V)[None, :]
    gl.store(p_o + p_ot, gl.convert_layout(b_oh, L_W), mask=m_o)
    if HAS_LOW:  # what the rounding dropped
        b_low = (b_o - b_oh.to(gl.float32)).to(p_low.dtype.element_ty)
        gl.store(p_low + p_ot, gl.convert_layout(b_low, L_W), mask=m_o)
    o_r = r + gl.arange(0, BR, L_R)
    gl.store(p_lse + o_r, b_m + gl.log2(b_l), mask=o_r < T)


@gluon.jit
def _rows(w: gl.constexpr, q_s, ring, p_o, p_low, p_lse, p_c, p_base, p_g, p_left, p_start, p_sink, i_b, i_h, i_t, T, S,
          scale2, H: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
          BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_LEFT: gl.constexpr,
          HAS_START: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LOW: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """The w-th warpgroup's 64 rows."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    LEFT: gl.constexpr = HAS_LEFT or HAS_START
    BR: gl.constexpr = BT // 2
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BS, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    L_R: gl.constexpr = gl.SliceLayout(1, L_S)
    off = S - T
    p_first, p_last = i_t * BT + off, gl.minimum(i_t * BT + BT, T) - 1 + off
    lo, full, mid, n_left, n_diag, start = _key_tiles(p_left, p_start, i_t, p_first, p_last, BT, BS, RU, HAS_LEFT,
                                                      HAS_START)  # fmt: skip
    b_pos = p_first + w * BR + gl.arange(0, BR, L_R)
    b_left = b_pos * 0 + start
    if HAS_LEFT:
        b_left = gl.maximum(b_left, gl.load(p_left + b_pos, mask=b_pos < S, other=0))
    b_m = gl.full([BR], float("-inf"), gl.float32, L_R)
    b_l = gl.zeros([BR], gl.float32, L_R)
    if HAS_SINK:  # one more logit, without a value: moved to the frame of the row unit
        b_m = b_l + gl.load(p_sink + i_h).to(gl.float32) * 1.4426950408889634
        b_slope = _slope(p_g, i_h, GATE)
        b_ref = _gate_at(p_c, p_base, b_slope, i_t * BT // RU * RU + off, GATE, KU)
        if GATE != 0:
            b_m += _bias_at(p_c, p_base, b_slope, b_ref, b_pos, S, GATE, KU)
        b_l = gl.where(b_m == float("-inf"), 0.0, 1.0)
    b_o = gl.zeros([BR, BV], gl.float32, L_O)
    q_t = q_s.index(w).reshape([BR, BK])
    n_mask = n_diag + n_left  # at least one: a row sees itself
    n_all = n_mask + gl.maximum(mid - full, 0)
    s = _tile_at(0, lo, full, mid, n_left, n_diag) * BS
    b_y = warpgroup_mma_wait(0, [_scores(q_t, ring, 0, BR, BS, BK, STAGES, L_S)])
    b_bias = bias_s.index(0).load(gl.SliceLayout(0, L_S))
    mbarrier.arrive(empty_k.index(0), count=1)
    b_p, b_a, b_m, b_l = _weights(b_y, b_m, b_l, b_bias, s, b_pos, b_left, scale2, BR, BS, GATE, LEFT, L_S, True)
    b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
    mbarrier.wait(full_v.index(0), 0)
    for n in range(n_mask - 1):
        s = _tile_at(n + 1, lo, full, mid, n_left, n_diag) * BS
        b_o, b_ph, b_m, b_l = _step(b_o, b_ph, b_m, b_l, q_t, ring, n, s, b_pos, b_left, scale2, BR, BS, BK, BV, GATE,
                                    LEFT, STAGES, L_S, L_O, True)  # fmt: skip
    for n in range(n_mask - 1, n_all - 1):
        b_o, b_ph, b_m, b_l = _step(b_o, b_ph, b_m, b_l, q_t, ring, n, 0, b_pos, b_left, scale2, BR, BS, BK, BV, GATE,
                                    LEFT, STAGES, L_S, L_O, False)  # fmt: skip
    b_o = _last_step(b_o, b_ph, ring, n_all - 1, BS, BV, STAGES)
    p_ot = (i_b.to(gl.int64) * T * H + i_h) * V
    _store_rows(b_o, b_m, b_l, p_o + p_ot, p_low + p_ot, p_lse, H * V, i_t * BT + w * BR, T, V, BR, BV, HAS_LOW, L_S,
                L_O)  # fmt: skip


@gluon.jit(do_not_specialize=["T", "S", "n_heads", "stride_lb", "stride_lh"])
def fox_fwd_kernel(
    d_q, d_k, d_v, p_o, p_low, p_lse, p_c, p_base, p_g, p_left, p_start, p_sink, T, S, n_heads, scale2, stride_lb,
    stride_lh,
    H: gl.constexpr, REP: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
    BS: gl.constexpr, RU: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_START: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per BT rows, the longest rows first."""
    n_t = gl.cdiv(T, BT)
    i_n, i_bh = _schedule(n_t, n_heads)
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
    p_left += i_b.to(gl.int64) * stride_lb + i_h * stride_lh
    p_start += i_bh.to(gl.int64) * gl.cdiv(T, RU)
    p_lse += i_bh.to(gl.int64) * T
    gl.warp_specialize(
        [
            (_rows, (0, q_s, ring, p_o, p_low, p_lse, p_c, p_base, p_g, p_left, p_start, p_sink, i_b, i_h, i_t, T, S,
                     scale2, H, V, BK, BV, BT, BS, RU, KU, GATE, HAS_LEFT, HAS_START, HAS_SINK, HAS_LOW, STAGES)),
            (_rows, (1, q_s, ring, p_o, p_low, p_lse, p_c, p_base, p_g, p_left, p_start, p_sink, i_b, i_h, i_t, T, S,
                     scale2, H, V, BK, BV, BT, BS, RU, KU, GATE, HAS_LEFT, HAS_START, HAS_SINK, HAS_LOW, STAGES)),
            (_load, (d_q, d_k, d_v, q_s, ring, p_c, p_base, p_g, p_left, p_start, i_b, i_h, i_t, T, S, REP, BT, BS, RU,
                     KU, GATE, HAS_LEFT, HAS_START, STAGES)),
        ],
        [4, 1],  # warps, beside the four of the first
        [240, 24],  # registers per thread; the first gets what is left, 240
    )  # fmt: skip


def fox_forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, sink: Tensor | None, c: Tensor | None,
    base: Tensor | None, left: Tensor | None, start: Tensor | None, scale: float, low: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``portable.forward.fox_forward``, where ``plan.hopper_forward`` holds."""
    B, T, H, K = q.shape
    S, G, V = k.shape[1], k.shape[2], v.shape[3]
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    BK, BV = head_block(K), head_block(V)
    t = HOPPER_FORWARD
    fox_fwd_kernel[(triton.cdiv(T, t.BT) * B * H,)](
        describe(q, t.BT // 2), describe(k, t.BS), describe(v, t.BS), o, o if low is None else low, lse,
        lse if c is None else c, lse if base is None else base, lse if log_gate is None else log_gate,
        lse if left is None else left, lse if start is None else start, lse if sink is None else sink, T, S,
        min(t.heads, B * H), scale * LOG2E, *left_strides(left), H=H, REP=H // G, V=V, BK=BK, BV=BV, BT=t.BT, BS=t.BS,
        RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate_kind(log_gate), HAS_LEFT=left is not None, HAS_START=start is not None,
        HAS_SINK=sink is not None, HAS_LOW=low is not None, STAGES=t.num_stages, num_warps=t.num_warps,
    )  # fmt: skip
    return o, lse
