"""The search of a learning rate: runs at 1, 2, 5, 10, ... times a power of ten until the best has worse ones beside it.

Source: Lin et al., 2025 (FoX), section 4.1 and appendix B: the peak rates of its table 5, by the training loss of the
last 512 million tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from attnzoo.errors import above
from attnzoo.experiments.experiment import rate_in_words
from attnzoo.experiments.kept import further
from attnzoo.training import read_metrics, train
from attnzoo.training.config import TrainConfig

LAST = 512_000_000  # tokens whose training loss counts, and a tenth of the run at most
logger = logging.getLogger(__name__)


def search(config: TrainConfig, said: Callable[[float, float], None] = lambda lr, loss: None) -> dict[float, float]:
    """The losses by learning rate, whose least has a larger one on both sides; `inf` stands for a run that diverged.

    The runs are folders `lr-RATE` in the configuration's `output_dir`; finished ones are not run again.

    Args:
        config: of the runs; its own learning rate is the first.
        said: called with each rate and its loss.
    """
    above(config.optimizer, 0.0, "lr")
    losses: dict[float, float] = {}
    rate: float | None = config.optimizer.lr
    while rate is not None:
        folder = Path(config.output_dir) / f"lr-{rate_in_words(rate)}"
        try:
            rates = replace(config.optimizer, lr=rate, min_lr=min(rate, config.optimizer.min_lr))
            run = train(replace(config, output_dir=str(folder), optimizer=rates))
            losses[rate] = last_loss(run)
        except FloatingPointError as error:
            logger.warning("learning rate %s: %s", rate_in_words(rate), error)
            losses[rate] = math.inf
        said(rate, losses[rate])
        if math.isinf(losses[rate]) and all(map(math.isinf, losses.values())):  # the first ones were too high
            rate = rate / 10 if len(losses) < 4 else None
        else:
            rate = further(losses)
    return losses


def last_loss(run: Path) -> float:
    """The mean training loss of a run's last tokens: `LAST` of them, or a tenth of all where that is less."""
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    every = rows[-1]["tokens"]
    counted = [row["loss"] for row in rows if row["tokens"] > every - min(LAST, every / 10)]
    return math.fsum(counted) / len(counted)
