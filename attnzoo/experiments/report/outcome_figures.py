"""The figures of an experiment's outcome, for its page and for the documentation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnzoo.evaluation.forgetting import OF_NETWORKS
from attnzoo.experiments import figures, run_figures
from attnzoo.experiments.claims import AtLeast, AtMost, Correlated, Value
from attnzoo.experiments.experiment import Arm, Experiment
from attnzoo.experiments.figures import Line, Look, to_svg
from attnzoo.experiments.outcome import Outcome
from attnzoo.experiments.probes import Probe
from attnzoo.experiments.statistics import Array, correlation

SIDES = ("softmax", "linear")
RUNS = (
    "small dots are runs, large ones their means with standard errors, hollow on the linear side; dotted rules are "
    "limits that an expectation sets, the dashed one is what guessing gives"
)
GAINS = "small dots are runs, large ones their means with standard errors; on the dotted rule both sides gain alike"
OVERLAY = "means of the seeds with their standard errors"


def picture(experiment: Experiment, outcome: Outcome) -> tuple[Figure, str]:
    """The main figure of an outcome, with a caption that says what its numbers span.

    It is the first overlay, or the gains of both sides if the experiment has them, else every run at the last place of
    the first expectation.
    """
    if experiment.overlays:
        shown, words = overlaid(experiment, 0, outcome), experiment.overlays[0].title
        least = max(float(line.x.min()) for line in shown.lines)
        means = {line.label: float(line.y[line.x == least][0]) for line in shown.lines if least in line.x}
        words = f"{words} ({shown.ylabel}), at {100 * least:.3g}% ({shown.xlabel})"
        return run_figures.overlay(shown), f"{words}: {_span(means, shown.percent)}"
    kinds, looks = kinds_and_looks(experiment)
    judged = experiment.judged(outcome.size)
    for each in judged:
        if isinstance(each.claim, Correlated) and not outcome.missing(each.claim):
            return _gains_figure(each.claim, outcome, kinds, looks), _gains_words(each.claim, outcome, kinds)
    first = judged[0].claim
    about = first.values[0 if isinstance(first, Correlated) else -1]  # of a correlation's: the base's number
    probe = next(probe for probe in experiment.probes if probe.name == about.probe)
    places = places_of(probe, outcome)
    at = about.at if about.at is not None or not places else places[-1]
    words = f"{probe.name} ({probe.places}: {at:g})" if len(places) > 1 else probe.name
    numbers = {arm.name: outcome.values(Value(arm.name, probe.name, at)) for arm in experiment.arms}
    means = {
        name: float(found[np.isfinite(found)].mean()) for name, found in numbers.items() if np.isfinite(found).any()
    }
    return _runs_figure(experiment, probe, at, outcome, kinds, looks), f"{words}: {_span(means, probe.percent)}"


def _gains_words(claim: Correlated, outcome: Outcome, kinds: dict[str, tuple[str, int, str]]) -> str:
    """Which part gains most on either side, and how the gains of both correlate."""
    gains = one, other = [each.mean(1) for each in claim.gains(outcome.values)]
    most = [
        f"by {claim.pairs[int(each.argmax())][side]} on the {kinds[claim.bases[side]][0]} side ({each.max():.2f})"
        for side, each in enumerate(gains)
    ]
    r, _ = correlation(one, other, claim.parts)
    return f"gain in {claim.probe} of {len(claim.pairs)} pairs, most {' and '.join(most)}; r = {r:.2f}"


def _span(means: dict[str, float], percent: bool) -> str:
    """From which to which number the means go, and whose these are."""
    ends = [pick(means, key=lambda name: means[name]) for pick in (min, max)]
    shown = [f"{100 * means[name]:.0f}%" if percent else f"{round(means[name], 2) + 0:.2f}" for name in ends]
    return " to ".join(f"{number} ({name})" for number, name in zip(shown, ends, strict=True))


def kinds_and_looks(experiment: Experiment) -> tuple[dict[str, tuple[str, int, str]], dict[str, Look]]:
    """The side, pair and dual of each arm, and its look in figures."""
    kinds = {arm.name: figures.kind_of(_variants(arm)) for arm in experiment.arms}
    return kinds, figures.looks([(name, pair, side) for name, (side, pair, _) in kinds.items()])


def _variants(arm: Arm) -> list[str]:
    entries = arm.variant if isinstance(arm.variant, list | tuple) else [arm.variant]
    return list(dict.fromkeys(entry if isinstance(entry, str) else entry["name"] for entry in entries))


def places_of(probe: Probe, outcome: Outcome) -> list[float]:
    """The places at which a probe measured any arm."""
    return sorted({place for run in outcome.runs for place in run.values.get(probe.name, {})})


def numbers_at(outcome: Outcome, arm: str, probe: str, place: float) -> Array:
    """The number of each run of an arm at a place, nan where the probe had nothing to measure."""
    found = [run.values.get(probe, {}).get(place, math.nan) for run in outcome.of(arm)]
    return np.array(found, dtype=np.float64)


def section(
    experiment: Experiment, probe: Probe, outcome: Outcome, kinds: dict[str, Any], looks: dict[str, Look]
) -> dict[str, Any]:
    """The figure of a probe: curves by side over its places, or every run at its only place."""
    places = places_of(probe, outcome)
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
    """A figure of every run that a probe measured, at one place."""
    rows = [
        run_figures.Runs(arm.name, arm.name, outcome.values(Value(arm.name, probe.name, at)), looks[arm.name],
                         kinds[arm.name][0] == "softmax")
        for arm in experiment.arms
        if outcome.places(arm.name, probe.name)
    ]  # fmt: skip
    places = places_of(probe, outcome)
    place = at if at is not None or not places else places[-1]
    guess = None if place is None else outcome.guess(probe.name, place)
    return run_figures.runs(
        rows, xlabel=probe.name, percent=probe.percent, marks=_limits_of(experiment, probe), guess=guess
    )


def _line(arm: str, probe: Probe, outcome: Outcome, look: Look) -> Line:
    places = outcome.places(arm, probe.name)
    table = np.stack([numbers_at(outcome, arm, probe.name, place) for place in places])
    error = table.std(1, ddof=1) / math.sqrt(table.shape[1]) if table.shape[1] > 1 else np.zeros(len(places))
    return Line(arm, arm, np.array(places), table.mean(1), look, error)


def overlays(experiment: Experiment, outcome: Outcome) -> list[dict[str, str]]:
    """The overlays of an experiment, with captions."""
    found = []
    for number, overlay in enumerate(experiment.overlays):
        shown = overlaid(experiment, number, outcome)
        text = f"Over the {shown.xlabel}; {OVERLAY}."
        svg = to_svg(run_figures.overlay(shown), f"overlay-{number}", overlay.title)
        found.append({"title": overlay.title, "svg": svg, "text": text})
    return found


def overlaid(experiment: Experiment, number: int, outcome: Outcome) -> run_figures.Overlaid:
    """The data of one overlay, without curves and points that have no numbers yet.

    A label has one colour in all overlays. Rules by a forget network are solid (or dash-dotted, where colours repeat),
    other rules dashed, and rules that look ahead dotted.
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
    """The limits of a probe in the expectations' claims."""
    flat = [part for each in experiment.expectations for part in getattr(each.claim, "claims", (each.claim,))]
    return sorted({x.limit for x in flat if isinstance(x, AtMost | AtLeast) and x.value.probe == probe.name})


def gains(
    experiment: Experiment, outcome: Outcome, kinds: dict[str, Any], looks: dict[str, Look]
) -> list[dict[str, str]]:
    """Figures of each change's gain on one side against that on the other, with the correlation."""
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
