"""Beginnings of prompts that are kept, so that later prompts go on from them and share the pages of their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnzoo.forms.caches.inplace import Memory
from attnzoo.forms.caches.pages.page_table import PAGE
from attnzoo.forms.caches.pages.prefix import PagedPrefix
from attnzoo.layer.cache import LayerCache


@dataclass(eq=False)
class Prefix:
    """A beginning of prompts, and what each layer remembers after it.

    Args:
        tokens: ``[T]`` int64, on the host.
        cache: by layer; the state itself, or a :class:`~attnzoo.forms.caches.pages.prefix.PagedPrefix` of it.
        paged: these prefixes.
        crops: whether a prompt can also go on from each of its whole pages: it can where no layer sums up its tokens,
            or keeps the last ones for a convolution or a shift.
    """

    tokens: Tensor
    cache: list[LayerCache]
    paged: list[PagedPrefix]
    crops: bool

    @staticmethod
    def of(tokens: Tensor, cache: Sequence[LayerCache], memories: Sequence[Memory]) -> Prefix:
        """The beginning ``tokens``, after which the layers remember ``cache``; without pages until :meth:`hold`."""
        kept = [replace(layer, state=memory.prefix(layer.state)) for memory, layer in zip(memories, cache, strict=True)]
        try:
            crops = bool([layer.cropped(0) for layer in kept])
        except ValueError:
            crops = False
        paged = [new.state for old, new in zip(cache, kept, strict=True) if new.state is not old.state]
        return Prefix(tokens, kept, paged, crops)

    def common(self, prompt: Tensor) -> int:
        """The number of first tokens of ``prompt`` that need not be read, at most all but one."""
        n = min(len(self.tokens), len(prompt) - 1)
        same = int((self.tokens[:n] == prompt[:n]).long().cumprod(0).sum())
        if same == len(self.tokens):
            return same
        return same // PAGE * PAGE if self.crops else 0

    def covers(self, other: Prefix) -> bool:
        """Whether every prompt that can go on from ``other`` can go on from this one instead."""
        n = len(other.tokens)
        long = self.crops or n == len(self.tokens)
        return long and n <= len(self.tokens) and torch.equal(self.tokens[:n], other.tokens)

    def hold(self, row: int, spare: Callable[[], bool]) -> None:
        """Keep the pages of ``row``, which begins so; pools that need pages call ``spare``."""
        for paged in self.paged:
            paged.hold(row)
            paged.pool.spare = spare

    def share(self, row: int, tokens: int) -> None:
        """Give the empty row ``row`` the pages of the first ``tokens`` tokens, unless they are kept no longer."""
        for paged in self.paged:
            paged.share(row, tokens)

    def release(self) -> None:
        """Keep no page."""
        for paged in self.paged:
            paged.release()

    def tensors(self) -> list[Tensor]:
        """The tensors that it keeps, besides pages of a pool."""
        found = [self.tokens, *(x for layer in self.cache for x in layer.windows.values())]
        states = [*(layer.state for layer in self.cache), *(paged.like for paged in self.paged)]
        return found + [x for state in states for x in vars(state).values() if isinstance(x, Tensor)]


@dataclass(eq=False)
class Prefixes:
    """The kept beginnings of prompts.

    Their pages are those of the sequences that began so, and stay in their pools, until a sequence needs the memory;
    then beginnings go, the one that was used longest ago first.

    Args:
        limit: bytes of what they take besides.
        kept: in the order of their last use.
    """

    limit: int = 0
    kept: list[Prefix] = field(default_factory=list)

    def find(self, prompt: Tensor) -> tuple[Prefix | None, int]:
        """The beginning that has the most first tokens of ``prompt`` ``[T]``, and how many, at most all but one."""
        common = {one: one.common(prompt) for one in self.kept}
        best = max(common, key=common.__getitem__, default=None)
        if best is None or not common[best]:
            return None, 0
        self.kept.remove(best)
        self.kept.append(best)
        return best, common[best]

    def keep(self, new: Sequence[Prefix], row: int) -> None:
        """Keep beginnings of the sequence that has just begun in ``row``."""
        for one in new:
            one.hold(row, self.spare)
            for old in [old for old in self.kept if one.covers(old)]:
                self.drop(old)
            self.kept.append(one)
        self.trim()

    def drop(self, one: Prefix) -> None:
        """Keep ``one`` no longer."""
        self.kept.remove(one)
        one.release()

    def spare(self) -> bool:
        """Drop the one that was used longest ago; False where there is none."""
        if self.kept:
            self.drop(self.kept[0])
            return True
        return False

    def clear(self) -> None:
        """Drop all of them."""
        while self.spare():
            pass

    def trim(self, new: list[Prefix] | None = None) -> None:
        """Drop kept beginnings, then the first of ``new`` ones, until both together are within the limit."""
        new = new or []
        while (self.kept or new) and self.bytes(new) > self.limit:
            if not self.spare():
                del new[0]

    def bytes(self, new: Sequence[Prefix] = ()) -> int:
        """Memory of what is kept, and of ``new``, beside the pages of the pools; those of one prompt share tensors."""
        stored = (x.untyped_storage() for one in (*self.kept, *new) for x in one.tensors())
        return sum({storage.data_ptr(): storage.nbytes() for storage in stored}.values())
