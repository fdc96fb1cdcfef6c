"""Attention over a cache in pages, in plain operations and in kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads, is_closed
from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.transitions import compute_dtype, heads_first
from attnzoo.algebra.values import records
from attnzoo.forms.caches.pages.paged_cache import PagedCache
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool, LastRows
from attnzoo.forms.caches.state import append_valid
from attnzoo.forms.options import SoftmaxOptions, existing
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import least_logit
from attnzoo.kernels.common.options import AttentionOptions

ROWS = 128  # at a time


class Additive(Protocol):
    """What the rows of a call need of the variant's forms."""

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate: ...

    def place(
        self, q: Tensor, k: Tensor, gate: Gate, state: Any, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...


@torch.no_grad()
def extend_pages(
    forms: Additive, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: PagedCache, given: SoftmaxOptions
) -> tuple[tuple[Tensor, Tensor] | None, PagedCache]:
    """Add T tokens to the pages and attend to all that is there.

    ``prune`` leaves nothing out here, and so drops nothing beyond what eviction has.

    Returns:
        Output ``[B, H, T, V]`` without the sink and its log-sum-exp ``[B, H, T]``, or None where there were no
        keys, as the rows are for forms that read no pages; and the new cache.
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
    if not state.stores:
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
    if records(call.q, call.k, call.v):
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


def step_options(given: SoftmaxOptions) -> AttentionOptions:
    """Options of the kernels over pages, whose bound of pruning is ``"tail"``: that of the paper never lets more go."""
    prune = None if given.prune is None else Prune(given.prune.eps)
    bound = None if prune is None else given.logit_bound
    return AttentionOptions(given.scale, prune, given.window, given.sink, None, bound)


def append_and_attend(
    pool: KeyPool, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, given: SoftmaxOptions,
    impl: Literal["triton", "reference"], count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write few tokens into their pages and attend, ``[B, T, H, V]`` in v's dtype; the host counts them elsewhere.

    Args:
        pool: with pages for them.
        q: in its place, as k is.
        log_decay: ``[B, T, H]`` or None.
        given: what it asks for; ``valid`` and ``return_lse`` are not looked at. Where it prunes, the pages that the
            certificate ``"tail"`` lets go are not read, whatever its bound: that of the paper never lets more go.
        impl: of ``attnzoo.kernels.decode``.
        count: tokens that each sequence gets, ``[B]`` int32; None for all of them.
    """
    from attnzoo.kernels.decode import paged_append, paged_attention

    k, x = (x.to(pool.k.dtype) for x in (k, v))
    if log_decay is not None and pool.decay is not None:
        log_decay = log_decay.to(pool.decay.dtype)
    state = pool.state()
    visible = paged_append(k, x, state, log_decay=log_decay, count=count, impl=impl)
    options = step_options(given)
    o = paged_attention(q.to(pool.k.dtype), state, first_visible=visible, options=options, impl=impl)
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
