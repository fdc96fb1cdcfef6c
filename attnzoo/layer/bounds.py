"""Bounds of all queries and scores by the weights of QK-norm and a softcap, and the eviction that rests on them."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from attnzoo.algebra.pruning import Evict, QueryBounds
from attnzoo.forms.caches.pages.eviction import Eviction
from attnzoo.forms.caches.pages.offload import Offload
from attnzoo.forms.caches.pages.pool import KeyPool
from attnzoo.layer.config import AttentionConfig
from attnzoo.layer.modules import HeadNorm, untouched
from attnzoo.registry.variant import Variant

ROUNDED = 1 + 2**-20  # of a softcap: the rounding of tanh may lead as far beyond it
ANY_LENGTH = torch.finfo(torch.float32).max  # of queries without a bound of their own


class Normed(Protocol):
    """The attributes of a layer that the bounds are computed from."""

    config: AttentionConfig
    variant: Variant
    scale: float | None
    q_proj: nn.Linear
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None


@torch.no_grad()
def largest_score(layer: Normed, dtype: torch.dtype) -> Tensor | None:
    """A bound of every ``|s_tj|``, ``[H]`` float32; None without softcap and :func:`normed` queries and keys, and where
    the weights are :func:`away`.

    With QK-norm it is ``scale K max_c |w_q[c] w_k[c]|`` per head, as normed vectors have at most length ``sqrt(K)``
    before the weights; where a rotation or another transition mixes the channels, ``scale K max |w_q| max |w_k|``.
    As ``|softcap tanh(s / softcap)| <= min(|s|, softcap)``, the smaller of this and a softcap holds.

    Args:
        dtype: the dtype that q and k are rounded to.
    """
    if away(layer):
        return None
    normed, cap = _largest_normed(layer, dtype), layer.config.softcap
    if cap is None:
        return normed
    capped = layer.q_proj.weight.new_full((layer.config.num_heads,), cap * ROUNDED, dtype=torch.float32)
    return capped if normed is None else capped.minimum(normed)


def _largest_normed(layer: Normed, dtype: torch.dtype) -> Tensor | None:
    """The bound by QK-norm, None without it."""
    config, scale = layer.config, _scale(layer, dtype) * _longer(layer, dtype)
    if config.qk_norm == "l2":
        return layer.q_proj.weight.new_full((config.num_heads,), scale, dtype=torch.float32)
    if not normed(layer) or layer.q_norm is None or layer.k_norm is None:
        return None
    q, k = _weights(layer, layer.q_norm, config.query_heads), _weights(layer, layer.k_norm, config.key_heads)
    if config.qk_norm == "rms_full":  # one head may have the whole length
        scale *= math.sqrt(config.query_heads * config.key_heads)
    mixed = layer.config.rotary is not None or layer.variant.carries
    largest = q.amax(-1) * k.amax(-1) if mixed else (q * k).amax(-1)
    return (largest * (config.key_dim * scale)).expand(config.num_heads).contiguous()


@torch.no_grad()
def longest_query(layer: Normed, dtype: torch.dtype) -> Tensor | None:
    """A bound of the length of a scaled query, ``[H]`` float32; None where it is not :func:`normed`, and where its
    weights are :func:`away`.

    Args:
        dtype: the dtype that q is rounded to.
    """
    config, scale = layer.config, _scale(layer, dtype)
    if away(layer):
        return None
    if config.qk_norm == "l2":
        return layer.q_proj.weight.new_full((config.num_heads,), scale, dtype=torch.float32)
    if not normed(layer) or layer.q_norm is None:
        return None
    channels = config.key_dim * (config.query_heads if config.qk_norm == "rms_full" else 1)
    longest = _weights(layer, layer.q_norm, config.query_heads).amax(-1)
    return (longest * (math.sqrt(channels) * scale)).expand(config.num_heads)


def query_bounds(layer: Normed, dtype: torch.dtype) -> QueryBounds | None:
    """Bounds of all later query rows, with q and k rounded to ``dtype``; None without QK-norm and softcap."""
    query, score = longest_query(layer, dtype), largest_score(layer, dtype)
    if score is None:
        return None
    return QueryBounds(torch.full_like(score, ANY_LENGTH) if query is None else query, own=score, score=score)


def eviction(layer: Normed, evict: Evict, pool: KeyPool, dtype: torch.dtype) -> Eviction:
    """The rule of eviction of a cache in ``pool``, with q and k rounded to ``dtype``; see ``Attention.new_cache``.

    Raises:
        ValueError: keys are to be evicted, and a device map keeps the weights of QK-norm elsewhere.
    """
    config = layer.config
    if evict.offload:
        (B, G, _), H = pool.table.shape, config.num_heads
        kept = Offload.empty(B, G, H, pool.length.device)
        return Eviction(math.log(evict.eps), None, config.window, kept)
    if (config.qk_norm != "none" or config.softcap is not None) and away(layer):
        raise ValueError(
            f"evict: expected 'offload', or a device map that leaves this layer's weights in one place (those of "
            f"QK-norm bound later queries), got {evict.eps}"
        )
    return Eviction(math.log(evict.eps), query_bounds(layer, dtype), config.window)


def normed(layer: Normed) -> bool:
    """Whether the layer's own QK-norm makes queries and keys: no module or hook of somebody else's."""
    return layer.config.qk_norm == "l2" or (_own(layer.q_norm) and _own(layer.k_norm))


def _own(norm: HeadNorm | None) -> bool:
    """Whether a norm is the layer's and no hook changes it; accelerate's moves its weights alone."""
    return isinstance(norm, HeadNorm) and type(norm).forward is HeadNorm.forward and untouched(norm, moved=True)


def check_bounded(layer: Normed, evict: float | str | Evict | None) -> None:
    """Raise ValueError where keys are to be evicted and the norms that bound later queries were exchanged."""
    config = layer.config
    bounded = normed(layer) or config.softcap is not None or config.window is not None
    if evict is not None and not bounded and not Evict.of(evict).offload:
        raise ValueError(
            "evict: expected 'offload', or q_norm and k_norm as the layer made them and without hooks (their weights "
            f"bound later queries), got {evict!r}"
        )


def away(layer: Normed) -> bool:
    """Whether a device map of accelerate keeps the layer's weights elsewhere and loads them only while a module
    runs."""
    return layer.q_proj.weight.is_meta and hasattr(layer.q_proj, "_hf_hook")


def _scale(layer: Normed, dtype: torch.dtype) -> float:
    """The scale of the scores, enlarged for vectors rounded to ``dtype`` and bounds rounded to float32."""
    scale: float = layer.config.key_dim**-0.5 if layer.scale is None else layer.scale
    return abs(scale) * max(_longer(layer, x) for x in (dtype, torch.float32))


def _longer(layer: Normed, dtype: torch.dtype) -> float:
    """The factor by which rounding to ``dtype`` may lengthen a normed vector, with its rotation's rounded products."""
    return float((1 + torch.finfo(dtype).eps) ** (1 if layer.config.rotary is None else 3))


def _weights(layer: Normed, norm: HeadNorm, heads: int) -> Tensor:
    """Absolute values of a norm's weights, ``[H, K]`` or ``[K]``."""
    weight = norm.weight.float().abs()
    return weight if layer.config.qk_norm_shared else weight.repeat_interleave(layer.config.num_heads // heads, 0)
