"""The norms as two custom ops (forward, backward)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.norms.norming import norm, norm_bwd
from attnzoo.kernels.norms.parts import Gated, Skip

Some = Tensor | None


class NormInputs(NamedTuple):
    """Inputs of the forward op, which :func:`attnzoo.kernels.norms.head_norm` explains; H groups for each head."""

    x: Tensor
    weight: Some
    gate: Gated | None
    skip: Skip | None
    kind: str
    eps: float
    groups: int


class NormOutputs(NamedTuple):
    y: Tensor


class NormBackward(NamedTuple):
    given: NormInputs
    dy: Tensor


class NormGradients(NamedTuple):
    x: Tensor
    weight: Some
    logits: Some
    v: Some
    scale: Some


def _forward(x: NormInputs) -> NormOutputs:
    with on_device_of(x.x):
        return NormOutputs(norm(*x))


def _forward_fake(x: NormInputs) -> NormOutputs:
    return NormOutputs(x.x.new_empty(x.x.shape))


def _backward(x: NormBackward) -> NormGradients:
    with on_device_of(x.dy):
        return NormGradients(*norm_bwd(*x.given, x.dy))


def _backward_fake(x: NormBackward) -> NormGradients:
    of, gate, skip = x.given, x.given.gate, x.given.skip
    given = (of.x, of.weight, None if gate is None else gate.logits, *((None, None) if skip is None else skip))
    return NormGradients(*(None if one is None else one.new_empty(one.shape) for one in given))  # type: ignore[arg-type]


def _gradients(x: NormInputs, made: NormOutputs, grads: NormOutputs, wanted: set[str]) -> dict[str, Some]:
    return backward_op(NormBackward(x, grads.y))._asdict()


forward_op = NamedOp(
    "attnzoo::head_norm_forward", NormInputs, NormOutputs, _forward, _forward_fake, replays=True, together=True
)
backward_op = NamedOp(
    "attnzoo::head_norm_backward", NormBackward, NormGradients, _backward, _backward_fake, replays=True
)
forward_op.differentiable(_gradients, inputs=("x", "weight", "logits", "v", "scale"), outputs=())
backward_op.refuse_second_derivatives()


class UnitInputs(NamedTuple):
    """Inputs of the op of :func:`attnzoo.kernels.norms.unit_vectors`."""

    q: Tensor
    k: Tensor
    eps: float


class UnitVectors(NamedTuple):
    q: Tensor
    k: Tensor


class UnitBackward(NamedTuple):
    given: UnitInputs
    dq: Some
    dk: Some


class UnitGradients(NamedTuple):
    q: Some
    k: Some


def _units(x: UnitInputs) -> UnitVectors:
    with on_device_of(x.q):
        return UnitVectors(*(norm(y, None, None, None, "l2", x.eps, y.shape[2]) for y in x[:2]))


def _units_backward(x: UnitBackward) -> UnitGradients:
    given = x.given
    with on_device_of(given.q):
        return UnitGradients(*(
            None if dy is None else norm_bwd(y, None, None, None, "l2", given.eps, y.shape[2], dy)[0]
            for y, dy in ((given.q, x.dq), (given.k, x.dk))
        ))  # fmt: skip


units_op = NamedOp(
    "attnzoo::unit_vectors_forward", UnitInputs, UnitVectors, _units,
    lambda x: UnitVectors(x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape)), replays=True, together=True,
)  # fmt: skip
units_backward_op = NamedOp(
    "attnzoo::unit_vectors_backward", UnitBackward, UnitGradients, _units_backward,
    lambda x: UnitGradients(
        *(None if dy is None else y.new_empty(y.shape) for y, dy in ((x.given.q, x.dq), (x.given.k, x.dk)))
    ), replays=True,
)  # fmt: skip
units_op.differentiable(
    lambda x, made, grads, wanted: units_backward_op(UnitBackward(x, *grads))._asdict(), inputs=("q", "k"), outputs=()
)
units_backward_op.refuse_second_derivatives()

__all__ = ["NormInputs", "UnitInputs", "backward_op", "forward_op", "units_op"]
