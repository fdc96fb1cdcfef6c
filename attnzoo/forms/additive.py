"""Softmax forms of encodings whose cached keys never change: a bias on the logits, or a rotation of q and k."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.pruning import first_kept_keys, may_prune
from attnzoo.algebra.transitions import Identity, Transition, heads_first, scaled_queries
from attnzoo.forms import softmax
from attnzoo.forms.backends.fox_path import fox_kernel
from attnzoo.forms.backends.sdpa import sdpa_kernel
from attnzoo.forms.caches.state import KVCache, grown
from attnzoo.forms.caches.stores import KeyStore, PlacedKeys
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.readout import Band, near_lse
from attnzoo.forms.rowblocks import causal_attention


@dataclass(frozen=True)
class AdditiveForms(softmax.SoftmaxForms):
    """Forms of encodings that are a bias on the logits, or a rotation of q and k before the scores."""

    transition: Transition = field(default_factory=Identity)
    store: KeyStore = field(default=PlacedKeys(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", {"triton": fox_kernel(self), "sdpa": sdpa_kernel(self), **self.kernels})

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, options: SoftmaxOptions
    ) -> tuple[Tensor, Tensor | None, KVCache]:
        q, state = self.remember(q, k, v, gate, state, options)
        H, prune, scaled = q.shape[2], options.prune, scaled_queries(q, options.scale)
        dtype = scaled.dtype
        keys, values = heads_first(state.k, H, dtype), heads_first(state.v, H, dtype)
        decay = None if state.log_decay is None else heads_first(state.log_decay, H, dtype)
        band = None
        if options.window is not None:
            band = Band.of(options.window, state.valid, keys.shape[2], q.device)
        first_kept = None
        if prune is not None and may_prune(q.shape[1], len(state), softmax.ROWS):
            gates, bound = cast(Tensor, decay), options.logit_bound
            lower = near_lse(scaled, keys, gates, state.valid, band, options) if prune.bound == "tail" else None
            first_kept = first_kept_keys(scaled, keys, gates, prune, bound, lower=lower, rows=softmax.ROWS)
        o, lse = causal_attention(
            scaled, keys, values, decay, state.valid, first_kept, rows=softmax.ROWS, band=band, given=options
        )
        return o, lse, state

    def _attend_whole(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: SoftmaxOptions
    ) -> tuple[Tensor, Tensor | None]:
        return self._attend(q, k, v, gate, None, options)[:2]

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None,
        options: SoftmaxOptions, dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, KVCache]:  # fmt: skip
        """The placed q, and the cache with the new tokens, with keys in ``dtype`` (None: the dtype of the
        computation)."""
        q, k, phase, angle = self.place(q, k, gate, state, options.valid, dtype)
        k = k if dtype is None else k.to(dtype)
        decay = gate.log_decay
        if decay is not None and decay.ndim == 1:
            decay = decay.expand(*q.shape[:2], -1)
        new = KVCache(k, v, decay, options.valid, phase, angle)
        if state is None:
            return q, new
        if dtype is not None and state.k.dtype != dtype:
            state = replace(state, k=state.k.to(dtype))
        if k.shape[2] != state.k.shape[2]:
            state = replace(state, k=expand_heads(state.k, k.shape[2]))
            new = replace(new, k=expand_heads(k, state.k.shape[2]))
        return q, grown(state, new, q, options.sink)

    def rounded(
        self, q: Tensor, k: Tensor, gate: Gate, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Gate, tuple[Tensor, ...] | None]:
        """q, k and the gate of whole sequences for a kernel of ``dtype``, with matrix parts applied where rounding
        matters.

        The last entry holds the tensors that receive the unrounded gradients of q and k, or None.
        """
        return q, k, gate, None
