"""A memory of fixed size whose keys transitions carry, in pages that may be given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import compute_dtype, heads_first
from attnzoo.forms.caches.inplace import Extend, Rows
from attnzoo.forms.caches.pages.inplace import PagedMemory, pool_of
from attnzoo.forms.caches.pages.page_table import PAGE
from attnzoo.forms.caches.pages.paged_cache import PagedCache
from attnzoo.forms.caches.path_pages.groups import GROUP, GroupedPool
from attnzoo.forms.caches.path_pages.pool import CarriedPool, attend_carried
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import attend_with_sink
from attnzoo.kernels.common.untraced import untraced


@dataclass(eq=False)
class CarriedPages(PagedMemory):
    """The keys of PaTH and PaTH-FoX of B sequences in a :class:`~attnzoo.forms.caches.path_pages.pool.CarriedPool`.

    For steps in plain operations, and for pages that may come back from the host. Arguments as
    :class:`~attnzoo.forms.caches.pages.inplace.PagedMemory`, without a place and a phase.
    """

    carried: ClassVar[int] = 1
    on_host: ClassVar[bool] = True

    @staticmethod
    def of(state: PagedCache, rows: Rows, tokens: int, device: torch.device | str) -> CarriedPages:
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one."""
        pool = _like(cast(CarriedPool, state.pool), len(rows.lengths), tokens, device)
        pool.lengths = rows.lengths
        return CarriedPages(
            pool, rows, None, None, None if state.evict is None else state.evict.of_rows(len(rows.lengths))
        )

    @untraced  # it changes the pool where it stands
    def step(self, call: Call, extend: Extend) -> Tensor:
        pool, given = cast(CarriedPool, self.pool), SoftmaxOptions(**call.options)
        q, k, v, gate = call.q, call.k, call.v, call.gate.per_token(call.q)
        self._look(q, k, given.scale)
        if q.is_cuda:
            return pool.step(q, k, v, gate, given, self.rows.count())
        (B, T, H, K), there = q.shape, self.rows.active[:, None] != 0
        there = there.expand(B, T)
        scaled = heads_first(q, H, compute_dtype(q)) * (K**-0.5 if given.scale is None else given.scale)
        o, lse = attend_carried(scaled, k, v, gate, pool, there, given.window)
        pool.add(k, v, gate, there)
        pool.lengths = self.rows.lengths  # the host counts them after the step
        return attend_with_sink(o, lse, given.sink)[0].transpose(1, 2).to(v.dtype)

    def keep(self, kept: Tensor) -> None:
        """It waits for the device: which pages hold these tokens is known to the host."""
        pool, rows = self.pool, self.rows
        counts = list(zip(rows.lengths, kept.tolist(), strict=True))
        left = [n + more for n, more in counts]
        there = [n + rows.tokens * (more > 0) for n, more in counts]
        if left != there:
            pool.lengths = there
            pool.crop(left)
        pool.lengths = rows.lengths  # the host counts them after the step

    def admit(self, row: int, state: KVCache | PagedCache, tokens: int) -> None:
        if isinstance(state, PagedCache):
            one = cast(CarriedPool, state.keys())
        else:  # its keys stand as the last token has left them all: as if no token before had a factor
            one = _like(cast(CarriedPool, self.pool), 1, len(state), state.k.device)
            w = state.k.new_zeros(*state.k.shape[:3], *one.near_w.shape[3:])
            one.add(state.k, state.v, Gate(log_decay=state.log_decay, w=w, beta=w[..., 0]), None)
        self._adopt(row, one, state, tokens)


def _like(pool: CarriedPool, B: int, tokens: int, device: torch.device | str) -> CarriedPool:
    """A pool of B empty sequences with heads and channels as in ``pool``."""
    (G, K), R = (pool.table.shape[1], pool.k.shape[2]), 1 if pool.decay is None else pool.decay.shape[2]
    return CarriedPool.of(
        B, G, R, K, pool.v.shape[2], dtype=pool.k.dtype, values=pool.v.dtype, device=device,
        decays=pool.decay is not None, pages=B * G, tokens=tokens, factors=pool.factors,
    )  # fmt: skip


@dataclass(eq=False)
class GroupedPages(PagedMemory):
    """The same in a :class:`~attnzoo.forms.caches.path_pages.groups.GroupedPool`, for steps in kernels."""

    carried: ClassVar[int] = GROUP
    shares: ClassVar[bool] = False

    @staticmethod
    def of(state: KVCache | PagedCache, rows: Rows, tokens: int, device: torch.device | str) -> GroupedPages:
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one.

        It has pages for all of these tokens from the start, or where keys are given up takes them as they are needed.
        """
        one, B, evict = pool_of(state), len(rows.lengths), state.evict if isinstance(state, PagedCache) else None
        (G, K), R = (one.table.shape[1], one.k.shape[2]), 1 if one.decay is None else one.decay.shape[2]
        pool = GroupedPool.of(
            B, G, R, K, one.v.shape[2], dtype=one.v.dtype, device=device, decays=one.decay is not None,
            pages=B * G * (-(-tokens // PAGE) if evict is None else 1), tokens=tokens,
        )  # fmt: skip
        pool.lengths = rows.lengths
        return GroupedPages(pool, rows, None, None, None if evict is None else evict.of_rows(B))

    @untraced  # its kernels write to the pool where it stands
    def step(self, call: Call, extend: Extend) -> Tensor:
        pool, once, gate = cast(GroupedPool, self.pool), self.rows.tokens == 1, call.gate.per_token(call.q)
        if not once:
            self.last = call
        return pool.step(call.q, call.k, call.v, gate, self._options(call.options), self.rows.count(), once)

    def keep(self, kept: Tensor) -> None:
        assert self.last is not None
        call, self.last = self.last, None
        pool = cast(GroupedPool, self.pool)
        pool.crop_sums((self.rows.length + kept).int())
        pool.carry(call.k, call.gate.per_token(call.q), kept)

    def admit(self, row: int, state: KVCache | PagedCache, tokens: int) -> None:
        pool = pool_of(state)
        one = GroupedPool.copy_of(pool, None if isinstance(state, PagedCache) else state.k[0])
        self._adopt(row, one, state, tokens)
