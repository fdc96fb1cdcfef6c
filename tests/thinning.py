"""Which products of transitions run which tests, and with how many examples.

The code of a product is that of its factors, which the pairs of factors run in full. Outside the long profile all
products run what is held against the oracle, with few examples, and two stand for all of them elsewhere.

Of a test that is marked ``covering`` the usual run has as many combinations of its parameters as make every two values
of two parameters occur together; ``make test-long`` has all.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings

from attnzoo.registry.table import OBLIQUE, PRODUCTS

OF_PRODUCTS = {name for pair in (*PRODUCTS, *OBLIQUE) for name in (pair.linear, pair.softmax)}
EVERYWHERE = {"kda", "fox_rope"}
FOR_ALL = {
    "test_forms_equal_oracle", "test_segmented_equals_full", "test_equations_equal_oracle",
    "test_pieces_padding_and_packing_equal_whole_sequences", "test_long_sequences_within_budget",
}  # fmt: skip
FEW = 3
Row = TypeVar("Row")
NAMED = 2  # products that a test may name itself; more come from the registry


def given_variant(few: bool = False, **drawn: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``hypothesis.given`` for a test of the variant ``name``: few examples where that is a product, or everywhere."""
    always = few

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        usual = given(**drawn)(test)
        if settings.get_current_profile_name() == "long":
            return usual
        fewer = settings(max_examples=min(FEW, settings.default.max_examples))(given(**drawn)(test))

        @functools.wraps(usual, updated=())
        def run(**arguments: Any) -> None:
            (fewer if always or arguments["name"] in OF_PRODUCTS else usual)(**arguments)

        return run

    return decorate


def in_long(usual: Any, long: Any) -> Any:
    """``long`` in the long profile, else ``usual``: sizes or cases of a test."""
    return long if settings.get_current_profile_name() == "long" else usual


def product(item: pytest.Item) -> str:
    """The product that a test is about, or ""."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [name for value in values for name in (value if isinstance(value, tuple) else (value,))]
    return next((name for name in names if isinstance(name, str) and name in OF_PRODUCTS), "")


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that others stand for: of products, where the variants come from the registry and not by name, and of
    combinations of parameters."""
    if settings.get_current_profile_name() == "long":
        return []
    products = defaultdict(set)
    for item in items:
        products[item.path, item.originalname].add(product(item))
    out = {
        item
        for item in items
        if product(item) not in {"", *EVERYWHERE}
        and len(products[item.path, item.originalname] - {""}) > NAMED
        and item.originalname not in FOR_ALL
        and item.path.name != "test_registry.py"
    }
    rest = combinations([item for item in items if item not in out])
    return [*out, *(item for of_one in rest for item in beyond_covering(of_one))]


def combinations(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of each function that is marked ``covering``, but for those that a machine may skip. What is marked
    ``covering("a name")`` is one product with all of that name in a file, in which the function is a parameter."""
    found = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark and not item.get_closest_marker("gpu"):
            found[item.path, mark.args or item.originalname].append(item)
    return [*found.values()]


def beyond_covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests of one product those whose every two parameters have their values together in another that is kept."""
    needs = {}
    for item in items:
        values = [("test", item.originalname), *((name, repr(value)) for name, value in item.callspec.params.items())]
        needs[item] = {*itertools.combinations(values, 2)}
    kept = covering(needs)
    return [item for item in items if item not in kept]


def covering(needs: Mapping[Row, set[Any]]) -> set[Row]:
    """As many rows as have all that any of them has: each time the first of those with most that no other has yet."""
    kept, have = set[Row](), set[Any]()
    queue = [(-len(own), place, row) for place, (row, own) in enumerate(needs.items())]
    heapq.heapify(queue)
    while queue:
        most, place, row = queue[0]
        new = len(needs[row] - have)
        if new == -most > 0:
            kept.add(row)
            have |= needs[row]
        if new in (0, -most):
            heapq.heappop(queue)
        else:  # the count was made when fewer rows were kept
            heapq.heapreplace(queue, (-new, place, row))
    return kept
