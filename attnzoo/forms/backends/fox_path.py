"""The ``triton`` forms: the fused kernels of ``attnzoo.kernels``, with caches that grow in place.

The kernels are imported when they first run: this module costs nothing where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.values import records
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.inplace_keys import CarriedMemory
from attnzoo.forms.caches.state import GrowingCache, KVCache, append_in_place, growing
from attnzoo.forms.options import READS_LESS, SoftmaxOptions, existing, separated
from attnzoo.forms.protocol import Call, Kernel
from attnzoo.kernels.common.device import machine
from attnzoo.kernels.common.options import portable_alone
from attnzoo.kernels.common.retention import Retention

Output = Tensor | tuple[Tensor, Tensor]  # o, or (o, lse) with return_lse
HONOURED = frozenset(SoftmaxOptions.__match_args__) - {"keep_carries"}  # options honoured by all of these kernels
Part = TypeVar("Part", Tensor, Tensor | None)


class Additive(Protocol):
    """The methods of ``AdditiveForms`` that the kernel of FoX uses."""

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate: ...

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, options: SoftmaxOptions,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, KVCache]: ...  # fmt: skip

    def rounded(
        self, q: Tensor, k: Tensor, gate: Gate, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Gate, tuple[Tensor, ...] | None]: ...


def fox_kernel(forms: Additive) -> Kernel:
    """The kernel of FoX, ALiBi and NoPE, and of RoPE, whose q and k are rotated before it.

    Args:
        forms: the forms, which apply the gate's matrix part to q and k and extend the cache.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions, retention: Retention | None = None,
        function: Callable[..., Output] | None = None,
    ) -> Output:  # fmt: skip
        """The output of the fused kernel (``attnzoo.kernels.fox``), in the inputs' precision, or that of another
        ``function`` of its arguments."""
        receivers = None
        if given.valid is None:
            q, k, gate, receivers = forms.rounded(q, k, gate, v.dtype)
        return attend(q, k, v, gate, None, given, receivers, retention, function)[0]

    def attend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, given: SoftmaxOptions,
        receivers: tuple[Tensor, ...] | None = None, retention: Retention | None = None,
        function: Callable[..., Output] | None = None,
    ) -> tuple[Output, KVCache]:  # fmt: skip
        """The output and the new cache; padded rows run packed from an empty state, or masked over a cache."""
        from attnzoo.kernels.fox.api import fox_attention

        kernel: Callable[..., Output] = fox_attention if function is None else function
        _refuse_both(given)
        if given.valid is not None:
            q, k, v = existing(given.valid, q, k, v)
        g = single(gate.log_decay)
        if g is not gate.log_decay:
            gate = replace(gate, log_decay=g)
        constant = g if g is not None and g.ndim == 1 else None
        gate = forms.separated(gate, q, given.valid, None)
        past = state
        q, state = forms.remember(q, k, v, gate, past, given, v.dtype)
        q, k, g = q.to(v.dtype), state.k, single(state.log_decay)
        v, values = (expand_heads(x, k.shape[2]) for x in (v, state.v))  # one key per query head, as angles differ
        options = given.of_kernels("cu_seqlens") | {"return_lse": given.return_lse, "impl": "triton"}
        keys = None if retention is None else expand_heads(retention.keys, k.shape[2])

        def of(keys: Tensor | None) -> Retention | None:
            return None if retention is None or keys is None else retention._replace(keys=keys)

        if past is None and given.valid is not None:

            def packed(
                q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, keys: Tensor | None, borders: Tensor
            ) -> Output:
                return kernel(q, k, v, log_decay=g, cu_seqlens=borders, retention=of(keys), **options)

            return on_packed(packed, given.valid, q, k, v, g, keys), state
        if past is None:
            g = g if constant is None else constant
            options |= {"cu_seqlens": given.cu_seqlens, "receivers": receivers, "retention": of(keys)}
            return kernel(q, k, values, log_decay=g, **options), state
        if g is None or records(q, k, values, g, given.sink):
            return kernel(q, k, values, log_decay=g, valid=state.valid, **options), state
        state = replace(state, sums=_gate_sums(past, state, given.prune))
        return kernel(q, k, values, log_decay=None, gate_sums=state.sums, valid=state.valid, **options), state

    def refuses(call: Call) -> str:
        from attnzoo.kernels.fox.api import triton_unavailable

        if call.state is not None and _padded(call) and expects_gradient(call):
            return "a step over padding has no gradient in the triton form (run it under torch.no_grad())"
        return refused(call) or triton_unavailable(call.q, call.v)

    def explain(call: Call) -> tuple[str, str]:
        from attnzoo.kernels.fox import plan

        (T, H, K), (G, V) = call.q.shape[1:], call.v.shape[2:]
        S = T if call.state is None else len(call.state) + T
        needs_gate_grad = call.gate.log_decay is not None and records(call.gate.log_decay)
        asked = plan.FoxCall(
            T, S, H // G, K, V, call.v.dtype, needs_gate_grad, torch.are_deterministic_algorithms_enabled(),
            masked=call.state is not None and _padded(call), portable_alone=portable_alone(call.options),
        )  # fmt: skip
        chosen = plan.plan(asked, machine(call.q.device))
        return chosen.kernels(expects_gradient(call)), chosen.why

    return Kernel(run, attend, refuses, explain, parts=frozenset({"log_decay", "angle"}), honours=HONOURED)


def _gate_sums(past: KVCache, state: KVCache, prune: Prune | None) -> Any:
    """The kernel's sums of gates over ``state``, which extends ``past`` so that only new tokens are read.

    With ``prune`` they include the longest key's length.
    """
    from attnzoo.kernels.fox import GateSums

    g, k = cast(Tensor, state.log_decay).float(), None if prune is None else state.k
    if past.sums is None or (k is not None and past.sums.longest is None):
        return GateSums.of(g, k)
    return past.sums.append(g[:, len(past) :], None if k is None else k[:, len(past) :])


def path_kernel(decaying: bool = False) -> Kernel:
    """The kernels of PaTH and PaTH-FoX, perhaps with decays per channel, for whole sequences and cached steps.

    A step carries every cached key and so reads all of them: ``prune`` drops none there. A step has no gradient and
    does not change the given state.

    Args:
        decaying: whether channels decay; then no carries are kept.
    """

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, given: SoftmaxOptions
    ) -> tuple[Output, KVCache]:
        from attnzoo.kernels.path import carry_keys, path_extend, refuse_gradients

        q, k, v, gate = step_inputs(q, k, v, gate, given)
        valid = given.valid
        w, beta, a = cast(Tensor, gate.w), cast(Tensor, gate.beta), gate.log_diag
        heads = 0 if a is None else q.shape[2]  # decays are per query head, so keys get a copy per query head

        def each(*xs: Tensor) -> list[Tensor]:
            return [expand_heads(x, heads) for x in xs]

        if state is None or not len(state):
            o = whole_path(q, k, v, gate, given)
            return o, KVCache(carry_keys(*each(k, w, beta), log_diag=a), v, gate.log_decay, valid, carried=True)
        refuse_gradients(q, k, v, w, beta, state.k, state.v, a)
        new = KVCache(k, v, gate.log_decay, valid)
        parts, buffers = append_in_place(state, *growing(state, new, ("v",)), state.k)
        gates, there = parts.get("log_decay"), parts.get("valid")
        k, w, beta, values = each(k, w, beta, parts["v"])
        o, keys, lse = path_extend(
            q, k, w, beta, state.k.float(), values, single(gates), there,
            log_diag=a, return_lse=True, **given.of_kernels(*READS_LESS),
        )  # fmt: skip
        after = GrowingCache(keys, parts["v"], gates, there, carried=True, buffers=buffers)
        return (o, lse) if given.return_lse else o, after

    def refuses(call: Call) -> str:
        from attnzoo.kernels.path.api import triton_unavailable

        if call.state is not None and expects_gradient(call):
            return NO_GRADIENT
        if call.gate.factors is not None and (call.state is None or not len(call.state)):
            return f"its kernels of whole sequences take one factor per token, got {call.gate.factors}"
        return refused(call) or triton_unavailable(call.q, call.v)

    def explain(call: Call) -> tuple[str, str]:
        if call.state is not None and len(call.state):
            return "one fused step over all keys", ""
        return planned(call, shortened=bool({"prune", "window"} & call.options.keys()))

    def in_place(state: KVCache, rows: BatchRows, tokens: int, device: torch.device | str) -> CarriedMemory | None:
        from attnzoo.kernels.path import triton_unavailable

        if state.k.shape[2] != state.v.shape[2] or triton_unavailable(state.k.to(state.v.dtype), state.v):
            return None
        return CarriedMemory.like(state, rows, tokens, device)

    parts = frozenset({"log_decay", "log_diag", "w", "beta"})
    honours = HONOURED if decaying else HONOURED | {"keep_carries"}  # decays of the channels are made again
    return Kernel(whole_path, extend, refuses, explain, in_place=in_place, parts=parts, honours=honours)


def planned(call: Call, shortened: bool) -> tuple[str, str]:
    """The kernels over levels that run whole sequences, and the reason why no faster ones do."""
    from attnzoo.kernels.levels.plan import LevelsCall, plan

    needs_gate_grad = call.gate.log_decay is not None and records(call.gate.log_decay)
    (_, T, _, K), V = call.q.shape, call.v.shape[3]
    deterministic, alone = torch.are_deterministic_algorithms_enabled(), portable_alone(call.options)
    asked = LevelsCall(T, K, V, call.v.dtype, needs_gate_grad, deterministic, shortened, portable_alone=alone)
    chosen = plan(asked, machine(call.q.device))
    return chosen.kernels(expects_gradient(call)), chosen.why


def step_inputs(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions
) -> tuple[Tensor, Tensor, Tensor, Gate]:  # fmt: skip
    """The inputs of a step that carries the cached keys: a gate per token, and zeros at absent tokens."""
    if given.valid is not None:
        q, k, v = existing(given.valid, q, k, v)
    return q, k, v, separated(gate.per_token(q), q, given.valid, None).map(single)


def single(part: Part) -> Part:
    """A gate part for kernels: float64 becomes float32."""
    return part.float() if part is not None and part.dtype == torch.float64 else part


def whole_path(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions, receivers: tuple[Tensor, ...] | None = None
) -> Output:
    """The output of the fused kernel (``attnzoo.kernels.path``) on whole sequences; with ``valid`` they run packed, and
    then there are no ``receivers`` (see ``path_attention``)."""
    from attnzoo.kernels.path.api import path_attention

    gate = gate.per_token(q).map(single)
    attention: Callable[..., Output] = partial(path_attention, receivers=receivers, keep_carries=given.keep_carries)
    return on_whole(attention, q, k, v, given, **{name: getattr(gate, name) for name in gate.parts})


def on_whole(
    attention: Callable[..., Output], q: Tensor, k: Tensor, v: Tensor, given: SoftmaxOptions, **parts: Tensor | None
) -> Output:
    """The output of a fused kernel on whole sequences; with ``valid`` they run packed."""
    _refuse_both(given)

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> Output:
        *values, borders = more
        return attention(
            q, k, v, cu_seqlens=borders, return_lse=given.return_lse, impl="triton",
            **given.of_kernels("cu_seqlens"), **dict(zip(parts, values, strict=True)),
        )  # fmt: skip

    rows: tuple[Any, ...] = (q.to(v.dtype), k.to(v.dtype), v, *parts.values())
    return attend(*rows, given.cu_seqlens) if given.valid is None else on_packed(attend, given.valid, *rows)


NO_GRADIENT = "a cached step of the triton form has no gradient (run it under torch.no_grad())"
BOTH = "the triton form takes valid or cu_seqlens, not both"


def refused(call: Call) -> str:
    """The reason why no kernel can serve a call, or ""."""
    return BOTH if "valid" in call.options and "cu_seqlens" in call.options else ""


def _refuse_both(given: SoftmaxOptions) -> None:
    if given.valid is not None and given.cu_seqlens is not None:
        raise ValueError(f"valid: expected None with cu_seqlens, got a tensor ({BOTH})")


def _padded(call: Call) -> bool:
    return "valid" in call.options or getattr(call.state, "valid", None) is not None


def records_any(call: Call, *more: Tensor | None) -> bool:
    """Whether autograd records operations on q, k, v, the gate or ``more``."""
    return records(call.q, call.k, call.v, *(getattr(call.gate, part) for part in call.gate.parts), *more)


def expects_gradient(call: Call) -> bool:
    """Whether autograd will ask for the gradient of an input."""
    return records_any(call, call.options.get("sink"))


def on_packed(attend: Callable[..., Output], valid: Tensor, *rows: Tensor | None) -> Output:
    """The output of ``attend(*rows, cu_seqlens)`` on the valid tokens as packed sequences, and zeros elsewhere.

    Args:
        attend: a function of each of ``rows`` as ``[1, tokens, ...]`` and of borders ``[B + 1]`` that returns
            ``[1, tokens, ...]``, or two of these.
        valid: ``[B, T]`` bool.
        rows: ``[B, T, ...]`` or None.
    """
    borders = F.pad(valid.sum(1).cumsum(0), (1, 0)).int()
    there = valid.flatten().nonzero()[:, 0]  # Python waits for a GPU here alone
    tokens = [None if x is None else x.flatten(0, 1).index_select(0, there) for x in rows]
    if not torch.compiler.is_compiling() and not len(there):  # kernels need at least one token
        tokens = [None if x is None else torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in tokens]
        borders = F.pad(borders[1:], (1, 0)) + F.pad(borders.new_ones(1), (len(borders) - 1, 0))
    given = attend(*(None if x is None else x[None] for x in tokens), borders)

    def unpacked(x: Tensor) -> Tensor:
        out = x.new_zeros(valid.numel(), *x.shape[2:])
        return out.index_copy(0, there, x[0, : len(there)]).view(*valid.shape, *x.shape[2:])

    return (unpacked(given[0]), unpacked(given[1])) if isinstance(given, tuple) else unpacked(given)
