"""The inverse of a block of 64 tokens in Gluon, and products of pieces: ``portable/inverse.py`` for Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def _column_layout():
    """Four blocks [16, 4, 16] by rows, blocks, columns: a block to a warp, every second row of a column to a thread."""
    return gl.DistributedLinearLayout(
        [[2, 0, 0], [4, 0, 0], [8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0]],
        [[0, 1, 0], [0, 2, 0]],
        [],
        [16, 4, 16],
    )


@gluon.constexpr_function
def _row_layout():
    """A row [1, 64] of the four blocks, as the columns of ``_column_layout`` need it."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]],
        [[0, 0], [0, 0], [0, 0], [0, 0], [0, 8]],
        [[0, 16], [0, 32]],
        [],
        [1, 64],
    )


@gluon.constexpr_function
def _entry_layout():
    """[16, 64], the blocks side by side, as the blocks of a product need it."""
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[0, 16], [0, 32]],
        [],
        [16, 64],
    )


@gluon.constexpr_function
def _product_blocks():
    """A product [64, 64] as [4, 16, 4, 16]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 16, 4, 16],
    )


@gluon.jit
def to_half(x):
    """x in float16, two at a time."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, True, 2)


@gluon.jit
def two_pieces(x):
    """x as the sum of two numbers in float16: as ``inverse.two_pieces``, two at a time."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .f32 x, y;
        cvt.rn.f16x2.f32 $0, $3, $2;
        mov.b32 {a, b}, $0;
        cvt.f32.f16 x, a;
        cvt.f32.f16 y, b;
        sub.f32 x, $2, x;
        sub.f32 y, $3, y;
        cvt.rn.f16x2.f32 $1, y, x;
        }""",
        "=&r,=r,r,r",
        [x],
        (gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def left_factor(b, L: gl.constexpr):
    """b, laid out as a product, as the left factor of a product laid out as L: it stays where it is."""
    return gl.convert_layout(b, gl.DotOperandLayout(0, L, 2))


@gluon.jit
def _sixteens(b):
    """Columns of b [64, 64], 16 at a time."""
    b = gl.permute(gl.reshape(b, [64, 2, 2, 16]), [0, 3, 2, 1])
    b_l, b_r = gl.split(b)
    b_0, b_1 = gl.split(b_l)
    b_2, b_3 = gl.split(b_r)
    return b_0, b_1, b_2, b_3


@gluon.jit
def _add_blocks(acc, a, b_s, n: gl.constexpr, m: gl.constexpr, USE: gl.constexpr, L: gl.constexpr):
    """Starts acc + a b, of which only columns of a and rows of b in the n-th and m-th 16 are not 0."""
    parts = _sixteens(a)
    acc = warpgroup_mma(left_factor(parts[n], L), b_s.slice(16 * n, 16), acc, use_acc=USE, is_async=True)
    return warpgroup_mma(left_factor(parts[m], L), b_s.slice(16 * m, 16), acc, is_async=True)


@gluon.jit
def merge_blocks(b_l, b_x, x_s, y_s, t_s, u_s, h: gl.constexpr, L_C: gl.constexpr):
    """As ``inverse.merge_blocks``: diagonal blocks of size 2h inverted, given those of size h. # [64, 64]"""
    o_r, o_c = gl.arange(0, 64, gl.SliceLayout(1, L_C)), gl.arange(0, 64, gl.SliceLayout(0, L_C))
    m_b = (o_r // (2 * h))[:, None] == (o_c // (2 * h))[None, :]
    m_b = m_b & ((o_r // h)[:, None] != (o_c // h)[None, :])
    x_hi, x_lo = two_pieces(b_x)
    x_s.store(x_hi)
    y_s.store(x_lo)
    l_hi, l_lo = two_pieces(gl.where(m_b, -b_l, 0.0))
    fence_async_shared()
    e: gl.constexpr = 2 if h == 16 else 1  # the upper blocks are sixteens 0 and e, the lower ones d and d + e
    d: gl.constexpr = h // 16
    zero = gl.zeros([64, 64], gl.float32, L_C)
    b_t = _add_blocks(zero, l_hi, x_s, 0, e, False, L_C)
    b_t = _add_blocks(b_t, l_lo, x_s, 0, e, True, L_C)
    b_t = _add_blocks(b_t, l_hi, y_s, 0, e, True, L_C)
    t_hi, t_lo = two_pieces(warpgroup_mma_wait(0, [b_t]))
    t_s.store(t_hi)
    u_s.store(t_lo)
    fence_async_shared()
    b_x = _add_blocks(b_x, x_hi, t_s, d, d + e, True, L_C)
    b_x = _add_blocks(b_x, x_lo, t_s, d, d + e, True, L_C)
    b_x = _add_blocks(b_x, x_hi, u_s, d, d + e, True, L_C)
    return warpgroup_mma_wait(0, [b_x])


@gluon.jit
def invert_sixteens(b_l, d_s, L_C: gl.constexpr):
    """Inverses of the diagonal 16 x 16 blocks of I + b_l, by rows; 0 beside them. # [64, 64]

    A warp holds a block, each thread half of a column, so that no step crosses warps; d_s [16, 64] float32 is scratch.
    """
    L_I: gl.constexpr = _column_layout()
    L_B: gl.constexpr = _product_blocks()
    o_r, o_c = gl.arange(0, 64, gl.SliceLayout(1, L_C)), gl.arange(0, 64, gl.SliceLayout(0, L_C))
    m_n = (o_r // 16)[:, None] == (o_c // 16)[None, :]
    b_d = gl.sum(gl.reshape(gl.where(m_n, b_l, 0.0), [4, 16, 4, 16]), 2)  # blocks, rows, columns
    d_s.store(gl.reshape(gl.permute(gl.reshape(b_d, [4, 16, 8, 2]), [1, 0, 3, 2]), [16, 64]))  # odd ones after even
    o_i = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, L_I)))[:, None, None]
    o_s = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, L_I)))[None, None, :]
    b_i = gl.where(o_i == o_s, 1.0, gl.zeros([16, 4, 16], gl.float32, L_I))
    for i in gl.static_range(1, 16):
        b_r = gl.reshape(d_s.slice(i, 1).load(_row_layout()), [4, 2, 8])
        b_r = gl.reshape(gl.permute(b_r, [2, 1, 0]), [16, 4])
        b_r = gl.convert_layout(b_r, gl.SliceLayout(2, L_I))
        b_r = gl.sum(b_r[:, :, None] * b_i, 0)  # [4, 16]
        b_i = gl.where(o_i == i, b_i - b_r[None, :, :], b_i)
    d_s.store(gl.reshape(b_i, [16, 64]))
    b_d = gl.permute(gl.reshape(d_s.load(_entry_layout()), [16, 4, 16]), [1, 0, 2])
    b_d = gl.convert_layout(b_d, gl.SliceLayout(2, L_B))
    m_n = gl.convert_layout(gl.reshape(m_n, [4, 16, 4, 16]), L_B)
    b_x = gl.where(m_n, b_d[:, :, None, :], 0.0)
    return gl.convert_layout(gl.reshape(b_x, [64, 64]), L_C)
