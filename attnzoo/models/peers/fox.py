"""The Forgetting Transformer's own models (Lin et al., 2025; the authors' repository at commit 883f260)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from attnzoo.layer.gates.matrix import rotary_angles
from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.fla import mlp_size
from attnzoo.models.peers.layout import FLA, decoder, interleaved
from attnzoo.models.peers.weights import Settings, Weights

GATES = {"full": "forget", "bias_only": "independent", "fixed": "fixed", "none": None}
QK_NORM_EPS = 1e-5


def forgetting_transformer(settings: Settings) -> Peer:
    """FoX and the Transformer baselines, Pro or LLaMA: `fox`, or without a forget gate `rope` or `nope`."""
    for name, value in (("attention_bias", False), ("window_size", None), ("elementwise_affine", True)):
        settings.only(name, value)
    settings.only("hidden_act", "swish", "silu")
    kind = settings.get("fgate_type", "full")
    if kind not in GATES:
        settings.only("fgate_type", *GATES)
    D, H, L = settings["hidden_size"], settings["num_heads"], settings["num_hidden_layers"]
    G, eps = settings.get("num_kv_heads", H), settings.get("norm_eps", 1e-6)
    rotates, shared = settings.get("use_rope", False), settings.get("qk_norm_share_param_across_head", False)
    normed, output_normed = settings.get("qk_norm", False), settings.get("use_output_norm", False)
    shifted = {"k": settings.get("use_k_shift", False), "v": settings.get("use_v_shift", False)}
    if shifted["k"] != shifted["v"]:
        raise ValueError(f"config.json: use_k_shift and use_v_shift must agree, got {shifted['k']} and {shifted['v']}")
    gated = settings.get("use_output_gate", False)
    activation = settings.get("ogate_act", "sigmoid")
    options: dict[str, Any] = {
        "num_kv_heads": G, "kv_shift": shifted["k"],
        "output_gate": ("swish" if activation == "silu" else activation) if gated else "none",
    }  # fmt: skip
    if normed:
        options |= {"qk_norm": "rms", "qk_norm_shared": shared, "qk_norm_eps": QK_NORM_EPS}
    if output_normed:
        options |= {"output_norm": "rms", "output_norm_eps": eps}
    gate, base = GATES[kind], float(settings.get("rope_base", 500_000.0))
    variant = "fox" if gate else "rope" if rotates else "nope"
    if gate:
        options |= {"gate": gate} | ({"rotary": base} if rotates else {})
        tolerance = settings.get("log_pruning_tolerance")
        options |= {} if tolerance is None else {"acp": {"eps": math.exp(tolerance)}}
    elif rotates:
        options["theta"] = base
    config = ModelConfig(
        attention=variant,
        attention_options=options,
        hidden_size=D,
        num_layers=L,
        num_heads=H,
        intermediate_size=mlp_size(settings),
        vocab_size=settings["vocab_size"],
        tie_embeddings=settings.get("tie_word_embeddings", False),
        norm_eps=eps,
        initializer_range=settings.get("initializer_range", 0.02),
    )

    def turned(rows: Tensor, heads: int) -> Tensor:
        return interleaved(rows, heads) if rotates else rows

    def attention(take: Callable[[str], Tensor], index: int) -> Iterator[tuple[str, Tensor]]:
        yield "q_proj.weight", turned(take("q_proj.weight"), H)
        for name, is_shifted in shifted.items():
            weight = take(f"{name}_proj.linear.weight" if is_shifted else f"{name}_proj.weight")
            yield f"{name}_proj.weight", turned(weight, G) if name == "k" else weight
            if is_shifted:
                yield f"{name}_shift.proj.weight", take(f"{name}_proj.shift_proj.weight")
        if normed:
            for name, heads in (("q_norm.weight", H), ("k_norm.weight", G)):
                weight = turned(take(name), 1 if shared else heads)
                yield name, weight if shared else weight.unflatten(0, (heads, -1))
        if gate == "forget":
            for part in ("weight", "bias"):
                yield f"gate.forget_proj.{part}", take(f"fgate_proj.{part}")
        elif gate:
            yield "gate.forget_bias", take("fgate_bias")
        elif rotates:
            yield "gate.angle", rotary_angles(D // H, base)
        if output_normed:
            yield "output_norm.weight", take("output_norm.weight").unflatten(0, (H, -1))
        if gated:
            yield "output_gate.weight", take("ogate_proj.weight")
        yield "o_proj.weight", take("o_proj.weight")

    def weights(theirs: Weights) -> Iterator[tuple[str, Tensor]]:
        return decoder(theirs, FLA, L, attention, config.tie_embeddings)

    return Peer(config, weights)
