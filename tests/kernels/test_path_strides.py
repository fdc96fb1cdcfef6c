"""Tensors whose heads lie far apart: offsets beyond 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from path_cases import DEVICE, Case, inputs, large_tiles  # noqa: F401  (a fixture)
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.path import kept_fraction, path_attention

FAR = 1 << 30  # elements from one head to the next: the largest stride that a kernel takes as a 32-bit number


def far_apart(x: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    """The same numbers, [1, T, 3, D] in float16, as views of one buffer with FAR elements between heads.

    Views start 2^31 elements into it, so that an offset that wraps reads zeros there instead of memory of others. Only
    the pages that are touched exist on a CPU.
    """
    try:
        buffer = torch.empty((1 << 32) + (1 << 20), dtype=torch.float16, device=DEVICE)
    except (MemoryError, RuntimeError):
        pytest.skip("needs 8.6 GB of address space, or of GPU memory")
    at, views = 1 << 31, dict(x)
    for name in names:
        _, T, heads, D = x[name].shape
        buffer.as_strided((heads, T * D), (FAR, 1), at - (1 << 31)).zero_()  # where the third head would wrap to
        views[name] = buffer.as_strided(x[name].shape, (T * D, D, FAR, 1), at).copy_(x[name])
        at += T * D
    return views


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
    x = inputs(Case(T=260, H=4, G=2, gate="strong", sink=True), torch.float32)
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
