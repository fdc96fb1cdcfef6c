"""The layers' caches behind Hugging Face's `Cache` interface."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnzoo.layer.cache import LayerCache
from attnzoo.models.hf.config import CACHE_NAMES

# the installed transformers' name for a cache
NAME = CACHE_NAMES["cache" in CausalLMOutputWithPast.__dataclass_fields__]


class LayerMemory(CacheLayerMixin):  # type: ignore[misc]
    """One layer's :class:`attnzoo.layer.cache.LayerCache`, with the methods that `generate` calls.

    Only the layer reads and writes its keys, so :meth:`update` is refused.

    Args:
        memory: a cache from `Attention.new_cache`.
    """

    is_sliding = False

    def __init__(self, memory: LayerCache) -> None:
        super().__init__()
        self.memory = memory

    @property
    def is_croppable(self) -> bool:
        """Whether :meth:`crop` can take the last tokens back; not where a convolution or shift has kept only its
        window."""
        return not self.memory.windows

    def activate_past_recording(self) -> None:
        """Do nothing: the cache can always be cropped where its layer allows it."""

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: the layer fills its cache."""

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Raise, as only the layer adds keys and values.

        Raises:
            TypeError: always.
        """
        raise TypeError("update: a layer of attnzoo extends its own memory; give the cache to the model's forward")

    def get_seq_length(self, *_: Any) -> int:
        """The number of tokens seen, padding included."""
        return 0 if self.memory.state is None else len(self.memory.state)

    def get_max_length(self) -> int:
        """-1, as the cache grows without limit."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The length and offset of a mask over past and new tokens."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + new, 0

    def reset(self) -> None:
        """Empty the cache."""
        self._keep(replace(self.memory, state=None, windows={}, seen=None, dtype=None, bound=None))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx`, in that order."""
        if self.memory.seen is not None:
            self.memory.reorder(beam_idx.to(self.memory.seen.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        seen = self.memory.seen
        if seen is not None:
            self.memory.reorder(torch.arange(len(seen), device=seen.device).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Remove the last tokens, where the earlier state can be restored exactly.

        Args:
            max_length: tokens to keep; or minus the number to remove; 0 removes none.

        Raises:
            ValueError: it cannot be restored (a recurrent state, PaTH's carried keys, the window of a convolution).
        """
        self._keep(self._cropped(index(max_length)))  # some releases of transformers pass a tensor

    def _cropped(self, max_length: int) -> LayerCache:
        """The cropped cache; see :meth:`crop`."""
        length = self.get_seq_length()
        keep = max_length if max_length > 0 else length + max_length
        if keep >= length or self.memory.seen is None:
            return self.memory
        if self.memory.windows:
            kept = ", ".join(sorted(self.memory.windows))
            raise ValueError(f"max_length: expected all {length} tokens ({kept} keep only the last ones), got {keep}")
        return self.memory.cropped(keep)

    def _keep(self, cropped: LayerCache) -> None:
        vars(self.memory).update(vars(cropped))


class ModelCache(Cache):  # type: ignore[misc]
    """The caches of all layers of one model.

    Args:
        memories: caches from `LanguageModel.new_cache`.
    """

    def __init__(self, memories: list[LayerCache]) -> None:
        super().__init__(layers=[LayerMemory(memory) for memory in memories])
        self.origin: Tensor | None = None  # [B], position of each row's first token, if positions were given

    @property
    def memories(self) -> list[LayerCache]:
        """The layers' caches, as the argument `cache` of `LanguageModel`."""
        return [layer.memory for layer in self.layers]

    def reset(self) -> None:
        """Empty the caches."""
        super().reset()
        self.origin = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx`, in that order."""
        super().reorder_cache(beam_idx)
        if self.origin is not None:
            self.origin = self.origin[beam_idx.to(self.origin.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        super().batch_select_indices(indices)
        if self.origin is not None:
            self.origin = self.origin[indices.to(self.origin.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.origin is not None:
            self.origin = self.origin.repeat_interleave(repeats)

    def crop(self, max_length: int) -> None:
        """Remove the last tokens in all layers, or in none where one refuses; see :meth:`LayerMemory.crop`."""
        tokens = index(max_length)  # read a tensor once: on a GPU this waits
        cropped = [layer._cropped(tokens) for layer in self.layers]
        for layer, kept in zip(self.layers, cropped, strict=True):
            layer._keep(kept)


def one_cache(past_key_values: Any, cache: Any) -> ModelCache | None:
    """The cache that was passed by either name, or None.

    Raises:
        ValueError: both were passed.
        TypeError: a cache of another kind.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("cache: expected None beside past_key_values, which is its other name")
    name, found = ("past_key_values", past_key_values) if cache is None else ("cache", cache)
    if found is not None and not isinstance(found, ModelCache):
        raise TypeError(f"{name}: expected attnzoo.models.hf.ModelCache, got {type(found).__name__}")
    return found
