"""One call's view of its rows: padding and packing, before and after what its cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnzoo.layer.cache import LayerCache, Owner


@dataclass(frozen=True, eq=False)
class Stream:
    """One call's view of its rows.

    Args:
        valid: ``[B, T]`` bool, or None when there is no padding.
        cache: the layer's cache, or None.
        shape: ``(B, T)``.
        device: the device of the rows.
        cu_seqlens: borders ``[N + 1]`` of sequences packed into one row, without padding or a cache; or None.
        windows: the new windows for the cache, by name, from :meth:`windowed`.
        products: of the rows with maps of the layer, by name, where they are known, and the rows.
    """

    valid: Tensor | None
    cache: LayerCache | None
    shape: tuple[int, int]
    device: torch.device
    cu_seqlens: Tensor | None = None
    windows: dict[str, Tensor] = field(default_factory=dict)
    products: dict[str, Tensor] = field(default_factory=dict)

    def positions(self) -> Tensor:
        """The index of each token in its sequence, ``[B, T]`` int64; padding does not count."""
        B, T = self.shape
        if self.cu_seqlens is not None:
            return torch.arange(T, device=self.device)[None] - self.cu_seqlens.long()[self._sequence()]
        if self.valid is None:
            index = torch.arange(T, device=self.device).expand(B, T)
        else:
            index = (self.valid.cumsum(1) - 1).clamp(min=0)
        if self.cache is not None and self.cache.seen is not None:
            index = index + self.cache.seen[:, None]
        return index

    def _sequence(self) -> Tensor:
        """The number of each token's packed sequence, ``[1, T]`` int64."""
        borders = cast(Tensor, self.cu_seqlens).long()
        return torch.searchsorted(borders, torch.arange(self.shape[1], device=self.device)[None], right=True) - 1

    def windowed(self, name: str, x: Tensor, size: int, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a causal operator with a window of ``size`` tokens, across padding and earlier calls.

        Args:
            name: the operator's key in the cache.
            x: ``[B, T, X]``.
            fn: ``[B, size - 1 + T, X] -> [B, T, Y]``; zeros stand before the first token.
        """
        B, T, X = x.shape
        n = size - 1
        if self.valid is not None:  # with a bias, x is not zero at padding
            x = x.masked_fill(~self.valid[..., None], 0.0)
        if self.cu_seqlens is not None:  # n zeros before each sequence
            place = torch.arange(T, device=x.device) + n * self._sequence()[0]
            spaced = x.new_zeros(1, T + n * (len(self.cu_seqlens) - 1), X).index_copy(1, place + n, x)
            return fn(spaced).index_select(1, place)
        past = None if self.cache is None else self.cache.windows.get(name)
        full = torch.cat([x.new_zeros(B, n, X) if past is None else past.to(x.dtype), x], 1)
        if self.valid is None:
            self._remember(name, full, n)
            return fn(full)
        # padding moves to the left, so that every window holds a sequence's own last tokens
        there = torch.cat([torch.ones_like(self.valid[:, :1]).expand(B, n), self.valid], 1)
        order = there.int().argsort(stable=True, dim=1)
        full = full.gather(1, order[..., None].expand_as(full))
        self._remember(name, full, n)
        out = fn(full)
        rank = order.argsort(1)[:, n:] - n
        return out.gather(1, rank.clamp(min=0)[..., None].expand(-1, -1, out.shape[-1]))

    def continued(self, name: str, x: Tensor, n: int) -> Tensor | None:
        """The n tokens before ``x [B, T, X]`` in the cache, where rows have one; the last n are stored in their place.

        Without padding; otherwise as :meth:`windowed`.
        """
        if self.cache is None:
            return None
        past = self.cache.windows.get(name)
        past = x.new_zeros(x.shape[0], n, x.shape[2]) if past is None else past.to(x.dtype)
        self._remember(name, torch.cat([past, x[:, max(0, x.shape[1] - n) :]], 1), n)
        return past

    def before(self, name: str, x: Tensor) -> Tensor:
        """The preceding token of each token of ``x [B, T, X]``, zeros before the first; ``name`` is its key in the
        cache."""
        past = None if self.cache is None or self.valid is not None else self.cache.windows.get(name)
        if past is None or x.shape[1] > 1:
            return self.windowed(name, x, 2, lambda full: full[:, :-1])
        self._remember(name, x, 1)
        return past.to(x.dtype)

    def _remember(self, name: str, full: Tensor, n: int) -> None:
        if self.cache is not None:
            self.windows[name] = full[:, full.shape[1] - n :]

    def keep(self) -> None:
        """Store the new windows of the call in the cache, if there is one."""
        if self.cache is not None:
            self.cache.windows = {**self.cache.windows, **self.windows}

    def commit(self, layer: nn.Module, x: Tensor, state: Any) -> None:
        """Store the new state of the call on the rows ``x`` in the cache, if there is one; the last step of a call."""
        cache = self.cache
        if cache is None:
            return
        B, T = self.shape
        seen = torch.zeros(B, dtype=torch.int64, device=self.device) if cache.seen is None else cache.seen
        seen = seen + (T if self.valid is None else self.valid.sum(1))  # nothing after this line can fail
        if cache.owner is None:
            cache.owner = Owner(layer)
        cache.state, cache.seen, cache.dtype = state, seen, x.dtype
        self.keep()


class OwnCore(Stream):
    """Rows whose keys or states lie elsewhere than in a cache of the layer: the stream itself runs the core."""

    def run(self, variant: Any, form: str, call: Any, keys_per_token: int) -> Tensor:
        """The core's output ``[B, T, H, V]`` of the call."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Packing:
    """The map between packed sequences ``[1, T]`` and the rows ``[N, L]`` of a cache.

    Args:
        index: the packed position of each slot, ``[N, L]``.
        valid: mask of the slots that hold a token, ``[N, L]``; None where all do.
    """

    index: Tensor
    valid: Tensor | None

    @staticmethod
    def of(cu_seqlens: Tensor) -> Packing:
        """The packing of sequences with the borders ``cu_seqlens [N + 1]``."""
        cu = cu_seqlens.long()
        lengths = cu.diff()
        slot = torch.arange(int(lengths.max()), device=cu.device)
        valid = slot < lengths[:, None]
        return Packing((cu[:-1, None] + slot).where(valid, 0), None if bool(valid.all()) else valid)

    def unpack(self, x: Tensor) -> Tensor:
        """The packed ``x [1, T, X]`` as rows ``[N, L, X]``."""
        return x[0][self.index]

    def pack(self, x: Tensor, tokens: int) -> Tensor:
        """The rows ``x [N, L, X]`` packed, ``[1, T, X]``."""
        if self.valid is None:
            return x.reshape(1, tokens, -1)
        return x[self.valid][None]
