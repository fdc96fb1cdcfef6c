"""The page and the terminal's table of a comparison's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from attnzoo.data.own import check_replaceable
from attnzoo.evaluation import Array, moving_mean
from attnzoo.experiments import figures
from attnzoo.experiments.figures import Dot, Line, Look, to_svg
from attnzoo.experiments.report.results import RunResult
from attnzoo.experiments.report.shell import render_template
from attnzoo.files import write_whole
from attnzoo.terminal import new_table

SIDES = ("softmax", "linear")
MAPS_PER_LAYER = 4
POINTS = 320  # most points of a curve, more than a screen resolves


@dataclass(frozen=True)
class Panels:
    """A titled figure with one panel (caption, svg) per side of each group."""

    title: str
    text: str
    panels: tuple[tuple[str, str], ...]


def write_report(results: Sequence[RunResult], path: Path, *, title: str = "comparison", command: str = "") -> Path:
    """Render ``results`` and write the page to ``path`` in one move.

    Args:
        results: the runs' results, on the same held-out windows.
        path: the page's path; its folder is made.
        title: the heading.
        command: the command line, shown on the page.

    Raises:
        FileExistsError: `path` is a file that attnzoo has not written.
        ValueError: no results, results that were not measured on the same held-out windows, or a folder as `path`.
    """
    page = render(results, title=title, command=command)
    check_replaceable(path, "output")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)
    return path


def render(results: Sequence[RunResult], *, title: str = "comparison", command: str = "") -> str:
    """The page as HTML text; see :func:`write_report`."""
    _check(results)
    results = sorted(results, key=lambda r: (r.facts.pair, SIDES.index(r.facts.side), r.facts.key))
    ordered = _ordered(results)
    groups = _groups(results)
    looks = {
        key: look
        for of_group in groups.values()
        for key, look in figures.looks([(r.facts.key, r.facts.pair, r.facts.side) for r in of_group]).items()
    }
    machines = [result.facts.machine for result in results]
    return render_template(
        "page.html.j2",
        title=title,
        command=command,
        rows=[_row(result, ordered, looks[result.facts.key]) for result in ordered],
        groups=len(groups),
        summary=[sentence for of_group in groups.values() for sentence in _summary(_ordered(of_group))],
        layers=[_in_group(group, words) for group, of_group in groups.items() if (words := _layers(of_group))],
        duals=_duals(groups, looks, "loss") + _duals(groups, looks, "speed") if len(results) > 1 else [],
        sections=[_training(results, looks), _token_loss(results, looks), _perplexity(results, looks)],
        gated=[_gates(result, looks[result.facts.key]) for result in results if result.gates],
        models=list(dict.fromkeys(result.facts.model for result in results)),
        machines=[machine for number, machine in enumerate(machines) if machine not in machines[:number]],
        first=results[0],
        budget=_budget(results),
        settings=[(result.facts.label, result.facts.settings) for result in results],
    )


def _groups(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """The results by their groups; the one with the lowest loss first."""
    names = dict.fromkeys(result.facts.group for result in _ordered(results))
    return {name: [result for result in results if result.facts.group == name] for name in names}


def _ordered(results: Sequence[RunResult]) -> list[RunResult]:
    return sorted(results, key=lambda result: result.final_loss[0])


def _in_group(group: str, words: str) -> str:
    """Words about a group, under its name if it has one."""
    return f"{group[0].upper()}{group[1:]}: {words}" if group else words


def terminal_table(results: Sequence[RunResult]) -> Table:
    """The final numbers, best first, for the terminal."""
    context, length = results[0].facts.context, results[0].length
    groups = ["group"] if len(_groups(results)) > 1 else []
    numbers = ("loss", "± s.e.", f"P({context})", f"P({length})", "kept", "tokens/s")
    table = new_table("variant", "side", *groups, *numbers, numbers=numbers)
    table.title = f"held-out loss over {context} {results[0].facts.unit}s in nats; P(l): perplexity over l of them"
    for result in _ordered(results):
        loss, error = result.final_loss
        kept = result.kept("tail")
        table.add_row(
            escape(result.facts.label),
            result.facts.side,
            *([escape(result.facts.group)] if groups else []),
            f"{loss:.4f}",
            _spread(error),
            number(result.perplexity[context - 1]),
            number(result.perplexity[-1]),
            "" if np.isnan(kept) else f"{kept:.0%}",
            f"{result.facts.tokens_per_second:,.0f}",
        )
    if any(np.isfinite(result.kept("tail")) for result in results):
        table.caption = "kept: share of the blocks that pruning (tail bound) computes"
    return table


def number(value: float) -> str:
    """A number in three or four digits, without an exponent below a million."""
    if not np.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 100 else f"{value:.3f}"


def _spread(error: float) -> str:
    """A standard error in print; a dash for nan."""
    return f"{error:.4f}" if np.isfinite(error) else "–"


def _check(results: Sequence[RunResult]) -> None:
    if not results:
        raise ValueError("report: expected at least one run, got none")
    keys = [result.facts.key for result in results]
    if len(set(keys)) < len(keys):
        raise ValueError(f"report: expected runs with distinct names, got {', '.join(keys)}")
    for what, values in (
        ("training context", {result.facts.context for result in results}),
        ("evaluation length", {result.length for result in results}),
        ("number of held-out windows", {result.losses.shape[0] for result in results}),
    ):
        if len(values) > 1:
            listed = ", ".join(str(value) for value in sorted(values))
            raise ValueError(f"report: expected runs with one {what}, got {listed}")
    if len(results) > 1:
        _check_windows(results)


def _check_windows(results: Sequence[RunResult]) -> None:
    """Raise where results were measured on different windows."""
    by_text: dict[str, list[str]] = {}
    for result in results:
        by_text.setdefault(result.facts.heldout, []).append(result.facts.label)
    if "" in by_text:
        raise ValueError(
            f"report: {', '.join(by_text[''])}: measured by a version that did not note on which held-out windows; "
            "run attnzoo compare again"
        )
    if len(by_text) > 1:
        listed = "; others for ".join(", ".join(labels) for labels in by_text.values())
        raise ValueError(f"report: expected runs measured on the same held-out text, got one for {listed}")


def _row(result: RunResult, ordered: Sequence[RunResult], look: Look) -> dict[str, Any]:
    facts = result.facts
    loss, error = result.final_loss
    behind, paired = result.behind(ordered[0])
    losses = [other.final_loss[0] for other in ordered]
    spread = max(losses) - min(losses)
    fastest = max(other.facts.tokens_per_second for other in ordered)
    return {
        "facts": facts,
        "color": figures.THEME[look.color],
        "loss": f"{loss:.4f}",
        "error": _spread(error),
        "behind": "best" if result is ordered[0] else f"+{behind:.3f}",
        "behind_error": "" if result is ordered[0] or not np.isfinite(paired) else f"{paired:.3f}",
        "behind_share": behind / spread if spread > 0 else 0.0,
        "short": number(result.perplexity[facts.context - 1]),
        "long": number(result.perplexity[-1]),
        "speed": f"{facts.tokens_per_second:,.0f}",
        "speed_share": facts.tokens_per_second / fastest,
        "parameters": f"{facts.parameters:,}",
        "minutes": f"{facts.seconds / 60:.1f}",
    }


def _summary(ordered: Sequence[RunResult]) -> list[str]:
    """A description of the measurements, in sentences that hold for any outcome."""
    best, worst = ordered[0], ordered[-1]
    context, length = best.facts.context, best.length
    sentences = []
    if len(ordered) > 1:
        sentences.append(
            f"Lowest held-out loss over {context} tokens: {best.facts.label}, {best.final_loss[0]:.3f} nats per "
            f"{best.facts.unit}. Highest: {worst.facts.label}, {worst.final_loss[0]:.3f}."
        )
        for side in SIDES:
            of_side = [result for result in ordered if result.facts.side == side]
            if len(of_side) > 1:
                names = ", ".join(result.facts.label for result in of_side)
                sentences.append(f"From lowest to highest on the {side} side: {names}.")
        longest = min(ordered, key=lambda result: float(result.perplexity[-1]))
        sentences.append(
            f"Lowest perplexity over {length} tokens, {length / context:g} × the training context: "
            f"{longest.facts.label}, {number(longest.perplexity[-1])}."
        )
    shares = [
        f"{result.facts.label} {result.kept('tail'):.0%} / {result.kept('paper'):.0%}"
        for result in ordered
        if np.isfinite(result.kept("tail"))
    ]
    if shares:
        sentences.append(f"Blocks kept by pruning, tail bound / the paper's bound: {', '.join(shares)}.")
    return [_in_group(best.facts.group, sentence) for sentence in sentences]


def _layers(results: Sequence[RunResult]) -> str:
    """A description of how the layers differ besides their gates; empty where they do not."""
    everywhere = [part for part in results[0].facts.parts if all(part in other.facts.parts for other in results)]
    having: dict[str, list[str]] = {}
    for result in results:
        for part in result.facts.parts:
            if part not in everywhere:
                having.setdefault(part, []).append(result.facts.label)
    return "; ".join(f"{part} in {', '.join(labels)}" for part, labels in having.items())


def _budget(results: Sequence[RunResult]) -> str:
    facts = [result.facts for result in results]
    tokens = sorted({fact.tokens for fact in facts})
    steps = sorted({fact.steps for fact in facts})
    text = " or ".join(f"{value:,}" for value in tokens) + f" tokens {'each ' if len(facts) > 1 else ''}in "
    text += " or ".join(f"{value:,}" for value in steps) + " steps"
    return f"{text}; {sum(fact.seconds for fact in facts) / 60:.1f} minutes of training in all"


def _duals(groups: dict[str, list[RunResult]], looks: dict[str, Look], what: str) -> list[tuple[str, str]]:
    """Figures (caption, svg) per group, with a row per pair ordered by loss, of the ``loss`` or the ``speed``."""
    xlabel = "held-out loss, nats" if what == "loss" else "thousand tokens trained per second"
    better = "loss: left is better" if what == "loss" else "speed: right is better"
    panels = []
    for number, (group, of_group) in enumerate(groups.items()):
        by_pair: dict[int, list[Dot]] = {}
        for result in _ordered(of_group):
            by_pair.setdefault(result.facts.pair, []).append(_dot(result, looks[result.facts.key], what))
        figure = figures.pairs(list(by_pair.values()), xlabel=xlabel)
        svg = to_svg(figure, f"duals-{what}-{number}", _in_group(group, f"{xlabel}, of each pair of duals"))
        panels.append((_in_group(group, better), svg))
    return panels


def _dot(result: RunResult, look: Look, what: str) -> Dot:
    facts = result.facts
    value, error = result.final_loss if what == "loss" else (facts.tokens_per_second / 1e3, 0.0)
    return Dot(facts.key, facts.label, value, error, look, filled=facts.side == "softmax")


def _training(results: Sequence[RunResult], looks: dict[str, Look]) -> Panels:
    lines = {}
    results = [result for result in results if result.curve.size]  # a run stopped before its first row has no curve
    if not results:
        return Panels("Training", "No step was logged before the checkpoints that were measured.", ())
    for result in results:
        tokens, loss = result.curve
        smooth = moving_mean(loss, max(1, loss.size // 20))
        lines[result.facts.key] = _line(result, looks, tokens / 1e6, smooth)
    every = np.concatenate([line.y for line in lines.values()])
    late = np.concatenate([line.y[line.y.size // 10 :] for line in lines.values()])
    text = "Loss on the training text, averaged over a twentieth of the run."
    panels = _side_panels(
        "training", results, lines, xlabel="million tokens seen", ylim=_limits(every, late), mark=None
    )
    return Panels("Training", text, panels)


def _token_loss(results: Sequence[RunResult], looks: dict[str, Look]) -> Panels:
    context, length = results[0].facts.context, results[0].length
    window = max(1, length // 20)
    lines, early = {}, []
    for result in results:
        smooth = moving_mean(result.token_loss, window)
        lines[result.facts.key] = _line(result, looks, np.arange(1.0, length + 1), smooth)
        early.append(smooth[window:context] if context > window else smooth)
    every = np.concatenate([line.y[window:] for line in lines.values()])
    text = (
        f"L(i): mean negative log-likelihood of the token at index i, in nats, smoothed over {window} indices. "
        "A curve that keeps falling is still gaining from more context."
    )
    panels = _side_panels(
        "token-loss", results, lines, xlabel="token index i", ylim=_limits(every, np.concatenate(early)),
        mark=(context, "trained to here") if length > context else None,
    )  # fmt: skip
    return Panels("Loss per token", text, panels)


def _perplexity(results: Sequence[RunResult], looks: dict[str, Look]) -> Panels:
    context, length = results[0].facts.context, results[0].length
    lines, early = {}, []
    start = context // 2  # P(l) of the first tokens would stretch the axis
    for result in results:
        lines[result.facts.key] = _line(result, looks, np.arange(1.0, length + 1), result.perplexity)
        early.append(result.perplexity[start:context])
    every = np.concatenate([result.perplexity[start:] for result in results])
    text = f"P(l): exp of the mean loss over the first l tokens, up to {length / context:g} × the training context."
    panels = _side_panels(
        "perplexity", results, lines, xlabel="length l in tokens", ylim=_limits(every, np.concatenate(early)),
        mark=(context, "trained to here") if length > context else None,
    )  # fmt: skip
    return Panels("Perplexity over lengths", text, panels)


def _line(result: RunResult, looks: dict[str, Look], x: Array, y: Array) -> Line:
    keep = np.unique(np.linspace(0, x.size - 1, min(POINTS, x.size)).round().astype(int))
    return Line(result.facts.key, result.facts.label, x[keep], y[keep], looks[result.facts.key])


def _limits(every: Array, core: Array) -> tuple[float, float]:
    """Axis limits around ``core``; values above 1.5 times its height over its top are cut off."""
    every, core = every[np.isfinite(every)], core[np.isfinite(core)]
    if not every.size or not core.size:
        return 0.0, 1.0
    low, high = float(every.min()), float(core.max())
    top = min(float(every.max()), high + 1.5 * (high - low))
    margin = max((top - low) * 0.05, 1e-3)
    return low - margin, top + margin


def _side_panels(
    name: str, results: Sequence[RunResult], lines: dict[str, Line], *, xlabel: str, ylim: tuple[float, float],
    mark: tuple[float, str] | None,
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    names_width = max(len(line.label) for line in lines.values())
    panels = []
    for number, (group, of_group) in enumerate(_groups(results).items()):
        for side in SIDES:
            of_side = [lines[result.facts.key] for result in of_group if result.facts.side == side]
            if of_side:
                figure = figures.curves(of_side, xlabel=xlabel, ylim=ylim, mark=mark, names_width=names_width)
                title = _in_group(group, f"{name} of the {side} side, {xlabel}")
                panels.append((_in_group(group, f"{side} side"), to_svg(figure, f"{name}-{side}-{number}", title)))
    return tuple(panels)


def _gates(result: RunResult, look: Look) -> dict[str, Any]:
    key, label = result.facts.key, result.facts.label
    layers = []
    for gate in result.gates:
        heads = range(min(MAPS_PER_LAYER, gate.decay.shape[0]))
        maps = []
        for head in heads:
            cuts = {bound: prune.first[head] for bound, prune in gate.prune.items()}
            block = next((prune.block for prune in gate.prune.values()), 1)
            figure = figures.decay_map(gate.decay[head], gate.length, cuts, block)
            kept = {bound: f"{prune.kept[head]:.0%}" for bound, prune in gate.prune.items()}
            svg = to_svg(figure, f"gate-{key}-{gate.layer}-{head}", f"Forget gate of {label}, head {head + 1}")
            maps.append({"head": head + 1, "svg": svg, "kept": kept})
        layers.append({"number": gate.layer + 1, "maps": maps, "heads": gate.decay.shape[0]})
    bars = ""
    pruned = [gate for gate in result.gates if gate.prune]
    if pruned:
        names = [f"{gate.layer + 1}.{head + 1}" for gate in pruned for head in range(gate.decay.shape[0])]
        kept_by = {bound: np.concatenate([gate.prune[bound].kept for gate in pruned]) for bound in pruned[0].prune}
        bars = to_svg(figures.kept_blocks(names, kept_by, look), f"kept-{key}", f"Blocks kept per head of {label}")
    means = {bound: f"{result.kept(bound):.1%}" for bound in (pruned[0].prune if pruned else ())}
    block = pruned[0].prune["tail"].block if pruned and "tail" in pruned[0].prune else 0
    return {
        "facts": result.facts,
        "color": figures.THEME[look.color],
        "layers": layers,
        "bars": bars,
        "means": means,
        "length": result.gates[0].length,
        "window": result.gates[0].window,
        "block": block,
    }
