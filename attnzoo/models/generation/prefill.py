"""Prompts read in pieces, and the states at their pieces' ends, from which later prompts go on."""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from attnzoo.layer.cache import LayerCache
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.request import Request
from attnzoo.parallel import Fragments
from attnzoo.parallel import prefill as read_together

PIECE = 512  # tokens
Digest = bytes


@dataclass(eq=False)
class Reading:
    """A prompt that is being read.

    Args:
        cache: after the tokens so far.
        tokens: how many were read, or found.
        last: the head's input ``[1, D]`` of the last one.
    """

    cache: list[LayerCache]
    tokens: int = 0
    last: Tensor | None = None


@dataclass(eq=False)
class Prefill:
    """The prompts of a generator.

    Args:
        model: in evaluation mode.
        evict, budget: see :class:`~attnzoo.models.generation.engine.Generator`.
        piece: tokens that are read between two steps of the others.
        limit: bytes of the states that are kept for later prompts; the one that was used longest ago goes first.
        over: process group or device mesh whose ranks read each prompt together; None: this process alone.
        kept: these states, by a digest of the tokens that they have seen.
    """

    model: LanguageModel
    evict: Any
    budget: Any
    piece: int = PIECE
    limit: int = 0
    over: Any = None
    kept: OrderedDict[Digest, Reading] = field(default_factory=OrderedDict)
    _weights: int = 0

    def whole(self) -> str:
        """Why a prompt is read whole and its states are not kept, or "": what was evicted depends on the pieces."""
        if self.evict is not None:
            return "evict"
        return "forgetting" if any(layer.forget is not None for layer in self.model.attentions()) else ""

    def done(self, request: Request) -> bool:
        """Whether nothing of the request's prompt is left to read."""
        read = request.reading is not None and request.reading.tokens == request.length
        return read or not isinstance(request.start, Tensor)

    def read(self, request: Request) -> int:
        """Read a piece of the prompt, of so many tokens."""
        start = cast(Tensor, request.start)
        if request.reading is None:
            request.reading = self._found(request.prompt)
            request.found = request.reading.tokens
        reading = request.reading
        piece = start[reading.tokens :][: None if self.whole() else self.piece]
        if self.over is not None and not reading.tokens and len(start) >= self.over.size():
            piece, fragments = start, Fragments.zigzag(len(start), self.over)
            reading.cache, reading.last = read_together(self.model, piece[None], fragments)
        else:
            reading.last = self.model.hidden(piece[None], cache=reading.cache)[:, -1]
        reading.tokens += len(piece)
        if self.limit:
            self._keep(request.prompt, reading)
        return len(piece)

    def _found(self, prompt: list[int]) -> Reading:
        """The state after the longest beginning of a prompt that is kept, at least one token before its end."""
        weights = sum(0 if weight.is_inference() else weight._version for weight in self.model.parameters())
        if weights != self._weights:  # they have changed in place
            self._weights = weights
            self.kept.clear()
        for tokens in sorted({kept.tokens for kept in self.kept.values()}, reverse=True):
            name = _digest(prompt[:tokens]) if tokens < len(prompt) else b""
            if name in self.kept:
                self.kept.move_to_end(name)
                return _copy(self.kept[name])
        return Reading(self.model.new_cache(self.evict, self.budget))

    def _keep(self, prompt: list[int], reading: Reading) -> None:
        name = _digest(prompt[: reading.tokens])
        self.kept[name] = _copy(reading)
        self.kept.move_to_end(name)
        while self.kept and self.bytes() > self.limit:
            self.kept.popitem(last=False)

    def bytes(self) -> int:
        """Memory of the states that are kept; those of one prompt share the tensors of their keys."""
        stored = (x.untyped_storage() for kept in self.kept.values() for layer in kept.cache for x in _tensors(layer))
        return sum({storage.data_ptr(): storage.nbytes() for storage in stored}.values())


def _digest(tokens: list[int]) -> Digest:
    return hashlib.sha256(array("q", tokens)).digest()


def _copy(reading: Reading) -> Reading:
    """The reading as it is now: what a cache holds is replaced by later calls, not changed."""
    return Reading([copy.copy(layer) for layer in reading.cache], reading.tokens)


def _tensors(layer: LayerCache) -> Iterator[Tensor]:
    for x in (*layer.windows.values(), *vars(layer.state).values()):
        if isinstance(x, Tensor):
            yield x
