"""Products of the same rows with several weights beside PyTorch's linear maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnzoo import build_attention
from attnzoo.layer import products as layer_products
from attnzoo.layer.attention import Attention
from attnzoo.layer.modules import TokenShift
from attnzoo.layer.products import WHOLE, _Products, products
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_products, "on_kernels", lambda *given: True)


def maps(**frozen: bool) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made = {
        "q": nn.Linear(6, 5, bias=False),
        "k": nn.Linear(6, 4, bias=False),
        "a": GateAffine(6, 2),
        "b": GateAffine(6, 3),
    }
    for name, one in made.items():
        one.requires_grad_(not frozen.get(name, False))
    return made


def test_products_and_their_first_and_second_derivatives() -> None:
    x, *weights = (torch.randn(n, 3, dtype=torch.float64).requires_grad_() for n in (4, 5, 2))
    assert torch.autograd.gradcheck(lambda *given: _Products.apply(given[0][:, None], *given[1:]), (x, *weights))
    assert torch.autograd.gradgradcheck(lambda *given: _Products.apply(given[0][:, None], *given[1:]), (x, *weights))


@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("used", [("q", "k", "a", "b"), ("k", "b")], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_products_of_maps_are_those_of_linear_maps(of_rows: bool, used: tuple[str, ...], autocast: bool) -> None:
    """Also where some weights are frozen and some products are not used."""
    found = []
    for whole in (True, False):
        made, x = maps(q=True), torch.randn(2, 3, 6).requires_grad_(of_rows)
        leaves = [p for one in made.values() for p in [one.weight] if p.requires_grad] + [x] * of_rows
        with torch.autocast("cpu", enabled=autocast):
            known = products(x, made, "triton") if whole else {n: F.linear(x, one.weight) for n, one in made.items()}
        assert {*known} == {*made}
        total = sum(known[name].float().square().sum() for name in used)
        found.append([*(known[n] for n in made), *torch.autograd.grad(total, leaves, allow_unused=True)])
    for a, b in zip(*found, strict=True):
        if a is None or b is None:  # thin maps are one product, of which a part may not be used
            assert all(one is None or not one.any() for one in (a, b))
        else:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-5)


def test_maps_that_are_more_than_a_weight_are_left_to_be_called() -> None:
    made, x = maps(), torch.randn(2, 3, 6)
    made |= {"v": nn.Linear(6, 4), "g": nn.Sequential(nn.Linear(6, 4, bias=False)), "h": nn.Linear(6, 4, bias=False)}
    made["h"].register_forward_hook(lambda *given: None)
    assert {*products(x, made, "triton")} == {"q", "k", "a", "b"}
    made["a"].register_forward_hook(lambda *given: None)
    assert {*products(x, made, "triton")} == {"q", "k", "b"}
    made["q"].forward = lambda x: -x  # type: ignore[method-assign]
    assert {*products(x, made, "triton")} == {"k", "b"}
    with torch.no_grad():
        assert products(x, made, "triton") == {}
        assert {*products(x, maps(), "triton")} == {"a", "b"}
    assert {*products(x.double(), maps(), "triton")} == set()


def test_a_hook_for_every_module_sees_all_maps() -> None:
    made, seen = maps(), list[nn.Module]()
    hooks: tuple[Any, ...] = (
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_forward_pre_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
        torch.nn.modules.module.register_module_full_backward_pre_hook,
    )
    for hook in hooks:
        handle = hook(lambda module, *given: seen.append(module))
        try:
            assert products(torch.randn(2, 3, 6), made, "triton") == {}
        finally:
            handle.remove()
    assert {*products(torch.randn(2, 3, 6), made, "triton")} == {*made}


def test_a_backward_pass_under_autocast_is_that_of_the_products_without() -> None:
    found = []
    for enabled in (True, False):
        made, x = maps(), torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()

        def squares(x: Tensor, made: dict[str, nn.Module] = made) -> Tensor:
            return torch.stack([y.square().sum() for y in products(x, made, "triton").values()]).sum()

        total = checkpoint(squares, x, use_reentrant=False)
        with torch.autocast("cpu", enabled=enabled):
            found.append(torch.autograd.grad(total, [x, *(one.weight for one in made.values())]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


class Doubled(TokenShift):
    """A shift of somebody's own, by another input."""

    def forward(self, x: Tensor, hidden: Tensor, stream: Stream, name: str) -> Tensor:
        return super().forward(x, 2 * hidden, stream, name)


def test_a_shift_of_ones_own_is_given_no_product_of_other_rows() -> None:
    layer = build_attention("fox", hidden_size=16, num_heads=2, block="pro")
    assert {"k_shift", "v_shift"} <= {*layer._maps_of(None)}
    layer.k_shift = Doubled(16, 2)
    assert {"k_shift", "v_shift"} & {*layer._maps_of(None)} == {"v_shift"}


class Wrapped(nn.Module):
    """A wrapper that hands on attributes of what it wraps, as those of FSDP and peft do."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.of, name)

    def forward(self, x: Tensor, *given: Any) -> Any:
        return self.of(x / 2, *given)


@pytest.mark.parametrize("name", ["fox", "path_fox", "gated_deltanet"])
def test_a_wrapped_gate_is_called_with_its_rows_alone(name: str) -> None:
    layer, x = build_attention(name, hidden_size=16, num_heads=2, block="pro"), torch.randn(1, 5, 16)
    if name == "gated_deltanet":
        layer.gate.members[0] = Wrapped(layer.gate.members[0])
    else:
        layer.gate = Wrapped(layer.gate)
    expected = layer.project(x.clone().requires_grad_()).gate
    layer._impl = "triton"  # of the products alone
    found = layer.project(x.clone().requires_grad_()).gate
    for part in expected.parts:
        torch.testing.assert_close(getattr(found, part), getattr(expected, part))


def test_a_wrapped_map_is_called_where_biases_come_apart() -> None:
    gate, x = build_attention("gla", hidden_size=16, num_heads=2).gate, torch.randn(1, 5, 16)
    gate.up = Wrapped(gate.up)
    logits, bias, *_ = gate.logits(x)
    assert bias is None
    torch.testing.assert_close(logits, gate.up(gate.down(x)))


class Halved(Attention):
    """A layer of somebody's own, whose q, k and v are of other rows than its gates."""

    def rows(self, x: Tensor, stream: Stream, mixed: Any = None) -> Any:
        return super().rows(x / 2, stream, mixed)


@pytest.mark.parametrize("name", ["fox", "mamba2"])
def test_a_subclass_that_gives_rows_of_its_own_is_given_no_product_of_others(name: str) -> None:
    layer, x = build_attention(name, hidden_size=16, num_heads=2), torch.randn(1, 5, 16).requires_grad_()
    layer.__class__ = Halved
    layer._impl, expected = "triton", layer.rows(x, Stream(None, None, (1, 5), x.device))
    seen = []
    layer.rows = lambda *given: seen.append(Halved.rows(layer, *given)) or seen[-1]
    layer.project(x)
    for a, b in zip(seen[0], expected, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_leaves_rows_in_float64_as_they_are() -> None:
    x, made = torch.randn(2, 3, 6).double(), {name: one.double() for name, one in maps().items()}
    with torch.autocast("cpu"):
        known = products(x.requires_grad_(), made, "triton")
        for name, y in known.items():
            assert torch.equal(y, F.linear(x, made[name].weight))
            assert y.dtype is torch.float64
    assert {*known} == {*made}
    with torch.autocast("cpu"):
        assert products(x, maps(), "triton") == {}


@pytest.mark.parametrize("gates", [("a", "b"), ("a",), ()], ids=str)
def test_compiled_maps_are_one_product_where_each_wide_one_begins_at_16_bytes(gates: tuple[str, ...]) -> None:
    """With the numbers of maps one by one, in rows that no compiler pads; where no gradient is recorded the weights of
    wide maps are not put together."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"q": 16, "k": 8, "v": 8, "odd": 5}
    made: dict[str, nn.Module] = {name: nn.Linear(6, n, bias=False) for name, n in sizes.items()}
    made |= {name: GateAffine(6, n) for name, n in (("a", 2), ("b", 8)) if name in gates}
    x, graphs = torch.randn(2, 3, 6).requires_grad_(), []

    def kept(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append([node.target for node in graph.graph.nodes].count(torch._C._nn.linear))
        return graph

    known = torch.compile(lambda x: products(x, made, "triton"), backend=kept, fullgraph=True)
    found = known(x)
    assert {*found} == {"q", "k", "v", *gates}
    assert graphs == [1]
    assert all(y.stride() == (3 * 64, 64, 1) and y.data_ptr() % 16 == 0 for y in (found[name] for name in "qkv"))
    leaves = [x, *(made[name].weight for name in found)]
    for name, y in found.items():
        torch.testing.assert_close(y, F.linear(x, made[name].weight))
    ours, plain = (
        torch.autograd.grad(sum(y.square().sum() for y in of.values()), leaves)
        for of in (found, {name: F.linear(x, made[name].weight) for name in found})
    )
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert {*known(x)} == ({"a", "b"} if len(gates) > 1 else set())


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_are_copied_for_one_product_only_where_autocast_does_so_or_they_are_few(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the gradient of the product, which holds the copy from the forward to the backward pass."""
    made = {name: nn.Linear(16, 8, bias=False) for name in ("q", "k", "v")}
    x = torch.randn(2, 3, 16).requires_grad_()

    def copied() -> bool:
        """Whether the weights of all three are held as one tensor."""
        torch._dynamo.reset()
        held: list[Tensor] = []

        def pack(y: Tensor) -> Tensor:
            held.append(y)
            return y

        def summed(x: Tensor) -> Any:
            known = products(x, {**made}, "triton", ("q", "k", "v"))
            return sum((known[WHOLE] if WHOLE in known else F.linear(x, made["q"].weight)).float().square().sum(-1))

        run: Any = torch.compile(summed, backend="aot_eager") if compiled else summed
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            run(x)
        return any(y.numel() == (64 if compiled else 3 * 8) * 16 for y in held)

    assert copied()
    monkeypatch.setattr(layer_products, "COPIED", 3 * 8 * 16 - 1)
    assert not copied()
    with torch.autocast("cpu"):
        assert copied()
    made["k"].half()
    monkeypatch.setattr(layer_products, "COPIED", 1 << 24)
    assert not copied()  # nor made one of two dtypes
