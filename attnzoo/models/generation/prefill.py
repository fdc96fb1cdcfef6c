"""Prompts read in pieces, from where a kept beginning ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.forms.caches.inplace import Memory
from attnzoo.layer.cache import LayerCache
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.prefixes import Prefix, Prefixes
from attnzoo.models.generation.request import Request
from attnzoo.parallel import Fragments
from attnzoo.parallel import prefill as read_together

PIECE = 512  # tokens


@dataclass(eq=False)
class Reading:
    """A prompt that is being read.

    Args:
        prompt: ``[T]`` int64, on the host.
        cache: after the tokens so far.
        tokens: how many were read, or found.
        start: the kept beginning that it goes on from, or None.
        last: the head's input ``[1, D]`` of the last one.
        ends: beginnings that are to be kept.
    """

    prompt: Tensor
    cache: list[LayerCache]
    tokens: int = 0
    start: Prefix | None = None
    last: Tensor | None = None
    ends: list[Prefix] = field(default_factory=list)


@dataclass(eq=False)
class Prefill:
    """The prompts of a generator.

    Args:
        model: in evaluation mode.
        evict, budget: see :class:`~attnzoo.models.generation.engine.Generator`.
        memories: of the batch's layers.
        piece: tokens that are read between two steps of the others.
        over: process group or device mesh whose ranks read each prompt together; None: this process alone.
        prefixes: what is kept for later prompts.
    """

    model: LanguageModel
    evict: Any
    budget: Any
    memories: Sequence[Memory]
    piece: int = PIECE
    over: Any = None
    prefixes: Prefixes = field(default_factory=Prefixes)
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
            request.reading = self._begun(request.prompt)
            request.found = request.reading.tokens
        reading = request.reading
        piece = start[reading.tokens :][: None if self.whole() else self.piece]
        if self.over is not None and not reading.tokens and len(start) >= self.over.size():
            piece, fragments = start, Fragments.zigzag(len(start), self.over)
            reading.cache, reading.last = read_together(self.model, piece[None], fragments)
        else:
            reading.last = self.model.hidden(piece[None], cache=reading.cache)[:, -1]
        reading.tokens += len(piece)
        if self.prefixes.limit:
            end = Prefix.of(reading.prompt[: reading.tokens], reading.cache, self.memories)
            reading.ends = [end] if end.crops else [*reading.ends, end]
            self.prefixes.trim(reading.ends)
        return len(piece)

    def keep(self, row: int, request: Request) -> None:
        """Keep the beginnings of a prompt that has been read, and is in ``row`` by now."""
        if request.reading is not None:
            self.prefixes.keep(request.reading.ends, row)

    def _begun(self, prompt: list[int]) -> Reading:
        """The reading of a prompt from where the longest beginning that is kept ends."""
        weights = sum(0 if weight.is_inference() else weight._version for weight in self.model.parameters())
        if weights != self._weights:  # they have changed in place
            self._weights = weights
            self.prefixes.clear()
        text = torch.tensor(prompt, device="cpu")
        start, tokens = self.prefixes.find(text)
        if start is None:
            return Reading(text, self.model.new_cache(self.evict, self.budget))
        return Reading(text, [layer.cropped(tokens) for layer in start.cache], tokens, start)
