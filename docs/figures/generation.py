"""What a step of generation takes over the context: from the recorded run of ``attnzoo bench generate``."""

from __future__ import annotations

import json
import math
from pathlib import Path

from matplotlib.figure import Figure
from style import WIDE, Theme

RESULTS = Path(__file__).parents[1] / "benchmarks/results/2026-11-22-h200-generate/results.json"
NAMES = {  # of the run: in words, the pair whose colour it has, and whether it is dashed
    "Llama, static cache, compiled": ("Llama", 4, False),
    "FoX (Pro) + ACP, fused": ("FoX", 2, False),
    "FoX (Pro) + ACP, evicting, fused": ("FoX, evicting", 2, True),
    "PaTH-FoX (Pro) + ACP, fused": ("PaTH-FoX", 5, False),
    "PaTH-FoX (Pro) + ACP, evicting, fused": ("PaTH-FoX, evicting", 5, True),
    "Mamba-2": ("Mamba-2", 1, False),
    "Gated DeltaNet": ("Gated DeltaNet", 6, False),
}


def generation(theme: Theme) -> Figure:
    """Milliseconds per token over cached tokens, a panel for each number of sequences."""
    rows = json.loads(RESULTS.read_text())["rows"]
    batches, tokens = (sorted({row[key] for row in rows}) for key in ("batch", "tokens"))
    top = 5 * math.ceil(max(row["ms"] for row in rows if row["name"] in NAMES and "ms" in row) / 5)
    figure = Figure(figsize=(WIDE, 3.0))
    panels = figure.subplots(1, len(batches), sharey=True)
    for axes, batch in zip(panels, batches, strict=True):
        for name, (label, pair, dashed) in NAMES.items():
            found = sorted(
                (r["tokens"], r["ms"]) for r in rows if (r["name"], r["batch"]) == (name, batch) and "ms" in r
            )
            style = {"color": theme.pairs[pair], "linestyle": "--" if dashed else "-"}
            if found:
                axes.plot(*zip(*found, strict=True), linewidth=1.6, marker="o", markersize=3, label=label, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
        axes.minorticks_off()
        axes.set_title(f"{batch} sequence{'s' * (batch > 1)}", loc="left", fontsize=9)
        axes.tick_params(colors=theme.muted, length=0)
        axes.grid(axis="y", color=theme.grid, linewidth=0.6)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_ylim(0, top)
        axes.set_yticks(range(0, top + 1, 5 if top <= 30 else 10))
    panels[0].set_xlabel("tokens in the cache of each", loc="left")
    panels[0].set_ylabel("ms per step")
    below = {"loc": "upper left", "bbox_to_anchor": (-0.12, -0.2), "ncol": 3, "columnspacing": 1.2}
    panels[0].legend(frameon=False, fontsize=8, labelcolor=theme.ink, **below)
    return figure
