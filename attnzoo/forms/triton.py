"""The ``triton`` forms: the fused kernels of ``attnzoo.kernels``, with caches that grow in place.

The kernels are imported when they first run: this module costs nothing where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune
from attnzoo.forms.cache import GrowingCache, KVCache, append_in_place, growing
from attnzoo.forms.options import SoftmaxOptions, check_softmax
from attnzoo.forms.protocol import Call, Kernel


class Additive(Protocol):
    """What the kernel of FoX needs of ``AdditiveForms``."""

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate: ...

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, valid: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, KVCache]: ...  # fmt: skip


def fox_kernel(forms: Additive) -> Kernel:
    """The kernel of FoX, ALiBi and NoPE, and of RoPE, whose q and k are rotated before it.

    Args:
        forms: fold the gate's matrix part into q and k, and make the cache with the new tokens.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, prune: Prune | None = None,
        logit_bound: Tensor | None = None, window: int | None = None, sink: Tensor | None = None,
        valid: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The fused kernel (``attnzoo.kernels.fox``), in the inputs' own precision."""
        options = {
            "scale": scale, "prune": prune, "logit_bound": logit_bound, "window": window, "sink": sink,
            "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        return attend(q, k, v, gate, None, valid, options)[0]

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, *, scale: float | None = None,
        prune: Prune | None = None, logit_bound: Tensor | None = None, window: int | None = None,
        sink: Tensor | None = None, valid: Tensor | None = None,
    ) -> tuple[Tensor, KVCache]:  # fmt: skip
        """The same over a cache; with ``valid`` the rows run as packed sequences, from an empty state."""
        options = {"scale": scale, "prune": prune, "logit_bound": logit_bound, "window": window, "sink": sink}
        return attend(q, k, v, gate, state, valid, options)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: KVCache | None,
        valid: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, KVCache]:
        from attnzoo.kernels.fox import fox_attention

        check_softmax(SoftmaxOptions(**options), q, gate)
        if valid is not None and (state is not None or options.get("cu_seqlens") is not None):
            raise ValueError("valid: expected None with a state or cu_seqlens (the kernel packs whole sequences)")
        constant = gate.log_decay if gate.log_decay is not None and gate.log_decay.ndim == 1 else None
        gate = forms.separated(gate, q, valid, None)
        q, state = forms.remember(q, k, v, gate, state, valid, v.dtype)
        q, k, g = q.to(v.dtype), state.k, state.log_decay
        if valid is None:
            g = constant if constant is not None and len(state) == q.shape[1] else g
            return fox_attention(q, k, state.v, log_decay=g, impl="triton", **options), state

        def packed(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, borders: Tensor) -> Tensor:
            o: Tensor = fox_attention(q, k, v, log_decay=g, impl="triton", **{**options, "cu_seqlens": borders})
            return o

        return on_packed(packed, valid, q, k, v, g), state

    def refuses(call: Call) -> str:
        from attnzoo.kernels.fox import triton_unavailable

        if call.state is not None and ("valid" in call.options or call.state.valid is not None):
            return "the triton form serves padding only in whole sequences, without a cache"
        return _with_both(call) or triton_unavailable(call.q, call.v)

    return Kernel(run, extend, refuses)


def path_kernel() -> Kernel:
    """The kernels of PaTH and PaTH-FoX: whole sequences, and a step over all cached keys.

    A step reads every cached key, as each must be advanced: ``prune`` leaves out none of them there, and so drops
    no mass at all. It has no gradient. The state that is given stays as it was.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, prune: Prune | None = None,
        logit_bound: Tensor | None = None, valid: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The fused kernel (``attnzoo.kernels.path``) on whole sequences; with ``valid`` they run packed."""
        from attnzoo.kernels.path import path_attention

        given = SoftmaxOptions(scale, prune, logit_bound, valid=valid, cu_seqlens=cu_seqlens)
        check_softmax(given, q, gate)
        if valid is not None and cu_seqlens is not None:
            raise ValueError("valid: expected None with cu_seqlens (the kernel packs whole sequences)")
        options: dict[str, Any] = {"scale": scale, "prune": prune, "logit_bound": logit_bound, "impl": "triton"}

        def attend(
            q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, g: Tensor | None, borders: Tensor | None
        ) -> Tensor:
            o: Tensor = path_attention(q, k, v, w=w, beta=beta, log_decay=g, cu_seqlens=borders, **options)
            return o

        gate = gate.per_token(q)
        rows = (q.to(v.dtype), k.to(v.dtype), v, cast(Tensor, gate.w), cast(Tensor, gate.beta), gate.log_decay)
        return attend(*rows, cu_seqlens) if valid is None else on_packed(attend, valid, *rows)

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, *, scale: float | None = None,
        prune: Prune | None = None, logit_bound: Tensor | None = None, valid: Tensor | None = None,
    ) -> tuple[Tensor, KVCache]:  # fmt: skip
        from attnzoo.kernels.path import carry_keys, path_extend, refuse_gradients

        check_softmax(SoftmaxOptions(scale, prune, logit_bound), q, gate)
        gate = gate.per_token(q)
        if valid is not None:
            gate = gate.neutral_where(~valid)
        w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)
        if state is None or not len(state):
            o = run(q, k, v, gate, scale=scale, prune=prune, logit_bound=logit_bound, valid=valid)
            return o, KVCache(carry_keys(k, w, beta), v, gate.log_decay, valid, carried=True)
        refuse_gradients(q, k, v, w, beta, state.k, state.v)
        new = KVCache(k, v, gate.log_decay, valid)
        parts, room = append_in_place(state, *growing(state, new, ("v",)))
        gates, there = parts.get("log_decay"), parts.get("valid")
        o, keys = path_extend(q, k, w, beta, state.k.float(), parts["v"], gates, there, scale)
        return o, GrowingCache(keys, parts["v"], gates, there, carried=True, room=room)

    def refuses(call: Call) -> str:
        from attnzoo.kernels.path import triton_unavailable

        rows = (call.q, call.k, call.v, *(cast(Tensor, getattr(call.gate, part)) for part in call.gate.parts))
        if call.state is not None and torch.is_grad_enabled() and any(x.requires_grad for x in rows):
            return "a cached step of the triton form has no gradient (run it under torch.no_grad())"
        return _with_both(call) or triton_unavailable(call.q, call.v)

    return Kernel(run, extend, refuses)


def _with_both(call: Call) -> str:
    both = "valid" in call.options and "cu_seqlens" in call.options
    return "the triton form takes valid or cu_seqlens, not both" if both else ""


def on_packed(attend: Callable[..., Tensor], valid: Tensor, *rows: Tensor | None) -> Tensor:
    """``attend(*rows, cu_seqlens)`` on the valid tokens alone, as packed sequences; zeros elsewhere.

    Args:
        attend: takes each of ``rows`` as ``[1, tokens, ...]`` and the borders ``[B + 1]``; gives ``[1, tokens, ...]``.
        valid: ``[B, T]`` bool.
        rows: ``[B, T, ...]`` or None.
    """
    borders = F.pad(valid.sum(1).cumsum(0), (1, 0)).int()
    o = attend(*(None if x is None else x[valid][None] for x in rows), borders)
    out = o.new_zeros(*valid.shape, *o.shape[2:])
    out[valid] = o[0]
    return out
