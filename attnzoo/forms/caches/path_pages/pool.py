r"""Keys that transitions carry (PaTH, PaTH-FoX), in pages.

A cached key need not be multiplied by every later factor: in its page it stands as the page's last token left it, and
beside the page stands the product of its factors. A query is carried back instead, over the rows of its call, and then
from page to page,

.. math:: s_{tj} = \lambda\, (R_{j+1} \cdots R_e k_j)^\top R_{e+1} \cdots R_t q_t

with e the end of j's page. So a step reads each key once, rewrites those of the page that is not whole alone, and pages
that are evicted cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import block_decay, heads_first, scaled_queries
from attnzoo.algebra.triangular import householder_block
from attnzoo.forms.caches.pages.attention import step_options
from attnzoo.forms.caches.pages.page_table import Pages, PoolSizes
from attnzoo.forms.caches.pages.pool import PAGE, ROWS, KeyPool, longest
from attnzoo.forms.caches.pages.present_tokens import in_front
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import attend_with_sink, least_logit, logits_of
from attnzoo.kernels.common.untraced import untraced
from attnzoo.kernels.decode.path_state import NearKeys, PathGroups, PathTokens

NEAR = ("near_k", "near_w", "near_beta")


@dataclass(eq=False, kw_only=True)
class CarriedPool(KeyPool):
    """A pool whose pages hold keys as the page's last token so far leaves them.

    Args:
        factor: transposed product of the factors of a page, ``[P, K, K]``, in the dtype of the keys.
        near_k: the last keys as they came, that of token t at ``t % (2 PAGE)``, ``[B, G, 2 PAGE, K]``.
        near_w: their w, ``[B, G, 2 PAGE, K]``, or ``[B, G, 2 PAGE, n, K]`` with n factors per token.
        near_beta: their beta, ``[B, G, 2 PAGE]`` or ``[B, G, 2 PAGE, n]``.
        known: the first token whose key is among them, on the host; sequences can be cropped to pages from there on.
    """

    group: ClassVar[int] = 1
    on_host: ClassVar[bool] = True

    factor: Tensor
    near_k: Tensor
    near_w: Tensor
    near_beta: Tensor
    known: list[int]

    @classmethod
    def of(
        cls, sizes: PoolSizes, *, dtype: torch.dtype, values: torch.dtype, device: torch.device | str, decays: bool,
        pages: int = 0, tokens: int = 0, factors: int | None = None,
    ) -> Self:  # fmt: skip
        """A pool of empty sequences with keys in ``dtype`` and values in ``values``; see :meth:`Pages.empty`."""
        B, G, _, K, _ = sizes
        near = torch.zeros(B, G, 2 * PAGE, K, dtype=dtype, device=device)
        w = near.new_zeros(B, G, 2 * PAGE, *(() if factors is None else (factors,)), K)
        factor = torch.zeros(pages, K, K, dtype=dtype, device=device)
        pool = cls.empty(
            sizes, dtype=dtype, device=device, decays=decays, pages=pages, tokens=tokens, factor=factor,
            near_k=near, near_w=w, near_beta=w[..., 0].clone(), known=[0] * B,
        )  # fmt: skip
        pool.v = pool.v.to(values)
        return pool

    @classmethod
    def like(cls, state: Any, B: int, tokens: int, device: torch.device | str) -> Self:
        """As :meth:`KeyPool.like`, of a cache in such pages."""
        return cls._shaped(state.pool, B, tokens, device)

    @classmethod
    def _shaped(cls, pool: CarriedPool, B: int, tokens: int, device: torch.device | str) -> Self:
        """A pool of B empty sequences with heads and channels as in ``pool``."""
        sizes = pool.sizes._replace(B=B)
        return cls.of(
            sizes, dtype=pool.k.dtype, values=pool.v.dtype, device=device, decays=pool.decay is not None,
            pages=B * sizes.G, tokens=tokens, factors=pool.factors,
        )  # fmt: skip

    def holding(self, state: Any) -> CarriedPool:
        if state.in_pages:
            return cast(CarriedPool, state.keys())
        # its keys stand as the last token has left them all: as if no token before had a factor
        one = self._shaped(self, 1, len(state), state.k.device)
        w = state.k.new_zeros(*state.k.shape[:3], *one.near_w.shape[3:])
        one.add(state.k, state.v, Gate(log_decay=state.log_decay, w=w, beta=w[..., 0]), None)
        return one

    @property
    def factors(self) -> int | None:
        """The number of factors per token; None where w has one vector per token and no axis of factors."""
        return self.near_w.shape[3] if self.near_w.ndim == 5 else None

    @torch.no_grad()
    def add(self, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None) -> None:
        """Add T tokens to every sequence; arguments as :meth:`append`, with w and beta in the gate, per token."""
        before, bases = self.lengths, [near_base(n) for n in self.lengths]
        (B, T, G, _), dtype = k.shape, self.k.dtype
        near = self._near()
        self.append(k, v, gate.log_decay, valid)
        order, counts = in_front(B, T, valid, k.device)
        size = max(n - base for n, base in zip(self.lengths, bases, strict=True)) // PAGE * PAGE + 2 * PAGE
        there = torch.arange(T, device=k.device) < order.new_tensor(counts)[:, None]
        row, token = there.nonzero(as_tuple=True)
        place = token + order.new_tensor([n - base for n, base in zip(before, bases, strict=True)])[row]
        wide = []
        for old, new in zip(near, (k, gate.w, gate.beta), strict=True):
            x = torch.cat([old, old.new_zeros(B, G, size - 2 * PAGE, *old.shape[3:])], 2)
            x[row, :, place] = cast(Tensor, new)[row, order[row, token]].to(dtype)
            wide.append(x)
        pages = [
            (b, n) for b, (old, new) in enumerate(zip(before, self.lengths, strict=True)) if new > old
            for n in range(old // PAGE, -(-new // PAGE))
        ]  # fmt: skip
        self._carry(wide, pages, bases)
        shifts = order.new_tensor([near_base(n) - base for n, base in zip(self.lengths, bases, strict=True)])
        for name, x in zip(NEAR, wide, strict=True):
            setattr(self, name, self._rolled(shifted(x, shifts)))
        self.known = [max(known, near_base(n)) for known, n in zip(self.known, self.lengths, strict=True)]

    def _carry(self, near: Sequence[Tensor], pages: list[tuple[int, int]], bases: list[int]) -> None:
        """Carry the keys of ``pages`` (row and number) to their last tokens; ``near`` as they came, from ``bases``."""
        if not pages:
            return
        row, page = self.table.new_tensor(pages).long().unbind(1)
        inside = page - self.table.new_tensor(bases).long()[row] // PAGE
        k, w, beta = (x.unflatten(2, (-1, PAGE))[row, :, inside] for x in near)  # [M, G, PAGE, ...]
        block, ids = householder_block(k, k, w, beta), self.table[row, :, page].long()
        self.k[ids], self.factor[ids] = block.k, cast(Tensor, block.total)
        whole = (page + 1) * PAGE <= self.length[row]
        norms = longest(block.k).amax(-1)
        self.k_norm[row, :, page] = torch.where(whole[:, None], norms, self.k_norm[row, :, page])

    def _near(self) -> list[Tensor]:
        """What is known of the last tokens, from the page before the one that is not whole; zero where none is."""
        ends = self.table.new_tensor([n - near_base(n) for n in self.lengths])
        past = (torch.arange(2 * PAGE, device=ends.device) >= ends[:, None])[:, None]  # [B, 1, 2 PAGE]
        found = [self._rolled(getattr(self, name)) for name in NEAR]
        return [x.masked_fill(past.view(*past.shape, *(1,) * (x.ndim - 3)), 0) for x in found]

    def _rolled(self, x: Tensor) -> Tensor:
        """Entries ``[B, G, 2 PAGE, ...]`` from the page before the open one on, as they are kept, and the other way."""
        odd = self.table.new_tensor([near_base(n) // PAGE % 2 for n in self.lengths]).bool()
        return torch.where(odd.view(-1, *(1,) * (x.ndim - 1)), x.roll(PAGE, 2), x)

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
        if impl == "triton":
            groups = PathGroups(self.factor, near=NearKeys(self.near_k, self.near_w, self.near_beta))
            return step_pool(self, q, v, path_tokens(k, gate, count), groups, given)
        T, lengths = q.shape[1], self.lengths
        there = None if count is None else torch.arange(T, device=q.device) >= T - count[:, None]
        o, lse = self.extend(scaled_queries(q, given.scale), k, v, gate, there, given)
        self.lengths = lengths
        return attend_with_sink(o, lse, given.sink)[0].transpose(1, 2).to(v.dtype)

    def counted(self, counts: Sequence[int]) -> None:
        super().counted(counts)
        self.known = [max(known, near_base(n)) for known, n in zip(self.known, self.lengths, strict=True)]

    def keep(self, call: Call | None, kept: Tensor, length: Tensor) -> None:
        """Keep tokens as :meth:`KeyPool.keep` does.

        It waits for the device, because the host must know which pages hold these tokens.
        """
        assert call is not None
        before, T = self.lengths, call.q.shape[1]
        counts = list(zip(before, kept.tolist(), strict=True))
        left, there = [n + more for n, more in counts], [n + T * (more > 0) for n, more in counts]
        if left != there:
            self.lengths = there
            self.crop(left)
        self.lengths = before  # the host counts them after the step

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
            self.known = [min(known, n) for known, n in zip(self.known, lengths, strict=True)]
        else:
            same = notes["near_k"] is self.near_k  # then steps have written over what they needed no more
            kept = zip(notes["known"], self.known, strict=True)
            self.known = [max(then, now) if same else then for then, now in kept]
            for name in NEAR:
                setattr(self, name, notes[name])
        super().crop(lengths, notes)
        near, bases = self._near(), [near_base(n) for n in lengths]
        pages = [(b, n // PAGE) for b, n in enumerate(lengths) if n % PAGE]
        self._carry(near, pages, bases)
        for b, n in pages:
            start = n * PAGE - bases[b]
            self.k_norm[b, :, n] = longest(near[0][b, :, start : start + PAGE]).amax(-1)

    @torch.no_grad()
    def select(self, index: Tensor) -> None:
        super().select(index)
        self.known = [self.known[b] for b in index.tolist()]

    @torch.no_grad()
    def reset(self, row: int) -> None:
        super().reset(row)
        self.known[row] = 0

    @torch.no_grad()
    def adopt(self, row: int, other: Pages, tokens: int, twin: int | None = None) -> None:
        super().adopt(row, other, tokens, twin)
        self.known[row] = cast(CarriedPool, other).known[0]


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


def step_pool(
    pool: KeyPool, q: Tensor, v: Tensor, tokens: PathTokens, groups: PathGroups, given: SoftmaxOptions,
    carry: bool = True,
) -> Tensor:  # fmt: skip
    """Add few tokens to ``pool`` and attend, in kernels: ``paged_path_step``, with values in the dtype of the pool."""
    from attnzoo.kernels.decode import paged_path_step

    x = v.to(pool.v.dtype)
    return paged_path_step(q, x, tokens, pool.state(), groups, options=step_options(given), carry=carry).to(v.dtype)


def path_tokens(k: Tensor, gate: Gate, count: Tensor | None) -> PathTokens:
    """New tokens with gates per token, of which each sequence gets ``count [B]``, or all."""
    log_decay = None if gate.log_decay is None else gate.log_decay.float()
    return PathTokens(k, cast(Tensor, gate.w), cast(Tensor, gate.beta), log_decay, count)


def attend_carried(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gate,
    pool: CarriedPool,
    valid: Tensor | None,
    given: SoftmaxOptions,
) -> tuple[Tensor, Tensor]:
    """Attention of C new tokens over the keys in the pool and their own, before they are added.

    Args:
        q: scaled queries ``[B, H, C, K]``, in the dtype of the computation.
        k: ``[B, C, G, K]``.
        v: ``[B, C, G, V]``.
        gate: theirs, per token.
        valid: those that exist, ``[B, C]``, or None for all.
        given: options of the call.

    Returns:
        ``[B, H, C, V]``, and the log-sum-exps ``[B, H, C]``.
    """
    (B, H, C, _), G, dtype, device, window = q.shape, k.shape[2], q.dtype, q.device, given.window
    R, least = H // G, least_logit(dtype)
    w, beta = (heads_first(cast(Tensor, x), H, dtype) for x in (gate.w, gate.beta))
    block = householder_block(q, heads_first(k, H, dtype), w, beta)
    back = block.q.unflatten(1, (G, R))  # [B, G, R, C, K], at the start of these tokens
    rank = torch.arange(C, device=device).expand(B, C) if valid is None else valid.cumsum(1) - 1
    at = pool.length.long()[:, None] + rank  # [B, C]
    last = (pool.length.long() - 1).div(PAGE, rounding_mode="floor")  # [B]: the pages from there on backwards
    scores, ids = [], []
    for n in range(int((pool.pages >= 0).sum(-1).max())):
        page = (last - n)[:, None].expand(B, G)
        id = pool.table.gather(2, page.clamp(0, pool.table.shape[2] - 1)[..., None])[..., 0].long()
        ids.append(torch.where(page >= 0, id, -1))
        scores.append(back @ pool.k[id][:, :, None].mT.to(dtype))
        back = back @ pool.factor[id][:, :, None].to(dtype)
    found = torch.stack(ids, 2) if ids else pool.table[:, :, :0].long()  # [B, G, L]
    pages = (last[:, None] - torch.arange(found.shape[2], device=device))[:, None].expand_as(found)
    index = (pages[..., None] * PAGE + torch.arange(PAGE, device=device)).flatten(2)  # [B, G, S]
    known = (found >= 0).repeat_interleave(PAGE, -1) & (index < pool.length[:, None, None])
    hidden = (~known[:, :, None, None]).expand(B, G, 1, C, -1)
    if window is not None:
        hidden = hidden | (index[:, :, None, None] <= at[:, None, None, :, None] - window)
    old = logits_of(torch.cat([back[..., :0], *scores], -1), given)
    own = logits_of(block.scores.unflatten(1, (G, R)), given)
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
