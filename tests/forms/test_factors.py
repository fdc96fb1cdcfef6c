"""Several Householder-like factors per token: the axis of w and beta, in every form of both sides of the pairs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, Prune, get, oracle
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import HeadGate, Product, Transition
from attnzoo.forms.factors import sub_tokens, token_outputs
from attnzoo.forms.linear import LinearForms
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.recurrences.complex_linear import Rotation
from attnzoo.recurrences.deltanet import Householder
from attnzoo.samples import Regime, random_gate, random_inputs
from attnzoo.testing import LIMIT, Inputs, assert_close, block_sizes, relative_error, value_and_gradients

B, T, H, G, K = 2, 13, 4, 2, 6
NAMES = ("deltanet", "gated_deltanet", "path", "path_fox")
FORMS = [(name, form) for name in NAMES for form in get(name).forms if form not in ("triton", "fla")]


def inputs_for(name: str, n: int | None, regime: Regime = "mixed", dtype: torch.dtype = torch.float64) -> Inputs:
    return random_inputs(name, B, T, H, G, K, 5, factors=n, regime=regime, dtype=dtype)


def test_dense_is_the_product_in_the_order_of_the_axis() -> None:
    q, _, _, gate = inputs_for("path", 3)
    w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        each = [
            torch.eye(K, dtype=q.dtype) - beta[b, t, h // 2, f] * torch.outer(w[b, t, h // 2, f], w[b, t, h // 2, f])
            for f in range(3)
        ]
        assert torch.allclose(gate.dense(q)[1][b, t, h], each[0] @ each[1] @ each[2], atol=1e-14)


def test_a_head_gate_has_its_factors_behind_time() -> None:
    q, _, _, gate = inputs_for("gated_deltanet", 3)
    heads = HeadGate.of(gate, q)
    assert heads.factors == 3
    assert cast(Tensor, heads.w).shape == (B, H, T, 3, K)
    assert torch.equal(cast(Tensor, heads.at(4).beta), cast(Tensor, gate.beta)[:, 4].repeat_interleave(2, 1))
    assert torch.equal(cast(Tensor, heads.slice(2, 5).w)[:, 3, 1], cast(Tensor, gate.w)[:, 3, 1])
    blocks = heads.cut(8)
    assert blocks.tokens() == (B, H, 2, 8)
    assert cast(Tensor, blocks.at(2).w).shape == (B, H, 2, 3, K)
    assert blocks.map(torch.zeros_like).factors == 3


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("regime", ["mixed", "closed"])
def test_every_form_equals_the_oracle(name: str, form: str, regime: Regime) -> None:
    """Values and all gradients."""
    for n in (2, 3) if regime == "mixed" else (2,):
        inputs = inputs_for(name, n, regime)
        expected = value_and_gradients(get(name).oracle, inputs)
        with block_sizes(4):
            assert_close(value_and_gradients(get(name).forms[form], inputs), expected, what=f"{form}, n={n}")


@pytest.mark.parametrize("names", ["rotation", "diagonal", "diagonal rotation"])
def test_products_with_other_parts_equal_the_oracle(names: str) -> None:
    """The other parts come once per token, before its factors."""
    all_parts = {"rotation": (Rotation(), "angle"), "diagonal": (Diagonal(), "log_diag")}
    chosen = [all_parts[name] for name in names.split()]
    transition = Product(*(part for part, _ in chosen), Householder())
    q, k, v, gate = inputs_for("path_fox", 2)
    other = {"angle": random_inputs("rope", B, T, H, G, K)[3], "log_diag": random_inputs("gla", B, T, H, G, K)[3]}
    inputs: Inputs = (q, k, v, replace(gate, **{part: getattr(other[part], part) for _, part in chosen}))
    linear, softmax = LinearForms(transition, chunk_size=4), SoftmaxForms(transition)
    with block_sizes(4):
        for form in (linear.recurrent, linear.chunk):
            assert_close(value_and_gradients(form, inputs), value_and_gradients(oracle.linear, inputs))
        assert_close(value_and_gradients(softmax.parallel, inputs), value_and_gradients(oracle.softmax, inputs))
        assert relative_error(softmax.recurrent(*inputs), oracle.softmax(*inputs)) <= LIMIT


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_one_factor_with_an_axis_is_the_one_without(name: str, form: str) -> None:
    q, k, v, gate = inputs_for(name, None)
    several = replace(gate, w=cast(Tensor, gate.w).unsqueeze(3), beta=cast(Tensor, gate.beta).unsqueeze(3))
    assert torch.equal(get(name).forms[form](q, k, v, several), get(name).forms[form](q, k, v, gate))


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_factors_are_sub_tokens_that_write_nothing(name: str) -> None:
    """n tokens of one factor each for every token: the first forgets, the last one reads and writes."""
    n = 3
    q, k, v, gate = inputs_for(name, n)

    silent = [torch.stack([*[torch.zeros_like(x)] * (n - 1), x], 3) for x in (k, v)]
    fine = sub_tokens(q, *silent, gate)
    expected = token_outputs(oracle.linear(*fine), n)
    assert relative_error(get(name).forms["chunk"](q, k, v, gate), expected) <= LIMIT


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_the_delta_rule_writes_with_every_factor(name: str) -> None:
    """DeltaProduct as the paper has it, token by token and factor by factor."""
    n = 3
    q, _, _, gate = inputs_for(name, n)
    k, v, beta = cast(Tensor, gate.w), torch.randn(B, T, G, n, 5, dtype=q.dtype), cast(Tensor, gate.beta)
    kh, vh, bh = (x.repeat_interleave(H // G, 2) for x in (k, v, beta))
    S, expected = q.new_zeros(B, H, K, 5), []
    for t in range(T):
        if gate.log_decay is not None:
            S = gate.log_decay[:, t, :, None, None].exp() * S
        for f in range(n):
            key, value = kh[:, t, :, f, :, None], vh[:, t, :, f, None, :]
            S = S + bh[:, t, :, f, None, None] * key * (value - (S * key).sum(-2, keepdim=True))
        expected.append(K**-0.5 * (q[:, t, :, None] @ S)[:, :, 0])
    fine = sub_tokens(q, k, v, gate)
    o, state = get(name).extend(*fine, delta_rule=True)
    assert relative_error(token_outputs(o, n), torch.stack(expected, 1)) <= LIMIT
    assert relative_error(state.matrix, S) <= LIMIT
    with pytest.raises(ValueError, match="is as many tokens: attnzoo.forms.factors.sub_tokens"):
        get(name).extend(q, k[:, :, :, 0], v[:, :, :, 0], gate, delta_rule=True)


@pytest.mark.parametrize("name", NAMES)
def test_neutral_factors_change_nothing(name: str) -> None:
    """beta = 0 in all but one, wherever it stands."""
    q, k, v, gate = inputs_for(name, 3)
    beta = cast(Tensor, gate.beta)
    for f in range(3):
        only = torch.zeros_like(beta)
        only[..., f] = beta[..., f]
        alone = replace(gate, w=cast(Tensor, gate.w)[:, :, :, f], beta=beta[..., f])
        run = get(name).forms["chunk" if get(name).side == "linear" else "parallel"]
        assert relative_error(run(q, k, v, replace(gate, beta=only)), run(q, k, v, alone)) <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_segments_padding_and_packing(name: str) -> None:
    q, k, v, gate = inputs_for(name, 2)
    variant, expected = get(name), get(name).oracle(q, k, v, gate)
    state, token_outputs = None, []
    for a, b in ((0, 6), (6, 7), (7, 8), (8, T)):
        o, state = variant.extend(q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), state)
        token_outputs.append(o)
    assert relative_error(torch.cat(token_outputs, 1), expected) <= LIMIT
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 4:6], valid[1, :3] = False, False
    o = variant.forms[next(iter(variant.forms))](q, k, v, gate, valid=valid)
    rows = valid[0].nonzero()[:, 0]
    alone = variant.oracle(q[:1, rows], k[:1, rows], v[:1, rows], gate.map(lambda x: x[:1, rows]))
    assert relative_error(o[:1, rows], alone) <= LIMIT
    borders, one = torch.tensor([0, 6, 7, T]), gate.map(lambda x: x[:1])
    form = "chunk" if variant.side == "linear" else "parallel"
    packed = variant.forms[form](q[:1], k[:1], v[:1], one, cu_seqlens=borders)
    for a, b in itertools.pairwise(borders.tolist()):
        alone = variant.oracle(q[:1, a:b], k[:1, a:b], v[:1, a:b], one.slice(a, b))
        assert relative_error(packed[:, a:b], alone) <= LIMIT


@pytest.mark.parametrize("name", ["path", "path_fox"])
@pytest.mark.parametrize("form", ["parallel", "recurrent"])
def test_window_sink_and_lse(name: str, form: str) -> None:
    inputs, sink = inputs_for(name, 2), torch.linspace(-1, 1, H, dtype=torch.float64)
    options: Any = {"window": 6, "sink": sink, "return_lse": True, "scale": 0.3}
    with block_sizes(4):
        o, lse = get(name).forms[form](*inputs, **options)
    expected, total = cast(tuple[Tensor, Tensor], oracle.softmax(*inputs, **options))
    assert relative_error(o, expected) <= LIMIT
    assert relative_error(lse, total) <= LIMIT


def test_pruned_rows_lose_no_more_than_eps() -> None:
    """Factors do not lengthen a vector, however many there are: the certificate holds."""
    q, k, v, gate = random_inputs("path_fox", 1, 300, 2, 2, 8, 4, factors=3, seed=3)
    gate = replace(gate, log_decay=torch.full_like(cast(Tensor, gate.log_decay), -0.1))
    eps, run = 1e-2, get("path_fox").forms["parallel"]
    (o, lse), (exact, total) = (run(0.3 * q, k, v, gate, prune=x, return_lse=True) for x in (Prune(eps=eps), None))
    lost = 1 - (lse - total).exp()
    assert 0 < float(lost.max()) <= eps
    assert float((o - exact).abs().max()) <= 2 * eps * float(v.abs().max())


class OneFactor(Transition):
    """A third party's, which knows nothing of an axis of factors."""

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return state


@pytest.mark.parametrize(
    ("w", "beta", "message"),
    [
        ((B, T, G, 2, K), (B, T, G), rf"gate.beta: expected \[B, T, G, n\] = \({B}, {T}, {G}, 2\), got"),
        ((B, T, G, 2, K), (B, T, G, 3), rf"gate.beta: expected \[B, T, G, n\] = \({B}, {T}, {G}, 2\), got"),
        ((B, T, G, K), (B, T, G, 2), rf"gate.beta: expected \[B, T, G\] = \({B}, {T}, {G}\), got"),
        ((B, T, 2, G, 5), (B, T, G, 2), rf"gate.w: expected \[B, T, G, n, K\] = \({B}, {T}, {G}, 2, {K}\), got"),
        ((B, T, G, 0, K), (B, T, G, 0), rf"gate.w: expected \[B, T, G, n, K\] = \({B}, {T}, {G}, 1, {K}\), got"),
    ],
)
def test_axes_that_do_not_fit_are_refused(w: tuple[int, ...], beta: tuple[int, ...], message: str) -> None:
    q, k, v, _ = inputs_for("path", None)
    with pytest.raises(ValueError, match=message):
        get("path").forms["parallel"](q, k, v, Gate(w=torch.zeros(w).double(), beta=torch.zeros(beta).double()))


def test_transitions_that_know_one_factor_refuse_several() -> None:
    for forms in (LinearForms(OneFactor()), SoftmaxForms(OneFactor())):
        with pytest.raises(ValueError, match=r"gate.w: expected \[B, T, G, K\] \(OneFactor has one factor per token\)"):
            forms.forms["recurrent"](*inputs_for("path", 2))


def test_values_of_every_factor_are_read() -> None:
    q, k, v, gate = inputs_for("path", 2)
    long = cast(Tensor, gate.w).clone()
    long[0, 3, 1, 1] *= 1.1
    beta = torch.ones_like(cast(Tensor, gate.beta))
    with pytest.raises(ValueError, match="gate.w: expected lengths of at most 1, got 1.1"):
        get("path").forms["parallel"](q, k, v, replace(gate, w=long, beta=beta))


def test_factors_of_a_gate_without_any_are_refused() -> None:
    with pytest.raises(ValueError, match="factors: expected None, for gates of 'fox' have no w, got 3"):
        random_gate("fox", B, T, H, G, K, factors=3)
    with pytest.raises(ValueError, match="factors: expected None"):
        random_inputs("gla", factors=1)
    with pytest.raises(ValueError, match="factors: expected at least 1, got 0"):
        random_gate("path", B, T, H, G, K, factors=0)
