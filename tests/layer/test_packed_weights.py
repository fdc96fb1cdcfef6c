"""Linear maps whose weights are packed integers (as bitsandbytes' are): forward, backward and generating."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo import get
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.engine import Generator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["mamba2", "gated_deltanet", "gla", "fox", "path_fox", "rope"]


class PackedLinear(nn.Linear):
    """Weights of 8 bits, which a call unpacks to the dtype of its input.

    Args:
        given: whose weights are rounded to it, in place.
    """

    def __init__(self, given: nn.Linear) -> None:
        super().__init__(given.in_features, given.out_features, bias=given.bias is not None, device="meta")
        self.bias, self.step = given.bias, float(given.weight.detach().abs().max()) / 127
        packed = (given.weight.detach() / self.step).round().add(128).to(torch.uint8)
        self.weight = nn.Parameter(packed.view(-1, 1), requires_grad=False)
        with torch.no_grad():
            given.weight.copy_(self.unpacked(given.weight.dtype))

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return ((self.weight.float() - 128) * self.step).to(dtype).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.unpacked(x.dtype)
        if self.bias is None or self.bias.dtype == x.dtype:
            return F.linear(x, weight, self.bias)
        return F.linear(x, weight) + self.bias  # a gate's bias, in float32


def pair_of(name: str, dtype: torch.dtype, head_dim: int) -> tuple[LanguageModel, LanguageModel]:
    """A model with packed maps in its blocks, and one whose weights are what those unpack to."""
    torch.manual_seed(0)
    config = ModelConfig(
        attention=name, attention_options={"head_dim": head_dim}, hidden_size=32, num_layers=2, num_heads=2,
        vocab_size=40, intermediate_size=32,
    )  # fmt: skip
    plain = LanguageModel(config).to(DEVICE, dtype).eval()
    packed = copy.deepcopy(plain)
    for place, one in plain.blocks.named_modules():
        if isinstance(one, nn.Linear):
            parent, _, label = place.rpartition(".")
            setattr(packed.blocks.get_submodule(parent), label, PackedLinear(one))
    return packed, plain


def assert_packed_is_plain(name: str, dtype: torch.dtype, head_dim: int) -> None:
    packed, plain = pair_of(name, dtype, head_dim)
    tokens = torch.arange(9, device=DEVICE)[None]
    logits = [model(tokens).logits for model in (packed, plain)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    gradients = [torch.autograd.grad(y.float().square().sum(), model.embedding.weight)[0]
                  for y, model in zip(logits, (packed, plain), strict=True)]  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    drawn, whole = [], []
    for model in (packed, plain):
        if get(name).side == "linear":  # steps of the kernel, also where there is no GPU
            for block in model.blocks:
                block.attention.impl = "triton"
        generator = Generator(model, 2, 40, fuse=False)
        whole.append([cache.whole for cache in generator.batch.caches])
        numbers = [generator.add(tokens[0, :n].cpu(), 3, temperature=0) for n in (3, 9, 5)]
        done = generator.run()
        drawn.append([done[number] for number in numbers])
    assert whole[0] == whole[1] == [name not in ("path_fox", "rope")] * 2
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_are_those_that_they_unpack_to(name: str) -> None:
    pytest.importorskip("triton")
    assert_packed_is_plain(name, torch.float32, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_on_a_gpu_are_those_that_they_unpack_to(name: str, deterministic: None) -> None:
    """To the bit: on Hopper PaTH otherwise adds up gradients in an order that varies."""
    assert_packed_is_plain(name, torch.bfloat16, 64)
