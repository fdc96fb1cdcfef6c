"""Ops that are declared by named tuples: names, what is not there, gradients by name, compilers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from named_ops import opcheck
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo.kernels.common import named_op
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.recording import recorders


class Factors(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0


class Product(NamedTuple):
    x: Tensor
    factors: Factors
    other: Factors | None
    keep: bool


class Result(NamedTuple):
    y: Tensor
    kept: Tensor | None


def product(given: Product) -> Result:
    y = given.factors.scale * given.x * given.factors.weight
    for factors in (given.factors, given.other):
        if factors is not None and factors.bias is not None:
            y = y + factors.bias
    return Result(y, y * 2 if given.keep else None)


def shapes(given: Product) -> Result:
    return Result(torch.empty_like(given.x), torch.empty_like(given.x) if given.keep else None)


seen: list[Any] = []


def gradient(given: Product, made: Result, grads: Result, wanted: set[str]) -> dict[str, Tensor]:
    seen[:] = [given, made, grads, wanted]
    dy = grads.y if grads.kept is None else 2 * grads.kept if grads.y is None else grads.y + 2 * grads.kept
    assert dy is not None
    factors = {"x": given.factors.weight, "weight": given.x}
    return {name: given.factors.scale * dy * factor for name, factor in factors.items() if name in wanted}


OP = NamedOp("attnzoo_tests::product", Product, Result, product, shapes)
OP.differentiable(gradient, inputs=("x", "weight"), outputs=("y",))


def inputs(other: bool = False, keep: bool = True) -> Product:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(3, 2, generator=generator) for _ in range(3))
    factors = Factors(weight.requires_grad_(), None, 0.5)
    return Product(x.requires_grad_(), factors, Factors(weight.detach(), bias) if other else None, keep)


def test_leaves_keep_their_names_and_the_second_of_a_name_gets_a_prefix() -> None:
    assert OP.inputs.names == ("x", "weight", "bias", "scale", "other_weight", "other_bias", "other_scale", "keep")
    assert [a.name for a in OP.op._schema.arguments] == list(OP.inputs.names)
    assert OP.outputs.names == ("y", "kept")


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_opcheck(other: bool, keep: bool) -> None:
    opcheck(OP, inputs(other, keep))


@pytest.mark.parametrize("other", [False, True])
def test_the_op_and_its_function_read_and_return_the_same(other: bool) -> None:
    given = inputs(other)
    plain, made = product(given), OP(given)
    assert all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))  # type: ignore[arg-type]
    assert OP(inputs(other, keep=False)).kept is None
    assert OP.without_gradient(given, given.x).y.grad_fn is not None  # the function itself: torch's own gradient


@pytest.mark.parametrize("frozen", [None, "x", "weight"])
def test_gradients_are_asked_for_and_given_by_name(frozen: str | None) -> None:
    given = inputs(other=True)
    leaves = {"x": given.x, "weight": given.factors.weight}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    made = OP(given)
    assert made.kept is not None
    (made.y.sum() + made.kept.sum()).backward()
    saved, results, grads, wanted = seen
    assert wanted == leaves.keys() - {frozen}
    assert saved.keep is True
    assert saved.factors.scale == 0.5
    assert saved.other is None or saved.other.weight is None  # a tensor that is not saved
    assert (results.y is not None, results.kept) == (True, None)
    for name, factor in (("x", given.factors.weight), ("weight", given.x)):
        got = leaves[name].grad
        assert (got is None) == (name == frozen)
        assert got is None or torch.equal(got, 1.5 * factor)


def test_an_output_that_nobody_uses_has_no_gradient() -> None:
    given = inputs()
    OP(given).y.sum().backward()
    assert seen[2].kept is None


def test_what_is_saved_has_a_name() -> None:
    with pytest.raises(ValueError, match=r"saved: expected names among \('x', 'weight', .*got 'weigth'"):
        OP.differentiable(gradient, inputs=("weigth",), outputs=())


def test_compiles_as_one_graph() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        made = OP(Product(x * 2, Factors(weight, None, 0.5), None, False))
        return made.y + 1 if made.kept is None else made.y

    x, weight = (torch.randn(4, 3).requires_grad_() for _ in range(2))
    got, want = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, weight), layer(x, weight)
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.sum(), (x, weight)) for y in (got, want)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Scaled(NamedTuple):
    x: Tensor
    by: float


class Scaling(NamedTuple):
    x: Tensor


def test_kernels_of_a_first_call_are_compiled_with_those_of_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a kind of calls, whatever the shapes; not where no gradient is recorded."""
    seen: list[str] = []

    def scaled(x: Scaled) -> Scaling:
        seen.append("compiled" if recorders.compiles else "run")
        return Scaling(x.x * x.by)

    def compile_together(run: Callable[[], object]) -> None:
        monkeypatch.setattr(recorders, "compiles", True)
        run()
        monkeypatch.setattr(recorders, "compiles", False)

    op = NamedOp(
        "attnzoo_tests::scaled", Scaled, Scaling, scaled, lambda x: Scaling(torch.empty_like(x.x)), together=True
    )
    op.differentiable(lambda x, made, grads, wanted: {"x": op(Scaled(grads.x, x.by)).x}, inputs=("x",), outputs=())
    monkeypatch.setattr(named_op, "compile_together", compile_together)
    for n, by, expected in ((3, 2.0, ["compiled", "compiled", "run", "run"]), (5, 2.0, ["run", "run"])):
        seen.clear()
        x = torch.ones(n, requires_grad=True)
        op(Scaled(x.detach(), by))
        assert seen == ["run"]
        seen.clear()
        assert torch.equal(torch.autograd.grad(op(Scaled(x, by)).x.sum(), x)[0], torch.full((n,), by))
        assert seen == expected


def test_calls_of_torchs_op_are_short_only_where_nothing_beside_them_is_looking() -> None:
    """As compiled code calls it; a mode sees the op itself, and a gradient is recorded by torch's own function."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    def double(given: Scaled) -> Scaling:
        frames.append(sys._getframe(1).f_back)
        return Scaling(given.x * given.by)

    watching: Any = Seen
    frames: list[Any] = []
    names: list[str] = []
    op = NamedOp(
        "attnzoo_tests::double", Scaled, Scaling, double, lambda x: Scaling(torch.empty_like(x.x)), replays=True
    )
    op.differentiable(lambda x, made, grads, wanted: {"x": grads.x * x.by}, inputs=("x",), outputs=())
    x = torch.ones(3, requires_grad=True)

    def ways() -> set[str]:
        """Which ways lie between the last call and the op's function: torch's own functions, and its dispatcher."""
        frame, found = frames[-1], set()
        while frame is not None and frame.f_code.co_filename != __file__:
            found |= {"torch's functions"} if frame.f_code.co_filename.endswith("custom_ops.py") else set()
            found |= {"dispatcher"} if frame.f_code.co_name == "seen" else set()
            frame = frame.f_back
        return found

    with torch.no_grad():
        assert torch.equal(op.op(x, 2.0), 2 * x)
        assert not ways()
        assert torch.equal(op.op(x=x, by=2.0), 2 * x)
        assert ways() == {"dispatcher"}
        with watching():
            op.op(x, 2.0)
    assert names[0] == "attnzoo_tests::double"
    made = op.op(x, 2.0)
    assert ways() == {"torch's functions", "dispatcher"}
    assert torch.equal(torch.autograd.grad(made.sum(), x)[0], torch.full((3,), 2.0))
    with FakeTensorMode() as mode, torch.no_grad():
        assert op.op(mode.from_tensor(x), 2.0).shape == (3,)
    assert {op.op: 1}[torch.ops.attnzoo_tests.double.default] == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_profiler_is_told_the_names_of_ops(compiled: bool, recorded: bool) -> None:
    def call(x: Tensor) -> Tensor:
        given = inputs()
        return OP(given._replace(x=x, factors=given.factors._replace(weight=given.factors.weight.detach()))).y

    x = torch.randn(3, 2, requires_grad=recorded)
    run = torch.compile(call, backend="aot_eager") if compiled else call
    run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run(x)
    assert "attnzoo_tests::product" in {event.name for event in found.events() or ()}
