"""Cross-entropy of a language model's head without the logits of the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # a target that does not count
LOGITS = 2**25  # held at a time: 128 MiB in float32


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, limit: int = LOGITS) -> Tensor:
    """Mean cross-entropy in nats of `x @ weight.T` over the targets that count.

    Above `limit` logits, rows are taken in chunks whose logits are computed again in the backward pass, so that no
    more than one chunk's are ever held.

    Args:
        x: what the head reads, [N, D].
        weight: of the head, [vocab, D].
        targets: integers [N], -100 where nothing is asked.
        limit: how many logits may be held.
    """
    targets = targets.long()
    rows = max(1, limit // weight.shape[0])
    if len(x) <= rows:
        return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORED)
    sums = [
        checkpoint(_chunk, x[first : first + rows], weight, targets[first : first + rows], use_reentrant=False)
        for first in range(0, len(x), rows)
    ]
    return torch.stack(sums).sum() / (targets != IGNORED).sum()


def _chunk(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORED, reduction="sum")
