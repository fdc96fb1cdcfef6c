"""Training and evaluation mode of a model's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Within it the models are in evaluation mode; after it each module is in its own mode again, such as one that its
    owner has frozen while the others train."""
    before = [(part, part.training) for model in models for part in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
