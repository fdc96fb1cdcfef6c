"""Attention over pages of keys that stand as they were written, in plain operations and in kernels."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.pruning import Prune
from attnzoo.forms.caches.pages.page_table import PAGE, Pages
from attnzoo.forms.options import READS_LESS, SoftmaxOptions
from attnzoo.forms.readout import least_logit, logits_of
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.decode import paged_append, paged_attention
from attnzoo.kernels.decode.eight_bits import written


def step_options(given: SoftmaxOptions) -> AttentionOptions:
    """Options of the kernels over pages, whose bound of pruning is ``"tail"``: that of the paper never lets more go."""
    prune = None if given.prune is None else Prune(given.prune.eps)
    bound = None if prune is None else given.logit_bound
    return AttentionOptions(**given.of_kernels(*READS_LESS), prune=prune, logit_bound=bound)


def append_and_attend(
    pool: Pages, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, given: SoftmaxOptions,
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
    dtype = v.dtype if pool.exponents is not None else pool.k.dtype
    k, x = (x.to(dtype) for x in (k, v))
    if log_decay is not None and pool.decay is not None:
        log_decay = log_decay.to(pool.decay.dtype)
    state = pool.state()
    visible = paged_append(k, x, state, log_decay=log_decay, count=count, impl=impl)
    options = step_options(given)
    o = paged_attention(q.to(dtype), state, first_visible=visible, options=options, impl=impl)
    return o.to(v.dtype)


def first_visible(before: Tensor, g: Tensor, at: Tensor) -> Tensor:
    """The first token that closed gates ``g [B, T, H]`` let each of the tokens ``at [B, T]`` see, ``[B, H, T]``."""
    closed = torch.where(is_closed(g), at[..., None], 0).cummax(1).values
    return closed.transpose(1, 2).maximum(before[..., None].long())


def attend_rows(
    q: Tensor, pool: Pages, at: Tensor, since: Tensor | None, given: SoftmaxOptions
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens ``at`` over the keys that are there, in plain operations.

    Args:
        q: scaled queries ``[B, H, T, K]``, in the dtype of the computation.
        pool: with these tokens' keys.
        at: their numbers in their sequences, ``[B, T]``.
        since: the first token that closed gates let each see, ``[B, H, T]``, or None.
        given: options of the call.

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
    k, v = (x.flatten(2, 3).to(q.dtype)[:, :, None] for x in written(pool.state().pages, ids))  # [B, G, 1, S, K]
    logits = logits_of(q.unflatten(1, (G, R)) @ k.mT, given)  # [B, G, R, T, S]
    row = at[:, None, :, None]  # [B, 1, T, 1]
    hidden = (index[:, :, None] > row) | ~there[:, :, None]  # [B, G, T, S]
    if given.window is not None:
        hidden = hidden | (index[:, :, None] <= row - given.window)
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
