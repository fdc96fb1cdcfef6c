"""The short convolution as two custom ops (forward, backward)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.convolution.convolving import convolve, convolve_bwd

Some = Tensor | None


class ConvolutionInputs(NamedTuple):
    """Inputs of the forward op, which :func:`attnzoo.kernels.convolution.causal_convolution` explains."""

    x: Tensor
    weight: Tensor
    bias: Some
    before: Some
    cu_seqlens: Some
    silu: bool


class Convolved(NamedTuple):
    y: Tensor


class ConvolutionBackward(NamedTuple):
    given: ConvolutionInputs
    dy: Tensor


class ConvolutionGradients(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Some
    before: Some


def _dense(x: ConvolutionInputs) -> ConvolutionInputs:
    """With weights, biases and borders side by side, as the kernels read them."""
    bias, cu = (None if one is None else one.contiguous() for one in (x.bias, x.cu_seqlens))
    return x._replace(weight=x.weight.contiguous(), bias=bias, cu_seqlens=cu)


def _forward(x: ConvolutionInputs) -> Convolved:
    with on_device_of(x.x):
        return Convolved(convolve(*_dense(x)))


def _forward_fake(x: ConvolutionInputs) -> Convolved:
    return Convolved(x.x.new_empty(x.x.shape))


def _backward(x: ConvolutionBackward) -> ConvolutionGradients:
    with on_device_of(x.dy):
        return ConvolutionGradients(*convolve_bwd(*_dense(x.given), x.dy))


def _backward_fake(x: ConvolutionBackward) -> ConvolutionGradients:
    like = (None if one is None else one.new_empty(one.shape) for one in x.given[:4])
    return ConvolutionGradients(*like)  # type: ignore[arg-type]


def _gradients(x: ConvolutionInputs, made: Convolved, grads: Convolved, wanted: set[str]) -> dict[str, Some]:
    return backward_op(ConvolutionBackward(x, grads.y))._asdict()


forward_op = NamedOp(
    "attnzoo::convolution_forward", ConvolutionInputs, Convolved, _forward, _forward_fake, replays=True, together=True
)
backward_op = NamedOp(
    "attnzoo::convolution_backward", ConvolutionBackward, ConvolutionGradients, _backward, _backward_fake, replays=True
)
forward_op.differentiable(_gradients, inputs=("x", "weight", "bias", "before", "cu_seqlens"), outputs=())
backward_op.refuse_second_derivatives()

__all__ = ["ConvolutionInputs", "backward_op", "forward_op"]
