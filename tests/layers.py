"""Layers and rows of the tests of layers."""

import torch
from hypothesis import strategies as st

from attnzoo import build_attention

D, H, G = 24, 4, 2
TINY = 1e-25  # certified below it, a weight is nothing beside the others
FORGETS = ("fox", "path_fox", "fox_rope")


def layer(name, block=None, seed=0, **options):
    """A float64 layer whose every parameter matters: nothing is left at zero or one."""
    torch.manual_seed(seed)
    attn = build_attention(name, hidden_size=D, num_heads=H, num_kv_heads=G, head_dim=8, block=block, **options)
    attn = attn.double()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return attn


def forgetful(name="fox", bias=0.0, **options):
    """A float64 layer with QK-norm of which some heads forget within few tokens, and some do not."""
    attn = layer(name, "pro", window=options.pop("window", None), **options)
    if name in FORGETS:
        with torch.no_grad():
            gate = attn.gate if name == "fox" else attn.gate.members[1]
            gate.forget_proj.bias.copy_(torch.tensor([-2.0, 3.0, -1.0, -3.0]) + bias)
    return attn


def rows(B, T, seed=1):
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same(got, expected):
    assert got.shape == expected.shape
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 1e-10, f"relative error {error:.1e}"


def pieces(draw, T):
    cuts = sorted(draw(st.sets(st.integers(1, T - 1), max_size=6)))
    return list(zip([0, *cuts], [*cuts, T], strict=True))
