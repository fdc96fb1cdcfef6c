"""What the usual run leaves out of a product of parameters: nothing that two values do together."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thinning import covering, left_out

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


def items(*marks: str) -> list[Any]:
    return [
        Item(
            path=Path("test_of_something.py"),
            originalname="test_something",
            callspec=SimpleNamespace(params=dict(zip("abcd", row, strict=True))),
            get_closest_marker=lambda name: name if name in marks else None,
        )
        for row in ROWS
    ]


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


def test_only_marked_tests_lose_combinations_and_none_to_those_that_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ["ci"]
    monkeypatch.setattr("thinning.settings", SimpleNamespace(get_current_profile_name=lambda: profile[0]))
    here, there, whole = items("covering"), items("covering", "gpu"), items()
    out = left_out([*there, *here, *whole])
    assert out
    assert {*out} <= {*here}
    rows = [tuple(one.callspec.params.values()) for one in here if one not in out]
    assert pairs(rows) == pairs(ROWS)
    profile[0] = "long"
    assert left_out([*here, *whole]) == []
