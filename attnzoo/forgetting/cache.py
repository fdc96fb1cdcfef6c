"""A cache that evicts single keys: those that the forget network no longer retains, or that exceed a budget.

Each key head of each sequence holds its own keys, in slots without an order. The last key in use moves into the slot of
an evicted one ("One-Pass Forgetting", section 3: swap-delete), so that the slots in use stay the first ones; when few
are in use the tensors shrink, by pages of 64 slots.

Within a budget in bytes all heads of a sequence share their slots, and each slot stores the number of its head, so that
heads may hold different numbers of keys within the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds, negligible
from attnzoo.forgetting.rules import Forgetting
from attnzoo.forgetting.student import Retention
from attnzoo.forms.caches.device_memory import size_of
from attnzoo.forms.caches.pages.page_table import PAGE
from attnzoo.forms.caches.state import check_rows, whole

GONE = -1.0  # retention that marks a key for eviction
SAFE = 2.0  # above every retention


@dataclass(frozen=True, eq=False)
class Policy:
    """The rules by which a cache evicts keys.

    Args:
        options: the layer's options of One-Pass Forgetting.
        tokens: keys that each head may hold; None for no limit.
        bytes: bytes of keys and values that all heads of a sequence may hold together, in shared slots for which the
            heads compete; None for no limit.
        total: whether ``bytes`` is the budget of all layers, whose keys compete (:func:`within_total`); a layer alone
            may hold all of it.
        log_eps: also evict keys whose total weight in any later row is certified to be at most ``exp(log_eps)``; None:
            do not.
        bounds: bounds of later query rows, for ``log_eps``.
        window: tokens that a row of the layer sees, or None for all.
    """

    options: Forgetting
    tokens: int | None = None
    bytes: int | None = None
    total: bool = False
    log_eps: float | None = None
    bounds: QueryBounds | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Network:
    """The forget network in pieces, so that a step evaluates it only for the keys still held.

    Args:
        keys: ``(k [B, T, G, K], v [B, T, G, V]) -> [B, G, T, X]``, the features of each key that are cached.
        rows: ``q [B, T, H, K] -> [B, G, T, X]``, the features of each query.
        join: ``(keys [B, G, n, X], rows [B, G, R, X]) -> Retention``, the retention of n keys at R queries.
        fused: whether kernels read the features of keys.
    """

    keys: Callable[[Tensor, Tensor], Tensor]
    rows: Callable[[Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Retention]
    fused: bool = False


@dataclass(frozen=True, eq=False)
class ForgettingCache:
    """The state of a layer with One-Pass Forgetting. A call does not change it and returns a new one.

    Args:
        slots: tensors by name, ``[B, G, N, ...]``; of each head the first ``live`` slots are in use. ``k``
            ``[.., r, K]`` (r > 1 where transitions differ by query head) and ``v`` ``[.., V]``; ``network``, the forget
            network's features of the key; ``position``, the key's index in its sequence; ``kept``, its least retention
            so far; ``attention``, the running mean of the attention to it. Where the variant decays, for the R = H / G
            query heads: ``c`` and ``closed``, the running sum of the open gates and count of the closed ones up to the
            key, ``tail``, ``log n_b - c_b`` there (:mod:`attnzoo.algebra.pruning`), and ``longest``, the length of the
            longest key so far. Where slots are not in order (:mod:`attnzoo.forgetting.inplace`), the mask ``held`` says
            which are in use, and ``live`` is not read. Where heads share slots, all are ``[B, S, 1, ...]``, as if each
            slot were a head with one key, and ``head`` is the number of the slot's head.
        live: slots in use by each head, ``[B, G]`` int64.
        seen: tokens of each sequence so far, ``[B]`` int64.
        policy: the rules by which keys are evicted.
        tokens: tokens seen so far, padding included.
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
    in_pages: ClassVar[bool] = False
    grows: ClassVar[bool] = True

    def __len__(self) -> int:
        return self.tokens

    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(size_of(x) for x in (*self.slots.values(), *self.sums.values(), self.live, self.seen))

    def reorder(self, index: Tensor) -> ForgettingCache:
        """The rows ``index`` of the batch, in that order; see :func:`~attnzoo.forms.caches.state.check_rows`."""
        check_rows(index, self.seen)
        shared = self.phase is None or self.phase.shape[0] != len(self.seen)
        slots, sums = ({name: x[index] for name, x in part.items()} for part in (self.slots, self.sums))
        phase = self.phase if shared or self.phase is None else self.phase[index]
        return replace(self, slots=slots, live=self.live[index], seen=self.seen[index], sums=sums, phase=phase)

    def crop(self, tokens: int) -> ForgettingCache:
        """The cache itself, if ``tokens`` is the number of tokens that it has seen; no earlier one can be restored.

        Raises:
            ValueError: any other number: what earlier rows saw may be gone.
        """
        whole(tokens)
        if tokens != self.tokens:
            raise ValueError(f"tokens: expected all {self.tokens} (forgotten keys are gone), got {tokens}")
        return self

    def detach(self) -> ForgettingCache:
        """The cache itself, which records no gradient."""
        return self

    def to(self, device: torch.device | str) -> ForgettingCache:
        """A copy on another device, with the same dtypes."""
        slots, sums = ({name: x.to(device) for name, x in part.items()} for part in (self.slots, self.sums))
        phase, angle = (None if x is None else x.to(device) for x in (self.phase, self.angle))
        live, seen = self.live.to(device), self.seen.to(device)
        return replace(self, slots=slots, sums=sums, live=live, seen=seen, phase=phase, angle=angle)

    @property
    def shared(self) -> bool:
        """Whether all heads of a sequence share their slots."""
        return "head" in self.slots

    def by_slot(self, x: Tensor) -> Tensor:
        """Values per head, ``[B, G, ...]``, in the layout of slots: ``[B, S, ...]`` where heads share slots, else
        unchanged."""
        return x[torch.arange(len(x), device=x.device)[:, None], self.slots["head"][:, :, 0]] if self.shared else x

    def by_head(self, which: Tensor) -> Tensor:
        """The number of slots in the mask ``which [B, G, N]`` for each head, ``[B, G]``."""
        if not self.shared:
            return which.sum(-1)
        return torch.zeros_like(self.live).scatter_add_(1, self.slots["head"][:, :, 0], which[:, :, 0].long())

    def in_use(self) -> Tensor:
        """The mask of slots that hold a key, ``[B, G, N]`` bool."""
        if "held" in self.slots:
            return self.slots["held"]
        number = torch.arange(self.size, device=self.live.device)
        return (number < self.live.sum(1, keepdim=True))[..., None] if self.shared else number < self.live[..., None]

    @property
    def size(self) -> int:
        """Slots of a head, or of a sequence where its heads share them."""
        return self.slots["kept"].shape[1 if self.shared else 2]

    def key_bytes(self) -> int:
        """Bytes of a key and its value."""
        return sum(self.slots[name].shape[3:].numel() * self.slots[name].element_size() for name in ("k", "v"))

    def most(self) -> int | None:
        """The most slots that a head, or a sequence with shared slots, can need: its budget and the new keys; None: no
        limit."""
        G, options = self.live.shape[1], self.policy.options
        if self.policy.bytes is not None:
            return max(self.policy.bytes // self.key_bytes(), G * options.window) + G
        return None if self.policy.tokens is None else max(self.policy.tokens, options.window) + 1

    def free(self) -> Tensor:
        """A free slot for each head, ``[B, G]``."""
        number = torch.arange(self.live.shape[1], device=self.live.device)
        if "held" in self.slots:
            held = self.slots["held"].int()
            return held[:, :, 0].argsort(dim=1, stable=True)[:, : len(number)] if self.shared else held.argmin(-1)
        return self.live.sum(1, keepdim=True) + number if self.shared else self.live

    def with_room(self) -> ForgettingCache:
        """A copy with a free slot for one more key of each head."""
        axis, slots = 1 if self.shared else 2, {}
        used = (self.live + 1).sum(1) if self.shared else self.live.flatten() + 1
        needed = max(used.tolist(), default=0)  # of no sequence, none
        size = self.size if needed <= self.size else _within(self.most(), needed, -(-needed // PAGE) * PAGE)
        for name, x in self.slots.items():
            more = x.new_zeros(*x.shape[:axis], size - self.size, *x.shape[axis + 1 :])
            slots[name] = torch.cat([x, more], axis)
        return replace(self, slots=slots)

    def age(self) -> Tensor:
        """Tokens from each key to the last one, ``[B, G, N]``."""
        return self.seen[:, None, None] - 1 - self.slots["position"]

    def worth(self) -> Tensor:
        """The order in which keys stay, ``[B, G, N]``: the retention so far, :data:`SAFE` for the last ``window``
        tokens, and :data:`GONE` for keys that no later row sees, which are not counted."""
        held = self.in_use() & ~self.done_with()
        score = torch.where(held, self.slots["kept"], GONE)
        return score.masked_fill(held & (self.age() < self.policy.options.window), SAFE)

    def within_budget(self) -> ForgettingCache:
        """A copy in which the keys that exceed the layer's budget are marked for eviction, those of the least retention
        first; the last ``window`` tokens never are."""
        if self.policy.bytes is not None:
            return self.without(over_bytes([self])[0])
        if self.policy.tokens is None:
            return self
        score, rank = self.worth(), torch.arange(self.size, device=self.live.device)
        order = _best_first(score, self.slots["position"])
        beyond = torch.zeros_like(order).scatter_(-1, order, rank.expand_as(order)) >= self.policy.tokens
        return self.without(beyond & (score != SAFE))

    def without(self, gone: Tensor) -> ForgettingCache:
        """A copy in which the keys in the mask ``gone`` are marked for eviction."""
        return replace(self, slots={**self.slots, "kept": self.slots["kept"].masked_fill(gone, GONE)})

    def done_with(self) -> Tensor:
        """The mask of keys that no later row sees or needs, ``[B, G, N]`` bool."""
        slots, policy = self.slots, self.policy
        gone = slots["kept"] < policy.options.threshold
        if policy.window is not None:
            gone = gone | (self.age() >= policy.window - 1)
        if "c" in slots:
            gone = gone | (slots["closed"] != self.by_slot(self.sums["closed"])[:, :, None]).all(-1)
            if policy.log_eps is not None and policy.bounds is not None:
                tails, total = slots["tail"].movedim(-1, 2).flatten(1, 2), self.by_slot(self.sums["c"]).flatten(1)
                longest = slots["longest"].repeat_interleave(total.shape[1] // gone.shape[1], 1)
                found = negligible(longest, tails, total, policy.log_eps, self._bounds(policy.bounds))
                gone = gone | found.unflatten(1, (gone.shape[1], -1)).all(2)
        return gone

    def _bounds(self, bounds: QueryBounds) -> QueryBounds:
        """The bounds of the query heads of each slot."""
        (B, G), R = self.live.shape, self.sums["c"].shape[2]

        def of_slots(x: Tensor) -> Tensor:
            return self.by_slot(x.expand(B, G * R).unflatten(1, (G, R))).flatten(1)

        score = None if bounds.score is None else of_slots(bounds.score)
        return replace(bounds, query=of_slots(bounds.query), own=of_slots(bounds.own), score=score)

    def settled(self) -> ForgettingCache:
        """A copy without the keys that no later row sees or needs."""
        gone = self.done_with() & self.in_use()
        if not bool(gone.any()):
            return self
        if self.shared:
            stays, live = self.in_use() & ~gone, self.live - self.by_head(gone)
            used = int(live.sum(1).max())
            slots = first_ones(self.slots, stays, _within(self.most(), used, _shrunk(used, self.size)))
        else:
            slots, live = swap_delete(self.slots, self.live, gone, self.most())
        return replace(self, slots=slots, live=live)


def over_bytes(caches: Sequence[ForgettingCache]) -> list[Tensor]:
    """For each of some caches the mask of keys that exceed the budget in bytes of them all: in each sequence, of the
    keys of all heads and caches, those of the least retention."""
    limit, scores = caches[0].policy.bytes, [cache.worth() for cache in caches]
    assert limit is not None  # such caches alone are asked
    score, position = (
        torch.cat([x.flatten(1) for x in parts], 1) for parts in (scores, [cache.slots["position"] for cache in caches])
    )
    each = [torch.full_like(cache.slots["position"].flatten(1), cache.key_bytes()) for cache in caches]
    order = _best_first(score, position)
    taken = torch.cat(each, 1).gather(1, order).cumsum(1)
    beyond = torch.zeros_like(taken).scatter_(1, order, taken) > limit
    masks = beyond.split([x.shape[1:].numel() for x in scores], 1)
    return [mask.view_as(x) & (x != SAFE) for mask, x in zip(masks, scores, strict=True)]


def within_total(caches: Sequence[ForgettingCache]) -> list[ForgettingCache]:
    """Copies of all layers' caches in which the keys that exceed their common budget are marked for eviction."""
    return [cache.without(gone) for cache, gone in zip(caches, over_bytes(caches), strict=True)]


def _best_first(score: Tensor, position: Tensor) -> Tensor:
    """The order of the entries along the last axis: the largest score first, of equal scores the latest position."""
    late = position.argsort(dim=-1, descending=True, stable=True)
    return late.gather(-1, score.gather(-1, late).argsort(dim=-1, descending=True, stable=True))


def swap_delete(
    slots: dict[str, Tensor], live: Tensor, gone: Tensor, most: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The slots without the keys ``gone``, whose places the last keys take, and the numbers of slots in use ``[B, G]``.

    The tensors shrink where more than half of the pages would be free.

    Args:
        slots: ``[B, G, N, ...]``.
        live: slots in use, ``[B, G]``.
        gone: mask of evicted keys, ``[B, G, N]``.
        most: the most slots of a head, unless more are in use.
    """
    number = torch.arange(gone.shape[2], device=live.device)
    left = live - gone.sum(-1)
    stays = (number < live[..., None]) & ~gone
    holes = (gone & (number < left[..., None])).nonzero(as_tuple=True)  # as many as ``late`` has
    late = (stays & (number >= left[..., None])).nonzero(as_tuple=True)
    size, moved = _within(most, int(left.max()), _shrunk(int(left.max()), gone.shape[2])), {}
    for name, x in slots.items():
        x = x.clone()
        x[holes] = x[late]
        moved[name] = x[:, :, :size].clone() if size < x.shape[2] else x
    return moved, left


def _shrunk(used: int, size: int) -> int:
    """The number of slots to keep: whole pages where more than half of the pages would be free, else ``size``."""
    pages = max(1, -(-used // PAGE))
    return pages * PAGE if 2 * pages * PAGE <= size else size


def _within(most: int | None, used: int, size: int) -> int:
    """``size`` slots, but at most ``most``, or as many as are used where a call holds more until its budget is
    applied."""
    return size if most is None else min(size, max(most, used))


def first_ones(slots: dict[str, Tensor], stay: Tensor, size: int) -> dict[str, Tensor]:
    """``size`` of the shared slots ``[B, S, 1, ...]``: first those in the mask ``stay [B, S, 1]``, in order, then
    others."""
    order = stay[:, :, 0].int().argsort(dim=1, descending=True, stable=True)[:, :size]
    rows = torch.arange(len(order), device=order.device)[:, None]
    return {name: x[rows, order] for name, x in slots.items()}
