"""The memory of the layers behind Hugging Face's `Cache`."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnzoo.layer.stream import LayerCache
from attnzoo.models.hf.config import CACHE_NAMES

NAME = CACHE_NAMES["cache" in CausalLMOutputWithPast.__dataclass_fields__]  # by which this release passes it around


class LayerMemory(CacheLayerMixin):  # type: ignore[misc]
    """One layer's :class:`attnzoo.layer.stream.LayerCache`, with the methods that `generate` calls.

    Nothing outside the layer reads its keys, so :meth:`update` is refused.

    Args:
        memory: from `Attention.new_cache`.
    """

    is_sliding = False

    def __init__(self, memory: LayerCache) -> None:
        super().__init__()
        self.memory = memory

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back: not where a convolution or a shift has kept only its window."""
        return not self.memory.windows

    def activate_past_recording(self) -> None:
        """Nothing to do: what can be taken back is always kept."""

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: the layer fills its memory."""

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refused: keys and values are added by the layer itself.

        Raises:
            TypeError: always.
        """
        raise TypeError("update: a layer of attnzoo extends its own memory; give the cache to the model's forward")

    def get_seq_length(self, *_: Any) -> int:
        """Tokens seen, padding included."""
        return 0 if self.memory.state is None else len(self.memory.state)

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of a mask over past and new tokens."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + new, 0

    def reset(self) -> None:
        """Forget everything, as :meth:`attnzoo.layer.attention.Attention.new_cache` would give it again."""
        self._keep(replace(self.memory, state=None, windows={}, seen=None, dtype=None, bound=None))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx`, in that order."""
        if self.memory.seen is not None:
            self.memory.reorder(beam_idx.to(self.memory.seen.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        seen = self.memory.seen
        if seen is not None:
            self.memory.reorder(torch.arange(len(seen), device=seen.device).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Take tokens back, where the state can give them back exactly.

        Args:
            max_length: tokens to keep; or minus the number to take back; 0 takes none back.

        Raises:
            ValueError: the state cannot (a recurrent one, PaTH's carried keys, the window of a convolution).
        """
        self._keep(self._cropped(index(max_length)))  # some releases of transformers give a tensor

    def _cropped(self, max_length: int) -> LayerCache:
        """What :meth:`crop` leaves."""
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
    """The memories of all layers of one model.

    Args:
        memories: from `LanguageModel.new_cache`.
    """

    def __init__(self, memories: list[LayerCache]) -> None:
        super().__init__(layers=[LayerMemory(memory) for memory in memories])
        self.origin: Tensor | None = None  # [B], the position that each row's first token was given, where it was

    @property
    def memories(self) -> list[LayerCache]:
        """What `LanguageModel` takes as `cache`."""
        return [layer.memory for layer in self.layers]

    def reset(self) -> None:
        """Forget everything."""
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
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.origin is not None:
            self.origin = self.origin.repeat_interleave(repeats)

    def crop(self, max_length: int) -> None:
        """Take tokens back in all layers, or in none where one refuses; see :meth:`LayerMemory.crop`."""
        tokens = index(max_length)  # of a tensor once: on a GPU it is waited for
        cropped = [layer._cropped(tokens) for layer in self.layers]
        for layer, kept in zip(self.layers, cropped, strict=True):
            layer._keep(kept)


def one_cache(past_key_values: Any, cache: Any) -> ModelCache | None:
    """What was given by either name, or None.

    Raises:
        ValueError: both.
        TypeError: a cache of another kind.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("cache: expected None beside past_key_values, which is its other name")
    name, found = ("past_key_values", past_key_values) if cache is None else ("cache", cache)
    if found is not None and not isinstance(found, ModelCache):
        raise TypeError(f"{name}: expected attnzoo.models.hf.ModelCache, got {type(found).__name__}")
    return found
