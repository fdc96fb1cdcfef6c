"""The Forgetting Transformer's own models, imported: they compute what their papers' definitions do."""

from __future__ import annotations

import pytest
import torch

from attnzoo.models.decoder import LanguageModel
from attnzoo.models.peers import from_peer, peer_of
from attnzoo.models.swap import Unfilled


class OfficialFoX(torch.nn.Module):
    """One of the FoX paper's models (Lin et al., 2025, section 3 and appendices A, D and E) in plain torch.

    Its weights have the names and shapes of the authors' checkpoints.
    """

    def __init__(self, config):
        super().__init__()
        self.settings = dict(config)
        D, H, G, L = (config[name] for name in ("hidden_size", "num_heads", "num_kv_heads", "num_hidden_layers"))
        K, I = D // H, config["intermediate_size"]  # noqa: E741
        shapes = {"model.embeddings.weight": (70, D), "model.norm.weight": (D,), "lm_head.weight": (70, D)}
        for i in range(L):
            attn = {"q_proj.weight": (D, D), "o_proj.weight": (D, D)}
            for name in ("k", "v"):
                if config[f"use_{name}_shift"]:
                    attn |= {f"{name}_proj.linear.weight": (G * K, D), f"{name}_proj.shift_proj.weight": (G, D)}
                else:
                    attn |= {f"{name}_proj.weight": (G * K, D)}
            if config["fgate_type"] == "full":
                attn |= {"fgate_proj.weight": (H, D), "fgate_proj.bias": (H,)}
            elif config["fgate_type"] != "none":
                attn |= {"fgate_bias": (H,)}
            if config["qk_norm"]:
                one = config["qk_norm_share_param_across_head"]
                attn |= {"q_norm.weight": (K if one else D,), "k_norm.weight": (K if one else G * K,)}
            if config["use_output_norm"]:
                attn |= {"output_norm.weight": (D,)}
            if config["use_output_gate"]:
                attn |= {"ogate_proj.weight": (D, D)}
            layer = {f"attn.{name}": shape for name, shape in attn.items()}
            layer |= {"attn_norm.weight": (D,), "mlp_norm.weight": (D,)}
            layer |= {"mlp.gate_proj.weight": (2 * I, D), "mlp.down_proj.weight": (D, I)}
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        self.state = {
            name: torch.randn(shape) * 0.2 + (1.0 if len(shape) == 1 else 0.0) for name, shape in shapes.items()
        }

    def state_dict(self, *_, **__):
        return self.state

    @property
    def config(self):
        fields = {"model_type": "forgetting_transformer-project_fox", **self.settings}
        return type("Config", (), {"to_dict": lambda _: fields})()

    def forward(self, tokens):
        s, w = self.settings, self.state
        H, G = s["num_heads"], s["num_kv_heads"]

        def rms(x, weight, eps):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

        def turn(x):
            K = x.shape[-1]
            angle = torch.arange(x.shape[1])[:, None] * s["rope_base"] ** (-torch.arange(0, K, 2) / K)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        x = w["model.embeddings.weight"][tokens]
        for i in range(s["num_hidden_layers"]):

            def at(name, i=i):
                return w[f"model.layers.{i}.{name}.weight"]

            h = rms(x, at("attn_norm"), 1e-6)
            heads = {"q": (h @ at("attn.q_proj").T).unflatten(-1, (H, -1))}
            for name in ("k", "v"):
                if s[f"use_{name}_shift"]:
                    y = (h @ at(f"attn.{name}_proj.linear").T).unflatten(-1, (G, -1))
                    a = (h @ at(f"attn.{name}_proj.shift_proj").T).sigmoid()[..., None]
                    before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
                    heads[name] = a * before + (1 - a) * y
                else:
                    heads[name] = (h @ at(f"attn.{name}_proj").T).unflatten(-1, (G, -1))
            q, k, v = heads["q"], heads["k"], heads["v"]
            if s["qk_norm"]:
                scales = (at("attn.q_norm"), at("attn.k_norm"))
                if not s["qk_norm_share_param_across_head"]:
                    scales = (scales[0].view(H, -1), scales[1].view(G, -1))
                q, k = rms(q, scales[0], 1e-5), rms(k, scales[1], 1e-5)
            if s["use_rope"]:
                q, k = turn(q), turn(k)
            k, v = (y.repeat_interleave(H // G, 2) for y in (k, v))
            scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
            T = tokens.shape[1]
            if s["fgate_type"] != "none":
                if s["fgate_type"] == "full":
                    logit = h @ at("attn.fgate_proj").T + w[f"model.layers.{i}.attn.fgate_proj.bias"]
                else:
                    logit = w[f"model.layers.{i}.attn.fgate_bias"].expand(*tokens.shape, H)
                c = torch.nn.functional.logsigmoid(logit).cumsum(1).mT  # [B, H, T]
                scores = scores + c[..., :, None] - c[..., None, :]
            ago = torch.arange(T)[:, None] - torch.arange(T)
            scores = scores.masked_fill((ago < 0) | (ago >= (s.get("window_size") or T)), float("-inf"))
            o = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v)
            if s["use_output_norm"]:
                o = rms(o, at("attn.output_norm").view(H, -1), 1e-6)
            o = o.flatten(2)
            if s["use_output_gate"]:
                act = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}[s["ogate_act"]]
                o = o * act(h @ at("attn.ogate_proj").T)
            x = x + o @ at("attn.o_proj").T
            gate, up = (rms(x, at("mlp_norm"), 1e-6) @ at("mlp.gate_proj").T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ at("mlp.down_proj").T
        return rms(x, w["model.norm.weight"], 1e-6) @ w["lm_head.weight"].T


LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 70,
    "intermediate_size": 48, "norm_eps": 1e-6, "use_rope": False, "rope_base": 500_000.0, "qk_norm": False,
    "qk_norm_share_param_across_head": False, "use_k_shift": False, "use_v_shift": False, "use_output_norm": False,
    "use_output_gate": False, "ogate_act": "sigmoid", "fgate_type": "full",
}  # fmt: skip
PRO = {
    **LLAMA, "qk_norm": True, "qk_norm_share_param_across_head": True, "use_k_shift": True, "use_v_shift": True,
    "use_output_norm": True, "use_output_gate": True,
}  # fmt: skip
OFFICIAL = {
    "FoX (LLaMA)": LLAMA,
    "FoX (Pro)": PRO,
    "FoX (Pro), norms per head": {**PRO, "qk_norm_share_param_across_head": False, "num_kv_heads": 2},
    "FoX (Pro) with RoPE": {**PRO, "use_rope": True, "ogate_act": "silu"},
    "FoX, gates without data": {**LLAMA, "fgate_type": "bias_only"},
    "FoX, fixed gates": {**LLAMA, "fgate_type": "fixed"},
    "Transformer (LLaMA)": {**LLAMA, "fgate_type": "none", "use_rope": True},
    "Transformer (Pro)": {**PRO, "fgate_type": "none", "use_rope": True},
    "Transformer of its own class": {
        **LLAMA,
        "model_type": "transformer-project_fox",
        "fgate_type": "none",
        "use_rope": True,
        "qk_norm": True,
        "qk_norm_share_param_across_head": True,
        "num_kv_heads": 2,
    },
    "Transformer (LLaMA) with windows": {**LLAMA, "fgate_type": "none", "use_rope": True, "window_size": 5},
    "FoX (LLaMA), pruned": {**LLAMA, "log_pruning_tolerance": -40.0},
}


@pytest.mark.parametrize("case", OFFICIAL)
def test_logits_are_those_of_the_papers_models(case, rows):
    torch.manual_seed(0)
    theirs = OfficialFoX(OFFICIAL[case])
    expected = theirs(rows)
    if "model_type" in theirs.settings:  # whose configuration has fewer fields
        del theirs.settings["fgate_type"], theirs.settings["qk_norm_share_param_across_head"]
    ours = from_peer(theirs)
    torch.testing.assert_close(ours(rows).logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


WIDE = {"hidden_size": 1536, "num_hidden_layers": 24, "num_heads": 12, "vocab_size": 50257}
SHIFTED = {name: PRO[name] for name in PRO if name.startswith(("use_", "qk_norm"))}
PUBLISHED = {  # the paper's 760M models without the embedding, by the authors' classes
    "fox-pro": ({**WIDE, **SHIFTED, "num_heads": 24, "hidden_ratio": 3.5}, 759_441_984),
    "fox-llama": ({**WIDE, "num_heads": 24}, 757_632_576),
    "transformer-pro": ({**WIDE, **SHIFTED, "fgate_type": "none", "use_rope": True, "hidden_ratio": 3.5}, 757_675_008),
    "transformer-llama": ({**WIDE, "model_type": "transformer-project_fox"}, 756_747_264),
    "delta_net": ({**WIDE, "model_type": "delta_net-project_fox"}, 757_635_072),
    "hgrn2": ({**WIDE, "model_type": "hgrn2-project_fox"}, 756_820_992 - 24 * 1536),  # its bounds, which nobody uses
    "mamba2": (
        {**WIDE, "model_type": "mamba2-project_fox", "num_hidden_layers": 48, "num_heads": 48, "head_dim": 64,
         "state_size": 128, "n_groups": 1, "conv_kernel": 4}, 780_113_664,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name):
    fields, expected = PUBLISHED[name]
    with torch.device("meta"), Unfilled():
        model = LanguageModel(peer_of({"model_type": "forgetting_transformer-project_fox", **fields}).config)
    assert sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel() == expected
