"""A table for readers of what the import makes of each kind of model: `attnzoo import --list`."""

from __future__ import annotations

NORMS = "norms scale by 1 + w, rounded to the dtype of the weights"
ANGLES = "of angles that change with the length, those of the original context"
BECOMES = {  # model_type: the variants of its layers, and what differs
    "llama": ("rope", ANGLES),
    "mistral": ("rope with a window", ""),
    "qwen2": ("rope", ""),
    "qwen3": ("rope", ""),
    "phi3": ("rope", ANGLES),
    "olmo2": ("rope with norms after", ""),
    "olmo3": ("rope with norms after, three in four with a window", ANGLES),
    "smollm3": ("rope, nope", ""),
    "gemma": ("rope", NORMS),
    "gemma2": ("rope, in turn with a window, softcap and norms around", NORMS),
    "gemma3": ("rope, five in six with a window", f"without images; {NORMS}"),
    "gemma3_text": ("rope, five in six with a window", NORMS),
    "gpt2": ("nope with learned positions", ""),
    "qwen3_next": ("gated_deltanet, rope", NORMS),
    "qwen3_5": ("gated_deltanet, rope", f"without images; {NORMS}"),
    "qwen3_5_text": ("gated_deltanet, rope", NORMS),
    "olmo_hybrid": ("gated_deltanet, rope or nope", ""),
    "kimi_linear": ("kda, nope with latent keys", "without layers of experts"),
    "mamba2": ("mamba2", "several groups as its authors' kernels norm them"),
    "mamba3": ("mamba3", "one input per step, by the trapezoidal rule"),
    "forgetting_transformer-project_fox": ("fox", ""),
    "transformer-project_fox": ("rope", ""),
    "delta_net-project_fox": ("deltanet", ""),
    "hgrn2-project_fox": ("gla", ""),
    "mamba2-project_fox": ("mamba2", ""),
    "forgetting_transformer": ("fox", ""),
    "path_attn": ("path, path_fox", "the log gate times K^(-1/2), as there"),
    "delta_net": ("deltanet", ""),
    "gated_deltanet": ("gated_deltanet", ""),
    "gated_deltaproduct": ("deltanet, gated_deltanet", ""),
    "comba": ("gated_deltanet", "no decay of the erasing key, which its kernels norm away"),
    "kda": ("kda", ""),
    "gla": ("gla", ""),
    "retnet": ("retnet", ""),
    "wall_transformer": ("wall, gated_wall", ""),
    "rwkv7": ("rwkv7", ""),
}
