"""A model's answers to a task on rows longer than those of its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from attnzoo.data.tasks import Examples, Task
from attnzoo.evaluation.answers import Answers, measure_answers


@dataclass(frozen=True)
class LengthCurve:
    """The results of a model's answers on rows of several lengths.

    Args:
        context: tokens per row in training; None where unknown.
        answers: one entry per length.
    """

    context: int | None
    answers: tuple[Answers, ...]


def growing_lengths(context: int, factor: int = 8) -> tuple[int, ...]:
    """The lengths 1, 2, 4, ... times the training context, up to ``factor`` times.

    Raises:
        ValueError: a number below 1.
    """
    if context < 1 or factor < 1:
        raise ValueError(f"context, factor: expected at least 1, got {context}, {factor}")
    return tuple(context * 2**n for n in range(factor.bit_length()))


def measure_lengths(
    model: nn.Module, task: Task, lengths: Sequence[int], rows: int, seed: int = 0, context: int | None = None
) -> LengthCurve:
    """The results of a model's answers on held-out rows of each length.

    Args:
        model: as :func:`attnzoo.evaluation.scores.score_targets` takes it.
        task: of :func:`attnzoo.data.tasks.build_task`; its options are the same at each length.
        lengths: tokens per row.
        rows: per length.
        seed: of the rows.
        context: tokens per row in training.

    Raises:
        ValueError: no rows, or a length that does not suit the task.
    """
    found = [measure_answers(model, Examples(task, length, seed, held_out=True), rows) for length in lengths]
    return LengthCurve(context, tuple(found))
