"""What the core of a layer is given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.layer.gates.base import Write


@dataclass(frozen=True)
class Projected:
    """Queries, keys, values and gate of the rows of one call, with T n sub-tokens where tokens write n times each.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, G, K]``.
        v: ``[B, T, G, V]``.
        gate: the parts that the variant requires.
        write: how strongly each token writes, as a gate projection gives it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    write: Write = None
