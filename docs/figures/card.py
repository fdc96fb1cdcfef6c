"""The picture that a link to the site is shown with: decays in a triangle, and the name."""

from __future__ import annotations

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from style import DARK
from trained import ROOT

OUT = ROOT / "docs" / "assets" / "card.png"
PIXELS = (1200, 630)


def card() -> None:
    """Write ``docs/assets/card.png``."""
    rng = np.random.default_rng(3)
    steps = rng.exponential(0.06, 42) + np.where(rng.random(42) < 0.1, 1.2, 0.0)
    place = steps.cumsum()
    decay = np.where(np.tri(42, dtype=bool), np.exp(-(place[:, None] - place)), np.nan)
    with rc_context({"font.size": 20}):
        figure = Figure(figsize=(PIXELS[0] / 100, PIXELS[1] / 100), dpi=100, facecolor="#17293b")
        axes = figure.add_axes((0.53, 0.07, 0.45, 0.86))
        axes.imshow(decay, cmap=DARK.heat, vmin=0, vmax=1, interpolation="nearest")
        axes.axis("off")
        figure.text(0.06, 0.60, "attnzoo", fontsize=64, color="#ffffff")
        figure.text(
            0.06, 0.44, "One forget gate,\ntwo readouts", fontsize=30, color=DARK.ink, va="top", linespacing=1.4
        )
        figure.savefig(OUT, metadata={"Software": None})
