"""What is still found while a head may hold only so many keys; the numbers are in data/memory.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from style import WIDE, Theme

DATA = Path(__file__).parent / "data" / "memory.json"
NAMES = {  # by rule: in words, the pair whose colour it has, and whether it is dashed
    "window": ("window", 0, False), "sinks": ("sinks + window", 1, False), "h2o": ("H2O", 3, False),
    "snapkv": ("SnapKV", 5, False), "utility": ("what later rows need", 4, True),
    "retention": ("forget network", 2, False),
}  # fmt: skip


def equal_memory(theme: Theme) -> Figure:
    """Wrong answers against keys held, a line per rule: the mean over seeds in their range."""
    data = json.loads(DATA.read_text())
    keys = np.array(data["keys"])
    figure = Figure(figsize=(WIDE, 3.0))
    axes = figure.subplots()
    for rule, (name, pair, dashed) in NAMES.items():
        wrong = 100 * np.array(data["wrong"][rule])
        color = theme.pairs[pair]
        axes.fill_between(keys, wrong.min(0), wrong.max(0), color=color, alpha=0.15, linewidth=0)
        axes.plot(keys, wrong.mean(0), color=color, linewidth=1.6, label=name, linestyle="--" if dashed else "-")
    axes.set_xscale("log", base=2)
    axes.set_xticks(keys, [str(key) for key in keys])
    axes.minorticks_off()
    axes.set_xlabel("keys that a head may hold, of 64", loc="left")
    axes.set_title("wrong answers, per cent", loc="left", fontsize=9)
    axes.tick_params(colors=theme.muted, length=0)
    axes.grid(axis="y", color=theme.grid, linewidth=0.6)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_ylim(-2, 100)
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.2), "ncol": 3, "columnspacing": 1.2}
    axes.legend(frameon=False, fontsize=8, labelcolor=theme.ink, **below)
    return figure
