"""What a step does to its token before the state changes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAPS = ("identity", "silu", "relu", "elu")  # feature maps of queries and keys; elu is elu + 1


class Convolution(NamedTuple):
    """A convolution of each channel over the last n tokens, then a SiLU or nothing.

    Args:
        weight: ``[X, n]``, the latest token last.
        bias: ``[X]``, or None.
        before: the n - 1 tokens before the step, ``[B, n - 1, X]``, contiguous; the step moves it on.
        silu: whether a SiLU follows.
    """

    weight: Tensor
    bias: Tensor | None
    before: Tensor
    silu: bool = True


class Decay(NamedTuple):
    """Log decays ``factor exp(log_a) log sigmoid(x)`` or, ``opposite``, of -x, which is ``-softplus(x)``.

    Args:
        logits: x without its bias, ``[B, 1, H]``, or ``[B, 1, H K]`` for a decay per channel.
        bias: of each logit, or None.
        log_a: ``[H]``, or None for 0.
        factor: at least 0.
        opposite: see above.
    """

    logits: Tensor
    bias: Tensor | None = None
    log_a: Tensor | None = None
    factor: float = 1.0
    opposite: bool = False
