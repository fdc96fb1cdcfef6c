"""Linear forms and layer settings for any set of gate parts whose transition is a product of known factors.

Pairs of the registry's table that have no file of their own use these.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.transitions import Identity, Product, Transition
from attnzoo.forms.backends.chunks import SCALAR_DECAY
from attnzoo.forms.backends.fla import (
    Operation,
    channel_delta_rule,
    delta_rule,
    diagonal_decay,
    fla_kernel,
    scalar_decay,
)
from attnzoo.forms.backends.recurrent import FEW_TOKENS
from attnzoo.forms.linear import LinearForms
from attnzoo.forms.protocol import Kernel
from attnzoo.recurrences.complex_linear import ROTATED_DECAY, Rotation, rotated
from attnzoo.recurrences.deltanet import Householder, Oblique

FACTORS = [Diagonal(), Rotation(), Householder(), Oblique()]  # the known factors of R_t, in their order in it
Kinds = tuple[type[Transition], ...]
CHUNK_SIZE = 32  # tokens of a block whose transitions are multiplied as matrices
# operations of flash-linear-attention by the factors of R_t; each takes a scalar decay too
OPERATIONS: dict[Kinds, Operation] = {
    (): scalar_decay, (Diagonal,): diagonal_decay, (Householder,): delta_rule,
    (Diagonal, Householder): channel_delta_rule, (Rotation,): rotated(scalar_decay),
    (Rotation, Householder): rotated(delta_rule),
}  # fmt: skip
CHUNKS: dict[Kinds, Kernel] = {(): SCALAR_DECAY, (Rotation,): ROTATED_DECAY}  # chunk kernels of our own


def factors_of(parts: Collection[str]) -> tuple[Transition, ...]:
    """The factors of ``R_t`` of a gate with these parts, in the order of ``Gate.dense``.

    Raises:
        ValueError: a part that no factor reads.
    """
    able = sorted((f for f in FACTORS if set(f.parts) <= set(parts)), key=lambda f: len(f.parts))
    given = {part: factor for factor in able for part in factor.parts}  # the one that reads the most of them
    wanted = [part for part, declared in PARTS.items() if part in parts and declared.carries]
    for part in wanted:
        if part not in given:
            known = ", ".join(dict.fromkeys(part for factor in FACTORS for part in factor.parts))
            raise ValueError(f"gate part {part!r}: expected a factor of R_t that reads it, got those of {known}")
    return tuple(dict.fromkeys(given[part] for part in wanted))


def transition_of(parts: Collection[str]) -> Transition:
    """``R_t`` of a gate with these parts."""
    factors = factors_of(parts)
    if len(factors) > 1:
        return Product(*factors)
    return factors[0] if factors else Identity()


def kinds_of(parts: Collection[str]) -> Kinds:
    """The classes of the factors of ``R_t`` of a gate with these parts."""
    return tuple(type(factor) for factor in factors_of(parts))


def linear_forms(*parts: str, transition: Transition | None = None) -> LinearForms:
    """The linear forms for these gate parts, or for a user's ``transition``, without kernels."""
    if transition is not None:
        return LinearForms(transition, chunk_size=CHUNK_SIZE)
    kinds = kinds_of(parts)
    kernels = {"triton": CHUNKS.get(kinds, FEW_TOKENS)} if FEW_TOKENS.knows(parts) else {}
    operation = OPERATIONS.get(kinds)
    if operation is not None:
        kernels["fla"] = fla_kernel(operation)
    return LinearForms(transition_of(parts), chunk_size=CHUNK_SIZE if "w" in parts else 64, kernels=kernels)


def projections(parts: Collection[str], side: int) -> tuple[str, ...] | str:
    """The names of the parts' default gate projections, on the linear (0) or the softmax side (1)."""
    found = [(PARTS[part].projections or ())[side : side + 1] for part in PARTS if part in parts]
    return tuple(name for names in found for name in names) or "none"


def linear_layer(*parts: str) -> dict[str, Any]:
    """The layer settings for these gate parts: each part's default projection, in the block of most linear
    recurrences."""
    layer = {"gate": projections(parts, 0), "output_norm": "rms"}
    return layer | ({"qk_norm": "l2", "conv_size": 4} if "w" in parts else {}) | {"output_gate": "swish"}
