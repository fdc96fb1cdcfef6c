"""Norms of queries and keys and the finish of heads' outputs in a fused step of either side."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """Root-mean-square norms of each head's query and key.

    Args:
        q, k: scale of every channel, ``[H, K]`` and ``[G, K]``, or ``[K]`` for all heads.
        eps: added to the mean squares.
    """

    q: Tensor
    k: Tensor
    eps: float


class Finish(NamedTuple):
    """The finish of each head's output: a norm, then a gate.

    Args:
        scale: of every channel, ``[H, V]``, or ``[V]`` for all heads; None without a norm.
        eps: added to the mean square.
        centred: whether the mean is taken away first (GroupNorm).
        gate: logits of the factor of every channel, ``[B, T, H, V]``; None without a gate.
        swish: ``x sigmoid(x)`` of them instead of ``sigmoid(x)``.
    """

    scale: Tensor | None = None
    eps: float = 0.0
    centred: bool = False
    gate: Tensor | None = None
    swish: bool = False
