"""Attention weights and forget gates of a short text as matrices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from attnzoo.evaluation.gates import decay_matrix, gate_of_tokens, has_decay
from attnzoo.evaluation.layers import each_layer
from attnzoo.evaluation.losses import Array
from attnzoo.forms.factors import token_outputs
from attnzoo.layer.attention import Attention
from attnzoo.layer.projected import Projected


@dataclass(frozen=True)
class LayerMap:
    """The matrices of one layer.

    Args:
        layer: the layer's number.
        variant: the variant's name.
        weights: the weight of token j's value (column) in the output of token t (row), ``[H, T, T]``, 0 above the
            diagonal; the sum over the values of a token that writes several. On the softmax side rows sum to 1 minus
            the sink's weight, without pruning and forget networks; on the linear side weights may have any sign.
        decay: exp(d_tj), the product of the forget gates between, ``[H, T, T]``, mean over channels where a gate has
            several; None for a layer without such a gate.
    """

    layer: int
    variant: str
    weights: Array
    decay: Array | None


@dataclass(frozen=True)
class AttentionMaps:
    """The layers' maps on one text.

    Args:
        tokens: the T tokens in print.
        layers: one map per layer.
    """

    tokens: tuple[str, ...]
    layers: tuple[LayerMap, ...]


def measure_maps(
    model: nn.Module, tokens: Tensor, words: Sequence[str], layers: Collection[int] | None = None
) -> AttentionMaps:
    """The weights and forget gates of every layer on a short text, all held in memory.

    Args:
        model: as :func:`attnzoo.evaluation.layers.each_layer` takes it.
        tokens: one window of ids, ``[T]``.
        words: each token in print.
        layers: numbers of the layers; None for all.

    Raises:
        ValueError: another number of words than of tokens, or a layer that the model does not have.
    """
    if len(words) != tokens.numel():
        raise ValueError(f"words: expected {tokens.numel()}, one per token, got {len(words)}")
    found = each_layer(model, tokens, lambda layer, core: (layer.variant.name, *_map(layer, core)), layers)
    return AttentionMaps(tuple(words), tuple(LayerMap(number, *matrices) for number, matrices in found))


def _map(layer: Attention, core: Projected) -> tuple[Array, Array | None]:
    T, G, n = core.q.shape[1], core.v.shape[2], layer.keys_per_token
    options = dict(layer.core_options)
    if layer.variant.side == "softmax":
        options["sink"] = layer.sinks
    else:
        delta_rule = isinstance(core.write, str)
        options |= {"write": None if delta_rule else core.write, "delta_rule": delta_rule}
    # unit vectors as values: the output is the weights
    values = torch.eye(T, device=core.q.device)[None, :, None].expand(1, T, G, T)
    weights = layer.variant.forms["parallel"](core.q.float(), core.k.float(), values, core.gate, **options)
    gate, rows = gate_of_tokens(layer, core), token_outputs(weights, n)[0].transpose(0, 1).double()  # [H, T, T n]
    matrix = np.asarray(rows.unflatten(-1, (-1, n)).sum(-1).cpu().numpy(), dtype=np.float64)
    return matrix, decay_matrix(gate, T) if has_decay(gate) else None
