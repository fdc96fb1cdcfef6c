r"""Keys that transitions carry (PaTH, PaTH-FoX), in groups of pages.

A cached key need not be multiplied by every later factor: where its group of pages is whole, it stands as the group's
last token left it, and the product of the group's factors is kept. A query is carried back instead, over the rows of
its call, and then from group to group,

.. math:: s_{tj} = \lambda\, (R_{j+1} \cdots R_e k_j)^\top R_{e+1} \cdots R_t q_t

with e the end of j's group. So a step reads each key once, rewrites those of the group that is not whole alone, and
pages that are evicted cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import cut, heads_first, scaled_queries
from attnzoo.algebra.triangular import householder_block
from attnzoo.forms.caches.pages.attention import step_options
from attnzoo.forms.caches.pages.page_table import CHUNK, Pages, PoolSizes, resized
from attnzoo.forms.caches.pages.pool import PAGE, ROWS, KeyPool, longest, pool_of
from attnzoo.forms.caches.pages.present_tokens import ordered
from attnzoo.forms.caches.path_pages.attention import attend_carried
from attnzoo.forms.caches.path_pages.factors import eye_like, later_factors, open_group
from attnzoo.forms.caches.path_pages.tokens import Factors, Recent, last_tokens, path_tokens
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import attend_with_sink
from attnzoo.kernels.common.untraced import untraced
from attnzoo.kernels.decode import paged_path_carry, paged_path_step
from attnzoo.kernels.decode.path_state import OpenGroup, PathGroups
from attnzoo.precision import wide_dtype

GROUP = 8  # pages


@dataclass(eq=False, kw_only=True)
class CarriedPool(KeyPool):
    """A pool whose keys stand as the last token of their group of pages left them; see ``attnzoo.kernels.decode``.

    Pages of whole groups are in the dtype of the values, and were rounded once; those of the group that is not whole
    hold nothing that is read.

    Args:
        open_keys: keys of the group that is not whole, as its last token left them, ``[B, G, S, K]`` in float32, or
            float64 as the values; S is the tokens of a group.
        open_factor: transposed product of its factors, ``[B, G, K, K]``; any where it is empty.
        factors: those of whole groups, ``[B, G, M, K, K]``.
        base: how many of the first groups have none: their keys stand as one later token left them all, ``[B]`` int32.
            So a prompt's are carried once, when it is admitted, and spare every later step the walk over its groups.
        recent: by which tokens can be taken back after calls, oldest first; None for a memory that steps change in
            place, whose :meth:`step` and :meth:`keep` carry no token that is not kept.
    """

    open_keys: Tensor
    open_factor: Tensor
    factors: Tensor
    base: Tensor
    recent: tuple[Recent, ...] | None = None

    @classmethod
    def empty(
        cls, sizes: PoolSizes, *, dtype: torch.dtype, device: torch.device | str = "cpu", decays: bool = True,
        pages: int = 0, tokens: int = 0, group: int | None = None, **more: Any,
    ) -> Self:  # fmt: skip
        """A pool of empty sequences of up to ``tokens`` tokens, ``group`` pages a group; see :meth:`Pages.empty`."""
        B, G, _, K, _ = sizes
        group = group or GROUP
        opened, groups = open_group(B, G, K, dtype, device, group), -(-max(CHUNK, -(-tokens // PAGE)) // group)
        return super().empty(
            sizes, dtype=dtype, device=device, decays=decays, pages=pages, tokens=tokens, **opened,
            factors=opened["open_factor"][:, :, None].repeat(1, 1, groups, 1, 1), **more,
        )  # fmt: skip

    @property
    def span(self) -> int:
        """Tokens of a group."""
        return self.open_keys.shape[2]

    @property
    def group(self) -> int:
        return self.span // PAGE

    def groups_alive(self) -> int:
        """The number of groups, the open one among them, from the last one back to the first page of any sequence."""
        alive = (self.pages >= 0).any(1)  # [B, N]
        first = alive.int().argmax(-1) // self.group
        reach = 1 + torch.tensor(self.lengths, device=first.device) // self.span - first
        return int(reach.masked_fill(~alive.any(-1), 0).amax())

    def alive_in(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """The pages of each sequence's group ``number [B, 1]`` that some head of one has, all on the host.

        Returns:
            The pages ``[B, G, n]`` int64, -1 where a head has none, and their numbers in the sequences, ``[B, n]``.
        """
        (B, G, N), each = self.pages.shape, self.group
        pages = number * each + torch.arange(each, device=number.device)  # [B, each]
        found = self.pages.long().gather(2, pages.clamp(0, N - 1)[:, None].expand(B, G, each))
        found = found.masked_fill(((pages < 0) | (pages >= N))[:, None], -1)
        kept = (found >= 0).any(0).any(0)
        return found[..., kept], pages[:, kept]

    def _grow(self, wanted: int, width: int) -> None:
        super()._grow(wanted, width)
        groups = -(-self.table.shape[2] * PAGE // self.span)
        if groups > self.factors.shape[2]:
            self.factors = resized(self.factors, 2, groups)

    def holding(self, state: Any) -> CarriedPool:
        """As :meth:`KeyPool.holding`; whole groups need no products then, but where pages come back from the host."""
        if not state.in_pages:
            return self.copy_of(pool_of(state), state.k[0], self.group)
        away = state.evict is not None and state.evict.offload is not None
        return cast(CarriedPool, state.keys()) if away else self.copy_of(state.keys())

    @classmethod
    @torch.no_grad()
    def copy_of(cls, pool: KeyPool, keys: Tensor | None = None, group: int | None = None) -> Self:
        """The only sequence of ``pool``, all of whose keys stand as its last token has left them.

        Args:
            keys: all of them, ``[S, G, K]``; None: those of a :class:`CarriedPool`.
            group: pages of a group; None: as many as those of ``pool``.
        """
        S, G, K, dtype = pool.lengths[0], pool.table.shape[1], pool.k.shape[2], pool.v.dtype
        ids, n = pool.table[0, :, : -(-S // PAGE)], -(-S // PAGE)
        live, at = ids >= 0, ids.clamp(min=0).long()
        if keys is None:
            pages, group = cast(CarriedPool, pool).latest(), cast(CarriedPool, pool).group
        else:
            padded = torch.nn.functional.pad(keys.to(wide_dtype(dtype)), (0, 0, 0, 0, 0, n * PAGE - S))
            pages = padded.transpose(0, 1).unflatten(1, (n, PAGE))  # [G, n, PAGE, K]
        there = torch.arange(n * PAGE, device=pages.device).view(n, PAGE, 1) < S
        pages = pages.masked_fill(~(there & live[..., None, None]), 0.0)
        span = cast(int, group) * PAGE
        opened, start = open_group(1, G, K, dtype, pages.device, span // PAGE), S // span * (span // PAGE)
        opened["base"].fill_(S // span)
        opened["open_keys"][0, :, : (n - start) * PAGE] = pages[:, start:].flatten(1, 2)
        rounded, k, norms = pages.to(dtype), pool.v.new_zeros(pool.k.shape), pool.k_norm.clone()
        k[at[live]] = rounded[live]
        norms[0, :, :n] = norms[0, :, :n].maximum(longest(pages).maximum(longest(rounded)).amax(-1))
        kept: dict[str, Any] = {f.name: getattr(pool, f.name) for f in fields(KeyPool)} | {"k": k, "k_norm": norms}
        return cls(**kept, **cast(dict[str, Any], opened), factors=pages.new_empty(1, G, 0, K, K))

    def latest(self) -> Tensor:
        """The keys of the only sequence as its last token leaves them, ``[G, n, PAGE, K]``; any where none is."""
        n, start = -(-self.lengths[0] // PAGE), self.open_page(self.lengths[0])
        groups, each = start * PAGE // self.span, self.group
        factor = torch.cat([self.factors[0, :, :groups], self.open_factor[0, :, None]], 1)
        none = torch.arange(groups + 1, device=self.base.device) < self.base[0]
        none[-1] = self.lengths[0] % self.span == 0
        factor = torch.where(none[:, None, None], eye_like(factor), factor)
        after = later_factors(factor)[:, :-1]  # [G, groups, K, K]
        whole = self.k[self.table[0, :, :start].clamp(min=0).long()].to(after.dtype).unflatten(1, (groups, each))
        carried = (whole @ after[:, :, None].mT).flatten(1, 2)
        return torch.cat([carried, self.open_keys[0].unflatten(1, (each, PAGE))], 1)[:, :n]

    @torch.no_grad()
    def add(self, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None) -> None:
        """Add T tokens to every sequence; arguments as :meth:`append`, with w and beta in the gate, per token."""
        before, tokens, last = self.lengths, Factors.of(k, gate, valid), max(0, k.shape[1] - ROWS)
        self.append(k, v, gate.log_decay, valid)
        if last and self.recent is not None:
            self.recent = ()
            self._carry(tokens.slice(0, last), before)
            before = [n + min(count, last) for n, count in zip(before, tokens.counts, strict=True)]
            tokens = tokens.slice(last, k.shape[1])
        self._remember(tokens, before)
        self._carry(tokens, before)

    def _remember(self, tokens: Factors, before: Sequence[int]) -> None:
        """Note tokens, at most ROWS, as they come after ``before[b]`` of each sequence, while so many are noted."""
        if self.recent is None:
            return
        if not self.recent or len(self.recent[-1]) + tokens.k.shape[1] > ROWS:
            now = Recent(tuple(before), self.open_keys.clone(), self.open_factor.clone())
            self.recent = (*self.recent[-1:], now)
        *old, last = self.recent
        self.recent = (*old, replace(last, tokens=(*last.tokens, tokens)))

    def _carry(self, tokens: Factors, before: Sequence[int]) -> None:
        """Carry the open groups over tokens that follow ``before[b]`` of each sequence; groups become whole."""
        done, S = [0] * len(before), self.span
        while any(now < n for now, n in zip(done, tokens.counts, strict=True)):
            at = [(n + now) % S for n, now in zip(before, done, strict=True)]  # in their groups
            more = [min(n - now, S - start) for n, now, start in zip(tokens.counts, done, at, strict=True)]
            self._carry_within(tokens, done, at, more)
            for b, (n, now, start) in enumerate(zip(before, done, at, strict=True)):
                if more[b] and start + more[b] == S:
                    self._close(b, (n + now) // S)
            done = [now + n for now, n in zip(done, more, strict=True)]

    def _carry_within(self, tokens: Factors, first: list[int], at: list[int], more: list[int]) -> None:
        """Carry the open groups over ``more[b]`` tokens from ``first[b]`` on, which come ``at[b]`` in their groups."""
        device, dtype, T, (G, S) = self.open_keys.device, self.open_keys.dtype, max(more), self.open_keys.shape[1:3]
        starts, counts, places = (torch.tensor(x, device=device)[:, None] for x in (first, more, at))
        step, number = torch.arange(T, device=device), torch.arange(S, device=device)
        index, absent = (starts + step).clamp(max=tokens.k.shape[1] - 1), step >= counts  # [B, T]

        def taken(x: Tensor) -> Tensor:
            shape = (*index.shape, *(1,) * (x.ndim - 2))
            x = x.gather(1, index.view(shape).expand(-1, -1, *x.shape[2:])).masked_fill(absent.view(shape), 0)
            return cut(heads_first(x, G, dtype), PAGE)

        k, w, beta = (taken(x) for x in (tokens.k, tokens.w, tokens.beta))  # [B, G, n, PAGE, ...]
        block = householder_block(k, k, w, beta)
        factor = cast(Tensor, block.total)
        after = later_factors(factor)
        new, total = (block.k @ after.mT).flatten(2, 3), after[:, :, 0] @ factor[:, :, 0]
        self.open_factor.copy_(torch.where((places > 0)[..., None, None], total @ self.open_factor, total))
        old = (self.open_keys @ total.mT).masked_fill((number >= places)[:, None, :, None], 0)
        mine, inside = (number >= places) & (number < places + counts), (number - places).clamp(0, T - 1)  # [B, S]
        placed = new.gather(2, inside[:, None, :, None].expand(-1, G, -1, new.shape[3]))
        self.open_keys.copy_(torch.where(mine[:, None, :, None], placed, old))

    def _close(self, b: int, number: int) -> None:
        """Group ``number`` of sequence b is whole: its keys go to its pages, its product to those of groups."""
        each = self.group
        pages = slice(number * each, (number + 1) * each)
        ids, keys = self.table[b, :, pages].long(), self.open_keys[b].unflatten(1, (each, PAGE)).to(self.k.dtype)
        self.k[ids[ids >= 0]] = keys[ids >= 0]
        self.k_norm[b, :, pages] = longest(keys).amax(-1).masked_fill(ids < 0, 0.0)
        self.factors[b, :, number] = self.open_factor[b]

    @torch.no_grad()
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None, given: SoftmaxOptions
    ) -> tuple[Tensor, Tensor]:
        found = []
        for start in range(0, k.shape[1], ROWS):
            now = slice(start, start + ROWS)
            part, there = gate.slice(now.start, now.stop), None if valid is None else valid[:, now]
            found.append(attend_carried(q[:, :, now], k[:, now], v[:, now], part, self, there, given))
            self.add(k[:, now], v[:, now], part, there)
        o, lse = (torch.cat(x, 2) for x in zip(*found, strict=True))
        return o, lse

    @untraced  # it changes the pool where it stands
    def step(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions, count: Tensor | None = None,
        impl: Literal["triton", "reference"] = "triton", carry: bool = True,
    ) -> Tensor:  # fmt: skip
        T, before = q.shape[1], self.lengths
        if impl == "triton":
            if self.recent is not None:
                self._remember(Factors.of(k, gate, last_tokens(T, count)), before)
            x, tokens = v.to(self.v.dtype), path_tokens(k.to(self.k.dtype), gate, count)
            options = step_options(given)
            return paged_path_step(q, x, tokens, self.state(), self.groups, options=options, carry=carry).to(v.dtype)
        there = last_tokens(T, count)
        o, lse = attend_carried(scaled_queries(q, given.scale), k, v, gate, self, there, given)
        if carry:
            self.add(k, v, gate, there)
        else:
            self.append(k, v, gate.log_decay, there)
        self.lengths = before
        return attend_with_sink(o, lse, given.sink)[0].transpose(1, 2).to(v.dtype)

    def keep(self, call: Call | None, kept: Tensor, length: Tensor) -> None:
        assert call is not None
        self.crop_sums(length)
        impl: Literal["triton", "reference"] = "triton" if kept.is_cuda else "reference"
        self.carry(call.k, call.gate.per_token(call.q), kept, impl)

    def carry(
        self, k: Tensor, gate: Gate, kept: Tensor, impl: Literal["triton", "reference"] = "triton"
    ) -> None:  # fmt: skip
        """Carry keys over the first ``kept[b]`` tokens of a step that did not; the device's lengths count them."""
        T = k.shape[1]
        if impl == "reference":
            factors = Factors.of(k, gate, None)._replace(counts=kept.tolist())
            self._carry(factors, (self.length - kept).tolist())
            return
        order = (torch.arange(T, device=k.device) - (T - kept[:, None])).clamp(min=0)  # these tokens last

        def last(x: Tensor) -> Tensor:
            return ordered(x, order)

        tokens = path_tokens(last(k.to(self.k.dtype)), Gate(w=gate.w, beta=gate.beta).map(last), kept.int())
        paged_path_carry(tokens, self.state(), self.groups)

    @torch.no_grad()
    def crop_sums(self, length: Tensor) -> None:
        """Crop the sums of gates as :meth:`KeyPool.crop_sums`; a page's bound of its longest key does not shrink."""
        norms = self.k_norm.clone()
        super().crop_sums(length)
        self.k_norm.copy_(torch.where(self.k_norm > 0, norms.maximum(self.k_norm), 0.0))

    def notes(self) -> dict[str, Any]:
        opened = {"open_keys": self.open_keys.clone(), "open_factor": self.open_factor.clone()}
        return {**super().notes(), **opened, "recent": self.recent}

    def check_crop(self, lengths: Sequence[int]) -> None:
        """As :meth:`KeyPool.check_crop`.

        Raises:
            ValueError: also where a group that would not be whole any more lies so far back that its keys, as they
                came, are not known.
        """
        known = self.recent[0].lengths if self.recent else self.lengths
        for least, n in zip(known, lengths, strict=True):
            if n % self.span and n < least:
                raise ValueError(f"tokens: expected at least {least} (earlier keys have been carried), got {n}")

    @torch.no_grad()
    def crop(self, lengths: Sequence[int], notes: dict[str, Any] | None = None) -> None:
        super().crop(lengths, notes)
        if notes is not None:
            self.open_keys.copy_(notes["open_keys"])
            self.open_factor.copy_(notes["open_factor"])
            self.recent = notes["recent"]
            return
        recent = self.recent or ()
        while len(recent) > 1 and all(n >= start for n, start in zip(lengths, recent[1].lengths, strict=True)):
            recent = recent[1:]
        self.recent = ()
        for n, one in enumerate(recent):
            if not n:
                self.open_keys.copy_(one.keys)
                self.open_factor.copy_(one.factor)
            before = [min(start, m) for start, m in zip(one.lengths, lengths, strict=True)]
            for tokens in one.tokens:
                counts = [min(c, max(0, m - s)) for c, m, s in zip(tokens.counts, lengths, before, strict=True)]
                kept = tokens._replace(counts=counts)
                self._remember(kept, before)
                self._carry(kept, before)
                before = [s + c for s, c in zip(before, counts, strict=True)]

    @property
    def groups(self) -> PathGroups:
        """The products and the open group, as the kernels take them."""
        return PathGroups(self.factors, OpenGroup(self.open_keys, self.open_factor, self.base))

    @torch.no_grad()
    def select(self, index: Tensor) -> None:
        super().select(index)
        self.recent = None if self.recent is None else tuple(one.select(index) for one in self.recent)

    @torch.no_grad()
    def adopt(self, row: int, other: Pages, tokens: int) -> None:
        assert isinstance(other, CarriedPool)
        factors, other.factors = other.factors, self.factors[row : row + 1]
        super().adopt(row, other, tokens)
        other.factors, n = factors, min(factors.shape[2], self.factors.shape[2])
        self.factors[row, :, :n] = factors[0, :, :n]
