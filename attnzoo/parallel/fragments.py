"""Which stretches of a row of tokens each rank has: data, from which all else is derived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attnzoo.parallel.collectives import Works, gather


class Fragment(NamedTuple):
    """The tokens from ``start`` to ``stop`` (not itself one of them), which are on ``rank``."""

    start: int
    stop: int
    rank: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fragments:
    """The fragments of a row of T tokens over the ranks of a process group.

    A rank keeps its fragments one after the other, in the order of the text, as its rows. Made by :meth:`contiguous`,
    :meth:`zigzag`, :meth:`balanced` or, of any table, :meth:`of`.

    Args:
        table: in the order of the text, without gaps; empty ones are left out.
        ranks: how many share the row.
        borders: of the documents packed into the row, 0 to T.
        group: of ``torch.distributed``; None for the default one.
    """

    table: tuple[Fragment, ...]
    ranks: int
    borders: tuple[int, ...]
    group: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, table: Iterable[tuple[int, int, int]], over: Any, tokens: Any = None) -> Fragments:
        """Any table of (start, stop, rank), in any order.

        Args:
            over: how many ranks share the row, or their process group or one-dimensional device mesh.
            tokens: T, or the borders 0 to T of packed documents (``cu_seqlens``); None: one document.

        Raises:
            ValueError: fragments with gaps or that overlap, ranks that do not exist, one without tokens, or borders
                that do not rise from 0 to T.
        """
        ranks, group = _ranks(over)
        rows = sorted(Fragment(*map(int, row)) for row in table)
        rows = [row for row in rows if row.size]
        borders = _borders(rows[-1].stop if tokens is None and rows else tokens)
        if borders[-1] < ranks:
            raise ValueError(f"tokens: expected at least one for each of {ranks} ranks, got {borders[-1]}")
        at = 0
        for row in rows:
            if row.start != at or row.stop < row.start:
                raise ValueError(f"table: expected a fragment from token {at} on, got {tuple(row)}")
            if not 0 <= row.rank < ranks:
                raise ValueError(f"table: expected ranks from 0 to {ranks - 1}, got {tuple(row)}")
            at = row.stop
        if at != borders[-1]:
            raise ValueError(f"table: expected fragments of all {borders[-1]} tokens, got {at}")
        idle = set(range(ranks)) - {row.rank for row in rows}
        if idle:
            raise ValueError(f"table: expected tokens for each of {ranks} ranks, got none for rank {min(idle)}")
        return cls(tuple(rows), ranks, borders, group)

    @classmethod
    def contiguous(cls, tokens: Any, over: Any) -> Fragments:
        """One fragment per rank, as equal as can be; arguments as :meth:`of`'s."""
        ranks, _ = _ranks(over)
        return cls.of(((a, b, rank) for rank, (a, b) in enumerate(_equal(_borders(tokens)[-1], ranks))), over, tokens)

    @classmethod
    def zigzag(cls, tokens: Any, over: Any) -> Fragments:
        """An early and a late fragment per rank, so that all have as many pairs of a causal attention."""
        ranks, _ = _ranks(over)
        spans = enumerate(_equal(_borders(tokens)[-1], 2 * ranks))
        return cls.of(((a, b, min(n, 2 * ranks - 1 - n)) for n, (a, b) in spans), over, tokens)

    @classmethod
    def balanced(cls, work: Sequence[float] | Tensor, over: Any, tokens: Any) -> Fragments:
        """One fragment per rank, each with the same share of the work.

        Args:
            work: of equal blocks of tokens, such as the blocks that pruning keeps for each block of rows.
            over, tokens: as :meth:`of`'s.

        Raises:
            ValueError: no work, or less than nothing.
        """
        (ranks, _), T = _ranks(over), _borders(tokens)[-1]
        shares = torch.as_tensor(work, dtype=torch.float64).flatten().cpu()
        if not len(shares) or bool((shares < 0).any()) or not float(shares.sum()) > 0:
            raise ValueError(f"work: expected numbers of 0 or more, and some above, got {shares.tolist()[:8]}")
        done = torch.cat([shares.new_zeros(1), shares.cumsum(0)]) / shares.sum()
        at = [int(torch.searchsorted(done, rank / ranks)) / len(shares) for rank in range(1, ranks)]
        cuts = [0, *(round(share * T) for share in at), T]
        for rank in range(1, ranks):  # every rank has a token
            cuts[rank] = min(max(cuts[rank], cuts[rank - 1] + 1), T - ranks + rank)
        return cls.of(((a, b, rank) for rank, (a, b) in enumerate(pairwise(cuts))), over, tokens)

    @property
    def tokens(self) -> int:
        """T, of the whole row."""
        return self.borders[-1]

    @property
    def rank(self) -> int:
        """The number of this process in the group.

        Raises:
            ValueError: the process group has another number of ranks.
        """
        if self.ranks == 1 and not dist.is_initialized():
            return 0
        size = dist.get_world_size(self.group) if dist.is_initialized() else 1
        if size != self.ranks:
            raise ValueError(f"fragments: expected a process group of {self.ranks} ranks, got one of {size}")
        return dist.get_rank(self.group)

    def of_rank(self, rank: int) -> list[Fragment]:
        """The fragments of a rank, in the order in which it keeps them."""
        return [row for row in self.table if row.rank == rank]

    @property
    def own(self) -> list[Fragment]:
        """The fragments of this process."""
        return self.of_rank(self.rank)

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each fragment of this process."""
        return [row.size for row in self.own]

    @property
    def slots(self) -> int:
        """The most fragments that a rank has."""
        return max(len(self.of_rank(rank)) for rank in range(self.ranks))

    def slot(self, row: Fragment) -> int:
        """The number of fragments that a fragment's rank has before it."""
        return self.of_rank(row.rank).index(row)

    def count(self, rank: int) -> int:
        """The number of tokens of a rank."""
        return sum(row.size for row in self.of_rank(rank))

    def index(self, rank: int) -> Tensor:
        """The places in the whole row of a rank's tokens, ``[n]`` int64."""
        return torch.cat([torch.arange(row.start, row.stop) for row in self.of_rank(rank)])

    def shard(self, *xs: Tensor, dim: int = 1) -> Any:
        """This rank's rows of whole rows, one tensor or a tuple of them.

        Raises:
            ValueError: one that has not T tokens along ``dim``.
        """
        for x in xs:
            if x.shape[dim] != self.tokens:
                raise ValueError(f"x: expected {self.tokens} tokens along axis {dim}, got shape {tuple(x.shape)}")
        found = tuple(torch.cat([x.narrow(dim, row.start, row.size) for row in self.own], dim) for x in xs)
        return found[0] if len(found) == 1 else found

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole rows, on every rank, from this rank's; called by all of them. Its gradient is their sum."""
        if self.ranks == 1:
            return x
        (pieces,), _ = self.of_all_tokens(x.movedim(dim, 0)[None])
        return torch.cat(pieces, 1)[0].movedim(0, dim)

    def of_all_tokens(self, *rows: Tensor) -> tuple[list[list[Tensor]], Tensor]:
        """The rows of all fragments, gathered: for each tensor ``rows [B, n, ...]`` of this rank a list with one tensor
        per fragment in the order of the text; and the knot for :func:`~attnzoo.parallel.collectives.tied`."""
        works = Works()
        arrived, knot = self.send(works, *rows)
        works.wait()
        return arrived(), knot

    def send(self, works: Works, *rows: Tensor) -> tuple[Callable[[], list[list[Tensor]]], Tensor]:
        """A function that gives the lists of :meth:`of_all_tokens`, called when ``works`` have ended; and the knot."""
        most = max(map(self.count, range(self.ranks)))
        if self.count(self.rank) < most:
            rows = tuple(F.pad(x, (0, 0) * (x.ndim - 2) + (0, most - x.shape[1])) for x in rows)
        gathered, knot = gather(self.group, self.ranks, *rows, works=works)

        def arrived() -> list[list[Tensor]]:
            ends = [(rank, most - self.count(rank)) for rank in range(self.ranks)]
            sizes = [size for rank, end in ends for size in (*(row.size for row in self.of_rank(rank)), end)]
            at = {row: self.slot(row) + sum(len(self.of_rank(r)) + 1 for r in range(row.rank)) for row in self.table}
            found = []
            for x in gathered:
                cuts = x.transpose(0, 1).flatten(1, 2).split(sizes, 1)
                found.append([cuts[at[row]] for row in self.table])
            return found

        return arrived, knot

    def cut(self, x: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """The rows of this rank, cut into its fragments.

        Raises:
            ValueError: another number of rows.
        """
        if x.shape[dim] != self.count(self.rank):
            have = self.count(self.rank)
            raise ValueError(f"x: expected the {have} tokens of rank {self.rank}, got shape {tuple(x.shape)}")
        return torch.split(x, self.sizes, dim)

    def own_pieces(self, x: Tensor) -> list[Tensor]:
        """A tensor per fragment in the order of the text: this rank's rows, and empty ones for other ranks'."""
        mine = iter(self.cut(x))
        return [next(mine) if row.rank == self.rank else x[:, :0] for row in self.table]

    def has_before(self, row: Fragment, tokens: int) -> bool:
        """Whether this rank has the last ``tokens`` tokens before a fragment."""
        return all(one.rank == self.rank for one in self.table if row.start - tokens < one.stop <= row.start)

    def positions(self) -> Tensor:
        """The place of each of this rank's tokens in its document, ``[n]`` int64."""
        index, borders = self.index(self.rank), torch.tensor(self.borders)
        return index - borders[torch.searchsorted(borders, index, right=True) - 1]

    def begins(self) -> Tensor | None:
        """Whether each of this rank's tokens is the first of a document, ``[n]`` bool; None where there is but one."""
        return None if len(self.borders) == 2 else self.positions() == 0

    @property
    def have_whole_documents(self) -> bool:
        """Whether no document is cut: ranks need nothing of each other."""
        return all(row.start in self.borders for row in self.table)

    @property
    def own_borders(self) -> list[int]:
        """The borders of documents among this rank's rows, 0 and their number too; the ends of fragments are some."""
        begins = self.positions() == 0
        begins[0] = True
        return [*begins.nonzero()[:, 0].tolist(), len(begins)]

    def repeat(self, n: int) -> Fragments:
        """The fragments of a row in which each token stands for n."""
        table = tuple(Fragment(n * a, n * b, rank) for a, b, rank in self.table)
        return replace(self, table=table, borders=tuple(n * x for x in self.borders))


def _ranks(over: Any) -> tuple[int, Any]:
    """The number of ranks, and their process group (None where only their number is known)."""
    if isinstance(over, int) and not isinstance(over, bool):
        if over < 1:
            raise ValueError(f"over: expected at least one rank, got {over}")
        return over, None
    group = over.get_group() if hasattr(over, "get_group") else over
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"over: expected a number of ranks, a process group or a device mesh, got {over!r}")
    return dist.get_world_size(group), group


def _borders(tokens: Any) -> tuple[int, ...]:
    """The borders ``[0, ..., T]`` of documents: those given, or 0 and T of one."""
    found = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    borders = (0, found) if isinstance(found, int) else tuple(int(x) for x in found or ())
    if len(borders) < 2 or borders[0] != 0 or borders[-1] < 1 or any(a > b for a, b in pairwise(borders)):
        raise ValueError(f"tokens: expected a number above 0, or borders that rise from 0, got {tokens!r}")
    return tuple(dict.fromkeys(borders))


def _equal(tokens: int, parts: int) -> Iterable[tuple[int, int]]:
    """Spans of as equal sizes as can be."""
    return pairwise(accumulate((tokens // parts + (n < tokens % parts) for n in range(parts)), initial=0))
