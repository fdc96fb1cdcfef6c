"""Continuation of a text by a model and tokenizer of a run or a model folder."""

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
from attnzoo.models.generation.proposals import Draft, ModelDraft, from_model
from attnzoo.models.generation.request import Request
from attnzoo.trained.model import TrainedModel, load_trained


def load_text_model(source: str | Path, device: str, dtype: torch.dtype | None = None) -> TrainedModel:
    """The model of a run's newest whole checkpoint, or of a model folder, checked to have a tokenizer.

    Args:
        source: the folder of a run, or one that `attnzoo export` or `attnzoo import` wrote; or a small model's name.
        device: the device of the model.
        dtype: the dtype of the weights; None keeps that of the files.

    Raises:
        FileNotFoundError: no run or model folder, no checkpoint, or no tokenizer.
        ValueError: a model of another library, or tokens without a tokenizer, such as those of a task.
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
        read_tokenizer(Path(source))  # raises and names what is missing
    for layer in found.model.attentions():
        if layer.forget is not None and layer.forget.blend != 1:
            now = f"blend = {layer.forget.blend:g}, 1 from the end of forgetting.anneal_steps on"
            kind = "expected a model whose layers forget alone, got one that learns it"
            raise ValueError(f"{str(source)!r}: {kind} ({now})")
    _ = found.decode, found.stop  # raises for a damaged tokenizer
    return found


def check_draft(draft: Path | None, tokens: int | None) -> None:
    """Raise ValueError if a number of proposed tokens comes without a draft."""
    if draft is None and tokens is not None:
        raise ValueError(f"--draft-tokens: expected none without --draft, got {tokens}")


def draft_of(source: TrainedModel, other: TrainedModel, tokens: int | None) -> ModelDraft:
    """A draft by another trained model, which proposes ``tokens`` at a time to ``source``; None for 5.

    Raises:
        ValueError: a model with other tokens.
    """
    text = "Ein Text, a text: 1 + 1 = 2.\n"
    sizes = [each.model.config.vocab_size for each in (source, other)]
    if sizes[0] != sizes[1] or source.encode(text) != other.encode(text):
        raise ValueError(
            f"--draft: expected a model with the same tokens ({sizes[0]}), got one with others ({sizes[1]})"
        )
    return from_model(other.model.eval(), tokens or 5)


@dataclass(eq=False)
class Continuation:
    """A continuation of a prompt: the constructor allocates the caches, and iteration draws the text.

    Args:
        source: the model.
        prompt: the text to continue.
        max_tokens: the most tokens to draw.
        evict: the total weight that a row may lose by evicted keys, or "offload", or None to evict none.
        budget: the tokens or memory that each layer with One-Pass Forgetting may hold, or None.
        kv_dtype: "fp8", or None for the model's dtype.
        draft: what proposes tokens, or None.
        sampling: see :meth:`~attnzoo.models.generation.engine.Generator.add`.
        stop: texts, or names of special tokens, before the first of which the continuation ends.
        over: process group whose ranks read the prompt together and all iterate; None: this process alone.

    Attributes:
        request: the generator's request.
        bytes: memory of the caches.
        prefill_seconds: seconds until the first token was drawn.
        speed: tokens per second, without the first few, during which steps are compiled; None for short texts.

    Raises:
        TypeError, ValueError, MemoryError: as :class:`~attnzoo.models.generation.engine.Generator` and its
            ``add``; or a text to stop at that is empty.
    """

    source: TrainedModel
    prompt: str
    max_tokens: int
    evict: float | str | None = None
    budget: int | str | None = None
    kv_dtype: str | None = None
    draft: Draft | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    over: Any = None
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
            self.source.model, 1, len(tokens) + self.max_tokens, check_every=4, evict=self.evict, budget=self.budget,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip
        self._generator.share(self.over)
        special = self.source.decode.special
        ends = self.source.stop | {special[text] for text in self.stop if text in special}
        number = self._generator.add(tokens, self.max_tokens, stop=ends, **self.sampling)
        self.request = self._generator.requests[number]

    def __iter__(self) -> abc.Generator[str, None, None]:
        """Yield the text as it is drawn, in whole characters; sets the measured attributes even if interrupted."""
        generator, request = self._generator, self.request
        start = time.perf_counter()
        begun, before = 0.0, 0
        try:
            generator.admit()
            int(generator.batch.tokens[0])  # waits for the device
            self.prefill_seconds = time.perf_counter() - start
            text = Unfolding(self.source.decode, request.prompt, self.stop)
            for _ in generator.stream(self.draft):
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
            generator.cancel(request.id)  # where it has not ended itself

    def summary(self) -> list[str]:
        """Lines with the speed, memory and number of keys that each head held, after iteration."""
        new, length = len(self.request.tokens), self.request.length
        speed = "" if self.speed is None else f", {self.speed:.1f} tokens/s"
        lines = [
            f"{new} tokens after {length} of the prompt ({self.prefill_seconds:.2f} s){speed}",
            f"caches: {_memory(self.bytes)} on {self.source.model.embedding.weight.device}",
        ]
        if self.draft is not None:
            lines.append(f"{self.request.accepted} of {self.request.proposed} proposed tokens were the model's own")
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
    """A number of bytes in print, with one decimal in the largest fitting unit."""
    unit = min(3, max(1, (number.bit_length() - 1) // 10))
    return f"{number / 1024**unit:.1f} {('KiB', 'MiB', 'GiB')[unit - 1]}"
