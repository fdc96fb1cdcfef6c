"""A correlation of gains holds its level though pairs share parts, and what so many runs can see is known before."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from attnzoo.experiments import statistics
from attnzoo.experiments.statistics import correlation, difference_seen, drawn_anew, incidence, without_each

NESTED = (("c",), ("s",), ("v",), ("d",), ("c", "d"), ("s", "d"), ("v", "d"))


def rejected(parts: tuple[tuple[str, ...], ...], draw: str, counted: bool, times: int = 200) -> float:
    """How often a correlation is seen between sides whose parts have nothing to do with each other."""
    rng, has, found = np.random.default_rng(1), incidence(parts), 0
    for _ in range(times):
        one, other = (has @ getattr(rng, draw)(size=has.shape[1]) + 0.1 * rng.standard_normal(len(parts)) for _ in "ab")
        found += correlation(one, other, parts if counted else ())[1] <= 0.05
    return found / times


@pytest.mark.parametrize("draw", ["standard_normal", "lognormal"])
def test_sides_that_have_nothing_to_do_with_each_other_are_seldom_seen_to_correlate(draw):
    assert rejected(NESTED, draw, counted=True) <= 0.08
    assert rejected(NESTED, draw, counted=False) > 0.08  # as if pairs shared no part


def test_pairs_that_share_no_part_are_put_in_every_order():
    one, other = np.array([1.0, 2.0, 4.0, 3.0]), np.array([1.0, 3.0, 4.0, 2.0])
    r, p = correlation(one, other, (("a",), ("b",), ("c",), ("d",)))
    every = [np.corrcoef(one, other[list(order)])[0, 1] for order in permutations(range(4))]
    assert r == pytest.approx(np.corrcoef(one, other)[0, 1])
    assert p == np.mean([each >= r - 1e-12 for each in every])


def test_what_two_parts_give_beyond_their_sum_stays_with_the_pair():
    """By hand: parts give 1, 2, 4 and together 7 + 0.5 on the other side; of 6 orders the given one is the best."""
    parts = (("a",), ("b",), ("c",), ("a", "b"))
    one, other = np.array([1.0, 2.0, 3.0, 3.5]), np.array([1.0, 2.0, 4.0, 3.5])
    given = np.linalg.lstsq(incidence(parts), other, rcond=None)[0]
    left = other - incidence(parts) @ given
    every = [np.corrcoef(one, incidence(parts) @ given[list(order)] + left)[0, 1] for order in permutations(range(3))]
    r, p = correlation(one, other, parts)
    assert r == pytest.approx(every[0])
    assert p == np.mean([each >= r - 1e-12 for each in every])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((("a",), ()), "expected one or more of each pair"),
        ((("a", "b"), ("c",)), "expected pairs that tell a, b, c apart"),
        (tuple((str(n),) for n in range(9)), "expected at most 8"),
    ],
)
def test_parts_that_cannot_be_told_apart_or_counted_are_refused(parts, words):
    with pytest.raises(ValueError, match=words):
        incidence(parts)


def test_correlation_is_said_without_each_pair():
    one, other = np.array([0.0, 1.0, 2.0, 30.0]), np.array([1.0, 0.5, 0.2, 30.0])
    left = without_each(one, other)
    assert left[3] == pytest.approx(np.corrcoef(one[:3], other[:3])[0, 1])
    assert left[3] < -0.9 < 0.9 < left[0]


def test_seeds_and_text_drawn_anew_spread_the_correlation_as_their_noise_does():
    rng = np.random.default_rng(0)
    gains = np.array([0.0, 0.3, 0.6, 0.9, 1.2])
    losses = 5 - gains[:, None, None] + np.zeros((5, 3, 8))
    assert drawn_anew(losses, losses, 100) == pytest.approx((1.0, 1.0))
    wide, narrow = (
        drawn_anew(
            losses + noise * rng.standard_normal(losses.shape), losses + noise * rng.standard_normal(losses.shape)
        )
        for noise in (1.0, 0.1)
    )
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0]) > 0
    text = rng.standard_normal((1, 1, 8))  # stretches that are hard for all models move no gain
    assert drawn_anew(losses + text, losses + text, 100) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(("seeds", "models"), [(3, 2), (5, 2), (3, 1), (3, 4)])
def test_difference_that_is_seen_four_times_of_five_is_seen_so_often(seeds, models):
    from attnzoo.experiments.claims import Below, Value, Wider

    rng, seen = np.random.default_rng(5), 0
    a, b, c, d = (Value(name, "p") for name in "abcd")
    claim = Wider((a, b), (c, d)) if models == 4 else Below(a, b, paired=models == 1)
    difference = difference_seen(seeds, models)
    for _ in range(400):
        runs = {name: rng.standard_normal(seeds) for name in "abcd"}
        runs["b"] = (np.zeros(seeds) if models == 1 else runs["b"]) + difference
        seen += claim.judge(lambda value, runs=runs: runs[value.arm]).word == "seen"
    assert seen / 400 == pytest.approx(0.8, abs=0.06)


def test_more_seeds_see_smaller_differences_and_closer_sides_are_seen_more_often():
    assert difference_seen(2) > difference_seen(3) > difference_seen(5)
    shares = [statistics.correlation_seen(NESTED, true, 100) for true in (0.0, 0.8, 0.99)]
    assert shares[0] <= 0.1 < shares[1] < shares[2]
