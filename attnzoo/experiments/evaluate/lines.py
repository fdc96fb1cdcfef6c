"""Results as lines of at most 80 characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnzoo.evaluation import AttentionMaps, EffectiveContext, EpsSweep, LengthCurve, LossCurve, PrunedShares
from attnzoo.kernels.common.constants import ROW_UNIT

if TYPE_CHECKING:
    from attnzoo.experiments.evaluate.harness import HarnessScores

WIDTH = 80


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with right-aligned columns of the least width."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def percent(share: float, digits: int = 2) -> str:
    """A share in percent; a dash for nan."""
    return "-" if np.isnan(share) else f"{100 * share:.{digits}f}"


def loss(found: LossCurve) -> list[str]:
    """Lines with L(i) and P(l) at a few positions, the training context among them."""
    L = len(found.loss)
    places = {2**n for n in range(L.bit_length()) if 2**n >= min(L, 16)} | {L}
    if found.context is not None and found.context <= L:
        places.add(found.context)
    rows = []
    for place in sorted(places):
        mark = "training context" if place == found.context else ""
        error = float(found.error[place - 1])
        spread = "-" if np.isnan(error) else f"{error:.4f}"
        rows.append([f"{place:,}", f"{found.around(place):.4f}", spread, f"{found.perplexity[place - 1]:.3f}", mark])
    return [
        f"{found.windows} windows of {L:,} tokens; L(i) is a mean over 101 positions, +- is of one",
        *(line.rstrip() for line in table(["position", "L(i) nats", "+-", "P(l)", ""], rows)),
    ]


def answers(found: LengthCurve) -> list[str]:
    """Lines with the answers, one per length."""
    rows = []
    for row in found.answers:
        mark = "training length" if row.length == found.context else ""
        numbers = [percent(row.error, 3), percent(row.uncertainty, 3), percent(row.whole), f"{row.loss:.4f}"]
        rows.append([f"{row.length:,}", f"{row.asked:,}", *numbers, mark])
    header = ["length", "answers", "wrong %", "+-", "all right %", "loss", ""]
    return [line.rstrip() for line in table(header, rows)]


def haystack(found: Any) -> list[str]:
    """Share of whole numbers found, a line per depth."""
    lines = []
    for picture in found.pictures:
        cells = [
            [f"{depth:.2f}", *(percent(share, 0) for share in row)]
            for depth, row in zip(picture.depths, picture.whole, strict=True)
        ]
        lengths = [f"{length:,}{'*' if length == picture.context else ''}" for length in picture.lengths]
        rows = picture.answers[0][0].rows
        lines += [
            f"{picture.mode} needle: % of numbers found, by depth and length; {rows} rows each",
            *table(["depth", *lengths], cells),
        ]
    if any(picture.context in picture.lengths for picture in found.pictures):
        lines.append("*: training length")
    if found.too_short:
        lines.append(f"left out, too short for the question: rows of {', '.join(map(str, found.too_short))} tokens")
    return lines


def too_short_to_prune(tokens: int) -> list[str]:
    """A line that explains why nothing is pruned of few tokens; empty for more."""
    said = f"(nothing can be pruned of {ROW_UNIT} tokens or fewer, a block's rows; see --length)"
    return [said] if tokens <= ROW_UNIT else []


def pruning(found: Any) -> list[str]:
    """Lines with the pruned shares of the model by layer, and of its earlier checkpoints."""
    now: PrunedShares = found.steps[-1]
    lines = [
        f"pruned at eps {now.eps:.3g} ({now.bound}) on {now.tokens:,} tokens: {percent(now.share, 1)} % of the blocks;",
        f"local heads (more than half pruned): {percent(now.local, 1)} %",
    ]
    lines += too_short_to_prune(now.tokens)
    for number, heads in zip(now.layers, now.heads, strict=True):
        lines += wrapped(f"layer {number:3}:", [percent(share, 1).rjust(5) for share in heads])
    if len(found.steps) > 1:
        rows = [[f"{step.step:,}", percent(step.share, 1), percent(step.local, 1)] for step in found.steps]
        lines += table(["step", "pruned %", "local heads %"], rows)
    return lines


def eps(found: EpsSweep) -> list[str]:
    """Lines with the measurements, one per eps."""
    rows = []
    for row in found.rows:
        name = "none" if row.eps is None else f"{row.eps:.2e}"
        spread = "-" if np.isnan(row.error) else f"{row.error:.1e}"
        ratio = found.rows[0].seconds / row.seconds
        rows.append([name, f"{row.loss:.5f}", f"{row.change:+.1e}", spread, percent(row.kept, 1), f"{ratio:.2f}"])
    return [
        f"{found.windows} windows of {found.tokens:,} tokens, bound {found.bound}; speed of a forward pass",
        *table(["eps", "loss", "change", "+-", "kept %", "speed"], rows),
        *too_short_to_prune(found.tokens),
    ]


def context(found: EffectiveContext) -> list[str]:
    """Lines with the effective context of each layer's heads, and with its bound by the gates."""
    lines = [f"newest keys that hold {1 - found.eps:g} of a row, median of {found.tokens:,} rows, per head"]
    for number, heads, bounds in zip(found.layers, found.heads, found.bounds, strict=True):
        lines += wrapped(f"layer {number:3}:", [f"{tokens:,}".rjust(7) for tokens in heads])
        if bounds is not None:
            lines += wrapped("by gates: ", [f"{tokens:,}".rjust(7) for tokens in bounds])
    return lines


def maps(found: AttentionMaps) -> list[str]:
    """Lines with the tokens to which each head attends most at the last token."""
    lines = [f"{len(found.tokens)} tokens; which of them the last, {found.tokens[-1]!r}, weighs most, head by head"]
    for layer in found.layers:
        most = [int(np.abs(head[-1]).argmax()) for head in layer.weights]
        seen = [f"{found.tokens[j]!r} {head[-1, j]:.2f}" for j, head in zip(most, layer.weights, strict=True)]
        lines += wrapped(f"layer {layer.layer:3}:", seen)
    return lines


def harness(found: HarnessScores) -> list[str]:
    """Lines with the scores, one per metric."""
    rows = []
    for task, scores in found.scores.items():
        for metric, value in scores.items():
            what, comma, answers = metric.partition(",")  # lm-eval appends the name of a filter of the answers
            if not what.endswith("_stderr") and metric != "sample_len":
                error = scores.get(f"{what}_stderr{comma}{answers}", float("nan"))
                spread = "-" if np.isnan(error) else f"{error:.4f}"
                rows.append([task, f"{found.samples.get(task, 0):,}", metric, f"{value:.4f}", spread])
    if found.average is not None:
        rows.append(["average of accuracies", "", "", f"{found.average:.4f}", ""])
    window = "any length" if found.window is None else f"{found.window:,} tokens"
    return [f"the model is given {window}", *table(["task", "asked", "metric", "value", "+-"], rows)]


def wrapped(name: str, cells: Sequence[str]) -> list[str]:
    """The cells after a name, wrapped to lines."""
    lines = [name]
    for cell in cells:
        if len(lines[-1]) + 1 + len(cell) > WIDTH:
            lines.append(" " * len(name))
        lines[-1] += f" {cell}"
    return lines
