"""Text from a run or a model folder: the model with its tokenizer, and a continuation as it is drawn."""

from __future__ import annotations

import shlex
import time
from collections import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnzoo.algebra.pruning import Evict
from attnzoo.data.shards import TOKENIZER
from attnzoo.data.tokenizer import read_tokenizer
from attnzoo.data.unfolding import Unfolding
from attnzoo.models.generation.engine import Generator
from attnzoo.models.generation.request import Request
from attnzoo.trained.model import TrainedModel, load_trained


def load_text_model(source: Path, device: str, dtype: torch.dtype | None = None) -> TrainedModel:
    """The model of a run's newest whole checkpoint, or of a model folder, that can go on with a text.

    Args:
        source: the folder of a run, or one that `attnzoo export` or `attnzoo import` wrote.
        device: where the model goes.
        dtype: of the weights; None keeps that of the files.

    Raises:
        FileNotFoundError: neither is there, or no checkpoint, or no tokenizer.
        ValueError: a model of another library, or tokens whose text nobody has said, or that are those of a task.
        ModuleNotFoundError: tokenizers, or for a model folder transformers, is not installed. A run on bytes needs
            neither.
    """
    found = load_trained(source, device, dtype, others=False)
    if found.task is not None:
        raise ValueError(
            f"{str(source)!r} was trained on the task {found.task!r}, whose tokens stand for no text; "
            f"`attnzoo evaluate {shlex.quote(str(source))}` asks it"
        )
    if not found.has_text and found.config is not None:
        raise ValueError(
            f"{str(source)!r} was trained on tokens whose text is not known here: export it, and put its "
            f"{TOKENIZER} into the folder"
        )
    if not found.has_text:
        read_tokenizer(source)  # says what is missing
    for layer in found.model.attentions():
        if layer.forget is not None and layer.forget.blend != 1:
            now = f"blend = {layer.forget.blend:g}, 1 from the end of forgetting.anneal_steps on"
            kind = "expected a model whose layers forget alone, got one that learns it"
            raise ValueError(f"{str(source)!r}: {kind} ({now})")
    _ = found.decode, found.stop  # a tokenizer that cannot be read is refused here
    return found


@dataclass(eq=False)
class Continuation:
    """The text that follows a prompt; making it takes the memory, iterating draws it, and then the rest is known.

    Args:
        source: the model.
        prompt: what it continues.
        max_tokens: at most so many follow.
        evict: weight that rows may lose for keys that are given up, or "offload", or None for none.
        budget: what each layer that forgets may hold, or None for what it has not forgotten.
        sampling: see :meth:`~attnzoo.models.generation.engine.Generator.add`.
        stop: texts before the first of which it ends, special tokens by their names among them.

    Attributes:
        request: the sequence as the generator knows it.
        bytes: memory of the caches.
        prefill_seconds: until the first token was drawn.
        speed: tokens per second after the first few, with which steps are compiled or recorded; None without others.

    Raises:
        TypeError, ValueError, MemoryError: as :class:`~attnzoo.models.generation.engine.Generator` and its
            ``add``; or a text to stop at that is empty.
    """

    source: TrainedModel
    prompt: str
    max_tokens: int
    evict: float | str | None = None
    budget: int | str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    request: Request = field(init=False)
    bytes: int = 0
    prefill_seconds: float = 0.0
    speed: float | None = None

    def __post_init__(self) -> None:
        for name, text in (("prompt", self.prompt), *(("stop", text) for text in self.stop)):
            if (half := next((at for at, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)) is not None:
                raise ValueError(f"{name}: expected text, got half of a surrogate pair at {half}, {text[half]!r}")
        tokens = self.source.encode(self.prompt)
        if not tokens:
            raise ValueError(f"prompt: expected a text of at least one token, got {self.prompt!r}")
        if "" in self.stop:
            raise ValueError("stop: expected texts of at least one character, got ''")
        self._generator = Generator(
            self.source.model, 1, len(tokens) + self.max_tokens, check_every=4, evict=self.evict, budget=self.budget
        )
        special = self.source.decode.special
        ends = self.source.stop | {special[text] for text in self.stop if text in special}
        number = self._generator.add(tokens, self.max_tokens, stop=ends, **self.sampling)
        self.request = self._generator.requests[number]

    def __iter__(self) -> abc.Generator[str, None, None]:
        """The text as it becomes known, whole characters; however it ends, what was used is known afterwards."""
        generator, request = self._generator, self.request
        start = time.perf_counter()
        begun, before = 0.0, 0
        try:
            generator.admit()
            int(generator.batch.tokens[0])  # waits for the device
            self.prefill_seconds = time.perf_counter() - start
            text = Unfolding(self.source.decode, request.prompt, self.stop)
            for _ in generator.stream():
                if not begun:
                    begun, before = time.perf_counter(), len(request.tokens)
                ended = request.tokens[-1] in request.stop
                yield text.after(request.tokens[:-1] if ended else request.tokens, request.done)
                if text.ended:
                    return
        finally:
            self.bytes = generator.bytes()
            if len(request.tokens) > before > 0:
                self.speed = (len(request.tokens) - before) / (time.perf_counter() - begun)
            generator.cancel(request.id)  # where it has not ended by itself

    def summary(self) -> list[str]:
        """Speed, memory and the keys that each head kept, in lines; after the text."""
        new, length = len(self.request.tokens), self.request.length
        speed = "" if self.speed is None else f", {self.speed:.1f} tokens/s"
        lines = [
            f"{new} tokens after {length} of the prompt ({self.prefill_seconds:.2f} s){speed}",
            f"caches: {_memory(self.bytes)} on {self.source.model.embedding.weight.device}",
        ]
        kept = {layer: heads for layer, heads in enumerate(self.request.kept) if heads is not None}
        forgets = [layer for layer, each in enumerate(self.source.model.attentions()) if each.forget is not None]
        read = self.request.read
        if kept and self.evict is None and not forgets:
            lines.append(f"keys kept per head: all {read}")
        elif kept:
            lines += [
                f"keys kept per head, layer {layer}, of {read}: {' '.join(map(str, heads))}"
                for layer, heads in kept.items()
            ]
        if self.evict is not None:
            lost = Evict.of(self.evict).eps
            lines.append(f"for keys that were given up, no token lost more than {lost:.3g} of its weight")
        if forgets:
            lines.append("layers that forget gave up keys as they were trained to; nothing bounds what that changes")
        return lines


def _memory(number: int) -> str:
    """Bytes, to one digit after the point in the largest unit that they reach."""
    unit = min(3, max(1, (number.bit_length() - 1) // 10))
    return f"{number / 1024**unit:.1f} {('KiB', 'MiB', 'GiB')[unit - 1]}"
