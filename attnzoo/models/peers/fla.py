"""Mappings of flash-linear-attention's models (Yang and Zhang, 2024; release 0.6), named after its classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import FLA, Attention, Named, Take, common_sizes, interleaved, mapped
from attnzoo.models.peers.settings import Settings

NORM_EPS = 1e-5  # default of its norms


def forgetting_transformer(settings: Settings) -> Peer:
    """FoX: the forget gate `f_proj`, QK-norm per head and a sigmoid output gate where they are on."""
    settings.only("window_size", None)
    return _softmax(settings, "fox", {}, "g_proj", ("gate.forget_proj", "f_proj"))


def wall_transformer(settings: Settings) -> Peer:
    """Wall with its gates per channel, and with a scalar gate beside them where `use_scalar_gate` is on."""
    window = {"window": settings.optional("window_size", "int")}
    if settings.get("use_scalar_gate", False):
        names = (("gate.members.0.channel_proj", "g_proj"), ("gate.members.1.forget_proj", "gs_proj"))
        return _softmax(settings, "gated_wall", window, "o_gate_proj", *names)
    options = {"gate_rank": None, "temperature": 1.0, **window}
    return _softmax(settings, "wall", options, "o_gate_proj", ("gate.up", "g_proj"))


def _softmax(settings: Settings, variant: str, options: dict[str, Any], output: str, *gates: tuple[str, str]) -> Peer:
    """The mapping shared by the softmax models: `output` names their output gate, `gates` pairs our and their gate
    projections."""
    H, G = _heads(settings)
    biases, normed, gated = (settings.get(name, False) for name in ("qkv_bias", "qk_norm", "use_output_gate"))
    options = options | {"num_kv_heads": G, "qkv_bias": biases, "output_gate": "sigmoid" if gated else "none"}
    if normed:
        options |= {"qk_norm": "rms", "qk_norm_eps": NORM_EPS}

    def attention(take: Take, index: int) -> Named:
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{name}.weight", take(f"{name}.weight")
            if biases:
                yield f"{name}.bias", take(f"{name}.bias")
        if normed:
            yield "q_norm.weight", take("q_norm.weight").unflatten(0, (H, -1))
            yield "k_norm.weight", take("k_norm.weight").unflatten(0, (G, -1))
        for ours, theirs in gates:
            yield f"{ours}.weight", take(f"{theirs}.weight")
            yield f"{ours}.bias", take(f"{theirs}.bias")
        if gated:
            yield "output_gate.weight", take(f"{output}.weight")
        yield "o_proj.weight", take("o_proj.weight")

    return _peer(settings, variant, options, attention)


def path_attn(settings: Settings) -> Peer:
    """PaTH, and PaTH-FoX where `use_forget_gate` is on: there its log gate is scaled by K^(-1/2), and so is ours."""
    H, G = _heads(settings)
    K = settings["hidden_size"] // H
    forgets = settings.get("use_forget_gate", False)
    low_rank, convolved = settings.get("use_low_rank_w", True), settings.get("use_w_shortconv", True)
    options: dict[str, Any] = {
        "num_kv_heads": G, "w_rank": 32 if low_rank else G * K, "w_conv_size": 3 if convolved else 0,
    }  # fmt: skip
    gate = "gate.members.0" if forgets else "gate"
    notes: tuple[str, ...] = ()
    if forgets:
        options["scale_forget"] = True
        notes = ("PaTH-FoX: the log gate is multiplied by K^(-1/2), as flash-linear-attention does",)

    def attention(take: Take, index: int) -> Named:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{name}.weight", take(f"{name}.weight")
        if low_rank:
            yield f"{gate}.w_down.weight", take("w_proj.0.weight")
            yield f"{gate}.w_up.weight", take("w_proj.1.weight")
        else:
            yield f"{gate}.w_down.weight", take("w_proj.weight")
            yield f"{gate}.w_up.weight", torch.eye(G * K)
        if convolved:
            yield f"{gate}.w_conv.weight", take("w_conv1d.weight").squeeze(1)
        for part in ("weight", "bias"):
            yield f"{gate}.beta_proj.{part}", take(f"bt_proj.{part}")
            if forgets:
                yield f"gate.members.1.forget_proj.{part}", take(f"g_proj.{part}")

    return _peer(settings, "path_fox" if forgets else "path", options, attention, notes)


def delta_net(settings: Settings) -> Peer:
    """DeltaNet with short convolutions and SiLU, as it was published; the FoX paper's models have the same layers."""
    settings.only("norm_first", False)
    for name, value in (("use_short_conv", True), ("qk_activation", "silu"), ("qk_norm", "l2"), ("use_beta", True)):
        settings.only(name, value)
    settings.only("use_output_norm", True)
    gated = settings.get("use_gate", False)
    options = _expanded(settings, 1.0, 1.0) | {
        "conv_size": settings.get("conv_size", 4),
        "allow_neg_eigval": settings.get("allow_neg_eigval", False),
        "output_gate": "swish" if gated else "none",
        **_output_norm(settings),
    }

    def attention(take: Take, index: int) -> Named:
        yield from _convolved(take)
        yield "gate.beta_proj.weight", take("b_proj.weight")
        yield "output_norm.weight", take("o_norm.weight")
        if gated:
            yield "output_gate.weight", take("g_proj.weight")

    return _peer(settings, "deltanet", options, attention)


def gated_deltanet(settings: Settings) -> Peer:
    """Gated DeltaNet, with more value heads than key heads where `num_v_heads` says so."""
    settings.only("use_short_conv", True)
    gated, kind = settings.get("use_gate", True), settings.get("output_gate_activation", "swish")
    heads, options = _value_heads(settings, 256, 2.0)
    options["allow_neg_eigval"] = settings.get("allow_neg_eigval", False)
    options["output_gate"] = ("sigmoid" if kind == "sigmoid" else "swish") if gated else "none"

    def attention(take: Take, index: int) -> Named:
        return _gated_delta_rule(take, gated)

    return _peer(settings, "gated_deltanet", options, attention, heads=heads)


def _gated_delta_rule(take: Take, gated: bool) -> Named:
    """The weights of a layer of Gated DeltaNet, with an output gate where it is ``gated``."""
    yield from _convolved(take)
    yield from _decay(take)
    yield "gate.members.1.beta_proj.weight", take("b_proj.weight")
    yield "output_norm.weight", take("o_norm.weight")
    if gated:
        yield "output_gate.weight", take("g_proj.weight")


def gated_deltaproduct(settings: Settings) -> Peer:
    """DeltaProduct, and Gated DeltaProduct where `use_forget_gate` is on; its rows are ordered by factor, then by
    head."""
    settings.only("use_short_conv", True)
    gated, forgets = settings.get("use_output_gate", True), settings.get("use_forget_gate", False)
    K, H, n = settings.get("head_dim", 256), settings["num_heads"], settings.get("num_householder", 1)
    options: dict[str, Any] = {
        "head_dim": K, "value_dim": int(K * settings.get("expand_v", 2.0)), "conv_size": settings.get("conv_size", 4),
        "allow_neg_eigval": settings.get("allow_neg_eigval", False), "num_householder": n,
        "output_gate": "swish" if gated else "none", **_output_norm(settings),
    }  # fmt: skip
    gate = "gate.members.1" if forgets else "gate"

    def by_head(rows: Tensor) -> Tensor:
        grouped: Tensor = rows.unflatten(0, (n, H, -1))
        return grouped.transpose(0, 1).flatten(0, 2)

    def attention(take: Take, index: int) -> Named:
        for name, tensor in _convolved(take):
            yield name, by_head(tensor) if name[0] in "kv" else tensor
        if forgets:
            yield from _decay(take)
        yield f"{gate}.beta_proj.weight", by_head(take("b_proj.weight"))
        yield "output_norm.weight", take("o_norm.weight")
        if gated:
            yield "output_gate.weight", take("g_proj.weight")

    return _peer(settings, "gated_deltanet" if forgets else "deltanet", options, attention)


def comba(settings: Settings) -> Peer:
    """Comba: Gated DeltaNet with a multiple of the key taken off the query.

    There the key that erases is scaled by `decay` and then normed, which takes the scale away again (`ops/comba`); of
    that scale only the correction of the query is left.
    """
    settings.only("use_short_conv", True)
    for name in ("use_output_correction", "use_inner_decay"):
        settings.only(name, True, False)  # its model does not tell them to its layers, which have both
    gated = settings.get("use_output_gate", True)
    heads, options = _value_heads(settings, 256, 2.0)
    options |= {"query_correction": True, "output_gate": "sigmoid" if gated else "none"}

    def attention(take: Take, index: int) -> Named:
        yield from _gated_delta_rule(take, gated)
        yield "correction", take("D") * take("decay").sigmoid()

    return _peer(settings, "gated_deltanet", options, attention, heads=heads)


def kda(settings: Settings) -> Peer:
    """Kimi Delta Attention, with more value heads than key heads where `num_v_heads` says so."""
    for name, value in (("use_short_conv", True), ("safe_gate", False), ("lower_bound", None)):
        settings.only(name, value)
    heads, options = _value_heads(settings, 128, 1.0)
    options |= {"channel_rank": options["value_dim"], "allow_neg_eigval": settings.get("allow_neg_eigval", False)}

    def attention(take: Take, index: int) -> Named:
        yield from _convolved(take)
        yield "gate.members.0.channel_down.weight", take("f_proj.0.weight")
        yield "gate.members.0.channel_up.weight", take("f_proj.1.weight")
        yield "gate.members.0.channel_bias", take("dt_bias")
        yield "gate.members.0.log_a", take("A_log")
        yield "gate.members.1.beta_proj.weight", take("b_proj.weight")
        yield "output_norm.weight", take("o_norm.weight")
        for ours in ("0.weight", "1.weight", "1.bias"):
            yield f"output_gate.{ours}", take(f"g_proj.{ours}")

    return _peer(settings, "kda", options, attention, heads=heads)


def gla(settings: Settings) -> Peer:
    """GLA with gates per channel, an output norm and a swish output gate."""
    for name, value in (("use_gk", True), ("use_gv", False), ("clamp_min", None)):
        settings.only(name, value)
    H, G = _heads(settings)
    convolved = settings.get("use_short_conv", False)
    options = _expanded(settings, 0.5, 1.0) | _gated_output(settings) | _features(settings)
    options |= {"num_kv_heads": G, "conv_size": settings.get("conv_size", 4) if convolved else 0}

    def attention(take: Take, index: int) -> Named:
        yield from _convolved(take) if convolved else _plain(take)
        yield "gate.down.weight", take("gk_proj.0.weight")
        for part in ("weight", "bias"):  # one gate per query head, equal within a group
            rows = take(f"gk_proj.1.{part}").unflatten(0, (G, -1))
            yield f"gate.up.{part}", rows.repeat_interleave(H // G, 0).flatten(0, 1)
        yield from _swish_gate(take)

    return _peer(settings, "gla", options | {"gate_rank": 16, "temperature": 16.0}, attention)


def retnet(settings: Settings) -> Peer:
    """RetNet as implemented there: RoPE's rotary angles, and an RMS norm per head; `use_short_conv` has no effect."""
    H, G = _heads(settings)
    options = _expanded(settings, 1.0, 2.0) | _gated_output(settings) | _features(settings)
    options |= {"num_kv_heads": G, "rotary": 10_000.0, "rotary_angles": "rope"}
    settings.read.add("use_short_conv")

    def attention(take: Take, index: int) -> Named:
        for name, tensor in _plain(take):
            yield name, interleaved(tensor, H if name.startswith("q") else G) if name[0] in "qk" else tensor
        yield "gate.log_gamma", torch.log1p(-(2.0 ** (-5 - torch.arange(H))))
        yield from _swish_gate(take)

    return _peer(settings, "retnet", options, attention)


def _value_heads(settings: Settings, head_dim: int, expand_v: float) -> tuple[int, dict[str, Any]]:
    """The number of value heads, of which there may be more than of key heads, and options of their layers."""
    K, H = settings.get("head_dim", head_dim), settings["num_heads"]
    V, heads = int(K * settings.get("expand_v", expand_v)), settings.get("num_v_heads", H)
    sizes = {"head_dim": K, "value_dim": V, "num_qk_heads": None if heads == H else H}
    return heads, {**sizes, "conv_size": settings.get("conv_size", 4), **_output_norm(settings)}


def _peer(
    settings: Settings,
    name: str,
    options: dict[str, Any],
    attention: Attention,
    notes: tuple[str, ...] = (),
    heads: int | None = None,
) -> Peer:
    settings.only("hidden_act", "swish", "silu")
    settings.only("attn", None)
    settings.only("attnres_block_size", None)
    settings.only("elementwise_affine", True)
    settings.read.add("conv_size")  # without convolutions
    config = model_config(settings, name, options, heads or settings["num_heads"])
    return Peer(config, mapped(config, FLA, attention), notes)


def model_config(settings: Settings, variant: str, options: dict[str, Any], heads: int) -> ModelConfig:
    """The sizes from these models' field names, with one variant in all layers."""
    return ModelConfig(
        attention=variant, attention_options=options, num_heads=heads, intermediate_size=_mlp_size(settings),
        norm_eps=settings.get("norm_eps", 1e-6), **common_sizes(settings),
    )  # fmt: skip


def _mlp_size(settings: Settings) -> int:
    """The width inside the SwiGLU: as given, or `hidden_ratio` times 2/3 of the hidden size, rounded up to a multiple
    of 256."""
    given: int | None = settings.optional("intermediate_size", "int")
    ratio = settings.get("hidden_ratio", 4.0)
    return given or -(-int(settings["hidden_size"] * ratio * 2 / 3) // 256) * 256


def _heads(settings: Settings) -> tuple[int, int]:
    return settings["num_heads"], settings.get("num_kv_heads", settings["num_heads"])


def _expanded(settings: Settings, k: float, v: float) -> dict[str, Any]:
    """Head dimensions from `expand_k` and `expand_v`, whose defaults are `k` and `v`."""
    D, H = settings["hidden_size"], settings["num_heads"]
    K, V = (round(D * settings.get(name, value)) // H for name, value in (("expand_k", k), ("expand_v", v)))
    return {"head_dim": K, "value_dim": V}


def _output_norm(settings: Settings) -> dict[str, Any]:
    return {"output_norm": "rms", "output_norm_shared": True, "output_norm_eps": settings.get("norm_eps", 1e-6)}


def _gated_output(settings: Settings) -> dict[str, Any]:
    settings.only("use_output_gate", True)
    settings.only("elementwise_affine", True)
    return {"output_gate": "swish", **_output_norm(settings)}


def _features(settings: Settings) -> dict[str, Any]:
    settings.only("feature_map", None, "relu", "silu", "swish")
    name = settings.get("feature_map", "identity")
    return {"feature_map": "silu" if name == "swish" else name}


def _plain(take: Take) -> Named:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield f"{name}.weight", take(f"{name}.weight")


def _convolved(take: Take) -> Named:
    yield from _plain(take)
    for name in "qkv":
        yield f"{name}_conv.weight", take(f"{name}_conv1d.weight").squeeze(1)


def _decay(take: Take) -> Named:
    """The weights of Mamba-2's decay under our names, as the first of a gate's projections."""
    yield "gate.members.0.dt_proj.weight", take("a_proj.weight")
    yield "gate.members.0.dt_bias", take("dt_bias")
    yield "gate.members.0.log_a", take("A_log")


def _swish_gate(take: Take) -> Named:
    yield "output_norm.weight", take("g_norm_swish_gate.weight")
    yield "output_gate.weight", take("g_proj.weight")
