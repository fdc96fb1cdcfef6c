"""The table of pairs and how to get at it."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import attnzoo
from attnzoo import Pair, build_attention, describe, dual, get, list_variants, pair_for, pairs, register
from attnzoo.algebra.parts import PARTS
from attnzoo.equations import equations_of
from attnzoo.registry import _get, unregister
from attnzoo.registry.table import BUILT_IN, PAIRS, PRODUCTS

VARIANTS = list_variants()
ROOT = Path(__file__).parents[2]


def test_table_of_the_pairs_that_others_are_products_of() -> None:
    rows = [(pair.linear, pair.softmax, pair.requires) for pair in PAIRS]
    assert rows == [
        ("linear_attention", "nope", ()),
        ("retnet", "alibi", ("log_decay",)),
        ("mamba2", "fox", ("log_decay",)),
        ("gla", "wall", ("log_diag",)),
        ("complex_linear", "rope", ("angle",)),
        ("deltanet", "path", ("w", "beta")),
        ("gated_deltanet", "path_fox", ("log_decay", "w", "beta")),
    ]


def test_every_set_of_gate_parts_is_a_pair() -> None:
    """Four parts, with w and beta as one: sixteen sets, and only that of a scalar decay is two pairs."""
    assert pairs()[: len(BUILT_IN)] == BUILT_IN
    free = ("log_decay", "log_diag", "angle", "w")
    for chosen in itertools.product((False, True), repeat=4):
        parts = {part for part, taken in zip(free, chosen, strict=True) if taken}
        parts |= {"beta"} if "w" in parts else set()
        pair = pair_for(parts)
        assert set(pair.requires) == parts
        same = [other for other in BUILT_IN if set(other.requires) == parts]
        assert [p.linear for p in same] == (["retnet", "mamba2"] if parts == {"log_decay"} else [pair.linear])


def test_pair_for_takes_parts_in_any_order_and_names_what_is_wrong() -> None:
    assert pair_for(["log_decay"]).softmax == "fox"
    assert pair_for(("beta", "w", "log_diag")).linear == "kda"
    assert build_attention(pair_for({"angle", "log_diag"}).softmax, hidden_size=16, num_heads=2) is not None
    with pytest.raises(ValueError, match="unknown gate part 'log_decy': .*did you mean 'log_decay'"):
        pair_for(["log_decy"])
    with pytest.raises(ValueError, match="parts: expected w and beta together, got w"):
        pair_for(["w"])


def test_list_variants_by_side_in_the_order_of_the_table() -> None:
    assert list_variants("linear") == tuple(pair.linear for pair in pairs())
    assert list_variants("softmax") == tuple(pair.softmax for pair in pairs())
    assert list_variants() == list_variants("linear") + list_variants("softmax")


@pytest.mark.parametrize("name", VARIANTS)
def test_dual_is_an_involution(name: str) -> None:
    assert dual(name).name != name
    assert get(name).dual is dual(name)
    assert dual(dual(name).name) is get(name)
    assert dual(name).side != get(name).side
    assert dual(name).requires == get(name).requires


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_complete(name: str) -> None:
    variant = get(name)
    assert variant.name == name
    assert variant.title
    assert "20" in variant.paper or "arXiv" in variant.paper
    assert set(variant.requires) <= set(PARTS)
    needed = {"recurrent", "parallel", "chunk"} if variant.side == "linear" else {"recurrent", "parallel"}
    assert needed <= set(variant.forms) <= needed | {"fla", "triton", "sdpa"}
    assert callable(variant.extend)
    assert variant.module.__doc__
    assert variant.paper.startswith("parts of ") == (not hasattr(variant.module, "__file__") and not variant.pair.paper)


def test_prunable_are_those_with_a_scalar_decay() -> None:
    assert [name for name in VARIANTS if get(name).prunable] == [
        pair.softmax for pair in pairs() if "log_decay" in pair.requires
    ]


def test_gla_says_what_the_literature_pairs_it_with() -> None:
    assert dual("gla").name == "wall"
    assert "FoX" in get("gla").note


@pytest.mark.parametrize("name", VARIANTS)
def test_describe_names_what_there_is(name: str) -> None:
    text, variant = describe(name), get(name)
    head = f"{name}, {variant.side} side of pair "  # alone where the title has no room, or where there is none
    assert text.startswith((head, f"{variant.title} ({head}".replace(",", "),", 1)))
    assert all(form in text for form in (*variant.forms, *dual(name).forms))
    assert all(f"{part}=..." in text for part in variant.requires)
    assert dual(name).title in text
    assert all(side.paper in " ".join(text.split()) for side in (variant, dual(name)))
    assert ("acp=True" in text) == variant.prunable


@pytest.mark.parametrize("name", VARIANTS)
def test_describe_fits_a_narrow_terminal(name: str) -> None:
    assert max(map(len, describe(name).splitlines())) <= 80


@pytest.mark.parametrize("name", VARIANTS)
def test_describe_shows_the_equations_of_both_sides_with_their_signs_aligned(name: str) -> None:
    lines = describe(name).splitlines()
    for side in (get(name), dual(name)):
        equations = equations_of(side)
        start = next(n for n, line in enumerate(lines) if line.startswith(side.side)) + 1
        shown = lines[start : start + len(equations)]
        assert [line.replace(" ", "") for line in shown] == [line.replace(" ", "") for line in equations]
        assert len({line.index("=") for line in shown}) == 1
    assert describe(name).splitlines()[1:11] == describe(get(name).dual.name).splitlines()[1:11]


@pytest.mark.parametrize("name", VARIANTS)
def test_describe_in_ascii_is_ascii_and_says_the_same(name: str) -> None:
    text = describe(name, ascii_only=True)
    assert text.isascii()
    assert "?" not in text
    assert "S_t = " in text
    assert "l_{tj}" in text
    assert len(text.splitlines()) == len(describe(name).splitlines())


@pytest.mark.parametrize("pair", [*PAIRS, PRODUCTS[0], PRODUCTS[-1]], ids=lambda pair: pair.softmax)
def test_derivation_page_that_describe_names_is_there(pair: Pair) -> None:
    for name in (pair.linear, pair.softmax):
        page = re.search(r"docs/derivations/\w+\.md", describe(name))
        assert page is not None
        assert (ROOT / page[0]).is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_table_of_the_first_pages_is_that_of_the_registry(page: str) -> None:
    table = (ROOT / page).read_text(encoding="utf-8").partition("linear side | softmax side")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row)[:2] for row in table.splitlines()[2:]]
    assert rows == [[pair.linear, pair.softmax] for pair in PAIRS]


def test_get_gives_one_object() -> None:
    assert get("fox") is get("fox")


def test_variant_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        get("fox").name = "x"  # type: ignore[misc]
    with pytest.raises(TypeError):
        get("fox").forms["parallel"] = print  # type: ignore[index]


@pytest.mark.parametrize("name", [name for name in attnzoo.__all__ if name not in ("Attention", "build_attention")])
def test_public_names_are_there(name: str) -> None:
    assert getattr(attnzoo, name) is not None
    assert pickle.loads(pickle.dumps(getattr(attnzoo, name))) is not None


def test_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'attnzoo' has no attribute 'foks'"):
        _ = attnzoo.foks


# registering

NEW = Pair(
    "new_linear", "new_softmax", ("log_decay",), "g", "I",
    linear_module="attnzoo.recurrences.mamba2", softmax_module="attnzoo.encodings.fox",
)  # fmt: skip


@pytest.fixture
def registered() -> Iterator[Pair]:
    register(NEW)
    yield NEW
    unregister(NEW)


def test_registered_pair_is_everywhere(registered: Pair) -> None:
    assert pairs()[-1] == registered
    assert list_variants("linear")[-1] == "new_linear"
    assert get("new_softmax").prunable
    assert dual("new_linear").name == "new_softmax"
    assert "new_softmax" in describe("new_linear")


@pytest.mark.parametrize("given", [None, (), "Sₜ  = F Sₜ₋₁\noₜⱼₖ = 1", ("Sₜ = F Sₜ₋₁", "in words", "oₜⱼₖ = 1")])
def test_describe_of_a_third_partys_pair(registered: Pair, monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    for module in (get("new_linear").module, get("new_softmax").module):
        for constant in ("TITLE", "PAPER", "LAYER", "EQUATIONS"):
            monkeypatch.delattr(module, constant)
    if given is not None:
        monkeypatch.setattr(get("mamba2").module, "EQUATIONS", given, raising=False)
    _get.cache_clear()
    text = describe("new_linear")
    _get.cache_clear()
    assert text.startswith(f"new_linear, linear side of pair {len(BUILT_IN) + 1}; dual: new_softmax\n")
    assert "docs/" not in text
    assert "not given" in text
    assert "Rₜ  = I" in text  # the softmax side's general equations
    if given:
        assert "  Sₜ   = F Sₜ₋₁" in text
        assert "  oₜⱼₖ = 1" in text
        assert ("  in words\n" in text) == isinstance(given, tuple)
    else:
        assert "  gₜ = g\n" in text
        assert "  Sₜ = exp(gₜ) Sₜ₋₁ Rₜ + vₜ kₜᵀ\n" in text


def test_registering_again_changes_nothing(registered: Pair) -> None:
    before = pairs()
    register(replace(registered))
    assert pairs() == before


def test_only_a_registered_pair_is_taken_out() -> None:
    with pytest.raises(TypeError, match="pair: expected attnzoo.Pair, got str"):
        unregister("fox")  # type: ignore[arg-type]
    for other in (Pair("mamba2", "nobody", ("log_decay",)), Pair("mamba2", "fox", ("log_decay",), note="another")):
        with pytest.raises(ValueError, match="unknown variant 'nobody'|the one that is registered as 'mamba2'"):
            unregister(other)
    assert get("fox").dual is get("mamba2")


def test_unregistered_pair_is_gone() -> None:
    register(NEW)
    get("new_linear")
    unregister(NEW)
    assert "new_linear" not in list_variants()
    with pytest.raises(ValueError, match="unknown variant 'new_linear'"):
        get("new_linear")
    with pytest.raises(ValueError, match="unknown variant 'new_linear'"):
        unregister(NEW)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(NEW, requires=("w",)), "pair.requires: expected w and beta together, got w"),
        (replace(NEW, requires="angle"), r"pair.requires: expected a tuple of names .* got 'angle'"),
        (replace(NEW, requires=["angle"]), r"pair.requires: expected a tuple of names .* got \['angle'\]"),  # type: ignore[arg-type]
        (replace(NEW, requires=("angle", "angle")), "pair.requires: expected each part once, got angle, angle"),
        (replace(NEW, requires=None), "pair.requires: expected a tuple of names .* got None"),  # type: ignore[arg-type]
        (replace(NEW, linear_module=pytest), "pair.linear_module: expected the name of a module, .* got <module"),  # type: ignore[arg-type]
        (replace(NEW, linear=3), "pair: expected two names, got 3"),  # type: ignore[arg-type]
        (replace(NEW, linear="a name"), "pair: expected names of letters, digits and _ .* got 'a name'"),
        (replace(NEW, softmax="../up"), "pair: expected names of letters, .* got '../up'"),
        (replace(NEW, softmax_layer="forget"), "pair.softmax_layer: expected options by name, .* got 'forget'"),  # type: ignore[arg-type]
        (replace(NEW, linear_layer={"expand": 2}), r"pair.linear_layer: expected none beside a module \(attnzoo.rec"),
    ],
)
def test_pair_that_could_not_be_used_is_not_registered(bad: Pair, message: str) -> None:
    before = pairs()
    with pytest.raises((TypeError, ValueError), match=message):
        register(bad)
    assert pairs() == before


def test_taken_name_is_refused_and_changes_nothing() -> None:
    before = pairs()
    for bad in (replace(NEW, softmax="fox"), replace(NEW, linear="nope")):
        with pytest.raises(ValueError, match="pair: expected new names, got '(fox|nope)', which is registered already"):
            register(bad)
    assert pairs() == before


def test_one_name_for_both_sides_is_refused() -> None:
    with pytest.raises(ValueError, match="pair: expected two different names, got 'same' twice"):
        register(replace(NEW, linear="same", softmax="same"))


def test_unknown_gate_part_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown gate part 'log_decy': expected one of .*did you mean 'log_decay'"):
        register(replace(NEW, requires=("log_decy",)))


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pair: expected attnzoo.Pair, got dict"):
        register({"linear": "x"})  # type: ignore[arg-type]
