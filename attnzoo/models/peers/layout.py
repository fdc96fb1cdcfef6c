"""Mappings common to peers' decoders: names around attention, and the row order of rotated heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights


@dataclass(frozen=True)
class Layout:
    """The names of a peer's weights around its attention; `{}` stands for the layer's index.

    Args:
        embedding, norm, layer: names of the token embedding, the last norm and a layer.
        attention_norm, mlp_norm: names of a layer's norms; `mlp_norm` is None for layers without an MLP.
        attention_after, mlp_after: names of further norms, behind attention and MLP; None for none.
        mlp: name of the MLP.
        attention: name of the attention module; empty where `take` gets names that include it.
        centred: whether norms scale by one plus their weights.
    """

    embedding: str
    norm: str
    layer: str
    attention_norm: str
    mlp_norm: str | None
    attention: str
    centred: bool = False
    attention_after: str | None = None
    mlp_after: str | None = None
    mlp: str = "mlp"


def common_sizes(settings: Settings, tied: bool = False) -> dict[str, Any]:
    """The fields of a ModelConfig that every peer's settings name alike.

    Args:
        tied: whether the head is the embedding where the settings do not say.
    """
    return {
        "hidden_size": settings["hidden_size"], "num_layers": settings["num_hidden_layers"],
        "vocab_size": settings["vocab_size"], "tie_embeddings": settings.get("tie_word_embeddings", tied),
        "initializer_range": settings.get("initializer_range", 0.02),
    }  # fmt: skip


TRANSFORMERS = Layout(
    "model.embed_tokens", "model.norm", "model.layers.{}", "input_layernorm", "post_attention_layernorm", "self_attn"
)
FLA = Layout("model.embeddings", "model.norm", "model.layers.{}", "attn_norm", "mlp_norm", "attn")
MAMBA = Layout("backbone.embeddings", "backbone.norm_f", "backbone.layers.{}", "norm", None, "mixer")

Take = Callable[[str], Tensor]
Named = Iterator[tuple[str, Tensor]]  # our names and tensors
Attention = Callable[[Take, int], Named]


def mapped(
    config: ModelConfig, layout: Layout, attention: Attention, left_out: Callable[[str], bool] = lambda name: False
) -> Callable[[Weights], Named]:
    """What :class:`~attnzoo.models.peers.Peer` takes for weights: those of a :func:`decoder` with these sizes.

    Args:
        left_out: whether a weight of this name is in files alone, and loaded by none.
    """

    def weights(theirs: Weights) -> Named:
        for name in filter(left_out, theirs.names):
            theirs.skip(name)
        return decoder(theirs, layout, config.num_layers, attention, config.tie_embeddings)

    return weights


def decoder(
    weights: Weights, layout: Layout | Sequence[Layout], layers: int, attention: Attention, tied: bool,
    mlp: Attention | None = None,
) -> Named:  # fmt: skip
    """Our names and tensors of a whole decoder.

    Args:
        weights: the peer's weights.
        layout: the peer's names, of all layers or of each.
        layers: the number of layers.
        attention: `attention(take, index)` yields one layer's attention weights under our names, where
            `take("q_proj.weight")` is the peer's tensor of that name in that layer.
        tied: whether embedding and head are tied, so that either may be missing.
        mlp: as `attention`, what yields the weights of one layer's MLP under the names of our block; None for SwiGLU.
    """
    layouts = [layout] * layers if isinstance(layout, Layout) else list(layout)
    whole = layouts[0]

    def norm(ours: str, theirs: str) -> Named:
        weight = weights(f"{theirs}.weight")
        yield f"{ours}.weight", 1 + weight if whole.centred else weight
        if f"{theirs}.bias" in weights:
            yield f"{ours}.bias", weights(f"{theirs}.bias")

    def taken(part: Attention, place: str, i: int) -> Named:
        """The weights that `part` yields of the layer i, whose module is called `place`."""
        return part(lambda name: weights(f"{place}.{name}"), i)

    embedding, head = f"{whole.embedding}.weight", "lm_head.weight"
    yield "embedding.weight", weights(embedding if embedding in weights or not tied else head)
    for i, layout in enumerate(layouts):
        layer = layout.layer.format(i)
        names = ("attention_norm", "attention_after", "mlp_norm", "mlp_after")
        for ours, theirs in ((name, getattr(layout, name)) for name in names):
            if theirs is not None:
                yield from norm(f"blocks.{i}.{ours}", f"{layer}.{theirs}")
        for name, tensor in taken(attention, f"{layer}.{layout.attention}" if layout.attention else layer, i):
            yield f"blocks.{i}.attention.{name}", tensor
        if layout.mlp_norm is not None and mlp is None:
            yield from _mlp(weights, f"{layer}.{layout.mlp}", f"blocks.{i}.mlp")
        elif layout.mlp_norm is not None and mlp is not None:
            yield from ((f"blocks.{i}.{name}", x) for name, x in taken(mlp, f"{layer}.{layout.mlp}", i))
    yield from norm("norm", whole.norm)
    yield "head.weight", weights(head if head in weights or not tied else embedding)


def _mlp(weights: Weights, theirs: str, ours: str) -> Named:
    for part in ("weight", "bias") if f"{theirs}.down_proj.bias" in weights else ("weight",):
        fused = f"{theirs}.gate_up_proj.{part}"  # Phi-3's name
        gate = weights(fused if fused in weights else f"{theirs}.gate_proj.{part}")
        if f"{theirs}.up_proj.{part}" in weights:
            up = weights(f"{theirs}.up_proj.{part}")
        else:  # one matrix for gate and up, the gate's half first
            gate, up = gate.chunk(2, 0)
        down = weights(f"{theirs}.down_proj.{part}")
        yield from ((f"{ours}.gate.{part}", gate), (f"{ours}.up.{part}", up), (f"{ours}.down.{part}", down))


def pattern(entries: list[Any]) -> Any:
    """The entries of all layers as `ModelConfig` takes them: the shortest list that repeats into them."""
    count = len(entries)
    period = next(n for n in range(1, count + 1) if count % n == 0 and entries == entries[:n] * (count // n))
    return entries[0] if period == 1 else entries[:period]


def interleaved(rows: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """The rows of rotated heads, reordered from pairs half a head apart to pairs of neighbours.

    Args:
        rows: `[heads * K, ...]`, a projection, its bias or a norm's scale.
        heads: number of heads in `rows`.
        rotated: channels per head that are rotated, the first ones; None for all.
    """
    K = rows.shape[0] // heads
    rotated = K if rotated is None else rotated
    order = torch.arange(rotated).view(2, -1).T.flatten()
    order = torch.cat([order, torch.arange(rotated, K)])
    turned: Tensor = rows.unflatten(0, (heads, K))[:, order].flatten(0, 1)
    return turned
