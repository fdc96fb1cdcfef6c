"""Closed forms of blocks of rank-one factors, and the unit lower triangular systems that they solve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnzoo.algebra.transitions import ClosedForm, HeadGate, Identity, Transition


def unit_lower_solve(lower: Tensor, right: Tensor) -> Tensor:
    """``(I + lower)^{-1} right`` for matrices lower ``[..., C, C]``, of which the part below the diagonal is read."""
    if lower.shape[-1] == 1:  # a cached step
        return right
    solved: Tensor = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return solved


class RankOne:
    """A block of ``R_t = A_t H_t1 ... H_tn`` with ``H_tf = I - beta_tf w_tf w_tf^T``, in closed form.

    The C n factors in their order are joined by the UT transform (Yang et al., 2024). A product between a later and an
    earlier vector includes the transitions A between their tokens.

    Args:
        first: A_t; the identity leaves the factors alone.
        q: ``[..., C, K]``; so is k, of the same block.
        ws: the first factor of every token, ``[..., C, K]``, the second, and so on.
        beta: of all factors in their order, ``[..., C n, 1]``.
        gate: the gate that ``first`` reads.
        us: u of ``I - beta u w^T``, as ``ws``; None where u is w.
    """

    def __init__(
        self, first: Transition, q: Tensor, k: Tensor, ws: Sequence[Tensor], beta: Tensor, gate: HeadGate,
        us: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.first, self.between = first, first.blocks((q, *(ws if us is None else us)), (k, *ws), gate)
        (self.qk, *q_row), *rows = self.between.scores
        # the n factors of a token are neighbours
        self.qw = _together([x.tril() for x in q_row], -1)
        ww = _together([_together(row[1:], -1) for row in rows], -2)
        self.beta, self.erased = beta, beta * ww
        self.from_values = self._solve(_together([row[0].tril(-1) for row in rows], -2))

    def _solve(self, along_w: Tensor) -> Tensor:
        """The amounts that the factors take from vectors whose products with the w are ``along_w [..., C n, X]``."""
        return unit_lower_solve(self.erased, self.beta * along_w)

    def scores(self) -> Tensor:
        """``scores`` of the closed form, ``[..., C, C]``."""
        return self.qk - self.qw @ self.from_values

    def block(self) -> ClosedForm:
        """The closed form, whose ``total`` is the transposed product of the block, ``[..., K, K]``."""
        (back_q, *back), (forward_k, *forward) = self.between.q, self.between.k
        back_w, forward_w = _together(back, -2), _together(forward, -2)
        from_state = self._solve(back_w)
        eye = torch.eye(back_w.shape[-1], dtype=back_w.dtype, device=back_w.device)
        return ClosedForm(
            scores=self.scores(),
            q=back_q - self.qw @ from_state,
            k=forward_k - self.from_values.mT @ forward_w,
            total=self.first.carry(self.between.total, eye) - forward_w.mT @ from_state,
        )


def rank_one_block(
    first: Transition, q: Tensor, k: Tensor, ws: Sequence[Tensor], beta: Tensor, gate: HeadGate,
    us: Sequence[Tensor] | None = None,
) -> ClosedForm:  # fmt: skip
    """The closed form of the block that :class:`RankOne` describes."""
    return RankOne(first, q, k, ws, beta, gate, us).block()


def householder_block(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> ClosedForm:
    """The closed form of a block of ``I - beta_t w_t w_t^T``, or of n such factors per token.

    Args:
        q, k: ``[..., C, K]``.
        w: ``[..., C, K]`` or ``[..., C, n, K]``.
        beta: ``[..., C]`` or ``[..., C, n]``, as w.
    """
    return rank_one_block(Identity(), q, k, *in_order(w, beta, w.ndim > k.ndim), HeadGate())


def in_order(w: Tensor, beta: Tensor, several: bool) -> tuple[Sequence[Tensor], Tensor]:
    """The arguments ``ws`` and ``beta`` of :class:`RankOne` from w and beta, with ``several`` factors per token or
    one."""
    return (w.unbind(-2), beta.flatten(-2)[..., None]) if several else ([w], beta[..., None])


def _together(factors: Sequence[Tensor], dim: int) -> Tensor:
    """The n tensors of ``factors`` interleaved along ``dim``: all factors of the first token, then of the next."""
    return factors[0] if len(factors) == 1 else torch.stack(list(factors), dim).flatten(dim - 1, dim)
