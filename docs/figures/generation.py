"""Times over the context: of a step of generation and of FoX's kernels, from recorded runs of ``attnzoo bench``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import WIDE, Theme

Names = dict[str, tuple[str, int, bool]]
RESULTS = Path(__file__).parents[1] / "benchmarks/results"
NAMES: Names = {  # of the run: in words, the pair whose colour it has, and whether it is dashed
    "Llama, static cache, compiled": ("Llama", 4, False),
    "FoX (Pro) + ACP, fused": ("FoX", 2, False),
    "FoX (Pro) + ACP, evicting, fused": ("FoX, evicting", 2, True),
    "PaTH-FoX (Pro) + ACP, fused": ("PaTH-FoX", 5, False),
    "PaTH-FoX (Pro) + ACP, evicting, fused": ("PaTH-FoX, evicting", 5, True),
    "Mamba-2": ("Mamba-2", 1, False),
    "Gated DeltaNet": ("Gated DeltaNet", 6, False),
}
KERNELS: Names = {  # of FoX, likewise
    "FLA": ("FLA", 5, False),
    "official": ("its authors'", 4, False),
    "official, pruned": ("its authors', with ACP", 4, True),
    "SDPA cuDNN (no gate)": ("cuDNN, no gate", 0, False),
    "ours": ("ours", 2, False),
    "ours, pruned (tail)": ("ours, with ACP", 2, True),
}
SHOWN = (("ms", "ms per step", 2), ("cache_gb", "GB of cache", 10))  # of a row: in words, and the ratio of lines


def generation(theme: Theme) -> Figure:
    """Milliseconds and memory over cached tokens, all doubling, a panel for each number of sequences."""
    rows = [row for row in _read("2026-11-22-h200-generate")["rows"] if row["name"] in NAMES and "ms" in row]
    batches, tokens = (sorted({row[key] for row in rows}) for key in ("batch", "tokens"))
    figure = Figure(figsize=(WIDE, 4.6))
    panels = figure.subplots(2, len(batches), sharex=True, sharey="row")
    for (key, words, ratio), line in zip(SHOWN, panels, strict=True):
        for axes, batch in zip(line, batches, strict=True):
            _lines(axes, [row for row in rows if row["batch"] == batch], ("tokens", key), NAMES, theme)
            _scales(axes, tokens, _powers([r[key] for r in rows], ratio))
        line[0].set_ylabel(words)
    for axes, batch in zip(panels[0], batches, strict=True):
        axes.set_title(f"{batch} sequence{'s' * (batch > 1)}", loc="left", fontsize=9)
    panels[1][0].set_xlabel("tokens in the cache of each", loc="left")
    _legend(panels[1][0], theme, 3)
    return figure


def fox_lengths(theme: Theme) -> Figure:
    """Milliseconds forward and backward over tokens a sequence, all doubling."""
    rows = [row for row in _read("2026-11-21-h200-fox")["lengths"] if row["name"] in KERNELS]
    figure = Figure(figsize=(WIDE, 3.2))
    axes = figure.subplots()
    _lines(axes, rows, ("T", "both_ms"), KERNELS, theme)
    _scales(axes, sorted({row["T"] for row in rows}), _powers([row["both_ms"] for row in rows], 2))
    axes.set_ylabel("ms, forward and backward")
    axes.set_xlabel("tokens of a sequence, 128k in all", loc="left")
    _legend(axes, theme, 2)
    return figure


def _read(run: str) -> dict[str, Any]:
    return json.loads((RESULTS / run / "results.json").read_text())  # type: ignore[no-any-return]


def _lines(axes: Axes, rows: list[dict[str, Any]], keys: tuple[str, str], names: Names, theme: Theme) -> None:
    for name, (label, pair, dashed) in names.items():
        found = sorted(tuple(row[key] for key in keys) for row in rows if row["name"] == name)
        style = {"color": theme.pairs[pair], "linestyle": "--" if dashed else "-"}
        axes.plot(*zip(*found, strict=True), linewidth=1.6, marker="o", markersize=3, label=label, **style)
    axes.tick_params(colors=theme.muted, length=0)
    axes.grid(axis="y", color=theme.grid, linewidth=0.6)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(axes: Axes, theme: Theme, columns: int) -> None:
    below = {"loc": "upper left", "bbox_to_anchor": (-0.12, -0.24), "ncol": columns, "columnspacing": 1.2}
    axes.legend(frameon=False, fontsize=8, labelcolor=theme.ink, **below)


def _powers(values: list[float], ratio: int) -> list[float]:
    """Powers that hold all values between them."""
    low, high = (math.log(end(values), ratio) for end in (min, max))
    return [float(ratio) ** n for n in range(math.floor(low), math.ceil(high) + 1)]


def _scales(axes: Axes, tokens: list[int], ticks: list[float]) -> None:
    named = (tokens[0], tokens[len(tokens) // 2], tokens[-1])
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}k" if n in named else "" for n in tokens])
    axes.set_yscale("log", base=2)
    axes.set_ylim(ticks[0] / 1.15, ticks[-1] * 1.15)
    axes.set_yticks(ticks, [f"{n:g}" for n in ticks])
    axes.minorticks_off()
