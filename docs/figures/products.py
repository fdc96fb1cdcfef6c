"""The cube of the three matrix parts of a gate, each corner a pair without a scalar decay and one with it."""

from __future__ import annotations

import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import Theme

from attnzoo import Pair, pair_for

PARTS = ("log_diag", "angle", "w")
WORDS = {"log_diag": "$a_t$", "angle": "$\\theta_t$", "w": "$\\beta_t, w_t$"}
CORNERS = [frozenset(parts) for n in range(4) for parts in itertools.combinations(PARTS, n)]
WIDTH, HEIGHT = 1.72, 0.78


def place(parts: frozenset[str]) -> tuple[float, float]:
    """x and y of a corner: parts in rows from the bottom, opposite corners above each other."""
    if len(parts) in (0, 3):
        return 0.0, 1.3 * len(parts)
    one = next(iter(parts)) if len(parts) == 1 else next(part for part in PARTS if part not in parts)
    column = PARTS.index(one) - 1
    return 1.92 * (column if len(parts) == 1 else -column), 1.3 * len(parts)


def pair_of(parts: frozenset[str], decays: bool) -> Pair:
    return pair_for({*parts, *(("beta",) if "w" in parts else ()), *(("log_decay",) if decays else ())})


def products(theme: Theme) -> Figure:
    """Eight boxes, twelve edges in the colours of the parts that they add."""
    colors = dict(zip(PARTS, (theme.pairs[3], theme.pairs[4], theme.pairs[5]), strict=True))
    figure = Figure(figsize=(5.6, 4.6))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-2.9, 2.9)
    axes.set_ylim(-0.5, 4.4)
    axes.axis("off")
    for parts in CORNERS:
        for part in (part for part in PARTS if part in parts):
            (x0, y0), (x1, y1) = place(parts - {part}), place(parts)
            ends = [y0 + HEIGHT / 2, y1 - HEIGHT / 2]
            axes.plot([x0, x1], ends, color=colors[part], linewidth=1.2, zorder=0)
            straight, at = x0 == x1, ((2 * x0 + x1) / 3, (2 * ends[0] + ends[1]) / 3)
            axes.annotate(
                WORDS[part], at, (5, 1) if straight else (0, 8), textcoords="offset points",
                ha="left" if straight else "center", va="center", fontsize=9, color=colors[part],
            )  # fmt: skip
        _box(axes, parts, theme)
    return figure


def _box(axes: Axes, parts: frozenset[str], theme: Theme) -> None:
    x, y = place(parts)
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    axes.add_patch(
        FancyBboxPatch(
            corner, WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.06", facecolor="none", edgecolor=theme.muted,
            linewidth=1.2,
        )
    )  # fmt: skip
    axes.plot([x - WIDTH / 2, x + WIDTH / 2], [y, y], color=theme.muted, linewidth=0.6)
    for half, decays in ((HEIGHT / 4, False), (-HEIGHT / 4, True)):
        pair = pair_of(parts, decays)
        for line, name in ((0.085, pair.linear), (-0.085, pair.softmax)):
            axes.annotate(name, (x, y + half + line), ha="center", va="center", fontsize=8, color=theme.ink)
