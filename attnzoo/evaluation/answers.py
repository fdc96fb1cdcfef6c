"""The share of a synthetic task's questions that a model answers correctly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnzoo.data.tasks import UNASKED, Examples
from attnzoo.evaluation.scores import score_targets

Array = npt.NDArray[np.float64]
TOKENS = 2**15  # tokens of a forward pass, if a row is not longer


@dataclass(frozen=True)
class Answers:
    """The result of a model's answers on rows of one length.

    Args:
        length: tokens in a row.
        rows: number of rows.
        asked: number of answers asked for in all rows.
        error: share of the answers that were wrong, in [0, 1].
        uncertainty: standard error of `error` over the rows; nan for one row.
        whole: share of the rows in which no answer was wrong.
        loss: mean nats per answer.
    """

    length: int
    rows: int
    asked: int
    error: float
    uncertainty: float
    whole: float
    loss: float


@dataclass(frozen=True)
class Guess:
    """The error of giving the same answer to every question.

    Args:
        wrong: share of wrong answers, in [0, 1].
        uncertainty: standard error of `wrong` over the rows; nan for one row.
        asked: number of answers asked for in all rows; 0 where unknown.
    """

    wrong: float
    uncertainty: float
    asked: int = 0


def measure_guess(examples: Examples, rows: int) -> Guess:
    """The error of always giving the answer that is most frequent in as many training rows.

    Args:
        examples: rows of a task; rows from 0 on are asked, and rows of the training split from 0 on choose the answer.
        rows: number of rows, at least 1.

    Raises:
        ValueError: no rows.
    """
    if rows < 1:
        raise ValueError(f"rows: expected at least 1, got {rows}")
    training = Examples(examples.task, examples.length, examples.seed)
    known = np.concatenate([targets[targets != UNASKED] for _, targets in (training[row] for row in range(rows))])
    said = int(np.bincount(known).argmax())
    asked, wrong = np.zeros(rows), np.zeros(rows)
    for row in range(rows):
        _, targets = examples[row]
        asked[row], wrong[row] = (targets != UNASKED).sum(), ((targets != UNASKED) & (targets != said)).sum()
    return Guess(*_ratio(wrong, asked), int(asked.sum()))


def measure_answers(model: nn.Module, examples: Examples, rows: int) -> Answers:
    """The result of a model's answers, each the likeliest token where an answer is asked.

    Args:
        model: as :func:`attnzoo.evaluation.scores.score_targets` takes it.
        examples: rows of a task; rows from 0 on are asked.
        rows: number of rows, at least 1.

    Raises:
        ValueError: no rows.
    """
    if rows < 1:
        raise ValueError(f"rows: expected at least 1, got {rows}")
    tables: list[Tensor] = []  # per row: asked, wrong, nats
    batch = max(1, TOKENS // examples.length)
    for first in range(0, rows, batch):
        tokens, targets = map(torch.from_numpy, examples.batch(range(first, min(first + batch, rows))))
        nats, wrong = score_targets(model, tokens, targets)
        tables.append(torch.stack([(targets != UNASKED).sum(-1), wrong.sum(-1).cpu(), nats.sum(-1).cpu()], 1))
    asked, wrong_of, nats_of = np.asarray(torch.cat(tables).numpy()).T
    return Answers(
        examples.length, rows, int(asked.sum()), *_ratio(wrong_of, asked), float((wrong_of == 0).mean()),
        float(nats_of.sum() / asked.sum()),
    )  # fmt: skip


def _ratio(wrong: Array, asked: Array) -> tuple[float, float]:
    """The share of wrong answers and its standard error over rows, from the numbers of each row, ``[rows]``."""
    rows, error = len(asked), wrong.sum() / asked.sum()
    # Standard error of a ratio of two sums over rows (delta method).
    spread = math.sqrt(((wrong - error * asked) ** 2).sum() * rows / (rows - 1)) if rows > 1 else math.nan
    return float(error), spread / float(asked.sum())
