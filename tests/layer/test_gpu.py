"""The layer on a GPU: every variant, as ``impl="auto"`` runs it, against the float64 reference on the same weights."""

import copy
import importlib.util

import pytest
import torch

from attnzoo import build_attention, get, list_variants
from attnzoo.samples import random_inputs

pytestmark = pytest.mark.gpu
D, H = 128, 2
EPS = 2**-8  # of bfloat16, half a unit
KERNELS = [name for name in list_variants() if "triton" in get(name).forms]  # linear ones: of few tokens
PIECES = [30, 1, 1, 8]


def layers(name, **options):
    """A bfloat16 layer as ``auto`` runs it, the same on the reference forms, and the float64 layer that both round."""
    torch.manual_seed(0)
    exact = build_attention(name, hidden_size=D, num_heads=H, **options).cuda().double()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter += 0.01 * torch.randn_like(parameter)  # digits that float32 does not hold
    attn, plain = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16()
    plain.impl = exact.impl = "reference"
    return attn, plain, exact


def rows(B, T):
    return torch.randn(B, T, D, device="cuda", dtype=torch.float64)


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
    draws = [(rows(2, 300), rows(2, 300)) for _ in range(3)]  # one says little of the gradients of two biases

    def run(attn):
        dtype, found = attn.o_proj.weight.dtype, []
        for x, grad in draws:
            y = attn(x.to(dtype))
            found.append([y, *torch.autograd.grad(y, list(attn.parameters()), grad.to(dtype))])
        return [torch.stack(same) for same in zip(*found, strict=True)]

    labels = ["output", *(label for label, _ in models[0].named_parameters())]
    for label, *values in zip(labels, *map(run, models), strict=True):
        assert_within_budget(label, *values)


@pytest.mark.parametrize("name", list_variants())
@torch.no_grad()
def test_padding_packing_and_cache(name):
    models = layers(name)
    x = rows(2, 40)
    mask = torch.ones(2, 40, dtype=torch.bool, device="cuda")
    mask[0, :7] = mask[1, 33:] = False
    borders = torch.tensor([0, 13, 40], device="cuda")

    def run(attn):
        given = x.to(attn.o_proj.weight.dtype)
        outputs = [attn(given, attention_mask=mask), attn(given[:1], cu_seqlens=borders)]
        for padding in (torch.ones_like(mask), mask):
            cache, steps = attn.new_cache(), []
            for part, there in zip(given.split(PIECES, 1), padding.split(PIECES, 1), strict=True):
                steps.append(attn(part, attention_mask=there, cache=cache))
            outputs.append(torch.cat(steps, 1))
        return outputs

    for label, *values in zip(("padded", "packed", "cached", "padded cache"), *map(run, models), strict=True):
        assert_within_budget(label, *values)


@pytest.mark.parametrize(
    ("name", "options", "evict"),
    [("fox", {}, 1e-6), ("alibi", {}, 1e-6), ("path_fox", {}, 1e-6), ("rope", {"window": 70}, 1e-6),
     ("fox", {"qk_norm": "none"}, "offload"), ("path_fox", {"qk_norm": "none"}, "offload")],
)  # fmt: skip
@torch.no_grad()
def test_a_cache_gives_up_keys(name, options, evict):
    """Beams and tokens that are taken back among the steps, against a whole cache in float64; of PaTH's keys whole
    groups of 512 go to the host."""
    models, x = layers(name, block="pro", **options), rows(2, 1020)
    for attn in models:
        attn.k_shift = attn.v_shift = None
        for gate in attn.gate.modules():
            if hasattr(gate, "forget_proj"):
                gate.forget_proj.bias.fill_(-1.0)

    def run(attn):
        given, outputs = x.to(attn.o_proj.weight.dtype), []
        cache = attn.new_cache(None if attn is models[2] else evict)
        for n, part in enumerate(given.split([900, 1, 8, 100, 1, 2, 8], 1)):
            outputs.append(attn(part, cache=cache))
            if n == 3:
                cache.reorder(torch.tensor([1, 1], device="cuda"))
        if attn is not models[2]:
            assert cache.state.pool.first.any()
            assert torch.equal(cache.state.pool.table.cpu(), cache.state.pool.pages)
            assert len(cache.state.crop(1015)) == 1015
        return torch.cat(outputs, 1)

    assert_within_budget("outputs", *map(run, models))


def kernel_of(name):
    """The form that ``auto`` should take for many tokens; skips where that needs a package that is not installed."""
    if get(name).side == "softmax":
        return "triton" if name in KERNELS else "reference"
    kernel = getattr(get(name).form_set, "kernels", {}).get("triton")
    if kernel is not None and not kernel.brief:
        return "triton"
    if "fla" not in get(name).forms:
        return "reference"
    if importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed (pip install 'attnzoo[fla]')")
    return "fla"


@pytest.mark.parametrize("name", list_variants())
@torch.no_grad()
def test_auto_takes_a_kernel_where_there_is_one(name):
    expected, attn = kernel_of(name), layers(name)[0]
    attn(rows(1, 128).bfloat16())
    assert f"({expected} on cuda)" in repr(attn)


@pytest.mark.parametrize("name", KERNELS)
@torch.no_grad()
def test_a_mask_leaves_the_kernel_at_work(name):
    """Whether a mask hides anything is not known without waiting for the GPU."""
    attn, x, many = layers(name)[0], rows(2, 110).bfloat16(), kernel_of(name)
    for mask in (
        torch.ones(2, 110, device="cuda", dtype=torch.int64),
        (torch.arange(110, device="cuda") > 5).expand(2, -1),
    ):
        cache = attn.new_cache()
        for part, there in zip(x.split([70, *PIECES], 1), mask.split([70, *PIECES], 1), strict=True):
            attn(part, attention_mask=there, cache=cache)
            form = many if part.shape[1] == 70 else "triton"
            assert f"({form} on cuda)" in repr(attn)


@pytest.mark.parametrize("name", list_variants("linear"))
@torch.no_grad()
def test_a_step_of_the_linear_side_is_captured_in_a_cuda_graph(name):
    q, k, v, gate = (x.cuda() if isinstance(x, torch.Tensor) else x.map(torch.Tensor.cuda)
                     for x in random_inputs(name, 2, 1, 4, 2, 64, 64, dtype=torch.float32))  # fmt: skip
    variant = get(name)
    _, state = variant.extend(q, k, v, gate, form="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = variant.extend(q, k, v, gate, state, form="triton")
    q.mul_(2)
    graph.replay()
    expected, _ = variant.extend(q, k, v, gate, state)
    assert relative_error(o, expected.double()) <= 1e-5


GRAPHS = [(name, False) for name in list_variants()] + [(name, True) for name in list_variants("softmax")]


@pytest.mark.parametrize(("name", "packed"), GRAPHS)  # flash-linear-attention reads the borders on the CPU
@torch.no_grad()
def test_a_layer_is_captured_in_a_cuda_graph(name, packed):
    """Nothing inside waits for the GPU; a replay reads new rows, and new borders of as many sequences."""
    attn = layers(name)[0]
    x, new = rows(1, 256).bfloat16(), rows(1, 256).bfloat16()
    borders, moved = (torch.tensor([0, cut, 256], device="cuda", dtype=torch.int32) for cut in (100, 31))
    options = {"cu_seqlens": borders} if packed else {}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles and tunes what is not yet
            attn(x, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attn(x, **options)
    x.copy_(new)
    borders.copy_(moved)
    graph.replay()
    torch.testing.assert_close(y, attn(x, **options), rtol=0, atol=0)
