"""Products of transitions: their closed forms are derived, so each is held to explicit products of matrices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, reduce
from types import ModuleType
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import Gate, Pair, Prune, build_attention, get, oracle, register
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.parts import PARTS, Draws
from attnzoo.algebra.transitions import HeadGate, Identity, Product, Transition, heads_first
from attnzoo.forms.linear import LinearForms
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.recurrences.complex_linear import Rotation
from attnzoo.recurrences.deltanet import Householder
from attnzoo.registry import unregister
from attnzoo.samples import Regime, random_inputs
from attnzoo.testing import LIMIT, Inputs, assert_close, block_sizes, in_float64, relative_error, value_and_gradients

FACTORS: dict[str, tuple[Transition, tuple[str, ...]]] = {
    "diagonal": (Diagonal(), ("log_diag",)),
    "rotation": (Rotation(), ("angle",)),
    "householder": (Householder(), ("w", "beta")),
}
# in the order of Gate.dense, which is the oracle's
ORDERED = [
    ("diagonal", "householder"),
    ("rotation", "householder"),
    ("diagonal", "rotation"),
    ("diagonal", "rotation", "householder"),
]
OTHERS = [
    ("householder", "diagonal"),
    ("rotation", "diagonal"),
    ("householder", "rotation"),
    ("rotation", "diagonal", "householder"),
    ("householder", "rotation", "diagonal"),
]
B, H, G, K, V = 2, 4, 2, 6, 5
SIZES = {"H": H, "G": G, "K": K, "K/2": K // 2, "H or 1": H}


class ChannelDelta(Transition):
    """A third party's: Diagonal times Householder with nothing but the one method that must be written."""

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        w = cast(Tensor, gate.w)[..., None, :]
        state = cast(Tensor, gate.log_diag).exp()[..., None] * state
        return state - w.mT @ (cast(Tensor, gate.beta)[..., None, None] * (w @ state))


def product(names: tuple[str, ...]) -> Product:
    return Product(*(FACTORS[name][0] for name in names))


def inputs_for(
    names: tuple[str, ...], T: int, regime: Regime, *, decay: bool = False, dtype: torch.dtype = torch.float64
) -> Inputs:
    """The same parts whatever the others are: all are drawn, and those of ``names`` are given."""
    draws = Draws(regime, dtype, torch.Generator().manual_seed(T))
    wanted = {part for name in names for part in FACTORS[name][1]} | ({"log_decay"} if decay else set())
    sizes = {"B": B, "T": T, "L": 3, **SIZES}
    q, k, v = (draws.normal((B, T, n, c)) for n, c in ((H, K), (G, K), (G, V)))
    parts = {p: part.sample(draws, tuple(sizes[x] for x in part.shapes[0].split(", "))) for p, part in PARTS.items()}
    return q, k, v, Gate(**{p: x for p, x in parts.items() if p in wanted})


def forms_of(transition: Transition) -> Iterator[tuple[str, Callable[..., Tensor], bool]]:
    """Name, form, and whether it is on the linear side; small blocks, so that few tokens make many."""
    linear, softmax = LinearForms(transition, chunk_size=16), SoftmaxForms(transition)
    for name in ("recurrent", "parallel", "chunk"):
        yield name, getattr(linear, name), True
    for name in ("recurrent", "parallel"):
        yield name, getattr(softmax, name), False
    yield "linear pieces", lambda *x: pieces(linear, x), True
    yield "softmax pieces", lambda *x: pieces(softmax, x), False


def pieces(forms: Any, inputs: Any) -> Tensor:
    """In segments through the state: 7 tokens, one, and the rest."""
    q, k, v, gate = inputs
    state, outputs = None, []
    for start, stop in ((0, 7), (7, 8), (8, q.shape[1])):
        now = slice(start, stop)
        o, state = forms.extend(q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state)
        outputs.append(o)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("regime", get_args(Regime))
@pytest.mark.parametrize("names", ORDERED, ids="-".join)
def test_product_equals_oracle(names: tuple[str, ...], regime: Regime) -> None:
    """Values and all gradients, both sides, every form, with a scalar decay beside the product."""
    inputs = inputs_for(names, 21, regime, decay=True)
    expected = {
        True: value_and_gradients(oracle.linear, inputs), False: value_and_gradients(oracle.softmax, inputs),
    }  # fmt: skip
    with block_sizes(8):
        for form, compute, linear in forms_of(product(names)):
            if regime == "mixed" or form in ("parallel", "chunk"):
                assert_close(value_and_gradients(compute, inputs), expected[linear], what=f"{form}, linear={linear}")


@pytest.mark.parametrize("T", [1, 2, 13, 64, 67])
@pytest.mark.parametrize("names", ORDERED, ids="-".join)
def test_product_equals_oracle_at_real_block_sizes(names: tuple[str, ...], T: int) -> None:
    inputs = inputs_for(names, T, "mixed")
    for form in (LinearForms(product(names)).chunk, LinearForms(product(names)).parallel):
        assert relative_error(form(*inputs), oracle.linear(*inputs)) <= LIMIT
    assert relative_error(SoftmaxForms(product(names)).parallel(*inputs), oracle.softmax(*inputs)) <= LIMIT


def matrices(names: tuple[str, ...], gate: Gate, q: Tensor) -> Tensor:
    """R_t ``[B, T, H, K, K]``, the factors multiplied in the order of ``names``."""
    alone = [Gate(**{part: getattr(gate, part) for part in FACTORS[name][1]}) for name in names]
    return reduce(torch.matmul, [factor.dense(q)[1] for factor in alone])


@pytest.mark.parametrize("regime", ["mixed", "closing"])
@pytest.mark.parametrize("names", OTHERS, ids="-".join)
def test_product_is_in_the_order_given(names: tuple[str, ...], regime: Regime) -> None:
    """R_t = A_t B_t, which is not B_t A_t: against S_t = R_t^T S_{t-1} + k_t v_t^T, written out."""

    def naive(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        R = matrices(names, gate, q)
        kh, vh = (x.repeat_interleave(H // G, 2) for x in (k, v))
        S, outputs = q.new_zeros(B, H, K, V), []
        for t in range(q.shape[1]):
            S = R[:, t].mT @ S + kh[:, t, :, :, None] * vh[:, t, :, None, :]
            outputs.append((q[:, t, :, None, :] @ S)[..., 0, :] * K**-0.5)
        return torch.stack(outputs, 1)

    inputs = inputs_for(names, 21, regime)
    expected = value_and_gradients(naive, inputs)
    with block_sizes(8):
        for form, compute, linear in forms_of(product(names)):
            if linear and form != "recurrent":
                assert_close(value_and_gradients(compute, inputs), expected, what=form)
    backwards = LinearForms(product(names[::-1])).chunk(*inputs)
    assert relative_error(backwards, expected["o"]) > 1e-3


@pytest.mark.parametrize("regime", get_args(Regime))
def test_one_method_is_enough_for_a_transition(regime: Regime) -> None:
    """A third party's class with ``apply`` alone has every form, and they are those of the product of known ones."""
    inputs = inputs_for(("diagonal", "householder"), 21, regime)
    known = {True: value_and_gradients(oracle.linear, inputs), False: value_and_gradients(oracle.softmax, inputs)}
    with block_sizes(8):
        for form, compute, linear in forms_of(ChannelDelta()):
            if regime == "mixed" or form in ("parallel", "chunk"):
                assert_close(value_and_gradients(compute, inputs), known[linear], what=form)


def test_products_of_products_and_identities_are_products() -> None:
    inputs = inputs_for(("diagonal", "rotation", "householder"), 19, "mixed")
    D, R, E = (FACTORS[name][0] for name in ("diagonal", "rotation", "householder"))
    nested = [Product(D, Product(R, E)), Product(Product(D, R), E), Product(Identity(), D, R, Identity(), E)]
    for transition in (*nested, Product(Product(D, R, Identity()), Product(E, Identity()))):
        assert relative_error(LinearForms(transition).chunk(*inputs), oracle.linear(*inputs)) <= LIMIT
    assert nested[0].factors == (D, R, E)
    assert (Product(D, R).width, Product(Identity(), D).width, nested[0].width) == (2, 1, 0)


NEUTRAL = {"diagonal": "log_diag", "rotation": "angle", "householder": "beta"}


@pytest.mark.parametrize("regime", ["mixed", "closing"])
@pytest.mark.parametrize(
    ("names", "idle"), [(names, name) for names in ORDERED[:3] + OTHERS[:3] for name in names],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_neutral_factor_leaves_the_other(names: tuple[str, ...], idle: str, regime: Regime) -> None:
    q, k, v, gate = inputs_for(names, 27, regime)
    gate = replace(gate, **{NEUTRAL[idle]: torch.zeros_like(cast(Tensor, getattr(gate, NEUTRAL[idle])))})
    (other,) = (name for name in names if name != idle)
    transition, parts = FACTORS[other]
    alone = Gate(**{p: getattr(gate, p) for p in parts})
    with block_sizes(8):
        for (form, compute, _), (_, single, _) in zip(forms_of(product(names)), forms_of(transition), strict=True):
            assert relative_error(compute(q, k, v, gate), single(q, k, v, alone)) <= LIMIT, form


@cache
def float32_errors(names: tuple[str, ...], regime: Regime) -> list[float]:
    """The worst error of outputs and gradients of q, k, v against float64, of three forms."""
    transition = product(names) if len(names) > 1 else FACTORS[names[0]][0]
    worst = [0.0, 0.0, 0.0]
    for T in (66, 130):
        inputs = inputs_for(names, T, regime, dtype=torch.float32)
        wide = in_float64(inputs)
        linear, softmax = LinearForms(transition), SoftmaxForms(transition)
        for n, form in enumerate((linear.chunk, linear.parallel, softmax.parallel)):
            got, expected = value_and_gradients(form, inputs), value_and_gradients(form, wide)
            worst[n] = max(worst[n], *(relative_error(got[x], expected[x]) for x in ("o", "q", "k", "v")))
    return worst


@pytest.mark.parametrize("regime", ["closing", "closed"])
@pytest.mark.parametrize("names", [*ORDERED, ("householder", "diagonal")], ids="-".join)
def test_strong_gates_in_float32(names: tuple[str, ...], regime: Regime) -> None:
    """Log gates of -5 per token, and of -inf: finite, and within twice the error that the worst factor has alone."""
    allowed = [2 * max(errors) for errors in zip(*(float32_errors((name,), regime) for name in names), strict=True)]
    got = float32_errors(names, regime)
    assert all(error <= limit for error, limit in zip(got, allowed, strict=True)), (got, allowed)


class Count(TorchDispatchMode):
    """How many operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transition", [*map(product, ORDERED), ChannelDelta()], ids=lambda x: type(x).__name__)
def test_closed_form_has_no_loop_over_tokens(transition: Transition) -> None:
    """Sixteen times the tokens cost a few operations more, a number for each doubling."""

    def calls(T: int) -> int:
        q, k, _, gate = inputs_for(("diagonal", "rotation", "householder"), T, "closed")
        local = HeadGate.of(gate, q)
        with Count() as count:
            transition.block(heads_first(q, H, q.dtype), heads_first(k, H, q.dtype), local)
        return count.calls

    assert calls(256) < 2.5 * calls(16)


class Stretch(Transition):
    """R_t = 2 I: a key weighs more and more, and no decay bounds it."""

    expands = True

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return 2 * state


def test_nothing_is_pruned_where_a_transition_expands(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs("fox")
    for transition in (Stretch(), Product(Rotation(), Stretch()), Product(Product(Stretch(), Identity()), Rotation())):
        forms = SoftmaxForms(transition)
        for form in (forms.parallel, forms.recurrent, forms.extend):
            with pytest.raises(ValueError, match=r"prune: expected None \((Stretch|Product) makes vectors longer"):
                form(*inputs, prune=Prune())
    for name, made in (("stretched", LinearForms(Stretch())), ("stretched_fox", SoftmaxForms(Stretch()))):
        module = ModuleType(name)
        module.__dict__.update(FORMS=made, LAYER={"gate": "forget"})
        monkeypatch.setitem(sys.modules, name, module)
    pair = Pair("stretched", "stretched_fox", ("log_decay",), linear_module="stretched", softmax_module="stretched_fox")
    register(pair)
    try:
        assert not get("stretched_fox").prunable
        with pytest.raises(ValueError, match="acp: 'stretched_fox' makes vectors longer, so nothing bounds"):
            build_attention("stretched_fox", hidden_size=16, num_heads=2, acp=True)
        attn = build_attention("stretched_fox", hidden_size=16, num_heads=2, qk_norm="rms")
        with pytest.raises(ValueError, match="evict: 'stretched_fox' needs all its keys"):
            attn.new_cache(evict=1e-3)
    finally:
        unregister(pair)


def test_products_of_other_things_are_refused() -> None:
    with pytest.raises(ValueError, match="factors: expected at least two, got 1"):
        Product(Diagonal())
    with pytest.raises(TypeError, match="factor 1: expected a Transition, got <class"):
        Product(Diagonal(), Householder)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"Transition.apply: expected every transition to define it"):
        Transition().apply(HeadGate(), torch.zeros(1, 1, 2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("names", ORDERED, ids="-".join)
def test_product_equals_oracle_on_a_gpu(names: tuple[str, ...]) -> None:
    q, k, v, gate = inputs_for(names, 70, "mixed")
    inputs: Inputs = (q.cuda(), k.cuda(), v.cuda(), gate.map(Tensor.cuda))
    for form in (LinearForms(product(names)).chunk, LinearForms(product(names)).recurrent):
        assert relative_error(form(*inputs), oracle.linear(*inputs)) <= LIMIT
    assert relative_error(SoftmaxForms(product(names)).parallel(*inputs), oracle.softmax(*inputs)) <= LIMIT
    own = LinearForms(ChannelDelta()).chunk
    if names == ("diagonal", "householder"):
        assert relative_error(own(*inputs), oracle.linear(*inputs)) <= LIMIT
