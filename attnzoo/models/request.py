"""The sequences of a generator, and their tokens on the way to the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnzoo.layer.stream import LayerCache
from attnzoo.models.sampling import Sampling


@dataclass(eq=False)
class Request:
    """One sequence of a :class:`Generator`.

    Args:
        id: what :meth:`Generator.add` gave.
        start: its tokens so far, ``[T]``, or the caches that have seen them and the token that follows;
            None once it is in the batch.
        length: how many tokens that is, the one that follows not among them.
        prompt: its tokens, or the one that follows the caches.
        max_new_tokens: how many may follow.
        sampling: how they are drawn.
        stop: tokens that end it.
        tokens: those that followed and are known, the one that ended it among them.
        left: steps before the last of them is drawn.
        done: whether all that there will be are known.
        read: how many tokens its caches had seen in the end.
        kept: by layer, how many keys each of its key heads had then; None for a layer without keys.
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


@dataclass(eq=False)
class Drawn:
    """Tokens on their way to the host: which request each row of each step belongs to."""

    values: Tensor  # [steps, B]
    rows: list[list[tuple[int, Request]]]
    arrived: torch.cuda.Event | None
