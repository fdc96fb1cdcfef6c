"""A memory of fixed size whose keys transitions carry, in pages that may be given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from attnzoo.algebra.transitions import compute_dtype, heads_first
from attnzoo.forms.carried import CarriedPool, attend_carried
from attnzoo.forms.fixed import Extend, Rows
from attnzoo.forms.fixed_pages import PagedMemory
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.paged import PagedCache
from attnzoo.forms.pages import PAGE
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import attend_with_sink
from attnzoo.forms.untraced import untraced

GROUP = 16  # pages whose products go to the end of their group


@dataclass(eq=False)
class CarriedPages(PagedMemory):
    """The keys of PaTH and PaTH-FoX of B sequences in a :class:`~attnzoo.forms.carried.CarriedPool`.

    A step is seven kernels on a GPU (``attnzoo.kernels.decode``), and plain operations elsewhere. Pruning drops no
    mass. Arguments as :class:`~attnzoo.forms.fixed_pages.PagedMemory`, without a place and a phase, and

    Args:
        closed: groups of pages of each sequence that are closed (:meth:`~attnzoo.forms.carried.CarriedPool.close`).
    """

    closed: list[int] = field(default_factory=list)
    carried: ClassVar[bool] = True
    on_host: ClassVar[bool] = True

    @staticmethod
    def of(state: PagedCache, rows: Rows, tokens: int, device: torch.device | str) -> CarriedPages:
        """Empty, for sequences of up to ``tokens`` tokens with states such as this one."""
        one, B = cast(CarriedPool, state.pool), len(rows.lengths)
        (G, K), R = (one.table.shape[1], one.k.shape[2]), 1 if one.decay is None else one.decay.shape[2]
        pool = CarriedPool.of(
            B, G, R, K, one.v.shape[2], dtype=one.k.dtype, values=one.v.dtype, device=device,
            decays=one.decay is not None, pages=B * G, tokens=tokens, factors=one.factors,
        )  # fmt: skip
        evict = None if state.evict is None else state.evict.of_rows(B)
        away = evict is not None and evict.offload is not None  # a page that is away goes to no end of a group
        pool.lengths, pool.group = rows.lengths, GROUP if pool.k.is_cuda and not away else 0
        return CarriedPages(pool, rows, None, None, evict, closed=[0] * B)

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

    def admit(self, row: int, state: Any, tokens: int) -> None:
        if not isinstance(state, PagedCache):
            how = "keys that have been carried to the last token are in no pages"
            raise ValueError(f"cache: expected that of new_cache(evict=...) ({how}), got {type(state).__name__}")
        super().admit(row, state, tokens)
        self.closed[row] = 0
        self._close(row, state.pool.lengths[0])

    def ready(self, rows: Sequence[int]) -> bool:
        for row in rows:
            self._close(row, self.rows.lengths[row])
        return super().ready(rows)

    def _close(self, row: int, tokens: int) -> None:
        """Close the groups that ``tokens`` tokens fill and that are not closed yet."""
        pool = cast(CarriedPool, self.pool)
        groups = tokens // (PAGE * pool.group) if pool.group else 0
        if groups > self.closed[row]:
            pool.close(row, self.closed[row], groups)
            self.closed[row] = groups
