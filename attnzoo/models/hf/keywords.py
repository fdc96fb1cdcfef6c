"""Which keywords `forward` of the Hugging Face class takes besides its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import Cache

from attnzoo.errors import nearest

# Of the loss, of collators and of other models: what does not concern this one is passed to every model.
OTHERS = frozenset({
    "num_items_in_batch", "ignore_index", "shift_labels", "position_ids", "seq_idx", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "cache_position", "token_type_ids", "head_mask", "output_router_logits", "task_ids",
})  # fmt: skip
CLOSE = 0.8  # of two words' letters; "attention_masks" and "label" are, "pixel_values" is not


def check_keywords(given: Mapping[str, Any], parameters: Collection[str]) -> None:
    """Misspelt parameters are not taken for keywords of others, which are ignored; nor are caches by another name.

    Args:
        given: keywords that are none of the parameters.
        parameters: of `forward`.

    Raises:
        TypeError: a name that is nearly one of a parameter or of a keyword that counts, or a cache.
    """
    for name, x in given.items():
        if isinstance(x, Cache):  # a loop that a later release wrote would lose what came before
            raise TypeError(f"forward: expected a cache as past_key_values or cache, got one as {name!r}")
        if name not in OTHERS:
            near = nearest(name, sorted({*parameters, *OTHERS}), CLOSE)
            if near:
                raise TypeError(f"forward: unknown keyword {name!r}; did you mean {near!r}?")
