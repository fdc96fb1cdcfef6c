"""Parts of a layer that a step over pages applies to its tokens before they are attended to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.parts import Finish, Norm


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


class TokenParts(NamedTuple):
    """The parts of a whole step besides attention.

    Args:
        gate: log decays ``[B, T, H]``, <= 0, or what they are made of; None where nothing decays.
        shift: of keys and values before the norm, or None.
        norm: of queries and keys, or None.
        finish: what the output goes through.
    """

    gate: Tensor | Forget | None = None
    shift: Shift | None = None
    norm: Norm | None = None
    finish: Finish = Finish()
