"""Layers beside other people's layers of the same name, on the same weights.

What is in transformers is taken from there; the others are written here from their papers' equations, in plain torch
with a loop over tokens.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo import build_attention

D, H, T = 32, 4, 19
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def seed():
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
