"""The fused recurrence over a few tokens: values and states against the oracle, for every gate and product of gates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from named_ops import opcheck
from torch import Tensor

from attnzoo import Gate, get, list_variants, oracle
from attnzoo.forms.protocol import Call
from attnzoo.kernels.linear import MOST_TOKENS, RecurrentParts, linear_step, linear_steps
from attnzoo.samples import random_inputs
from attnzoo.testing import Case, Inputs, in_float64, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 1e-5  # float32
NAMES = [name for name in list_variants("linear") if "u" not in get(name).requires]  # no kernel reads u


def inputs_of(name: str, **sizes: Any) -> Inputs:
    q, k, v, gate = Case(name, **{"T": 9, "K": 16, "V": 12, **sizes}).inputs(torch.float32)
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), gate.map(lambda part: part.to(DEVICE))


@pytest.mark.parametrize("regime", ["mixed", "closed"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_pieces_equal_the_whole_and_go_on_from_the_reference(name: str, regime: Any) -> None:
    inputs = inputs_of(name, regime=regime, shared_angle=True)
    expected, last = get(name).extend(*in_float64(inputs))
    q, k, v, gate = inputs
    state, outputs = None, []
    for i, (start, stop) in enumerate(itertools.pairwise([0, 3, 4, 5, 9])):
        now, form = slice(start, stop), ("triton", "reference")[i == 1]
        part = q[:, now], k[:, now], v[:, now], gate.slice(start, stop)
        assert get(name).refuses(form, Call(*part, state, True)) == ""
        o, state = get(name).extend(*part, state, form=form)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), expected) <= CLOSE
    assert relative_error(state.matrix, last.matrix) <= CLOSE  # type: ignore[attr-defined]
    assert len(state) == 9  # type: ignore[arg-type]


@torch.no_grad()
def test_all_parts_of_a_gate_at_once() -> None:
    gates = [inputs_of(name)[3] for name in ("gla", "mamba2", "complex_linear", "deltanet")]
    q, k, v, _ = inputs_of("gla")
    gate = Gate(**{part: getattr(g, part) for g in gates for part in g.parts})
    o, _ = linear_steps(q, k, v, gate)
    assert relative_error(o, oracle.linear(*in_float64((q, k, v, gate)))) <= CLOSE


@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_several_factors_per_token(n: int) -> None:
    """Beside all other parts, in two pieces."""
    q, k, v, gate = random_inputs("gated_deltanet", 2, 5, 4, 2, 10, 6, factors=n, dtype=torch.float32)
    other = [random_inputs(name, 2, 5, 4, 2, 10, dtype=torch.float32)[3] for name in ("gla", "complex_linear")]
    gate = replace(gate, log_diag=other[0].log_diag, angle=other[1].angle)
    q, k, v, gate = q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), gate.map(lambda part: part.to(DEVICE))
    first, state = linear_steps(q[:, :3], k[:, :3], v[:, :3], gate.slice(0, 3))
    then, _ = linear_steps(q[:, 3:], k[:, 3:], v[:, 3:], gate.slice(3, 5), state)
    assert relative_error(torch.cat([first, then], 1), oracle.linear(*in_float64((q, k, v, gate)))) <= CLOSE


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_absent_tokens_count_for_nothing(name: str) -> None:
    """Whatever they hold: NaN here."""
    inputs = inputs_of(name, B=3)
    valid = torch.ones(3, 9, dtype=torch.bool, device=DEVICE)
    valid[0, :4], valid[1, 6:], valid[2, 3:5] = False, False, False
    expected, last = get(name).extend(*in_float64(inputs), valid=valid)
    nothing = [x.masked_fill(~valid.view(3, 9, *[1] * (x.ndim - 2)), torch.nan) for x in inputs[:3]]
    gate = inputs[3].map(lambda x: x.masked_fill(~valid.view(3, 9, *[1] * (x.ndim - 2)), torch.nan))
    o, state = get(name).extend(*nothing, gate if name != "complex_linear" else inputs[3], form="triton", valid=valid)
    assert relative_error(o[valid], expected[valid]) <= CLOSE
    assert relative_error(state.matrix, last.matrix) <= CLOSE


@pytest.mark.parametrize("heads", [2, 4])
@torch.no_grad()
def test_write_strengths_scale_and_half_precision(heads: int) -> None:
    q, k, v, gate = inputs_of("mamba2")
    q, k, v = (x.half() for x in (q, k, v))
    write = torch.rand(2, 9, heads, device=DEVICE)
    o = get("mamba2").forms["triton"](q, k, v, gate, write=write, scale=0.3)
    expected = oracle.linear(*in_float64((q, k, v, gate)), write=write.double(), scale=0.3)
    assert o.dtype == torch.float16
    assert relative_error(o, expected) <= 2 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
@torch.no_grad()
def test_the_delta_rule_writes_with_its_strength(name: str) -> None:
    q, _, v, gate = inputs_of(name)
    assert gate.w is not None
    o, state = get(name).extend(q, gate.w, v, gate, form="triton", delta_rule=True)
    expected, last = get(name).extend(*in_float64((q, gate.w, v, gate)), delta_rule=True)
    assert relative_error(o, expected) <= CLOSE
    assert relative_error(state.matrix, last.matrix) <= CLOSE


@torch.no_grad()
def test_strided_inputs_and_odd_sizes() -> None:
    q, k, v, gate = inputs_of("gla", T=5, H=3, G=3, K=10, V=7)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    log_diag = gate.log_diag.expand(2, *gate.log_diag.shape).transpose(0, 1)[:, 1]  # type: ignore[union-attr]
    o, state = linear_steps(*swapped, Gate(log_diag=log_diag))
    again, _ = linear_steps(*(x[:, 4:] for x in (q, k, v)), gate.slice(4, 5), linear_steps(
        *(x[:, :4] for x in (q, k, v)), gate.slice(0, 4))[1].mT.contiguous().mT)  # fmt: skip
    assert relative_error(o, oracle.linear(*in_float64((q, k, v, gate)))) <= CLOSE
    assert relative_error(again, o[:, 4:]) <= CLOSE
    assert state.is_contiguous()


@torch.no_grad()
def test_a_state_stays_as_it_was() -> None:
    inputs = inputs_of("gated_deltanet")
    _, state = linear_steps(*inputs)
    before = state.clone()
    linear_steps(*inputs, state)
    assert torch.equal(state, before)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_is_written_to_where_that_is_asked_for(compiled: bool) -> None:
    inputs = inputs_of("gated_deltanet")
    _, state = linear_steps(*inputs)
    o, after = linear_steps(*inputs, state)
    place = state.data_ptr()
    step = torch.compile(linear_steps, backend="aot_eager") if compiled else linear_steps
    again, last = step(*inputs, state, in_place=True)
    assert last.data_ptr() == state.data_ptr() == place
    assert torch.equal(again, o)
    assert torch.equal(state, after)
    for wrong in (None, state.mT.contiguous().mT):
        with pytest.raises(ValueError, match="state: expected a contiguous one with in_place=True, got "):
            linear_steps(*inputs, wrong, in_place=True)


def test_the_ops_pass_opcheck() -> None:
    from attnzoo.kernels.linear.recurrent import Recurrence, recurrent_in_place_op, recurrent_op

    q, k, v, gate = random_inputs("gated_deltanet", 1, 2, 2, 1, 8, 8, dtype=torch.float32)
    parts = (gate.log_decay, None, None, gate.w, gate.beta)
    args = (q, k, v, *parts, None, None, torch.zeros(1, 2, 8, 8), 0.5)
    given = Recurrence(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in args))  # type: ignore[arg-type]
    opcheck(recurrent_op, given)
    opcheck(recurrent_in_place_op, given)


def test_what_it_does_not_serve_is_said() -> None:
    q, k, v, gate = inputs_of("mamba2")
    with pytest.raises(ValueError, match=r"no gradient: expected torch.no_grad\(\)"):
        linear_steps(q.requires_grad_(), k, v, gate)
    *other, channels = inputs_of("gla")
    other[0].requires_grad_()
    assert "no gradient" in get("gla").refuses("triton", Call(*other, channels))
    with pytest.raises(RuntimeError, match="form 'triton': .*no gradient"):
        get("gla").forms["triton"](*other, channels)
    q, k, v = (x.detach() for x in (q, k, v))
    with pytest.raises(ValueError, match=r"state: expected \(2, 4, 16, 12\) beside q .*, got \(2, 4, 12, 16\)"):
        linear_steps(q, k, v, gate, torch.zeros(2, 4, 12, 16, device=DEVICE))
    with pytest.raises(ValueError, match=r"gate.log_decay: expected natural logs <= 0, got 1"):
        linear_steps(q.cpu(), k.cpu(), v.cpu(), Gate(log_decay=torch.ones(2, 9, 4)))
    with pytest.raises(ValueError, match=r"log_decay: expected \(2, 9, 4\) or \(4,\)"):
        linear_steps(q, k, v, Gate(log_decay=torch.zeros(2, 9, 2, device=DEVICE)))
    with pytest.raises(ValueError, match="gate: expected w and beta together"):
        linear_steps(q, k, v, Gate(beta=torch.ones(2, 9, 2, device=DEVICE)))
    with pytest.raises(ValueError, match="gate: expected an axis of factors in both w and beta or in none"):
        linear_steps(q, k, v, Gate(w=q[:, :, :2], beta=q[:, :, :2, :1]))
    with pytest.raises(TypeError, match=r"gate: expected attnzoo.Gate, got NoneType"):
        linear_steps(q, k, v, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k: expected a floating dtype, got torch.int32"):
        linear_steps(q, k.int(), v, gate)
    for rounded in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=rf"gate.log_decay: expected float32, got {rounded}"):
            linear_steps(q, k, v, gate.map(lambda part, to=rounded: part.to(to)))  # type: ignore[misc]
    long = [x.repeat(1, 8, 1, 1) for x in (q, k, v)]
    assert f"1 to {MOST_TOKENS} tokens at a time, got 72" in get("gla").refuses("triton", Call(*long, Gate()))
    double = Call(*(x.double() for x in (q, k, v)), gate)
    assert "expected bfloat16, float16 or float32, got torch.float64" in get("gla").refuses("triton", double)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"state": torch.zeros(2, 2, 8, 8, device="meta")}, ValueError, "state: expected the device of q .*, got meta"),
        ({"active": [1, 1]}, TypeError, "active: expected a tensor, got list"),
        ({"decay": 0.5}, TypeError, "decay: expected a Decay or a tensor or None, got 0.5"),
        ({"norm": "l2"}, TypeError, "norm: expected a Norm, a number or None, got 'l2'"),
        ({"maps": ("silu",)}, ValueError, "maps: expected two names"),
        ({"gate_first": "no"}, TypeError, "gate_first: expected True or False, got 'no'"),
    ],
)
def test_what_a_whole_step_cannot_take_is_named(given: dict[str, Any], error: type[Exception], said: str) -> None:
    x, state = torch.randn(2, 1, 2, 8, device=DEVICE), torch.zeros(2, 2, 8, 8, device=DEVICE)
    usual = {"state": state, "active": torch.ones(2, dtype=torch.int32, device=DEVICE)}
    usual |= {name: y for name, y in given.items() if name in usual}
    parts = RecurrentParts(**{name: part for name, part in given.items() if name not in usual})
    with pytest.raises(error, match=said):
        linear_step(x, x, x, **usual, parts=parts)


def test_a_state_is_not_written_to_by_mistake() -> None:
    x, state = torch.randn(2, 1, 2, 8, device=DEVICE), torch.zeros(2, 2, 8, 8, device=DEVICE)
    with pytest.raises(TypeError, match="in_place: expected True or False, got 'no'"):
        linear_steps(x, x, x, Gate(), state, in_place="no")  # type: ignore[arg-type]
    assert not state.any()
