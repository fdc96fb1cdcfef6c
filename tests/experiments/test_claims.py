"""A claim is seen, not seen or undecided as its test over the seeds says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnzoo.experiments.claims import All, AtLeast, AtMost, Below, Closed, Correlated, Value, Wider, in_order, power
from attnzoo.experiments.statistics import tail

A, B = Value("a", "p"), Value("b", "p")


def word(claim, **values):
    return claim.judge(lambda value: np.array(values[value.arm], dtype=np.float64)).word


@pytest.mark.parametrize(
    ("freedom", "t", "p"),
    [
        (1, 6.3138, 0.05),
        (2, 2.91999, 0.05),
        (4, 2.13185, 0.05),
        (10, 1.81246, 0.05),
        (10, 2.76377, 0.01),
        (7.5, 0.0, 0.5),
    ],
)
def test_tail_of_students_t_is_that_of_the_tables(freedom, t, p):
    assert tail(t, freedom) == pytest.approx(p, rel=1e-4)
    assert tail(-t, freedom) == pytest.approx(1 - p, rel=1e-4)


def test_tail_of_one_and_two_degrees_of_freedom_is_the_closed_form():
    for t in (0.1, 1.0, 30.0, math.inf):
        assert tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, abs=1e-9)
        closed = 0.0 if t == math.inf else 0.5 - t / (2 * math.sqrt(2 + t * t))
        assert tail(t, 2) == pytest.approx(closed, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.0, 0.0], "seen"),
        ([0.001, 0.002, 0.001], "seen"),
        ([0.0, 0.0, 0.5], "undecided"),
        ([0.4, 0.5, 0.45], "not seen"),
        ([0.01, 0.01, 0.01], "undecided"),
        ([0.0], "undecided"),
        ([0.0, 0.0, math.nan], "undecided"),
    ],
)
def test_limit_is_tested_over_the_seeds(values, expected):
    assert word(AtMost(A, 0.01), a=values) == expected
    opposite = {"seen": "not seen", "not seen": "seen", "undecided": "undecided"}
    assert word(AtLeast(A, 0.01), a=values) == opposite[expected]


@pytest.mark.parametrize(("kind", "sign"), [(AtMost, -1), (AtLeast, 1)])
def test_limit_is_tested_by_the_t_of_one_sample(kind, sign):
    """t = (mean - limit) / (s / sqrt(n)), on the side that is claimed."""
    values = np.array([0.1, 0.4, 0.25, 0.31])
    t = (values.mean() - 0.3) / (values.std(ddof=1) / 2)
    assert kind(A, 0.3).judge(lambda value: values).why.endswith(f"; p = {tail(sign * t, 3):.2g}")


@pytest.mark.parametrize(
    ("now", "expected"), [([1.2, 1.31, 1.26], "seen"), ([1.9, 2.01, 1.96], "not seen"), ([1.2, 2.4, 1.5], "undecided")]
)
def test_a_gap_is_closed_by_more_than_a_share_seed_by_seed(now, expected):
    """Of a gap from 2.1 to 1.1, 2.2 to 1.2 and 2.15 to 1.15; the spread of the seeds is in all three alike."""
    claim = Closed(A, (B, Value("c", "p")))
    values = {"a": now, "b": [2.1, 2.2, 2.15], "c": [1.1, 1.2, 1.15]}
    assert word(claim, **values) == expected
    assert power(claim, 3) == power(Below(A, B, paired=True), 3)
    if expected == "seen":
        why = claim.judge(lambda value: np.array(values[value.arm])).why
        assert "89% closed" in why
        assert word(Closed(A, claim.gap, 0.95), **values) == "not seen"


def test_equal_values_have_no_error():
    verdict = AtMost(A, 0.02).judge(lambda value: np.array([0.0125] * 3))
    assert verdict.why == "a: 0.0125 ± 0, limit 0.02; p = below 0.001"


def test_two_arms_are_compared_as_welch_does():
    """t = 4.157 at 2.74 degrees of freedom, from the formulas by hand; the third digit of p moves with both."""
    lower, higher = [1.0, 1.2, 1.1], [1.5, 2.0, 1.7]
    difference = np.mean(higher) - np.mean(lower)
    parts = [np.var(x, ddof=1) / 3 for x in (lower, higher)]
    freedom = sum(parts) ** 2 / sum(part**2 / 2 for part in parts)
    p = tail(difference / math.sqrt(sum(parts)), freedom)
    why = Below(A, B).judge(lambda value: np.array(lower if value == A else higher)).why
    assert why == f"a: 1.1 ± 0.058, b: 1.733 ± 0.15; p = {p:.2g}"
    assert word(Below(A, B), a=lower, b=higher) == "seen"
    assert word(Below(B, A), a=lower, b=higher) == "not seen"
    assert word(Below(A, B, by=0.6), a=lower, b=higher) == "undecided"
    assert word(Below(A, B), a=lower, b=lower) == "undecided"


def test_two_numbers_of_the_same_runs_are_compared_in_pairs():
    start, end = Value("a", "p", 1.0), Value("a", "p", 4.0)
    values = {1.0: [1.0, 2.0, 3.0], 4.0: [1.1, 2.11, 3.09]}
    assert Below(start, end).judge(lambda value: np.array(values[value.at])).word == "seen"
    assert word(Below(A, B), a=values[1.0], b=values[4.0]) == "undecided"
    assert word(Below(A, B, paired=True), a=values[1.0], b=values[4.0]) == "seen"
    assert word(Below(A, B, by=0.09, paired=True), a=values[1.0], b=values[4.0]) == "undecided"
    assert word(Below(A, B, by=0.2, paired=True), a=values[1.0], b=values[4.0]) == "not seen"


def test_several_claims_are_seen_if_all_are():
    claims = AtMost(A, 1.0), AtMost(B, 1.0)
    low, high, both = [0.0, 0.1, 0.0], [2.0, 2.1, 2.0], [0.0, 2.5, 1.1]
    assert word(All(claims), a=low, b=low) == "seen"
    assert word(All(claims), a=low, b=both) == "undecided"
    assert word(All(claims), a=both, b=high) == "not seen"


def test_an_order_is_that_of_neighbours():
    low, high, top = [0.0, 0.1, 0.0], [2.0, 2.1, 2.0], [4.0, 4.1, 4.0]
    assert in_order(A, B).claims == (Below(A, B),)
    assert in_order(A, B, A, by=1.0).claims == (Below(A, B, by=1.0), Below(B, A, by=1.0))
    assert word(in_order(A, B), a=low, b=high) == "seen"
    assert word(in_order(B, A), a=high, b=top) == "not seen"
    with pytest.raises(ValueError, match="values: expected at least two, the lowest first, got 1"):
        in_order(A)
    with pytest.raises(ValueError, match="claims: expected a tuple"):
        All(AtMost(A, 1.0))


def test_gains_that_grow_together_are_seen():
    bases, pairs = ("x0", "y0"), tuple((f"x{n}", f"y{n}") for n in range(1, 6))
    losses = {f"x{n}": [2.0 - 0.1 * n] * 3 for n in range(6)}
    for sign, expected in [(1, "seen"), (-1, "not seen")]:
        both = losses | {f"y{n}": [3.0 - sign * 0.2 * n] * 3 for n in range(6)}
        assert word(Correlated(bases, pairs, "p"), **both) == expected
        gains = Correlated(bases, pairs, "p").gains(lambda value, both=both: np.array(both[value.arm]))
        for found, each in zip(gains, (0.1, sign * 0.2), strict=True):
            assert np.allclose(found, each * np.arange(1, 6)[:, None].repeat(3, 1))  # lower losses are gains
    assert word(Correlated(bases, pairs, "p"), **losses, **{f"y{n}": [1.0] * 3 for n in range(6)}) == "undecided"


def test_correlation_that_rests_on_one_pair_is_said_and_not_seen():
    """Five parts in the order of their gains but one that gains far more: without it the others go the other way."""
    gains = {"x": [0.10, 0.11, 0.12, 0.13, 1.0], "y": [0.13, 0.12, 0.11, 0.10, 1.0]}
    losses = {f"{side}{n}": [2.0 - g] * 3 for side, all in gains.items() for n, g in enumerate(all, 1)}
    pairs = tuple((f"x{n}", f"y{n}") for n in range(1, 6))
    claim = Correlated(("x0", "y0"), pairs, "p")
    verdict = claim.judge(lambda value: np.array((losses | {"x0": [2.0] * 3, "y0": [2.0] * 3})[value.arm]))
    assert verdict.word == "undecided"
    assert "-1.00 without x5 / y5" in verdict.why


@pytest.mark.parametrize("parts", [(), (("a",), ("b",), ("a", "b"))])
def test_correlation_that_can_never_be_seen_is_refused(parts):
    with pytest.raises(ValueError, match=r"p is never below 0\.(17|5): the claim would never be seen"):
        Correlated(("x0", "y0"), (("x1", "y1"), ("x2", "y2"), ("x3", "y3")), "p", parts)
    with pytest.raises(ValueError, match="parts: expected those of 4 pairs, got those of 1"):
        Correlated(("x0", "y0"), tuple((f"x{n}", f"y{n}") for n in range(4)), "p", (("a",),))


def test_what_so_many_seeds_can_see_is_said_of_each_kind_of_claim():
    limit, welch, paired = AtMost(A, 0.1), Below(A, B), Below(A, B, paired=True)
    said = [power(claim, 3) for claim in (limit, welch, paired)]
    sizes = [float(lines[0].split(" of ")[-1].split()[0]) for lines in said]
    assert sizes[0] == sizes[2] < sizes[1]
    for words, lines in zip(("a limit", "two models", "the same seed"), said, strict=True):
        assert words in lines[0]
    assert power(All((welch, Below(B, A), limit)), 3) == [*said[1], *said[0]]
    assert float(power(welch, 5)[0].split(" of ")[-1].split()[0]) < sizes[1]
    pairs = tuple((f"x{n}", f"y{n}") for n in range(1, 5))
    assert power(Correlated(("x0", "y0"), pairs, "p"), 3)[0].startswith(
        "of gains of 4 parts, a true correlation of 0.8 in"
    )


def test_gap_is_wider_than_another_if_both_together_say_so():
    short, long = (A, B), (Value("c", "p"), Value("d", "p"))
    values = {"a": [1.0, 1.1, 0.9], "b": [1.5, 1.4, 1.6], "c": [1.0, 1.1, 1.05], "d": [3.0, 3.1, 2.9]}
    assert word(Wider(long, short), **values) == "seen"
    assert word(Wider(short, long), **values) == "not seen"
    assert word(Wider(long, short, by=1.5), **values) == "undecided"
    assert word(Wider(long, short), **{**values, "d": [1.0, 5.0, 3.0]}) == "undecided"


def test_gaps_of_one_arm_are_compared_run_by_run():
    """At two places of one model: what all of a run's numbers share does not count."""
    share = np.array([0.0, 100.0, -50.0])
    numbers = {1.0: share, 2.0: share + np.array([0.5, 0.6, 0.4]), 3.0: share + np.array([1.5, 1.4, 1.6])}
    near, far = ((Value("a", "p", 1.0), Value("a", "p", end)) for end in (2.0, 3.0))
    assert Wider(far, near).judge(lambda value: numbers[value.at]).word == "seen"
    assert Below(near[1], far[1]).judge(lambda value: numbers[value.at]).word == "seen"
