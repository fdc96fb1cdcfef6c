"""The linear readout: recurrent, parallel and chunkwise forms of any transition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import Decay, block_decay, decay_between
from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.transitions import ClosedForm, HeadGate, Transition, cut, heads_first
from attnzoo.algebra.truncation import carried_states
from attnzoo.algebra.values import readable
from attnzoo.forms.caches.inplace import BatchRows, MatrixMemory
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.options import LinearOptions, check_linear, check_prune, existing, separated
from attnzoo.forms.packing import in_rows
from attnzoo.forms.protocol import REFERENCE, Forms
from attnzoo.precision import wide_dtype

CHUNK = 64  # tokens of the longest chunk of any variant
SEGMENT = 1024  # tokens that a CPU computes at a time, so that its caches hold them


def prepared(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions
) -> tuple[Tensor, Tensor, Tensor, Gate, torch.dtype, float]:
    """The inputs after ``valid``, ``write`` and other options, the dtype of the output, and the scale."""
    dtype = v.dtype
    write = gate.beta if options.delta_rule else options.write
    if options.valid is not None:
        q, k, v = existing(options.valid, q, k, v)
        write = None if write is None else existing(options.valid, write)[0]
    if write is not None:
        v = expand_heads(v, write.shape[2]) * expand_heads(write, v.shape[2])[..., None].to(wide_dtype(q.dtype))
    if options.valid is not None or options.cu_seqlens is not None:
        gate = separated(gate, q, options.valid, options.cu_seqlens)
    return q, k, v, gate, dtype, q.shape[-1] ** -0.5 if options.scale is None else options.scale


@dataclass(frozen=True)
class LinearForms(Forms):
    r"""The forms of ``S_t = S_{t-1} A_t + v_t k_t^T``, ``o_t = S_t (scale q_t)`` for one transition.

    All forms take q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]``, the gate and, by keyword, what
    :class:`~attnzoo.forms.options.LinearOptions` lists, and give ``[B, T, H, V]`` in v's dtype. The state holds
    :math:`S^\top` in float32 (float64 for float64 inputs).

    Args:
        transition: the matrix part of the gate.
        chunk_size: tokens per chunk, at most ``CHUNK``.
        kernels: forms beside ``recurrent``, ``parallel`` and ``chunk``.
    """

    REFERENCES = ("recurrent", "parallel", "chunk")
    OPTIONS = LinearOptions
    STATE = RecurrentState

    transition: Transition
    chunk_size: int = 64

    def recurrent(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        """The output token by token: O(T K V) operations, sequential in time."""
        return self._recur(*prepared(q, k, v, gate, self._checked(q, k, v, gate, options)), None)[0]

    def parallel(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        """The output ``(scores * exp(d)) v`` with one T x T matrix per head."""
        q, k, v, gate, dtype, scale = prepared(q, k, v, gate, self._checked(q, k, v, gate, options))
        return self._blockwise(q, k, v, gate, scale, None, size=q.shape[1])[0].to(dtype)

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        """The output by chunks of ``chunk_size`` tokens: quadratic inside, recurrent across them."""
        return self.whole(REFERENCE, q, k, v, gate, self._checked(q, k, v, gate, options))

    def check(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions) -> None:
        check_prune(options.prune, gate, self.transition)
        check_linear(options, q, k, gate)
        self.transition.check(gate)

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Mapping[str, Any]) -> LinearOptions:
        given = LinearOptions(**options)
        self.check(q, k, v, gate, given)
        return given

    def whole(self, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions) -> Tensor:
        if form in self.kernels:
            return cast(Tensor, super().whole(form, q, k, v, gate, options))
        if options.cu_seqlens is not None and readable(options.cu_seqlens):
            return cast(Tensor, in_rows(partial(self.whole, form), q, k, v, gate, options))
        return self._chunked(*prepared(q, k, v, gate, options), None, prune=options.prune)[0]

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: RecurrentState | None, options: LinearOptions
    ) -> tuple[Tensor, RecurrentState]:
        past, seen = (None, 0) if state is None else (state.matrix, len(state))
        ready = prepared(q, k, v, gate, options)
        if q.shape[1] == 1:
            o, last = self._recur(*ready, past)
        else:
            o, matrix = self._chunked(*ready, past, keeps_state=True, prune=options.prune)
            last = cast(Tensor, matrix)
        return o, RecurrentState(last, seen + q.shape[1])

    def in_place(
        self, state: RecurrentState, rows: BatchRows, tokens: int, device: torch.device | str, paged: bool | None = None
    ) -> MatrixMemory:
        """An in-place memory for states like ``state``; see ``SoftmaxForms.in_place``."""
        return MatrixMemory.like(state, rows, device)

    def _heads_first(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor, HeadGate]:
        """The inputs with heads before time, and a copy for each query head."""
        H, dtype = q.shape[2], wide_dtype(q.dtype)
        return heads_first(q, H, dtype), heads_first(k, H, dtype), heads_first(v, H, dtype), HeadGate.of(gate, q)

    def _state(self, q: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
        """The state ``[B, H, K, V]`` before the first token, zeros without ``state``; q ``[B, H, ..., K]``, v
        ``[B, H, ..., V]``."""
        if state is None:
            return q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
        return state.to(q.dtype)

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, dtype: torch.dtype, scale: float, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v, local = self._heads_first(q, k, v, gate)
        S = self._state(q, v, state)
        decay = None if local.log_decay is None else local.log_decay.exp()
        outputs = []
        for t in range(q.shape[2]):
            S = self.transition.apply(local.at(t), S)
            if decay is not None:
                S = decay[:, :, t, None, None] * S
            S = S.addcmul(k[:, :, t, :, None], v[:, :, t, None, :])
            outputs.append(q[:, :, t, None, :] @ S)
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return (o * scale).transpose(1, 2).to(dtype), S

    def _chunked(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, dtype: torch.dtype, scale: float, state: Tensor | None,
        keeps_state: bool = False, prune: Prune | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        T, outputs = q.shape[1], []
        stride, longest = SEGMENT if q.is_cpu and prune is None else T, min(CHUNK, self.chunk_size)
        if stride >= T:
            size = longest if longest < T else T
            o, state = self._blockwise(q, k, v, gate, scale, state, size, keeps_state, prune)
            return o.to(dtype), state
        for a in range(0, T, stride):
            # no min(T, ...): as a symbol in every shape it doubles the time of compiling
            b = a + stride if a + stride < T else T
            size = longest if b - a > longest else b - a
            segment = q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b)
            o, state = self._blockwise(*segment, scale, state, size, keeps_state or b < T)
            outputs.append(o.to(dtype))
        return torch.cat(outputs, 1), state

    def _blockwise(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float, state: Tensor | None, size: int,
        keeps_state: bool = False, prune: Prune | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        T = q.shape[1]
        q, k, v, local = self._heads_first(q, k, v, gate)
        one = not torch.compiler.is_compiling() and size >= T  # a compiled graph serves other lengths
        if state is None and not keeps_state and one:  # a single block
            g, scores = local.log_decay, self.transition.scores(q, k, local).tril_()
            o = (scores if g is None else scores * decay_between(g).exp()) @ v
            return o.mul_(scale).transpose(1, 2), None
        q, k, v, local = cut(q, size), cut(k, size), cut(v, size), local.cut(size)
        block, g = self.transition.block(q, k, local), local.log_decay
        scores, decay = block.scores.tril_(), None if g is None else block_decay(g)
        o = (scores if decay is None else scores * decay.between.exp()) @ v
        starts, state = self._states(block, v, decay, self._state(q, v, state), prune)
        block_q = block.q if decay is None else block.q * decay.entry.exp()[..., None]
        o = o.add_(block_q @ starts).mul_(scale)  # in place, as new memory is slow
        return o.flatten(2, 3)[:, :, :T].transpose(1, 2), state

    def _states(
        self, block: ClosedForm, v: Tensor, decay: Decay | None, S: Tensor, prune: Prune | None
    ) -> tuple[Tensor, Tensor]:
        """The state before each block, ``[B, H, N, K, V]``, and the state after the last."""
        keys = block.k if decay is None else block.k * decay.exit.exp()[..., None]
        updates = keys.mT @ v
        decays = None if decay is None else decay.total.exp()[..., None, None]
        if prune is not None:

            def advance(S: Tensor, n: int) -> Tensor:
                total = None if block.total is None else block.total[:, :, n:]
                return cast(Tensor, decays)[:, :, n:] * self.transition.carry(total, S)

            states = carried_states(advance, cast(Decay, decay), updates, S, prune.eps)
            return states[:, :, :-1], states[:, :, -1]
        falls, totals = (None if x is None else x.unbind(2) for x in (decays, block.total))
        starts = []
        for n, update in enumerate(updates.unbind(2)):
            starts.append(S)
            if totals is not None:
                S = self.transition.carry(totals[n], S)
            if falls is not None:
                S = falls[n] * S
            S = S + update
        return torch.stack(starts, 2), S
