"""Reports of an experiment's outcome: an HTML page, a table for the terminal, and a summary in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from attnzoo.experiments import figures
from attnzoo.experiments.claims import Value
from attnzoo.experiments.experiment import Arm, Experiment, Grid, cost_of, layers_of, meanings_of, rate_in_words
from attnzoo.experiments.figures import Look
from attnzoo.experiments.outcome import BETTER, Outcome, Trained
from attnzoo.experiments.report.outcome_figures import gains, kinds_and_looks, numbers_at, overlays, places_of, section
from attnzoo.experiments.report.shell import render_template
from attnzoo.experiments.statistics import LEVEL, Array, mean_error
from attnzoo.files import write_whole
from attnzoo.terminal import new_table

TEST = (
    f"A claim is tested against its opposite, one-sidedly, over the seeds, at the level {LEVEL:g}: Student's t of one "
    "arm's runs against a number (or of two numbers of the same runs, or of runs that start from the same weights, in "
    "pairs), Welch's t of two arms, every relabelling of the parts for a correlation, which must stay positive without "
    "any one pair. Seen: the test says so. Not seen: the "
    "test of the opposite says so. Undecided: neither. A claim of several parts is seen if all of them are, and not "
    "seen if one of them is not. No correction is made for several claims."
)


def write_page(experiment: Experiment, outcome: Outcome, path: Path) -> Path:
    """Write the self-contained page about an outcome, atomically."""
    write_whole(path, render_experiment(experiment, outcome))
    return path


def render_experiment(experiment: Experiment, outcome: Outcome) -> str:
    """The page as a string."""
    kinds, looks = kinds_and_looks(experiment)
    return render_template(
        "experiment.html.j2",
        title=experiment.title,
        experiment=experiment,
        outcome=outcome,
        hints=hints(outcome),
        verdicts=outcome.verdicts(experiment),
        later=[each for each in experiment.expectations if each not in experiment.judged(outcome.size)],
        arms=[_arm(experiment, arm, kinds[arm.name], looks[arm.name], outcome) for arm in experiment.arms],
        columns=_columns(experiment, outcome),
        sections=[section(experiment, probe, outcome, kinds, looks) for probe in experiment.probes],
        gains=gains(experiment, outcome, kinds, looks),
        grids=_grids(experiment, outcome),
        overlays=overlays(experiment, outcome),
        maps=_maps(experiment, outcome),
        map_rows=max((probe.places for probe in experiment.probes if probe.name in experiment.maps), default=""),
        rates=_rates(experiment, outcome),
        failed=[run for run in outcome.runs if run.note],
        budget=budget(experiment, outcome),
        cost=cost_of(experiment, outcome.size),
        meanings=meanings_of(experiment),
        test=TEST,
    )


def verdict_table(experiment: Experiment, outcome: Outcome) -> Table:
    """A terminal table of the expectations and their verdicts."""
    table = new_table("expected", "verdict", "numbers", prose=["expected", "numbers"])
    colors = {"seen": "green", "not seen": "red", "undecided": "yellow"}
    for expectation, verdict in outcome.verdicts(experiment):
        table.add_row(escape(expectation.text), f"[{colors[verdict.word]}]{verdict.word}[/]", escape(verdict.why))
    return table


def hints(outcome: Outcome) -> list[str]:
    """Advice, in sentences, where no model has learnt a task, or may not have."""
    return [
        f"No model is better than a guess in {probe!r}: always the same answer is {100 * wrong:.3g}% wrong. "
        + _advice([run for run in outcome.runs if run.values.get(probe) and run.guesses.get(probe)], probe)
        for probe, wrong in outcome.unlearnt().items()
    ]


def _advice(runs: Sequence[Trained], probe: str) -> str:
    if any(run.betters(probe, by=2) for run in runs):
        return (
            f"One is by two standard errors, but that may be chance: it takes {BETTER:g}. Nothing is decided; "
            "asking more rows (`rows` of the size) would tell."
        )
    return (
        "Nothing was learnt, so nothing is decided about it. More answers to learn from help (steps, batch_size, an "
        "option of the task that asks more in each row), shorter rows, and other learning rates."
    )


def markdown(experiment: Experiment, outcome: Outcome) -> str:
    """The outcome for the documentation: verdicts, numbers, machine, command."""
    machine = ", ".join(f"{name} {value}" for name, value in outcome.machine.items())
    lines = [
        f"# {experiment.title}", "", experiment.question, "",
        f"{outcome.date}, size `{outcome.size}`: {budget(experiment, outcome)}. {machine}.", "",
        f"    {outcome.command}", "",
        "| expected | by | verdict | numbers |", "|---|---|---|---|",
    ]  # fmt: skip
    for expectation, verdict in outcome.verdicts(experiment):
        lines.append(f"| {expectation.text} | {expectation.source} | **{verdict.word}** | {verdict.why} |")
    lines += [line for hint in hints(outcome) for line in ("", hint)]
    columns = _columns(experiment, outcome)
    lines += ["", "Mean ± standard error over the seeds (–: not measured, or a run diverged):", ""]
    lines.append(f"| | lr | {' | '.join(column['title'] for column in columns)} |")
    lines.append("|---|---|" + "---|" * len(columns))
    for number, arm in enumerate(experiment.arms):
        cells = [" ".join(column["cells"][number]) for column in columns]
        name = f"{arm.name}{_fewer(outcome, arm)}"
        lines.append(f"| {name} | {_rate(outcome, arm)} | {' | '.join(cells)} |")
    if any(column["guess"] for column in columns):
        lines.append(f"| *always the same answer* | | {' | '.join(column['guess'] for column in columns)} |")
    lines += ["", *(f"- *{probes}*: {meaning}" for meaning, probes in meanings_of(experiment).items()), "", TEST, ""]
    lines += [f"Settings, before those of the command: `{cost_of(experiment, outcome.size)}`.", ""]
    lines += [f"- {arm.name}: `{layers_of(experiment, arm, outcome.size)}`" for arm in experiment.arms]
    return "\n".join([*lines, ""])


def row_in_words(experiment: Experiment, outcome: Outcome, arm: Arm) -> str:
    """An arm's row of the table of numbers, for the terminal."""
    number, columns = experiment.arms.index(arm), _columns(experiment, outcome)
    cells = ", ".join(f"{column['title']} {' '.join(column['cells'][number])}".rstrip() for column in columns)
    return f"{arm.name}{_fewer(outcome, arm)} (learning rate {_rate(outcome, arm)}): {cells}"


def budget(experiment: Experiment, outcome: Outcome) -> str:
    """A description of the trained models and budget."""
    tokens = sorted({run.tokens for run in outcome.runs if run.tokens})
    every = {(run.arm, run.lr, run.seed, run.tokens): run for run in (*outcome.tried, *outcome.runs)}.values()
    arms = len(experiment.arms)
    seeds = outcome.planned or len(outcome.runs) // arms
    rates = max((len([x for x in outcome.tried if x.arm == run.arm]) for run in outcome.tried), default=1)
    words = f"{arms} models, {seeds} seeds each"
    words += f" at the best of {rates} learning rates" if rates > 1 else ""
    words += f", {' or '.join(f'{count:,}' for count in tokens)} tokens a run"
    if len(outcome.runs) < arms * seeds:
        words += f"; not finished: {len(outcome.runs)} of {arms * seeds} models trained and measured"
    return f"{words}; {len(every)} runs, {sum(run.seconds for run in every) / 60:.1f} minutes of training in all"


def _arm(experiment: Experiment, arm: Arm, kind: tuple[str, int, str], look: Look, outcome: Outcome) -> dict[str, Any]:
    side, pair, dual = kind
    runs = outcome.of(arm.name)
    return {
        "name": arm.name, "fewer": _fewer(outcome, arm), "side": side, "pair": pair, "dual": dual,
        "color": figures.THEME[look.color],
        "layers": layers_of(experiment, arm, outcome.size), "lr": _rate(outcome, arm),
        "parameters": f"{runs[0].parameters:,}" if runs else "–",
        "minutes": f"{sum(run.seconds for run in runs) / 60:.1f}",
    }  # fmt: skip


def _fewer(outcome: Outcome, arm: Arm) -> str:
    """How many runs an arm has, behind its name, where these are some of those planned."""
    count = len(outcome.of(arm.name))
    return f" ({count} of {outcome.planned} seeds)" if 0 < count < outcome.planned else ""


def _rate(outcome: Outcome, arm: Arm) -> str:
    """The learning rate of an arm's runs, in words."""
    runs = outcome.of(arm.name)
    return rate_in_words(runs[0].lr) if runs else "–"


def _columns(experiment: Experiment, outcome: Outcome) -> list[dict[str, Any]]:
    """The columns of the table of numbers: each probe at its places, or at three of many (first, middle, last)."""
    columns = []
    for probe in experiment.probes:
        places = places_of(probe, outcome)
        if len(places) > 4:
            places = [places[0], places[len(places) // 2], places[-1]]
        for place in places:
            values = [numbers_at(outcome, arm.name, probe.name, place) for arm in experiment.arms]
            title = probe.name if len(places) == 1 else f"{probe.name} at {place:g}"
            guess = outcome.guess(probe.name, place)
            said = "" if guess is None else _cell(np.array([guess]), probe.percent)[0]
            columns.append({"title": title, "cells": [_cell(x, probe.percent) for x in values], "guess": said})
    return columns


def _cell(values: Array, percent: bool) -> tuple[str, str]:
    """The mean and the standard error of values, in print."""
    if not (values.size and np.isfinite(values).all()):
        return ("–", "")
    scale, digits = (100, 2) if percent else (1, 3)
    numbers = (scale * x for x in mean_error(values)[:2])
    mean, error = (f"{x:.1g}" if 0 < abs(x) < 0.5 * 10**-digits else f"{x:.{digits}f}" for x in numbers)
    return f"{mean}{' %' if percent else ''}", f"± {error}" if values.size > 1 else ""


def _grids(experiment: Experiment, outcome: Outcome) -> list[dict[str, Any]]:
    """The grids of arms; tables of one probe share their colours."""
    percent = {probe.name: probe.percent for probe in experiment.probes}
    numbers: dict[str, list[float]] = {}
    for grid in experiment.grids:
        means = [_mean(grid, arm, outcome) for row in grid.arms for arm in row if arm]
        numbers.setdefault(grid.probe, []).extend(mean for mean in means if math.isfinite(mean))
    tables = []
    for grid in experiment.grids:
        known = numbers[grid.probe]
        limits = (min(known), max(known)) if known else (0.0, 1.0)
        cells = [
            [
                _field(outcome.values(Value(arm, grid.probe, grid.at)), percent[grid.probe], limits) if arm else None
                for arm in row
            ]
            for row in grid.arms
        ]
        tables.append({"title": grid.title, "columns": grid.columns, "rows": list(zip(grid.rows, cells, strict=True))})
    return tables


def _mean(grid: Grid, arm: str, outcome: Outcome) -> float:
    values = outcome.values(Value(arm, grid.probe, grid.at))
    return float(values.mean()) if values.size else math.nan


def _maps(experiment: Experiment, outcome: Outcome) -> list[dict[str, Any]]:
    """For each arm a table with a row per place and a column per probe."""
    probes = [probe for probe in experiment.probes if probe.name in experiment.maps]
    tables = []
    for arm in experiment.arms if probes else ():
        places = sorted({place for probe in probes for place in outcome.places(arm.name, probe.name)})
        rows = [
            (
                f"{place:g}",
                [_field(numbers_at(outcome, arm.name, probe.name, place), probe.percent, (0, 1)) for probe in probes],
            )
            for place in places
        ]
        tables.append({"title": arm.name, "columns": [probe.name for probe in probes], "rows": rows})
    return tables


def _field(values: Array, percent: bool, limits: tuple[float, float]) -> dict[str, Any]:
    mean, error = _cell(values, percent)
    if mean == "–":
        return {"mean": mean, "error": error, "share": ""}
    low, high = limits
    share = (float(values.mean()) - low) / (high - low) if high > low else 0.0
    return {"mean": mean, "error": error, "share": f"{100 * min(max(share, 0.0), 1.0):.0f}"}


def _rates(experiment: Experiment, outcome: Outcome) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """The held-out loss of every learning rate that was tried for an arm, and whether it was chosen."""
    rows = []
    for arm in experiment.arms:
        tried: list[Trained] = [run for run in outcome.tried if run.arm == arm.name]
        taken = _rate(outcome, arm)
        cells = [
            (rate_in_words(run.lr), f"{run.validation:.4f}" if math.isfinite(run.validation) else "diverged")
            for run in tried
        ]
        rows.append((arm.name, [(lr, loss, lr == taken) for lr, loss in cells]))
    return rows
