"""The cache of a layer between calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.algebra.pruning import Evict
from attnzoo.forgetting.cache import ForgettingCache, within_total
from attnzoo.forms.caches.state import check_rows, whole


class Owner(weakref.ref[nn.Module]):
    """A reference to the layer that made a cache. A copied cache has the same owner; an unpickled one has none."""

    def __deepcopy__(self, memo: object) -> Owner:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclass(eq=False)
class LayerCache:
    """The cache of one attention layer; a call that succeeds extends it in place, one that fails does not change it.

    Args:
        state: an :class:`attnzoo.RecurrentState` or an :class:`attnzoo.KVCache`; None before the first call.
        windows: by name, the last tokens that a short convolution or a shift still needs, ``[B, n, X]``.
        seen: tokens so far, ``[B]`` int64 (padding does not count).
        dtype: the dtype of the hidden states in earlier calls.
        owner: the layer whose calls extend it; None until the first call.
        evict: the rule by which keys are evicted; None: no key is.
        budget: the budget of a layer with One-Pass Forgetting, see :func:`attnzoo.forgetting.rules.parse_budget`.
        bound: the logit bound ``[H]`` by the weights of QK-norm, where something needs it.
    """

    state: Any = None
    windows: dict[str, Tensor] = field(default_factory=dict)
    seen: Tensor | None = None
    dtype: torch.dtype | None = None
    owner: Owner | None = None
    bound: Tensor | None = None
    evict: Evict | None = None
    budget: int | str | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens so far, padding included."""
        return 0 if self.state is None else len(self.state)

    def reorder(self, index: Tensor) -> None:
        """Keep the rows ``index`` of the batch, in that order (beam search, finished rows).

        Raises:
            TypeError, ValueError: ``index`` is not one axis of row numbers, int32 or int64.
        """
        if self.seen is None:
            raise ValueError("index: expected a cache that has seen tokens, got an empty one, which has no rows")
        check_rows(index, self.seen)
        state = self.state.reorder(index)
        windows = {name: window[index] for name, window in self.windows.items()}
        self.state, self.windows, self.seen = state, windows, self.seen[index]

    def crop(self, tokens: int) -> None:
        """Go back to the first ``tokens`` tokens, padding among them, where that can be done exactly.

        Raises:
            TypeError, ValueError: no number from 0 to ``self.tokens``, or a cache that cannot go back: a recurrent
                state, keys that later tokens have changed, the windows of convolutions and shifts.
        """
        vars(self).update(vars(self.cropped(tokens)))

    def cropped(self, tokens: int) -> LayerCache:
        """The cropped cache (see :meth:`crop`) as a new object; only one of the two may be extended."""
        whole(tokens)
        if self.windows and tokens != self.tokens:
            kept = ", ".join(sorted(self.windows))
            raise ValueError(f"tokens: expected all {self.tokens} ({kept} keep only the last ones), got {tokens}")
        if self.state is None or self.seen is None:
            if tokens != 0:
                raise ValueError(f"tokens: expected 0, as the cache is empty, got {tokens}")
            return self
        state = self.state.crop(tokens)
        valid = getattr(state, "valid", None)
        there = self.seen.clamp(max=tokens) if valid is None else valid.sum(1)
        return replace(self, state=state, seen=there)

    def check(self, layer: nn.Module, rows: int, x: Tensor) -> None:
        """Raise where ``layer`` cannot extend this cache with ``rows`` rows of the dtype and device of ``x``.

        Raises:
            ValueError: the cache is another layer's, or holds another batch, dtype or device.
        """
        if self.owner is not None and not torch.compiler.is_compiling() and self.owner() is not layer:
            other = getattr(self.owner(), "variant", None)
            got = "of another layer" + (f" ({other.name!r})" if other else "")
            raise ValueError(f"cache: expected what new_cache() of this very layer gave, got that {got}")
        if self.seen is None:
            return
        if len(self.seen) != rows:
            raise ValueError(f"cache: expected {len(self.seen)} rows as in the calls before, got {rows}")
        if self.dtype != x.dtype or self.seen.device != x.device:
            before, now = f"{self.dtype} on {self.seen.device}", f"{x.dtype} on {x.device}"
            raise ValueError(f"cache: expected x in {before} as in the calls before, got {now}")


def share_budget(caches: Sequence[LayerCache]) -> None:
    """Evict, after a call of all layers, the keys that exceed a budget of all of them, if they have one."""
    held = [cache for cache in caches if isinstance(cache.state, ForgettingCache) and cache.state.policy.total]
    for cache, state in zip(held, within_total([cache.state for cache in held]) if held else [], strict=True):
        cache.state = state


class AllOrNone:
    """``with AllOrNone(caches):`` restores the caches of all layers when the call of one fails."""

    @classmethod
    def of(cls, caches: Any, layers: int) -> AllOrNone:
        """The context that restores all layers' caches if a call fails, after checking that they fit; none for None.

        Raises:
            TypeError, ValueError: other caches than these, or layers that have not seen the same tokens.
        """
        if caches is None:
            return cls(())
        if not isinstance(caches, list | tuple) or not all(isinstance(layer, LayerCache) for layer in caches):
            raise TypeError(f"cache: expected what new_cache() makes, got {type(caches).__name__}")
        if len(caches) != layers:
            raise ValueError(f"cache: expected {layers} layers, as new_cache() makes, got {len(caches)}")
        tokens = {layer.tokens for layer in caches}
        if len(tokens) > 1:
            raise ValueError(f"cache: expected layers that have seen equally many tokens, got {sorted(tokens)}")
        return cls(caches)

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.before = [(cache, vars(cache).copy()) for cache in caches]

    def __enter__(self) -> None:
        """Do nothing; the constructor has saved the caches' contents."""

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            for cache, was in self.before:
                vars(cache).update(was)
