"""A converted model beside the one that it was made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnzoo.evaluation import LossCurve, measure_losses, measure_pruning
from attnzoo.evaluation.pruning import forward_seconds
from attnzoo.experiments.evaluate.lines import percent, table
from attnzoo.trained.model import TrainedModel

REPEATS = 5  # timed forward passes of each, in turns


@dataclass(frozen=True)
class Beside:
    """The measurements of one of two models.

    Args:
        title: a description of the model.
        layers: the variants of its layers.
        curve: loss by position and perplexity.
        pruned: the mean share of blocks that pruning skips in layers that can prune; nan without such layers.
        tokens_per_second: of a forward pass over a window, without the output head, the fastest of a few.
    """

    title: str
    layers: tuple[str, ...]
    curve: LossCurve
    pruned: float
    tokens_per_second: float


@dataclass(frozen=True)
class Conversion:
    """The measurements of a model before and after its conversion, on the same windows and machine."""

    original: Beside
    converted: Beside


def measure_conversion(original: TrainedModel, converted: TrainedModel, windows: Tensor) -> Conversion:
    """Loss, L(i), pruned share and speed of both models.

    Args:
        original: the model before.
        converted: the model after.
        windows: token ids ``[N, T + 1]``.

    Raises:
        ValueError: models of other vocabularies.
    """
    both = (original, converted)
    sizes = [subject.model.config.vocab_size for subject in both]
    if sizes[0] != sizes[1]:
        raise ValueError(f"original: expected a model with vocab_size={sizes[1]}, got {sizes[0]} in {original.title}")
    seconds = [[forward_seconds(subject.model, windows[:1, :-1]) for subject in both] for _ in range(REPEATS)]
    found = [_beside(one, windows, min(times)) for one, times in zip(both, zip(*seconds, strict=True), strict=True)]
    return Conversion(*found)


def _beside(subject: TrainedModel, windows: Tensor, seconds: float) -> Beside:
    layers = subject.model.attentions()
    pruned = math.nan
    if any(layer.variant.prunable for layer in layers):
        pruned = measure_pruning(subject.model, windows[0, :-1]).share
    curve = measure_losses(subject.model, windows, subject.context)
    names = tuple(layer.variant.name for layer in layers)
    return Beside(subject.title, names, curve, pruned, (windows.shape[1] - 1) / seconds)


def lines(found: Conversion) -> list[str]:
    """Lines with the numbers before and after, and their difference."""
    one, other = found.original, found.converted
    L = len(one.curve.loss)
    rows: list[Sequence[str]] = [_row("loss, nats", float(one.curve.loss.mean()), float(other.curve.loss.mean()))]
    for place in sorted({max(1, L // 16), max(1, L // 4), L}):
        rows.append(_row(f"L({place:,})", one.curve.around(place), other.curve.around(place)))
    rows.append(("pruned, %", percent(one.pruned, 1), percent(other.pruned, 1), ""))
    speeds = one.tokens_per_second, other.tokens_per_second
    rows.append(("tokens/s, forward", *(f"{speed:,.0f}" for speed in speeds), f"x {speeds[1] / speeds[0]:.2f}"))
    return [
        f"before: {', '.join(dict.fromkeys(one.layers))}; after: {', '.join(dict.fromkeys(other.layers))}",
        f"{one.curve.windows} windows of {L:,} tokens; L(i) is a mean over 101 positions",
        *(line.rstrip() for line in table(["", "before", "after", "change"], rows)),
    ]


def _row(name: str, before: float, after: float) -> Sequence[str]:
    return name, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"
