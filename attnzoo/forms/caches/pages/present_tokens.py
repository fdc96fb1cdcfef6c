"""The tokens of a call that exist, put in front or last of their rows: pages hold no padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def in_front(B: int, T: int, valid: Tensor | None, device: torch.device) -> tuple[Tensor, list[int]]:
    """The T tokens of each row with those that exist first, ``[B, T]``, and how many do."""
    if valid is None:
        return torch.arange(T, device=device).expand(B, T), [T] * B
    return (~valid).int().argsort(dim=1, stable=True), valid.sum(1).tolist()


@dataclass(frozen=True, eq=False)
class LastRows:
    """The tokens of a call with those that exist last, as the kernels over pages take them.

    Args:
        counts: how many of each row exist, on the host.
        count: the same, ``[B]`` int32; None where all do.
        order: the tokens in that order, ``[B, T]``; None where all exist.
    """

    counts: list[int]
    count: Tensor | None = None
    order: Tensor | None = None

    @staticmethod
    def of(valid: Tensor | None, B: int, T: int) -> LastRows:
        """The tokens of a call that exist: those of the mask ``valid [B, T]`` bool, None for all."""
        if valid is None:
            return LastRows([T] * B)
        count = valid.sum(1)
        return LastRows(count.tolist(), count.int(), valid.int().argsort(dim=1, stable=True))

    def take(self, x: Tensor) -> Tensor:
        """``x [B, T, ...]`` in this order."""
        return x if self.order is None else ordered(x, self.order)

    def put(self, x: Tensor) -> Tensor:
        """``x [B, T, ...]``, which is in this order, as it was."""
        return x if self.order is None else ordered(x, self.order.argsort(1))


def ordered(x: Tensor, order: Tensor) -> Tensor:
    """``x [B, T, ...]`` with its tokens in the order ``[B, n]``."""
    return x.gather(1, order.view(*order.shape, *(1,) * (x.ndim - 2)).expand_as(x))
