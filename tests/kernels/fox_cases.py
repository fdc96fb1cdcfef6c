"""Inputs, the float64 oracle and the error budget of the fox kernel tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.kernels.common.tiles import Kind, Tiles
from attnzoo.kernels.fox import fox_attention, plan
from attnzoo.kernels.fox.reference import fox_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(64, 64, 4, 1)  # several tiles in each direction at test sizes


@dataclass(frozen=True)
class Sizes:
    """One call: sizes, gate regime and options; a test's name has the fields that are not the default."""

    T: int = 150
    H: int = 2
    G: int = 1
    K: int = 16
    V: int = 16
    gate: str = "mixed"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        usual, given = type(self)(), [self.gate]
        for name, value in vars(self).items():
            if value != getattr(usual, name) and name != "gate":
                several = "_".join(map(str, value)) if isinstance(value, tuple | dict) else value
                given.append(name if value is True else f"{name}{several}")
        return "-".join(given)


@dataclass(frozen=True)
class Packable(Sizes):
    """One call of as many queries as keys, whose rows may have a sink, or be several sequences."""

    B: int = 1
    sink: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    S = property(lambda self: self.T)


@dataclass(frozen=True)
class Case(Packable):
    """One call of fox_attention; gates are open, mixed, strong, shut, ones (log gate exactly 0), const, const_shut or
    none."""

    T: int = 130
    S: int = 130


def heads(case: Packable, dtype: torch.dtype, generator: torch.Generator, names: str = "qkvo") -> dict[str, Tensor]:
    """q, k, v and do of unit scale."""
    q, k = (case.B, case.T, case.H), (case.B, case.S, case.G)
    shapes = {"q": (*q, case.K), "k": (*k, case.K), "v": (*k, case.V), "o": (*q, case.V)}
    drawn = {name: torch.randn(shapes[name], generator=generator).to(dtype) for name in names}
    return {"do" if name == "o" else name: x for name, x in drawn.items()}


def draw_gate(case: Packable, generator: torch.Generator) -> Tensor | None:
    shape = (case.B, case.S, case.H)
    u = torch.rand(shape, generator=generator)
    g = -0.2 * torch.rand(shape, generator=generator)
    if case.gate == "none":
        return None
    if case.gate == "const":
        return -0.1 * torch.rand(case.H, generator=generator)
    if case.gate == "const_shut":  # every other head closed
        return (-0.1 * torch.rand(case.H, generator=generator)).masked_fill(torch.arange(case.H) % 2 == 0, -math.inf)
    if case.gate == "ones":
        return torch.zeros(shape)
    if case.gate == "strong":
        return 20.0 * g
    if case.gate == "shut":  # every gate closed: each row sees itself alone
        return torch.full(shape, -math.inf)
    if case.gate == "mixed":
        g[u < 0.3] = 0.0
        g[u < 0.04] = -30.0
        g[u < 0.02] = -math.inf
    return g


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """q, k, v, do and, where the case has them, log_decay and sink; q and k of unit scale."""
    generator = torch.Generator().manual_seed(seed)
    x = heads(case, dtype, generator)
    gate = draw_gate(case, generator)
    if gate is not None:
        x["log_decay"] = gate
    if case.sink:
        x["sink"] = torch.randn(case.H, generator=generator)
    return {name: t.to(DEVICE) for name, t in x.items()}


FAR = 1 << 30  # elements from one head to the next: the largest stride that a kernel takes as a 32-bit number


def far_apart(x: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    """The same numbers, [1, T, 3, D] in float16, as views of one buffer with FAR elements between heads.

    Views start 2^31 elements into it, so that an offset that wraps reads zeros there instead of memory of others. Only
    the pages that are touched exist on a CPU.
    """
    try:
        with pytest.MonkeyPatch.context() as patch:  # deterministic algorithms would touch all
            patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
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


def run(fn: Any, case: Packable, x: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """Output and gradients of fn at x; with ``return_lse`` also the log-sum-exp, and gradients of a loss of both."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items() if name != "do"}
    named = {"log_decay": None} | {n: t for n, t in leaves.items() if n not in "qkv"}
    if case.cu_seqlens is not None:
        named["cu_seqlens"] = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=DEVICE)
    o = fn(leaves["q"], leaves["k"], leaves["v"], **named, **case.options, **more)
    outputs, ups = {"o": o}, [x["do"]]
    if isinstance(o, tuple):
        outputs = dict(zip(("o", "lse"), o, strict=True))
        ups.append(torch.cos(torch.arange(o[1].numel(), device=DEVICE)).view(o[1].shape))
    ups = [up.to(y.dtype) for up, y in zip(ups, outputs.values(), strict=True)]
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), ups)
    found = {name: y.detach() for name, y in outputs.items()}
    return found | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def oracle(case: Packable, x: dict[str, Tensor], reference: Any = fox_reference) -> dict[str, Tensor]:
    return run(reference, case, {name: t.double() for name, t in x.items()})


def triton(case: Case, x: dict[str, Tensor], tiles: Tiles | None = SMALL) -> dict[str, Tensor]:
    override: dict[Kind, Tiles] = {} if tiles is None else {"fwd": tiles, "dq": tiles, "dkdv": tiles}
    with plan.override(override):
        return run(fox_attention, case, x, impl="triton")


def within_budget(
    case: Packable, x: dict[str, Tensor], ours: dict[str, Tensor], reference: Any = fox_reference,
    summed: tuple[str, ...] = ("dlog_decay",),
) -> None:  # fmt: skip
    """Error against float64 at most twice that of PyTorch in the same dtype, plus a band of rounding.

    The band is an eighth of a rounding of the input dtype, plus 16 of float32, plus those of the float32 exponents:
    gates make these as large as the log2 gates of a 128-row unit add up to. The gradients in summed add up over the S
    keys, and so do their roundings, in quadrature. Errors are relative to the result, or to a tenth of dO where terms
    cancel. In 16 bits most of dq's is that of O, which the backward takes rounded for dO . O and PyTorch does not.
    """
    exact = oracle(case, x, reference)
    dtype = x["q"].dtype
    plain = run(reference, case, x, compute_dtype=dtype)
    exponent = 0.0
    if "log_decay" in x and x["log_decay"].ndim == 3:
        g = x["log_decay"].masked_fill(x["log_decay"] <= -1e4, 0.0)
        c = torch.nn.functional.pad(g.double().cumsum(1), (0, 0, 128, 0))
        exponent = 1.45 * float((c[:, :-128] - c[:, 128:]).max())  # the largest sum over 128 tokens
    single = (16 + exponent) * torch.finfo(torch.float32).eps
    for name, want in exact.items():
        scale = want.norm().clamp(min=0.1 * x["do"].double().norm())
        band = torch.finfo(dtype).eps / 8 + single * (math.sqrt(case.S) if name in summed else 1.0)
        error = ((ours[name].double() - want).norm() / scale).item()
        budget = 2 * ((plain[name].double() - want).norm() / scale).item() + band
        assert math.isfinite(error), f"{case}: {name} is not finite"
        assert error <= budget, f"{case}: {name} error {error:.2e}, budget {budget:.2e}"
