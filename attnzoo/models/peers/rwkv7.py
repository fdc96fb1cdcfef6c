"""RWKV-7 (Peng et al., 2025) as flash-linear-attention has it, release 0.6: layers of `rwkv7` and channel mixing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import FLA, Named, Take, common_sizes, decoder
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights

LAYOUT = replace(FLA, mlp_norm="ffn_norm", mlp="ffn")
MIXED = ("r", "w", "k", "v", "a", "g")  # mixtures of each token with the one before; in early files one tensor


def rwkv7(settings: Settings) -> Peer:
    """The models whose values are as wide as their keys, with norms before attention and MLP."""
    for name, value in (("norm_first", True), ("norm_bias", True), ("attn", None)):
        settings.only(name, value)
    settings.only("hidden_act", "sqrelu")
    D, L = settings["hidden_size"], settings["num_hidden_layers"]
    head_dim = settings.optional("head_dim", "int") if settings.says("head_dim") else 64
    K = head_dim or D // settings["num_heads"]
    settings.read.update(("num_heads", "attn_mode", "fuse_norm"))
    widths = settings.raw("value_dim") if settings.says("value_dim") else None
    settings.read.add("value_dim")
    if widths not in (None, D, [D] * L):
        raise ValueError(f"config.json: value_dim: expected hidden_size = {D} in every layer, got {widths}")
    width = settings.optional("intermediate_size", "int")
    eps, ratio = settings.get("norm_eps", 1e-5), settings.get("hidden_ratio", 4)
    ranks = {
        "decay_rank": settings.get("decay_low_rank_dim", 64), "rate_rank": settings.get("a_low_rank_dim", 64),
        "output_gate_rank": settings.get("gate_low_rank_dim", 128),
        "value_residual": settings.get("v_low_rank_dim", 16),
    }  # fmt: skip
    options = {"head_dim": K, "output_norm_eps": K * eps, **ranks}
    config = ModelConfig(
        attention="rwkv7", attention_options=options, num_heads=D // K, norm_kind="layer", norm_eps=eps,
        embedding_norm=True,
        intermediate_size=width or -(-int(D * ratio) // 32) * 32, mlp_activation="relu2", mlp_gated=False, mlp_mix=True,
        **common_sizes(settings),
    )  # fmt: skip

    def layer(together: str, take: Take, index: int) -> Named:
        rows = take(together).view(6, D) if together else torch.cat([take(f"x_{name}").view(1, D) for name in MIXED])
        yield "token_mix.weight", rows[[0, 2, 3, 5]]
        yield "gate.mix.weight", rows[[1, 4]]
        for ours, theirs in (("q", "r"), ("k", "k"), ("v", "v"), ("o", "o")):
            yield f"{ours}_proj.weight", take(f"{theirs}_proj.weight")
        for ours, theirs, bias in (("decay", "w", "channel_bias"), ("rate", "a", "rate_bias")):
            yield f"gate.{ours}_down.weight", take(f"{theirs}_lora.lora.0.weight")
            yield f"gate.{ours}_up.weight", take(f"{theirs}_lora.lora.2.weight")
            yield f"gate.{bias}", take(f"{theirs}_lora.lora.2.bias")
        yield "gate.erased_scale", take("k_k").flatten()
        yield "gate.rate_share", take("k_a").flatten()
        if index:
            yield "value_residual.down.weight", take("v_lora.lora.0.weight")
            for part in ("weight", "bias"):
                yield f"value_residual.up.{part}", take(f"v_lora.lora.2.{part}")
        for part in ("weight", "bias"):
            yield f"output_norm.{part}", take(f"g_norm.{part}").view(-1, K)
        yield "bonus", take("r_k")
        for place in (0, 2):
            yield f"output_gate.{place}.weight", take(f"g_lora.lora.{place}.weight")

    def mlp(take: Take, index: int) -> Named:
        yield "mlp_mix.weight", take("x_k").view(1, D)
        yield "mlp.up.weight", take("key.weight")
        yield "mlp.down.weight", take("value.weight")

    def weights(theirs: Weights) -> Named:
        for part in ("weight", "bias"):
            yield f"embedding_norm.{part}", theirs(f"model.layers.0.pre_norm.{part}")
        whole = "model.layers.0.attn.x_x" in theirs
        attention = partial(layer, "x_x" if whole else "")
        yield from decoder(theirs, LAYOUT, L, attention, config.tie_embeddings, mlp)

    return Peer(config, weights)
