"""Cross-entropy of a language model's head without the logits of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.values import in_transform
from attnzoo.precision import wide, wide_dtype

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
    return F.cross_entropy(wide(logits), targets, ignore_index=IGNORED, reduction="sum")


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
    dtype = wide_dtype(logits.dtype)
    ours, aims = (capped(each, by).to(dtype).log_softmax(-1) for each, by in ((logits, softcap), (wanted, cap)))
    return (F.kl_div(ours, aims, reduction="none", log_target=True).sum(-1) * (targets != IGNORED)).sum()


class _Chunks(NamedTuple):
    """The rows of a head's loss in chunks of ``size``, beside what is the same for all of them; see `head_loss`."""

    size: int
    chunk: Callable[..., Tensor]
    targets: Tensor
    vocab: int
    softcap: float | None
    beside: Sequence[Tensor]

    def given(self, x: Tensor, weight: Tensor) -> Iterator[tuple[Any, ...]]:
        """The arguments of ``chunk``, one chunk after the other."""
        for part in (slice(i, i + self.size) for i in range(0, len(x), self.size)):
            beside = (each[part] for each in self.beside)
            yield x[part], weight, self.targets[part], self.vocab, self.softcap, *beside

    def recomputed(self, x: Tensor, weight: Tensor) -> Tensor:
        """The loss summed over all rows; its backward pass computes the logits again."""
        sums = [checkpoint(self.chunk, *given, use_reentrant=False) for given in self.given(x, weight)]
        return torch.stack(sums).sum()


class _WithGradients(torch.autograd.Function):
    """The sum over all chunks, with the gradients of each computed while its logits are there.

    So no product is computed twice. Gradients of gradients are those of ``recomputed``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: _Chunks) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad[:2]
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        rounded = weight.detach().to(dtype).requires_grad_(of_weight)  # once, and not in every chunk
        sums, dxs, dw = [], [], None
        for rows, *given in chunks.given(x.detach(), rounded):
            leaves = [one for one in (rows.requires_grad_(of_x), rounded) if one.requires_grad]
            with torch.enable_grad():
                loss = chunks.chunk(rows, *given)
            found = [*torch.autograd.grad(loss, leaves)]
            sums.append(loss.detach())
            if of_weight:
                one = found.pop()
                dw = wide(one) if dw is None else dw.add_(one)
            dxs += found
        ctx.chunks = chunks
        ctx.save_for_backward(x, weight, torch.cat(dxs) if dxs else None, dw)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, dx, dw = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *(None if of is None else (of * given).to(one.dtype) for one, of in ((x, dx), (weight, dw))), None
        wanted = [of is not None for of in (dx, dw)]
        leaves = [one for one, asked in zip((x, weight), wanted, strict=True) if asked]
        found = iter(torch.autograd.grad(ctx.chunks.recomputed(x, weight), leaves, given, create_graph=True))
        return *(next(found) if asked else None for asked in wanted), None


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

    Above ``limit`` logits, rows are taken in chunks of one size, so that no more than one chunk's are ever held:
    gradients are computed at once, or, in what is compiled or transformed, with the logits computed again in the
    backward pass. On a GPU the weight gets rows of zeros up to a multiple of 64: a
    product with 50257 rows would run at a quarter of the speed.

    Args:
        x: the head's input, [N, D].
        weight: the head's weight, [vocab, D].
        targets: integers [N], -100 where a row does not count.
        limit: the most logits to hold at a time.
        softcap: see :func:`capped`.
        chunk: :func:`chunk_loss`, a compiled version, or another sum over rows.
        beside: further tensors of N rows without gradients, of which ``chunk`` gets the same rows.
    """
    targets, vocab, N = targets.long(), weight.shape[0], len(x)
    if x.is_cuda:
        weight = F.pad(weight, (0, 0, 0, -vocab % ALIGNED))
    chunks = -(-N // max(1, limit // len(weight)))
    if chunks == 1:
        return chunk(x, weight, targets, vocab, softcap, *beside) / (targets != IGNORED).sum()
    parts = _Chunks(-(-N // chunks), chunk, targets, vocab, softcap, beside)
    at_once = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    at_once = at_once and not (torch.compiler.is_compiling() or in_transform())
    with_gradients = cast(Callable[..., Tensor], _WithGradients.apply)
    total = with_gradients(x, weight, parts) if at_once else parts.recomputed(x, weight)
    return total / (targets != IGNORED).sum()
