"""Models of the tests of generation, and what they generate alone."""

import torch
from layers import rows

from attnzoo.config import ModelConfig
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.layer.inplace import FixedCache
from attnzoo.models import LanguageModel
from attnzoo.registry import get, list_variants

LAYERS = {name: {"attention": name} for name in list_variants()} | {
    "hybrid": {"attention": ["gated_deltanet", "path_fox"]},
    "fox-pro-acp": {"attention": "fox", "attention_options": {"block": "pro", "acp": True}},
    "fox-window-sinks": {"attention": "fox", "attention_options": {"window": 5, "sinks": True, "num_kv_heads": 1}},
    "path-fox-window-sinks": {
        "attention": "path_fox",
        "attention_options": {"window": 5, "sinks": True, "num_kv_heads": 1, "block": "pro"},
    },
    "rope-grouped": {"attention": "rope", "attention_options": {"num_kv_heads": 1, "window": 9}},
    "wall-grouped": {"attention": "wall", "attention_options": {"num_kv_heads": 1}},
    "mamba2-groups": {"attention": "mamba2", "attention_options": {"num_qk_heads": 1, "skip": True, "conv_size": 4}},
    "retnet-rotary": {"attention": "retnet", "attention_options": {"rotary": 10000.0}},
    "hgrn2": {"attention": "gla", "attention_options": {"block": "hgrn2"}},
    "rwkv7-model": {
        "attention": "rwkv7",
        "attention_options": {"value_residual": 3},
        "mlp_mix": True,
        "mlp_gated": False,
        "mlp_activation": "relu2",
        "embedding_norm": True,
        "norm_kind": "layer",
    },
    "trapezoid-latent": {
        "attention": [
            {"name": "mamba3", "options": {"head_dim": 8, "trapezoid": True, "qk_bias": True}},
            {"name": "rope", "options": {"kv_rank": 12, "shared_key_dim": 4, "rotated": 4}},
        ]
    },
}
LENGTHS = (3, 11, 1, 6)


def build(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "initializer_range": 0.3}
    model = LanguageModel(ModelConfig(**{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def alone(model, prompt, new):
    return model.generate(prompt[None], new, temperature=0)[0, len(prompt) :].tolist()


@torch.no_grad()
def filled(attn, lengths, tokens, paged=None, eight_bits=False):
    """A cache of a batch whose rows have seen so many tokens (0: idle), and those of its sequences alone."""
    like, batch, caches = attn.new_cache(), BatchRows.idle(len(lengths), eight_bits=eight_bits), []
    attn(rows(1, 1), cache=like)
    fixed = FixedCache.of(attn, like, batch, tokens, paged=paged)
    for row, T in enumerate(lengths):
        if T:
            caches.append(attn.new_cache())
            attn(rows(1, T, seed=row), cache=caches[-1])
            fixed.admit(row, caches[-1], tokens)
            batch.begin(row, T)
    return fixed, caches


def forgetful(name="fox", **options):
    """A model with one head per layer that forgets within some tokens, and one that never does."""
    layers = [{"name": n, "options": {"block": "pro", **(options if n == name else {})}} for n in (name, "mamba2")]
    model = build(attention=layers)
    with torch.no_grad():
        attention = model.attentions()[0]
        gate = attention.gate if name == "fox" else attention.gate.members[1]
        gate.forget_proj.weight.mul_(0.1)
        gate.forget_proj.bias.copy_(torch.tensor([-1.0, 12.0]))
    return model


def that_forgets(attention, forgetting=None, **options):
    """A model whose softmax layers forget about half of what they may."""
    names = [attention] if isinstance(attention, str) else attention
    given = {**options, "block": "pro", "forgetting": {"window": 3, "width": 8, **(forgetting or {})}}
    layers = [{"name": n, "options": given if get(n).side == "softmax" else {}} for n in names]
    model = build(attention=layers)
    with torch.no_grad():
        for layer in model.attentions():
            if layer.forget is not None and layer.forget.options.network == "decay":
                layer.forget.fade_bias.fill_(-2.0)
            elif layer.forget is not None:
                layer.forget.bias.fill_(2.5)
                layer.forget.out.sub_(layer.forget.out.mean()).mul_(8)
    return model
