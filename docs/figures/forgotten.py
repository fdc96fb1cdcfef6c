"""What is forgotten of a text, and when: each token in a colour by the age at which a head gave it up.

The ages are kept in ``data/forgotten.json``: ``python docs/figures/forgotten.py NEEDLES TEXT`` reads them off two runs,
of `attnzoo experiment run needle_memory` and `forgetting_text`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import WIDE, Theme

DATA = Path(__file__).parent / "data" / "forgotten.json"
COLUMNS = 64  # characters of a line
LINE = 0.155  # inches
SIZE = 72 * WIDE / (COLUMNS + 0.6) / 0.602  # a letter of this font is so much of its size wide
SCALE = (1, 4, 16, 64)  # ages of the legend
SHOWN = (("needle", 0, 0, " "), ("text", 1, 1, ""))  # layer and head of each, and what stands between tokens


def record(needles: str, text: str) -> None:
    """Keep the ages of all heads: of a row with a needle and room for 8 keys, and of held-out text with an eighth."""
    import torch

    from attnzoo.data import build_data, heldout_windows
    from attnzoo.data.tasks import Examples, build_task
    from attnzoo.evaluation.forgetting import ages_of_forgetting
    from attnzoo.training import load_run

    found = {}
    model, config = load_run(Path(needles), "cpu")
    task = build_task(config.data.task or "", config.data.task_options)
    row = Examples(task, config.data.context_length, 1000, held_out=True).batch(range(1))[0][0].astype(np.int64)
    ages = ages_of_forgetting(model, torch.from_numpy(row), "retention", 8)
    found["needle"] = {"tokens": [task.words[token] for token in row], "ages": [one.tolist() for one in ages]}
    model, config = load_run(Path(text), "cpu")
    windows = heldout_windows(build_data(config.data).heldout, config.data.context_length, 4096)
    window = torch.from_numpy(windows)[0, :-1]
    ages = ages_of_forgetting(model, window, "retention", len(window) // 8)
    found["text"] = {"tokens": [chr(token) for token in window], "ages": [one.tolist() for one in ages]}
    DATA.write_text(json.dumps(found) + "\n", encoding="utf-8")


def forgotten_words(theme: Theme) -> Figure:
    """A head that keeps digits above, one that keeps beginnings of lines below."""
    found = json.loads(DATA.read_text(encoding="utf-8"))
    needle, text = (_lines(found[name], layer, head, sep) for name, layer, head, sep in SHOWN)
    height = LINE * (len(needle) + len(text) + 6)
    figure = Figure(figsize=(WIDE, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.3, COLUMNS + 0.3)
    axes.set_ylim(len(needle) + len(text) + 6, 0)
    axes.axis("off")
    y = _write(axes, "a number among random words, 8 of 64 keys", needle, 1.0, theme)
    y = _write(axes, "Python's library, 32 of 256 keys", text, y + 1, theme)
    x = 0.0
    for words, share in [("given up after", None), *((f" {age} ", _share(age)) for age in SCALE), ("tokens,", None)]:
        x = _tokens(axes, [(words, share)], x, y + 0.7, theme, theme.muted) + 0.8
    _tokens(axes, [("or never", None)], x, y + 0.7, theme, theme.muted)
    return figure


def _share(age: int) -> float:
    """How much of the colour a token has: all at age 1, less with the logarithm, none if it stays."""
    return 0.0 if age < 0 else 1 - np.log(age) / np.log(256)


def _lines(found: dict[str, list], layer: int, head: int, between: str) -> list[list[tuple[str, float | None]]]:
    """Lines of (what is written, how much of the colour it has)."""
    lines: list[list[tuple[str, float | None]]] = [[]]
    for token, age in zip(found["tokens"], found["ages"][layer][head], strict=True):
        written = sum(len(word) for word, _ in lines[-1])
        if written + len(token) > COLUMNS:
            lines.append([])
        if token == "\n":
            lines.append([])
            continue
        lines[-1].append((token, _share(age)))
        if between:
            lines[-1].append((between, None))
    return [line for line in lines if line]


def _write(axes: Axes, title: str, lines: list[list[tuple[str, float | None]]], y: float, theme: Theme) -> float:
    axes.text(0, y, title, fontsize=8, color=theme.ink, va="center")
    for number, line in enumerate(lines, 1):
        _tokens(axes, line, 0.0, y + number, theme, theme.ink)
    return y + len(lines) + 1


def _tokens(axes: Axes, tokens: list[tuple[str, float | None]], x: float, y: float, theme: Theme, ink: str) -> float:
    for token, share in tokens:
        if share:
            box = Rectangle((x, y - 0.46), len(token), 0.92, facecolor=theme.cut, alpha=0.62 * share, linewidth=0)
            axes.add_patch(box)
        if token.strip():
            axes.text(x, y + 0.3, token, fontsize=SIZE, family="DejaVu Sans Mono", color=ink, parse_math=False)
        x += len(token)
    return x


if __name__ == "__main__":
    record(*sys.argv[1:])
