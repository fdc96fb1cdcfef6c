"""The forms of any readout over any transition; the linear and the softmax readout have faster ones of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import decay_between
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.readout import Readout, Scores, both_ways
from attnzoo.algebra.transitions import HeadGate, Identity, Transition, heads_first, scaled_queries
from attnzoo.forms.caches.inplace import BatchRows, Memory
from attnzoo.forms.caches.readout_state import ReadoutState, SlotMemory, WeighedMemory
from attnzoo.forms.caches.state import KVCache, append, append_valid
from attnzoo.forms.linear import prepared
from attnzoo.forms.options import LinearOptions, check_linear
from attnzoo.forms.protocol import Call, Forms
from attnzoo.forms.readout import decays_over
from attnzoo.precision import wide_dtype


@dataclass(frozen=True, eq=False)
class Ready:
    """The inputs of a call, after its options and the readout's features.

    Args:
        q, k, v: ``[B, T, H, K]``, ``[B, T, G, K]`` and ``[B, T, G or H, V]``; q is scaled.
        gate: per token.
        valid: tokens that exist, ``[B, T]``, or None for all.
        place: the number of tokens before each in its sequence and this call, ``[B or 1, T]``.
        dtype: of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    valid: Tensor | None
    place: Tensor
    dtype: torch.dtype

    def at(self, t: int) -> Ready:
        """The inputs of token ``t`` alone."""
        now, valid = slice(t, t + 1), self.valid
        rows = {name: getattr(self, name)[:, now] for name in ("q", "k", "v", "place")}
        return replace(self, **rows, gate=self.gate.slice(t, t + 1), valid=None if valid is None else valid[:, now])


@dataclass(frozen=True)
class ReadoutForms(Forms):
    """The forms of ``o_t = sum_j p_tj v_j``, with the weights p of a readout of scores and decays.

    ``parallel`` weighs all tokens at once, with T x T matrices. ``recurrent`` goes token by token, from the readout's
    state where it has one, else over cached keys. Shapes and options are those of
    :class:`~attnzoo.forms.linear.LinearForms`.

    Args:
        transition: the matrix part of the gate.
        readout: what is made of scores and decays.

    Raises:
        ValueError: a readout of later keys over a transition, which has no inverse.
    """

    REFERENCES = ("recurrent", "parallel")
    OPTIONS = LinearOptions
    OF_KERNELS = ("prune",)
    transition: Transition
    readout: Readout

    def __post_init__(self) -> None:
        if not self.readout.causal and not isinstance(self.transition, Identity):
            why = "a score with a later key needs the inverse of R_t, which a transition that decays or erases has not"
            raise ValueError(f"readout: expected a causal one over R_t = {self.transition.shown} ({why})")

    @property
    def forms(self) -> Mapping[str, Any]:
        return {name: form for name, form in super().forms.items() if self.readout.causal or name == "parallel"}

    def parallel(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        """The output of all tokens at once."""
        given = LinearOptions(**options)
        self.check(q, k, v, gate, given)
        return self.whole("parallel", q, k, v, gate, given)

    def recurrent(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        """The output token by token."""
        given = LinearOptions(**options)
        self.check(q, k, v, gate, given)
        ready = self._ready(q, k, v, gate, given)
        if self.readout.stateful:
            return self._recur(ready, None)[0]
        state, outputs = None, []
        for t in range(q.shape[1]):
            o, state = self._weigh(ready.at(t), ready.place[:, : t + 1], state)
            outputs.append(o)
        return torch.cat(outputs, 1)

    def check(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions) -> None:
        if options.prune is not None:
            raise ValueError(f"prune: expected None ({self.readout.unpruned}), got {options.prune!r}")
        check_linear(options, q, k, gate)
        self.transition.check(gate)

    def check_state(self, state: Any) -> None:
        """Raise where ``state`` is not one that this readout leaves.

        Raises:
            TypeError: another object.
        """
        kind = ReadoutState if self.readout.stateful else KVCache
        if state is not None and not isinstance(state, kind):
            raise TypeError(f"state: expected {kind.__name__} or None, got {type(state).__name__}")

    def refuses(self, form: str, call: Call) -> str:
        if call.keeps_state and not self.readout.causal:
            return "rows see later tokens, so no state goes on to them"
        return super().refuses(form, call)

    def whole(self, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions) -> Tensor:
        ready = self._ready(q, k, v, gate, options)
        return self._weigh(ready, ready.place, None)[0]

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any, options: LinearOptions
    ) -> tuple[Tensor, Any]:
        if not self.readout.causal:
            raise ValueError("state: expected no call that keeps one (rows see later tokens), got extend")
        ready = self._ready(q, k, v, gate, options)
        if self.readout.stateful:
            return self._recur(ready, state)
        tokens = q.shape[1] + (0 if state is None else len(state))
        return self._weigh(ready, new_places(append_valid(state, options.valid, k), None, tokens, q.device), state)

    def in_place(
        self, state: Any, rows: BatchRows, tokens: int, device: torch.device | str, paged: bool | None = None
    ) -> Memory:
        """An in-place memory for states like ``state``; see ``SoftmaxForms.in_place``.

        Raises:
            ValueError: ``paged``.
        """
        if paged:
            raise ValueError("paged: expected None or False (no pages hold what this readout keeps), got True")
        return (SlotMemory if self.readout.stateful else WeighedMemory).like(state, rows, tokens, device)

    def _ready(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions) -> Ready:
        T, cu_seqlens = q.shape[1], options.cu_seqlens
        q, k, v, gate, dtype, scale = prepared(q, k, v, gate.per_token(q), options)
        wide = wide_dtype(q.dtype)
        if cu_seqlens is not None and not self.readout.causal:
            back = q.new_zeros(q.shape[:3], dtype=wide) if gate.log_decay_back is None else gate.log_decay_back
            ends = torch.zeros(T + 1, dtype=torch.bool, device=q.device).index_fill(0, cu_seqlens.long(), True)[1:]
            gate = replace(gate, log_decay_back=back.masked_fill(ends[:, None], -torch.inf))
        q, k = self.readout.features(q.to(wide), k.to(wide))
        place = new_places(options.valid, cu_seqlens, T, q.device)
        return Ready(q * scale, k, v, gate, options.valid, place, dtype)

    def _recur(self, ready: Ready, state: ReadoutState | None) -> tuple[Tensor, ReadoutState]:
        """The output token by token, from the readout's state."""
        (B, T, H, K), gate = ready.q.shape, HeadGate.of(ready.gate, ready.q)
        dtype = ready.q.dtype
        q, k, v = (heads_first(x, H, dtype) for x in (ready.q, ready.k, ready.v))
        if state is None:
            N, X = self.readout.slots(gate, v.shape[-1])
            state = ReadoutState(q.new_zeros(B, H, K, N, X), seen=ready.place.new_zeros(B))
        S, place = state.matrix.to(dtype), state.seen[:, None] + ready.place
        outputs = []
        for t in range(T):
            now = gate.at(t)
            moved = self.transition.apply(now, S.flatten(-2)).unflatten(-1, S.shape[-2:])
            if now.log_decay is not None:
                moved = now.log_decay.exp()[..., None, None, None] * moved
            new = self.readout.write(moved, k[:, :, t], v[:, :, t], place[:, t], now)
            outputs.append(self.readout.read(new, q[:, :, t], place[:, t], now))
            S = new if ready.valid is None else torch.where(ready.valid[:, t, None, None, None, None], new, S)
        seen = state.seen + (T if ready.valid is None else ready.valid.sum(1))
        return torch.stack(outputs, 1).to(ready.dtype), ReadoutState(S, len(state) + T, seen=seen)

    def _weigh(self, ready: Ready, place: Tensor, state: KVCache | None) -> tuple[Tensor, KVCache]:
        """The output of T tokens over the keys of ``state`` and their own, which stand at ``place``, and these keys."""
        H, G = ready.q.shape[2], ready.k.shape[2]
        past = KVCache(ready.k[:, :0], ready.v[:, :0]) if state is None else state
        P, gate = len(past), HeadGate.of(ready.gate, ready.q)
        q, k = scaled_queries(ready.q, 1.0), heads_first(ready.k, H, ready.q.dtype)
        new = KVCache(
            ready.k, cast(Tensor, append(past.v, ready.v)), append(past.log_decay, ready.gate.log_decay),
            append_valid(state, ready.valid, ready.k), carried=not isinstance(self.transition, Identity),
        )  # fmt: skip
        carried = heads_first(past.k, H, q.dtype).mT  # [B, H, K, P], the layout of a state
        block = self.transition.block(q, k, gate)
        s = torch.cat([block.q @ carried, block.scores], -1)
        d = torch.zeros_like(s)
        if new.log_decay is not None:
            g = heads_first(new.log_decay, H, q.dtype)
            d = decays_over(g, P) if P else decay_between(g)
        if self.readout.causal:
            d = d.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(P + 1), -torch.inf)
        else:
            back = torch.zeros_like(d[..., 0]) if gate.log_decay_back is None else gate.log_decay_back
            d = both_ways(d, decay_between(back.flip(-1)))
        scores = Scores(s, d, place, gate)
        if new.valid is not None:  # the row of an absent token sees itself, so that none sees nothing
            d = d.masked_fill(~(new.valid[:, None, None] | scores.own), -torch.inf)
        scores = replace(scores, s=s.masked_fill(d == -torch.inf, 0.0), d=d)
        o = self.readout.output(self.readout.weights(scores), heads_first(new.v, H, q.dtype))
        if P:
            carried = self.transition.carry(block.total, carried)
        keys, step = torch.cat([carried, block.k.mT], -1).mT, 1 if ready.gate.per_query_head else H // G
        return o.transpose(1, 2).to(ready.dtype), replace(new, k=keys[:, ::step].transpose(1, 2))


def new_places(valid: Tensor | None, cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """How many tokens stand before each in its sequence, absent ones not counted, ``[B or 1, tokens]`` int64.

    Args:
        valid: ``[B, tokens]`` bool, or None where all exist.
        cu_seqlens: borders ``[N + 1]`` of packed sequences, or None.
        tokens: how many there are.
        device: of the result.
    """
    there = torch.ones(1, tokens, dtype=torch.int64, device=device) if valid is None else valid.long()
    before = there.cumsum(1) - there
    if cu_seqlens is None:
        return before
    borders = cu_seqlens.long()
    own = torch.searchsorted(borders, torch.arange(tokens, device=device), right=True) - 1
    return before - before[:, borders[own]]
