"""Exchanges between ranks, with gradients: each is one operation of ``torch.distributed`` there and one back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has new names for these
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Traffic:
    """Bytes that this process has sent to others, forward and backward."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, x: Tensor, times: float = 1) -> None:
        self.bytes += int(x.numel() * x.element_size() * times)


traffic = Traffic()


class Works(list[Any]):
    """Collectives that have been started; what they fill may be read after :meth:`wait`."""

    def wait(self) -> None:
        """Return when all have ended (on a GPU: what is computed from now on waits for them)."""
        for work in self:
            work.wait()
        self.clear()


def gather(group: Any, ranks: int, *xs: Tensor, works: Works | None = None) -> tuple[list[Tensor], Tensor]:
    """The tensors of all ranks, ``[ranks, ...]`` each, and the knot for :func:`tied`; all ranks give the same shapes.

    With ``works`` they may be read after its wait alone.
    """
    *found, knot = _Gather.apply(group, ranks, works, *xs)  # type: ignore[no-untyped-call]
    return found, knot


def exchange(group: Any, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
    """Rows ``[n, ...]``, so many to each rank in turn, for so many from each."""
    return cast(Tensor, _Exchange.apply(group, x, list(sends), list(receives)))  # type: ignore[no-untyped-call]


def tied(x: Tensor, *knots: Tensor) -> Tensor:
    """``x``, whose gradient goes through the collectives before these knots, whether or not it comes from them.

    A rank that has read nothing of what it was sent must still send the others the gradients of what is theirs.
    """
    return cast(Tensor, _Tied.apply(x, *knots))  # type: ignore[no-untyped-call]


def together(*xs: Tensor) -> tuple[Tensor, ...]:
    """Tensors, whichever of which a rank reads: the gradients of all collectives before them are asked for."""
    knots = [x for x in xs if x.requires_grad]
    return tuple(tied(x, *(y for y in knots if y is not x)) if x.requires_grad else x for x in xs)


def swap(group: Any, x: Tensor, sends: Sequence[int], receives: Sequence[int], works: Works | None = None) -> Tensor:
    """:func:`exchange` without a gradient; with ``works`` it may be read after its wait alone."""
    out = x.new_empty(sum(receives), *x.shape[1:])
    traffic.add(x, (sum(sends) - sends[dist.get_rank(group)]) / max(1, sum(sends)))
    given = (out, x.contiguous(), list(receives), list(sends))
    _start(dist.all_to_all_single, works, *given, group=group)
    return out


def _start(collective: Callable[..., Any], works: Works | None, *given: Any, group: Any) -> None:
    """Run it to its end, or start it where there are ``works`` to wait for."""
    work = collective(*given, group=group, async_op=works is not None)
    if works is not None and work is not None:
        works.append(work)


class _Gather(torch.autograd.Function):
    """One node for all tensors, so that all ranks ask for their gradients in the same order."""

    @staticmethod
    def forward(ctx: Any, group: Any, ranks: int, works: Works | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, found = group, []
        for x in xs:
            traffic.add(x, ranks - 1)
            found.append(x.new_empty(ranks, *x.shape))
            _start(_all_gather, works, found[-1].view(-1), x.contiguous().view(-1), group=group)
        return *found, xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found, works = [], Works()
        for grad in grads[:-1]:
            traffic.add(grad, 1 - 1 / len(grad))
            found.append(grad.new_empty(grad.shape[1:]))
            _start(_reduce_scatter, works, found[-1].view(-1), grad.contiguous().view(-1), group=ctx.group)
        works.wait()
        return None, None, None, *found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, (sends, receives)
        return swap(group, x, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sends, receives = ctx.sizes
        return None, swap(ctx.group, grad, receives, sends), None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *knots: Tensor) -> Tensor:
        ctx.knots = len(knots)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *([None] * ctx.knots)  # what made them runs all the same
