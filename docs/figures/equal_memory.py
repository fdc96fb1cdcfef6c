"""What is lost where a head may hold only so many keys: all rules, on text and on needles, with RoPE and with FoX."""

from __future__ import annotations

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from quoted import outcome

from attnzoo.experiments.experiment import find
from attnzoo.experiments.figures import INK, MUTED, quiet
from attnzoo.experiments.report.outcome_figures import overlaid
from attnzoo.experiments.run_figures import Overlaid

SIZE = "cpu"  # of both experiments
SHOWN = {"learned_forgetting": "text: nats added to the loss", "needle_memory": "needles: wrong answers"}
COLUMNS = "RoPE", "FoX"
CERTIFIED = "certified eviction"
ONE_PERCENT = np.log(1.01)  # of perplexity, in nats
LINEAR_BELOW = 0.005  # nats; logarithmic above
TICKS = (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # nats
WIDTH, HEIGHT, LEFT, BETWEEN, BELOW, ABOVE, LEGEND = 680, 560, 62, 22, 34, 24, 62  # points


def equal_memory() -> Figure:
    """Rows: loss on text, retrieval. Columns: RoPE, FoX. One legend, since a rule looks the same in all panels."""
    figure, handles = Figure(figsize=(WIDTH / 72, HEIGHT / 72)), {}
    width, height = (WIDTH - LEFT - BETWEEN - 8) / 2, (HEIGHT - LEGEND) / 2
    for row, (name, title) in enumerate(SHOWN.items()):
        found, first = outcome(name, SIZE), None
        tokens = yaml.safe_load(found.settings)["data"]["context_length"]
        for column, model in enumerate(COLUMNS):
            left, bottom = LEFT + column * (width + BETWEEN), LEGEND + (1 - row) * height + BELOW
            box = (left / WIDTH, bottom / HEIGHT, width / WIDTH, (height - BELOW - ABOVE) / HEIGHT)
            axes = first = figure.add_axes(box, sharex=first, sharey=first)
            picture = overlaid(find(name), column, found)
            handles |= _draw(axes, picture)
            axes.set_xlabel(f"keys that a head holds, of {tokens}", loc="left")
            axes.set_title(f"{model}, {title}", loc="left", fontsize=10.5, color=INK)
            axes.tick_params(labelleft=column == 0)
            if not picture.percent:
                _nats(axes, name_it=column == 0)
        if not picture.percent:
            low, high = first.get_ylim()
            first.set_yticks([tick for tick in TICKS if low <= tick <= high])
    names = sorted(handles, key=lambda name: not name.startswith("network"))
    figure.legend(
        [handles[name] for name in names], names, loc="lower left", bbox_to_anchor=(LEFT / WIDTH - 0.012, 0), ncols=4,
        frameon=False, fontsize=9.5, labelcolor="linecolor", handlelength=2.4, columnspacing=1.6, borderpad=0,
    )  # fmt: skip
    return figure


def _draw(axes: Axes, picture: Overlaid) -> dict[str, Line2D]:
    """Curves with their errors, and what the certificate gives up; what they look like, by label."""
    quiet(axes)
    found = {}
    for line in picture.lines:
        style = {"color": line.look.color, "dashes": line.look.dash or (1, 0), "marker": "o", "markersize": 3.4}
        above = 2.0 if line.look.dash else 2.5  # networks, where curves coincide
        axes.errorbar(
            line.x, line.y, yerr=line.error, linewidth=1.6, elinewidth=1.0, capsize=2.2, zorder=above, **style
        )
        found[line.label] = Line2D([], [], linewidth=1.6, **style)
    for point in picture.points:
        if point.label == CERTIFIED:
            x, y = point.x.mean(), point.y.mean()
            ex, ey = (v.std(ddof=1) / np.sqrt(v.size) for v in (point.x, point.y))
            style = {"color": INK, "marker": "D", "markersize": 6, "linestyle": "none"}
            axes.errorbar(x, y, xerr=ex, yerr=ey, **style)
            found[point.label] = Line2D([], [], **style)
    places = sorted({float(x) for line in picture.lines for x in line.x})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{100 * x:.3g} %" for x in places])
    axes.minorticks_off()
    axes.set_xlim(places[-1] * 1.08, places[0] / 1.08)
    axes.axhline(0, color=INK, linewidth=0.7, alpha=0.5)
    if picture.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    return found


def _nats(axes: Axes, *, name_it: bool) -> None:
    """A scale on which small losses are seen beside large ones, with the share of perplexity that is asked for."""
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.axhline(ONE_PERCENT, color=MUTED, linewidth=0.8, dashes=(2, 2), zorder=0)
    if name_it:
        axes.annotate(
            "1 % of perplexity", (0, ONE_PERCENT), (4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=MUTED, fontsize=9,
        )  # fmt: skip
