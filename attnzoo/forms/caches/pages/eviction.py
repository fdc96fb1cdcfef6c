"""The rule by which keys leave pages: FoX's, PaTH's and all others that lie in a pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds
from attnzoo.algebra.transitions import heads_first
from attnzoo.forms.caches.pages.offload import Offload
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool
from attnzoo.forms.options import SoftmaxOptions


@dataclass(frozen=True, eq=False)
class Eviction:
    """The rule by which a cache evicts keys.

    Args:
        log_eps: logarithm of the weight that later rows may lose in all.
        bounds: of the rows to come; None: only the window and closed gates say what is not needed.
        window: of the layer, or None.
        offload: where keys go that may come back; then its bounds count. None: they go for ever.
    """

    log_eps: float
    bounds: QueryBounds | None
    window: int | None = None
    offload: Offload | None = None

    def to(self, device: torch.device | str) -> Eviction:
        """A copy on another device."""
        bounds, away = self.bounds, self.offload
        if bounds is not None:
            score = None if bounds.score is None else bounds.score.to(device)
            bounds = QueryBounds(bounds.query.to(device), bounds.own.to(device), score)
        if away is not None:
            away = replace(away, query=away.query.to(device), own=away.own.to(device))
        return replace(self, bounds=bounds, offload=away)

    def due(self, pool: KeyPool) -> bool:
        """Whether some sequence has got as many tokens as a page has since it was last looked for keys to evict."""
        return any(n >= before + PAGE for n, before in zip(pool.lengths, pool.looked, strict=True))

    def apply(self, pool: KeyPool) -> int:
        """Evict the keys of ``pool`` that no row to come needs; return the number of pages that have become free."""
        away, pool.looked = self.offload, list(pool.lengths)
        bounds, keep = (self.bounds, None) if away is None else (away.bounds, away.keep)
        return pool.evict(self.log_eps, bounds, self.window, keep)

    def look(self, pool: KeyPool, q: Tensor, k: Tensor, given: SoftmaxOptions) -> None:
        """Bring back the keys that the rows of a call may need, before its tokens are added.

        Args:
            q: scaled queries ``[B, H, T, K]``, in the dtype of the computation.
            k: their keys ``[B, T, G, K]``.
            given: options of the call; ``valid`` says which of these exist.
        """
        if self.offload is not None:
            k = heads_first(k.to(pool.k.dtype), q.shape[1], q.dtype)
            self.offload.look(pool, q, k, given, self.log_eps, self.window)

    def of_rows(self, rows: int) -> Eviction:
        """The rule for ``rows`` new sequences, of which no row has been seen."""
        if self.offload is None:
            return self
        (_, H), G = self.offload.query.shape, len(self.offload.pages[0])
        return replace(self, offload=Offload.empty(rows, G, H, self.offload.query.device))
