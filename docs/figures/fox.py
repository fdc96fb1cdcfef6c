"""Figures of a trained FoX: its forget gates, its attention, and what pruning leaves of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Theme, framed, quiet
from torch import Tensor
from trained import Array, Core

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.pruning import Bound, Prune, first_kept_keys, kept_fraction

BOUNDS: tuple[Bound, ...] = ("tail", "paper")
BLOCK = 16
FADED = -10.0  # natural log; also the log of the default eps


def _heads_first(core: Core) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled q, k ``[1, H, T, K]`` and log gates ``[1, H, T]``."""
    assert core.gate.log_decay is not None
    k = expand_heads(core.k[None], core.q.shape[1])
    return core.q[None].transpose(1, 2), k.transpose(1, 2), core.gate.log_decay.transpose(1, 2)


def log_decay(core: Core) -> Array:
    """d_tj, ``[H, T, T]``, nan above the diagonal."""
    c = _heads_first(core)[2][0].cumsum(-1)
    return _masked(c[:, :, None] - c[:, None, :])


def log_weights(core: Core) -> Array:
    """log p_tj, ``[H, T, T]``, nan above the diagonal."""
    q, k, g = _heads_first(core)
    c = g[0].cumsum(-1)
    logits = (q[0] @ k[0].mT + c[:, :, None] - c[:, None, :]).numpy()
    future = np.triu(np.ones(logits.shape[1:], dtype=bool), 1)
    return _masked(torch.from_numpy(np.where(future, -np.inf, logits)).log_softmax(-1))


def _masked(x: Tensor) -> Array:
    future = torch.ones(x.shape[1:], dtype=torch.bool).triu(1)
    return np.asarray(x.masked_fill(future, math.nan).numpy(), dtype=np.float64)


def boundaries(core: Core, bound: Bound, block: int = BLOCK) -> Tensor:
    """First kept key per head and row block, ``[1, H, blocks]``."""
    q, k, g = _heads_first(core)
    return first_kept_keys(q, k, g, Prune(bound=bound), rows=block, cols=block)


def kept(core: Core, bound: Bound, block: int = BLOCK) -> Array:
    """Share of causal blocks kept, ``[H]``."""
    share = kept_fraction(boundaries(core, bound, block), core.q.shape[0], rows=block, cols=block)
    return np.asarray(share.numpy(), dtype=np.float64)


def maps(layers: Sequence[Core], values: Sequence[Array], label: str, theme: Theme) -> Figure:
    """A matrix per head (columns) and layer (rows), with the boundary of each bound.

    Args:
        layers: the cores, for the boundaries.
        values: natural logs per layer, ``[H, T, T]``.
        label: of the colour bar.
        theme: colours.
    """
    heads = values[0].shape[0]
    figure = Figure(figsize=(5.6, 0.35 + 1.42 * len(layers)), layout="constrained")
    grid = figure.subplots(len(layers), heads, squeeze=False)
    for row, (core, matrices) in enumerate(zip(layers, values, strict=True)):
        share = kept(core, "tail")
        for head, matrix in enumerate(matrices):
            axes = grid[row, head]
            framed(axes, theme)
            image = axes.imshow(
                matrix.clip(FADED, 0), extent=(0, len(matrix), len(matrix), 0), vmin=FADED, vmax=0, cmap=theme.heat,
                interpolation="nearest",
            )  # fmt: skip
            for bound in BOUNDS:
                _staircase(axes, np.asarray(boundaries(core, bound)[0, head]), len(matrix), bound, theme)
            axes.set_title(f"layer {core.layer + 1}, head {head + 1}: {share[head]:.0%}", fontsize=7.5, pad=3)
    grid[-1, 0].set_xlabel("key →", fontsize=7.5, labelpad=2)
    grid[-1, 0].set_ylabel("← query", fontsize=7.5, labelpad=2)
    bar = figure.colorbar(image, ax=grid, fraction=0.03, pad=0.01, aspect=30)
    bar.set_label(label, fontsize=8, color=theme.muted)
    bar.set_ticks([0, -5, -10], labels=["1", "$e^{-5}$", "$\\leq e^{-10}$"])
    bar.ax.tick_params(colors=theme.muted, labelsize=7.5, length=0)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


def _staircase(axes: Axes, first: Array, length: int, bound: str, theme: Theme) -> None:
    """Everything to the left of the line is pruned."""
    y = np.minimum(np.repeat(np.arange(first.size + 1) * BLOCK, 2)[1:-1], length)
    solid = bound == "tail"
    axes.plot(
        np.repeat(first, 2), y, color=theme.cut, linewidth=1.5 if solid else 0.9, dashes=(1, 0) if solid else (3, 2)
    )
    axes.set_xlim(0, length)
    axes.set_ylim(length, 0)


def kept_per_head(layers: Sequence[Core], theme: Theme) -> Figure:
    """A bar per head and bound, sorted from the most local head to the most global one."""
    shares = {bound: np.concatenate([kept(core, bound) for core in layers]) for bound in BOUNDS}
    names = [f"{core.layer + 1}.{head + 1}" for core in layers for head in range(core.q.shape[1])]
    order = np.argsort(shares["tail"])
    figure = Figure(figsize=(5.6, 2.3), layout="constrained")
    axes = figure.subplots()
    quiet(axes, theme)
    at = np.arange(len(order))
    color = theme.pairs[2]
    axes.bar(at - 0.19, shares["tail"][order], 0.36, color=color, edgecolor=color, label="tail certificate")
    axes.bar(at + 0.19, shares["paper"][order], 0.36, color="none", edgecolor=color, label="the paper's threshold")
    for x, share in zip(at, shares["tail"][order], strict=True):
        axes.annotate(f"{share:.0%}", (x - 0.19, share), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(at, [names[i] for i in order])
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("layer.head, from the most local to the most global", fontsize=8)
    axes.set_ylabel("causal blocks computed", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def kept_over_length(lengths: Sequence[int], shares: Sequence[dict[Bound, Array]], theme: Theme) -> Figure:
    """Share of blocks computed against context length: the mean of all heads bold, each head thin.

    Args:
        lengths: tokens.
        shares: per length and bound, ``[heads of all layers]``.
        theme: colours.
    """
    figure = Figure(figsize=(5.6, 2.9), layout="constrained")
    axes = figure.subplots()
    quiet(axes, theme)
    colors = {"tail": theme.pairs[2], "paper": theme.muted}
    names = {"tail": "tail certificate", "paper": "the paper's threshold"}
    for bound in BOUNDS:
        heads = np.stack([share[bound] for share in shares])
        if bound == "tail":
            axes.plot(lengths, heads, color=colors[bound], linewidth=0.7, alpha=0.45)
        axes.plot(
            lengths, heads.mean(1), color=colors[bound], linewidth=2.2, marker="o", markersize=3.5,
            dashes=(1, 0) if bound == "tail" else (4, 2), label=f"{names[bound]}, mean of the heads",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1], ["1%", "3%", "10%", "30%", "100%"])
    axes.minorticks_off()
    axes.set_xlabel("context length in tokens (one thin line per head)", fontsize=8)
    axes.set_ylabel("causal blocks computed", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    return figure
