"""A cache in the pages of a pool, from which keys may be evicted."""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.values import records
from attnzoo.forms.caches.pages.eviction import Eviction
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool
from attnzoo.forms.caches.state import check_rows, whole
from attnzoo.forms.options import SoftmaxOptions


@dataclass(frozen=True, eq=False)
class PagedCache:
    """The softmax side's cache in the pages of a :class:`~attnzoo.forms.caches.pages.pool.KeyPool`.

    A call that goes on from it changes the pool and gives a new object; this one may be gone on from once more in its
    place (after a call that failed). Keys are evicted when a call begins, for what its cache had seen before it. So
    the tokens of the last call can always be taken back.

    Args:
        pool: the keys and values.
        evict: the rule by which keys are evicted, or None.
        tokens: how many it has seen, padding included.
        valid: which of them exist, ``[B, tokens]`` bool, or None for all.
        phase: RoPE's total angle so far, as in :class:`attnzoo.KVCache`.
        angle: RoPE's angle where all tokens had the same, or None.
        lengths: tokens of each sequence that are stored.
        notes: by which the pool comes back to it; empty until tokens that are taken back have left the pool.
        mark: its name.
        base: the state of the pool that it is, or is the beginning of.
    """

    pool: KeyPool
    evict: Eviction | None = None
    tokens: int = 0
    valid: Tensor | None = None
    phase: Tensor | None = None
    angle: Tensor | None = None
    lengths: tuple[int, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict, repr=False)
    mark: int = 0
    base: int = 0
    in_pages: ClassVar[bool] = True
    grows: ClassVar[bool] = True

    @staticmethod
    def of(pool: KeyPool, evict: Eviction | None = None, **seen: Any) -> PagedCache:
        """The cache that ``pool`` now is; ``seen`` are ``tokens``, ``valid``, ``phase`` and ``angle``."""
        pool.mark = mark = pool.new_mark()
        lengths = tuple(pool.lengths)
        return PagedCache(pool, evict, lengths=lengths, notes=pool.notes(), mark=mark, base=mark, **seen)

    def __len__(self) -> int:
        return self.tokens

    @property
    def stores(self) -> bool:
        """Whether there are keys: padding leaves none."""
        return any(self.lengths)

    def check(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> None:
        """The inputs of a call fit.

        Raises:
            ValueError: another batch, other heads or channels, a gate with other parts, or a gradient is expected.
        """
        pool, (B, _, H, K), G, V = self.pool, q.shape, key_heads(q, v, gate), v.shape[3]
        sizes = pool.sizes
        heads = sizes.G * (H // G if pool.decay is None else sizes.R)
        got, expected = (B, H, G, K, V), (sizes.B, heads, sizes.G, sizes.K, sizes.V)
        if got != expected:
            raise ValueError(f"state: expected pages of B, H, G, K, V = {got}, got {expected}")
        if (gate.log_decay is None) != (pool.decay is None):
            needs, has = ("none", "some") if gate.log_decay is None else ("those of all cached tokens", "none")
            raise ValueError(f"state.pool.decay: expected {needs}, as the gate is, got {has} (of another variant?)")
        if records(q, k, v):
            raise ValueError("state: expected torch.no_grad(), as keys in pages have no gradient, got inputs with one")

    def begin(self) -> None:
        """Make ready for a call: the pool is what it was when this cache was made, but for keys that are evicted."""
        self._settle()
        if self.evict is None or not self.evict.due(self.pool):
            return
        if self.evict.apply(self.pool) and 2 * self.pool.used() < len(self.pool.refs):
            self.pool.compact()

    def keys(self) -> KeyPool:
        """The keys of this cache, to be read: its pool, or a copy where that still holds tokens that were taken back.

        Raises:
            ValueError: as a call that goes on from here.
        """
        if self.pool.mark == self.base and tuple(self.pool.lengths) == self.lengths:
            return self.pool
        own = replace(self, pool=copy.deepcopy(self.pool), notes=dict(self.notes))
        own._settle()
        return own.pool

    def _settle(self) -> None:
        """Make the pool what it was when this cache was made: without tokens that were taken back, or of a failed call.

        Raises:
            ValueError: another call has gone on from this cache, and from what it gave.
        """
        pool = self.pool
        if pool.mark == self.base:
            if tuple(pool.lengths) != self.lengths:
                pool.crop(self.lengths)
                self.notes.update(pool.notes())
        elif pool.before == self.mark:
            pool.crop(self.lengths, self.notes or None)
        else:
            raise ValueError("state: expected the last that this pool of keys has given, got an earlier one")
        pool.before, pool.mark = self.mark, pool.new_mark()

    def reorder(self, index: Tensor) -> PagedCache:
        """The rows ``index`` of the batch, in that order; see :func:`~attnzoo.forms.caches.state.check_rows`.

        Rows that are the same share their pages. The pool is changed in place.
        """
        check_rows(index, self.pool.length)
        self._settle()
        shared = self.phase is None or self.phase.shape[0] != len(self.lengths)
        phase = self.phase if shared else cast(Tensor, self.phase)[index]
        valid = None if self.valid is None else self.valid[index]
        self.pool.select(index)
        if self.evict is not None and self.evict.offload is not None:
            self.evict.offload.select(index)
        return self._after(self.tokens, valid, phase)

    def crop(self, tokens: int) -> PagedCache:
        """The cache as it was after the first ``tokens`` tokens. This one can be gone on from in its place.

        Keys that have been evicted since stay so where no row after those tokens needs them: they were certified for
        all rows to come when they went, and that holds from the first token on at which it is true.

        Raises:
            ValueError: more than there are, fewer than 0, keys that rows from there on would need, or RoPE's phase
                where its angle varied.
        """
        whole(tokens)
        if not 0 <= tokens <= self.tokens:
            raise ValueError(f"tokens: expected 0 to {self.tokens}, got {tokens}")
        if tokens == self.tokens:
            return self
        if self.pool.mark != self.base:
            self._settle()
        if self.phase is not None and self.angle is None:
            all_of_them = f"all {self.tokens} (the angles of single tokens are not kept)"
            raise ValueError(f"tokens: expected {all_of_them}, got {tokens}")
        lengths = self._lengths(tokens)
        away = None if self.evict is None else self.evict.offload
        if away is not None:  # pages that will be written to, and what lies behind them, which goes with the tokens
            ends = self.pool.first.new_tensor([self.pool.open_page(n) for n in lengths])[:, None]
            away.bring_back(self.pool, self.pool.first.minimum(ends))
        elif not self._may_crop(lengths):
            more = range(tokens + 1, self.tokens + 1)
            least = more[bisect_left(more, True, key=lambda n: self._may_crop(self._lengths(n)))]
            raise ValueError(
                f"tokens: expected at least {least} (keys that earlier rows need are evicted), got {tokens}"
            )
        self.pool.check_crop(lengths)
        valid, phase = None if self.valid is None else self.valid[:, :tokens], None
        if self.angle is not None:
            phase = self.pool.length.new_tensor(lengths).double()[:, None, None, None] * self.angle.double()
        mark = self.pool.new_mark()
        return replace(
            self, tokens=tokens, valid=valid, phase=phase, lengths=tuple(lengths), notes={}, mark=mark,
            base=self.pool.mark,
        )  # fmt: skip

    def _lengths(self, tokens: int) -> list[int]:
        """Stored tokens of each sequence after the first ``tokens``."""
        return [tokens] * len(self.lengths) if self.valid is None else self.valid[:, :tokens].sum(1).tolist()

    def _may_crop(self, lengths: list[int]) -> bool:
        pool = self.pool
        if bool((pool.first.cpu() > pool.pages.new_tensor(lengths)[:, None] // PAGE).any()):
            return False
        if self.evict is None or not bool(pool.first.any()):
            return True
        certified = pool.certified(self.evict.log_eps, self.evict.bounds, self.evict.window, lengths)
        return bool((pool.first <= certified).all())

    def _after(self, tokens: int, valid: Tensor | None, phase: Tensor | None) -> PagedCache:
        self.pool.before = -1
        return PagedCache.of(self.pool, self.evict, tokens=tokens, valid=valid, phase=phase, angle=self.angle)

    def look(self, q: Tensor, k: Tensor, given: SoftmaxOptions) -> None:
        """Bring back keys as :meth:`Eviction.look` does, where keys may be evicted."""
        if self.evict is not None:
            self.evict.look(self.pool, q, k, given)

    def to(self, device: torch.device | str) -> PagedCache:
        """A copy on another device; dtypes stay."""
        other = copy.deepcopy(self)
        for name, x in other.pool.tensors().items():
            setattr(other.pool, name, x.to(device))
        valid, phase, angle = (None if x is None else x.to(device) for x in (other.valid, other.phase, other.angle))
        evict = None if other.evict is None else other.evict.to(device)
        seen = {"tokens": self.tokens, "valid": valid, "phase": phase, "angle": angle}
        return PagedCache.of(other.pool, evict, **seen)

    def detach(self) -> PagedCache:
        """Itself: pages have no history of gradients."""
        return self


def key_heads(q: Tensor, v: Tensor, gate: Gate) -> int:
    """G, or H where each query head turns the keys by angles of its own."""
    turned = gate.angle is not None and gate.angle.ndim > 1 and gate.angle.shape[2] > 1
    return q.shape[2] if turned else v.shape[2]
