"""Figures that compare the variants: loss per token index, decay profiles, and PaTH's products."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Theme, framed, quiet
from trained import HERE, Array, Core

from attnzoo import pairs
from attnzoo.algebra.gate import expand_heads
from attnzoo.evaluation import moving_mean

SIDES = ("softmax", "linear")


def recorded() -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Facts of the runs, and their arrays by ``key.token_loss`` ``[L]`` and ``key.profile`` ``[heads, distances]``."""
    facts = json.loads((HERE / "data" / "zoo.json").read_text(encoding="utf-8"))
    with np.load(HERE / "data" / "zoo.npz") as archive:
        return facts, {name: archive[name].astype(np.float64) for name in archive.files}


def token_loss(theme: Theme) -> Figure:
    """L(i) of every variant, smoothed over 48 indices, a panel per side with one y axis."""
    facts, arrays = recorded()
    figure = Figure(figsize=(5.6, 6.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, side in zip(panels, SIDES, strict=True):
        quiet(axes, theme)
        ends = []
        for fact in facts:
            if fact["side"] != side:
                continue
            loss = moving_mean(arrays[f"{fact['key']}.token_loss"], 48)
            at = np.arange(1, loss.size + 1)
            keep = slice(24, loss.size - 24, 6)
            color = theme.pairs[fact["pair"] - 1]
            axes.plot(at[keep], loss[keep], color=color, linewidth=1.5)
            ends.append((loss[keep][-1], fact["variant"], color))
        context = facts[0]["context"]
        axes.axvline(context, color=theme.muted, linewidth=0.8, dashes=(2, 2))
        axes.annotate("trained to here", (context, 1), (3, -8), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=7.5, color=theme.muted)  # fmt: skip
        axes.set_ylabel(f"loss, {side} side (nats)", fontsize=8)
        axes.set_ylim(1.55, 3.05)
        _name_ends(axes, ends, at[keep][-1])
    panels[-1].set_xlabel("token index i", fontsize=8)
    return figure


def _name_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], x: float) -> None:
    """Write the names right of the curves, pushed apart."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.066
    ends = sorted(ends)
    places = [min(value, high) for value, _, _ in ends]
    for _ in range(200):
        for i in range(len(places) - 1):
            short = max(0.0, gap - (places[i + 1] - places[i])) / 2
            places[i], places[i + 1] = places[i] - short, places[i + 1] + short
    for y, (_, name, color) in zip(places, ends, strict=True):
        axes.annotate(name, (x, y), (5, 0), textcoords="offset points", fontsize=8, color=color, va="center",
                      annotation_clip=False)  # fmt: skip


def decay_profiles(theme: Theme) -> Figure:
    """What is left of a key after n tokens: a row per pair, a column per side, a line per head."""
    facts, arrays = recorded()
    by_name = {fact["variant"]: fact for fact in facts}
    shown = [pair for pair in pairs() if pair.linear in by_name and pair.softmax in by_name]
    figure = Figure(figsize=(5.6, 8.6), layout="constrained")
    grid = figure.subplots(len(shown), 2, sharex=True, sharey=True)
    for row, pair in enumerate(shown):
        for axes, name in zip(grid[row], (pair.linear, pair.softmax), strict=True):
            quiet(axes, theme)
            profile = arrays[f"{by_name[name]['key']}.profile"]
            axes.plot(np.arange(profile.shape[1]), profile.T, color=theme.pairs[row], linewidth=1.0, alpha=0.75)
            axes.set_title(name, fontsize=8.5, loc="left", pad=2, color=theme.pairs[row])
            axes.set_ylim(-0.25, 1.08)
            axes.set_yticks([0, 1])
            axes.set_xscale("symlog", linthresh=4, linscale=0.6)
            axes.set_xticks([0, 1, 4, 16, 64, 255], ["0", "1", "4", "16", "64", "255"])
            axes.minorticks_off()
            axes.set_xlim(0, profile.shape[1] - 1)
    for axes in grid[-1]:
        axes.set_xlabel("tokens between key and query", fontsize=8)
    return figure


def products(core: Core, distances: Sequence[int], count: int) -> tuple[Array, Array]:
    """PaTH's accumulated products of one head, the last token being the query.

    Args:
        core: of a PaTH layer.
        distances: tokens between key and query at which the matrix is wanted.
        count: distances at which the singular values are wanted, from 0.

    Returns:
        ``[distances, H, K, K]`` and the singular values ``[count, H, K]``, largest first.
    """
    H, K = core.q.shape[1:]
    _, R = core.gate.dense(torch.zeros(1, core.q.shape[0], H, K, dtype=torch.float64))
    R = expand_heads(R, H)[0]
    product = torch.eye(K, dtype=torch.float64).expand(H, K, K)
    wanted, values = [], []
    for n in range(count):
        if n in distances:
            wanted.append(product)
        values.append(torch.linalg.svdvals(product))
        product = R[core.q.shape[0] - 1 - n] @ product
    matrices = torch.stack(wanted) if wanted else torch.empty(0, H, K, K)
    return np.asarray(matrices.numpy(), dtype=np.float64), np.asarray(torch.stack(values).numpy(), dtype=np.float64)


def extremes(layers: Sequence[Core]) -> list[tuple[int, int]]:
    """(layer, head) of the head whose product loses most over 64 tokens, and of the one that loses least."""
    left = {}
    for layer, core in enumerate(layers):
        _, values = products(core, (), 65)
        left |= {(layer, head): float(value) for head, value in enumerate(values[64].mean(-1))}
    ordered = sorted(left, key=lambda key: left[key])
    return [ordered[0], ordered[-1]]


def path_products(layers: Sequence[Core], heads: Sequence[tuple[int, int]], theme: Theme) -> Figure:
    """Two heads of a trained PaTH: the product of transitions at five distances, and its singular values.

    Args:
        layers: the cores.
        heads: (layer, head) of each row.
        theme: colours.
    """
    distances, count = (1, 4, 16, 64), 129
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    grid = figure.subplots(len(heads), len(distances) + 1, width_ratios=[*[1] * len(distances), 1.5])
    for row, (layer, head) in enumerate(heads):
        matrices, values = products(layers[layer], distances, count)
        for axes, n, matrix in zip(grid[row], distances, matrices[:, head], strict=False):
            framed(axes, theme)
            image = axes.imshow(matrix, vmin=-1, vmax=1, cmap=theme.signed, interpolation="nearest")
            axes.set_title(f"$t - j = {n}$", fontsize=8, pad=3)
        grid[row, 0].set_ylabel(f"layer {layer + 1}, head {head + 1}", fontsize=8)
        axes = grid[row, -1]
        quiet(axes, theme)
        axes.plot(np.arange(count), values[:, head], color=theme.pairs[5], linewidth=0.8, alpha=0.8)
        axes.set_xscale("symlog", linthresh=4, linscale=0.6)
        axes.set_xticks([0, 4, 16, 64], ["0", "4", "16", "64"])
        axes.minorticks_off()
        axes.set_ylim(-0.03, 1.05)
        axes.set_yticks([0, 0.5, 1])
        axes.set_title("singular values", fontsize=8, pad=3)
    grid[-1, -1].set_xlabel("$t - j$", fontsize=8)
    bar = figure.colorbar(image, ax=grid[:, :-1], location="bottom", fraction=0.04, pad=0.02, aspect=40)
    bar.set_ticks([-1, 0, 1])
    bar.ax.tick_params(colors=theme.muted, labelsize=7.5, length=0)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure
