"""The fused forms of PaTH and PaTH-FoX (``attnzoo.kernels.path``), and a cache that grows in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.gate import Gate
from attnzoo.pruning import Prune
from attnzoo.softmax import CarriedForms, KVCache, on_packed

ROOM = 256  # buffers hold multiples of this many tokens


@dataclass(eq=False)
class Room:
    """Buffers that begin with a cache's values, gates and validity, ``[B, capacity, ...]``.

    Args:
        used: tokens of the longest cache in them; only that one may be appended to in place.
    """

    v: Tensor
    log_decay: Tensor | None
    valid: Tensor | None
    used: int

    @staticmethod
    def of(state: KVCache, extra: int, masked: bool) -> Room:
        """The buffers of ``state`` if ``extra`` tokens still fit behind it, else larger copies."""
        S = len(state)
        room = state.room if isinstance(state, GrowingCache) else None
        fits = room is not None and room.used == S and S + extra <= room.v.shape[1]
        writable = room is not None and (torch.is_inference_mode_enabled() or not room.v.is_inference())
        if room is not None and fits and writable and masked == (room.valid is not None):
            return room
        size = -(-(S + extra + S // 4) // ROOM) * ROOM
        valid = state.valid
        if masked and valid is None:
            valid = state.v.new_ones(*state.v.shape[:2], dtype=torch.bool)

        def widened(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            wide = x.new_empty(x.shape[0], size, *x.shape[2:])
            wide[:, :S] = x
            return wide

        return Room(cast(Tensor, widened(state.v)), widened(state.log_decay), widened(valid), S)

    def append(self, v: Tensor, log_decay: Tensor | None, valid: Tensor | None) -> None:
        """Write the new tokens behind the others."""
        now = slice(self.used, self.used + v.shape[1])
        self.v[:, now] = v
        if self.log_decay is not None:
            self.log_decay[:, now] = cast(Tensor, log_decay)
        if self.valid is not None:
            self.valid[:, now] = True if valid is None else valid
        self.used = now.stop


@dataclass(frozen=True, eq=False)
class GrowingCache(KVCache):
    """A :class:`KVCache` whose values, gates and validity are views of a :class:`Room`: appending copies nothing."""

    room: Room | None = None


@dataclass(frozen=True)
class PathForms(CarriedForms):
    """:class:`CarriedForms` with Householder-like transitions, and the same in fused kernels."""

    def triton(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None, *,
        valid: Tensor | None = None, prune: Prune | None = None, logit_bound: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The fused kernel (``attnzoo.kernels.path``) on whole sequences; with ``valid`` they run packed."""
        from attnzoo.kernels.path import path_attention

        w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)
        options: dict[str, Any] = {"scale": scale, "prune": prune, "logit_bound": logit_bound, "impl": "triton"}

        def attend(
            q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, g: Tensor | None, borders: Tensor | None = None
        ) -> Tensor:
            return path_attention(q, k, v, w=w, beta=beta, log_gate=g, cu_seqlens=borders, **options)

        rows = (q.to(v.dtype), k.to(v.dtype), v, w, beta, gate.log_decay)
        return attend(*rows) if valid is None else on_packed(attend, valid, *rows)

    def extend_triton(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: KVCache | None = None,
        scale: float | None = None,
        *,
        valid: Tensor | None = None,
        prune: Prune | None = None,
        logit_bound: Tensor | None = None,
    ) -> tuple[Tensor, KVCache]:
        """:meth:`extend` on the fused kernels: without a state whole sequences, with one a step over all cached keys.

        A step reads every cached key, as each must be advanced: ``prune`` leaves out none of them there, and so drops
        no mass at all. ``state`` stays as it was. A step has no gradient.

        Raises:
            ValueError: ``prune`` without a scalar decay; a state together with inputs that require a gradient while
                gradients are recorded.
        """
        from attnzoo.kernels.path import carry_keys, path_extend, refuse_gradients

        if prune is not None and gate.log_decay is None:
            raise ValueError("prune: expected None (nothing decays without log_decay), got " + repr(prune))
        if valid is not None:
            gate = gate.neutral_where(~valid)
        w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)
        if state is None or not len(state):
            o = self.triton(q, k, v, gate, scale, valid=valid, prune=prune, logit_bound=logit_bound)
            return o, KVCache(carry_keys(k, w, beta), v, gate.log_decay, valid)
        refuse_gradients(q, k, v, w, beta, state.k, state.v)
        room = Room.of(state, v.shape[1], masked=valid is not None or state.valid is not None)
        room.append(v, gate.log_decay, valid)
        seen = slice(0, room.used)
        gates = None if room.log_decay is None else room.log_decay[:, seen]
        there = None if room.valid is None else room.valid[:, seen]
        values = room.v[:, seen]
        o, keys = path_extend(q, k, w, beta, state.k.float(), values, gates, there, scale)
        return o, GrowingCache(keys, values, gates, there, None, room)
