"""Cross-entropy of a language model's head without the logits of the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # a target that does not count
LOGITS = 2**27  # held at a time: 512 MiB in float32
ALIGNED = 64  # rows of a head that a GPU multiplies by at its full speed


def chunk_loss(x: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Sum of the cross-entropies in nats of the first ``vocab`` columns of ``x @ weight.T``.

    Args:
        x: [n, D].
        weight: [at least vocab, D].
        targets: int64 [n], -100 where nothing is asked.
        vocab: size of the vocabulary.
    """
    logits = F.linear(x, weight)[:, :vocab].float()  # [n, vocab]
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, limit: int = LOGITS, chunk: Callable[..., Tensor] = chunk_loss
) -> Tensor:
    """Mean cross-entropy in nats of ``x @ weight.T`` over the targets that count.

    Above ``limit`` logits, rows are taken in chunks of one size whose logits are computed again in the backward pass,
    so that no more than one chunk's are ever held. On a GPU the weight gets rows of zeros up to a multiple of 64:
    a vocabulary of 50257 would be multiplied at a quarter of the speed.

    Args:
        x: what the head reads, [N, D].
        weight: of the head, [vocab, D].
        targets: integers [N], -100 where nothing is asked.
        limit: how many logits may be held.
        chunk: :func:`chunk_loss`, or a compiled one.
    """
    targets, vocab, N = targets.long(), weight.shape[0], len(x)
    if x.is_cuda:
        weight = F.pad(weight, (0, 0, 0, -vocab % ALIGNED))
    chunks = -(-N // max(1, limit // len(weight)))
    if chunks == 1:
        return chunk(x, weight, targets, vocab) / (targets != IGNORED).sum()
    rows = -(-N // chunks)
    sums = [
        checkpoint(chunk, x[i : i + rows], weight, targets[i : i + rows], vocab, use_reentrant=False)
        for i in range(0, N, rows)
    ]
    return torch.stack(sums).sum() / (targets != IGNORED).sum()
