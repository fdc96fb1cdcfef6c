"""Stores of a softmax form's keys: the one door between its mathematics and the caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import Transition, scaled_queries
from attnzoo.algebra.values import records
from attnzoo.forms.caches.inplace import BatchRows, Memory
from attnzoo.forms.caches.inplace_keys import KeyMemory
from attnzoo.forms.caches.pages.inplace import PagedMemory
from attnzoo.forms.caches.pages.page_table import PoolSizes
from attnzoo.forms.caches.pages.paged_cache import PagedCache, key_heads
from attnzoo.forms.caches.pages.pool import KeyPool
from attnzoo.forms.caches.pages.present_tokens import LastRows
from attnzoo.forms.caches.path_pages.pool import CarriedPool
from attnzoo.forms.caches.state import append_valid
from attnzoo.forms.options import SoftmaxOptions, existing
from attnzoo.forms.protocol import Call, Kernel
from attnzoo.kernels.common.untraced import untraced
from attnzoo.kernels.decode import path_unavailable, triton_unavailable
from attnzoo.kernels.decode.plan import MOST_ROWS

Attended = tuple[Tensor, Tensor]  # o [B, H, T, V] without a sink, and its log-sum-exp [B, H, T]


class Keeper(Protocol):
    """The methods of forms that their store calls."""

    @property
    def transition(self) -> Transition: ...

    @property
    def kernels(self) -> Mapping[str, Kernel]: ...

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate: ...

    def place(
        self, q: Tensor, k: Tensor, gate: Gate, state: Any, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...


class KeyStore(Protocol):
    """The storage of a softmax form's keys, beside the :class:`~attnzoo.KVCache` that every form goes on from.

    A call gives a new state (:meth:`extend`, :meth:`step`); a step of a batch changes a memory in place
    (:meth:`in_place`). Both add their tokens to pages by the same methods of a pool
    (:class:`~attnzoo.forms.caches.pages.pool.KeyPool`).
    """

    @property
    def pages(self) -> bool:
        """Whether keys may lie in pages, from which some can be evicted."""

    def new(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> PagedCache:
        """An empty cache in pages for sequences of which such tokens are the first."""

    def refuses(self, form: str, call: Call) -> str:
        """Why :meth:`step` cannot serve a call over pages by ``form``, or ""."""

    def extend(self, forms: Keeper, call: Call, given: SoftmaxOptions) -> tuple[Attended | None, PagedCache]:
        """The attention of T tokens over the pages and themselves, in plain operations, and the cache with them.

        ``prune`` leaves nothing out here, and so drops nothing beyond what eviction has. The attention is None where
        there were no keys: the rows are those of forms that read no pages.
        """

    def step(self, forms: Keeper, call: Call, given: SoftmaxOptions) -> tuple[Tensor, PagedCache]:
        """The output ``[B, T, H, V]`` of few tokens by kernels, and the cache with them."""

    def in_place(
        self, forms: Keeper, state: Any, rows: BatchRows, tokens: int, device: torch.device | str,
        paged: bool | None,
    ) -> Memory:  # fmt: skip
        """The memory of steps that change it in place; see :meth:`~attnzoo.forms.softmax.SoftmaxForms.in_place`."""


class _Pages:
    """Calls over pages, the same for both stores."""

    @torch.no_grad()
    def extend(self, forms: Keeper, call: Call, given: SoftmaxOptions) -> tuple[Attended | None, PagedCache]:
        state, found = cast(PagedCache, call.state), None
        q, k, v, gate, seen = _ready(forms, call, given)
        scaled = scaled_queries(q, given.scale)
        state.look(scaled, k, given)
        if state.stores:
            found = state.pool.extend(scaled, k, v, gate, given.valid, given)
        else:
            state.pool.add(k, v, gate, given.valid)
        return found, PagedCache.of(state.pool, state.evict, **seen)

    @torch.no_grad()
    def step(self, forms: Keeper, call: Call, given: SoftmaxOptions) -> tuple[Tensor, PagedCache]:
        state, last = cast(PagedCache, call.state), LastRows.of(given.valid, *call.q.shape[:2])
        q, k, v, gate, seen = _ready(forms, call, given)
        if state.evict is not None and state.evict.offload is not None:
            state.look(scaled_queries(q, given.scale), k, given)
        q, k, v = (last.take(x) for x in (q, k, v))
        state.pool.reserve(last.counts)
        o = last.put(state.pool.step(q, k, v, gate.map(last.take), given, last.count))
        state.pool.counted(last.counts)
        return o, PagedCache.of(state.pool, state.evict, **seen)


@dataclass(frozen=True)
class PlacedKeys(_Pages):
    """Keys that stand as they were written, with all that moves them folded in before."""

    pages: bool = True

    def new(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> PagedCache:
        sizes = _sizes(q, v, key_heads(q, v, gate))
        decays = gate.log_decay is not None
        return PagedCache.of(KeyPool.empty(sizes, dtype=v.dtype, device=v.device, decays=decays))

    def refuses(self, form: str, call: Call) -> str:
        return _refuses(form, call) or triton_unavailable(call.q, call.v)

    def in_place(
        self, forms: Keeper, state: Any, rows: BatchRows, tokens: int, device: torch.device | str,
        paged: bool | None,
    ) -> Memory:  # fmt: skip
        if state.in_pages and paged is False:
            raise ValueError("evict: expected None where keys may lie in no pages (impl='reference' on a GPU)")
        if paged is None and not state.in_pages:
            paged = not rows.length.is_cuda or not triton_unavailable(state.k.to(state.v.dtype), state.v)
        if paged or state.in_pages:
            return PagedMemory.like(KeyPool, state, rows, tokens, device, forms.place)
        return KeyMemory.like(state, rows, tokens, device, None, forms.place)


@dataclass(frozen=True)
class CarriedKeys(_Pages):
    """Keys that the transitions of later tokens carry along.

    Args:
        pages: whether they may lie in pages: where the transitions are those of w and beta alone.
    """

    pages: bool = False

    def new(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> PagedCache:
        sizes, decays = _sizes(q, v, v.shape[2]), gate.log_decay is not None
        return PagedCache.of(CarriedPool.empty(sizes, dtype=v.dtype, device=v.device, decays=decays, recent=()))

    def refuses(self, form: str, call: Call) -> str:
        return _refuses(form, call) or path_unavailable(call.q, call.v)

    @untraced  # its kernels write to the pool where it stands
    def step(self, forms: Keeper, call: Call, given: SoftmaxOptions) -> tuple[Tensor, PagedCache]:
        return super().step(forms, call, given)

    def in_place(
        self, forms: Keeper, state: Any, rows: BatchRows, tokens: int, device: torch.device | str,
        paged: bool | None,
    ) -> Memory:  # fmt: skip
        if paged:
            raise ValueError("paged: expected False or None (a step in place reads carried keys whole), got True")
        on_gpu = rows.length.is_cuda
        if state.in_pages:
            why = path_unavailable(state.pool.k, state.pool.v) if on_gpu else ""
            if why or paged is False:
                why = why or "impl='reference' on a GPU"
                raise ValueError(f"evict: expected None where a step over pages has no kernel ({why})")
            return PagedMemory.like(CarriedPool, state, rows, tokens, device, forms.place)
        if on_gpu and paged is None:
            if self.pages and not path_unavailable(state.k.to(state.v.dtype), state.v):
                return PagedMemory.like(CarriedPool, state, rows, tokens, device, forms.place)
            kernel = forms.kernels.get("triton")
            memory = None if kernel is None or kernel.in_place is None else kernel.in_place(state, rows, tokens, device)
            if memory is not None:
                return cast(Memory, memory)
        return KeyMemory.like(state, rows, tokens, device, forms.transition, None)


def _ready(forms: Keeper, call: Call, given: SoftmaxOptions) -> tuple[Tensor, Tensor, Tensor, Gate, dict[str, Any]]:
    """The call's q, k, v and gate with rotations and padding applied, and what its cache has seen after it.

    The pages of the cache are made ready for the new tokens.
    """
    state, valid = cast(PagedCache, call.state), given.valid
    q, k, v = call.q, call.k, call.v
    state.begin()
    if valid is not None:
        q, k, v = existing(valid, q, k, v)
    gate = forms.separated(call.gate, q, valid, None)
    q, k, phase, angle = forms.place(q, k, gate, state, valid)
    there = append_valid(cast(Any, state) if state.tokens else None, valid, k)
    seen = {"tokens": state.tokens + q.shape[1], "valid": there, "phase": phase, "angle": angle}
    return q, k, v, gate.per_token(q), seen


def _sizes(q: Tensor, v: Tensor, G: int) -> PoolSizes:
    """The sizes of a pool for tokens like these, whose keys have G heads."""
    B, _, H, K = q.shape
    return PoolSizes(B, G, H // G, K, v.shape[3])


def _refuses(form: str, call: Call) -> str:
    """Why the kernels of ``attnzoo.kernels.decode`` cannot serve a call over pages, whatever its tensors, or ""."""
    if form != "triton":
        return f"the {form} form reads no keys in pages"
    if "return_lse" in call.options:
        return "the triton form has no option return_lse over keys in pages"
    if call.q.shape[1] > MOST_ROWS:
        return f"the triton form reads keys in pages for 1 to {MOST_ROWS} tokens at a time"
    if records(call.q, call.k, call.v):
        return "keys in pages have no gradient (run it under torch.no_grad())"
    return ""
