"""What a matrix transition must be able to do, for one token and for a block of tokens.

Both sides of a pair stand on one :class:`Transition`: the linear side carries its state across blocks with
it, the softmax side its cached keys. The scalar decay commutes with every matrix and is kept apart, in logs.
Inside this layer time is the second-to-last axis and heads come before it: q ``[B, H, T, K]``, or
``[B, H, N, C, K]`` when T is cut into N blocks of C tokens. Gates have that layout too, as :class:`HeadGate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import PARTS, Gate, GateParts


@dataclass(frozen=True, eq=False)
class HeadGate(GateParts):
    """A gate as transitions take it: heads before time, and a copy of every part for each query head.

    ``log_decay`` and ``beta`` are ``[B, H, T]``, ``log_diag`` and ``w`` ``[B, H, T, K]``, ``angle`` ``[B, H, T, K/2]``;
    cut into N blocks of C tokens, ``[B, H, N, C]`` and so on. Those of one token (:meth:`at`) have no axis of time.
    """

    @classmethod
    def of(cls, gate: Gate, q: Tensor) -> HeadGate:
        """``gate`` in this layout and in the dtype of the computation, with q ``[B, T, H, K]``."""
        gate, heads, dtype = gate.per_token(q), q.shape[2], compute_dtype(q)
        return cls(**{name: heads_first(getattr(gate, name), heads, dtype) for name in gate.parts})

    def at(self, t: int) -> HeadGate:
        """The gate of one token."""
        return self._along_time(lambda part, axis: part.select(axis, t))

    def slice(self, start: int, stop: int) -> HeadGate:
        """The gate of tokens ``start`` to ``stop``."""
        return self._along_time(lambda part, axis: part.narrow(axis, start, stop - start))

    def cut(self, size: int) -> HeadGate:
        """The gate in blocks of ``size`` tokens, the last one filled up with identities."""
        return self.map(lambda part: cut(part, size))

    def _along_time(self, fn: Callable[[Tensor, int], Tensor]) -> HeadGate:
        """Apply ``fn`` to every part and the axis on which its tokens are, counted from the end."""
        return replace(self, **{name: fn(getattr(self, name), 2 - PARTS[name].ndim) for name in self.parts})


@dataclass(frozen=True)
class ClosedForm:
    """A block of C tokens in closed form.

    Args:
        scores: ``k_j^T R_{j+1} ... R_i q_i`` for j <= i, ``[..., C, C]``; other entries are not defined.
        q: queries carried back to the start, ``R_1 ... R_i q_i``, ``[..., C, K]``.
        k: keys carried forward to the end, ``(R_{j+1} ... R_C)^T k_j``, ``[..., C, K]``.
        total: whatever :meth:`Transition.carry` needs to apply ``(R_1 ... R_C)^T``; None for the identity.
    """

    scores: Tensor
    q: Tensor
    k: Tensor
    total: Tensor | None


class Transition:
    """The identity; other transitions override all three methods. What they return may be written to in place."""

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        """``R_t^T state`` for one token: the parts of ``gate`` lack the time axis, state is ``[B, H, K, X]``."""
        return state

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        """The closed form of a block; q, k ``[..., C, K]`` and gate parts with the same leading axes."""
        return ClosedForm(scores=q @ k.mT, q=q, k=k, total=None)

    def carry(self, total: Tensor, state: Tensor) -> Tensor:
        """``(R_1 ... R_C)^T state`` with ``total`` from :meth:`block` and state ``[B, H, K, X]``."""
        return state


@dataclass(frozen=True)
class Decay:
    """Log-decays inside a block, exact for closed (-inf) gates.

    Args:
        entry: ``g_1 + ... + g_i``, ``[..., C]``.
        between: ``g_{j+1} + ... + g_i`` for j <= i, ``[..., C, C]``; above the diagonal something <= 0.
        exit: ``g_{j+1} + ... + g_C``, ``[..., C]``.
        total: ``g_1 + ... + g_C``, ``[...]``.
    """

    entry: Tensor
    between: Tensor
    exit: Tensor
    total: Tensor


def open_sums(g: Tensor, dim: int = -1) -> tuple[Tensor, Tensor | None]:
    """Running sum of the finite gates in float64, and the running count of the closed ones (None: there are none).

    A float32 sum would round like its longest part, and so would every difference.

    A difference of two sums is a log-decay where the counts agree and -inf where they do not: no inf - inf.
    """
    closed = torch.isneginf(g)
    looks = g.is_cpu and not torch.compiler.is_compiling()  # a GPU would have to be waited for
    if looks and not closed.any():
        return g.cumsum(dim, dtype=torch.float64), None
    return g.masked_fill(closed, 0.0).cumsum(dim, dtype=torch.float64), closed.cumsum(dim)


def block_decay(g: Tensor) -> Decay:
    """The :class:`Decay` of gates ``[..., C]``."""
    c, n = open_sums(g)
    decay = Decay(
        entry=c.to(g.dtype),
        between=_differences(c, g.dtype).clamp_(max=0),
        exit=(c[..., -1:] - c).to(g.dtype),
        total=c[..., -1].to(g.dtype),
    )
    if n is None:
        return decay
    return Decay(
        entry=decay.entry.masked_fill(n > 0, -torch.inf),
        between=decay.between.masked_fill(n[..., :, None] != n[..., None, :], -torch.inf),
        exit=decay.exit.masked_fill(n != n[..., -1:], -torch.inf),
        total=decay.total.masked_fill(n[..., -1] > 0, -torch.inf),
    )


def _differences(c: Tensor, dtype: torch.dtype) -> Tensor:
    """``c_i - c_j`` in ``dtype``, ``[..., C, C]``, as exact as if taken in float64 but without that matrix."""
    rounded = c.to(dtype)
    error = (c - rounded).to(dtype)
    return (rounded[..., :, None] - rounded[..., None, :]).add_(error[..., :, None]).sub_(error[..., None, :])


def compute_dtype(q: Tensor) -> torch.dtype:
    """float64 inputs stay float64; everything else is computed in float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def heads_first(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """``[B, T, G, ...]`` to ``[B, H, T, ...]`` in ``dtype``, each query head with its own copy."""
    x = x.to(dtype).transpose(1, 2)
    return x.contiguous() if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def cut(x: Tensor, size: int) -> Tensor:
    """Cut ``[B, H, T, ...]`` into blocks ``[B, H, N, size, ...]``, the last one filled up with zeros."""
    missing = -x.shape[2] % size
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2)
    return cast(Tensor, x.unflatten(2, (-1, size)))
