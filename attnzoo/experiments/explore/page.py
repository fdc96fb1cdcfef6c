"""The page of a pair: everything measured, in words, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnzoo.algebra.parts import PARTS
from attnzoo.equations import equations_text
from attnzoo.evaluation import Array, moving_mean
from attnzoo.experiments import figures
from attnzoo.experiments.explore import measures, pictures
from attnzoo.experiments.explore.measures import PRODUCTS, Complex, K, T
from attnzoo.experiments.explore.probe import LENGTH, LONGER, StateProbe
from attnzoo.experiments.figures import MUTED, Line, Look, kind_of, to_svg
from attnzoo.experiments.report.results import describe_machine
from attnzoo.experiments.report.shell import render_template
from attnzoo.registry.variant import Variant
from attnzoo.testing.laws import LAWS, Trial
from attnzoo.verify import Where, checks

Panels = list[tuple[str, str]]
LENGTHS = ("transitions n", "length")  # labels of both axes
WAYS = {2: "two", 3: "three", 4: "four"}
SAME = 1e-10  # largest difference of two pairs that are called one
LEAST, NOTHING = 1e-4, 1e-300  # least number that a logarithmic axis shows, and what stands for 0 on it


@dataclass(frozen=True)
class Explored:
    """The pair, sizes and options that a page shows.

    Args:
        sides: the variants of the pair, its linear side first.
        examples: cases of each law.
        probe: what small models of both sides are trained for, or None.
        seed: of all inputs.
        command: the command line, shown on the page.
    """

    sides: Sequence[Variant]
    examples: int
    probe: StateProbe | None
    seed: int
    command: str

    @property
    def names(self) -> list[str]:
        return [side.name for side in self.sides]

    def looks(self) -> dict[str, Look]:
        """A look of each side, as everywhere: one hue, the linear side dashed."""
        kinds = {name: kind_of([name]) for name in self.names}
        return figures.looks([(name, number, side) for name, (side, number, _) in kinds.items()])


def work_of(asked: Explored) -> dict[str, Callable[[], Any]]:
    """The work of a page, as functions by a line that says what is being done; :func:`render` takes its results."""
    where = Where(seed=asked.seed, examples=asked.examples)
    linear, seed = asked.sides[0], asked.seed
    work: dict[str, Callable[[], Any]] = {
        f"laws {number}": check for number, check in enumerate(checks(asked.names, where))
    }
    work["decays"] = lambda: {regime: measures.left_over(linear, regime, seed) for regime in measures.REGIMES}
    for side in asked.sides:
        work[f"maps {side.name}"] = partial(_weights, side, seed)
    work["states"] = lambda: (measures.states(linear, seed), [measures.grows(side) for side in asked.sides])
    work["eigenvalues"] = partial(measures.eigenvalues, linear, seed)
    work["reductions"] = partial(measures.reductions, linear.pair, seed)
    for side in asked.sides:
        for form in side.forms:
            work[f"speed {side.name} {form}"] = partial(measures.timed, side, form)
    return work | _training(asked)


def _training(asked: Explored) -> dict[str, Callable[[], Any]]:
    if asked.probe is None:
        return {}
    able = [side for side in asked.sides if not LAWS["layer"].refuses(side)]
    return {f"probe {side.name}": partial(asked.probe.trained, side.name) for side in able}


def _weights(variant: Variant, seed: int) -> tuple[Array, Array]:
    return measures.weights(variant, seed, True), measures.weights(variant, seed, False)


def render(asked: Explored, found: dict[str, Any]) -> str:
    """The page as HTML text.

    Args:
        asked: what was asked.
        found: the results of :func:`work_of`, by its keys.
    """
    looks, trials = asked.looks(), [found[key] for key in found if key.startswith("laws ")]
    maps = {name: found[f"maps {name}"] for name in asked.names}
    titles = [side.title for side in asked.sides]
    parts = dict.fromkeys(part for side in asked.sides for part in side.requires)
    return render_template(
        "explore.html.j2",
        title=" and ".join(titles),
        lead=_lead(asked),
        findings=[_verdict(trials), *_findings(found)],
        sides=[_side(side, looks[side.name]) for side in asked.sides],
        parts=[(PARTS[p].symbol, p, PARTS[p].shown, PARTS[p].values) for p in parts],
        closed=_closed(asked.sides[0]),
        laws=_laws(asked, trials),
        unrun=_unrun([(f"{t.law} of {t.variant}", t.refused) for t in trials if t.refused and t.law in LAWS]),
        broken=[trial.said for trial in trials if not trial.ok],
        decays={"text": DECAYS, "panels": _decay_panels(asked, looks, found["decays"], maps)},
        maps={"text": MAPS, "panels": _map_panels(asked, maps)},
        state=_state(asked, *found["states"]),
        spectrum={"text": SPECTRUM, "panels": _spectrum(found["eigenvalues"], *found["decays"]["open"])},
        reductions=[_reduction(row) for row in found["reductions"]],
        speed=_speed(looks, asked, [found[key] for key in found if key.startswith("speed ")]),
        probe=_probe(asked, looks, found),
        command=asked.command,
        inputs=f"seed {asked.seed}; pictures: one head of {K} channels, {T} tokens, normal q, k and v",
        machine=describe_machine(accelerator=False),
    )


DECAYS = (
    "First what n transitions leave of a key of length 1, over all directions (root mean square), in three regimes of "
    "the gate: open (near 1), mixed (also 0 and 1 exactly), closing (strong). It is the same gate for both sides. "
    "Then what each side makes of it, the mean size of a weight by distance, for open gates and random q and k."
)
MAPS = (
    "The weight of each key (across) in each output (down) by the float64 oracle, as a share of the largest in its "
    "row, for the same gate, q and k on both sides. First all queries and keys are one vector, so that the gate alone "
    "is seen; then they are random. A linear side has weights of both signs, which do not sum to 1."
)
SPECTRUM = (
    "The eigenvalues of single transitions exp(g) R and of products of {} and {} in a row, with open gates. Inside the "
    "circle something is forgotten, on it something is kept for ever; off the positive real axis a state can "
    "alternate or turn."
).format(*PRODUCTS[1:])


def _lead(asked: Explored) -> str:
    linear, pair = asked.sides[0], asked.sides[0].pair
    sides = ", ".join(f"{side.name} is {_kind(side)}" for side in asked.sides)
    parts = ", ".join(linear.requires) or "no gate"
    note = f" {pair.note}" if pair.note else ""
    ways = WAYS.get(len(asked.sides), "several")
    return f"One gate ({parts}), read in {ways} ways: {sides}.{note}"


def _kind(side: Variant) -> str:
    return f"the {side.side} side" if side.readout is None else "another readout"


def _side(side: Variant, look: Look) -> dict[str, Any]:
    return {
        "name": side.name, "kind": _kind(side), "drawn": kind_of([side.name])[0], "title": side.title,
        "paper": side.paper, "color": figures.THEME[look.color], "equations": equations_text(side),
    }  # fmt: skip


def _closed(variant: Variant) -> str:
    transition = variant.transition
    if transition is None:
        return "Its forms name no transition, so the oracle multiplies the factors of the gate's parts."
    if transition.closed:
        return "Its transition has a closed form for a block of tokens."
    return (
        "Its transition has no closed form for a block of tokens: the forms write out a K × K "
        "matrix for each token and join blocks by products, which is exact and slower."
    )


def _verdict(trials: Sequence[Trial]) -> str:
    broken = [f"{trial.law} of {trial.variant}" for trial in trials if not trial.ok]
    held = sum(trial.ok and not trial.refused for trial in trials)
    if broken:
        return f"Broken: {', '.join(broken)}; {held} other checks hold. The smallest failing case of each stands below."
    worst = max((error for trial in trials if trial.law in EXACT_LAWS for error in trial.worst.values()), default=0.0)
    return (
        f"All {held} checks of laws that apply hold; the forms differ from the float64 oracle by at most {worst:.1e}."
    )


EXACT_LAWS = ("oracle", "matrices")


def _findings(found: dict[str, Any]) -> list[str]:
    average, most = found["decays"]["open"]
    half = next((n for n, left in enumerate(average) if left < 0.5), None)
    words = f"are left after {T - 1} tokens" if half is None else f"are down to a half after {half} tokens"
    keys = f"With open gates keys {words}" + (f" ({average[-1]:.2f} of their length)." if half is None else ".")
    largest = float(most.max())
    longer = (
        f"Products of transitions made a vector up to {largest:.2f} times as long: no certificate of pruning holds."
        if largest > 1 + 1e-9
        else "No product of transitions made a vector longer."
    )
    return [keys, longer]


def _laws(asked: Explored, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    found = {(trial.law, trial.variant): trial for trial in trials}
    tried = [name for name in LAWS if (name, asked.names[0]) in found]
    return [
        {
            "name": name, "says": LAWS[name].says, "budget": f"{LAWS[name].budget:.0e}",
            "cells": [_cell(found[name, side]) for side in asked.names],
        }
        for name in tried
    ]  # fmt: skip


def _cell(trial: Trial) -> dict[str, Any]:
    if trial.refused:
        return {"broken": False, "worst": "–", "cases": ""}
    worst = f"{max(trial.worst.values(), default=0.0):.1e}"
    return {"broken": not trial.ok, "worst": worst, "cases": f"({trial.examples})"}


def _unrun(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """Sentences, those of one reason in one."""
    by_reason: dict[str, list[str]] = {}
    for what, reason in reasons:
        by_reason.setdefault(reason, []).append(what)
    return [f"Not run: {', '.join(names)}: {reason}." for reason, names in by_reason.items()]


def _decay_panels(
    asked: Explored, looks: dict[str, Look], decays: dict[str, tuple[Array, Array]], maps: dict[str, Any]
) -> Panels:
    averages = {regime: average for regime, (average, _) in decays.items()}
    left = _logarithmic(averages, _colored(averages, pictures.FEW, pictures.SOME, pictures.MANY), LENGTHS, top=1.0)
    found = {name: measures.by_distance(random) for name, (_, random) in maps.items()}
    right = _logarithmic(found, looks, ("distance t − j, tokens", "mean size of a weight"))
    return [
        ("what is left of a key of length 1", to_svg(left, "decays", "What is left of a key by number of tokens")),
        ("weights by distance", to_svg(right, "distance", "Mean size of a weight by distance, both sides")),
    ]


def _colored(names: Iterable[str], *colors: str) -> dict[str, Look]:
    return {name: Look(color, ()) for name, color in zip(names, colors, strict=True)}


def _logarithmic(values: dict[str, Array], looks: dict[str, Look], labels: tuple[str, str], top: float = 0.0) -> Figure:
    """A figure of values ``[T]`` by name on a logarithmic axis, up to 1.5 times the largest or ``top``."""
    lines = [Line(name, name, np.arange(float(T)), np.maximum(y, NOTHING), looks[name]) for name, y in values.items()]
    top = max(top, *(float(y.max()) for y in values.values()))
    return figures.curves(lines, xlabel=labels[0], ylim=(LEAST, 1.5 * top), log_y=True, ylabel=labels[1])


def _map_panels(asked: Explored, maps: dict[str, tuple[Array, Array]]) -> Panels:
    panels = []
    for number, words in enumerate(("equal q and k", "random q and k")):
        for name in asked.names:
            weights = maps[name][number]
            shares = weights / np.maximum(np.abs(weights).max(1, keepdims=True), NOTHING)
            figure = pictures.matrix(shares, xlabel="key j, tokens", ylabel="query t, tokens", scale="share")
            panels.append((f"{name}: {words}", to_svg(figure, f"map-{name}-{number}", f"Weights of {name}, {words}")))
    return panels


def _state(asked: Explored, states: dict[int, Array], growing: Sequence[bool | None]) -> dict[str, Any]:
    said = {
        True: f"the memory of {{}} grows: {T} keys and values after {T} tokens",
        False: "{} keeps one K × V matrix per head, or a few, however many tokens",
        None: "{} reads later tokens and takes no steps",
    }
    sizes = "; ".join(said[grows].format(name) for name, grows in zip(asked.names, growing, strict=True))
    text = (
        f"Token j writes the unit vector of channel j mod {K} into column j, so a column is what is left of that key: "
        "it fades, turns, or is erased by the tokens after it. The recurrence keeps only the sum of these keys times "
        f"their values; a softmax keeps every column. In numbers: {sizes}."
    )
    panels = []
    for t, matrix in states.items():
        figure = pictures.matrix(matrix, xlabel="token j that wrote", ylabel="channel", scale="entry")
        panels.append((f"after {t} tokens", to_svg(figure, f"state-{t}", f"The state after {t} tokens")))
    return {"text": text, "panels": panels}


def _spectrum(found: dict[int, Complex], average: Array, most: Array) -> Panels:
    largest = ", ".join(f"{np.abs(values).max():.2f} of {n}" for n, values in found.items())
    plane = to_svg(pictures.plane(found), "plane", "Eigenvalues of products of transitions in the complex plane")
    bounds = {"at most": most, "on average": average}
    lengths = _logarithmic(bounds, _colored(bounds, pictures.MANY, pictures.FEW), LENGTHS, top=1.0)
    return [
        (f"eigenvalues; largest absolute value: {largest}", plane),
        ("what n transitions make of a vector of length 1", to_svg(lengths, "lengths", "Length after n transitions")),
    ]


def _reduction(row: measures.Reduction) -> dict[str, str]:
    same = row.error <= SAME
    return {
        "whole": " | ".join(row.whole), "part": " | ".join(row.part), "where": row.where or "the same gate",
        "verdict": "is" if same else "is not", "error": f"{row.error:.1e}",
    }  # fmt: skip


def _speed(looks: dict[str, Look], asked: Explored, rows: Sequence[measures.Timed]) -> dict[str, Any]:
    B, H, width = measures.TIMED
    ran = [row for row in rows if row.seconds]
    speeds = {(row.variant, row.form): max(row.seconds) / row.seconds[max(row.seconds)] for row in ran}
    drawn = {side.name: kind_of([side.name])[0] for side in asked.sides}
    shown = [
        {
            "variant": row.variant, "form": row.form, "drawn": drawn[row.variant],
            "color": figures.THEME[looks[row.variant].color],
            "cells": [_number(1e3 * row.seconds[n]) if n in row.seconds else "–" for n in measures.LENGTHS],
            "share": f"{52 * speeds[row.variant, row.form] / max(speeds.values()):.1f}",
            "speed": f"{speeds[row.variant, row.form]:,.0f}",
        }
        for row in ran
    ]  # fmt: skip
    text = (
        f"Forward, float32, {B} row, {H} heads of {width} channels, on this machine's processor; the fastest of a few "
        "calls. Tokens per second at the longest row that was timed. It compares the forms with each other; what a GPU "
        "would run, attnzoo doctor says."
    )
    unrun = _unrun([(f"{row.form} of {row.variant}", row.refused) for row in rows if not row.seconds])
    return {"text": text, "rows": shown, "lengths": [f"{n:,}" for n in measures.LENGTHS], "unrun": unrun}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _probe(asked: Explored, looks: dict[str, Look], found: dict[str, Any]) -> dict[str, Any]:
    probe = asked.probe
    if probe is None:
        return {"text": "No model was trained: the probe was left out (--probe none).", "panels": []}
    missing = [(f"a model of {side.name}", LAWS["layer"].refuses(side)) for side in asked.sides]
    unable = "".join(f" {sentence}" for sentence in _unrun([each for each in missing if each[1]]))
    trained = {key.removeprefix("probe "): wrong for key, wrong in found.items() if key.startswith("probe ")}
    text = (
        f"One small layer of each side as it comes, trained for {probe.steps} steps on the task {probe.name} with rows "
        f"of {LENGTH} tokens, then asked on held-out rows of {LONGER * LENGTH}. One seed and seconds of training: low "
        f"says that it can be learnt, high says little.{unable}"
    )
    if not trained:
        return {"text": text, "panels": []}
    x = np.arange(1.0, LONGER * LENGTH + 1)
    lines = [Line(name, name, x, wrong, looks[name]) for name, (wrong, _) in trained.items()]
    lines.append(Line("guess", "guessing", x, probe.guess(), Look(MUTED, (2.0, 2.0))))
    asked_at = ~np.isnan(lines[-1].y)
    lines = [Line(line.key, line.label, x[asked_at], line.y[asked_at], line.look) for line in lines]
    answers = figures.curves(
        lines, xlabel="place in the row, tokens", ylim=(-0.02, 1.02), percent=True, mark=(LENGTH, "trained to here"),
        ylabel="wrong answers",
    )  # fmt: skip
    steps = np.arange(1.0, probe.steps + 1)
    smooth = {name: moving_mean(loss, max(1, probe.steps // 20)) for name, (_, loss) in trained.items()}
    lines = [Line(name, name, steps, loss, looks[name]) for name, loss in smooth.items()]
    top = max(float(loss.max()) for loss in smooth.values())
    loss = figures.curves(lines, xlabel="steps of training", ylim=(0, 1.05 * top), ylabel="loss, nats")
    return {
        "text": text,
        "panels": [
            (f"{probe.name}: wrong answers", to_svg(answers, "probe", "Wrong answers by place in the row")),
            (f"{probe.name}: loss in training", to_svg(loss, "probe-loss", "Loss in training")),
        ],
    }
