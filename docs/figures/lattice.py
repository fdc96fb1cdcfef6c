"""The lattice of reductions, drawn from the table that the tests run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from style import Theme
from trained import ROOT

from attnzoo import get, pairs
from attnzoo.algebra.parts import PARTS

# where each pair stands, by its linear side: x in columns, y in rows from the bottom
PLACES = {
    "linear_attention": (2.3, 0.0),
    "retnet": (1.15, 1.0),
    "complex_linear": (3.45, 1.0),
    "mamba2": (1.15, 2.0),
    "deltanet": (2.3, 2.0),
    "gla": (0.0, 3.0),
    "gated_deltanet": (2.3, 3.0),
}
Edge = tuple[str, str]


def reductions() -> dict[Edge, str]:
    """What is set to turn the first variant into the second, in TeX, from ``tests/forms/test_reductions.py``."""
    folders = [str(ROOT / "tests"), str(ROOT / "tests" / "forms")]
    sys.path[:0] = folders
    try:
        from test_reductions import REDUCTIONS
    finally:
        del sys.path[: len(folders)]
    found: dict[Edge, str] = {}
    for name, to, change in REDUCTIONS:
        found.setdefault((name, to), _words(change))
    return found


def _words(change: Callable[..., Any]) -> str:
    parts = inspect.getclosurevars(change).nonlocals.get("parts")
    if parts:
        return ", ".join(f"${PARTS[part].tex} = 0$" for part in parts)
    return {"closed_free": "$g_t$ constant", "equal_channels": "$a = g\\,(1 \\ldots 1)$"}.get(change.__name__, "")


def implied(edge: Edge, edges: Iterable[Edge]) -> bool:
    """Whether the reduction is made of two others."""
    edges = set(edges)
    return any(
        (edge[0], middle) in edges and (middle, edge[1]) in edges for middle in {name for e in edges for name in e}
    )


def lattice(theme: Theme) -> Figure:
    """One box per pair; arrows that both sides have are solid, one that only the linear side has is dashed."""
    edges = reductions()
    linear = {edge: how for edge, how in edges.items() if get(edge[0]).side == "linear"}
    softmax = {(get(a).dual.name, get(b).dual.name): how for (a, b), how in edges.items() if get(a).side == "softmax"}
    figure = Figure(figsize=(5.6, 4.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.55, 4.0)
    axes.set_ylim(-0.3, 3.3)
    axes.axis("off")
    for edge, how in (linear | softmax).items():
        if all(edge not in side or implied(edge, side) for side in (linear, softmax)):
            continue
        _arrow(axes, edge, how, edge in linear, edge in softmax, theme)
    for number, pair in enumerate(pairs()):
        if pair.linear in PLACES:
            _box(axes, pair.linear, pair.softmax, theme.pairs[number], theme)
    return figure


WIDTH, HEIGHT = 1.02, 0.44


def _box(axes: Axes, linear: str, softmax: str, color: str, theme: Theme) -> None:
    x, y = PLACES[linear]
    box = (x - WIDTH / 2, y - HEIGHT / 2)
    axes.add_patch(
        FancyBboxPatch(
            box, WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.06",
            facecolor="none", edgecolor=color, linewidth=1.5,
        )
    )  # fmt: skip
    axes.plot([x - WIDTH / 2, x + WIDTH / 2], [y, y], color=color, linewidth=0.6)
    axes.annotate(linear, (x, y + HEIGHT / 4), ha="center", va="center", fontsize=9, color=theme.ink)
    axes.annotate(softmax, (x, y - HEIGHT / 4), ha="center", va="center", fontsize=9, color=theme.ink)


def _arrow(axes: Axes, edge: Edge, how: str, in_linear: bool, in_softmax: bool, theme: Theme) -> None:
    (x0, y0), (x1, y1) = PLACES[edge[0]], PLACES[edge[1]]
    both = in_linear and in_softmax
    color = theme.ink if both else theme.cut
    straight = not any(_between(x0, y0, x1, y1, *place) for place in PLACES.values())
    if straight:
        start, end = _edge_of_box(x0, y0, x1, y1), _edge_of_box(x1, y1, x0, y0)
        words_at = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    else:  # down first, then into the side of the box
        start, end = (x0, y0 - HEIGHT / 2), (x1 - WIDTH / 2, y1)
        words_at = (x0, (y0 + y1) / 2)
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, linewidth=1.0, color=color, shrinkA=1, shrinkB=1,
            linestyle="-" if both else (0, (4, 2)),
            connectionstyle="arc3" if straight else "angle,angleA=-90,angleB=180,rad=8",
        )
    )  # fmt: skip
    words = how if both else f"{how}\n{'linear' if in_linear else 'softmax'} side only"
    offset = (7, 6 if straight and x1 > x0 else 0)
    axes.annotate(
        words, words_at, offset, textcoords="offset points", ha="left", va="center", fontsize=9,
        color=theme.muted if both else color,
    )  # fmt: skip


def _between(x0: float, y0: float, x1: float, y1: float, x: float, y: float) -> bool:
    """Whether the line from (x0, y0) to (x1, y1) crosses the box at (x, y)."""
    if not min(y0, y1) < y < max(y0, y1):
        return False
    return abs(x0 + (x1 - x0) * (y - y0) / (y1 - y0) - x) < WIDTH / 2 + HEIGHT


def _edge_of_box(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Where the line from the centre of the box at (x0, y0) towards (x1, y1) leaves it."""
    dx, dy = x1 - x0, y1 - y0
    reach = min(WIDTH / 2 / abs(dx) if dx else 1.0, HEIGHT / 2 / abs(dy) if dy else 1.0)
    return x0 + dx * reach, y0 + dy * reach
