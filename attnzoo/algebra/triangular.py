"""Closed forms of blocks of rank-one factors, and the inverse of unit lower triangular matrices that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.sums import power_of_2
from attnzoo.algebra.transitions import ClosedForm, HeadGate, Identity, Transition

BASE = 8  # rows of the smallest block that is inverted row by row


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(lower: Tensor) -> Tensor:
        C = lower.shape[-1]
        size = max(BASE, power_of_2(C))
        lower = torch.nn.functional.pad(lower, (0, size - C, 0, size - C))
        blocks = lower.unflatten(-1, (-1, BASE)).unflatten(-3, (-1, BASE)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        rows = blocks.neg().reshape(-1, BASE, BASE).split(1, 1)
        inverse = torch.eye(BASE, dtype=lower.dtype, device=lower.device).repeat(len(rows[0]), 1, 1)
        for i in range(1, BASE):  # forward substitution, row by row
            inverse[:, i : i + 1, :i] = rows[i][..., :i] @ inverse[:, :i, :i]
        inverse = inverse.view(blocks.shape)
        m = BASE
        while m < size:  # [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]
            first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)
            pairs = lower.unflatten(-1, (-1, 2 * m)).unflatten(-3, (-1, 2 * m)).diagonal(dim1=-4, dim2=-2)
            corner = pairs.movedim(-1, -3)[..., m:, :m]
            cross = -(second @ corner @ first)
            inverse = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)
            m *= 2
        result: Tensor = inverse[..., 0, :C, :C]
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], lower: Tensor) -> tuple[Tensor, int]:
        return unit_lower_inverse(lower.movedim(in_dims[0], 0)), 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        transposed: Tensor = ctx.saved_tensors[0].mT
        return -(transposed @ grads[0] @ transposed).tril(-1)


class _WithForwardDerivative(_UnitLowerInverse):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -(inverse @ tangents[0].tril(-1) @ inverse)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """The inverse ``(I + lower)^{-1}`` for strictly lower triangular matrices ``[..., C, C]``, by products of
    blocks."""
    if lower.shape[-1] == 1:  # a cached step
        return torch.ones_like(lower)
    # torch.compile cannot trace an autograd function with a jvp
    function = _UnitLowerInverse if torch.compiler.is_compiling() else _WithForwardDerivative
    return cast(Tensor, function.apply(lower))  # type: ignore[no-untyped-call]


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
        self.inverse = unit_lower_inverse((beta * ww).tril_(-1)) * beta.mT  # X
        self.from_values = self.inverse @ _together([row[0].tril(-1) for row in rows], -2)

    def scores(self) -> Tensor:
        """``scores`` of the closed form, ``[..., C, C]``."""
        return self.qk - self.qw @ self.from_values

    def block(self) -> ClosedForm:
        """The closed form, whose ``total`` is the transposed product of the block, ``[..., K, K]``."""
        (back_q, *back), (forward_k, *forward) = self.between.q, self.between.k
        back_w, forward_w = _together(back, -2), _together(forward, -2)
        from_state = self.inverse @ back_w
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
