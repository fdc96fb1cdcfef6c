"""How often a model answers the questions of a synthetic task."""

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
TOKENS = 2**15  # in a forward pass, if a row is not longer


@dataclass(frozen=True)
class Answers:
    """What a model answered on rows of one length.

    Args:
        length: tokens in a row.
        rows: how many.
        asked: answers asked for in all of them.
        error: share of the answers that were wrong, in [0, 1].
        uncertainty: standard error of that over the rows; nan for one row.
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
    """How wrong it is to say the same at every question.

    Args:
        wrong: share of the answers, in [0, 1].
        uncertainty: standard error of that over the rows; nan for one row.
        asked: answers asked for in all rows; 0 where nobody said.
    """

    wrong: float
    uncertainty: float
    asked: int = 0


def measure_guess(examples: Examples, rows: int) -> Guess:
    """Say the answer that is the most frequent one on as many rows of training.

    Args:
        examples: rows of a task; those from 0 on are asked, and the same ones of the side of training chose.
        rows: how many, at least 1.

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
    """Take the likeliest token at every place where something is asked.

    Args:
        model: as :func:`attnzoo.evaluation.scores.score_targets` takes it.
        examples: rows of a task; those from 0 on are taken.
        rows: how many, at least 1.

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
    """The share of wrong answers and its standard error over rows, of their numbers in each row, ``[rows]``."""
    rows, error = len(asked), wrong.sum() / asked.sum()
    # The error is a ratio of two sums over rows, whose deviation is that of their difference.
    spread = math.sqrt(((wrong - error * asked) ** 2).sum() * rows / (rows - 1)) if rows > 1 else math.nan
    return float(error), spread / float(asked.sum())
