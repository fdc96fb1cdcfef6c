"""What the usual run leaves out of a product of parameters: nothing that two values do together."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thinning import EVERYWHERE, OF_PRODUCTS, covering, left_out

ROWS = [*itertools.product(range(4), range(3), range(2), range(2))]


def pairs(rows: Any) -> set[Any]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def kept_of(rows: Any) -> set[Any]:
    return covering({row: pairs([row]) for row in rows})


def test_every_pair_of_values_is_kept_and_no_row_in_vain() -> None:
    kept = kept_of(ROWS)
    assert pairs(kept) == pairs(ROWS)
    assert len(kept) <= len(ROWS) / 3
    assert all(pairs(kept - {row}) < pairs(ROWS) for row in kept)
    assert kept_of(ROWS) == kept


def test_pairs_that_no_row_has_are_not_asked_for() -> None:
    rows = [row for row in ROWS if row[0] or row[1] == 2]
    assert kept_of(rows) <= {*rows}
    assert pairs(kept_of(rows)) == pairs(rows) < pairs(ROWS)


def test_two_parameters_are_left_whole() -> None:
    rows = [*itertools.product(range(3), range(5))]
    assert kept_of(rows) == {*rows}


class Item(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__  # as pytest's


def items(*marks: str, test: str = "test_something", of: tuple[str, ...] = (), rows: Any = ROWS) -> list[Any]:
    return [
        Item(
            path=Path("test_of_something.py"),
            originalname=test,
            callspec=SimpleNamespace(params=dict(zip("abcd", row, strict=False))),
            get_closest_marker=lambda name: SimpleNamespace(args=of) if name in marks else None,
        )
        for row in rows
    ]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The profile that the thinning sees, which a test may exchange."""
    seen = ["ci"]
    monkeypatch.setattr("thinning.settings", SimpleNamespace(get_current_profile_name=lambda: seen[0]))
    return seen


@pytest.mark.covering
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", "ab")
@pytest.mark.parametrize("third", [False, True])
def test_pytest_itself_runs_every_pair_and_not_all(
    first: int, second: str, third: bool, request: pytest.FixtureRequest
) -> None:
    own = [item for item in request.session.items if item.originalname == request.node.originalname]
    if request.config.getoption("--hypothesis-profile") == "long" or len(own) == 1:  # which was asked for by its name
        return
    assert len(own) == 6
    assert len(pairs([tuple(map(str, item.callspec.params.values())) for item in own])) == 3 * 2 + 3 * 2 + 2 * 2


def test_only_marked_tests_lose_combinations_and_none_to_those_that_need_a_gpu(profile: list[str]) -> None:
    here, there, whole = items("covering"), items("covering", "gpu"), items()
    out = left_out([*there, *here, *whole])
    assert out
    assert {*out} <= {*here}
    rows = [tuple(one.callspec.params.values()) for one in here if one not in out]
    assert pairs(rows) == pairs(ROWS)
    profile[0] = "long"
    assert left_out([*here, *whole]) == []


def test_of_tests_that_are_one_product_each_has_every_value_and_all_together_every_pair(profile: list[str]) -> None:
    rows = [*itertools.product(range(4), range(3))]
    tests = ("test_one", "test_other", "test_third")
    all_of = [one for test in tests for one in items("covering", test=test, of=("layers",), rows=rows)]
    out = left_out(all_of)
    kept = {(one.originalname, *one.callspec.params.values()) for one in all_of if one not in out}
    assert len(kept) < len(all_of) / 2
    assert pairs(kept) == pairs((test, *row) for test in tests for row in rows)


def test_pairs_are_counted_among_what_is_left_of_products(profile: list[str]) -> None:
    """A product of transitions that is not run stands for nothing."""
    names = ("fox", "mamba2", *sorted(OF_PRODUCTS - EVERYWHERE))
    rows = [*itertools.product(names, range(3), range(3))]
    all_of = items("covering", rows=rows)
    out = left_out(all_of)
    kept = [tuple(one.callspec.params.values()) for one in all_of if one not in out]
    assert {name for name, *_ in kept} == {"fox", "mamba2"}
    assert pairs(kept) == pairs(row for row in rows if row[0] in ("fox", "mamba2"))
