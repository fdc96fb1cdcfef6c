"""Kimi Linear (Kimi Team, 2025): layers of `kda`, and every fourth one `nope` with latent keys and values (MLA)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import TRANSFORMERS, Named, Take, common_sizes, decoder, pattern
from attnzoo.models.peers.rotary import norm_eps
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights

FULL, LINEAR = "full_attention", "linear_attention"
UNUSED = (
    "num_key_value_heads",
    "head_dim",
    "qk_head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)  # without groups of heads and rotations
LOADS = "a Kimi Linear whose layers are all dense loads, and 'kda' of flash-linear-attention does"


def kimi_linear(settings: Settings) -> Peer:
    """The dense models of Kimi Linear; one with layers of experts, as the published ones have, is refused."""
    settings.only("hidden_act", "silu", "swish")
    for name, value in (("attention_bias", False), ("mla_use_nope", True), ("num_nextn_predict_layers", 0)):
        settings.only(name, value)
    settings.only("q_lora_rank", None)
    settings.read.update(UNUSED)
    L, H = settings["num_hidden_layers"], settings["num_attention_heads"]
    _refuse_experts(settings, L)
    rank, own = settings.get("kv_lora_rank", 512), settings.get("qk_nope_head_dim", 128)
    shared, V = settings.get("qk_rope_head_dim", 64), settings.get("v_head_dim", 128)
    kinds, linear, eps = _kinds(settings, L), _linear(settings), norm_eps(settings)
    heads, K = linear["num_heads"], linear["head_dim"]
    options: dict[str, dict[str, Any]] = {
        FULL: {"name": "nope", "options": {
            "head_dim": own + shared, "value_dim": V, "kv_rank": rank, "shared_key_dim": shared,
        }},
        LINEAR: {"name": "kda", "options": {
            "num_heads": heads, "head_dim": K, "value_dim": K, "channel_rank": K,
            "conv_size": linear["short_conv_kernel_size"], "output_norm_shared": True, "output_norm_eps": eps,
        }},
    }  # fmt: skip
    config = ModelConfig(
        attention=pattern([options[kind] for kind in kinds]), num_heads=H, norm_eps=eps,
        intermediate_size=settings["intermediate_size"], **common_sizes(settings),
    )  # fmt: skip

    def attention(whole: bool, take: Take, index: int) -> Named:
        yield "o_proj.weight", take("o_proj.weight")
        yield from full(take) if kinds[index] == FULL else kda(take, whole)

    def full(take: Take) -> Named:
        q = take("q_proj.weight").unflatten(0, (H, own + shared))
        yield "q_proj.weight", q.roll(shared, 1).flatten(0, 1)  # the shared channels, its last, are our first
        down, k = take("kv_a_proj_with_mqa.weight").split([rank, shared])
        yield "latent.down.weight", down
        yield "latent.shared.weight", k
        yield "latent.norm.weight", take("kv_a_layernorm.weight")
        k, v = take("kv_b_proj.weight").unflatten(0, (H, own + V)).split([own, V], 1)
        yield "k_proj.weight", k.flatten(0, 1)
        yield "v_proj.weight", v.flatten(0, 1)

    def kda(take: Take, whole: bool) -> Named:
        # in memory one matrix, in files three
        parts = take("conv1d.weight").chunk(3) if whole else [take(f"{name}_conv1d.weight") for name in "qkv"]
        for name, part in zip("qkv", parts, strict=True):
            yield f"{name}_proj.weight", take(f"{name}_proj.weight")
            yield f"{name}_conv.weight", part.squeeze(1)
        yield "gate.members.0.channel_down.weight", take("f_a_proj.weight")
        yield "gate.members.0.channel_up.weight", take("f_b_proj.weight")
        yield "gate.members.0.channel_bias", take("dt_bias")
        yield "gate.members.0.log_a", take("A_log").flatten()
        yield "gate.members.1.beta_proj.weight", take("b_proj.weight")
        yield "output_norm.weight", take("o_norm.weight")
        yield "output_gate.0.weight", take("g_a_proj.weight")
        up = take("g_b_proj.weight")
        yield "output_gate.1.weight", up
        yield "output_gate.1.bias", torch.zeros_like(up[:, 0])

    def weights(theirs: Weights) -> Named:
        theirs.rename(lambda name: name.replace(".self_attn.forget_gate.", ".self_attn."))  # in memory, not in files
        whole = any(name.endswith(".conv1d.weight") for name in theirs.names)
        return decoder(theirs, TRANSFORMERS, L, partial(attention, whole), config.tie_embeddings)

    return Peer(config, weights)


def _linear(settings: Settings) -> dict[str, int]:
    """Sizes of the layers of `kda`, as the published files nest them or as transformers names them."""
    names = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
    theirs = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    within = settings.within("linear_attn_config")
    return {
        name: within.get(name, settings.get(other, default))
        for (name, default), other in zip(names.items(), theirs, strict=True)
    }


def _kinds(settings: Settings, layers: int) -> list[str]:
    """The kind of each layer: a list, or in the published files two lists of numbers from 1."""
    named = settings.listed("layer_types", "str", layers)
    within = settings.within("linear_attn_config")
    full, linear = (within.listed(name, "int") for name in ("full_attn_layers", "kda_layers"))
    if full is not None and linear is not None:
        if sorted([*full, *linear]) != list(range(1, layers + 1)):
            raise ValueError(
                f"{within.place}full_attn_layers, kda_layers: expected each of 1 to {layers} once, got {full}, {linear}"
            )
        numbered = [FULL if number in full else LINEAR for number in range(1, layers + 1)]
        if named not in (None, numbered):
            raise ValueError(f"config.json: layer_types and {within.place}full_attn_layers say one thing, and differ")
        named = numbered
    for kind in named or ():
        if kind not in (FULL, LINEAR):
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not supported (only {FULL}, {LINEAR})")
    return named or [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]


def _refuse_experts(settings: Settings, layers: int) -> None:
    first = settings.get("first_k_dense_replace", 1, least=0)
    by_number = ["dense" if i < first else "sparse" for i in range(layers)]
    kinds = settings.listed("mlp_layer_types", "str", layers) or by_number
    counts = [settings.raw(name) for name in ("num_experts", "num_local_experts") if settings.says(name)]
    sparse = [kind for kind in kinds if kind != "dense"]
    if sparse and not (counts and all(not count for count in counts)):
        raise ValueError(
            f"config.json: {len(sparse)} of {layers} layers have experts, which MLPs have no place for; {LOADS}"
        )
