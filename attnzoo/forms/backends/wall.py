"""The ``triton`` form of Wall and of its product with a scalar decay."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.sums import running_sum, sum_to_the_end
from attnzoo.algebra.values import counted
from attnzoo.forms.backends.fox_path import (
    HONOURED,
    NO_GRADIENT,
    Output,
    expects_gradient,
    on_whole,
    planned,
    refused,
    single,
    step_inputs,
)
from attnzoo.forms.caches.state import GrowingCache, KVCache, append_in_place, growing
from attnzoo.forms.options import READS_LESS, SoftmaxOptions
from attnzoo.forms.protocol import Call, Kernel
from attnzoo.forms.readout import attend_with_sink, least_logit

Pair = tuple[Tensor, Tensor]
WALL_STEPS = 16  # most tokens that extend a cache of Wall one by one


def wall_kernel() -> Kernel:
    """The kernels of Wall, perhaps with a scalar decay, for whole sequences and cached steps.

    A step multiplies every cached key by the token's gates and attends to all by the kernel of FoX; ``prune`` drops
    none there. Several new tokens attend to each other as a sequence, and, carried back to the cached keys, to those in
    one pass. A window spans both, so with a window, or with padding among few tokens, each token is a step of its own.
    Steps have no gradient and do not change the given state.
    """

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, given: SoftmaxOptions
    ) -> tuple[Output, KVCache]:
        from attnzoo.kernels.path import refuse_gradients

        q, k, v, gate = step_inputs(q, k, v, gate, given)
        valid = given.valid
        a, H, T = cast(Tensor, gate.log_diag), q.shape[2], q.shape[1]
        if state is None or not len(state):
            return whole_wall(q, k, v, gate, given), KVCache(carried_keys(k, a), v, gate.log_decay, valid, carried=True)
        refuse_gradients(q, k, v, a, state.k, state.v)
        parts, buffers = append_in_place(state, *growing(state, KVCache(k, v, gate.log_decay, valid), ("v",)), state.k)
        g, there = parts.get("log_decay"), parts.get("valid")
        seen = KVCache(state.k.float(), expand_heads(parts["v"], H), single(g), there)
        at_once = given.window is None and (T > WALL_STEPS or (T > 1 and valid is None))
        o, lse, keys = (_tokens_at_once if at_once else _token_by_token)(q, k, v, gate, seen, given)
        return (o, lse) if given.return_lse else o, GrowingCache(
            keys, parts["v"], g, there, carried=True, buffers=buffers
        )

    def refuses(call: Call) -> str:
        from attnzoo.kernels.wall import triton_unavailable

        if call.state is not None and expects_gradient(call):
            return NO_GRADIENT
        if call.state is not None and len(call.state) and call.q.shape[1] > WALL_STEPS and _window(call):
            return f"with a window a cache of Wall takes at most {WALL_STEPS} new tokens{counted(call.q.shape[1])}"
        return refused(call) or triton_unavailable(call.q, call.v)

    def explain(call: Call) -> tuple[str, str]:
        if call.state is not None and len(call.state):
            one = call.q.shape[1] == 1 or _window(call)
            return "a step per token over all keys" if one else "the new tokens, and one pass over all keys", ""
        return planned(call, shortened="prune" in call.options)

    parts = frozenset({"log_decay", "log_diag"})
    return Kernel(whole_wall, extend, refuses, explain, parts=parts, honours=HONOURED)


def _window(call: Call) -> bool:
    return call.options.get("window") is not None


def whole_wall(q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions) -> Output:
    """The output of the fused kernel (``attnzoo.kernels.wall``) on whole sequences; with ``valid`` they run packed."""
    from attnzoo.kernels.wall import wall_attention

    gate = gate.per_token(q).map(single)
    return on_whole(wall_attention, q, k, v, given, log_diag=gate.log_diag, log_decay=gate.log_decay)


def _tokens_at_once(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, seen: KVCache, given: SoftmaxOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse and all carried keys, from the T new tokens as a sequence and one pass over the S cached keys.

    Args:
        q, k, v, gate: inputs of the new tokens, ``[B, T, ...]``.
        seen: a cache with carried keys ``[B, S, H, K]`` float32 of old tokens, and values, gates and ``valid`` of all.
        given: the call's options, without a window.
    """
    from attnzoo.kernels.fox import fox_attention

    a, S, T = cast(Tensor, gate.log_diag), seen.k.shape[1], q.shape[1]
    total, old = running_sum(a, 1).exp(), torch.arange(S + T, device=q.device).expand(len(q), -1) < S
    first = fox_attention(
        (q * total).to(v.dtype), F.pad(seen.k.to(v.dtype), (0, 0, 0, 0, 0, T)), seen.v, log_decay=seen.log_decay,
        valid=old if seen.valid is None else old & seen.valid, return_lse=True, impl="triton",
        **given.of_kernels("sink", *READS_LESS),
    )  # fmt: skip
    alone = replace(given, prune=None, logit_bound=None, sink=None, cu_seqlens=None, return_lse=True)
    own = whole_wall(q, k, v, gate, alone)
    o, lse = together(first, cast(Pair, own), given.sink)
    return o, lse, torch.cat([seen.k * total[:, -1:], carried_keys(k, a)], 1)


def _token_by_token(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, seen: KVCache, given: SoftmaxOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse and all carried keys, from a step over all keys for each new token; for windows and padding."""
    from attnzoo.kernels.fox import fox_attention

    a, keys, rows = cast(Tensor, gate.log_diag), seen.k, []
    S, H = keys.shape[1], q.shape[2]
    for t in range(q.shape[1]):
        now, past = slice(t, t + 1), slice(0, S + t + 1)
        keys = torch.cat([keys * a[:, now].exp(), expand_heads(k[:, now], H).float()], 1)
        o, lse = fox_attention(
            q[:, now].to(v.dtype), keys.to(v.dtype), seen.v[:, past],
            log_decay=None if seen.log_decay is None else seen.log_decay[:, past],
            valid=None if seen.valid is None else seen.valid[:, past], return_lse=True, impl="triton",
            **given.of_kernels(*READS_LESS),
        )  # fmt: skip
        rows.append((o, lse))
    o, lse = (torch.cat(x, 1) for x in zip(*rows, strict=True))
    return o, lse, keys


def carried_keys(k: Tensor, log_diag: Tensor) -> Tensor:
    """The keys ``[B, T, G, K]`` carried to the last of the T tokens, ``[B, T, H, K]`` float32."""
    after = sum_to_the_end(F.pad(log_diag[:, 1:], (0, 0, 0, 0, 0, 1)), 1)
    return expand_heads(k, log_diag.shape[2]).float() * after.exp()


def together(first: Pair, second: Pair, sink: Tensor | None) -> Pair:
    """The attention to the union of two sets of keys from o ``[B, T, H, V]`` and lse ``[B, T, H]`` of each; sink
    ``[H]``."""
    lse = torch.logaddexp(first[1], second[1])
    most = lse.clamp(min=least_logit(lse.dtype))[..., None]  # rows without visible keys return 0
    o = sum(x.float() * (y[..., None] - most).exp() for x, y in (first, second))
    o, whole = attend_with_sink(cast(Tensor, o).transpose(1, 2), lse.transpose(1, 2), sink)
    return o.transpose(1, 2).to(first[0].dtype), cast(Tensor, whole).transpose(1, 2)
