"""The kernels: a program goes over BT tokens of BX channels one by one, and keeps the window in registers.

The tokens k before the present one and what their gradients have so far are b_x1, b_d1 and so on; windows of fewer than
four tokens leave those out. Rows are loaded two tokens ahead, as a program has little else to do meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import addressable, cdiv, power_of_2
from attnzoo.kernels.common.partial_sums import partial_sums

CHANNELS = 128  # most of a program, which has one warp
TOKENS = 32  # of a program, and twice as many in the backward, which reads three more


@triton.jit
def _document(p_cu, i_t, N, STEPS):
    """The first token of the document of a token, and the first one behind it: bisection. # [], []"""
    i_low, i_high = i_t * 0, i_t * 0 + N
    for _ in range(STEPS):
        i_mid = (i_low + i_high) // 2
        m_low = tl.load(p_cu + i_mid).to(tl.int32) <= i_t
        i_low, i_high = tl.where(m_low, i_mid, i_low), tl.where(m_low, i_high, i_mid)
    return tl.load(p_cu + i_low).to(tl.int32), tl.load(p_cu + i_high).to(tl.int32)


@triton.jit
def _weight(p_weight, o_x, m_x, AGO: tl.constexpr, SIZE: tl.constexpr):
    """Weights of the token that long ago. # [BX] float32"""
    o_w = o_x * SIZE + (SIZE - 1 - AGO)
    return tl.load(p_weight + o_w, mask=m_x & (AGO < SIZE), other=0.0).to(tl.float32)


@triton.jit
def _row(p_x, i_t, i_first, i_stop, o_x, m_x, stride_t):
    """Token i_t of x, or 0 outside of the document. # [BX]"""
    m_t = m_x & (i_t >= i_first) & (i_t < i_stop)
    return tl.load(p_x + i_t.to(tl.int64) * stride_t + o_x, mask=m_t, other=0.0)


@triton.jit
def _earlier(p_x, p_before, i_t, i_first, T, o_x, m_x, stride_t, stride_bt, SIZE: tl.constexpr, BEFORE: tl.constexpr):
    """A token before the first of a program, or what stands before all. # [BX] float32"""
    b_x = _row(p_x, i_t, i_first, T, o_x, m_x, stride_t).to(tl.float32)
    if BEFORE:
        o_b = (i_t + SIZE - 1).to(tl.int64) * stride_bt + o_x
        b_x += tl.load(p_before + o_b, mask=m_x & (i_t < 0) & (i_t > -SIZE), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _weighed(b_z, b_w0, b_w1, b_w2, b_w3, b_x0, b_x1, b_x2, b_x3, SIZE: tl.constexpr):
    """The bias plus the weighed tokens of the window and no others, as 0 times inf is NaN. # [BX] float32"""
    b_z += b_w0 * b_x0
    if SIZE > 1:
        b_z += b_w1 * b_x1
    if SIZE > 2:
        b_z += b_w2 * b_x2
    if SIZE > 3:
        b_z += b_w3 * b_x3
    return b_z


@launched
@triton.jit(do_not_specialize=["T", "NT", "N", "STEPS"])
def causal_convolution_kernel(
    p_x, p_before, p_weight, p_bias, p_cu, p_y, T, NT, N, STEPS, stride_b, stride_t, stride_bb, stride_bt,
    X: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    i_b, i_0 = (tl.program_id(0) // NT).to(tl.int64), tl.program_id(0) % NT * BT
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    m_x = o_x < X
    p_x += i_b * stride_b
    p_before += i_b * stride_bb
    p_y += i_b * T * X
    i_first, i_stop = T - T, T
    if PACKED:
        i_first, i_stop = _document(p_cu, i_0, N, STEPS)
    b_x1 = _earlier(p_x, p_before, i_0 - 1, i_first, T, o_x, m_x, stride_t, stride_bt, SIZE, BEFORE)
    b_x2 = _earlier(p_x, p_before, i_0 - 2, i_first, T, o_x, m_x, stride_t, stride_bt, SIZE, BEFORE)
    b_x3 = _earlier(p_x, p_before, i_0 - 3, i_first, T, o_x, m_x, stride_t, stride_bt, SIZE, BEFORE)
    b_w0, b_w1 = _weight(p_weight, o_x, m_x, 0, SIZE), _weight(p_weight, o_x, m_x, 1, SIZE)
    b_w2, b_w3 = _weight(p_weight, o_x, m_x, 2, SIZE), _weight(p_weight, o_x, m_x, 3, SIZE)
    b_bias = tl.zeros([BX], tl.float32)
    if BIAS:
        b_bias += tl.load(p_bias + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_next = _row(p_x, i_0, 0, T, o_x, m_x, stride_t)
    b_after = _row(p_x, i_0 + 1, 0, T, o_x, m_x, stride_t)
    for i in range(BT):
        i_t = i_0 + i
        b_x0, b_next = b_next.to(tl.float32), b_after
        b_after = _row(p_x, i_t + 2, 0, T, o_x, m_x, stride_t)
        if PACKED:
            if i_t >= i_stop:
                i_first, i_stop = _document(p_cu, tl.minimum(i_t, T - 1), N, STEPS)
            b_x1 = tl.where(i_t - 1 >= i_first, b_x1, 0.0)
            b_x2 = tl.where(i_t - 2 >= i_first, b_x2, 0.0)
            b_x3 = tl.where(i_t - 3 >= i_first, b_x3, 0.0)
        b_z = _weighed(b_bias, b_w0, b_w1, b_w2, b_w3, b_x0, b_x1, b_x2, b_x3, SIZE)
        if SILU:
            b_z *= tl.sigmoid(b_z)
        tl.store(p_y + i_t.to(tl.int64) * X + o_x, b_z.to(p_y.dtype.element_ty), mask=m_x & (i_t < T))
        b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0


@launched
@triton.jit(do_not_specialize=["T", "NT", "N", "STEPS"])
def causal_convolution_bwd_kernel(
    p_x, p_before, p_weight, p_bias, p_cu, p_dy, p_dx, p_dbefore, p_dweight, p_dbias, T, NT, N, STEPS,
    stride_b, stride_t, stride_bb, stride_bt, stride_db, stride_dt,
    X: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """dx, and one share of dweight [X, SIZE] and dbias [X]; with BEFORE the tokens before the first have a dx too."""
    i_p, i_0 = tl.program_id(0).to(tl.int64), tl.program_id(0) % NT * BT
    i_b = i_p // NT
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    m_x = o_x < X
    p_x += i_b * stride_b
    p_before += i_b * stride_bb
    p_dy += i_b * stride_db
    p_dx += i_b * T * X
    i_first, i_stop = T - T, T
    if PACKED:
        i_first, i_stop = _document(p_cu, i_0, N, STEPS)
    b_x1 = _earlier(p_x, p_before, i_0 - 1, i_first, T, o_x, m_x, stride_t, stride_bt, SIZE, BEFORE)
    b_x2 = _earlier(p_x, p_before, i_0 - 2, i_first, T, o_x, m_x, stride_t, stride_bt, SIZE, BEFORE)
    b_x3 = _earlier(p_x, p_before, i_0 - 3, i_first, T, o_x, m_x, stride_t, stride_bt, SIZE, BEFORE)
    b_w0, b_w1 = _weight(p_weight, o_x, m_x, 0, SIZE), _weight(p_weight, o_x, m_x, 1, SIZE)
    b_w2, b_w3 = _weight(p_weight, o_x, m_x, 2, SIZE), _weight(p_weight, o_x, m_x, 3, SIZE)
    b_bias = tl.zeros([BX], tl.float32)
    if BIAS:
        b_bias += tl.load(p_bias + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_s0, b_s1, b_s2, b_s3, b_sum = b_bias * 0.0, b_bias * 0.0, b_bias * 0.0, b_bias * 0.0, b_bias * 0.0
    b_d1, b_d2, b_d3 = b_bias * 0.0, b_bias * 0.0, b_bias * 0.0
    b_next, b_dnext = _row(p_x, i_0, 0, T, o_x, m_x, stride_t), _row(p_dy, i_0, 0, T, o_x, m_x, stride_dt)
    b_after, b_dafter = _row(p_x, i_0 + 1, 0, T, o_x, m_x, stride_t), _row(p_dy, i_0 + 1, 0, T, o_x, m_x, stride_dt)
    for i in range(BT + 3):
        i_t = i_0 + i
        b_x0, b_dz, b_next, b_dnext = b_next.to(tl.float32), b_dnext.to(tl.float32), b_after, b_dafter
        b_after, b_dafter = _row(p_x, i_t + 2, 0, T, o_x, m_x, stride_t), _row(p_dy, i_t + 2, 0, T, o_x, m_x, stride_dt)
        if PACKED:
            if i_t >= i_stop:
                i_first, i_stop = _document(p_cu, tl.minimum(i_t, T - 1), N, STEPS)
            b_x1 = tl.where(i_t - 1 >= i_first, b_x1, 0.0)
            b_x2 = tl.where(i_t - 2 >= i_first, b_x2, 0.0)
            b_x3 = tl.where(i_t - 3 >= i_first, b_x3, 0.0)
        if SILU:
            b_z = _weighed(b_bias, b_w0, b_w1, b_w2, b_w3, b_x0, b_x1, b_x2, b_x3, SIZE)
            b_open = tl.sigmoid(b_z)
            b_dz *= b_open * (1.0 + b_z * (1.0 - b_open))
        b_own = tl.where(i < BT, b_dz, 0.0)  # the rest is another program's
        b_s0 += b_own * b_x0
        b_s1 += b_own * b_x1
        b_s2 += b_own * b_x2
        b_s3 += b_own * b_x3
        b_sum += b_own
        b_dx = b_d3 + b_w3 * tl.where((i_t - 3 >= i_first - 3 * BEFORE) & (SIZE > 3), b_dz, 0.0)
        b_d3 = b_d2 + b_w2 * tl.where((i_t - 2 >= i_first - 3 * BEFORE) & (SIZE > 2), b_dz, 0.0)
        b_d2 = b_d1 + b_w1 * tl.where((i_t - 1 >= i_first - 3 * BEFORE) & (SIZE > 1), b_dz, 0.0)
        b_d1 = b_w0 * b_dz
        b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0
        i_d = i_t - 3
        m_dx = m_x & (i_d >= i_0) & (i_d < T)
        tl.store(p_dx + i_d.to(tl.int64) * X + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_dx)
        if BEFORE:
            o_db = (i_b * (SIZE - 1) + i_d + SIZE - 1) * X + o_x
            m_db = m_x & (i_0 == 0) & (i_d < 0) & (i_d > -SIZE)
            tl.store(p_dbefore + o_db, b_dx.to(p_dbefore.dtype.element_ty), mask=m_db)
    o_dw = (i_p * X + o_x) * SIZE + SIZE - 1
    tl.store(p_dweight + o_dw, b_s0, mask=m_x)
    tl.store(p_dweight + o_dw - 1, b_s1, mask=m_x & (SIZE > 1))
    tl.store(p_dweight + o_dw - 2, b_s2, mask=m_x & (SIZE > 2))
    tl.store(p_dweight + o_dw - 3, b_s3, mask=m_x & (SIZE > 3))
    if BIAS:
        tl.store(p_dbias + i_p * X + o_x, b_sum, mask=m_x)


def _launch(x: Tensor, tokens: int, cu_seqlens: Tensor | None) -> tuple[int, int, tuple[int, int], int, int]:
    """Programs over rows and over channels, documents and the steps of a bisection among them, BT and BX."""
    (T, X), N = x.shape[1:], 1 if cu_seqlens is None else len(cu_seqlens) - 1
    BT, BX = min(tokens, power_of_2(T)), min(CHANNELS, max(32, power_of_2(X)))
    return cdiv(T, BT), cdiv(X, BX), (N, N.bit_length()), BT, BX


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    """``y [B, T, X]``."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, past = addressable(x), addressable(x if before is None else before)
    NT, NX, documents, BT, BX = _launch(x, TOKENS, cu_seqlens)
    causal_convolution_kernel[(len(x) * NT, NX)](
        x, past, weight, weight if bias is None else bias, x if cu_seqlens is None else cu_seqlens, y, x.shape[1], NT,
        *documents, *x.stride()[:2], *past.stride()[:2], *weight.shape, silu, bias is not None, before is not None,
        cu_seqlens is not None, BT, BX, num_warps=1,
    )  # fmt: skip
    return y


def convolve_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight, bias and before."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbefore = None if before is None else torch.empty(before.shape, dtype=before.dtype, device=x.device)
    x, dy, past = addressable(x), addressable(dy), addressable(x if before is None else before)
    NT, NX, documents, BT, BX = _launch(x, 2 * TOKENS, cu_seqlens)
    dweight = x.new_empty(len(x) * NT, *weight.shape, dtype=torch.float32)
    dbias = None if bias is None else x.new_empty(len(x) * NT, len(weight), dtype=torch.float32)
    causal_convolution_bwd_kernel[(len(x) * NT, NX)](
        x, past, weight, weight if bias is None else bias, x if cu_seqlens is None else cu_seqlens, dy, dx,
        dx if dbefore is None else dbefore, dweight, dweight if dbias is None else dbias, x.shape[1], NT, *documents,
        *x.stride()[:2], *past.stride()[:2], *dy.stride()[:2], *weight.shape, silu, bias is not None,
        before is not None, cu_seqlens is not None, BT, BX, num_warps=1,
    )  # fmt: skip
    of_weight, *of_bias = partial_sums((dweight, weight), *(() if dbias is None or bias is None else ((dbias, bias),)))
    return dx, of_weight, of_bias[0] if of_bias else None, dbefore
