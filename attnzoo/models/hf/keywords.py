"""The check of keywords that `forward` of the Hugging Face class gets besides its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import Cache

from attnzoo.errors import nearest

# Keywords of the loss, of collators and of other models, which transformers passes to every model.
OTHERS = frozenset({
    "num_items_in_batch", "ignore_index", "shift_labels", "position_ids", "seq_idx", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "cache_position", "token_type_ids", "head_mask", "output_router_logits", "task_ids",
})  # fmt: skip
# ratio of equal letters from which a word counts as misspelt: "attention_masks" and "label", not "pixel_values"
CLOSE = 0.8


def check_keywords(given: Mapping[str, Any], parameters: Collection[str]) -> None:
    """Raise for a misspelt parameter or a cache under another name; keywords meant for other models are ignored.

    Args:
        given: keywords that are no parameters.
        parameters: names of the parameters of `forward`.

    Raises:
        TypeError: a name close to a parameter or to a keyword that is read, or a cache.
    """
    for name, x in given.items():
        if isinstance(x, Cache):  # a later transformers may rename the cache, and earlier tokens would be lost
            raise TypeError(f"forward: expected a cache as past_key_values or cache, got one as {name!r}")
        if name not in OTHERS:
            near = nearest(name, sorted({*parameters, *OTHERS}), CLOSE)
            if near:
                raise TypeError(f"forward: unknown keyword {name!r}; did you mean {near!r}?")
