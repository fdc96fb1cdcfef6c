"""The model of a new run, in the dtype of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnzoo.models import LanguageModel

if TYPE_CHECKING:
    from attnzoo.training.config import TrainConfig


def new_model(config: TrainConfig) -> LanguageModel:
    """The model of a run with its first weights, from torch's global random state; on the CPU, in training mode.

    With `mixed_precision=pure_bf16` the weights are bfloat16, but for the float32 parameters of a
    :class:`~attnzoo.precision.PreciseModule`.

    Raises:
        ValueError: a variant or one of its options does not exist.
    """
    model = LanguageModel(config.model)
    return model.to(torch.bfloat16) if config.mixed_precision == "pure_bf16" else model
