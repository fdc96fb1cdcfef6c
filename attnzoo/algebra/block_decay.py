"""Sums of the log-decays inside a block of tokens, exact for closed gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.algebra.gate import CLOSED, is_closed
from attnzoo.algebra.sums import running_sum
from attnzoo.algebra.values import readable


@dataclass(frozen=True)
class Decay:
    """Log-decays inside a block, exact for closed gates.

    Args:
        entry: ``g_1 + ... + g_i``, ``[..., C]``.
        exit: ``g_{j+1} + ... + g_C``, ``[..., C]``.
        total: ``g_1 + ... + g_C``, ``[...]``.
        between: ``g_{j+1} + ... + g_i`` for j <= i, ``[..., C, C]``; 0 on and above the diagonal.
    """

    entry: Tensor
    exit: Tensor
    total: Tensor
    between: Tensor


def open_sums(g: Tensor, dim: int = -1) -> tuple[Tensor, Tensor | None]:
    """Running sum of the open gates in float64, and running count of the closed ones (None where no gate is closed).

    The log-decay between two tokens is the difference of their sums where their counts agree, else -inf; so inf - inf
    never occurs. In float32 every difference would carry the rounding error of the whole sum.
    """
    if readable(g) and g.numel() and g.detach().min().item() > CLOSED:
        return g.cumsum(dim, dtype=torch.float64), None  # on a CPU, which has it in deterministic mode too
    closed = is_closed(g)
    return running_sum(g.masked_fill(closed, 0.0), dim, torch.float64), closed.cumsum(dim)


def block_decay(g: Tensor) -> Decay:
    """The :class:`Decay` of gates ``[..., C]``."""
    sums, closed = open_sums(g)
    return Decay(*_edges(sums, closed, g.dtype), between=_between(sums, closed, g.dtype))


def edge_decay(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``entry``, ``exit`` and ``total`` of the :class:`Decay` of gates ``[..., C]`` alone."""
    return _edges(*open_sums(g), g.dtype)


def _edges(sums: Tensor, closed: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    entry, exit, total = sums.to(dtype), (sums[..., -1:] - sums).to(dtype), sums[..., -1].to(dtype)
    if closed is not None:
        entry = entry.masked_fill(closed > 0, -torch.inf)
        exit = exit.masked_fill(closed != closed[..., -1:], -torch.inf)
        total = total.masked_fill(closed[..., -1] > 0, -torch.inf)
    return entry, exit, total


def decay_between(g: Tensor) -> Tensor:
    """``between`` of the :class:`Decay` of gates ``[..., C]`` alone, ``[..., C, C]``."""
    sums, closed = open_sums(g)
    return _between(sums, closed, g.dtype)


def _between(sums: Tensor, closed: Tensor | None, dtype: torch.dtype) -> Tensor:
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(dtype).tril_(-1)
    return between if closed is None else between.masked_fill(closed[..., :, None] != closed[..., None, :], -torch.inf)
