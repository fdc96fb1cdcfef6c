"""Attention over keys that stand in groups of pages as later tokens carry them, in plain operations."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import block_decay
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import heads_first
from attnzoo.algebra.triangular import householder_block
from attnzoo.forms.caches.pages.page_table import PAGE
from attnzoo.forms.caches.path_pages.factors import eye_like
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.readout import least_logit, logits_of


def attend_carried(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, pool: Any, valid: Tensor | None, given: SoftmaxOptions
) -> tuple[Tensor, Tensor]:
    """Attention of C new tokens over the keys in the pool and their own, before they are added.

    Args:
        q: scaled queries ``[B, H, C, K]``, in the dtype of the computation.
        k: ``[B, C, G, K]``.
        v: ``[B, C, G, V]``.
        gate: theirs, per token.
        pool: a :class:`~attnzoo.forms.caches.path_pages.pool.CarriedPool`, which is not changed.
        valid: those that exist, ``[B, C]``, or None for all.
        given: options of the call.

    Returns:
        ``[B, H, C, V]``, and the log-sum-exps ``[B, H, C]``.
    """
    (B, H, C, _), G, dtype, device, window = q.shape, k.shape[2], q.dtype, q.device, given.window
    R, least, each = H // G, least_logit(dtype), pool.group
    w, beta = (heads_first(cast(Tensor, x), H, dtype) for x in (gate.w, gate.beta))
    block = householder_block(q, heads_first(k, H, dtype), w, beta)
    back = block.q.unflatten(1, (G, R))  # [B, G, R, C, K], at the start of these tokens
    rank = torch.arange(C, device=device).expand(B, C) if valid is None else valid.cumsum(1) - 1
    at = pool.length.long()[:, None] + rank  # [B, C]
    opened = torch.tensor(pool.lengths, device=pool.pages.device)[:, None] // pool.span  # [B, 1]: the open group
    scores, ids, numbers = [back[..., :0]], [pool.table[:, :, :0].long()], [pool.table[:, 0, :0].long()]
    for n in range(pool.groups_alive()):  # from there on backwards
        found, pages = pool.alive_in(opened - n)
        kept = pages[0] % each  # places in the group of pages that some head has
        ids.append(found.to(device))
        numbers.append(pages.to(device))
        if n:
            keys = pool.k[ids[-1].clamp(min=0)].flatten(2, 3)  # [B, G, S, K]
        else:
            keys = pool.open_keys.unflatten(2, (each, PAGE))[:, :, kept.to(device)].flatten(2, 3)
        scores.append(back @ keys[:, :, None].mT.to(dtype))
        number = (opened - n).to(device)[..., None]  # [B, 1, 1]
        there = number.clamp(0, pool.factors.shape[2] - 1)[..., None, None].expand(B, G, 1, *pool.open_factor.shape[2:])
        factor = pool.factors.gather(2, there)[:, :, 0] if n else pool.open_factor
        none = (number < pool.base[:, None, None]) if n else (pool.length % pool.span == 0)[:, None, None]
        factor = torch.where(none[..., None], eye_like(factor), factor)
        back = back @ factor[:, :, None].to(dtype)
    found = torch.cat(ids, 2)  # [B, G, L]
    pages = torch.cat(numbers, 1)[:, None].expand_as(found)
    index = (pages[..., None] * PAGE + torch.arange(PAGE, device=device)).flatten(2)  # [B, G, S]
    known = (found >= 0).repeat_interleave(PAGE, -1) & (index < pool.length[:, None, None])
    hidden = (~known[:, :, None, None]).expand(B, G, 1, C, -1)
    if window is not None:
        hidden = hidden | (index[:, :, None, None] <= at[:, None, None, :, None] - window)
    old = logits_of(torch.cat(scores, -1), given)
    own = logits_of(block.scores.unflatten(1, (G, R)), given)
    if gate.log_decay is not None:
        inside = block_decay(heads_first(gate.log_decay, H, dtype))
        total_sum, page_sum, since = (cast(Tensor, x) for x in (pool.total, pool.page_sum, pool.since))
        inside_table = pages.clamp(0, page_sum.shape[2] - 1)[:, :, None].expand(B, G, R, -1)  # some may be new
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
