"""The kernel: a head's state, some of its columns in each program, goes through the tokens one by one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, power_of_2
from attnzoo.kernels.common.named_op import NamedOp

TILE = 2048  # entries of the state in one program


@launched
@triton.jit(do_not_specialize=["T", "stride_gb", "stride_gt", "stride_ab", "stride_at", "stride_ah"])
def linear_recurrent_kernel(
    p_q, p_k, p_v, p_decay, p_diag, p_angle, p_w, p_beta, p_write, p_valid, p_past, p_o, p_state,
    stride_gb, stride_gt, stride_ab, stride_at, stride_ah, T, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WRITERS: tl.constexpr, DECAY: tl.constexpr, DIAG: tl.constexpr, ANGLE: tl.constexpr, FACTORS: tl.constexpr,
    WRITE: tl.constexpr, MASKED: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """Columns are independent. ``A_t^T`` acts on the state ``S^T`` [K, V]: decays, rotation, then FACTORS of rank one.

    WRITERS is the number of heads that p_write has.
    """
    i_bh, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    i_g = i_h // (H // G)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    p_tile = i_bh.to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]
    m_tile = m_k[:, None] & m_v[None, :]
    b_s = tl.zeros([BK, BV], tl.float32)
    if PAST:
        b_s = tl.load(p_past + p_tile, mask=m_tile, other=0.0)  # [BK, BV]
    for i_t in range(T):
        i_bt = i_b * T + i_t
        m_here = True
        if MASKED:
            m_here = tl.load(p_valid + i_bt) != 0
        m_kt, m_vt = m_k & m_here, m_v & m_here
        o_group = (i_bt * G + i_g) * K + o_k
        b_q = tl.load(p_q + (i_bt * H + i_h) * K + o_k, mask=m_kt, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_group, mask=m_kt, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + (i_bt * G + i_g) * V + o_v, mask=m_vt, other=0.0).to(tl.float32)
        if DECAY:
            b_g = tl.load(p_decay + i_b * stride_gb + i_t * stride_gt + i_h, mask=m_here, other=0.0)
            b_s *= tl.exp(b_g.to(tl.float32))
        if DIAG:
            b_a = tl.load(p_diag + (i_bt * H + i_h) * K + o_k, mask=m_kt, other=0.0)
            b_s *= tl.exp(b_a.to(tl.float32))[:, None]
        if ANGLE:
            o_p = tl.arange(0, BK // 2)
            p_turn = p_angle + i_b * stride_ab + i_t * stride_at + i_h * stride_ah + o_p
            b_turn = tl.load(p_turn, mask=(o_p < K // 2) & m_here, other=0.0).to(tl.float32)
            b_cos, b_sin = tl.cos(b_turn)[:, None], tl.sin(b_turn)[:, None]
            b_even, b_odd = tl.split(tl.permute(tl.reshape(b_s, [BK // 2, 2, BV]), (0, 2, 1)))  # [BK / 2, BV]
            b_s = tl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin)
            b_s = tl.reshape(tl.permute(b_s, (0, 2, 1)), [BK, BV])
        for i_n in tl.static_range(FACTORS):
            i_f = (i_bt * G + i_g) * FACTORS + i_n
            b_w = tl.load(p_w + i_f * K + o_k, mask=m_kt, other=0.0).to(tl.float32)
            b_beta = tl.load(p_beta + i_f, mask=m_here, other=0.0).to(tl.float32)
            b_s -= b_w[:, None] * (b_beta * tl.sum(b_w[:, None] * b_s, 0))[None, :]
        if WRITE:
            b_v *= tl.load(p_write + i_bt * WRITERS + i_h // (H // WRITERS), mask=m_here, other=0.0).to(tl.float32)
        b_s += b_k[:, None] * b_v[None, :]
        b_o = tl.sum(b_q[:, None] * b_s, 0) * scale  # [BV]
        tl.store(p_o + (i_bt * H + i_h) * V + o_v, b_o, mask=m_v)
    tl.debug_barrier()  # in place: every thread has read what will be written to
    tl.store(p_state + p_tile, b_s, mask=m_tile)


class Recurrence(NamedTuple):
    """Inputs of both ops, as :func:`attnzoo.kernels.linear.linear_steps` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    log_diag: Tensor | None
    angle: Tensor | None
    w: Tensor | None
    beta: Tensor | None
    write: Tensor | None
    valid: Tensor | None
    state: Tensor | None
    scale: float


class Continued(NamedTuple):
    """o [B, T, H, V] in v's dtype, and the new state [B, H, K, V] float32."""

    o: Tensor
    state: Tensor


class ContinuedInPlace(NamedTuple):
    """o [B, T, H, V] in v's dtype; the new state stands in the place of the old one."""

    o: Tensor


def _recurrent(x: Recurrence) -> Continued:
    made = _recurrent_fake(x)
    _launch(x, *made)
    return made


def _recurrent_fake(x: Recurrence) -> Continued:
    (B, _, H, K), V = x.q.shape, x.v.shape[3]
    return Continued(*_in_place_fake(x), x.q.new_empty(B, H, K, V, dtype=torch.float32))


def _in_place(x: Recurrence) -> ContinuedInPlace:
    """A program reads the part of the state that it writes, which is contiguous."""
    assert x.state is not None
    made = _in_place_fake(x)
    _launch(x, made.o, x.state)
    return made


def _in_place_fake(x: Recurrence) -> ContinuedInPlace:
    return ContinuedInPlace(x.q.new_empty(*x.q.shape[:3], x.v.shape[3], dtype=x.v.dtype))


def _launch(x: Recurrence, o: Tensor, after: Tensor) -> None:
    """Fill o and the state after the tokens."""
    (B, T, H, K), (G, V), (*given, scale) = x.q.shape, x.v.shape[2:], x
    dense = [after if y is None else y if y.is_contiguous() else y.contiguous() for y in given]
    gate_strides = (0, 0) if x.log_decay is None or x.log_decay.ndim == 1 else (T * H, H)
    angle_strides = (0, 0, 0)
    if x.angle is not None and x.angle.ndim == 4:
        heads, pairs = x.angle.shape[2:]
        angle_strides = (T * heads * pairs, heads * pairs, pairs * (heads > 1))
    factors = 0 if x.beta is None else x.beta[0, 0, 0].numel()
    BK = max(2, power_of_2(K))
    BV = min(power_of_2(V), max(8, TILE // BK))
    with on_device_of(x.q):
        linear_recurrent_kernel[(B * H, cdiv(V, BV))](
            *dense, o, after, *gate_strides, *angle_strides, T, scale, H, G, K, V, BK, BV,
            1 if x.write is None else x.write.shape[2], x.log_decay is not None, x.log_diag is not None,
            x.angle is not None, factors, x.write is not None, x.valid is not None, x.state is not None, num_warps=4,
        )  # fmt: skip


recurrent_op = NamedOp("attnzoo::linear_recurrent", Recurrence, Continued, _recurrent, _recurrent_fake)
recurrent_in_place_op = NamedOp(
    "attnzoo::linear_recurrent_in_place", Recurrence, ContinuedInPlace, _in_place, _in_place_fake, ("state",)
)
