"""The tree of carries against explicit products of the factors, and its derivatives against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnzoo.kernels.path import transitions as tr

CASES = [  # B, T, H, G, K
    (2, 1, 2, 2, 16),
    (1, 64, 1, 1, 16),
    (2, 130, 4, 2, 16),
    (1, 513, 2, 1, 16),
    (1, 1100, 2, 2, 16),
    (1, 1536 + 65, 2, 1, 32),
]


def draw(B: int, T: int, H: int, G: int, K: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """q, k, w (some repeated), beta (some 0, some 2)."""
    g = torch.Generator().manual_seed(seed)
    q, k, w = (torch.randn(B, T, n, K, generator=g, dtype=torch.float64) for n in (H, G, G))
    again = torch.rand(T, generator=g) < 0.3
    w[:, again] = w[:, :1].clone()
    u = torch.rand(B, T, G, generator=g, dtype=torch.float64)
    beta = (4 * u - 1).clamp(0, 2)
    return [x.to(dtype) for x in (q, k, w / w.norm(dim=-1, keepdim=True), beta)]


def explicit_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """k_j^T R_{j+1} ... R_i q_i for j <= i, [B, H, T, T], one factor at a time."""
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    scores = q.new_zeros(q.shape[0], H, T, T)
    keys = q.new_zeros(q.shape[0], T, G, q.shape[3])
    for i in range(T):
        inner = torch.einsum("bjgk,bgk->bjg", keys, w[:, i]) * beta[:, None, i]
        keys = keys - inner[..., None] * w[:, None, i]
        keys[:, i] = k[:, i]
        each = keys[:, : i + 1].repeat_interleave(H // G, 2)
        scores[:, :, i, : i + 1] = torch.einsum("bjhk,bhk->bhj", each, q[:, i])
    return scores


def pairs(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihk,bjhk->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))


def read_level(scores: Tensor, q: Tensor, k: Tensor, level: tr.Level) -> None:
    """Write the scores of a level's packed rows where they belong."""
    h = level.h
    for u in range(level.nodes):
        end = min(h, level.T - (2 * u + 1) * h)
        rows, cols = slice((2 * u + 1) * h, (2 * u + 1) * h + end), slice(2 * u * h, (2 * u + 1) * h)
        scores[:, :, rows, cols] = pairs(q[:, u * h : u * h + end], k[:, u * h : (u + 1) * h])


def assemble(block: tr.Block, near: tr.Levels, far: tr.Levels | None, T: int) -> Tensor:
    """All scores from the levels, as the attention kernels read them."""
    B, nC, H = block.diag.shape[:3]
    scores = block.diag.new_zeros(B, H, nC * 64, nC * 64)
    for n in range(nC):
        scores[:, :, n * 64 : n * 64 + 64, n * 64 : n * 64 + 64] = block.diag[:, n]
    scores = scores[:, :, :T, :T].clone()
    for s in range(3):
        read_level(scores, near.q[s], near.k[s], tr.Level(64 << s, T))
    for s in range(tr.far_count(T)):
        assert far is not None
        read_level(scores, far.q[s], far.k[s], tr.Level(512 << s, T))
    return scores


def everything(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    T = q.shape[1]
    block = tr.block_level(q, k, w, beta)
    near, qs, ks, p = tr.near_levels(block.q, block.k, block.m)
    n = tr.far_count(T)
    far = tr.far_levels(qs, ks, tr.tree(p), 0, n) if n else None
    return assemble(block, near, far, T)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_levels_give_every_score(case: tuple[int, ...]) -> None:
    x = draw(*case)
    torch.testing.assert_close(everything(*x), explicit_scores(*x), rtol=1e-11, atol=1e-11)


def test_near_stage_runs_on_slabs() -> None:
    x = draw(2, 1400, 2, 1, 16)
    whole = tr.near_levels(*tr.block_level(*x)[1:])
    for at in (0, 512, 1024):
        part = tr.near_levels(*tr.block_level(*(t[:, at : at + 512] for t in x))[1:])
        torch.testing.assert_close(part[1], whole[1][:, at : at + 512])
        torch.testing.assert_close(part[2], whole[2][:, at : at + 512])
        torch.testing.assert_close(part[3], whole[3][:, at // 512 : at // 512 + 1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_level_backward_is_the_derivative(case: tuple[int, ...]) -> None:
    x = [t.requires_grad_() for t in draw(*case)]
    out = tr.block_level(*x)
    d = tr.Block(*(torch.randn_like(t) for t in out))
    expected = torch.autograd.grad(out, x, d)
    for name, a, b in zip(("q", "k", "w", "beta"), tr.block_level_backward(*x, d), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


def rows_of(levels: tr.Levels, lo: int, h: int, T: int) -> tuple[Tensor, ...]:
    """The defined rows of some levels."""
    out = []
    for s in range(levels.q.shape[0]):
        level = tr.Level(h << (lo + s), T)
        out += [levels.q[s, :, : level.queries], levels.k[s, :, : level.keys]]
    return tuple(out)


def poison(levels: tr.Levels, lo: int, h: int, T: int) -> tr.Levels:
    """Random gradients, NaN where rows are not defined."""
    d = tr.Levels(torch.full_like(levels.q, torch.nan), torch.full_like(levels.k, torch.nan))
    for x in rows_of(d, lo, h, T):
        x.copy_(torch.randn_like(x))
    return d


@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_levels_backward_is_the_derivative(case: tuple[int, ...]) -> None:
    T = case[1]
    q, k, m = (t.detach().requires_grad_() for t in tr.block_level(*draw(*case))[1:])
    levels, *rest = tr.near_levels(q, k, m)
    d = poison(levels, 0, 64, T)
    drest = [torch.randn_like(x) for x in rest]
    grads = [*rows_of(d, 0, 64, T), *drest]
    expected = torch.autograd.grad([*rows_of(levels, 0, 64, T), *rest], (q, k, m), grads, materialize_grads=True)
    with torch.no_grad():
        ours = tr.near_levels_backward(m, levels, d, *drest)
    for name, a, b in zip("qkm", ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("T", [513, 1024, 2200, 4096])
@pytest.mark.parametrize("group", [1, 2, 9])
def test_far_levels_backward_is_the_derivative(T: int, group: int) -> None:
    B, H, G, K, n = 2, 2, 1, 16, tr.far_count(T)
    q, k = (torch.randn(B, T, x, K, dtype=torch.float64, requires_grad=True) for x in (H, G))
    p = (torch.randn(B, -(-T // 512), G, K, K, dtype=torch.float64) / 4).requires_grad_()
    nodes = tr.tree(p)
    levels = tr.far_levels(q, k, nodes, 0, n)
    d = poison(levels, 0, 512, T)
    expected = torch.autograd.grad(rows_of(levels, 0, 512, T), (q, k, p), rows_of(d, 0, 512, T), materialize_grads=True)
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    dnodes = torch.zeros_like(nodes)
    for hi in range(n, 0, -group):
        lo = max(0, hi - group)
        part = tr.far_levels(q.detach(), k.detach(), nodes.detach(), lo, hi)
        Tq, Tk = part.q.shape[2], part.k.shape[2]
        tr.far_levels_backward(part, tr.Levels(d.q[lo:hi, :, :Tq], d.k[lo:hi, :, :Tk]), nodes.detach(), lo, hi, dq, dk,
                               dnodes)  # fmt: skip
    ours = dq, dk, tr.tree_backward(nodes.detach(), dnodes, p.shape[1])
    for name, a, b in zip("qkp", ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")
