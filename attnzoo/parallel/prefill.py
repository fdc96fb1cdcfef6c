"""A long prompt that several ranks read together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.parallel.context import context_parallel
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.rows import of_all_fragments


@torch.no_grad()
def prefill(model: Any, tokens: Tensor, fragments: Fragments) -> tuple[list[Any], Tensor]:
    """The cache of a language model after a text, and the head's input of the last token, ``[B, D]``.

    Each rank reads its fragments. What later tokens need comes to all of them, as one process would have it: states,
    the last tokens of convolutions, and all keys and values, with pruning too. Any rank can go on by itself.

    Args:
        model: an :class:`attnzoo.models.LanguageModel`, with the same weights on every rank.
        tokens: the whole text, integers ``[B, T]``, the same on every rank.
        fragments: of the T tokens, one document.

    Raises:
        ValueError: another number of tokens, or several documents.
    """
    cache = model.new_cache()
    with context_parallel(fragments):
        hidden = model.hidden(fragments.shard(tokens), cache=cache)
    ends = [piece[:, -1] for piece in fragments.cut(hidden)]
    if fragments.ranks > 1:
        (ends,), _ = of_all_fragments(fragments, ends)
    return cache, ends[-1]
