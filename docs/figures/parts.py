"""The sixteen sets of gate parts, each a pair, drawn from the registry."""

from __future__ import annotations

from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import Theme

from attnzoo.registry import pair_for

# a part, its symbol, and the gate's fields that it is made of
PARTS = {"g": ("log_decay",), "a": ("log_diag",), "\\theta": ("angle",), "\\beta": ("w", "beta")}
HEIGHT, ROW = 0.46, 1.12


def parts(theme: Theme) -> Figure:
    """A row for every number of parts; a line takes one part away."""
    figure = Figure(figsize=(7.0, 4.6))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.62, 5.62)
    axes.set_ylim(-0.75, 4 * ROW + 0.4)
    axes.axis("off")
    places: dict[tuple[str, ...], tuple[float, float]] = {}
    for count in range(5):
        row = list(combinations(PARTS, count))
        step = {1: 1.45, 3: 1.6}.get(count, 1.04)
        for number, chosen in enumerate(row):
            places[chosen] = (2.5 + step * (number - (len(row) - 1) / 2), ROW * count)
    colors = dict(zip(PARTS, (theme.pairs[2], theme.pairs[3], theme.pairs[4], theme.pairs[5]), strict=True))
    for chosen, (x, y) in places.items():
        for part in chosen:
            x1, y1 = places[tuple(other for other in chosen if other != part)]
            axes.plot([x, x1], [y - HEIGHT / 2, y1 + HEIGHT / 2], color=colors[part], linewidth=1.2, zorder=0)
        _box(axes, chosen, (x, y), theme)
    for number, (part, color) in enumerate(colors.items()):
        left = 0.2 + 1.3 * number
        axes.plot([left, left + 0.3], [-0.62, -0.62], color=color, linewidth=2)
        axes.annotate(f"${part} = 0$", (left + 0.38, -0.62), ha="left", va="center", fontsize=9, color=theme.ink)
    return figure


def _box(axes: Axes, chosen: tuple[str, ...], place: tuple[float, float], theme: Theme) -> None:
    x, y = place
    pair = pair_for([field for part in chosen for field in PARTS[part]])
    width = 0.06 + 0.063 * max(len(pair.linear), len(pair.softmax), 8)
    box = FancyBboxPatch(
        (x - width / 2, y - HEIGHT / 2), width, HEIGHT, boxstyle="round,pad=0,rounding_size=0.05",
        facecolor="none", edgecolor=theme.muted, linewidth=0.9,
    )  # fmt: skip
    axes.add_patch(box)
    for name, shift in ((pair.linear, 0.105), (pair.softmax, -0.105)):
        axes.annotate(name, (x, y + shift), ha="center", va="center", fontsize=7.5, color=theme.ink)
