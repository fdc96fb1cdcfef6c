"""Transitions that the forward pass has carried, kept for the backward pass in one buffer (``keep_carries``).

Groups of heads lie one after the other, each with its tensors as ``_layout`` has them. The products of the nodes are
made in two pieces of 16 bits, of which carries and the backward pass read the first alone where q is bf16: there the
second lies where the carried queries and keys are written later.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.levels.head_groups import HeadGroup, head_groups
from attnzoo.kernels.levels.layout import BLOCK, Kept, Leaves, Levels, level_count, level_rows, tree_offset, tree_scales

ALIGNED = 256  # bytes


class Made(NamedTuple):
    """Room for all that the forward makes of some heads' transitions, or what it has made there."""

    kept: Kept
    block: Leaves
    levels: Levels


class TensorLayout(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class GroupLayout(NamedTuple):
    """The offsets of one group of heads' tensors in its part of the buffer, and the bytes of that part."""

    parts: dict[str, tuple[int, TensorLayout]]
    nbytes: int


def kept_groups(q: Tensor, k: Tensor) -> list[HeadGroup]:
    """The groups of heads of both passes where carries are kept."""
    return head_groups(q, k, backward=True, one_pass=True, kept=True)


def kept_bytes(q: Tensor, k: Tensor, w: Tensor) -> int:
    """Size of the buffer."""
    return sum(_layout_of(g, q, k, w).nbytes for g in kept_groups(q, k))


def kept_places(buffer: Tensor, q: Tensor, k: Tensor, w: Tensor) -> Iterator[tuple[HeadGroup, Made]]:
    """Each group of heads and its tensors in a buffer of ``kept_bytes`` bytes."""
    begin = 0
    for group in kept_groups(q, k):
        layout, found = _layout_of(group, q, k, w), {}
        for name, (at, part) in layout.parts.items():
            found[name] = buffer[begin + at : begin + at + part.nbytes].view(part.dtype).view(part.shape)
        levels = Levels(found["level_q"], found["level_k"])
        block = Leaves(found["diag"], found["q"], found["k"], found["nodes"])
        yield group, Made(Kept(found["v"], found["x"], found.get("w", group.keys(w))), block, levels)
        begin += layout.nbytes


def _layout_of(group: HeadGroup, q: Tensor, k: Tensor, w: Tensor) -> GroupLayout:
    """The layout of a group's tensors, those of ``inverse.new_kept``, ``blocks.block_level`` and ``carry.carry``."""
    (B, T, H, K), G = map(int, group.queries(q).shape), int(group.keys(k).shape[2])
    return _layout(B, T, H, G, K, q.dtype, w.dtype)


@functools.lru_cache(maxsize=256)
def _layout(B: int, T: int, H: int, G: int, K: int, dtype: torch.dtype, w_dtype: torch.dtype) -> GroupLayout:
    n, units, (Tq, Tk) = level_count(T), cdiv(T, BLOCK), level_rows(T)
    coarse = dtype == torch.bfloat16
    squares = (B, units, G, BLOCK, BLOCK)
    parts = {
        "v": TensorLayout(squares, torch.float16 if coarse else torch.float32),
        "x": TensorLayout((2, *squares) if coarse else squares, dtype if coarse else torch.float32),
        "diag": TensorLayout((B, units, H, BLOCK, BLOCK), torch.float32),
        "q": TensorLayout((B, T, H, K), dtype),
        "k": TensorLayout((B, T, G, K), dtype),
    }
    if coarse and w_dtype != dtype:
        parts["w"] = TensorLayout((B, T, G, K), dtype)
    nodes = tree_offset(units, tree_scales(units))
    parts["nodes"] = TensorLayout((2, B, nodes, G, K, K), torch.float16)
    parts["level_q"] = TensorLayout((n, B, Tq, H, K), dtype)
    parts["level_k"] = TensorLayout((n, B, Tk, G, K), dtype)
    found, at, end = {}, 0, 0
    for name, part in parts.items():
        found[name] = at, part
        end = max(end, at + _aligned(part.nbytes))
        at += _aligned(part.nbytes // 2 if name == "nodes" and coarse else part.nbytes)
    return GroupLayout(found, end)


def _aligned(size: int) -> int:
    return cdiv(size, ALIGNED) * ALIGNED
