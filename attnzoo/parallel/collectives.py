"""Exchanges between ranks, with gradients: each is one operation of ``torch.distributed`` there and one back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has new names for these
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def urgent(backend: str, timeout: timedelta | None = None) -> Any:
    """Options of a process group whose exchanges begin although kernels fill the GPU; None for other backends than
    NCCL."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


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


class Exchange:
    """Rows on their way to other ranks, and later their gradients on the way back.

    Both ways run beside what is computed meanwhile: rows from :func:`depart` until they are asked for, gradients from
    when all of those of the rows that came are there until nothing else is left to be computed.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.works = group, Works()
        self.coming: list[Tensor] = []

    def start(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """What the collectives fill, which have been started."""
        raise NotImplementedError

    def start_back(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The same for the gradients of what came."""
        raise NotImplementedError

    def total(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of what was sent, from those that came back."""
        return list(grads)


def depart(exchange: Exchange, *xs: Tensor) -> Callable[[], tuple[list[Tensor], Tensor]]:
    """A function that waits for what comes in exchange for ``xs``, and returns it and the knot for :func:`tied`.

    Backward runs in the opposite order of forward: gradients are sent back before those of whatever was computed
    before the call, and waited for after those of whatever was computed since ``depart``.
    """
    knot = _Departed.apply(exchange, *xs)  # type: ignore[no-untyped-call]

    def arrived() -> tuple[list[Tensor], Tensor]:
        exchange.works.wait()
        *found, last = _Arrived.apply(exchange, knot)  # type: ignore[no-untyped-call]
        return found, last

    return arrived


class Gathering(Exchange):
    """The tensors of all ranks, ``[ranks, ...]`` each, for this rank's; all give the same shapes."""

    def __init__(self, group: Any, ranks: int) -> None:
        super().__init__(group)
        self.ranks = ranks

    def start(self, xs: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for x in xs:
            traffic.add(x, self.ranks - 1)
            found.append(x.new_empty(self.ranks, *x.shape))
            _start(_all_gather, self.works, found[-1].view(-1), x.contiguous().view(-1), group=self.group)
        return found

    def start_back(self, grads: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for grad in grads:
            traffic.add(grad, 1 - 1 / len(grad))
            found.append(grad.new_empty(grad.shape[1:]))
            _start(_reduce_scatter, self.works, found[-1].view(-1), grad.contiguous().view(-1), group=self.group)
        return found


def gather(group: Any, ranks: int, *xs: Tensor) -> tuple[list[Tensor], Tensor]:
    """What :class:`Gathering` gives of ``xs``, waited for at once, and the knot for :func:`tied`."""
    return depart(Gathering(group, ranks), *xs)()


def exchange(group: Any, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
    """Rows ``[n, ...]``, so many to each rank in turn, for so many from each."""
    return cast(Tensor, _Exchange.apply(group, x, list(sends), list(receives)))  # type: ignore[no-untyped-call]


def tied(x: Tensor, *knots: Tensor) -> Tensor:
    """``x``, whose gradient goes through the collectives that gave these knots, whether or not it comes from them.

    A rank that has read nothing of what it was sent must still send the others the gradients of what is theirs.
    """
    return cast(Tensor, _Tied.apply(x, *knots))  # type: ignore[no-untyped-call]


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


class _Departed(torch.autograd.Function):
    """One node for all tensors, so that all ranks ask for their gradients in the same order."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *xs: Tensor) -> Tensor:
        ctx.exchange, exchange.coming = exchange, exchange.start(xs)
        return xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, knot: Tensor) -> tuple[Any, ...]:
        ctx.exchange.works.wait()
        grads, ctx.exchange.coming = ctx.exchange.coming, []
        return None, *ctx.exchange.total(grads)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, knot: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        found, exchange.coming = exchange.coming, []
        return *found, torch.empty_like(knot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.coming = ctx.exchange.start_back(grads[:-1])
        return None, grads[-1].new_empty(0)


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
        ctx.save_for_backward(*knots)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *ctx.saved_tensors  # without entries
