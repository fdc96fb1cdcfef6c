"""Tensors whose heads lie far apart: offsets beyond 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fox_cases import far_apart
from path_cases import DEVICE, Case, inputs, large_tiles  # noqa: F401  (a fixture)
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.path import kept_fraction, path_attention


def run(x: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Output and gradients; the inputs as they are, not copied."""
    leaves = {name: t.requires_grad_() for name, t in x.items() if name != "do"}
    o = path_attention(**leaves, **options, impl="triton")
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), x["do"])]


def test_heads_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # or each launch would copy the buffer onto itself
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    x = inputs(Case(T=70, H=3, G=3, gate="open"), torch.float16)
    x["w"] = x["w"].half()
    for near, far in zip(run(x), run(far_apart(x, ("q", "k", "v", "w", "do"))), strict=True):
        assert torch.equal(near, far)


def test_numbers_of_the_heads_may_have_any_strides() -> None:
    x = inputs(Case(T=140, H=4, G=2, gate="strong", sink=True), torch.float32)
    wide = torch.stack([x["sink"], -x["sink"]], -1), torch.tensor([[1e-3, 9.0]] * 4, device=DEVICE)
    results = []
    for dense in (False, True):
        sink, bound = (y[:, 0].contiguous() if dense else y[:, 0] for y in wide)
        options: dict[str, Any] = {"prune": Prune(0.1), "logit_bound": bound}
        parts = {name: x[name] for name in ("q", "k", "w", "beta", "log_decay")}
        kept = kept_fraction(**parts, **options, impl="triton")
        results.append([kept, *run(x | {"sink": sink.detach()}, **options)])
    assert not results[0][0].eq(1).all()
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
