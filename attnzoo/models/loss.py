"""Cross-entropy of a language model's head without the logits of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.transitions import compute_dtype

IGNORED = -100  # a target that does not count
LOGITS = 2**27  # logits held at a time: 512 MiB in float32
ALIGNED = 64  # the head is padded to a multiple of rows for a GPU's full speed


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap tanh(logits / softcap)`` (Gemma 2); the logits themselves with None."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def chunk_loss(x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float | None = None) -> Tensor:
    """The sum of the cross-entropies in nats of the logits ``x @ weight.T``, of which the first ``vocab`` columns
    count.

    Args:
        x: [n, D].
        weight: [at least vocab, D].
        targets: int64 [n], -100 where a row does not count.
        vocab: size of the vocabulary.
        softcap: see :func:`capped`.
    """
    logits = capped(F.linear(x, weight)[:, :vocab], softcap)
    return F.cross_entropy(logits.to(compute_dtype(logits)), targets, ignore_index=IGNORED, reduction="sum")


def divergence(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float | None, theirs: Tensor, *, head: Tensor,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """The sum of the divergences KL(teacher || model) in nats of the next token, by the arguments of
    :func:`chunk_loss` and these.

    Args:
        theirs: the teacher's x, [n, its D].
        head: the teacher's weight, [at least vocab, its D].
        cap: the teacher's softcap.
    """
    logits, wanted = F.linear(x, weight)[:, :vocab], F.linear(theirs, head)[:, :vocab]
    wide = compute_dtype(logits)
    ours, aims = (capped(each, by).to(wide).log_softmax(-1) for each, by in ((logits, softcap), (wanted, cap)))
    return (F.kl_div(ours, aims, reduction="none", log_target=True).sum(-1) * (targets != IGNORED)).sum()


def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    limit: int = LOGITS,
    softcap: float | None = None,
    chunk: Callable[..., Tensor] = chunk_loss,
    beside: Sequence[Tensor] = (),
) -> Tensor:
    """The mean cross-entropy in nats of the logits ``x @ weight.T`` over the targets that count.

    Above ``limit`` logits, rows are taken in chunks of one size whose logits are computed again in the backward pass,
    so that no more than one chunk's are ever held. On a GPU the weight gets rows of zeros up to a multiple of 64: a
    product with 50257 rows would run at a quarter of the speed.

    Args:
        x: the head's input, [N, D].
        weight: the head's weight, [vocab, D].
        targets: integers [N], -100 where a row does not count.
        limit: the most logits to hold at a time.
        softcap: see :func:`capped`.
        chunk: :func:`chunk_loss`, a compiled version, or another sum over rows.
        beside: further tensors of N rows, of which ``chunk`` gets the same rows.
    """
    targets, vocab, N = targets.long(), weight.shape[0], len(x)
    if x.is_cuda:
        weight = F.pad(weight, (0, 0, 0, -vocab % ALIGNED))
    chunks = -(-N // max(1, limit // len(weight)))
    if chunks == 1:
        return chunk(x, weight, targets, vocab, softcap, *beside) / (targets != IGNORED).sum()
    rows = -(-N // chunks)
    sums = []
    for part in (slice(i, i + rows) for i in range(0, N, rows)):
        more = [each[part] for each in beside]
        sums.append(checkpoint(chunk, x[part], weight, targets[part], vocab, softcap, *more, use_reentrant=False))
    return torch.stack(sums).sum() / (targets != IGNORED).sum()
