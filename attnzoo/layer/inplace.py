"""A layer's cache of fixed size, changed in place by steps of several sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds
from attnzoo.errors import UnavailableError
from attnzoo.forms.caches.inplace import BatchRows, Memory
from attnzoo.kernels.decode.eight_bits import longer
from attnzoo.layer.cache import LayerCache
from attnzoo.layer.stream import Stream


@dataclass(eq=False)
class FixedCache:
    """The in-place cache of one attention layer for B sequences; see :meth:`of`.

    Args:
        memory: the in-place memory of the core.
        windows: by name, the last tokens that a short convolution or a shift still needs, ``[B, n, X]``.
        rows: the rows of the batch, shared by all layers.
        heads: query heads of the layer.
        bounded: a function that computes ``bound`` from the present weights, or None where it is not needed.
        promised: a function that computes the bounds of later query rows from the present weights, or None where no
            eviction needs them.
        ends: by name, the windows and the new tokens of a step of several tokens, until :meth:`keep`.
        bound: the logit bound ``[H]`` by the weights of QK-norm when the last sequence joined, or None.
        whole: see :meth:`~attnzoo.layer.attention.Attention.whole_steps`.
    """

    memory: Memory
    windows: dict[str, Tensor]
    rows: BatchRows
    bound: Tensor | None = None
    heads: int = 1
    promised: Callable[[], QueryBounds | None] | None = None
    bounded: Callable[[], Tensor | None] | None = None
    ends: dict[str, Tensor] = field(default_factory=dict)
    whole: bool = False

    @staticmethod
    def of(
        layer: Any, like: LayerCache, rows: BatchRows, tokens: int, device: torch.device | str | None = None,
        paged: bool | None = None,
    ) -> FixedCache:  # fmt: skip
        """An empty in-place cache for steps of several sequences.

        Args:
            layer: an :class:`~attnzoo.layer.attention.Attention`.
            like: a cache of the layer with one sequence that has seen a token, for shapes and dtypes.
            rows: of the batch; every layer reads them.
            tokens: tokens of the longest sequence.
            device: None for the device of ``rows``; ``"meta"`` to measure the memory it needs.
            paged: whether keys lie in pages; None: where they can.

        Raises:
            ValueError: a third-party variant without in-place steps, or ``paged`` is against what the keys allow.
            UnavailableError: ``impl="triton"`` or ``"sdpa"`` where it serves no such steps.
        """
        device, name = device or rows.length.device, layer.variant.name
        in_place = getattr(layer.variant.form_set, "in_place", None)
        if in_place is None:
            raise ValueError(f"variant: expected one whose FORMS offer a memory of fixed size, got {name!r}")
        if layer.impl == "reference" and rows.length.is_cuda:
            paged = False  # without kernels, reading pages would wait for the GPU
        if layer.forget is None:
            memory = in_place(like.state, rows, tokens, device, paged)
        else:
            memory = layer.forget.in_place(layer.variant.form_set, like.state, rows, tokens, device)
        if layer.impl == "sdpa" or (layer.impl == "triton" and memory.plain):
            raise UnavailableError(
                f"impl={layer.impl!r}: no kernel takes a step of {name!r} in place here; use impl='auto'"
            )
        windows = {
            name: torch.zeros(len(rows.lengths), *x.shape[1:], dtype=x.dtype, device=device)
            for name, x in like.windows.items()
        }
        if rows.eight_bits and like.state.grows:
            check_eight_bits(layer, memory, like)
        dtype, gives_up = like.dtype or torch.float32, like.evict is not None and not like.evict.offload
        longest = longer(layer.config.key_dim) if rows.eight_bits else 1.0  # that a key may become
        prunes = layer.prune is not None and layer.variant.side != "linear"
        bounded = (lambda: _scaled(layer.logit_bound(dtype), longest)) if prunes else None
        promised = (lambda: _promised(layer.query_bounds(dtype), longest)) if gives_up else None
        bound, whole = None if bounded is None else bounded(), layer.whole_steps(memory, dtype)
        return FixedCache(memory, windows, rows, bound, layer.config.num_heads, promised, bounded, whole=whole)

    def stream(self, x: Tensor) -> FixedStream:
        """The rows of a step on hidden states ``x [B, T, D]``."""
        return FixedStream(None, None, (x.shape[0], x.shape[1]), x.device, fixed=self)

    def workspace(self, tokens: int = 1) -> int:
        """The temporary bytes of a step of ``tokens`` tokens per sequence, where they are many."""
        return self.memory.workspace(self.heads, tokens)

    @torch.no_grad()
    def admit(self, row: int, cache: LayerCache, tokens: int) -> None:
        """Let the idle row ``row`` continue the only sequence of ``cache``, up to ``tokens`` tokens."""
        bounds = None if self.promised is None else self.promised()
        if bounds is not None:
            self.memory.renew(bounds)
        self.memory.admit(row, cache.state, tokens)
        bound = None if self.bounded is None else self.bounded()
        if self.bound is not None and bound is not None:
            self.bound.copy_(bound)
        for name, window in self.windows.items():
            window[row] = cache.windows[name][0]

    def ready(self, rows: Sequence[int]) -> bool:
        """Make room for the tokens of a step of ``rows``; return whether tensors may have moved."""
        return self.memory.ready(rows)

    def keep(self, kept: Tensor) -> None:
        """Keep the first ``kept[b]`` tokens of the last step for sequence b, and discard the others; ``[B]`` int64."""
        self.memory.keep(kept)
        for name, full in self.ends.items():
            window, index = self.windows[name], kept[:, None]
            if window.shape[1] > 1:
                index = index + torch.arange(window.shape[1], device=kept.device)
            window.copy_(full.gather(1, index[..., None].expand(window.shape)))
        self.ends = {}

    def clear(self, row: int) -> None:
        """Free the row ``row``, whose sequence has ended."""
        self.memory.clear(row)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the cache on the device."""
        yield from self.memory.tensors()
        yield from self.windows.values()

    def check(self, x: Tensor) -> None:
        """Raise where ``x`` does not hold as many tokens of each sequence as a step of ``rows`` takes.

        Raises:
            ValueError: another number of tokens or sequences.
        """
        T = self.rows.tokens
        if x.shape[:2] != (len(self.rows.length), T):
            number = "one token" if T == 1 else f"{T} tokens"
            raise ValueError(f"x: expected {number} of each of {len(self.rows.length)} rows, got {tuple(x.shape)}")


def check_eight_bits(layer: Any, memory: Memory, like: LayerCache) -> None:
    """Raise where the memory of a layer's keys does not hold them in 8 bits.

    Raises:
        ValueError: so it is; the message says why.
    """
    offloaded = like.evict is not None and like.evict.offload
    if memory.eight_bits and not offloaded:
        return
    why = "its keys lie in no pages here"
    if offloaded:
        why = "keys on the host have the model's dtype"
    elif layer.forget is not None:
        why = "it gives up single keys, which lie in no pages"
    elif layer.variant.carries:
        why = "later tokens change its cached keys"
    raise ValueError(f"kv_dtype: expected None with a layer of {layer.variant.name!r} ({why}), got 'fp8'")


def _scaled(bound: Tensor | None, factor: float) -> Tensor | None:
    return None if bound is None else bound * factor


def _promised(bounds: QueryBounds | None, longest: float) -> QueryBounds | None:
    """Bounds of later rows, where keys may become ``longest`` times as long as the layer makes them."""
    if bounds is None:
        return None
    return QueryBounds(bounds.query, bounds.own * longest, _scaled(bounds.score, longest))


@dataclass(frozen=True, eq=False)
class FixedStream(Stream):
    """One step's view of a :class:`FixedCache`; its windows advance as they are read."""

    fixed: FixedCache = field(kw_only=True)

    def positions(self) -> Tensor:
        return self.fixed.rows.places()

    def windowed(self, name: str, x: Tensor, size: int, fn: Callable[[Tensor], Tensor]) -> Tensor:
        window = self.fixed.windows[name]
        full = torch.cat([window.to(x.dtype), x], 1)
        self._moved(name, full)
        return fn(full)

    def _moved(self, name: str, full: Tensor) -> None:
        """Advance a window to the end of ``full``, or store ``full`` until :meth:`FixedCache.keep`."""
        if self.shape[1] > 1:
            self.fixed.ends[name] = full
        else:
            self.fixed.windows[name].copy_(full[:, 1:])

    def before(self, name: str, x: Tensor) -> Tensor:
        window = self.fixed.windows[name]
        if self.shape[1] > 1:
            full = torch.cat([window.to(x.dtype), x], 1)
            self._moved(name, full)
            return full[:, :-1]
        past = window.to(x.dtype, copy=True)
        window.copy_(x)
        return past
