"""The linear readout: recurrent, parallel and chunkwise forms of any transition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.transitions import HeadGate, Transition, block_decay, compute_dtype, cut, heads_first
from attnzoo.algebra.values import readable
from attnzoo.forms.caches.inplace import MatrixMemory, Rows
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.options import LinearOptions, check_linear, existing, separated
from attnzoo.forms.packing import in_rows
from attnzoo.forms.protocol import Forms

CHUNK = 64  # tokens of the longest chunk of any variant
SEGMENT = 1024  # tokens that a CPU works on at a time: what it writes then stays in its caches


@dataclass(frozen=True)
class LinearForms(Forms):
    r"""``S_t = S_{t-1} A_t + v_t k_t^T``, ``o_t = S_t (scale q_t)`` for one transition.

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
        """Token by token: O(T K V) operations, none of them in parallel over time."""
        return self._recur(*self._ready(q, k, v, gate, self._checked(q, k, v, gate, options)), None)[0]

    def parallel(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        """Masked quadratic: ``(scores * exp(d)) v`` with one T x T matrix per head."""
        ready = self._ready(q, k, v, gate, self._checked(q, k, v, gate, options))
        return self._blockwise(*ready, None, size=q.shape[1])[0]

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Tensor:
        """Quadratic inside chunks of ``chunk_size`` tokens, recurrent across them."""
        return self._whole(q, k, v, gate, self._checked(q, k, v, gate, options))

    def check(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions) -> None:
        check_linear(options, q, k, gate)
        self.transition.check(gate)

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Mapping[str, Any]) -> LinearOptions:
        given = LinearOptions(**options)
        self.check(q, k, v, gate, given)
        return given

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions) -> Tensor:
        if options.cu_seqlens is not None and readable(options.cu_seqlens):
            return cast(Tensor, in_rows(self._whole, q, k, v, gate, options))
        return self._chunked(*self._ready(q, k, v, gate, options), None)[0]

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: RecurrentState | None, options: LinearOptions
    ) -> tuple[Tensor, RecurrentState]:
        past, seen = (None, 0) if state is None else (state.matrix, len(state))
        ready = self._ready(q, k, v, gate, options)
        o, matrix = self._recur(*ready, past) if q.shape[1] == 1 else self._chunked(*ready, past)
        return o, RecurrentState(matrix, seen + q.shape[1])

    def in_place(
        self, state: RecurrentState, rows: Rows, tokens: int, device: torch.device | str, paged: bool | None = None
    ) -> MatrixMemory:
        """The memory of steps that change it in place, for states such as this one; see ``SoftmaxForms.in_place``."""
        return MatrixMemory.like(state, rows, device)

    def _ready(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: LinearOptions
    ) -> tuple[Tensor, Tensor, Tensor, Gate, torch.dtype, float]:
        """The inputs with what the options ask for folded in, the dtype of the output and the scale."""
        dtype = v.dtype
        write = gate.beta if options.delta_rule else options.write
        if options.valid is not None:
            q, k, v = existing(options.valid, q, k, v)
            write = None if write is None else existing(options.valid, write)[0]
        if write is not None:
            v = expand_heads(v, write.shape[2]) * expand_heads(write, v.shape[2])[..., None].to(compute_dtype(q))
        if options.valid is not None or options.cu_seqlens is not None:
            gate = separated(gate, q, options.valid, options.cu_seqlens)
        return q, k, v, gate, dtype, q.shape[-1] ** -0.5 if options.scale is None else options.scale

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, HeadGate, Tensor]:
        """All of it with the heads first, each query head with its own copy, and the state ``[B, H, K, V]``."""
        B, _, H, K = q.shape
        dtype = compute_dtype(q)
        local = HeadGate.of(gate, q)
        if state is None:
            state = q.new_zeros(B, H, K, v.shape[-1], dtype=dtype)
        q, k, v = (heads_first(x, H, dtype) for x in (q, k, v))
        return q, k, v, local, state.to(dtype)

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, dtype: torch.dtype, scale: float, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v, local, S = self._inputs(q, k, v, gate, state)
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
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, dtype: torch.dtype, scale: float, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        T, outputs = q.shape[1], []
        stride, longest = SEGMENT if q.is_cpu else T, min(CHUNK, self.chunk_size)
        for a in range(0, T, stride):
            # no min of T: a compiler would carry it through every shape, and take twice as long
            b = a + stride if a + stride < T else T
            size = longest if b - a > longest else b - a
            o, state = self._blockwise(q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), dtype, scale, state, size)
            outputs.append(o)
        return torch.cat(outputs, 1), cast(Tensor, state)

    def _blockwise(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, dtype: torch.dtype, scale: float, state: Tensor | None,
        size: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        T = q.shape[1]
        q, k, v, local, S = self._inputs(q, k, v, gate, state)
        q, k, v, local = cut(q, size), cut(k, size), cut(v, size), local.cut(size)
        block = self.transition.block(q, k, local)
        scores, block_q, block_k = block.scores, block.q, block.k
        decays: list[Tensor] | None = None
        if local.log_decay is None:
            scores = scores.tril_()
        else:
            decay = block_decay(local.log_decay)
            scores = scores.tril_() * decay.between.exp()
            block_q = block_q * decay.entry.exp()[..., None]
            block_k = block_k * decay.exit.exp()[..., None]
            decays = list(decay.total.exp()[..., None, None].unbind(2))
        updates = (block_k.mT @ v).unbind(2)
        totals = None if block.total is None else block.total.unbind(2)
        starts = []
        for n, update in enumerate(updates):
            starts.append(S)
            if totals is not None:
                S = self.transition.carry(totals[n], S)
            if decays is not None:
                S = decays[n] * S
            S = S + update
        o = (scores @ v).add_(block_q @ torch.stack(starts, 2)).mul_(scale)  # in place: fresh memory is slow
        return rearrange(o.flatten(2, 3)[:, :, :T], "b h t v -> b t h v").to(dtype), S
