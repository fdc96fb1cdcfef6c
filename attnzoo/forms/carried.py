r"""Keys that transitions carry (PaTH, PaTH-FoX), in pages.

A cached key need not be multiplied by every later factor: in a whole page it stands as the page's last token left it,
and beside the page stands the product of its factors. A query is carried back instead, over the rows of its call, over
the page that is not whole yet, and then from page to page,

.. math:: s_{tj} = \lambda\, (R_{j+1} \cdots R_e k_j)^\top R_{e+1} \cdots R_t q_t

with e the end of j's page. So a step reads each key once and rewrites none, and pages that are given up cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import HeadGate, Transition, block_decay, compute_dtype, heads_first
from attnzoo.forms.cache import append_valid
from attnzoo.forms.options import SoftmaxOptions, existing
from attnzoo.forms.paged import PagedCache
from attnzoo.forms.pool import PAGE, KeyPool, in_front, longest
from attnzoo.forms.readout import least_logit

ROWS = 128  # at a time
NEAR = ("near_k", "near_w", "near_beta")


@dataclass(eq=False, kw_only=True)
class CarriedPool(KeyPool):
    """A pool whose whole pages hold keys as the page's last token leaves them.

    Args:
        factor: transposed product of the factors of a whole page, ``[P, K, K]``, in the dtype of the keys.
        near_k: keys as they came, from the page before the one that is not whole on, ``[B, G, 2 PAGE, K]``.
        near_w: their w, n per token, ``[B, G, 2 PAGE, n, K]``; zero where no token is.
        near_beta: their beta, ``[B, G, 2 PAGE, n]``; zero where no token is.
        known: the first token whose key is among them, on the host; sequences can be cropped to pages from there on.
    """

    factor: Tensor
    near_k: Tensor
    near_w: Tensor
    near_beta: Tensor
    known: list[int]

    @classmethod
    def of(
        cls, B: int, G: int, R: int, K: int, V: int, *, dtype: torch.dtype, values: torch.dtype,
        device: torch.device | str, decays: bool, factors: int,
    ) -> Self:  # fmt: skip
        """A pool of B empty sequences with keys in ``dtype``, values in ``values`` and n ``factors`` per token."""
        near = torch.zeros(B, G, 2 * PAGE, K, dtype=dtype, device=device)
        w = near.new_zeros(B, G, 2 * PAGE, factors, K)
        factor = torch.zeros(0, K, K, dtype=dtype, device=device)
        pool = cls.empty(
            B, G, R, K, V, dtype=dtype, device=device, decays=decays, factor=factor, near_k=near,
            near_w=w, near_beta=w[..., 0].clone(), known=[0] * B,
        )  # fmt: skip
        pool.v = pool.v.to(values)
        return pool

    @torch.no_grad()
    def add(self, transition: Transition, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None) -> None:
        """Add T tokens to every sequence; arguments as :meth:`append`, with w and beta in the gate, per token."""
        before, bases = self.lengths, [near_base(n) for n in self.lengths]
        (B, T, G, _), dtype = k.shape, self.k.dtype
        self.append(k, v, gate.log_decay, valid)
        order, counts = in_front(B, T, valid, k.device)
        room = max(n - base for n, base in zip(self.lengths, bases, strict=True)) // PAGE * PAGE + 2 * PAGE
        there = torch.arange(T, device=k.device) < order.new_tensor(counts)[:, None]
        row, token = there.nonzero(as_tuple=True)
        place = token + order.new_tensor([n - base for n, base in zip(before, bases, strict=True)])[row]
        wide = []
        for name, new in zip(NEAR, (k, gate.w, gate.beta), strict=True):
            x = getattr(self, name)
            x = torch.cat([x, x.new_zeros(B, G, room - 2 * PAGE, *x.shape[3:])], 2)
            now = cast(Tensor, new)[row, order[row, token]].to(dtype)
            x[row, :, place] = now.view(len(row), G, *x.shape[3:])
            wide.append(x)
        self._close(transition, wide, before, bases)
        shifts = order.new_tensor([near_base(n) - base for n, base in zip(self.lengths, bases, strict=True)])
        for name, x in zip(NEAR, wide, strict=True):
            setattr(self, name, shifted(x, shifts))
        self.known = [max(known, near_base(n)) for known, n in zip(self.known, self.lengths, strict=True)]

    def _close(self, transition: Transition, wide: list[Tensor], before: list[int], bases: list[int]) -> None:
        """Carry the keys of the pages that have become whole to their ends; ``wide`` as ``near``, from ``bases`` on."""
        done = [
            (b, n) for b, (old, new) in enumerate(zip(before, self.lengths, strict=True))
            for n in range(old // PAGE, new // PAGE)
        ]  # fmt: skip
        if not done:
            return
        row, page = self.table.new_tensor(done).long().unbind(1)
        inside = page - self.table.new_tensor(bases).long()[row] // PAGE
        k, w, beta = (x.unflatten(2, (-1, PAGE))[row, :, inside] for x in wide)  # [M, G, PAGE, ...]
        block = transition.block(k, k, HeadGate(w=w, beta=beta, factors=w.shape[-2]))
        ids = self.table[row, :, page].long()
        self.k[ids], self.factor[ids] = block.k, cast(Tensor, block.total)
        self.k_norm[row, :, page] = longest(block.k).amax(-1)

    def open_page(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, w and beta of each sequence's page that is not whole, ``[B, G, PAGE, ...]``; zero where none is."""
        starts = [n // PAGE * PAGE - near_base(n) for n in self.lengths]
        k, w, beta = (shifted(getattr(self, name), self.table.new_tensor(starts).long())[:, :, :PAGE] for name in NEAR)
        return k, w, beta

    def notes(self) -> dict[str, Any]:
        return {**super().notes(), **{name: getattr(self, name) for name in NEAR}, "known": list(self.known)}

    def check_crop(self, lengths: Sequence[int]) -> None:
        """As :meth:`KeyPool.check_crop`.

        Raises:
            ValueError: also where a page that would not be whole any more lies so far back that its keys, as they came,
                are not known.
        """
        super().check_crop(lengths)
        for known, n in zip(self.known, lengths, strict=True):
            if n % PAGE and n // PAGE * PAGE < known:
                raise ValueError(f"tokens: expected at least {known} (earlier keys have been carried), got {n}")

    @torch.no_grad()
    def crop(self, lengths: Sequence[int], notes: dict[str, Any] | None = None) -> None:
        if notes is None:
            self.check_crop(lengths)
            moves = [near_base(n) - near_base(now) for n, now in zip(lengths, self.lengths, strict=True)]
            index = torch.arange(2 * PAGE, device=self.k.device)
            ends = self.table.new_tensor([n - near_base(n) for n in lengths])
            for name in NEAR:
                x = shifted(getattr(self, name), self.table.new_tensor(moves).long())
                past = (index >= ends[:, None]).view(len(ends), 1, -1, *(1,) * (x.ndim - 3))
                setattr(self, name, x.masked_fill(past, 0))
            self.known = [min(known, n) for known, n in zip(self.known, lengths, strict=True)]
        else:
            self.known = list(notes["known"])
            for name in NEAR:
                setattr(self, name, notes[name])
        for b, n in enumerate(lengths):
            if n % PAGE:
                ids, start = self.pages[b, :, n // PAGE].long(), n // PAGE * PAGE - near_base(n)
                self.k[ids.to(self.k.device), : n % PAGE] = self.near_k[b, :, start : start + n % PAGE]
        super().crop(lengths, notes)

    @torch.no_grad()
    def select(self, index: Tensor) -> None:
        super().select(index)
        self.known = [self.known[b] for b in index.tolist()]

    @torch.no_grad()
    def reset(self, row: int) -> None:
        super().reset(row)
        self.known[row] = 0


def near_base(tokens: int) -> int:
    """The first token of the page before the one that is not whole."""
    return max(0, tokens // PAGE - 1) * PAGE


def shifted(x: Tensor, by: Tensor) -> Tensor:
    """``x [B, G, S, ...]`` from entry ``by[b]`` on, two pages of it; zero where there is none."""
    index = by[:, None] + torch.arange(2 * PAGE, device=x.device)
    there = (index >= 0) & (index < x.shape[2])
    index = index.clamp(0, x.shape[2] - 1)
    shape = (len(by), 1, 2 * PAGE, *(1,) * (x.ndim - 3))
    found = x.gather(2, index.view(shape).expand(-1, x.shape[1], -1, *x.shape[3:]))
    return found.masked_fill(~there.view(shape), 0)


class Separating(Protocol):
    """What the rows of a call need of the variant's forms."""

    @property
    def transition(self) -> Transition: ...

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate: ...


@torch.no_grad()
def extend_carried(
    forms: Separating, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: PagedCache, given: SoftmaxOptions
) -> tuple[tuple[Tensor, Tensor] | None, PagedCache]:
    """Attend to all that is there and add T tokens; as :func:`~attnzoo.forms.paged.extend_pages`."""
    (T, H, K), dtype, valid = q.shape[1:], compute_dtype(q), given.valid
    pool = cast(CarriedPool, state.pool)
    state.begin()
    if valid is not None:
        q, k, v = existing(valid, q, k, v)
    gate = forms.separated(gate, q, valid, None).per_token(q)
    there = append_valid(cast(Any, state) if state.tokens else None, valid, k)
    scaled = heads_first(q, H, dtype) * (K**-0.5 if given.scale is None else given.scale)
    state.look(scaled, k, valid)
    found = []
    for start in range(0, T, ROWS if state.tokens else T):
        now = slice(start, start + ROWS if state.tokens else T)
        part, exists = gate.slice(now.start, now.stop), None if valid is None else valid[:, now]
        if state.tokens:
            found.append(attend_carried(forms.transition, scaled[:, :, now], k[:, now], v[:, now], part, pool, exists,
                                        given.window))  # fmt: skip
        pool.add(forms.transition, k[:, now], v[:, now], part, exists)
    new = PagedCache.of(pool, state.evict, tokens=state.tokens + T, valid=there)
    if not found:
        return None, new
    o, lse = (torch.cat(x, 2) for x in zip(*found, strict=True))
    return (o, lse), new


def attend_carried(
    transition: Transition, q: Tensor, k: Tensor, v: Tensor, gate: Gate, pool: CarriedPool, valid: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of C new tokens over the keys in the pool and their own, before they are added.

    Args:
        q: scaled queries ``[B, H, C, K]``, in the dtype of the computation.
        k: ``[B, C, G, K]``.
        v: ``[B, C, G, V]``.
        gate: theirs, per token.
        valid: those that exist, ``[B, C]``, or None for all.
        window: each sees that many tokens, itself among them; None for all.

    Returns:
        ``[B, H, C, V]``, and the log-sum-exps ``[B, H, C]``.
    """
    (B, H, C, _), G, dtype, device = q.shape, k.shape[2], q.dtype, q.device
    R, least = H // G, least_logit(dtype)
    block = transition.block(q, heads_first(k, H, dtype), HeadGate.of(gate, q.transpose(1, 2)))
    back = block.q.unflatten(1, (G, R))  # [B, G, R, C, K], at the start of these tokens
    rank = torch.arange(C, device=device).expand(B, C) if valid is None else valid.cumsum(1) - 1
    at = pool.length.long()[:, None] + rank  # [B, C]
    # the page that is not whole, then the whole ones backwards; each query is carried on to the start of the page
    near, w, beta = pool.open_page()
    part = transition.block(near, near, HeadGate(w=w, beta=beta, factors=w.shape[-2]))
    whole = pool.length.long() // PAGE  # [B]
    carried, total = part.k, cast(Tensor, part.total)
    scores, ids = [], []
    for n in range(int((pool.pages >= 0).sum(-1).max()) + 1):
        page = (whole - n)[:, None].expand(B, G)
        id = pool.table.gather(2, page.clamp(0, pool.table.shape[2] - 1)[..., None])[..., 0].long()
        ids.append(torch.where(page >= 0, id, -1))
        if n:
            carried, total = pool.k[id], pool.factor[id]
        scores.append(back @ carried[:, :, None].mT.to(dtype))
        back = back @ total[:, :, None].to(dtype)
    found = torch.stack(ids, 2)  # [B, G, L]
    pages = (whole[:, None] - torch.arange(found.shape[2], device=device))[:, None].expand_as(found)
    index = (pages[..., None] * PAGE + torch.arange(PAGE, device=device)).flatten(2)  # [B, G, S]
    known = (found >= 0).repeat_interleave(PAGE, -1) & (index < pool.length[:, None, None])
    hidden = (~known[:, :, None, None]).expand(B, G, 1, C, -1)
    if window is not None:
        hidden = hidden | (index[:, :, None, None] <= at[:, None, None, :, None] - window)
    old, own = torch.cat(scores, -1), block.scores.unflatten(1, (G, R))
    if gate.log_decay is not None:
        inside = block_decay(heads_first(gate.log_decay, H, dtype))
        total_sum, page_sum, since = (cast(Tensor, x) for x in (pool.total, pool.page_sum, pool.since))
        inside_table = pages.clamp(0, page_sum.shape[2] - 1)[:, :, None].expand(B, G, R, -1)  # the first one may be new
        starts = page_sum.unflatten(1, (G, R)).gather(3, inside_table)
        within = cast(Tensor, pool.decay)[found.clamp(min=0)].permute(0, 1, 4, 2, 3).double()
        after = total_sum.unflatten(1, (G, R))[..., None] - (starts[..., None] + within).flatten(3)
        old = old + (after.clamp(max=0)[..., None, :] + inside.entry.unflatten(1, (G, R))[..., None]).to(dtype)
        own = own + inside.between.unflatten(1, (G, R))
        hidden = hidden | (index[:, :, None] < since.unflatten(1, (G, R))[..., None])[..., None, :]
    future = torch.ones(C, C, dtype=torch.bool, device=device).triu(1).expand(B, C, C)
    if valid is not None:
        future = future | ~valid[:, None]
    if window is not None:
        future = future | (at[:, None] <= at[..., None] - window)
    old = old.clamp(min=least).masked_fill(hidden, least)
    own = own.masked_fill(future[:, None, None], 0).clamp(min=least).masked_fill(future[:, None, None], least)
    logits = torch.cat([old, own], -1)
    cached = pool.v[found.clamp(min=0)].flatten(2, 3).to(dtype).masked_fill(~known[..., None], 0)
    values = torch.cat([cached, heads_first(v, G, dtype)], 2)
    o = logits.softmax(-1) @ values[:, :, None]
    return o.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2)
