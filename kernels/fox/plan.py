"""Tile sizes and the choice of hardware features, in one place."""

from __future__ import annotations

import dataclasses
import functools
import logging

import torch

from attnzoo.kernels.common import tiles as tile_sizes
from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.device import capability, gluon_runs, has_descriptors
from attnzoo.kernels.common.tiles import Kind, Tiles

_log = logging.getLogger("attnzoo.kernels.fox")


# Head dims up to the key -> tiles. Measured on an H200 (docs/benchmarks/NOTES.md), 16-bit inputs.
_HOPPER: dict[Kind, dict[int, Tiles]] = {
    "fwd": {
        64: Tiles(128, 64, 4, 3),
        128: Tiles(128, 64, 8, 2, maxnreg=128, tma=True, heads=8),
        256: Tiles(128, 64, 8, 2),
    },
    "dq": {
        64: Tiles(128, 64, 8, 3, maxnreg=128, tma=True),
        128: Tiles(128, 64, 8, 3, tma=True, heads=8),
        256: Tiles(64, 32, 8, 2),
    },
    "dkdv": {64: Tiles(64, 64, 4, 4, heads=8), 128: Tiles(32, 64, 4, 4, heads=8), 256: Tiles(32, 64, 8, 2)},
}
# The Gluon forward (``hopper/forward.py``); num_warps are those of each of its two warpgroups. Head dims over 64 up to
# 128: at 64 it is no faster than the portable one.
HOPPER_FORWARD = Tiles(128, 128, 4, 2, tma=True, heads=2)
# Fits the 99 KiB of shared memory of capability 8.6 / 8.9, so it is safe on anything from 8.0 up.
_SAFE: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 1)},
    "dq": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    "dkdv": {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2), 256: Tiles(32, 32, 4, 1)},
}
# Exact float32 products run on the scalar units and need the registers.
_FLOAT32: dict[Kind, dict[int, Tiles]] = {
    kind: {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)} for kind in _SAFE
}
_overrides: dict[Kind, Tiles] = {}
override = functools.partial(tile_sizes.override, _overrides)
_said: set[tuple[int, int]] = set()


def one_pass(K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the backward runs as one pass (``hopper/backward_kernel.py``) instead of as two kernels.

    Not under deterministic algorithms: it adds up dq in an order that varies. Not where tests force the two kernels'
    tiles.
    """
    if "dq" in _overrides or "dkdv" in _overrides or torch.are_deterministic_algorithms_enabled():
        return False
    return gluon_runs(K, V, dtype, device)


def hopper_forward(T: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Gluon forward (``hopper/``) runs: where it is faster, and there are rows for both warpgroups."""
    return "fwd" not in _overrides and T >= ROW_UNIT and max(K, V) > 64 and gluon_runs(K, V, dtype, device)


def tiles(kind: Kind, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles of a kernel for head dims up to ``head_dim`` (the larger of K and V)."""
    if kind in _overrides:
        if kind != "dkdv" and _overrides[kind].BS > KEY_UNIT:
            raise ValueError(
                f"BS: expected at most {KEY_UNIT} in {kind} (one gate base per tile), got {_overrides[kind].BS}"
            )
        return _overrides[kind]
    size = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    if dtype == torch.float32:
        return _FLOAT32[kind][size]
    cap = capability(device)
    if cap == (9, 0):
        t = _HOPPER[kind][size]
        return t if has_descriptors() else dataclasses.replace(t, tma=False, maxnreg=None)
    if cap not in ((0, 0), (8, 0), (8, 6), (8, 9)) and cap not in _said:
        _said.add(cap)
        _log.info("fox: no tuned tiles for compute capability %d.%d; using the safe table", *cap)
    return _SAFE[kind][size]
