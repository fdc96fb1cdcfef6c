"""A layer's cache of fixed size: steps of one token of several sequences change it in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.pruning import QueryBounds
from attnzoo.errors import UnavailableError
from attnzoo.forms.caches.inplace import BatchRows, Memory
from attnzoo.layer.stream import LayerCache, Stream


@dataclass(eq=False)
class FixedCache:
    """What one attention layer remembers of B sequences; see :meth:`of`.

    Args:
        memory: of the core.
        windows: by name, the last tokens that a short convolution or a shift still needs, ``[B, n, X]``.
        rows: of the batch; all layers have the same.
        heads: query heads of the layer.
        bounded: what ``bound`` is by the weights as they are now, where something asks for it.
        promised: what the weights of QK-norm promise now of the rows to come, where keys are given up by that.
        ends: by name, the windows and the tokens of a step of several, until :meth:`keep`.
        bound: what the weights of the layer's QK-norm promise of the logits, ``[H]``, where something asks for it: as
            they were when the last sequence joined.
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
        """An empty cache for steps of one token of several sequences.

        Args:
            layer: an :class:`~attnzoo.layer.attention.Attention`.
            like: its cache of one sequence that has seen a token, for shapes and dtypes.
            rows: of the batch; every layer reads them.
            tokens: of the longest sequence that there will be.
            device: None for that of ``rows``; ``"meta"`` shows how much memory it needs.
            paged: whether keys lie in pages; None for wherever that can be.

        Raises:
            ValueError: the variant is a third party's that offers none, or keys cannot lie in pages, or must.
            UnavailableError: ``impl="triton"`` where no kernel serves such steps.
        """
        device, name = device or rows.length.device, layer.variant.name
        in_place = getattr(layer.variant.form_set, "in_place", None)
        if in_place is None:
            raise ValueError(f"variant: expected one whose FORMS offer a memory of fixed size, got {name!r}")
        if layer.impl == "reference" and rows.length.is_cuda:
            paged = False  # plain operations read no pages without waiting for the GPU
        if layer.forget is None:
            memory = in_place(like.state, rows, tokens, device, paged)
        else:
            memory = layer.forget.in_place(layer.variant.form_set, like.state, rows, tokens, device)
        if layer.impl == "triton" and memory.plain:
            raise UnavailableError(f"impl='triton': no kernel takes a step of {name!r} in place here; use impl='auto'")
        windows = {
            name: torch.zeros(len(rows.lengths), *x.shape[1:], dtype=x.dtype, device=device)
            for name, x in like.windows.items()
        }
        dtype, gives_up = like.dtype or torch.float32, like.evict is not None and not like.evict.offload
        bounded = None if layer.prune is None else functools.partial(layer.logit_bound, dtype)
        promised = functools.partial(layer.query_bounds, dtype) if gives_up else None
        bound, whole = None if bounded is None else bounded(), layer.whole_steps(memory, dtype)
        return FixedCache(memory, windows, rows, bound, layer.config.num_heads, promised, bounded, whole=whole)

    def workspace(self, tokens: int = 1) -> int:
        """Bytes that a step of so many tokens of each sequence takes besides, where they are many."""
        return self.memory.workspace(self.heads, tokens)

    @torch.no_grad()
    def admit(self, row: int, cache: LayerCache, tokens: int) -> None:
        """The idle row ``row`` goes on from the only one of ``cache``, to ``tokens`` tokens at most."""
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
        """Whether tensors may have changed their places, so that the tokens of a step of ``rows`` fit."""
        return self.memory.ready(rows)

    def keep(self, kept: Tensor) -> None:
        """Of the several tokens of the last step, sequence b keeps its first ``kept[b]``, ``[B]`` int64."""
        if not self.memory.on_host:
            self.memory.keep(kept)
        for name, full in self.ends.items():
            window = self.windows[name]
            index = kept[:, None] + torch.arange(window.shape[1], device=kept.device)
            window.copy_(full.gather(1, index[..., None].expand(window.shape)))
        self.ends = {}

    def keep_on_host(self, kept: Tensor) -> None:
        """What :meth:`keep` cannot do without waiting for the device."""
        if self.memory.on_host:
            self.memory.keep(kept)

    def clear(self, row: int) -> None:
        """Sequence ``row`` has ended."""
        self.memory.clear(row)

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds on the device."""
        yield from self.memory.tensors()
        yield from self.windows.values()

    def check(self, x: Tensor) -> None:
        """``x`` holds the tokens of a step of each sequence, one if nothing else was said.

        Raises:
            ValueError: it does not.
        """
        T = self.rows.tokens
        if x.shape[:2] != (len(self.rows.length), T):
            number = "one token" if T == 1 else f"{T} tokens"
            raise ValueError(f"x: expected {number} of each of {len(self.rows.length)} rows, got {tuple(x.shape)}")


@dataclass(frozen=True, eq=False)
class FixedStream(Stream):
    """One step's view of a :class:`FixedCache`, whose windows move on as they are read."""

    fixed: FixedCache = field(kw_only=True)

    def positions(self) -> Tensor:
        now = self.fixed.rows.length[:, None]
        return now if self.shape[1] == 1 else now + torch.arange(self.shape[1], device=self.device)

    def windowed(self, name: str, x: Tensor, size: int, fn: Callable[[Tensor], Tensor]) -> Tensor:
        window = self.fixed.windows[name]
        full = torch.cat([window.to(x.dtype), x], 1)
        self._moved(name, full)
        return fn(full)

    def _moved(self, name: str, full: Tensor) -> None:
        """The window goes to the end of ``full``, or waits there until it is known how many tokens stay."""
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
