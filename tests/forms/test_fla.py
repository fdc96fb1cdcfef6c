"""The forms on flash-linear-attention's kernels: their laws and budgets, and what they say where they do not serve.

Without a GPU its kernels run in Triton's interpreter, where bfloat16 is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from peer_kernels import HERE, interpret
from torch import Tensor

from attnzoo import Gate, build_attention, get, list_variants, oracle
from attnzoo.algebra.parts import PARTS
from attnzoo.forms.backends import fla, fla_delta
from attnzoo.forms.backends.fla import fla_unavailable
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.protocol import Call
from attnzoo.registry.table import PAIRS
from attnzoo.samples import Regime, random_inputs
from attnzoo.testing import Inputs, in_float64, leaves_of, relative_error

SERVED = [name for name in list_variants() if "fla" in get(name).forms]
DTYPE = torch.bfloat16 if HERE == "cuda" else torch.float16
EPS = torch.finfo(DTYPE).eps


def tied(inputs: Inputs) -> Inputs:
    """One key to erase along and to write: all that its delta rule computes."""
    q, k, v, gate = inputs
    if gate.w is None:
        return inputs
    w = gate.w.to(k.dtype)
    return q, w, v, replace(gate, w=w)


def rule(name: str) -> dict[str, bool]:
    """The option that its delta rule needs."""
    return {"delta_rule": True} if "w" in get(name).requires else {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA GPU serves the form")
@pytest.mark.parametrize("name", SERVED)
def test_fla_form_without_a_gpu_says_why(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"form 'fla': .*CUDA.*got cpu; use the 'chunk' form"):
        get(name).forms["fla"](*tied(random_inputs(name, dtype=torch.float32)), **rule(name))


@pytest.mark.parametrize(
    ("name", "K", "said"), [("mamba2", 300, ""), ("kda", 256, ""), ("kda", 258, "to 256, got 258")]
)
def test_delta_rules_of_wide_heads_are_refused(name: str, K: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    monkeypatch.setattr(fla, "INSTALLED", True)
    q, k, v, gate = random_inputs(name, 1, 2, 1, 1, K, 16, dtype=torch.float16)
    assert fla_unavailable(Call(q, k, v, gate, options=rule(name))) == (
        said and f"its delta-rule kernels take K up {said} (smaller heads)"
    )


@pytest.mark.parametrize(
    ("version", "said"), [("0.5.0", "0.6 or later, got 0.5.0"), ("0.6.0", ""), ("0.10", ""), ("", "")]
)
def test_versions_that_compute_otherwise_are_refused(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0 takes packed sequences beside an empty one for others."""
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    monkeypatch.setattr(fla, "INSTALLED", True)
    monkeypatch.setattr(fla, "OUTDATED", fla.outdated(version))
    q, k, v, gate = random_inputs("mamba2", 1, 2, 1, 1, 16, 16, dtype=torch.float16)
    why = fla_unavailable(Call(q, k, v, gate))
    assert why == (said and f"expected flash-linear-attention {said} (pip install -U 'attnzoo[fla]')")


@pytest.mark.parametrize(("version", "found"), [("3.3.1", ""), ("3.6.0", "3.6.0"), ("3.7.1+git1", ""), ("", "")])
def test_tritons_that_miscompile_are_known_by_their_version(version: str, found: str) -> None:
    """Of a package of another name none is known."""
    assert fla.miscompiling(version) == found


def test_what_triton_interprets_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    monkeypatch.setattr(fla, "INSTALLED", True)
    q, k, v, gate = random_inputs("mamba2", 1, 2, 1, 1, 16, 16, dtype=torch.bfloat16)
    assert fla_unavailable(Call(q, k, v, gate)).startswith("the Triton interpreter computes bfloat16 wrongly")


@pytest.mark.parametrize("name", [name for name in SERVED if "w" in get(name).requires])
def test_fla_delta_rule_refuses_another_erasing_key(name: str) -> None:
    inputs = random_inputs(name, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="erases along the key it writes, .*delta_rule=True"):
        get(name).forms["fla"](*inputs)
    with pytest.raises(ValueError, match="gate.w: expected k itself with delta_rule"):
        get(name).forms["fla"](*inputs, delta_rule=True)


def test_every_linear_variant_has_the_form() -> None:
    assert {pair.linear for pair in PAIRS} <= set(SERVED)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels run here."""
    interpret(monkeypatch)


def given(name: str, B: int, T: int, regime: Regime = "open", V: int = 16) -> Inputs:
    """In a dtype that its kernels take."""
    K = 64 if HERE == "cuda" else 16
    return of_width(name, B, T, K, V * K // 16, regime)


def of_width(name: str, B: int, T: int, K: int, V: int, regime: Regime = "open") -> Inputs:
    inputs = random_inputs(name, B, T, 2, 1, K, V, dtype=torch.float32, regime=regime)
    q, k, v = (x.to(HERE, DTYPE) for x in inputs[:3])
    return tied((q, k, v, inputs[3].map(lambda part: part.to(HERE))))


def through(name: str, form: str, inputs: Inputs, cuts: Sequence[int], **options: Any) -> dict[str, Tensor]:
    """Output, last state and the gradients of both in all inputs, by ``form`` over pieces that end at ``cuts``."""
    leaves = {part: x.detach().clone().requires_grad_() for part, x in leaves_of(inputs).items() if part != "w"}
    q, k, v = (leaves[part] for part in ("q", "k", "v"))
    gate = Gate(**{part: x for part, x in leaves.items() if part in PARTS}, w=k if inputs[3].w is not None else None)
    state, outputs, start = None, [], 0
    for stop in cuts:
        now = slice(start, stop)
        here = {key: x[:, now] if key == "valid" else x for key, x in options.items()}
        o, state = get(name).extend(
            q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, form=form, **here, **rule(name)
        )
        outputs.append(o)
        start = stop
    o = torch.cat(outputs, 1)
    if "valid" in options:
        o = o.masked_fill(~options["valid"][..., None, None], 0.0)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in (o, state.matrix)]
    grads = torch.autograd.grad([o, state.matrix], list(leaves.values()), weights)
    return {"o": o.detach(), "state": state.matrix.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_within_budget(got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """At most twice the error of the reference in the same precision, plus a band of eps."""
    assert got.keys() == exact.keys()
    for part, x in got.items():
        error, budget = relative_error(x, exact[part]), 2 * relative_error(plain[part], exact[part]) + 2 * EPS
        assert error <= budget, f"{part} off by {error:.2e}, budget {budget:.2e}"


def skip_where_refused(name: str, inputs: Inputs) -> None:
    reason = fla_unavailable(Call(*inputs, options=rule(name)))
    if reason:
        pytest.skip(reason)


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize(
    ("regime", "cuts"), [("open", [64]), ("open", [70, 71, 100]), ("mixed", [33, 70]), ("closed", [40])]
)
@pytest.mark.parametrize("name", SERVED)
def test_values_states_and_gradients_over_pieces(name: str, regime: Regime, cuts: list[int]) -> None:
    inputs = given(name, 2, cuts[-1], regime)
    skip_where_refused(name, inputs)
    exact = through(name, "reference", in_float64(inputs), cuts[-1:])
    assert_within_budget(through(name, "fla", inputs, cuts), through(name, "reference", inputs, cuts[-1:]), exact)


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize(("name", "regime"), [("mamba2", "mixed"), ("gated_deltanet", "open"), ("mamba3", "open")])
def test_a_scalar_decay_through_the_kernels_of_channels(
    name: str, regime: Regime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What trains where Triton miscompiles the kernels of a scalar decay; said once."""
    monkeypatch.setattr(fla, "_hopper", lambda q: True)
    monkeypatch.setattr(fla, "MISCOMPILING", "3.6.0")
    monkeypatch.setattr(fla_delta, "register", lambda: False)
    fla._warn.cache_clear()
    called: list[str] = []
    operation = fla._op
    monkeypatch.setattr(fla, "_op", lambda kernel, x, **gates: called.append(kernel) or operation(kernel, x, **gates))
    inputs = given(name, 2, 70, regime)
    exact, plain = (through(name, "reference", x, [70]) for x in (in_float64(inputs), inputs))
    assert_within_budget(through(name, "fla", inputs, [33, 70]), plain, exact)
    assert set(called) == {"chunk_kda" if "w" in get(name).requires else "chunk_gla"}
    assert [r.getMessage()[:26] for r in caplog.records].count("Triton 3.6.0 miscompiles f") == 1


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize("name", SERVED)
def test_padding_changes_nothing(name: str) -> None:
    """Left, right and inside, with NaN where no token is."""
    inputs, cuts = given(name, 3, 72), [50, 72]
    skip_where_refused(name, inputs)
    valid = torch.ones(3, 72, dtype=torch.bool, device=HERE)
    valid[0, :20], valid[1, 60:], valid[2, 30:55] = False, False, False
    exact = through(name, "reference", in_float64(inputs), cuts, valid=valid)
    plain = through(name, "reference", inputs, cuts, valid=valid)
    q, k, v, gate = inputs
    k = k.masked_fill(~valid[..., None, None], torch.nan)
    v = v.masked_fill(~valid[..., None, None], torch.nan)
    assert_within_budget(through(name, "fla", tied((q, k, v, gate)), cuts, valid=valid), plain, exact)


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", SERVED)
def test_packed_equals_separate(name: str, dtype: torch.dtype) -> None:
    q, k, v, gate = given(name, 1, 120, "mixed")
    run, ends = get(name).forms["fla"], ((0, 50), (50, 51), (51, 120))
    with torch.no_grad():
        borders = torch.tensor([0, 50, 51, 120], device=HERE, dtype=dtype)
        packed = run(q, k, v, gate, cu_seqlens=borders, **rule(name))
        alone = [run(q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), **rule(name)) for a, b in ends]
    assert relative_error(packed, torch.cat(alone, 1)) <= 2 * EPS


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize("name", SERVED)
def test_output_and_state_have_the_shape_and_dtype_of_the_reference(name: str) -> None:
    inputs = given(name, 2, 40, V=32)
    with torch.no_grad():
        (o, state), (plain, expected) = (
            get(name).extend(*inputs, form=form, **rule(name)) for form in ("fla", "reference")
        )
    assert (o.shape, o.dtype) == (plain.shape, plain.dtype)
    assert (state.matrix.shape, state.matrix.dtype, len(state)) == (expected.matrix.shape, torch.float32, 40)


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@torch.no_grad()
def test_one_decay_per_head_equals_the_same_for_each_token() -> None:
    """They run on different kernels; with a write strength, and a decay that closes a head."""
    q, k, v, _ = given("retnet", 2, 70)
    g, write = torch.tensor([-0.1, -torch.inf], device=HERE), torch.rand(2, 70, 1, device=HERE)
    run = get("retnet").forms["fla"]
    shared, each = (run(q, k, v, Gate(log_decay=x), write=write) for x in (g, g.expand(2, 70, 2)))
    assert relative_error(shared, each) <= EPS
    assert relative_error(shared, oracle.linear(*in_float64((q, k, v, Gate(log_decay=g))), write=write.double())) <= EPS


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize(
    ("name", "padded"),
    [("gated_deltanet", False), ("deltanet", True), ("kda", False), ("gla", True), ("retnet", False)],
)
def test_compiled_calls_of_several_lengths_are_one_graph(name: str, padded: bool) -> None:
    torch._dynamo.reset()
    run = torch.compile(get(name).forms["fla"], fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (40, 20):
        q, k, v, gate = inputs = given(name, 2, T)
        skip_where_refused(name, inputs)
        parts = {part: x.requires_grad_() for part, x in leaves_of(inputs).items() if part != "w"}
        valid = torch.arange(T, device=HERE) < torch.tensor([[T], [T - 9]], device=HERE) if padded else None
        found = [function(q, k, v, gate, valid=valid, **rule(name)) for function in (run, get(name).forms["fla"])]
        grads = [torch.autograd.grad(o.float().square().sum(), [*parts.values()]) for o in found]
        assert torch.equal(*found)
        assert all(map(torch.equal, *grads))


@pytest.mark.gpu
@pytest.mark.fla
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["gated_deltanet", "deltanet", "kda", "gla"])
def test_training_steps_of_a_compiled_layer_are_those_of_the_layer(name: str, mode: str) -> None:
    """First met, recorded and replayed, within a CUDA graph and without."""
    torch._dynamo.reset()
    layer = build_attention(name, hidden_size=256, num_heads=4).to(HERE, DTYPE)
    run = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(5):
        x, steps = torch.randn(2, 200, 256, device=HERE, dtype=DTYPE, requires_grad=True), []
        for function in (run, layer):
            torch.compiler.cudagraph_mark_step_begin()
            o = function(x)
            grads = torch.autograd.grad(o.float().square().sum(), [x, *layer.parameters()])
            steps.append([y.clone() for y in (o, *grads)])
        assert all(relative_error(a, b) <= 8 * EPS for a, b in zip(*steps, strict=True))


def in_plain_operations(name: str) -> fla.Operation:
    """What an operation of the peer computes, by the reference form."""

    def operation(x: fla.Prepared) -> tuple[Tensor, Tensor | None]:
        start = x.options["initial_state"]
        state = None if start is None else RecurrentState(start, 1)
        options = {"scale": x.options["scale"], "form": "reference", **rule(name)}
        gate = x.gate if x.gate.w is None else replace(x.gate, w=x.k)
        o, last = get(name).extend(x.q, x.k, x.v, gate, state, **options)
        return o, last.matrix

    return operation


@pytest.mark.parametrize(("K", "V"), [(16, 16), (16, 64), (64, 16), (24, 40)])
@pytest.mark.parametrize("name", [name for name in SERVED if "angle" not in get(name).requires])
def test_heads_of_more_channels_compute_the_same(name: str, K: int, V: int) -> None:
    """Values, states and gradients, from a state, with a scale and with the default one, which is of the own K."""
    q, k, v, gate = tied(random_inputs(name, 2, 70, 2, 2, K, V, dtype=torch.float64))
    leaves = [x.requires_grad_() for x in (q, k, v, *(getattr(gate, part) for part in gate.parts if part != "w"))]
    start = torch.randn(2, 2, K, V, dtype=torch.float64, requires_grad=True)
    for scale, state in ((None, None), (0.3, start)):
        options = {"scale": scale, "cu_seqlens": None, "initial_state": state, "output_final_state": True}
        x, operation = fla.Prepared(q, k, v, gate, options), in_plain_operations(name)
        found = operation(x), fla.widened(operation, x, 32)
        inputs = [*leaves, start] if state is not None else leaves
        grads = [torch.autograd.grad([y.square().sum() for y in both], inputs) for both in found]
        for a, b in zip((*found[0], *grads[0]), (*found[1], *grads[1]), strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.fla
@pytest.mark.parametrize(("K", "V"), [(16, 32), (32, 64), (64, 32)])
@pytest.mark.parametrize("name", SERVED)
def test_narrow_heads_within_budget(name: str, K: int, V: int) -> None:
    """Several times, with other kernels between: code that reads what another left may be right by chance."""
    inputs = of_width(name, 2, 200, K, V)
    skip_where_refused(name, inputs)
    exact, plain = (through(name, "reference", x, [200]) for x in (in_float64(inputs), inputs))
    for _ in range(3):
        assert_within_budget(through(name, "fla", inputs, [200]), plain, exact)
        torch.randn(512, 512, device=HERE, dtype=DTYPE) @ torch.randn(512, 512, device=HERE, dtype=DTYPE)


@pytest.mark.gpu
@pytest.mark.fla
def test_heads_of_whose_tiles_few_fit() -> None:
    """K=128 with V=256, as RetNet may have them: a backward kernel needs fewer stages than are usually best."""
    inputs = of_width("retnet", 1, 200, 128, 256)
    exact, plain = (through("retnet", "reference", x, [200]) for x in (in_float64(inputs), inputs))
    assert_within_budget(through("retnet", "fla", inputs, [200]), plain, exact)


@pytest.mark.gpu
@pytest.mark.fla
@pytest.mark.parametrize("name", SERVED)
def test_long_sequences_within_budget(name: str) -> None:
    inputs = given(name, 1, 1024)
    skip_where_refused(name, inputs)
    exact, plain = (through(name, "reference", x, [1024]) for x in (in_float64(inputs), inputs))
    found = through(name, "fla", inputs, [1024])
    for parts in (exact, plain, found):
        parts.pop("angle", None)  # the next test's: in its gradient the peer's dq and dk cancel, but not their errors
    assert_within_budget(found, plain, exact)


@pytest.mark.fla
@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize("name", [name for name in SERVED if "angle" in get(name).requires])
def test_an_angles_gradient_is_that_of_what_the_peer_returns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 from the peer's own dq and dk: nothing is added to their errors."""
    seen: dict[str, Tensor] = {}
    operation = fla._op

    def watched(kernel: str, x: fla.Prepared, **gates: Tensor) -> Any:
        for part, y in (("q", x.q), ("k", x.k)):
            seen[part] = y.detach().double()
            y.register_hook(lambda grad, part=part: seen.update({"d" + part: grad.double()}))
        return operation(kernel, x, **gates)

    monkeypatch.setattr(fla, "_op", watched)
    q, k, v, gate = inputs = given(name, 1, 1024 if HERE == "cuda" else 70)
    skip_where_refused(name, inputs)
    angle = cast(Tensor, gate.angle).requires_grad_()
    o = get(name).forms["fla"](q, k, v, gate, **rule(name))
    [got] = torch.autograd.grad(o, [angle], torch.randn(o.shape).to(o))
    turned = torch.zeros(())
    for part in ("q", "k"):
        (a, b), (da, db) = (seen[x].unflatten(-1, (-1, 2)).unbind(-1) for x in (part, "d" + part))
        turned = a * db - b * da + turned.to(a)  # the gradient of a phase, [B, T, H, K / 2]
    expected = turned.flip(1).cumsum(1).flip(1)
    expected = expected if angle.shape[2] > 1 else expected.sum(2, keepdim=True)
    assert relative_error(got, expected) <= EPS / 4
