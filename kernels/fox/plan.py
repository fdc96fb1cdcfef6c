"""Tile sizes and the choice of hardware features, in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["fwd", "dq", "dkdv"]
_log = logging.getLogger("attnzoo.kernels.fox")

ROW_UNIT = 128  # query rows that share one pruning boundary; every BT divides it
KEY_UNIT = 64  # boundaries are multiples of this many keys
NEAR_UNITS = 1  # key units before a row unit whose weights count towards the row's normaliser in the tail bound


@dataclass(frozen=True)
class Tiles:
    """One launch configuration: BT query rows by BS keys."""

    BT: int
    BS: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers per thread, to fit more programs on a multiprocessor
    tma: bool = False  # load tiles through tensor descriptors (Hopper and later)
    heads: int = 1 << 20  # heads scheduled together

    def __post_init__(self) -> None:
        if self.BT not in (16, 32, 64, 128):
            raise ValueError(f"BT: expected one of (16, 32, 64, 128), got {self.BT}")
        if self.BS not in (16, 32, 64, 128):
            raise ValueError(f"BS: expected one of (16, 32, 64, 128), got {self.BS}")


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
# The one-pass backward (``hopper/backward_kernel.py``); head dims up to 128.
ONE_PASS = Tiles(64, 128, 8, 2, tma=True, heads=2)
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
_said: set[tuple[int, int]] = set()


@contextlib.contextmanager
def override(tiles: dict[Kind, Tiles], forced: dict[Kind, Tiles] = _overrides) -> Iterator[None]:
    """Force tiles for tests and sweeps; affects every head dim while the context is open.

    Args:
        tiles: by kernel.
        forced: of the kernel family; FoX's by default.
    """
    before = dict(forced)
    forced.update(tiles)
    try:
        yield
    finally:
        forced.clear()
        forced.update(before)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) for a CPU (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def triton_version() -> tuple[int, int]:
    """Installed Triton, asked without importing it; (0, 0) if there is none."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


def has_descriptors() -> bool:
    """Whether this Triton has host-side tensor descriptors."""
    return triton_version() >= (3, 4)


def _gluon(K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Gluon kernels were measured here: Hopper, Triton 3.6 (Gluon is an experimental interface), 16-bit
    inputs, head dims of 33 to 128."""
    fits = dtype in (torch.bfloat16, torch.float16) and min(K, V) > 32 and max(K, V) <= 128
    return fits and capability(device) == (9, 0) and triton_version() == (3, 6)


def one_pass(K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the backward runs as one pass (``hopper/backward_kernel.py``) instead of as two kernels.

    Not under deterministic algorithms: it adds up dq in an order that varies. Not where tests force the two kernels'
    tiles.
    """
    if "dq" in _overrides or "dkdv" in _overrides or torch.are_deterministic_algorithms_enabled():
        return False
    return _gluon(K, V, dtype, device)


def hopper_forward(T: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Gluon forward (``hopper/``) runs: where it is faster, and there are rows for both warpgroups."""
    return "fwd" not in _overrides and T >= ROW_UNIT and max(K, V) > 64 and _gluon(K, V, dtype, device)


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


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of float32 products: torch's own setting decides, as for torch.matmul."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"
