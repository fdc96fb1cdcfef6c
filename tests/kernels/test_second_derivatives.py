"""Second and forward derivatives: right where a form has them, refused in words of ours where a kernel has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from thinning import in_long
from torch import Tensor
from torch.autograd import forward_ad

from attnzoo import Gate, get, oracle
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.wall import wall_attention
from attnzoo.models.loss import head_loss
from attnzoo.samples import random_inputs
from attnzoo.testing import block_sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("fox", "nope", "rope", "path", "path_fox", "wall")


def second(
    form: Callable[..., Any], name: str, dtype: torch.dtype, tokens: int = 20, regime: str = "open", **options: Any
) -> tuple[Tensor, ...]:
    """Gradients of the gradients' squares, with respect to q, k, v and the gate's parts."""
    q, k, v, gate = random_inputs(name, 1, tokens, 2, 1, 16, 16, dtype=torch.float32, regime=regime)
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v, *(getattr(gate, part) for part in gate.parts))]
    parts: dict[str, Any] = dict(zip(gate.parts, leaves[3:], strict=True))
    found = form(*leaves[:3], replace(gate, **parts) if parts else Gate(), **options)
    of = sum(x.square().sum() for x in (found if isinstance(found, tuple) else (found,)))
    first = torch.autograd.grad(cast(Tensor, of), leaves, create_graph=True)
    return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_refuse_second_derivatives(name: str) -> None:
    with pytest.raises(RuntimeError, match="first derivatives only.*expects impl='reference'"):
        second(get(name).forms["triton"], name, torch.float32)


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_refuse_forward_derivatives_in_compiled_code(name: str, transform: bool) -> None:
    """Where no gradient is recorded, torch's custom ops take them for 0."""
    q, k, v, gate = random_inputs(name, 1, 20, 2, 1, 16, 16, dtype=torch.float32, regime="open")
    q, k, v, gate = q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), gate.map(lambda x: x.to(DEVICE))

    def form(q: Tensor) -> Tensor:
        return cast(Tensor, get(name).forms["triton"](q, k, v, gate))

    def along(q: Tensor) -> Any:
        if transform:
            return torch.func.jvp(form, (q,), (q,))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(form(forward_ad.make_dual(q, q))).tangent

    torch._dynamo.reset()
    with pytest.raises((ValueError, NotImplementedError), match="cannot see through a kernel"):
        torch.compile(along, backend="eager")(q)


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


@pytest.mark.covering
@pytest.mark.parametrize(("tokens", "block"), [(1, None), (20, None), (20, 8), *in_long([], [(270, None)])])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "fox", "fox_rope"])
def test_parallel_forms_have_them(name: str, lse: bool, tokens: int, block: int | None) -> None:
    """In one block of rows, and in several: small ones of few tokens, usually."""
    for regime in ("open", "closed") if name == "fox" else ("open",):
        with block_sizes(block):
            want, found = (
                second(form, name, torch.float64, tokens, regime, return_lse=lse)
                for form in (oracle.softmax, get(name).forms["parallel"])
            )
        for x, y in zip(found, want, strict=True):
            assert (x - y).norm() < 1e-10 * max(y.norm(), 1e-3)


@pytest.mark.parametrize("tokens", [20, 270])
def test_a_query_computed_from_a_key_has_them(tokens: int) -> None:
    x = torch.randn(1, tokens, 2, 8, dtype=torch.float64, requires_grad=True)
    frozen = torch.randn(1, tokens, 2, 8, dtype=torch.float64)

    def twice(form: Callable[..., Tensor], name: str) -> Tensor:
        gate = Gate() if name == "nope" else Gate(log_decay=torch.full((1, tokens, 2), -0.01, dtype=torch.float64))
        k = x.sin()
        first = torch.autograd.grad(form(k * 2, k, frozen, gate).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    for name in ("nope", "fox"):
        want, found = (twice(form, name) for form in (oracle.softmax, get(name).forms["parallel"]))
        assert (found - want).norm() < 1e-10 * want.norm()


def test_the_loss_in_chunks_has_them() -> None:
    leaves = [torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (12, 5)]
    targets = torch.arange(12) % 5

    def twice(limit: int) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(head_loss(*leaves, targets, limit), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)

    for x, y in zip(twice(20), twice(1000), strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()  # the logits are in float32
