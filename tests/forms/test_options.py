"""Laws of the keyword options: windows, sinks, log-sum-exps, write strengths and packed sequences, in every form."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from thinning import given_variant
from torch import Tensor

import attnzoo.forms.rowblocks
from attnzoo import Gate, Prune, get, list_variants, oracle
from attnzoo.samples import random_inputs
from attnzoo.testing import (
    CPU_FORMS,
    LIMIT,
    Case,
    assert_close,
    block_sizes,
    cases,
    cut_points,
    extend_in_segments,
    relative_error,
    value_and_gradients,
)

SOFTMAX, LINEAR = list_variants("softmax"), list_variants("linear")
FORMS = [(name, form) for name in list_variants() for form in get(name).forms if form in CPU_FORMS]
SOFTMAX_FORMS = [(name, form) for name in SOFTMAX for form in ("recurrent", "parallel", "extend")]


def run_of(name: str, form: str) -> Callable[..., Any]:
    """A form of the softmax side, or its ``extend`` from an empty state."""
    if form == "extend":
        return lambda *inputs, **options: get(name).extend(*inputs, **options)[0]
    return get(name).forms[form]


def with_lse(run: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """o and lse of a form side by side, as one tensor."""

    def side_by_side(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        o, lse = run(q, k, v, gate, return_lse=True, **options)
        return torch.cat([o, lse[..., None]], -1)

    return side_by_side


# windows, sinks and log-sum-exps


@pytest.mark.parametrize("name", SOFTMAX)
@given_variant(data=st.data())
def test_window_sink_and_lse_equal_oracle(name: str, data: st.DataObject) -> None:
    """In all forms, values and gradients, those of the log-sum-exp and of the sink among them."""
    case = data.draw(cases(name, max_t=30))
    window = data.draw(st.one_of(st.none(), st.integers(1, case.T + 2)), label="window")
    sink = data.draw(st.sampled_from((None, 0.0, -3.0, 4.0)), label="sink")
    forms = ("parallel", "recurrent")
    sinks = None if sink is None else sink + torch.linspace(-1, 1, case.H, dtype=torch.float64)
    options = {
        "window": window,
        "scale": case.scale,
        "softcap": data.draw(st.sampled_from((None, 0.9)), label="softcap"),
    }

    def on(run: Callable[..., Any]) -> dict[str, Tensor]:
        leaf = None if sinks is None else sinks.clone().requires_grad_()
        got = value_and_gradients(with_lse(run, sink=leaf, **options), case.inputs())
        if leaf is not None:
            o = with_lse(run, sink=leaf, **options)(*case.inputs())
            cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=o.dtype)
            got["sink"] = torch.autograd.grad(o, leaf, cotangent)[0]
        return got

    expected = on(oracle.softmax)
    with case.blocks():
        for form in forms:
            assert_close(on(case.variant.forms[form]), expected, what=f"{form}, {options}, sink {sink} of {case}")


def test_gradient_that_cancels_for_every_token_is_zero_to_its_rounding() -> None:
    """A row that sees itself alone has the same angle on both sides; 50 tokens share it, each with its suffix."""
    case = Case("fox_rope", T=25, H=1, G=1, K=2, V=3, block=4, shared_angle=True)
    expected = value_and_gradients(with_lse(oracle.softmax, window=1), case.inputs())
    assert not expected["angle"].any()
    for form in ("parallel", "recurrent"):
        assert_close(value_and_gradients(with_lse(case.variant.forms[form], window=1), case.inputs()), expected)


@pytest.mark.parametrize("name", SOFTMAX)
@given_variant(data=st.data())
def test_segmented_equals_full_with_window_and_sink(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, max_t=24))
    cuts, window = data.draw(cut_points(case.T)), data.draw(st.integers(1, case.T))
    options = {"window": window, "sink": torch.linspace(-1, 1, case.H, dtype=torch.float64), "return_lse": True}
    q, k, v, gate = case.inputs()
    with case.blocks():
        (whole, lse), _ = case.variant.extend(q, k, v, gate, **options)
        state, outputs = None, []
        for start, stop in itertools.pairwise(cuts):
            now = slice(start, stop)
            o, state = case.variant.extend(q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, **options)
            outputs.append(o)
    got = {"o": torch.cat([o for o, _ in outputs], 1), "lse": torch.cat([lse for _, lse in outputs], 1)}
    assert_close(got, {"o": whole, "lse": lse}, what=f"cuts {cuts}, window {window} of {case}")


@pytest.mark.parametrize(("name", "form"), SOFTMAX_FORMS)
def test_window_of_one_is_the_value_itself(name: str, form: str) -> None:
    q, k, v, gate = random_inputs(name)
    o = run_of(name, form)(q, k, v, gate, window=1)
    assert relative_error(o, v.repeat_interleave(2, 2)) <= 1e-15


@pytest.mark.parametrize(("name", "form"), SOFTMAX_FORMS)
def test_window_as_long_as_the_text_is_none(name: str, form: str) -> None:
    inputs, run = random_inputs(name), run_of(name, form)
    assert torch.equal(run(*inputs, window=24), run(*inputs))
    assert torch.equal(run(*inputs, window=10**6), run(*inputs))


@pytest.mark.parametrize(("name", "form"), SOFTMAX_FORMS)
def test_sink_of_minus_infinity_is_none(name: str, form: str) -> None:
    def with_none(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        return run(q, k, v, gate, sink=torch.full((4,), -torch.inf, dtype=torch.float64))

    inputs, run = random_inputs(name), run_of(name, form)
    assert_close(value_and_gradients(with_none, inputs), value_and_gradients(run, inputs), 1e-14)


@pytest.mark.parametrize("name", SOFTMAX)
def test_a_huge_sink_takes_everything(name: str) -> None:
    inputs = random_inputs(name)
    o, lse = get(name).forms["parallel"](*inputs, sink=torch.full((4,), 1e4, dtype=torch.float64), return_lse=True)
    assert float(o.abs().max()) == 0.0
    assert bool((lse == 1e4).all())


@pytest.mark.parametrize("regime", ["mixed", "open", "closing", "closed"])
@pytest.mark.parametrize("name", ["nope", "fox", "rope"])
def test_lse_past_the_largest_row_block(name: str, regime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fused row blocks: the gradient of the log-sum-exp takes a channel beside the V = 8 of the values."""
    H = 3
    inputs = random_inputs(name, 1, 700, H, 1, 6, 8, regime=regime)
    form = with_lse(get(name).forms["parallel"], sink=torch.linspace(-1, 1, H, dtype=torch.float64))
    with monkeypatch.context() as patched:  # plain blocks of all keys, in the backward pass, too
        patched.setattr(attnzoo.forms.rowblocks, "readable", lambda x: False)
        expected = value_and_gradients(form, inputs)
    assert_close(value_and_gradients(form, inputs), expected)


def test_plain_row_blocks_stand_in_where_pytorch_lacks_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs("fox", 1, 400, 2, 1, 8, 8, regime="open")
    expected = value_and_gradients(get("fox").forms["parallel"], inputs)
    monkeypatch.setattr(attnzoo.forms.rowblocks, "_forward", None)
    assert_close(value_and_gradients(get("fox").forms["parallel"], inputs), expected)


@pytest.mark.parametrize("name", SOFTMAX)
def test_windows_cost_what_they_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block of rows multiplies with keys that lie before its window."""
    seen: list[int] = []
    kept = attnzoo.forms.rowblocks.block_bias

    def bias(decays: Tensor, *rest: Any) -> Tensor:
        seen.append(decays.shape[-1])
        return kept(decays, *rest)

    monkeypatch.setattr(attnzoo.forms.rowblocks, "block_bias", bias)
    monkeypatch.setattr(attnzoo.forms.softmax, "block_bias", bias)
    inputs = random_inputs(name, 1, 600, 1, 1, 4, 4, regime="open")
    with block_sizes(32), torch.no_grad():
        got = get(name).forms["parallel"](*inputs, window=20)
    assert seen
    assert max(seen) <= 32 + 19
    q, k, v, gate = inputs
    late = slice(560, 600)
    near = get(name).forms["parallel"](q[:, late], k[:, late], v[:, late], gate.slice(560, 600), window=20)
    assert relative_error(got[:, 580:], near[:, 20:]) <= LIMIT


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_pruning_holds_with_window_and_sink(name: str) -> None:
    q, k, v, gate = random_inputs(name, 1, 700, 2, 1, 8, 8, regime="open")
    gate = replace(gate, log_decay=torch.full_like(gate.log_decay, -0.1))
    options = {"window": 650, "sink": torch.zeros(2, dtype=torch.float64)}
    run = get(name).forms["parallel"]
    pruned, exact = run(q, k, v, gate, prune=Prune(1e-6), **options), run(q, k, v, gate, **options)
    assert 0 < float((pruned - exact).abs().max()) <= 2e-6 * float(v.abs().max())


# padding


@pytest.mark.parametrize("name", SOFTMAX)
@given_variant(data=st.data())
def test_padding_changes_nothing_with_window_and_sink(name: str, data: st.DataObject) -> None:
    """A window counts the tokens that exist: absent ones anywhere, in any segment."""
    case = replace(data.draw(cases(name, min_t=2, max_t=24)), B=1)
    present = data.draw(st.lists(st.booleans(), min_size=case.T, max_size=case.T).filter(any))
    cuts, window = data.draw(cut_points(case.T)), data.draw(st.integers(1, case.T))
    valid = torch.tensor(present)[None]
    q, k, v, gate = case.inputs()
    index = valid[0].nonzero()[:, 0]
    options = {"window": window, "sink": torch.linspace(-1, 1, case.H, dtype=torch.float64)}
    short = (q[:, index], k[:, index], v[:, index], gate.map(lambda x: x if x.ndim == 1 else x[:, index]))
    with case.blocks():
        expected, _ = case.variant.extend(*short, **options)
        state, outputs = None, []
        for start, stop in itertools.pairwise(cuts):
            now = slice(start, stop)
            o, state = case.variant.extend(
                q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, valid=valid[:, now], **options
            )
            outputs.append(o)
        whole = case.variant.forms["parallel"](q, k, v, gate, valid=valid, **options)
    for got in (torch.cat(outputs, 1), whole):
        assert_close({"o": got[:, index]}, {"o": expected}, what=f"valid {present}, cuts {cuts} of {case}")


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_every_form_takes_padding(name: str, form: str) -> None:
    q, k, v, gate = random_inputs(name, B=1, T=20)
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[:, [0, 1, 7, 13]] = False
    index = valid[0].nonzero()[:, 0]
    short = (q[:, index], k[:, index], v[:, index], gate.map(lambda x: x[:, index]))
    run = get(name).forms[form]
    assert relative_error(run(q, k, v, gate, valid=valid)[:, index], run(*short)) <= LIMIT


# packed sequences


@pytest.mark.parametrize(("name", "form"), FORMS)
@given_variant(data=st.data())
def test_packed_equals_separate(name: str, form: str, data: st.DataObject) -> None:
    """Sequences of any lengths, none among them, laid end to end are the sequences on their own, with gradients."""
    case = replace(data.draw(cases(name, min_t=2, max_t=28)), B=1)
    borders = sorted([0, *data.draw(st.lists(st.integers(0, case.T), max_size=4)), case.T])
    options: dict[str, Any] = {"scale": case.scale}
    if case.variant.side == "softmax" and data.draw(st.booleans(), label="window and sink"):
        options |= {"window": 3, "sink": torch.linspace(-1, 1, case.H, dtype=torch.float64)}
    run = case.variant.forms[form]

    def packed(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        return run(q, k, v, gate, cu_seqlens=torch.tensor(borders), **options)

    def separate(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        ends = [(a, b) for a, b in itertools.pairwise(borders) if a < b]
        return torch.cat([run(q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), **options) for a, b in ends], 1)

    with case.blocks():
        got, expected = value_and_gradients(packed, case.inputs()), value_and_gradients(separate, case.inputs())
    assert_close(got, expected, what=f"{borders} of {case}")


@pytest.mark.parametrize("name", list_variants())
def test_packed_takes_padding_too(name: str) -> None:
    q, k, v, gate = random_inputs(name, B=1, T=20)
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[:, [0, 8, 9, 19]] = False
    index = valid[0].nonzero()[:, 0]
    form = "chunk" if get(name).side == "linear" else "parallel"
    run = get(name).forms[form]
    o = run(q, k, v, gate, valid=valid, cu_seqlens=torch.tensor([0, 8, 20]))
    short = (q[:, index], k[:, index], v[:, index], gate.map(lambda x: x[:, index]))
    assert relative_error(o[:, index], run(*short, cu_seqlens=torch.tensor([0, 7, 16], dtype=torch.int32))) <= LIMIT


# write strengths


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("name", LINEAR)
def test_write_scales_the_values(name: str, heads: int) -> None:
    q, k, v, gate = random_inputs(name)
    write = torch.rand(2, 24, heads, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = oracle.linear(q, k, v, gate, write=write)
    wanted, expected = torch.autograd.grad(expected.square().sum(), write)[0], expected.detach()
    for form in ("recurrent", "parallel", "chunk"):
        o = get(name).forms[form](q, k, v, gate, write=write)
        assert relative_error(o.detach(), expected) <= LIMIT
        assert relative_error(torch.autograd.grad(o.square().sum(), write)[0], wanted) <= LIMIT
    o, _ = get(name).extend(q, k, v, gate, write=write.detach())
    assert relative_error(o, expected) <= LIMIT


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_delta_rule_writes_with_the_strength_it_erases_with(name: str) -> None:
    """What flash-linear-attention computes from q, k, v and beta."""
    q, k, v, gate = random_inputs(name)
    k = torch.nn.functional.normalize(k, dim=-1)
    gate = replace(gate, w=k)
    expected = oracle.linear(q, k, v * gate.beta[..., None], gate)
    for form in ("recurrent", "parallel", "chunk"):
        assert relative_error(get(name).forms[form](q, k, v, gate, delta_rule=True), expected) <= LIMIT
    assert relative_error(oracle.linear(q, k, v, gate, delta_rule=True), expected) <= LIMIT


# refusals


def test_options_are_keyword_only() -> None:
    for name in list_variants():
        for form in (*get(name).forms.values(), get(name).oracle):
            with pytest.raises(TypeError, match="positional"):
                form(*random_inputs(name), 0.3)


BAD = {
    "window of 0": ({"window": 0}, ValueError, "window: expected at least 1"),
    "window of half a token": ({"window": 2.5}, TypeError, "window: expected a number of tokens or None, got 2.5"),
    "sink of other heads": ({"sink": torch.zeros(3)}, ValueError, r"sink: expected a floating tensor of shape \[H=4\]"),
    "sink that is a float": ({"sink": 1.0}, TypeError, r"sink: expected a tensor \[H\] or None, got float"),
    "lse that is a number": ({"return_lse": 1}, TypeError, "return_lse: expected True or False, got 1"),
    "borders of two rows": (
        {"cu_seqlens": torch.tensor([0, 24])},
        ValueError,
        r"cu_seqlens: expected one row \(B = 1\)",
    ),
    "prune that is True": ({"prune": True}, TypeError, r"prune: expected attnzoo.Prune\(eps=...\) or None, got True"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_option_of_the_softmax_side_is_refused(options: Any, error: type[Exception], message: str) -> None:
    for form in ("parallel", "recurrent"):
        with pytest.raises(error, match=message):
            get("fox").forms[form](*random_inputs("fox"), **options)


@pytest.mark.parametrize("borders", [[1, 24], [0, 23], [0, 9, 5, 24], [0]])
@pytest.mark.parametrize("name", ["fox", "mamba2"])
def test_bad_borders_are_refused(name: str, borders: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        get(name).forms["parallel"](*random_inputs(name, B=1), cu_seqlens=torch.tensor(borders))
    with pytest.raises(TypeError, match="cu_seqlens: expected an int32 or int64 tensor"):
        get(name).forms["parallel"](*random_inputs(name, B=1), cu_seqlens=torch.tensor([0.0, 24.0]))


def test_bad_write_is_refused() -> None:
    q, k, v, gate = random_inputs("deltanet")
    run = get("deltanet").forms["chunk"]
    with pytest.raises(ValueError, match=r"write: expected a floating tensor \[B, T, G\] = \(2, 24, 2\) or "):
        run(q, k, v, gate, write=torch.zeros(2, 24, 3))
    with pytest.raises(ValueError, match="gate.w: expected k itself with delta_rule"):
        run(q, k, v, gate, delta_rule=True)
    with pytest.raises(ValueError, match="write: expected None with delta_rule"):
        run(q, gate.w, v, gate, delta_rule=True, write=torch.zeros(2, 24, 2))
    with pytest.raises(ValueError, match="delta_rule: expected False"):
        get("mamba2").forms["chunk"](*random_inputs("mamba2"), delta_rule=True)


def test_states_are_left_out_by_a_scalar_decay_alone() -> None:
    for name, prune, message in (
        ("gla", Prune(), "prune: expected None (nothing decays without log_decay)"),
        ("mamba2", Prune(bound="paper"), "prune: expected bound='tail' (a state's weights are summed)"),
    ):
        for form in ("recurrent", "parallel", "chunk"):
            with pytest.raises(ValueError, match=re.escape(message)):
                get(name).forms[form](*random_inputs(name), prune=prune)
    with pytest.raises(TypeError, match="prune: expected attnzoo.Prune"):
        get("mamba2").forms["chunk"](*random_inputs("mamba2"), prune=1e-3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'prune'"):
        get("log_linear_mamba2").forms["parallel"](*random_inputs("log_linear_mamba2"), prune=Prune())


def test_an_option_of_the_other_side_is_refused_with_what_there_is() -> None:
    with pytest.raises(TypeError, match="'chunk' of 'mamba2' got an unexpected .* 'window': it takes scale"):
        get("mamba2").forms["chunk"](*random_inputs("mamba2"), window=3)
    with pytest.raises(TypeError, match="'parallel' of 'fox' .* 'windw': .*; did you mean 'window'"):
        get("fox").forms["parallel"](*random_inputs("fox"), windw=3)
    with pytest.raises(TypeError, match="'extend' of 'fox' .* 'cu_seqlens'"):
        get("fox").extend(*random_inputs("fox"), cu_seqlens=torch.tensor([0, 24]))
    for error in (ValueError, KeyError):
        with pytest.raises(error, match="^unknown form 'chnk' of 'mamba2': .*; did you mean 'chunk'"):
            get("mamba2").forms["chnk"]
    assert get("fox").forms.get("chunk") is None
    assert "chunk" not in get("fox").forms
    with pytest.raises(ValueError, match="unknown form 'tritn' of 'fox': .*did you mean 'triton'"):
        get("fox").extend(*random_inputs("fox"), form="tritn")
    assert get("wall").options("parallel") == (
        "scale", "prune", "logit_bound", "window", "sink", "valid", "cu_seqlens", "return_lse", "softcap",
    )  # fmt: skip
    assert get("gla").options("chunk") == ("scale", "valid", "cu_seqlens", "write", "delta_rule", "prune")
    for form in ("paralel", "fla"):
        with pytest.raises(ValueError, match=f"unknown form '{form}' of 'wall': expected one of reference, recurrent"):
            get("wall").options(form)


@pytest.mark.parametrize("name", list_variants())
def test_a_constant_gate_is_one_per_head(name: str) -> None:
    """``[H]`` gates, through every form, options that need a gate per token among them."""
    if "log_decay" not in get(name).requires:
        pytest.skip("no scalar decay")
    q, k, v, gate = random_inputs(name, B=1)
    constant = replace(gate, log_decay=torch.linspace(-2, 0, 4, dtype=torch.float64))
    every = constant.per_token(q)
    valid = torch.ones(1, 24, dtype=torch.bool)
    valid[:, 5] = False
    for options in ({}, {"valid": valid}, {"cu_seqlens": torch.tensor([0, 9, 24])}):
        for form in set(CPU_FORMS) & set(get(name).forms):
            run = get(name).forms[form]
            assert relative_error(run(q, k, v, constant, **options), run(q, k, v, every, **options)) <= 1e-14
    steps, _ = extend_in_segments(get(name), (q, k, v, constant), [0, 7, 8, 24])
    assert relative_error(steps, get(name).forms["parallel"](q, k, v, every)) <= LIMIT


def test_a_gate_of_the_delta_rule_does_not_write() -> None:
    """Without an option, ``v_t k_t^T`` is written as it is."""
    q, k, v, gate = Case("deltanet", B=1, T=1, H=1, G=1, K=4, V=3).inputs()
    o = get("deltanet").forms["chunk"](q, k, v, gate, scale=1.0)
    assert relative_error(o, (q * k).sum(-1)[..., None] * v) <= 1e-14
