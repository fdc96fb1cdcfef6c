"""Schematics made of triangles: the pairs of a query and a key, and a triangular system."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from style import WIDE, Point, Theme, arrow, panel, write


def staircase(theme: Theme) -> Figure:
    """Decays of twelve tokens in blocks of three; what is far from the diagonal is crossed out, corners decide."""
    T, block, limit = 12, 3, 1.2
    steps = np.array([0.0, 0.5, 0.35, 0.5, 0.3, 0.45, 0.6, 0.3, 0.5, 0.4, 0.45, 0.5])
    place = steps.cumsum()
    figure = Figure(figsize=(WIDE * 0.72, 3.9))
    axes = panel(figure, (0, 0, 1, 1), (-1.0, T + 0.6), (T + 0.3, -1.0), equal=True)
    for t in range(T):
        for j in range(t + 1):
            color = theme.heat(math.exp(-(place[t] - place[j])))
            axes.add_patch(Rectangle((j + 0.05, t + 0.05), 0.9, 0.9, color=color, linewidth=0))
    edge: list[Point] = []
    for row in range(0, T, block):
        kept = next(col for col in range(0, T, block) if col == row or place[row] - place[col + block - 1] <= limit)
        for col in range(0, kept, block):
            for slope in ((0.2, block - 0.2), (block - 0.2, 0.2)):
                axes.plot([col + 0.2, col + block - 0.2], [row + x for x in slope], color=theme.cut, linewidth=1.0)
        edge += [(kept, row), (kept, row + block)]
    axes.plot(*zip(*edge, strict=True), color=theme.cut, linewidth=2.2)
    corner = (block - 0.5, 6.5)
    axes.plot(*corner, "o", markersize=13, markerfacecolor="none", markeredgecolor=theme.ink, markeredgewidth=1.8)
    _name_sides(axes, 5.6, theme)
    return figure


def rectangle(theme: Theme) -> Figure:
    """The pairs around a gate: all rows from it on, without the triangle of the pairs after it."""
    figure = Figure(figsize=(WIDE, 1.9))
    T, at = 8, 3.0
    whole = ((0.0, 0.0), (0.0, 8.0), (8.0, 8.0))
    shapes: tuple[tuple[str, tuple[Point, ...]], ...] = (
        ("$j < l \\leq t$", ((0.0, at), (0.0, 8.0), (at, 8.0), (at, at))),
        ("rows $t \\geq l$", ((0.0, at), (0.0, 8.0), (8.0, 8.0), (at, at))),
        ("columns $j \\geq l$", ((at, at), (at, 8.0), (8.0, 8.0))),
    )
    for number, (name, corners) in enumerate(shapes):
        axes = panel(figure, (0.02 + 0.34 * number, 0.0, 0.28, 1.0), (-0.4, T + 0.4), (T + 1.6, -0.6), equal=True)
        axes.add_patch(Polygon(whole, facecolor="none", edgecolor=theme.muted, linewidth=1))
        axes.add_patch(Polygon(corners, facecolor=theme.pairs[4], alpha=0.75, linewidth=0))
        write(axes, name, (T / 2, T + 1.0), theme.ink)
    axes = panel(figure, (0, 0, 1, 1), (0, 1), (0, 1))
    write(axes, "$=$", (0.33, 0.5), theme.ink, size=16)
    write(axes, "$-$", (0.67, 0.5), theme.ink, size=16)
    return figure


def triangular(theme: Theme) -> Figure:
    """A triangular system: each amount needs the amounts above it only."""
    figure = Figure(figsize=(WIDE, 1.5))
    axes = panel(figure, (0, 0, 1, 1), (-0.4, 15.6), (5.4, -0.5), equal=True)
    for row in range(5):
        for col in range(5):
            color = theme.muted if row == col else theme.pairs[5] if col < row else "none"
            patch = Rectangle((col + 0.06, row + 0.06), 0.88, 0.88, facecolor=color, edgecolor=theme.grid)
            axes.add_patch(patch)
            if row == col:
                write(axes, "1", (col + 0.5, row + 0.52), theme.ink)
    for x, color in ((6.2, theme.pairs[2]), (8.9, theme.pairs[4])):
        for row in range(5):
            axes.add_patch(Rectangle((x, row + 0.06), 0.88, 0.88, facecolor=color, alpha=0.8, linewidth=0))
    write(axes, "$=$", (8.0, 2.5), theme.ink, size=15)
    for y, text, color in (
        (0.5, "amounts: each needs", theme.pairs[2]),
        (1.25, "those above it", theme.pairs[2]),
        (2.5, "the key, read in each", theme.pairs[4]),
        (3.25, "direction $w_t$", theme.pairs[4]),
        (4.5, "overlaps of directions", theme.pairs[5]),
    ):
        write(axes, text, (10.4, y), color, ha="left", size=9)
    return figure


def tiles(theme: Theme) -> Figure:
    """Which program owns what: a row of tiles forward, a column of tiles for the gradients of keys and values."""
    figure = Figure(figsize=(WIDE, 2.5))
    for number, name in enumerate(("forward, and $dq$", "$dk$, $dv$ and the gate")):
        axes = panel(figure, (0.5 * number, 0, 0.5, 1), (-1.2, 8.4), (8.5, -1.5), equal=True)
        for row in range(8):
            for col in range(row + 1):
                own = row == 5 if number == 0 else col == 2
                color = theme.pairs[4] if own else theme.grid
                axes.add_patch(Rectangle((col + 0.06, row + 0.06), 0.88, 0.88, color=color, alpha=0.85, linewidth=0))
        start, end = ((5.5, 5.5), (0.4, 5.5)) if number == 0 else ((2.5, 2.5), (2.5, 7.7))
        arrow(axes, start, end, theme.ink, width=1.6)
        write(axes, name, (3.6, -1.1), theme.ink, size=9)
        write(axes, "keys", (6.3, 1.0), theme.muted, size=8)
        axes.annotate("queries", (-0.6, 4.0), ha="center", va="center", rotation=90, fontsize=8, color=theme.muted)
    return figure


def forgotten(theme: Theme) -> Figure:
    """Each column, a key, fades at a row of its own and never comes back; the last tokens are kept."""
    T, window, left = 14, 3, (14, 5, 7, 14, 8, 11, 9, 12, 13, 14, 14, 14, 14, 14)  # the row at which a key goes
    figure = Figure(figsize=(WIDE * 0.72, 3.3))
    axes = panel(figure, (0, 0, 1, 1), (-1.0, T + 0.6), (T + 0.3, -1.0), equal=True)
    for t in range(T):
        for j in range(t + 1):
            kept = 1.0 if t - j < window else 1 / (1 + math.exp(2.5 * (t - left[j])))
            axes.add_patch(Rectangle((j + 0.05, t + 0.05), 0.9, 0.9, color=theme.heat(kept), linewidth=0))
    axes.plot([0, T - window], [window, T], color=theme.cut, linewidth=1.4, dashes=(4, 3))
    _name_sides(axes, 5.8, theme)
    return figure


def _name_sides(axes: Axes, queries: float, theme: Theme) -> None:
    """Arrows along keys and queries, the latter's name at a height."""
    arrow(axes, (0.4, -0.45), (4.2, -0.45), theme.muted, width=1)
    write(axes, "keys", (5.4, -0.45), theme.muted)
    arrow(axes, (-0.45, 0.4), (-0.45, 4.2), theme.muted, width=1)
    axes.annotate("queries", (-0.45, queries), ha="center", va="center", rotation=90, fontsize=9.5, color=theme.muted)


DRAWINGS: dict[str, Callable[[Theme], Figure]] = {
    "staircase": staircase,
    "rectangle": rectangle,
    "triangular": triangular,
    "tiles": tiles,
    "forgotten": forgotten,
}
