"""The ``triton`` form of Wall and of its product with a scalar decay."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.values import records
from attnzoo.forms.cache import GrowingCache, KVCache, append_in_place, growing
from attnzoo.forms.options import SoftmaxOptions, check_softmax
from attnzoo.forms.protocol import Call, Kernel
from attnzoo.forms.readout import attend_with_sink, least_logit
from attnzoo.forms.triton import NO_GRADIENT, Output, expects_gradient, on_whole, refused, step_inputs

Pair = tuple[Tensor, Tensor]
WALL_STEPS = 16  # most tokens that continue a cache of Wall one at a time


def wall_kernel() -> Kernel:
    """The kernels of Wall, with or without a scalar decay: whole sequences, and steps of a token over all cached keys.

    A step multiplies every cached key by the token's gates, as the reference does, and attends to them by the kernel of
    FoX: ``prune`` leaves out none of them there. Several tokens attend to each other as a sequence of their own, and
    carried back to the cached keys to these, so that they are read once. A window would have to count both: with one,
    and few tokens of which some do not exist (no GPU is waited for then), there is a step for each. It has no gradient.
    The state that is given stays as it was.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, prune: Prune | None = None,
        logit_bound: Tensor | None = None, window: int | None = None, sink: Tensor | None = None,
        valid: Tensor | None = None, cu_seqlens: Tensor | None = None, return_lse: bool = False,
    ) -> Output:  # fmt: skip
        """The fused kernel (``attnzoo.kernels.wall``) on whole sequences; with ``valid`` they run packed."""
        given = SoftmaxOptions(scale, prune, logit_bound, window, sink, valid, cu_seqlens, return_lse)
        return whole(q, k, v, gate, given)

    def whole(q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions) -> Output:
        from attnzoo.kernels.wall import wall_attention

        check_softmax(given, q, gate)
        a, g = cast(Tensor, gate.log_diag).float(), gate.per_token(q).log_decay
        return on_whole(wall_attention, q, k, v, given, log_diag=a, log_decay=None if g is None else g.float())

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, *, scale: float | None = None,
        prune: Prune | None = None, logit_bound: Tensor | None = None, window: int | None = None,
        sink: Tensor | None = None, valid: Tensor | None = None, return_lse: bool = False,
    ) -> tuple[Output, KVCache]:  # fmt: skip
        from attnzoo.kernels.fox import fox_attention
        from attnzoo.kernels.path import refuse_gradients

        given = SoftmaxOptions(scale, prune, logit_bound, window, sink, valid, None, return_lse)
        q, k, v, gate = step_inputs(q, k, v, gate, given)
        a, H = cast(Tensor, gate.log_diag).float(), q.shape[2]
        if state is None or not len(state):
            return whole(q, k, v, gate, given), KVCache(carried(k, a), v, gate.log_decay, valid, carried=True)
        refuse_gradients(q, k, v, a, state.k, state.v)
        S, rows = len(state), []
        parts, room = append_in_place(state, *growing(state, KVCache(k, v, gate.log_decay, valid), ("v",)), state.k)
        keys, values, there = state.k.float(), expand_heads(parts["v"], H), parts.get("valid")
        T, gates = q.shape[1], parts.get("log_decay")
        if window is None and (T > WALL_STEPS or (T > 1 and valid is None)):
            total, old = a.cumsum(1).exp(), torch.arange(S + T, device=q.device).expand(len(q), -1) < S
            first = fox_attention(
                (q * total).to(v.dtype), F.pad(keys.to(v.dtype), (0, 0, 0, 0, 0, T)), values,
                log_decay=None if gates is None else gates.float(), scale=scale,
                valid=old if there is None else old & there, return_lse=True, impl="triton",
            )  # fmt: skip
            own = run(q, k, v, gate, scale=scale, valid=valid, return_lse=True)
            o, lse = together(first, cast(Pair, own), sink)
            keys = torch.cat([keys * total[:, -1:], carried(k, a)], 1)
            return (o, lse) if return_lse else o, GrowingCache(keys, parts["v"], gates, there, carried=True, room=room)
        for t in range(T):
            now, seen = slice(t, t + 1), slice(0, S + t + 1)
            keys = torch.cat([keys * a[:, now].exp(), expand_heads(k[:, now], H).float()], 1)
            o, lse = fox_attention(
                q[:, now].to(v.dtype), keys.to(v.dtype), values[:, seen],
                log_decay=None if gates is None else gates[:, seen].float(), scale=scale, window=window, sink=sink,
                valid=None if there is None else there[:, seen], return_lse=True, impl="triton",
            )  # fmt: skip
            rows.append((o, lse))
        o, lse = (torch.cat(x, 1) for x in zip(*rows, strict=True))
        return (o, lse) if return_lse else o, GrowingCache(keys, parts["v"], gates, there, carried=True, room=room)

    def refuses(call: Call) -> str:
        from attnzoo.kernels.wall import triton_unavailable

        if call.state is not None and expects_gradient(call):
            return NO_GRADIENT
        if call.state is not None and len(call.state) and call.q.shape[1] > WALL_STEPS and _window(call):
            return f"with a window a cache of Wall is continued by at most {WALL_STEPS} tokens, got {call.q.shape[1]}"
        return refused(call) or triton_unavailable(call.q, call.v)

    def explain(call: Call) -> tuple[str, str]:
        from attnzoo.kernels.common.device import machine
        from attnzoo.kernels.wall.plan import plan

        if call.state is not None and len(call.state):
            one = call.q.shape[1] == 1 or _window(call)
            return "a step per token over all keys" if one else "the new tokens, and one pass over all keys", ""
        (T, _, K), V = call.q.shape[1:], call.v.shape[3]
        deterministic = torch.are_deterministic_algorithms_enabled()
        learns = call.gate.log_decay is not None and records(call.gate.log_decay)
        shortened = "prune" in call.options
        chosen = plan(T, K, V, call.v.dtype, deterministic, True, machine(call.q.device), learns, shortened)
        return chosen.kernels(expects_gradient(call)), chosen.why

    return Kernel(run, extend, refuses, explain)


def _window(call: Call) -> bool:
    return call.options.get("window") is not None


def carried(k: Tensor, log_diag: Tensor) -> Tensor:
    """Keys ``[B, T, G, K]`` as the last of these T tokens leaves them, ``[B, T, H, K]`` float32."""
    after = F.pad(log_diag[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
    return expand_heads(k, log_diag.shape[2]).float() * after.exp()


def together(first: Pair, second: Pair, sink: Tensor | None) -> Pair:
    """Attention to two sets of keys as one, each o ``[B, T, H, V]`` and lse ``[B, T, H]``; sink ``[H]`` or None."""
    lse = torch.logaddexp(first[1], second[1])
    most = lse.clamp(min=least_logit(lse.dtype))[..., None]  # rows that see no key give 0
    o = sum(x.float() * (y[..., None] - most).exp() for x, y in (first, second))
    o, whole = attend_with_sink(cast(Tensor, o).transpose(1, 2), lse.transpose(1, 2), sink)
    return o.transpose(1, 2).to(first[0].dtype), cast(Tensor, whole).transpose(1, 2)
