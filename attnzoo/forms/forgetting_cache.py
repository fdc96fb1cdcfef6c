"""A cache that gives up single keys: those that a forget network has done with, or that a budget has no room for.

Each key head of each sequence holds its own keys, in slots without an order. A key that goes is replaced by the last
one ("One-Pass Forgetting", section 3: swap-delete), so that the slots in use stay the first ones; when few are in use
the tensors shrink, by pages of 64 slots. What is gone does not come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from einops import reduce
from torch import Tensor

from attnzoo.algebra.forgetting import Forgetting, squashed
from attnzoo.algebra.gate import Gate, expand_heads, is_closed
from attnzoo.algebra.pruning import QueryBounds, negligible
from attnzoo.algebra.transitions import HeadGate, compute_dtype, heads_first
from attnzoo.forms.cache import check_rows, whole
from attnzoo.forms.forgetting import Panel, Retention, hard_attention
from attnzoo.forms.memory import size_of
from attnzoo.forms.options import SoftmaxOptions, check_softmax
from attnzoo.forms.pages import PAGE
from attnzoo.forms.panels import Logits
from attnzoo.forms.readout import least_logit
from attnzoo.forms.softmax import AdditiveForms, SoftmaxForms

GONE = -1.0  # the retention of a key that must go, whatever the network says


@dataclass(frozen=True, eq=False)
class Policy:
    """By what keys are given up.

    Args:
        options: of the layer that forgets.
        tokens: keys that each head may hold; None for as many as it wants.
        bytes: keys and values that all heads of a sequence may hold together; None likewise. The heads compete.
        log_eps: besides, keys go of which later rows can lose no more than this weight, as a logarithm; None: none do.
        bounds: of the rows to come, for that.
        window: of the layer, or None.
    """

    options: Forgetting
    tokens: int | None = None
    bytes: int | None = None
    log_eps: float | None = None
    bounds: QueryBounds | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Network:
    """The forget network in pieces, so that a step asks it of the keys that are left alone.

    Args:
        keys: ``(k [B, T, G, K], v [B, T, G, V]) -> [B, G, T, X]``, what it remembers of each key.
        rows: ``q [B, T, H, K] -> [B, G, T, X]``, what it sees of each query.
        join: ``(keys [B, G, n, X], rows [B, G, R, X]) -> Retention``.
    """

    keys: Callable[[Tensor, Tensor], Tensor]
    rows: Callable[[Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Retention]


@dataclass(frozen=True, eq=False)
class ForgettingCache:
    """What a layer that forgets remembers. A call leaves it as it is, and gives a new one.

    Args:
        slots: by name, ``[B, G, N, ...]``; of each head the first ``live`` slots are in use. ``k`` ``[.., r, K]``
            (r > 1 where transitions differ by query head) and ``v`` ``[.., V]``; ``network``, what the forget network
            remembers of the key; ``position``, its number in its sequence; ``kept``, its least retention so far;
            ``attention``, the running mean of the attention to it. Where the variant decays, for the R = H / G query
            heads: ``c`` and ``closed``, the running sum of the open gates and count of the closed ones up to the key,
            ``tail``, ``log n_b - c_b`` there (:mod:`attnzoo.algebra.pruning`), and ``longest``, the length of the
            longest key until then. Where slots are not in order (:mod:`attnzoo.forms.forgetting_fixed`), ``held`` says
            which are in use, and ``live`` nothing.
        live: slots in use, ``[B, G]`` int64.
        seen: tokens of each sequence so far, ``[B]`` int64.
        policy: by what keys go.
        tokens: how many tokens it has seen, padding included.
        sums: after the last token, ``[B, G, R]``: ``c``, ``closed`` and ``tail``; ``longest`` ``[B, G]``.
        phase, angle: as in :class:`attnzoo.KVCache`.
    """

    slots: dict[str, Tensor]
    live: Tensor
    seen: Tensor
    policy: Policy
    tokens: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    phase: Tensor | None = None
    angle: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens

    def bytes(self) -> int:
        """Memory of all tensors."""
        return sum(size_of(x) for x in (*self.slots.values(), *self.sums.values(), self.live, self.seen))

    def reorder(self, index: Tensor) -> ForgettingCache:
        """The rows ``index`` of the batch, in that order; see :func:`~attnzoo.forms.cache.check_rows`."""
        check_rows(index, self.seen)
        shared = self.phase is None or self.phase.shape[0] != len(self.seen)
        slots, sums = ({name: x[index] for name, x in part.items()} for part in (self.slots, self.sums))
        phase = self.phase if shared or self.phase is None else self.phase[index]
        return replace(self, slots=slots, live=self.live[index], seen=self.seen[index], sums=sums, phase=phase)

    def crop(self, tokens: int) -> ForgettingCache:
        """The cache after the first ``tokens`` tokens, which only the whole one still is.

        Raises:
            ValueError: any other number: what earlier rows saw may be gone.
        """
        whole(tokens)
        if tokens != self.tokens:
            raise ValueError(f"tokens: expected all {self.tokens} (forgotten keys are gone), got {tokens}")
        return self

    def detach(self) -> ForgettingCache:
        """Itself: it has no history of gradients."""
        return self

    def to(self, device: torch.device | str) -> ForgettingCache:
        """The same on another device; dtypes stay."""
        slots, sums = ({name: x.to(device) for name, x in part.items()} for part in (self.slots, self.sums))
        phase, angle = (None if x is None else x.to(device) for x in (self.phase, self.angle))
        live, seen = self.live.to(device), self.seen.to(device)
        return replace(self, slots=slots, sums=sums, live=live, seen=seen, phase=phase, angle=angle)

    def in_use(self) -> Tensor:
        """Which slots hold a key, ``[B, G, N]`` bool."""
        if "held" in self.slots:
            return self.slots["held"]
        N = self.slots["kept"].shape[2]
        return torch.arange(N, device=self.live.device) < self.live[..., None]

    def age(self) -> Tensor:
        """Tokens from each key to the last one, ``[B, G, N]``."""
        return self.seen[:, None, None] - 1 - self.slots["position"]

    def over_budget(self) -> Tensor:
        """Which keys a budget has no room for: of those that rows to come may see, those of the least retention, but
        for the last ``window`` tokens."""
        kept, policy = self.slots["kept"], self.policy
        held = self.in_use() & ~self.done_with()
        safe = held & (self.age() < policy.options.window)
        score = torch.where(held, kept, GONE).masked_fill(safe, 2.0)
        gone = torch.zeros_like(held)
        position = self.slots["position"]
        if policy.tokens is not None:
            gone = gone | (_rank(score, position) >= policy.tokens)
        if policy.bytes is not None:
            each = sum(self.slots[name][0, 0, 0].numel() * self.slots[name].element_size() for name in ("k", "v"))
            gone = gone | (_rank(score.flatten(1), position.flatten(1)).view_as(score) >= policy.bytes // each)
        return gone & held & ~safe

    def within_budget(self) -> ForgettingCache:
        """The same with those keys marked that must go by the budget."""
        if self.policy.tokens is None and self.policy.bytes is None:
            return self
        kept = self.slots["kept"].masked_fill(self.over_budget(), GONE)
        return replace(self, slots={**self.slots, "kept": kept})

    def done_with(self) -> Tensor:
        """Which keys no row to come sees, or may need, ``[B, G, N]`` bool."""
        slots, policy = self.slots, self.policy
        gone = slots["kept"] < policy.options.threshold
        if policy.window is not None:
            gone = gone | (self.age() >= policy.window - 1)
        if "c" in slots:
            gone = gone | (slots["closed"] != self.sums["closed"][:, :, None]).all(-1)
            if policy.log_eps is not None and policy.bounds is not None:
                tails, total = slots["tail"].movedim(-1, 2).flatten(1, 2), self.sums["c"].flatten(1)
                longest = slots["longest"].repeat_interleave(total.shape[1] // self.live.shape[1], 1)
                found = negligible(longest, tails, total, policy.log_eps, policy.bounds)
                gone = gone | found.unflatten(1, (self.live.shape[1], -1)).all(2)
        return gone

    def settled(self) -> ForgettingCache:
        """The same without the keys that no row to come sees."""
        gone = self.done_with() & self.in_use()
        if not bool(gone.any()):
            return self
        slots, live = swap_delete(self.slots, self.live, gone)
        return replace(self, slots=slots, live=live)


def _rank(score: Tensor, position: Tensor) -> Tensor:
    """How many entries of the last axis come before each when the largest is first, and of equal ones the latest."""
    late = position.argsort(dim=-1, descending=True, stable=True)
    order = late.gather(-1, score.gather(-1, late).argsort(dim=-1, descending=True, stable=True))
    number = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, number)


def swap_delete(slots: dict[str, Tensor], live: Tensor, gone: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Put the last keys that stay in the place of those that go; shrink where more than half of the pages is free.

    Args:
        slots: ``[B, G, N, ...]``.
        live: slots in use, ``[B, G]``.
        gone: which of them go, ``[B, G, N]``.
    """
    number = torch.arange(gone.shape[2], device=live.device)
    left = live - gone.sum(-1)
    stays = (number < live[..., None]) & ~gone
    holes = (gone & (number < left[..., None])).nonzero(as_tuple=True)  # as many of each head as it has late ones
    late = (stays & (number >= left[..., None])).nonzero(as_tuple=True)
    pages = max(1, -(-int(left.max()) // PAGE))
    size = pages * PAGE if 2 * pages * PAGE <= gone.shape[2] else gone.shape[2]
    moved = {}
    for name, x in slots.items():
        x = x.clone()
        x[holes] = x[late]
        moved[name] = x[:, :, :size].clone() if size < x.shape[2] else x
    return moved, left


@torch.no_grad()
def extend_forgetting(
    forms: SoftmaxForms, q: Tensor, k: Tensor, v: Tensor, gate: Gate, network: Network, policy: Policy,
    state: ForgettingCache | None, given: SoftmaxOptions,
) -> tuple[Tensor, ForgettingCache]:  # fmt: skip
    """Add T tokens to a cache and attend to the keys that are left.

    Rows of one call see each other and what the cache held before, by retention alone; a budget cuts when it ends.

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
    """The first T tokens, in panels."""
    (B, T, H, _), G, valid = q.shape, v.shape[2], given.valid
    logits = Logits(forms, q, k, gate, scale=given.scale, valid=valid, window=given.window)
    memory = network.keys(k, v)
    o, last = hard_attention(logits, v, network.join(memory, network.rows(q)), policy.options, given.sink)
    there = torch.ones(B, T, dtype=torch.bool, device=q.device) if valid is None else valid
    R, phase, angle = H // G, None, None
    if isinstance(forms, AdditiveForms):
        placed = forms.separated(gate, q, valid, None)
        _, keys, phase, angle = forms.place(q, k, placed, None, valid)
        keys = keys.transpose(1, 2).unflatten(1, (G, -1))  # [B, G, r, T, K]
    else:
        assert last.carried is not None
        keys = last.carried.unflatten(1, (G, R))
        keys = keys if _per_query_head(gate) else keys[:, :, :1]
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
    new = ForgettingCache(slots, live, seen, policy, T, sums, phase, angle)
    slots, live = swap_delete(slots, live, ~there[:, None].expand(B, G, T)) if valid is not None else (slots, live)
    return o, replace(new, slots=slots, live=live)


def _per_query_head(gate: Gate) -> bool:
    """Whether transitions differ among the query heads of one key head."""
    return gate.log_diag is not None or gate.angle is not None


def _step(
    forms: SoftmaxForms, q: Tensor, k: Tensor, v: Tensor, gate: Gate, network: Network, state: ForgettingCache,
    given: SoftmaxOptions,
) -> tuple[Tensor, ForgettingCache]:  # fmt: skip
    """One token of each sequence."""
    state = state.settled()
    state = replace(state, slots=_with_room(state.slots, int(state.live.max()) + 1))
    return take_token(forms, q, k, v, gate, network, state, given, state.live)


def take_token(
    forms: SoftmaxForms, q: Tensor, k: Tensor, v: Tensor, gate: Gate, network: Network, state: ForgettingCache,
    given: SoftmaxOptions, at: Tensor,
) -> tuple[Tensor, ForgettingCache]:  # fmt: skip
    """One token of each sequence into the free slots ``at [B, G]``, and its output; nothing waits for the device.

    The slots are written to where they stand. The other arguments are those of :func:`extend_forgetting`.
    """
    (B, _, H, K), G, dtype, options = q.shape, v.shape[2], compute_dtype(q), state.policy.options
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
        slots["k"] = _carry(forms, gate, q, k, slots["k"])
    r = slots["k"].shape[3]
    new: dict[str, Tensor] = {
        "k": expand_heads(k, G * r).reshape(B, G, r, K), "v": v[:, 0],
        "network": memory[:, :, 0], "position": state.seen[:, None].expand(B, G),
        "kept": torch.ones(B, G, device=q.device), "attention": torch.full((B, G), 0.5, device=q.device),
        "held": there[:, None].expand(B, G),
    }  # fmt: skip
    sums = _next_sums(state, gate.per_token(q).log_decay, k, there)
    new |= sums
    place = torch.arange(B, device=q.device)[:, None], torch.arange(G, device=q.device), at
    for name, x in slots.items():
        before = x[place]
        x[place] = torch.where(there.view(B, *(1,) * (before.ndim - 1)), new[name].to(x.dtype), before)
    live = state.live + there[:, None]
    after = replace(
        state, slots=slots, live=live, seen=state.seen + there, sums=sums, tokens=state.tokens + 1,
        phase=phase, angle=angle,
    )  # fmt: skip

    scaled = heads_first(q, H, dtype)[:, :, 0].unflatten(1, (G, -1)) * (K**-0.5 if given.scale is None else given.scale)
    keys = slots["k"].to(dtype).expand(-1, -1, -1, scaled.shape[2] if r > 1 else 1, -1)
    a = (keys * scaled[:, :, None]).sum(-1).movedim(-1, 2) if r > 1 else scaled @ keys[:, :, :, 0].mT  # [B, G, R, N]
    if sums:
        a = a + (sums["c"][..., None] - slots["c"].movedim(-1, 2)).to(dtype)
        a = a.masked_fill(sums["closed"][..., None] != slots["closed"].movedim(-1, 2), -torch.inf)
    held, age = after.in_use(), after.age()
    seen = held if given.window is None else held & (age < given.window)
    a = a.masked_fill(~seen[:, :, None], -torch.inf)
    panel = Panel(0, slots["kept"].shape[2], age[:, :, None])
    if options.of_pairs:
        own = (scaled * heads_first(k, H, dtype)[:, :, 0].unflatten(1, (G, -1))).sum(-1)
        share = (a - own[..., None]).sigmoid().mean(2)
        mean = torch.where(age == 0, share, options.memory * slots["attention"] + (1 - options.memory) * share)
        slots["attention"] = torch.where(there[:, None, None], mean, slots["attention"])
        logit = reduce(squashed(a), "b g r n -> b g 1 n", "mean")
        panel = replace(panel, logits=logit, attention=mean[:, :, None])
    retention = network.join(slots["network"], rows)(panel)[:, :, 0].sigmoid()
    retention = retention.masked_fill((age < options.window) | ~there[:, None, None], 1.0)
    slots["kept"] = slots["kept"].minimum(retention.to(slots["kept"].dtype))

    sees = seen & (slots["kept"] >= options.threshold)
    a = a.clamp(min=least_logit(dtype)).masked_fill(~sees[:, :, None], least_logit(dtype))
    values = slots["v"].to(dtype)
    if given.sink is not None:
        sink = given.sink.to(dtype).view(1, G, -1, 1).expand(B, -1, -1, 1)
        a, values = torch.cat([a, sink], -1), torch.cat([values, values.new_zeros(B, G, 1, values.shape[-1])], 2)
    o = a.softmax(-1) @ values
    return o.flatten(1, 2)[:, None].to(v.dtype), after


def _with_room(slots: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Copies with room for ``size`` keys of each head."""
    N = slots["kept"].shape[2]
    more = max(0, -(-size // PAGE) * PAGE - N)
    return {name: torch.cat([x, x.new_zeros(*x.shape[:2], more, *x.shape[3:])], 2) for name, x in slots.items()}


def _carry(forms: SoftmaxForms, gate: Gate, q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
    """The keys ``[B, G, N, r, K]`` after one more transition."""
    B, G, N, r, K = keys.shape
    local = HeadGate.of(replace(gate, log_decay=None), q if r > 1 else k).at(0)
    moved: Tensor = forms.transition.apply(local, keys.permute(0, 1, 3, 4, 2).flatten(1, 2))  # [B, H or G, K, N]
    moved = moved.unflatten(1, (G, r))
    return moved.permute(0, 1, 4, 2, 3)


def _next_sums(state: ForgettingCache, g: Tensor | None, k: Tensor, there: Tensor) -> dict[str, Tensor]:
    """The sums after one token with the gates ``g [B, 1, H]`` and the key ``k``, where it exists."""
    if g is None:
        return {}
    before, (B, G) = state.sums, state.live.shape
    g = g[:, 0].double().view(B, G, -1)
    closed = is_closed(g)
    c = before["c"] + g.masked_fill(closed, 0.0)
    longest = k[:, 0].double().norm(dim=-1).view(B, G, -1).amax(-1)
    new = {
        "c": c, "closed": before["closed"] + closed, "tail": torch.logaddexp(before["tail"], -c),
        "longest": before["longest"].maximum(longest),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, x in new.items():
        found[name] = torch.where(there.view(B, *(1,) * (x.ndim - 1)), x, before[name])
    return found
