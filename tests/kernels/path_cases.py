"""Inputs, the float64 oracle and the error budget of the path kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fox_cases
import pytest
import torch
import wall_cases
from fox_cases import DEVICE, Packable, draw_gate, heads, run
from torch import Tensor

from attnzoo.kernels.common.tiles import Kind, Tiles
from attnzoo.kernels.levels import plan
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.path.reference import path_reference, path_reference_lse


@dataclass(frozen=True)
class Case(Packable):
    """One call of path_attention; gates as in fox_cases, but for a constant one."""

    beta: str = "any"  # any (uniform in 0..2, some exactly 0 or 2), zero, two
    diag: str = ""  # of the channels' gates (wall_cases): open, mixed, strong; or none


@pytest.fixture(autouse=True)
def large_tiles() -> Iterator[None]:
    """Under the interpreter large tiles are the fastest; a GPU keeps its own."""
    large: dict[Kind, Tiles] = {
        "fwd": Tiles(128, 64, 4, 1), "dq": Tiles(128, 64, 4, 1), "dkdv": Tiles(64, 64, 4, 1),
    }  # fmt: skip
    with plan.override(large if DEVICE == "cpu" else {}):
        yield


def draw_beta(case: Case, generator: torch.Generator) -> Tensor:
    shape = (case.B, case.T, case.G)
    beta, u = 2 * torch.rand(shape, generator=generator), torch.rand(shape, generator=generator)
    if case.beta == "any":
        return beta.masked_fill(u < 0.1, 0.0).masked_fill(u > 0.9, 2.0)
    return torch.full(shape, {"zero": 0.0, "two": 2.0}[case.beta])


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """q, k, v, w, beta, do and, where the case has them, log_decay and sink; w and beta in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = heads(case, dtype, generator, "qkv")
    w = torch.randn(x["k"].shape, generator=generator)
    x |= {"w": torch.nn.functional.normalize(w, dim=-1), "beta": draw_beta(case, generator)}
    x |= heads(case, dtype, generator, "o")
    gate = draw_gate(case, generator)
    if gate is not None:
        x["log_decay"] = gate
    if case.sink:
        x["sink"] = torch.randn(case.H, generator=generator)
    if case.diag:
        x["log_diag"] = wall_cases.draw_gate(case, case.diag, generator)
    return {name: t.to(DEVICE) for name, t in x.items()}


def oracle(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    return fox_cases.oracle(case, x, path_reference)


def triton(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    return run(path_attention, case, x, impl="triton")


def within_budget(case: Case, x: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """The budget of the fox kernels; w and beta, too, have gradients that are sums over the factors."""
    fox_cases.within_budget(case, x, ours, path_reference, ("dlog_decay", "dw", "dbeta", "dsink", "dlog_diag"))


def _lse_and_gradients(fn: Any, case: Case, x: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """Output, log-sum-exp and the gradients of a function of both."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items() if name != "do"}
    o, lse = fn(**leaves, **case.options, **more)
    total = (o * x["do"].to(o.dtype)).sum() + lse.sin().sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {"o": o.detach(), "lse": lse.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def lse_within_budget(case: Case, x: dict[str, Tensor]) -> None:
    """The log-sum-exp and the gradients of a function of it and the output, against float64 and the same dtype."""
    dtype = x["q"].dtype
    ours = _lse_and_gradients(path_attention, case, x, impl="triton", return_lse=True)
    exact = _lse_and_gradients(path_reference_lse, case, {n: t.double() for n, t in x.items()})
    plain = _lse_and_gradients(path_reference_lse, case, x, compute_dtype=dtype)
    assert ours["lse"].dtype == torch.float32
    for name, want in exact.items():
        error, other = (float((y[name].double() - want).norm() / want.norm()) for y in (ours, plain))
        assert error <= 2 * other + torch.finfo(dtype).eps / 8 + 1e-5, f"{name}: {error:.2e}, plain {other:.2e}"
