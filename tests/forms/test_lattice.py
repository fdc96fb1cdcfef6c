"""Sixteen sets of gate parts, each a pair: what holds between neighbours, and for strong gates, lengths and pruning.

That every form of every pair equals the oracle is in test_forms.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, Pair, Prune, Variant, get, oracle, pair_for
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.pruning import first_kept_keys
from attnzoo.recurrences.complex_linear import phases, rotate
from attnzoo.samples import random_inputs
from attnzoo.testing import (
    CPU_FORMS,
    LIMIT,
    Form,
    Inputs,
    assert_close,
    block_sizes,
    in_float64,
    relative_error,
    value_and_gradients,
)

FREE = ("log_decay", "log_diag", "angle", "w")  # w brings beta
SETS = [frozenset(parts) for n in range(5) for parts in itertools.combinations(FREE, n)]
STEPS = [(parts, part) for parts in SETS for part in FREE if part in parts]


def pair_of(parts: frozenset[str]) -> Pair:
    return pair_for(parts | {"beta"} if "w" in parts else parts)


def linear(parts: frozenset[str]) -> str:
    return pair_of(parts).linear


def both_sides(parts: frozenset[str]) -> list[Variant]:
    pair = pair_of(parts)
    return [get(pair.linear), get(pair.softmax)]


def without(gate: Gate, part: str) -> Gate:
    """The gate that has no such part."""
    dropped = {"w": None, "beta": None} if part == "w" else {part: None}
    return replace(gate, **dropped)  # type: ignore[arg-type]


def neutral(gate: Gate, part: str) -> Gate:
    """The gate with that part at its neutral value; a w stays, of which beta erases nothing."""
    name = "beta" if part == "w" else part
    return replace(gate, **{name: torch.full_like(getattr(gate, name), PARTS[name].neutral)})


def of_qkv(form: Form, inputs: Inputs) -> dict[str, Tensor]:
    """Values, and gradients of q, k and v alone."""
    q, k, v, gate = inputs
    return value_and_gradients(lambda q, k, v, _: form(q, k, v, gate), (q, k, v, Gate()))


def shown(step: tuple[frozenset[str], str]) -> str:
    return f"{linear(step[0])}-{step[1]}"


@pytest.mark.parametrize("step", STEPS, ids=shown)
def test_neutral_part_leads_to_the_neighbour(step: tuple[frozenset[str], str]) -> None:
    """Values and the gradients of q, k and v, in every form of both sides."""
    parts, part = step
    for variant, neighbour in zip(both_sides(parts), both_sides(parts - {part}), strict=True):
        q, k, v, gate = random_inputs(variant.name, 1, 19, 2, 1, 4, 3)
        idle, less = neutral(gate, part), without(gate, part)
        with block_sizes(8):
            expected = of_qkv(neighbour.forms["parallel"], (q, k, v, less))
            for form in set(CPU_FORMS) & set(variant.forms):
                assert_close(of_qkv(variant.forms[form], (q, k, v, idle)), expected, what=f"{form} of {variant.name}")


def test_reading_along_what_is_erased_leads_from_oblique_factors_to_householder_ones() -> None:
    for name, neighbour in (("rwkv7", "kda"), ("rwkv7_path", "path_wall")):
        q, k, v, gate = random_inputs(name, 1, 19, 2, 1, 4, 3)
        same, less = replace(gate, u=gate.w), replace(gate, u=None)
        with block_sizes(8):
            expected = of_qkv(get(neighbour).forms["parallel"], (q, k, v, less))
            for form in set(CPU_FORMS) & set(get(name).forms):
                assert_close(of_qkv(get(name).forms[form], (q, k, v, same)), expected, what=f"{form} of {name}")


@pytest.mark.parametrize("rest", [parts for parts in SETS if not parts & {"log_decay", "log_diag"}], ids=linear)
def test_one_decay_for_all_channels_is_a_scalar_decay_of_the_recurrence(rest: frozenset[str]) -> None:
    """On the linear side, whatever else is in the product; under a softmax the two differ."""
    for side, same in ((0, True), (1, False)):
        scalar, channels = both_sides(rest | {"log_decay"})[side], both_sides(rest | {"log_diag"})[side]
        q, k, v, gate = random_inputs(scalar.name, 1, 19, 2, 1, 4, 3, regime="open")
        log_diag = cast(Tensor, gate.log_decay)[..., None].expand(1, 19, 2, 4).contiguous()
        got = channels.forms["parallel"](q, k, v, replace(gate, log_decay=None, log_diag=log_diag))
        error = relative_error(got, scalar.forms["parallel"](q, k, v, gate))
        assert error <= LIMIT if same else error > 1e-3


@pytest.mark.parametrize("parts", SETS, ids=linear)
def test_transitions_do_not_expand(parts: frozenset[str]) -> None:
    """Which is all that the certificate of pruning asks of R_t: wherever there is a scalar decay, it holds."""
    recurrence, softmax = both_sides(parts)
    for regime in ("mixed", "closing"):
        q, _, _, gate = random_inputs(recurrence.name, 1, 31, 2, 1, 6, 3, regime=regime)  # type: ignore[arg-type]
        g, R = gate.dense(q)
        assert float(torch.linalg.matrix_norm(R, 2).max()) <= 1 + 1e-12
        assert bool((g <= 0).all())
    assert softmax.prunable == ("log_decay" in parts)
    assert not recurrence.prunable


@pytest.mark.parametrize("parts", [parts for parts in SETS if "log_decay" in parts], ids=linear)
def test_pruned_products_move_by_at_most_what_was_certified(parts: frozenset[str]) -> None:
    variant, eps = both_sides(parts)[1], 1e-2
    q, k, v, gate = random_inputs(variant.name, 1, 150, 2, 1, 4, 3, regime="open", seed=1)
    gate = replace(gate, log_decay=20 * cast(Tensor, gate.log_decay))
    with block_sizes(8):
        o, pruned = (variant.forms["parallel"](q, k, v, gate, prune=p) for p in (None, Prune(eps)))
    moved = float((o - pruned).abs().max())
    assert 0 < moved <= 2 * eps * float(v.abs().max())
    s, d = oracle.scores(q, k, gate)
    scaled, keys = q.transpose(1, 2) / 2, k.transpose(1, 2).repeat_interleave(2, 1)
    first = first_kept_keys(scaled, keys, cast(Tensor, gate.log_decay).transpose(1, 2), Prune(eps), rows=8, cols=4)
    weights = (s + d).softmax(-1)
    for n in range(first.shape[-1]):
        before = torch.arange(150) < first[..., n, None]
        assert float((weights[:, :, 8 * n : 8 * n + 8] * before[:, :, None]).sum(-1).max()) <= eps


def strong(parts: frozenset[str], T: int, kind: str, dtype: torch.dtype, H: int = 2) -> Inputs:
    """Inputs with log gates down to -50 per token: everywhere, in rare tokens, or in every other channel."""
    q, k, v, gate = random_inputs(linear(parts), 1, T, H, 1, 8, 4, regime="open", seed=T, dtype=torch.float64)
    draw = torch.Generator().manual_seed(T)

    def stronger(log: Tensor) -> Tensor:
        u, which = (torch.rand(log.shape, dtype=torch.float64, generator=draw) for _ in range(2))
        if kind == "rare":
            return torch.where(which < 0.1, -50 * u, log)
        if kind == "every other channel":
            return torch.where(torch.arange(log.shape[-1]) % 2 == 0, -50 * u, log)
        return -50 * u

    gate = replace(gate, **{name: stronger(getattr(gate, name)) for name in gate.parts if name.startswith("log_")})
    return q.to(dtype), k.to(dtype), v.to(dtype), gate.map(lambda x: x.to(dtype))


@pytest.mark.parametrize("kind", ["everywhere", "rare", "every other channel"])
@pytest.mark.parametrize("parts", [p for p in SETS if "log_diag" in p and len(p) > 1], ids=linear)
def test_strong_channel_gates_are_exact(parts: frozenset[str], kind: str) -> None:
    inputs = strong(parts, 70, kind, torch.float64)
    for variant in both_sides(parts):
        expected = value_and_gradients(variant.oracle, inputs)
        for form in ("parallel", "chunk"):
            if form in variant.forms:
                assert_close(value_and_gradients(variant.forms[form], inputs), expected, what=f"{form}, {kind}")


@pytest.mark.parametrize("kind", ["everywhere", "rare", "every other channel"])
@pytest.mark.parametrize("parts", [frozenset({"log_diag", "w"}), frozenset({"log_diag", "angle", "w"})], ids=linear)
def test_strong_channel_gates_over_4096_tokens_in_float32(parts: frozenset[str], kind: str) -> None:
    """Finite, and as near to float64 as one rounding of a sum of the window that is left."""
    inputs = strong(parts, 4096, kind, torch.float32, H=1)
    wide = in_float64(inputs)
    for variant, form in zip(both_sides(parts), ("chunk", "parallel"), strict=True):
        with torch.no_grad():
            assert relative_error(variant.forms[form](*inputs), variant.forms[form](*wide)) < 2e-6


def turned(x: Tensor, gate: Gate) -> Tensor:
    return rotate(x, phases(cast(Tensor, gate.angle), dim=1))


DECAYS = [frozenset(), frozenset({"log_decay"})]


@pytest.mark.parametrize("decay", DECAYS, ids=["", "log_decay"])
def test_rotations_before_attention_are_rotations_in_the_product(decay: frozenset[str]) -> None:
    """RoPE on q and k, then the variant without angles: the same where w is turned too, in its own token's frame."""
    for rest in (decay, decay | {"w"}):
        for variant, plain in zip(both_sides(rest | {"angle"}), both_sides(rest), strict=True):
            q, k, v, gate = random_inputs(variant.name, 1, 21, 2, 2, 6, 3)
            behind = replace(gate, angle=None, w=None if gate.w is None else turned(gate.w, gate))
            expected = plain.forms["parallel"](turned(q, gate), turned(k, gate), v, behind)
            assert relative_error(variant.forms["parallel"](q, k, v, gate), expected) <= LIMIT


@pytest.mark.parametrize("decay", DECAYS, ids=["", "log_decay"])
def test_rotations_before_channel_decays_are_those_in_the_product_where_turned_pairs_decay_alike(
    decay: frozenset[str],
) -> None:
    """Otherwise RoPE before GLA decays the channels of the turned frame, and the product those of the state."""
    for alike in (True, False):
        parts = decay | {"log_diag"}
        for variant, plain in zip(both_sides(parts | {"angle"}), both_sides(parts), strict=True):
            q, k, v, gate = random_inputs(variant.name, 1, 21, 2, 2, 6, 3, regime="open")
            if alike:
                gate = replace(gate, log_diag=cast(Tensor, gate.log_diag)[..., ::2].repeat_interleave(2, -1))
            expected = plain.forms["parallel"](turned(q, gate), turned(k, gate), v, replace(gate, angle=None))
            error = relative_error(variant.forms["parallel"](q, k, v, gate), expected)
            assert error <= LIMIT if alike else error > 1e-3
