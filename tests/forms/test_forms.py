"""Every form of every variant against the float64 oracle: values and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import strategies as st
from thinning import given_variant, in_long

from attnzoo import Prune, RecurrentState, get, list_variants, oracle
from attnzoo.samples import Regime, random_inputs
from attnzoo.testing import (
    CPU_FORMS,
    LIMIT,
    Case,
    assert_close,
    cases,
    check,
    relative_error,
    straightforward,
    value_and_gradients,
)

FORMS = [(name, form) for name in list_variants() for form in get(name).forms if form in CPU_FORMS]
GPU_FORMS = [
    pytest.param(name, form, marks=[pytest.mark.fla] * (form == "fla"))
    for name in list_variants()
    for form in get(name).forms
    if form not in CPU_FORMS
]
LOW = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-23}
REGIMES: tuple[Regime, ...] = ("mixed", "open", "closing")


@pytest.mark.parametrize("name", list_variants())
@given_variant(data=st.data())
def test_forms_equal_oracle(name: str, data: st.DataObject) -> None:
    check("oracle", data.draw(cases(name)))


# around the real block sizes: chunks of 64, rows of 128 and of 512
AROUND: tuple[tuple[int, Regime], ...] = (
    (63, "mixed"), (64, "open"), (65, "closing"), (128, "open"), (129, "mixed"), (130, "closed"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "T", "regime"),
    [
        (name, *around)
        for number, name in enumerate(list_variants())
        for around in in_long(AROUND[number % 3 :: 3], AROUND)  # neighbours in the list take turns
    ],
)
def test_forms_equal_oracle_around_block_sizes(name: str, regime: Regime, T: int) -> None:
    check("oracle", Case(name, B=1, T=T, H=2, G=1, K=4, V=3, regime=regime, seed=T))


@pytest.mark.parametrize("name", list_variants("softmax"))
def test_parallel_equals_oracle_past_the_largest_row_block(name: str) -> None:
    case = Case(name, B=1, T=521, H=1, G=1, K=2, V=3, regime="open", seed=7)
    q, k, v, gate = case.inputs()
    got = case.variant.forms["parallel"](q, k, v, gate)
    assert relative_error(got, oracle.softmax(q, k, v, gate)) <= LIMIT


@pytest.mark.parametrize("regime", get_args(Regime))
@pytest.mark.parametrize("name", ["alibi", "fox"])
def test_gradients_past_the_largest_row_block(name: str, regime: Regime) -> None:
    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: object) -> torch.Tensor:
        c = gate.log_decay.masked_fill(gate.log_decay.isneginf(), 0).cumsum(1)  # type: ignore[attr-defined]
        n = gate.log_decay.isneginf().cumsum(1)  # type: ignore[attr-defined]
        hidden = (n[:, :, None] != n[:, None]) | torch.ones(T, T, dtype=torch.bool).triu(1)[None, :, :, None]
        d = (c[:, :, None] - c[:, None]).masked_fill(hidden, -torch.inf)
        s = torch.einsum("bthk,bjhk->btjh", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("btjh,bjhv->bthv", (s + d).softmax(2), v)

    T = 1037
    inputs = random_inputs(name, 1, T, 1, 1, 4, 3, regime=regime)
    expected = value_and_gradients(dense, inputs)
    assert_close(value_and_gradients(get(name).forms["parallel"], inputs), expected, what=f"parallel of {name}")


@pytest.mark.parametrize("name", list_variants("linear"))
def test_chunk_equals_parallel_over_many_chunks(name: str) -> None:
    inputs = random_inputs(name, 1, 333, 2, 1, 8, 6, regime="open")
    forms = get(name).forms
    expected = value_and_gradients(forms["parallel"], inputs)
    assert_close(value_and_gradients(forms["chunk"], inputs), expected, 1e-9, what=f"chunk of {name}")


@pytest.mark.parametrize("name", list_variants("linear"))
@given_variant(data=st.data())
def test_oracle_scores_equal_oracle_recurrence(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    q, k, v, gate = case.inputs()
    by_scores = oracle.linear(q, k, v, gate, scale=case.scale)
    assert relative_error(by_scores, oracle.recurrence(q, k, v, gate, scale=case.scale)[0]) <= 1e-12


@pytest.mark.parametrize("name", list_variants("linear"))
@given_variant(data=st.data())
def test_state_equals_oracle_recurrence(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    q, k, v, gate = case.inputs()
    start = torch.randn(case.B, case.H, case.K, case.V, dtype=torch.float64)
    with case.blocks():
        o, state = case.variant.extend(q, k, v, gate, RecurrentState(start), scale=case.scale)
    expected_o, expected_state = oracle.recurrence(q, k, v, gate, scale=case.scale, state=start)
    assert_close({"o": o, "state": state.matrix}, {"o": expected_o, "state": expected_state}, what=repr(case))


@pytest.mark.parametrize("name", list_variants("linear"))
def test_gradient_of_the_initial_state_equals_oracle(name: str) -> None:
    q, k, v, gate = random_inputs(name, T=19)
    start = torch.randn(2, 4, 8, 6, dtype=torch.float64, requires_grad=True)
    o, state = get(name).extend(q, k, v, gate, RecurrentState(start))
    expected = oracle.recurrence(q, k, v, gate, state=start)
    grads = [torch.autograd.grad((o * o).sum() + (S * S).sum(), start)[0] for o, S in ((o, state.matrix), expected)]
    assert relative_error(*grads) <= LIMIT


@pytest.mark.parametrize("name", list_variants("linear"))
def test_extend_by_one_token_equals_oracle(name: str) -> None:
    q, k, v, gate = random_inputs(name, T=1)
    start = torch.randn(2, 4, 8, 6, dtype=torch.float64)
    o, state = get(name).extend(q, k, v, gate, RecurrentState(start))
    expected = oracle.recurrence(q, k, v, gate, state=start)
    assert max(map(relative_error, (o, state.matrix), expected)) <= LIMIT


@pytest.mark.covering
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_low_precision_within_budget(name: str, form: str, dtype: torch.dtype) -> None:
    """At most twice the error of the same computation written plainly in that dtype, plus a few roundings.

    The gradient of a log gate is a running sum of terms that cancel: it gets more of them.
    """
    variant = get(name)
    turn = (list_variants().index(name) + list(LOW).index(dtype)) % len(REGIMES)  # each with each dtype and each regime
    for regime in in_long(REGIMES[turn : turn + 1], REGIMES):
        q, k, v, gate = Case(name, B=1, T=66, H=2, G=1, K=16, V=8, regime=regime, seed=3).inputs(torch.float32)
        inputs = q.to(dtype), k.to(dtype), v.to(dtype), gate
        wide = inputs[0].double(), inputs[1].double(), inputs[2].double(), gate.map(torch.Tensor.double)
        expected = value_and_gradients(variant.oracle, wide)
        plain = value_and_gradients(straightforward(variant, dtype), inputs)
        for part, x in value_and_gradients(variant.forms[form], inputs).items():
            roundings = 64 if part.startswith("log_") else 8
            budget = 2 * relative_error(plain[part], expected[part]) + roundings * LOW[dtype]
            error = relative_error(x, expected[part])
            assert error <= budget, f"{regime}: {part} off by {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)
@pytest.mark.parametrize("name", list_variants())
def test_output_has_the_dtype_of_v(name: str, dtype: torch.dtype) -> None:
    q, k, v, gate = random_inputs(name, T=9, dtype=torch.float32)
    variant = get(name)
    inputs = q.to(dtype), k.to(dtype), v.to(dtype), gate
    for form in CPU_FORMS:
        if form in variant.forms:
            o = variant.forms[form](*inputs)
            assert (o.dtype, o.shape) == (dtype, (2, 9, 4, 6))
    o, _ = variant.extend(*inputs)
    assert (o.dtype, o.shape) == (dtype, (2, 9, 4, 6))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_autocast_does_not_reach_inside(name: str, form: str) -> None:
    inputs = random_inputs(name, dtype=torch.float32)
    plain = get(name).forms[form](*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(get(name).forms[form](*inputs), plain)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_inputs_are_left_as_they_are(name: str, form: str) -> None:
    inputs = random_inputs(name)
    before = [x.clone() for x in (*inputs[:3], *(getattr(inputs[3], p) for p in inputs[3].parts))]
    value_and_gradients(get(name).forms[form], inputs)
    get(name).forms[form](*inputs)
    after = [*inputs[:3], *(getattr(inputs[3], p) for p in inputs[3].parts)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_strides_do_not_matter(name: str, form: str) -> None:
    q, k, v, gate = random_inputs(name)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    got = get(name).forms[form](*strided, gate.map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)))
    assert relative_error(got, get(name).forms[form](q, k, v, gate)) <= 1e-14


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "form"), GPU_FORMS)
def test_gpu_form_equals_oracle(name: str, form: str) -> None:
    """The delta rule of fla and the bf16 budgets have their own file; this is that each listed form runs at all."""
    from attnzoo.verify import Where, in_precision

    check = in_precision(get(name), form, Where("cuda"))
    assert check.ok, check
    assert not check.refused, check


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "path", "path_fox"])
def test_a_short_w_is_a_gate_like_others(name: str) -> None:
    q, k, v, gate = Case(name, T=19, regime="open").inputs()
    inputs = q, k, v, replace(gate, w=gate.w * torch.rand(*gate.w.shape[:3], 1))
    expected = value_and_gradients(get(name).oracle, inputs)
    for form in set(CPU_FORMS) & set(get(name).forms):
        assert_close(value_and_gradients(get(name).forms[form], inputs), expected, what=f"{form} of {name}")


@pytest.mark.covering
@pytest.mark.parametrize("T", [9, 300])
@pytest.mark.parametrize("sizes", [(0, 2, 1, 4, 3), (2, 2, 1, 4, 0)], ids=["no rows", "no value channels"])
@pytest.mark.parametrize("name", list_variants())
def test_forms_of_nothing_give_nothing(name: str, sizes: tuple[int, ...], T: int) -> None:
    B, *rest = sizes
    q, k, v, gate = random_inputs(name, B, T, *rest, dtype=torch.float32)
    given: list[dict[str, Any]] = [{}, {"valid": torch.ones(B, T, dtype=torch.bool)}]
    given += [{"prune": Prune(eps=1e-3)}] if get(name).prunable else []
    forms = set(CPU_FORMS) & set(get(name).forms)
    for form in forms - {"recurrent"} if T > 9 else forms:  # which goes token by token, however many there are
        for options in given:
            o = get(name).forms[form](q, k, v.requires_grad_(), gate, **options)
            assert o.shape == (*q.shape[:3], v.shape[3])
            assert torch.autograd.grad(o.sum(), v)[0].shape == v.shape


@pytest.mark.parametrize("name", list_variants("softmax"))
def test_huge_scores_and_absent_keys(name: str) -> None:
    """What an absent or closed key is given in place of its logit is below any score that the dtype holds."""
    q, k, v, gate = Case(name, B=1, T=9, H=2, G=1, regime="closed").inputs()
    valid = torch.ones(1, 9, dtype=torch.bool)
    valid[0, 2:4] = False
    q, k = 1e40 * q, 1e40 * k
    for form in ("parallel", "recurrent"):
        o = get(name).forms[form](q, k, v, gate, valid=valid)[valid]
        rest = gate.per_token(q).map(lambda x: x[valid][None])
        expected = oracle.softmax(*(x[valid][None] for x in (q, k, v)), rest)[0]
        assert relative_error(o, expected) <= LIMIT
