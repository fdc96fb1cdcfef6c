"""The rows of a layer's call: what they are checked for, and the stream that they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.values import reads_values
from attnzoo.errors import UnavailableError
from attnzoo.forms.options import check_borders
from attnzoo.layer.cache import LayerCache
from attnzoo.layer.stream import OwnCore, Packing, Stream
from attnzoo.parallel.context import ENTERED, Context, entered


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
    layer: Any, x: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, cache: LayerCache | None
) -> tuple[Stream, Packing | None]:
    """The stream of a call's rows, and their packing where packed rows meet a cache of separate rows."""
    if (context := shared_context()) is not None:
        from attnzoo.layer.shared import shared_rows  # it loads the compiler

        if layer.variant.side == "other":
            raise UnavailableError(
                f"{layer.variant.name}: the readout {type(layer.variant.readout).__name__} needs whole sequences, "
                "which ranks in context_parallel do not have"
            )
        others = {"cu_seqlens": cu_seqlens, "attention_mask": attention_mask, "forgetting": layer.forget}
        others["training_groups"] = layer.config.training_groups if layer.training else None
        return shared_rows(context, x, cache, **others), None
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
