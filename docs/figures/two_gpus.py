"""What two GPUs gain on one text and what they send each other, by transport: measured beside the model."""

from __future__ import annotations

from many_gpus import EXCHANGED, KEY, TWO, gain, measured, sent
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import WIDE, Theme

NAMES = {("gather", False): "gather", ("heads", False): "heads", ("gather", True): "ACP, gather",
         ("heads", True): "ACP, heads", ("pruned", True): "ACP, pruned"}  # fmt: skip


def two_gpus(theme: Theme) -> Figure:
    """Two panels: times as fast as one GPU, and GB sent; bars measured, lines by the model and by the certificate."""
    figure = Figure(figsize=(WIDE, 4.4), layout="constrained")
    gains, bytes_ = figure.subplots(2, 1, sharex=True)
    for n, tokens in enumerate(TWO):
        places = [at + 0.38 * (n - 0.5) for at in range(len(EXCHANGED))]
        style = {"width": 0.36, "color": theme.pairs[(1, 4)[n]]}
        label = f"{tokens} tokens"
        gains.bar(places, [measured(tokens, *one, "times_one") for one in EXCHANGED], label=label, **style)
        bytes_.bar(places, [measured(tokens, *one, "sent_MB") / 1e3 for one in EXCHANGED], **style)
        for at, one in zip(places, EXCHANGED, strict=True):
            if one != ("heads", True):
                _line(gains, at, gain(tokens, 2, *one, today=False), theme)
        _line(bytes_, places[-1], 2 * float(sent(tokens, 2).sum()) * KEY / 1e9, theme)
    gains.axhline(1, color=theme.muted, linewidth=0.8, linestyle="--")
    gains.set_ylabel("times one GPU")
    bytes_.set_ylabel("GB sent, both ways")
    bytes_.set_xticks(range(len(NAMES)), list(NAMES.values()), fontsize=8)
    gains.legend(frameon=False, fontsize=8, labelcolor=theme.ink, loc="upper right", bbox_to_anchor=(1, 1.18), ncol=2)
    for axes in (gains, bytes_):
        axes.tick_params(colors=theme.muted, length=0)
        axes.grid(axis="y", color=theme.grid, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def _line(axes: Axes, at: float, value: float, theme: Theme) -> None:
    axes.plot([at - 0.18, at + 0.18], [value, value], color=theme.ink, linewidth=1.4)
