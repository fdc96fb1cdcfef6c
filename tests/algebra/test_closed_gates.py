"""A log gate of -1e4 or less is closed: what comes out is, bit for bit, what comes out for -inf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnzoo import Gate, get, list_variants
from attnzoo.algebra.block_decay import block_decay
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import HeadGate
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.path import path_attention
from attnzoo.samples import random_inputs
from attnzoo.testing import CPU_FORMS, Form, Inputs, assert_close, block_sizes, extend_with_steps, value_and_gradients

DECAYING = [name for name in list_variants() if {"log_decay", "log_diag"} & set(get(name).requires)]
SCALAR = [name for name in DECAYING if "log_decay" in get(name).requires]
FINITE = [-1e4, torch.finfo(torch.float32).min, torch.finfo(torch.float64).min]


def with_gates(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    q, k, v, gate = inputs
    logs = {part: change(getattr(gate, part)) for part in ("log_decay", "log_diag") if part in gate.parts}
    return q, k, v, replace(gate, **logs)


def ways(name: str) -> dict[str, Form]:
    """Everything that computes variant ``name`` here: the oracle, each form, and pieces over a state."""
    variant = get(name)
    forms = {form: run for form, run in variant.forms.items() if form in CPU_FORMS}
    return {"oracle": variant.oracle, **forms, "extend": lambda *inputs: extend_with_steps(variant, inputs)}


@pytest.mark.parametrize("name", DECAYING)
def test_large_finite_gates_are_closed_exactly(name: str) -> None:
    """Scores are so large that exp(-1e4) of a past key would still be seen."""
    q, k, v, gate = random_inputs(name, B=1, T=11, H=2, G=1, K=4, V=3, regime="closed")
    closed = (100 * q, 100 * k, v, gate)
    with block_sizes(4):
        for way, form in ways(name).items():
            expected = value_and_gradients(form, closed)
            for value in FINITE:
                masked = with_gates(closed, lambda g, value=value: g.masked_fill(g.isneginf(), value))  # type: ignore[misc]
                got = value_and_gradients(form, masked)
                assert all(torch.equal(got[part], expected[part]) for part in expected), (way, value)


@pytest.mark.parametrize("name", DECAYING)
def test_gates_that_are_just_open_equal_the_oracle(name: str) -> None:
    """-9999 is a number like others, and drowns none of the gates after it."""
    inputs = random_inputs(name, B=1, T=70, H=2, G=1, K=4, V=3, regime="open")
    generator = torch.Generator().manual_seed(0)
    strong = with_gates(inputs, lambda g: g.masked_fill(torch.rand(g.shape, generator=generator) < 0.2, -9999.0))
    expected = value_and_gradients(ways(name)["oracle"], strong)
    for way, form in ways(name).items():
        assert_close(value_and_gradients(form, strong), expected, what=f"{way} of {name}")


@pytest.mark.parametrize("name", SCALAR)
def test_a_constant_gate_may_be_closed(name: str) -> None:
    q, k, v, gate = random_inputs(name, B=1, T=9, H=2, G=1, K=4, V=3)
    for way, form in ways(name).items():
        outputs = [
            form(30 * q, 30 * k, v, replace(gate, log_decay=torch.tensor([g, -0.1]).double()))
            for g in (-1e4, -torch.inf)
        ]
        assert torch.equal(*outputs), way


@pytest.mark.parametrize("form", ["chunk", "parallel"])
@pytest.mark.parametrize("name", ["gated_gla", "mamba3"])
def test_gates_between_tokens_that_are_cut_off_get_no_gradient(name: str, form: str) -> None:
    """Not even a rounding of a token's score with itself."""
    q, k, v, gate = random_inputs(name, B=1, T=40, H=2, K=8, V=3, dtype=torch.float32, regime="open")
    gradients = value_and_gradients(get(name).forms[form], (q, k, v, replace(gate, log_decay=torch.full((2,), -1e4))))
    assert all(not gradients[part].any() for part in ("log_diag", "angle") if part in gate.parts)


@pytest.mark.parametrize("value", FINITE[:-1])
@pytest.mark.parametrize("family", ["fox", "alibi", "path_fox"])
def test_kernels_references_close_the_same_gates(family: str, value: float) -> None:
    def run(gate: Gate) -> Tensor:
        if family == "path_fox":
            return path_attention(q, k, v, w=gate.w, beta=gate.beta, log_decay=gate.log_decay, impl="reference")
        return fox_attention(q, k, v, log_decay=gate.log_decay, impl="reference")

    q, k, v, gate = random_inputs(family, B=1, T=19, H=2, G=1, dtype=torch.float32, regime="closed")
    q, k = 100 * q, 100 * k
    if family == "alibi":
        gate = Gate(log_decay=torch.tensor([-torch.inf, -0.5]))
    closed = replace(gate, log_decay=gate.log_decay.masked_fill(gate.log_decay.isneginf(), value))
    assert torch.equal(run(closed), run(gate))


class NoGradientAtBounds(TorchFunctionMode):
    """``clamp`` as torch has it from 2.14 on: where x equals a bound its gradient is 0, not 1."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ not in ("clamp", "clamp_", "clamp_min", "clamp_max"):
            return func(*args, **kwargs)
        x, *bounds = args
        at_bound = sum((x == bound for bound in (*bounds, *kwargs.values()) if bound is not None), torch.tensor(False))
        y = func(*args, **kwargs)
        return torch.where(at_bound, y.detach(), y)


def scalar(log: Tensor) -> Tensor:
    return block_decay(log[..., 0]).between.tril()


def per_channel(log: Tensor) -> Tensor:
    return Diagonal().block(*torch.ones(2, 6, 3, dtype=log.dtype), HeadGate(log_diag=log)).scores.tril()


@pytest.mark.parametrize("decays", [scalar, per_channel])
@pytest.mark.parametrize("closed", [False, True])
def test_open_gates_have_their_gradients_whatever_clamp_has_at_its_bound(decays, closed: bool) -> None:
    log = -torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log[1::2] = 0.0
    if closed:
        log[2] = -torch.inf

    def gradient(log: Tensor) -> Tensor:
        y = decays(log.requires_grad_())
        return torch.autograd.grad(y[y.isfinite()].sum(), log)[0]

    expected = gradient(log.clone())
    with NoGradientAtBounds():
        assert torch.equal(gradient(log.clone()), expected)


def test_the_score_of_a_token_with_itself_leaves_no_rounding_in_the_gradient_of_a_gate() -> None:
    log = torch.full((6, 3), -0.3).index_fill(0, torch.tensor([4]), -torch.inf).requires_grad_()
    weight = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)).tril(-1)
    expected, got = (
        torch.autograd.grad((scalar(log).exp() * (weight + own * torch.eye(6))).sum(), log)[0] for own in (0.0, 1e6)
    )
    assert torch.equal(got, expected)
