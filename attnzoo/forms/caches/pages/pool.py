"""Keys and values of many sequences in pages of one pool: what is added, what is evicted and what is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads, is_closed
from attnzoo.algebra.pruning import QueryBounds, evictable
from attnzoo.algebra.sums import running_sum
from attnzoo.forms.caches.pages.attention import append_and_attend, attend_rows, first_visible
from attnzoo.forms.caches.pages.page_table import PAGE as PAGE
from attnzoo.forms.caches.pages.page_table import Pages, PoolSizes
from attnzoo.forms.caches.pages.present_tokens import in_front
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.kernels.decode import crop_unavailable, paged_crop
from attnzoo.kernels.decode.eight_bits import E4M3, write, written

ROWS = 128  # at a time


@dataclass(eq=False)
class KeyPool(Pages):
    """Keys and values in the pages of a pool, standing as they were written; its tensors are those of :class:`Pages`.

    This is the contract of all pools. A cache that calls hand on (:class:`~.paged_cache.PagedCache`) and a memory that
    steps change in place (:class:`~.inplace.PagedMemory`) both add tokens by :meth:`extend` and :meth:`step`. The
    second begins with :meth:`like`, takes sequences by :meth:`holding`, and tokens back by :meth:`keep`.
    """

    @classmethod
    def like(cls, state: Any, B: int, tokens: int, device: torch.device | str) -> Self:
        """A pool of B empty sequences of up to ``tokens`` tokens, with heads and channels as in ``state``.

        It has pages for all of these tokens from the start, or where keys are evicted takes them as they are needed.

        Args:
            state: a :class:`~attnzoo.KVCache` or a cache in pages, of one sequence that has a token.
        """
        return cls._like(state, B, tokens, device, pool_of(state).v.dtype)

    @classmethod
    def like_in_eight_bits(cls, state: Any, B: int, tokens: int, device: torch.device | str) -> Self:
        """As :meth:`like`, with keys and values in 8 bits."""
        return cls._like(state, B, tokens, device, E4M3)

    @classmethod
    def _like(cls, state: Any, B: int, tokens: int, device: torch.device | str, dtype: torch.dtype) -> Self:
        one = pool_of(state)
        sizes, each = one.sizes._replace(B=B), 1 if state.evict is not None else -(-tokens // PAGE)
        return cls.empty(
            sizes, dtype=dtype, device=device, decays=one.decay is not None, pages=B * sizes.G * each, tokens=tokens
        )

    def holding(self, state: Any) -> KeyPool:
        """The keys of a state of one sequence in a pool of this kind, to be read: both stay as they are."""
        return pool_of(state) if self.exponents is None else pool_of(state).in_eight_bits()

    @torch.no_grad()
    def add(self, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None) -> None:
        """Add T tokens to every sequence; as :meth:`append`, with a gate per token and v with its own heads."""
        self.append(k, expand_heads(v, k.shape[2]), gate.log_decay, valid)

    @torch.no_grad()
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None, given: SoftmaxOptions
    ) -> tuple[Tensor, Tensor]:
        """Add T tokens to every sequence and attend to all that is there, in plain operations.

        Args:
            q: scaled queries ``[B, H, T, K]``, in the dtype of the computation.
            k: ``[B, T, G, K]``, with the transitions that move it once folded in.
            v: ``[B, T, G, V]``.
            gate: theirs, per token.
            valid: those that exist, ``[B, T]``, or None for all.
            given: options of the call; of ``valid`` and ``scale`` nothing is read.

        Returns:
            Output ``[B, H, T, V]`` without a sink, and the log-sum-exps ``[B, H, T]``.
        """
        B, T = k.shape[:2]
        rank = torch.arange(T, device=q.device).expand(B, T) if valid is None else valid.cumsum(1) - 1
        at, since = (self.length.long()[:, None] + rank).clamp(min=0), None
        if gate.log_decay is not None:
            since = first_visible(cast(Tensor, self.since), gate.log_decay, at)
        self.add(k, v, gate, valid)
        found = []
        for start in range(0, T, ROWS):
            now = slice(start, start + ROWS)
            visible = None if since is None else since[:, :, now]
            found.append(attend_rows(q[:, :, now], self, at[:, now], visible, given))
        o, lse = (torch.cat(x, 2) for x in zip(*found, strict=True))
        return o, lse

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions, count: Tensor | None = None,
        impl: Literal["triton", "reference"] = "triton", carry: bool = True,
    ) -> Tensor:  # fmt: skip
        """Add few tokens and attend: ``[B, T, H, V]``. There are pages for them; the host counts them elsewhere.

        Args:
            q: ``[B, T, H, K]``; the others as those of :meth:`extend`.
            given: as that of :func:`~attnzoo.forms.caches.pages.attention.append_and_attend`.
            count: the last tokens that each sequence gets, ``[B]`` int32; None for all of them.
            impl: of ``attnzoo.kernels.decode``.
            carry: False where :meth:`keep` follows.
        """
        k, v = (expand_heads(x, self.table.shape[1]) for x in (k, v))
        return append_and_attend(self, q, k, v, gate.log_decay, given, impl, count)

    def counted(self, counts: Sequence[int]) -> None:
        """The host counts the tokens of a :meth:`step`."""
        self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]

    def keep(self, call: Call | None, kept: Tensor, length: Tensor) -> None:
        """Keep the first ``kept[b]`` tokens of the last :meth:`step`, after which there are ``length[b]``.

        Args:
            call: of the step; None where nothing is to be carried.
            kept: ``[B]`` int64.
            length: ``[B]`` int64.
        """
        self.crop_sums(length)

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
        new = write(self.state().pages, to, k[row, source, head], v[row, source, head])
        where = (row * G + head) * self.k_norm.shape[2] + page[row, token]
        self.k_norm.view(-1).scatter_reduce_(0, where, longest(new), "amax")
        if log_decay is not None:
            g = log_decay.double().gather(1, order[..., None].expand_as(log_decay)).masked_fill(~there[..., None], 0.0)
            self._add_gates(g.transpose(1, 2), at, count, (row, token, head, to))
        self.length += count
        self.lengths = [before + n for before, n in zip(self.lengths, counts, strict=True)]

    def _add_gates(self, g: Tensor, at: Tensor, count: Tensor, new: tuple[Any, ...]) -> None:
        """The sums of the gates ``g [B, H, T]`` of the tokens ``at [B, T]``, of which ``count [B]`` exist."""
        total, page_sum, since, n_log, bits, decay = (
            cast(Tensor, x) for x in (self.total, self.page_sum, self.since, self.n_log, self.closed, self.decay)
        )
        B, H, T = g.shape
        closed = is_closed(g)
        since.copy_(torch.where(closed, at[:, None], 0).amax(-1).maximum(since))
        bits &= self._below(self.length)  # tokens that were taken back may have left theirs
        page = (at // PAGE).clamp(max=bits.shape[2] - 1)[:, None].expand(B, H, T)
        bits.scatter_add_(2, page, torch.where(closed, 1 << at[:, None] % PAGE, 0))
        opened = torch.nn.functional.pad(g.masked_fill(closed, 0.0), (1, 0))
        before = total[..., None] + running_sum(opened, -1)  # [B, H, T + 1]
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
        if keep is not None:  # they come back as they are now
            first = first.minimum(first.new_tensor([self.open_page(n) for n in self.lengths])[:, None]).maximum(
                self.first
            )
        wanted, N = first.cpu(), self.pages.shape[2]
        gone = (torch.arange(N, device=wanted.device) < wanted[..., None]) & (self.pages >= 0)
        before = len(self.free)
        if bool(gone.any()):
            if keep is not None:
                keep(self, gone.nonzero())
            self.first.copy_(first)
            ids = self.pages[gone]
            self.pages[gone] = -1
            self.table.copy_(self.pages)
            self.release(ids)
        return len(self.free) - before

    def certified(
        self, log_eps: float, bounds: QueryBounds | None, window: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The number of first pages that no row after the last token needs, ``[B, G]`` int32; see :meth:`evict`.

        Args:
            lengths: as if there were only that many tokens of each sequence.
        """
        B, G, _ = self.table.shape
        length = self.length if lengths is None else self.length.new_tensor(lengths)
        full = length // PAGE  # only whole pages go
        count = full.new_zeros(B, G)
        if self.n_log is not None:
            total = cast(Tensor, self.total if lengths is None else self.totals(length))
            closed = cast(Tensor, self.since if lengths is None else self.closed_before(length))
            heads = (closed // PAGE).long()
            if bounds is not None:
                norms = self.k_norm.cummax(-1).values.repeat_interleave(total.shape[1] // G, 1)
                heads = heads.maximum(evictable(norms, self.n_log, total, log_eps, bounds))
            count = heads.unflatten(1, (G, -1)).amin(-1)
        if window is not None:
            count = count.maximum(((length - window + 1) // PAGE).clamp(min=0)[:, None])
        return count.minimum(full[:, None]).int()

    def totals(self, length: Tensor) -> Tensor | None:
        """``total`` as it was after ``length [B]`` tokens of each sequence."""
        if self.total is None or self.page_sum is None:
            return None
        page, slot = self._place(length, self.total)
        sums = self._open_page(length)
        found = torch.where(slot > 0, sums.gather(2, (slot - 1).clamp(min=0)), self.page_sum.gather(2, page))[..., 0]
        return torch.where((length < self.length)[:, None], found, self.total)

    def _place(self, length: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Page and place in it of the token ``length [B]``, for each head of ``like``: ``[B, heads, 1]``."""
        at = length.long()[:, None, None].expand(*like.shape[:2], 1)
        return (at // PAGE).clamp(max=self.table.shape[2] - 1), at % PAGE

    def _open_page(self, length: Tensor) -> Tensor:
        """The sums of gates up to each token of the page of the token ``length [B]``, ``[B, H, PAGE]`` float64."""
        page_sum, decay = cast(Tensor, self.page_sum), cast(Tensor, self.decay)
        ids = self.table.gather(2, self._place(length, self.table)[0])[..., 0].clamp(min=0).long()
        return page_sum.gather(2, self._place(length, page_sum)[0]) + decay[ids].mT.flatten(1, 2).double()

    def closed_before(self, length: Tensor) -> Tensor | None:
        """``since`` as it was after ``length [B]`` tokens of each sequence."""
        if self.closed is None:
            return None
        bits = self.closed & self._below(length)  # [B, H, N]
        number = torch.arange(PAGE, device=bits.device)
        page = torch.where(bits != 0, torch.arange(bits.shape[2], device=bits.device), 0).amax(-1)
        last = bits.gather(2, page[..., None]) >> number & 1
        return (page * PAGE + torch.where(last != 0, number, 0).amax(-1)).int()

    def _below(self, length: Tensor) -> Tensor:
        """The bits of the first ``length [B]`` tokens in the words of their pages, ``[B, 1, N]`` int64."""
        starts = torch.arange(self.table.shape[2], device=length.device) * PAGE
        there = (length.long()[:, None, None] - starts).clamp(0, PAGE)
        return torch.where(there < PAGE, (1 << there.clamp(max=PAGE - 1)) - 1, -1)

    @torch.no_grad()
    def crop_sums(self, length: Tensor) -> None:
        """Set sums of gates and norms of keys to what they were after ``length [B]`` tokens of each sequence.

        Pages stay where they are, for tokens to come. Nothing here waits for the device, or knows ``lengths``. On a GPU
        it is one kernel.
        """
        if length.is_cuda and not crop_unavailable(self.state()):
            return paged_crop(self.state(), length)
        page, slot = self._place(length, self.k_norm)
        ids = self.table.gather(2, page)[..., 0]
        inside = torch.arange(PAGE, device=length.device) < slot  # [B, G, PAGE]
        norms = (
            longest(written(self.state().pages, ids.clamp(min=0).long())[0])
            .masked_fill(~inside | (ids < 0)[..., None], 0.0)
            .amax(-1)
        )
        number = torch.arange(self.table.shape[2], device=length.device)
        self.k_norm.masked_fill_(number >= -(-length.long() // PAGE)[:, None, None], 0.0)
        self.k_norm.scatter_(
            2, page, torch.where(slot[..., 0] > 0, norms, self.k_norm.gather(2, page)[..., 0])[..., None]
        )
        if self.total is not None and self.since is not None and self.n_log is not None:
            page, slot = self._place(length, self.n_log)
            past = torch.arange(PAGE, device=length.device) >= slot
            start = torch.where(page > 0, self.n_log.gather(2, (page - 1).clamp(min=0)), -torch.inf)
            tails = torch.cat([start, (-self._open_page(length)).masked_fill(past, -torch.inf)], -1).logsumexp(-1)
            self.n_log.scatter_(2, page, torch.where(slot > 0, tails[..., None], self.n_log.gather(2, page)))
            self.since.copy_(cast(Tensor, self.closed_before(length)))
            self.total.copy_(cast(Tensor, self.totals(length)))
        self.length.copy_(length)

    def notes(self) -> dict[str, Any]:
        """The fields by which :meth:`crop` comes back to this state exactly, by name."""
        return {} if self.total is None else {"total": self.total.clone()}

    def check_crop(self, lengths: Sequence[int]) -> None:
        """Whether :meth:`crop` can keep ``lengths[b]`` tokens of each sequence b; a pool of this class always can."""

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
        self.crop_sums(self.length.new_tensor(lengths))
        if self.total is not None and notes is not None:
            self.total.copy_(notes["total"])
        for b, n in enumerate(lengths):
            self.pages[b, :, -(-n // PAGE) :] = -1
        self.table.copy_(self.pages)
        self.refs.zero_()
        owned = self.pages[self.pages >= 0].long()
        self.refs.index_add_(0, owned, self.refs.new_ones(owned.shape))
        self.free[:] = (self.refs == 0).nonzero()[:, 0].tolist()
        self.lengths = list(lengths)
        self.looked = [min(before, n) for before, n in zip(self.looked, lengths, strict=True)]

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the pages ``ids [G, n]``, ``[1, n PAGE, G, dim]``."""
        found = written(self.state().pages, ids.to(self.k.device).long())
        k, v = (x.flatten(1, 2).transpose(0, 1)[None] for x in found)
        return k, v

    def gather(self, b: int, g: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """The keys and values of key head g of sequence b, for references.

        Returns:
            Keys ``[S, K]``, values ``[S, V]``, the log decays from each key to the last token ``[S, R]`` float64 (None
            where nothing decays; closed gates count as open), and the number of the first token.
        """
        first, S = int(self.first[b, g]), self.lengths[b]
        ids = self.pages[b, g, first : -(-S // PAGE)].long()
        tokens = S - first * PAGE
        k, v = (x.flatten(0, 1)[:tokens] for x in written(self.state().pages, ids))
        if self.decay is None:
            return k, v, None, first * PAGE
        R = self.decay.shape[2]
        heads = slice(g * R, (g + 1) * R)
        page_sum, total = cast(Tensor, self.page_sum), cast(Tensor, self.total)
        sums = page_sum[b, heads, first : -(-S // PAGE)].mT[:, None] + self.decay[ids].double()
        return k, v, (total[b, heads] - sums.flatten(0, 1)[:tokens]), first * PAGE


def pool_of(state: Any) -> KeyPool:
    """The keys of a state of one sequence, in pages; of a :class:`~attnzoo.KVCache` as they stand there."""
    if state.in_pages:
        return cast(KeyPool, state.keys())
    (S, G, K), gates = state.k.shape[1:], state.log_decay
    pool = KeyPool.empty(
        PoolSizes(1, G, 1 if gates is None else gates.shape[2] // G, K, state.v.shape[3]), dtype=state.v.dtype,
        device=state.v.device, decays=gates is not None, pages=G * -(-S // PAGE), tokens=S,
    )  # fmt: skip
    pool.append(state.k, expand_heads(state.v, G), gates)
    return pool


def longest(k: Tensor) -> Tensor:
    """Lengths of keys ``[..., K]``, rounded up to float32."""
    norms: Tensor = k.double().norm(dim=-1)
    return norms.mul(1 + 1e-6).float()
