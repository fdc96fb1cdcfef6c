"""The rotation as two custom ops (forward, backward)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.algebra.values import records
from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.rotation.turning import angle_gradient, blocks, phase_sums, turn_all

Some = Tensor | None


class Vectors(NamedTuple):
    """q, k and w [B, T, heads, K] of one call, or their gradients; w is None without one."""

    q: Tensor
    k: Tensor
    w: Some


class Dtypes(NamedTuple):
    q: torch.dtype
    k: torch.dtype
    w: torch.dtype


class RotationInputs(NamedTuple):
    """Inputs of the forward op, whose arguments :func:`attnzoo.kernels.rotation.rotate` explains.

    Args:
        dtypes: of the gradients of q, k and w.
        balanced: for the backward alone.
    """

    angle: Tensor
    vectors: Vectors
    dtype: torch.dtype
    dtypes: Dtypes
    received: bool
    balanced: bool


class RotationOutputs(NamedTuple):
    """Vectors that have turned, sums of the angles over blocks of tokens where angles vary, receivers of gradients."""

    turned: Vectors
    sums: Some
    to_q: Some
    to_k: Some
    to_w: Some


class RotationBackward(NamedTuple):
    """Inputs of the backward op: what the forward has made, and the gradients of the vectors that have turned."""

    angle: Tensor
    sums: Some
    turned: Vectors
    grads: Vectors
    dtypes: Dtypes
    of_angle: bool
    balanced: bool


class RotationGradients(NamedTuple):
    angle: Some
    q: Tensor
    k: Tensor
    w: Some


def _forward(x: RotationInputs) -> RotationOutputs:
    angle, vectors = x.angle.contiguous(), [y for y in x.vectors if y is not None]
    with on_device_of(x.vectors.q):
        sums = None if angle.ndim == 1 else phase_sums(angle)
        dtypes = (x.dtype, x.dtype, torch.float32)[: len(vectors)]
        q, k, *w = turn_all(angle, sums, vectors, dtypes, back=False)
    return RotationOutputs(Vectors(q, k, w[0] if w else None), sums, *_receivers(x))


def _receivers(x: RotationInputs) -> tuple[Some, ...]:
    """Float32 zeros of the shapes of q, k and w, without memory, where they are asked for."""
    if not x.received:
        return None, None, None
    return tuple(None if y is None else x.angle.new_zeros((), dtype=torch.float32).expand(y.shape) for y in x.vectors)


def _forward_fake(x: RotationInputs) -> RotationOutputs:
    q, k, w = x.vectors
    sums = None
    if x.angle.ndim == 4:
        B, T, heads, P = x.angle.shape
        sums = x.angle.new_empty((B * heads, blocks(T, 2 * P) + 1, P), dtype=torch.float64)
    turned = None if w is None else w.new_empty(w.shape, dtype=torch.float32)
    vectors = Vectors(q.new_empty(q.shape, dtype=x.dtype), k.new_empty(k.shape, dtype=x.dtype), turned)
    return RotationOutputs(vectors, sums, *_receivers(x))


def _backward(x: RotationBackward) -> RotationGradients:
    angle, ys = x.angle.contiguous(), [y for y in x.turned if y is not None]
    dys = [dy for dy in x.grads if dy is not None]
    with on_device_of(x.turned.q):
        dangle = None
        if x.of_angle:
            dys = [dy.contiguous() for dy in dys]
            dangle = angle_gradient(angle, ys, dys, x.balanced)
        dq, dk, *dw = turn_all(angle, x.sums, dys, x.dtypes[: len(dys)], back=True)
    return RotationGradients(dangle, dq, dk, dw[0] if dw else None)


def _backward_fake(x: RotationBackward) -> RotationGradients:
    like = (None if y is None else y.new_empty(y.shape, dtype=t) for y, t in zip(x.turned, x.dtypes, strict=True))
    return RotationGradients(x.angle.new_empty(x.angle.shape) if x.of_angle else None, *like)  # type: ignore[arg-type]


def _gradients(x: RotationInputs, made: RotationOutputs, grads: RotationOutputs, wanted: set[str]) -> dict[str, Some]:
    """Gradients of a call's inputs from those of the receivers where there are any, else of the turned vectors."""
    given = (grads.to_q, grads.to_k, grads.to_w) if x.received else grads.turned
    dys = (
        None if y is None else torch.zeros_like(y) if dy is None else dy
        for y, dy in zip(made.turned, given, strict=True)
    )  # fmt: skip
    found = backward_op(RotationBackward(
        x.angle, made.sums, made.turned, Vectors(*dys), x.dtypes, "angle" in wanted, x.balanced  # type: ignore[arg-type]
    ))  # fmt: skip
    return found._asdict()


forward_op = NamedOp(
    "attnzoo::rotation_forward", RotationInputs, RotationOutputs, _forward, _forward_fake, replays=True
)
backward_op = NamedOp(
    "attnzoo::rotation_backward", RotationBackward, RotationGradients, _backward, _backward_fake, replays=True
)
forward_op.differentiable(_gradients, inputs=("angle",), outputs=("q", "k", "w", "sums"))
backward_op.refuse_second_derivatives()


def rotate_vectors(
    angle: Tensor, q: Tensor, k: Tensor, w: Some, dtype: torch.dtype, received: bool, balanced: bool
) -> tuple[Tensor, Tensor, Some, Tensor, tuple[Tensor, ...] | None]:
    """See :func:`attnzoo.kernels.rotation.rotate`."""
    dtypes = Dtypes(q.dtype, k.dtype, torch.float32 if w is None else w.dtype)
    given = RotationInputs(angle, Vectors(q, k, w), dtype, dtypes, received, balanced)
    learns = records(angle, q, k, w)
    turned, sums, *to = forward_op(given) if learns else forward_op.without_gradient(given, q)
    if sums is None:
        phase = (q.shape[1] * angle.detach().double())[None, None, None]
    else:
        phase = sums.detach()[:, -1].view(angle.shape[0], 1, *angle.shape[2:])
    if received:
        turned = Vectors(*(x if x is None else x.detach() for x in turned))  # type: ignore[arg-type]
    return *turned, phase, tuple(x for x in to if x is not None) if received else None


__all__ = ["Dtypes", "RotationInputs", "Vectors", "backward_op", "forward_op", "rotate_vectors"]
