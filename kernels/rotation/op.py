"""The rotation as two custom ops (forward, backward), with what compilers and autograd must know of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.values import records
from attnzoo.kernels.common.autograd import refuse_second_derivatives
from attnzoo.kernels.common.checks import traced
from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.rotation.turning import angle_gradient, blocks, phase_sums, turn_all

Some = Tensor | None


def forward(
    angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype, received: bool, balanced: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and w turned, the sums of the angles over blocks of tokens, and receivers of q, k and w.

    Empty where there are none. ``balanced`` is for the backward alone.
    """
    angle, empty = angle.contiguous(), angle.new_empty(0, dtype=torch.float32)
    xs = [x.contiguous() for x in (q, k, w) if x is not None]
    with on_device_of(q):
        sums = empty.double() if angle.ndim == 1 else phase_sums(angle)
        ys = turn_all(angle, sums, xs, (dtype, dtype, torch.float32)[: len(xs)], back=False)
    return ys[0], ys[1], empty if w is None else ys[2], sums, *_receivers(angle, q, k, w, received)


def _receivers(angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None, received: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 zeros of the shapes of q, k and w, without memory."""

    def like(x: Tensor | None) -> Tensor:
        if x is None or not received:
            return angle.new_empty(0, dtype=torch.float32)
        return angle.new_zeros((), dtype=torch.float32).expand(x.shape)

    return like(q), like(k), like(w)


forward_op = torch.library.custom_op("attnzoo::rotation_forward", forward, mutates_args=())


@forward_op.register_fake
def _forward_fake(
    angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype, received: bool, balanced: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape: tuple[Any, ...] = (0,)
    if angle.ndim == 4:
        (BA, T, HA, P) = angle.shape
        shape = (BA * HA, blocks(T, 2 * P) + 1, P)
    sums = angle.new_empty(shape, dtype=torch.float64)
    turned = angle.new_empty((0,) if w is None else w.shape, dtype=torch.float32)
    turned_q, turned_k = q.new_empty(q.shape, dtype=dtype), k.new_empty(k.shape, dtype=dtype)
    return turned_q, turned_k, turned, sums, *_receivers(angle, q, k, w, received)


@torch.library.custom_op("attnzoo::rotation_backward", mutates_args=())
def backward_op(
    angle: Tensor, sums: Tensor, q: Tensor, k: Tensor, w: Tensor | None, dq: Tensor, dk: Tensor, dw: Tensor | None,
    q_dtype: torch.dtype, k_dtype: torch.dtype, w_dtype: torch.dtype, of_angle: bool, balanced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the angles (empty unless ``of_angle``) and of q, k and w (empty without one) in their dtypes.

    Args:
        q, k, w: as they have turned; dq, dk, dw: their gradients.
    """
    angle = angle.contiguous()
    ys = [x for x in (q, k, w) if x is not None]
    dys = [x.contiguous() for x in (dq, dk, dw) if x is not None]
    with on_device_of(q):
        dangle = angle_gradient(angle, ys, dys, balanced) if of_angle else angle.new_empty(0)
        dxs = turn_all(angle, sums, dys, (q_dtype, k_dtype, w_dtype)[: len(dys)], back=True)
    return dangle, dxs[0], dxs[1], angle.new_empty(0, dtype=w_dtype) if w is None else dxs[2]


@backward_op.register_fake
def _backward_fake(
    angle: Tensor, sums: Tensor, q: Tensor, k: Tensor, w: Tensor | None, dq: Tensor, dk: Tensor, dw: Tensor | None,
    q_dtype: torch.dtype, k_dtype: torch.dtype, w_dtype: torch.dtype, of_angle: bool, balanced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dangle = angle.new_empty(angle.shape if of_angle else (0,))
    turned = angle.new_empty((0,) if w is None else w.shape, dtype=w_dtype)
    return dangle, q.new_empty(q.shape, dtype=q_dtype), k.new_empty(k.shape, dtype=k_dtype), turned


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    angle, q, k, w, _, ctx.received, ctx.balanced = inputs
    ctx.dtypes = (q.dtype, k.dtype, torch.float32 if w is None else w.dtype)
    turned_q, turned_k, turned_w, sums, *_ = output
    ctx.save_for_backward(angle, sums, turned_q, turned_k, None if w is None else turned_w)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Some) -> tuple[Some, ...]:
    angle, sums, *ys = ctx.saved_tensors
    of_angle = ctx.needs_input_grad[0]
    dys = grads[4:] if ctx.received else grads[:3]
    dys = tuple(None if y is None else torch.zeros_like(y) if dy is None else dy for y, dy in zip(ys, dys, strict=True))
    dangle, dq, dk, dw = backward_op(angle, sums, *ys, *dys, *ctx.dtypes, of_angle, ctx.balanced)
    return dangle if of_angle else None, dq, dk, None if ys[2] is None else dw, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup)
refuse_second_derivatives(backward_op)


def rotate_vectors(
    angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype, received: bool, balanced: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, tuple[Tensor, ...] | None]:
    """See :func:`attnzoo.kernels.rotation.rotate`."""
    learns = records(angle, q, k, w)
    op = forward_op if learns or traced(q) else forward
    *turned, sums, to_q, to_k, to_w = op(angle, q, k, w, dtype, received, balanced)
    if angle.ndim == 1:
        phase = (q.shape[1] * angle.detach().double())[None, None, None]
    else:
        phase = sums.detach()[:, -1].view(angle.shape[0], 1, *angle.shape[2:])
    turned_q, turned_k, turned_w = (x.detach() for x in turned) if received else turned
    receivers = (to_q, to_k) if w is None else (to_q, to_k, to_w)
    return turned_q, turned_k, None if w is None else turned_w, phase, receivers if received else None


__all__ = ["backward_op", "forward_op", "rotate_vectors"]
