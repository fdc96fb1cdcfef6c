"""The sequences of a generator, and checks of what begins one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.errors import check_kinds, check_least
from attnzoo.layer.cache import LayerCache
from attnzoo.models.generation.sampling import Sampling


@dataclass(eq=False)
class Request:
    """One sequence of a :class:`Generator`.

    Args:
        id: the number that :meth:`Generator.add` returned.
        start: the prompt's tokens ``[T]``, or filled caches and the next token; None once the request is in the batch.
        length: tokens of the prompt, or tokens in the caches.
        prompt: the prompt's tokens, or the token that follows the caches.
        max_new_tokens: the most tokens to generate.
        sampling: how tokens are drawn.
        stop: tokens that end the sequence.
        tokens: generated tokens that the host knows, with the one that ended the sequence.
        left: tokens still to be drawn.
        done: whether all generated tokens are known.
        read: tokens in the caches when the sequence ended.
        kept: by layer, the keys that each key head held at the end; None for a layer without keys.
        reading: the prompt as far as it has been read; None before and after.
        found: tokens of the prompt whose states were kept from an earlier one.
        proposed, accepted: tokens that a draft has proposed, and those of them that were drawn.
    """

    id: int
    start: Tensor | tuple[list[LayerCache], int] | None
    length: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    left: int = 0
    done: bool = False
    read: int = 0
    kept: list[list[int] | None] = field(default_factory=list)
    reading: Any = None
    found: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def known(self) -> int:
        """The number of tokens in ``prompt`` and ``tokens``."""
        return len(self.prompt) + len(self.tokens)


def check_counts(**counts: int) -> None:
    """Raise where one of these, by the names of the arguments, is no whole number of at least 1.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    check_kinds(counts, dict.fromkeys(counts, "int"))
    check_least(1, **counts)


def whole_numbers(name: str, values: Any) -> list[int]:
    """``values``, which may be Python or numpy integers or tensors, as Python ints.

    Raises:
        TypeError: other values; the message names the argument ``name``.
    """
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a sequence of whole numbers, got {values!r}")
    found: list[int] = []
    for value in values:
        try:
            found.append(index(value))
        except TypeError:
            raise TypeError(f"{name}: expected whole numbers, got {value!r}") from None
    return found


def check_begun(cache: Any, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Raise where ``cache`` does not hold the beginning of one sequence in the caches of ``layers``.

    Raises:
        TypeError, ValueError: another cache; see :meth:`Generator.resume`.
    """
    if not isinstance(cache, list) or not all(isinstance(one, LayerCache) for one in cache):
        raise TypeError(f"cache: expected a list of LayerCache, as new_cache() gives it, got {type(cache).__name__}")
    if len(cache) != len(layers):
        raise ValueError(f"cache: expected what {len(layers)} layers remember, got {len(cache)}")
    for one, layer in zip(cache, layers, strict=True):
        if one.owner is not None and one.owner() is not layer:
            raise ValueError("cache: expected what new_cache() of this very model gave, got that of another")
        if one.seen is None or one.tokens != cache[0].tokens:
            counts = sorted({other.tokens for other in cache})
            raise ValueError(f"cache: expected the same tokens in each layer, at least one, got {counts} tokens")
        if len(one.seen) != 1:
            raise ValueError(f"cache: expected one sequence, got {len(one.seen)}")
        if one.seen.device != device:
            raise ValueError(f"cache: expected it on {device}, as the model is, got {one.seen.device}")
    there = int(min(one.seen for one in cache if one.seen is not None))
    if there < cache[0].tokens:
        raise ValueError(f"cache: expected a sequence without padding, got {there} of {cache[0].tokens} tokens")
