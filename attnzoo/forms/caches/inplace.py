"""Memories of fixed size: what the two sides remember of several sequences, changed in place by steps of one token.

Every tensor keeps its place and its shape, and nothing waits for the device, so that a CUDA graph of a step stays right
while the sequences grow. Rows come from the states that ``extend`` leaves and go without touching the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds
from attnzoo.forms.caches.device_memory import size_of
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.protocol import Call

Extend = Callable[[Call], tuple[Any, Any]]  # how a layer runs a call: its output and the state after it


@dataclass(eq=False)
class BatchRows:
    """The sequences of a batch, for all layers; whoever calls them counts their tokens, before and after each step.

    Args:
        length: tokens so far, ``[B]`` int64.
        active: 1 for rows that get a token at the next step, 0 for idle ones, ``[B]`` int32.
        lengths: ``length``, on the host.
        tokens: how many of each sequence a step takes. With more than one they are given tokens, of which each sequence
            keeps its first ones: a step ends when :meth:`Memory.keep` has said how many.
        eight_bits: whether keys and values are to be kept in 8 bits.
    """

    length: Tensor
    active: Tensor
    lengths: list[int]
    tokens: int = 1
    eight_bits: bool = False

    def count(self) -> Tensor:
        """Tokens that a step takes of each sequence, ``[B]`` int32."""
        return self.active if self.tokens == 1 else self.active * self.tokens

    def places(self) -> Tensor:
        """The positions of a step's tokens, ``[B, tokens]`` int64."""
        now = self.length[:, None]
        return now if self.tokens == 1 else now + torch.arange(self.tokens, device=now.device)

    @staticmethod
    def idle(rows: int, device: torch.device | str = "cpu", eight_bits: bool = False) -> BatchRows:
        """No sequence yet in any of ``rows`` rows."""
        length, active = (torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        return BatchRows(length, active, [0] * rows, eight_bits=eight_bits)

    def begin(self, row: int, tokens: int) -> None:
        """A sequence of ``tokens`` tokens goes on in row ``row``."""
        self.length[row], self.active[row], self.lengths[row] = tokens, 1, tokens

    def end(self, row: int) -> None:
        """Row ``row`` is idle."""
        self.length[row], self.active[row], self.lengths[row] = 0, 0, 0


class Memory(Protocol):
    """A layer's memory of B sequences, each of its own length, which steps write in place.

    Attributes:
        plain: whether a step is plain operations on every device.
    """

    plain: ClassVar[bool] = False

    @property
    def eight_bits(self) -> bool:
        """Whether its keys and values have 8 bits."""
        return False

    @property
    def whole_steps(self) -> str:
        """The kernels that do a whole step of some layers over it: those over a ``"matrix"``, ``"pages"`` or none."""
        return ""

    def step(self, call: Call, extend: Extend) -> Tensor:
        """The tokens of a step, ``rows.tokens`` of each sequence: output ``[B, T, H, V]`` of a call without a state."""

    def keep(self, kept: Tensor) -> None:
        """Undo the last step of several tokens but for the first ``kept[b]`` of sequence b; ``kept [B]`` int64."""

    def admit(self, row: int, state: Any, tokens: int) -> None:
        """The idle row ``row`` goes on from ``state``, of one sequence, to ``tokens`` tokens at most."""

    def prefix(self, state: Any) -> Any:
        """What is kept of ``state``, so that later sequences go on from it: itself, or a prefix with its pages."""
        return state

    def renew(self, bounds: QueryBounds) -> None:
        """Give keys up by these bounds of the rows to come from now on, where it does so by any."""
        return

    def ready(self, rows: Sequence[int]) -> bool:
        """Whether tensors may have changed their places, so that the tokens of a step of ``rows`` fit."""
        return False

    def clear(self, row: int) -> None:
        """Sequence ``row`` has ended. Where that is nothing to do, the next one overwrites it."""
        return

    def kept(self, row: int) -> list[int] | None:
        """The number of keys of each key head of sequence ``row``; None where there are no keys."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it holds on the device: its own attributes."""
        yield from (x for x in vars(self).values() if isinstance(x, Tensor))

    def workspace(self, heads: int, tokens: int = 1) -> int:
        """Bytes that a step of ``heads`` query heads and ``tokens`` tokens takes besides, where they are many."""


@dataclass(eq=False)
class MatrixMemory(Memory):
    """The recurrent states of B sequences.

    Args:
        matrix: ``S^T``, ``[B, H, K, V]``.
        rows: see :class:`BatchRows`.
        last: the step of several tokens that :meth:`keep` ends.
    """

    matrix: Tensor
    rows: BatchRows
    last: tuple[Call, Extend] | None = None

    @property
    def whole_steps(self) -> str:
        return "matrix"

    @staticmethod
    def like(state: RecurrentState, rows: BatchRows, device: torch.device | str) -> MatrixMemory:
        """Zeros for sequences with states such as this one."""
        matrix = state.matrix
        return MatrixMemory(torch.zeros(len(rows.lengths), *matrix.shape[1:], dtype=matrix.dtype, device=device), rows)

    def step(self, call: Call, extend: Extend) -> Tensor:
        if self.rows.tokens == 1:
            return self._advance(call, extend)
        self.last = call, extend
        o: Tensor = extend(replace(call, state=RecurrentState(self.matrix)))[0]
        return o

    def _advance(self, call: Call, extend: Extend) -> Tensor:
        """The output of a call, after which the states are those after its tokens."""
        o, state = extend(replace(call, state=RecurrentState(self.matrix, disposable=True)))
        if state.matrix is not self.matrix:
            self.matrix.copy_(state.matrix)
        return o  # type: ignore[no-any-return]

    def keep(self, kept: Tensor) -> None:
        """Repeat the step with neutral gates and zero values at the tokens that are not kept."""
        assert self.last is not None
        (call, extend), self.last = self.last, None
        T = call.q.shape[1]
        others = torch.arange(T, device=kept.device) >= kept[:, None] * (T // self.rows.tokens)
        gate, v = call.gate.per_token(call.q).neutral_where(others), call.v.masked_fill(others[..., None, None], 0.0)
        self._advance(replace(call, gate=gate, v=v), extend)

    def admit(self, row: int, state: RecurrentState, tokens: int) -> None:
        self.matrix[row] = state.matrix[0]

    def workspace(self, heads: int, tokens: int = 1) -> int:
        return 0 if tokens == 1 else size_of(self.matrix)  # the state after all of them


def tokens_of(call: Call) -> Iterator[Call]:
    """Yield a call per token of a call whose gate parts are all per token."""
    for t in range(call.q.shape[1]):
        q, k, v = (x[:, t : t + 1] for x in (call.q, call.k, call.v))
        yield replace(call, q=q, k=k, v=v, gate=call.gate.slice(t, t + 1))
