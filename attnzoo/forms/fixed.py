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

from attnzoo.algebra.gate import expand_heads, is_closed
from attnzoo.algebra.transitions import HeadGate, Transition, compute_dtype, heads_first
from attnzoo.forms.cache import KVCache, RecurrentState
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import attend_with_sink, decay_to, least_logit
from attnzoo.forms.untraced import untraced

Extend = Callable[[Call], tuple[Any, Any]]  # how a layer runs a call: its output and the state after it


@dataclass(eq=False)
class Rows:
    """The sequences of a batch, for all layers; whoever calls them counts their tokens, before and after each step.

    Args:
        length: tokens so far, ``[B]`` int64.
        active: 1 for rows that get a token at the next step, 0 for idle ones, ``[B]`` int32.
        lengths: ``length``, on the host.
        tokens: how many of each sequence a step takes. With more than one they are given tokens, of which each sequence
            keeps its first ones: a step ends when :meth:`Memory.keep` has said how many.
    """

    length: Tensor
    active: Tensor
    lengths: list[int]
    tokens: int = 1

    def count(self) -> Tensor:
        """Tokens that a step takes of each sequence, ``[B]`` int32."""
        return self.active if self.tokens == 1 else self.active * self.tokens

    @staticmethod
    def idle(rows: int, device: torch.device | str = "cpu") -> Rows:
        """No sequence yet in any of ``rows`` rows."""
        length, active = (torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        return Rows(length, active, [0] * rows)

    def begin(self, row: int, tokens: int) -> None:
        """A sequence of ``tokens`` tokens goes on in row ``row``."""
        self.length[row], self.active[row], self.lengths[row] = tokens, 1, tokens

    def end(self, row: int) -> None:
        """Row ``row`` is idle."""
        self.length[row], self.active[row], self.lengths[row] = 0, 0, 0


class Memory(Protocol):
    """What a layer remembers of B sequences of their own lengths.

    Attributes:
        final: why tokens cannot be taken back, or "": then a step may take several.
        on_host: whether :meth:`keep` waits for the device.
    """

    final: ClassVar[str]
    on_host: ClassVar[bool]

    def step(self, call: Call, extend: Extend) -> Tensor:
        """The tokens of a step, ``rows.tokens`` of each sequence: output ``[B, T, H, V]`` of a call without a state."""

    def keep(self, kept: Tensor) -> None:
        """Of the several tokens of the last step, sequence b keeps its first ``kept[b]``, ``[B]`` int64."""

    def admit(self, row: int, state: Any, tokens: int) -> None:
        """The idle row ``row`` goes on from ``state``, of one sequence, to ``tokens`` tokens at most."""

    def ready(self, rows: Sequence[int]) -> bool:
        """Make room for the tokens of a step of ``rows``; whether tensors may have changed their places for it."""

    def clear(self, row: int) -> None:
        """Sequence ``row`` has ended."""

    def kept(self, row: int) -> list[int] | None:
        """How many keys each key head of sequence ``row`` has; None where there are no keys."""

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds on the device."""

    def workspace(self, heads: int) -> int:
        """Bytes that a step of ``heads`` query heads takes besides, where they are many."""


@dataclass(eq=False)
class MatrixMemory:
    """The recurrent states of B sequences.

    Args:
        matrix: ``S^T``, ``[B, H, K, V]``.
        rows: see :class:`Rows`.
        last: the step of several tokens that :meth:`keep` ends.
    """

    matrix: Tensor
    rows: Rows
    last: tuple[Call, Extend] | None = None
    on_host: ClassVar[bool] = False
    final: ClassVar[str] = ""

    @staticmethod
    def like(state: RecurrentState, rows: Rows, device: torch.device | str) -> MatrixMemory:
        """Zeros for sequences with states such as this one."""
        matrix = state.matrix
        return MatrixMemory(torch.zeros(len(rows.lengths), *matrix.shape[1:], dtype=matrix.dtype, device=device), rows)

    def step(self, call: Call, extend: Extend) -> Tensor:
        once = self.rows.tokens == 1
        matrix = self.matrix if once else self.matrix.clone()  # a kernel may write to the state that it is given
        o, state = extend(replace(call, state=RecurrentState(matrix)))
        if not once:
            self.last = call, extend
        elif state.matrix is not self.matrix:
            self.matrix.copy_(state.matrix)
        return o  # type: ignore[no-any-return]

    def keep(self, kept: Tensor) -> None:
        """The step again, in which the other tokens write nothing and change nothing."""
        assert self.last is not None
        (call, extend), self.last = self.last, None
        T = call.q.shape[1]
        others = torch.arange(T, device=kept.device) >= kept[:, None] * (T // self.rows.tokens)
        gate, v = call.gate.per_token(call.q).neutral_where(others), call.v.masked_fill(others[..., None, None], 0.0)
        state = extend(replace(call, gate=gate, v=v, state=RecurrentState(self.matrix.clone())))[1]
        self.matrix.copy_(state.matrix)

    def admit(self, row: int, state: RecurrentState, tokens: int) -> None:
        self.matrix[row] = state.matrix[0]

    def ready(self, rows: Sequence[int]) -> bool:
        return False

    def clear(self, row: int) -> None:
        """Nothing to do: the next sequence overwrites it."""

    def kept(self, row: int) -> None:
        return None

    def tensors(self) -> Iterator[Tensor]:
        yield self.matrix

    def workspace(self, heads: int) -> int:
        return 0


@dataclass(eq=False)
class KeyMemory:
    """The keys of B sequences of up to S tokens; a step reads them all and masks those to come.

    Pruning leaves out no keys here, and so drops no mass at all.

    Args:
        transition: what multiplies the keys before a new one; None where they stand as they were written.
        place: ``place(q, k, gate, state, valid)`` of :class:`~attnzoo.forms.softmax.AdditiveForms`, or None.
        rows: see :class:`Rows`.
        k: keys, ``[B, G, K, S]`` (``[B, H, K, S]`` where the transition is per query head).
        v: values, ``[B, G, S, V]``.
        decay: log decays from each key to the last token, ``[B, H, S]`` float64, or None.
        phase: RoPE's total angle so far, ``[B, 1, 1 or H, K/2]`` float64, or None.
    """

    transition: Transition | None
    place: Callable[..., Any] | None
    rows: Rows
    k: Tensor
    v: Tensor
    decay: Tensor | None
    phase: Tensor | None
    on_host: ClassVar[bool] = False
    final: ClassVar[str] = "its keys lie in no pages, and later tokens change them or their decays where they stand"

    @staticmethod
    def like(
        state: KVCache, rows: Rows, tokens: int, device: torch.device | str,
        transition: Transition | None, place: Callable[..., Any] | None,
    ) -> KeyMemory:  # fmt: skip
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one."""

        def zeros(like: Tensor | None, *shape: int, dtype: torch.dtype | None = None) -> Any:
            if like is not None:
                return torch.zeros(len(rows.length), *shape, dtype=dtype or like.dtype, device=device)

        G, K, (_, _, heads, V), gates, phase = *state.k.shape[2:], state.v.shape, state.log_decay, state.phase
        return KeyMemory(
            transition, place, rows, zeros(state.k, G, K, tokens), zeros(state.v, heads, tokens, V),
            zeros(gates, 0 if gates is None else gates.shape[2], tokens, dtype=torch.float64),
            zeros(phase, *(() if phase is None else phase.shape[1:])),
        )  # fmt: skip

    def step(self, call: Call, extend: Extend) -> Tensor:
        q, k, v, gate, given = call.q, call.k, call.v, call.gate, SoftmaxOptions(**call.options)
        (B, _, H, K), S = q.shape, self.k.shape[-1]
        rows, now = torch.arange(B, device=q.device), self.rows.length
        if self.place is not None:
            q, k, phase, _ = self.place(q, k, gate, KVCache(k[:, :0], v[:, :0], phase=self.phase), None)
            if self.phase is not None:
                self.phase.copy_(phase)
        k = expand_heads(k, self.k.shape[1])
        if self.transition is not None:
            matrices = HeadGate.of(replace(gate, log_decay=None), k.to(self.k.dtype)).at(0)
            self.k.copy_(self.transition.apply(matrices, self.k))
        self.k[rows, :, :, now] = k[:, 0].to(self.k.dtype)
        self.v[rows, :, now] = v[:, 0]
        dtype = compute_dtype(q)
        scaled = heads_first(q, H, dtype) * (K**-0.5 if given.scale is None else given.scale)  # [B, H, 1, K]
        grouped = scaled.unflatten(1, (self.k.shape[1], -1)).flatten(2, 3)  # [B, G, H / G, K]
        logits = (grouped @ self.k.to(dtype)).flatten(1, 2)  # [B, H, S]
        if self.decay is not None and gate.log_decay is not None:
            g = gate.per_token(q).log_decay[:, 0, :, None].double()  # type: ignore[index]  # [B, H, 1]
            self.decay.add_(g.masked_fill(is_closed(g), -torch.inf))
            self.decay[rows, :, now] = self.decay.new_zeros(())  # a number would be copied from the host
            logits = (logits + self.decay).clamp(min=least_logit(dtype)).to(dtype)
        keys = torch.arange(S, device=q.device)
        hidden = keys > now[:, None]  # [B, S]
        if given.window is not None:
            hidden |= keys <= now[:, None] - given.window
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
        o = (logits.softmax(-1).unflatten(1, (self.v.shape[1], -1)) @ self.v.to(dtype)).flatten(1, 2)[:, :, None]
        o, _ = attend_with_sink(o, None if given.sink is None else logits.logsumexp(-1)[..., None], given.sink)
        return o.transpose(1, 2).to(v.dtype)

    def keep(self, kept: Tensor) -> None:
        raise NotImplementedError(self.final)

    def ready(self, rows: Sequence[int]) -> bool:
        return False

    def admit(self, row: int, state: KVCache, tokens: int) -> None:
        S = len(state)
        self.k[row].zero_()[..., :S] = expand_heads(state.k, self.k.shape[1])[0].permute(1, 2, 0)
        self.v[row].zero_()[:, :S] = state.v[0].transpose(0, 1)
        if self.decay is not None and state.log_decay is not None:
            self.decay[row].zero_()[:, :S] = decay_to(state.log_decay[0].T.double(), S)
        if self.phase is not None and state.phase is not None:
            self.phase[row] = state.phase[0]

    def clear(self, row: int) -> None:
        """Nothing to do: the next sequence overwrites it."""

    def kept(self, row: int) -> list[int]:
        return [self.rows.lengths[row]] * self.v.shape[1]

    def tensors(self) -> Iterator[Tensor]:
        yield from (x for x in (self.k, self.v, self.decay, self.phase) if x is not None)

    def workspace(self, heads: int) -> int:
        return 0


@dataclass(eq=False)
class CarriedMemory:
    """PaTH's keys of B sequences of up to S tokens: one kernel multiplies them where they stand and attends to them.

    The last place of each tensor is that of the token of a step, from which it goes to the end of its sequence.

    Args:
        rows: see :class:`Rows`.
        k: keys ``[B, S + 1, G, K]`` float32.
        v: values ``[B, S + 1, G, V]``.
        gates: log decays ``[B, S + 1, H]`` float32, or None.
        valid: the places that hold a token, ``[B, S + 1]`` bool.
    """

    rows: Rows
    k: Tensor
    v: Tensor
    gates: Tensor | None
    valid: Tensor
    on_host: ClassVar[bool] = False
    final: ClassVar[str] = "later tokens are multiplied into its keys where they stand"

    @staticmethod
    def like(state: KVCache, rows: Rows, tokens: int, device: torch.device | str) -> CarriedMemory:
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one."""

        def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.zeros(len(rows.lengths), tokens + 1, *like.shape[2:], dtype=dtype, device=device)

        gates = None if state.log_decay is None else zeros(state.log_decay, torch.float32)
        valid = zeros(state.k[0, 0, 0, 0].view(1, 1), torch.bool)
        valid[:, -1] = True
        return CarriedMemory(rows, zeros(state.k, torch.float32), zeros(state.v, state.v.dtype), gates, valid)

    @untraced  # its kernel writes to the keys where they stand
    def step(self, call: Call, extend: Extend) -> Tensor:
        from attnzoo.kernels.path import path_step

        given, gate = SoftmaxOptions(**call.options), call.gate.per_token(call.q)
        index, now = torch.arange(len(self.k), device=self.k.device), self.rows.length
        new = {"k": call.k, "v": call.v, "gates": gate.log_decay}
        self.v[:, -1:] = call.v
        if self.gates is not None and gate.log_decay is not None:
            self.gates[:, -1:] = gate.log_decay
        o = path_step(
            call.q, call.k, gate.w, gate.beta, self.k, self.v, self.gates, self.valid, given.scale,  # type: ignore[arg-type]
            log_diag=gate.log_diag, window=given.window, sink=given.sink,
        )  # fmt: skip
        for name, x in new.items():
            if x is not None:
                mine = getattr(self, name)
                mine[index, now] = x[:, 0].to(mine.dtype)
        self.valid.scatter_(1, now[:, None], True)
        return o.to(call.v.dtype)

    def keep(self, kept: Tensor) -> None:
        raise NotImplementedError(self.final)

    def ready(self, rows: Sequence[int]) -> bool:
        return False

    def admit(self, row: int, state: KVCache, tokens: int) -> None:
        S = len(state)
        self.k[row, :S], self.v[row, :S] = state.k[0], state.v[0]
        if self.gates is not None and state.log_decay is not None:
            self.gates[row, :S] = state.log_decay[0]
        self.valid[row, :S], self.valid[row, S:-1] = True, False

    def clear(self, row: int) -> None:
        """Nothing to do: the next sequence overwrites it."""

    def kept(self, row: int) -> list[int]:
        return [self.rows.lengths[row]] * self.v.shape[2]

    def tensors(self) -> Iterator[Tensor]:
        yield from (x for x in (self.k, self.v, self.gates, self.valid) if x is not None)

    def workspace(self, heads: int) -> int:
        return 0
