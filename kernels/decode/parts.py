"""What a step does to its tokens before they are attended to, and to its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shift(NamedTuple):
    """Keys and values that are mixed with those of the token before: ``y_t = a_t x_{t-1} + (1 - a_t) x_t``.

    Args:
        k, v: logits of a, ``[B, T, G]``.
        k_before, v_before: keys and values of the token before the step, ``[B, G, K]`` and ``[B, G, V]``, contiguous.
            A step of one token leaves its own there, for sequences that get it.
    """

    k: Tensor
    v: Tensor
    k_before: Tensor
    v_before: Tensor


class Norm(NamedTuple):
    """Root-mean-square norms of each head's query and key.

    Args:
        q, k: scale of every channel, ``[H, K]`` and ``[G, K]``, or ``[K]`` for all heads.
        eps: added to the mean squares.
    """

    q: Tensor
    k: Tensor
    eps: float


class Forget(NamedTuple):
    """Log decays ``factor log sigmoid(logits + bias)``.

    Args:
        logits: ``[B, T, H]``.
        bias: ``[H]``, or None.
        factor: at least 0.
    """

    logits: Tensor
    bias: Tensor | None
    factor: float = 1.0


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
