"""The softmax side of any set of gate parts: what a pair needs whose transition is a product of those that exist.

A pair of the table without a file of its own has its forms and its layer from here.
"""

from __future__ import annotations

from typing import Any

from attnzoo.encodings.rope import Rotated
from attnzoo.forms.softmax import AdditiveForms, SoftmaxForms
from attnzoo.recurrences.products import transition_of

GATES = {"log_decay": "forget", "log_diag": "full_rank", "angle": "selective", "w": "path"}


def softmax_forms(*parts: str) -> SoftmaxForms:
    """The forms of the encoding with these gate parts."""
    matrix = set(parts) - {"log_decay"}
    if not matrix:
        return AdditiveForms()
    if matrix == {"angle"}:
        return Rotated()
    return SoftmaxForms(transition_of(parts))


def softmax_layer(*parts: str) -> dict[str, Any]:
    """A layer for them: the projections of the parts' own layers, and nothing else."""
    return {"gate": tuple(name for part, name in GATES.items() if part in parts) or "none"}
