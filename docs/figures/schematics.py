"""Schematics: one thought of a page each, drawn from a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Rectangle
from style import WIDE, Theme, arrow, panel, write


def line(theme: Theme) -> Figure:
    """Three tokens at the places that their gates 1/2 and 1/4 give them."""
    figure = Figure(figsize=(WIDE, 1.7))
    axes = panel(figure, (0, 0, 1, 1), (-0.25, 2.4), (-0.55, 1.0))
    places = [0.0, -math.log(1 / 2), -math.log(1 / 8)]
    axes.plot([-0.2, 2.35], [0, 0], color=theme.grid, linewidth=2, zorder=0)
    steps = zip(places, places[1:], ("$f_2 = 1/2$", "$f_3 = 1/4$"), strict=False)
    for start, end, gate in steps:
        arrow(axes, (start + 0.03, 0.08), (end - 0.03, 0.08), theme.pairs[4], bend=-0.35)
        write(axes, gate, ((start + end) / 2, 0.12), theme.pairs[4])
    arrow(axes, (0.0, 0.2), (places[2], 0.2), theme.pairs[2], bend=-0.28)
    write(axes, "what is left: $e^{-2.079} = 1/8$", (places[2] / 2, 0.86), theme.pairs[2])
    for number, place in enumerate(places, 1):
        axes.plot([place], [0], "o", color=theme.ink, markersize=8)
        write(axes, f"token {number}", (place, -0.22), theme.ink)
        write(axes, f"{place:.3f}" if place else "0", (place, -0.43), theme.muted, size=8.5)
    return figure


def inside_outside(theme: Theme) -> Figure:
    """Softmax weights of three keys: without a gate, with it outside, with it inside, and with a closed one inside."""
    scores, left = np.array([2.0, 1.0, 1.0]), np.array([1 / 8, 1 / 4, 1.0])
    groups = (
        ("no gate", scores),
        ("outside\n$s + d$", scores + np.log(left)),
        ("inside\n$e^{d} s$", scores * left),
        ("inside,\nclosed", scores * [0, 0, 1]),
    )
    figure = Figure(figsize=(WIDE, 2.3))
    axes = panel(figure, (0, 0, 1, 1), (-0.3, 15.4), (-0.26, 0.78))
    for group, (name, logits) in enumerate(groups):
        weights = np.exp(logits) / np.exp(logits).sum()
        for key, weight in enumerate(weights):
            x = 4 * group + key
            color = theme.pairs[4] if key < 2 else theme.muted
            axes.add_patch(Rectangle((x, 0), 0.86, float(weight), color=color))
            write(axes, f"{weight:.2f}", (x + 0.43, float(weight) + 0.04), theme.ink, size=8)
        write(axes, name, (4 * group + 1.43, -0.16), theme.ink, size=9)
    for x in range(4):
        for key in range(3):
            write(axes, str(key + 1), (4 * x + key + 0.43, -0.04), theme.muted, size=7.5)
    return figure


def reflect(theme: Theme) -> Figure:
    """The key (1, 0) without its part along w = (0.6, 0.8), and mirrored."""
    figure = Figure(figsize=(WIDE * 0.62, 3.0))
    axes = panel(figure, (0, 0, 1, 1), (-0.75, 1.55), (-1.15, 0.98), equal=True)
    axes.plot([-0.68, 0.92], [0.51, -0.69], color=theme.grid, linewidth=2, zorder=0)
    write(axes, "across $w$", (-0.42, 0.52), theme.muted, size=8.5)
    arrow(axes, (0, 0), (0.6, 0.8), theme.muted)
    write(axes, "$w$", (0.7, 0.86), theme.muted)
    axes.plot([1, 0.28], [0, -0.96], color=theme.pairs[2], linewidth=1, dashes=(3, 3))
    for end, name, place, color in (
        ((1.0, 0.0), "$k$, $\\beta = 0$", (1.06, 0.02), theme.ink),
        ((0.64, -0.48), "erased, $\\beta = 1$", (0.72, -0.46), theme.pairs[5]),
        ((0.28, -0.96), "mirrored, $\\beta = 2$", (0.36, -1.0), theme.pairs[2]),
    ):
        arrow(axes, (0, 0), end, color, width=2)
        write(axes, name, place, color, ha="left")
    return figure


def turn(theme: Theme) -> Figure:
    """Key and query turned each by its own phase; the angle between them is what counts."""
    figure = Figure(figsize=(WIDE, 2.35))
    for number, (title, start) in enumerate((("key at token 2, query at 5", 2), ("key at 6, query at 9", 6))):
        axes = panel(figure, (0.5 * number, 0, 0.5, 1), (-1.3, 1.3), (-1.28, 1.42), equal=True)
        axes.add_patch(Arc((0, 0), 2, 2, color=theme.grid, linewidth=1.5))
        speed = 0.42
        key, query = speed * start + 0.1, speed * (start + 3) + 0.1
        for angle, name, color in ((key, "key", theme.pairs[4]), (query, "query", theme.pairs[2])):
            end = (math.cos(angle), math.sin(angle))
            arrow(axes, (0, 0), end, color, width=2)
            write(axes, name, (1.2 * end[0], 1.14 * end[1]), color)
        ends = {"theta1": math.degrees(key), "theta2": math.degrees(query)}
        axes.add_patch(Arc((0, 0), 0.8, 0.8, color=theme.ink, linewidth=1.5, **ends))
        middle = (key + query) / 2
        write(axes, "$3\\theta$", (0.56 * math.cos(middle), 0.56 * math.sin(middle)), theme.ink)
        write(axes, title, (0, 1.36), theme.ink, size=9)
    return figure


def clocks(theme: Theme) -> Figure:
    """The same tokens by ALiBi's clock and by one that the tokens drive."""
    words = ("def", "f", "(", "x", ")", ":", "\u21b5", "return", "x")
    ticks = np.array([0.0, 0.06, 0.03, 0.08, 0.04, 0.03, 1.2, 0.3, 0.08])
    even = np.linspace(0.0, 1.0, len(words))
    own = ticks.cumsum() / ticks.sum()
    figure = Figure(figsize=(WIDE, 1.9))
    axes = panel(figure, (0, 0, 1, 1), (-0.04, 1.06), (-0.45, 1.75))
    for y, places in ((1.0, even), (0.0, own)):
        axes.plot([0, 1.03], [y, y], color=theme.grid, linewidth=2, zorder=0)
        axes.plot(places, np.full(len(words), y), "o", color=theme.ink, markersize=5)
    for a, b, word in zip(even, own, words, strict=True):
        axes.plot([a, b], [0.9, 0.1], color=theme.pairs[4], linewidth=0.8, alpha=0.7)
        axes.annotate(word, (a, 1.2), ha="center", va="center", fontsize=8, color=theme.ink, family="monospace")
    write(axes, "ALiBi: every token is a step of $m$", (0.0, 1.58), theme.ink, ha="left", size=9)
    write(axes, "FoX: tokens say their steps", (0.0, -0.3), theme.ink, ha="left", size=9)
    write(axes, "a line break: a long way", (own[6] - 0.04, -0.3), theme.pairs[2], size=9)
    return figure


def posterior(theme: Theme) -> Figure:
    """Prior by the gate, evidence by the scores, and the attention weights that they make."""
    age = np.arange(14)[::-1]
    prior = np.exp(-0.3 * age)
    scores = np.array([0.2, 0.0, 2.6, 0.1, 0.3, 0.0, 0.4, 0.2, 0.1, 1.1, 0.0, 0.2, 0.6, 0.1])
    rows = (
        ("prior (gate)", prior / prior.sum(), theme.pairs[4]),
        ("evidence ($e^{s}$)", np.exp(scores), theme.muted),
        ("attention weights", prior * np.exp(scores), theme.pairs[2]),
    )
    figure = Figure(figsize=(WIDE, 1.8))
    for number, (name, values, color) in enumerate(rows):
        axes = panel(figure, (0.01 + 0.335 * number, 0.0, 0.31, 1.0), (-0.6, 13.6), (-0.22, 1.22))
        axes.bar(age[::-1], values / values.max(), width=0.78, color=color)
        axes.axvline(5.5, ymin=0.15, ymax=0.82, color=theme.ink, linewidth=0.8, dashes=(2, 2))
        write(axes, name, (6.5, 1.12), theme.ink, size=8.5)
        write(axes, "old", (2.5, -0.13), theme.muted, size=8)
        write(axes, "recent", (9.8, -0.13), theme.muted, size=8)
    return figure


def readouts(theme: Theme) -> Figure:
    """Six scores, and the softmax weights that they become."""
    scores = np.array([0.6, -0.4, 1.4, -0.9, 0.3, -0.2])
    weights = np.exp(scores) / np.exp(scores).sum()
    figure = Figure(figsize=(WIDE, 1.9))
    for number, (name, values) in enumerate((("scores $s$: linear", scores), ("weights: softmax", weights))):
        axes = panel(figure, (0.5 * number, 0, 0.5, 1), (-0.8, 5.8), (-1.5, 2.2))
        axes.axhline(0, color=theme.grid, linewidth=1.5, zorder=0)
        tall = 1.0 if number == 0 else 3.0
        colors = [theme.pairs[4] if value > 0 else theme.pairs[2] for value in values]
        axes.bar(range(6), tall * values, width=0.72, color=colors)
        for key, value in enumerate(values):
            above = 0.22 if value > 0 else -0.24
            write(
                axes, f"{value:.1f}" if number == 0 else f"{value:.2f}", (key, tall * value + above), theme.ink, size=8
            )
        write(axes, name, (2.5, 2.0), theme.ink, size=9)
    return figure


def slopes(theme: Theme) -> Figure:
    """Three heads' straight lines, and their exponentials."""
    away = np.arange(0, 33)
    figure = Figure(figsize=(WIDE, 2.0))
    panels = (
        ("added to the logit (ALiBi)", lambda m: -m * away / 6),
        ("what is left (RetNet)", lambda m: np.exp(-m * away)),
    )
    for number, (name, of) in enumerate(panels):
        axes = panel(figure, (0.5 * number, 0, 0.5, 1), (-3.5, 41), (-1.28, 0.4) if number == 0 else (-0.22, 1.24))
        low, high = (-1.1, 0.0) if number == 0 else (0.0, 1.0)
        axes.plot([0, 33], [high, high] if number == 0 else [low, low], color=theme.grid, linewidth=1.5, zorder=0)
        for m, color in ((1 / 2, theme.pairs[2]), (1 / 8, theme.pairs[4]), (1 / 32, theme.muted)):
            values = of(m)
            seen = values >= low
            axes.plot(away[seen], values[seen], color=color, linewidth=1.8)
            end = int(np.nonzero(seen)[0][-1])
            label = f"$m = 1/{round(1 / m)}$"
            place = (float(away[end]) + 0.6, float(values[end]) + (0.0 if number == 0 else 0.05))
            write(axes, label, place if m < 1 / 2 or number == 0 else (5.4, 0.12), color, size=8.5, ha="left")
        write(axes, name, (16, 0.28 if number == 0 else 1.16), theme.ink, size=9)
        write(axes, "tokens between", (16, -1.22 if number == 0 else -0.14), theme.muted, size=8)
    return figure


def both_gates(theme: Theme) -> Figure:
    """What one token does to a cached key: it takes the part along w, and puts every key a step further away."""
    figure = Figure(figsize=(WIDE, 2.3))
    axes = panel(figure, (0, 0, 0.4, 1), (-0.45, 1.25), (-0.75, 1.2), equal=True)
    axes.plot([-0.4, 0.92], [0.3, -0.69], color=theme.grid, linewidth=2, zorder=0)
    arrow(axes, (0, 0), (0.6, 0.8), theme.muted)
    write(axes, "$w_t$", (0.7, 0.88), theme.muted)
    arrow(axes, (0, 0), (1, 0), theme.muted, width=2)
    arrow(axes, (0, 0), (0.64, -0.48), theme.pairs[5], width=2)
    arrow(axes, (1, 0), (0.67, -0.44), theme.pairs[2], width=1)
    write(axes, "inside: $R_t$", (0.4, 1.12), theme.ink, size=9)
    axes = panel(figure, (0.4, 0, 0.6, 1), (-0.35, 3.6), (-0.75, 1.2))
    places = np.array([0.0, 0.55, 0.8, 1.5])
    for y, shift, words in ((0.55, 0.0, "before token $t$"), (-0.25, 1.1, "after it")):
        axes.plot([0, 3.4], [y, y], color=theme.grid, linewidth=2, zorder=0)
        axes.plot(3.2 - places[::-1] - shift, np.full(4, y), "o", color=theme.pairs[4], markersize=6)
        if shift:
            axes.plot([3.2], [y], "o", color=theme.ink, markersize=6)
        write(axes, words, (0.0, y - 0.24), theme.muted, size=8.5, ha="left")
    arrow(axes, (3.2, 0.1), (2.1, 0.1), theme.pairs[2], width=1)
    write(axes, "$-g_t$", (2.65, 0.22), theme.pairs[2], size=9)
    write(axes, "outside: $f_t = e^{g_t}$", (1.7, 1.12), theme.ink, size=9)
    return figure


def degrees(theme: Theme) -> Figure:
    """The features of the exponential by degree, and what a gate outside and a matrix inside do to each."""
    figure = Figure(figsize=(WIDE, 1.9))
    axes = panel(figure, (0, 0, 1, 1), (-3.0, 13.4), (-2.1, 3.3))
    x = 0.0
    for degree, wide in enumerate((0.9, 1.6, 2.6, 4.0)):
        axes.add_patch(Rectangle((x, 0), wide, 1.5, facecolor=theme.pairs[4], alpha=0.35 + 0.15 * degree, linewidth=0))
        write(axes, ("$1$", "$k$", "$k^{\\otimes 2}$", "$k^{\\otimes 3}$")[degree], (x + wide / 2, 0.75), theme.ink)
        write(axes, "$e^{g}$", (x + wide / 2, 2.0), theme.pairs[2])
        inside = ("$1$", "$R$", "$R^{\\otimes 2}$", "$R^{\\otimes 3}$")[degree]
        write(axes, inside, (x + wide / 2, -0.55), theme.pairs[5])
        if degree == 1:
            frame = Rectangle((x - 0.16, -1.0), wide + 0.32, 3.5, facecolor="none", edgecolor=theme.ink, linewidth=1.3)
            axes.add_patch(frame)
            write(axes, "the linear side", (x + wide / 2, 2.95), theme.ink, size=9)
        x += wide + 0.5
    write(axes, "$\\cdots$", (x + 0.4, 0.75), theme.ink)
    for y, words, color in (
        (2.0, "outside", theme.pairs[2]),
        (0.75, "features", theme.ink),
        (-0.55, "inside", theme.pairs[5]),
    ):
        write(axes, words, (-0.5, y), color, size=9, ha="right")
    write(axes, "degree 0: no matrix can close it", (-2.9, -1.7), theme.muted, size=8.5, ha="left")
    return figure


def disc(theme: Theme) -> Figure:
    """Where the eigenvalues of each gate lie in the unit disc."""
    figure = Figure(figsize=(WIDE * 0.66, 2.6))
    axes = panel(figure, (0, 0, 1, 1), (-1.45, 2.15), (-1.4, 1.4), equal=True)
    axes.add_patch(Arc((0, 0), 2, 2, color=theme.pairs[4], linewidth=2.5))
    axes.plot([-1.3, 1.3], [0, 0], color=theme.grid, linewidth=1, zorder=0)
    axes.plot([0, 0], [-1.3, 1.3], color=theme.grid, linewidth=1, zorder=0)
    axes.plot([-1, 1], [-0.05, -0.05], color=theme.pairs[5], linewidth=3)
    axes.plot([0, 1], [0.05, 0.05], color=theme.pairs[2], linewidth=3)
    for x in (-1, 0, 1):
        write(axes, f"${x}$", (x + (0.14 if x == 0 else 0.18 * x), -0.2), theme.muted, size=8.5)
    write(axes, "decays", (0.5, 0.22), theme.pairs[2], size=8.5)
    write(axes, "$1 - \\beta$", (-0.5, -0.25), theme.pairs[5], size=9)
    write(axes, "rotation", (0.98, 0.92), theme.pairs[4], size=8.5, ha="left")
    return figure


def row_of_weights(theme: Theme) -> Figure:
    """One row of attention weights at equal scores; the gates of tokens 2 to 7 are 1, 1/2, 1, 1/4, 1/2 and 1."""
    weights = np.array([1, 1, 2, 2, 8, 16, 16])
    figure = Figure(figsize=(WIDE, 1.9))
    axes = panel(figure, (0, 0, 1, 1), (-0.5, 6.5), (-3.6, 18.6))
    axes.bar(range(7), weights, width=0.7, color=theme.pairs[2])
    for key, weight in enumerate(weights):
        write(axes, f"{weight}/{weights.sum()}", (key, weight + 1.3), theme.ink, size=9)
        write(axes, f"token {key + 1}", (key, -1.3), theme.muted, size=8.5)
    write(axes, "the query", (6, -2.8), theme.muted, size=8)
    return figure


def expands(theme: Theme) -> Figure:
    """The unit circle after I - 0.7 w w^T, which nowhere leaves it, and after I - u w^T, which does."""
    angle = np.linspace(0, 2 * math.pi, 181)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    u, w = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    figure = Figure(figsize=(WIDE, 2.6))
    for number, (name, matrix, color) in enumerate(
        (
            ("one vector: nothing gets longer", np.eye(2) - 0.7 * np.outer(w, w), theme.pairs[4]),
            ("two: some get longer", np.eye(2) - np.outer(u, w), theme.pairs[2]),
        )
    ):
        axes = panel(figure, (0.5 * number, 0, 0.5, 1), (-1.9, 1.7), (-1.15, 1.55), equal=True)
        axes.plot(*circle, color=theme.grid, linewidth=2)
        axes.plot(*(matrix @ circle), color=color, linewidth=2)
        write(axes, name, (0, 1.4), theme.ink, size=9)
        arrow(axes, (0, 0), (0, 1), theme.muted)
        write(axes, "$w$", (0.17, 0.8), theme.muted)
        if number:
            arrow(axes, (0, 0), (1, 0), theme.muted)
            write(axes, "$u$", (0.66, -0.18), theme.muted)
            directions, sizes, _ = np.linalg.svd(matrix)
            x, y = sizes[0] * directions[:, 0] * np.sign(directions[1, 0])
            arrow(axes, (0, 0), (float(x), float(y)), color, width=2)
            write(axes, "1.618", (float(x) - 0.1, float(y) + 0.14), color, size=8.5, ha="right")
    return figure


DRAWINGS: dict[str, Callable[[Theme], Figure]] = {
    "line": line,
    "inside-outside": inside_outside,
    "reflect": reflect,
    "turn": turn,
    "clocks": clocks,
    "posterior": posterior,
    "readouts": readouts,
    "slopes": slopes,
    "both-gates": both_gates,
    "degrees": degrees,
    "disc": disc,
    "row-of-weights": row_of_weights,
    "expands": expands,
}
