"""Keys and values of many sequences in pages of one pool, with a table of pages per sequence and head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.pruning import QueryBounds, evictable
from attnzoo.forms.memory import check_room, size_of

PAGE = 64  # tokens of a page
PAGED = ("k", "v", "decay", "factor")  # what has a row per page
TABLES = ("table", "page_sum", "n_log", "k_norm")  # what has an entry per page of a sequence
CHUNK = 16  # a table grows by multiples of this many pages


@dataclass(eq=False)
class KeyPool:
    """Pages of 64 keys of one key/value head of one sequence, and where those of each sequence are.

    Everything is changed in place, except that growth puts larger tensors in the place of ``k``, ``v``, ``decay`` (more
    pages) or of ``table``, ``page_sum``, ``k_norm``, ``n_log`` (longer sequences). Sequences have their own lengths:
    padding is not stored. A page may belong to several sequences (beams, a common prefix); it is copied when one of
    them writes to it.

    The decay between two tokens j <= t of head h is ``page_sum[t's page] - page_sum[j's page]`` in float64 plus
    ``decay[t] - decay[j]`` in float32: its error does not grow with the length. Closed gates (at most -1e4) add nothing
    to these sums. A row sees no key before the last one of them that is not after it (``since``).

    Args:
        k: ``[P, PAGE, K]``, RoPE's keys in the frame of the first token.
        v: ``[P, PAGE, V]``.
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
        k_norm: at least the length of the page's longest key, ``[B, G, N]`` float32.
        lengths: ``length``, on the host.
        pages: ``table``, on the host.
        refs: sequences that each page belongs to, ``[P]`` int32, on the host.
        free: pages that belong to none.
        mark: names its state, for :class:`~attnzoo.forms.paged.PagedCache`.
        before: the state that the last call went on from; -1 where there is no way back.
        marks: given so far.
        looked: whole pages of all sequences when :meth:`evict` was last asked.
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
    k_norm: Tensor
    lengths: list[int]
    pages: Tensor
    refs: Tensor
    free: list[int] = field(repr=False)
    mark: int = 0
    before: int = -1
    marks: int = 0
    looked: int = 0

    @classmethod
    def empty(
        cls, B: int, G: int, R: int, K: int, V: int, *, dtype: torch.dtype, device: torch.device | str = "cpu",
        decays: bool = True, pages: int = 0, tokens: int = 0, **more: Any,
    ) -> Self:  # fmt: skip
        """A pool of B empty sequences.

        Args:
            R: query heads per key head.
            dtype: of keys and values.
            decays: whether the tokens come with log decays.
            pages: room for that many from the start.
            tokens: the tables have room for sequences of that length from the start.
            more: fields of a class that extends this one.
        """
        N, H, wide = max(CHUNK, -(-tokens // PAGE)), G * R, torch.promote_types(dtype, torch.float32)

        def zeros(*shape: int, of: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        def sums(*shape: int, of: torch.dtype = torch.float64) -> Tensor | None:
            return zeros(*shape, of=of) if decays else None

        return cls(
            zeros(pages, PAGE, K, of=dtype), zeros(pages, PAGE, V, of=dtype),
            sums(pages, PAGE, R, of=wide), zeros(B, G, N, of=torch.int32).fill_(-1),
            zeros(B, G, of=torch.int32), zeros(B, of=torch.int32), sums(B, H, N), sums(B, H),
            sums(B, H, of=torch.int32), sums(B, H, N), zeros(B, G, N, of=torch.float32), [0] * B,
            torch.full((B, G, N), -1, dtype=torch.int32), torch.zeros(pages, dtype=torch.int32),
            list(reversed(range(pages))), **more,
        )  # fmt: skip

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
        """All that is on the device."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pages", "refs")}
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    def of_pages(self) -> dict[str, Tensor]:
        """The tensors that have a row per page."""
        return {name: x for name, x in self.tensors().items() if name in PAGED}

    def _of_rows(self) -> dict[str, Tensor]:
        """The tensors that have a row per sequence."""
        return {name: x for name, x in self.tensors().items() if name not in PAGED}

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, log_decay: Tensor | None = None, valid: Tensor | None = None) -> None:
        """Add T tokens to every sequence.

        Args:
            k: ``[B, T, G, K]``.
            v: ``[B, T, G, V]``.
            log_decay: ``[B, T, H]``, <= 0; None where nothing decays.
            valid: the tokens that exist, ``[B, T]`` bool, None for all. The others leave no trace.

        Raises:
            MemoryError: the pool would have to grow beyond the memory of its device. Nothing has changed then.
        """
        (B, T, G, _), device = k.shape, k.device
        order, counts = in_front(B, T, valid, device)
        self.reserve(counts)
        count = torch.tensor(counts, device=device)
        there = torch.arange(T, device=device) < count[:, None]  # [B, T]
        at = self.length[:, None].long() + torch.arange(T, device=device)
        page = (at // PAGE).clamp(max=self.table.shape[2] - 1)
        ids = self.table.gather(2, page[:, None].expand(B, G, T)).transpose(1, 2).long()  # [B, T, G]
        row, token, head = there[..., None].expand(B, T, G).nonzero(as_tuple=True)
        source, to = order[row, token], (ids[row, token, head], at[row, token] % PAGE)
        new = k[row, source, head].to(self.k.dtype)
        self.k[to], self.v[to] = new, v[row, source, head].to(self.v.dtype)
        where = (row * G + head) * self.k_norm.shape[2] + page[row, token]
        self.k_norm.view(-1).scatter_reduce_(0, where, longest(new), "amax")
        if log_decay is not None:
            g = log_decay.double().gather(1, order[..., None].expand_as(log_decay)).masked_fill(~there[..., None], 0.0)
            self._add_gates(g.transpose(1, 2), at, count, (row, token, head, to))
        self.length += count
        self.lengths = [before + n for before, n in zip(self.lengths, counts, strict=True)]

    def _add_gates(self, g: Tensor, at: Tensor, count: Tensor, new: tuple[Any, ...]) -> None:
        """The sums of the gates ``g [B, H, T]`` of the tokens ``at [B, T]``, of which ``count [B]`` exist."""
        total, page_sum, since, n_log, decay = (
            cast(Tensor, x) for x in (self.total, self.page_sum, self.since, self.n_log, self.decay)
        )
        B, H, T = g.shape
        closed = is_closed(g)
        since.copy_(torch.where(closed, at[:, None], 0).amax(-1).maximum(since))
        opened = torch.nn.functional.pad(g.masked_fill(closed, 0.0), (1, 0))
        before = total[..., None] + opened.cumsum(-1)  # [B, H, T + 1]
        N = page_sum.shape[2]
        pages = torch.arange(N, device=g.device) * PAGE - self.length[:, None]  # [B, N]: its first new token
        begins = (pages >= 0) & (pages < count[:, None])
        start = before.gather(2, pages.clamp(0, T)[:, None].expand(B, H, N))
        page_sum.copy_(torch.where(begins[:, None], start, page_sum))
        c = before[..., 1:]
        within = c - page_sum.gather(2, (at // PAGE).clamp(max=N - 1)[:, None].expand(B, H, T))
        row, token, head, to = new
        decay[to] = within.transpose(1, 2).unflatten(2, (-1, decay.shape[2]))[row, token, head].to(decay.dtype)
        seen = ((self.length.long() - 1) // PAGE).clamp(min=0)[:, None, None].expand(B, H, 1)
        start = torch.where(self.length[:, None, None] > 0, n_log.gather(2, seen), -torch.inf)
        tails = torch.cat([start, -c], -1).logcumsumexp(-1)  # [B, H, T + 1]
        last = (pages + PAGE).clamp(max=count[:, None])  # new tokens up to the end of each page
        touched = (last > 0) & (pages < count[:, None])
        n_log.copy_(torch.where(touched[:, None], tails.gather(2, last.clamp(0, T)[:, None].expand(B, H, N)), n_log))
        total.copy_(before[..., -1])

    def reserve(self, counts: Sequence[int]) -> None:
        """Pages for ``counts[b]`` more tokens of each sequence b, written to by none else.

        Raises:
            MemoryError: they do not fit into the memory of the device. Nothing has changed then.
        """
        G, now, more = self.table.shape[1], torch.tensor(self.lengths), torch.tensor(list(counts))
        written = ((now % PAGE > 0) & (more > 0)).nonzero()[:, 0]  # sequences that write to a page that they have
        common = self.refs[self.pages[written, :, now[written] // PAGE].long()] > 1
        shared = [(b := int(written[i]), g, self.lengths[b] // PAGE) for i, g in common.nonzero().tolist()]
        spans = [
            (self._reserved(b), -(-(n + extra) // PAGE)) if -n % PAGE < extra else (0, 0)
            for b, (n, extra) in enumerate(zip(self.lengths, counts, strict=True))
        ]
        missing = G * sum(max(0, stop - start) for start, stop in spans) + len(shared)
        if not missing:
            return
        self._make_room(missing - len(self.free), max(stop for _, stop in spans))
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
                self.pages[b, :, start:stop] = torch.tensor(self._take(G * (stop - start))).view(G, -1)
                self.table[b].copy_(self.pages[b])

    def _reserved(self, b: int) -> int:
        """How many pages, evicted ones among them, sequence b has for its tokens and for those that may follow."""
        n = -(-self.lengths[b] // PAGE)
        return n + int((self.pages[b, 0, n:] >= 0).sum())

    def _take(self, number: int) -> list[int]:
        """Free pages, now of one sequence."""
        taken = [self.free.pop() for _ in range(number)]
        self.refs[taken] = 1
        return taken

    def _make_room(self, missing: int, width: int) -> None:
        """At least ``missing`` more pages, and tables of ``width`` pages."""
        P, N = len(self.refs), self.pages.shape[2]
        if missing > 0:
            size = P + max(missing, P // 4)
            paged = self.of_pages()
            each = sum(x.shape[1:].numel() * x.element_size() for x in paged.values())
            old = max(size_of(x) for x in paged.values())  # stands beside its copy for a moment
            tokens = sum(self.lengths)
            check_room((size - P) * each + old, self.k.device, f"cache of {tokens} tokens, {size - P} pages more")
            for name, x in paged.items():
                setattr(self, name, _resized(x, 0, size))
            self.refs = _resized(self.refs, 0, size)
            self.free[:0] = reversed(range(P, size))
        if width > N:
            size = -(-max(width, N + N // 4) // CHUNK) * CHUNK
            for name, x in self._of_rows().items():
                if name in TABLES:
                    setattr(self, name, _resized(x, 2, size, -1 if name == "table" else 0))
            self.pages = _resized(self.pages, 2, size, -1)

    @torch.no_grad()
    def evict(
        self, log_eps: float, bounds: QueryBounds | None, window: int | None = None,
        keep: Callable[[KeyPool, Tensor], None] | None = None,
    ) -> int:  # fmt: skip
        """Give back the pages that no later row needs; see :func:`attnzoo.algebra.pruning.evictable`.

        Args:
            log_eps: of all keys that go, now and before, no later row loses more than this weight, as a logarithm.
            bounds: of the rows to come; None: only the window and closed gates say what goes.
            window: later rows see that many tokens, themselves among them; None for all.
            keep: is shown the pages before they go, ``[n, 3]`` numbers of sequence, head and page.

        Returns:
            Pages that have become free.
        """
        first = self.certified(log_eps, bounds, window).maximum(self.first)
        wanted, N = first.cpu(), self.pages.shape[2]
        gone = (torch.arange(N) < wanted[..., None]) & (self.pages >= 0)
        before = len(self.free)
        if bool(gone.any()):
            if keep is not None:
                keep(self, gone.nonzero())
            self.first.copy_(first)
            ids = self.pages[gone]
            self.pages[gone] = -1
            self.table.copy_(self.pages)
            self._release(ids)
        return len(self.free) - before

    @torch.no_grad()
    def restore(self, b: int, g: int, found: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Put the last evicted pages of head g of sequence b back, by number and with all that :meth:`of_pages` names.

        Raises:
            MemoryError: as :meth:`reserve`.
        """
        self._make_room(len(found) - len(self.free), 0)
        ids = self._take(len(found))
        for id, page in zip(ids, found.values(), strict=True):
            for name, x in self.of_pages().items():
                x[id] = page[name].to(x.device)
        self.pages[b, g, list(found)] = torch.tensor(ids, dtype=self.pages.dtype)
        self.table[b, g].copy_(self.pages[b, g])
        self.first[b, g] = min(found)

    def certified(
        self, log_eps: float, bounds: QueryBounds | None, window: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """How many of its first pages no row after the last token needs, ``[B, G]`` int32; see :meth:`evict`.

        Args:
            lengths: as if there were only that many tokens of each sequence.
        """
        B, G, _ = self.table.shape
        length = self.length if lengths is None else self.length.new_tensor(lengths)
        full = length // PAGE  # only whole pages go
        count = full.new_zeros(B, G)
        if self.n_log is not None:
            total = cast(Tensor, self.total) if lengths is None else cast(Tensor, self.totals(lengths))
            heads = (cast(Tensor, self.since) // PAGE).long()
            if bounds is not None:
                norms = self.k_norm.cummax(-1).values.repeat_interleave(total.shape[1] // G, 1)
                heads = heads.maximum(evictable(norms, self.n_log, total, log_eps, bounds))
            count = heads.unflatten(1, (G, -1)).amin(-1)
        if window is not None:
            count = count.maximum(((length - window + 1) // PAGE).clamp(min=0)[:, None])
        return count.minimum(full[:, None]).int()

    def totals(self, lengths: Sequence[int]) -> Tensor | None:
        """``total`` as it was after ``lengths[b]`` tokens of each sequence b."""
        if self.total is None or self.page_sum is None or self.decay is None:
            return None
        found = self.total.clone()
        for b, n in enumerate(lengths):
            if n == self.lengths[b]:
                continue
            page, slot = divmod(n, PAGE)
            found[b] = self.page_sum[b, :, page]
            if slot:
                found[b] += self.decay[self.pages[b, :, page].long(), slot - 1].flatten().double()
        return found

    def notes(self) -> dict[str, Any]:
        """What :meth:`crop` needs to come back to this state exactly, by the names of the fields."""
        return {name: x.clone() for name in ("total", "since") if (x := getattr(self, name)) is not None}

    def check_crop(self, lengths: Sequence[int]) -> None:
        """Whether :meth:`crop` can keep ``lengths[b]`` tokens of each sequence b.

        Raises:
            ValueError: the last closed gate is among the later tokens (the one before it is not known any more).
        """
        if self.since is not None and bool((self.since > self.since.new_tensor(lengths)[:, None]).any()):
            least = int(self.since.max())
            raise ValueError(f"tokens: expected at least {least} (the last closed gate), got {min(lengths)}")

    @torch.no_grad()
    def crop(self, lengths: Sequence[int], notes: dict[str, Any] | None = None) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence b, as if the later ones had never been.

        What has been evicted stays so: whether rows after these tokens may do without it, :meth:`certified` says.

        Args:
            notes: what :meth:`notes` gave when the sequences had these lengths, if that is known.

        Raises:
            ValueError: without notes, as :meth:`check_crop`.
        """
        if notes is None:
            self.check_crop(lengths)
        if self.total is not None and self.since is not None:
            self.total.copy_(cast(Tensor, self.totals(lengths)) if notes is None else notes["total"])
            self.since.copy_(self.since if notes is None else notes["since"])
        self.length.copy_(self.length.new_tensor(lengths))
        for b, n in enumerate(lengths):
            whole, slot = divmod(n, PAGE)
            self.k_norm[b, :, whole:] = 0
            self.pages[b, :, whole + bool(slot) :] = -1
            if slot:  # as it was when the page held these tokens alone
                ids = self.pages[b, :, whole].long()
                self.k_norm[b, :, whole] = longest(self.k[ids, :slot]).amax(-1)
                if self.n_log is not None:
                    c = cast(Tensor, self.decay)[ids, :slot].double().mT.flatten(0, 1)  # [H, slot]
                    c = c + cast(Tensor, self.page_sum)[b, :, whole, None]
                    before = [self.n_log[b, :, whole - 1, None]] if whole else []
                    self.n_log[b, :, whole] = torch.cat([*before, -c], -1).logsumexp(-1)
        self.table.copy_(self.pages)
        self.refs.zero_()
        owned = self.pages[self.pages >= 0].long()
        self.refs.index_add_(0, owned, self.refs.new_ones(owned.shape))
        self.free[:] = (self.refs == 0).nonzero()[:, 0].tolist()
        self.lengths = list(lengths)

    @torch.no_grad()
    def compact(self) -> None:
        """Give the memory of all free pages back to the device."""
        vars(self).update(self._compacted())
        self.table.copy_(self.pages)

    def _compacted(self) -> dict[str, Any]:
        """What :meth:`compact` changes."""
        ids = (self.refs > 0).nonzero()[:, 0]
        place = torch.full_like(self.refs, -1)
        place[ids] = torch.arange(len(ids), dtype=place.dtype)
        pages = torch.where(self.pages >= 0, place[self.pages.long()], -1)
        kept = {name: x[ids.to(x.device)] for name, x in self.of_pages().items()}
        return {**kept, "pages": pages, "refs": self.refs[ids], "free": []}

    def __getstate__(self) -> dict[str, Any]:
        """A pool is copied and saved without its free pages."""
        kept = self._compacted() if len(self.refs) else {}
        return {**vars(self), **kept, "table": kept.get("pages", self.pages).to(self.table.device)}

    def _release(self, ids: Tensor) -> None:
        """One sequence fewer has each of the pages ``ids``; one that is named twice, two fewer."""
        ids = ids.long()
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
        ids = kept[kept >= 0].long()
        self.refs.index_add_(0, ids, self.refs.new_ones(ids.shape))
        self._release(self.pages[self.pages >= 0])
        self.pages, self.lengths = kept, [self.lengths[b] for b in rows.tolist()]
        picked = {name: x[index] for name, x in self._of_rows().items()}
        for name, x in picked.items():
            if x.shape == getattr(self, name).shape:
                getattr(self, name).copy_(x)
            else:
                setattr(self, name, x)
        self.table.copy_(kept)

    def fork(self, source: int, target: int) -> None:
        """Sequence ``target`` becomes what ``source`` is, and shares its pages until one of them writes to them."""
        rows = torch.arange(len(self.lengths), device=self.length.device)
        rows[target] = source
        self.select(rows)

    @torch.no_grad()
    def reset(self, row: int) -> None:
        """Forget a sequence."""
        self._release(self.pages[row][self.pages[row] >= 0])
        self.pages[row], self.lengths[row] = -1, 0
        for name, x in self._of_rows().items():
            x[row] = -1 if name == "table" else 0

    @torch.no_grad()
    def adopt(self, row: int, other: KeyPool, tokens: int) -> None:
        """The empty sequence ``row`` becomes a copy of the only one of ``other``.

        Args:
            row: its number.
            other: with heads and channels as here.
            tokens: it has pages for so many, those of ``other`` among them.

        Raises:
            MemoryError: as :meth:`reserve`.
        """
        n, end = -(-tokens // PAGE), -(-other.lengths[0] // PAGE)
        live = other.pages[0, :, :end] >= 0  # [G, end]
        wanted = torch.cat([live, live.new_ones(len(live), n - end)], 1)
        self._make_room(int(wanted.sum()) - len(self.free), n)
        self.pages[row, :, :n][wanted] = torch.tensor(self._take(int(wanted.sum())), dtype=torch.int32)
        to, source = self.pages[row, :, :end][live].long(), other.pages[0, :, :end][live].long()
        for name, x in self.of_pages().items():
            x[to] = getattr(other, name)[source]
        for name, x in self._of_rows().items():
            new = getattr(other, name)[0]
            if x.ndim < 3:
                x[row] = new
            elif name != "table":
                x[row, :, :end] = new[:, :end]
        self.table[row].copy_(self.pages[row])
        self.lengths[row] = other.lengths[0]

    def gather(self, b: int, g: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """What is there of key head g of sequence b, for references.

        Returns:
            Keys ``[S, K]``, values ``[S, V]``, the log decays from each key to the last token ``[S, R]`` float64 (None
            where nothing decays; closed gates count as open), and the number of the first token.
        """
        first, S = int(self.first[b, g]), self.lengths[b]
        ids = self.pages[b, g, first : -(-S // PAGE)].long()
        tokens = S - first * PAGE
        k, v = (x[ids].flatten(0, 1)[:tokens] for x in (self.k, self.v))
        if self.decay is None:
            return k, v, None, first * PAGE
        R = self.decay.shape[2]
        heads = slice(g * R, (g + 1) * R)
        page_sum, total = cast(Tensor, self.page_sum), cast(Tensor, self.total)
        sums = page_sum[b, heads, first : -(-S // PAGE)].mT[:, None] + self.decay[ids].double()
        return k, v, (total[b, heads] - sums.flatten(0, 1)[:tokens]), first * PAGE


def in_front(B: int, T: int, valid: Tensor | None, device: torch.device) -> tuple[Tensor, list[int]]:
    """The T tokens of each row with those that exist first, ``[B, T]``, and how many do."""
    if valid is None:
        return torch.arange(T, device=device).expand(B, T), [T] * B
    return (~valid).int().argsort(dim=1, stable=True), [int(n) for n in valid.sum(1)]


def longest(k: Tensor) -> Tensor:
    """Lengths of keys ``[..., K]``, rounded up to float32."""
    norms: Tensor = k.double().norm(dim=-1)
    return norms.mul(1 + 1e-6).float()


def _resized(x: Tensor, dim: int, size: int, value: int = 0) -> Tensor:
    """``x`` cut or filled up with ``value`` to ``size`` along ``dim``."""
    new = x.new_full((*x.shape[:dim], size, *x.shape[dim + 1 :]), value)
    both = min(size, x.shape[dim])
    new.narrow(dim, 0, both).copy_(x.narrow(dim, 0, both))
    return new
