"""PaTH's blocks, tree of products and carries written out in PyTorch: what the kernels are held to."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.kernels.levels.layout import (
    BLOCK,
    UNIT,
    Carried,
    Leaves,
    Level,
    Levels,
    level_count,
    level_rows,
    tree_nodes,
    tree_offset,
    tree_scales,
)
from attnzoo.precision import wide_dtype


def _cut(x: Tensor, size: int) -> Tensor:
    """[B, T, ...] to [B, n, size, ...], filled up with zeros."""
    pad = -x.shape[1] % size
    y: Tensor = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)).unflatten(1, (-1, size))
    return y


def _blocks(x: Tensor, G: int) -> Tensor:
    """[B, T, H, K] to [B, nC, G, H/G, C, K] in the wide dtype."""
    y: Tensor = _cut(x.to(wide_dtype(x.dtype)), BLOCK).unflatten(3, (G, -1))
    return y.permute(0, 1, 3, 4, 2, 5)


def _tokens(x: Tensor, T: int, dtype: torch.dtype) -> Tensor:
    """Inverse of _blocks."""
    return x.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :T].to(dtype).contiguous()


class _Ut(NamedTuple):
    """The UT transform of a block, all [B, nC, G, 1, C, .]: y = x w rows y_a = beta_a R_1 .. R_{a-1} w_a."""

    gram: Tensor  # strictly lower w w^T
    inverse: Tensor  # (I + diag(beta) gram)^-1
    x: Tensor  # inverse diag(beta)
    wk: Tensor  # strictly lower w k^T
    y: Tensor  # x w
    z: Tensor  # x wk


def _ut(k: Tensor, w: Tensor, beta: Tensor) -> _Ut:
    gram = (w @ w.mT).tril(-1)
    eye = torch.eye(BLOCK, dtype=w.dtype, device=w.device)
    inverse = torch.linalg.solve_triangular(eye + beta[..., None] * gram, eye, upper=False, unitriangular=True)
    x = inverse * beta[..., None, :]
    wk = (w @ k.mT).tril(-1)
    return _Ut(gram, inverse, x, wk, x @ w, x @ wk)


def block_level(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Leaves:
    """Closed form of the blocks. q [B, T, H, K]; k, w [B, T, G, K]; beta [B, T, G]."""
    T, G = k.shape[1:3]
    b_q, b_k, b_w = _blocks(q, G), _blocks(k, G), _blocks(w, G)
    u = _ut(b_k, b_w, _blocks(beta[..., None], G)[..., 0])
    qw = (b_q @ b_w.mT).tril()
    eye = torch.eye(k.shape[3], dtype=b_w.dtype, device=w.device)
    return Leaves(
        diag=(b_q @ b_k.mT - qw @ u.z).tril().flatten(2, 3),
        q=_tokens(b_q - qw @ u.y, T, q.dtype),
        k=_tokens(b_k - u.z.mT @ b_w, T, k.dtype),
        m=(eye - u.y.mT @ b_w).squeeze(3),
    )


def block_level_backward(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, d: Leaves
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, w, beta in the wide dtype, given those of all parts of the block level.

    d.diag is read where it means something: on and below the diagonal, in rows before T.
    """
    T, G = k.shape[1:3]
    b_q, b_k, b_w, d_q, d_k = (_blocks(x, G) for x in (q, k, w, d.q, d.k))
    b_beta = _blocks(beta[..., None], G)[..., 0]
    rows = torch.arange(d.diag.shape[1] * BLOCK, device=q.device).view(-1, 1, 1, BLOCK, 1) < T
    d_a, d_m = d.diag.unflatten(2, (G, -1)).where(rows, 0.0).tril(), d.m.unsqueeze(3)
    u = _ut(b_k, b_w, b_beta)
    qw = (b_q @ b_w.mT).tril()

    d_qw = -(d_q @ u.y.mT + d_a @ u.z.mT).tril()
    dq = d_q + d_a @ b_k + d_qw @ b_w
    d_y = -(qw.mT @ d_q).sum(3, keepdim=True) - b_w @ d_m.mT
    d_z = -(qw.mT @ d_a).sum(3, keepdim=True) - b_w @ d_k.mT
    d_x = d_y @ b_w.mT + d_z @ u.wk.mT
    d_wk = (u.x.mT @ d_z).tril(-1)
    dk = d_k + (d_a.mT @ b_q).sum(3, keepdim=True) + d_wk.mT @ b_w
    d_l = -(u.inverse.mT @ (d_x * b_beta[..., None, :]) @ u.inverse.mT).tril(-1)
    dbeta = (u.inverse * d_x).sum(-2) + (d_l * u.gram).sum(-1)
    d_gram = b_beta[..., None] * d_l
    dw = (d_qw.mT @ b_q).sum(3, keepdim=True) + u.x.mT @ d_y + d_wk @ b_k - u.z @ d_k - u.y @ d_m
    dw = dw + (d_gram + d_gram.mT) @ b_w
    wide = wide_dtype(q.dtype)
    return (
        _tokens(dq, T, wide),
        _tokens(dk, T, wide),
        _tokens(dw, T, wide),
        _tokens(dbeta[..., None], T, wide)[..., 0],
    )


def _apply(x: Tensor, n: Tensor) -> Tensor:
    """Rows x [B, u, h, H, K] times n [B, u, G, K, K], one matrix per node and key head."""
    return torch.einsum("buhgrk,bugkl->buhgrl", x.unflatten(3, (n.shape[2], -1)), n).flatten(3, 4)


def _outer(x: Tensor, y: Tensor, G: int) -> Tensor:
    """Sum over rows and query heads of x y^T: [B, u, h, H, K] twice to [B, u, G, K, K]."""
    return torch.einsum("buhgrk,buhgrl->bugkl", x.unflatten(3, (G, -1)), y.unflatten(3, (G, -1)))


def _pack(x: Tensor, level: Level, side: int) -> Tensor:
    """The rows of the right (1) or left (0) children of a level: [B, T, H, K] to [B, rows, H, K]."""
    packed: Tensor = _cut(x, level.h * 2)[:, : level.nodes].unflatten(2, (2, -1))[:, :, side].flatten(1, 2)
    return packed[:, : level.queries if side else level.keys]


def _unpack(x: Tensor, level: Level) -> Tensor:
    """Packed rows [B, rows, H, K] as [B, nodes, h, H, K], filled up with zeros."""
    pad = level.nodes * level.h - x.shape[1]
    y: Tensor = F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, level.h))
    return y


def _join(left: Tensor, right: Tensor, rest: Tensor) -> Tensor:
    """Tokens [B, T, H, K] of the first nodes by their children [B, n, h, H, K], and the rest [B, ., 2, h, H, K]."""
    return torch.cat([torch.stack([left, right], 2), rest], 1).flatten(1, 3)


def _up(q: Tensor, k: Tensor, nodes: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """q and k carried to the ends of nodes twice the size; nodes [B, n, G, K, K] of size h."""
    n, T = level.nodes, q.shape[1]
    c_q, c_k = (_cut(x, 2 * level.h).unflatten(2, (2, -1)) for x in (q, k))
    new_q = _join(c_q[:, :n, 0], _apply(c_q[:, :n, 1], nodes[:, 0 : 2 * n : 2].mT), c_q[:, n:])
    new_k = _join(_apply(c_k[:, :n, 0], nodes[:, 1 : 2 * n : 2]), c_k[:, :n, 1], c_k[:, n:])
    return new_q[:, :T], new_k[:, :T]


def _down(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, nodes: Tensor, level: Level) -> tuple[Tensor, Tensor, Tensor]:
    """Derivative of _up: dq, dk [B, T, ., K] of its results; q, k its packed inputs. Gives dq, dk, dnodes."""
    n, T, G = level.nodes, dq.shape[1], nodes.shape[2]
    left, right = nodes[:, 0 : 2 * n : 2], nodes[:, 1 : 2 * n : 2]
    c_q, c_k = (_cut(x, 2 * level.h).unflatten(2, (2, -1)) for x in (dq, dk))
    dnodes = torch.zeros_like(nodes)
    dnodes[:, 0 : 2 * n : 2] = _outer(c_q[:, :n, 1], _unpack(q, level), G)
    dnodes[:, 1 : 2 * n : 2] = _outer(_unpack(k, level), c_k[:, :n, 0], G)
    new_q = _join(c_q[:, :n, 0], _apply(c_q[:, :n, 1], left), c_q[:, n:])
    new_k = _join(_apply(c_k[:, :n, 0], right.mT), c_k[:, :n, 1], c_k[:, n:])
    return new_q[:, :T], new_k[:, :T], dnodes


def _add(x: Tensor, packed: Tensor, level: Level, side: int) -> Tensor:
    """x [B, T, H, K] plus a level's packed rows."""
    c: Tensor = _cut(x, 2 * level.h).unflatten(2, (2, -1)).clone()
    c[:, : level.nodes, side] += _unpack(packed, level).to(x.dtype)
    return c.flatten(1, 3)[:, : x.shape[1]]


def _stack(levels: list[Tensor], rows: int) -> Tensor:
    return torch.stack([F.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1])) for x in levels])


def tree(units: Tensor) -> Tensor:
    """Products of all nodes over units [B, n, G, K, K]: [B, total, G, K, K], scale by scale."""
    scales = [units]
    for _ in range(1, tree_scales(units.shape[1])):
        left, right = scales[-1][:, 0::2], scales[-1][:, 1::2]
        n = right.shape[1]
        scales.append(torch.cat([left[:, :n] @ right, left[:, n:]], 1))
    return torch.cat(scales, 1)


def tree_backward(nodes: Tensor, dnodes: Tensor, units: int) -> Tensor:
    """Gradient of the units, given that of every node; both [B, total, G, K, K]."""
    d = dnodes.clone()
    for s in reversed(range(tree_scales(units) - 1)):
        at, size = tree_offset(units, s), tree_nodes(units, s)
        child, dchild, above = nodes[:, at : at + size], d[:, at : at + size], d[:, at + size :]
        n = size // 2
        dchild[:, 0 : 2 * n : 2] += above[:, :n] @ child[:, 1::2].mT
        dchild[:, 1::2] += child[:, 0 : 2 * n : 2].mT @ above[:, :n]
        if size % 2:
            dchild[:, -1] += above[:, n]
    return d[:, :units]


def needed(start: Tensor, level: Level, G: int) -> tuple[Tensor, Tensor]:
    """Which packed rows of a level some row reads: queries [B, rows, H, 1], keys [B, rows, G, 1], bool.

    Args:
        start: [B, H, ceil(T / 128)] first key of each unit of rows, a multiple of 64, never moving left.
    """
    u = torch.arange(level.nodes, device=start.device)
    mid = (2 * u + 1) * level.h
    at = torch.arange(level.nodes * level.h, device=start.device)
    q = at[: level.queries] + (at[: level.queries] // level.h + 1) * level.h
    k = at + at // level.h * level.h
    for_q = start[:, :, q // UNIT] < mid[at[: level.queries] // level.h]
    first = start[:, :, mid // UNIT].unflatten(1, (G, -1)).amin(2)
    for_k = first[:, :, at // level.h] <= k // BLOCK * BLOCK
    return for_q.transpose(1, 2)[..., None], for_k.transpose(1, 2)[..., None]


def needed_nodes(start: Tensor, units: int, G: int) -> Tensor:
    """Which nodes of the tree lie between a row and a key that it reads, [B, total, G], bool.

    The row right after a node decides, since first keys never move left; so a needed node's children are needed too.
    start as in ``needed``; zeros without pruning.
    """
    found = []
    for s in range(tree_scales(units)):
        v = torch.arange(tree_nodes(units, s), device=start.device)
        end = (v + 1) * (BLOCK << s)
        row = (end // UNIT).clamp(max=start.shape[2] - 1)
        first = start[:, :, row].unflatten(1, (G, -1)).amin(2)
        found.append((first < v * (BLOCK << s)) & (end < units * BLOCK))
    return torch.cat(found, 2).transpose(1, 2)


def carry(block: Leaves, start: Tensor | None = None) -> Carried:
    """The levels above the blocks. Rows not ``needed`` and nodes above the leaves not in ``needed_nodes`` may be left
    undefined (here they are not)."""
    q, k, m = block.q, block.k, block.m
    nodes, T, n = tree(m), q.shape[1], level_count(q.shape[1])
    b_q, b_k = q.to(m.dtype), k.to(m.dtype)
    out_q, out_k = [], []
    for s in range(n):
        at = tree_offset(m.shape[1], s)
        b_q, b_k = _up(b_q, b_k, nodes[:, at : at + tree_nodes(m.shape[1], s)], Level(BLOCK << s, T))
        level = Level(BLOCK << (s + 1), T)
        out_q.append(_pack(b_q, level, 1).to(q.dtype))
        out_k.append(_pack(b_k, level, 0).to(k.dtype))
    Tq, Tk = level_rows(T)
    if not n:
        return Carried(Levels(q.new_empty(0, *q.shape), k.new_empty(0, *k.shape)), nodes)
    return Carried(Levels(_stack(out_q, Tq), _stack(out_k, Tk)), nodes)


def carry_backward(
    block: Leaves, carried: Carried, d: Levels, dq: Tensor, dk: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of block.q, block.k and block.m, in the wide dtype.

    Args:
        d: gradients of the levels; rows that do not exist or are not ``needed`` are not read. Holds no gradients after.
        dq, dk: gradients of level 0: rows of odd blocks of q, rows of even blocks of k with a right sibling; the other
            rows are not read.
    """
    m, nodes, T, n = block.m, carried.nodes, dq.shape[1], level_count(dq.shape[1])
    units, G = m.shape[1], m.shape[2]
    dnodes = torch.zeros_like(nodes)
    g_q, g_k = (torch.zeros_like(x, dtype=m.dtype) for x in (dq, dk))
    for s in reversed(range(n + 1)):
        level = Level(BLOCK << s, T)
        rows = slice(level.queries), slice(level.keys)
        if s:
            x_q, x_k = carried.levels.q[s - 1, :, rows[0]], carried.levels.k[s - 1, :, rows[1]]
            d_q, d_k = d.q[s - 1, :, rows[0]], d.k[s - 1, :, rows[1]]
        else:
            x_q, x_k, d_q, d_k = (
                _pack(block.q, level, 1),
                _pack(block.k, level, 0),
                _pack(dq, level, 1),
                _pack(dk, level, 0),
            )
        if start is not None and s:
            m_q, m_k = needed(start, level, G)
            d_q, d_k = d_q.where(m_q, 0), d_k.where(m_k, 0)
        if s < n:
            at, size = tree_offset(units, s), tree_nodes(units, s)
            g_q, g_k, dnodes[:, at : at + size] = _down(
                g_q, g_k, x_q.to(m.dtype), x_k.to(m.dtype), nodes[:, at : at + size], level
            )
        g_q, g_k = _add(g_q, d_q, level, 1), _add(g_k, d_k, level, 0)
    return g_q, g_k, tree_backward(nodes, dnodes, units)
