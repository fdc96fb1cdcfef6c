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


def assemble(block: tr.Block, levels: tr.Levels, T: int) -> Tensor:
    """All scores from the levels, as the attention kernels read them."""
    B, nC, H = block.diag.shape[:3]
    scores = block.diag.new_zeros(B, H, nC * 64, nC * 64)
    for n in range(nC):
        scores[:, :, n * 64 : n * 64 + 64, n * 64 : n * 64 + 64] = block.diag[:, n]
    scores = scores[:, :, :T, :T].clone()
    for u in range(tr.Level(64, T).nodes):
        rows, cols = slice(u * 128 + 64, min(u * 128 + 128, T)), slice(u * 128, u * 128 + 64)
        scores[:, :, rows, cols] = pairs(block.q[:, rows], block.k[:, cols])
    for s, level in enumerate(tr.levels_of(T)):
        read_level(scores, levels.q[s], levels.k[s], level)
    return scores


@pytest.mark.parametrize("case", CASES, ids=str)
def test_levels_give_every_score(case: tuple[int, ...]) -> None:
    x = draw(*case)
    block = tr.block_level(*x)
    scores = assemble(block, tr.carry(block).levels, case[1])
    torch.testing.assert_close(scores, explicit_scores(*x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_level_backward_is_the_derivative(case: tuple[int, ...]) -> None:
    x = [t.requires_grad_() for t in draw(*case)]
    out = tr.block_level(*x)
    d = tr.Block(*(torch.randn_like(t) for t in out))
    expected = torch.autograd.grad(out, x, d)
    for name, a, b in zip(("q", "k", "w", "beta"), tr.block_level_backward(*x, d), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


def rows_of(levels: tr.Levels, T: int) -> tuple[Tensor, ...]:
    """The rows that exist, level by level."""
    out = []
    for s, level in enumerate(tr.levels_of(T)):
        out += [levels.q[s, :, : level.queries], levels.k[s, :, : level.keys]]
    return tuple(out)


def random_like(levels: tr.Levels, T: int) -> tr.Levels:
    """Random numbers, NaN in the rows that do not exist."""
    d = tr.Levels(torch.full_like(levels.q, torch.nan), torch.full_like(levels.k, torch.nan))
    for x in rows_of(d, T):
        x.copy_(torch.randn_like(x))
    return d


def level_zero(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random gradients of level 0: with zeros, and with NaN, in the rows that it does not read."""
    T = q.shape[1]
    blk = torch.arange(T) // 64
    right, left = blk % 2 == 1, (blk % 2 == 0) & ((blk + 1) * 64 < T)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    full = torch.where(right[:, None, None], dq, 0.0), torch.where(left[:, None, None], dk, 0.0)
    return *full, torch.where(right[:, None, None], dq, torch.nan), torch.where(left[:, None, None], dk, torch.nan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_carry_backward_is_the_derivative(case: tuple[int, ...]) -> None:
    T = case[1]
    block = tr.block_level(*draw(*case))
    q, k, m = (t.detach().requires_grad_() for t in block[1:])
    block = tr.Block(block.diag, q, k, m)
    carried = tr.carry(block)
    d = random_like(carried.levels, T)
    zq, zk, dq, dk = level_zero(q, k)
    outputs, grads = [q, k, *rows_of(carried.levels, T)], [zq, zk, *rows_of(d, T)]
    expected = torch.autograd.grad(outputs, (q, k, m), grads, materialize_grads=True)
    with torch.no_grad():
        ours = tr.carry_backward(block, carried, d, dq, dk)
    for name, a, b in zip("qkm", ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


def draw_start(B: int, T: int, H: int) -> Tensor:
    """First keys of units of 128 rows, multiples of 64, never moving left nor past their row."""
    n = -(-T // 128)
    lag = torch.randint(0, 9, (B, H, n), generator=torch.Generator().manual_seed(T)) * 64
    start = (torch.arange(n) * 128 - lag).clamp(min=0)
    return start.flip(2).cummin(2).values.flip(2).int()


def test_needed_rows_are_those_that_some_row_reads() -> None:
    B, T, H, G = 2, 2000, 4, 2
    start = draw_start(B, T, H)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    kept = (j <= i) & (j >= start.repeat_interleave(128, 2)[:, :, :T, None])  # [B, H, T, T]
    for level in tr.levels_of(T):
        h = level.h
        meet = kept & (i // (2 * h) == j // (2 * h)) & (i // h != j // h)
        q, k = tr.needed(start, level, G)
        read_q = tr._pack(meet.any(3).transpose(1, 2)[..., None].long(), level, 1).bool()
        read_k = tr._pack(meet.any(2).unflatten(1, (G, -1)).any(2).transpose(1, 2)[..., None].long(), level, 0).bool()
        assert torch.equal(q, read_q)
        assert torch.equal(k, read_k)
