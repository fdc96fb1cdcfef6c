"""A run's use of its GPUs: floating point operations, and the share of blocks that pruning computes.

A model's operations are those of its matrix products, forward once and backward twice: 6 per token for every parameter
but the embedding's (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1), and for every head 6
(K + V) per visible (query, key) pair, or for a recurrence 6 K V per token to read its state and 6 K V per write (one
write per factor). Norms, convolutions, transitions and what is computed twice to save memory are not counted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnzoo.evaluation.pruning import heads_kept
from attnzoo.layer.attention import Attention
from attnzoo.models import LanguageModel
from attnzoo.training.batches import TokenBatch, rows_of

logger = logging.getLogger(__name__)

# Dense bfloat16 operations per second with float32 sums, from NVIDIA's data sheets (half of the figures "with
# sparsity"), by words of the name that the driver gives; the entry with most words counts.
PEAKS = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H800": 989.4e12,
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
}


def peak_of(name: str) -> float | None:
    """The peak operations per second of the GPU of that driver name; None for unknown GPUs and for parts of one."""
    words = set(re.split(r"\W+", name))
    known = [entry for entry in PEAKS if words.issuperset(entry.split())]
    return None if not known or "MIG" in words else PEAKS[max(known, key=lambda entry: len(entry.split()))]


def peak_here(device: torch.device, processes: int) -> float | None:
    """The peak operations per second of all GPUs of a run, assumed equal; None on a CPU or, logged, an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = peak_of(name)
    if peak is None:
        logger.warning("the peak speed of %r is not known: the metrics have no MFU", name)
    return peak and peak * processes


@dataclass(frozen=True)
class _Layer:
    per_token: int
    per_pair: int
    window: int | None


class Operations:
    """The count of operations of a model's forward and backward pass.

    Args:
        model: on any device; its parameters may be shared with the head.
    """

    def __init__(self, model: LanguageModel):
        embedding = model.embedding.weight
        every = sum(parameter.numel() for parameter in model.parameters())
        tied = model.head.weight is embedding
        looked_up = [] if tied else [embedding]
        looked_up += [] if model.positions is None else [model.positions.weight]
        self.parameters = every - sum(table.numel() for table in looked_up)
        self._layers = [_layer(layer) for layer in _attentions(model).values()]

    def forward_per_token(self, context_length: int) -> float:
        """The mean number of operations of the forward pass for a token of a sequence of this length."""
        row = rows_of(np.zeros((1, context_length + 1), dtype=np.int64), None)
        return self.per_step([row]) / (3 * context_length)

    def per_step(self, rows: Sequence[TokenBatch], kept: Mapping[int, float] | None = None) -> int:
        """The number of operations of a step on these rows.

        Args:
            rows: the parts of a step.
            kept: by layer number, the share of blocks that is computed; 1 for other layers.
        """
        tokens = sum(part.inputs.numel() for part in rows)
        total = 6 * self.parameters * tokens
        for number, layer in enumerate(self._layers):
            pairs = sum(part.pairs(layer.window) for part in rows)
            total += 3 * layer.per_token * tokens
            total += round(3 * layer.per_pair * pairs * (kept or {}).get(number, 1.0))
        return total


def _layer(attention: Attention) -> _Layer:
    config = attention.config
    H, K, V = config.num_heads, config.key_dim, config.v_dim
    if attention.variant.side == "linear":
        return _Layer(2 * (1 + attention.keys_per_token) * H * K * V, 0, None)
    return _Layer(0, 2 * H * (K + V), config.window)


def _attentions(model: nn.Module) -> dict[int, Attention]:
    found = [module for module in model.modules() if isinstance(module, Attention)]
    return dict(enumerate(found))


@torch.no_grad()
def blocks_kept(model: nn.Module, rows: TokenBatch) -> dict[int, float]:
    """By layer number, the share of visible blocks (128 rows by 64 keys) that pruning computes, mean over heads.

    Layers without pruning are left out, and so is the linear side, whose pruning shortens memories and skips no blocks.
    It runs one more forward pass, without compilation. With a sharded model all processes must call it.

    Args:
        model: the trained model, perhaps wrapped.
        rows: tokens, of which the first row is measured, or all of a packed row.
    """
    shares: dict[int, Tensor] = {}
    layers = _attentions(model).items()
    pruned = {number: layer for number, layer in layers if layer.prune is not None and layer.variant.prunable}
    if not pruned:
        return {}
    with _watched(pruned, shares), torch.compiler.set_stance("force_eager"):
        packed = {} if rows.cu_seqlens is None else {"cu_seqlens": rows.cu_seqlens}
        model(rows.inputs[:1], targets=rows.targets[:1], with_logits=False, **packed)
    return {number: float(share) for number, share in shares.items()}


@contextmanager
def _watched(layers: Mapping[int, Attention], shares: dict[int, Tensor]) -> Iterator[None]:
    """Record each layer's share in ``shares`` while it runs."""

    def note(number: int) -> Any:
        def measure(layer: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any], _: Tensor) -> None:
            shares[number] = _share(cast(Attention, layer), args[0], options.get("cu_seqlens"), options.get("first"))

        return measure

    with ExitStack() as hooks:
        for number, layer in layers.items():
            hooks.callback(layer.register_forward_hook(note(number), with_kwargs=True).remove)
        yield


def _share(layer: Attention, x: Tensor, cu_seqlens: Tensor | None, first: list[Tensor] | None) -> Tensor:
    core = layer.project(x, cu_seqlens, first)
    pruned, whole = (heads_kept(layer, core, prune, cu_seqlens) for prune in (layer.prune, None))
    return pruned.sum() / whole.sum()
