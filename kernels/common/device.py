"""Abilities of a GPU and of the installed Triton, and a context that launches where the tensors are."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from attnzoo.kernels.common.untraced import cached_in_traces

# Releases of Triton that compile every Gluon kernel for sm_90a (``make test-versions``): an experimental interface.
GLUON = ((3, 6), (3, 7), (3, 8), (3, 9))
NO_TRITON = "the triton package is not installed (pip install 'attnzoo[triton]')"
HAS_TRITON = importlib.util.find_spec("triton") is not None
LEAST_CAPABILITY = (8, 0)  # what Triton compiles for
TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")  # what packages of it are called
ON = ("1", "true", "on", "yes", "y")  # values of variables that Triton takes for set, in any case
_newer = getattr(torch._C, "_get_fp32_precision_getter", None)  # from torch 2.9 on
# How exact torch's float32 products are on a GPU. After a newer setting (torch.backends...fp32_precision) torch raises
# an error where it is asked by the older name, or answers what was set by that name.
float32_products: Callable[[], str] = (
    partial(_newer, "cuda", "matmul") if _newer else torch._C._get_float32_matmul_precision
)
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


class Machine(NamedTuple):
    """The machine that plans depend on: compute capability ((0, 0) for the interpreter), Triton's version, and ROCm."""

    capability: tuple[int, int]
    triton: tuple[int, int]
    rocm: bool = False

    @property
    def hopper(self) -> bool:
        """Whether this is a Hopper GPU. A ROCm device may report (9, 0) as well, and is none."""
        return self.capability == (9, 0) and not self.rocm

    @property
    def blackwell(self) -> bool:
        """Whether sums of products may lie in tensor memory: Blackwell of data centres."""
        return self.capability[0] == 10 and not self.rocm

    @property
    def architecture(self) -> str:
        """The GPU's, where a family may have kernels or tiles of its own for it; else ""."""
        return "hopper" if self.hopper else "blackwell" if self.blackwell else ""

    @property
    def descriptors(self) -> bool:
        """Whether this Triton has host-side tensor descriptors."""
        return self.triton >= (3, 4)


def machine(device: torch.device) -> Machine:
    """The machine that ``device`` belongs to."""
    return Machine(capability(device), triton_version(), torch.version.hip is not None)


@cached_in_traces
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for a CPU (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def shared_memory(capability: tuple[int, int]) -> int:
    """KiB of shared memory that a program may have (CUDA's programming guide, "compute capabilities")."""
    return _SHARED.get(capability, 99)


def sums_over_loops(where: Machine) -> dict[str, int]:
    """Launch options of a kernel in which several loops add products to one sum.

    Triton 3.5 does not compile it where the sum lies in tensor memory, which programs of 16 warps do not use.
    """
    return {"num_warps": 16} if where.blackwell and where.triton == (3, 5) else {}


@cached_in_traces
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _installed() -> str:
    for name in TRITONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


_TRITON = _installed()  # read here, as compilers cannot trace the reading
_RELEASE = tuple(map(int, _TRITON.split(".")[:2])) if _TRITON else (0, 0)


def installed_triton() -> str:
    """Version of the installed Triton, asked without importing it; "" if there is none."""
    return _TRITON


def triton_version() -> tuple[int, int]:
    """The first two numbers of the installed Triton's version; (0, 0) without Triton."""
    return cast(tuple[int, int], _RELEASE)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ON


def device_unavailable(x: Tensor) -> str:
    """Why Triton kernels cannot run on the device of x, or ""."""
    if not HAS_TRITON:
        return NO_TRITON
    if not x.is_cuda and not interpreted():
        return f"expected CUDA tensors (or TRITON_INTERPRET=1), got {x.device}"
    if torch.version.hip is not None:
        return "expected an NVIDIA GPU: the kernels were never run on ROCm"
    if x.is_cuda and capability(x.device) < LEAST_CAPABILITY:
        return f"expected compute capability >= 8.0, got {capability(x.device)}"
    return ""


def not_gluon(where: Machine, K: int, V: int, dtype: torch.dtype, option: str = "") -> str:
    """Why the Gluon kernels do not run, or "": they are for Hopper, 16-bit inputs and head dims of 33 to 128, without
    ``option`` where a call has one that they do not know."""
    if not where.hopper:
        return f"expected a Hopper GPU, got capability {where.capability}{' of ROCm' if where.rocm else ''}"
    if where.triton not in GLUON:
        least, most, got = (f"{major}.{minor}" for major, minor in (GLUON[0], GLUON[-1], where.triton))
        remedy = "torch 2.10 and later bring one" if where.triton < GLUON[0] else "a newer attnzoo may know it"
        return f"expected Triton {least} to {most} for the Gluon kernels, got {got} ({remedy})"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"expected bfloat16 or float16, got {dtype}"
    if min(K, V) <= 32 or max(K, V) > 128:
        return f"expected head dims of 33 to 128, got K={K}, V={V}"
    return f"the Gluon kernels know no {option}" if option else ""


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels launch on x's GPU, which need not be the current one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
