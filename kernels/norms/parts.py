"""What a norm is computed with: a factor of each channel, and what is added first."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gated(NamedTuple):
    """A factor of every channel, ``sigmoid(logits)``, or ``swish`` with ``logits sigmoid(logits)``.

    Args:
        logits: [B, T, H V].
        swish: see above.
        first: whether it comes before the norm.
    """

    logits: Tensor
    swish: bool = False
    first: bool = False


class Skip(NamedTuple):
    """What is added before all else: ``scale_h v_t``.

    Args:
        v: [B, T, G, V], with G a divisor of H.
        scale: [H].
    """

    v: Tensor
    scale: Tensor
