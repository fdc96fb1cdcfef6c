"""Keys of a beginning that later sequences share: whole pages, to which nobody writes, and what lies behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.forms.caches.pages.pool import PAGE, KeyPool
from attnzoo.forms.caches.state import KVCache


@dataclass(eq=False)
class PagedPrefix:
    """The first tokens of a sequence as a layer remembers them, with the whole pages of their keys in a pool.

    Args:
        pool: of the rows that share the pages.
        like: the state after these tokens; its keys and values have no channels.
        k, v: those of the tokens behind the whole pages, ``[1, n, heads, dim]``.
        pages: the whole pages, ``[G, n]`` int32, on the host; none before :meth:`hold` and after :meth:`release`.
    """

    pool: KeyPool
    like: KVCache
    k: Tensor
    v: Tensor
    pages: Tensor

    @staticmethod
    def of(pool: KeyPool, state: KVCache) -> PagedPrefix:
        """What ``state`` remembers of one sequence whose keys come to lie in a row of ``pool``, without its pages."""
        whole = len(state) // PAGE * PAGE
        k, v = (x[:, whole:].clone() for x in (state.k, state.v))
        no_k, no_v = (x.new_empty(*x.shape[:3], 0) for x in (state.k, state.v))
        like = KVCache(no_k, no_v, state.log_decay, state.valid, state.phase, state.angle)
        return PagedPrefix(pool, like, k, v, pool.pages[0, :, :0].clone())

    def __len__(self) -> int:
        return len(self.like)

    def hold(self, row: int) -> None:
        """Keep the whole pages of ``row``, which has these tokens first."""
        self.pages = self.pool.pages[row, :, : len(self) // PAGE].clone()
        self.pool.hold(self.pages)

    def share(self, row: int, tokens: int) -> None:
        """Give the empty row ``row`` the whole pages of the first ``tokens`` tokens."""
        self.pool.share(row, self.pages[:, : tokens // PAGE])

    def release(self) -> None:
        """Keep no page any more; one that belongs to no row either is free."""
        self.pool.release(self.pages)
        self.pages = self.pages[:, :0].clone()

    def crop(self, tokens: int) -> KVCache:
        """The state after the first ``tokens`` tokens, with keys and values as their pages hold them.

        Raises:
            ValueError: as :meth:`KVCache.crop`.
        """
        like = self.like.crop(tokens)
        k, v = self.pool.read(self.pages[:, : -(-tokens // PAGE)])
        v = v[:, :, :: k.shape[2] // like.v.shape[2]]  # a pool has them for each head of keys
        k, v = (torch.cat([x.to(last.dtype), last], 1)[:, :tokens] for x, last in ((k, self.k), (v, self.v)))
        return replace(like, k=k, v=v)
