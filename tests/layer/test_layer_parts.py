"""The kernels of a layer's parts: which layers call them, and what they give beside PyTorch's parts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
from attnzoo import build_attention
from attnzoo.kernels import convolution, linear, norms
from attnzoo.layer import attention
from attnzoo.layer import products as layer_products
from attnzoo.layer.modules import HeadNorm
from attnzoo.models.generation.fused import fuse
from attnzoo.precision import GateAffine

HERE = "cuda" if torch.cuda.is_available() else "cpu"
D, T = 32, 21
# calls of the kernels in a forward: convolutions (one with a gradient), norms (of outputs, of q and k), log decays
CALLS: dict[str, tuple[int, int, int]] = {
    "mamba2": (3, 1, 1), "gated_deltanet": (3, 3, 1), "deltanet": (3, 3, 0), "kda": (3, 3, 1), "gla": (0, 1, 1),
    "gla, hgrn2": (0, 1, 1), "retnet": (0, 1, 0),
}  # fmt: skip


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel is called, by layers whose ``impl`` is "triton": their core runs on the reference."""
    count: Counter[str] = Counter()

    def heard(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            count[function.__name__] += 1
            return function(*given, **named)

        return call

    for package, name in (
        (convolution, "causal_convolution"),
        (norms, "head_norm"),
        (norms, "unit_vectors"),
        (linear, "log_decays"),
        (linear, "written_values"),
    ):
        monkeypatch.setattr(package, name, heard(getattr(package, name)))
    monkeypatch.setattr(attention, "chosen", lambda *given: "reference")
    return count


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """A layer on the kernels, and the same on PyTorch's parts."""
    torch.manual_seed(0)
    variant, _, block = name.partition(", ")
    attn = build_attention(variant, hidden_size=D, num_heads=2, block=block or None, **options).to(HERE)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    plain = copy.deepcopy(attn)
    attn.impl, plain.impl = "triton", "reference"
    return attn, plain


def rows(seed: int = 1) -> Tensor:
    return torch.randn(1, T, D, generator=torch.Generator().manual_seed(seed)).to(HERE)


def error(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).detach().norm() / exact.detach().norm().clamp(min=1e-6))


@pytest.mark.parametrize("name", CALLS)
def test_layers_call_the_kernels_for_their_parts(name: str, called: Counter[str]) -> None:
    """Also packed, padded and in pieces: the same values and gradients."""
    layers, x = pair(name), rows()
    borders, mask = torch.tensor([0, 10, 11, T], device=HERE), (torch.arange(T, device=HERE) > 4)[None]

    def outputs(attn: Any) -> list[Tensor]:
        y = attn(x)
        found = [y, *torch.autograd.grad(y.square().sum(), [p for p in attn.parameters() if p.requires_grad])]
        with torch.no_grad():
            cache = attn.new_cache()
            found += [attn(x, cu_seqlens=borders), attn(x, attention_mask=mask)]
            found.append(torch.cat([attn(piece, cache=cache) for piece in x.split([8, 1, 2, 10], 1)], 1))
        return found

    ours = outputs(layers[0])
    called["head_norm"] += 2 * called.pop("unit_vectors", 0)  # of queries and of keys
    names = ("causal_convolution", "head_norm", "log_decays")
    expected = Counter(dict(zip(names, (7 * n for n in CALLS[name]), strict=True)))
    expected["causal_convolution"] -= 2 if CALLS[name][0] else 0  # of the call with a gradient
    assert [called[name] for name in names] == [expected[name] for name in names]
    assert called["written_values"] == 7 * (name == "mamba2")
    called.clear()
    for x_, exact in zip(ours, outputs(layers[1]), strict=True):
        assert error(x_, exact) < 1e-5
    assert not called


@pytest.mark.parametrize(
    ("name", "options"),
    [("mamba2", {"conv_bias": True}), ("gated_deltanet", {}), ("kda", {"conv_activation": "identity"}),
     ("gated_deltanet", {"num_householder": 2})],
)  # fmt: skip
def test_short_convolutions_are_one_where_nothing_waits_for_one_of_them(
    name: str, options: dict[str, Any], called: Counter[str]
) -> None:
    """In a packed row too; a hook, a module of another kind or a frozen weight changes no number."""
    attn, plain = pair(name, **options)
    borders = torch.tensor([0, 10, 11, T], device=HERE)

    def outputs(layer: Any) -> list[Tensor]:
        y = layer(rows(), cu_seqlens=borders)
        return [y, *torch.autograd.grad(y.square().sum(), [p for p in layer.parameters() if p.requires_grad])]

    def same(convolutions: int) -> None:
        called.clear()
        ours = outputs(attn)
        assert called["causal_convolution"] == convolutions
        assert max(map(error, ours, outputs(plain))) < 1e-5

    same(1)
    for part in (attn.k_conv, attn.v_proj):
        hook = part.register_forward_hook(lambda module, given, made: None)
        same(3)
        hook.remove()
    for layer in (attn, plain):
        layer.q_conv.weight.requires_grad_(False)
        layer.v_proj.weight.requires_grad_(False)
    same(1)


def test_hooks_and_exchanged_modules_are_called(called: Counter[str]) -> None:
    attn, plain = pair("gated_deltanet")
    seen: list[Tensor] = []
    attn.output_norm.register_forward_hook(lambda module, given, made: seen.append(made))
    assert error(attn(rows()), plain(rows())) < 1e-5
    assert len(seen) == 1
    for layer in (attn, plain):
        layer.output_norm = nn.Identity()
    assert error(attn(rows()), plain(rows())) < 1e-5
    assert type(pair("gated_deltanet")[0].output_norm) is HeadNorm


@pytest.mark.parametrize(
    ("name", "thin"),
    [
        *((name, ("k_shift", "v_shift", "forget")) for name in ("fox, pro", "path_fox, pro")),
        ("gated_deltanet", ("dt", "beta")), ("kda", ("channel_down", "beta")),
    ],
)  # fmt: skip
def test_thin_maps_of_a_layer_are_one_product(
    name: str, thin: tuple[str, ...], called: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gates and both shifts; not where a hook waits, as those that shard a gate by itself. Others have one sum."""
    attn, plain = pair(name)
    made: list[tuple[str, ...]] = []

    def products(*given: Any) -> dict[str, Tensor]:
        made.append(tuple(found := layer_products.products(*given)))
        return found

    monkeypatch.setattr(attention, "products", products)
    ours, exact = (
        [y := layer(rows()), *torch.autograd.grad(y.square().sum(), [p for p in layer.parameters() if p.requires_grad])]
        for layer in (attn, plain)
    )
    wide = ["q", "k", "v"] if attn.q_conv is None else [layer_products.WHOLE]
    wide += ["output_gate"] if type(attn.output_gate) is nn.Linear else []
    assert [sorted(names) for names in made] == [sorted([*thin, *wide])]
    assert max(map(error, ours, exact)) < 1e-5
    expected = plain(rows())
    for part in (attn.gate if attn.k_shift is None else attn.k_shift.proj, attn.gate):
        seen: list[Tensor] = []
        hook = part.register_forward_hook(lambda module, given, out, seen=seen: seen.append(out))
        assert error(attn(rows()), expected) < 1e-5
        hook.remove()
        assert len(seen) == 1
    of_gate = {*thin} - {"k_shift", "v_shift"}
    for names, hooked in zip(made[1:], (of_gate if attn.k_shift is None else {"k_shift"}, of_gate), strict=True):
        assert not hooked & {*names}


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("name", ["fox, pro", "path_fox, pro", "path_fox", "gated_deltanet"])
def test_maps_that_were_exchanged_are_called_with_x_alone(name: str, impl: str, called: Counter[str]) -> None:
    """By linear layers, as adapters are put in, and by those that generation stacks."""
    attn, plain = pair(name)
    attn.impl = impl
    with torch.no_grad():
        expected = plain(rows())
        [stacked], made = fuse([attn], lambda: attn(rows()))
        assert made
        assert error(stacked(rows()), expected) < 1e-5
        for part in [module for module in attn.modules() if not isinstance(module, GateAffine)]:
            for place, one in [*part.named_children()]:
                if type(one) is GateAffine:
                    other = nn.Linear(one.in_features, one.out_features, one.bias is not None)
                    other.weight, other.bias = one.weight, one.bias
                    setattr(part, place, other)
        assert error(attn(rows()), expected) < 1e-5


def test_the_choice_of_a_layer_reaches_its_parts() -> None:
    attn, plain = pair("kda")
    assert {part.impl for part in attn.modules() if hasattr(part, "impl")} == {"triton"}
    assert {part.impl for part in plain.modules() if hasattr(part, "impl")} == {"reference"}


def test_the_parts_of_exported_programs_are_those_of_pytorch(called: Counter[str]) -> None:
    attn, _ = pair("deltanet")
    names = {str(node.target) for node in torch.export.export(attn, (rows(),)).graph.nodes}
    assert not called
    assert not any("convolution_forward" in name or "head_norm" in name for name in names)


@pytest.mark.parametrize(("name", "weights"), [("deltanet", "q_conv"), ("fox, pro", "k_shift.proj")])
def test_compiled_parts_give_the_same(name: str, weights: str, called: Counter[str]) -> None:
    """In one graph, with a gradient."""
    attn, plain = pair(name)
    compiled = torch.compile(attn._project, backend="eager", fullgraph=True)

    def gradients(layer: Any, project: Callable[..., Any]) -> tuple[Tensor, ...]:
        made = project(rows(), attention.Stream(None, None, (1, T), rows().device))
        leaves = [layer.q_proj.weight, layer.get_submodule(weights).weight]
        return torch.autograd.grad((made.q.exp() * made.k).sum(), leaves)

    found, exact = gradients(attn, compiled), gradients(plain, plain._project)
    assert max(map(error, found, exact)) < 1e-5
