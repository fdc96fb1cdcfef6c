"""Tile sizes of the path kernels."""

from __future__ import annotations

import dataclasses
import functools
import logging

import torch

from attnzoo.kernels.common import tiles as tile_sizes
from attnzoo.kernels.common.device import TUNED, machine, not_gluon
from attnzoo.kernels.common.tiles import HOPPER_BACKWARD, Kind, Tiles

from .levels import BLOCK, level_count

_log = logging.getLogger("attnzoo.kernels.path")

# Head dims up to the key -> tiles. Measured on an H200 (docs/benchmarks/NOTES.md), 16-bit inputs.
_HOPPER: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3, tma=True, heads=8)},
    "dq": {64: Tiles(128, 64, 8, 3, maxnreg=128, tma=True), 128: Tiles(128, 64, 8, 3, tma=True, heads=8)},
    "dkdv": {64: Tiles(64, 64, 4, 4, heads=8), 128: Tiles(32, 64, 4, 4, heads=8)},
}
# Where they differ with pruning, which leaves short rows.
_HOPPER_PRUNED: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(128, 64, 8, 3, maxnreg=128, tma=True)},
    "dq": {128: Tiles(64, 64, 4, 2, tma=True, heads=8)},
}
# The Gluon forward (``hopper/forward.py``), pruned or not; num_warps are those of each of its two warpgroups.
HOPPER_FORWARD = {64: Tiles(128, 128, 4, 3, tma=True, heads=8), 128: Tiles(128, 128, 4, 2, tma=True, heads=8)}
# Fits the 99 KiB of shared memory of capability 8.6 / 8.9, so it is safe on anything from 8.0 up.
_SAFE: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2)},
    "dq": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2)},
    "dkdv": {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2)},
}
_FLOAT32: dict[Kind, dict[int, Tiles]] = {kind: {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 32, 4, 1)} for kind in _SAFE}
# KiB of shared memory per program: what the block kernels need at head dim 128, and what a GPU has (99 if not listed).
_NEEDED = {torch.bfloat16: 112, torch.float16: 152, torch.float32: 176}
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_overrides: dict[Kind, Tiles] = {}
override = functools.partial(tile_sizes.override, _overrides)
_said: set[tuple[int, int]] = set()


def too_small(dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """Why the block kernels do not fit a GPU's shared memory, or ""."""
    has = _SHARED.get(capability, 99)
    if _NEEDED[dtype] <= has:
        return ""
    return f"expected {_NEEDED[dtype]} KiB of shared memory per program for {dtype}, this GPU {capability} has {has}"


def tiles(kind: Kind, head_dim: int, dtype: torch.dtype, device: torch.device, pruned: bool) -> Tiles:
    """Tiles of a kernel for head dims up to ``head_dim`` (the larger of K and V, at most 128).

    A key tile lies in one block of 64 tokens (as do the dkdv kernel's row tiles), a row tile of fwd and dq in one
    pair of blocks.
    """
    t = _overrides.get(kind) or _table(kind, 64 if head_dim <= 64 else 128, dtype, device, pruned)
    if t.BS > BLOCK or (kind == "dkdv" and t.BT > BLOCK):
        raise ValueError(f"{kind} tiles: expected BS (and in dkdv BT) of at most {BLOCK}, got BT={t.BT}, BS={t.BS}")
    return t


def one_pass(T: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the backward over the levels runs as one pass (``hopper/``) instead of as two kernels, as in FoX."""
    if "dq" in _overrides or "dkdv" in _overrides or torch.are_deterministic_algorithms_enabled():
        return False
    return level_count(T) > 0 and not not_gluon(machine(device), K, V, dtype)


def one_pass_tiles(pruned: bool) -> Tiles:
    """Tiles of the one-pass backward: FoX's; where pruning leaves heads of different lengths, all of them together."""
    return dataclasses.replace(HOPPER_BACKWARD, heads=1 << 20) if pruned else HOPPER_BACKWARD


def pair_width(t: Tiles, head_dim: int) -> int:
    """Keys per tile within the own pair of blocks, where diag takes registers besides."""
    return min(t.BS, 32) if head_dim > 64 else t.BS


def _table(kind: Kind, size: int, dtype: torch.dtype, device: torch.device, pruned: bool) -> Tiles:
    if dtype == torch.float32:
        return _FLOAT32[kind][size]
    where = machine(device)
    if where.hopper:
        t = _HOPPER[kind][size]
        if pruned:
            t = _HOPPER_PRUNED.get(kind, {}).get(size, t)
        return t if where.descriptors else dataclasses.replace(t, tma=False, maxnreg=None)
    if where.capability not in TUNED and where.capability not in _said:
        _said.add(where.capability)
        _log.info("path: no tuned tiles for compute capability %d.%d; using the safe table", *where.capability)
    return _SAFE[kind][size]


def hopper_forward(T: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Gluon forward (``hopper/``) runs: where it is faster, and there are levels."""
    return "fwd" not in _overrides and level_count(T) > 0 and K % 8 == 0 and not not_gluon(machine(device), K, V, dtype)
