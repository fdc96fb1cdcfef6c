"""The number of keys that rows hold as two custom ops: one owns rows, the other keys, whose gradients it adds up."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.forgotten import tiled_keys
from attnzoo.kernels.common.launching import cdiv, retention_strides
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.retention import Rule, numbers_of
from attnzoo.kernels.retention.holding import retention_held_bwd_kernel, retention_held_kernel

Some = Tensor | None
BT = BS = 32


class HeldForward(NamedTuple):
    """Keys [B, T, G, 1 or 2] and their rule; [T] int32 the first key that a row sees, the first row that misses a
    key, or None."""

    keys: Tensor
    rule: Rule
    first: Some
    stop: Some


class Held(NamedTuple):
    """The output: what is still held of each key's retention, [B, T, G] float32."""

    held: Tensor


class HeldBackward(NamedTuple):
    """The gradient of the numbers [B, T, G], and the inputs."""

    dheld: Tensor
    given: HeldForward


class HeldGradient(NamedTuple):
    keys: Tensor


def _grid(x: HeldForward) -> tuple[int]:
    B, T, G, _ = x.keys.shape
    return (cdiv(T, BT) * B * G,)


def _forward(x: HeldForward) -> Held:
    B, T, G, kind = x.keys.shape
    held = x.keys.new_empty((B, T, G))
    with on_device_of(held):
        retention_held_kernel[_grid(x)](
            *tiled_keys(x.keys, x.rule, BS, held=True), held if x.first is None else x.first, held, T,
            numbers_of(x.rule, kind), G=G, KIND=kind, HAS_FIRST=x.first is not None, BT=BT, BS=BS, num_warps=4,
        )  # fmt: skip
    return Held(held)


def _backward(x: HeldBackward) -> HeldGradient:
    keys, dheld = x.given.keys, x.dheld.contiguous()
    (_, T, G, kind), stop = keys.shape, x.given.stop
    dkeys = keys.new_empty(keys.shape)
    with on_device_of(dkeys):
        retention_held_bwd_kernel[_grid(x.given)](
            keys, dheld if stop is None else stop, dheld, dkeys, T, numbers_of(x.given.rule, kind),
            *retention_strides(keys), G=G, KIND=kind, HAS_STOP=stop is not None, BT=BT, BS=BS, num_warps=8,
        )  # fmt: skip
    return HeldGradient(dkeys)


held_forward_op = NamedOp(
    "attnzoo::held_keys", HeldForward, Held, _forward, lambda x: Held(x.keys.new_empty(x.keys.shape[:3]))
)
held_backward_op = NamedOp(
    "attnzoo::held_keys_backward", HeldBackward, HeldGradient, _backward,
    lambda x: HeldGradient(x.given.keys.new_empty(x.given.keys.shape)),
)  # fmt: skip


def _differentiate(given: HeldForward, made: Held, grads: Held, wanted: set[str]) -> dict[str, Any]:
    return {} if grads.held is None else {"keys": held_backward_op(HeldBackward(grads.held, given)).keys}


held_forward_op.differentiable(_differentiate, inputs=("keys", "first", "stop"), outputs=())
held_backward_op.refuse_second_derivatives()
