"""Llama and its like (Touvron et al., 2023): softmax attention with rotary angles, as `rope`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import TRANSFORMERS, common_sizes, decoder, interleaved, pattern
from attnzoo.models.peers.weights import Settings, Weights


def llama(settings: Settings) -> Peer:
    """Llama, and Mistral's dense models: `rope`, with a window where there is one."""
    return _peer(settings, biases=settings.get("attention_bias", False), normed=False)


def qwen2(settings: Settings) -> Peer:
    """Qwen2: Llama with biases on q, k and v."""
    return _peer(settings, biases=True, normed=False)


def qwen3(settings: Settings) -> Peer:
    """Qwen3: Llama with a norm on each head of q and k."""
    return _peer(settings, biases=settings.get("attention_bias", False), normed=True)


def _peer(settings: Settings, *, biases: bool, normed: bool) -> Peer:
    settings.only("hidden_act", "silu", "swish")
    settings.only("mlp_bias", False)
    D, H, L = settings["hidden_size"], settings["num_attention_heads"], settings["num_hidden_layers"]
    G, K = settings.get("num_key_value_heads", H), settings.get("head_dim", D // H)
    outer = biases and settings.fields["model_type"] in ("llama", "qwen3")  # there the output has one too
    options: dict[str, Any] = {"num_kv_heads": G, "head_dim": K, "qkv_bias": biases, "output_bias": outer}
    if normed:
        options |= {"qk_norm": "rms", "qk_norm_shared": True, "qk_norm_eps": settings["rms_norm_eps"]}
    Settings(rope_settings(settings)).only("partial_rotary_factor", 1.0)
    windows = _windows(settings, L)
    angle = angles(settings, K)
    entries: list[dict[str, Any]] = [
        {"name": "rope", "options": {"theta": theta(settings)} | ({} if window is None else {"window": window})}
        for window in windows
    ]
    config = ModelConfig(
        attention=pattern(entries), attention_options=options, num_heads=H,
        intermediate_size=settings["intermediate_size"], norm_eps=settings["rms_norm_eps"], **common_sizes(settings),
    )  # fmt: skip

    def attention(take: Callable[[str], Tensor], index: int) -> Iterator[tuple[str, Tensor]]:
        for name, heads in (("q", H), ("k", G)):
            yield f"{name}_proj.weight", interleaved(take(f"{name}_proj.weight"), heads)
            if biases:
                yield f"{name}_proj.bias", interleaved(take(f"{name}_proj.bias"), heads)
            if normed:
                yield f"{name}_norm.weight", interleaved(take(f"{name}_norm.weight"), 1)
        yield "v_proj.weight", take("v_proj.weight")
        if biases:
            yield "v_proj.bias", take("v_proj.bias")
        yield "o_proj.weight", take("o_proj.weight")
        if outer:
            yield "o_proj.bias", take("o_proj.bias")
        yield "gate.angle", angle.clone()

    def weights(theirs: Weights) -> Iterator[tuple[str, Tensor]]:
        for name in theirs.names:
            if name.endswith("rotary_emb.inv_freq"):  # written by early releases, which did not read it either
                theirs.skip(name)
        return decoder(theirs, TRANSFORMERS, L, attention, config.tie_embeddings)

    return Peer(config, weights)


def _windows(settings: Settings, layers: int) -> list[int | None]:
    """How far each layer looks back; None for all the way. Defaults are those of the peers' own classes."""
    model = settings.fields["model_type"]
    if model == "llama":
        return [None] * layers
    window, first = settings.fields.get("sliding_window", 4096), 0  # null: none
    if model != "mistral":
        window = window if settings.get("use_sliding_window", False) else None
        first = settings.get("max_window_layers", 28)  # where `layer_types` is not written out
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    kinds = settings.get("layer_types", default)
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not supported")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def theta(settings: Settings) -> float:
    """The base of the angles."""
    return float(rope_settings(settings).get("rope_theta", settings.get("rope_theta", 10_000.0)))


def angles(settings: Settings, channels: int) -> Tensor:
    """Radians per token of each pair of the `channels` that are rotated, `[channels / 2]` float32.

    `default`, `linear` (Chen et al., 2023) and `llama3` (Llama 3.1's model card) scaling are known.

    Raises:
        ValueError: another kind.
    """
    rope = rope_settings(settings)
    angle: Tensor = theta(settings) ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return angle
    if kind == "linear":
        return angle / float(rope["factor"])
    if kind == "llama3":
        turns = float(rope["original_max_position_embeddings"]) * angle / (2 * math.pi)  # in the original context
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return angle * kept + angle / float(rope["factor"]) * (1 - kept)
    raise ValueError(f"config.json: rope_type = {kind!r} is not supported (only 'default', 'linear', 'llama3')")


def rope_settings(settings: Settings) -> dict[str, Any]:
    """What is said of the angles, in one of the two places where it may stand.

    Raises:
        ValueError: they differ between kinds of layers.
    """
    rope: dict[str, Any] = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("config.json: rope_parameters that differ between kinds of layers are not supported")
    return rope
