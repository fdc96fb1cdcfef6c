"""The kernels: a program has BT tokens of BX channels.

The backward first computes the gradient of what the SiLU is taken of, in float32: it is part of n gradients, for each
of which it would be computed again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import addressable, cdiv
from attnzoo.kernels.common.partial_sums import partial_sums

CHANNELS = 64  # BX


@triton.jit
def _borders(p_cu, o_t, N, STEPS):
    """The first token of the document of each token, and the first one behind it: bisection. # [BT] int32"""
    b_low = o_t * 0
    b_high = b_low + N
    for _ in range(STEPS):
        b_mid = (b_low + b_high) // 2
        m_low = tl.load(p_cu + b_mid).to(tl.int32) <= o_t
        b_low, b_high = tl.where(m_low, b_mid, b_low), tl.where(m_low, b_high, b_mid)
    return tl.load(p_cu + b_low).to(tl.int32), tl.load(p_cu + b_high).to(tl.int32)


@triton.jit
def _tokens(p_x, p_before, o_t, b_first, b_stop, o_x, m_x, stride_t, stride_bt, SIZE: tl.constexpr,
            BEFORE: tl.constexpr):  # fmt: skip
    """Tokens of x, from b_first to b_stop; 0 elsewhere, or what stands before. # [BT, BX] float32

    p_x, p_before: of the sequence, where o_t counts from.
    """
    m_tx = ((o_t >= b_first) & (o_t < b_stop))[:, None] & m_x[None, :]
    b_x = tl.load(p_x + o_t[:, None].to(tl.int64) * stride_t + o_x[None, :], mask=m_tx, other=0.0).to(tl.float32)
    if BEFORE:
        m_bx = ((o_t < 0) & (o_t > -SIZE))[:, None] & m_x[None, :]
        o_b = (o_t + SIZE - 1)[:, None].to(tl.int64) * stride_bt + o_x[None, :]
        b_x += tl.load(p_before + o_b, mask=m_bx, other=0.0).to(tl.float32)
    return b_x


@launched
@triton.jit(do_not_specialize=["T", "NT", "N", "STEPS"])
def causal_convolution_kernel(
    p_x, p_before, p_weight, p_bias, p_cu, p_dy, p_y, T, NT, N, STEPS, stride_b, stride_t, stride_bb, stride_bt,
    stride_db, stride_dt,
    X: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, BACK: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """y, or BACK the gradient of what the SiLU is taken of."""
    i_b = (tl.program_id(0) // NT).to(tl.int64)
    o_t = tl.program_id(0) % NT * BT + tl.arange(0, BT)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    m_x = o_x < X
    m_tx = (o_t < T)[:, None] & m_x[None, :]
    p_x += i_b * stride_b
    p_before += i_b * stride_bb
    if BACK:
        o_dy = i_b * stride_db + o_t[:, None].to(tl.int64) * stride_dt + o_x[None, :]
        b_dy = tl.load(p_dy + o_dy, mask=m_tx, other=0.0).to(tl.float32)
    if PACKED:
        b_first, b_stop = _borders(p_cu, o_t, N, STEPS)
    else:
        b_first, b_stop = o_t * 0, o_t * 0 + T
    b_z = tl.zeros([BT, BX], tl.float32)
    if BIAS:
        b_z += tl.load(p_bias + o_x, mask=m_x, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(SIZE):
        b_w = tl.load(p_weight + o_x * SIZE + j, mask=m_x, other=0.0).to(tl.float32)
        b_z += b_w[None, :] * _tokens(
            p_x, p_before, o_t + (j - SIZE + 1), b_first, b_stop, o_x, m_x, stride_t, stride_bt, SIZE, BEFORE
        )
    if BACK:
        b_open = tl.sigmoid(b_z)
        b_z = b_dy * b_open * (1.0 + b_z * (1.0 - b_open))
    elif SILU:
        b_z *= tl.sigmoid(b_z)
    o_y = (i_b * T + o_t)[:, None] * X + o_x[None, :]
    tl.store(p_y + o_y, b_z.to(p_y.dtype.element_ty), mask=m_tx)


@launched
@triton.jit(do_not_specialize=["T", "NT", "N", "STEPS"])
def causal_convolution_bwd_kernel(
    p_x, p_before, p_weight, p_cu, p_dz, p_dx, p_dbefore, p_dweight, p_dbias, T, NT, N, STEPS,
    stride_b, stride_t, stride_bb, stride_bt, stride_db, stride_dt,
    X: tl.constexpr, SIZE: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
    BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """dx, and one share of dweight [X, SIZE] and dbias [X]; with BEFORE the tokens before the first have a dx too."""
    i_p = tl.program_id(0).to(tl.int64)
    i_b = i_p // NT
    o_t = tl.program_id(0) % NT * BT + tl.arange(0, BT) - (SIZE - 1) * BEFORE
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    m_x = o_x < X
    p_dz += i_b * stride_db
    if PACKED:
        b_first, b_stop = _borders(p_cu, o_t, N, STEPS)
    else:
        b_first, b_stop = o_t * 0, o_t * 0 + T
    b_x = _tokens(
        p_x + i_b * stride_b,
        p_before + i_b * stride_bb,
        o_t,
        b_first,
        b_stop,
        o_x,
        m_x,
        stride_t,
        stride_bt,
        SIZE,
        BEFORE,
    )
    b_dx = tl.zeros([BT, BX], tl.float32)
    for s in tl.static_range(SIZE):  # token t is part of the outputs of tokens t + s
        m_tx = ((o_t + s >= b_first) & (o_t + s < b_stop))[:, None] & m_x[None, :]
        o_dz = (o_t + s)[:, None].to(tl.int64) * stride_dt + o_x[None, :]
        b_dz = tl.load(p_dz + o_dz, mask=m_tx, other=0.0).to(tl.float32)
        b_w = tl.load(p_weight + o_x * SIZE + (SIZE - 1 - s), mask=m_x, other=0.0).to(tl.float32)
        b_dx += b_w[None, :] * b_dz
        tl.store(p_dweight + (i_p * X + o_x) * SIZE + (SIZE - 1 - s), tl.sum(b_dz * b_x, 0), mask=m_x)
        if BIAS and s == 0:
            tl.store(p_dbias + i_p * X + o_x, tl.sum(b_dz, 0), mask=m_x)
    o_dx = (i_b * T + o_t)[:, None] * X + o_x[None, :]
    m_dx = ((o_t >= 0) & (o_t < T))[:, None] & m_x[None, :]
    tl.store(p_dx + o_dx, b_dx.to(p_dx.dtype.element_ty), mask=m_dx)
    if BEFORE:
        o_db = (i_b * (SIZE - 1) + o_t + SIZE - 1)[:, None] * X + o_x[None, :]
        tl.store(p_dbefore + o_db, b_dx.to(p_dbefore.dtype.element_ty), mask=(o_t < 0)[:, None] & m_x[None, :])


def _packed(cu_seqlens: Tensor | None) -> tuple[int, int]:
    """The number of documents, and the steps of a bisection among them."""
    N = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    return N, N.bit_length()


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    dy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``y [B, T, X]``; with ``dy``, its gradient, that of what the SiLU is taken of, in float32."""
    B, T, X = x.shape
    y = torch.empty(B, T, X, dtype=x.dtype if dy is None else torch.float32, device=x.device)
    x, past, dy_ = addressable(x), addressable(x if before is None else before), x if dy is None else dy
    BT = 8 if T <= 8 else 32
    NT = cdiv(T, BT)
    causal_convolution_kernel[(B * NT, cdiv(X, CHANNELS))](
        x, past, weight, weight if bias is None else bias, x if cu_seqlens is None else cu_seqlens, dy_, y, T, NT,
        *_packed(cu_seqlens), *x.stride()[:2], *past.stride()[:2], *dy_.stride()[:2], X, weight.shape[1], silu,
        bias is not None, before is not None, cu_seqlens is not None, dy is not None, BT, CHANNELS, num_warps=4,
    )  # fmt: skip
    return y


def convolve_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight, bias and before."""
    (B, T, X), SIZE, BT = x.shape, weight.shape[1], 64
    dx = torch.empty(B, T, X, dtype=x.dtype, device=x.device)
    dbefore = None if before is None else torch.empty(before.shape, dtype=before.dtype, device=x.device)
    x, dy, past = addressable(x), addressable(dy), addressable(x if before is None else before)
    dz = convolve(x, weight, bias, before, cu_seqlens, silu, dy) if silu else dy
    NT = cdiv(T + (0 if before is None else SIZE - 1), BT)
    dweight = x.new_empty(B * NT, X, SIZE, dtype=torch.float32)
    dbias = None if bias is None else x.new_empty(B * NT, X, dtype=torch.float32)
    causal_convolution_bwd_kernel[(B * NT, cdiv(X, CHANNELS))](
        x, past, weight, x if cu_seqlens is None else cu_seqlens, dz, dx, dx if dbefore is None else dbefore, dweight,
        dweight if dbias is None else dbias, T, NT, *_packed(cu_seqlens), *x.stride()[:2], *past.stride()[:2],
        *dz.stride()[:2], X, SIZE, bias is not None, before is not None, cu_seqlens is not None, BT, CHANNELS,
        num_warps=8,
    )  # fmt: skip
    whole = None if dbias is None or bias is None else partial_sums(dbias, bias)
    return dx, partial_sums(dweight, weight), whole, dbefore
