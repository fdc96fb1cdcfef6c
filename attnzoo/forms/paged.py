"""A cache in the pages of a pool, which may give up keys for ever, and attention over it."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads, is_closed
from attnzoo.algebra.pruning import QueryBounds
from attnzoo.algebra.transitions import compute_dtype, heads_first
from attnzoo.forms.cache import append_valid, check_rows, whole
from attnzoo.forms.offload import Offload
from attnzoo.forms.options import SoftmaxOptions, existing
from attnzoo.forms.pool import PAGE, KeyPool, LastRows
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import least_logit

ROWS = 128  # at a time


@dataclass(frozen=True, eq=False)
class Eviction:
    """What a cache goes by when it gives up keys.

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
        """The same on another device."""
        bounds, away = self.bounds, self.offload
        if bounds is not None:
            score = None if bounds.score is None else bounds.score.to(device)
            bounds = QueryBounds(bounds.query.to(device), bounds.own.to(device), score)
        if away is not None:
            away = replace(away, query=away.query.to(device), own=away.own.to(device))
        return replace(self, bounds=bounds, offload=away)

    def give_up(self, pool: KeyPool) -> int:
        """Let ``pool`` give up what no row to come needs; how many pages have become free."""
        if self.offload is None:
            return pool.evict(self.log_eps, self.bounds, self.window)
        return pool.evict(self.log_eps, self.offload.bounds, self.window, self.offload.keep)

    def look(self, pool: KeyPool, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        """Bring back the keys that the rows of a call may need, before its tokens are added.

        Args:
            q: scaled queries ``[B, H, T, K]``, in the dtype of the computation.
            k: their keys ``[B, T, G, K]``.
            valid: those that exist, ``[B, T]``, or None for all.
        """
        if self.offload is not None:
            k = heads_first(k.to(pool.k.dtype), q.shape[1], q.dtype)
            self.offload.look(pool, q, k, valid, self.log_eps, self.window)

    def of_rows(self, rows: int) -> Eviction:
        """The same for ``rows`` sequences of which nothing has been seen."""
        if self.offload is None:
            return self
        (_, H), G = self.offload.query.shape, len(self.offload.pages[0])
        return replace(self, offload=Offload.empty(rows, G, H, self.offload.query.device))


@dataclass(frozen=True, eq=False)
class PagedCache:
    """What the softmax side remembers, in the pages of a :class:`~attnzoo.forms.pool.KeyPool`.

    A call that goes on from it changes the pool and gives a new object; this one may be gone on from once more in its
    place (after a call that failed). Keys are given up when a call begins, for what its cache had seen before it. So
    the tokens of the last call can always be taken back.

    Args:
        pool: the keys and values.
        evict: what they are given up by, or None.
        tokens: how many it has seen, padding included.
        valid: which of them exist, ``[B, tokens]`` bool, or None for all.
        phase: RoPE's total angle so far, as in :class:`attnzoo.KVCache`.
        angle: RoPE's angle where all tokens had the same, or None.
        lengths: tokens of each sequence that are stored.
        notes: by which the pool comes back to it; empty until tokens that are taken back have left the pool.
        mark: its name.
        base: the state of the pool that it is, or is the beginning of.
    """

    pool: KeyPool
    evict: Eviction | None = None
    tokens: int = 0
    valid: Tensor | None = None
    phase: Tensor | None = None
    angle: Tensor | None = None
    lengths: tuple[int, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict, repr=False)
    mark: int = 0
    base: int = 0

    @staticmethod
    def of(pool: KeyPool, evict: Eviction | None = None, **seen: Any) -> PagedCache:
        """The cache that ``pool`` now is; ``seen`` are ``tokens``, ``valid``, ``phase`` and ``angle``."""
        pool.mark = mark = pool.new_mark()
        lengths = tuple(pool.lengths)
        return PagedCache(pool, evict, lengths=lengths, notes=pool.notes(), mark=mark, base=mark, **seen)

    def __len__(self) -> int:
        return self.tokens

    def check(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> None:
        """The inputs of a call fit.

        Raises:
            ValueError: another batch, other heads or channels, a gate with other parts, or a gradient is expected.
        """
        pool, (B, _, H, K), G, V = self.pool, q.shape, key_heads(q, v, gate), v.shape[3]
        R = H // G if pool.decay is None else pool.decay.shape[2]
        got, expected = (B, H, G, K, V), (len(pool.lengths), R * pool.table.shape[1], *pool.table.shape[1:2])
        expected = (*expected, pool.k.shape[2], pool.v.shape[2])
        if got != expected:
            raise ValueError(f"state: expected pages of B, H, G, K, V = {got}, got {expected}")
        if (gate.log_decay is None) != (pool.decay is None):
            needs, has = ("none", "some") if gate.log_decay is None else ("those of all cached tokens", "none")
            raise ValueError(f"state.pool.decay: expected {needs}, as the gate is, got {has} (of another variant?)")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("state: expected torch.no_grad(), as keys in pages have no gradient, got inputs with one")

    def begin(self) -> None:
        """Make ready for a call: the pool is what it was when this cache was made, but for keys that are given up."""
        self._settle()
        pages = sum(n // PAGE for n in self.lengths)
        if self.evict is not None and pages != self.pool.looked:  # at most once a page
            if self.evict.give_up(self.pool) and 2 * self.pool.used() < len(self.pool.refs):
                self.pool.compact()
            self.pool.looked = pages

    def _settle(self) -> None:
        """Make the pool what it was when this cache was made: without tokens that were taken back, or of a failed call.

        Raises:
            ValueError: another call has gone on from this cache, and from what it gave.
        """
        pool = self.pool
        if pool.mark == self.base:
            if tuple(pool.lengths) != self.lengths:
                pool.crop(self.lengths)
                self.notes.update(pool.notes())
        elif pool.before == self.mark:
            pool.crop(self.lengths, self.notes or None)
        else:
            raise ValueError("state: expected the last that this pool of keys has given, got an earlier one")
        pool.before, pool.mark = self.mark, pool.new_mark()

    def reorder(self, index: Tensor) -> PagedCache:
        """The rows ``index`` of the batch, in that order; see :func:`~attnzoo.forms.cache.check_rows`.

        Rows that are the same share their pages. The pool is changed in place.
        """
        check_rows(index, self.pool.length)
        self._settle()
        shared = self.phase is None or self.phase.shape[0] != len(self.lengths)
        phase = self.phase if shared else cast(Tensor, self.phase)[index]
        valid = None if self.valid is None else self.valid[index]
        self.pool.select(index)
        if self.evict is not None and self.evict.offload is not None:
            self.evict.offload.select(index)
        return self._after(self.tokens, valid, phase)

    def crop(self, tokens: int) -> PagedCache:
        """The cache as it was after the first ``tokens`` tokens. This one can be gone on from in its place.

        Keys that have been given up since stay so where no row after those tokens needs them: they were certified for
        all rows to come when they went, and that holds from the first token on at which it is true.

        Raises:
            ValueError: more than there are, fewer than 0, keys that rows from there on would need, or RoPE's phase
                where its angle varied.
        """
        whole(tokens)
        if not 0 <= tokens <= self.tokens:
            raise ValueError(f"tokens: expected 0 to {self.tokens}, got {tokens}")
        if tokens == self.tokens:
            return self
        if self.pool.mark != self.base:
            self._settle()
        if self.phase is not None and self.angle is None:
            all_of_them = f"all {self.tokens} (the angles of single tokens are not kept)"
            raise ValueError(f"tokens: expected {all_of_them}, got {tokens}")
        lengths = self._lengths(tokens)
        away = None if self.evict is None else self.evict.offload
        if away is not None:  # a page that will be written to, and what lies behind it, which goes with the tokens
            ends = self.pool.first.new_tensor([n // PAGE for n in lengths])[:, None]
            away.bring_back(self.pool, self.pool.first.minimum(ends))
        elif not self._may_crop(lengths):
            more = range(tokens + 1, self.tokens + 1)
            least = more[bisect_left(more, True, key=lambda n: self._may_crop(self._lengths(n)))]
            raise ValueError(
                f"tokens: expected at least {least} (keys that earlier rows need are evicted), got {tokens}"
            )
        self.pool.check_crop(lengths)
        valid, phase = None if self.valid is None else self.valid[:, :tokens], None
        if self.angle is not None:
            phase = self.pool.length.new_tensor(lengths).double()[:, None, None, None] * self.angle.double()
        mark = self.pool.new_mark()
        return replace(
            self, tokens=tokens, valid=valid, phase=phase, lengths=tuple(lengths), notes={}, mark=mark,
            base=self.pool.mark,
        )  # fmt: skip

    def _lengths(self, tokens: int) -> list[int]:
        """Stored tokens of each sequence after the first ``tokens``."""
        return [tokens] * len(self.lengths) if self.valid is None else self.valid[:, :tokens].sum(1).tolist()

    def _may_crop(self, lengths: list[int]) -> bool:
        pool = self.pool
        if bool((pool.first.cpu() > torch.tensor(lengths)[:, None] // PAGE).any()):
            return False
        if self.evict is None or not bool(pool.first.any()):
            return True
        certified = pool.certified(self.evict.log_eps, self.evict.bounds, self.evict.window, lengths)
        return bool((pool.first <= certified).all())

    def _after(self, tokens: int, valid: Tensor | None, phase: Tensor | None) -> PagedCache:
        self.pool.before = -1
        return PagedCache.of(self.pool, self.evict, tokens=tokens, valid=valid, phase=phase, angle=self.angle)

    def look(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        """As :meth:`Eviction.look`, where there is one."""
        if self.evict is not None:
            self.evict.look(self.pool, q, k, valid)

    def to(self, device: torch.device | str) -> PagedCache:
        """A copy on another device; dtypes stay."""
        other = copy.deepcopy(self)
        for name, x in other.pool.tensors().items():
            setattr(other.pool, name, x.to(device))
        valid, phase, angle = (None if x is None else x.to(device) for x in (other.valid, other.phase, other.angle))
        evict = None if other.evict is None else other.evict.to(device)
        seen = {"tokens": self.tokens, "valid": valid, "phase": phase, "angle": angle}
        return PagedCache.of(other.pool, evict, **seen)

    def detach(self) -> PagedCache:
        """Itself: pages have no history of gradients."""
        return self


class Additive(Protocol):
    """What the rows of a call need of the variant's forms."""

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate: ...

    def place(
        self, q: Tensor, k: Tensor, gate: Gate, state: Any, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...


def key_heads(q: Tensor, v: Tensor, gate: Gate) -> int:
    """G, or H where each query head turns the keys by angles of its own."""
    turned = gate.angle is not None and gate.angle.ndim > 1 and gate.angle.shape[2] > 1
    return q.shape[2] if turned else v.shape[2]


@torch.no_grad()
def extend_pages(
    forms: Additive, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: PagedCache, given: SoftmaxOptions
) -> tuple[tuple[Tensor, Tensor] | None, PagedCache]:
    """Add T tokens to the pages and attend to all that is there.

    ``prune`` leaves nothing out here, and so drops nothing beyond what eviction has.

    Returns:
        Output ``[B, H, T, V]`` without the sink and its log-sum-exp ``[B, H, T]``, or None from an empty cache, where
        the rows are for forms that read no pages; and the new cache.
    """
    (B, T, H, K), dtype, pool, valid = q.shape, compute_dtype(q), state.pool, given.valid
    state.begin()
    if valid is not None:
        q, k, v = existing(valid, q, k, v)
    gate = forms.separated(gate, q, valid, None)
    q, k, phase, angle = forms.place(q, k, gate, state, valid)
    scaled = heads_first(q, H, dtype) * (K**-0.5 if given.scale is None else given.scale)
    state.look(scaled, k, valid)
    g = None if gate.log_decay is None else gate.log_decay.expand(B, T, H)
    rank = torch.arange(T, device=q.device).expand(B, T) if valid is None else valid.cumsum(1) - 1
    at = (pool.length.long()[:, None] + rank).clamp(min=0)
    since = None if g is None else _since(cast(Tensor, pool.since), g, at)
    pool.append(k, expand_heads(v, k.shape[2]), g, valid)
    there = append_valid(cast(Any, state) if state.tokens else None, valid, k)
    new = PagedCache.of(pool, state.evict, tokens=state.tokens + T, valid=there, phase=phase, angle=angle)
    if not state.tokens:
        return None, new
    found = []
    for start in range(0, T, ROWS):
        now = slice(start, start + ROWS)
        seen = None if since is None else since[:, :, now]
        found.append(attend_rows(scaled[:, :, now], pool, at[:, now], seen, given.window))
    o, lse = (torch.cat(x, 2) for x in zip(*found, strict=True))
    return (o, lse), new


def refuses_pages(call: Call, unavailable: Callable[[Tensor, Tensor], str]) -> str:
    """Why the kernels of ``attnzoo.kernels.decode`` cannot serve a call over a :class:`PagedCache`, or "".

    Args:
        call: over pages.
        unavailable: why they cannot take q and v (any call), or "".
    """
    from attnzoo.kernels.decode.plan import MOST_ROWS

    if "return_lse" in call.options:
        return "the triton form has no option return_lse over keys in pages"
    if call.q.shape[1] > MOST_ROWS:
        return f"the triton form reads keys in pages for 1 to {MOST_ROWS} tokens at a time"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)):
        return "keys in pages have no gradient (run it under torch.no_grad())"
    return unavailable(call.q, call.v)


@torch.no_grad()
def step_pages(
    forms: Additive, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: PagedCache, given: SoftmaxOptions
) -> tuple[Tensor, PagedCache]:
    """As :func:`extend_pages`, for few tokens, in kernels; the output is ``[B, T, H, V]``."""
    (B, T, H, K), pool, valid = q.shape, state.pool, given.valid
    state.begin()
    if valid is not None:
        q, k, v = existing(valid, q, k, v)
        gate = forms.separated(gate, q, valid, None)
    q, k, phase, angle = forms.place(q, k, gate, state, valid)
    if state.evict is not None and state.evict.offload is not None:
        state.look(heads_first(q, H, compute_dtype(q)) * (K**-0.5 if given.scale is None else given.scale), k, valid)
    there, g = append_valid(cast(Any, state), valid, k), gate.log_decay
    g = None if g is None else g.expand(B, T, H)
    last = LastRows.of(valid, B, T)
    q, k, v = (last.take(x) for x in (q, k, expand_heads(v, k.shape[2])))
    g = None if g is None else last.take(g)
    pool.reserve(last.counts)
    o = last.put(append_and_attend(pool, q, k, v, g, given, "triton", last.count))
    pool.lengths = [n + more for n, more in zip(pool.lengths, last.counts, strict=True)]
    seen = {"tokens": state.tokens + T, "valid": there, "phase": phase, "angle": angle}
    return o, PagedCache.of(pool, state.evict, **seen)


def append_and_attend(
    pool: KeyPool, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, given: SoftmaxOptions,
    impl: Literal["triton", "reference"], count: Tensor | None = None, prune: bool = True,
) -> Tensor:  # fmt: skip
    """Write few tokens into their pages and attend, ``[B, T, H, V]`` in v's dtype; the host counts them elsewhere.

    Args:
        pool: with pages for them.
        q: in its place, as k is.
        log_decay: ``[B, T, H]`` or None.
        given: what it asks for; ``valid`` and ``return_lse`` are not looked at.
        impl: of ``attnzoo.kernels.decode``.
        count: tokens that each sequence gets, ``[B]`` int32; None for all of them.
        prune: whether the step leaves out what ``given.prune`` allows.
    """
    from attnzoo.kernels.decode import paged_append, paged_attention

    k, x = (x.to(pool.k.dtype) for x in (k, v))
    if log_decay is not None and pool.decay is not None:
        log_decay = log_decay.to(pool.decay.dtype)
    sums: dict[str, Any] = {"decay": pool.decay, "page_sum": pool.page_sum}
    since = paged_append(
        k, x, keys=pool.k, values=pool.v, table=pool.table, length=pool.length, k_norm=pool.k_norm,
        log_decay=log_decay, total=pool.total, since=pool.since, n_log=pool.n_log, closed=pool.closed, count=count,
        impl=impl, **sums,
    )  # fmt: skip
    if prune and given.prune is not None:
        sums |= {
            "prune": given.prune, "k_norm": pool.k_norm, "n_log": pool.n_log, "logit_bound": given.logit_bound
        }  # fmt: skip
    o = paged_attention(
        q.to(pool.k.dtype), pool.k, pool.v, pool.table, pool.first, pool.length, since=since, scale=given.scale,
        window=given.window, sink=given.sink, impl=impl, **sums,
    )  # fmt: skip
    return o.to(v.dtype)


def _since(before: Tensor, g: Tensor, at: Tensor) -> Tensor:
    """The first token that closed gates ``g [B, T, H]`` let each of the tokens ``at [B, T]`` see, ``[B, H, T]``."""
    closed = torch.where(is_closed(g), at[..., None], 0).cummax(1).values
    return closed.transpose(1, 2).maximum(before[..., None].long())


def attend_rows(
    q: Tensor, pool: KeyPool, at: Tensor, since: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens ``at`` over the keys that are there, in plain operations.

    Args:
        q: scaled queries ``[B, H, T, K]``, in the dtype of the computation.
        pool: with these tokens' keys.
        at: their numbers in their sequences, ``[B, T]``.
        since: the first token that closed gates let each see, ``[B, H, T]``, or None.
        window: each sees that many tokens, itself among them; None for all.

    Returns:
        ``[B, H, T, V]``, and the log-sum-exps ``[B, H, T]``.
    """
    (B, H, T, _), (_, G, N) = q.shape, pool.table.shape
    R = H // G
    L = max(1, int((pool.pages >= 0).sum(-1).max()))
    n = pool.first[..., None].long() + torch.arange(L, device=q.device)  # [B, G, L]
    ids = pool.table.gather(2, n.clamp(max=N - 1))
    ids = torch.where(n < N, ids, -1)
    index = (n[..., None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(2)  # [B, G, S]
    ids, there = ids.clamp(min=0).long(), (ids >= 0).repeat_interleave(PAGE, -1)
    k, v = (x[ids].flatten(2, 3).to(q.dtype)[:, :, None] for x in (pool.k, pool.v))  # [B, G, 1, S, K]
    logits = q.unflatten(1, (G, R)) @ k.mT  # [B, G, R, T, S]
    row = at[:, None, :, None]  # [B, 1, T, 1]
    hidden = (index[:, :, None] > row) | ~there[:, :, None]  # [B, G, T, S]
    if window is not None:
        hidden = hidden | (index[:, :, None] <= row - window)
    hidden = hidden[:, :, None]
    if pool.decay is not None:
        within = pool.decay[ids].permute(0, 1, 4, 2, 3)  # [B, G, R, L, PAGE]
        before = cast(Tensor, pool.page_sum).unflatten(1, (G, R))
        before = before.gather(3, n.clamp(max=N - 1)[:, :, None].expand(B, G, R, L))
        c = (before[..., None] + within.double()).flatten(3)  # [B, G, R, S]
        place = (at[:, None] - pool.first[..., None] * PAGE).clamp(min=0)  # [B, G, T]
        own = c.gather(3, place[:, :, None].expand(B, G, R, T))
        logits = logits + (own[..., None] - c[..., None, :]).clamp(max=0).to(logits.dtype)
        if since is not None:
            hidden = hidden | (index[:, :, None, None] < since.unflatten(1, (G, R))[..., None])
    logits = logits.clamp(min=least_logit(logits.dtype)).masked_fill(hidden, least_logit(logits.dtype))
    unread = (~there | (index >= pool.length[:, None, None]))[:, :, None, :, None]  # may hold what others have left
    o = logits.softmax(-1) @ v.masked_fill(unread, 0)
    return o.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2)
