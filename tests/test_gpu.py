"""The layer on a GPU: every variant, as ``impl="auto"`` runs it, against the float64 reference on the same weights."""

import copy

import pytest
import torch

from attnzoo import build_attention, get, list_variants

pytestmark = pytest.mark.gpu
D, H = 128, 2


def pair_of_layers(name, **options):
    """A bfloat16 layer on the GPU and its float64 reference."""
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=D, num_heads=H, **options).cuda().bfloat16()
    exact = copy.deepcopy(attn).double()
    exact.impl = "reference"
    return attn, exact


def assert_near(got, expected, budget=0.03):
    error = (got.double() - expected).norm() / expected.norm()
    assert error < budget, f"relative error {error:.1e}"


@pytest.mark.parametrize("block", [None, "pro"])
@pytest.mark.parametrize("name", list_variants())
def test_layer_and_gradients(name, block):
    attn, exact = pair_of_layers(name, block=block, acp=get(name).prunable)
    x = torch.randn(2, 300, D, device="cuda", dtype=torch.bfloat16)
    y, z = attn(x), exact(x.double())
    assert_near(y, z)
    grad = torch.randn_like(x)
    got = torch.autograd.grad(y, list(attn.parameters()), grad)
    expected = torch.autograd.grad(z, list(exact.parameters()), grad.double())
    for (label, _), a, b in zip(attn.named_parameters(), got, expected, strict=True):
        if b.norm() > 1e-3 * max(g.norm() for g in expected):
            error = (a.double() - b).norm() / b.norm()
            assert error < 0.06, f"{label}: relative error {error:.1e}"


@pytest.mark.parametrize("name", list_variants())
@torch.no_grad()
def test_padding_packing_and_cache(name):
    attn, exact = pair_of_layers(name)
    x = torch.randn(2, 40, D, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(2, 40, dtype=torch.bool, device="cuda")
    mask[0, :7] = mask[1, 33:] = False
    assert_near(attn(x, attention_mask=mask), exact(x.double(), attention_mask=mask))
    borders = torch.tensor([0, 13, 40], device="cuda")
    assert_near(attn(x[:1], cu_seqlens=borders), exact(x[:1].double(), cu_seqlens=borders))
    cache = attn.new_cache()
    steps = [attn(part, cache=cache) for part in x.split([30, 1, 1, 8], 1)]
    assert_near(torch.cat(steps, 1), exact(x.double()))


@pytest.mark.parametrize("name", list_variants())
def test_auto_takes_a_kernel_where_there_is_one(name):
    attn, _ = pair_of_layers(name)
    with torch.no_grad():
        attn(torch.randn(1, 64, D, device="cuda", dtype=torch.bfloat16))
    kernels = {"nope", "alibi", "fox", "rope"}
    expected = "triton" if name in kernels else "fla" if get(name).side == "linear" else "reference"
    assert f"({expected} on cuda)" in repr(attn)
