"""Figures of a pair: matrices with their axes, and eigenvalues in the plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnzoo.evaluation import Array
from attnzoo.experiments.explore.measures import Complex
from attnzoo.experiments.figures import DECAY_COLORS, GRID, INK, MUTED, PAIR_COLORS, panel, quiet

SIGNED = "RdBu"
FEW, SOME, MANY = PAIR_COLORS[4], PAIR_COLORS[1], PAIR_COLORS[2]


def matrix(values: Array, *, xlabel: str, ylabel: str, scale: str) -> Figure:
    """A figure of a matrix, rows downwards, with a bar of its colours; those of a signed one meet at 0. Of a square one
    with zeros above the diagonal those are left blank.

    Args:
        values: ``[rows, columns]``.
        xlabel: what a column is.
        ylabel: what a row is.
        scale: what the colours measure.
    """
    rows, columns = values.shape
    side, left, bottom, right = 290.0, 46.0, 40.0, 64.0
    high = side * min(1.0, max(0.5, rows / columns))
    width, height = left + side + right, bottom + high + 8
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((left / width, bottom / height, side / width, high / height))
    bar = figure.add_axes(((left + side + 12) / width, bottom / height, 12 / width, high / height))
    largest = max(float(np.abs(values).max()), 1e-12)
    signed = bool((values < 0).any())
    least = -largest if signed else 0.0
    look: dict[str, Any] = {"cmap": SIGNED if signed else DECAY_COLORS, "vmin": least, "vmax": largest}
    future = np.triu(np.ones_like(values, dtype=bool), 1)
    causal = rows == columns and not values[future].any()
    shown = np.ma.masked_where(future, values) if causal else values
    axes.imshow(shown, aspect="auto", interpolation="nearest", extent=(0, columns, rows, 0), **look)
    ramp = np.linspace(least, largest, 64)[:, None]
    bar.imshow(ramp, aspect="auto", origin="lower", extent=(0, 1, least, largest), **look)
    for each in (axes, bar):
        quiet(each)
        each.grid(False)
    bar.spines["bottom"].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.set_title(scale, loc="right", fontsize=10, color=MUTED)
    axes.set_xlabel(xlabel, loc="left")
    axes.set_ylabel(ylabel, loc="bottom", color=MUTED, fontsize=10)
    return figure


def plane(eigenvalues: Mapping[int, Complex]) -> Figure:
    """A figure of complex eigenvalues in and around the unit circle, by how many transitions were multiplied."""
    figure, axes = panel(400, 400, left=46, bottom=40)
    turn = np.linspace(0, 2 * np.pi, 181)
    axes.plot(np.cos(turn), np.sin(turn), color=MUTED, linewidth=0.9)
    axes.axhline(0, color=GRID, linewidth=0.8)
    axes.axvline(0, color=GRID, linewidth=0.8)
    every = np.concatenate(list(eigenvalues.values()))
    reach = max(1.15, min(4.0, 1.05 * float(np.abs(np.stack([every.real, every.imag])).max())))
    for (n, found), color, marker in zip(eigenvalues.items(), (FEW, SOME, MANY), ("o", "s", "^"), strict=True):
        words = "one transition" if n == 1 else f"{n} in a row"
        axes.plot(found.real, found.imag, marker, ms=4, mew=0, color=color, alpha=0.6, label=words)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-reach, reach)
    axes.grid(False)
    axes.set_xlabel("real part", loc="left")
    axes.set_ylabel("imaginary part", loc="bottom", color=MUTED, fontsize=10)
    legend = axes.legend(
        loc="upper left", frameon=False, fontsize=10, labelcolor=INK, handletextpad=0.1, markerscale=1.8
    )
    legend.set_zorder(3)
    return figure
