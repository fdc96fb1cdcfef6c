"""The interface of matrix transitions, for one token and for a block of tokens.

Both sides of a pair stand on one :class:`Transition`: the linear side carries its state across blocks with
it, the softmax side its cached keys. The scalar decay commutes with every matrix and is kept apart, in logs.
Inside this layer time is the second-to-last axis and heads come before it: q ``[B, H, T, K]``, or
``[B, H, N, C, K]`` when T is cut into N blocks of C tokens. Gates have that layout too, as :class:`HeadGate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate, GateParts
from attnzoo.algebra.parts import PARTS, in_product
from attnzoo.algebra.sums import power_of_2
from attnzoo.precision import wide_dtype


@dataclass(frozen=True, eq=False)
class HeadGate(GateParts):
    """A gate in the layout of transitions: heads before time, and a copy of every part for each query head.

    ``log_decay`` and ``beta`` are ``[B, H, T]``, ``log_diag`` and ``w`` ``[B, H, T, K]``, ``angle`` ``[B, H, T, K/2]``;
    cut into N blocks of C tokens, ``[B, H, N, C]`` and so on. The parts of one token (:meth:`at`) have no time axis.

    Args:
        factors: n where w is ``[B, H, T, n, K]`` and beta ``[B, H, T, n]``, else None.
    """

    factors: int | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, gate: Gate, q: Tensor) -> HeadGate:
        """``gate`` in this layout and in the dtype of the computation, with q ``[B, T, H, K]``."""
        gate, heads, dtype = gate.per_token(q), q.shape[2], wide_dtype(q.dtype)
        parts = {name: heads_first(getattr(gate, name), heads, dtype) for name in gate.parts}
        return cls(**parts, factors=gate.factors)

    def at(self, t: int) -> HeadGate:
        """The gate of one token."""
        return self._along_time(lambda part, axis: part.select(axis, t))

    def slice(self, start: int, stop: int) -> HeadGate:
        """The gate of tokens ``start`` to ``stop``."""
        return self._along_time(lambda part, axis: part.narrow(axis, start, stop - start))

    def map(self, fn: Callable[[Tensor], Tensor]) -> HeadGate:
        return HeadGate(**{name: fn(getattr(self, name)) for name in self.parts}, factors=self.factors)

    def cut(self, size: int) -> HeadGate:
        """The gate in blocks of ``size`` tokens, the last one filled up with identities."""
        return HeadGate(
            **{name: cut(getattr(self, name), size, PARTS[name].neutral) for name in self.parts}, factors=self.factors
        )

    def tokens(self) -> tuple[int, ...]:
        """The sizes of the axes up to and including time, ``(B, H, T)`` or ``(B, H, N, C)``; () where no part is
        given."""
        shapes = [getattr(self, name).shape[: self._time(name) + 1 or None] for name in self.parts]
        return shapes[0] if shapes else ()

    def _along_time(self, fn: Callable[[Tensor, int], Tensor]) -> HeadGate:
        """Apply ``fn`` to every part and its time axis, counted from the end."""
        parts = {name: fn(getattr(self, name), self._time(name)) for name in self.parts}
        return HeadGate(**parts, factors=self.factors)

    def _time(self, name: str) -> int:
        """The time axis of a part, counted from the end."""
        part = PARTS[name]
        return 2 - part.ndim - (part.factored and self.factors is not None)


@dataclass(frozen=True)
class ClosedForm:
    """A block of C tokens without a loop over tokens: its scores, and its queries and keys carried to its borders.

    Args:
        scores: ``k_j^T R_{j+1} ... R_i q_i`` for j <= i, ``[..., C, C]``; other entries are not defined.
        q: queries carried back to the start, ``R_1 ... R_i q_i``, ``[..., C, K]``.
        k: keys carried forward to the end, ``(R_{j+1} ... R_C)^T k_j``, ``[..., C, K]``.
        total: the block's transition in the form that :meth:`Transition.carry` takes; None for the identity.
    """

    scores: Tensor
    q: Tensor
    k: Tensor
    total: Tensor | None


@dataclass(frozen=True)
class ClosedForms:
    """The :class:`ClosedForm` of one block of C tokens for several sets of queries and keys.

    Args:
        scores: ``scores[a][b]`` between the queries a and the keys b, as in :class:`ClosedForm`.
        q: of each set of queries.
        k: of each set of keys.
        total: see :class:`ClosedForm`.
    """

    scores: Sequence[Sequence[Tensor]]
    q: Sequence[Tensor]
    k: Sequence[Tensor]
    total: Tensor | None


class Transition:
    """The matrix part of a gate. Only :meth:`apply` must be written; faster closed forms override the rest.

    Leading axes may be any, as long as they broadcast. What the methods return may be written to in place.

    Args:
        parts: names of the gate parts that it reads; a transition is looked up by them.
        width: size of the diagonal blocks of R_t: neighbouring channels that mix only with each other; 0 where all mix.
        symbol: the formula of R_t, in ASCII; the class's name where it is empty.
        factored: whether w and beta may have a factor axis.
        expands: whether ``|R_t|`` may be over 1; pruning needs at most 1 and is refused otherwise.
    """

    parts: tuple[str, ...] = ()
    width: int = 0
    symbol: str = ""
    factored: bool = False
    expands: bool = False

    @property
    def shown(self) -> str:
        """R_t in print: its symbol or the class's name."""
        return self.symbol or f"{type(self).__name__}_t"

    @property
    def closed(self) -> bool:
        """Whether it has a closed form of a block; else every token's matrix is written out and blocks are joined."""
        return type(self).block is not Transition.block

    def check(self, gate: Gate) -> None:
        """Refuse a gate whose parts have axes that this transition does not read.

        Raises:
            ValueError: several factors per token where it is not ``factored``.
        """
        if gate.factors is not None and not self.factored:
            name = type(self).__name__
            raise ValueError(f"gate.w: expected [B, T, G, K] ({name} has one factor per token), got {gate.factors}")

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        """``R_t^T state`` for one token: the parts of ``gate`` lack the time axis, state is ``[..., K, X]``."""
        raise NotImplementedError(f"{type(self).__name__}.apply: expected every transition to define it")

    def matrix(self, gate: HeadGate, q: Tensor) -> Tensor:
        """``R_t`` of every token, ``[..., T, K, K]``: what the oracle multiplies.

        Only the shape, dtype and device of q ``[..., T, K]`` are used. Here it is read off by :meth:`apply`.
        """
        K = q.shape[-1]
        eye = torch.eye(K, dtype=q.dtype, device=q.device)
        return self.apply(gate, eye.expand(*q.shape[:-1], K, K)).mT

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        """The closed form of a block; q, k ``[..., C, K]``, gate parts with the same leading axes or the last of them.

        This default joins halves recursively, with the matrix of each token written out.
        """
        K = q.shape[-1]
        P = self.width or K
        eye = torch.eye(P, dtype=q.dtype, device=q.device).repeat(K // P, 1)  # [K, P]: picks diagonal blocks
        factors = self.apply(gate, eye.expand(*(gate.tokens() or q.shape[:-1]), K, P))
        return join_tokens(q, k, factors.unflatten(-2, (K // P, P)))

    def scores(self, q: Tensor, k: Tensor, gate: HeadGate) -> Tensor:
        """The ``scores`` of :meth:`block` alone, for a block without tokens before or after it."""
        return self.block(q, k, gate).scores

    def blocks(self, queries: Sequence[Tensor], keys: Sequence[Tensor], gate: HeadGate) -> ClosedForms:
        """The closed forms of one block for several sets of queries and of keys, each ``[..., C, K]``."""
        stacked = self.block(torch.stack(list(queries))[:, None], torch.stack(list(keys))[None], gate)
        scores = [[row[n] for n in range(len(keys))] for row in stacked.scores]
        return ClosedForms(scores, [x[0] for x in stacked.q], list(stacked.k[0]), stacked.total)

    def block_after(self, first: Transition, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        """The closed form of ``A_t R_t`` with A_t of ``first``; its ``total`` is for :meth:`Transition.carry`."""
        return Transition.block(Product(first, self), q, k, gate)

    def carry(self, total: Tensor | None, state: Tensor) -> Tensor:
        """``(R_1 ... R_C)^T state`` with ``total`` from :meth:`block` and state ``[..., K, X]``.

        In this default ``total`` is the transposed product ``[..., K, K]``, or its diagonal blocks
        ``[..., K/P, P, P]``.
        """
        total = cast(Tensor, total)
        if total.shape[-1] == state.shape[-2]:
            return total @ state
        return cast(Tensor, total @ state.unflatten(-2, total.shape[-3:-1])).flatten(-3, -2)


class Identity(Transition):
    """``R_t = I``; ``total`` is None."""

    width = 1
    symbol = "I"

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return state

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        return ClosedForm(scores=q @ k.mT, q=q, k=k, total=None)

    def scores(self, q: Tensor, k: Tensor, gate: HeadGate) -> Tensor:
        return q @ k.mT

    def blocks(self, queries: Sequence[Tensor], keys: Sequence[Tensor], gate: HeadGate) -> ClosedForms:
        columns = [k.mT for k in keys]
        return ClosedForms([[q @ column for column in columns] for q in queries], queries, keys, None)

    def carry(self, total: Tensor | None, state: Tensor) -> Tensor:
        return state


class Product(Transition):
    """``R_t = A_t B_t ...`` of the transitions given, in their order.

    The last factor decides how the factors before are joined to it (:meth:`Transition.block_after`).

    Raises:
        TypeError: a factor that is not a transition.
        ValueError: fewer than two factors.
    """

    factors: tuple[Transition, ...]

    def __init__(self, *factors: Transition) -> None:
        for number, factor in enumerate(factors):
            if not isinstance(factor, Transition):
                raise TypeError(f"factor {number}: expected a Transition, got {factor!r}")
        if len(factors) < 2:
            raise ValueError(f"factors: expected at least two, got {len(factors)}")
        parts = [factor.factors if isinstance(factor, Product) else (factor,) for factor in factors]
        self.factors = tuple(chain.from_iterable(parts))
        self.parts = tuple(dict.fromkeys(chain.from_iterable(factor.parts for factor in self.factors)))
        self.symbol = in_product(factor.shown for factor in self.factors)
        self.factored = any(factor.factored for factor in self.factors)
        self.expands = any(factor.expands for factor in self.factors)
        widths = [factor.width for factor in self.factors]
        self.width = math.lcm(*widths) if all(widths) else 0

    @property
    def closed(self) -> bool:
        return type(self.factors[-1]).block_after is not Transition.block_after

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        for factor in self.factors:
            state = factor.apply(gate, state)
        return state

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        *first, last = self.factors
        return last.block_after(first[0] if len(first) == 1 else Product(*first), q, k, gate)


def with_own_scores(scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Scores ``[..., C, C]`` with the diagonal, each token's score with itself, replaced by ``k_i^T q_i``.

    A diagonal computed from a carried query and a carried key would give its gate two gradients that cancel up to
    rounding; where the gates between tokens are closed, that rounding would be the whole gradient.
    """
    return torch.diagonal_scatter(scores, (q * k).sum(-1), dim1=-2, dim2=-1)


def join_tokens(q: Tensor, k: Tensor, factors: Tensor) -> ClosedForm:
    """The closed form of a block from the matrix of each token, by joining neighbours again and again.

    A pair of tokens in different halves of a group meets in the middle: the query is carried back to it, the key
    forward. Every product is one of transitions, so nothing grows.

    Args:
        q: ``[..., C, K]``.
        k: ``[..., C, K]``.
        factors: the diagonal blocks of ``R_t^T``, ``[..., C, K/P, P, P]``.
    """
    C, K = q.shape[-2:]
    missing = power_of_2(C) - C
    if missing:
        q, k = (F.pad(x, (0, 0, 0, missing)) for x in (q, k))
        eye = torch.eye(factors.shape[-1], dtype=q.dtype, device=q.device)
        factors = torch.cat([factors, eye.expand(*factors.shape[:-4], missing, *factors.shape[-3:])], -4)
    # per group of m tokens: inner scores, queries at its start and keys at its end [..., groups, m, K], its product
    total, back, forward = factors, _rows_times(q[..., None, :], factors), k[..., None, :]
    scores = (q * k).sum(-1)[..., None, None]
    while total.shape[-4] > 1:
        early, late = total.unflatten(-4, (-1, 2)).unbind(-4)
        (early_back, late_back), (early_forward, late_forward), (early_scores, late_scores) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (back, forward, scores)
        )
        cross = late_back @ early_forward.mT
        scores = torch.cat([F.pad(early_scores, (0, cross.shape[-1])), torch.cat([cross, late_scores], -1)], -2)
        back = torch.cat([early_back, _rows_times(late_back, early)], -2)
        forward = torch.cat([_rows_times(early_forward, late.mT), late_forward], -2)
        total = late @ early
    total = total[..., 0, 0, :, :] if total.shape[-1] == K else total[..., 0, :, :, :]
    return ClosedForm(scores[..., 0, :C, :C], back[..., 0, :C, :], forward[..., 0, :C, :], total)


def _rows_times(x: Tensor, blocks: Tensor) -> Tensor:
    """``x [..., m, K]`` times the block diagonal matrix of ``blocks [..., K/P, P, P]``."""
    if blocks.shape[-1] == x.shape[-1]:
        return x @ blocks[..., 0, :, :]
    rows: Tensor = x.unflatten(-1, blocks.shape[-3:-1])[..., None]  # [..., m, K/P, P, 1]
    return (rows * blocks[..., None, :, :, :]).sum(-2).flatten(-2)


def heads_first(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """``[B, T, G, ...]`` to ``[B, H, T, ...]`` in ``dtype``, for each query head; batch and heads can be viewed as one
    axis, as matrix products do."""
    x = (x if x.dtype == dtype else x.to(dtype)).transpose(1, 2)
    if x.shape[1] != heads:
        return x.repeat_interleave(heads // x.shape[1], 1)
    return x if x.shape[0] == 1 else x.contiguous()


def scaled_queries(q: Tensor, scale: float | None) -> Tensor:
    """The scaled queries ``[B, H, T, K]`` of q ``[B, T, H, K]``, in the dtype of the computation; None: 1 / sqrt(K)."""
    H, K = q.shape[2:]
    return heads_first(q, H, wide_dtype(q.dtype)) * (K**-0.5 if scale is None else scale)


def cut(x: Tensor, size: int, filler: float = 0.0) -> Tensor:
    """Cut ``[B, H, T, ...]`` into blocks ``[B, H, N, size, ...]``, the last one filled up with ``filler``."""
    T = x.shape[2]
    if size == T:
        return x[:, :, None]
    x = x.contiguous()  # batch, heads and blocks can be viewed as one axis
    blocks = (T + size - 1) // size  # no -T % size and no (-1, size): where T is a symbol, both would stay in shapes
    missing = blocks * size - T
    if missing:
        x = torch.cat([x, x.new_full((*x.shape[:2], missing, *x.shape[3:]), filler)], 2)
    return cast(Tensor, x.unflatten(2, (blocks, size)))
