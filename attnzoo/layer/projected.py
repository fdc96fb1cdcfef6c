"""The q, k, v and gate of one call, after projections and norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.layer.gates.base import Strength


@dataclass(frozen=True)
class Projected:
    """Queries, keys, values and gate of one call; T counts n sub-tokens per token where each token writes n times.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, G, K]``.
        v: ``[B, T, G, V]``.
        gate: the parts that the variant requires.
        write: the write strength of each token, as a gate projection returns it.
        values: ``[B, T, G, V]``, v of each token as it was projected.
        of_gate: the output gate's input, ``[B, T, D]``.
        bonus: what is added to the normed output, ``[B, T, H, V]``, or None.
        logits: the output gate's, ``[B, T, H * V]``, where they are known.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    write: Strength
    values: Tensor
    of_gate: Tensor
    bonus: Tensor | None = None
    logits: Tensor | None = None
