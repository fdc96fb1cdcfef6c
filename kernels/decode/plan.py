"""Tiles and number of programs of one call of ``paged_attention``: ``plan`` decides, nothing else does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnzoo.kernels.common.launching import cdiv, head_block, power_of_2
from attnzoo.kernels.common.plans import Announced

MOST_ROWS = 16  # tokens of a step
_forced: dict[str, int] = {}


class DecodeCall(NamedTuple):
    """A call as plans see it: T rows, ``rep`` query heads per key head, keys a page, head dims.

    carried: pages of a group whose rows are read beside its keys (PaTH), or 0.
    """

    T: int
    rep: int
    page: int
    K: int
    V: int
    dtype: torch.dtype
    carried: int = 0


@dataclass(frozen=True)
class DecodePlan(Announced):
    """Tiles and programs that read the pages.

    Attributes:
        BT: rows (tokens times query heads of one key head) per program.
        BS: keys per step; divides a page.
        programs: that share the pages; more than fit on the GPU at a time even out what the shares cost.
        extra: what it costs a program to begin a head, in pages.
    """

    BT: int
    BS: int
    num_warps: int
    num_stages: int
    programs: int
    extra: int


def workspace(call: DecodeCall, plan: DecodePlan, heads: int, pages: int) -> int:
    """Bytes that a call takes until its output is there, at the most.

    Args:
        heads: B G, the key heads of all sequences.
        pages: columns of the table.
    """
    rows = call.T * call.rep
    parts = (plan.programs + heads) * rows * (call.V + 1)
    walked = 0
    if call.carried:
        walked = heads * rows * (cdiv(pages, call.carried) * call.K + call.carried * call.page + call.T)
    return 4 * (parts + walked + 2 * heads + 1)


def plan(call: DecodeCall, multiprocessors: int) -> DecodePlan:
    """The plan of a call on a GPU of so many multiprocessors; equal arguments give equal plans.

    A step of BS keys is at most 32 KiB, and of two or three steps as many are loaded ahead as fit into 64 KiB,
    so that any GPU from compute capability 8.0 on can run it.
    """
    return _plan(call, multiprocessors, tuple(_forced.items()))


@functools.lru_cache(maxsize=1024)
def _plan(call: DecodeCall, multiprocessors: int, forced: tuple[tuple[str, int], ...]) -> DecodePlan:
    width = (head_block(call.K) + head_block(call.V)) * call.dtype.itemsize
    BS = min(64, call.page, power_of_2(32768 // width + 1) // 2)
    stages = max(1, min(3, 65536 // (BS * width)))
    BT = min(64, max(16, power_of_2(call.T * call.rep)))
    chosen = DecodePlan(BT, BS, 4, stages, 8 * multiprocessors, 4)
    few = BT == 16 and not (call.carried and call.dtype.itemsize > 2)  # float32 keys would spill from fewer warps
    if few and width <= 256:  # 16-bit heads of 64 (one warp needs no sums across warps), one H200
        chosen = replace(chosen, num_warps=1, num_stages=2, extra=2)
    elif few and width <= 512:
        chosen = replace(chosen, num_warps=2, num_stages=2, programs=4 * multiprocessors)
    return replace(chosen, **dict[str, Any](forced))


@contextlib.contextmanager
def override_plan(**forced: int) -> Iterator[None]:
    """Force fields of every plan, for tests and sweeps, while the context is open."""
    before = dict(_forced)
    _forced.update(forced)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
