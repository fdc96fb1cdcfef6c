"""Reductions between variants, and each variant against the formula of its paper written without our algebra."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo import Gate, get, list_variants
from attnzoo.registry.table import PAIRS
from attnzoo.samples import random_inputs
from attnzoo.testing import CPU_FORMS, LIMIT, Inputs, assert_close, block_sizes, relative_error, value_and_gradients

B, T, H, G, K, V = 2, 37, 4, 2, 8, 6
Change = Callable[[Gate], Gate]


def closed_free(gate: Gate) -> Gate:
    return gate


def _zeros(name: str, *parts: str) -> Change:
    """The gate of variant ``name`` with ``parts`` at zero, from a gate that has the others."""
    shapes = {"log_decay": (B, T, H), "log_diag": (B, T, H, K), "angle": (B, T, H, K // 2), "beta": (B, T, G)}

    def change(gate: Gate) -> Gate:
        for part in parts:
            gate = replace(gate, **{part: torch.zeros(shapes[part], dtype=torch.float64)})
        if "w" in get(name).requires and gate.w is None:
            gate = replace(gate, w=F.normalize(torch.randn(B, T, G, K, dtype=torch.float64), dim=-1))
        return gate

    return change


def equal_channels(gate: Gate) -> Gate:
    assert gate.log_decay is not None
    return Gate(log_diag=gate.log_decay[..., None].expand(B, T, H, K).contiguous())


def only_shared_angle(gate: Gate) -> Gate:
    return Gate(angle=torch.zeros(K // 2, dtype=torch.float64))


# the first variant with a gate of the third column is the second variant
REDUCTIONS = [
    ("mamba2", "linear_attention", _zeros("mamba2", "log_decay")),
    ("retnet", "linear_attention", _zeros("retnet", "log_decay")),
    ("gla", "linear_attention", _zeros("gla", "log_diag")),
    ("complex_linear", "linear_attention", _zeros("complex_linear", "angle")),
    ("complex_linear", "linear_attention", only_shared_angle),
    ("deltanet", "linear_attention", _zeros("deltanet", "beta")),
    ("gated_deltanet", "linear_attention", _zeros("gated_deltanet", "beta", "log_decay")),
    ("gated_deltanet", "deltanet", _zeros("gated_deltanet", "log_decay")),
    ("gated_deltanet", "mamba2", _zeros("gated_deltanet", "beta")),
    ("mamba2", "retnet", closed_free),
    ("gla", "mamba2", equal_channels),
    ("alibi", "nope", _zeros("alibi", "log_decay")),
    ("fox", "nope", _zeros("fox", "log_decay")),
    ("wall", "nope", _zeros("wall", "log_diag")),
    ("rope", "nope", _zeros("rope", "angle")),
    ("rope", "nope", only_shared_angle),
    ("path", "nope", _zeros("path", "beta")),
    ("path_fox", "nope", _zeros("path_fox", "beta", "log_decay")),
    ("path_fox", "path", _zeros("path_fox", "log_decay")),
    ("path_fox", "fox", _zeros("path_fox", "beta")),
    ("fox", "alibi", closed_free),
]


@pytest.mark.covering
@pytest.mark.parametrize("form", CPU_FORMS)
@pytest.mark.parametrize("regime", ["mixed", "open", "closing"])
@pytest.mark.parametrize(
    ("name", "to", "gate_of"), REDUCTIONS, ids=[f"{a}-{b}-{i}" for i, (a, b, _) in enumerate(REDUCTIONS)]
)
def test_variant_reduces_to(name: str, to: str, gate_of: Change, regime: str, form: str) -> None:
    """Values and the gradients of q, k, v, in every form that both have."""
    if form not in get(name).forms:
        form = "recurrent"
    q, k, v, gate = random_inputs(to, B, T, H, G, K, V, regime=regime)
    with block_sizes(8):
        got = value_and_gradients(lambda q, k, v, _: get(name).forms[form](q, k, v, gate_of(gate)), (q, k, v, Gate()))
        expected = value_and_gradients(lambda q, k, v, _: get(to).forms["parallel"](q, k, v, gate), (q, k, v, Gate()))
    assert_close(got, expected)


def test_every_variant_is_in_a_reduction() -> None:
    builtin = {name for pair in PAIRS for name in (pair.linear, pair.softmax)}
    assert builtin <= {name for row in REDUCTIONS for name in row[:2]}


def inputs_of(name: str, regime: str = "open", heads: int = 3) -> Inputs:
    """One row, no grouping."""
    return random_inputs(name, 1, 29, heads, heads, 8, 6, regime=regime)  # type: ignore[arg-type]


def forms_of(name: str) -> list[Callable[..., Tensor]]:
    return [form for label, form in get(name).forms.items() if label in CPU_FORMS]


def causal_softmax(logits: Tensor, v: Tensor) -> Tensor:
    """logits ``[B, T, T, H]``."""
    future = torch.ones(logits.shape[1:3], dtype=torch.bool).triu(1)[None, :, :, None]
    return torch.einsum("btjh,bjhv->bthv", logits.masked_fill(future, -torch.inf).softmax(2), v)


def dot_products(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthk,bjhk->btjh", q, k) / math.sqrt(q.shape[-1])


def check(name: str, inputs: Inputs, expected: Tensor) -> None:
    with block_sizes(8):
        for form in forms_of(name):
            assert relative_error(form(*inputs), expected) <= LIMIT


# papers


def test_linear_attention_equals_masked_product() -> None:
    q, k, v, gate = inputs_of("linear_attention")
    check("linear_attention", (q, k, v, gate), torch.einsum("btjh,bjhv->bthv", dot_products(q, k) * causal(29), v))


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.float64).tril()[None, :, :, None]


def test_nope_equals_sdpa() -> None:
    q, k, v, gate = inputs_of("nope")
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    check("nope", (q, k, v, gate), o)


def test_retnet_equals_powers_of_gamma() -> None:
    q, k, v, _ = inputs_of("retnet")
    gamma = 1 - 2.0 ** (-5 - torch.arange(3, dtype=torch.float64))
    t = torch.arange(29)
    powers = gamma ** (t[:, None] - t).clamp(min=0)[..., None] * causal(29)
    gate = Gate(log_decay=gamma.log().expand(1, 29, 3).contiguous())
    check("retnet", (q, k, v, gate), torch.einsum("btjh,bjhv->bthv", dot_products(q, k) * powers, v))


def test_alibi_equals_minus_slope_times_distance() -> None:
    q, k, v, _ = inputs_of("alibi")
    slope = 2.0 ** (-8 * torch.arange(1, 4, dtype=torch.float64) / 3)
    t = torch.arange(29)
    bias = -slope * (t[:, None] - t)[..., None]
    check(
        "alibi",
        (q, k, v, Gate(log_decay=-slope.expand(1, 29, 3).contiguous())),
        causal_softmax(dot_products(q, k) + bias, v),
    )


def test_mamba2_equals_its_recurrence() -> None:
    q, k, v, gate = inputs_of("mamba2", "mixed")
    check("mamba2", (q, k, v, gate), loop(q, k, v, lambda S, t: S * gate.log_decay[:, t].exp()[..., None, None]))  # type: ignore[index]


def loop(q: Tensor, k: Tensor, v: Tensor, forget: Callable[[Tensor, int], Tensor]) -> Tensor:
    """State ``[B, H, K, V]``, token by token."""
    S = q.new_zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        S = forget(S, t) + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t] / math.sqrt(q.shape[-1])))
    return torch.stack(out, 1)


def test_fox_equals_log_forget_gates_between() -> None:
    q, k, v, gate = inputs_of("fox")
    f = gate.log_decay.exp()  # type: ignore[union-attr]
    logits = dot_products(q, k).clone()
    for t in range(29):
        for j in range(t):
            logits[:, t, j] += f[:, j + 1 : t + 1].log().sum(1)
    check("fox", (q, k, v, gate), causal_softmax(logits, v))


def test_gla_equals_its_recurrence() -> None:
    q, k, v, gate = inputs_of("gla", "mixed")
    check("gla", (q, k, v, gate), loop(q, k, v, lambda S, t: S * gate.log_diag[:, t].exp()[..., None]))  # type: ignore[index]


def test_wall_equals_channels_weighted_by_their_decay() -> None:
    q, k, v, gate = inputs_of("wall")
    c = gate.log_diag.cumsum(1)  # type: ignore[union-attr]
    decay = (c[:, :, None] - c[:, None]).clamp(max=0).exp()
    logits = torch.einsum("bthk,bjhk,btjhk->btjh", q, k, decay) / math.sqrt(8)
    check("wall", (q, k, v, gate), causal_softmax(logits, v))


def test_wall_of_equal_channels_multiplies_the_score() -> None:
    """A scalar gate inside the dot product: it scales the logit, where FoX adds to it."""
    q, k, v, gate = inputs_of("fox")
    c = gate.log_decay.cumsum(1)  # type: ignore[union-attr]
    logits = dot_products(q, k) * (c[:, :, None] - c[:, None]).clamp(max=0).exp()
    diag = gate.log_decay[..., None].expand(1, 29, 3, 8).contiguous()  # type: ignore[index]
    check("wall", (q, k, v, Gate(log_diag=diag)), causal_softmax(logits, v))


def test_wall_closed_leaves_the_past_at_logit_zero() -> None:
    """A closed matrix transition does not hide the past: exp(0) stays in the softmax."""
    q, k, v, _ = inputs_of("wall")
    own = torch.diag_embed(torch.einsum("bthk,bthk->bht", q, k) / math.sqrt(8)).permute(0, 2, 3, 1)
    check("wall", (q, k, v, Gate(log_diag=torch.full_like(q, -torch.inf))), causal_softmax(own, v))


def test_rope_equals_textbook_rope() -> None:
    """Su et al., eq. 15: position t turns the pair (2i, 2i+1) by t times theta_i, as complex numbers."""
    q, k, v, _ = inputs_of("rope")
    theta = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones(29, 4, dtype=torch.float64), torch.arange(29)[:, None] * theta)[:, None]

    def turned(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)

    expected = causal_softmax(dot_products(turned(q), turned(k)), v)
    check("rope", (q, k, v, Gate(angle=theta)), expected)
    check("rope", (q, k, v, Gate(angle=theta.expand(1, 29, 3, 4).contiguous())), expected)


def test_complex_linear_equals_complex_arithmetic() -> None:
    q, k, v, gate = inputs_of("complex_linear")
    zq, zk = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    turn = torch.polar(torch.ones_like(gate.angle), gate.angle)  # type: ignore[arg-type]
    S = torch.zeros(1, 3, 4, 6, dtype=torch.complex128)
    out = []
    for t in range(29):
        S = S * turn[:, t, :, :, None] + zk[:, t].conj()[..., None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", S, zq[:, t]).real / math.sqrt(8))
    check("complex_linear", (q, k, v, gate), torch.stack(out, 1))


def test_half_turns_alternate_the_sign() -> None:
    q, k, v, _ = inputs_of("complex_linear")
    t = torch.arange(29)
    sign = torch.where((t[:, None] - t) % 2 == 0, 1.0, -1.0).double()[None, :, :, None]
    gate = Gate(angle=torch.full((4,), math.pi, dtype=torch.float64))
    check("complex_linear", (q, k, v, gate), torch.einsum("btjh,bjhv->bthv", dot_products(q, k) * sign * causal(29), v))
    check("rope", (q, k, v, gate), causal_softmax(dot_products(q, k) * sign, v))


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_delta_rule_equals_its_paper(name: str) -> None:
    """Erase what the unit key reads, write beta times the error: w = k, and the write strength in the value."""
    q, k, v, gate = inputs_of(name)
    k = F.normalize(k, dim=-1)
    beta = gate.beta
    assert beta is not None
    S = torch.zeros(1, 3, 6, 8, dtype=torch.float64)  # values by keys, as in the papers
    out = []
    for t in range(29):
        if gate.log_decay is not None:
            S = S * gate.log_decay[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t])
        S = S + beta[:, t, :, None, None] * error[..., :, None] * k[:, t, :, None, :]
        out.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]) / math.sqrt(8))
    check(name, (q, k, beta[..., None] * v, replace(gate, w=k)), torch.stack(out, 1))


@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_path_equals_explicit_products(name: str) -> None:
    q, k, v, gate = inputs_of(name)
    w, beta = gate.w, gate.beta
    assert w is not None
    assert beta is not None
    eye = torch.eye(8, dtype=torch.float64)
    factor = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    logits = torch.zeros(1, 29, 29, 3, dtype=torch.float64)
    for t in range(29):
        product, bias = eye, 0.0
        for j in range(t, -1, -1):
            logits[:, t, j] = (
                torch.einsum("bhk,bhkl,bhl->bh", k[:, j], product.expand(1, 3, 8, 8), q[:, t]) / math.sqrt(8) + bias
            )
            product = factor[:, j] @ product
            if gate.log_decay is not None:  # unscaled
                bias = bias + gate.log_decay[:, j]
    check(name, (q, k, v, gate), causal_softmax(logits, v))


def test_two_reflections_are_a_rotation() -> None:
    """beta = 2 reflects; every second token reflecting at the first axis makes DeltaNet a complex recurrence."""
    angle = torch.rand(14, dtype=torch.float64) * math.pi
    w = torch.zeros(1, 28, 1, 2, dtype=torch.float64)
    w[0, 0::2, 0, 0] = 1.0
    w[0, 1::2, 0] = torch.stack([(angle / 2).cos(), (angle / 2).sin()], -1)
    q, k, v, _ = random_inputs("deltanet", 1, 28, 1, 1, 2, 3)
    k[:, 0::2] = 0  # written and read after both reflections only
    reflected = (q, k, v, Gate(w=w, beta=torch.full((1, 28, 1), 2.0, dtype=torch.float64)))
    # I - 2 e e^T first in time is leftmost: R_1 R_2 = Refl(0) Refl(angle / 2) = Rot(-angle)
    turned = q[:, 1::2], k[:, 1::2], v[:, 1::2], Gate(angle=-angle[None, :, None, None])
    expected = get("complex_linear").forms["parallel"](*turned)
    for form in forms_of("deltanet"):
        assert relative_error(form(*reflected)[:, 1::2], expected) <= LIMIT


@pytest.mark.parametrize("name", list_variants())
def test_scale_default_is_one_over_root_k(name: str) -> None:
    inputs = random_inputs(name)
    for form in forms_of(name):
        assert torch.equal(form(*inputs), form(*inputs, scale=8**-0.5))


@pytest.mark.parametrize("name", list_variants("linear"))
def test_linear_side_is_linear_in_v_and_scale(name: str) -> None:
    q, k, v, gate = random_inputs(name)
    for form in forms_of(name):
        assert relative_error(form(q, k, 3 * v, gate, scale=0.5), 3 * form(q, k, v, gate, scale=0.5)) <= LIMIT
        assert relative_error(form(q, k, v, gate, scale=1.0), 2 * form(q, k, v, gate, scale=0.5)) <= LIMIT


@pytest.mark.parametrize("name", list_variants("softmax"))
def test_softmax_side_averages_values(name: str) -> None:
    q, k, v, gate = random_inputs(name)
    for form in forms_of(name):
        assert relative_error(form(q, k, torch.ones_like(v), gate), torch.ones(1, dtype=torch.float64)) <= LIMIT
