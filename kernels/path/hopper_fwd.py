"""Forward for Hopper, in Gluon: what ``fwd.path_fwd_kernel`` computes, arranged as ``kernels/fox/hopper_fwd.py``.

A program owns a unit of 128 rows. Its rows share every level, so its keys are the units before it, nearest first, each
from the keys of one level; the level changes where the next unit's index differs from the rows' in a higher bit. The q
of a level comes with the first of its keys, into the shared memory of the level STAGES before: every level has a key
tile, so that one has been read by then.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from attnzoo.kernels.fox.fwd import GATE_FULL, GATE_NONE, LOG2E, _schedule, head_block, left_strides
from attnzoo.kernels.fox.hopper import _gate_at, describe
from attnzoo.kernels.fox.hopper_fwd import _bias_at, _key_tiles, _store_rows
from attnzoo.kernels.fox.tuning import KEY_UNIT

from .transitions import UNIT, Block, Levels
from .tuning import HOPPER_FORWARD


@gluon.jit
def _load_keys(d_q, d_k, q_s, k_s, bias_s, full_k, empty_k, p_c, p_base, b_ref, n, j, first, i_lb, r, r_k, i_h, i_g, s,
               T, BR: gl.constexpr, BS: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """Rows r_k of k and the bias of the n-th key tile, at key s; with the first of the j-th level also its q."""
    b = n % STAGES
    o_s = gl.arange(0, BS, gl.BlockedLayout([BS // 32], [32], [1], [0]))
    b_bias = _bias_at(p_c, p_base, gl.to_tensor(0.0), b_ref, s + o_s, T, GATE, KU)
    mbarrier.wait(empty_k.index(b), (n // STAGES & 1) ^ 1)
    if GATE != 0:
        bias_s.index(b).store(b_bias)
        gl.thread_barrier()
    if first:
        mbarrier.expect(full_k.index(b), d_k.block_type.nbytes + 2 * d_q.block_type.nbytes)
        for w in gl.static_range(2):
            q_t = q_s.index(j % STAGES * 2 + w)
            tma.async_copy_global_to_shared(d_q, [i_lb, r + w * BR, i_h, 0], full_k.index(b), q_t)
    else:
        mbarrier.expect(full_k.index(b), d_k.block_type.nbytes)
    tma.async_copy_global_to_shared(d_k, [i_lb, r_k, i_g, 0], full_k.index(b), k_s.index(b))


@gluon.jit
def _load_values(d_v, v_s, full_v, empty_v, n, i_b, i_g, s, STAGES: gl.constexpr):
    """v of the n-th key tile, at key s."""
    b = n % STAGES
    mbarrier.wait(empty_v.index(b), (n // STAGES & 1) ^ 1)
    mbarrier.expect(full_v.index(b), d_v.block_type.nbytes)
    tma.async_copy_global_to_shared(d_v, [i_b, s, i_g, 0], full_v.index(b), v_s.index(b))


@gluon.jit
def _load(d_qb, d_kb, d_q, d_k, d_v, q_s, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, p_c, p_base, p_left, p_start, i_b,
          i_h, i_u, B, T, n_levels, REP: gl.constexpr, BT: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
          HAS_LEFT: gl.constexpr, HAS_START: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Loader: k of a tile, and q where it changes, ahead of v of the tile before."""
    row, i_g = i_u * BT, i_h // REP
    lo, full, mid, n_left, n_diag, start = _key_tiles(p_left, p_start, i_u, row, gl.minimum(row + BT, T) - 1, BT, BT,
                                                      BT, HAS_LEFT, HAS_START)  # fmt: skip
    b_ref = _gate_at(p_c, p_base, gl.to_tensor(0.0), row, GATE, KU)
    _load_keys(d_qb, d_kb, q_s, k_s, bias_s, full_k, empty_k, p_c, p_base, b_ref, 0, 0, True, i_b, row, row, i_h, i_g,
               row, T, BT // 2, BT, KU, GATE, STAGES)  # fmt: skip
    j = 0
    for i in range(n_levels):
        node = i_u >> (i + 1)
        begin, last = gl.maximum((2 * node) << i, lo), ((2 * node + 1) << i) - 1
        if ((i_u >> i) & 1 == 1) & (begin <= last):
            j += 1
            for n in range(i_u - last, i_u - begin + 1):
                s = (i_u - n) * BT
                _load_keys(d_q, d_k, q_s, k_s, bias_s, full_k, empty_k, p_c, p_base, b_ref, n, j, i_u - n == last,
                           i * B + i_b, row - ((node + 1) << i) * BT, s - (node << i) * BT, i_h, i_g, s, T, BT // 2, BT,
                           KU, GATE, STAGES)  # fmt: skip
                _load_values(d_v, v_s, full_v, empty_v, n - 1, i_b, i_g, s + BT, STAGES)
    _load_values(d_v, v_s, full_v, empty_v, i_u - lo, i_b, i_g, lo * BT, STAGES)


@gluon.jit
def _weights(b_y, b_m, b_l, b_bias, s, b_left, scale2, BS: gl.constexpr, GATE: gl.constexpr, L_S: gl.constexpr,
             MASK: gl.constexpr):  # fmt: skip
    """Online softmax of one tile of scores, as ``kernels/fox/fwd.py``: weights, the factor of what came before."""
    if GATE != 0:
        b_y = b_y * scale2 + b_bias[None, :]
        scale2 = 1.0
    if MASK:
        m_y = (s + gl.arange(0, BS, gl.SliceLayout(0, L_S)))[None, :] >= b_left[:, None]
        b_y = gl.where(m_y, b_y, float("-inf"))
    b_mn = gl.maximum(b_m, gl.max(b_y, 1) * scale2)  # finite: a row sees itself, in the first tile
    b_p = gl.exp2(b_y * scale2 - b_mn[:, None])
    b_a = gl.exp2(b_m - b_mn)
    return b_p, b_a, b_mn, b_l * b_a + gl.sum(b_p, 1)


@gluon.jit
def _pair_scores(w: gl.constexpr, q_s, k_s, full_k, p_diag, b_row, T, BR: gl.constexpr, BS: gl.constexpr,
                 BK: gl.constexpr, L_S: gl.constexpr):  # fmt: skip
    """Unscaled scores in the own pair of blocks: diag within the block, the blocks' carried q and k across."""
    o_s = gl.arange(0, BS, gl.SliceLayout(0, L_S))
    m_own = (o_s // BR == w)[None, :]
    p_d = p_diag + (b_row % BR)[:, None] * BR + (o_s - w * BR)[None, :]
    b_y = gl.load(p_d, mask=m_own & (b_row < T)[:, None], other=0.0)  # [BR, BS]
    mbarrier.wait(full_k.index(0), 0)
    if w == 1:
        q_t, k_t = q_s.index(w).reshape([BR, BK]), k_s.index(0).reshape([BS, BK])
        zero = gl.zeros([BR, BS], gl.float32, L_S)
        b_c = warpgroup_mma(q_t, k_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        b_y = gl.where(m_own, b_y, warpgroup_mma_wait(0, [b_c]))
    return gl.where(o_s[None, :] <= (b_row % BS)[:, None], b_y, float("-inf"))


@gluon.jit
def _step(b_o, b_ph, b_m, b_l, q_t, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, n, s, b_left, scale2,
          BR: gl.constexpr, BS: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr,
          STAGES: gl.constexpr, L_S: gl.constexpr, L_O: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """The n-th tile's weights times v, beside the scores and weights of the next one, at key s."""
    b, b_n = n % STAGES, (n + 1) % STAGES
    k_t, v_t = k_s.index(b_n).reshape([BS, BK]), v_s.index(b).reshape([BS, BV])
    zero = gl.zeros([BR, BS], gl.float32, L_S)
    mbarrier.wait(full_k.index(b_n), (n + 1) // STAGES & 1)
    b_y = warpgroup_mma(q_t, k_t.permute([1, 0]), zero, use_acc=False, is_async=True)  # [BR, BS]
    b_o = warpgroup_mma(b_ph, v_t, b_o, is_async=True)
    b_bias = bias_s.index(b_n).load(gl.SliceLayout(0, L_S))
    b_y = warpgroup_mma_wait(1, [b_y])
    mbarrier.arrive(empty_k.index(b_n), count=1)
    b_p, b_a, b_m, b_l = _weights(b_y, b_m, b_l, b_bias, s, b_left, scale2, BS, GATE, L_S, MASK)
    b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
    # Waited for here, the next v keeps the wait for this one's product behind the exponentials in the compiled code.
    mbarrier.wait(full_v.index(b_n), (n + 1) // STAGES & 1)
    b_o, b_l = warpgroup_mma_wait(0, [b_o, b_l])
    mbarrier.arrive(empty_v.index(b), count=1)
    b_o = b_o * gl.convert_layout(b_a, gl.SliceLayout(1, L_O))[:, None]
    return b_o, b_ph, b_m, b_l


@gluon.jit
def _next(i_s, level, j):
    """The level after key unit i_s: the unit after its first key, and how many levels came before it."""
    first = level & (level - 1)
    return gl.where(i_s == first, first, level), gl.where(i_s == first, j + 1, j)


@gluon.jit
def _rows(w: gl.constexpr, q_s, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, p_diag, p_o, p_low, p_lse, p_left, p_start,
          i_u, T, scale2, stride_d, stride_o, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
          GATE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_START: gl.constexpr, HAS_LOW: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """The w-th warpgroup's block of 64 rows."""
    BR: gl.constexpr = BT // 2
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    row = i_u * BT
    lo, full, mid, n_left, n_diag, start = _key_tiles(p_left, p_start, i_u, row, gl.minimum(row + BT, T) - 1, BT, BT,
                                                      BT, HAS_LEFT, HAS_START)  # fmt: skip
    b_row = row + w * BR + gl.arange(0, BR, gl.SliceLayout(1, L_S))
    b_left = b_row * 0 + start
    if HAS_LEFT:
        b_left = gl.maximum(b_left, gl.load(p_left + b_row, mask=b_row < T, other=0))
    b_m = gl.full([BR], float("-inf"), gl.float32, gl.SliceLayout(1, L_S))
    b_y = _pair_scores(w, q_s, k_s, full_k, p_diag + (i_u * 2 + w) * stride_d, b_row, T, BR, BT, BK, L_S)
    b_bias = bias_s.index(0).load(gl.SliceLayout(0, L_S))
    mbarrier.arrive(empty_k.index(0), count=1)
    b_p, b_a, b_m, b_l = _weights(b_y, b_m, b_row * 0.0, b_bias, row, b_left, scale2, BT, GATE, L_S, HAS_LEFT)
    b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
    b_o = gl.zeros([BR, BV], gl.float32, L_O)
    mbarrier.wait(full_v.index(0), 0)
    level, j = i_u, 1
    n_full, n_all = gl.maximum(i_u - full, 0), i_u - lo
    for n in range(n_full):
        q_t = q_s.index(j % STAGES * 2 + w).reshape([BR, BK])
        b_o, b_ph, b_m, b_l = _step(b_o, b_ph, b_m, b_l, q_t, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, n, 0, b_left,
                                    scale2, BR, BT, BK, BV, GATE, STAGES, L_S, L_O, False)  # fmt: skip
        level, j = _next(i_u - n - 1, level, j)
    if HAS_LEFT or HAS_START:
        for n in range(n_full, n_all):
            s = (i_u - n - 1) * BT
            q_t = q_s.index(j % STAGES * 2 + w).reshape([BR, BK])
            b_o, b_ph, b_m, b_l = _step(b_o, b_ph, b_m, b_l, q_t, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, n, s, b_left,
                                        scale2, BR, BT, BK, BV, GATE, STAGES, L_S, L_O, True)  # fmt: skip
            level, j = _next(i_u - n - 1, level, j)
    b = n_all % STAGES
    b_o = warpgroup_mma_wait(0, [warpgroup_mma(b_ph, v_s.index(b).reshape([BT, BV]), b_o, is_async=True)])
    _store_rows(b_o, b_m, b_l, p_o, p_low, p_lse, stride_o, row + w * BR, T, V, BR, BV, HAS_LOW, L_S, L_O)


@gluon.jit(do_not_specialize=["B", "T", "n_levels", "n_heads", "stride_lb", "stride_lh"])
def path_fwd_kernel(
    d_qb, d_kb, d_q, d_k, d_v, p_diag, p_o, p_low, p_lse, p_c, p_base, p_left, p_start, B, T, n_levels, n_heads, scale2,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    H: gl.constexpr, REP: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
    KU: gl.constexpr, GATE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_START: gl.constexpr, HAS_LOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per unit of BT rows, the longest rows first."""
    n_t = gl.cdiv(T, BT)
    i_n, i_bh = _schedule(n_t, n_heads)
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
    i_b64, n_u = i_b.to(gl.int64), gl.cdiv(T, KU)
    p_diag += (i_b64 * n_u * H + i_h) * (KU * KU)
    p_c += i_bh.to(gl.int64) * (n_u * KU)
    p_base += i_bh.to(gl.int64) * (n_u + 1)
    p_left += i_b64 * stride_lb + i_h * stride_lh
    p_start += i_bh.to(gl.int64) * n_t
    p_lse += i_bh.to(gl.int64) * T
    o_row = i_b64 * stride_ob + i_h * stride_oh
    p_o += o_row
    p_low += o_row
    stride_d = gl.to_tensor(H * KU * KU).to(gl.int64)
    gl.warp_specialize(
        [
            (_rows, (0, q_s, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, p_diag, p_o, p_low, p_lse, p_left, p_start, i_u,
                     T, scale2, stride_d, stride_ot, V, BK, BV, BT, GATE, HAS_LEFT, HAS_START, HAS_LOW, STAGES)),
            (_rows, (1, q_s, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, p_diag, p_o, p_low, p_lse, p_left, p_start, i_u,
                     T, scale2, stride_d, stride_ot, V, BK, BV, BT, GATE, HAS_LEFT, HAS_START, HAS_LOW, STAGES)),
            (_load, (d_qb, d_kb, d_q, d_k, d_v, q_s, k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v, p_c, p_base, p_left,
                     p_start, i_b, i_h, i_u, B, T, n_levels, REP, BT, KU, GATE, HAS_LEFT, HAS_START, STAGES)),
        ],
        [4, 1],  # warps, beside the four of the first
        [240, 24],  # registers per thread; the first gets what is left, 240
    )  # fmt: skip


def path_forward_hopper(
    block: Block, levels: Levels, v: Tensor, o: Tensor, lse: Tensor, c: Tensor | None, base: Tensor | None,
    left: Tensor | None, start: Tensor | None, scale: float, low: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill o and lse as ``fwd.path_forward`` says, where ``tuning.hopper_forward`` holds and descriptors can address v.

    Args:
        low: like o, filled with what the rounding of o dropped.
    """
    (B, T, H, K), (G, V) = block.q.shape, v.shape[2:]
    t = HOPPER_FORWARD[64 if max(K, V) <= 64 else 128]
    path_fwd_kernel[(triton.cdiv(T, UNIT) * B * H,)](
        describe(block.q, UNIT // 2), describe(block.k, UNIT), describe(levels.q.flatten(0, 1), UNIT // 2),
        describe(levels.k.flatten(0, 1), UNIT), describe(v, UNIT), block.diag, o, o if low is None else low, lse,
        lse if c is None else c, lse if base is None else base, lse if left is None else left,
        lse if start is None else start, B, T, levels.q.shape[0], min(t.heads, B * H), scale * LOG2E, *o.stride()[:3],
        *left_strides(left), H=H, REP=H // G, V=V, BK=head_block(K), BV=head_block(V), BT=UNIT, KU=KEY_UNIT,
        GATE=GATE_NONE if c is None else GATE_FULL, HAS_LEFT=left is not None, HAS_START=start is not None,
        HAS_LOW=low is not None, STAGES=t.num_stages, num_warps=t.num_warps,
    )  # fmt: skip
