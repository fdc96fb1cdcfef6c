"""Qwen3-Next and Qwen3.5 (Qwen team, 2025, 2026): layers of `gated_deltanet` and, at times, of `rope` with a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import TRANSFORMERS, Named, Take, common_sizes, mapped, pattern
from attnzoo.models.peers.rotary import head_dim, norm_eps
from attnzoo.models.peers.scaling import rotation
from attnzoo.models.peers.settings import Settings

LAYOUT = replace(TRANSFORMERS, attention="", centred=True)
KINDS = {"linear_attention": "gated_deltanet", "full_attention": "rope"}


def qwen3_next(settings: Settings) -> Peer:
    """The dense models of Qwen3-Next, and of Qwen3.5 with its separate matrices; a layer of experts is refused."""
    settings.only("hidden_act", "silu", "swish")
    settings.only("attention_bias", False)
    settings.only("attn_output_gate", True)
    D, L, H = settings["hidden_size"], settings["num_hidden_layers"], settings["num_attention_heads"]
    newer = settings.raw("model_type") == "qwen3_5_text"
    _refuse_experts(settings, L)
    G, K, eps = settings.get("num_key_value_heads", H), head_dim(settings, D, H), norm_eps(settings)
    turn = rotation(settings, K, partial=0.25)
    every = settings.get("full_attention_interval", 4)
    default = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(L)]
    names = settings.listed("layer_types", "str", L) or default
    for name in names:
        if name not in KINDS:
            raise ValueError(f"config.json: layer_types has {name!r}, which is not supported (only {', '.join(KINDS)})")
    key_heads, value_heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    key_dim, value_dim = settings["linear_key_head_dim"], settings["linear_value_head_dim"]
    shared = value_heads // key_heads  # value heads of a key head
    options: dict[str, dict[str, Any]] = {
        "rope": {
            "num_kv_heads": G, "head_dim": K, **turn.options, "qk_norm": "rms", "qk_norm_shared": True,
            "qk_norm_eps": eps, "output_gate": "sigmoid",
        },
        "gated_deltanet": {
            "num_heads": value_heads, "num_qk_heads": None if shared == 1 else key_heads, "head_dim": key_dim,
            "value_dim": value_dim, "conv_size": settings["linear_conv_kernel_dim"], "output_norm_shared": True,
            "output_norm_eps": eps,
        },
    }  # fmt: skip
    config = ModelConfig(
        attention=pattern([{"name": KINDS[name], "options": options[KINDS[name]]} for name in names]),
        num_heads=H, intermediate_size=settings["intermediate_size"], norm_eps=eps, **common_sizes(settings),
    )  # fmt: skip

    def attention(take: Take, index: int) -> Named:
        if KINDS[names[index]] == "rope":
            yield from rope(lambda name: take(f"self_attn.{name}"))
        else:
            yield from gated_deltanet(lambda name: take(f"linear_attn.{name}"))

    def rope(take: Take) -> Named:
        q, gate = take("q_proj.weight").unflatten(0, (H, 2, K)).unbind(1)  # per head, [H, K, D]
        yield "q_proj.weight", turn.keys(q.flatten(0, 1), H)
        yield "output_gate.weight", gate.flatten(0, 1)
        yield "k_proj.weight", turn.keys(take("k_proj.weight"), G)
        yield "q_norm.weight", turn.queries(1 + take("q_norm.weight"), 1)
        yield "k_norm.weight", turn.keys(1 + take("k_norm.weight"), 1)
        for name in ("v_proj.weight", "o_proj.weight"):
            yield name, take(name)
        yield "gate.angle", turn.angle.clone()

    def gated_deltanet(take: Take) -> Named:
        maps = ("gate.members.1.beta_proj", "gate.members.0.dt_proj")
        if newer:
            q_k_v = take("in_proj_qkv.weight").split([key_heads * key_dim] * 2 + [value_heads * value_dim])
            parts = [*q_k_v, *(take(f"in_proj_{name}.weight") for name in "zba")]
        else:
            widths = [key_dim, key_dim, shared * value_dim, shared * value_dim]  # per key head
            q_k_v_z = take("in_proj_qkvz.weight").unflatten(0, (key_heads, -1)).split(widths, 1)
            b_a = take("in_proj_ba.weight").unflatten(0, (key_heads, -1)).chunk(2, 1)
            parts = [part.flatten(0, 1) for part in (*q_k_v_z, *b_a)]
        for name, part in zip(("q_proj", "k_proj", "v_proj", "output_gate", *maps), parts, strict=True):
            yield f"{name}.weight", part
        widths = [key_heads * key_dim] * 2 + [value_heads * value_dim]
        for name, part in zip("qkv", take("conv1d.weight").squeeze(1).split(widths), strict=True):
            yield f"{name}_conv.weight", part
        yield "gate.members.0.dt_bias", take("dt_bias")
        yield "gate.members.0.log_a", take("A_log")
        yield "output_norm.weight", take("norm.weight")
        yield "o_proj.weight", take("out_proj.weight")

    # transformers leaves out the multi-token prediction head, too
    weights = mapped(config, LAYOUT, attention, left_out=lambda name: name.startswith("mtp."))
    rounded = f"{'Qwen3.5' if newer else 'Qwen3-Next'}: norms scale by 1 + w, rounded here to the dtype of the weights"
    return Peer(config, weights, (rounded, *turn.notes))


def _refuse_experts(settings: Settings, layers: int) -> None:
    dense = settings.listed("mlp_only_layers", "int") or []
    experts, step = settings.get("num_experts", 0, least=0), settings.get("decoder_sparse_step", 1)
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    if experts and sparse:
        raise ValueError(
            f"config.json: num_experts = {experts} in {len(sparse)} layers is not supported (only dense MLPs: "
            f"num_experts = 0, or all layers in mlp_only_layers)"
        )
