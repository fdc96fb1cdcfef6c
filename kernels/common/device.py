"""What a GPU and the installed Triton can do."""

from __future__ import annotations

import functools
import importlib.metadata

import torch


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


def gluon_runs(K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Gluon kernels were measured here: Hopper, Triton 3.6 (Gluon is an experimental interface), 16-bit
    inputs, head dims of 33 to 128."""
    fits = dtype in (torch.bfloat16, torch.float16) and min(K, V) > 32 and max(K, V) <= 128
    return fits and capability(device) == (9, 0) and triton_version() == (3, 6)
