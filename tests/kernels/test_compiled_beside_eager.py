"""Calls of other kinds, made without compiling, leave compiled code as it is."""

import pytest
import torch

from attnzoo import build_attention
from attnzoo.kernels.common import call_checks


@pytest.mark.parametrize(("name", "options"), [("fox", {"acp": True}), ("path_fox", {}), ("wall", {}), ("mamba2", {})])
def test_a_compiled_layer_is_not_compiled_again_after_other_calls_that_are_not(name, options, monkeypatch):
    monkeypatch.setattr(call_checks, "reads_values", lambda x: False)  # as on a GPU, where kinds of calls are kept
    torch._dynamo.reset()
    layer = build_attention(name, hidden_size=32, num_heads=2, impl="triton", **options)
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(2, 16, 32)
    compiled(x)
    with torch.no_grad():
        layer(x[:1])
        layer(x[:, :7])
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x)
