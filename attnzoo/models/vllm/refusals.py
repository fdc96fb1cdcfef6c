"""The layers that vLLM cannot serve, and why; known without vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.backends.sdpa import PARTS
from attnzoo.forms.linear import LinearForms
from attnzoo.layer.attention import Attention


def refusal(layer: Attention, dtype: torch.dtype) -> str:
    """The reason why vLLM cannot serve a layer, or ""."""
    variant, config = layer.variant, layer.config
    decays = "log_decay" in variant.requires
    if layer.forget is not None:
        return "One-Pass Forgetting evicts keys of single heads, and vLLM's pages hold all heads of a token"
    if variant.side == "linear":
        own = not isinstance(variant.form_set, LinearForms)
        return "its forms are its own, and what they remember is not known" if own else ""
    changing = [part for part in variant.requires if part not in PARTS]
    if changing:
        return f"later tokens change its cached keys ({', '.join(changing)}), and vLLM's pages hold keys as they came"
    if not isinstance(variant.form_set, AdditiveForms):
        return "its forms are its own, and vLLM computes softmax(q . k + bias) alone"
    if decays and layer.sinks is not None:
        return "a sink takes part in the softmax without a decay, and keys hold the decays without the row's own"
    if decays and config.softcap is not None:
        return "vLLM would cap scores with their decays, and softcap caps them without"
    if decays and dtype == torch.float16:
        return "float16 holds sums of log decays up to 65504 alone: expected --dtype bfloat16 or float32"
    return ""


def unserved(layers: Sequence[Attention], dtype: torch.dtype) -> str:
    """The first layer of a model that vLLM cannot serve, and why; "" where it can serve all."""
    for number, layer in enumerate(layers):
        if why := refusal(layer, dtype):
            return f"layer {number}: expected one that vLLM can serve, got {layer.variant.name!r}: {why}"
    return ""


def check_layers(layers: Sequence[Attention], dtype: torch.dtype) -> None:
    """Raise where vLLM cannot serve one of the layers of a model.

    Raises:
        ValueError: one that it cannot; the message names the layer and says why.
    """
    if why := unserved(layers, dtype):
        raise ValueError(why)
