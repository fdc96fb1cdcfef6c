"""How often a model answers the questions of a synthetic task."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.data.tasks import UNASKED, Examples

LOGITS = 2**26  # held at a time


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


@torch.inference_mode()
def measure_answers(model: nn.Module, examples: Examples, rows: int) -> Answers:
    """Take the likeliest token at every place where something is asked.

    Args:
        model: called with token ids ``[B, T]``, its output has ``logits [B, T, vocabulary]``.
        examples: rows of a task; those from 0 on are taken.
        rows: how many, at least 1.

    Raises:
        ValueError: no rows.
    """
    if rows < 1:
        raise ValueError(f"rows: expected at least 1, got {rows}")
    device = next(model.parameters()).device
    tables: list[Tensor] = []  # per row: asked, wrong, nats
    batch, first = 1, 0
    while first < rows:  # the first one says how large the logits are
        indices = range(first, min(first + batch, rows))
        tokens, targets = (torch.from_numpy(side).to(device) for side in examples.batch(indices))
        logits = model(tokens).logits
        places = targets != UNASKED
        chosen, expected = logits[places].float(), targets[places]
        per_row = torch.stack([torch.ones_like(places), _at(places, chosen.argmax(-1) != expected)]).double()
        nats = _at(places, F.cross_entropy(chosen, expected, reduction="none").double())
        tables.append(torch.stack([*(per_row * places).sum(-1), nats.sum(-1)], 1).cpu())
        first += len(indices)
        batch = max(1, LOGITS // logits[0].numel())
    asked, wrong, nats_of = np.asarray(torch.cat(tables).numpy()).T
    error = wrong.sum() / asked.sum()
    # The error is a ratio of two sums over rows, whose deviation is that of their difference.
    spread = math.sqrt(((wrong - error * asked) ** 2).sum() * rows / (rows - 1)) if rows > 1 else math.nan
    return Answers(
        examples.length, rows, int(asked.sum()), float(error), spread / float(asked.sum()),
        float((wrong == 0).mean()), float(nats_of.sum() / asked.sum()),
    )  # fmt: skip


def _at(places: Tensor, values: Tensor) -> Tensor:
    """Values at places of a row, 0 elsewhere."""
    return torch.zeros(places.shape, dtype=values.dtype, device=places.device).masked_scatter(places, values)
