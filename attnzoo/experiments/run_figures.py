"""Figures of experiments: runs by arm, gains of one side against those of the other, curves of several arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnzoo.experiments import figures
from attnzoo.experiments.figures import GRID, INK, MUTED, Array, Line, Look, panel, quiet, shortened, spread


@dataclass(frozen=True)
class Runs:
    """The runs of one arm: ``values`` is ``[seeds]``; filled on the softmax side, hollow on the linear."""

    key: str
    label: str
    values: Array
    look: Look
    filled: bool


@dataclass(frozen=True)
class Gains:
    """The gains of one change on both sides by run: ``x`` and ``y`` are ``[seeds]``."""

    key: str
    label: str
    x: Array
    y: Array
    look: Look


def runs(
    rows: Sequence[Runs], *, xlabel: str, percent: bool = False, marks: Sequence[float] = (), guess: float | None = None
) -> Figure:
    """A figure with a row per arm: its runs as small dots, their mean with standard error as a large one.

    Args:
        rows: what to draw, from top to bottom.
        xlabel: text under the axis.
        percent: shares of 1, written as per cent.
        marks: limits of claims, as vertical rules.
        guess: the number of a constant answer, as a named line.
    """
    left = 16 + 5.6 * max((len(shortened(row.label)) for row in rows), default=0)
    figure, axes = panel(400, 46 + 24 * len(rows), left=left)
    shown = [row.values[np.isfinite(row.values)] for row in rows]
    for y, (row, values) in enumerate(zip(rows, shown, strict=True)):
        color = row.look.color
        name = axes.annotate(
            shortened(row.label), (0, y), (-8, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="center", fontsize=9.5, color=color, parse_math=False,
            annotation_clip=False,
        )  # fmt: skip
        artists: list[Artist] = [name]
        if values.size:
            mean = values.mean()
            error = values.std(ddof=1) / np.sqrt(values.size) if values.size > 1 else 0.0
            artists += axes.plot(values, np.full(values.size, y), "o", ms=3.2, color=color, alpha=0.55, mew=0)
            artists += axes.plot([mean - error, mean + error], [y, y], color=color, linewidth=1.4)
            face = color if row.filled else "none"
            artists += axes.plot(mean, y, "o", ms=8, mec=color, mfc=face, mew=1.6, alpha=0.9)
        for artist in artists:
            artist.set_gid(f"series:{row.key}")
    for mark in marks:
        axes.axvline(mark, color=MUTED, linewidth=0.8, dashes=(2, 2))
    if guess is not None:
        axes.axvline(guess, color=INK, linewidth=0.9, dashes=(5, 3), alpha=0.7)
        axes.annotate(
            "guessing", (guess, 1), (-4, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="right", va="bottom", fontsize=9, color=MUTED, annotation_clip=False,
        )  # fmt: skip
        marks = [*marks, guess]
    every = np.concatenate([*shown, np.asarray(marks, dtype=np.float64)]) if shown else np.zeros(0)
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    margin = max((high - low) * 0.06, 1e-3)
    axes.set_xlim(low - margin, high + margin)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.grid(True, axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(xlabel, loc="left")
    if percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    return figure


def gains(points: Sequence[Gains], *, xlabel: str, ylabel: str) -> Figure:
    """A figure of each change's gain on one side against its gain on the other.

    Large dots are means with standard errors both ways, small ones runs; the diagonal rule marks equal gains.

    Args:
        points: one for each change.
        xlabel: of the one side.
        ylabel: of the other.
    """
    side, height = 330.0, 330.0  # of the axes, in points; the names stand at their right
    names = max((len(shortened(point.label)) for point in points), default=0) * 5.4 + 14
    figure, axes = panel(58 + side + names, 48 + height, left=50, bottom=38)
    box = axes.get_position()
    axes.set_position((box.x0, box.y0, side / (58 + side + names), box.height))
    for point in points:
        color, n = point.look.color, point.x.size
        x, y = point.x.mean(), point.y.mean()
        ex, ey = ((v.std(ddof=1) / np.sqrt(n) if n > 1 else 0.0) for v in (point.x, point.y))
        artists = [
            *axes.plot(point.x, point.y, "o", ms=3.2, color=color, alpha=0.5, mew=0),
            *axes.plot([x - ex, x + ex], [y, y], color=color, linewidth=1.2),
            *axes.plot([x, x], [y - ey, y + ey], color=color, linewidth=1.2),
            *axes.plot(x, y, "o", ms=9, mec=color, mfc=color, alpha=0.9),
        ]
        for artist in artists:
            artist.set_gid(f"series:{point.key}")
    every = np.concatenate([np.concatenate([point.x, point.y]) for point in points]) if points else np.zeros(1)
    low, high = float(min(every.min(), 0)), float(max(every.max(), 0))
    margin = max((high - low) * 0.1, 1e-3)
    limits = (low - margin, high + margin)
    wanted = [float((point.y.mean() - limits[0]) / (limits[1] - limits[0]) * height) for point in points]
    for point, place in zip(points, spread(wanted, 14.0, height), strict=True):
        axes.annotate(
            shortened(point.label), (point.x.mean(), point.y.mean()), (1.03, place / height),
            textcoords="axes fraction", color=point.look.color, fontsize=9.5, va="center", annotation_clip=False,
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": point.look.color, "alpha": 0.35, "linewidth": 0.7, "shrinkA": 1},
        ).set_gid(f"series:{point.key}")  # fmt: skip
    axes.plot(limits, limits, color=MUTED, linewidth=0.8, dashes=(2, 2), zorder=0)
    axes.axhline(0, color=INK, linewidth=0.7, alpha=0.5)
    axes.axvline(0, color=INK, linewidth=0.7, alpha=0.5)
    axes.set_xlim(*limits)
    axes.set_ylim(*limits)
    axes.grid(True, axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(xlabel, loc="left")
    axes.set_ylabel(ylabel, loc="bottom", color=MUTED, fontsize=10)
    return figure


@dataclass(frozen=True)
class Overlaid:
    """Curves with error bars over shares that halve to the right, and single points with error bars.

    Args:
        lines: what to draw; ``x`` are shares of 1.
        points: the points' places and numbers, by run.
        xlabel: text under the axis.
        ylabel: text beside it.
        percent: shares of 1, written as per cent.
    """

    lines: Sequence[Line]
    points: Sequence[Gains]
    xlabel: str
    ylabel: str
    percent: bool = False


def overlay(*pictures: Overlaid) -> Figure:
    """A figure of several overlays of one width, one below the other."""
    height = 400.0
    figure, axes = panel(680, height * len(pictures), left=56)
    axes.remove()
    for number, picture in enumerate(reversed(pictures)):
        box = (56 / 680, (number + 34 / height) / len(pictures), 1 - 64 / 680, (1 - 44 / height) / len(pictures))
        axes = figure.add_axes(box)
        quiet(axes)
        _draw_overlaid(axes, picture)
    return figure


def _draw_overlaid(axes: Axes, picture: Overlaid) -> None:
    lines = [
        replace(line, x=line.x[::-1], y=line.y[::-1], error=None if line.error is None else line.error[::-1])
        for line in picture.lines
    ]
    for line in lines:
        drawn = axes.errorbar(
            line.x, line.y, yerr=line.error, color=line.look.color, linewidth=1.7, elinewidth=1.1, capsize=2.5,
            marker="o", markersize=3.6, dashes=line.look.dash or (1, 0),
        )  # fmt: skip
        for artist in drawn.get_children():
            artist.set_gid(f"series:{line.key}")
    for point in picture.points:
        root, color = np.sqrt(max(point.x.size, 1)), point.look.color
        x, y = point.x.mean(), point.y.mean()
        ex, ey = ((v.std(ddof=1) / root if v.size > 1 else 0.0) for v in (point.x, point.y))
        drawn = axes.errorbar(x, y, xerr=ex, yerr=ey, color=color, marker="D", markersize=6, linestyle="none")
        name = axes.annotate(
            shortened(point.label), (x, y), (8, 6), textcoords="offset points", color=color, fontsize=9.5,
            parse_math=False,
        )  # fmt: skip
        for artist in (*drawn.get_children(), name):
            artist.set_gid(f"series:{point.key}")
    places = sorted({float(x) for line in lines for x in line.x})
    every = [*places, *(float(point.x.mean()) for point in picture.points)] or [1.0]
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{100 * x:.3g} %" for x in places])
    axes.minorticks_off()
    axes.set_xlim(max(every) * 1.06, min(every) / 1.03)
    axes.set_xlabel(picture.xlabel, loc="left")
    axes.set_ylabel(picture.ylabel, loc="bottom", color=MUTED, fontsize=10)
    axes.axhline(0, color=INK, linewidth=0.7, alpha=0.5)
    if picture.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    figures.name_line_ends(axes, lines, min(every) / 1.03, 0)
