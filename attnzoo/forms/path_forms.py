"""The fused forms of PaTH and PaTH-FoX (``attnzoo.kernels.path``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune
from attnzoo.forms.cache import GrowingCache, KVCache, append_in_place, growing
from attnzoo.forms.softmax import CarriedForms, on_packed


@dataclass(frozen=True)
class PathForms(CarriedForms):
    """:class:`CarriedForms` with Householder-like transitions, and the same in fused kernels."""

    def triton(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None, *,
        valid: Tensor | None = None, prune: Prune | None = None, logit_bound: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The fused kernel (``attnzoo.kernels.path``) on whole sequences; with ``valid`` they run packed."""
        from attnzoo.kernels.path import path_attention

        gate = gate.per_token(q)
        w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)
        options: dict[str, Any] = {"scale": scale, "prune": prune, "logit_bound": logit_bound, "impl": "triton"}

        def attend(
            q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, g: Tensor | None, borders: Tensor | None = None
        ) -> Tensor:
            return path_attention(q, k, v, w=w, beta=beta, log_decay=g, cu_seqlens=borders, **options)

        rows = (q.to(v.dtype), k.to(v.dtype), v, w, beta, gate.log_decay)
        return attend(*rows) if valid is None else on_packed(attend, valid, *rows)

    def triton_refuses(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, valid: Tensor | None
    ) -> str:
        """Why :meth:`extend_triton` cannot serve a call, or ""."""
        from attnzoo.kernels.path import triton_unavailable

        rows = (q, k, v, *(cast(Tensor, getattr(gate, part)) for part in gate.parts))
        if state is not None and torch.is_grad_enabled() and any(x.requires_grad for x in rows):
            return "a cached step of the triton form has no gradient (run it under torch.no_grad())"
        return triton_unavailable(q, v)

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
        gate = gate.per_token(q) if valid is None else gate.neutral_where(~valid)
        w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)
        if state is None or not len(state):
            o = self.triton(q, k, v, gate, scale, valid=valid, prune=prune, logit_bound=logit_bound)
            return o, KVCache(carry_keys(k, w, beta), v, gate.log_decay, valid)
        refuse_gradients(q, k, v, w, beta, state.k, state.v)
        new = KVCache(k, v, gate.log_decay, valid)
        parts, room = append_in_place(state, *growing(state, new, ("v",)))
        gates, there = parts.get("log_decay"), parts.get("valid")
        o, keys = path_extend(q, k, w, beta, state.k.float(), parts["v"], gates, there, scale)
        return o, GrowingCache(keys, **parts, room=room)
