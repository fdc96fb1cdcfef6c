"""Small models of transformers with random weights, of every kind that is imported."""

from __future__ import annotations

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 70, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500.0,
}  # fmt: skip
NEXT = {  # the second of three layers attends; larger weights make more of roundings, which differ between CPUs
    "initializer_range": 0.05,
    "num_experts": 0, "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
MAMBA = {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}
CASES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_next": ("Qwen3Next", NEXT),
    "qwen3_next, as many values": ("Qwen3Next", {**NEXT, "linear_num_value_heads": 2, "partial_rotary_factor": 0.5}),
    "mamba2": ("Mamba2", MAMBA),
    "mamba2, in groups": ("Mamba2", {**MAMBA, "n_groups": 3}),
    "mamba2, tied": ("Mamba2", {**MAMBA, "use_conv_bias": False, "tie_word_embeddings": True}),
    "qwen3, windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "head_dim": 16},
    ),
}

SCALED = {"original_max_position_embeddings": 16, "factor": 4.0, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", **SCALED}
SHORT = {"rope_type": "longrope", **SCALED, "original_max_position_embeddings": 256, "short_factor": [1.0, 1.5, 2.0],
         "long_factor": [3.0] * 3}  # fmt: skip
WINDOWS = {"sliding_window": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BEYOND = {"rope_type": "yarn", "original_max_position_embeddings": 16, "factor": 4.0, "attention_factor": 1.2}
STRETCHED = {"rope_type": "linear", "factor": 8.0}
LINEAR = "linear_attention"
HYBRID = {
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "pad_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.05,
}  # fmt: skip
KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 9,
    "linear_head_dim": 16, "linear_num_heads": 2, "mlp_layer_types": ["dense"] * 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "layer_types": [LINEAR, "full_attention"],
}  # fmt: skip
CASES |= {
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen3, yarn, other numbers": (
        "Qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": 9}),
    "phi3, half of the channels": (
        "Phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 256,
                 "max_position_embeddings": 1024, "rope_parameters": {**SHORT, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2, biases, yarn": ("Olmo2", {"attention_bias": True, "rope_parameters": YARN}),
    "olmo3": ("Olmo3", {**WINDOWS, "num_hidden_layers": 4, "rope_scaling": BEYOND, "rope_theta": 5e5}),
    "olmo3, other layers": (
        "Olmo3", {**WINDOWS, "layer_types": ["full_attention", "sliding_attention"], "rope_theta": 5e5},
    ),
    "gemma3": (
        "Gemma3Text", {**WINDOWS, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 30,
                       "rope_theta": 900.0, "rope_local_base_freq": 30.0, "rope_scaling": STRETCHED},
    ),
    "gemma3, capped": (
        "Gemma3Text", {**WINDOWS, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
                       "final_logit_softcapping": 3.0, "attention_bias": True},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": True}),
    "smollm3, windows": (
        "SmolLM3", {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1], "pad_token_id": 0},
    ),
    "smollm3, a list": ("SmolLM3", {"no_rope_layers": [0, 1], "pad_token_id": 0}),
    "olmo_hybrid": ("OlmoHybrid", {**HYBRID, "linear_num_value_heads": 4}),
    "olmo_hybrid, still": (
        "OlmoHybrid", {**HYBRID, "linear_allow_neg_eigval": False, "layer_types": ["full_attention", LINEAR],
                       "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "llama, biases of the MLP": ("Llama", {"mlp_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 30, "attn_logit_softcapping": 2.0,
                   "final_logit_softcapping": 3.0},
    ),
    "gemma2, other fields": (
        "Gemma2", {"head_dim": 16, "attention_bias": True, "layer_types": ["full_attention"] * 2,
                   "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
                   "rope_parameters": YARN},
    ),
    "gpt2": ("GPT2", {"n_positions": 64}),
    "gpt2, other fields": (
        "GPT2", {"n_inner": 40, "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True,
                 "scale_attn_weights": False, "reorder_and_upcast_attn": True, "tie_word_embeddings": False},
    ),
    "kimi_linear": ("KimiLinear", KIMI),
    "kimi_linear, as published": (
        "KimiLinear", {
            **{name: value for name, value in KIMI.items() if not name.endswith("layer_types")},
            "first_k_dense_replace": 2, "mla_use_nope": True,
            "linear_attn_config": {
                "full_attn_layers": [1], "kda_layers": [2], "head_dim": 12, "num_heads": 3, "short_conv_kernel_size": 3,
            },
        },
    ),
    "qwen3_5": ("Qwen3_5Text", {k: v for k, v in NEXT.items() if k != "num_experts"}),
}  # fmt: skip

old = int(transformers.__version__.split(".")[0]) < 5


def configuration(name, options):
    if old and "rope_parameters" in options:  # two fields there
        scaling = dict(options["rope_parameters"])
        options = {**options, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
        options.pop("rope_parameters")
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this transformers does not have it")
    try:
        return getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    except ValueError as error:
        if old and str(error).startswith("`rope_scaling` must be a dictionary"):
            pytest.skip(f"this transformers has no such angles for {name}")
        raise


def peer(name, options):
    torch.manual_seed(0)
    if options.get("n_groups", 1) > 1:
        from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

        if "group_size" not in inspect.signature(MambaRMSNormGated).parameters:
            pytest.skip("this transformers norms all groups together, its kernels and the authors' do not")
    config = configuration(name, options)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name.removesuffix('Text')}{head}")._from_config(
        config, attn_implementation="eager"
    )
    for parameter in model.parameters():  # norms and biases that do something
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()
