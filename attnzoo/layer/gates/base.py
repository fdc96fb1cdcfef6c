"""What every gate projection is: from the hidden states of a layer to the gate of its variant.

Each takes the layer's sizes and its own options by keyword, says which gate parts it ``provides``, and maps
``(x [B, T, D], k [B, T, G, K], stream)`` to a gate and a write strength (None, a factor on v ``[B, T, H]`` or
``[B, T, G]``, or ``DELTA_RULE``); it may give the keys too (``keys``). A variant's file names its default; any
projection that provides the same parts may stand in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.layer.stream import Stream
from attnzoo.precision import PreciseModule

INIT_STD = 0.02
DELTA_RULE: Literal["delta_rule"] = "delta_rule"  # w is k itself, and beta is the write strength as well

Write = Tensor | Literal["delta_rule"] | None


@dataclass(frozen=True)
class Sizes:
    """D hidden, H query heads, G key/value heads, K key channels per head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class GateProjection(PreciseModule):
    """Base of all projections: no gate at all. ``provides`` names the gate parts that a subclass makes, and
    ``unit_keys`` says that it needs keys of unit length (w = k), and
    ``writes`` that it gives a write strength.

    Args:
        sizes: of the layer.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    unit_keys: ClassVar[bool] = False  # whether w = k, so that the layer must give unit keys
    writes: ClassVar[bool] = False  # whether it says how strongly a token writes, which only a linear state can honour

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def reset_parameters(self) -> None:
        """The initialisation of the paper."""

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        """The gate of each token, and how strongly it writes.

        Args:
            x: hidden states, ``[B, T, D]``.
            k: keys as the core gets them, ``[B, T, G, K]``; where tokens write n times each ``[B, T, G, n, K]``.
            stream: the rows' padding and cache, for projections that look back (a short convolution).

        Returns:
            A gate with the parts ``provides``, and a factor on v ``[B, T, H]`` or ``[B, T, G]``, or None, or
            ``DELTA_RULE`` where w is k and that factor is beta.
        """
        return Gate(), None

    def keys(self, k: Tensor, gate: Gate) -> Tensor:
        """The keys that the core gets, ``[B, T, G, K]``: k itself, unless the gate gives them."""
        return k


def reset_linear(linear: nn.Linear) -> None:
    """Normal weights of deviation ``INIT_STD``, biases 0."""
    nn.init.normal_(linear.weight, std=INIT_STD)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
