"""The picture of the README: one gate per token, and the two readings of it."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import WIDE, Theme, panel, write

WORDS = ("x", "=", "1", "\u21b5", "y", "=", "2")
GATES = np.array([0.9, 0.9, 0.95, 0.05, 0.9, 0.95, 0.95])
SCORES = np.array([1.5, 0.3, 1.1, 0.4, 0.9, 0.2, 0.8])


def weights() -> tuple[np.ndarray, np.ndarray]:
    """What the last token reads of each: score times what is left of it, and the softmax of score and distance."""
    distance = np.log(GATES)[::-1].cumsum()[::-1]
    d = np.append(distance[1:], 0.0)
    softmax = np.exp(SCORES + d)
    return SCORES * np.exp(d), softmax / softmax.sum()


def two_readings(theme: Theme) -> Figure:
    """Seven tokens with their gates above; below, the weights of the last row on the linear and on the softmax side."""
    figure = Figure(figsize=(WIDE, 3.15))
    linear, softmax = weights()
    top = panel(figure, (0.02, 0.58, 0.96, 0.4), (-0.75, 6.75), (-0.42, 1.5))
    for place, (word, gate) in enumerate(zip(WORDS, GATES, strict=True)):
        closed = gate < 0.5
        color = theme.pairs[2] if closed else theme.pairs[4]
        top.add_patch(Rectangle((place - 0.13, 0), 0.26, 1, facecolor="none", edgecolor=theme.grid, linewidth=1))
        top.add_patch(Rectangle((place - 0.13, 0), 0.26, gate, color=color))
        top.annotate(word, (place, -0.26), ha="center", va="center", fontsize=10, color=theme.ink, family="monospace")
        write(top, f"{gate:g}", (place, 1.14), color, size=8.5)
    write(top, "one forget gate per token: how much of everything before it is kept", (3, 1.42), theme.ink, size=9)
    for left, title, formula, values in (
        (0.02, "recurrence: what is left in a memory", "score $\\times$ product of gates", linear / linear.max()),
        (0.52, "softmax: how far away a key is", "softmax(score $+$ sum of log gates)", softmax / softmax.max()),
    ):
        axes = panel(figure, (left, 0.0, 0.46, 0.54), (-0.6, 6.6), (-0.62, 1.5))
        _bars(axes, values, theme)
        write(axes, title, (3, 1.4), theme.ink, size=8.8)
        write(axes, formula, (3, -0.5), theme.muted, size=8.5)
    return figure


def _bars(axes: Axes, values: np.ndarray, theme: Theme) -> None:
    for place, (word, value) in enumerate(zip(WORDS, values, strict=True)):
        axes.add_patch(Rectangle((place - 0.36, 0), 0.72, max(float(value), 0.012), color=theme.pairs[4]))
        axes.annotate(word, (place, -0.17), ha="center", va="center", fontsize=9, color=theme.ink, family="monospace")
    axes.plot([2.5, 2.5], [-0.05, 1.15], color=theme.pairs[2], linewidth=1, dashes=(3, 2))


DRAWINGS = {"two-readings": two_readings}
