"""One tile of the Gluon backwards."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnzoo.kernels.common.hopper.releases import barrier, tma_add, tma_load


@gluon.jit
def first_keys(p_since, i, i_full, T, HAS_SINCE: gl.constexpr, BT: gl.constexpr):
    """First keys of BT rows from row i, where a row is not before i_full; elsewhere 0."""
    o_t = i + gl.arange(0, BT, gl.BlockedLayout([1], [32], [1], [0]))
    b_first = o_t * 0
    if HAS_SINCE:
        b_first = gl.load(p_since + o_t, mask=(o_t < T) & (i + BT > i_full), other=0)
    return b_first


@gluon.jit
def load_rows(d_q, d_do, d_lse, d_delta, rings, full, empty, it, i_x, i_b, i_bh, i_h, i, back, b_at, b_ref, b_first,
              start, GATE: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_START: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """The it-th row tile: dO, lse and delta from row i, q of i_x from ``back`` rows before; what the gates say between
    the frames of rows and keys, b_at - b_ref; the rows' first keys; and the first that pruning leaves to all of them.
    """
    q_s, do_s, lse_s, delta_s, shift_s, first_s, start_s = rings
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    b = it % STAGES
    mbarrier.wait(empty.index(b), (it // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(b), d_q.block_type.nbytes + d_do.block_type.nbytes + 2 * d_lse.block_type.nbytes)
    tma_load(d_q, [i_x, i - back, i_h, 0], full.index(b), q_s.index(b))
    tma_load(d_lse, [i_bh, i], full.index(b), lse_s.index(b))
    tma_load(d_delta, [i_bh, i], full.index(b), delta_s.index(b))
    tma_load(d_do, [i_b, i, i_h, 0], full.index(b), do_s.index(b))
    if HAS_FIRST:
        first_s.index(b).store(b_first)
    if HAS_START:
        start_s.index(b).store(gl.full([1], 0, gl.int32, one) + start)
    if GATE != 0:
        shift_s.index(b).store(gl.full([1], 0.0, gl.float32, one) + (b_at - b_ref).to(gl.float32))
    barrier()
    mbarrier.arrive(full.index(b), count=1)


@gluon.jit
def held_order(b_x, M: gl.constexpr, N: gl.constexpr):
    """A product in the order in which its M by N warps hold it (``tile_order`` undoes it): whole 16-byte writes to
    shared memory, without bank conflicts."""
    return gl.permute(gl.reshape(b_x, [M, 2, 8, N, b_x.shape[1] // N // 8, 4, 2]), [4, 3, 0, 2, 5, 1, 6])


@gluon.jit
def hand_over(b_x, x_s, full, empty, it):
    """Hands the it-th tile to the reducer."""
    mbarrier.wait(empty, (it & 1) ^ 1)
    x_s.store(gl.reshape(b_x, x_s.shape))
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def add_tile(d_x, row, x_s, full, empty, it):
    """Reducer: adds the it-th tile to global memory."""
    mbarrier.wait(full, it & 1)
    tma_add(d_x, [row, 0], x_s)
    tma.store_wait(0)
    mbarrier.arrive(empty, count=1)


@gluon.jit
def backward_tile(b_dk, b_dv, b_dc, rings, k_s, v_s, ds_s, dq_s, full, empty, dq_full, dq_empty, it, i, b_bias, b_s,
                  p_sum, off, scale2, BT: gl.constexpr, BS: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
                  GATE: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_START: gl.constexpr, STAGES: gl.constexpr,
                  L_S: gl.constexpr, L_K: gl.constexpr, L_V: gl.constexpr, L_Q: gl.constexpr,
                  MASK: gl.constexpr):  # fmt: skip
    """dK, dV, column sums of dS, and this tile's part of dQ, from the row tile at row i.

    All products of a tile have ended when the next tile starts: ptxas serialises those that cross a loop's end.
    """
    q_s, do_s, lse_s, delta_s, shift_s, first_s, start_s = rings
    dtype: gl.constexpr = k_s.dtype
    b = it % STAGES
    q_t, do_t = q_s.index(b).reshape([BT, BK]), do_s.index(b).reshape([BT, BV])
    o_t = gl.arange(0, BT, gl.SliceLayout(0, L_S))
    zero = gl.zeros([BS, BT], gl.float32, L_S)
    mbarrier.wait(full.index(b), it // STAGES & 1)
    b_y = warpgroup_mma(k_s, q_t.permute([1, 0]), zero, use_acc=False, is_async=True)  # [BS, BT]
    b_dp = warpgroup_mma(v_s, do_t.permute([1, 0]), zero, use_acc=False, is_async=True)  # [BS, BT]
    b_lse = lse_s.index(b).load(L_S)  # [1, BT]
    if GATE != 0:
        b_bias += shift_s.index(b).load(gl.SliceLayout(1, L_S))
    if HAS_START:  # as if these keys' gates were closed: no tile needs a mask for it
        b_bias = gl.where(b_s >= start_s.index(b).load(gl.SliceLayout(1, L_S)), b_bias, float("-inf"))
    b_y = warpgroup_mma_wait(1, [b_y])
    b_y = b_y * scale2
    if GATE != 0:
        b_y += b_bias[:, None]
    b_p = gl.exp2(b_y - b_lse)
    if MASK:
        m_y = b_s[:, None] <= (off + i + o_t)[None, :]
        if HAS_FIRST:
            m_y = m_y & (b_s[:, None] >= first_s.index(b).load(gl.SliceLayout(0, L_S))[None, :])
        b_p = gl.where(m_y, b_p, 0.0)
    b_ph = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, L_V, 2))
    b_dv = warpgroup_mma(b_ph, do_t, b_dv, is_async=True)
    b_delta = delta_s.index(b).load(L_S)  # [1, BT]
    b_dp = warpgroup_mma_wait(1, [b_dp])
    b_ds = b_p * (b_dp - b_delta)
    b_dsh = b_ds.to(dtype)
    ds_s.store(b_dsh)
    fence_async_shared()
    b_dq = warpgroup_mma(ds_s.permute([1, 0]), k_s, gl.zeros([BT, BK], gl.float32, L_Q), use_acc=False, is_async=True)
    b_dk = warpgroup_mma(gl.convert_layout(b_dsh, gl.DotOperandLayout(0, L_K, 2)), q_t, b_dk, is_async=True)
    if GATE != 0:
        b_dc += gl.sum(b_ds, 1)
        # Sums over row pairs: within a thread, then by shuffles over 8 lanes of a warp, then over warps by atomics.
        W: gl.constexpr = BS // 16
        L_R: gl.constexpr = gl.BlockedLayout([1, 8, BT // 64], [1, 1, 32], [W, 1, 1], [2, 1, 0])
        b_e = gl.sum(gl.sum(gl.reshape(b_ds, [W, 2, 8, BT // 2, 2]), 4), 1)
        b_e = gl.sum(gl.convert_layout(b_e, L_R), 1)  # [W, BT // 2]
        o_e = gl.arange(0, BT // 2, gl.SliceLayout(0, gl.SliceLayout(1, L_R)))
        o_e = o_e[None, :] + gl.zeros([W, BT // 2], gl.int32, gl.SliceLayout(1, L_R))
        gl.atomic_add(p_sum + i // 2 + o_e, b_e, sem="relaxed")
    b_dq, b_dv = warpgroup_mma_wait(1, [b_dq, b_dv])
    hand_over(held_order(b_dq, L_Q.warps_per_cta[0], L_Q.warps_per_cta[1]), dq_s, dq_full, dq_empty, it)
    b_dk = warpgroup_mma_wait(0, [b_dk])
    mbarrier.arrive(empty.index(b), count=1)
    return b_dk, b_dv, b_dc
