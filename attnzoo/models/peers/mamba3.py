"""Mamba-3 (Lahoti et al., 2026) of flash-linear-attention, as `mamba3` with the trapezoidal rule."""

from __future__ import annotations

from typing import Any

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import MAMBA, Named, Take, common_sizes, mapped
from attnzoo.models.peers.settings import Settings

SEVERAL = "is_mimo: expected False (a token has one input per step; without several, 'mamba3' loads), got True"


def mamba3(settings: Settings) -> Peer:
    """Mamba-3 with one input per step: B, C and x of the input projection are our k, q and v, and z the output gate."""
    settings.only("hidden_act", "silu", "swish")
    settings.only("use_bias", False)
    if settings.get("is_mimo", False):
        raise ValueError(f"{settings.place}{SEVERAL}")
    settings.read.add("mimo_rank")
    D, G = settings["hidden_size"], settings.get("n_groups", 1)
    K, V, eps = settings.get("state_size", 128), settings.get("head_dim", 64), settings.get("norm_eps", 1e-5)
    H = settings.get("num_heads", settings.get("expand", 2) * D // V)
    share, normed = settings.get("rope_fraction", 0.5), settings.get("is_outproj_norm", False)
    pairs = int(K * share) // 2
    options: dict[str, Any] = {
        "num_qk_heads": G, "head_dim": K, "value_dim": V, "qk_norm_eps": eps, "qk_bias": True, "trapezoid": True,
        "a_min": settings.get("A_floor", 1e-4), "rotated_share": share,
    }  # fmt: skip
    options |= {"output_norm": "rms", "output_norm_eps": eps} if normed else {}
    config = ModelConfig(
        attention="mamba3", attention_options=options, num_heads=H, intermediate_size=0, norm_eps=eps,
        **common_sizes(settings),
    )  # fmt: skip

    def attention(take: Take, index: int) -> Named:
        names = {
            "output_gate": H * V, "v_proj": H * V, "k_proj": G * K, "q_proj": G * K, "gate.dt_proj": H,
            "gate.a_proj": H, "gate.trap_proj": H, "gate.angle_proj": pairs,
        }  # fmt: skip
        for name, rows in zip(names, take("in_proj.weight").split(list(names.values())), strict=True):
            yield f"{name}.weight", rows
        yield "gate.dt_bias", take("dt_bias")
        for ours, theirs in (("k", "B"), ("q", "C")):
            yield f"{ours}_norm.weight", take(f"{theirs}_norm.weight")
            yield f"{ours}_bias", take(f"{theirs}_bias").squeeze(1)
        yield "skip", take("D")
        if normed:
            yield "output_norm.weight", take("norm.weight").unflatten(0, (H, V))
        yield "o_proj.weight", take("out_proj.weight")

    notes: tuple[str, ...] = ()
    if settings.get("residual_in_fp32", True):
        notes = ("Mamba-3: the sum over the layers has the dtype of the weights (residual_in_fp32 there: float32)",)
    return Peer(config, mapped(config, MAMBA, attention), notes)
