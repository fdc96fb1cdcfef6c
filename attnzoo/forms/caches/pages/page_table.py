"""Which pages of a pool belong to which sequences and heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from attnzoo.forms.caches.device_memory import check_memory, size_of
from attnzoo.kernels.decode.eight_bits import E4M3, longer, quantised
from attnzoo.kernels.decode.state import GateState, KeyPages, PagedState, PageTable
from attnzoo.precision import wide_dtype

PAGE = 64  # tokens of a page
PAGED = ("k", "v", "exponents", "decay")  # what has a row per page
TABLES = ("table", "page_sum", "n_log", "closed", "k_norm")  # what has an entry per page of a sequence
CHUNK = 16  # a table grows by multiples of this many pages


class PoolSizes(NamedTuple):
    """Sizes of a pool: its sequences, and the heads and channels of each.

    Args:
        B: sequences.
        G: key heads.
        R: query heads per key head; 1 is enough where nothing decays.
        K: channels of keys.
        V: channels of values.
    """

    B: int
    G: int
    R: int
    K: int
    V: int


@dataclass(eq=False)
class Pages:
    """Pages of 64 keys of one key/value head of one sequence, and where those of each sequence are.

    Everything is changed in place, except that growth puts larger tensors in the place of ``k``, ``v``, ``decay`` (more
    pages) or of what TABLES names (longer sequences). Sequences have their own lengths:
    padding is not stored. A page may belong to several sequences (beams, a common prefix); it is copied when one of
    them writes to it.

    The decay between two tokens j <= t of head h is ``page_sum[t's page] - page_sum[j's page]`` in float64 plus
    ``decay[t] - decay[j]`` in float32: its error does not grow with the length. Closed gates (at most -1e4) add nothing
    to these sums. A row sees no key before the last one of them that is not after it (``since``).

    Args:
        k: ``[P, PAGE, K]``, RoPE's keys in the frame of the first token; bits, uint8, where they have 8.
        v: ``[P, PAGE, V]``, likewise.
        decay: running sums of the log decays within the page, up to and with each token, for the R = H / G query heads
            of the page's group, ``[P, PAGE, R]`` float32 (float64 beside float64 keys); None where nothing decays.
        table: page of each 64 tokens, ``[B, G, N]`` int32; -1 for evicted ones and for those to come.
        first: first live page of each head, ``[B, G]`` int32.
        length: tokens so far, ``[B]`` int32.
        page_sum: sum of the log decays of all tokens before the page, ``[B, H, N]`` float64, or None.
        total: that of all tokens, ``[B, H]`` float64, or None.
        since: the last token with a closed gate, 0 if there is none, ``[B, H]`` int32, or None.
        n_log: ``log sum_l exp(-c_l)`` over the tokens up to the end of the page, c their running sums, ``[B, H, N]``
            float64, or None.
        closed: in bit i whether the page's token i has a closed gate, ``[B, H, N]`` int64, or None.
        k_norm: at least the length of the page's longest key, ``[B, G, N]`` float32.
        lengths: ``length``, on the host.
        pages: ``table``, on the host.
        refs: sequences and kept beginnings that each page belongs to, ``[P]`` int32, on the host.
        free: pages that belong to none.
        mark: names its state, for :class:`~attnzoo.forms.caches.pages.paged_cache.PagedCache`.
        before: the state that the last call went on from; -1 where there is no way back.
        marks: given so far.
        looked: tokens of each sequence when it was last looked for keys to evict.
        exponents: of keys and values in 8 bits, ``[P, PAGE, 2]`` int8 (``kernels/decode/eight_bits.py``), or None.
        spare: called where there are too few free pages, before the pool grows: releases some that no sequence has, or
            says that there are none; or None.
    """

    k: Tensor
    v: Tensor
    decay: Tensor | None
    table: Tensor
    first: Tensor
    length: Tensor
    page_sum: Tensor | None
    total: Tensor | None
    since: Tensor | None
    n_log: Tensor | None
    closed: Tensor | None
    k_norm: Tensor
    lengths: list[int]
    pages: Tensor
    refs: Tensor
    free: list[int] = field(repr=False)
    mark: int = 0
    before: int = -1
    marks: int = 0
    looked: list[int] = field(default_factory=list)
    exponents: Tensor | None = None
    spare: Callable[[], bool] | None = None

    def state(self) -> PagedState:
        """The pool's tensors as the kernels over pages take them."""
        gates = None
        if self.decay is not None:
            gates = GateState(self.decay, self.page_sum, self.total, self.since, self.n_log, self.closed)  # type: ignore[arg-type]
        table = PageTable(self.table, self.first, self.length)
        return PagedState(KeyPages(self.k, self.v, self.k_norm, self.exponents), table, gates)

    @classmethod
    def empty(
        cls, sizes: PoolSizes, *, dtype: torch.dtype, device: torch.device | str = "cpu", decays: bool = True,
        pages: int = 0, tokens: int = 0, **more: Any,
    ) -> Self:  # fmt: skip
        """A pool of empty sequences.

        Args:
            sizes: of the sequences.
            dtype: of keys and values; ``torch.float8_e4m3fn`` for 8 bits with exponents.
            decays: whether the tokens come with log decays.
            pages: how many there are from the start.
            tokens: of the longest sequence that the tables hold from the start.
            more: fields of a class that extends this one.
        """
        B, G, R, K, V = sizes
        N, H, wide = max(CHUNK, -(-tokens // PAGE)), G * R, wide_dtype(dtype)
        eight, dtype = dtype == E4M3, torch.uint8 if dtype == E4M3 else dtype
        host = "meta" if torch.device(device).type == "meta" else "cpu"  # only counted there

        def zeros(*shape: int, of: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        def sums(*shape: int, of: torch.dtype = torch.float64) -> Tensor | None:
            return zeros(*shape, of=of) if decays else None

        return cls(
            zeros(pages, PAGE, K, of=dtype), zeros(pages, PAGE, V, of=dtype),
            sums(pages, PAGE, R, of=wide), zeros(B, G, N, of=torch.int32).fill_(-1),
            zeros(B, G, of=torch.int32), zeros(B, of=torch.int32), sums(B, H, N), sums(B, H),
            sums(B, H, of=torch.int32), sums(B, H, N), sums(B, H, N, of=torch.int64),
            zeros(B, G, N, of=torch.float32), [0] * B,
            torch.full((B, G, N), -1, dtype=torch.int32, device=host),
            torch.zeros(pages, dtype=torch.int32, device=host),
            [] if host == "meta" else list(reversed(range(pages))), looked=[0] * B,
            exponents=zeros(pages, PAGE, 2, of=torch.int8) if eight else None, **more,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Pages that share one product of transitions, and change until all of them are full; 0 where none carries the
        keys."""
        return 0

    def open_page(self, tokens: int) -> int:
        """The first page that changes with tokens after the first ``tokens``."""
        each = max(1, self.group)
        return tokens // (PAGE * each) * each

    @property
    def sizes(self) -> PoolSizes:
        """The sizes of its sequences."""
        B, G, _ = self.table.shape
        return PoolSizes(B, G, 1 if self.decay is None else self.decay.shape[2], self.k.shape[2], self.v.shape[2])

    def new_mark(self) -> int:
        """A name that no state of the pool has had."""
        self.marks += 1
        return self.marks

    def live(self) -> Tensor:
        """Pages that each head of each sequence has, ``[B, G]`` int64, on the host."""
        return (self.pages >= 0).sum(-1)

    def used(self) -> int:
        """Pages that belong to a sequence; one that belongs to several counts once."""
        return len(self.refs) - len(self.free)

    def bytes(self) -> int:
        """Memory of all tensors on the device."""
        return sum(size_of(x) for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors on the device, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pages", "refs")}
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    def of_pages(self) -> dict[str, Tensor]:
        """The tensors that have a row per page."""
        return {name: x for name, x in self.tensors().items() if name in PAGED}

    def _of_rows(self) -> dict[str, Tensor]:
        """The tensors that have a row per sequence."""
        return {name: x for name, x in self.tensors().items() if name not in PAGED}

    def reserve(self, counts: Sequence[int]) -> None:
        """Pages for ``counts[b]`` more tokens of each sequence b, written to by none else.

        Raises:
            MemoryError: they do not fit into the memory of the device. Nothing has changed then.
        """
        G, (now, more) = self.table.shape[1], self.pages.new_tensor([self.lengths, list(counts)]).long()
        opened = now.new_tensor([self.open_page(n) for n in self.lengths])
        written = ((now > opened * PAGE) & (more > 0)).nonzero()[:, 0]  # sequences that write to pages that they have
        numbers = opened[written, None] + torch.arange(max(1, self.group), device=now.device)  # [w, pages of a group]
        places = numbers.clamp(max=self.pages.shape[2] - 1)[:, None].expand(-1, G, -1)
        ids = self.pages[written].long().gather(2, places)
        there = (numbers * PAGE < now[written, None])[:, None] & (ids >= 0)
        common = there.nonzero()[self.refs[ids[there]] > 1]
        shared = [(int(written[i]), g, int(numbers[i, n])) for i, g, n in common.tolist()]
        spans = [
            (self._reserved(b), -(-(n + extra) // PAGE)) if -n % PAGE < extra else (0, 0)
            for b, (n, extra) in enumerate(zip(self.lengths, counts, strict=True))
        ]
        missing = G * sum(max(0, stop - start) for start, stop in spans) + len(shared)
        if not missing:
            return
        self._grow(missing, max(stop for _, stop in spans))
        for b, g, n in shared:
            old = int(self.pages[b, g, n])
            if int(self.refs[old]) == 1:  # the other sequences have theirs by now
                continue
            [new] = self._take(1)
            for x in self.of_pages().values():
                x[new] = x[old]
            self.refs[old] -= 1
            self.pages[b, g, n] = new
            self.table[b, g, n] = new
        for b, (start, stop) in enumerate(spans):
            if stop > start:
                self.pages[b, :, start:stop] = self.pages.new_tensor(self._take(G * (stop - start))).view(G, -1)
                self.table[b].copy_(self.pages[b])

    def _reserved(self, b: int) -> int:
        """The number of pages, evicted ones too, that sequence b has for its tokens and for those that may follow."""
        n = -(-self.lengths[b] // PAGE)
        return n + int((self.pages[b, 0, n:] >= 0).sum())

    def _take(self, number: int) -> list[int]:
        """Free pages, now of one sequence."""
        taken = [self.free.pop() for _ in range(number)]
        self.refs[taken] = 1
        return taken

    def _grow(self, wanted: int, width: int) -> None:
        """At least ``wanted`` free pages, and tables of ``width`` pages."""
        while wanted > len(self.free) and self.spare is not None and self.spare():
            pass
        missing, P, N = wanted - len(self.free), len(self.refs), self.pages.shape[2]
        if missing > 0:
            size = P + max(missing, P // 4)
            paged = self.of_pages()
            each = sum(x.shape[1:].numel() * x.element_size() for x in paged.values())
            old = max(size_of(x) for x in paged.values())  # stands beside its copy for a moment
            tokens = sum(self.lengths)
            check_memory((size - P) * each + old, self.k.device, f"cache of {tokens} tokens, {size - P} pages more")
            for name, x in paged.items():
                setattr(self, name, resized(x, 0, size))
            self.refs = resized(self.refs, 0, size)
            self.free[:0] = reversed(range(P, size))
        if width > N:
            size = -(-max(width, N + N // 4) // CHUNK) * CHUNK
            for name, x in self._of_rows().items():
                if name in TABLES:
                    setattr(self, name, resized(x, 2, size, -1 if name == "table" else 0))
            self.pages = resized(self.pages, 2, size, -1)

    @torch.no_grad()
    def restore(self, b: int, g: int, found: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Put the last evicted pages of head g of sequence b back, by number and with all that :meth:`of_pages` names.

        Raises:
            MemoryError: as :meth:`reserve`.
        """
        self._grow(len(found), 0)
        ids = self._take(len(found))
        for id, page in zip(ids, found.values(), strict=True):
            for name, x in self.of_pages().items():
                x[id] = page[name].to(x.device)
        self.pages[b, g, list(found)] = self.pages.new_tensor(ids)
        self.table[b, g].copy_(self.pages[b, g])
        self.first[b, g] = min(found)

    @torch.no_grad()
    def compact(self) -> None:
        """Give the memory of all free pages back to the device."""
        vars(self).update(self._compacted())
        self.table.copy_(self.pages)

    def _compacted(self) -> dict[str, Any]:
        """The fields that :meth:`compact` changes, with their new values."""
        ids = (self.refs > 0).nonzero()[:, 0]
        place = torch.full_like(self.refs, -1)
        place[ids] = torch.arange(len(ids), dtype=place.dtype, device=place.device)
        pages = torch.where(self.pages >= 0, place[self.pages.long()], -1)
        kept = {name: x[ids.to(x.device)] for name, x in self.of_pages().items()}
        return {**kept, "pages": pages, "refs": self.refs[ids], "free": []}

    def __getstate__(self) -> dict[str, Any]:
        """A pool is copied and saved without its free pages."""
        kept = self._compacted() if len(self.refs) else {}
        return {**vars(self), **kept, "table": kept.get("pages", self.pages).to(self.table.device)}

    def hold(self, ids: Tensor) -> None:
        """Add one user to each of the pages ``ids``, once per occurrence."""
        ids = ids.flatten().long()
        self.refs.index_add_(0, ids, self.refs.new_ones(ids.shape))

    def release(self, ids: Tensor) -> None:
        """Subtract one user from each of the pages ``ids``, once per occurrence; pages without any are free."""
        ids = ids.flatten().long()
        self.refs.index_add_(0, ids, self.refs.new_full(ids.shape, -1))
        self.free += ids.unique()[self.refs[ids.unique()] == 0].tolist()

    @torch.no_grad()
    def select(self, index: Tensor) -> None:
        """Go on with the sequences ``index``, in that order; one may be named several times, and keeps its pages once.

        Args:
            index: row numbers, int32 or int64. As many as there are sequences change the tensors in place.
        """
        rows = index.cpu().long()
        kept = self.pages[rows]
        for n, mine in zip((self.lengths[b] for b in rows.tolist()), kept, strict=True):
            mine[:, -(-n // PAGE) :] = -1  # reserved ones are not for two
        self.hold(kept[kept >= 0])
        self.release(self.pages[self.pages >= 0])
        self.pages, self.lengths = kept, [self.lengths[b] for b in rows.tolist()]
        self.looked = [self.looked[b] for b in rows.tolist()]
        picked = {name: x[index] for name, x in self._of_rows().items()}
        for name, x in picked.items():
            if x.shape == getattr(self, name).shape:
                getattr(self, name).copy_(x)
            else:
                setattr(self, name, x)
        self.table.copy_(kept)

    def in_eight_bits(self) -> Self:
        """A pool of these keys and values in 8 bits, to be read; norms hold for the keys that the bits stand for."""
        (k, of_keys), (v, of_values) = quantised(self.k), quantised(self.v)
        exponents, k_norm = torch.stack([of_keys, of_values], -1), self.k_norm * longer(self.k.shape[2])
        decay = None if self.decay is None else self.decay.float()
        return replace(self, k=k, v=v, exponents=exponents, k_norm=k_norm, decay=decay)

    def apart(self) -> Self:
        """A view of these pages from which some can be evicted while this pool keeps them; no token is added to it."""
        own = {name: getattr(self, name).clone() for name in ("pages", "table", "first", "refs")}
        return replace(self, **own, free=list(self.free), looked=list(self.looked))

    @torch.no_grad()
    def reset(self, row: int) -> None:
        """Forget a sequence."""
        self.release(self.pages[row][self.pages[row] >= 0])
        self.pages[row], self.lengths[row], self.looked[row] = -1, 0, 0
        for name, x in self._of_rows().items():
            x[row] = -1 if name == "table" else 0

    def share(self, row: int, ids: Tensor) -> None:
        """The empty sequence ``row`` begins with the pages ``ids [G, n]`` of others, -1 for none, which are whole."""
        self.hold(ids[ids >= 0])
        self.pages[row, :, : ids.shape[1]] = ids

    @torch.no_grad()
    def adopt(self, row: int, other: Pages, tokens: int) -> None:
        """The sequence ``row``, empty but for pages that it may :meth:`share`, becomes a copy of the one of ``other``.

        Args:
            row: its number.
            other: with heads and channels as here, and one sequence.
            tokens: it has pages for so many, those of ``other`` among them.

        Raises:
            MemoryError: as :meth:`reserve`.
        """
        n, end = -(-tokens // PAGE), -(-other.lengths[0] // PAGE)
        self._grow(0, n)
        copied = (other.pages[0, :, :end] >= 0) & (self.pages[row, :, :end] < 0)  # [G, end]
        wanted = torch.cat([copied, copied.new_ones(len(copied), n - end)], 1)
        self._grow(int(wanted.sum()), n)
        self.pages[row, :, :n][wanted] = self.pages.new_tensor(self._take(int(wanted.sum())))
        to, source = self.pages[row, :, :end][copied].long(), other.pages[0, :, :end][copied].long()
        for name, x in self.of_pages().items():
            x[to] = getattr(other, name)[source]
        for name, x in self._of_rows().items():
            new = getattr(other, name)[0]
            if name not in TABLES:
                x[row] = new
            elif name != "table":
                x[row, :, :end] = new[:, :end]
        self.table[row].copy_(self.pages[row])
        self.lengths[row], self.looked[row] = other.lengths[0], other.looked[0]


def resized(x: Tensor, dim: int, size: int, value: int = 0) -> Tensor:
    """``x`` cut or filled up with ``value`` to ``size`` along ``dim``."""
    new = x.new_full((*x.shape[:dim], size, *x.shape[dim + 1 :]), value)
    both = min(size, x.shape[dim])
    new.narrow(dim, 0, both).copy_(x.narrow(dim, 0, both))
    return new
