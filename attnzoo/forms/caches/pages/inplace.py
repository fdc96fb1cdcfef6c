"""A memory of fixed size whose keys lie in pages that stand as they were written."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.pruning import QueryBounds
from attnzoo.algebra.transitions import compute_dtype, heads_first
from attnzoo.forms.caches.device_memory import size_of
from attnzoo.forms.caches.inplace import Extend, Memory, Rows
from attnzoo.forms.caches.pages.attention import append_and_attend, step_options
from attnzoo.forms.caches.pages.paged_cache import Eviction, PagedCache
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.kernels.common.untraced import untraced

LONG, LARGE = 64, 2**27  # a head's pages, and bytes of all: what is less is read faster than it is looked through


@dataclass(eq=False)
class PagedMemory(Memory):
    """The keys of B sequences in a :class:`KeyPool`, for encodings that leave them as they are.

    A step is a few kernels (``attnzoo.kernels.decode``), which read on the device how many keys there are. With
    ``prune`` it skips the first pages of a head that together weigh at most its eps in each row. It reads all where
    looking for them takes longer than reading them (one H200): where keys are given up by such a certificate already,
    where there are fewer than LONG pages, and where all keys and values take less than LARGE bytes.

    Args:
        pool: whose ``lengths`` are those of ``rows``.
        rows: see :class:`~attnzoo.forms.caches.inplace.Rows`.
        place: ``place(q, k, gate, state, valid)`` of :class:`~attnzoo.forms.additive.AdditiveForms`; None where another
            class says how a step is done.
        phase: RoPE's total angle so far, ``[B, 1, 1 or H, K/2]`` float64, or None.
        evict: what keys are given up by, when a sequence has got as many tokens as a page has; None for none.
        looked: by row, how many tokens there were when it was last asked.
        last: the step of several tokens that :meth:`keep` ends.
        starts: by row, the state that its sequence goes on from; those that go on from one share its whole pages.
    """

    pool: KeyPool
    rows: Rows
    place: Callable[..., Any] | None
    phase: Tensor | None

    evict: Eviction | None = None
    looked: dict[int, int] = field(default_factory=dict)
    last: Call | None = None
    starts: dict[int, weakref.ref[KVCache | PagedCache]] = field(default_factory=dict)
    carried: ClassVar[int] = 0  # pages of a group of keys that are carried
    shares: ClassVar[bool] = True  # whether a whole page is never written to again

    @staticmethod
    def like(
        state: KVCache | PagedCache, rows: Rows, tokens: int, device: torch.device | str, place: Callable[..., Any]
    ) -> PagedMemory:
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one.

        It has pages for all of these tokens from the start, or where keys are given up takes them as they are needed.
        """
        one, phase = pool_of(state), state.phase
        (G, _), (_, K), R = one.table.shape[1:], one.k.shape[1:], 1 if one.decay is None else one.decay.shape[2]
        B, evict = len(rows.lengths), state.evict if isinstance(state, PagedCache) else None
        pool = KeyPool.empty(
            B, G, R, K, one.v.shape[2], dtype=one.v.dtype, device=device, decays=one.decay is not None,
            pages=B * G * (-(-tokens // PAGE) if evict is None else 1), tokens=tokens,
        )  # fmt: skip
        pool.lengths = rows.lengths
        if phase is not None:
            phase = torch.zeros(B, *phase.shape[1:], dtype=phase.dtype, device=device)
        return PagedMemory(pool, rows, place, phase, None if evict is None else evict.of_rows(B))

    @untraced  # its kernels write to the pool where it stands
    def step(self, call: Call, extend: Extend) -> Tensor:
        pool, given = self.pool, self._options(call.options)
        q, k, phase = self._placed(call)
        if self.rows.tokens > 1:
            self.last = call
        elif self.phase is not None:
            self.phase.copy_(phase)
        self._look(q, k, given.scale)
        k, v = (expand_heads(x, pool.table.shape[1]) for x in (k, call.v))
        gates = call.gate.per_token(q).log_decay
        impl: Literal["triton", "reference"] = "triton" if q.is_cuda else "reference"
        return append_and_attend(pool, q, k, v, gates, given, impl, self.rows.count())

    def whole_step(
        self, rows: tuple[Tensor, Tensor, Tensor], parts: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Tensor:
        """A step from the products with weights on; without a phase, and without keys on the host.

        Args:
            rows: q, k and v, ``[B, T, heads, dim]``, before their shift and norms.
            parts: ``gate``, ``shift``, ``norm`` and ``finish`` of :func:`attnzoo.kernels.decode.paged_step`.
            options: as those of a :class:`~attnzoo.forms.protocol.Call`.
        """
        from attnzoo.kernels.decode import TokenParts, paged_step

        pool, batch = self.pool, self.rows
        return paged_step(
            *rows, pool.state(), past=batch.length, count=batch.count(), parts=TokenParts(**parts),
            options=step_options(self._options(options)), impl="triton" if pool.k.is_cuda else "reference",
        )  # fmt: skip

    def _options(self, options: Mapping[str, Any]) -> SoftmaxOptions:
        """What is asked for, without pruning where that takes longer than it saves."""
        given, pool = SoftmaxOptions(**options), self.pool
        certified = self.evict is not None and self.evict.bounds is not None
        much = pool.table.shape[2] >= LONG and size_of(pool.k) + size_of(pool.v) >= LARGE
        return given if much and not certified else replace(given, prune=None)

    def _placed(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        assert self.place is not None
        past = KVCache(call.k[:, :0], call.v[:, :0], phase=self.phase)
        q, k, phase, _ = self.place(call.q, call.k, call.gate, past, None)
        return q, k, phase

    def keep(self, kept: Tensor) -> None:
        call, self.last = self.last, None
        if self.phase is not None and call is not None:
            others = torch.arange(self.rows.tokens, device=kept.device) >= kept[:, None]
            gate = call.gate.per_token(call.q).neutral_where(others)
            self.phase.copy_(self._placed(replace(call, gate=gate))[2])
        self.pool.crop_sums((self.rows.length + kept).int())

    def _look(self, q: Tensor, k: Tensor, scale: float | None) -> None:
        """Keys that the queries of a step may need come back from the host, before its tokens are added."""
        if self.evict is not None and self.evict.offload is not None:
            _, _, H, K = q.shape
            scaled = heads_first(q, H, compute_dtype(q)) * (K**-0.5 if scale is None else scale)
            self.evict.look(self.pool, scaled, k, (self.rows.active[:, None] != 0).expand(q.shape[:2]))

    def admit(self, row: int, state: KVCache | PagedCache, tokens: int) -> None:
        self._adopt(row, pool_of(state), state, tokens)

    def _adopt(self, row: int, one: KeyPool, state: KVCache | PagedCache, tokens: int) -> None:
        """The idle row ``row`` goes on from the keys of ``state``, which ``one`` holds; both stay as they are."""
        theirs = state.evict if isinstance(state, PagedCache) else None
        if self.evict is not None:
            away, one = self.evict.offload, one.apart()
            if away is None:
                self.evict.give_up(one)
            elif theirs is not None and theirs.offload is not None:
                kept = theirs.offload.copy()
                replace(theirs, offload=kept).give_up(one)
                away.adopt(row, kept)
            elif bool(one.first.any()):
                raise ValueError("cache: expected that of new_cache(evict='offload'), got one whose keys are gone")
            tokens = min(tokens, one.lengths[0] + PAGE)
        twins = self.starts.items() if self.shares else ()
        self.pool.adopt(row, one, tokens, next((other for other, start in twins if start() is state), None))
        self.starts[row] = weakref.ref(state)
        self.looked[row] = one.lengths[0]
        if self.phase is not None and state.phase is not None:
            self.phase[row] = state.phase[0]

    def renew(self, bounds: QueryBounds) -> None:
        if self.evict is not None:
            self.evict = replace(self.evict, bounds=bounds)

    def ready(self, rows: Sequence[int]) -> bool:
        tokens, lengths = self.rows.tokens, self.rows.lengths
        if self.evict is not None and any(lengths[b] >= self.looked[b] + PAGE for b in rows):
            self.looked = dict(enumerate(lengths))
            self.evict.give_up(self.pool)
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
        from attnzoo.kernels.decode import paged_workspace

        pool, device = self.pool, self.rows.length.device
        return paged_workspace(pool.k, pool.v, pool.table, heads, device, tokens, self.carried)


def pool_of(state: KVCache | PagedCache) -> KeyPool:
    """The keys of a state of one sequence, in pages."""
    if isinstance(state, PagedCache):
        return state.keys()
    (S, G, K), gates = state.k.shape[1:], state.log_decay
    pool = KeyPool.empty(
        1, G, 1 if gates is None else gates.shape[2] // G, K, state.v.shape[3], dtype=state.v.dtype,
        device=state.v.device, decays=gates is not None, pages=G * -(-S // PAGE), tokens=S,
    )  # fmt: skip
    pool.append(state.k, expand_heads(state.v, G), gates)
    return pool
