"""The block level with decays of the channels against its definition in float64, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import HeadGate, cut
from attnzoo.algebra.triangular import rank_one_block
from attnzoo.kernels.path.levels import BLOCK, Leaves
from attnzoo.kernels.path.portable.decayed import decayed_level
from attnzoo.kernels.path.portable.decayed_backward import decayed_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(T: int, K: int, gates: str, H: int = 1, B: int = 1) -> list[Tensor]:
    """q, k, w (some repeated), beta (some 0, some 2) and log gates: strong (to -50) or some of them closed."""
    g = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(B, T, H, K, generator=g) for _ in range(3))
    again = torch.rand(T, generator=g) < 0.3
    w[:, again] = w[:, :1].clone()
    u, a = torch.rand(B, T, H, K, generator=g), -0.2 * torch.rand(B, T, H, K, generator=g)
    a = 250.0 * a * u**4 if gates == "strong" else a.masked_fill(u < 0.02, -math.inf).masked_fill(u > 0.7, 0.0)
    beta = (4 * torch.rand(B, T, H, generator=g) - 1).clamp(0, 2)
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


@pytest.mark.parametrize("gates", ["strong", "closed"])
@pytest.mark.parametrize(("T", "K"), [(1, 16), (130, 16), (70, 80)])
def test_block_kernels_equal_the_definition(T: int, K: int, gates: str) -> None:
    x = draw(T, K, gates, H=2 if K == 16 else 1)
    leaves = [t.double().requires_grad_() for t in x]
    exact = definition(*leaves)
    g = torch.Generator().manual_seed(1)
    d = Leaves(*(torch.randn(t.shape, generator=g).to(DEVICE) for t in exact))
    wanted = torch.autograd.grad(tuple(exact), leaves, tuple(t.double() for t in d))
    d.diag.add_(torch.full_like(d.diag, torch.nan).triu(1))
    got, grads = kernels(x, d)
    for name, a, b in zip((*Leaves._fields, *("dq", "dk", "dw", "dbeta", "da")), (*got, *grads), (*exact, *wanted),
                          strict=True):  # fmt: skip
        assert error(a, b.detach()) <= 2e-6, name
    closed = x[4] == -math.inf
    assert bool((grads[4][closed] == 0).all())


def test_any_views() -> None:
    """Heads of larger tensors, and gradients into such heads."""
    x = draw(70, 16, "strong", H=3, B=2)
    part = [t[1:, :, 1:] for t in x]
    d: Any = Leaves(*(torch.randn(t.shape, device=DEVICE) for t in definition(*(t.double() for t in part))))
    (block, kept), (whole, _) = decayed_level(*part), decayed_level(*x)
    assert torch.equal(block.q, whole.q[1:, :, 1:])
    assert torch.equal(block.k, whole.k[1:, :, 1:])
    out = [torch.full_like(t, torch.nan) for t in x]
    dq, dk, dw, dbeta, da = (t[1:, :, 1:] for t in out)
    decayed_backward(*part, d, kept, (dq, dk, dw, dbeta), da)
    _, alone = kernels([t.contiguous() for t in part], d)
    for got, want in zip(out, alone, strict=True):
        assert torch.equal(got[1:, :, 1:], want)
        assert got[0].isnan().all()
        assert got[:, :, 0].isnan().all()
