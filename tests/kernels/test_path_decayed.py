"""Transitions whose channels decay, too: the block level and whole calls against the definition in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from attention_ops import assert_only_asked_for, assert_written_out
from path_cases import DEVICE, Case, inputs, large_tiles, triton, within_budget
from torch import Tensor

from attnzoo import Prune
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import HeadGate, cut
from attnzoo.algebra.triangular import rank_one_block
from attnzoo.kernels.levels.layout import BLOCK, Leaves
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.path.portable.decayed import decayed_level
from attnzoo.kernels.path.portable.decayed_backward import decayed_backward
from attnzoo.kernels.path.reference import path_reference
from attnzoo.samples import Regime

__all__ = ["large_tiles"]

CASES = [
    (Case(gate="none", T=140, H=1, diag="strong"), torch.float32),
    (Case(T=40, G=1, K=48, diag="mixed", sink=True, cu_seqlens=(0, 1, 20, 40), options={"window": 9}), torch.float32),
    (Case(gate="open", T=40, H=1, diag="open"), torch.float16),
]
GPU = [  # what the Gluon kernels take
    Case(gate="none", B=2, T=1100, H=4, G=2, K=64, V=64, diag="open"),
    Case(gate="none", T=700, K=128, V=64, diag="strong"),
    Case(T=1000, K=128, V=128, cu_seqlens=(0, 1, 130, 130, 700, 1000), sink=True, diag="mixed"),
    Case(T=1500, K=64, V=64, diag="mixed", options={"window": 300}),
    Case(gate="strong", T=1100, K=64, V=64, diag="open", options={"prune": Prune(), "scale": 0.1}),
]


@pytest.mark.parametrize("regime", ["open", "zero", "closed", "mixed"])
@pytest.mark.parametrize("name", ["path_wall", "gated_path_wall"])
def test_the_definition_is_the_product_written_out(name: str, regime: Regime) -> None:
    assert_written_out(path_reference, name, 21, regime)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in TF32 as GPUs make them: the last 13 bits of the factors are cut off, always towards 0."""
    if DEVICE != "cpu":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        if precision.name == "TF32" and a.data.dtype == "float32":
            a, b = (TensorHandle((x.data.view("uint32") & 0xFFFFE000).view("float32"), x.dtype) for x in (a, b))
        return product(self, a, b, d, precision, most)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_kernel_within_budget(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in GPU] + [(GPU[n], x) for n in (0, 1) for x in (torch.float16, torch.float32)],
    ids=str,
)
def test_kernel_within_budget_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


@torch.no_grad()
def test_pruned_rows_lose_no_more_than_eps() -> None:
    """And as many blocks go as in the reference."""
    x = inputs(Case(T=200, H=1, gate="open", diag="open"), torch.float32)
    gates: dict[str, Any] = {n: x[n] for n in ("w", "beta", "log_diag")}
    gates["log_decay"] = torch.full_like(x["log_decay"], -0.12)
    run = functools.partial(path_attention, 0.1 * x["q"], x["k"], x["v"], **gates, return_lse=True)
    eps = 1e-2
    (_, lse), (_, want) = (run(impl=impl, prune=Prune(eps)) for impl in ("triton", "reference"))
    lost = 1 - (lse - run(impl="reference")[1]).exp()
    assert 1e-6 < float(lost.max()) <= eps
    torch.testing.assert_close(lse, want, rtol=1e-5, atol=1e-5)


def test_frozen_inputs_have_no_gradient() -> None:
    x = inputs(Case(T=20, H=1, gate="none", diag="open"), torch.float32)
    assert_only_asked_for(path_attention, x, (("q",), ("k", "v"), ("log_diag",)))


BAD: list[tuple[Any, str]] = [
    (torch.zeros(1, 4, 1, 16), r"log_diag: expected \[B=1, T=4, H=2, K=16\] as q"),
    (torch.zeros(1, 4, 2, 16).half(), r"log_diag: expected float32"),
    (torch.full((1, 4, 2, 16), 0.5), r"log_diag: expected natural logs <= 0, got 0.5"),
    (0.5, r"log_diag: expected a tensor or None, got float"),
]


@pytest.mark.parametrize(("log_diag", "message"), BAD, ids=["shape", "dtype", "values", "type"])
def test_wrong_gates_are_named(log_diag: Any, message: str) -> None:
    x = inputs(Case(T=4, gate="none"), torch.float32)
    log_diag = log_diag.to(DEVICE) if isinstance(log_diag, Tensor) else log_diag
    with pytest.raises((ValueError, TypeError), match=message):
        path_attention(**{n: t for n, t in x.items() if n != "do"}, log_diag=log_diag)


def draw(T: int, K: int, gates: str, H: int = 1) -> list[Tensor]:
    """q, k, w (some repeated), beta (some 0, some 2) and log gates: open, uneven, strong (to -50) or closed."""
    g = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(1, T, H, K, generator=g) for _ in range(3))
    again = torch.rand(T, generator=g) < 0.3
    w[:, again] = w[:, :1].clone()
    u, a = torch.rand(1, T, H, K, generator=g), -0.2 * torch.rand(1, T, H, K, generator=g)
    if gates == "strong":
        a = 250.0 * a * u**4
    if gates == "closed":
        a = a.masked_fill(u < 0.02, -math.inf).masked_fill(u > 0.7, 0.0)
    if gates == "uneven":  # groups of 16 tokens are calm, those of 64 are not
        a[:, 20:40] *= 4.0
    beta = (4 * torch.rand(1, T, H, generator=g) - 1).clamp(0, 2)
    return [x.to(DEVICE) for x in (q, k, w / w.norm(dim=-1, keepdim=True), beta, a)]


def definition(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, a: Tensor) -> Leaves:
    """The closed form of the algebra, laid out as the kernels have it."""
    T = q.shape[1]
    q, k, w, beta, a = (cut(x.transpose(1, 2), BLOCK) for x in (q, k, w, beta, a))  # [B, H, nC, C, ...]
    block = rank_one_block(Diagonal(), q, k, [w], beta[..., None], HeadGate(log_diag=a))
    rows = [x.flatten(2, 3)[:, :, :T].transpose(1, 2) for x in (block.q, block.k)]
    assert block.total is not None
    return Leaves(block.scores.tril().transpose(1, 2), rows[0], rows[1], block.total.mT.transpose(1, 2))


def kernels(x: list[Tensor], d: Leaves) -> tuple[Leaves, list[Tensor]]:
    """What the kernels make, M from its two pieces, and their gradients."""
    block, kept = decayed_level(*x)
    m = block.m.float().sum(0)[:, : d.m.shape[1]]
    dq, dk, dw, dbeta, da = out = [torch.full_like(t, torch.nan) for t in x]
    decayed_backward(*x, d, kept, (dq, dk, dw, dbeta), da)
    return block._replace(diag=block.diag.tril(), m=m), out


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


@pytest.mark.parametrize(
    ("T", "K", "gates"), [(130, 16, "strong"), (70, 80, "closed"), (50, 16, "open"), (50, 16, "uneven")]
)
def test_block_kernels_equal_the_definition(T: int, K: int, gates: str) -> None:
    """M to the rounding of a matrix of length 1: it takes gates that make it small to nothing."""
    x = draw(T, K, gates)
    leaves = [t.double().requires_grad_() for t in x]
    exact = definition(*leaves)
    g = torch.Generator().manual_seed(1)
    d = Leaves(*(torch.randn(t.shape, generator=g).to(DEVICE) for t in exact))
    wanted = torch.autograd.grad(tuple(exact), leaves, tuple(t.double() for t in d))
    d.diag.add_(torch.full_like(d.diag, torch.nan).triu(1))
    got, grads = kernels(x, d)
    names = (*Leaves._fields, "dq", "dk", "dw", "dbeta", "da")
    for name, ours, want in zip(names, (*got, *grads), (*exact, *wanted), strict=True):
        scale = want.detach().norm().clamp(min=exact.m.numel() ** 0.5 / 8 if name == "m" else 0.0)
        assert float((ours.double() - want.detach()).norm() / scale) <= 2e-6, name
    assert bool((grads[4][x[4] == -math.inf] == 0).all())


def test_any_views() -> None:
    """A head of larger tensors, and gradients into such a head."""
    x = draw(20, 16, "strong", H=2)
    part = [t[:, :, 1:] for t in x]
    d: Any = Leaves(*(torch.randn(t.shape, device=DEVICE) for t in definition(*(t.double() for t in part))))
    (block, kept), (whole, _) = decayed_level(*part), decayed_level(*x)
    assert torch.equal(block.q, whole.q[:, :, 1:])
    assert torch.equal(block.k, whole.k[:, :, 1:])
    out = [torch.full_like(t, torch.nan) for t in x]
    dq, dk, dw, dbeta, da = (t[:, :, 1:] for t in out)
    decayed_backward(*part, d, kept, (dq, dk, dw, dbeta), da)
    _, alone = kernels([t.contiguous() for t in part], d)
    for got, want in zip(out, alone, strict=True):
        assert torch.equal(got[:, :, 1:], want)
        assert got[:, :, 0].isnan().all()
