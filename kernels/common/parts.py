"""What a step of either side does to queries and keys, and to the output of its heads."""

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
    """What the output of each head goes through before it leaves: a norm, then a gate.

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
