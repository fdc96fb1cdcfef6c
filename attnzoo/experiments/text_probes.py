"""Further probes on held-out text: losses of its stretches and of a text that is read twice, a needle in it, what
pruning keeps of it by head, depth and eps."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from attnzoo.algebra.pruning import Prune
from attnzoo.data.tasks import Examples
from attnzoo.evaluation import measure_pruning, pruning, token_losses
from attnzoo.evaluation.answers import Guess, measure_guess
from attnzoo.evaluation.needle import text_needle
from attnzoo.evaluation.pruning import share_kept, window_seconds
from attnzoo.experiments.probes import ROWS_SEED, ByLength, Probed, of_pruning, text_losses
from attnzoo.trained.model import load_trained


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
            found[length] = float(subject.losses(rows)[:, text.shape[1] :].mean())
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

    @of_pruning
    def measure(self, subject: Probed) -> dict[float, float]:
        maps = subject.maps(1.0, self.block)
        heads = np.concatenate([gate.prune["tail"].kept for gate in maps if "tail" in gate.prune])
        return dict(zip(self.at, np.histogram(heads, (0.0, *self.at))[0] / len(heads), strict=True))


@dataclass(frozen=True)
class Needle:
    """The share of the tokens of a number that are wrong where it stands in held-out text, over its depth, in a row
    that ends in the question for it (Lin et al., 2025, appendix B.3, easy mode, with a number that is counted).

    Args:
        name: what a reader sees.
        length: of the rows, in training contexts; at least 256 tokens.
        at: the depths, from 0 (the row's beginning) to 1 (right before the question).
    """

    name: str = "needle, wrong"
    length: float = 1.0
    at: tuple[float, ...] = (0.0, 0.5, 1.0)
    places: str = "depth"
    percent: bool = True
    task: ClassVar[bool] = False

    @property
    def longest(self) -> float:
        return self.length

    def asked(self, subject: Probed) -> dict[float, Examples]:
        """The rows by depth."""
        encode = load_trained(subject.config.output_dir).encode
        tokens = max(256, round(self.length * subject.config.data.context_length))
        needle = text_needle(subject.text, encode, "easy")
        return {depth: Examples(needle(depth), tokens, ROWS_SEED, held_out=True) for depth in self.at}

    def measure(self, subject: Probed) -> dict[float, float]:
        return {depth: subject.wrong(rows) for depth, rows in self.asked(subject).items()}

    def guess(self, subject: Probed) -> dict[float, Guess]:
        return {depth: measure_guess(rows, subject.rows) for depth, rows in self.asked(subject).items()}


@dataclass(frozen=True)
class KeptByDepth:
    """The share of visible blocks that pruning with the tail bound computes of one held-out training context, in each
    quarter of the layers: the mean over its heads.

    Args:
        name: what a reader sees.
    """

    name: str = "blocks kept by depth"
    places: str = "end of a quarter of the layers"
    percent: bool = True
    at: ClassVar[tuple[float, ...]] = (0.25, 0.5, 0.75, 1.0)
    task: ClassVar[bool] = False

    @of_pruning
    def measure(self, subject: Probed) -> dict[float, float]:
        with subject.precision():
            kept = 1 - np.array(measure_pruning(subject.model, subject.windows(1.0)[0, :-1]).heads).mean(1)
        ends = [(math.floor((end - 0.25) * kept.size), math.ceil(end * kept.size)) for end in self.at]
        return {at: float(kept[first:last].mean()) for at, (first, last) in zip(self.at, ends, strict=True)}


@dataclass(frozen=True)
class ByEps:
    """What pruning with the tail bound does by eps, the weight that a row may lose, on held-out text: nats added to the
    loss, the share of blocks kept, or milliseconds of a forward pass over one training context.

    Args:
        name: what a reader sees.
        of: `change`, `kept` or `seconds`.
        at: the values of eps.
    """

    name: str
    of: Literal["change", "kept", "seconds"]
    at: tuple[float, ...] = (1e-6, math.exp(-10), 1e-3, 1e-2, 1e-1)
    places: str = "eps"
    task: ClassVar[bool] = False

    @property
    def percent(self) -> bool:
        return self.of == "kept"

    @of_pruning
    def measure(self, subject: Probed) -> dict[float, float]:
        model, windows, batch = subject.model, subject.windows(1.0), subject.at_once(1.0)

        def measured(prune: Prune | None) -> float:
            with pruning(model, prune):
                if self.of == "change":
                    return float(token_losses(model, windows, batch).mean())
                if self.of == "kept":
                    return share_kept(model, windows[0, :-1], prune)
                return 1e3 * window_seconds(model, windows[:batch, :-1])

        # In the training's precision, but for a change of the loss: what 16 bits round may be more than that.
        with nullcontext() if self.of == "change" else subject.precision():
            plain = measured(None)  # for times, a first pass that loads what later ones need
            since = plain if self.of == "change" else 0.0
            return {eps: measured(Prune(eps)) - since for eps in self.at}
