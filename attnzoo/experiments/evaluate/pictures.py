"""Figures of the evaluations' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from attnzoo.evaluation import (
    AttentionMaps,
    EffectiveContext,
    EpsSweep,
    LengthCurve,
    LossCurve,
    NeedlePicture,
    PrunedShares,
    moving_mean,
)
from attnzoo.evaluation.losses import Array
from attnzoo.experiments.figures import CUT, DECAY_COLORS, GRID, INK, MUTED, PAIR_COLORS, quiet

COLOR = PAIR_COLORS[4]
LABELS = 64  # most tokens written on an axis


def loss(found: LossCurve) -> Figure:
    """A figure of L(i) and P(l) side by side, with the training context."""
    figure, (left, right) = _panels([(400, 260)] * 2)
    x = np.arange(1, len(found.loss) + 1)
    smooth = moving_mean(found.loss, 101)
    left.plot(x, smooth, color=COLOR, linewidth=1.6)
    right.plot(x, found.perplexity, color=COLOR, linewidth=1.6)
    for axes, values, name in ((left, smooth, "L(i), nats"), (right, found.perplexity, "P(l)")):
        settled = values[min(len(values) // 20, 100) :]  # the first tokens are hard for every model
        margin = 0.25 * (float(settled.max() - settled.min()) + 1e-3)
        axes.set_ylim(float(settled.min()) - margin, float(settled.max()) + margin)
        axes.set_xlim(0, len(x))
        _name(axes, name, "position, tokens" if axes is left else "context length, tokens")
        _mark(axes, found.context)
    return figure


def lengths(found: LengthCurve) -> Figure:
    """A figure of the share of wrong answers by length, with standard errors."""
    figure, (axes,) = _panels([(400, 260)])
    x = [row.length for row in found.answers]
    y = [100 * row.error for row in found.answers]
    spread = [0.0 if np.isnan(row.uncertainty) else 100 * row.uncertainty for row in found.answers]
    axes.errorbar(x, y, yerr=spread, color=COLOR, marker="o", markersize=5, linewidth=1.6)
    axes.set_xscale("log", base=2)
    _plain_ticks(axes, x)
    most = max(error + above for error, above in zip(y, spread, strict=True)) or 1.0
    axes.set_ylim(-0.04 * most, 1.08 * most)
    _name(axes, "wrong answers, %", "tokens in a row")
    _mark(axes, found.context)
    return figure


def haystack(found: Any) -> Figure:
    """A figure of the share of needles found (colour and number), depth downwards and length to the right."""
    pictures: Sequence[NeedlePicture] = found.pictures
    rows, columns = len(pictures[0].depths), len(pictures[0].lengths)
    figure, panels = _panels([(max(250, 60 + 44 * columns), 60 + 28 * rows)] * len(pictures), bottom=34, left=52)
    for axes, picture in zip(panels, pictures, strict=True):
        _shares(axes, picture.whole, 9)
        axes.set_xticks(range(columns), [f"{length:,}" for length in picture.lengths])
        axes.set_yticks(range(rows), [f"{100 * depth:.0f} %" for depth in picture.depths])
        _name(axes, f"{picture.mode}: numbers found, %", "tokens in a row; depth downwards")
        if picture.context in picture.lengths[:-1]:
            at = picture.lengths.index(picture.context) + 0.5
            axes.axvline(at, color=CUT, linewidth=1.4, dashes=(3, 2))  # the length of training rows
    return figure


def pruning(found: Any) -> Figure:
    """A figure of every head's pruned share by layer, and over training where there are several checkpoints."""
    now: PrunedShares = found.steps[-1]
    widest = max(len(heads) for heads in now.heads)
    sizes = [(max(170, 60 + 26 * widest), 60 + 22 * len(now.heads))]
    steps = found.steps if len(found.steps) > 1 else ()
    figure, panels = _panels([*sizes, (320, 220)] if steps else sizes, left=52)
    table = np.full((len(now.heads), widest), np.nan)
    for line, heads in zip(table, now.heads, strict=True):
        line[: len(heads)] = heads
    _shares(panels[0], table, 8)
    panels[0].set_yticks(range(len(now.heads)), [f"layer {number}" for number in now.layers])
    panels[0].set_xticks(range(widest))
    _name(panels[0], "blocks pruned, %", "head")
    if steps:
        x = [step.step for step in steps]
        panels[1].plot(x, [100 * step.share for step in steps], color=COLOR, marker="o", label="blocks pruned, %")
        local = [100 * step.local for step in steps]
        panels[1].plot(x, local, color=COLOR, marker="o", mfc="none", dashes=(4, 2), label="local heads, %")
        panels[1].set_ylim(0, 100)
        panels[1].set_xlabel("step", loc="left")
        panels[1].legend(frameon=False, fontsize=9, labelcolor=MUTED)
    return figure


def eps(found: EpsSweep) -> Figure:
    """A figure of the change of loss, the share of blocks and the time, by eps."""
    figure, panels = _panels([(260, 220)] * 3)
    rows = found.rows[1:]
    x = [row.eps or 0.0 for row in rows]
    whole = found.rows[0].seconds
    spread = [0.0 if np.isnan(row.error) else row.error for row in rows]
    panels[0].errorbar(x, [row.change for row in rows], yerr=spread, color=COLOR, marker="o", markersize=4)
    panels[1].plot(x, [100 * row.kept for row in rows], color=COLOR, marker="o", markersize=4)
    panels[2].plot(x, [100 * row.seconds / whole for row in rows], color=COLOR, marker="o", markersize=4)
    for axes, name in zip(panels, ("change of the loss, nats", "blocks kept, %", "time, %"), strict=True):
        axes.set_xscale("log")
        _name(axes, name, "eps")
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)
    return figure


def context(found: EffectiveContext) -> Figure:
    """A figure of each head's effective context by layer as a dot; hollow dots are the bounds by the gates."""
    figure, (axes,) = _panels([(max(400, 60 + 30 * len(found.layers)), 260)])
    for column, (heads, bounds) in enumerate(zip(found.heads, found.bounds, strict=True)):
        spread = column + np.linspace(-0.25, 0.25, len(heads))
        axes.plot(spread, heads, "o", color=COLOR, markersize=5)
        if bounds is not None:
            axes.plot(spread, bounds, "o", color=COLOR, markersize=5, mfc="none")
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.8, found.tokens * 1.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.set_xticks(range(len(found.layers)), [str(number) for number in found.layers])
    title = f"newest keys with {100 * (1 - found.eps):g} % of a row's weight"
    _name(axes, title, "layer; a dot per head, hollow: promised by its gate")
    return figure


def maps(found: AttentionMaps) -> Figure:
    """A figure with a line of panels per layer: each head's weights, and below them its forget gates."""
    T = len(found.tokens)
    lines = [(layer, matrices) for layer in found.layers for matrices in _matrices(layer)]
    widest = max(len(matrices[1]) for _, matrices in lines)
    side, left, top = max(120, 8 * T), 56, 66
    width, height = widest * (side + left) + 12, len(lines) * (side + top) + 12
    figure = Figure(figsize=(width / 72, height / 72))
    words = [_shown(word) for word in found.tokens]
    for row, (layer, (name, matrices)) in enumerate(lines):
        for head, matrix in enumerate(matrices):
            x, y = head * (side + left) + left, height - (row + 1) * (side + top)
            axes = figure.add_axes((x / width, y / height, side / width, side / height))
            quiet(axes)
            axes.grid(False)
            largest = max(float(np.abs(matrix).max()), 1e-9)
            signed = bool((matrix < 0).any())
            hidden = np.ma.masked_where(np.triu(np.ones((T, T), dtype=bool), 1), matrix)
            options: dict[str, Any] = {"cmap": "RdBu", "vmin": -largest, "vmax": largest}
            axes.imshow(hidden, interpolation="nearest", **(options if signed else {"cmap": DECAY_COLORS, "vmin": 0}))
            title = f"layer {layer.layer} ({layer.variant}), head {head}\n{name} up to {largest:.2f}"
            axes.set_title(title, loc="left", fontsize=8)
            axes.xaxis.tick_top()
            step = range(0, T, 1 if T <= LABELS else -(-T // LABELS))
            font: dict[str, Any] = {"fontsize": 5.5, "parse_math": False}
            axes.set_xticks(step, [words[t] for t in step], rotation=90, **font)
            axes.set_yticks(step, [words[t] for t in step], **font)
    return figure


def _matrices(layer: Any) -> list[tuple[str, Array]]:
    found = [("weights", layer.weights)]
    return found if layer.decay is None else [*found, ("forget gates", layer.decay)]


def _shown(word: str) -> str:
    """A token as an axis label, with visible signs for white space."""
    signs = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "": "\u2205"}
    text = "".join(signs.get(letter, letter if letter.isprintable() else "\u00b7") for letter in word) or signs[""]
    return text if len(text) <= 12 else f"{text[:11]}\u2026"


def _panels(sizes: Sequence[tuple[float, float]], left: float = 48, bottom: float = 38) -> tuple[Figure, list[Axes]]:
    """A figure with plain axes side by side, each of its width and height in points including labels."""
    width, height = sum(size[0] for size in sizes), max(size[1] for size in sizes)
    figure, x, panels = Figure(figsize=(width / 72, height / 72)), 0.0, []
    for wide, high in sizes:
        box = (x + left) / width, (bottom + height - high) / height, (wide - left - 12) / width
        axes = figure.add_axes((*box, (high - bottom - 24) / height))
        quiet(axes)
        panels.append(axes)
        x += wide
    return figure, panels


def _name(axes: Axes, title: str, xlabel: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel(xlabel, loc="left")


def _shares(axes: Axes, table: Array, fontsize: float) -> None:
    """Draw shares ``[rows, columns]`` as colours with numbers in per cent; nan stays empty."""
    axes.imshow(table, vmin=0, vmax=1, cmap=DECAY_COLORS, aspect="auto", interpolation="nearest")
    for (i, j), share in np.ndenumerate(table):
        if not np.isnan(share):
            color = "w" if share > 0.5 else INK
            axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=fontsize, color=color)
    axes.grid(False)


def _mark(axes: Axes, context: int | None) -> None:
    if context is not None:
        axes.axvline(context, color=MUTED, linewidth=0.8, dashes=(2, 2))
        axes.annotate(
            "training", (context, 1), (3, -9), xycoords=("data", "axes fraction"), textcoords="offset points",
            color=MUTED, fontsize=9,
        )  # fmt: skip


def _plain_ticks(axes: Axes, x: Sequence[int]) -> None:
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
