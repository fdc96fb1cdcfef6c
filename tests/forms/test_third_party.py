"""Forms from outside the package: whoever keeps the contract of attnzoo.forms.protocol is served by the layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo.layer.dispatch
from attnzoo import Gate, Pair, build_attention, describe, doctor, get, register
from attnzoo.algebra.transitions import Identity
from attnzoo.errors import UnavailableError
from attnzoo.forms.linear import LinearForms
from attnzoo.forms.protocol import Call, FormSet, Kernel
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.layer.gates.decay import ForgetGate
from attnzoo.registry import unregister
from attnzoo.testing import relative_error

NAMES = ("their_linear", "their_softmax")
asked: list[str] = []


def counting(reference: Any, side: str) -> Kernel:
    """A kernel of a third party that computes what the reference does, and remembers that it was asked."""

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None) -> Tensor:
        asked.append(f"{side} run")
        return reference.forms["parallel"](q, k, v, gate, scale=scale)

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any, *, scale: float | None = None
    ) -> tuple[Tensor, Any]:
        asked.append(f"{side} extend")
        return reference.extend(q, k, v, gate, state, scale=scale)

    def refuses(call: Call) -> str:
        return "it takes at most 9 tokens" if call.q.shape[1] > 9 else ""

    return Kernel(run, extend if side == "softmax" else None, refuses)


class Bare:
    """The protocol without any of our classes; the state is a list of tokens' inputs."""

    def __init__(self) -> None:
        self.theirs = SoftmaxForms(Identity())
        self.forms = {"parallel": self.theirs.parallel, "triton": self.triton}

    def triton(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        asked.append("bare run")
        return self.theirs.parallel(q, k, v, gate, **options)

    def options(self, form: str) -> tuple[str, ...]:
        return ("scale",)

    def refuses(self, form: str, call: Call) -> str:
        return "" if set(call.options) <= {"scale"} else "it takes no options"

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any = None, *, form: str = "reference", **options: Any
    ) -> tuple[Tensor, Any]:
        asked.append(f"bare extend by {form}")
        return self.theirs.extend(q, k, v, gate, state, **options)


def module(name: str, forms: Any, **more: Any) -> ModuleType:
    made = ModuleType(name)
    if forms is not None:
        made.FORMS = forms
    vars(made).update({"LAYER": {"gate": "forget"}, **more})
    return made


def registered(linear: Any, softmax: Any) -> Pair:
    sys.modules |= {name: module(name, forms) for name, forms in zip(NAMES, (linear, softmax), strict=True)}
    pair = Pair(*NAMES, ("log_decay",), "g", "I", linear_module=NAMES[0], softmax_module=NAMES[1])
    register(pair)
    return pair


@pytest.fixture
def theirs() -> Iterator[None]:
    asked.clear()
    linear = LinearForms(Identity(), kernels={"triton": counting(get("mamba2"), "linear")})
    softmax = SoftmaxForms(Identity(), kernels={"triton": counting(get("fox"), "softmax")})
    pair = registered(linear, softmax)
    yield
    unregister(pair)
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` looks for kernels as it does on a GPU."""
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: True)


def layers(name: str, impl: str) -> tuple[Any, Any]:
    """The same layer on the reference and on ``impl``."""
    made = [build_attention(name, hidden_size=16, num_heads=2, impl=i).double() for i in ("reference", impl)]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


@pytest.mark.usefixtures("theirs", "gpu")
@pytest.mark.parametrize("impl", ["triton", "auto"])
@pytest.mark.parametrize(("name", "side"), [(NAMES[0], "linear"), (NAMES[1], "softmax")])
def test_a_triton_form_of_theirs_serves_the_layer(name: str, side: str, impl: str) -> None:
    assert isinstance(get(name).module.FORMS, FormSet)
    reference, kernel = layers(name, impl)
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    assert relative_error(kernel(x), reference(x)) <= 1e-12
    assert asked == [f"{side} run"]


@pytest.mark.usefixtures("theirs", "gpu")
def test_their_cached_steps_go_on_from_any_form() -> None:
    """Steps by kernel and by reference over one cache: a prefill that the kernel refuses runs on the reference."""
    reference, kernel = layers(NAMES[1], "auto")
    x = torch.randn(1, 14, 16, dtype=torch.float64)
    cache = kernel.new_cache()
    pieces = [kernel(x[:, start:stop], cache=cache) for start, stop in ((0, 10), (10, 11), (11, 14))]
    assert relative_error(torch.cat(pieces, 1), reference(x)) <= 1e-12
    assert asked == ["softmax extend"] * 2


@pytest.mark.usefixtures("theirs", "gpu")
def test_what_theirs_refuses_is_said_and_auto_falls_back() -> None:
    x = torch.randn(1, 10, 16, dtype=torch.float64)
    for name in NAMES:
        _, kernel = layers(name, "triton")
        with pytest.raises(RuntimeError, match="impl='triton': it takes at most 9 tokens; use impl='auto'"):
            kernel(x)
        reference, auto = layers(name, "auto")
        assert torch.equal(auto(x), reference(x))
        with pytest.raises(RuntimeError, match=r"the triton form has no option valid here \(it takes scale\)"):
            kernel(x[:, :4], attention_mask=torch.tensor([[0, 1, 1, 1]]))
    _, kernel = layers(NAMES[0], "triton")
    with pytest.raises(RuntimeError, match="the triton form serves whole sequences and keeps no state"):
        kernel(x[:, :3], cache=kernel.new_cache())
    with pytest.raises(ValueError, match=r"form: expected one that keeps a state \(reference\), got 'triton'"):
        get(NAMES[0]).extend(*(torch.zeros(1, 1, 1, 2),) * 3, Gate(log_decay=torch.zeros(1)), form="triton")
    assert asked == []


@pytest.mark.usefixtures("gpu")
def test_the_protocol_is_enough() -> None:
    asked.clear()
    pair = registered(Bare(), Bare())
    try:
        reference, kernel = layers(NAMES[1], "auto")
        x = torch.randn(1, 5, 16, dtype=torch.float64)
        assert torch.equal(kernel(x), reference(x))
        cache = kernel.new_cache()
        kernel(x, cache=cache)
        assert asked == ["bare run", "bare extend by triton"]
        with pytest.raises(UnavailableError, match="no form of 'their_softmax' serves this call: it takes no options"):
            kernel(x, attention_mask=torch.arange(5)[None] > 1)
        with pytest.raises(TypeError, match="'parallel' of 'their_softmax' .* 'window': it takes scale"):
            get(NAMES[1]).forms["parallel"](*(torch.zeros(1, 1, 1, 2),) * 3, Gate(log_decay=torch.zeros(1)), window=1)
    finally:
        unregister(pair)


def test_the_doctor_says_what_their_forms_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    pair = registered(Bare(), Bare())
    try:
        monkeypatch.setattr(doctor, "list_variants", lambda side=None: [] if side else [NAMES[1], "nope"])
        rows = {(row.variant, row.when): row for row in doctor.examine().rows}
        padded = rows[NAMES[1], "padded training"]
        assert (padded.form, padded.why[-1]) == ("nothing", "reference: it takes no options")
        assert rows[NAMES[1], "training"].form == rows["nope", "padded training"].form == "reference"
    finally:
        unregister(pair)


def test_forms_of_other_names_serve_a_layer_by_what_continues_a_state() -> None:
    forms = Bare()
    forms.forms = {"scan": forms.theirs.parallel}
    pair = registered(forms, Bare())
    try:
        attn, x = build_attention(NAMES[0], hidden_size=16, num_heads=2).double(), torch.randn(1, 5, 16).double()
        assert torch.equal(attn(x), attn(x, cache=attn.new_cache()))
    finally:
        unregister(pair)


def test_a_gate_of_their_own_is_shown_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class TheirGate(ForgetGate):
        """g_t of their own."""

    monkeypatch.setitem(get("fox").module.LAYER, "gate", TheirGate)
    assert "gate=TheirGate: g_t of their own." in describe("fox")


@pytest.mark.parametrize("missing", ["forms", "options", "refuses", "extend"])
def test_what_a_module_lacks_is_named(missing: str) -> None:
    members: Mapping[str, Any] = {name: lambda: None for name in ("forms", "options", "refuses", "extend")}
    partial = type("Partial", (), {name: x for name, x in members.items() if name != missing})()
    pair = registered(partial, None)
    try:
        with pytest.raises(TypeError, match=rf"their_linear.FORMS: expected a {missing} \(attnzoo.forms.protocol\)"):
            get(NAMES[0])
        with pytest.raises(TypeError, match="their_softmax: expected an object FORMS"):
            get(NAMES[1])
    finally:
        unregister(pair)
