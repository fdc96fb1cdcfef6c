"""A memory that steps change in place, with keys in the pages of any pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds
from attnzoo.algebra.transitions import scaled_queries
from attnzoo.forms.caches.device_memory import size_of
from attnzoo.forms.caches.inplace import BatchRows, Extend, Memory
from attnzoo.forms.caches.pages.attention import step_options
from attnzoo.forms.caches.pages.eviction import Eviction
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool
from attnzoo.forms.caches.pages.prefix import PagedPrefix
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.kernels.common.untraced import untraced
from attnzoo.kernels.decode import TokenParts, paged_step, paged_workspace

LONG, LARGE = 64, 2**27  # a head's pages, and bytes of all: what is less is read faster than it is looked through


@dataclass(eq=False)
class PagedMemory(Memory):
    """The keys of B sequences in a :class:`~attnzoo.forms.caches.pages.pool.KeyPool`.

    On a GPU a step is a few kernels (``attnzoo.kernels.decode``), which read there how many keys there are. With
    ``prune`` it skips the first pages of a head that together weigh at most its eps in each row. It reads all where
    looking for them takes longer than reading them (one H200): where keys are evicted by such a certificate already,
    where there are fewer than LONG pages, and where all keys and values take less than LARGE bytes.

    Args:
        pool: whose ``lengths`` are those of ``rows``.
        rows: see :class:`~attnzoo.forms.caches.inplace.BatchRows`.
        place: ``place(q, k, gate, state, valid)`` of :class:`~attnzoo.forms.softmax.SoftmaxForms`.
        phase: RoPE's total angle so far, ``[B, 1, 1 or H, K/2]`` float64, or None.
        evict: what keys are evicted by; None for none.
        last: the step of several tokens that :meth:`keep` ends.
        starts: by row, the state that its sequence goes on from; those that go on from one share its whole pages.
    """

    pool: KeyPool
    rows: BatchRows
    place: Callable[..., Any]
    phase: Tensor | None
    evict: Eviction | None = None
    last: Call | None = None
    starts: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    @property
    def eight_bits(self) -> bool:
        return self.pool.exponents is not None

    @property
    def whole_steps(self) -> str:
        away = self.evict is not None and self.evict.offload is not None
        return "" if self.phase is not None or self.pool.group or away else "pages"

    @staticmethod
    def like(
        kind: type[KeyPool],
        state: Any,
        rows: BatchRows,
        tokens: int,
        device: torch.device | str,
        place: Callable[..., Any],
    ) -> PagedMemory:
        """An empty memory in a pool of ``kind``; see :meth:`~attnzoo.forms.caches.pages.pool.KeyPool.like`."""
        B, evict, phase = len(rows.lengths), state.evict, state.phase
        narrow = rows.eight_bits and kind is KeyPool
        pool = (kind.like_in_eight_bits if narrow else kind.like)(state, B, tokens, device)
        pool.lengths = rows.lengths
        if phase is not None:
            phase = torch.zeros(B, *phase.shape[1:], dtype=phase.dtype, device=device)
        return PagedMemory(pool, rows, place, phase, None if evict is None else evict.of_rows(B))

    @untraced  # its kernels write to the pool where it stands
    def step(self, call: Call, extend: Extend) -> Tensor:
        given, once = self._options(call.options), self.rows.tokens == 1
        q, k, phase = self._placed(call)
        if not once:
            self.last = call
        elif self.phase is not None:
            self.phase.copy_(phase)
        self._look(q, k, given)
        impl: Literal["triton", "reference"] = "triton" if q.is_cuda else "reference"
        return self.pool.step(q, k, call.v, call.gate.per_token(q), given, self.rows.count(), impl, once)

    def whole_step(
        self, rows: tuple[Tensor, Tensor, Tensor], parts: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Tensor:
        """A step from the products with weights on; without a phase, and without keys on the host.

        Args:
            rows: q, k and v, ``[B, T, heads, dim]``, before their shift and norms.
            parts: ``gate``, ``shift``, ``norm`` and ``finish`` of :func:`attnzoo.kernels.decode.paged_step`.
            options: as those of a :class:`~attnzoo.forms.protocol.Call`.
        """
        pool, batch = self.pool, self.rows
        return paged_step(
            *rows, pool.state(), past=batch.length, count=batch.count(), parts=TokenParts(**parts),
            options=step_options(self._options(options)), impl="triton" if pool.k.is_cuda else "reference",
        )  # fmt: skip

    def _options(self, options: Mapping[str, Any]) -> SoftmaxOptions:
        """The options of a call, without pruning where that takes longer than it saves."""
        given, pool = SoftmaxOptions(**options), self.pool
        certified = self.evict is not None and self.evict.bounds is not None
        much = pool.table.shape[2] >= LONG and size_of(pool.k) + size_of(pool.v) >= LARGE
        return given if much and not certified else replace(given, prune=None)

    def _placed(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        past = KVCache(call.k[:, :0], call.v[:, :0], phase=self.phase)
        q, k, phase, _ = self.place(call.q, call.k, call.gate, past, None)
        return q, k, phase

    def keep(self, kept: Tensor) -> None:
        call, self.last = self.last, None
        if self.phase is not None and call is not None:
            others = torch.arange(self.rows.tokens, device=kept.device) >= kept[:, None]
            gate = call.gate.per_token(call.q).neutral_where(others)
            self.phase.copy_(self._placed(replace(call, gate=gate))[2])
        self.pool.keep(call, kept, self.rows.length + kept)

    def _look(self, q: Tensor, k: Tensor, given: SoftmaxOptions) -> None:
        """Keys that the queries of a step may need come back from the host, before its tokens are added."""
        if self.evict is not None and self.evict.offload is not None:
            active = (self.rows.active[:, None] != 0).expand(q.shape[:2])
            self.evict.look(self.pool, scaled_queries(q, given.scale), k, replace(given, valid=active))

    def admit(self, row: int, state: Any, tokens: int) -> None:
        one, theirs = self.pool.holding(state), state.evict
        if self.evict is not None:
            away, one = self.evict.offload, one.apart()
            if away is None:
                self.evict.apply(one)
            elif theirs is not None and theirs.offload is not None:
                kept = theirs.offload.copy()
                replace(theirs, offload=kept).apply(one)
                away.adopt(row, kept)
            elif bool(one.first.any()):
                raise ValueError("cache: expected that of new_cache(evict='offload'), got one whose keys are gone")
            tokens = min(tokens, one.lengths[0] + PAGE)
        twin = next((b for b, start in self.starts.items() if start() is state), None)
        if twin is not None:
            ids = self.pool.pages[twin, :, : self.pool.open_page(one.lengths[0])]
            self.pool.share(row, ids.where(one.pages[0, :, : ids.shape[1]] >= 0, -1))
        self.pool.adopt(row, one, tokens)
        self.starts[row] = weakref.ref(state)
        if self.phase is not None and state.phase is not None:
            self.phase[row] = state.phase[0]

    def prefix(self, state: Any) -> Any:
        """As :meth:`Memory.prefix`; a state whose keys are given up, or carried by later tokens, is kept itself."""
        return state if self.evict is not None or self.pool.group else PagedPrefix.of(self.pool, state)

    def renew(self, bounds: QueryBounds) -> None:
        if self.evict is not None:
            self.evict = replace(self.evict, bounds=bounds)

    def ready(self, rows: Sequence[int]) -> bool:
        tokens, lengths = self.rows.tokens, self.rows.lengths
        if self.evict is not None and self.evict.due(self.pool):
            self.evict.apply(self.pool)
        full = [b for b in rows if -lengths[b] % PAGE < tokens]
        if full:
            self.pool.reserve([tokens * (b in full) for b in range(len(lengths))])
        return bool(full)

    def clear(self, row: int) -> None:
        self.pool.reset(row)
        self.starts.pop(row, None)
        if self.evict is not None and self.evict.offload is not None:
            self.evict.offload.clear(row)

    def kept(self, row: int) -> list[int]:
        n = self.rows.lengths[row]
        gone = (self.pool.pages[row, :, : -(-n // PAGE)] < 0).sum(-1)
        return [n - PAGE * pages for pages in gone.tolist()]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.pool.tensors().values()
        if self.phase is not None:
            yield self.phase

    def workspace(self, heads: int, tokens: int = 1) -> int:
        pool, device = self.pool, self.rows.length.device
        return paged_workspace(pool.k, pool.v, pool.table, heads, device, tokens, pool.group)
