"""The state of readouts beside the linear and the softmax one, and their memories that steps write in place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnzoo.forms.caches.inplace import BatchRows, Extend, Memory
from attnzoo.forms.caches.state import KVCache, RecurrentState, given
from attnzoo.forms.protocol import Call


@dataclass(frozen=True, eq=False)
class ReadoutState(RecurrentState):
    """The state of a readout with slots: ``matrix`` is ``[B, H, K, N, X]``.

    Args:
        seen: how many tokens each row has seen, absent ones not counted, ``[B]`` int64.
    """

    seen: Tensor = field(kw_only=True)

    def reorder(self, index: Tensor) -> ReadoutState:
        super().reorder(index)
        return replace(self, matrix=self.matrix[index], seen=self.seen[index])

    def to(self, device: torch.device | str) -> ReadoutState:
        return replace(self, matrix=self.matrix.to(device), seen=self.seen.to(device))


@dataclass(eq=False)
class ExtendedMemory(Memory):
    """A memory whose steps are those of ``extend`` from a state of B rows, by plain operations.

    Args:
        rows: see :class:`BatchRows`.
        last: the step of several tokens that :meth:`keep` ends.
    """

    rows: BatchRows
    last: tuple[Call, Extend] | None = field(default=None, kw_only=True)
    plain: ClassVar[bool] = True

    def state(self) -> Any:
        """The state that a step goes on from."""
        raise NotImplementedError

    def store(self, new: Any, kept: Tensor) -> None:
        """The state after a step of T tokens, of which those in ``kept [B, T]`` stay, takes the place of the old."""
        raise NotImplementedError

    def step(self, call: Call, extend: Extend) -> Tensor:
        o, new = extend(replace(call, state=self.state()))
        if self.rows.tokens == 1:
            self.store(new, call.q.new_ones(call.q.shape[:2], dtype=torch.bool))
        else:
            self.last = call, extend
        return o  # type: ignore[no-any-return]

    def keep(self, kept: Tensor) -> None:
        """The step again, in which the other tokens are absent."""
        assert self.last is not None
        (call, extend), self.last = self.last, None
        valid = torch.arange(call.q.shape[1], device=kept.device) < kept[:, None]
        call = replace(call, state=self.state(), options={**call.options, "valid": valid})
        self.store(extend(call)[1], valid)


@dataclass(eq=False)
class SlotMemory(ExtendedMemory):
    """The states of B sequences, of a readout with slots.

    Args:
        matrix: ``[B, H, K, N, X]``.
    """

    matrix: Tensor

    @staticmethod
    def like(state: ReadoutState, rows: BatchRows, tokens: int, device: torch.device | str) -> SlotMemory:
        """Zeros for sequences with states such as this one."""
        return SlotMemory(rows, state.matrix.new_zeros(len(rows.lengths), *state.matrix.shape[1:], device=device))

    def state(self) -> ReadoutState:
        return ReadoutState(self.matrix, seen=self.rows.length)

    def store(self, new: ReadoutState, kept: Tensor) -> None:
        self.matrix.copy_(new.matrix)

    def admit(self, row: int, state: ReadoutState, tokens: int) -> None:
        self.matrix[row] = state.matrix[0]

    def workspace(self, heads: int, tokens: int = 1) -> int:
        return 2 * self.matrix.numel() * self.matrix.itemsize


@dataclass(eq=False)
class WeighedMemory(ExtendedMemory):
    """The keys of B sequences of up to S tokens, of a readout that keeps all; a step reads S of them.

    Args:
        k, v: ``[B, S, G or H, K]`` and ``[B, S, G, V]``.
        gates: log decays ``[B, S, H]``, or None.
        valid: the places that hold a token, ``[B, S]`` bool.
    """

    k: Tensor
    v: Tensor
    gates: Tensor | None
    valid: Tensor

    @staticmethod
    def like(state: KVCache, rows: BatchRows, tokens: int, device: torch.device | str) -> WeighedMemory:
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one."""

        def zeros(x: Tensor) -> Tensor:
            return x.new_zeros(len(rows.lengths), tokens, *x.shape[2:], device=device)

        gates = None if state.log_decay is None else zeros(state.log_decay)
        return WeighedMemory(rows, zeros(state.k), zeros(state.v), gates, zeros(given(None, state.k, 1)))

    def state(self) -> KVCache:
        return KVCache(self.k, self.v, self.gates, self.valid, carried=True)

    def store(self, new: KVCache, kept: Tensor) -> None:
        S, now = self.k.shape[1], self.rows.length[:, None]
        row, token = torch.arange(len(now), device=now.device)[:, None], torch.arange(kept.shape[1], device=now.device)
        place = (now + token).clamp(max=S - 1)  # beyond the last place there are only tokens that do not stay
        self.k.copy_(new.k[:, :S])
        for mine, x in ((self.k, new.k), (self.v, new.v), (self.gates, new.log_decay), (self.valid, kept)):
            if mine is not None and x is not None:
                fresh, there = x[:, -kept.shape[1] :], kept.reshape(*kept.shape, *(1,) * (mine.ndim - 2))
                mine[row, place] = torch.where(there, fresh.to(mine.dtype), mine[row, place])

    def admit(self, row: int, state: KVCache, tokens: int) -> None:
        S = len(state)
        for mine, x in ((self.k, state.k), (self.v, state.v), (self.gates, state.log_decay)):
            if mine is not None and x is not None:
                mine[row] = 0
                mine[row, :S] = x[0]
        self.valid[row] = False
        self.valid[row, :S] = given(state.valid, state.k, S)[0]

    def kept(self, row: int) -> list[int]:
        return [self.rows.lengths[row]] * self.v.shape[2]

    def workspace(self, heads: int, tokens: int = 1) -> int:
        (B, S), wide = self.valid.shape, max(4, self.k.itemsize)
        return wide * (2 * self.k.numel() + self.v.numel() + 4 * B * heads * tokens * S)
