"""Mappings of Llama (Touvron et al., 2023), Mistral, Qwen2 and Qwen3: softmax attention with rotary angles, as
`rope`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import TRANSFORMERS, common_sizes, decoder, interleaved, pattern
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights

THETA = 10_000.0  # default base of the angles


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
    G, K, eps = settings.get("num_key_value_heads", H), head_dim(settings, D, H), norm_eps(settings)
    # in these the output projection has a bias too
    outer = biases and settings.fields["model_type"] in ("llama", "qwen3")
    options: dict[str, Any] = {"num_kv_heads": G, "head_dim": K, "qkv_bias": biases, "output_bias": outer}
    if normed:
        options |= {"qk_norm": "rms", "qk_norm_shared": True, "qk_norm_eps": eps}
    rope = rope_settings(settings)
    rope.only("partial_rotary_factor", 1.0)
    windows = _windows(settings, L)
    angle = angles(rope, K)
    entries: list[dict[str, Any]] = [
        {"name": "rope", "options": {"theta": theta(rope)} | ({} if window is None else {"window": window})}
        for window in windows
    ]
    config = ModelConfig(
        attention=pattern(entries), attention_options=options, num_heads=H,
        intermediate_size=settings["intermediate_size"], norm_eps=eps, **common_sizes(settings),
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
            if name.endswith("rotary_emb.inv_freq"):  # a table in files of early releases, never loaded
                theirs.skip(name)
        return decoder(theirs, TRANSFORMERS, L, attention, config.tie_embeddings)

    return Peer(config, weights, rope_notes(settings))


def head_dim(settings: Settings, hidden_size: int, heads: int) -> int:
    """Channels per head, which the heads share out where nothing is said.

    Raises:
        ValueError: there are more heads than channels.
    """
    if "head_dim" not in settings and heads > hidden_size:
        raise ValueError(f"config.json: num_attention_heads: expected at most hidden_size = {hidden_size}, got {heads}")
    return int(settings.get("head_dim", hidden_size // heads))


def norm_eps(settings: Settings) -> float:
    """The number that norms add to mean squares."""
    return float(settings.required("rms_norm_eps", "float"))


def _windows(settings: Settings, layers: int) -> list[int | None]:
    """Each layer's window in tokens; None for all tokens. Defaults are those of the peers' own classes."""
    model = settings.fields["model_type"]
    named = settings.listed("layer_types", "str", layers)
    # null means no window
    window = settings.optional("sliding_window", "int") if "sliding_window" in settings.fields else 4096
    if model in ("llama", "mistral"):
        window = window if model == "mistral" else None
        default = ["sliding_attention" if window else "full_attention"] * layers
        alike = named in (None, default)  # transformers does not read the layer types of these models
    else:
        window = window if settings.get("use_sliding_window", False) else None
        first = settings.get("max_window_layers", 28, least=0)  # used where `layer_types` is missing
        default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
        alike = window is not None or "sliding_attention" not in (named or [])
    if not alike:
        raise ValueError(f"config.json: layer_types = {named} is not supported beside sliding_window = {window}")
    kinds = named or default
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not supported")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def theta(rope: Settings) -> float:
    """The base of the angles."""
    return float(rope.get("rope_theta", THETA))


def angles(rope: Settings, channels: int) -> Tensor:
    """Radians per token of each pair of the `channels` that are rotated, `[channels / 2]` float32.

    `default`, `linear` (Chen et al., 2023) and `llama3` (Llama 3.1's model card) scaling are known.

    Raises:
        ValueError: another kind.
    """
    angle: Tensor = theta(rope) ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return angle
    if kind == "linear":
        return angle / float(rope.required("factor", "float"))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (float(rope.required(name, "float")) for name in names)
        turns = rope["original_max_position_embeddings"] * angle / (2 * math.pi)  # in the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return angle * kept + angle / factor * (1 - kept)
    raise ValueError(f"config.json: rope_type = {kind!r} is not supported (only 'default', 'linear', 'llama3')")


def rope_settings(settings: Settings, partial: float = 1.0) -> Settings:
    """The settings of the angles, from `rope_scaling` or `rope_parameters` and from fields beside them.

    As in transformers (5.23, modeling_rope_utils.py) `rope_scaling` alone counts where both exist.

    Args:
        settings: the model's settings.
        partial: the default of `partial_rotary_factor`.

    Raises:
        ValueError: the two fields differ in more than the kind of scaling, or from fields beside them; or layers of
            different kinds have different angles.
    """
    scaling, parameters = (settings.within(name) for name in ("rope_scaling", "rope_parameters"))
    rope = scaling if scaling.fields else parameters
    if any(isinstance(value, dict) for one in (scaling, parameters) for value in one.fields.values()):
        raise ValueError("config.json: rope_parameters that differ between kinds of layers are not supported")
    rope.said_once("rope_type", "type")
    found = {name: value for name, value in rope.fields.items() if value is not None}
    found.setdefault("rope_type", found.get("type", "default"))
    neutral = {"rope_theta": THETA, "partial_rotary_factor": partial, "original_max_position_embeddings": None}
    for name, value in neutral.items():
        if settings.fields.get(name) is not None:
            value = settings.fields[name]
            if found.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json: {name} = {value!r} and {rope.place.removeprefix(settings.place)}{name} = "
                    f"{found[name]!r} say one thing twice, and differ"
                )
        other = parameters.fields.get(name)
        if other is not None and other != found.get(name, value):
            raise ValueError(
                f"config.json: expected {name} = {other!r} of rope_parameters in rope_scaling, too, which counts alone "
                f"where both are there, got {found.get(name)!r}"
            )
    if "max_position_embeddings" in settings:
        found.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    return Settings({"partial_rotary_factor": partial, **found}, rope.place)


def rope_notes(settings: Settings) -> tuple[str, ...]:
    """Remarks for the importer where `rope_scaling` and `rope_parameters` both exist."""
    scaling, parameters = (settings.within(name).fields for name in ("rope_scaling", "rope_parameters"))
    if not scaling or not parameters or scaling == parameters:
        return ()
    return ("config.json: rope_scaling counts, and rope_parameters beside it does not, as in transformers",)
