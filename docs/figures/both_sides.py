"""What a gate or a delta rule gains on either side, by size; and the losses behind it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import quoted
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from quoted import outcome

from attnzoo.benchmarks.measure import markdown_table
from attnzoo.experiments import figures
from attnzoo.experiments.catalogue import pairs
from attnzoo.experiments.catalogue.factorial import GATES, LINEAR, SOFTMAX
from attnzoo.experiments.claims import Correlated, Value
from attnzoo.experiments.experiment import find
from attnzoo.experiments.figures import INK, MUTED, PAIR_COLORS, Line, quiet
from attnzoo.experiments.outcome import Outcome
from attnzoo.experiments.report.outcome_figures import kinds_and_looks
from attnzoo.experiments.sizes import curves_of, gains_by_size
from attnzoo.experiments.statistics import correlation

GATE_COLORS = {
    "none": PAIR_COLORS[5],
    "constant": PAIR_COLORS[1],
    "scalar": PAIR_COLORS[2],
    "per channel": PAIR_COLORS[3],
}
WIDTH, SIDE, LEFT, BETWEEN, BELOW, ABOVE = 680, 196, 46, 16, 86, 24  # points


def measured() -> list[tuple[int, int, Outcome]]:
    """Tokens of a run, hidden size and outcome of every size that is recorded, sorted by both numbers."""
    sizes = []
    for each in find("factorial").measured:
        found = outcome("factorial", each.size)
        settings = yaml.safe_load(found.settings)
        tokens = settings["steps"] * settings["batch_size"] * settings["data"]["context_length"]
        sizes.append((tokens, settings["model"]["hidden_size"], found))
    return sorted(sizes, key=lambda size: size[:2])


def claim() -> Correlated:
    """That the gains of the two sides are correlated."""
    [found] = [each.claim for each in find("factorial").expectations if isinstance(each.claim, Correlated)]
    return found


def both_sides() -> Figure:
    """A panel for each size of the shortest training; one legend, since a pair looks the same in all of them."""
    sizes, asked, height = measured(), claim(), BELOW + SIDE + ABOVE
    outcomes = [(hidden_size, found) for tokens, hidden_size, found in sizes if tokens == sizes[0][0]]
    gates = {(a.name, b.name): (gate, rule) for gate in GATES
             for rule, (a, b) in enumerate(zip(LINEAR[gate], SOFTMAX[gate], strict=True))}  # fmt: skip
    figure, first, handles = Figure(figsize=(WIDTH / 72, height / 72)), None, {}
    for number, (hidden_size, found) in enumerate(outcomes):
        left = LEFT + number * (SIDE + BETWEEN)
        box = (left / WIDTH, BELOW / height, SIDE / WIDTH, SIDE / height)
        axes = figure.add_axes(box, sharex=first, sharey=first)
        for pair, x, y in zip(asked.pairs, *asked.gains(found.values), strict=True):
            gate, rule = gates[pair]
            label = " | ".join(pair)
            handles[label] = _dot(axes, x, y, GATE_COLORS[gate], "D" if rule else "o")
        r, p = correlation(*(gains.mean(1) for gains in asked.gains(found.values)), asked.parts)
        axes.set_title(f"{hidden_size} channels: r = {r:.2f}, p = {p:.2f}", loc="left", fontsize=10, color=INK)
        axes.tick_params(labelleft=number == 0)
        first = first or axes
    assert first is not None
    for axes in figure.axes:
        _frame(axes)
    _explain(figure, first, handles)
    return figure


def on_tokens() -> list[str]:
    """The recorded sizes of the pairs whose losses are of tokens and not of bytes."""
    return [each.size for each in find("pairs").measured if each.size.startswith("gpu")]


def pairs_by_size() -> Figure:
    """A panel for each such size at which all pairs were trained, with axes of its own and the papers' gates; circles
    are pairs of one part."""
    [asked, _] = [each.claim for each in find("pairs").expectations if isinstance(each.claim, Correlated)]
    outcomes = sorted((outcome("pairs", size) for size in on_tokens()), key=_weights)
    outcomes = [found for found in outcomes if all(map(found.of, (arm for pair in asked.pairs for arm in pair)))]
    between = 2 * BETWEEN  # numbers of the next panel's axis
    side = (WIDTH - LEFT - between * len(outcomes)) / len(outcomes)
    height, handles = BELOW + side + ABOVE, dict[str, Line2D]()
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    for number, found in enumerate(outcomes):
        box = ((LEFT + number * (side + between)) / WIDTH, BELOW / height, side / WIDTH, side / height)
        axes = figure.add_axes(box)
        for n, pair in enumerate(asked.pairs):
            gains = [_gain(found, base, arm) for base, arm in zip(asked.bases, pair, strict=True)]
            handles[" | ".join(pair)] = _dot(axes, *gains, PAIR_COLORS[n + 1], "D" if len(asked.parts[n]) > 1 else "o")
        r, p = quoted.gains(found.size, "pairs")
        axes.set_title(
            f"{_weights(found) / 1e6:.1f}M weights: r = {r:.2f}, p = {p:.2f}", loc="left", fontsize=10, color=INK
        )
        _both_ways(axes)
        axes.margins(0.12)
        axes.locator_params(nbins=4)
    _explain(figure, figure.axes[0], handles)
    return figure


def _gain(found: Outcome, base: str, arm: str) -> np.ndarray:
    """What an arm gains over its base by seed; where they have not the same seeds, the difference of their means."""
    higher, lower = (found.values(Value(name, "loss")) for name in (base, arm))
    return higher - lower if higher.size == lower.size else np.array([higher.mean() - lower.mean()])


def _weights(found: Outcome) -> int:
    """Weights of a model beside its embeddings, without its gates."""
    model = yaml.safe_load(found.settings)["model"]
    return found.runs[0].parameters - 2 * model["vocab_size"] * model["hidden_size"]


def _explain(figure: Figure, first: Axes, handles: dict[str, Line2D]) -> None:
    """Names of the axes, and a legend below them."""
    first.set_ylabel("gain of the softmax side, nats", loc="bottom", color=MUTED, fontsize=10)
    first.set_xlabel("gain of the linear side, nats", loc="left")
    figure.legend(
        list(handles.values()), list(handles), loc="lower left", bbox_to_anchor=(LEFT / WIDTH - 0.012, 0), ncols=3,
        frameon=False, fontsize=9.5, labelcolor="markeredgecolor", handletextpad=0.2, columnspacing=1.4, borderpad=0,
    )  # fmt: skip


def curves(name: str, side: str) -> Figure:
    """What each part gains by the size of the model: of the factorial after the shortest training, of the pairs after
    tokens in proportion to the weights."""
    experiment, shortest = find(name), measured()[0][0]
    if name == "factorial":
        outcomes = [found for tokens, _, found in measured() if tokens == shortest]
    else:
        outcomes = [outcome(name, size) for size in on_tokens()]
    return curves_of(experiment, gains_by_size(experiment, outcomes), side)


def while_training(side: str) -> Figure:
    """What parts have gained in training loss over the first seeds of `pairs` at gpu-10m."""
    kinds, looks = kinds_and_looks(find("pairs"))
    lines = [
        Line(arm, arm, *found, looks[arm]) for arm, found in quoted.while_training().items() if kinds[arm][0] == side
    ]
    base = pairs.BASES[side == "softmax"]
    return figures.curves(
        lines, xlabel="million tokens read", ylim=(0, 1.85), names_width=len("complex_linear"),
        ylabel=f"gain in training loss over {base}",
    )  # fmt: skip


def _dot(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, marker: str) -> Line2D:
    """Means with standard errors both ways, and what it looks like in a legend."""
    ex, ey = (v.std(ddof=1) / np.sqrt(v.size) if v.size > 1 else None for v in (x, y))
    style = {"color": color, "marker": marker, "markersize": 6, "linestyle": "none"}
    axes.errorbar(x.mean(), y.mean(), xerr=ex, yerr=ey, elinewidth=1.0, **style)
    return Line2D([], [], **style)


def _frame(axes: Axes) -> None:
    limits, ticks = (-0.02, 0.56), (0.0, 0.2, 0.4)
    _both_ways(axes)
    axes.plot(limits, limits, color=MUTED, linewidth=0.8, dashes=(2, 2), zorder=0)
    axes.set(xlim=limits, ylim=limits, xticks=ticks, yticks=ticks)


def _both_ways(axes: Axes) -> None:
    """Quiet axes with lines along both."""
    quiet(axes)
    axes.grid(True, axis="x", color=axes.yaxis.get_gridlines()[0].get_color(), linewidth=0.8)


def table() -> str:
    """Held-out loss of every model and size, with standard errors, in Markdown."""
    sizes = measured()
    shortest, outcomes = sizes[0][0], [found for *_, found in sizes]
    words = [f"{size}" if tokens == shortest else f"{size}, {tokens / 1e6:.1f} MB" for tokens, size, _ in sizes]
    titles = [f"{word}: {side}" for word in words for side in ("linear", "softmax")]
    rows = []
    for rule, word in enumerate(("no", "yes")):
        for gate in GATES:
            arms = (LINEAR[gate][rule].name, SOFTMAX[gate][rule].name)
            rows.append([gate, word, *(_cell(found, arm) for found in outcomes for arm in arms)])
    return "\n".join(markdown_table(["gate", "delta rule", *titles], rows))


def gates_table() -> str:
    """Held-out loss of every seed by where the gates begin, after the longest training, in Markdown."""
    values, [grid] = outcome("open_gates", "gpu").values, find("open_gates").grids
    rows = []
    for row, arms in zip(grid.rows, grid.arms, strict=True):
        seeds = [sorted(values(Value(arm, grid.probe))) if arm else [] for arm in arms]
        rows.append([row, *(", ".join(f"{x:.2f}" for x in of_arm) for of_arm in seeds)])
    return "\n".join(markdown_table(["", *grid.columns], rows))


def pairs_table(size: str = "gpu", name: str = "pairs") -> str:
    """Losses and gains of every pair of which a side has runs at a size, with the gates of the papers and with open
    ones, in Markdown."""
    found = outcome(name, size)
    plain = [(linear, softmax) for linear, softmax, _ in pairs.PAIRS if found.of(linear) or found.of(softmax)]
    begun = [tuple(map(pairs.begun_open, pair)) for pair in plain]
    begun = [pair for pair in begun if all(map(found.of, pair))]
    again, far = ("loss of a text read again", 1.0), ("L(i)", 8.0)
    columns: dict[str, Callable[[str, str], str]] = {
        "loss": lambda arm, base: _cell(found, arm),
        "gain": lambda arm, base: "" if arm == base else f"{_gain(found, base, arm).mean():.2f}",
        "a text read again": lambda arm, base: f"{found.values(Value(arm, *again)).mean():.2f}",
        "loss at 8 contexts": lambda arm, base: f"{found.values(Value(arm, *far)).mean():.2f}",
    }
    rows = []
    for pair in [pairs.BASES, *plain, *(pair for pair in begun if pair not in plain)]:
        sides = list(zip(pair, pairs.BASES, strict=True))
        cells = [[cell(*side) if found.of(side[0]) else "–" for side in sides] for cell in columns.values()]
        rows.append([" / ".join(pair), *(" / ".join(both).strip(" /") for both in cells)])
    return "\n".join(markdown_table(["linear, softmax", *columns], rows))


def _cell(outcome: Outcome, arm: str) -> str:
    values = outcome.values(Value(arm, "loss"))
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1) / np.sqrt(values.size):.3f}" if values.size > 1 else "")
