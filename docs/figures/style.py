"""How the figures look: one drawing, saved in light and in dark ink on no background."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import get_data_path, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.patches import FancyArrowPatch

from attnzoo.experiments.figures import DECAY_COLORS, PAIR_COLORS

OUT = Path(__file__).parent / "out"
Point = tuple[float, float]
WIDE = 4.7  # inches of a schematic: shown in a column of text, and small enough that words stay legible on a phone


@dataclass(frozen=True)
class Theme:
    """Colours of one scheme: ``pairs`` of the seven pairs, ``heat`` for 0 to 1, ``signed`` for -1 to 1."""

    suffix: str
    ink: str
    muted: str
    grid: str
    cut: str
    pairs: tuple[str, ...]
    heat: Colormap
    signed: Colormap


LIGHT = Theme(
    suffix="",
    ink="#1d2530",
    muted="#5f6b7a",
    grid="#dfe3e8",
    cut="#e8463a",
    pairs=PAIR_COLORS,
    heat=DECAY_COLORS,
    signed=LinearSegmentedColormap.from_list("signed", ["#a8431c", "#e2a07f", "#f3f1ea", "#7fc0b5", "#1f5a8a"]),
)
DARK = Theme(
    suffix=".dark",
    ink="#e2e6ec",
    muted="#97a3b3",
    grid="#3a4450",
    cut="#ff6a5c",
    pairs=(
        "#a2acba", "#dba92b", "#ff7448", "#87c544", "#5aa2ff", "#35c4bf", "#b583f5", "#f265a4", "#c9935f", "#88a9d8",
    ),
    heat=LinearSegmentedColormap.from_list("heat", ["#232b35", "#22456a", "#1f7183", "#3fa08f", "#a3cfa4", "#f6efd4"]),
    signed=LinearSegmentedColormap.from_list("signed", ["#ff9a6b", "#8a4527", "#232b35", "#22668a", "#8fd0f0"]),
)  # fmt: skip


def save(name: str, draw: Callable[[Theme], Figure]) -> None:
    """Write ``draw`` in both schemes, as ``out/name.svg`` and ``out/name.dark.svg``."""
    OUT.mkdir(exist_ok=True)
    for theme in (LIGHT, DARK):
        settings = {
            "svg.hashsalt": name,
            "font.size": 9,
            "mathtext.fontset": "cm",
            "text.color": theme.ink,
            "axes.labelcolor": theme.muted,
            "axes.titlecolor": theme.ink,
        }
        with rc_context(settings):
            figure = draw(theme)
            buffer = io.StringIO()
            figure.savefig(
                buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None},
                bbox_inches="tight", pad_inches=0.02,
            )  # fmt: skip
        text = re.sub(r' d="[^"]*"', _rounded, buffer.getvalue())
        (OUT / f"{name}{theme.suffix}.svg").write_text(text, encoding="utf-8")


def own_fonts() -> None:
    """Letters are matplotlib's own, whatever fonts the machine and the cached list of an earlier process have."""
    fontManager.ttflist.clear()
    for path in sorted(Path(get_data_path(), "fonts", "ttf").glob("*.ttf")):
        fontManager.addfont(path)


def _rounded(path: re.Match[str]) -> str:
    """A hundredth of a point is enough, and halves the file."""
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[0])


def quiet(axes: Axes, theme: Theme, *, grid: str = "y") -> None:
    """No frame but the bottom line, and a grid behind."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=8, length=0, which="both")
    axes.grid(True, axis=grid, color=theme.grid, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def framed(axes: Axes, theme: Theme) -> None:
    """A thin frame and no ticks, for matrices."""
    axes.set_facecolor("none")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=theme.grid, linewidth=0.8)


def panel(figure: Figure, place: Sequence[float], x: Point, y: Point, *, equal: bool = False) -> Axes:
    """Axes without a frame, in which a drawing's own units count."""
    axes = figure.add_axes(tuple(place))  # type: ignore[call-overload]
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.axis("off")
    if equal:
        axes.set_aspect("equal")
    return axes  # type: ignore[no-any-return]


def arrow(axes: Axes, start: Point, end: Point, color: str, *, width: float = 1.4, bend: float = 0.0) -> None:
    style = "arc3" if not bend else f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, linewidth=width, color=color, connectionstyle=style,
            shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def write(axes: Axes, text: str, at: Point, color: str, *, size: float = 9.5, ha: str = "center") -> None:
    axes.annotate(text, at, ha=ha, va="center", fontsize=size, color=color)
