"""Statistical tests of claims (Student's t, a correlation of gains of pairs that share parts), and their power."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Parts = Sequence[Sequence[str]]
LEVEL = 0.05
MOST_PARTS = 8  # 40,320 relabellings, all of which are counted
DRAWS = 2000


def tail(t: float, freedom: float) -> float:
    """The probability that Student's t is above ``t``, by Simpson's rule on its angle atan(t / sqrt(freedom)).

    Args:
        t: any number, infinite ones too.
        freedom: degrees of freedom, at least 1.
    """
    angles = np.linspace(0, math.atan(abs(t) / math.sqrt(freedom)), 2001)
    heights = np.cos(angles) ** (freedom - 1)
    weights = np.where(np.arange(2001) % 2, 4.0, 2.0)
    weights[[0, -1]] = 1
    area = float(heights @ weights) * angles[1] / 3
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    above = max(0.5 - scale * area, 0.0)
    return float(above if t >= 0 else 1 - above)


def with_error(values: Array) -> str:
    """The mean ± standard error over the seeds, in print."""
    mean, error, _ = mean_error(values)
    return f"{mean:.4g}" + (f" ± {error:.2g}" if np.isfinite(error) else "")


def mean_error(values: Array) -> tuple[float, float, int]:
    """The mean, its standard error (nan for one value) and degrees of freedom; exact for equal values."""
    n, apart = values.size, values - values[0]
    error = float(apart.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return float(values[0] + apart.mean()), error, n - 1


def welch(terms: Sequence[Array]) -> tuple[float, float, float]:
    """The sum of the means of independent sets of runs, its standard error, and Welch's degrees of freedom.

    Args:
        terms: the numbers of each set, negative where the sum subtracts them.
    """
    means, errors, freedoms = zip(*map(mean_error, terms), strict=True)
    error = math.hypot(*errors)
    below = sum(part**4 / freedom for part, freedom in zip(errors, freedoms, strict=True) if freedom)
    return sum(means), error, error**4 / below if below > 0 else float(min(freedoms))


def correlation(one: Array, other: Array, parts: Parts = ()) -> tuple[float, float]:
    """Pearson's r of two sets of gains, and the share of all relabellings of parts whose r is as large or larger.

    Pairs that share a part are not exchangeable: two parts may gain more than one on both sides without any relation
    between the sides. So parts are permuted, not pairs: the gains of the other side are split by least squares into
    contributions of parts, which are permuted, and residuals of pairs, which are not. Where each pair is its own part,
    these are all permutations of the pairs.

    Args:
        one: gains, ``[pairs]``.
        other: of the other side, ``[pairs]``.
        parts: of each pair; none where each pair is a part of its own.
    """
    has = incidence(parts or [[str(n)] for n in range(one.size)])
    given = np.linalg.lstsq(has, other, rcond=None)[0]
    dealt = given[_orders(given.size)] @ has.T + (other - has @ given)
    r, every = _pearson(one, other[None])[0], _pearson(one, dealt)
    return float(r), float((every >= r - 1e-12).mean())


@functools.cache
def _orders(count: int) -> npt.NDArray[np.int64]:
    """Every order of so many parts, a row each."""
    return np.array(list(permutations(range(count))))


def _pearson(one: Array, others: Array) -> Array:
    """Pearson's r of ``one``, or of its rows, with the rows of ``others``; 0 for a constant row."""
    a, b = (x - x.mean(-1, keepdims=True) for x in (one, others))
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.asarray(np.divide((a * b).sum(-1), size, out=np.zeros_like(size), where=size > 1e-300))


def incidence(parts: Parts) -> Array:
    """The incidence matrix of pairs and parts, 0 or 1, ``[pairs, parts]``.

    Raises:
        ValueError: a pair without parts, more than 8 parts, or parts that always come together.
    """
    names = list(dict.fromkeys(part for each in parts for part in each))
    if not all(parts):
        raise ValueError("parts: expected one or more of each pair, got a pair without any")
    if len(names) > MOST_PARTS:
        raise ValueError(f"parts: expected at most {MOST_PARTS}, whose every relabelling is counted, got {len(names)}")
    has = np.array([[float(name in each) for name in names] for each in parts])
    if np.linalg.matrix_rank(has) < len(names):
        raise ValueError(f"parts: expected pairs that tell {', '.join(names)} apart; some always come together")
    return has


def smallest_p(parts: Parts) -> float:
    """The smallest p that :func:`correlation` can return: 1 / number of relabellings."""
    return 1 / math.factorial(incidence(parts).shape[1])


def without_each(one: Array, other: Array) -> Array:
    """Pearson's r with each pair left out, ``[pairs]``."""
    every = np.arange(one.size)
    return np.array([_pearson(one[every != n], other[every != n][None])[0] for n in every])


def drawn_anew(one: Array, other: Array, draws: int = DRAWS) -> tuple[float, float]:
    """The bootstrapped 95% interval of r over seeds and stretches of text.

    Seeds are drawn for every model separately, stretches once for all models, which read the same text.

    Args:
        one: losses of the base, then of each pair's model, on the one side, ``[1 + pairs, seeds, stretches]``.
        other: on the other side.
        draws: number of bootstrap draws.
    """
    rng, stretches = np.random.default_rng(0), np.arange(one.shape[2])
    sizes = (stretches.shape, one.shape[:2], other.shape[:2])
    many = zip(*([rng.integers(size[-1], size=size) for size in sizes] for _ in range(draws)), strict=True)
    drawn, *seeds = (np.array(each) for each in many)
    shares = (drawn[..., None] == stretches).mean(1)  # [draws, stretches]
    gains = []
    for losses, chosen in zip((one, other), seeds, strict=True):
        weights = (chosen[..., None] == np.arange(losses.shape[1])).mean(2)  # [draws, 1 + pairs, seeds]
        means = np.einsum("dms,mst,dt->dm", weights, losses, shares, optimize=True)
        gains.append(means[:, :1] - means[:, 1:])
    found = _pearson(*gains)
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


@functools.cache
def difference_seen(seeds: int, models: int = 2) -> float:
    """The difference, in standard deviations of a run, that is seen with a power of 80%, by simulation.

    Args:
        seeds: runs of each model.
        models: sets of runs that it is a sum of, by Welch's t: two for a difference of two models, four for one of two
            such differences; one for numbers of the same seed or a limit, by Student's t.

    Raises:
        ValueError: fewer than two seeds.
    """
    if seeds < 2:
        raise ValueError(f"seeds: expected at least 2, got {seeds}")
    runs = np.random.default_rng(0).standard_normal((models, DRAWS, seeds))
    parts = runs.var(2, ddof=1) / seeds
    error = np.sqrt(parts.sum(0))
    freedom = error**4 * (seeds - 1) / (parts**2).sum(0)
    least = np.interp(freedom, *_limits(seeds - 1, max(models, 2) * (seeds - 1)))
    # the difference at which each experiment's t comes to its limit
    return float(np.percentile(least * error - runs.mean(2).sum(0), 80))


@functools.cache
def _limits(least: int, most: int) -> tuple[Array, Array]:
    """A table of degrees of freedom, and the t that is exceeded with probability ``LEVEL`` at each."""
    freedoms, limits = np.linspace(least, most, 50), []
    for freedom in freedoms:
        low, high = 0.0, 1000.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if tail(middle, freedom) > LEVEL else (low, middle)
        limits.append(high)
    return freedoms, np.array(limits)


@functools.cache
def correlation_seen(parts: tuple[tuple[str, ...], ...], true: float, draws: int = 400) -> float:
    """The simulated power of :func:`correlation` for these pairs.

    The gains of parts are normal with a correlation ``true`` between the sides, and a pair's gain is the sum of its
    parts' gains.
    """
    rng, has = np.random.default_rng(0), incidence(parts)
    given = rng.standard_normal((draws, 2, has.shape[1]))
    given[:, 1] = true * given[:, 0] + math.sqrt(1 - true**2) * given[:, 1]
    return sum(correlation(has @ one, has @ other, parts)[1] <= LEVEL for one, other in given) / draws
