"""A transition of one's own: its forms are held to the matrices that it says, in whatever order it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, Pair, build_attention, describe, get, list_variants, oracle, register
from attnzoo import verify as verification
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import HeadGate, Product, Transition
from attnzoo.recurrences.deltanet import Householder
from attnzoo.registry import unregister
from attnzoo.samples import random_inputs
from attnzoo.testing import LIMIT, Case, assert_close, relative_error, value_and_gradients

SANDWICH = Pair(
    "sandwich", "sandwich_path", ("log_diag", "w", "beta"),
    transition=Product(Householder(), Diagonal(), Householder()),
)  # fmt: skip


@pytest.fixture
def sandwich() -> Iterator[Pair]:
    register(SANDWICH)
    yield SANDWICH
    unregister(SANDWICH)


def written_out(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """Both readouts of R_t = H_t D_t H_t, from the equations of the algebra's page."""
    B, T, H, K = q.shape
    k, v, w, beta = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v, gate.w, gate.beta))
    eye = torch.eye(K, dtype=q.dtype)
    erase = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    R = erase @ torch.diag_embed(gate.log_diag.exp()) @ erase
    scores = q.new_full((B, H, T, T), -torch.inf)
    for t in range(T):
        back = q[:, t, :, :, None] * K**-0.5
        for j in range(t, -1, -1):
            scores[:, :, t, j] = (k[:, j, :, None] @ back)[..., 0, 0]
            back = R[:, j] @ back
    weights = scores.masked_fill(scores == -torch.inf, 0.0), scores.softmax(-1)
    return tuple(torch.einsum("bhtj,bjhv->bthv", weight, v) for weight in weights)  # type: ignore[return-value]


@pytest.mark.usefixtures("sandwich")
def test_a_product_in_any_order_is_verified_as_what_it_is() -> None:
    inputs = random_inputs("sandwich", B=1, T=9)
    for name, expected in zip(("sandwich", "sandwich_path"), written_out(*inputs), strict=True):
        variant = get(name)
        assert relative_error(variant.oracle(*inputs), expected) <= 1e-12
        for form in variant.forms.values():
            assert relative_error(form(*inputs), expected) <= 1e-12
    assert all(check.ok for check in verification.verify(["sandwich"], verification.Where(examples=1)))


@pytest.mark.usefixtures("sandwich")
def test_a_pair_of_one_transition_has_layers_and_equations() -> None:
    x = torch.randn(1, 7, 16)
    for name in ("sandwich", "sandwich_path"):
        attn = build_attention(name, hidden_size=16, num_heads=2)
        cache = attn.new_cache()
        assert torch.allclose(torch.cat([attn(p, cache=cache) for p in x.split([5, 1, 1], 1)], 1), attn(x), atol=1e-6)
        assert describe(name).count("= (I − βₜ wₜ wₜᵀ) Diag(exp(aₜ)) (I − βₜ wₜ wₜᵀ)") == 2
    assert "triton" not in get("sandwich").forms  # it would multiply the same parts in its own order


def test_what_a_transition_says_is_the_product_of_its_parts_factors() -> None:
    """Two definitions of every set of parts: the class that the forms use, and the matrices of the parts."""
    for name, shared in product(list_variants(), (False, True)):
        q, k, v, gate = Case(name, B=1, T=4, shared_angle=shared).inputs()
        said = oracle.matrices(q, gate, get(name).transition)
        for one, other in zip(said, oracle.matrices(q, gate), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-14)
        assert_close(value_and_gradients(get(name).oracle, (q, k, v, gate)), value_and_gradients(
            oracle.linear if get(name).side == "linear" else oracle.softmax, (q, k, v, gate)), LIMIT)  # fmt: skip


class Named(Transition):
    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return state


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"transition": "H D H"}, "pair.transition: expected an object of a class Transition, got 'H D H'"),
        (
            {"transition": Named(), "linear_module": "mine"},
            "pair.linear_module: expected none beside a transition, got 'mine'",
        ),
    ],
)
def test_what_is_no_transition_or_stands_beside_a_module_is_refused(more: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        register(Pair("one", "other", ("log_decay",), **more))


def test_a_transition_without_symbols_is_shown_by_its_class() -> None:
    assert Pair("one", "other", ("log_decay",), transition=Named()).R == "Named_t"
    assert SANDWICH.R == "(I - beta_t w_t w_t^T) Diag(exp(a_t)) (I - beta_t w_t w_t^T)"
