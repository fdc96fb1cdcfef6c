"""Attention over pages written out densely: the definition the kernels are held to. No Triton here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnzoo.algebra.gate import expand_heads, is_closed
from attnzoo.kernels.common.constants import CLOSED
from attnzoo.kernels.common.dense_reference import dense_readout
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.decode.eight_bits import write, written
from attnzoo.kernels.decode.state import PagedState
from attnzoo.precision import wide_dtype


def paged_reference(
    q: Tensor, state: PagedState, *, first_visible: Tensor | None = None, log_decay: Tensor | None = None,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """``paged_attention`` in PyTorch, in float64 for float64 inputs, else in float32; memory O(B H T N PAGE)."""
    (_, _, k_norm, _), (table, first, length), gates = state
    (B, T, H, K), PAGE, G = q.shape, state.pages.keys.shape[1], table.shape[1]
    wide = wide_dtype(q.dtype)
    N = max(1, -(-max(length.tolist(), default=0) // PAGE))  # no page that a table has room for alone is looked at
    table = table[..., :N]
    j = torch.arange(N * PAGE, device=q.device)
    pos = length[:, None].long() - T + torch.arange(T, device=q.device)  # [B, T]
    there = ((table >= 0) & (torch.arange(N, device=q.device) >= first[..., None])).repeat_interleave(PAGE, -1)
    there = there & (j < length[:, None, None])  # [B, G, S]
    seen = there[:, :, None] & (j <= pos[:, None, :, None])  # [B, G, T, S]
    if options.window is not None:
        seen = seen & (j > pos[:, None, :, None] - options.window)
    seen = expand_heads(seen, H, 1)  # [B, H, T, S]
    if first_visible is not None:
        seen = seen & (j >= first_visible[..., None])
    ids = table.clamp(min=0).long()
    found = written(state.pages, ids)
    keys, values = (x.flatten(2, 3).masked_fill_(~there[..., None], 0.0).to(wide) for x in found)  # [B, G, S, .]
    keys, values = (expand_heads(x, H, 1) for x in (keys, values))
    logits = options.scores(q.transpose(1, 2).to(wide) @ keys.mT, K)
    at, c = pos.clamp(min=0)[:, None].expand(B, H, T), None
    if gates is not None:
        within = gates.decay[ids].permute(0, 1, 4, 2, 3).flatten(1, 2).double()  # [B, H, N, PAGE]
        c = (within + gates.page_sum[..., :N, None]).flatten(2)
        logits = logits + (c.gather(2, at)[..., None] - c[:, :, None]).masked_fill(~seen, 0.0).to(wide)
    elif log_decay is not None:
        c = (j * log_decay.double().clamp(min=CLOSED)[:, None]).expand(B, H, N * PAGE)
        logits = logits + (c.gather(2, at)[..., None] - c[:, :, None]).to(wide)
    logits = logits.masked_fill(~seen, -math.inf)
    if options.prune is not None:
        assert c is not None
        assert k_norm is not None
        tails = (-c).logcumsumexp(-1)[..., PAGE - 1 :: PAGE] if gates is None else gates.n_log[..., :N]
        q_norm = q.transpose(1, 2).double().norm(dim=-1)
        pages = k_norm[..., :N], tails, first, PAGE
        begin = _first_pages(logits, c.gather(2, at), pos, q_norm, pages, options, K)
        logits = logits.masked_fill(j < PAGE * begin.repeat_interleave(H // G, 1)[..., None, None], -math.inf)
    return dense_readout(logits, values, options.sink)[0].to(q.dtype)


def _first_pages(
    logits: Tensor, sums: Tensor, pos: Tensor, q_norm: Tensor, pages: tuple[Tensor, Tensor, Tensor, int],
    options: AttentionOptions, K: int,
) -> Tensor:  # fmt: skip
    """The first page [B, G] that the kernels' certificate (``portable/prune.py``) makes rows read, in float64.

    Args:
        logits: [B, H, T, S], -inf where a row does not see a key; sums: [B, H, T], gates up to each row; pos: [B, T].
        q_norm: [B, H, T], lengths of the queries, of K channels.
        pages: ``k_norm`` and ``n_log`` of the pages, the first ones, and the keys of one.
    """
    (k_norm, n_log, first, PAGE), prune = pages, options.prune
    assert prune is not None
    (G, N), H, S = k_norm.shape[1:], logits.shape[1], logits.shape[3]
    page, key = torch.arange(N, device=logits.device), torch.arange(S, device=logits.device)
    own = pos[:, :1].clamp(min=0) // PAGE  # [B, 1]
    near = torch.maximum(own - 1, first).repeat_interleave(H // G, 1)  # [B, H]
    far = key // PAGE < near[..., None, None]
    lower = logits.double().masked_fill(far, -math.inf).logsumexp(-1)[..., None]  # [B, H, T, 1]
    live = (page >= first[..., None]) & (page < own[..., None])  # [B, G, N]
    longest = k_norm.double().masked_fill(~live, 0.0).cummax(-1).values.repeat_interleave(H // G, 1)
    upper = options.scores(q_norm[..., None] * longest[:, :, None], K)  # [B, H, T, N]
    if options.logit_bound is not None:
        upper = upper.minimum(options.logit_bound.double()[:, None, None])
    need = upper - lower + sums[..., None] + n_log[:, :, None]
    drop = ((need <= prune.log_eps) | (pos < 0)[:, None, :, None]).all(2).unflatten(1, (G, -1)).all(2)  # [B, G, N]
    begin: Tensor = first + (drop & live).sum(-1)
    return begin


def append_reference(
    k: Tensor, v: Tensor, log_decay: Tensor | None, count: Tensor | None, state: PagedState
) -> Tensor | None:
    """``paged_append`` token by token, in place; the first key that each new row may see, None without gates."""
    (keys, _, k_norm, _), (table, _, length), gates = state
    assert k_norm is not None
    (B, T, G, _), PAGE = k.shape, keys.shape[1]
    visible = None if gates is None else length.new_zeros((B, gates.decay.shape[2] * G, T))
    for t in range(T):
        b = torch.arange(B, device=k.device) if count is None else (count > T - 1 - t).nonzero()[:, 0]
        at = length[b].long()
        n, i = at // PAGE, at % PAGE
        length[b] += 1
        pages = table[b, :, n].long()  # [M, G]
        m, g = (pages >= 0).nonzero(as_tuple=True)
        to, row, page = (pages[m, g], i[m]), b[m], n[m]
        new = write(state.pages, to, k[row, t, g], v[row, t, g])
        long = new.float().norm(dim=-1) * 1.00001
        k_norm[row, g, page] = torch.maximum(long, k_norm[row, g, page] * (i[m] > 0))
        if log_decay is None or gates is None or visible is None:
            continue
        decay, page_sum, total, since, n_log, closed = gates
        begins, now = (i == 0)[:, None], is_closed(log_decay[b, t])  # [M, H]
        page_sum[b, :, n] = torch.where(begins, total[b], page_sum[b, :, n])
        since[b] = torch.where(now, at[:, None].int(), since[b])
        before = closed[b, :, n] & ((1 << i) - 1)[:, None]
        closed[b, :, n] = before | now.long() << i[:, None]
        total[b] += log_decay[b, t].double().masked_fill(now, 0.0)
        past = n_log[b, :, (at - 1).clamp(min=0) // PAGE].masked_fill((at == 0)[:, None], -math.inf)
        n_log[b, :, n] = torch.logaddexp(past, -total[b])
        visible[b, :, t] = since[b]
        within = (total[b] - page_sum[b, :, n]).to(decay.dtype).unflatten(1, (G, -1))
        decay[to] = within[m, g]
    return visible
