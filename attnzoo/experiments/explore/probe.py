"""A small model of one variant, trained for seconds on a task that needs a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnzoo.data.tasks import UNASKED, Examples, Task
from attnzoo.data.tasks.task import Row
from attnzoo.evaluation import Array
from attnzoo.evaluation.scores import score_targets
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
LENGTH, BATCH, RATE = 8, 32, 1e-2  # tokens of a training row, rows of a step, learning rate
LONGER, ROWS = 3, 256  # times the tokens of a training row, and rows, that are asked


@dataclass(frozen=True)
class StateProbe:
    """The task that the probe's models are trained on.

    Args:
        name: of the task, as the command line has it.
        task: its rows.
        steps: of training.
        seed: of weights and rows.
    """

    name: str
    task: Task
    steps: int
    seed: int = 0

    def trained(self, variant: str) -> tuple[Array, Array]:
        """The share of wrong answers of a model of ``variant`` at each place of longer rows, ``[tokens]``, nan where
        nothing is asked; and the loss of each step, ``[steps]``."""
        rows = Examples(self.task, LENGTH, self.seed)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            model = LanguageModel(ModelConfig(attention=variant, vocab_size=len(self.task.words), **SIZES))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=self.steps)
        losses = []
        for number in range(self.steps):
            tokens, targets = rows.batch(range(number * BATCH, (number + 1) * BATCH))
            loss = model(torch.from_numpy(tokens), targets=torch.from_numpy(targets)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        model.eval()
        tokens, targets = self._asked()
        wrong = score_targets(model, torch.from_numpy(tokens), torch.from_numpy(targets))[1].numpy()
        return _mean(wrong, targets), np.array(losses)

    def guess(self) -> Array:
        """The share of wrong answers at each place, as of :meth:`trained`, of always giving the most frequent one."""
        _, targets = self._asked()
        known = targets[targets != UNASKED]
        return _mean(targets != np.bincount(known).argmax(), targets)

    def _asked(self) -> Row:
        return Examples(self.task, LONGER * LENGTH, self.seed, held_out=True).batch(range(ROWS))


def _mean(wrong: npt.NDArray[np.bool_], targets: npt.NDArray[np.int64]) -> Array:
    asked = targets != UNASKED
    with np.errstate(invalid="ignore"):
        found: Array = (wrong & asked).sum(0) / asked.sum(0)
    return found
