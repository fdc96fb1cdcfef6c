"""From the outcome of an experiment to its page, to a table for the terminal, and to a summary in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from attnzoo.evaluation.forgetting import OF_NETWORKS
from attnzoo.experiments import figures, run_figures
from attnzoo.experiments.claims import AtLeast, AtMost, Correlated, Value
from attnzoo.experiments.experiment import Arm, Experiment, Grid, cost_of, layers_of, meanings_of, rate_in_words
from attnzoo.experiments.figures import Line, Look, to_svg
from attnzoo.experiments.outcome import BETTER, Outcome, Trained
from attnzoo.experiments.probes import Probe
from attnzoo.experiments.report.shell import fill
from attnzoo.experiments.statistics import LEVEL, Array, mean_error
from attnzoo.files import write_whole
from attnzoo.terminal import new_table

SIDES = ("softmax", "linear")
TEST = (
    f"A claim is tested against its opposite, one-sidedly, over the seeds, at the level {LEVEL:g}: Student's t of one "
    "arm's runs against a number (or of two numbers of the same runs, or of runs that start from the same weights, in "
    "pairs), Welch's t of two arms, every relabelling of the parts for a correlation, which must stay positive without "
    "any one pair. Seen: the test says so. Not seen: the "
    "test of the opposite says so. Undecided: neither. A claim of several parts is seen if all of them are, and not "
    "seen if one of them is not. No correction is made for several claims."
)
RUNS = (
    "small dots are runs, large ones their means with standard errors, hollow on the linear side; dotted rules are "
    "limits that an expectation sets, the dashed one is what guessing gives"
)
GAINS = "small dots are runs, large ones their means with standard errors; on the dotted rule both sides gain alike"
OVERLAY = "means of the seeds with their standard errors"


def write_page(experiment: Experiment, outcome: Outcome, path: Path) -> Path:
    """Write the page about an outcome, whole in itself, in one move."""
    write_whole(path, render_experiment(experiment, outcome))
    return path


def render_experiment(experiment: Experiment, outcome: Outcome) -> str:
    """The page as a string."""
    kinds, looks = _kinds_and_looks(experiment)
    return fill(
        "experiment.html.j2",
        title=experiment.title,
        experiment=experiment,
        outcome=outcome,
        hints=hints(outcome),
        verdicts=outcome.verdicts(experiment),
        later=[each for each in experiment.expectations if each not in experiment.judged(outcome.size)],
        arms=[_arm(experiment, arm, kinds[arm.name], looks[arm.name], outcome) for arm in experiment.arms],
        columns=_columns(experiment, outcome),
        sections=[_section(experiment, probe, outcome, kinds, looks) for probe in experiment.probes],
        gains=_gains(experiment, outcome, kinds, looks),
        grids=_grids(experiment, outcome),
        overlays=_overlays(experiment, outcome),
        maps=_maps(experiment, outcome),
        map_rows=max((probe.places for probe in experiment.probes if probe.name in experiment.maps), default=""),
        rates=_rates(experiment, outcome),
        failed=[run for run in outcome.runs if run.note],
        budget=budget(experiment, outcome),
        cost=cost_of(experiment, outcome.size),
        meanings=meanings_of(experiment),
        test=TEST,
    )


def picture(experiment: Experiment, outcome: Outcome) -> tuple[Figure, str, str]:
    """The outcome in one figure, what it shows in words, and how to read it: the first picture that lays several arms
    over each other, or what a part gains on either side, if that is asked, else every run, at the last place that the
    first expectation is about."""
    if experiment.overlays:
        return run_figures.overlay(overlaid(experiment, 0, outcome)), experiment.overlays[0].title, OVERLAY
    kinds, looks = _kinds_and_looks(experiment)
    judged = experiment.judged(outcome.size)
    for each in judged:
        if isinstance(each.claim, Correlated) and not outcome.missing(each.claim):
            return _gains_figure(each.claim, outcome, kinds, looks), "what a part gains on either side", GAINS
    about = judged[0].claim.values[-1]
    probe = next(probe for probe in experiment.probes if probe.name == about.probe)
    places = _places(probe, outcome)
    at = about.at if about.at is not None or not places else places[-1]
    words = f"{probe.name} ({probe.places}: {at:g})" if len(places) > 1 else probe.name
    return _runs_figure(experiment, probe, at, outcome, kinds, looks), words, RUNS


def verdict_table(experiment: Experiment, outcome: Outcome) -> Table:
    """What was expected and what was seen, for the terminal."""
    table = new_table("expected", "verdict", "numbers", prose=["expected", "numbers"])
    colors = {"seen": "green", "not seen": "red", "undecided": "yellow"}
    for expectation, verdict in outcome.verdicts(experiment):
        table.add_row(escape(expectation.text), f"[{colors[verdict.word]}]{verdict.word}[/]", escape(verdict.why))
    return table


def hints(outcome: Outcome) -> list[str]:
    """What to do where no model has learnt anything, or may not have, in sentences."""
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
        lines.append(f"| {arm.name} | {_rate(outcome, arm)} | {' | '.join(cells)} |")
    if any(column["guess"] for column in columns):
        lines.append(f"| *always the same answer* | | {' | '.join(column['guess'] for column in columns)} |")
    lines += ["", *(f"- *{probes}*: {meaning}" for meaning, probes in meanings_of(experiment).items()), "", TEST, ""]
    lines += [f"Settings, before those of the command: `{cost_of(experiment, outcome.size)}`.", ""]
    lines += [f"- {arm.name}: `{layers_of(experiment, arm, outcome.size)}`" for arm in experiment.arms]
    return "\n".join([*lines, ""])


def row_in_words(experiment: Experiment, outcome: Outcome, arm: Arm) -> str:
    """A model's row of the table of numbers, for the terminal."""
    number, columns = experiment.arms.index(arm), _columns(experiment, outcome)
    cells = ", ".join(f"{column['title']} {' '.join(column['cells'][number])}" for column in columns)
    return f"{arm.name} (learning rate {_rate(outcome, arm)}): {cells}"


def budget(experiment: Experiment, outcome: Outcome) -> str:
    """What was trained, in words."""
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


def _variants(arm: Arm) -> list[str]:
    entries = arm.variant if isinstance(arm.variant, list | tuple) else [arm.variant]
    return list(dict.fromkeys(entry if isinstance(entry, str) else entry["name"] for entry in entries))


def _kinds_and_looks(experiment: Experiment) -> tuple[dict[str, tuple[str, int, str]], dict[str, Look]]:
    """Side, pair and dual of each arm, and how it is drawn."""
    kinds = {arm.name: figures.kind_of(_variants(arm)) for arm in experiment.arms}
    return kinds, figures.looks([(name, pair, side) for name, (side, pair, _) in kinds.items()])


def _arm(experiment: Experiment, arm: Arm, kind: tuple[str, int, str], look: Look, outcome: Outcome) -> dict[str, Any]:
    side, pair, dual = kind
    runs = outcome.of(arm.name)
    return {
        "name": arm.name, "side": side, "pair": pair, "dual": dual, "color": figures.THEME[look.color],
        "layers": layers_of(experiment, arm, outcome.size), "lr": _rate(outcome, arm),
        "parameters": f"{runs[0].parameters:,}" if runs else "–",
        "minutes": f"{sum(run.seconds for run in runs) / 60:.1f}",
    }  # fmt: skip


def _rate(outcome: Outcome, arm: Arm) -> str:
    """The learning rate that an arm's runs have, in words."""
    runs = outcome.of(arm.name)
    return rate_in_words(runs[0].lr) if runs else "–"


def _places(probe: Probe, outcome: Outcome) -> list[float]:
    """Where a probe measured anything of any arm."""
    return sorted({place for run in outcome.runs for place in run.values.get(probe.name, {})})


def _columns(experiment: Experiment, outcome: Outcome) -> list[dict[str, Any]]:
    """Columns of the table of numbers: each probe at its places, of many at the first, the middle and the last."""
    columns = []
    for probe in experiment.probes:
        places = _places(probe, outcome)
        if len(places) > 4:
            places = [places[0], places[len(places) // 2], places[-1]]
        for place in places:
            values = [_at(outcome, arm.name, probe.name, place) for arm in experiment.arms]
            title = probe.name if len(places) == 1 else f"{probe.name} at {place:g}"
            guess = outcome.guess(probe.name, place)
            said = "" if guess is None else _cell(np.array([guess]), probe.percent)[0]
            columns.append({"title": title, "cells": [_cell(x, probe.percent) for x in values], "guess": said})
    return columns


def _at(outcome: Outcome, arm: str, probe: str, place: float) -> Array:
    """A number of an arm's runs, nan where a probe had nothing to measure."""
    found = [run.values.get(probe, {}).get(place, math.nan) for run in outcome.of(arm)]
    return np.array(found, dtype=np.float64)


def _cell(values: Array, percent: bool) -> tuple[str, str]:
    """Mean and standard error in words."""
    if not (values.size and np.isfinite(values).all()):
        return ("–", "")
    scale, digits = (100, 2) if percent else (1, 3)
    numbers = (scale * x for x in mean_error(values)[:2])
    mean, error = (f"{x:.1g}" if 0 < abs(x) < 0.5 * 10**-digits else f"{x:.{digits}f}" for x in numbers)
    return f"{mean}{' %' if percent else ''}", f"± {error}"


def _section(
    experiment: Experiment, probe: Probe, outcome: Outcome, kinds: dict[str, Any], looks: dict[str, Look]
) -> dict[str, Any]:
    """A probe's figure: curves by side over its places, or the runs of every arm at its only one."""
    places = _places(probe, outcome)
    arms = [arm for arm in experiment.arms if outcome.places(arm.name, probe.name)]
    if len(places) < 2:
        figure = _runs_figure(experiment, probe, None, outcome, kinds, looks)
        panels = [("", to_svg(figure, f"runs-{probe.name}", f"{probe.name} of every run"))] if arms else []
        return {"title": probe.name, "text": f"{RUNS[0].upper()}{RUNS[1:]}.", "panels": panels}
    lines = {arm.name: _line(arm.name, probe, outcome, looks[arm.name]) for arm in arms}
    bands = [x.y + sign * x.error for x in lines.values() if x.error is not None for sign in (-1, 1)]
    every = np.concatenate(bands)
    every = every[np.isfinite(every)]
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    margin = max((high - low) * 0.06, 1e-3)
    panels = []
    for side in SIDES:
        of_side = [lines[arm.name] for arm in arms if kinds[arm.name][0] == side]
        if of_side:
            figure = figures.curves(
                of_side, xlabel=probe.places, ylim=(low - margin, high + margin), percent=probe.percent,
                mark=(1.0, "trained to here") if "training contexts" in probe.places and places[-1] > 1 else None,
                names_width=max(len(name) for name in lines),
            )  # fmt: skip
            panels.append((f"{side} side", to_svg(figure, f"{probe.name}-{side}", f"{probe.name} of the {side} side")))
    text = f"Over the {probe.places}: mean of the seeds, shaded ± one standard error."
    return {"title": probe.name, "text": text, "panels": panels}


def _runs_figure(
    experiment: Experiment, probe: Probe, at: float | None, outcome: Outcome, kinds: dict[str, Any],
    looks: dict[str, Look],
) -> Figure:  # fmt: skip
    """Every run of the arms that a probe measured, at one place of it."""
    rows = [
        run_figures.Runs(arm.name, arm.name, outcome.values(Value(arm.name, probe.name, at)), looks[arm.name],
                         kinds[arm.name][0] == "softmax")
        for arm in experiment.arms
        if outcome.places(arm.name, probe.name)
    ]  # fmt: skip
    places = _places(probe, outcome)
    place = at if at is not None or not places else places[-1]
    guess = None if place is None else outcome.guess(probe.name, place)
    return run_figures.runs(
        rows, xlabel=probe.name, percent=probe.percent, marks=_limits_of(experiment, probe), guess=guess
    )


def _line(arm: str, probe: Probe, outcome: Outcome, look: Look) -> Line:
    places = outcome.places(arm, probe.name)
    table = np.stack([_at(outcome, arm, probe.name, place) for place in places])
    error = table.std(1, ddof=1) / math.sqrt(table.shape[1]) if table.shape[1] > 1 else np.zeros(len(places))
    return Line(arm, arm, np.array(places), table.mean(1), look, error)


def _overlays(experiment: Experiment, outcome: Outcome) -> list[dict[str, str]]:
    """Pictures of several arms and probes, with what they show."""
    found = []
    for number, overlay in enumerate(experiment.overlays):
        shown = overlaid(experiment, number, outcome)
        text = f"Over the {shown.xlabel}; {OVERLAY}."
        svg = to_svg(run_figures.overlay(shown), f"overlay-{number}", overlay.title)
        found.append({"title": overlay.title, "svg": svg, "text": text})
    return found


def overlaid(experiment: Experiment, number: int, outcome: Outcome) -> run_figures.Overlaid:
    """What one of an experiment's overlays shows; what has no number yet is left out.

    A label has one colour in all of them. What a forget network decides is solid (or dashed and dotted, where colours
    come again), what no network decides dashed, and what looks ahead dotted.
    """
    overlay = experiment.overlays[number]
    probes = {probe.name: probe for probe in experiment.probes}
    names = list(dict.fromkeys(label for each in experiment.overlays for label, *_ in each.curves))
    rounds = {name: divmod(n, len(figures.PAIR_COLORS)) for n, name in enumerate(names)}
    lines = [
        replace(_line(arm, probes[name], outcome, _look(probes[name], *rounds[label])), label=label, key=label)
        for label, arm, name in overlay.curves
        if outcome.places(arm, name)
    ]
    points = [
        run_figures.Gains(
            label, label, outcome.values(Value(arm, x)), outcome.values(Value(arm, y)), Look(figures.INK, ())
        )
        for label, arm, x, y in overlay.points
        if outcome.places(arm, x) and outcome.places(arm, y)
    ]
    first = probes[overlay.curves[0][2]]
    return run_figures.Overlaid(lines, points, first.places, overlay.axis, first.percent)


def _look(probe: Probe, again: int, color: int) -> Look:
    rule, solid = getattr(probe, "rule", None), figures.DASHES["softmax"][min(again, 1)]
    dash = solid if rule is None or rule in OF_NETWORKS else (1, 1.4) if rule == "utility" else (4, 1.6)
    return Look(figures.PAIR_COLORS[color], dash)


def _limits_of(experiment: Experiment, probe: Probe) -> list[float]:
    """The limits that claims set to a probe."""
    flat = [part for each in experiment.expectations for part in getattr(each.claim, "claims", (each.claim,))]
    return sorted({x.limit for x in flat if isinstance(x, AtMost | AtLeast) and x.value.probe == probe.name})


def _gains(
    experiment: Experiment, outcome: Outcome, kinds: dict[str, Any], looks: dict[str, Look]
) -> list[dict[str, str]]:
    """What each change gains on one side against what it gains on the other, with the correlation."""
    found: list[dict[str, str]] = []
    for each in experiment.judged(outcome.size):
        if isinstance(each.claim, Correlated) and not outcome.missing(each.claim):
            svg = to_svg(_gains_figure(each.claim, outcome, kinds, looks), f"gains-{len(found)}", each.text)
            found.append({"text": each.text, "why": each.claim.judge(outcome.values).why, "svg": svg})
    return found


def _gains_figure(claim: Correlated, outcome: Outcome, kinds: dict[str, Any], looks: dict[str, Look]) -> Figure:
    x, y = claim.gains(outcome.values)
    points = [
        run_figures.Gains(pair[1], f"{pair[0]} | {pair[1]}", x[number], y[number], looks[pair[1]])
        for number, pair in enumerate(claim.pairs)
        if np.isfinite([x[number], y[number]]).all()
    ]
    sides = [kinds[base][0] for base in claim.bases]
    return run_figures.gains(
        points, xlabel=f"gain in {claim.probe} over {claim.bases[0]}, {sides[0]} side",
        ylabel=f"gain in {claim.probe} over {claim.bases[1]}, {sides[1]} side",
    )  # fmt: skip


def _grids(experiment: Experiment, outcome: Outcome) -> list[dict[str, Any]]:
    """The tables of arms, in colours that are the same in all tables of one probe."""
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
    """For each arm a table of the places of some probes and of these probes."""
    probes = [probe for probe in experiment.probes if probe.name in experiment.maps]
    tables = []
    for arm in experiment.arms if probes else ():
        places = sorted({place for probe in probes for place in outcome.places(arm.name, probe.name)})
        rows = [
            (
                f"{place:g}",
                [_field(_at(outcome, arm.name, probe.name, place), probe.percent, (0, 1)) for probe in probes],
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
    """Held-out loss of every learning rate that an arm was tried at, and whether it was taken."""
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
