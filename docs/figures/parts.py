"""The sixteen sets of gate parts, each with its pairs, drawn from the registry."""

from __future__ import annotations

from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import Theme

from attnzoo import Pair, pairs
from attnzoo.algebra import parts as declared

# the symbol of what is 0 without a part, and the gate's fields that the part is made of
GROUPS = [tuple(name for name in group if not declared.PARTS[name].optional) for group in declared.groups()]
PARTS = {declared.PARTS[group[-1]].tex: group for group in GROUPS}
HEIGHT, GAP = 0.46, 0.66  # of a pair in a box, between rows
Set = tuple[str, ...]


def parts(theme: Theme) -> Figure:
    """A row for every number of parts, all pairs of a set in its box; a line takes one part away."""
    found = {chosen: _pairs_of(chosen) for count in range(5) for chosen in combinations(PARTS, count)}
    heights = {chosen: HEIGHT * len(of_set) for chosen, of_set in found.items()}
    places: dict[Set, tuple[float, float]] = {}
    top = 0.0
    for count in range(5):
        row = [chosen for chosen in found if len(chosen) == count]
        tall = max(heights[chosen] for chosen in row)
        step = {1: 1.45, 3: 1.6}.get(count, 1.04)
        for number, chosen in enumerate(row):
            places[chosen] = (2.5 + step * (number - (len(row) - 1) / 2), top + tall / 2)
        top += tall + GAP
    top += 0.17 - GAP
    figure = Figure(figsize=(7.0, 0.815 * (top + 0.52)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.62, 5.62)
    axes.set_ylim(-0.52, top)
    axes.axis("off")
    colors = dict(zip(PARTS, (theme.pairs[2], theme.pairs[3], theme.pairs[4], theme.pairs[5]), strict=True))
    for chosen, (x, y) in places.items():
        for part in chosen:
            less = tuple(other for other in chosen if other != part)
            x1, y1 = places[less]
            ends = [y - heights[chosen] / 2, y1 + heights[less] / 2]
            axes.plot([x, x1], ends, color=colors[part], linewidth=1.2, zorder=0)
        _box(axes, found[chosen], (x, y), theme)
    for number, (part, color) in enumerate(colors.items()):
        left = 0.2 + 1.3 * number
        axes.plot([left, left + 0.3], [-0.39, -0.39], color=color, linewidth=2)
        axes.annotate(f"${part} = 0$", (left + 0.38, -0.39), ha="left", va="center", fontsize=9, color=theme.ink)
    return figure


def _pairs_of(chosen: Set) -> list[Pair]:
    wanted = {field for part in chosen for field in PARTS[part]}
    return [pair for pair in pairs() if set(pair.requires) == wanted]


def _box(axes: Axes, of_set: list[Pair], place: tuple[float, float], theme: Theme) -> None:
    """The pairs of a set under each other, the last one of the table lowest."""
    x, y = place
    height = HEIGHT * len(of_set)
    width = 0.06 + 0.063 * max(8, *(len(name) for pair in of_set for name in (pair.linear, pair.softmax)))
    box = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.05",
        facecolor="none", edgecolor=theme.muted, linewidth=0.9,
    )  # fmt: skip
    axes.add_patch(box)
    for number, pair in enumerate(of_set):
        middle = y + height / 2 - HEIGHT * (number + 0.5)
        if number:
            axes.plot([x - width / 2, x + width / 2], [middle + HEIGHT / 2] * 2, color=theme.muted, linewidth=0.5)
        for name, shift in ((pair.linear, 0.105), (pair.softmax, -0.105)):
            axes.annotate(name, (x, middle + shift), ha="center", va="center", fontsize=7.5, color=theme.ink)
