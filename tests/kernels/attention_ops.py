"""What holds of every public function of attention by kernels, and of its dense reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from attnzoo import Prune
from attnzoo.algebra.oracle import softmax
from attnzoo.samples import Regime, random_inputs

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


def assert_broadcasts(attention: Attention, x: dict[str, Tensor], shared: str) -> None:
    """One key head seen as two by expand, and the stride-0 gradient of a sum.

    Args:
        shared: names of what key heads have.
    """
    leaves = {name: t.requires_grad_() for name, t in x.items() if name != "do"}

    def grads(heads: int) -> tuple[Tensor, ...]:
        wide = {n: t.expand(*t.shape[:2], heads, *t.shape[3:]) if n in shared.split() else t for n, t in leaves.items()}
        return torch.autograd.grad(attention(**wide, impl="triton").sum(), [*leaves.values()])

    torch.testing.assert_close(grads(2), grads(1), rtol=1e-4, atol=1e-5)


def assert_written_out(reference: Attention, name: str, T: int, regime: Regime) -> None:
    """Values and gradients of a dense reference are those of the variant's transitions, multiplied one by one."""
    q, k, v, gate = random_inputs(name, B=1, T=T, H=4, G=2, K=8, V=6, regime=regime)
    parts = {part: getattr(gate, part) for part in gate.parts}
    leaves = [x.requires_grad_() for x in (q, k, v, *parts.values())]
    results = [[o, *torch.autograd.grad(o.sin().sum(), leaves)]
               for o in (reference(q, k, v, **parts), softmax(q, k, v, gate))]  # fmt: skip
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def assert_share_kept(kept_fraction: Attention, x: dict[str, Tensor]) -> None:
    """The share of blocks that two heads keep is the reference's, or a little more where rounding prunes less."""
    given = {name: t for name, t in x.items() if name not in ("v", "do")}
    ours, dense = (kept_fraction(**given, prune=Prune(), scale=0.1, impl=impl) for impl in ("triton", "reference"))
    assert ours.shape == (1, 2)
    assert bool(((ours >= dense) & (ours <= dense + 0.1) & (dense < 1)).all())
    given["log_decay"] = torch.zeros_like(x["log_decay"])
    windows = []
    for impl in ("triton", "reference"):
        assert bool((kept_fraction(**given, prune=Prune(), impl=impl) == 1).all())
        windows.append(kept_fraction(**given, window=100, impl=impl))
    assert torch.equal(*windows)
    assert float(windows[0].max()) < 1
