"""Claims about the runs of an experiment, and the statistical tests that decide whether they were seen.

A claim is tested against its opposite, one-sidedly, over the seeds: Student's t for one set of runs against a number
(or against values of the same runs, or of runs that start from the same weights, in pairs), Welch's t for two sets of
runs, an exact permutation test for a correlation. It is seen where the test says so at `LEVEL`, not seen where the test
of the opposite does, and undecided otherwise. No correction is made for several claims: of twenty that do not hold, one
may be taken for seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, Protocol

import numpy as np

from attnzoo.errors import check_kinds, several
from attnzoo.experiments.statistics import (
    LEVEL,
    Array,
    correlation,
    correlation_seen,
    difference_seen,
    drawn_anew,
    mean_error,
    smallest_p,
    tail,
    welch,
    with_error,
    without_each,
)

Word = Literal["seen", "not seen", "undecided"]
SEEN: Word = "seen"
NOT_SEEN: Word = "not seen"
UNDECIDED: Word = "undecided"


@dataclass(frozen=True)
class Value:
    """A measured number of each run of an arm.

    Args:
        arm: name of the arm.
        probe: name of the probe that measures the number.
        at: the place of the probe; None for the largest.
    """

    arm: str
    probe: str
    at: float | None = None

    def __post_init__(self) -> None:
        check_kinds(vars(self), Value.__annotations__)

    def __str__(self) -> str:
        return f"{self.arm}{'' if self.at is None else f' at {self.at:g}'}"


Values = Callable[[Value], Array]  # a value -> the numbers of its runs by seed, [seeds]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim, with the numbers behind it in words."""

    word: Word
    why: str


class Claim(Protocol):
    """A statement about runs that a test may confirm."""

    @property
    def values(self) -> tuple[Value, ...]:
        """The values that the claim is about."""

    def judge(self, of: Values) -> Verdict:
        """The verdict of the claim; ``of`` gives the numbers of a value's runs."""


@dataclass(frozen=True)
class _Limited:
    """A claim about a value's mean over the seeds and a limit."""

    value: Value
    limit: float
    sign: ClassVar[int]  # claimed sign of the value minus the limit

    def __post_init__(self) -> None:
        check_kinds(vars(self), _Limited.__annotations__)

    @property
    def values(self) -> tuple[Value, ...]:
        return (self.value,)

    def judge(self, of: Values) -> Verdict:
        mean, error, freedom = mean_error(of(self.value))
        what = f"{self.value}: {with_error(of(self.value))}, limit {self.limit:g}"
        return _decide(what, self.sign * (mean - self.limit), error, freedom)


@dataclass(frozen=True)
class AtMost(_Limited):
    """The claim that a value's mean over the seeds is below a limit."""

    sign = -1


@dataclass(frozen=True)
class AtLeast(_Limited):
    """The claim that a value's mean over the seeds is above a limit."""

    sign = 1


@dataclass(frozen=True)
class Below:
    """The claim that one value's mean over the seeds is below another's; values of one arm are compared run by run.

    Args:
        lower: the value claimed to be lower.
        higher: the other value.
        by: the least difference.
        paired: whether runs of two arms are compared seed by seed, as they start from the same weights.
    """

    lower: Value
    higher: Value
    by: float = 0.0
    paired: bool = False

    def __post_init__(self) -> None:
        check_kinds(vars(self), Below.__annotations__)

    @property
    def values(self) -> tuple[Value, ...]:
        return (self.lower, self.higher)

    def judge(self, of: Values) -> Verdict:
        lower, higher = of(self.lower), of(self.higher)
        what = f"{self.lower}: {with_error(lower)}, {self.higher}: {with_error(higher)}"
        if self.paired:
            return _decide(what, *mean_error(higher - lower - self.by))
        difference, error, freedom = _gap(of, (self.lower, self.higher))
        return _decide(what, difference - self.by, error, freedom)


@dataclass(frozen=True)
class Wider:
    """The claim that one value is further below another than a third is below a fourth, in means over the seeds.

    Args:
        wide: the lower and the higher value of the wider gap.
        narrow: those of the narrower gap.
        by: the least difference of the gaps.
    """

    wide: tuple[Value, Value]
    narrow: tuple[Value, Value]
    by: float = 0.0

    def __post_init__(self) -> None:
        check_kinds(vars(self), Wider.__annotations__)

    @property
    def values(self) -> tuple[Value, ...]:
        return (*self.wide, *self.narrow)

    def judge(self, of: Values) -> Verdict:
        wide, narrow = _gap(of, self.wide), _gap(of, self.narrow)
        what = "; ".join(
            f"{pair[0]} below {pair[1]} by {gap[0]:.3g} ± {gap[1]:.2g}"
            for pair, gap in ((self.wide, wide), (self.narrow, narrow))
        )
        difference, error, freedom = _gap(of, (*self.wide, *reversed(self.narrow)))
        return _decide(what, difference - self.by, error, freedom)


@dataclass(frozen=True)
class Closed:
    """The claim that runs close more than a share of the gap from one value to another, seed by seed.

    Args:
        value: of the runs that close it.
        gap: the value with the whole gap, and the one without any.
        share: of the gap.
    """

    value: Value
    gap: tuple[Value, Value]
    share: float = 0.5

    def __post_init__(self) -> None:
        check_kinds(vars(self), Closed.__annotations__)

    @property
    def values(self) -> tuple[Value, ...]:
        return (self.value, *self.gap)

    def judge(self, of: Values) -> Verdict:
        now, start, end = (of(value) for value in self.values)
        closed = 1 - mean_error(now - end)[0] / mean_error(start - end)[0]
        what = (
            f"{self.value}: {with_error(now)}, between {with_error(start)} and {with_error(end)}, {closed:.0%} closed"
        )
        return _decide(what, *mean_error((1 - self.share) * (start - end) - (now - end)))


@dataclass(frozen=True)
class All:
    """The conjunction of several claims: seen if all are seen, not seen if one is not."""

    claims: tuple[Claim, ...]

    def __post_init__(self) -> None:
        several(self, "claims")

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(value for claim in self.claims for value in claim.values)

    def judge(self, of: Values) -> Verdict:
        verdicts = [claim.judge(of) for claim in self.claims]
        words = {verdict.word for verdict in verdicts}
        word = NOT_SEEN if NOT_SEEN in words else UNDECIDED if UNDECIDED in words else SEEN
        return Verdict(word, "; ".join(verdict.why for verdict in verdicts))


def in_order(*values: Value, by: float = 0.0) -> All:
    """The claim that each value is below the next one.

    Args:
        values: at least two, the lowest first.
        by: as of :class:`Below`.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"values: expected at least two, the lowest first, got {len(values)}")
    return All(tuple(Below(lower, higher, by) for lower, higher in pairwise(values)))


def at_most(limit: float, probe: str, *arms: str, at: float | None = None) -> Claim:
    """The claim that a probe's number, at one place, is below a limit in each of some arms."""
    return _each(AtMost(Value(arm, probe, at), limit) for arm in arms)


def at_least(limit: float, probe: str, *arms: str, at: float | None = None) -> Claim:
    """The claim that a probe's number, at one place, is above a limit in each of some arms."""
    return _each(AtLeast(Value(arm, probe, at), limit) for arm in arms)


def below(probe: str, *pairs: tuple[str, str], at: float | None = None, by: float = 0.0, paired: bool = False) -> Claim:
    """The claim that in each pair of arms a probe's number, at one place, is lower in the first; see :class:`Below`."""
    return _each(Below(Value(lower, probe, at), Value(higher, probe, at), by, paired) for lower, higher in pairs)


def _each(claims: Iterable[Claim]) -> Claim:
    first, *others = claims
    return All((first, *others)) if others else first


@dataclass(frozen=True)
class Correlated:
    """The claim that gains over a base on one side correlate with those on the other.

    The correlation of the means over the seeds must be positive, also without any one pair.

    Args:
        bases: the base arms of both sides; smaller values are better.
        pairs: pairs of further arms, one of each side.
        probe: name of the probe.
        parts: the parts of each pair by name, whose relabellings the test counts; empty: each pair is its own part.
        text: a probe of the same number per stretch of the text, and the number of stretches, for a bootstrapped 95%
            interval of the correlation.

    Raises:
        ValueError: parts of another number of pairs, more than 8 of them, or so few that no correlation is ever seen.
    """

    bases: tuple[str, str]
    pairs: tuple[tuple[str, str], ...]
    probe: str
    parts: tuple[tuple[str, ...], ...] = ()
    text: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        several(self, "pairs", "parts")
        if self.parts and len(self.parts) != len(self.pairs):
            raise ValueError(f"parts: expected those of {len(self.pairs)} pairs, got those of {len(self.parts)}")
        least = smallest_p(self.parts or [pair[:1] for pair in self.pairs])
        if least > LEVEL:
            raise ValueError(
                f"pairs: expected ones of at least four parts, got {len(self.pairs)} of which p is never below "
                f"{least:.2g}: the claim would never be seen"
            )

    @property
    def values(self) -> tuple[Value, ...]:
        probes = (self.probe, self.text[0]) if self.text else (self.probe,)
        arms = [arm for pair in (self.bases, *self.pairs) for arm in pair]
        return tuple(Value(arm, probe) for probe in probes for arm in arms)

    def gains(self, of: Values) -> tuple[Array, Array]:
        """The gain of each pair over the bases by seed, ``[pairs, seeds]`` for both sides."""
        one, other = (
            np.stack(
                [of(Value(self.bases[side], self.probe)) - of(Value(pair[side], self.probe)) for pair in self.pairs]
            )
            for side in (0, 1)
        )
        return one, other

    def judge(self, of: Values) -> Verdict:
        one, other = (gains.mean(1) for gains in self.gains(of))
        if not np.isfinite([one, other]).all() or one.std() == 0 or other.std() == 0:
            return Verdict(UNDECIDED, "no correlation of values that are all alike, or not finite")
        r, above = correlation(one, other, self.parts)
        below = correlation(one, -other, self.parts)[1]
        left = without_each(one, other)
        seen, not_seen = above <= LEVEL and left.min() > 0, below <= LEVEL and left.max() < 0
        first, *others = np.argsort(left if r > 0 else -left)
        how = f"over {len(one)} pairs of gains" + (f" of {len(set(sum(self.parts, ())))} parts" if self.parts else "")
        ends = f"{left[others].min():.2f} to {left[others].max():.2f}"
        why = f"r = {r:.2f} {how}{self._interval(of)}, p = {_p(above)}"
        why += f"; {left[first]:.2f} without {' / '.join(self.pairs[first])}, {ends} without another one"
        return Verdict(SEEN if seen else NOT_SEEN if not_seen else UNDECIDED, why)

    def _interval(self, of: Values) -> str:
        """The bootstrapped 95% interval of the correlation over seeds and stretches of text, in words; "" without
        ``text``."""
        if self.text is None:
            return ""
        probe, count = self.text
        sides = [[pair[side] for pair in (self.bases, *self.pairs)] for side in (0, 1)]
        one, other = (
            np.stack([np.stack([of(Value(arm, probe, float(n))) for n in range(1, count + 1)], 1) for arm in arms])
            for arms in sides
        )
        low, high = drawn_anew(one, other)
        return f" (95% {low:.2f} to {high:.2f})"


def power(claim: Claim, seeds: int) -> list[str]:
    """The power of a claim's tests with ``seeds`` seeds, by simulation, in words: a line for each kind of test."""
    if isinstance(claim, All):
        return list(dict.fromkeys(line for each in claim.claims for line in power(each, seeds)))
    if isinstance(claim, Closed):
        return power(Below(claim.value, claim.gap[0], paired=True), seeds)
    if isinstance(claim, Correlated):
        parts = claim.parts or tuple((str(n),) for n in range(len(claim.pairs)))
        shares = " and ".join(f"{true:g} in {100 * correlation_seen(parts, true):.0f}" for true in (0.8, 0.9))
        count = len({part for each in parts for part in each})
        return [f"of gains of {count} parts, a true correlation of {shares} of 100 experiments"]
    if isinstance(claim, Below | Wider):
        models = 1 if isinstance(claim, Below) and claim.paired else len({value.arm for value in claim.values})
        kind = {1: "of numbers of the same seed", 2: "of two models"}.get(models, f"of gaps among {models} models")
    elif isinstance(claim, AtMost | AtLeast):
        models, kind = 1, "from a limit"
    else:
        return []
    return [
        f"in four of five experiments a difference {kind} of {difference_seen(seeds, models):.1f} standard deviations"
    ]


def _gap(of: Values, values: Sequence[Value]) -> tuple[float, float, float]:
    """Every second value minus the one before it, summed: mean, standard error and degrees of freedom.

    Numbers of one arm are summed run by run.
    """
    sums: dict[str, Array] = {}
    for number, value in enumerate(values):
        sums[value.arm] = sums.get(value.arm, np.zeros(1)) + (of(value) if number % 2 else -of(value))
    return welch(list(sums.values()))


def _decide(what: str, difference: float, error: float, freedom: float) -> Verdict:
    """The verdict on whether a difference is above 0, by Student's t."""
    if not np.isfinite([difference, error]).all() or freedom < 1:
        return Verdict(UNDECIDED, f"{what}; no test without two runs that ended well")
    t = difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0
    p = tail(t, freedom)
    word = SEEN if p <= LEVEL else NOT_SEEN if 1 - p <= LEVEL else UNDECIDED
    return Verdict(word, f"{what}; p = {_p(p)}")


def _p(p: float) -> str:
    return f"{p:.2g}" if p >= 0.001 else "below 0.001"
