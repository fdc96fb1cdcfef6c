"""The layer on a GPU: every variant, as ``impl="auto"`` runs it, against the float64 reference on the same weights."""

import copy

import pytest
import torch

from attnzoo import build_attention, get, list_variants

pytestmark = pytest.mark.gpu
D, H = 128, 2


EPS = 2**-8  # of bfloat16, half a unit


def layers(name, **options):
    """A bfloat16 layer as ``auto`` runs it, the same on the reference forms, and the reference in float64."""
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=D, num_heads=H, **options).cuda().bfloat16()
    plain = copy.deepcopy(attn)
    exact = copy.deepcopy(attn).double()
    plain.impl = exact.impl = "reference"
    return attn, plain, exact


def relative_error(got, expected):
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-12))


def assert_within_budget(label, got, plain, expected):
    """At most twice the error of the same-dtype reference, plus a band of eps."""
    error, budget = relative_error(got, expected), 2 * relative_error(plain, expected) + 2 * EPS
    assert error <= budget, f"{label}: relative error {error:.1e}, budget {budget:.1e}"


@pytest.mark.parametrize("block", [None, "pro"])
@pytest.mark.parametrize("name", list_variants())
def test_layer_and_gradients(name, block):
    models = layers(name, block=block, acp=get(name).prunable)
    x = torch.randn(2, 300, D, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)

    def run(attn):
        dtype = attn.o_proj.weight.dtype
        y = attn(x.to(dtype))
        return [y, *torch.autograd.grad(y, list(attn.parameters()), grad.to(dtype))]

    labels = ["output", *(label for label, _ in models[0].named_parameters())]
    for label, *values in zip(labels, *map(run, models), strict=True):
        assert_within_budget(label, *values)


@pytest.mark.parametrize("name", list_variants())
@torch.no_grad()
def test_padding_packing_and_cache(name):
    models = layers(name)
    x = torch.randn(2, 40, D, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(2, 40, dtype=torch.bool, device="cuda")
    mask[0, :7] = mask[1, 33:] = False
    borders = torch.tensor([0, 13, 40], device="cuda")

    def run(attn):
        rows = x.to(attn.o_proj.weight.dtype)
        cache = attn.new_cache()
        steps = [attn(part, cache=cache) for part in rows.split([30, 1, 1, 8], 1)]
        return attn(rows, attention_mask=mask), attn(rows[:1], cu_seqlens=borders), torch.cat(steps, 1)

    for label, *values in zip(("padded", "packed", "cached"), *map(run, models), strict=True):
        assert_within_budget(label, *values)


@pytest.mark.parametrize("name", list_variants())
def test_auto_takes_a_kernel_where_there_is_one(name):
    attn = layers(name)[0]
    with torch.no_grad():
        attn(torch.randn(1, 64, D, device="cuda", dtype=torch.bfloat16))
    kernels = {"nope", "alibi", "fox", "rope", "path", "path_fox"}
    expected = "triton" if name in kernels else "fla" if get(name).side == "linear" else "reference"
    assert f"({expected} on cuda)" in repr(attn)
