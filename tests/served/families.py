"""Small models of every family that is served, and their greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig
from attnzoo.models.hf import AttnzooForCausalLM

VOCABULARY = 256
# as the import of such models makes them
QWEN_LINEAR = {"num_qk_heads": 2, "head_dim": 16, "value_dim": 24, "conv_size": 4, "output_norm_shared": True}
QWEN_ROPE = {
    "name": "rope",
    "options": {"num_kv_heads": 1, "head_dim": 32, "qk_norm": "rms", "qk_norm_shared": True, "output_gate": "sigmoid"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "fox": {"attention": "fox"},
    "fox_pro": {"attention": "fox", "attention_options": {"block": "pro", "num_kv_heads": 2}},
    "fox_window": {"attention": "fox", "attention_options": {"window": 40, "kv_shift": True}},
    "nope": {"attention": "nope", "tie_embeddings": True},
    "alibi": {"attention": "alibi", "attention_options": {"num_kv_heads": 1}},
    "alibi_independent": {"attention": "alibi", "attention_options": {"gate": "independent", "output_norm": "rms"}},
    "rope": {"attention": "rope", "attention_options": {"num_kv_heads": 2, "qk_norm": "rms", "theta": 1e4}},
    "rope_softcap": {"attention": "rope", "attention_options": {"softcap": 3.0, "value_dim": 32, "qkv_bias": True}},
    "rope_selective": {"attention": "rope", "attention_options": {"gate": "selective", "num_kv_heads": 2}},
    "fox_rope": {"attention": "fox_rope"},
    "fox_rope_rotary": {
        "attention": "fox_rope",
        "attention_options": {"gate": ["rotary", "forget"], "block": "pro", "num_kv_heads": 2},
    },
    "hybrid": {
        "attention": [
            {"name": "rope", "options": {"window": 40, "sinks": True}},
            {"name": "fox", "options": {"block": "pro"}},
            {"name": "nope", "norm": "after"},
        ]
    },
    "linear": {
        "attention": [
            *("linear_attention", "retnet", "mamba2", "gla", "complex_linear"),
            *("deltanet", "gated_deltanet", "kda", "mamba3"),
        ]
    },
    "linear_products": {
        "attention": [
            *("gated_gla", "rope_deltanet", "rope_gated_deltanet", "rope_gla", "rope_gated_gla"),
            *("gated_kda", "rope_kda", "rope_gated_kda"),
        ]
    },
    "linear_parts": {
        "attention": [
            {"name": "gla", "options": {"block": "hgrn2"}},
            {"name": "deltanet", "options": {"num_householder": 3, "conv_size": 4}},
            {"name": "gated_deltanet", "options": {"num_householder": 2}},
            {"name": "mamba2", "options": {"block": "gated", "skip": True, "num_qk_heads": 1}},
            {"name": "retnet", "options": {"rotary": 10000.0, "block": "pro"}},
            {"name": "mamba3", "options": {"trapezoid": True, "qk_bias": True, "head_dim": 16}},
            {"name": "gated_deltanet", "options": {"query_correction": True}},
        ]
    },
    "rwkv7": {
        "attention": "rwkv7",
        "num_layers": 3,
        "attention_options": {"value_residual": 3},
        "mlp_mix": True,
        "mlp_gated": False,
        "mlp_activation": "relu2",
        "embedding_norm": True,
        "norm_kind": "layer",
    },
    "heads_of_keys": {  # unlike from layer to layer, of odd sizes
        "attention": [
            {"name": "fox", "options": {"block": "pro", "num_kv_heads": 2, "head_dim": 10, "value_dim": 22}},
            {"name": "mamba2", "options": {"head_dim": 12, "value_dim": 20, "num_qk_heads": 2}},
            {"name": "rope", "options": {"num_kv_heads": 3, "head_dim": 14, "window": 70}},
            {"name": "gated_deltanet", "options": {"head_dim": 18, "value_dim": 22}},
            {"name": "fox_rope", "options": {"gate": ["selective", "forget"], "num_kv_heads": 1}},
        ],
        "num_heads": 6,
        "hidden_size": 60,
    },
    "linear_and_fox": {"attention": ["mamba2", {"name": "fox", "options": {"block": "pro"}}, "gated_deltanet"]},
    "qwen3_next": {"attention": [*[{"name": "gated_deltanet", "options": QWEN_LINEAR}] * 3, QWEN_ROPE]},
}


def build(family: str) -> LanguageModel:
    """A model of the family with weights that make attention and every part of it matter."""
    settings = FAMILIES[family]
    layers = len(settings["attention"]) if isinstance(settings["attention"], list) else 2
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_layers": layers, "num_heads": 4, "vocab_size": VOCABULARY}
    model = LanguageModel(ModelConfig(**{**sizes, **settings})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter *= 4
            elif "forget_proj" in name:
                parameter.uniform_(0, 4)
            else:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def export(model: LanguageModel, folder: Path, **options: Any) -> str:
    """The folder that `attnzoo export` writes of a model, without a tokenizer."""
    AttnzooForCausalLM.of(model, **options).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def wrong(model: LanguageModel, prompt: list[int], tokens: list[int]) -> str:
    """What the model would have said in place of the first of ``tokens`` that is not its own; "" if all are."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for place, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        best = int(row.argmax())
        if best != token:
            return f"token {place} after {len(prompt)}: {token}, not {best}, {float(row[best] - row[token]):.2g} below"
    return ""
