"""Values times their write strengths, as two custom ops and their kernels: a program has BR values of V channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, head_block, side_by_side
from attnzoo.kernels.common.named_op import NamedOp


@launched
@triton.jit(do_not_specialize=["T", "ROWS"])
def written_values_kernel(
    p_v, p_write, p_dy, p_y, p_dwrite, T, ROWS, stride_b, stride_t, stride_db, stride_dt,
    H: tl.constexpr, V: tl.constexpr, BACK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """y, or BACK the gradients of v (as y) and of the strengths. The heads of a token of v and dy lie side by side."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    m_r = o_r < ROWS
    m_rv = m_r[:, None] & (o_v < V)[None, :]
    o_b, o_t = o_r // H // T, o_r // H % T
    o_hv = (o_r % H * V)[:, None] + o_v[None, :]
    b_write = tl.load(p_write + o_r, mask=m_r, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + (o_b * stride_b + o_t * stride_t)[:, None] + o_hv, mask=m_rv, other=0.0).to(tl.float32)
    if BACK:
        b_dy = tl.load(p_dy + (o_b * stride_db + o_t * stride_dt)[:, None] + o_hv, mask=m_rv, other=0.0).to(tl.float32)
        tl.store(p_dwrite + o_r, tl.sum(b_dy * b_v, 1).to(p_dwrite.dtype.element_ty), mask=m_r)
        b_v = b_dy
    tl.store(p_y + o_r[:, None] * V + o_v[None, :], (b_v * b_write[:, None]).to(p_y.dtype.element_ty), mask=m_rv)


class WriteInputs(NamedTuple):
    v: Tensor
    write: Tensor


class WriteOutputs(NamedTuple):
    y: Tensor


class WriteBackward(NamedTuple):
    v: Tensor
    write: Tensor
    dy: Tensor


def _launch(v: Tensor, write: Tensor, dy: Tensor | None, dwrite: Tensor) -> Tensor:
    v, write, back = side_by_side(v), write.contiguous(), dy is not None
    dy = v if dy is None else side_by_side(dy)
    y, (_, T, H, V), ROWS = torch.empty(v.shape, dtype=v.dtype, device=v.device), v.shape, write.numel()
    BV = head_block(V)
    BR = max(1, 2048 // BV)
    with on_device_of(v):
        written_values_kernel[(cdiv(ROWS, BR),)](
            v, write, dy, y, dwrite, T, ROWS, *v.stride()[:2], *dy.stride()[:2], H, V, back, BR, BV, num_warps=4
        )
    return y


def _forward(x: WriteInputs) -> WriteOutputs:
    return WriteOutputs(_launch(x.v, x.write, None, x.write))


def _backward(x: WriteBackward) -> WriteInputs:
    dwrite = torch.empty(x.write.shape, dtype=x.write.dtype, device=x.v.device)
    return WriteInputs(_launch(x.v, x.write, x.dy, dwrite), dwrite)


def _backward_fake(x: WriteBackward) -> WriteInputs:
    return WriteInputs(x.v.new_empty(x.v.shape), x.write.new_empty(x.write.shape))


forward_op = NamedOp(
    "attnzoo::written_values_forward", WriteInputs, WriteOutputs, _forward,
    lambda x: WriteOutputs(x.v.new_empty(x.v.shape)), replays=True, together=True,
)  # fmt: skip
backward_op = NamedOp(
    "attnzoo::written_values_backward", WriteBackward, WriteInputs, _backward, _backward_fake, replays=True
)
forward_op.differentiable(
    lambda x, made, grads, wanted: backward_op(WriteBackward(*x, grads.y))._asdict(), inputs=("v", "write"), outputs=()
)
backward_op.refuse_second_derivatives()
