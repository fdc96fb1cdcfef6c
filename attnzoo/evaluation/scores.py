"""Likelihoods of known tokens by a model, without holding the logits of a whole row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.data.tasks import UNASKED

LOGITS = 2**26  # logits held at a time


@torch.inference_mode()
def score_targets(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of each target, and whether another token is likelier.

    The memory is that of the hidden states of all rows and of the logits of some: O(B T) at any length.

    Args:
        model: an :class:`attnzoo.models.LanguageModel`; or any other that is called with token ids ``[B, T]`` and whose
            output has ``logits [B, T, vocabulary]``, all of which are then held.
        tokens: integers ``[B, T]``.
        targets: integers ``[B, T]``, the token after each; -100 where none is scored.

    Returns:
        Negative log-likelihoods in nats, float64, 0 where none is scored; and True where the likeliest token is another
        one. Both ``[B, T]`` on the model's device.
    """
    device = next(model.parameters(), torch.empty(0)).device
    tokens, targets = tokens.to(device), targets.to(device)
    asked = targets != UNASKED
    given, head = _before_the_head(model, tokens)
    given, expected = given[asked], targets[asked].long()  # [n, ...], [n]
    nats, wrong = (
        [torch.empty(0, dtype=torch.float64, device=device)],
        [torch.empty(0, dtype=torch.bool, device=device)],
    )
    first, size = 0, 1  # the first row of logits has their width
    while first < len(given):
        logits, some = head(given[first : first + size]).float(), expected[first : first + size]
        nats.append(F.cross_entropy(logits, some, reduction="none").double())
        wrong.append(logits.argmax(-1) != some)
        first += size
        size = max(1, LOGITS // logits.shape[-1])
    places = torch.zeros(targets.shape, device=device)
    return places.double().masked_scatter(asked, torch.cat(nats)), places.bool().masked_scatter(asked, torch.cat(wrong))


def _before_the_head(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The head's input ``[B, T, D]`` and the head; for other models the logits and an identity."""
    whole: Any = model
    if hasattr(model, "hidden") and hasattr(model, "logits"):
        return whole.hidden(tokens), whole.logits
    return whole(tokens).logits, lambda logits: logits
