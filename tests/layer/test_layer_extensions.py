"""A gate and a pair from outside the package."""

import math

import pytest
import torch
from layers import D, H

from attnzoo import Gate, Pair, build_attention, register
from attnzoo.layer.gates import GATES, GateProjection
from attnzoo.registry import unregister


class HalfLife(GateProjection):
    """Every token halves what came before."""

    provides = ("log_decay",)

    def forward(self, x, k, stream):
        return Gate(log_decay=torch.full((*x.shape[:2], self.sizes.num_heads), -math.log(2.0))), None


def test_a_gate_from_outside_serves_both_sides():
    x = torch.randn(1, 5, D)
    for name in ("fox", "mamba2"):
        attn = build_attention(name, hidden_size=D, num_heads=H, gate=HalfLife)
        assert attn(x).shape == x.shape
        assert torch.allclose(attn.project(x).gate.log_decay.exp(), torch.tensor(0.5))
    assert HalfLife not in GATES.values()


class Bare(HalfLife):
    def forward(self, x, k, stream):
        return super().forward(x, k, stream)[0]


def test_a_gate_from_outside_without_a_write_strength_is_refused_by_name():
    attn = build_attention("fox", hidden_size=D, num_heads=H, gate=Bare)
    with pytest.raises(TypeError, match=r"^gate: expected Bare.forward to return \(gate, .* got Gate\(log_decay"):
        attn(torch.randn(1, 5, D))


def test_a_registered_pair_builds_a_layer():
    pair = Pair(
        "fast_retnet", "fast_alibi", ("log_decay",), "-log 2", "I",
        linear_module="attnzoo.recurrences.retnet", softmax_module="attnzoo.encodings.alibi",
    )  # fmt: skip
    register(pair)
    try:
        attn = build_attention("fast_alibi", hidden_size=D, num_heads=H, gate=HalfLife, acp=True)
        assert attn(torch.randn(1, 5, D)).shape == (1, 5, D)
    finally:
        unregister(pair)
