"""Pairs of gates with a second vector u beside w, as a user's file registers them: factors that may expand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from torch import Tensor

from attnzoo import Pair, register
from attnzoo.algebra.transitions import HeadGate, Transition
from attnzoo.registry import unregister


class DiagonalPlusLowRank(Transition):
    """``R_t = Diag(exp(a_t)) - beta_t u_t w_t^T``, the transition of RWKV-7."""

    parts = ("log_diag", "w", "beta", "u")
    expands = True

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        w, u = cast(Tensor, gate.w)[..., None, :], cast(Tensor, gate.u)[..., None, :]
        erased = w.mT @ (cast(Tensor, gate.beta)[..., None, None] * (u @ state))
        return cast(Tensor, gate.log_diag).exp()[..., None] * state - erased


PAIRS = (
    Pair("two_vectors", "two_vectors_path", ("w", "beta", "u")),
    Pair("gdn2", "gdn2_path", ("log_diag", "w", "beta", "u")),
    Pair("comba", "comba_path", ("log_decay", "w", "beta", "u")),
    Pair("dplr", "dplr_path", ("log_diag", "w", "beta", "u"), transition=DiagonalPlusLowRank()),
)


@contextlib.contextmanager
def two_vectors() -> Iterator[None]:
    """The pairs, registered."""
    for pair in PAIRS:
        register(pair)
    yield
    for pair in PAIRS:
        unregister(pair)
