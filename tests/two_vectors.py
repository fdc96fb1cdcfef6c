"""A second vector u beside w, and pairs with it, as a user's file registers them: factors that may expand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo import Gate, Pair, register, register_part
from attnzoo.algebra.gate import GatePart, expand_heads
from attnzoo.algebra.transitions import ClosedForm, HeadGate, Identity, Transition
from attnzoo.algebra.triangular import RankOne
from attnzoo.registry import unregister, unregister_part


class Oblique(Transition):
    """``R_t = I - beta_t u_t w_t^T``: erased is what stands along w, by what is read along u."""

    parts = ("w", "beta", "u")
    symbol = "I - beta_t u_t w_t^T"
    expands = True

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        w, u = cast(Tensor, gate.w)[..., None, :], cast(Tensor, getattr(gate, "u"))[..., None, :]  # noqa: B009
        return state - w.mT @ (cast(Tensor, gate.beta)[..., None, None] * (u @ state))

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        return self.block_after(Identity(), q, k, gate)

    def block_after(self, first: Transition, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        beta, us = cast(Tensor, gate.beta)[..., None], [cast(Tensor, getattr(gate, "u"))]  # noqa: B009
        return RankOne(first, q, k, [cast(Tensor, gate.w)], beta, gate, us).block()


class DiagonalPlusLowRank(Transition):
    """``R_t = Diag(exp(a_t)) - beta_t u_t w_t^T``, the transition of RWKV-7."""

    parts = ("log_diag", "w", "beta", "u")
    expands = True

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        w, u = cast(Tensor, gate.w)[..., None, :], cast(Tensor, getattr(gate, "u"))[..., None, :]  # noqa: B009
        erased = w.mT @ (cast(Tensor, gate.beta)[..., None, None] * (u @ state))
        return cast(Tensor, gate.log_diag).exp()[..., None] * state - erased


def oblique_matrix(gate: Gate, q: Tensor) -> Tensor:
    w, u, beta = (expand_heads(cast(Tensor, getattr(gate, part)), q.shape[2]) for part in ("w", "u", "beta"))
    return torch.eye(w.shape[-1], dtype=w.dtype) - beta[..., None, None] * u[..., :, None] * w[..., None, :]


U = GatePart(
    "uₜ", ("B, T, G, K",), "finite", lambda x, gate: "" if bool(x.isfinite().all()) else "expected finite numbers",
    lambda draws, shape: F.normalize(draws.normal(shape), dim=-1), tex="u", of="w", optional=True, expands=True,
    rounded=True, matrix=oblique_matrix, factor="I - beta_t u_t w_t^T", letter="O",
)  # fmt: skip
PAIRS = (
    Pair("two_vectors", "two_vectors_path", ("w", "beta", "u")),
    Pair("gdn2", "gdn2_path", ("log_diag", "w", "beta", "u")),
    Pair("comba", "comba_path", ("log_decay", "w", "beta", "u")),
    Pair("dplr", "dplr_path", ("log_diag", "w", "beta", "u"), transition=DiagonalPlusLowRank()),
)


@contextlib.contextmanager
def two_vectors() -> Iterator[None]:
    """The part u and its pairs, registered."""
    register_part("u", U, factor=Oblique())
    for pair in PAIRS:
        register(pair)
    yield
    for pair in PAIRS:
        unregister(pair)
    unregister_part("u")
