"""A layer's demands on a serving engine: heads and channels of its keys, and the state between steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnzoo.layer.attention import Attention
from attnzoo.layer.cache import LayerCache
from attnzoo.layer.stream import Stream
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel

ALIGNED = 16  # bytes: where a tensor of a state may begin
MLP_MIX = "mlp_mix"  # the last token before an MLP that mixes it with the next
SUMS, PHASE = "sums", "phase"  # running sums of log decays and of angles
MATRIX = "matrix"  # of a recurrence


class Slot(NamedTuple):
    """One tensor of a layer's state."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Storage:
    """The keys and the state that an engine stores of a layer.

    Args:
        kv_heads: heads of its keys; 0 where it keeps none.
        key_dim: channels of a key, those of the gates' sums among them, or of a value where it has more.
        slots: the tensors of its state.
    """

    kv_heads: int
    key_dim: int
    slots: tuple[Slot, ...]

    def places(self) -> Iterator[tuple[Slot, int]]:
        """Each tensor of the state with the byte where it begins."""
        at = 0
        for slot in self.slots:
            yield slot, at
            at += -(-slot.bytes // ALIGNED) * ALIGNED

    @property
    def bytes(self) -> int:
        """The bytes of the state of one sequence."""
        return sum(-(-slot.bytes // ALIGNED) * ALIGNED for slot in self.slots)


def storages_of(layers: Sequence[Attention], channels: int, mixes: bool = False) -> tuple[Storage, ...]:
    """The storage of each layer of a model; those with keys have equally many heads of them, as one page holds all.

    Args:
        layers, channels, mixes: see :func:`storage_of`.
    """
    own = [storage_of(layer, channels, mixes) for layer in layers]
    shared = math.lcm(*(one.kv_heads for one in own if one.kv_heads))
    each = zip(layers, own, strict=True)
    return tuple(storage_of(layer, channels, mixes, shared) if one.kv_heads else one for layer, one in each)


def storage_of(layer: Attention, channels: int, mixes: bool = False, kv_heads: int = 1) -> Storage:
    """The storage of a layer, which projects one token to see what it keeps; no values are read.

    Args:
        layer: on any device, also the meta device.
        channels: of each running sum of log decays.
        mixes: whether the MLP after it mixes each token with the one before.
        kv_heads: heads of keys that it stores at least, which the number of query heads is a multiple of.
    """
    weight, D = layer.q_proj.weight, layer.config.hidden_size
    stream = Stream(None, LayerCache(), (1, 1), weight.device)
    first = None if layer.value_residual is None else [weight.new_zeros(1, 1, layer.v_proj.out_features)]
    made = layer._project(weight.new_zeros(1, 1, D), stream, first)
    q, k, v, gate = made.q, made.k, made.v, made.gate
    slots = [Slot(name, tuple(x.shape[1:]), x.dtype) for name, x in stream.windows.items()]
    slots += [Slot(MLP_MIX, (1, D), weight.dtype)] * mixes
    if layer.variant.side == "linear":
        matrix = layer._core(made, stream)[1].matrix
        return Storage(0, 0, (*slots, Slot(MATRIX, tuple(matrix.shape[1:]), matrix.dtype)))
    H, G, angle, decay = q.shape[2], max(k.shape[2], kv_heads), gate.angle, gate.log_decay
    if angle is not None and angle.ndim > 1:
        slots.append(Slot(PHASE, tuple(angle.shape[2:]), torch.float64))
        G = max(G, angle.shape[2])
    if decay is not None and decay.ndim > 1:
        slots.append(Slot(SUMS, tuple(decay.shape[2:]), torch.float64))
    more = 0 if decay is None else channels * (H // G)
    return Storage(G, max(k.shape[3] + more, v.shape[3]), tuple(slots))


def layers_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> list[Attention]:
    """The attention layers of a model, without weights."""
    with torch.device("meta"):
        return LanguageModel(config).to(dtype).attentions()
