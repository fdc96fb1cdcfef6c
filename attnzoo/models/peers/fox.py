"""Mappings of the Forgetting Transformer authors' models (Lin et al., 2025; their repository at commit 883f260)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from attnzoo.layer.gates.matrix import rotary_angles
from attnzoo.models.peers import Peer
from attnzoo.models.peers.fla import model_config
from attnzoo.models.peers.layout import FLA, Named, Take, interleaved, mapped
from attnzoo.models.peers.settings import Settings

GATES = {"full": "forget", "bias_only": "independent", "fixed": "fixed", "none": None}
QK_NORM_EPS = 1e-5


def transformer(settings: Settings) -> Peer:
    """The authors' Transformer class: `rope` or `nope`, perhaps with a window."""
    of_fox = {"fgate_type": "none", "qk_norm_share_param_across_head": True, "use_rope": settings.get("use_rope", True)}
    return forgetting_transformer(settings.beside(of_fox))


def hgrn2(settings: Settings) -> Peer:
    """HGRN2: `gla` whose keys are 1 - f. Its lower bounds are never passed to the layers in that code, so all are 0."""
    settings.only("elementwise_affine", True)
    settings.only("hidden_act", "swish", "silu")
    D, eps = settings["hidden_size"], settings.get("norm_eps", 1e-6)
    H = settings.get("num_heads", D // settings.get("expand_ratio", 128))
    convolved = settings.get("use_short_conv", False)
    options: dict[str, Any] = {
        "block": "hgrn2", "lower_bounds": False, "head_dim": settings.get("expand_ratio", D // H), "value_dim": D // H,
        "output_norm_eps": eps,
    }  # fmt: skip
    if convolved:
        options |= {"conv_size": settings.get("conv_size", 4), "conv_activation": "identity"}
    config = model_config(settings, "gla", options, H)

    def attention(take: Take, index: int) -> Named:
        for ours, theirs in (("q", "q"), ("k", "f"), ("v", "i")):
            yield f"{ours}_proj.weight", take(f"{theirs}_proj.weight")
            if convolved:
                yield f"{ours}_conv.weight", take(f"{theirs}_conv1d.weight").squeeze(1)
        yield "output_norm.weight", take("g_norm.weight").unflatten(0, (H, -1))
        yield "o_proj.weight", take("o_proj.weight")

    weights = mapped(config, FLA, attention, left_out=lambda name: name == "model.lower_bounds")
    return Peer(config, weights, ("HGRN2: its layers are given no lower bounds, as in the authors' code",))


def forgetting_transformer(settings: Settings) -> Peer:
    """FoX and the Transformer baselines, Pro or LLaMA: `fox`, or without a forget gate `rope` or `nope`."""
    for name, value in (("attention_bias", False), ("elementwise_affine", True)):
        settings.only(name, value)
    settings.only("hidden_act", "swish", "silu")
    kind = settings.get("fgate_type", "full")
    if kind not in GATES:
        settings.only("fgate_type", *GATES)
    if kind != "none":
        settings.only("window_size", None)
    D, H = settings["hidden_size"], settings["num_heads"]
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
        tolerance = settings.optional("log_pruning_tolerance", "float", least=-math.inf)
        options |= {} if tolerance is None else {"acp": {"eps": math.exp(tolerance)}}
    elif rotates:
        options["theta"] = base
    if "window_size" in settings:
        options["window"] = settings["window_size"]
    config = model_config(settings, variant, options, H)

    def turned(rows: Tensor, heads: int) -> Tensor:
        return interleaved(rows, heads) if rotates else rows

    def attention(take: Take, index: int) -> Named:
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

    return Peer(config, mapped(config, FLA, attention))
