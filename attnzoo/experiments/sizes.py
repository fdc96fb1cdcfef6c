"""What a part gains by the size of the model, from the results of one experiment at several sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from attnzoo.experiments import figures
from attnzoo.experiments.claims import Below, Correlated, Value
from attnzoo.experiments.experiment import Experiment
from attnzoo.experiments.figures import Line
from attnzoo.experiments.outcome import Outcome
from attnzoo.experiments.report.outcome_figures import kinds_and_looks
from attnzoo.experiments.statistics import Array, tail, welch
from attnzoo.terminal import new_table


@dataclass(frozen=True)
class GainBySize:
    """A gain by size, and whether it changes.

    Args:
        lower: the value that is claimed to be lower, as of a model with a part.
        higher: the other one, as of the base.
        weights: trained weights of the lower one's model, by size.
        gains: mean of the higher minus the lower value.
        errors: standard errors.
        p: of the gain at the largest size being as large as at the smallest, two-sidedly by Welch's t.
    """

    lower: Value
    higher: Value
    weights: Array
    gains: Array
    errors: Array
    p: float


def gains_by_size(experiment: Experiment, outcomes: Sequence[Outcome]) -> list[GainBySize]:
    """The gains of an experiment by size: those that it correlates, or else the differences that it claims, as far as
    all results have runs of the models.

    Args:
        experiment: the experiment.
        outcomes: its results at two sizes or more.

    Raises:
        ValueError: fewer than two sizes, another experiment's result, or no gain that all results have.
    """
    for outcome in outcomes:
        if outcome.experiment != outcomes[0].experiment:
            raise ValueError(f"results: expected ones of {outcomes[0].experiment!r}, got one of {outcome.experiment!r}")
    if len({outcome.size for outcome in outcomes}) < max(2, len(outcomes)):
        raise ValueError(f"results: expected some of different sizes, got {', '.join(x.size for x in outcomes)}")
    found, missing = list[GainBySize](), ""
    for lower, higher in _pairs(experiment):
        arms = {lower.arm, higher.arm}
        if lacking := [x.size for x in outcomes if any(not x.of(arm) for arm in arms)]:
            missing = missing or f"expected runs of {' and '.join(sorted(arms))} in all, got none in {lacking[0]}"
            continue
        numbers = [(outcome.values(lower), outcome.values(higher)) for outcome in outcomes]
        weights = [outcome.of(lower.arm)[0].parameters for outcome in outcomes]
        order = np.argsort(weights)
        gains = [welch([-low, high]) for low, high in (numbers[n] for n in order)]
        (one, base), (large, large_base) = numbers[order[0]], numbers[order[-1]]
        change, error, freedom = welch([one, -base, -large, large_base])
        p = 2 * tail(abs(change) / error, freedom) if error > 0 else math.nan
        means, errors, _ = (np.array(column, dtype=np.float64) for column in zip(*gains, strict=True))
        found.append(GainBySize(lower, higher, np.array(weights, dtype=np.float64)[order], means, errors, p))
    if not found:
        raise ValueError(f"results: {missing}")
    return found


def left_out(experiment: Experiment, rows: Sequence[GainBySize]) -> list[str]:
    """The models of whose gains there are no rows, as not all results have runs of them."""
    shown = {row.lower.arm for row in rows}
    return list(dict.fromkeys(lower.arm for lower, _ in _pairs(experiment) if lower.arm not in shown))


def _pairs(experiment: Experiment) -> list[tuple[Value, Value]]:
    """The lower and the higher value of each gain, once."""
    claims = [one for each in experiment.expectations for one in getattr(each.claim, "claims", (each.claim,))]
    pairs = [
        (Value(arm, claim.probe), Value(base, claim.probe))
        for claim in claims
        if isinstance(claim, Correlated)
        for pair in claim.pairs
        for arm, base in zip(pair, claim.bases, strict=True)
    ]
    pairs = pairs or [(claim.lower, claim.higher) for claim in claims if isinstance(claim, Below)]
    return list(dict.fromkeys(pairs))


def sides_of(experiment: Experiment, rows: Sequence[GainBySize]) -> list[str]:
    """The sides of the models that gain."""
    kinds, _ = kinds_and_looks(experiment)
    return sorted({kinds[row.lower.arm][0] for row in rows})


def table_of(rows: Sequence[GainBySize]) -> Table:
    """A terminal table of gains by size."""
    sizes = rows[0].weights
    table = new_table("gain", *(f"{x / 1e6:.2g}M weights" for x in sizes), "p of a change", prose=["gain"])
    for row in rows:
        cells = [f"{gain:.3f} ± {error:.3f}" for gain, error in zip(row.gains, row.errors, strict=True)]
        table.add_row(f"{row.lower} below {row.higher}", *cells, f"{row.p:.2g}")
    return table


def curves_of(experiment: Experiment, rows: Sequence[GainBySize], side: str) -> Figure:
    """Gains by size, with standard errors, of the models of one side."""
    kinds, looks = kinds_and_looks(experiment)
    lines = [
        Line(row.lower.arm, row.lower.arm, np.log10(row.weights), row.gains, looks[row.lower.arm], row.errors)
        for row in rows
        if kinds[row.lower.arm][0] == side
    ]
    every = np.concatenate([row.gains + sign * row.errors for row in rows for sign in (-1, 1)])
    bases = {f" in {row.higher.probe} over {row.higher.arm}" for row in rows if kinds[row.lower.arm][0] == side}
    figure = figures.curves(
        lines, xlabel="trained weights", ylim=(min(0.0, float(every.min())), 1.06 * float(every.max())),
        names_width=max(len(row.lower.arm) for row in rows), ylabel=f"gain{bases.pop() if len(bases) == 1 else ''}",
    )  # fmt: skip
    [axes] = figure.axes
    ticks = np.unique(np.concatenate([line.x for line in lines]).round(2))
    axes.set_xlim(ticks[0], ticks[-1])
    axes.set_xticks([ticks[0], ticks[-1]], [f"{10**x / 1e6:.2g}M" for x in (ticks[0], ticks[-1])])
    return figure
