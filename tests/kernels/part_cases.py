"""The error budget of the kernels of a layer's parts beside PyTorch's, from the same rounded numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALSO_ON_A_GPU = [pytest.mark.gpu] if DEVICE == "cuda" else []  # as marks of modules: they run in both places
BAND = 16 * torch.finfo(torch.float32).eps

Leaves = Sequence[Tensor | None]


def drawn(*shapes: Sequence[int] | None, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor | None]:
    """Normal numbers of these shapes; None for None."""
    generator = torch.Generator().manual_seed(seed)
    return [None if s is None else torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


def outcome(function: Callable[..., Any], leaves: Leaves, dtype: torch.dtype | None) -> list[Tensor]:
    """The outputs of a function of these tensors, in ``dtype`` or as they are, and the gradients of all of them."""
    given = [None if x is None else x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in leaves]
    found = function(*given)
    ys = [y for y in (found if isinstance(found, tuple) else (found,)) if y is not None]
    dys = [dy.to(y.dtype) for y, dy in zip(ys, drawn(*(y.shape for y in ys), seed=1), strict=True) if dy is not None]
    return [y.detach() for y in (*ys, *torch.autograd.grad(ys, [x for x in given if x is not None], dys))]


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp(min=1e-9))


def assert_within_budget(kernel: Callable[..., Any], plain: Callable[..., Any], leaves: Leaves) -> None:
    """At most twice the error of PyTorch's part, and 16 roundings of float32; the same numbers at each run."""
    exact = outcome(plain, leaves, torch.float64)
    for want, ours, again, other in zip(
        exact, outcome(kernel, leaves, None), outcome(kernel, leaves, None), outcome(plain, leaves, None), strict=True
    ):
        assert ours.shape == want.shape
        assert ours.dtype == other.dtype
        assert torch.equal(ours, again)
        assert error(ours, want) <= 2 * error(other, want) + BAND
