"""Parts around a norm: a factor of each channel, and a product of v that is added first."""

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
    """The term ``scale_h v_t`` that is added before the norm.

    Args:
        v: [B, T, G, V], with G a divisor of H.
        scale: [H].
    """

    v: Tensor
    scale: Tensor
