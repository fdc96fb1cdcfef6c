"""Softmax forms and layer settings for any set of gate parts whose transition is a product of known factors.

Pairs of the registry's table that have no file of their own use these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import Transition
from attnzoo.encodings.rope import Rotated
from attnzoo.encodings.turned import turned
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.backends.fox_path import path_kernel
from attnzoo.forms.backends.wall import wall_kernel
from attnzoo.forms.protocol import Kernel
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.recurrences.complex_linear import Rotation
from attnzoo.recurrences.deltanet import Householder
from attnzoo.recurrences.products import Kinds, kinds_of, projections, transition_of


def turned_path() -> Kernel:
    """PaTH's kernels behind rotations of q, k and w."""
    return turned(path_kernel())


KERNELS: dict[Kinds, Callable[[], Kernel]] = {  # by the factors of R_t; each takes a scalar decay too
    (Householder,): path_kernel, (Diagonal, Householder): partial(path_kernel, decaying=True),
    (Rotation, Householder): turned_path,
    (Diagonal,): wall_kernel,
}  # fmt: skip


def softmax_forms(*parts: str, transition: Transition | None = None) -> SoftmaxForms:
    """The softmax forms for these gate parts, or for a user's ``transition``, without kernels."""
    if transition is not None:
        return SoftmaxForms(transition)
    kinds = kinds_of(parts)
    if not kinds:
        return AdditiveForms()
    if kinds == (Rotation,):
        return Rotated()
    kernel = KERNELS.get(kinds)
    return SoftmaxForms(transition_of(parts), kernels={} if kernel is None else {"triton": kernel()})


def softmax_layer(*parts: str) -> dict[str, Any]:
    """The layer settings for these gate parts: only the gate projections, each the default of its part."""
    return {"gate": projections(parts, 1)}
