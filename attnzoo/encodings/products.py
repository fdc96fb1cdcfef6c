"""The softmax side of any set of gate parts: what a pair needs whose transition is a product of those that exist.

A pair of the table without a file of its own has its forms and its layer from here.
"""

from __future__ import annotations

from typing import Any

from attnzoo.algebra.gate import PARTS
from attnzoo.encodings.rope import Rotated
from attnzoo.encodings.turned import turned
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.protocol import Kernel
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.forms.triton import path_kernel
from attnzoo.forms.triton_wall import wall_kernel
from attnzoo.recurrences.products import transition_of

GATES = {"log_decay": "forget", "log_diag": "full_rank", "angle": "selective", "w": "path"}


def softmax_forms(*parts: str) -> SoftmaxForms:
    """The forms of the encoding with these gate parts."""
    matrix = set(parts) - {"log_decay"}
    if not matrix:
        return AdditiveForms()
    if matrix == {"angle"}:
        return Rotated()
    kernels = {
        ("w", "beta"): path_kernel, ("log_diag", "w", "beta"): path_kernel, ("angle", "w", "beta"): turned_path,
        ("log_diag",): wall_kernel,
    }  # fmt: skip
    kernel = kernels.get(tuple(part for part in PARTS if part in matrix))
    return SoftmaxForms(transition_of(parts), kernels={} if kernel is None else {"triton": kernel()})


def turned_path() -> Kernel:
    """PaTH's kernels behind rotations of q, k and w."""
    return turned(path_kernel())


def softmax_layer(*parts: str) -> dict[str, Any]:
    """A layer for them: the projections of the parts' own layers, and nothing else."""
    return {"gate": tuple(name for part, name in GATES.items() if part in parts) or "none"}
