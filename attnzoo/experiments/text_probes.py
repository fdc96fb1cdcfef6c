"""Further probes on held-out text: losses of its stretches and of a text that is read twice, what heads keep of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from attnzoo.evaluation import gate_maps, token_losses
from attnzoo.experiments.probes import ByLength, Probed, text_losses


@dataclass(frozen=True)
class LossByStretch:
    """Mean held-out loss over the training context in each of several stretches of the held-out text, nats per token.

    Args:
        name: what a reader sees.
        stretches: of equally many tokens.
    """

    name: str = "loss by stretch"
    stretches: int = 32
    places: str = "stretch of the held-out text"
    percent: bool = False
    task: ClassVar[bool] = False

    @property
    def at(self) -> tuple[float, ...]:
        return tuple(float(n) for n in range(1, self.stretches + 1))

    def measure(self, subject: Probed) -> dict[float, float]:
        parts = np.array_split(text_losses(subject, 1.0).ravel(), self.stretches)
        return {float(n): float(part.mean()) for n, part in enumerate(parts, 1)}


@dataclass(frozen=True)
class ReadAgain(ByLength):
    """The loss of a held-out text that the model has just read: a row is a text twice, and what counts is the second
    time, nats per token.

    Args:
        name: what a reader sees.
        lengths: of the rows, in training contexts; the text is half as long.
    """

    name: str = "loss of a text read again"
    lengths: tuple[float, ...] = (1.0,)
    percent: bool = False
    task: ClassVar[bool] = False

    @property
    def longest(self) -> float:
        return max(self.lengths) / 2

    def measure(self, subject: Probed) -> dict[float, float]:
        found = {}
        for length in self.lengths:
            text = subject.windows(length / 2)[:, 1:]
            # the second reading's first token is predicted from the first reading's last
            rows = torch.cat([text, text], 1)
            found[length] = float(token_losses(subject.model, rows)[:, text.shape[1] :].mean())
        return found


@dataclass(frozen=True)
class KeptByHead:
    """The histogram over heads of the share of blocks that pruning with the tail bound keeps of one held-out training
    context: the share of all heads in each quarter.

    Args:
        name: what a reader sees.
        block: rows and keys per block.
    """

    name: str = "heads by blocks kept"
    block: int = 64
    places: str = "upper end of a quarter of blocks kept"
    percent: bool = True
    at: ClassVar[tuple[float, ...]] = (0.25, 0.5, 0.75, 1.0)
    task: ClassVar[bool] = False

    def measure(self, subject: Probed) -> dict[float, float]:
        maps = gate_maps(subject.model, subject.windows(1.0)[0, :-1], block=self.block)
        kept = [gate.prune["tail"].kept for gate in maps if "tail" in gate.prune]
        if not kept:
            return {}
        heads = np.concatenate(kept)
        return dict(zip(self.at, np.histogram(heads, (0.0, *self.at))[0] / len(heads), strict=True))
