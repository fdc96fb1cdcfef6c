"""Laws that hold for every variant: segments, causality, padding, packing, closed gates, precision, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from thinning import given_variant, in_long
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo.forms.rowblocks
from attnzoo import Gate, RecurrentState, get, list_variants
from attnzoo.samples import random_inputs
from attnzoo.testing import (
    CPU_FORMS,
    LAWS,
    LIMIT,
    Case,
    Inputs,
    assert_close,
    block_sizes,
    cases,
    cut_points,
    extend_in_segments,
    in_float64,
    relative_error,
    take,
    value_and_gradients,
)
from attnzoo.testing.trials import measured

VARIANTS = list_variants()
SOFTMAX = list_variants("softmax")
GATED = [name for name in VARIANTS if "log_decay" in get(name).requires]
FORMS = [(name, form) for name in VARIANTS for form in get(name).forms if form in CPU_FORMS]
DTYPES = (torch.float64, torch.float32)


def state_parts(state: Any) -> dict[str, Tensor]:
    """The tensors of a state, whichever side it is of."""
    if isinstance(state, RecurrentState):
        return {"S": state.matrix}
    found = {name: getattr(state, name) for name in ("k", "v", "log_decay", "phase")}
    parts = {name: x for name, x in found.items() if x is not None}
    return {name: x.exp() if name == "log_decay" else x for name, x in parts.items()}


# the laws that attnzoo.testing has for everybody

MANY = ("causality", "rows", "heads", "padding")
FEW_EXAMPLES = ("matrices", "packing", "neutral", "pruning", "layer")  # of which other files know more
EXACT = {"causality": ("o",)}  # bit for bit, which is not asked of others' forms


def holds(law: str, name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, **LAWS[law].draws))
    errors = measured(law, case)
    assert not any(errors[form][what] for form in errors for what in EXACT.get(law, ())), case


def test_every_law_is_run() -> None:
    assert {"oracle", "segments", *MANY, *FEW_EXAMPLES} == LAWS.keys()


@pytest.mark.parametrize("name", VARIANTS)
@given_variant(data=st.data())
def test_segmented_equals_full(name: str, data: st.DataObject) -> None:
    holds("segments", name, data)


@pytest.mark.parametrize("law", MANY)
@pytest.mark.parametrize("name", VARIANTS)
@given_variant(data=st.data())
def test_law_holds(name: str, law: str, data: st.DataObject) -> None:
    holds(law, name, data)


@pytest.mark.parametrize("law", FEW_EXAMPLES)
@pytest.mark.parametrize("name", VARIANTS)
@given_variant(few=True, data=st.data())
def test_law_holds_on_few_examples(name: str, law: str, data: st.DataObject) -> None:
    reason = LAWS[law].refuses(get(name))
    if not reason:
        holds(law, name, data)
    assert not reason or law == "pruning", reason


# segments


@pytest.mark.parametrize("name", VARIANTS)
def test_token_by_token_equals_full(name: str) -> None:
    inputs, variant = random_inputs(name, T=21), get(name)
    with block_sizes(8):
        got = value_and_gradients(lambda *x: extend_in_segments(variant, x, list(range(22)))[0], inputs)
        expected = value_and_gradients(variant.forms["parallel"], inputs)
    assert_close(got, expected)


@pytest.mark.parametrize("name", VARIANTS)
@given_variant(data=st.data())
def test_state_does_not_depend_on_the_cuts(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, min_t=2))
    with case.blocks():
        _, whole = case.variant.extend(*case.inputs(), scale=case.scale)
        _, pieces = extend_in_segments(case.variant, case.inputs(), data.draw(cut_points(case.T)), case.scale)
    assert_close(state_parts(pieces), state_parts(whole))


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_continues_a_prefill_in_bfloat16(name: str) -> None:
    """Only outputs are rounded: a state that were rounded at every step would be 2 to 3 times worse here."""
    q, k, v, gate = random_inputs(name, 1, 240, 1, 1, 8, 8, dtype=torch.float32, regime="open")
    inputs = q.bfloat16(), k.bfloat16(), v.bfloat16(), gate
    wide = in_float64(inputs)
    with torch.no_grad():
        expected = get(name).forms["parallel"](*wide)
        whole = get(name).forms["parallel"](*inputs)
        steps, _ = extend_in_segments(get(name), inputs, [0, 40, *range(41, 241)])
    assert float((steps - expected).abs().mean()) <= 1.1 * float((whole - expected).abs().mean())


@pytest.mark.parametrize("name", VARIANTS)
def test_state_given_is_left_as_it_is(name: str) -> None:
    variant, inputs = get(name), random_inputs(name)
    _, state = variant.extend(*take(inputs, tokens=slice(0, 9)))
    before = {part: x.clone() for part, x in state_parts(state).items()}
    first, _ = variant.extend(*take(inputs, tokens=slice(9, 24)), state)
    again, _ = variant.extend(*take(inputs, tokens=slice(9, 24)), state)
    assert torch.equal(first, again)
    assert all(torch.equal(x, before[part]) for part, x in state_parts(state).items())


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_future_has_no_gradient(name: str, form: str) -> None:
    inputs = random_inputs(name, T=20)
    with block_sizes(8):
        got = value_and_gradients(lambda *x: get(name).forms[form](*x)[:, :11], inputs)
    assert all(bool((grad[:, 11:] == 0).all()) for part, grad in got.items() if part != "o")


# padding and packing


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_padded_differently_equal_rows_alone(name: str) -> None:
    """Left, right and inner padding in one batch, then one step for all, where some rows rest."""
    T, variant = 20, get(name)
    inputs = random_inputs(name, B=3, T=T)
    valid = torch.ones(3, T, dtype=torch.bool)
    valid[0, :7], valid[1, 13:], valid[2, 5:9] = False, False, False
    rest = torch.tensor([[True], [False], [True]])
    step = random_inputs(name, B=3, T=1, seed=5)
    with block_sizes(8):
        o, state = variant.extend(*inputs, valid=valid)
        o_step, state = variant.extend(*step, state, valid=rest)
        o_last, _ = variant.extend(*step, state)
        for b in range(3):
            row, index = take(inputs, rows=slice(b, b + 1)), valid[b].nonzero()[:, 0]
            alone = [x[:, index] for x in row[:3]]
            o_b, state_b = variant.extend(*alone, row[3].map(lambda x, i=index: x[:, i]))
            assert relative_error(o[b : b + 1, index], o_b) <= LIMIT
            step_b = take(step, rows=slice(b, b + 1))
            if rest[b]:
                expected, state_b = variant.extend(*step_b, state_b)
                assert relative_error(o_step[b : b + 1], expected) <= LIMIT
            assert relative_error(o_last[b : b + 1], variant.extend(*step_b, state_b)[0]) <= LIMIT


@pytest.mark.parametrize("name", VARIANTS)
def test_absent_tokens_have_finite_outputs(name: str) -> None:
    inputs, valid = random_inputs(name, T=20), torch.zeros(2, 20, dtype=torch.bool)
    for present in (slice(0, 0), slice(0, 6), slice(9, 12)):
        valid[:] = False
        valid[:, present] = True
        with block_sizes(8):
            got = value_and_gradients(lambda *x, m=valid: get(name).extend(*x, valid=m)[0], inputs)
        assert all(bool(x.isfinite().all()) for x in got.values())


@pytest.mark.parametrize("name", [n for n in VARIANTS if "angle" in get(n).requires])
@pytest.mark.parametrize("padded_first", [True, False])
def test_shared_angle_mixes_with_padding(name: str, padded_first: bool) -> None:
    """A prefill with padding then steps without it, and the other way round, share one state."""
    variant = get(name)
    q, k, v, gate = Case(name, T=12, shared_angle=True).inputs()
    everything = torch.ones(2, 12, dtype=torch.bool)
    state, outputs = None, []
    for start, stop in ((0, 6), (6, 7), (7, 12)):
        now = slice(start, stop)
        options = {"valid": everything[:, now]} if (start == 0) == padded_first else {}
        o, state = variant.extend(q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, **options)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), variant.extend(q, k, v, gate)[0]) <= LIMIT


# closed gates


def closing_at(name: str, t: int, T: int, dtype: torch.dtype) -> Inputs:
    q, k, v, gate = random_inputs(name, T=T, dtype=dtype, regime="open")
    part = "log_decay" if gate.log_decay is not None else "log_diag"
    closed = getattr(gate, part).clone()
    closed[:, t] = -torch.inf
    return q, k, v, replace(gate, **{part: closed})


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", [1, 8, 13, 19])
@pytest.mark.parametrize(("name", "form"), [pair for pair in FORMS if pair[0] in (*GATED, "gla")])
def test_closed_gate_cuts_off_the_past_exactly(name: str, form: str, t: int, dtype: torch.dtype) -> None:
    """Whatever finite numbers lie before it: no digit changes after it, and their gradient is exactly zero."""
    q, k, v, gate = closing_at(name, t, 20, dtype)
    before = torch.arange(20)[:, None, None] < t
    huge = [torch.where(before, x * 1e9, x) for x in (q, k, v)]
    run = get(name).forms[form]
    with block_sizes(8):
        assert torch.equal(run(*huge, gate)[:, t:], run(q, k, v, gate)[:, t:])
        got = value_and_gradients(lambda *x: run(*x)[:, t:], (*huge, gate))
    # the gradient of a log gate or an angle is a running sum that ends in zero, up to its own rounding
    largest = max(float(x.abs().max()) for x in got.values())
    for part, x in got.items():
        assert bool(x.isfinite().all()), part
        noise = 16 * torch.finfo(dtype).eps * largest if part.startswith("log_") or part == "angle" else 0.0
        assert part == "o" or float(x[:, :t].abs().max()) <= noise, f"{part} before the closed gate has a gradient"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*GATED, "gla"])
def test_closed_gate_cuts_off_the_state(name: str, dtype: torch.dtype) -> None:
    q, k, v, gate = closing_at(name, 0, 7, dtype)
    past = random_inputs(name, T=9, dtype=dtype, seed=4)
    _, state = get(name).extend(*(x * 1e9 for x in past[:3]), past[3])
    for T in (1, 7):
        now = take((q, k, v, gate), tokens=slice(0, T))
        o, _ = get(name).extend(*now, state)
        assert relative_error(o, get(name).extend(*now)[0]) <= 8 * torch.finfo(dtype).eps


# precision at length


def fox_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The last rows of FoX written out, decays summed in float64, everything after that in ``dtype``."""
    c = g.double().cumsum(1)
    d = (c[:, -rows:, None] - c[:, None]).to(dtype)
    T = g.shape[1]
    future = torch.ones(rows, T, dtype=torch.bool).triu(T - rows + 1)[None, :, :, None]
    s = torch.einsum("bthk,bjhk->btjh", q[:, -rows:].to(dtype) * q.shape[-1] ** -0.5, k.to(dtype))
    return torch.einsum("btjh,bjhv->bthv", (s + d).masked_fill(future, -torch.inf).softmax(2), v.to(dtype))


@pytest.mark.parametrize("mean", [0.01, 0.12, 1.0])
@pytest.mark.parametrize("name", ["fox", "alibi"])
def test_float32_decays_stay_exact_at_length(name: str, mean: float) -> None:
    """Sums from the start of the sequence would be off by 1e-3 here: they must be relative to a near token."""
    T, rows = 8192, 256
    q, k, v, _ = random_inputs(name, 1, T, 1, 1, 16, 8, dtype=torch.float32)
    g = -mean * 2 * torch.rand(1, T, 1, generator=torch.Generator().manual_seed(0))
    exact = fox_rows(q, k, v, g, rows, torch.float64)
    budget = 2 * relative_error(fox_rows(q, k, v, g, rows, torch.float32), exact)
    budget += (8 + attnzoo.forms.rowblocks.CALM) * 2**-24  # a fused row block rounds decays of up to CALM
    got = get(name).forms["parallel"](q, k, v, Gate(log_decay=g))[:, -rows:]
    assert relative_error(got, exact) <= budget


@pytest.mark.parametrize("name", list_variants("linear"))
def test_chunk_in_float32_stays_exact_at_length(name: str) -> None:
    for regime in ("open", "closing"):
        inputs = random_inputs(name, 1, 2048, 1, 1, 8, 8, dtype=torch.float32, regime=regime)
        wide = in_float64(inputs)
        chunk = get(name).forms["chunk"]
        assert relative_error(chunk(*inputs), chunk(*wide)) <= 64 * 2**-24, regime


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_in_float32_stays_exact_at_length(name: str) -> None:
    for regime in ("open", "closing"):
        inputs = random_inputs(name, 1, 1200, 1, 1, 8, 8, dtype=torch.float32, regime=regime)
        wide = in_float64(inputs)
        run = get(name).forms["parallel"]
        assert relative_error(run(*inputs), run(*wide)) <= 72 * 2**-24, regime


# memory


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returns, backward included."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def largest_tensor(name: str, T: int, **options: Any) -> int:
    regime = options.pop("regime", "open")
    inputs = random_inputs(name, 1, T, 1, 1, 8, 8, dtype=torch.float32, regime=regime)
    with LargestTensor() as seen:
        value_and_gradients(lambda *x: get(name).forms["parallel"](*x, **options), inputs)
    return seen.numel


@pytest.mark.parametrize("regime", ["open", "closed"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_parallel_makes_no_square_matrix(name: str, regime: str) -> None:
    """Forward and backward: nothing larger than some rows times T, which grows with T and not with its square."""
    T = in_long(512, 1024)
    short, long = largest_tensor(name, T, regime=regime), largest_tensor(name, 2 * T, regime=regime)
    assert long <= 2 * T * 512
    assert long <= 2.1 * short


@pytest.mark.parametrize("regime", ["open", "closed"])
@pytest.mark.parametrize("name", ["nope", "alibi", "fox", "rope"])
def test_additive_parallel_holds_only_its_inputs(name: str, regime: str) -> None:
    """The fused kernel never writes logits: at most one block of them, where gates close and are done exactly."""
    rows = attnzoo.forms.rowblocks.SIZES[0]
    T = in_long(2048, 4096)
    assert largest_tensor(name, T, regime=regime) <= max(T * 32, rows * rows)


@pytest.mark.parametrize("name", list_variants("linear"))
def test_chunk_grows_linearly(name: str) -> None:
    def largest(T: int) -> int:
        inputs = random_inputs(name, 1, T, 1, 1, 8, 8, dtype=torch.float32)
        with LargestTensor() as seen:
            value_and_gradients(get(name).forms["chunk"], inputs)
        return seen.numel

    assert largest(1024) <= 2.1 * largest(512)
