"""What holds of every public function of attention by kernels: how it compiles, what it casts, what it spares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

Attention = Callable[..., Any]  # of tensors and options by name


def layer_of(attention: Attention, **options: Any) -> Attention:
    """A function of q, k, v and the gates by name, with more to compile around the kernels."""

    def layer(q: Tensor, **named: Tensor) -> Tensor:
        o: Tensor = attention(q * 2, **named, **options, impl="triton")
        return o + 1

    return layer


def results(attention: Attention, x: dict[str, Tensor]) -> list[Tensor]:
    """Output and gradients of a function of ``x`` by name, where ``do`` is the gradient of the output."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items() if name != "do"}
    o = attention(**leaves)
    return [o, *torch.autograd.grad(o, [*leaves.values()], x["do"])]


def assert_one_graph(layer: Attention, inputs: Iterable[dict[str, Tensor]]) -> None:
    """Compiled, it is one graph for inputs of all lengths, with the same results."""
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for x in inputs:
        assert all(map(torch.equal, results(compiled, x), results(layer, x)))
    assert counter.frame_count == 1


def assert_casts_operands_alone(attention: Attention, x: dict[str, Tensor], gates: dict[str, Tensor]) -> None:
    """Under autocast q, k and v are cast, and gates of any dtype are taken in float32."""
    with torch.autocast(x["q"].device.type, dtype=torch.float16):
        o = attention(x["q"], x["k"], x["v"], **gates, impl="triton")
    want = attention(*(x[n].half() for n in "qkv"), **{n: t.float() for n, t in gates.items()}, impl="triton")
    assert o.dtype == torch.float16
    assert torch.equal(o, want)


def assert_only_asked_for(attention: Attention, x: dict[str, Tensor], choices: Iterable[Iterable[str]]) -> None:
    """Inputs that require no gradient get none, and the others' numbers are those of all gradients.

    Args:
        choices: names of those that require one.
    """
    full: dict[str, Tensor] = {}
    for names in ([n for n in x if n != "do"], *choices):
        leaves = {n: t.detach().requires_grad_(n in names) for n, t in x.items() if n != "do"}
        attention(**leaves, impl="triton").square().sum().backward()
        grads = {n: t.grad for n, t in leaves.items() if t.grad is not None}
        assert grads.keys() == set(names)
        full = full or grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, full[name], rtol=1e-5, atol=1e-6)
