"""Second derivatives: right where a form has them, refused in words of ours where a kernel has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, get, oracle
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.wall import wall_attention
from attnzoo.models.loss import head_loss
from attnzoo.samples import random_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("fox", "nope", "rope", "path", "path_fox", "wall")


def second(form: Callable[..., Tensor], name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gradients of the gradients' squares, with respect to q, k, v and the gate's parts."""
    q, k, v, gate = random_inputs(name, 1, 20, 2, 1, 16, 16, dtype=torch.float32, regime="open")
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v, *(getattr(gate, part) for part in gate.parts))]
    parts: dict[str, Any] = dict(zip(gate.parts, leaves[3:], strict=True))
    o = form(*leaves[:3], replace(gate, **parts) if parts else Gate())
    first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_refuse_second_derivatives(name: str) -> None:
    with pytest.raises(RuntimeError, match="first derivatives only.*expects impl='reference'"):
        second(get(name).forms["triton"], name, torch.float32)


def of_kernels(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """The reference of the function whose kernels compute this gate."""
    parts: dict[str, Any] = {part: getattr(gate, part) for part in gate.parts}
    if gate.w is not None:
        return cast(Tensor, path_attention(q, k, v, **parts, impl="reference"))
    if gate.log_diag is not None:
        return cast(Tensor, wall_attention(q, k, v, **parts, impl="reference"))
    return cast(Tensor, fox_attention(q, k, v, log_decay=gate.log_decay, impl="reference"))


@pytest.mark.parametrize("name", ["fox", "nope", "path", "path_fox", "wall"])
def test_the_reference_has_them(name: str) -> None:
    want = second(oracle.softmax, name, torch.float64)
    for x, y in zip(second(of_kernels, name, torch.float64), want, strict=True):
        assert (x - y).norm() < 1e-10 * y.norm()


def test_the_loss_in_chunks_has_them() -> None:
    leaves = [torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (12, 5)]
    targets = torch.arange(12) % 5

    def twice(limit: int) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(head_loss(*leaves, targets, limit), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)

    for x, y in zip(twice(20), twice(1000), strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()  # the logits are in float32
