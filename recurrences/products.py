"""The linear side of any set of gate parts: what a pair needs whose transition is a product of those that exist.

A pair of the table without a file of its own has its forms and its layer from here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.gate import PARTS
from attnzoo.algebra.transitions import Identity, Product, Transition
from attnzoo.forms.few_tokens import FEW_TOKENS
from attnzoo.forms.fla import (
    Operation,
    channel_delta_rule,
    delta_rule,
    diagonal_decay,
    fla_kernel,
    scalar_decay,
)
from attnzoo.forms.linear import LinearForms
from attnzoo.recurrences.complex_linear import Rotation, rotated
from attnzoo.recurrences.deltanet import Householder

FACTORS: dict[str, Transition] = {"log_diag": Diagonal(), "angle": Rotation(), "w": Householder()}
# those of flash-linear-attention, with or without a scalar decay beside these parts
OPERATIONS: dict[tuple[str, ...], Operation] = {
    (): scalar_decay, ("log_diag",): diagonal_decay, ("w",): delta_rule, ("log_diag", "w"): channel_delta_rule,
    ("angle",): rotated(scalar_decay), ("angle", "w"): rotated(delta_rule),
}  # fmt: skip
GATES = {"log_decay": "softplus", "log_diag": "low_rank", "angle": "selective", "w": "delta"}


def transition_of(parts: Collection[str]) -> Transition:
    """``R_t`` of a gate with these parts: their factors multiplied in the order of ``Gate.dense``."""
    factors = [FACTORS[part] for part in PARTS if part in parts and part in FACTORS]
    if len(factors) > 1:
        return Product(*factors)
    return factors[0] if factors else Identity()


def linear_forms(*parts: str) -> LinearForms:
    """The forms of the recurrence with these gate parts."""
    kernels = {"triton": FEW_TOKENS}
    operation = OPERATIONS.get(tuple(part for part in FACTORS if part in parts))
    if operation is not None:
        kernels["fla"] = fla_kernel(operation)
    return LinearForms(transition_of(parts), chunk_size=32 if "w" in parts else 64, kernels=kernels)


def linear_layer(*parts: str) -> dict[str, Any]:
    """A layer for them: the projections of the parts' own layers, in the block that most linear recurrences have."""
    layer = {"gate": tuple(name for part, name in GATES.items() if part in parts) or "none", "output_norm": "rms"}
    return layer | ({"qk_norm": "l2", "conv_size": 4} if "w" in parts else {}) | {"output_gate": "swish"}
