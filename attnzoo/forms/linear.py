"""The linear readout: recurrent, parallel and chunkwise forms of any transition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import HeadGate, Transition, block_decay, compute_dtype, cut, heads_first

CHUNK = 64  # tokens of the longest chunk of any variant
SEGMENT = 1024  # tokens that a CPU works on at a time: what it writes then stays in its caches


@dataclass(frozen=True)
class LinearForms:
    r"""``S_t = S_{t-1} A_t + v_t k_t^T``, ``o_t = S_t (scale q_t)`` for one transition.

    All forms take q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]``, the gate and ``scale``
    (default ``1/sqrt(K)``), and give ``[B, T, H, V]`` in v's dtype. The state is :math:`S^\top`,
    ``[B, H, K, V]``, in float32 (float64 for float64 inputs).

    Args:
        transition: the matrix part of the gate.
        chunk_size: tokens per chunk, at most ``CHUNK``.
    """

    transition: Transition
    chunk_size: int = 64

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """One token (T = 1): the output and the new state."""
        return self._recur(q, k, v, gate, state, scale)

    def recurrent(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
        """Token by token: O(T K V) operations, none of them in parallel over time."""
        return self._recur(q, k, v, gate, None, scale)[0]

    def parallel(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
        """Masked quadratic: ``(scores * exp(d)) v`` with one T x T matrix per head."""
        return self._blockwise(q, k, v, gate, None, scale, size=q.shape[1])[0]

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
        """Quadratic inside chunks of ``chunk_size`` tokens, recurrent across them."""
        return self._chunked(q, k, v, gate, None, scale)[0]

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: Tensor | None = None,
        scale: float | None = None,
        *,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Continue from ``state`` (None: empty) with one token or many.

        Args:
            state: ``[B, H, K, V]``, what an earlier call gave.
            valid: ``[B, T]`` bool; a token where it is false leaves the state as it is.

        Returns:
            The output ``[B, T, H, V]`` and the state after the last token.
        """
        if valid is not None:
            absent = ~valid
            gate = gate.per_token(q).neutral_where(absent)
            k = k.masked_fill(absent[..., None, None], 0.0)
            v = v.masked_fill(absent[..., None, None], 0.0)
        if q.shape[1] == 1:
            return self._recur(q, k, v, gate, state, scale)
        return self._chunked(q, k, v, gate, state, scale)

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor, HeadGate, Tensor, float]:
        B, _, H, K = q.shape
        dtype = compute_dtype(q)
        local = HeadGate.of(gate, q)
        if state is None:
            state = q.new_zeros(B, H, K, v.shape[-1], dtype=dtype)
        q, k, v = (heads_first(x, H, dtype) for x in (q, k, v))
        return q, k, v, local, state.to(dtype), K**-0.5 if scale is None else scale

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        dtype = v.dtype
        q, k, v, local, S, scale = self._inputs(q, k, v, gate, state, scale)
        decay = None if local.log_decay is None else local.log_decay.exp()
        outputs = []
        for t in range(q.shape[2]):
            S = self.transition.apply(local.at(t), S)
            if decay is not None:
                S = decay[:, :, t, None, None] * S
            S = S + k[:, :, t, :, None] * v[:, :, t, None, :]
            outputs.append(q[:, :, t, None, :] @ S)
        return torch.cat(outputs, 2).mul_(scale).transpose(1, 2).to(dtype), S

    def _chunked(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        T, outputs = q.shape[1], []
        stride = SEGMENT if q.is_cpu else T
        for a in range(0, T, stride):
            b = min(a + stride, T)
            size = min(CHUNK, self.chunk_size, b - a)
            o, state = self._blockwise(q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), state, scale, size)
            outputs.append(o)
        return torch.cat(outputs, 1), cast(Tensor, state)

    def _blockwise(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None, scale: float | None, size: int
    ) -> tuple[Tensor, Tensor]:
        T, dtype = q.shape[1], v.dtype
        q, k, v, local, S, scale = self._inputs(q, k, v, gate, state, scale)
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
        return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(dtype), S
