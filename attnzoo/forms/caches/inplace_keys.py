"""Memories of fixed size whose keys lie in no pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import block_decay
from attnzoo.algebra.gate import expand_heads, is_closed
from attnzoo.algebra.transitions import HeadGate, Identity, Transition, heads_first, scaled_queries
from attnzoo.forms.caches.device_memory import size_of
from attnzoo.forms.caches.inplace import BatchRows, Extend, Memory, tokens_of
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.options import READS_LESS, SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import attend_with_sink, decay_to, least_logit, logits_of
from attnzoo.kernels.common.untraced import untraced
from attnzoo.precision import wide_dtype


@dataclass(eq=False)
class KeyMemory(Memory):
    """The keys of B sequences of up to S tokens; a step reads them all and masks those to come.

    Several tokens are one block: their queries are carried back to the keys, which stay until :meth:`keep`. Pruning
    leaves out no keys here, and so drops no mass at all.

    Args:
        transition: what multiplies the keys before a new one; None where they stand as they were written.
        place: ``place(q, k, gate, state, valid)`` of :class:`~attnzoo.forms.softmax.SoftmaxForms`, or None.
        rows: see :class:`BatchRows`.
        k: keys, ``[B, G, K, S]`` (``[B, H, K, S]`` where the transition is per query head).
        v: values, ``[B, G, S, V]``.
        decay: log decays from each key to the last token, ``[B, H, S]`` float64, or None.
        phase: RoPE's total angle so far, ``[B, 1, 1 or H, K/2]`` float64, or None.
        last: the step of several tokens that :meth:`keep` ends.
    """

    transition: Transition | None
    place: Callable[..., Any] | None
    rows: BatchRows
    k: Tensor
    v: Tensor
    decay: Tensor | None
    phase: Tensor | None
    last: Call | None = None
    plain: ClassVar[bool] = True

    @staticmethod
    def like(
        state: KVCache, rows: BatchRows, tokens: int, device: torch.device | str,
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
        if self.rows.tokens > 1:
            self.last = call
            return self._block(call)
        v, gate, given = call.v, call.gate, SoftmaxOptions(**call.options)
        q, k, phase = self._placed(call)
        B, S = q.shape[0], self.k.shape[-1]
        rows, now = torch.arange(B, device=q.device), self.rows.length
        if self.phase is not None:
            self.phase.copy_(phase)
        if self.transition is not None:
            matrices = HeadGate.of(replace(gate, log_decay=None), k.to(self.k.dtype)).at(0)
            self.k.copy_(self.transition.apply(matrices, self.k))
        self.k[rows, :, :, now] = k[:, 0].to(self.k.dtype)
        self.v[rows, :, now] = v[:, 0]
        dtype = wide_dtype(q.dtype)
        grouped = scaled_queries(q, given.scale).unflatten(1, (self.k.shape[1], -1)).flatten(2, 3)  # [B, G, H / G, K]
        logits = logits_of((grouped @ self.k.to(dtype)).flatten(1, 2), given)  # [B, H, S]
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

    def _placed(self, call: Call) -> tuple[Tensor, Tensor, Any]:
        """q and k with what is folded into them, k with the heads of the keys, and the phase after these tokens."""
        q, k, phase = call.q, call.k, self.phase
        if self.place is not None:
            q, k, phase, _ = self.place(q, k, call.gate, KVCache(k[:, :0], call.v[:, :0], phase=phase), None)
        return q, expand_heads(k, self.k.shape[1]), phase

    def _block(self, call: Call) -> Tensor:
        """The output of several tokens, which changes nothing."""
        given, (q, k, _), dtype = SoftmaxOptions(**call.options), self._placed(call), wide_dtype(call.q.dtype)
        (_, T, H, _), (_, G, _, S), now = q.shape, self.k.shape, self.rows.length[:, None, None]
        gate = HeadGate.of(call.gate, q)
        scaled, keys = scaled_queries(q, given.scale), heads_first(k, H, dtype)
        block = self._transition().block(scaled, keys, replace(gate, log_decay=None))
        old = logits_of((block.q.unflatten(1, (G, -1)).flatten(2, 3) @ self.k.to(dtype)).view(-1, H, T, S), given)
        own = logits_of(block.scores, given)
        if self.decay is not None and gate.log_decay is not None:
            inside = block_decay(gate.log_decay)
            old = (old + (self.decay[:, :, None] + inside.entry[..., None])).clamp(min=least_logit(dtype)).to(dtype)
            own = (own + inside.between).clamp(min=least_logit(dtype))
        keys, tokens = torch.arange(S, device=q.device), torch.arange(T, device=q.device)[:, None]
        hidden, future = (keys >= now).expand(-1, T, S), tokens < tokens.T
        if given.window is not None:
            hidden = hidden | (keys <= now + tokens - given.window)
            future = future | (tokens - given.window >= tokens.T)
        logits = torch.cat([old.masked_fill(hidden[:, None], -torch.inf), own.masked_fill(future, -torch.inf)], -1)
        p, v = logits.softmax(-1), heads_first(call.v, H, dtype)
        o = p[..., :S].unflatten(1, (self.v.shape[1], -1)).flatten(2, 3) @ self.v.to(dtype)
        o = o.view(-1, H, T, v.shape[-1]) + p[..., S:] @ v
        o, _ = attend_with_sink(o, None if given.sink is None else logits.logsumexp(-1), given.sink)
        return o.transpose(1, 2).to(call.v.dtype)

    def keep(self, kept: Tensor) -> None:
        """Carry the keys over these tokens, which come to stand behind them."""
        assert self.last is not None
        call, self.last = self.last, None
        (B, T), device = call.q.shape[:2], kept.device
        gate = call.gate.per_token(call.q).neutral_where(torch.arange(T, device=device) >= kept[:, None])
        _, k, phase = self._placed(replace(call, gate=gate))
        if self.phase is not None:
            self.phase.copy_(phase)
        k, at = k.to(self.k.dtype), (torch.arange(B, device=device)[:, None], self.rows.length[:, None])
        at = at[0], at[1] + torch.arange(T, device=device)
        keys = heads_first(k, k.shape[2], k.dtype)
        block = self._transition().block(keys, keys, HeadGate.of(replace(gate, log_decay=None), k))
        if self.transition is not None:
            self.k.copy_(self.transition.carry(block.total, self.k))
        self.k[at[0], :, :, at[1]] = block.k.transpose(1, 2)
        self.v[at[0], :, at[1]] = call.v
        if self.decay is not None and gate.log_decay is not None:
            inside = block_decay(gate.log_decay.transpose(1, 2).double())
            self.decay.add_(inside.total[..., None])
            self.decay[at[0], :, at[1]] = inside.exit.transpose(1, 2)

    def _transition(self) -> Transition:
        return self.transition or Identity()

    def admit(self, row: int, state: KVCache, tokens: int) -> None:
        S = len(state)
        self.k[row].zero_()[..., :S] = expand_heads(state.k, self.k.shape[1])[0].permute(1, 2, 0)
        self.v[row].zero_()[:, :S] = state.v[0].transpose(0, 1)
        if self.decay is not None and state.log_decay is not None:
            self.decay[row].zero_()[:, :S] = decay_to(state.log_decay[0].T.double(), S)
        if self.phase is not None and state.phase is not None:
            self.phase[row] = state.phase[0]

    def kept(self, row: int) -> list[int]:
        return [self.rows.lengths[row]] * self.v.shape[1]

    def workspace(self, heads: int, tokens: int = 1) -> int:
        (B, *_, S), wide = self.k.shape, max(4, self.k.itemsize)
        return wide * (self.k.numel() + self.v.numel() + 3 * B * heads * tokens * S)  # copies, logits and weights


@dataclass(eq=False)
class CarriedMemory(Memory):
    """PaTH's keys of B sequences of up to S tokens: one kernel multiplies them where they stand and attends to them.

    The last place of each tensor is that of the token of a step, from which it goes to the end of its sequence. Several
    tokens come one after the other: over a copy of the keys, and when it is known which stay, over the keys.

    Args:
        rows: see :class:`BatchRows`.
        k: keys ``[B, S + 1, G, K]`` float32.
        v: values ``[B, S + 1, G, V]``.
        gates: log decays ``[B, S + 1, H]`` float32, or None.
        valid: the places that hold a token, ``[B, S + 1]`` bool.
        last: the step of several tokens that :meth:`keep` ends.
    """

    rows: BatchRows
    k: Tensor
    v: Tensor
    gates: Tensor | None
    valid: Tensor
    last: Call | None = None

    @staticmethod
    def like(state: KVCache, rows: BatchRows, tokens: int, device: torch.device | str) -> CarriedMemory:
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one."""

        def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.zeros(len(rows.lengths), tokens + 1, *like.shape[2:], dtype=dtype, device=device)

        gates = None if state.log_decay is None else zeros(state.log_decay, torch.float32)
        valid = zeros(state.k[0, 0, 0, 0].view(1, 1), torch.bool)
        valid[:, -1] = True
        return CarriedMemory(rows, zeros(state.k, torch.float32), zeros(state.v, state.v.dtype), gates, valid)

    @untraced  # its kernel writes to the keys where they stand
    def step(self, call: Call, extend: Extend) -> Tensor:
        call = replace(call, gate=call.gate.per_token(call.q))
        if self.rows.tokens == 1:
            return self.take(call, self.rows.length)
        self.last, trial = call, replace(self, **self.moving())
        return torch.cat([trial.take(one, self.rows.length + t) for t, one in enumerate(tokens_of(call))], 1)

    def moving(self) -> dict[str, Any]:
        """Copies of what a token changes besides its own place."""
        return {"k": self.k.clone(), "valid": self.valid.clone()}

    def take(self, call: Call, now: Tensor, there: Tensor | None = None) -> Tensor:
        """Add one token to each sequence, which has ``now [B]`` before it; the output of the token, ``[B, 1, H, V]``.

        Args:
            there: the sequences that get it, ``[B]`` bool, or None for all; the gate of others is that of no token.
        """
        from attnzoo.kernels.path import path_step

        given, gate, index = SoftmaxOptions(**call.options), call.gate, torch.arange(len(self.k), device=self.k.device)
        new = {"k": call.k, "v": call.v, "gates": gate.log_decay}
        self.v[:, -1:] = call.v
        if self.gates is not None and gate.log_decay is not None:
            self.gates[:, -1:] = gate.log_decay
        o = path_step(
            call.q, call.k, gate.w, gate.beta, self.k, self.v, self.gates, self.valid,  # type: ignore[arg-type]
            log_diag=gate.log_diag, **given.of_kernels(*READS_LESS),
        )  # fmt: skip
        for name, x in new.items():
            if x is not None:
                mine = getattr(self, name)
                mine[index, now] = x[:, 0].to(mine.dtype)
        self.valid[index, now] = now >= 0 if there is None else there
        return o.to(call.v.dtype)

    def keep(self, kept: Tensor) -> None:
        assert self.last is not None
        call, self.last = self.last, None
        others = torch.arange(self.rows.tokens, device=kept.device) >= kept[:, None]
        for t, one in enumerate(tokens_of(replace(call, gate=call.gate.neutral_where(others)))):
            self.take(one, self.rows.length + t, ~others[:, t])

    def admit(self, row: int, state: KVCache, tokens: int) -> None:
        S = len(state)
        self.k[row, :S], self.v[row, :S] = state.k[0], state.v[0]
        if self.gates is not None and state.log_decay is not None:
            self.gates[row, :S] = state.log_decay[0]
        self.valid[row, :S], self.valid[row, S:-1] = True, False

    def kept(self, row: int) -> list[int]:
        return [self.rows.lengths[row]] * self.v.shape[2]

    def workspace(self, heads: int, tokens: int = 1) -> int:
        return 0 if tokens == 1 else size_of(self.k) + size_of(self.valid)
