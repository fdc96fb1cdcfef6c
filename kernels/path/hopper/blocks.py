"""The block level for Hopper, in Gluon: what ``portable.blocks.path_block_fwd_kernel`` computes of bf16 q and k.

Latency bounds it, so products that do not depend on one another are started together, and a result is stored while the
next ones run. Left factors stay in registers where they were made; pieces and roundings are the portable kernel's.

Channels lie in shared memory in an order in which a thread's part of a product is what it reads and writes at once:
of 32 channels, 8 t + 2 j + b is at 8 j + 2 t + b. Sums over channels do not see it, columns of results are turned back,
in registers, where they are stored, and so are rows of M.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.path.portable.inverse import row_scale

from .inverse import invert_sixteens, left_factor, merge_blocks, to_half, two_pieces


@gluon.constexpr_function
def _rows_layout(BK):
    """[64, BK] in memory: 8 channels of a row to a thread at once, its rows those of its part of a product."""
    wide = [[0, 32], [0, 64]][: BK // 64]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *wide],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, BK],
    )


@gluon.jit
def _turn(b, L: gl.constexpr):
    """Columns from the order in memory to the order of products, or back: no data move. # [R, N]"""
    R: gl.constexpr = b.shape[0]
    N: gl.constexpr = b.shape[1]
    b = gl.permute(gl.reshape(b, [R, N // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(b, [R, N]), L)


@gluon.jit
def _half_y(w_s, v_s, x_s, y_s, i: gl.constexpr, NW: gl.constexpr, L_C: gl.constexpr):
    """Starts rows i to i + 64 of Y^T = W^T X^T. # [64, 64]"""
    x_t, y_t = x_s.permute([1, 0]), y_s.permute([1, 0])
    w_t = w_s.slice(i, 64, 1).permute([1, 0])
    b_y = warpgroup_mma(w_t, x_t, gl.zeros([64, 64], gl.float32, L_C), use_acc=False, is_async=True)
    b_y = warpgroup_mma(w_t, y_t, b_y, is_async=True)
    if NW == 2:
        b_y = warpgroup_mma(v_s.slice(i, 64, 1).permute([1, 0]), x_t, b_y, is_async=True)
    return b_y


@gluon.jit
def _half_m(b_y, w_s, v_s, NW: gl.constexpr, BK: gl.constexpr, L_K: gl.constexpr):
    """Starts those rows of -Y^T W. # [64, BK]"""
    y_hi, y_lo = two_pieces(-b_y)
    y_hi, y_lo = left_factor(y_hi, L_K), left_factor(y_lo, L_K)
    b_m = warpgroup_mma(y_hi, w_s, gl.zeros([64, BK], gl.float32, L_K), use_acc=False, is_async=True)
    b_m = warpgroup_mma(y_lo, w_s, b_m, is_async=True)
    if NW == 2:
        b_m = warpgroup_mma(y_hi, v_s, b_m, is_async=True)
    return b_m


@gluon.jit
def _store_m(b_m, p_m, plane, i: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, L_K: gl.constexpr):
    """I + b_m, rows i to i + 64 of M, in two pieces, a plane apart."""
    L_G: gl.constexpr = _rows_layout(BK)
    o_i, o_j = i + gl.arange(0, 64, gl.SliceLayout(1, L_K)), gl.arange(0, BK, gl.SliceLayout(0, L_K))
    m_hi, m_lo = two_pieces(gl.where(o_i[:, None] == o_j[None, :], b_m + 1.0, b_m))
    o_r, o_k = i + gl.arange(0, 64, gl.SliceLayout(1, L_G)), gl.arange(0, BK, gl.SliceLayout(0, L_G))
    o_r = o_r // 32 * 32 + o_r % 8 // 2 * 8 + o_r // 8 % 4 * 2 + o_r % 2
    p_t, m_k = p_m + o_r[:, None] * K + o_k[None, :], (o_r < K)[:, None] & (o_k < K)[None, :]
    gl.store(p_t, _turn(m_hi, L_G), mask=m_k)
    gl.store(p_t + plane, _turn(m_lo, L_G), mask=m_k)


@gluon.jit
def _unit_rows(b, L_K: gl.constexpr):
    """As ``inverse.unit_rows``, from the order in memory to that of products; two at a time."""
    b = _turn(b, L_K)
    s, inv = row_scale(b)
    b = gl.inline_asm_elementwise(
        """{
        .reg .b32 x, y;
        mul.rn.bf16x2 x, $1, $2;
        and.b32 y, x, 0xffff0000;
        shl.b32 x, x, 16;
        cvt.rn.f16x2.f32 $0, y, x;
        }""",
        "=r,r,r",
        [b, inv.to(gl.bfloat16)[:, None]],
        gl.float16,
        True,
        2,
    )
    return b, s


@gluon.jit
def _store_rows(b, p, stride: gl.constexpr, R, K: gl.constexpr, BK: gl.constexpr):
    """b in the dtype of p."""
    L_G: gl.constexpr = _rows_layout(BK)
    o_r, o_k = gl.arange(0, 64, gl.SliceLayout(1, L_G)), gl.arange(0, BK, gl.SliceLayout(0, L_G))
    m_ck = (o_r < R)[:, None] & (o_k < K)[None, :]
    gl.store(p + o_r[:, None] * stride + o_k[None, :], _turn(b.to(p.dtype.element_ty), L_G), mask=m_ck)


@gluon.jit
def _store_scores(b_a, b_qs, s_s, p, L_C: gl.constexpr):
    """The scores of a head, scaled back; four columns at once."""
    o_r, o_c = gl.arange(0, 64, gl.SliceLayout(1, L_C)), gl.arange(0, 64, gl.SliceLayout(0, L_C))
    b_a = b_a * gl.convert_layout(b_qs, gl.SliceLayout(1, L_C))[:, None]
    b_a = b_a * s_s.load(gl.SliceLayout(0, L_C))[None, :]
    gl.store(p + o_r[:, None] * 64 + o_c[None, :], b_a, mask=o_r[:, None] >= (o_c // 4 * 4)[None, :])


@gluon.jit
def _identity(L_C: gl.constexpr, L_K: gl.constexpr):
    """I as a left factor."""
    o_r, o_c = gl.arange(0, 64, gl.SliceLayout(1, L_C)), gl.arange(0, 64, gl.SliceLayout(0, L_C))
    one = gl.where(o_r[:, None] == o_c[None, :], 1.0, gl.zeros([64, 64], gl.float32, L_C))
    return left_factor(one.to(gl.float16), L_K)


@launched
@gluon.jit(do_not_specialize=["T", "B", "N"])
def path_block_fwd_hopper_kernel(
    p_q, p_k, p_w, p_beta, p_diag, p_qb, p_kb, p_m, p_kv, p_kx, p_kw, T, B, N,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh,
    stride_bb, stride_bt, stride_bh,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, NW: gl.constexpr, KEEP: gl.constexpr,
    KW: gl.constexpr,
):  # fmt: skip
    """As ``portable.blocks.path_block_fwd_kernel``, with DT float16 and NI, NB and NP 1.

    What is in flight beside what is stored is as much as 255 registers hold: with more, ptxas waits for each product
    (C7512). A tile in shared memory is written, then fenced, then read by products after a barrier of Triton's: between
    the write and the fence there must be none.
    """
    L_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    L_G: gl.constexpr = _rows_layout(BK)
    S: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    f16: gl.constexpr = gl.float16
    REP: gl.constexpr = H // G
    n_c = gl.cdiv(T, 64)
    i_bg, i_c = head_and_tile(n_c)
    i_b, i_g = (i_bg // G).to(gl.int64), (i_bg % G).to(gl.int64)
    r = (i_c * 64).to(gl.int64)
    R = T - i_c * 64
    o_t, o_k = gl.arange(0, 64, gl.SliceLayout(1, L_G)), gl.arange(0, BK, gl.SliceLayout(0, L_G))
    o_r, o_c = gl.arange(0, 64, gl.SliceLayout(1, L_C)), gl.arange(0, 64, gl.SliceLayout(0, L_C))
    p_w += i_b * stride_wb + i_g * stride_wh + r * stride_wt
    p_k += i_b * stride_kb + i_g * stride_kh + r * stride_kt
    p_q += i_b * stride_qb + i_g * REP * stride_qh + r * stride_qt
    p_beta += i_b * stride_bb + i_g * stride_bh + r * stride_bt
    b_w = load_tile(p_w, o_t, o_k, stride_wt, R, K, BK, True)
    b_beta = gl.load(p_beta + o_r * stride_bt, mask=o_r < R, other=0.0).to(gl.float32)
    b_k = load_tile(p_k, o_t, o_k, stride_kt, R, K, BK, True)
    w_s = gl.allocate_shared_memory(f16, [64, BK], S)
    v_s = gl.allocate_shared_memory(f16, [64, BK], S) if NW == 2 else w_s
    k_s, q_s = gl.allocate_shared_memory(f16, [64, BK], S), gl.allocate_shared_memory(f16, [64, BK], S)
    x_s, y_s = gl.allocate_shared_memory(f16, [64, 64], S), gl.allocate_shared_memory(f16, [64, 64], S)
    t_s, u_s = gl.allocate_shared_memory(f16, [64, 64], S), gl.allocate_shared_memory(f16, [64, 64], S)
    s_s = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    c_s = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_s = gl.allocate_shared_memory(gl.float32, [16, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    b_w = _turn(b_w, L_K)
    if KW:
        _store_rows(b_w, p_kw + ((i_b * T + r) * G + i_g) * K, G * K, R, K, BK)
    if NW == 2:
        w_hi, w_lo = two_pieces(b_w)
        v_s.store(w_lo)
    else:
        w_hi = to_half(b_w.to(gl.float32))
    w_s.store(w_hi)
    b_q = load_tile(p_q, o_t, o_k, stride_qt, R, K, BK, True)
    s_s.store(b_beta)
    b_k, b_ks = _unit_rows(b_k, L_K)
    c_s.store(b_ks)
    k_s.store(b_k)
    b_q, b_qs = _unit_rows(b_q, L_K)
    q_s.store(b_q)
    fence_async_shared()
    zero = gl.zeros([64, 64], gl.float32, L_C)
    w_t = w_s.permute([1, 0])
    b_l = warpgroup_mma(w_s, w_t, zero, use_acc=False, is_async=True)
    if NW == 2:
        b_l = warpgroup_mma(v_s, w_t, b_l, is_async=True)
        b_l = warpgroup_mma(w_s, v_s.permute([1, 0]), b_l, is_async=True)
    b_kw = warpgroup_mma(k_s, w_t, zero, use_acc=False, is_async=True)
    b_qw = warpgroup_mma(q_s, w_t, zero, use_acc=False, is_async=True)
    b_l = warpgroup_mma_wait(2, [b_l])
    b_l = gl.where(o_r[:, None] > o_c[None, :], b_l * b_beta[:, None], 0.0)
    b_kw, b_qw = warpgroup_mma_wait(0, [b_kw, b_qw])
    b_kw = left_factor(to_half(gl.where(o_r[:, None] < o_c[None, :], -b_kw, 0.0)), L_C)
    b_qw = left_factor(to_half(gl.where(o_r[:, None] >= o_c[None, :], b_qw, 0.0)), L_C)
    b_v = invert_sixteens(b_l, d_s, L_C)
    b_v = merge_blocks(b_l, b_v, x_s, y_s, t_s, u_s, 16, L_C)
    b_v = merge_blocks(b_l, b_v, x_s, y_s, t_s, u_s, 32, L_C)
    b_x = b_v * s_s.load(gl.SliceLayout(0, L_C))[None, :]
    x_hi, x_lo = two_pieces(b_x)
    x_s.store(x_hi)
    y_s.store(x_lo)
    fence_async_shared()
    if KEEP:
        o_cc = ((i_b * n_c + i_c) * G + i_g) * 4096 + o_r[:, None] * 64 + o_c[None, :]
        gl.store(p_kv + o_cc, to_half(b_v))
        b_xh = b_x.to(p_kx.dtype.element_ty)
        gl.store(p_kx + o_cc, b_xh)
        gl.store(p_kx + B.to(gl.int64) * n_c * G * 4096 + o_cc, (b_x - b_xh.to(gl.float32)).to(b_xh.dtype))
    b_z = warpgroup_mma(b_kw, x_s.permute([1, 0]), zero, use_acc=False, is_async=True)  # -Z^T
    b_p = warpgroup_mma(b_qw, x_s, zero, use_acc=False, is_async=True)
    b_z, b_p = warpgroup_mma_wait(0, [b_z, b_p])
    t_s.store(to_half(b_z))
    u_s.store(to_half(-b_p))
    fence_async_shared()
    wide = gl.zeros([64, BK], gl.float32, L_K)
    b_eye = _identity(L_C, L_K)
    b_a = warpgroup_mma(q_s, k_s.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_a = warpgroup_mma(b_qw, t_s.permute([1, 0]), b_a, is_async=True)
    b_kb = warpgroup_mma(b_eye, k_s, wide, use_acc=False, is_async=True)
    b_kb = warpgroup_mma(t_s, w_s, b_kb, is_async=True)
    b_a = warpgroup_mma_wait(2, [b_a])
    p_diag += ((i_b * n_c + i_c) * H + i_g * REP) * 4096
    _store_scores(b_a, b_qs, c_s, p_diag, L_C)
    if REP == 1:
        b_y = _half_y(w_s, v_s, x_s, y_s, 0, NW, L_C)
        b_kb = warpgroup_mma_wait(NW + 1, [b_kb])
    else:
        b_kb = warpgroup_mma_wait(0, [b_kb])
    b_qb = warpgroup_mma(b_eye, q_s, wide, use_acc=False, is_async=True)
    b_qb = warpgroup_mma(u_s, w_s, b_qb, is_async=True)
    p_qb += ((i_b * T + r) * H + i_g * REP) * K
    _store_rows(b_kb * b_ks[:, None], p_kb + ((i_b * T + r) * G + i_g) * K, G * K, R, K, BK)
    p_m += ((i_b * N + i_c) * G + i_g) * (K * K)
    plane = B * N.to(gl.int64) * (G * K * K)
    if REP == 1:
        b_y, b_qb = warpgroup_mma_wait(0, [b_y, b_qb])
        b_m = _half_m(b_y, w_s, v_s, NW, BK, L_K)
        _store_rows(b_qb * b_qs[:, None], p_qb, H * K, R, K, BK)
    else:
        b_qb = warpgroup_mma_wait(0, [b_qb])
        _store_rows(b_qb * b_qs[:, None], p_qb, H * K, R, K, BK)
        for _ in range(1, REP):
            p_q, p_qb, p_diag = p_q + stride_qh, p_qb + K, p_diag + 4096
            b_q, b_qs = _unit_rows(load_tile(p_q, o_t, o_k, stride_qt, R, K, BK, True), L_K)
            q_s.store(b_q)
            fence_async_shared()
            b_qw = warpgroup_mma(q_s, w_t, zero, use_acc=False, is_async=True)
            b_a = warpgroup_mma(q_s, k_s.permute([1, 0]), zero, use_acc=False, is_async=True)
            b_qw = warpgroup_mma_wait(1, [b_qw])
            b_qw = left_factor(to_half(gl.where(o_r[:, None] >= o_c[None, :], b_qw, 0.0)), L_C)
            b_p = warpgroup_mma(b_qw, x_s, zero, use_acc=False, is_async=True)
            b_a = warpgroup_mma(b_qw, t_s.permute([1, 0]), b_a, is_async=True)
            b_p = warpgroup_mma_wait(1, [b_p])
            b_qb = warpgroup_mma(_identity(L_C, L_K), q_s, wide, use_acc=False, is_async=True)
            b_qb = warpgroup_mma(left_factor(to_half(-b_p), L_K), w_s, b_qb, is_async=True)
            b_a = warpgroup_mma_wait(2, [b_a])
            _store_scores(b_a, b_qs, c_s, p_diag, L_C)
            b_qb = warpgroup_mma_wait(0, [b_qb])
            _store_rows(b_qb * b_qs[:, None], p_qb, H * K, R, K, BK)
        b_y = warpgroup_mma_wait(0, [_half_y(w_s, v_s, x_s, y_s, 0, NW, L_C)])
        b_m = _half_m(b_y, w_s, v_s, NW, BK, L_K)
    if BK == 128:
        b_y = _half_y(w_s, v_s, x_s, y_s, 64, NW, L_C)
        b_m, b_y = warpgroup_mma_wait(0, [b_m, b_y])
        b_n = _half_m(b_y, w_s, v_s, NW, BK, L_K)
        _store_m(b_m, p_m, plane, 0, K, BK, L_K)
        b_n = warpgroup_mma_wait(0, [b_n])
        _store_m(b_n, p_m, plane, 64, K, BK, L_K)
    else:
        b_m = warpgroup_mma_wait(0, [b_m])
        _store_m(b_m, p_m, plane, 0, K, BK, L_K)
