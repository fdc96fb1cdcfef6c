"""Prefill and cached steps with a cache that evicts single keys (One-Pass Forgetting, section 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from einops import reduce
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads, is_closed
from attnzoo.algebra.transitions import HeadGate, heads_first, scaled_queries
from attnzoo.forgetting.cache import ForgettingCache, Network, Policy, first_ones, swap_delete
from attnzoo.forgetting.fused import fused_student
from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.rules import squashed
from attnzoo.forgetting.student import LastRow, Panel, hard_attention, remembered_of
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.options import SoftmaxOptions, check_softmax
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import least_logit, logits_of
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.precision import wide_dtype


@torch.no_grad()
def extend_forgetting(
    forms: SoftmaxForms, q: Tensor, k: Tensor, v: Tensor, gate: Gate, network: Network, policy: Policy,
    state: ForgettingCache | None, given: SoftmaxOptions,
) -> tuple[Tensor, ForgettingCache]:  # fmt: skip
    """Add T tokens to a cache and attend to the keys that it holds.

    Within a call only retention hides keys from rows; a budget is applied at the end of the call.

    Args:
        forms: of the variant.
        network: of the layer.
        state: None for an empty cache.
        given: ``scale``, ``window``, ``sink`` and ``valid`` of the call.

    Returns:
        ``[B, T, H, V]`` and the new cache.

    Raises:
        ValueError: a cache of another batch.
    """
    check_softmax(given, q, gate)
    if state is None:
        o, new = _prefill(forms, q, k, v, gate, network, policy, given)
        if policy.tokens is not None or policy.bytes is not None:
            return o, new.within_budget().settled()  # evicted keys free their memory before the next call
    else:
        if len(state.seen) != q.shape[0]:
            raise ValueError(f"state: expected {q.shape[0]} sequences, got {len(state.seen)}")
        new, rows = state, []
        for t in range(q.shape[1]):
            now = slice(t, t + 1)
            step = replace(given, valid=None if given.valid is None else given.valid[:, now])
            one, new = _step(forms, q[:, now], k[:, now], v[:, now], gate.slice(t, t + 1), network, new, step)
            rows.append(one)
        o = torch.cat(rows, 1)
    return o, new.within_budget()


def _prefill(
    forms: SoftmaxForms, q: Tensor, k: Tensor, v: Tensor, gate: Gate, network: Network, policy: Policy,
    given: SoftmaxOptions,
) -> tuple[Tensor, ForgettingCache]:  # fmt: skip
    """The output and the cache of the first T tokens, computed in panels."""
    (B, T, H, _), G, valid = q.shape, v.shape[2], given.valid
    logits = Logits(forms, q, k, gate, given)
    memory = network.keys(k, v)
    retention = network.join(memory, network.rows(q))
    if network.fused:
        assert isinstance(forms, AdditiveForms)
        o = fused_student(forms, Call(q, k, v, gate, options=given), memory, policy.options)
        age = (logits.position[:, -1:] - logits.position)[:, None, None]
        x = retention(Panel(0, T, age))
        last = LastRow(remembered_of(x, age, age >= 0, policy.options)[:, :, 0])
    else:
        o, last = hard_attention(logits, v, retention, policy.options, given.sink)
    there = torch.ones(B, T, dtype=torch.bool, device=q.device) if valid is None else valid
    R, phase, angle = H // G, None, None
    if isinstance(forms, AdditiveForms):
        placed = forms.separated(gate, q, valid, None)
        _, keys, phase, angle = forms.place(q, k, placed, None, valid)
        keys = keys.transpose(1, 2).unflatten(1, (G, -1))  # [B, G, r, T, K]
    else:
        assert last.carried is not None
        keys = last.carried.unflatten(1, (G, R))
        keys = keys if gate.per_query_head else keys[:, :, :1]
    slots = {
        "k": keys.movedim(2, 3).contiguous(), "v": v.transpose(1, 2).contiguous(), "network": memory,
        "position": logits.position.expand(B, T)[:, None].expand(B, G, T).clone(), "kept": last.kept,
    }  # fmt: skip
    if last.attention is not None:
        slots["attention"] = last.attention
    sums: dict[str, Tensor] = {}
    if logits.sums is not None:
        c, closed = logits.sums
        closed = torch.zeros_like(c, dtype=torch.int64) if closed is None else closed
        tail = (-c).masked_fill(~there[:, None], -torch.inf).logcumsumexp(-1)
        longest = k.double().norm(dim=-1).masked_fill(~there[..., None], 0.0).cummax(1).values.transpose(1, 2)
        slots |= {n: x.unflatten(1, (G, R)).movedim(2, 3) for n, x in (("c", c), ("closed", closed), ("tail", tail))}
        slots["longest"] = longest
        sums = {name: slots[name][:, :, -1].clone() for name in ("c", "closed", "tail", "longest")}
    live, seen = torch.full((B, G), T, device=q.device), there.sum(1)
    if policy.bytes is not None:
        slots["head"] = torch.arange(G, device=q.device)[:, None].expand(B, G, T)
        slots = {name: x.flatten(1, 2)[:, :, None] for name, x in slots.items()}
        slots = slots if valid is None else first_ones(slots, there.repeat(1, G)[..., None], G * T)
        live = seen[:, None].expand(B, G)
    elif valid is not None:
        slots, live = swap_delete(slots, live, ~there[:, None].expand(B, G, T))
    return o, ForgettingCache(slots, live, seen, policy, T, sums, phase, angle)


def _step(
    forms: SoftmaxForms, q: Tensor, k: Tensor, v: Tensor, gate: Gate, network: Network, state: ForgettingCache,
    given: SoftmaxOptions,
) -> tuple[Tensor, ForgettingCache]:  # fmt: skip
    """The output and the new cache of one more token of each sequence."""
    state = state.settled().with_room()
    return take_token(forms, q, k, v, gate, network, state, given)


def take_token(
    forms: SoftmaxForms, q: Tensor, k: Tensor, v: Tensor, gate: Gate, network: Network, state: ForgettingCache,
    given: SoftmaxOptions,
) -> tuple[Tensor, ForgettingCache]:  # fmt: skip
    """Write one token of each sequence into free slots and return its output, without waiting for the device.

    The slots are changed in place. The other arguments are those of :func:`extend_forgetting`.
    """
    (B, _, H, K), G, dtype, options = q.shape, v.shape[2], wide_dtype(q.dtype), state.policy.options
    there = torch.ones(B, dtype=torch.bool, device=q.device) if given.valid is None else given.valid[:, 0]
    if given.valid is not None:
        q, k, v = (x.masked_fill(~there[:, None, None, None], 0.0) for x in (q, k, v))
    rows, memory = network.rows(q), network.keys(k, v)
    gate = forms.separated(gate, q, given.valid, None)
    slots, phase, angle = dict(state.slots), None, None
    if isinstance(forms, AdditiveForms):
        q, k, phase, angle = forms.place(q, k, gate, cast(Any, state), given.valid)
        if given.valid is not None and phase is not None and state.phase is not None:
            phase = torch.where(there[:, None, None, None], phase, state.phase)
    else:
        slots["k"] = _carry(forms, gate, q, k, state)
    r = slots["k"].shape[3]
    new: dict[str, Tensor] = {
        "k": expand_heads(k, G * r).reshape(B, G, r, K), "v": v[:, 0],
        "network": memory[:, :, 0], "position": state.seen[:, None].expand(B, G),
        "kept": torch.ones(B, G, device=q.device), "attention": torch.full((B, G), 0.5, device=q.device),
        "held": there[:, None].expand(B, G), "head": torch.arange(G, device=q.device).expand(B, G),
    }  # fmt: skip
    sums = _next_sums(state, gate.per_token(q).log_decay, k, there)
    new |= sums
    at, heads = state.free(), torch.arange(G, device=q.device)
    place: Any = torch.arange(B, device=q.device)[:, None], *((at, 0) if state.shared else (heads, at))
    for name, x in slots.items():
        before = x[place]
        x[place] = torch.where(there.view(B, *(1,) * (before.ndim - 1)), new[name].to(x.dtype), before)
    live = state.live + there[:, None]
    after = replace(
        state, slots=slots, live=live, seen=state.seen + there, sums=sums, tokens=state.tokens + 1,
        phase=phase, angle=angle,
    )  # fmt: skip

    query = scaled_queries(q, given.scale)[:, :, 0].unflatten(1, (G, -1))
    scaled, keys = after.by_slot(query), slots["k"].to(dtype)
    apart = r > 1 or after.shared  # whether each slot has queries of its own
    a = (keys * scaled[:, :, None]).sum(-1).movedim(-1, 2) if apart else scaled @ keys[:, :, :, 0].mT  # [B, G, R, N]
    a = logits_of(a, given)
    if sums:
        c, closed = (after.by_slot(sums[name])[..., None] for name in ("c", "closed"))
        a = a + (c - slots["c"].movedim(-1, 2)).to(dtype)
        a = a.masked_fill(closed != slots["closed"].movedim(-1, 2), -torch.inf)
    held, age = after.in_use(), after.age()
    seen = held if given.window is None else held & (age < given.window)
    a = a.masked_fill(~seen[:, :, None], -torch.inf)
    panel = Panel(0, slots["kept"].shape[2], age[:, :, None])
    if options.of_pairs:
        own = logits_of((query * heads_first(k, H, dtype)[:, :, 0].unflatten(1, (G, -1))).sum(-1), given)
        own = after.by_slot(own)
        share = (a - own[..., None]).sigmoid().mean(2)
        mean = torch.where(age == 0, share, options.memory * slots["attention"] + (1 - options.memory) * share)
        slots["attention"] = torch.where(there[:, None, None], mean, slots["attention"])
        logit = reduce(squashed(a), "b g r n -> b g 1 n", "mean")
        panel = replace(panel, logits=logit, attention=mean[:, :, None])
    retention = network.join(slots["network"], after.by_slot(rows))(panel)[:, :, 0].sigmoid()
    retention = retention.masked_fill((age < options.window) | ~there[:, None, None], 1.0)
    slots["kept"] = slots["kept"].minimum(retention.to(slots["kept"].dtype))

    sees = seen & (slots["kept"] >= options.threshold)
    a = a.clamp(min=least_logit(dtype)).masked_fill(~sees[:, :, None], least_logit(dtype))
    return _read(after, a, slots["v"].to(dtype), given.sink).flatten(1, 2)[:, None].to(v.dtype), after


def _read(state: ForgettingCache, a: Tensor, values: Tensor, sink: Tensor | None) -> Tensor:
    """The readout ``[B, G, R, V]`` of logits ``[B, G, R, N]`` and values ``[B, G, N, V]`` in the layout of slots."""
    B, G = state.live.shape
    if state.shared:  # every head reads all slots and masks those of other heads
        mine = state.slots["head"].mT == torch.arange(G, device=a.device)[:, None]  # [B, G, S]
        a = a[..., 0].mT[:, None].masked_fill(~mine[:, :, None], least_logit(a.dtype))  # [B, G, R, S]
        values = values[:, None, :, 0]  # [B, 1, S, V]
    if sink is not None:
        sink = sink.to(a.dtype).view(1, G, -1, 1).expand(B, -1, -1, 1)
        a, values = torch.cat([a, sink], -1), torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    return a.softmax(-1) @ values


def _carry(forms: SoftmaxForms, gate: Gate, q: Tensor, k: Tensor, state: ForgettingCache) -> Tensor:
    """The cached keys ``[B, G, N, r, K]``, carried by one more transition."""
    keys = state.slots["k"]
    r, G = keys.shape[3], state.live.shape[1]
    local = HeadGate.of(replace(gate, log_decay=None), q if r > 1 else k).at(0)
    local = local.map(lambda part: state.by_slot(part.unflatten(1, (G, r))).flatten(1, 2))
    moved: Tensor = forms.transition.apply(local, keys.permute(0, 1, 3, 4, 2).flatten(1, 2))  # [B, H or G, K, N]
    moved = moved.unflatten(1, (-1, r))
    return moved.permute(0, 1, 4, 2, 3)


def _next_sums(state: ForgettingCache, g: Tensor | None, k: Tensor, there: Tensor) -> dict[str, Tensor]:
    """The sums after one token with the gates ``g [B, 1, H]`` and the key ``k``, for the sequences in the mask
    ``there``."""
    if g is None:
        return {}
    before, (B, G) = state.sums, state.live.shape
    g = g[:, 0].double().unflatten(-1, (G, -1))
    closed = is_closed(g)
    c = before["c"] + g.masked_fill(closed, 0.0)
    longest = k[:, 0].double().norm(dim=-1).unflatten(-1, (G, -1)).amax(-1)
    new = {
        "c": c, "closed": before["closed"] + closed, "tail": torch.logaddexp(before["tail"], -c),
        "longest": before["longest"].maximum(longest),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, x in new.items():
        found[name] = torch.where(there.view(B, *(1,) * (x.ndim - 1)), x, before[name])
    return found
