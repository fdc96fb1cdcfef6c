"""Tensors of another GPU than the current one: kernels run where the tensors are, with the same results."""

import pytest
import torch
import torch.nn.functional as F

from attnzoo import Gate, Prune, build_attention, get
from attnzoo.samples import random_gate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]
B, T, H, K = 1, 320, 4, 64


def inputs(name: str, device: str) -> tuple[list[torch.Tensor], Gate]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(B, T, H, K, generator=generator).to(device, torch.bfloat16).requires_grad_() for _ in range(3)]
    gate = random_gate(name, B, T, H, H, K, dtype=torch.float32, regime="open", generator=generator)
    return x, gate.map(lambda part: part.to(device).requires_grad_())


@pytest.mark.parametrize("prune", [None, Prune()])
@pytest.mark.parametrize("name", ["nope", "alibi", "fox", "rope", "path", "path_fox", "wall"])
def test_output_and_gradients_are_those_of_the_current_gpu(name: str, prune: Prune | None) -> None:
    if prune is not None and not get(name).prunable:
        pytest.skip("nothing decays")
    results = []
    with torch.cuda.device(0):
        for device in ("cuda:0", "cuda:1"):
            (q, k, v), gate = inputs(name, device)
            options = {} if prune is None else {"prune": prune}
            o = get(name).forms["triton"](q, k, v, gate, **options)
            leaves = [q, k, v, *(getattr(gate, part) for part in gate.parts)]
            results.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    for first, second in zip(*results, strict=True):
        assert second.device == torch.device("cuda:1")
        assert F.mse_loss(second.float().cpu(), first.float().cpu()) <= 1e-4 * first.float().square().mean().cpu()


@pytest.mark.parametrize("name", ["fox", "path_fox", "mamba2", "gated_deltanet"])
@torch.no_grad()
def test_cached_steps_of_a_layer_are_those_of_the_current_gpu(name: str) -> None:
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=128, num_heads=2, acp=get(name).prunable).bfloat16()
    x = torch.randn(2, 40, 128, dtype=torch.bfloat16)
    results = []
    with torch.cuda.device(0):
        for device in ("cuda:0", "cuda:1"):
            attn, rows = attn.to(device), x.to(device)
            cache = attn.new_cache()
            results.append(torch.cat([attn(part, cache=cache) for part in rows.split([37, 1, 1, 1], 1)], 1).cpu())
    assert F.mse_loss(results[1].float(), results[0].float()) <= 1e-4 * results[0].float().square().mean()
