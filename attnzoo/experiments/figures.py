"""Figures from arrays: curves per position, duals side by side, forget-gate matrices, kept blocks.

Every function returns a plain matplotlib figure. ``to_svg`` turns one into SVG whose known colours are CSS
variables (``var(--ink, #1d2530)``), so that a page can restyle it for a dark theme.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from attnzoo import registry

Array = npt.NDArray[np.float64]

INK, MUTED, GRID, CUT = "#1d2530", "#5f6b7a", "#e3e7ec", "#e8463a"
# One hue per pair of duals, in the order of the registry's table; registered pairs continue from the end.
PAIR_COLORS = (
    "#6d7684", "#b8860b", "#d6451b", "#4f8a10", "#1d6fdc", "#0a8f8c", "#8a3fd1", "#c2256e", "#8c5a2b", "#33507a",
)  # fmt: skip
THEME = {INK: "ink", MUTED: "muted", GRID: "grid", CUT: "cut"} | {
    color: f"pair-{number}" for number, color in enumerate(PAIR_COLORS, 1)
}
DECAY_COLORS = LinearSegmentedColormap.from_list(
    "decay", ["#f3f1ea", "#c9dfd0", "#7fc0b5", "#2f8fa3", "#1f5a8a", "#22265e"]
)
DASHES: dict[str, tuple[tuple[float, ...], ...]] = {
    "softmax": ((), (8, 1.5, 1.5, 1.5)),
    "linear": ((4.5, 2), (1.5, 1.5)),
}
NAME = 40  # most characters of a name in a figure
NAME_LINE = 12.0  # points from one name to the next above it
ROW = 400.0  # width in points of a row of dots, with 8 on either side


@dataclass(frozen=True)
class Look:
    """The look of a variant in figures: its pair's hue, solid on the softmax side, dashed on the linear side."""

    color: str
    dash: tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """One curve: ``x`` and ``y`` are ``[points]``; ``key`` becomes the ``data-series`` of its SVG group. ``error``,
    ``[points]``, is shaded around it."""

    key: str
    label: str
    x: Array
    y: Array
    look: Look
    error: Array | None = None


@dataclass(frozen=True)
class Dot:
    """A value with its standard error (nan draws none); filled on the softmax side, hollow on the linear."""

    key: str
    label: str
    value: float
    error: float
    look: Look
    filled: bool


def kind_of(variants: Sequence[str]) -> tuple[str, int, str]:
    """The side, the pair's number and the dual of a model; a model of several variants has its own number and no
    dual."""
    if len(variants) > 1:
        side = "softmax" if any(registry.get(name).side == "softmax" for name in variants) else "linear"
        return side, len(registry.pairs()) + 1, ""
    found = registry.get(variants[0])
    side = found.side
    if found.readout is not None:  # drawn as the side whose memory it has
        side = "linear" if found.readout.stateful else "softmax"
    return side, registry.pairs().index(found.pair) + 1, found.dual.name


def looks(series: Sequence[tuple[str, int, str]]) -> dict[str, Look]:
    """A look per series.

    Args:
        series: (key, number of the pair from 1, side) of each.

    Returns:
        Look by key; a second series of the same hue and side gets another dash.
    """
    seen: dict[tuple[str, str], int] = {}
    result = {}
    for key, pair, side in series:
        color = PAIR_COLORS[(pair - 1) % len(PAIR_COLORS)]
        repeat = seen.get((color, side), 0)
        seen[color, side] = repeat + 1
        dashes = DASHES[side]
        result[key] = Look(color, dashes[repeat % len(dashes)])
    return result


def curves(
    lines: Sequence[Line],
    *,
    xlabel: str,
    ylim: tuple[float, float],
    log_y: bool = False,
    mark: tuple[float, str] | None = None,
    names_width: int = 0,
    percent: bool = False,
    ylabel: str = "",
) -> Figure:
    """Curves in one panel, each named at its right end.

    Args:
        lines: what to draw.
        xlabel: text under the axis.
        ylim: shared by the panels that stand side by side; values outside are cut off.
        log_y: logarithmic y axis.
        mark: an x and a word for it, drawn as a vertical rule.
        names_width: characters to leave room for at the right; at least those of the longest name are.
        percent: shares of 1, written as per cent.
        ylabel: text beside it, where the caption does not say it.
    """
    figure, axes = panel(400, 290, left=58 if ylabel else 42)
    axes.set_ylabel(ylabel, loc="bottom", color=MUTED, fontsize=10)
    for line in lines:
        (drawn,) = axes.plot(line.x, line.y, color=line.look.color, linewidth=1.6, solid_capstyle="round")
        if line.look.dash:
            drawn.set_dashes(line.look.dash)
        drawn.set_gid(f"series:{line.key}")
        if line.error is not None:
            band = axes.fill_between(
                line.x, line.y - line.error, line.y + line.error, color=line.look.color, alpha=0.16, linewidth=0
            )
            band.set_gid(f"series:{line.key}")
    if log_y:
        axes.set_yscale("log")
    axes.set_ylim(*ylim)
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    right = max((float(line.x[-1]) for line in lines), default=1.0)
    axes.set_xlim(0, right)
    axes.set_xlabel(xlabel, loc="left")
    if mark is not None:
        axes.axvline(mark[0], color=MUTED, linewidth=0.8, dashes=(2, 2))
        axes.annotate(
            mark[1], (mark[0], 1), (3, -9), xycoords=("data", "axes fraction"), textcoords="offset points",
            color=MUTED, fontsize=9,
        )  # fmt: skip
    name_line_ends(axes, lines, right, names_width)
    return figure


def pairs(rows: Sequence[Sequence[Dot]], *, xlabel: str) -> Figure:
    """A figure with a row per pair of duals and a dot per variant with its standard error.

    Names that would overlap are put on several lines, which makes their row higher.

    Args:
        rows: the dots of each pair, none empty.
        xlabel: text under the axis.
    """
    reached = [end for row in rows for dot in row for end in _ends(dot)]
    low, high = min(reached), max(reached)
    margin = max((high - low) * 0.14 if high > low else abs(high) * 0.05, 1e-3)
    names = [_names(row, low - margin, high + margin) for row in rows]
    places, bottom = [], 0.0
    for of_row in names:
        above, below = (
            max((line for _, line, under in of_row if under == side), default=0) * NAME_LINE / 40
            for side in (False, True)
        )
        places.append(bottom + above)
        bottom += above + 1 + below
    figure, axes = panel(ROW, 44 + 40 * bottom, left=8)
    for y, row, of_row in zip(places, rows, names, strict=True):
        ends = [min(dot.value for dot in row), max(dot.value for dot in row)]
        axes.plot(ends, [y, y], color=row[0].look.color, linewidth=2.2, alpha=0.35)
        for dot, (x, line, below) in zip(row, of_row, strict=True):
            away = 7 + NAME_LINE * line
            text = axes.annotate(
                shortened(dot.label), (x, y), (0, -away if below else away), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="center", va="top" if below else "bottom", fontsize=9.5,
                color=dot.look.color, parse_math=False,
            )  # fmt: skip
            (bar,) = axes.plot(_ends(dot), [y, y], color=dot.look.color, linewidth=1.0)
            face = dot.look.color if dot.filled else "none"
            (mark,) = axes.plot(dot.value, y, "o", ms=7.5, mec=dot.look.color, mfc=face, mew=1.8)
            for artist in (text, bar, mark):
                artist.set_gid(f"series:{dot.key}")
    axes.set_xlim(low - margin, high + margin)
    axes.set_ylim(bottom - 0.35, -0.75)
    axes.set_yticks([])
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.grid(True, axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(xlabel, loc="left")
    return figure


def _ends(dot: Dot) -> list[float]:
    error = dot.error if np.isfinite(dot.error) else 0.0
    return [dot.value - error, dot.value + error]


def _names(row: Sequence[Dot], low: float, high: float) -> list[tuple[float, int, bool]]:
    """The place of each dot's name: its middle as a share of the width, its line, and whether it is below the dot."""
    lines: dict[bool, list[float]] = {False: [], True: []}  # the end of the last name on each line
    found = {}
    for number in sorted(range(len(row)), key=lambda number: row[number].value):
        dot = row[number]
        below = not dot.filled and len(row) > 1
        half = 3 * (len(shortened(dot.label)) + 1) / (ROW - 16)
        x = min(max((dot.value - low) / (high - low), half), 1 - half)
        line = next((n for n, end in enumerate(lines[below]) if end <= x - half), len(lines[below]))
        lines[below][line : line + 1] = [x + half]
        found[number] = (x, line, below)
    return [found[number] for number in range(len(row))]


def decay_map(decay: Array, length: int, cuts: Mapping[str, Array], block: int = 1) -> Figure:
    """A figure of one forget-gate matrix, queries downwards and keys to the right, with pruning boundaries.

    Colours are logarithmic, from e^-10 (or less) to 1.

    Args:
        decay: exp(d_tj), ``[S, S]``, in [0, 1].
        length: tokens that the S samples span.
        cuts: per bound, the first computed key of each block of rows, ``[blocks]``; everything to its left is pruned.
            The first bound is drawn solid, the others dashed.
        block: rows per block.
    """
    figure = Figure(figsize=(160 / 72, 160 / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    log = np.log(np.maximum(decay, np.exp(-10.0)))
    visible = np.ma.masked_where(np.triu(np.ones_like(decay, dtype=bool), 1), log)
    axes.imshow(visible, extent=(0, length, length, 0), vmin=-10, vmax=0, cmap=DECAY_COLORS, interpolation="nearest")
    axes.plot([0, length], [0, length], color=MUTED, linewidth=0.7)
    for number, whole in enumerate(cuts.values()):
        first = whole[: -(-length // block)]
        x = np.repeat(first, 2)
        y = np.minimum(np.repeat(np.arange(first.size + 1) * block, 2)[1:-1], length)
        axes.plot(x, y, color=CUT, linewidth=1.6 if number == 0 else 1.0, dashes=(3, 2) if number else (1, 0))
    axes.set_xlim(0, length)
    axes.set_ylim(length, 0)
    axes.axis("off")
    return figure


def kept_blocks(heads: Sequence[str], kept: Mapping[str, Array], look: Look) -> Figure:
    """A figure of the computed share of blocks: a bar per head and bound, the first bound filled.

    Args:
        heads: a name per head.
        kept: per bound, the shares ``[heads]`` in [0, 1].
        look: colour of the variant.
    """
    figure, axes = panel(400, 150, left=40, bottom=20)
    width = 0.8 / max(len(kept), 1)
    at = np.arange(len(heads))
    for number, (bound, shares) in enumerate(kept.items()):
        offset = (number - (len(kept) - 1) / 2) * width
        face = look.color if number == 0 else "none"
        axes.bar(at + offset, shares, width * 0.86, facecolor=face, edgecolor=look.color, linewidth=1.1, label=bound)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_xticks(at, list(heads))
    axes.set_xlim(-0.6, len(heads) - 0.4)
    return figure


def written(figure: Figure, name: str, transparent: bool = False) -> str:
    """A figure as reproducible SVG text, whose labels use the reader's fonts.

    Args:
        figure: any matplotlib figure.
        name: seed of the ids.
        transparent: without a background.
    """
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # that font is not used
        figure.savefig(buffer, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def to_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an ``<svg>`` element that scales with its container.

    Args:
        figure: any matplotlib figure.
        name: unique on the page, since it seeds the ids inside the SVG.
        title: what the figure shows, for readers who do not see it.
    """
    text = written(figure, name, transparent=True)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'id="series:([^"]*)"', r'data-series="\1"', text)
    # Matplotlib names every group alike in every file, and two figures on a page must not share an id.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", text)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    for color, variable in THEME.items():
        text = re.sub(rf"{color}\b(?!\))", f"var(--{variable}, {color})", text)
    return text


def panel(width: float, height: float, left: float = 42, bottom: float = 34) -> tuple[Figure, Axes]:
    """A figure of ``width`` x ``height`` points with one quiet axes."""
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + 8) / width, 1 - (bottom + 10) / height))
    quiet(axes)
    return figure, axes


def quiet(axes: Axes) -> None:
    """Remove the frame and ticks that a reader does not need from axes."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=10, length=0, which="both")
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=MUTED, fontsize=10)


def name_line_ends(axes: Axes, lines: Sequence[Line], right: float, characters: int) -> None:
    """Write each label right of its curve's end, moved apart where labels would overlap."""
    box = axes.get_position()
    longest = min(max([characters, *(len(line.label) for line in lines)]), NAME)
    width = axes.figure.get_figwidth() * 72  # type: ignore[union-attr]
    axes.set_position((box.x0, box.y0, box.width - (longest * 5.4 + 6) / width, box.height))
    height = box.height * axes.figure.get_figheight() * 72  # type: ignore[union-attr]
    low, high = axes.get_ylim()
    inside = axes.transAxes.inverted()
    lines = sorted(lines, key=lambda line: line.y[-1])
    wanted = []
    for line in lines:
        end = float(np.clip(line.y[-1], low, high)) if np.isfinite(line.y[-1]) else high
        wanted.append(float(inside.transform(axes.transData.transform((right, end)))[1]) * height)
    for line, y in zip(lines, spread(wanted, 12.0, height), strict=True):
        axes.annotate(
            shortened(line.label), (1, y / height), (6, 0), xycoords="axes fraction", textcoords="offset points",
            color=line.look.color, fontsize=9.5, va="center", annotation_clip=False, parse_math=False,
        ).set_gid(f"series:{line.key}")  # fmt: skip


def shortened(name: str) -> str:
    """A name in a figure: of a long one its beginning and its end, cut between words where it has any."""
    if len(name) <= NAME:
        return name
    words = name.split(" ")
    ends = [
        (" ".join(words[:first]), " ".join(words[last:]))
        for first in range(min(len(words), NAME), 0, -1)
        for last in range(max(first + 1, len(words) - NAME), len(words))
    ]
    cuts = [f"{start} … {end}" for start, end in ends if min(len(start), len(end)) >= NAME // 8]
    return max((cut for cut in cuts if len(cut) <= NAME), key=len, default=f"{name[: NAME - 16]}…{name[-15:]}")


def spread(wanted: Sequence[float], gap: float, height: float) -> list[float]:
    """Positions near ``wanted``, in its order, at least ``gap`` apart, inside [0, height] when they fit."""
    order = np.argsort(wanted, kind="stable")
    placed = np.array([wanted[i] for i in order], dtype=float)
    # Repeated small pushes settle a crowd around its own middle, where one sweep would shift it all upwards.
    for _ in range(200):
        moved = False
        for i in range(len(placed) - 1):
            short = gap - (placed[i + 1] - placed[i])
            if short > 1e-6:
                placed[i] -= short / 2
                placed[i + 1] += short / 2
                moved = True
        if placed.size and placed[0] < 0:
            placed += -placed[0] if placed[-1] - placed[0] <= height else 0
        if placed.size and placed[-1] > height:
            placed -= placed[-1] - height
        if not moved:
            break
    result = [0.0] * len(wanted)
    for i, position in zip(order, placed, strict=True):
        result[int(i)] = float(position)
    return result
