"""What a part gains by the size of the model, from the results of one experiment at several sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import yaml
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
        weights: trained weights of the lower one's model, by size; of another model where it has no runs.
        gains: mean of the higher minus the lower value; nan where one of the two has no runs.
        errors: standard errors; nan where one of the two has fewer than two runs.
        p: of the gain at its largest size being as large as at its smallest, two-sidedly by Welch's t; nan where one of
            these has no error.
    """

    lower: Value
    higher: Value
    weights: Array
    gains: Array
    errors: Array
    p: float


def gains_by_size(experiment: Experiment, outcomes: Sequence[Outcome]) -> list[GainBySize]:
    """The gains of an experiment by size, the smallest first: those that it correlates, or else the differences that it
    claims, as far as two results or more have runs of the models.

    Args:
        experiment: the experiment.
        outcomes: its results at two sizes or more.

    Raises:
        ValueError: fewer than two sizes, another experiment's result, one on another text, whose losses do not compare,
            or no gain that two results have.
    """
    for outcome in outcomes:
        if outcome.experiment != outcomes[0].experiment:
            raise ValueError(f"results: expected ones of {outcomes[0].experiment!r}, got one of {outcome.experiment!r}")
    if len({outcome.size for outcome in outcomes}) < max(2, len(outcomes)):
        raise ValueError(f"results: expected some of different sizes, got {', '.join(x.size for x in outcomes)}")
    texts = {outcome.size: _text(outcome) for outcome in outcomes}
    if len(set(texts.values())) > 1:
        said = ", ".join(f"{text} at {size}" for size, text in texts.items())
        raise ValueError(f"results: expected ones of one text, as losses of unlike tokens do not compare, got {said}")
    outcomes = sorted(outcomes, key=lambda outcome: outcome.runs[0].parameters)
    found, missing = list[GainBySize](), ""
    for lower, higher in _pairs(experiment):
        numbers = [(outcome.values(higher), outcome.values(lower)) for outcome in outcomes]
        there = [n for n, both in enumerate(numbers) if all(values.size for values in both)]
        if len(there) < 2:
            have = ", ".join(outcomes[n].size for n in there) or "none"
            missing = missing or f"expected two with runs of {lower.arm} and {higher.arm}, got {have}"
            continue
        weights = [(outcome.of(lower.arm) or outcome.runs)[0].parameters for outcome in outcomes]
        gains, errors = np.full((2, len(outcomes)), math.nan)
        for n in there:
            base, part = numbers[n]
            gains[n], errors[n], _ = welch([base, -part])
        (base, one), (large_base, large) = numbers[there[0]], numbers[there[-1]]
        change, error, freedom = welch([one, -base, -large, large_base])
        p = 2 * tail(abs(change) / error, freedom) if error > 0 else math.nan
        found.append(GainBySize(lower, higher, np.array(weights, dtype=np.float64), gains, errors, p))
    if not found:
        none = f"expected ones that compare models, and {outcomes[0].experiment} claims limits alone"
        raise ValueError(f"results: {missing or none}")
    return found


def _text(outcome: Outcome) -> str:
    """The text or task of a result's training."""
    data = yaml.safe_load(outcome.settings)["data"]
    return str(data.get("sources") or data["source"])


def left_out(experiment: Experiment, rows: Sequence[GainBySize]) -> list[str]:
    """The models of whose gains there are no rows, as fewer than two results have runs of them."""
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
        cells = [
            "–" if math.isnan(gain) else f"{gain:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")
            for gain, error in zip(row.gains, row.errors, strict=True)
        ]
        table.add_row(f"{row.lower} below {row.higher}", *cells, "–" if math.isnan(row.p) else f"{row.p:.2g}")
    return table


def curves_of(experiment: Experiment, rows: Sequence[GainBySize], side: str) -> Figure:
    """Gains by size, with standard errors, of the models of one side."""
    kinds, looks = kinds_and_looks(experiment)
    lines = []
    for row in (row for row in rows if kinds[row.lower.arm][0] == side):
        x, y, error = (column[np.isfinite(row.gains)] for column in (row.weights, row.gains, row.errors))
        lines.append(Line(row.lower.arm, row.lower.arm, np.log10(x), y, looks[row.lower.arm], error))
    every = np.concatenate([row.gains + sign * np.nan_to_num(row.errors) for row in rows for sign in (-1, 1)])
    bases = {f" in {row.higher.probe} over {row.higher.arm}" for row in rows if kinds[row.lower.arm][0] == side}
    figure = figures.curves(
        lines, xlabel="trained weights", ylim=(min(0.0, float(np.nanmin(every))), 1.06 * float(np.nanmax(every))),
        names_width=max(len(row.lower.arm) for row in rows), ylabel=f"gain{bases.pop() if len(bases) == 1 else ''}",
    )  # fmt: skip
    [axes] = figure.axes
    ticks = np.unique(np.concatenate([line.x for line in lines]).round(2))
    axes.set_xlim(ticks[0], ticks[-1])
    axes.set_xticks([ticks[0], ticks[-1]], [f"{10**x / 1e6:.2g}M" for x in (ticks[0], ticks[-1])])
    first, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")  # beside the y axis, not under it
    last.set_horizontalalignment("right")
    return figure
