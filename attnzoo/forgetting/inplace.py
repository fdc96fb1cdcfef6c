"""In-place steps of layers with One-Pass Forgetting: the keys of several sequences, changed where they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds
from attnzoo.forgetting.cache import ForgettingCache, Network, within_total
from attnzoo.forgetting.steps import take_token
from attnzoo.forms.caches.device_memory import check_memory, size_of
from attnzoo.forms.caches.inplace import BatchRows, Extend, Memory, tokens_of
from attnzoo.forms.caches.pages.page_table import PAGE, resized
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.kernels.common.untraced import untraced

AHEAD = 16  # the host reads how many slots are in use at most once in so many steps


@dataclass(eq=False)
class ForgettingMemory(Memory):
    """The in-place keys of B sequences, in slots of each head; a new key overwrites an evicted one.

    A step reads all slots and never waits for the device. With a budget the number of slots is fixed by it, per head
    for a budget in tokens, for all heads of a sequence together for one in bytes. Without a budget, and with one of all
    layers, the host now and then reads how many slots are in use and changes their number. A step of several tokens
    adds one after the other to a copy of the slots; :meth:`keep` then adds those that stay to the slots.

    Args:
        forms: of the variant.
        network: of the layer.
        rows: see :class:`~attnzoo.forms.caches.inplace.BatchRows`.
        cache: the cache whose tensors are changed; its slots have no order.
        most: the most slots that a head can need, or a sequence whose heads share them.
        used: an upper bound of the slots that any head has in use.
        last: the call of the last step of several tokens, until :meth:`keep`.
    """

    forms: SoftmaxForms
    network: Network
    rows: BatchRows
    cache: ForgettingCache
    most: int
    used: int = 0
    last: Call | None = None

    @staticmethod
    def like(
        state: ForgettingCache, rows: BatchRows, tokens: int, device: torch.device | str, forms: SoftmaxForms,
        network: Network,
    ) -> ForgettingMemory:  # fmt: skip
        """An empty memory for sequences of up to ``tokens`` tokens, with the shapes and dtypes of ``state``."""
        B, policy = len(rows.lengths), state.policy
        if policy.bounds is not None:
            policy = replace(policy, bounds=policy.bounds.clone())

        def zeros(x: Tensor, *shape: int) -> Tensor:
            return torch.zeros(B, *shape, dtype=x.dtype, device=device)

        G = state.live.shape[1]
        within, longest = state.most(), G * tokens if state.shared else tokens
        most = longest if within is None else min(longest, within)
        grows = within is None or policy.total
        shape = (min(most, PAGE) if grows else most, 1)
        shape = shape if state.shared else (G, shape[0])
        slots = {name: zeros(x, *shape, *x.shape[3:]) for name, x in state.slots.items()}
        slots["held"] = torch.zeros(B, *shape, dtype=torch.bool, device=device)
        sums = {name: zeros(x, *x.shape[1:]) for name, x in state.sums.items()}
        phase = None if state.phase is None else zeros(state.phase, *state.phase.shape[1:])
        cache = ForgettingCache(slots, zeros(state.live, G), rows.length, policy, 0, sums, phase)
        return ForgettingMemory(forms, network, rows, cache, most)

    @untraced  # it changes the slots in place
    def step(self, call: Call, extend: Extend) -> Tensor:
        active = self.rows.active != 0
        if self.rows.tokens == 1:
            return self._take(self.cache, call, active)
        self.last = call = replace(call, gate=call.gate.per_token(call.q))
        slots, sums = ({name: x.clone() for name, x in part.items()} for part in (self.cache.slots, self.cache.sums))
        phase = None if self.cache.phase is None else self.cache.phase.clone()
        trial = replace(self.cache, slots=slots, sums=sums, phase=phase)
        rows, before = [], self.rows.length
        for t, one in enumerate(tokens_of(call)):
            rows.append(self._take(replace(trial, seen=before + t), one, active))
        return torch.cat(rows, 1)

    def _take(self, cache: ForgettingCache, call: Call, there: Tensor) -> Tensor:
        """The output of one token of the sequences in the mask ``there [B]``; changes the tensors of ``cache`` in
        place."""
        slots, given = cache.slots, replace(SoftmaxOptions(**call.options), valid=there[:, None])
        slots["held"] &= ~cache.done_with()
        o, after = take_token(self.forms, call.q, call.k, call.v, call.gate, self.network, cache, given)
        after = after.within_budget()
        for mine, new in ((slots, after.slots), (cache.sums, after.sums)):
            for name, x in mine.items():
                if new[name] is not x:
                    x.copy_(new[name])
        if cache.phase is not None and after.phase is not None:
            cache.phase.copy_(after.phase)
        return o

    def admit(self, row: int, state: ForgettingCache, tokens: int) -> None:
        state, slots = replace(state, policy=self.cache.policy).within_budget().settled(), self.cache.slots
        n = int(state.live.sum() if state.shared else state.live.max())
        self.used = max(self.used, n)
        if n + self._each() > self.cache.size and self.cache.size < self.most:
            self._resize(n)
        self.clear(row)
        for name, x in {**state.slots, "held": state.in_use()}.items():
            first = (row, slice(n)) if state.shared else (row, slice(None), slice(n))
            slots[name][first] = x[(0, *first[1:])]
        for name, x in state.sums.items():
            self.cache.sums[name][row] = x[0]
        if self.cache.phase is not None and state.phase is not None:
            self.cache.phase[row] = state.phase[0]

    @torch.no_grad()
    def keep(self, kept: Tensor) -> None:
        assert self.last is not None
        call, self.last = self.last, None
        for t, one in enumerate(tokens_of(call)):
            seen = self.rows.length + kept.clamp(max=t)
            self._take(replace(self.cache, seen=seen), one, kept > t)

    def renew(self, bounds: QueryBounds) -> None:
        if self.cache.policy.bounds is not None:
            self.cache.policy.bounds.copy_(bounds)

    def ready(self, rows: Sequence[int]) -> bool:
        N, more = self.cache.size, self.rows.tokens * self._each()
        self.used += more
        if self.most <= N or self.used <= N:
            return False
        used = int((self._held().flatten(1) if self.cache.shared else self._held()).sum(-1).max())
        size = self._room_for(used)
        self.used = used + more
        if used + AHEAD * self._each() <= N < 2 * size:
            return False
        self._resize(used)
        return True

    def _each(self) -> int:
        """Slots that a token takes of those of a head, or of all heads together."""
        return self.cache.live.shape[1] if self.cache.shared else 1

    def _room_for(self, used: int) -> int:
        return min(self.most, -(-(used + AHEAD * self._each()) // PAGE) * PAGE)

    def _resize(self, used: int) -> None:
        """Change the number of slots to some more than ``used``; the keys in use move to the front.

        Raises:
            MemoryError: the new slots do not fit on the device. Nothing has changed then.
        """
        slots, size, axis = self.cache.slots, self._room_for(used), 1 if self.cache.shared else 2
        needed = sum(size_of(x) // x.shape[axis] * size for x in slots.values())
        check_memory(needed, self.rows.length.device, f"slots for {size} keys of each head that forgets")
        slots["held"].copy_(self._held())
        order = slots["held"].int().argsort(dim=axis, descending=True, stable=True)
        order = order.narrow(axis, 0, min(size, order.shape[axis]))
        for name, x in slots.items():
            index = order.view(*order.shape, *(1,) * (x.ndim - 3)).expand(*order.shape, *x.shape[3:])
            slots[name] = resized(x.gather(axis, index), axis, size)

    def _held(self) -> Tensor:
        """The mask of slots whose key a later row may see, ``[B, G, N]``."""
        return self.cache.slots["held"] & ~self.cache.done_with()

    def clear(self, row: int) -> None:
        self.cache.slots["held"][row] = False

    def kept(self, row: int) -> list[int]:
        return self.cache.by_head(self._held())[row].tolist()

    def tensors(self) -> Iterator[Tensor]:
        yield from self.cache.slots.values()
        yield from self.cache.sums.values()
        if self.cache.phase is not None:
            yield self.cache.phase

    def workspace(self, heads: int, tokens: int = 1) -> int:
        slots = self.cache.slots
        copies = slots["k"].numel() + slots["v"].numel()  # temporary copies of a step
        if self.cache.shared:
            # each slot's queries, their products with its key, and the logits of all heads
            per_head = heads // self.cache.live.shape[1]
            copies += slots["held"].numel() * (2 * per_head * slots["k"].shape[-1] + 3 * heads)
        copies *= max(4, slots["v"].itemsize)
        return copies if tokens == 1 else copies + sum(size_of(x) for x in slots.values())


def share_in_place(memories: Sequence[Memory]) -> None:
    """Mark for eviction, after a step of all layers, the keys that exceed a budget of all of them, if they have one."""
    held = [memory for memory in memories if isinstance(memory, ForgettingMemory) and memory.cache.policy.total]
    for memory, after in zip(held, within_total([memory.cache for memory in held]) if held else [], strict=True):
        memory.cache.slots["kept"].copy_(after.slots["kept"])
