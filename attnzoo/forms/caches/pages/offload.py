"""Pages of keys that are kept in the host's memory, until a row needs them after all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds
from attnzoo.forms.caches.pages.pool import KeyPool
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.readout import logits_of


@dataclass(eq=False)
class Offload:
    """The pages that a pool has moved to the host, and the bounds of rows to come that it went by.

    These are the largest values so far. A row that breaks them is looked at before it attends: the pages that could
    give it more than eps come back first. So no row loses more, whatever it asks.

    Args:
        pages: by their number in the sequence, the tensors of each page, for each key head of each sequence.
        query: the longest scaled query so far, ``[B, H]``.
        own: the largest negated score of a row with itself so far, ``[B, H]``.
        returned: pages that have come back so far.
    """

    pages: list[list[dict[int, dict[str, Tensor]]]]
    query: Tensor
    own: Tensor
    returned: int = 0

    @staticmethod
    def empty(B: int, G: int, H: int, device: torch.device) -> Offload:
        """No page on the host, and no row seen."""
        lowest = torch.full((B, H), -torch.inf, dtype=torch.float64, device=device)
        return Offload([[{} for _ in range(G)] for _ in range(B)], lowest, lowest.clone())

    @property
    def bounds(self) -> QueryBounds:
        return QueryBounds(self.query, self.own)

    def keep(self, pool: KeyPool, gone: Tensor) -> None:
        """Copy the pages ``gone`` (``[n, 3]``: sequence, head, number), which are about to leave the pool."""
        for b, g, n in gone.tolist():
            id = int(pool.pages[b, g, n])
            self.pages[b][g][n] = {name: x[id].to("cpu", copy=True) for name, x in pool.of_pages().items()}

    def look(
        self, pool: KeyPool, q: Tensor, k: Tensor, given: SoftmaxOptions, log_eps: float, window: int | None
    ) -> None:
        """Bring back what the rows of a call may need.

        Args:
            pool: before their tokens are added.
            q: scaled queries ``[B, H, T, K]``.
            k: their own keys ``[B, H, T, K]``.
            given: options of the call; ``valid`` says which rows exist.
            log_eps: logarithm of the weight that they may lose.
            window: of the layer, or None.
        """
        q, k = q.double(), k.double()
        longest, against = q.norm(dim=-1), -logits_of((q * k).sum(-1), given)
        if given.valid is not None:
            longest, against = (x.masked_fill(~given.valid[:, None], -torch.inf) for x in (longest, against))
        now = QueryBounds(longest.amax(-1), against.amax(-1))
        if bool(pool.first.any()):
            self.bring_back(pool, pool.certified(log_eps, now, window))
        self.query, self.own = self.query.maximum(now.query), self.own.maximum(now.own)

    def bring_back(self, pool: KeyPool, first: Tensor) -> None:
        """Put the pages from ``first [B, G]`` on back into the pool."""
        for b, g in (first < pool.first).nonzero().tolist():
            start, stop = int(first[b, g]), int(pool.first[b, g])
            pool.restore(b, g, {n: self.pages[b][g][n] for n in range(start, stop)})
            for n in range(start, stop):
                del self.pages[b][g][n]
            self.returned += stop - start

    def copy(self) -> Offload:
        """A copy to which pages may be added; the tensors of its pages are shared."""
        return replace(self, pages=[[dict(head) for head in row] for row in self.pages])

    def adopt(self, row: int, other: Offload) -> None:
        """Row ``row`` goes on as the only one of ``other``, whose pages are shared: nobody writes to them."""
        self.pages[row] = [dict(head) for head in other.pages[0]]
        self.query[row], self.own[row] = other.query[0], other.own[0]

    def clear(self, row: int) -> None:
        """Forget row ``row``: none of its keys is on the host or has been seen."""
        self.adopt(row, Offload.empty(1, len(self.pages[row]), self.query.shape[1], self.query.device))

    def select(self, index: Tensor) -> None:
        """Go on with the sequences ``index``, in that order."""
        self.pages = [[dict(head) for head in self.pages[b]] for b in index.tolist()]
        self.query, self.own = self.query[index], self.own[index]
