"""The rows of a layer's call: padding and packing, before and after what its cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.values import reads_values
from attnzoo.errors import UnavailableError
from attnzoo.forms.options import check_borders
from attnzoo.layer.cache import LayerCache, Owner
from attnzoo.parallel.context import ENTERED, Context, entered


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
        products: of the rows with thin maps of the layer, by name, where they are known.
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
        full = F.pad(x, (0, 0, n, 0)) if past is None else torch.cat([past.to(x.dtype), x], 1)
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
        cache.state, cache.windows, cache.seen, cache.dtype = state, {**cache.windows, **self.windows}, seen, x.dtype


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


def shared_context() -> Context | None:
    """The context of sequences that ranks share, or None.

    Raises:
        UnavailableError: torch's own ``context_parallel``, which puts a function of its own in place of
            ``scaled_dot_product_attention``, as its documentation says.
    """
    if not torch.compiler.is_compiling():
        home = getattr(F.scaled_dot_product_attention, "__module__", None) or ""
        if home.startswith("torch.distributed."):
            raise UnavailableError(
                "torch's context_parallel shares out scaled_dot_product_attention alone, and here layers would see the "
                "keys of their own rank only: expected attnzoo.parallel.context_parallel in its place"
            )
    return entered() if ENTERED else None


def rows_of_call(
    layer: nn.Module, x: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, cache: LayerCache | None
) -> tuple[Stream, Packing | None]:
    """The stream of a call's rows, and their packing where packed rows meet a cache of separate rows."""
    if isinstance(cache, OwnCore):
        return cache, None
    shape = (x.shape[0], x.shape[1])
    if cu_seqlens is None and attention_mask is None and cache is None:
        return Stream(None, None, shape, x.device), None
    if cache is not None and not isinstance(cache, LayerCache):
        raise TypeError(f"cache: expected what new_cache() gives, got {type(cache).__name__}")
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask: expected None with cu_seqlens (packed sequences have no padding)")
        if x.shape[0] != 1:
            raise ValueError(f"x: expected one row [1, T, D] with cu_seqlens, got {tuple(x.shape)}")
        check_borders(cu_seqlens, x)
        if cache is None:
            return Stream(None, None, shape, x.device, cu_seqlens), None
        packing = Packing.of(cu_seqlens)
        cache.check(layer, len(cu_seqlens) - 1, x)
        return Stream(packing.valid, cache, (packing.index.shape[0], packing.index.shape[1]), x.device), packing
    past = () if cache is None else (cache.tokens, cache.seen, getattr(cache.state, "valid", None))
    valid = valid_tokens(attention_mask, x, *past)
    if cache is not None:
        cache.check(layer, x.shape[0], x)
    return Stream(valid, cache, shape, x.device), None


def positions_of(
    layer: Any, x: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, cache: LayerCache | None
) -> Tensor:
    """The index of each token of a layer's call in its sequence, ``[B, T]`` int64; padding does not count."""
    check_hidden(x, layer.config.hidden_size, layer.q_proj)
    context = shared_context()
    if context is not None:
        return context.fragments.positions().to(x.device).expand(x.shape[:2])
    stream, packing = rows_of_call(layer, x, cu_seqlens, attention_mask, cache)
    index = stream.positions()
    return index if packing is None else packing.pack(index[..., None], x.shape[1])[..., 0]


def check_hidden(x: Tensor, hidden_size: int, projection: nn.Module) -> None:
    """Raise where ``x`` is not ``[B, T, D]`` with T >= 1 in the dtype and on the device of the layer's ``projection``.

    Raises:
        TypeError, ValueError: another shape, dtype or device.
    """
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != hidden_size:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected [B, T, D = {hidden_size}], got {got}")
    if x.shape[1] == 0:
        raise ValueError(f"x: expected at least one token, got shape {tuple(x.shape)}")
    if x.layout != torch.strided:
        raise ValueError(f"x: expected a dense tensor, got {x.layout}")
    if type(projection) is not nn.Linear:
        return  # a quantised or sharded weight has another dtype or place
    weight = projection.weight
    if (x.dtype == weight.dtype and x.device == weight.device) or hasattr(projection, "_hf_hook"):
        return  # accelerate's hook moves the weights when they are used
    if x.device != weight.device:
        raise ValueError(f"x: expected the device of the layer, {weight.device}, got {x.device}")
    if x.is_meta or not x.is_floating_point() or not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x: expected the dtype of the layer, {weight.dtype} (or autocast), got {x.dtype}")


def valid_tokens(
    mask: Tensor | None, x: Tensor, cached: int = 0, seen: Tensor | None = None, places: Tensor | None = None
) -> Tensor | None:
    """The mask of tokens among the rows ``x [B, T, D]``, ``[B, T]`` bool; None where none is padding.

    Args:
        mask: ``[B, T]``, or ``[B, S + T]`` with the S = ``cached`` tokens before; None for no padding.
        seen: how many of the cached rows were tokens, ``[B]``; None without a cache.
        places: mask of tokens among the cached rows, ``[B, S]`` bool; None where all were, or where a state has no
            mask.

    Raises:
        TypeError, ValueError: another shape, dtype or device, other values than 0 and 1, or cached tokens that
            are hidden.
    """
    if mask is None:
        return None
    B, T = x.shape[:2]
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {type(mask).__name__}")
    # sizes one by one: a compiled graph compares a tuple with a symbolic size as unequal to any other
    if mask.ndim != 2 or mask.shape[0] != B or (mask.shape[1] != T and mask.shape[1] != cached + T):
        also = f" or [B, S + T] = {(B, cached + T)}" if cached else ""
        raise ValueError(f"attention_mask: expected [B, T] = {(B, T)}{also}, got {tuple(mask.shape)}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"attention_mask: expected bool or integers (0 at padding), got {mask.dtype}")
    if mask.device != x.device:
        raise ValueError(f"attention_mask: expected the device of x, {x.device}, got {mask.device}")
    valid = mask[:, mask.shape[1] - T :]
    if not reads_values(mask):
        return valid.bool()
    if valid.dtype != torch.bool and bool(((valid != 0) & (valid != 1)).any()):
        raise ValueError(f"attention_mask: expected 1 for tokens and 0 for padding, got {valid.unique().tolist()}")
    if seen is not None and mask.shape[1] > T:
        before = mask[:, :-T].bool()
        there = before if places is None else before & places
        if bool((there.sum(1) < seen).any()):
            raise ValueError(
                f"attention_mask: expected all cached tokens, {seen.tolist()} per row, got {there.sum(1).tolist()} of "
                "them (what is cached cannot be hidden)"
            )
    valid = valid.bool()
    return None if bool(valid.all()) else valid
