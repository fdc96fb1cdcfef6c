"""Every store of keys, handed on by calls and stepped in place: the same histories give what the oracle gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from kernel_pool import KernelPool
from torch import Tensor

from attnzoo import KVCache, RecurrentState, get, oracle
from attnzoo.forgetting.cache import ForgettingCache
from attnzoo.forms.caches.inplace import BatchRows, Memory
from attnzoo.forms.caches.pages.eviction import Eviction
from attnzoo.forms.caches.pages.inplace import PagedMemory
from attnzoo.forms.caches.pages.paged_cache import PagedCache
from attnzoo.forms.caches.pages.pool import KeyPool
from attnzoo.forms.caches.path_pages.pool import CarriedPool
from attnzoo.forms.caches.state import State
from attnzoo.forms.protocol import REFERENCE, Call
from attnzoo.samples import random_inputs
from attnzoo.testing import Inputs, in_float64, relative_error, take

MOST, WINDOW = 200, 30  # tokens of a sequence
SOFTCAP = 0.8  # of scores of about 1
Make = Callable[[Any, Any, BatchRows], Memory]  # from the forms, a state of one token and the rows


@dataclass(frozen=True)
class Store:
    """One way to keep the keys of a variant.

    Args:
        name: of the variant.
        kind: of the store.
        make: its memory; None where it only exists for calls.
        pages: whether a state is in pages.
        form: by which few tokens are taken.
        evicts: whether keys go that a window hides.
        calls: whether its states can be handed on; a GPU's memory has no such side.
    """

    name: str
    kind: str
    make: Make | None = field(default=None, repr=False)
    pages: bool = False
    form: str = REFERENCE
    evicts: bool = False
    calls: bool = True

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}"

    @property
    def single(self) -> bool:
        """Whether it computes in float32."""
        return self.form != REFERENCE or not self.calls


def made(paged: bool | None) -> Make:
    return lambda forms, state, rows: forms.in_place(state, rows, MOST, "cpu", paged)


def on_a_gpu(forms: Any, state: Any, rows: BatchRows) -> Memory:
    return PagedMemory.like(KernelPool, state, rows, MOST, "cpu", forms.place)


def by_kernel(forms: Any, state: Any, rows: BatchRows) -> Memory:
    memory: Memory = forms.kernels["triton"].in_place(state, rows, MOST, "cpu")
    return memory


STORES = [
    Store("gated_deltanet", "matrix", made(None)),
    *(Store(name, "whole", made(False)) for name in ("fox", "rope", "wall", "path_fox", "rope_path_fox")),
    *(Store(name, "pages", made(None), pages=True) for name in ("fox", "rope", "path_fox")),
    *(Store(name, "evicted", made(None), pages=True, evicts=True) for name in ("fox", "path_fox")),
    *(Store(name, "kernels", pages=True, form="triton") for name in ("fox", "rope", "path_fox")),
    Store("path_fox", "one_kernel", by_kernel, form="triton"),
    Store("path_fox", "on_a_gpu", on_a_gpu, calls=False),
    Store("path_fox", "on_a_gpu_evicted", on_a_gpu, pages=True, evicts=True, calls=False),
]

# Of two rows: a sequence joins with so many tokens, both take some and keep their first ones, one leaves.
HISTORY: list[tuple[str, tuple[int, ...]]] = [
    ("join", (0, 62)), ("join", (1, 1)), ("take", (1, 1, 1)), ("take", (3, 3, 1)), ("take", (2, 1, 2)),
    ("leave", (0,)), ("join", (0, 130)), ("take", (1, 1, 1)), ("take", (4, 2, 4)), *[("take", (1, 1, 1))] * 2,
    ("leave", (1,)), ("join", (1, 64)), ("take", (3, 1, 3)), ("take", (1, 1, 1)),
]  # fmt: skip


class Handed:
    """A state of each sequence, which every call hands to the next."""

    def __init__(self, store: Store, options: dict[str, Any], evict: Eviction | None) -> None:
        self.store, self.options, self.evict = store, options, evict
        self.variant = get(store.name)
        self.states: list[Any] = [None, None]

    def new(self, inputs: Inputs) -> Any:
        if not self.store.pages:
            return None
        forms: Any = self.variant.form_set
        return replace(forms.store.new(*inputs), evict=self.evict)

    def join(self, row: int, inputs: Inputs) -> None:
        self.states[row] = self.variant.extend(*inputs, self.new(inputs), **self.options)[1]

    def take(self, inputs: Inputs, kept: tuple[int, ...]) -> Tensor:
        found, T = [], inputs[0].shape[1]
        for row, n in enumerate(kept):
            one, before = take(inputs, slice(row, row + 1)), self.states[row]
            o, after = self.variant.extend(*one, before, form=self.store.form, **self.options)
            if n < T and self.store.pages and row == 0 and after.phase is None:
                after = after.crop(len(before) + n)
            elif n < T:  # a call may be forgotten, too
                after = self.variant.extend(*take(one, tokens=slice(n)), before, **self.options)[1]
            self.states[row] = after
            found.append(o)
        return torch.cat(found)

    def leave(self, row: int) -> None:
        self.states[row] = None


class InPlace(Handed):
    """One memory of all sequences, which steps change where it stands."""

    def __init__(self, store: Store, options: dict[str, Any], evict: Eviction | None) -> None:
        super().__init__(store, options, evict)
        self.rows = BatchRows.idle(2)
        self.memory: Memory | None = None

    def join(self, row: int, inputs: Inputs) -> None:
        super().join(row, inputs)
        assert self.store.make is not None
        if self.memory is None:
            like = self.variant.extend(*take(inputs, tokens=slice(1)), self.new(inputs), **self.options)[1]
            self.memory = self.store.make(self.variant.form_set, like, self.rows)
        self.memory.admit(row, self.states[row], MOST)
        self.rows.begin(row, inputs[0].shape[1])

    def take(self, inputs: Inputs, kept: tuple[int, ...]) -> Tensor:
        q, k, v, gate = inputs
        self.rows.tokens, memory = q.shape[1], self.memory
        assert memory is not None
        memory.ready([0, 1])
        o = memory.step(
            Call(q, k, v, gate, None, True, self.options),
            lambda call: self.variant.extend(call.q, call.k, call.v, call.gate, call.state, **call.options),
        )
        if self.rows.tokens > 1:
            memory.keep(torch.tensor(kept))
        self.rows.length += torch.tensor(kept)
        for row, n in enumerate(kept):
            self.rows.lengths[row] += n
        return o

    def leave(self, row: int) -> None:
        assert self.memory is not None
        self.memory.clear(row)
        self.rows.end(row)


def joined(first: Inputs, second: Inputs) -> Inputs:
    q, k, v = (torch.cat(pair, 1) for pair in zip(first[:3], second[:3], strict=True))
    parts = {name: torch.cat([getattr(first[3], name), getattr(second[3], name)], 1) for name in first[3].parts}
    return q, k, v, replace(first[3], **parts)


def drawn(store: Store, B: int, T: int, seed: int) -> Inputs:
    dtype = torch.float32 if store.single else torch.float64
    q, k, v, gate = random_inputs(store.name, B, T, 2, 1, 16, 16, regime="open", dtype=dtype, seed=seed)
    return q, k, v, gate.per_token(q)


WAYS = [(store, Handed) for store in STORES if store.calls] + [(store, InPlace) for store in STORES if store.make]


@pytest.mark.parametrize(("store", "way"), WAYS, ids=lambda x: str(x) if isinstance(x, Store) else x.__name__)
@torch.no_grad()
def test_any_history_over_any_store_gives_what_the_oracle_gives(
    store: Store, way: type[Handed], small_groups: None
) -> None:
    options: dict[str, Any] = {"window": WINDOW} if store.evicts else {}
    if (way is InPlace or store.name == "rope") and get(store.name).side == "softmax":
        options["softcap"] = SOFTCAP
    cache = way(store, options, Eviction(-100.0, None, WINDOW) if store.evicts else None)
    seen: list[Any] = [None, None]
    whole: Any = oracle.linear if get(store.name).side == "linear" else oracle.softmax
    for seed, (what, numbers) in enumerate(HISTORY):
        if what == "join":
            row, T = numbers
            seen[row] = drawn(store, 1, T, seed)
            cache.join(row, seen[row])
        elif what == "leave":
            cache.leave(*numbers)
        else:
            (T, *kept), new = numbers, drawn(store, 2, numbers[0], seed)
            o = cache.take(new, tuple(kept))
            for row, n in enumerate(kept):
                past, one = seen[row], take(new, slice(row, row + 1))
                expected = whole(*in_float64(joined(past, one)), **options)[:, -T:]
                assert relative_error(o[row : row + 1], expected) <= (2e-5 if store.single else 1e-10), (what, numbers)
                seen[row] = joined(past, take(one, tokens=slice(n)))
    if store.evicts:
        pools = [cache.memory.pool] if isinstance(cache, InPlace) else [state.pool for state in cache.states]
        assert any(bool(pool.first.any()) for pool in pools)


def test_every_kind_of_pool_goes_through_these_histories() -> None:
    assert {*KeyPool.__subclasses__()} == {CarriedPool}


@pytest.mark.parametrize("state", [RecurrentState, KVCache, PagedCache, ForgettingCache])
def test_every_state_says_what_the_contract_asks(state: type) -> None:
    asked = {
        *State.__annotations__,
        *(name for name, x in vars(State).items() if callable(x) and name[0] != "_"),
        "__len__",
    }
    assert {"in_pages", "grows", "reorder", "crop", "detach", "to"} <= asked
    assert not [name for name in asked if not hasattr(state, name)]
