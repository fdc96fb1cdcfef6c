"""The gate: the transition ``A_t = exp(g_t) R_t`` of every variant, in the parts that are declared beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self, cast

import torch
from torch import Tensor

from attnzoo.algebra.parts import PARTS, GatePart, factors_in
from attnzoo.errors import unknown

CLOSED = -1.0e4


def is_closed(log: Tensor) -> Tensor:
    """A mask of the closed log gates: those of at most ``CLOSED`` = -1e4, which are treated exactly as -inf.

    Large negative numbers are common as masks. Their exp is 0 in every dtype, but added to a running sum they would
    round away every gate after them.
    """
    return log <= -1.0e4  # CLOSED as a literal: torch.compile(dynamic=True) makes symbols of global floats


@dataclass(frozen=True, eq=False)
class GateParts:
    """The parts that a gate may have, in any layout; see :class:`Gate` for what they mean."""

    log_decay: Tensor | None = None
    log_diag: Tensor | None = None
    angle: Tensor | None = None
    w: Tensor | None = None
    beta: Tensor | None = None
    u: Tensor | None = None
    levels: Tensor | None = None
    log_decay_back: Tensor | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are given."""
        return tuple([name for name in type(self).__match_args__ if getattr(self, name) is not None])

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``fn`` to every part that is given."""
        return type(self)(**{name: fn(getattr(self, name)) for name in self.parts})


@dataclass(frozen=True, eq=False)
class Gate(GateParts):
    r"""The transition of each token, as the parts a variant needs.

    The scalar part is :math:`g_t` = ``log_decay``. The matrix part is the product, in this order,

    .. math:: R_t = \mathrm{Diag}(e^{a_t})\; \mathrm{Rot}(\theta_t)\; (I - \beta_t u_t w_t^\top)

    of the parts that are given (a missing part is the identity, a missing u is w). ``Rot`` turns the coordinate
    pairs (2i, 2i+1) by the angle ``theta[i]``, as RoPE does (Su et al., 2021, eq. 15).

    w and beta may have one more axis, of n factors per token, :math:`(I - \beta_{t1} w_{t1} w_{t1}^\top) \cdots
    (I - \beta_{tn} w_{tn} w_{tn}^\top)` in place of the one: a state passes the first of them first (DeltaProduct,
    Siems et al., 2025). The axis stands behind the heads, so that time and heads keep their places in every part.

    Args:
        log_decay: g, natural log, <= 0, ``[B, T, H]``, or ``[H]`` (every token). At most -1e4 it is closed, as by -inf.
        log_diag: a, natural log per channel, <= 0, closed as above, ``[B, T, H, K]``.
        angle: theta in radians per token, ``[K/2]`` (every token, every head), ``[B, T, 1, K/2]`` (every head) or
            ``[B, T, H, K/2]``.
        w: vectors of length 1 or less of the Householder-like factor, ``[B, T, G, K]``, or of n: ``[B, T, G, n, K]``.
        beta: its strength in [0, 2], ``[B, T, G]`` or ``[B, T, G, n]``, as w.
        u: the vectors that are read where w is erased, ``[B, T, G, K]``, beside one w per token; with them the factor
            may make vectors longer (RWKV-7, Peng et al., 2025).
        levels: weights >= 0 of L levels of the past, ``[B, T, H, L]``, which a readout reads (log-linear attention).
        log_decay_back: the log decay towards later tokens, as log_decay, ``[B, T, H]``, of readouts that see those.
    """

    @property
    def per_query_head(self) -> bool:
        """Whether the matrix part may differ among the query heads of a key head, so that each needs its own carried
        keys."""
        return any(PARTS[name].carries and PARTS[name].per_query_head for name in self.parts)

    @property
    def expands(self) -> bool:
        """Whether the matrix part may make a vector longer."""
        return any(PARTS[name].expands for name in self.parts)

    @property
    def factors(self) -> int | None:
        """The number n of Householder-like factors per token; None where w and beta have no factor axis or are
        missing."""
        x, axes = (self.beta, 3) if self.w is None else (self.w, 4)
        return x.shape[3] if x is not None and x.ndim > axes else None

    def slice(self, start: int, stop: int) -> Gate:
        """The gate of tokens ``start`` to ``stop`` (a part that holds for every token stays as it is)."""
        return self.map(lambda part: part if part.ndim == 1 else part[:, start:stop])

    def at(self, t: int) -> Gate:
        """The gate of one token, in parts without the axis of time (one that holds for every token stays as it is)."""
        return self.map(lambda part: part if part.ndim == 1 else part[:, t])

    def neutral_where(self, absent: Tensor) -> Gate:
        """The gate with an identity transition at the tokens where ``absent`` ``[B, T]`` is true."""
        gate = self._expanded(*absent.shape)
        masked = {
            name: getattr(gate, name).masked_fill(_unsqueeze_to(absent, getattr(gate, name).ndim), PARTS[name].neutral)
            for name in gate.parts
        }
        return replace(gate, **masked)

    def per_token(self, q: Tensor) -> Gate:
        """Parts that hold for every token expanded to ``[B, T, ...]``, with q ``[B, T, H, K]``.

        An angle ``[K/2]`` becomes ``[B, T, 1, K/2]``.
        """
        return self._expanded(*q.shape[:2])

    def _expanded(self, B: int, T: int) -> Gate:
        shared = {name: getattr(self, name) for name in self.parts if getattr(self, name).ndim == 1}
        if not shared:
            return self
        return replace(self, **{name: x.expand(B, T, *(1,) * (PARTS[name].ndim - 3), -1) for name, x in shared.items()})

    def dense(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The gate as explicit float64 matrices: the product of its parts' factors in the order of :data:`PARTS`.

        Args:
            q: queries ``[B, T, H, K]``; only their shape and device are used.

        Returns:
            g ``[B, T, H]`` and R ``[B, T, H, K, K]``, float64.
        """
        B, T, H, K = q.shape
        gate = self.per_token(q).map(Tensor.double)
        shared = [name for name in gate.parts if PARTS[name].per_key_head]
        gate = replace(gate, **{name: expand_heads(getattr(gate, name), H) for name in shared})
        matrices = [cast(Callable[..., Tensor], PARTS[name].matrix)(gate, q) for name in factors_in(gate.parts)]
        eye = torch.eye(K, dtype=torch.float64, device=q.device)
        return self.decay(q), reduce(torch.matmul, matrices, eye).expand(B, T, H, K, K)

    def decay(self, q: Tensor) -> Tensor:
        """g of every token in float64, ``[B, T, H]``, with q ``[B, T, H, K]``: 0 without one, -inf where it closes."""
        if self.log_decay is None:
            return q.new_zeros(q.shape[:3], dtype=torch.float64)
        return self.log_decay.double().masked_fill(is_closed(self.log_decay), -torch.inf).expand(q.shape[:3])


_narrow: dict[str, list[tuple[type, dict[str, Any]]]] = {}  # the classes of gates before a part was declared
_MADE = ("__init__", "__match_args__", "__dataclass_fields__")  # by dataclass, of the parts


def declare(name: str, part: GatePart) -> None:
    """Give every gate a part of that name, which :data:`PARTS` declares from now on.

    Raises:
        TypeError: not a :class:`GatePart`.
        ValueError: a name that is taken or no identifier, or a part of one that there is not.
    """
    if not isinstance(part, GatePart):
        raise TypeError(f"part: expected attnzoo.algebra.parts.GatePart, got {type(part).__name__}")
    if not name.isidentifier() or hasattr(Gate, name):
        raise ValueError(f"name: expected a new name that a keyword may have, got {name!r}")
    if part.of and part.of not in PARTS:
        raise unknown("gate part", part.of, PARTS, of=f"{name}.of")
    _narrow[name] = []
    owners: list[type] = [GateParts, *GateParts.__subclasses__()]
    for owner in owners:
        _narrow[name].append((owner, {made: getattr(owner, made) for made in _MADE}))
        wider = type(owner.__name__, (owner,), {"__annotations__": {name: "Tensor | None"}, name: None})
        wider = dataclass(frozen=True, eq=False)(wider)
        for made in _MADE:
            setattr(owner, made, getattr(wider, made))
        setattr(owner, name, None)
    PARTS[name] = part


def undeclare(name: str) -> None:
    """Take a part out again, the last that was declared.

    Raises:
        ValueError: it is not that.
    """
    if name != next(reversed(_narrow), None):
        raise ValueError(f"name: expected the part declared last ({next(reversed(_narrow), 'none')}), got {name!r}")
    for owner, made in _narrow.pop(name):
        delattr(owner, name)
        for attribute, was in made.items():
            setattr(owner, attribute, was)
    del PARTS[name]


def expand_heads(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """Repeat the heads of ``[B, T, G, ...]``, or along another ``dim``, up to ``heads``, if there are fewer."""
    return x if x.shape[dim] >= heads else x.repeat_interleave(heads // x.shape[dim], dim)


def _unsqueeze_to(mask: Tensor, ndim: int) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (ndim - mask.ndim))
