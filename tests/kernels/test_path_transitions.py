"""The tree of carries against explicit products of the factors, and its derivatives against autograd."""

from __future__ import annotations

from typing import Any

import path_definitions as dense
import pytest
import torch
from torch import Tensor

from attnzoo.kernels.common.device import machine
from attnzoo.kernels.levels import layout as tr
from attnzoo.kernels.path.fits import blocks_in_gluon
from attnzoo.kernels.path.portable import blocks, blocks_backward, carry, inverse
from attnzoo.kernels.path.portable.tree import new_tree, node_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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


def assemble(block: tr.Leaves, levels: tr.Levels, T: int) -> Tensor:
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
    block = dense.block_level(*x)
    scores = assemble(block, dense.carry(block).levels, case[1])
    torch.testing.assert_close(scores, explicit_scores(*x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_level_backward_is_the_derivative(case: tuple[int, ...]) -> None:
    x = [t.requires_grad_() for t in draw(*case)]
    out = dense.block_level(*x)
    d = tr.Leaves(*(torch.randn_like(t) for t in out))
    expected = torch.autograd.grad(out, x, d)
    for name, a, b in zip(("q", "k", "w", "beta"), dense.block_level_backward(*x, d), expected, strict=True):
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
    blk = torch.arange(T, device=q.device) // 64
    right, left = blk % 2 == 1, (blk % 2 == 0) & ((blk + 1) * 64 < T)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    full = torch.where(right[:, None, None], dq, 0.0), torch.where(left[:, None, None], dk, 0.0)
    return *full, torch.where(right[:, None, None], dq, torch.nan), torch.where(left[:, None, None], dk, torch.nan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_carry_backward_is_the_derivative(case: tuple[int, ...]) -> None:
    T = case[1]
    block = dense.block_level(*draw(*case))
    q, k, m = (t.detach().requires_grad_() for t in block[1:])
    block = tr.Leaves(block.diag, q, k, m)
    carried = dense.carry(block)
    d = random_like(carried.levels, T)
    zq, zk, dq, dk = level_zero(q, k)
    outputs, grads = [q, k, *rows_of(carried.levels, T)], [zq, zk, *rows_of(d, T)]
    expected = torch.autograd.grad(outputs, (q, k, m), grads, materialize_grads=True)
    with torch.no_grad():
        ours = dense.carry_backward(block, carried, d, dq, dk)
    for name, a, b in zip("qkm", ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


def carried_back(block: tr.Leaves, carried: tr.Carried, d: tr.Levels, dq: Tensor, dk: Tensor, start: Any = None) -> Any:
    """Gradients of q, k and the leaves, as ``dense.carry_backward`` has them."""
    gq, gk, zero = carry.carry_backward(block, carried, d, dq, dk, start)
    return gq, gk, node_gradients(block, carried, zero, d, block.q.shape[1], start)


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
        q, k = dense.needed(start, level, G)
        read_q = dense._pack(meet.any(3).transpose(1, 2)[..., None].long(), level, 1).bool()
        read_k = dense._pack(
            meet.any(2).unflatten(1, (G, -1)).any(2).transpose(1, 2)[..., None].long(), level, 0
        ).bool()
        assert torch.equal(q, read_q)
        assert torch.equal(k, read_k)


@pytest.mark.parametrize("T", [2000, 1856, 130])
def test_needed_nodes_are_those_that_some_row_reads_across(T: int) -> None:
    """A row after a node that reads keys before it; and what the kernels rely on: a needed node's children are too."""
    B, H, G, units = 2, 4, 2, -(-T // 64)
    start = draw_start(B, T, H)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    kept = (j <= i) & (j >= start.repeat_interleave(128, 2)[:, :, :T, None])  # [B, H, T, T]
    kept = kept.unflatten(1, (G, -1)).any(2)
    found, at = dense.needed_nodes(start, units, G), 0
    for s in range(tr.tree_scales(units)):
        h, size = 64 << s, tr.tree_nodes(units, s)
        for v in range(size):
            across = kept[:, :, (v + 1) * h :, : v * h].any(3).any(2)
            assert torch.equal(found[:, at + v], across), (s, v)
            if s + 1 < tr.tree_scales(units):
                assert bool((found[:, at + v] | ~found[:, at + size + v // 2]).all())
        at += size


def on_device(x: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(DEVICE, dtype) for t in x[:3]] + [x[3].to(DEVICE, torch.float32)]


def within(name: str, exact: Tensor, ours: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """Error against float64 at most twice that of PyTorch in float32, rounded to the same dtype, plus a band.

    The band is an eighth of a rounding of the inputs' dtype and 16 of float32.
    """
    assert ours.isfinite().all(), f"{name} is not finite"
    scale = exact.norm().clamp(min=1e-30)
    error, other = (((x.double() - exact).norm() / scale).item() for x in (ours, plain.to(ours.dtype)))
    budget = 2 * other + torch.finfo(dtype).eps / 8 + 16 * torch.finfo(torch.float32).eps
    assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


def doubled(x: Any) -> Any:
    return type(x)(*(t.double() for t in x))


DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hard", [False, True], ids=["mixed", "hard"])
@pytest.mark.parametrize("case", [(2, 1, 2, 2, 16), (1, 65, 1, 1, 128), (1, 130, 2, 1, 48)], ids=str)
def test_block_kernels_within_budget(case: tuple[int, ...], hard: bool, dtype: torch.dtype) -> None:
    """Hard: every beta is 2 and half of the w are the same, which makes I + L as ill-conditioned as it gets."""
    x = draw(*case)
    if hard:
        x[2][:, ::2] = x[2][:, :1].clone()
        x[3].fill_(2.0)
    x = on_device(x, dtype)
    kept = inverse.new_kept(x[0], x[2])
    exact, ours = dense.block_level(*(t.double() for t in x)), blocks.block_level(*x, kept)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):  # its products are in bf16 too
        plain = dense.block_level(*x)
    ours = ours._replace(diag=ours.diag.tril(), m=ours.m.float().sum(0)[:, : plain.m.shape[1]])
    for name, a, b, c in zip(tr.Leaves._fields, exact, ours, plain, strict=True):
        within(name, a, b, c, dtype)

    d = tr.Leaves(*(torch.randn_like(t) for t in ours))
    exact_d = dense.block_level_backward(*(t.double() for t in x), doubled(d))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        plain_d = dense.block_level_backward(*x, d)
    d.diag.add_(torch.full_like(d.diag, torch.nan).triu(1))
    for name, a, b, c in zip("qkwb", exact_d, blocks_backward.block_level_backward(*x, d, kept), plain_d, strict=True):
        within(f"d{name}", a, b, c, dtype)


def test_block_kernels_take_views_of_any_scale() -> None:
    """Head slices of larger tensors; queries of the size of 1e4 and keys of 1e-4 in float16; beta 0 and 2 exact."""
    x = on_device(draw(2, 70, 4, 4, 32), torch.float16)
    x[3][:, :, 1] = 0.0
    x[0], x[1] = x[0] * 1e4, x[1] * 1e-4
    part = [t[:1, :, 1:3] for t in x]
    kept = inverse.new_kept(part[0], part[2])
    whole, ours = blocks.block_level(*x), blocks.block_level(*part, kept)
    assert torch.equal(ours.q, whole.q[:1, :, 1:3])
    assert torch.equal(ours.k, whole.k[:1, :, 1:3])
    assert torch.equal(ours.diag.tril(), whole.diag[:1, :, 1:3].tril())
    assert torch.equal(ours.q[:, :, 0], x[0][:1, :, 1])  # beta = 0 moves nothing
    assert torch.equal(ours.k[:, :, 0], x[1][:1, :, 1])
    exact = dense.block_level(*(t.double() for t in part))
    assert (ours.diag.tril() - exact.diag).norm() <= 1e-5 * exact.diag.norm()
    d = tr.Leaves(*(torch.randn_like(t) * 1e-4 for t in ours))
    out = [torch.full_like(t, torch.nan) for t in x]
    blocks_backward.block_level_backward(*part, d, kept, tuple(t[:1, :, 1:3] for t in out))
    for got, new in zip(out, blocks_backward.block_level_backward(*part, d, kept), strict=True):
        assert torch.equal(got[:1, :, 1:3], new)
        assert got[1:].isnan().all()
        assert got[:, :, 0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("G", [1, 2])
def test_one_kernel_makes_all_gradients_of_a_block(monkeypatch: pytest.MonkeyPatch, G: int, dtype: torch.dtype) -> None:
    x = on_device(draw(1, 150, 2, G, 40), dtype)
    kept = inverse.new_kept(x[0], x[2])
    d = tr.Leaves(
        *(torch.randn_like(t) for t in blocks.block_level(*x, kept)._replace(m=x[0].new_empty(1, 3, G, 40, 40)))
    )
    exact = dense.block_level_backward(*(t.double() for t in x), doubled(d))
    one_by_one = blocks_backward.block_level_backward(*x, d, kept)
    monkeypatch.setattr(blocks_backward, "block_backward_at_once", lambda *_: True)
    monkeypatch.setattr(blocks_backward, "path_product_bwd_kernel", None)
    at_once = blocks_backward.block_level_backward(*x, d, kept)
    for name, a, b, c in zip("qkwb", exact, at_once, one_by_one, strict=True):
        within(f"d{name}", a, b, c, dtype)  # sums in another order: no closer to each other than to the exact ones


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pruned", [False, True], ids=["all", "pruned"])
@pytest.mark.parametrize(
    "case", [(1, 60, 1, 1, 16), (1, 120, 1, 1, 80), (2, 330, 2, 1, 16), (1, 600, 2, 1, 16)], ids=str
)
def test_carry_kernels_within_budget(case: tuple[int, ...], pruned: bool, dtype: torch.dtype) -> None:
    B, T, H, G, K = case
    x = on_device(draw(*case), dtype)
    start = draw_start(B, T, H).to(DEVICE) if pruned else None
    block, plain, units = blocks.block_level(*x), dense.block_level(*x), -(-T // 64)
    block.m[:, :, units:] = torch.nan
    plain = plain._replace(q=block.q, k=block.k, m=block.m.float().sum(0)[:, : plain.m.shape[1]])
    exact, theirs, ours = dense.carry(doubled(plain)), dense.carry(plain), carry.carry(block, start)
    exists = [part for level in tr.levels_of(T) for part in (dense.needed(start, level, G) if pruned else (None, None))]
    reads = [None if e is None else e.to(DEVICE) for e in exists]

    def kept(levels: tr.Levels) -> list[Tensor]:
        return [r if m is None else r.where(m, 0.0) for r, m in zip(rows_of(levels, T), reads, strict=True)]

    for a, b, c in zip(kept(exact.levels), kept(ours.levels), kept(theirs.levels), strict=True):
        within("level", a, b, c, dtype)
    every = torch.zeros(B, H, -(-T // 128), dtype=torch.int32, device=DEVICE)
    nodes = dense.needed_nodes(every if start is None else start, units, G)
    nodes[:, :units] = True  # the leaves are there anyhow
    ours.nodes.masked_fill_(~nodes[None, ..., None, None], torch.nan)  # nobody reads them
    computed = [t.where(nodes[..., None, None], 0.0) for t in (exact.nodes, ours.nodes.float().sum(0), theirs.nodes)]
    within("nodes", *computed, torch.float32)

    d = random_like(theirs.levels, T)
    for r, m in zip(rows_of(d, T), reads, strict=True):
        if m is not None:
            r.copy_(r.where(m, torch.nan))
    _, _, dq, dk = level_zero(block.q, block.k)
    exact_d = dense.carry_backward(
        doubled(plain), tr.Carried(doubled(theirs.levels), exact.nodes), doubled(d), dq.double(), dk.double(), start
    )
    plain_d = dense.carry_backward(plain, theirs, d, dq, dk, start)
    gq, gk, gm = carried_back(block, ours, d, dq, dk, start)
    plain_d = *plain_d[:2], plain_d[2].to(dtype)  # the running gradients are kept in the inputs' dtype
    for name, a, b, c in zip("qkm", exact_d, (gq, gk, gm), plain_d, strict=True):
        within(f"d{name}", a, b, c, dtype)


@pytest.mark.timeout(120)  # a deadlock, not a wrong number, is what fails here
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU starts programs in an order of its own")
def test_programs_may_start_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started last to first, one after another: none may wait for one that has not started."""
    from triton.runtime.interpreter import InterpreterBuilder

    x = on_device(draw(1, 600, 2, 1, 16), torch.float32)
    block = blocks.block_level(*x)
    carried = carry.carry(block)
    d = random_like(carried.levels, 600)
    _, _, dq, dk = level_zero(block.q, block.k)
    want = carried_back(block, carried, tr.Levels(d.q.clone(), d.k.clone()), dq, dk)

    def backwards(self: Any, x: int, y: int, z: int) -> None:
        self.grid_idx = tuple(n - 1 - i for n, i in zip(self.grid_dim, (x, y, z), strict=True))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
    got = carried_back(block, carried, d, dq, dk)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(
    not blocks_in_gluon(128, torch.bfloat16, machine(torch.device(DEVICE))), reason="the kernel is for Hopper"
)
@pytest.mark.parametrize("K", [64, 80, 128])
@pytest.mark.parametrize("H", [2, 4])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
def test_blocks_in_gluon_are_the_portable_ones(
    K: int, H: int, keep: bool, w_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, w, beta = on_device(draw(2, 3 * 64 + 37, H, 2, K), torch.bfloat16)
    w = torch.nn.functional.normalize(w.float(), dim=-1).to(w_dtype)
    k *= torch.linspace(0.01, 100, k.shape[1], device=k.device)[:, None, None]  # rows of different sizes
    n, found = 4, []
    for gluon in (True, False):
        if not gluon:
            monkeypatch.setattr(blocks, "blocks_in_gluon", lambda *given: False)
        diag = q.new_full((2, n, H, 64, 64), torch.nan, dtype=torch.float32)
        m = new_tree(q, n, 2).fill_(torch.nan)
        kept = inverse.new_kept(q, w) if keep else None
        block = blocks.block_level(q, k, w, beta, kept, tr.Leaves(diag, q * torch.nan, k * torch.nan, m))
        parts = {"diag": diag.tril(), "q": block.q, "k": block.k, "m": m[:, :, :n].double().sum(0)}
        if kept is not None:
            assert torch.equal(kept.w, w.to(torch.bfloat16))
            parts |= {"v": kept.v, "x": kept.x.double().sum(0)}
        found.append(parts)
    limits = {"diag": 2e-4, "q": 1e-3, "k": 1e-3, "m": 2e-6, "v": 5e-5, "x": 1e-5}
    for name, ours in found[0].items():
        theirs = found[1][name].double()
        error = ((ours.double() - theirs).norm() / theirs.norm()).item()
        assert error <= limits[name], f"{name}: {error:.2e}"  # not so where something is NaN
