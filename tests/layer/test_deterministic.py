"""What PyTorch refuses in deterministic mode is not needed: running sums by doubling, layers and models on a GPU."""

import sys

import pytest
import torch
from layers import layer, rows
from ranks import on_ranks
from torch.overrides import TorchFunctionMode

from attnzoo import build_attention, get, list_variants
from attnzoo.algebra.sums import running_sum, sum_by_doubling
from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel
from attnzoo.parallel import Fragments, context_parallel

CONFIG = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "intermediate_size": 64}


@pytest.mark.parametrize("n", [0, 1, 2, 5, 64, 77])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sums_by_doubling_are_running_sums(n, dim):
    shape = [3, 4, 2]
    shape[dim] = n
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    got, expected = sum_by_doubling(x, dim), x.cumsum(dim)
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(got)
    for found in torch.autograd.grad(got, x, grad), torch.autograd.grad(running_sum(x, dim), x, grad):
        torch.testing.assert_close(*found, *torch.autograd.grad(x.cumsum(dim), x, grad))
    assert running_sum(x.float(), dim, torch.float64).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_gpu_has_the_running_sums_of_a_cpu(dim):
    x = torch.randn(3, 500, 2, dtype=torch.float64, device="cuda", requires_grad=True)
    got, expected = running_sum(x, dim), x.cpu().cumsum(dim)
    torch.testing.assert_close(got.cpu(), expected)
    grad = torch.randn_like(got)
    torch.testing.assert_close(torch.autograd.grad(got, x, grad), torch.autograd.grad(expected, x, grad.cpu()))


class Refusing(TorchFunctionMode):
    """PyTorch's refusal of a GPU's running sums of floats; ``running_sum`` has another way there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cumsum, torch.cumsum) and args[0].is_floating_point():
            assert sys._getframe(1).f_code.co_name == "running_sum", "a running sum that deterministic mode refuses"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unread(monkeypatch):
    """Gates are not read, as on a GPU."""
    monkeypatch.setattr("attnzoo.algebra.block_decay.readable", lambda x: False)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", list_variants())
def test_layers_sum_floats_in_a_way_that_deterministic_mode_has(name):
    attn = layer(name, acp=get(name).prunable)
    with Refusing():
        attn(rows(1, 70)).sum().backward()


@pytest.mark.usefixtures("unread")
def test_ranks_sum_floats_in_a_way_that_deterministic_mode_has():
    attn, fragments = layer("fox", acp=True), Fragments.zigzag(20, 2)

    def rank(_):
        with Refusing(), context_parallel(fragments, "pruned"):
            return attn(fragments.shard(rows(1, 20)))

    on_ranks(2, rank)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", list_variants())
def test_layers_in_deterministic_mode(name, impl, deterministic):
    """A sequence with its gradients, then a prompt and steps: nothing is refused, and a second time gives the same."""
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=64, num_heads=2, acp=get(name).prunable, impl=impl).cuda().bfloat16()
    x = torch.randn(2, 150, 64, device="cuda", dtype=torch.bfloat16)

    def run():
        y = attn(x)
        found = [y, *torch.autograd.grad(y, list(attn.parameters()), torch.ones_like(y))]
        with torch.no_grad():
            cache = attn.new_cache()
            found += [attn(part, cache=cache) for part in x.split([140, 1, 9], 1)]
        return found

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), [
    *((name, {"top_k": 20}) for name in ("fox", "path_fox", "wall", "gated_deltanet", "mamba2")),
    ("fox", {"evict": 1e-3}), ("path_fox", {"evict": 1e-3}),
], ids=str)  # fmt: skip
def test_generation_in_deterministic_mode(name, options, deterministic):
    torch.manual_seed(0)
    model = (
        LanguageModel(ModelConfig(attention=name, attention_options={"block": "pro"}, **CONFIG))
        .cuda()
        .bfloat16()
        .eval()
    )
    prompt, found = torch.randint(0, 40, (2, 70), device="cuda"), []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(model.generate(prompt, 20, **options))
    assert torch.equal(*found)
