"""Steps of the Gluon forwards: loading a ring of key tiles, the online softmax beside the products, storing rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnzoo.kernels.common.hopper.gate_bias import gluon_bias_at
from attnzoo.kernels.common.hopper.releases import barrier, tma_load


@gluon.jit
def key_tiles(p_since, p_start, i_t, p_first, p_last, BT: gl.constexpr, BS: gl.constexpr, RU: gl.constexpr,
              HAS_SINCE: gl.constexpr, HAS_START: gl.constexpr):  # fmt: skip
    """Key tiles of a row block: n_diag from mid and n_left from lo need a mask, then those from full to mid do not.

    Also the first key that pruning keeps.
    """
    lo, since, start = 0, 0, 0
    if HAS_SINCE:
        lo = gl.load(p_since + p_first) // BS
        since = gl.load(p_since + p_last)
    if HAS_START:
        start = gl.load(p_start + i_t * BT // RU)
        lo = gl.maximum(lo, start // BS)
        since = gl.maximum(since, start)
    n_left = gl.cdiv(gl.maximum(since - lo * BS, 0), BS)
    full = lo + n_left
    mid = gl.maximum(full, (p_first + 1) // BS)
    n_diag = gl.maximum(gl.cdiv(p_last + 1, BS) - mid, 0)
    return lo, full, mid, n_left, n_diag, start


@gluon.jit
def load_ring_keys(d_q, d_k, q_s, ring, i_q, first, p_c, p_base, b_slope, b_ref, n, i_b, r, r_k, s, i_h, i_g, S,
                   BR: gl.constexpr, BS: gl.constexpr, KU: gl.constexpr, GATE: gl.constexpr,
                   STAGES: gl.constexpr):  # fmt: skip
    """The n-th key tile, at key s: rows r_k of k, and bias_j = c_ref - c_j; if ``first``, q from row r on into i_q."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b = n % STAGES
    o_s = gl.arange(0, BS, gl.BlockedLayout([BS // 32], [32], [1], [0]))
    b_bias = gluon_bias_at(p_c, p_base, b_slope, b_ref, s + o_s, S, GATE, KU)
    mbarrier.wait(empty_k.index(b), (n // STAGES & 1) ^ 1)
    tma_load(d_k, [i_b, r_k, i_g, 0], full_k.index(b), k_s.index(b))
    if first:
        for w in gl.static_range(2):
            tma_load(d_q, [i_b, r + w * BR, i_h, 0], full_k.index(b), q_s.index(2 * i_q + w))
    if GATE != 0:
        bias_s.index(b).store(b_bias)
        barrier()
    if first:  # last, for it also publishes the bias
        mbarrier.expect(full_k.index(b), d_k.block_type.nbytes + 2 * d_q.block_type.nbytes)
    else:
        mbarrier.expect(full_k.index(b), d_k.block_type.nbytes)


@gluon.jit
def load_ring_values(d_v, ring, n, i_b, s, i_g, STAGES: gl.constexpr):
    """v of the n-th key tile, at key s."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b = n % STAGES
    mbarrier.wait(empty_v.index(b), (n // STAGES & 1) ^ 1)
    mbarrier.expect(full_v.index(b), d_v.block_type.nbytes)
    tma_load(d_v, [i_b, s, i_g, 0], full_v.index(b), v_s.index(b))


@gluon.jit
def start_scores(q_t, ring, n, BR: gl.constexpr, BS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
                 L_S: gl.constexpr):  # fmt: skip
    """Starts the products of q and the n-th key tile. # [BR, BS]"""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b = n % STAGES
    zero = gl.zeros([BR, BS], gl.float32, L_S)
    mbarrier.wait(full_k.index(b), n // STAGES & 1)
    return warpgroup_mma(q_t, k_s.index(b).reshape([BS, BK]).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _row_maximum(b_y, BR: gl.constexpr, BS: gl.constexpr, L_R: gl.constexpr):
    """Maximum of each row, over a fourth of the columns at a time: one chain of a thread's values would be slower."""
    b_m = gl.max(gl.max(gl.reshape(b_y, [BR, 4, BS // 4]), 1), 1)
    return gl.convert_layout(b_m, L_R)


@gluon.jit
def tile_weights(b_y, b_m, b_l, b_bias, s, b_pos, b_since, scale2, BR: gl.constexpr, BS: gl.constexpr,
                 GATE: gl.constexpr, SINCE: gl.constexpr, L_S: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Online softmax of one tile of scores, at key s: the weights, the factor of what came before, maximum and sum.

    Without a gate the maximum is taken before the scale, which is positive.
    """
    o_s = gl.arange(0, BS, gl.SliceLayout(0, L_S))
    if GATE != 0:
        b_y = b_y * scale2 + b_bias[None, :]
        scale2 = 1.0
    if MASK:
        m_y = (s + o_s)[None, :] <= b_pos[:, None]
        if SINCE:
            m_y = m_y & ((s + o_s)[None, :] >= b_since[:, None])
        b_y = gl.where(m_y, b_y, float("-inf"))
    b_mn = gl.maximum(b_m, _row_maximum(b_y, BR, BS, gl.SliceLayout(1, L_S)) * scale2)
    b_ms = b_mn
    if MASK:  # a row that has seen no key yet
        b_ms = gl.where(b_mn == float("-inf"), 0.0, b_mn)
    b_p = gl.exp2(b_y * scale2 - b_ms[:, None])
    b_a = gl.exp2(b_m - b_ms)
    return b_p, b_a, b_mn, b_l * b_a + gl.sum(b_p, 1)


@gluon.jit
def softmax_step(b_o, b_ph, b_m, b_l, q_t, ring, n, s, b_pos, b_since, scale2, BR: gl.constexpr, BS: gl.constexpr,
                 BK: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, SINCE: gl.constexpr, STAGES: gl.constexpr,
                 L_S: gl.constexpr, L_O: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """The n-th tile's weights times v, beside the scores and the weights of the next one, at key s."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b, b_n = n % STAGES, (n + 1) % STAGES
    b_y = start_scores(q_t, ring, n + 1, BR, BS, BK, STAGES, L_S)
    b_o = warpgroup_mma(b_ph, v_s.index(b).reshape([BS, BV]), b_o, is_async=True)
    b_bias = bias_s.index(b_n).load(gl.SliceLayout(0, L_S))
    b_y = warpgroup_mma_wait(1, [b_y])
    mbarrier.arrive(empty_k.index(b_n), count=1)
    b_p, b_a, b_m, b_l = tile_weights(b_y, b_m, b_l, b_bias, s, b_pos, b_since, scale2, BR, BS, GATE, SINCE, L_S, MASK)
    b_ph = gl.convert_layout(b_p.to(v_s.dtype), gl.DotOperandLayout(0, L_O, 2))
    # A wait that can branch: without it ptxas moves the exponentials behind the wait for the product.
    mbarrier.wait(full_v.index(b_n), (n + 1) // STAGES & 1)
    b_o, b_l = warpgroup_mma_wait(0, [b_o, b_l])
    mbarrier.arrive(empty_v.index(b), count=1)
    b_o = b_o * gl.convert_layout(b_a, gl.SliceLayout(1, L_O))[:, None]
    return b_o, b_ph, b_m, b_l


@gluon.jit
def last_step(b_o, b_ph, ring, n, BS: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):
    """The n-th tile's weights times v, where there is no next one."""
    k_s, v_s, bias_s, full_k, full_v, empty_k, empty_v = ring
    b_o = warpgroup_mma(b_ph, v_s.index(n % STAGES).reshape([BS, BV]), b_o, is_async=True)
    return warpgroup_mma_wait(0, [b_o])


@gluon.jit
def normalized(b_o, b_l, L_O: gl.constexpr):
    """Sums of weights times v over the sums of weights. # [BR, BV]"""
    return b_o / gl.convert_layout(b_l, gl.SliceLayout(1, L_O))[:, None]


@gluon.jit
def store_lse(b_m, b_l, p_lse, r, T, BR: gl.constexpr, L_S: gl.constexpr):
    """The log2-sum-exp of BR rows from r on."""
    o_r = r + gl.arange(0, BR, gl.SliceLayout(1, L_S))
    gl.store(p_lse + o_r, b_m + gl.log2(b_l), mask=o_r < T)


@gluon.jit
def store_rows(b_o, b_m, b_l, p_o, p_rest, p_lse, stride, r, T, V: gl.constexpr, BR: gl.constexpr, BV: gl.constexpr,
               HAS_REST: gl.constexpr, L_S: gl.constexpr, L_O: gl.constexpr):  # fmt: skip
    """The results of BR rows from r on, where a row of p_o and p_rest has ``stride`` elements."""
    L_W: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    b_o = normalized(b_o, b_l, L_O)
    b_oh = b_o.to(p_o.dtype.element_ty)
    o_t, o_v = r + gl.arange(0, BR, gl.SliceLayout(1, L_W)), gl.arange(0, BV, gl.SliceLayout(0, L_W))
    p_ot = o_t[:, None].to(gl.int64) * stride + o_v[None, :]
    m_o = (o_t < T)[:, None] & (o_v < V)[None, :]
    gl.store(p_o + p_ot, gl.convert_layout(b_oh, L_W), mask=m_o)
    if HAS_REST:  # what the rounding dropped
        b_rest = (b_o - b_oh.to(gl.float32)).to(p_rest.dtype.element_ty)
        gl.store(p_rest + p_ot, gl.convert_layout(b_rest, L_W), mask=m_o)
    store_lse(b_m, b_l, p_lse, r, T, BR, L_S)
