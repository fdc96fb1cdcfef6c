"""Laws that hold for every variant, each as a measurement: its error on one case."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra import oracle
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.pruning import Prune
from attnzoo.errors import unknown
from attnzoo.forms.protocol import REFERENCE
from attnzoo.layer.build import build_attention
from attnzoo.registry.pair import product_of
from attnzoo.registry.variant import Variant
from attnzoo.testing.case import Case, take
from attnzoo.testing.compare import (
    LIMIT,
    extend_in_segments,
    reference_forms,
    relative_error,
    relative_errors,
    value_and_gradients,
)

Errors = Mapping[str, Mapping[str, float]]  # by form, then by what is compared
EPS = 1e-2  # mass that pruning may drop
EXACT = 1e-13  # where the same sums are taken


def _holds_for_all(variant: Variant) -> str:
    return ""


@dataclass(frozen=True)
class Law:
    """One property.

    Args:
        says: it, in a sentence.
        measure: its errors on a case.
        budget: what each of them may reach.
        refuses: why it says nothing of a variant, or "".
        draws: what its cases need, as :func:`attnzoo.testing.cases` takes it.
    """

    says: str
    measure: Callable[[Case], Errors]
    budget: float = LIMIT
    refuses: Callable[[Variant], str] = _holds_for_all
    draws: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """The outcome of a law for a variant.

    Args:
        variant: its name.
        law: its name.
        budget: what errors may reach.
        worst: the largest error of each form, over all examples.
        examples: how many were drawn.
        refused: why the law says nothing of this variant; then nothing was drawn.
        case: the smallest that breaks it, or None.
        said: what is wrong there, and how to repeat it.
    """

    variant: str
    law: str
    budget: float
    worst: dict[str, float] = field(default_factory=dict)
    examples: int = 0
    refused: str = ""
    case: Case | None = None
    said: str = ""

    @property
    def ok(self) -> bool:
        return not self.said


def law_of(name: str) -> Law:
    """The law of that name.

    Raises:
        ValueError: no such law; the message lists them.
    """
    if name not in LAWS:
        raise unknown("law", name, LAWS)
    return LAWS[name]


def _forms(case: Case, option: str = "") -> dict[str, Callable[..., Any]]:
    """The forms at the case's scale, those alone that honour ``option``."""
    scaled = {} if case.scale is None else {"scale": case.scale}
    variant = case.variant
    return {
        name: functools.partial(form, **scaled)
        for name, form in reference_forms(variant).items()
        if not option or option in variant.options(name)
    }


def _equals_oracle(case: Case) -> Errors:
    inputs = case.inputs()
    expected = value_and_gradients(functools.partial(case.variant.oracle, scale=case.scale), inputs)
    with case.blocks():
        return {
            name: relative_errors(value_and_gradients(form, inputs), expected) for name, form in _forms(case).items()
        }


def _matrices(case: Case) -> Errors:
    q, _, _, gate = case.inputs()
    g, R = oracle.matrices(q, gate, case.variant.transition)
    return {"transition": {"R": relative_error(R, gate.dense(q)[1])}}


def _is_its_own(variant: Variant) -> str:
    if variant.readout is not None:
        return f"its transition is that of {variant.dual.name}"
    transition = variant.transition
    if transition is None:
        return "its forms name no transition"
    same = transition.shown == product_of(variant.requires)
    return "" if same else f"R_t = {transition.shown}, not the product of its parts' factors"


def _segments(case: Case) -> Errors:
    variant, inputs = case.variant, case.inputs()

    def run(edges: list[int]) -> dict[str, Tensor]:
        return value_and_gradients(lambda *x: extend_in_segments(variant, x, edges, case.scale)[0], inputs)

    with case.blocks():
        return {"extend": relative_errors(run(case.edges), run([0, case.T]))}


def _causality(case: Case) -> Errors:
    """Other tokens from the first cut on, and far larger ones; then other gates too, which may move the last digits
    where decays are taken relative to the middle of a block. The outputs before it may have no gradient there."""
    t, here, other = case.edges[1], case.inputs(), replace(case, seed=case.seed + 1).inputs()
    first, rest = take(here, tokens=slice(0, t)), take(other, tokens=slice(t, case.T))
    q, k, v = (torch.cat([a, 100 * b], 1) for a, b in zip(first[:3], rest[:3], strict=True))
    parts = {part: (getattr(first[3], part), getattr(rest[3], part)) for part in here[3].parts}
    gate = Gate(**{part: x if x.ndim == 1 else torch.cat([x, y], 1) for part, (x, y) in parts.items()})
    errors = {}
    with case.blocks():
        for name, form in _forms(case).items():
            got = value_and_gradients(lambda *x, form=form: form(*x)[:, :t], here)
            largest = max(float(x.abs().max()) for x in got.values()) or 1.0
            late = {part: x[:, t:] for part, x in got.items() if part != "o" and x.ndim > 1}
            errors[name] = {
                "o": relative_error(form(q, k, v, here[3])[:, :t], got["o"]),
                "o under other gates": relative_error(form(q, k, v, gate)[:, :t], got["o"]),
            } | {f"gradient of {part} after it": float(x.abs().max()) / largest for part, x in late.items()}
    return errors


def _rows(case: Case) -> Errors:
    case = replace(case, B=3)
    inputs, errors = case.inputs(), {}
    with case.blocks():
        for name, form in _forms(case).items():
            alone = torch.cat([form(*take(inputs, rows=slice(b, b + 1))) for b in range(3)])
            errors[name] = {"o": relative_error(alone, form(*inputs))}
    return errors


def _heads(case: Case) -> Errors:
    q, k, v, gate = case.inputs()

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(case.H // case.G, 2)

    shared = {p: repeated(getattr(gate, p)) for p in gate.parts if not PARTS[p].per_query_head}
    with case.blocks():
        return {
            name: {"o": relative_error(form(q, k, v, gate), form(q, repeated(k), repeated(v), replace(gate, **shared)))}
            for name, form in _forms(case).items()
        }


def _padding(case: Case) -> Errors:
    """Absent tokens are loud, so that what leaks is seen; they may get no gradient, and the state goes on without."""
    case = replace(case, B=1)
    valid = torch.ones(1, case.T, dtype=torch.bool)
    valid[0, list(case.absent)] = False
    q, k, v, gate = case.inputs()
    loud = ~valid[..., None, None] * 1e3 + 1
    padded, index = (q * loud, k * loud, v * loud, gate), valid[0].nonzero()[:, 0]
    short, variant = take((q, k, v, gate), tokens=index), case.variant

    def run_padded(*inputs: Any) -> Tensor:
        return extend_in_segments(variant, inputs, case.edges, case.scale, valid)[0][:, index]

    def at_valid(got: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {part: x if part == "o" or x.ndim == 1 else x[:, index] for part, x in got.items()}

    with case.blocks():
        got, expected = value_and_gradients(run_padded, padded), value_and_gradients(
            lambda *x: extend_in_segments(variant, x, [0, x[0].shape[1]], case.scale)[0], short
        )  # fmt: skip
        lost = {
            f"entries of {part}'s gradient at absent tokens": float((x[:, ~valid[0]] != 0).sum())
            for part, x in got.items()
            if part != "o" and x.ndim > 1
        }
        _, state = extend_in_segments(variant, padded, case.edges, case.scale, valid)
        _, wanted = extend_in_segments(variant, short, [0, len(index)], case.scale)
        follow = replace(case, T=3, seed=case.seed + 1, cuts=(), absent=()).inputs()
        goes_on, as_wanted = (variant.extend(*follow, s)[0] for s in (state, wanted))
        errors = {"extend": relative_errors(at_valid(got), expected) | lost}
        errors["extend"]["what follows"] = relative_error(goes_on, as_wanted)
        for name, form in _forms(case, "valid").items():
            errors[name] = {"o": relative_error(form(*padded, valid=valid)[:, index], form(*short))}
    return errors


def _packing(case: Case) -> Errors:
    case = replace(case, B=1)
    inputs, borders, errors = case.inputs(), torch.tensor(case.edges, dtype=torch.int32), {}
    with case.blocks():
        for name, form in _forms(case, "cu_seqlens").items():
            alone = torch.cat([form(*take(inputs, tokens=slice(a, b))) for a, b in pairwise(case.edges)], 1)
            errors[name] = {"o": relative_error(form(*inputs, cu_seqlens=borders), alone)}
    return errors


def _sees_later(variant: Variant) -> str:
    return "" if variant.causal else "its rows see later tokens"


def _without(option: str, *forms: str) -> Callable[[Variant], str]:
    """A function of a variant: the reason why a law does not apply where no form (of those named) takes the option."""

    def refuses(variant: Variant) -> str:
        if REFERENCE in forms and _sees_later(variant):
            return _sees_later(variant)
        asked = forms or tuple(reference_forms(variant))
        return "" if any(option in variant.options(form) for form in asked) else f"no form takes {option}"

    return refuses


def _neutral(case: Case) -> Errors:
    q, k, v, gate = case.inputs()
    still = gate.neutral_where(torch.ones(q.shape[:2], dtype=torch.bool))
    kept = {part: getattr(still, part) for part in still.parts if PARTS[part].readout}
    truth: Any = case.variant.oracle  # a partial: without the transition nothing is multiplied
    expected = truth.func(q, k, v, Gate(**kept), **{**truth.keywords, "transition": None}, scale=case.scale)
    with case.blocks():
        return {name: {"o": relative_error(form(q, k, v, still), expected)} for name, form in _forms(case).items()}


def _pruning(case: Case) -> Errors:
    """Weights, read off by values that are unit vectors; gates are strong, so that there is something to drop."""
    q, k, _, gate = case.inputs()
    gate = replace(gate, log_decay=None if gate.log_decay is None else 20 * gate.log_decay)
    unit = torch.eye(case.T, dtype=q.dtype)[None, :, None].expand(case.B, case.T, case.G, case.T)
    errors = {}
    with case.blocks():
        for name, form in _forms(case, "prune").items():
            kept, whole = form(q, k, unit, gate, prune=Prune(EPS)), form(q, k, unit, gate)
            errors[name] = {"dropped mass": float((whole * (kept == 0)).sum(-1).max())}
    return errors


def _unpruned(variant: Variant) -> str:
    if variant.readout is not None:
        return variant.readout.unpruned
    if variant.side == "linear":
        return "a state has no keys to prune"
    if variant.expands:
        return "its transition may make vectors longer, so no decay bounds a weight"
    return "" if variant.prunable else "it has no scalar decay, by which pruning is certified"


def _layer(case: Case) -> Errors:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(case.seed)
        layer = build_attention(case.name, hidden_size=8 * case.H, num_heads=case.H).double()
        x = torch.randn(case.B, case.T, 8 * case.H, dtype=torch.float64)
    cache = layer.new_cache()
    with torch.no_grad():
        steps = [layer(part, cache=cache) for part in x.split([b - a for a, b in pairwise(case.edges)], 1)]
        return {"layer": {"y": relative_error(torch.cat(steps, 1), layer(x))}}


def _unprojected(variant: Variant) -> str:
    if not variant.causal:
        return _sees_later(variant)
    layer, able = getattr(variant.module, "LAYER", {}), "build_attention takes gate=..."
    if variant.requires and not layer.get("gate"):
        return f"its layer names no gate projection: {able}"
    chosen = getattr(variant.pair, f"{variant.side}_layer", {}).get("gate")
    lacks = [part for part in variant.requires if not (chosen or PARTS[part].of or PARTS[part].projections)]
    return f"no gate projection of {', '.join(lacks)} is known: {able}" if lacks else ""


LAWS: dict[str, Law] = {
    "oracle": Law("Every form equals the float64 oracle, in values and gradients.", _equals_oracle),
    "matrices": Law("What the transition says is the product of its parts' factors.", _matrices, refuses=_is_its_own),
    "segments": Law(
        "Pieces and steps, continued through the state, equal the whole.", _segments,
        refuses=_sees_later, draws={"cuts": True},
    ),
    "causality": Law(
        "No later token changes an output or gets a gradient from it.", _causality, EXACT,
        refuses=_sees_later, draws={"min_t": 2, "max_t": 24, "cuts": True},
    ),
    "rows": Law("The rows of a batch do not meet.", _rows, EXACT, draws={"max_t": 24}),
    "heads": Law("Grouped key heads equal as many repeated ones.", _heads, draws={"max_t": 24}),
    "padding": Law(
        "Absent tokens are as if they were not there, whatever they hold.", _padding,
        refuses=_without("valid", REFERENCE), draws={"max_t": 28, "cuts": True, "absent": True},
    ),
    "packing": Law(
        "Packed sequences equal separate ones.", _packing,
        refuses=_without("cu_seqlens"), draws={"max_t": 28, "cuts": True},
    ),
    "neutral": Law("A gate of neutral parts is no gate.", _neutral, draws={"max_t": 24}),
    "pruning": Law(
        f"The mass of dropped keys is at most the {EPS:g} that was allowed.", _pruning, EPS, refuses=_unpruned,
        draws={"min_t": 70, "max_t": 150},
    ),
    "layer": Law(
        "Cached steps of a layer equal its whole.", _layer, refuses=_unprojected, draws={"max_t": 16, "cuts": True}
    ),
}  # fmt: skip
