"""flash-linear-attention's models, and the FoX authors', imported: the logits of their own classes, without kernels.

The authors' package is not on PyPI: `pip install git+https://github.com/zhixuan-lin/forgetting-transformer`, beside
transformers 5. Neither needs a GPU here; where theirs is missing, tests/models/test_import_fox.py has its equations.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from attnzoo.models.peers import Weights, from_peer, peer_of
from attnzoo.models.peers import build_peer as build_ours

pytestmark = pytest.mark.fla
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "intermediate_size": 96, "vocab_size": 70,
    "initializer_range": 0.2, "fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False, "use_cache": False,
}  # fmt: skip
MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 8, "chunk_size": 16}
CASES = {
    "fox": ("ForgettingTransformer", {"num_kv_heads": 2}),
    "fox, gated and normed": ("ForgettingTransformer", {"qk_norm": True, "use_output_gate": True, "qkv_bias": True}),
    "path": ("PaTHAttention", {"num_kv_heads": 2}),
    "path, full rank": ("PaTHAttention", {"use_low_rank_w": False, "use_w_shortconv": False}),
    "path_fox": ("PaTHAttention", {"use_forget_gate": True}),
    "deltanet": ("DeltaNet", {}),
    "deltanet, gated": ("DeltaNet", {"use_gate": True, "allow_neg_eigval": True, "expand_v": 2.0}),
    "gated_deltanet": ("GatedDeltaNet", {"head_dim": 16}),
    "gated_deltanet, more values": (
        "GatedDeltaNet",
        {"head_dim": 16, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.0},
    ),
    "gated_deltaproduct": (
        "GatedDeltaProduct",
        {"head_dim": 16, "num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True},
    ),
    "deltaproduct": ("GatedDeltaProduct", {"head_dim": 16, "num_householder": 3, "use_output_gate": False}),
    "comba": ("Comba", {"head_dim": 16}),
    "comba, more values": (
        "Comba",
        {"head_dim": 16, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.0, "use_inner_decay": False},
    ),
    "comba, bare": ("Comba", {"head_dim": 16, "use_output_gate": False, "use_output_correction": False}),
    "kda": ("KDA", {"head_dim": 16, "allow_neg_eigval": True}),
    "kda, more values": ("KDA", {"head_dim": 16, "num_heads": 2, "num_v_heads": 4, "expand_v": 0.5}),
    "gla": ("GLA", {"fuse_norm": True}),
    "gla, shared keys": ("GLA", {"fuse_norm": True, "num_kv_heads": 2, "use_short_conv": True}),
    "retnet": ("RetNet", {"fuse_norm": True}),
    "retnet, an option that nothing reads": ("RetNet", {"fuse_norm": True, "use_short_conv": True}),
    "mamba2": ("Mamba2", MAMBA),
    "mamba2, normed before the gate": ("Mamba2", {**MAMBA, "norm_before_gate": True, "use_conv_bias": False}),
    "mamba2, without a norm": ("Mamba2", {**MAMBA, "rmsnorm": False}),
    "wall": ("WallTransformer", {"num_kv_heads": 2}),
    "wall, gated and normed": ("WallTransformer", {"qk_norm": True, "use_output_gate": True}),
    "wall, with a scalar gate": ("WallTransformer", {"num_kv_heads": 2, "use_scalar_gate": True}),
}


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rms_norm(norm, x, residual=None, prenorm=False):
    x = x if residual is None else x + residual
    return (rms(x, norm.weight, norm.eps), x) if prenorm else rms(x, norm.weight, norm.eps)


def turned(rotary, q, k, *_, **__):
    K = q.shape[-1]
    angle = torch.arange(q.shape[1])[:, None] * rotary.base ** (-torch.arange(0, K, 2) / K)  # [T, K/2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return turn(q), turn(k)


def convolved(conv, x, **_):
    size = conv.weight.shape[-1]
    y = F.conv1d(F.pad(x.mT, (size - 1, 0)), conv.weight, conv.bias, groups=x.shape[-1]).mT
    return F.silu(y) if conv.activation in ("silu", "swish") else y, None


def by_heads(x):
    return x.transpose(1, 2)


@pytest.fixture
def plain(monkeypatch):
    """Each kernel of the peer's replaced by plain torch: its `naive` functions where it has them."""

    def naive(family):
        return importlib.import_module(f"fla.ops.{family}.naive")

    def replace(where, **functions):
        module = importlib.import_module(where)
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)

    def method(where, cls, function):
        monkeypatch.setattr(getattr(importlib.import_module(where), cls), "forward", function)

    def fox(q, k, v, g, **_):
        return naive("forgetting_attn").naive_forgetting_attn(q, k, v, g)

    def path(q, k, v, w, beta, g, **_):
        g = torch.zeros(*q.shape[:3]) if g is None else g
        return naive("path_attn").naive_path_attn(q, k, v, w, beta, g, q.shape[-1] ** -0.5), None

    def delta(q, k, v, beta, **_):
        o, _ = naive("delta_rule").delta_rule_recurrence(*map(by_heads, (unit(q), unit(k), v, beta)))
        return by_heads(o), None

    def gated_delta(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval=False, **_):
        g = -A_log.exp() * F.softplus(g + dt_bias)
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        q, k = (unit(x).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return naive("gated_delta_rule").naive_recurrent_gated_delta_rule(q, k, v, beta, g)

    def kda(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval=False, **_):
        g = -A_log.exp()[:, None] * F.softplus(g + dt_bias.unflatten(0, g.shape[2:]))
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        return naive("kda").naive_recurrent_kda(unit(q), unit(k), v, g, beta)

    def comba(q, k, v, p, g, beta, **_):
        q, k, p = (unit(x).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k, p))
        return naive("comba").naive_recurrent_comba(q, k, v, p, beta, g)

    def product(q, k, v, g, beta, **_):
        g = torch.zeros_like(beta) if g is None else g
        return naive("gated_delta_rule").naive_recurrent_gated_delta_rule(unit(q), unit(k), v, beta, g)

    def gla(q, k, v, g=None, gk=None, **_):
        return naive("gla").naive_recurrent_gla(q, k, v, g if gk is None else gk)

    def retention(q, k, v, **_):
        return by_heads(naive("retention").naive_retention(*map(by_heads, (q, k, v)))), None

    def wall(q, k, v, g, g_scalar=None, window_size=None, **_):
        naive_wall, scale = naive("wall_attn").naive_wall_attn, q.shape[-1] ** -0.5
        return naive_wall(q, k, v, g, scale=scale, window_size=window_size, g_scalar=g_scalar)

    def gated_norm(norm, x, g, **_):
        return rms(x, norm.weight, norm.eps) * (g.sigmoid() if norm.activation == "sigmoid" else F.silu(g))

    def group_norm(norm, x):
        return rms(x.unflatten(-1, (norm.num_groups, -1)), 1, norm.eps).flatten(-2) * norm.weight

    def gated_group_norm(norm, x, z):
        x = x if norm.norm_before_gate else x * F.silu(z)
        x = rms(x.unflatten(-1, (-1, norm.group_size)), 1, norm.eps).flatten(-2) * norm.weight
        return x * F.silu(z) if norm.norm_before_gate else x

    def norm_linear(x, weight, bias, linear, linear_bias, eps=1e-6, **_):
        return rms(x, weight, eps) @ linear.T

    layers = "fla.layers."
    replace(layers + "forgetting_attn", parallel_forgetting_attn=fox)
    replace(layers + "path_attn", parallel_path_attn=path, l2_norm=lambda x, **_: unit(x))
    replace(layers + "delta_net", chunk_delta_rule=delta, fused_recurrent_delta_rule=delta)
    replace(
        layers + "gated_deltanet", chunk_gated_delta_rule=gated_delta, fused_recurrent_gated_delta_rule=gated_delta,
        causal_conv1d=lambda x, weight, **_: (F.silu(F.conv1d(
            F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], groups=x.shape[-1]).mT), None),
    )  # fmt: skip
    replace(layers + "gated_deltaproduct", fused_recurrent_gated_delta_rule=product)
    replace(layers + "kda", chunk_kda=kda, fused_recurrent_kda=kda)
    replace(layers + "comba", chunk_comba=comba, fused_recurrent_comba=comba)
    replace(layers + "gla", chunk_gla=gla, fused_recurrent_gla=gla)
    replace(layers + "multiscale_retention", chunk_retention=retention, fused_recurrent_retention=retention)
    replace(layers + "wall_attn", parallel_wall_attn=wall)
    replace("fla.ops.wall_attn.naive", chunk_global_cumsum=lambda x, scale=1.0, **_: x.cumsum(1) * scale)
    replace("fla.modules.mlp", swiglu=lambda x, y: F.silu(x) * y)
    replace(
        layers + "hgrn2", fused_recurrent_gla=gla, chunk_gla=gla, rms_norm_linear=norm_linear, swish=F.silu,
    )  # fmt: skip
    monkeypatch.setitem(importlib.import_module(layers + "mamba2").ACT2FN, "silu", F.silu)
    method("fla.modules.layernorm_gated", "RMSNormGated", gated_group_norm)
    method("fla.modules", "ShortConvolution", convolved)
    method("fla.modules", "RotaryEmbedding", turned)
    method("fla.modules", "FusedRMSNormGated", gated_norm)
    method("fla.modules", "GroupNorm", group_norm)
    method("fla.modules", "RMSNorm", rms_norm)


def build(name, options, package="fla.models"):
    models = importlib.import_module(package)
    torch.manual_seed(0)
    theirs = getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**{**SIZES, **options})).eval()
    for parameter in theirs.parameters():  # norms and biases that do something
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return theirs


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_peers(case, plain):
    theirs = build(*CASES[case])
    tokens = torch.randint(1, 70, (2, 64))
    with torch.no_grad():
        expected = theirs(tokens).logits
        ours = from_peer(theirs)(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    left = [note for note in peer_of(theirs.config.to_dict()).notes if "not read" in note]
    assert left == (
        ["config.json: intermediate_size: not read, as nothing here is like it"] if "mamba2" in case else []
    )


OFFICIAL = {
    "delta_net": ("DeltaNet", {}),
    "hgrn2": ("HGRN2", {"expand_ratio": 16, "norm_eps": 1e-6}),
    "hgrn2, convolved": ("HGRN2", {"expand_ratio": 16, "norm_eps": 1e-6, "use_short_conv": True}),
}


@pytest.mark.parametrize("case", OFFICIAL)
def test_logits_of_the_fox_papers_baselines_are_the_peers(case, plain):
    """They differ in two names: one matrix for both halves of the MLP, and lower bounds that no layer is given."""
    name, options = OFFICIAL[case]
    theirs = build(name, {**options, "use_lower_bound": False} if name == "HGRN2" else options)
    tokens = torch.randint(1, 70, (2, 33))
    state = theirs.state_dict()
    for i in range(2):
        gate, up = (f"model.layers.{i}.mlp.{part}_proj.weight" for part in ("gate", "up"))
        state[gate] = torch.cat([state[gate], state.pop(up)])
    if name == "HGRN2":
        state["model.lower_bounds"] = torch.zeros(2, 64)
    fields = {**theirs.config.to_dict(), "model_type": f"{case.partition(',')[0]}-project_fox"}
    with torch.no_grad():
        expected = theirs(tokens).logits
        ours = build_ours(peer_of(fields), Weights.of_state(state))(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


FOX = "forgetting_transformer.ForgettingTransformer"
LLAMA = {"num_heads": 4, "intermediate_size": 48, "initializer_range": 0.2}
NORMED = {"qk_norm": True, "use_output_norm": True, "use_output_gate": True}
PRO = {**LLAMA, **NORMED, "qk_norm_share_param_across_head": True, "use_k_shift": True, "use_v_shift": True}
ROPE = {"fgate_type": "none", "use_rope": True}
DECAYS = {"fgate_bias_init": True, "decay_time_min": 2.0, "decay_time_max": 50.0}
AUTHORS = {
    "fox-pro": (FOX, PRO),
    "fox-pro, norms per head": (FOX, {**PRO, "qk_norm_share_param_across_head": False}),
    "fox-pro, with RoPE": (FOX, {**PRO, "use_rope": True}),
    "fox-llama": (FOX, LLAMA),
    "fox-llama, pruned": (FOX, {**LLAMA, "log_pruning_tolerance": -20.0}),
    "fox, with a swish gate": (FOX, {**LLAMA, "use_output_gate": True, "ogate_act": "silu"}),
    "fox, gates without data": (FOX, {**LLAMA, **DECAYS, "fgate_type": "bias_only"}),
    "fox, fixed gates": (FOX, {**LLAMA, **DECAYS, "fgate_type": "fixed"}),
    "transformer-pro": (FOX, {**PRO, **ROPE}),
    "transformer-llama": (FOX, {**LLAMA, **ROPE}),
    "transformer, with windows": ("transformer.Transformer", {**LLAMA, "use_rope": True, "window_size": 5}),
    "delta_net": ("delta_net.DeltaNet", {**LLAMA, "num_heads": 2}),
    "hgrn2": ("hgrn2.HGRN2", {**LLAMA, "num_heads": 2, "expand_ratio": 16}),
    # their definition without kernels adds up the wrong states from a third chunk on
    "mamba2": ("mamba2.Mamba2", {**MAMBA, "n_groups": 1, "chunk_size": 17}),
}


@pytest.fixture
def authors(plain, monkeypatch):
    """The FoX authors' package, whose layers take older kernels of flash-linear-attention: heads first, one output."""
    monkeypatch.setattr(importlib.import_module("fla.modules.l2norm"), "l2_norm_fn", unit, raising=False)
    models = "forgetting_transformer.model."
    pytest.importorskip("forgetting_transformer", reason="the FoX authors' package is not installed")

    def attend(q, k, v, log_fgate=None, window=None, **_):
        """softmax(q k^T / sqrt(K) + sums of log gates) v over [B, H, T, K], a causal window of it."""
        scores = q @ k.mT * q.shape[-1] ** -0.5
        ago = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        if log_fgate is not None:
            c = log_fgate.cumsum(-1)
            scores = scores + c[..., :, None] - c[..., None, :]
        return scores.masked_fill((ago < 0) | (ago >= (window or len(ago))), float("-inf")).softmax(-1) @ v

    def flash(q, k, v, causal, window_size):
        return by_heads(attend(*map(by_heads, (q, k, v)), window=window_size[0] + 1))

    def shifted(x, before, now):
        return before[..., None] * F.pad(x, (0, 0, 0, 0, 1, -1)) + now[..., None] * x

    def gated_linear(act):
        return lambda x, y, weight, bias: F.linear(act(x) * y, weight, bias)

    def delta(q, k, v, beta, **_):
        return importlib.import_module("fla.ops.delta_rule.naive").delta_rule_recurrence(q, k, v, beta)

    def gla(q, k, v, g, **_):
        naive = importlib.import_module("fla.ops.gla.naive").naive_recurrent_gla
        o, state = naive(*map(by_heads, (q, k, v, g)))
        return by_heads(o), state

    def grouped(norm, x, g=None, **_):
        o = rms(x.unflatten(-1, (norm.num_groups, -1)), 1, norm.eps).flatten(-2) * norm.weight
        return o if g is None else o * {"sigmoid": torch.sigmoid, "silu": F.silu}[norm.activation](g)

    for name, functions in {
        "forgetting_transformer.modeling_forgetting_transformer": {
            "forgetting_attention": attend, "token_shift": shifted, "swiglu_linear": gated_linear(F.silu),
            "glu_linear": gated_linear(torch.sigmoid),
        },
        "transformer.modeling_transformer": {"flash_attn_func": flash, "swiglu_linear": gated_linear(F.silu)},
        "delta_net.modeling_delta_net": {"swiglu_linear": gated_linear(F.silu)},
        "delta_net.delta_net_layer": {"fused_recurrent_delta_rule": delta},
        "hgrn2.modeling_hgrn2": {"swiglu_linear": gated_linear(F.silu)},
        "hgrn2.hgrn2_attention": {"chunk_gla": gla, "swish": F.silu},
        "mamba2.modeling_mamba2": {"RMSNormGated": importlib.import_module("fla.modules.layernorm_gated").RMSNormGated},
    }.items():  # fmt: skip
        for function in functions:
            monkeypatch.setattr(importlib.import_module(models + name), function, functions[function])
    own = importlib.import_module(models + "forgetting_transformer.modeling_forgetting_transformer")
    for part, forward in (("RMSNorm", rms_norm), ("GroupNorm", grouped), ("FusedGroupNormGated", grouped)):
        monkeypatch.setattr(getattr(own, part), "forward", forward)
    monkeypatch.setattr(own.RotaryEmbedding, "forward", turned)
    convolution = importlib.import_module("fla.modules").ShortConvolution
    monkeypatch.setattr(convolution, "forward", lambda conv, x, *_: convolved(conv, x)[0])


@pytest.mark.parametrize("case", AUTHORS)
def test_logits_are_those_of_the_fox_authors_own_classes(case, authors):
    where, options = AUTHORS[case]
    module, name = where.split(".")
    theirs = build(name, {"fuse_cross_entropy": False, **options}, f"forgetting_transformer.model.{module}")
    tokens = torch.randint(1, 70, (2, 33))
    with torch.no_grad():
        expected = theirs(tokens).logits
        ours = from_peer(theirs)(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
