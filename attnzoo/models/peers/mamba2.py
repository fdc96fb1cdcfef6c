"""Mamba-2 (Dao and Gu, 2024) of transformers, of flash-linear-attention and of the FoX paper, as `mamba2`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import MAMBA, Named, Take, common_sizes, decoder
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights

UNBOUNDED = (math.inf, {"__float__": "Infinity"})  # the second is how transformers writes infinity into JSON


def mamba2(settings: Settings) -> Peer:
    """Mamba-2: B, C and x of the input projection are our k, q and v, and z is the output gate.

    Heads of a group are neighbours and are normed together, as in the authors' kernels.
    """
    settings.only("hidden_act", "silu", "swish")
    settings.only("use_bias", False)
    settings.only("D_has_hdim", False)
    for name in ("time_step_limit", "dt_limit"):
        limit = settings.raw(name)
        limit = list(limit) if isinstance(limit, tuple) else limit
        if limit is not None and limit not in [[0.0, high] for high in UNBOUNDED]:
            raise ValueError(f"config.json: {name} = {limit} is not supported (only [0, inf])")
    D, L, G = settings["hidden_size"], settings["num_hidden_layers"], settings["n_groups"]
    K, V = settings["state_size"], settings["head_dim"]
    H = settings.get("num_heads", settings.get("expand", 2) * D // V)
    biased = settings.get("use_conv_bias", True)
    settings.said_once("layer_norm_epsilon", "norm_eps")
    eps = settings.get("layer_norm_epsilon", settings.get("norm_eps", 1e-5))
    normed = settings.get("rmsnorm", True)
    options: dict[str, Any] = {
        "num_qk_heads": G, "head_dim": K, "value_dim": V, "conv_size": settings["conv_kernel"], "conv_bias": biased,
    }  # fmt: skip
    options |= {"output_norm_groups": G, "output_norm_eps": eps} if normed else {"output_norm": "none"}
    if normed and not settings.says("layer_norm_epsilon") and settings.get("norm_before_gate", False):
        options["gate_before_norm"] = False  # an option of flash-linear-attention that transformers does not read
    config = ModelConfig(
        attention="mamba2",
        attention_options=options,
        num_heads=H,
        intermediate_size=0,
        norm_eps=eps,
        **common_sizes(settings),
    )

    def attention(take: Take, index: int) -> Named:
        sizes = {"v": H * V, "k": G * K, "q": G * K}
        z, *inner, dt = take("in_proj.weight").split([H * V, *sizes.values(), H])
        yield "output_gate.weight", z
        yield "gate.dt_proj.weight", dt
        for name, weight in zip(sizes, inner, strict=True):
            yield f"{name}_proj.weight", weight
        for part in ("weight", "bias") if biased else ("weight",):
            whole = take(f"conv1d.{part}")
            whole = whole.squeeze(1) if part == "weight" else whole
            for name, channels in zip(sizes, whole.split(list(sizes.values())), strict=True):
                yield f"{name}_conv.{part}", channels
        for ours, theirs in (("gate.dt_bias", "dt_bias"), ("gate.log_a", "A_log"), ("skip", "D")):
            yield ours, take(theirs)
        if normed:
            yield "output_norm.weight", take("norm.weight").unflatten(0, (H, V))
        yield "o_proj.weight", take("out_proj.weight")

    def weights(theirs: Weights) -> Named:
        older = "backbone.embedding.weight" in theirs
        layout = replace(MAMBA, embedding="backbone.embedding") if older else MAMBA
        return decoder(theirs, layout, L, attention, config.tie_embeddings)

    notes: tuple[str, ...] = ()
    if settings.get("residual_in_fp32", True):
        notes = ("Mamba-2: the sum over the layers has the dtype of the weights (residual_in_fp32 there: float32)",)
    return Peer(config, weights, notes)
