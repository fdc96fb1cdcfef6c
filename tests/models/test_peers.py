"""Layers beside other people's layers of the same name, on the same weights.

What is in transformers is taken from there; the others are written here from their papers' equations, in plain torch
with a loop over tokens.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peer_kernels import in_plain_torch
from torch import Tensor

from attnzoo import build_attention

D, H, T = 32, 4, 19
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    in_plain_torch(monkeypatch)
    torch.manual_seed(0)


def layer(name: str, **options: object):
    """A layer in float64 whose parameters are all random, norms and biases too."""
    attn = build_attention(name, **{"hidden_size": D, "num_heads": H, **options}).double()
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attn


def tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, T, D, dtype=torch.float64)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal convolution of each channel."""
    size = weight.shape[1]
    return F.silu(F.conv1d(F.pad(x.mT, (size - 1, 0)), weight[:, None], groups=x.shape[-1])).mT


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def heads(x: Tensor, count: int = H) -> Tensor:
    return x.unflatten(-1, (count, -1))


def test_deltanet_is_the_published_layer():
    """Yang et al., 2024, section 3.3 and figure 1: linear, convolution, SiLU; q and k of unit length; RMS norm."""
    attn, x = layer("deltanet"), tokens()
    q, k, v = (heads(convolved(getattr(attn, f"{n}_proj")(x), getattr(attn, f"{n}_conv").weight)) for n in "qkv")
    q, k, beta = unit(q), unit(k), attn.gate.beta_proj(x).sigmoid()
    S = x.new_zeros(len(x), H, D // H, D // H)
    out = []
    for t in range(T):
        old = torch.einsum("bhvk,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * (v[:, t] - old), k[:, t])
        out.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]) * (D // H) ** -0.5)
    expected = attn.o_proj(rms(torch.stack(out, 1), attn.output_norm.weight, 1e-6).flatten(2))
    assert torch.allclose(attn(x), expected, atol=1e-5, rtol=1e-5)


def test_kda_is_the_published_layer():
    """Kimi Team, 2025, section 4: as DeltaNet, with a decay per channel first and a sigmoid gate of low rank last."""
    attn, x = layer("kda"), tokens()
    q, k, v = (heads(convolved(getattr(attn, f"{n}_proj")(x), getattr(attn, f"{n}_conv").weight)) for n in "qkv")
    q, k = unit(q), unit(k)
    channel, delta = attn.gate.members
    step = F.softplus(channel.channel_up(channel.channel_down(x)) + channel.channel_bias)
    fade, beta = (-channel.log_a.exp()[:, None] * heads(step)).exp(), delta.beta_proj(x).sigmoid()
    S, out = x.new_zeros(len(x), H, D // H, D // H), []
    for t in range(T):
        S = S * fade[:, t, :, None]
        old = torch.einsum("bhvk,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * (v[:, t] - old), k[:, t])
        out.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]) * (D // H) ** -0.5)
    down, up = attn.output_gate
    assert down.out_features == D // H
    o = rms(torch.stack(out, 1), attn.output_norm.weight, 1e-6).flatten(2) * up(down(x)).sigmoid()
    assert torch.allclose(attn(x), attn.o_proj(o), atol=1e-5, rtol=1e-5)


def qwen3_next(value_heads: int):
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=H, linear_num_value_heads=value_heads, linear_key_head_dim=8,
        linear_value_head_dim=6, linear_conv_kernel_dim=4, num_hidden_layers=1, vocab_size=8, head_dim=8,
    )  # fmt: skip
    peer = Qwen3NextGatedDeltaNet(config, 0).double()
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return peer


@pytest.mark.parametrize("ratio", [1, 2])
def test_gated_deltanet_is_the_one_of_qwen3_next(ratio):
    """With more value heads than key heads too."""
    peer, x = qwen3_next(ratio * H), tokens()
    attn = layer(
        "gated_deltanet", num_heads=ratio * H, num_qk_heads=H, head_dim=8, value_dim=6, output_norm_shared=True
    )
    q, k, v, z = peer.in_proj_qkvz.weight.view(H, -1, D).split([8, 8, 6 * ratio, 6 * ratio], 1)
    b, a = peer.in_proj_ba.weight.view(H, -1, D).chunk(2, 1)
    q_conv, k_conv, v_conv = peer.conv1d.weight.squeeze(1).split([8 * H, 8 * H, 6 * H * ratio])
    weights = {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "output_gate.weight": z,
        "q_conv.weight": q_conv, "k_conv.weight": k_conv, "v_conv.weight": v_conv,
        "gate.members.1.beta_proj.weight": b, "gate.members.0.dt_proj.weight": a,
        "gate.members.0.dt_bias": peer.dt_bias, "gate.members.0.log_a": peer.A_log,
        "output_norm.weight": peer.norm.weight, "o_proj.weight": peer.out_proj.weight,
    }  # fmt: skip
    attn.load_state_dict({name: weight.reshape(attn.state_dict()[name].shape) for name, weight in weights.items()})
    assert torch.allclose(attn(x), peer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_the_published_block(groups):
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=D, num_heads=8, head_dim=8, state_size=16, n_groups=groups, expand=2, chunk_size=8, vocab_size=8,
        num_hidden_layers=1,
    )  # fmt: skip
    peer, x = Mamba2Mixer(config, 0).double(), tokens()
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    normed_together = getattr(peer.norm, "group_size", 64)
    attn = layer("mamba2", num_heads=8, head_dim=16, num_qk_heads=groups, output_norm_groups=64 // normed_together)
    z, v, k, q, dt = peer.in_proj.weight.split([64, 64, 16 * groups, 16 * groups, 8])
    weights = {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "output_gate.weight": z,
        "gate.dt_proj.weight": dt, "gate.dt_bias": peer.dt_bias, "gate.log_a": peer.A_log, "skip": peer.D,
        "output_norm.weight": peer.norm.weight.view(8, 8), "o_proj.weight": peer.out_proj.weight,
    }  # fmt: skip
    for kind in ("weight", "bias"):
        parts = getattr(peer.conv1d, kind).squeeze().split([64, 16 * groups, 16 * groups])
        weights |= {f"{name}_conv.{kind}": part for name, part in zip("vkq", parts, strict=True)}
    attn.load_state_dict(weights)
    assert torch.allclose(attn(x), peer(x), atol=1e-5, rtol=1e-5)


def test_mamba3_is_the_published_block_without_its_trapezoidal_rule():
    """Lahoti et al., 2026: each query and key turned by its own phase, in a loop as mamba_ssm's steps have it."""
    attn, x = layer("mamba3", num_heads=8, head_dim=16), tokens()
    q, k = (rms(getattr(attn, f"{n}_proj")(x), getattr(attn, f"{n}_norm").weight, 1e-5)[:, :, None] for n in "qk")
    v, gate = heads(attn.v_proj(x), 8), attn.gate
    dt = F.softplus(gate.dt_proj(x) + gate.dt_bias)
    decay = (-F.softplus(gate.a_proj(x)).clamp(min=1e-4) * dt).exp()
    step = torch.pi * dt[..., None] * gate.angle_proj(x).tanh()[:, :, None]
    S, phase, out = x.new_zeros(2, 8, 8, 16), x.new_zeros(2, 8, 4), []
    for t in range(T):
        phase = phase + step[:, t]
        turn = torch.polar(torch.ones_like(phase), phase)
        qt, kt = (x[:, t].expand(2, 8, 16).clone() for x in (q, k))
        for y in (qt, kt):  # half of the channels turn, in pairs that stand side by side
            y[..., :8] = torch.view_as_real(torch.view_as_complex(y[..., :8].unflatten(-1, (-1, 2))) * turn).flatten(-2)
        S = decay[:, t, :, None, None] * S + dt[:, t, :, None, None] * v[:, t, :, :, None] * kt[:, :, None]
        out.append((S * qt[:, :, None]).sum(-1))
    o = (torch.stack(out, 1) + attn.skip[:, None] * v).flatten(2) * F.silu(attn.output_gate(x))
    assert torch.allclose(attn(x), attn.o_proj(o), atol=1e-9, rtol=1e-9)


def interleaved(weight: Tensor, count: int) -> Tensor:
    """Rows of half-split rotations as pairs that stand side by side."""
    return weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def test_biases_are_those_of_qwen2():
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

    config = Qwen2Config(hidden_size=D, num_attention_heads=H, num_key_value_heads=2, attn_implementation="eager")
    peer = Qwen2Attention(config, 0).double()
    attn = layer("rope", num_kv_heads=2, qkv_bias=True, theta=10_000.0)
    weights = {
        f"{n}_proj.{kind}": interleaved(getattr(peer, f"{n}_proj").get_parameter(kind), count)
        for n, count in (("q", H), ("k", 2))
        for kind in ("weight", "bias")
    }
    attn.load_state_dict(weights, strict=False)
    for n in "vo":
        getattr(attn, f"{n}_proj").load_state_dict(getattr(peer, f"{n}_proj").state_dict())
    check_rotary(attn, peer, config)


def test_norm_over_the_full_width_is_the_one_of_olmo2():
    from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

    config = Olmo2Config(hidden_size=D, num_attention_heads=H, num_key_value_heads=2, attn_implementation="eager")
    peer = Olmo2Attention(config, 0).double()
    attn = layer("rope", num_kv_heads=2, qk_norm="rms_full", theta=10_000.0)
    for n, count in (("q", H), ("k", 2)):
        weight, norm = getattr(peer, f"{n}_proj").weight, getattr(peer, f"{n}_norm").weight
        getattr(attn, f"{n}_proj").weight.data = interleaved(weight, count).data
        getattr(attn, f"{n}_norm").weight.data = interleaved(norm, count).view(count, -1).data
    for n in "vo":
        getattr(attn, f"{n}_proj").load_state_dict(getattr(peer, f"{n}_proj").state_dict())
    attn.config.__dict__["qk_norm_eps"] = config.rms_norm_eps
    check_rotary(attn, peer, config)


def check_rotary(attn, peer, config) -> None:
    """``rope`` equals a peer of Hugging Face with its own angles."""
    x, position = tokens(), torch.arange(T, dtype=torch.float64)[:, None]
    angle = position * 10_000.0 ** (-torch.arange(0, D // H, 2, dtype=torch.float64) / (D // H))
    angle = torch.cat([angle, angle], -1)[None]
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = peer(x, position_embeddings=(angle.cos(), angle.sin()), attention_mask=mask)[0]
    assert torch.allclose(attn(x), expected, atol=1e-6, rtol=1e-6)


def test_retnet_is_the_published_layer():
    """Sun et al., 2023, section 2, with the angles and the RMS norm of the authors' code; values are twice as wide."""
    attn, x, K = layer("retnet"), tokens(), D // H
    assert attn.v_proj.out_features == attn.output_gate.out_features == 2 * D
    angle = 10_000.0 ** -torch.linspace(0, 1, K // 2, dtype=torch.float64)
    phase = torch.polar(torch.ones(T, K // 2).double(), torch.arange(T).double()[:, None] * angle)[:, None]
    q, k = (torch.view_as_complex(heads(p(x)).unflatten(-1, (-1, 2))) * phase for p in (attn.q_proj, attn.k_proj))
    scores = torch.einsum("bthk,bjhk->bhtj", q, k.conj()).real * K**-0.5
    gamma = 1 - 2.0 ** (-5 - torch.arange(H).double())
    distance = (torch.arange(T)[:, None] - torch.arange(T)).double()
    decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0.0)
    o = torch.einsum("bhtj,bjhv->bthv", scores * decay, heads(attn.v_proj(x)))
    o = rms(o, attn.output_norm.weight, 1e-6).flatten(2) * F.silu(attn.output_gate(x))
    assert torch.allclose(attn(x), attn.o_proj(o), atol=1e-6, rtol=1e-5)


def test_alibi_slopes_are_those_of_bloom():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for count in (1, 2, 6, 8, 12, 14, 16, 20, 24, 40):
        gate = build_attention("alibi", hidden_size=8 * count, num_heads=count).gate
        expected = build_alibi_tensor(torch.ones(1, 2), count, torch.float32)[:, 0, 1]
        assert torch.allclose(gate.log_slope.exp(), expected)


def test_wall_starts_almost_open():
    """A full projection with bias 8: a token fades by ``log sigmoid(8)`` = -3.4e-4 (flash-linear-attention's layer)."""
    from attnzoo.models.config import ModelConfig
    from attnzoo.models.decoder import LanguageModel

    model = LanguageModel(ModelConfig(attention="wall", hidden_size=D, num_heads=H, num_layers=1))
    attn = model.blocks[0].attention
    assert attn.gate.down is None
    assert attn.gate.up.weight.shape == (D, D)
    zero = torch.zeros(1, 2, D)
    assert torch.allclose(attn.project(zero).gate.log_diag, F.logsigmoid(torch.tensor(8.0)))
    channel, scalar = build_attention("gated_wall", hidden_size=D, num_heads=H).gate.members  # both of them there
    assert bool((channel.channel_proj.bias == 8).all())
    assert bool((scalar.forget_proj.bias == 8).all())
    attn, x = layer("wall"), tokens()
    logits = F.linear(x, attn.gate.up.weight, attn.gate.up.bias)
    assert torch.allclose(attn.project(x).gate.log_diag.flatten(2), F.logsigmoid(logits))


def test_the_gate_of_path_fox_takes_the_factor_of_flash_linear_attention():
    plain, scaled = layer("path_fox"), layer("path_fox", scale_forget=True)
    scaled.load_state_dict(plain.state_dict())
    x = tokens()
    assert torch.allclose(scaled.project(x).gate.log_decay, plain.project(x).gate.log_decay * (D // H) ** -0.5)


@pytest.mark.parametrize("norm", ["rms", "rms_full"])
def test_shared_norms_are_equal_ones(norm):
    shared = layer("fox", qk_norm=norm, qk_norm_shared=True, output_norm="rms", output_norm_shared=True)
    each = layer("fox", qk_norm=norm, output_norm="rms")
    state = shared.state_dict()
    for name in ("q_norm", "k_norm", "output_norm"):
        assert state[f"{name}.weight"].shape == (D // H,)
        state[f"{name}.weight"] = state[f"{name}.weight"].expand(H, -1)
    each.load_state_dict(state)
    x = tokens()
    assert torch.allclose(shared(x), each(x))
    assert torch.allclose(shared.logit_bound(), each.logit_bound())


@pytest.mark.parametrize("groups", [1, 2])
def test_the_output_norm_may_span_heads(groups):
    norm = layer("mamba2", output_norm_groups=groups).output_norm
    x = torch.randn(2, T, H, 2 * D // H, dtype=torch.float64)
    expected = F.rms_norm(x.reshape(2, T, groups, -1), (2 * D // groups,), eps=1e-5).reshape(x.shape) * norm.weight
    assert torch.allclose(norm(x), expected)


def test_qk_norm_and_output_norm_have_an_eps_each():
    attn = build_attention("fox", block="pro")
    assert (attn.q_norm.eps, attn.k_norm.eps, attn.output_norm.eps) == (1e-5, 1e-5, 1e-6)
    attn = build_attention("fox", block="pro", qk_norm_eps=1e-3, output_norm_eps=1e-2)
    assert (attn.q_norm.eps, attn.k_norm.eps, attn.output_norm.eps) == (1e-3, 1e-3, 1e-2)


def test_the_logit_bound_of_a_norm_over_the_full_width():
    attn = layer("fox", qk_norm="rms_full", num_kv_heads=2)
    attn.q_proj.weight.data[D // H :] *= 1e-3  # nearly all of the length in one head
    attn.k_proj.weight.data[D // H :] *= 1e-3
    p = attn.project(tokens())
    k = p.k.repeat_interleave(2, 2)
    largest = torch.einsum("bthk,bjhk->hbtj", p.q, k).abs().amax((1, 2, 3)) * (D // H) ** -0.5
    bound = attn.logit_bound()
    assert (largest <= bound).all()
    assert largest[0] > bound[0] / (H * 2) ** 0.5  # the norm of one head alone would have promised too much
    longest, query = p.q.norm(dim=-1).amax((0, 1)) * (D // H) ** -0.5, attn.query_bounds(torch.float32).query
    assert (longest <= query).all()
    assert longest[0] > query[0] / H**0.5  # likewise


@pytest.mark.parametrize("activation", ["silu", "identity"])
def test_the_convolution_may_have_a_bias_and_no_activation(activation):
    attn, x = layer("fox", conv_size=3, conv_bias=True, conv_activation=activation), tokens()
    for n in ("q", "v"):
        conv = getattr(attn, f"{n}_conv")
        u = F.pad(getattr(attn, f"{n}_proj")(x).mT, (2, 0))
        expected = F.conv1d(u, conv.weight[:, None], conv.bias, groups=D).mT
        expected = F.silu(expected) if activation == "silu" else expected
        assert torch.allclose(getattr(attn.project(x), n).flatten(2), expected)


EVERYTHING = {
    "conv_size": 3, "conv_bias": True, "qkv_bias": True, "output_bias": True, "skip": True, "scale": 0.7,
    "qk_norm": "rms_full", "output_norm": "rms", "output_norm_groups": 2, "output_gate": "swish",
    "gate_before_norm": True, "num_qk_heads": 2, "kv_shift": True, "key_feature_map": "relu", "expand": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("name", ["fox", "path", "gla"])
def test_padding_and_steps_change_nothing_with_every_option(name):
    attn, x = layer(name, **EVERYTHING), tokens()
    whole = attn(x)
    mask = torch.ones(2, T + 3, dtype=torch.int64)
    mask[:, :3] = 0
    padded = torch.cat([torch.randn(2, 3, D, dtype=torch.float64), x], 1)
    assert torch.allclose(attn(padded, attention_mask=mask)[:, 3:], whole)
    cache = attn.new_cache()
    steps = [attn(part, cache=cache) for part in x.split([5, 1, 1, 12], 1)]
    assert torch.allclose(torch.cat(steps, 1), whole)
    borders = torch.tensor([0, 7, T])
    packed = attn(x[:1], cu_seqlens=borders)
    assert torch.allclose(packed, torch.cat([attn(x[:1, :7]), attn(x[:1, 7:])], 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_eps": 1e-5}, r"unknown option 'norm_eps' of 'fox'.*did you mean '(output|qk)_norm_eps'"),
        ({"num_qk_heads": 3}, "num_qk_heads: expected a divisor of num_heads = 4, got 3"),
        ({"num_qk_heads": 2, "num_kv_heads": 2}, "num_qk_heads: expected None with num_kv_heads = 2, got 2"),
        (
            {"expand": 0.3},
            "expand: expected a whole number of channels per head, hidden_size = 32 over num_heads = 4, got 0.3",
        ),
        ({"expand": 2, "value_dim": 8}, "expand: expected None with value_dim = 8, got 2"),
        ({"qk_norm_eps": float("nan")}, "qk_norm_eps: expected a number that float32 holds, got nan"),
        ({"scale": float("inf")}, "scale: expected a number that float32 holds or None, got inf"),
        ({"skip": "no"}, "skip: expected True or False, got 'no'"),
        ({"conv_bias": True}, "conv_bias: expected False without conv_size, got True"),
        ({"gate_before_norm": True, "output_norm": "rms"}, "gate_before_norm: expected False without output_gate"),
        ({"qk_norm_shared": True, "qk_norm": "l2"}, "qk_norm_shared: expected False with qk_norm='l2'"),
        ({"conv_size": 4, "conv_activation": "silo"}, "unknown conv_activation 'silo'.*did you mean 'silu'"),
        ({"key_feature_map": "rely"}, "unknown key_feature_map 'rely': expected one of identity, silu.*'relu'"),
        ({"scale_forget": "yes"}, "scale_forget: expected True or False, got 'yes'"),
    ],
)
def test_bad_details_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build_attention("fox", hidden_size=D, num_heads=H, **options)


def test_what_is_taken_away_takes_its_details_along():
    attn = build_attention("mamba2", hidden_size=D, num_heads=H, conv_size=0, output_norm="none", num_kv_heads=2)
    assert attn.v_conv is None
    assert attn.output_norm is None
    assert (attn.k_proj.out_features, attn.v_proj.out_features) == (2 * 128, 2 * 2 * D // H)
    assert build_attention("retnet", hidden_size=D, num_heads=H, value_dim=5).config.v_dim == 5
