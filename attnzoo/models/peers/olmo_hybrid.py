"""OLMo Hybrid (Allen Institute for AI, 2026): layers of `gated_deltanet`, and every fourth one as in OLMo 2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import TRANSFORMERS, Named, Take, common_sizes, decoder, pattern
from attnzoo.models.peers.rotary import BEHIND, norm_eps
from attnzoo.models.peers.scaling import rope_settings, rotation
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights

LINEAR = replace(TRANSFORMERS, attention="linear_attn")
OUTPUT_EPS = 1e-5  # written in its class
FILED = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}


def olmo_hybrid(settings: Settings) -> Peer:
    """The layers that attend have norms behind attention and MLP, the others before; without a base none rotates."""
    settings.only("hidden_act", "silu", "swish")
    settings.only("attention_bias", False)
    D, L, H = settings["hidden_size"], settings["num_hidden_layers"], settings["num_attention_heads"]
    G, K, eps = settings.get("num_key_value_heads", H), D // H, norm_eps(settings)
    attends = ["linear_attention" if i % 4 != 3 else "full_attention" for i in range(L)]
    if "full_attention" not in attends:
        attends[-1] = "full_attention"
    kinds = settings.listed("layer_types", "str", L) or attends
    for name in kinds:
        if name not in ("linear_attention", "full_attention"):
            raise ValueError(f"config.json: layer_types has {name!r}, which is not supported")
    still = "rope_theta" in settings.within("rope_parameters").fields and (
        settings.within("rope_parameters").fields["rope_theta"] is None
    )
    if not still:
        rope_settings(settings).only("partial_rotary_factor", 1.0)
    turn = None if still else rotation(settings, K)
    key_heads = settings.get("linear_num_key_heads", H)
    value_heads = settings.get("linear_num_value_heads", H)
    key_dim = settings.get("linear_key_head_dim", int(0.75 * D / key_heads))
    value_dim = settings.get("linear_value_head_dim", 2 * key_dim)
    linear: dict[str, Any] = {
        "num_heads": value_heads, "num_qk_heads": None if value_heads == key_heads else key_heads, "head_dim": key_dim,
        "value_dim": value_dim, "conv_size": settings.get("linear_conv_kernel_dim", 4), "output_norm_shared": True,
        "output_norm_eps": OUTPUT_EPS, "allow_neg_eigval": settings.get("linear_allow_neg_eigval", True),
    }  # fmt: skip
    softmax = {"num_kv_heads": G, "head_dim": K, "qk_norm": "rms_full", "qk_norm_eps": eps}
    entries: dict[str, dict[str, Any]] = {
        "linear_attention": {"name": "gated_deltanet", "options": linear},
        "full_attention": {
            "name": "nope" if turn is None else "rope",
            "options": softmax | ({} if turn is None else turn.options),
        },
    }  # fmt: skip
    config = ModelConfig(
        attention=pattern([entries[kind] for kind in kinds]), num_heads=H,
        norm=pattern(["after" if kind == "full_attention" else "before" for kind in kinds]),
        intermediate_size=settings["intermediate_size"], norm_eps=eps, **common_sizes(settings),
    )  # fmt: skip

    def attention(apart: bool, take: Take, index: int) -> Named:
        yield from gated_deltanet(take, apart) if kinds[index] == "linear_attention" else full(take)

    def full(take: Take) -> Named:
        for name, heads in (("q", H), ("k", G)):
            rows, scale = take(f"{name}_proj.weight"), take(f"{name}_norm.weight")
            if turn is not None:
                rows, scale = turn.keys(rows, heads), turn.keys(scale, heads)
            yield f"{name}_proj.weight", rows
            yield f"{name}_norm.weight", scale.unflatten(0, (heads, K))
        for name in ("v_proj.weight", "o_proj.weight"):
            yield name, take(name)
        if turn is not None:
            yield "gate.angle", turn.angle.clone()

    def gated_deltanet(take: Take, apart: bool) -> Named:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{name}.weight", take(f"{name}.weight")
        widths = [key_heads * key_dim] * 2 + [value_heads * value_dim]
        # transformers saves thirds of the whole, wherever q, k and v end
        parts = [take(f"{name}_conv1d.weight") for name in "qkv"] if apart else [take("conv1d.weight")]
        for name, part in zip("qkv", torch.cat(parts).squeeze(1).split(widths), strict=True):
            yield f"{name}_conv.weight", part
        yield "gate.members.0.dt_proj.weight", take("a_proj.weight")
        yield "gate.members.0.dt_bias", take("dt_bias")
        yield "gate.members.0.log_a", take("A_log")
        yield "gate.members.1.beta_proj.weight", take("b_proj.weight")
        yield "output_norm.weight", take("o_norm.weight")
        yield "output_gate.weight", take("g_proj.weight")

    def weights(theirs: Weights) -> Named:
        theirs.rename(_as_in_its_class)
        apart = any(name.endswith("q_conv1d.weight") for name in theirs.names)
        layouts = [LINEAR if kind == "linear_attention" else BEHIND for kind in kinds]
        return decoder(theirs, layouts, L, partial(attention, apart), config.tie_embeddings)

    return Peer(config, weights, () if turn is None else turn.notes)


def _as_in_its_class(name: str) -> str:
    """The name in transformers' class of a weight, which files have under another (5.23, conversion_mapping.py)."""
    for filed, loaded in FILED.items():
        name = name.replace(f".{filed}.", f".{loaded}.")
    return name
