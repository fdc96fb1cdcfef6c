"""The gradient of attention's forward ops, which their backward ops compute."""

from __future__ import annotations

from typing import Any

import torch

from attnzoo.kernels.common.named_op import NamedOp


def attention_gradients(forward: NamedOp[Any, Any], backward: NamedOp[Any, Any], inputs: Any, wanted: Any) -> None:
    """Register the backward op as the gradient of the forward op; the gradient itself cannot be differentiated.

    Args:
        inputs: type of the backward op's, with do, dlse, given, made, deterministic, unrounded and wanted.
        wanted: type of these: names of the forward op's inputs that have a gradient. Those with a receiver ``to_NAME``
            get theirs there, unrounded, where a receiver's gradient is asked for.
    """
    operands = wanted._fields
    receivers = {name: f"to_{name}" for name in operands if f"to_{name}" in forward.inputs.names}

    def differentiate(x: Any, made: Any, grads: Any, asked: set[str]) -> dict[str, Any]:
        unrounded = not asked.isdisjoint(receivers.values())
        places = receivers if unrounded else {}
        needed = wanted(*[places.get(name, name) in asked for name in operands])
        if (grads.o is None and grads.row_lse is None) or not any(needed):
            return {}
        do = torch.zeros_like(made.o) if grads.o is None else grads.o
        # asked for before the forward or before the backward
        deterministic = x.deterministic or torch.are_deterministic_algorithms_enabled()
        found = backward(inputs(do, grads.row_lse, x.given, made, deterministic, unrounded, needed))
        return {places.get(name, name): grad for name, grad in zip(operands, found, strict=True)}

    saved = [name for name in forward.outputs.names if name != "row_lse"]
    forward.differentiable(differentiate, inputs=(*operands, "cu_seqlens"), outputs=saved)
    backward.refuse_second_derivatives()
