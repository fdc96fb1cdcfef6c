"""The model of a new run, in the dtype of its weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from attnzoo.models import LanguageModel

if TYPE_CHECKING:
    from attnzoo.models.config import ModelConfig
    from attnzoo.training.config import TrainConfig


def new_model(config: TrainConfig) -> LanguageModel:
    """The model of a run with its first weights, from torch's global random state; on the CPU, in training mode.

    With `mixed_precision=pure_bf16` the weights are bfloat16, but for the float32 parameters of a
    :class:`~attnzoo.precision.PreciseModule`.

    Raises:
        ValueError: a variant or one of its options does not exist; the message begins with the field.
    """
    try:
        model = LanguageModel(config.model)
    except ValueError as error:
        raise ValueError(f"model.{_of_field(config.model, str(error))}") from error
    return model.to(torch.bfloat16) if config.mixed_precision == "pure_bf16" else model


def _of_field(model: ModelConfig, said: str) -> str:
    """A message about a layer, after the field of the model's configuration that the layer takes its option from."""
    about = re.findall(r"\w+", said.partition(":")[0])
    if about[0] in model.attention_options:
        return f"attention_options.{said}"
    if about[0] in vars(model):
        return said
    return f"attention{'_options' if {*about} & model.attention_options.keys() else ''}: {said}"
