"""What the forward pass makes of the transitions, kept for the backward pass in one buffer (``keep_carries``).

Groups of heads lie one after the other, each with its tensors in the order of ``_parts``. The products of the nodes are
made in two pieces of 16 bits, of which carries and the backward pass read the first alone where q is bf16: there the
second lies where the carried queries and keys are written later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.path.head_groups import HeadGroup, head_groups
from attnzoo.kernels.path.levels import BLOCK, Kept, Leaves, Levels, level_count, level_rows, tree_offset, tree_scales

ALIGNED = 256  # bytes


class Made(NamedTuple):
    """Room for all that the forward makes of some heads' transitions, or what it has made there."""

    kept: Kept
    block: Leaves
    levels: Levels


class Part(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def kept_groups(q: Tensor, k: Tensor) -> list[HeadGroup]:
    """The groups of heads of both passes where carries are kept."""
    return head_groups(q, k, backward=True, one_pass=True, kept=True)


def kept_bytes(q: Tensor, k: Tensor, w: Tensor) -> int:
    """Size of the buffer."""
    return sum(_size(_parts(g.queries(q), g.keys(k), g.keys(w)), q.dtype) for g in kept_groups(q, k))


def places(buffer: Tensor, q: Tensor, k: Tensor, w: Tensor) -> Iterator[tuple[HeadGroup, Made]]:
    """Each group of heads and its tensors in a buffer of ``kept_bytes`` bytes."""
    begin = 0
    for group in kept_groups(q, k):
        own_w = group.keys(w)
        parts = _parts(group.queries(q), group.keys(k), own_w)
        found, at = {}, begin
        for name, part in parts.items():
            whole = part._replace(shape=(2, *part.shape[1:])) if name == "nodes" else part
            found[name] = buffer[at : at + whole.nbytes].view(part.dtype).view(whole.shape)
            at += _aligned(part.nbytes)
        levels = Levels(found["level_q"], found["level_k"])
        block = Leaves(found["diag"], found["q"], found["k"], found["nodes"])
        yield group, Made(Kept(found["v"], found["x"], found.get("w", own_w)), block, levels)
        begin += _size(parts, q.dtype)


def _parts(q: Tensor, k: Tensor, w: Tensor) -> dict[str, Part]:
    """The tensors of one group of heads, of ``inverse.new_kept``, ``blocks.block_level`` and ``carry.carry``."""
    (B, T, H, K), G = map(int, q.shape), int(k.shape[2])
    n, units, (Tq, Tk) = level_count(T), cdiv(T, BLOCK), level_rows(T)
    coarse = q.dtype == torch.bfloat16
    squares = (B, units, G, BLOCK, BLOCK)
    parts = {
        "v": Part(squares, torch.float16 if coarse else torch.float32),
        "x": Part((2, *squares) if coarse else squares, q.dtype if coarse else torch.float32),
        "diag": Part((B, units, H, BLOCK, BLOCK), torch.float32),
        "q": Part((B, T, H, K), q.dtype),
        "k": Part((B, T, G, K), k.dtype),
    }
    if coarse and w.dtype != q.dtype:
        parts["w"] = Part((B, T, G, K), q.dtype)
    nodes = tree_offset(units, tree_scales(units))
    return parts | {
        "nodes": Part((1 if coarse else 2, B, nodes, G, K, K), torch.float16),
        "level_q": Part((n, B, Tq, H, K), q.dtype),
        "level_k": Part((n, B, Tk, G, K), k.dtype),
    }


def _size(parts: dict[str, Part], dtype: torch.dtype) -> int:
    """Bytes of one group: of its tensors, and of what the second piece of the nodes needs after them."""
    second = parts["nodes"].nbytes if dtype == torch.bfloat16 else 0
    levels = sum(_aligned(parts[name].nbytes) for name in ("level_q", "level_k"))
    return sum(_aligned(part.nbytes) for part in parts.values()) + max(0, _aligned(second) - levels)


def _aligned(size: int) -> int:
    return cdiv(size, ALIGNED) * ALIGNED
