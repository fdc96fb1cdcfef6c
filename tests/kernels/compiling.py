"""Compile the kernels that calls launch, for a GPU that is not here; say what each needs of it.

    python tests/kernels/compiling.py [--capability 9.0] [--calls REGEX] [--kernels REGEX] [--ptx]

With the Triton that is found first (PYTHONPATH), without the interpreter. One JSON object per compiled kernel on
standard output; exit status 1 where one does not compile or needs more shared memory than a program may have.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common import device
from attnzoo.kernels.fox import api as fox
from attnzoo.kernels.path import api as path
from attnzoo.kernels.path.cache import path_extend

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class NoGPU:
    """A driver of a GPU of one compute capability on which nothing can be launched."""

    def __init__(self, capability: tuple[int, int]):
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:  # the launcher and the utilities of a GPU that is there
        if name in ("launcher_cls", "utils"):
            return None
        raise AttributeError(name)


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Named calls that together launch every kernel in every form that a plan can choose."""
    for kind, dtype in DTYPES.items():

        def x(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype).requires_grad_()

        wide = functools.partial(x, dtype=torch.float32)
        for K in (64, 128, 256):
            qkv = x(1, 512, 4, K), x(1, 512, 2, K), x(1, 512, 2, K)
            w, beta, full = x(1, 512, 2, K), wide(1, 512, 2), wide(1, 512, 4)
            options: dict[str, dict[str, Any]] = {
                "": {},
                " prune": {"prune": Prune()},
                " sink": {"sink": wide(4), "return_lse": True, "window": 200},
            }
            for extra, given in options.items():
                for gate, g in (("gate", full), ("slope", wide(4)), ("none", None)):
                    if g is None and "prune" in given:
                        continue
                    yield (
                        f"fox {kind} {K} {gate}{extra}",
                        functools.partial(fox.fox_attention, *qkv, log_decay=g, impl="triton", **given),
                    )
                    if K <= 128 and gate != "slope":
                        yield (
                            f"path {kind} {K} {gate}{extra}",
                            functools.partial(path.path_attention, *qkv, w=w, beta=beta, log_decay=g, impl="triton",
                                              **given),
                        )  # fmt: skip
            if K <= 128:
                yield (
                    f"path {kind} {K} heads",
                    functools.partial(path.path_attention, qkv[1], qkv[1], qkv[2], w=wide(1, 512, 2, K), beta=beta,
                                      log_decay=wide(1, 512, 2), impl="triton"),
                )  # fmt: skip
                one, keys = (x(2, 1, 4, K), x(2, 1, 2, K)), (wide(2, 300, 2, K), x(2, 301, 2, K))
                yield (
                    f"path {kind} {K} step",
                    functools.partial(path_extend, *one, x(2, 1, 2, K), wide(2, 1, 2), *keys, wide(2, 301, 4)),
                )
            yield (
                f"fox {kind} {K} step",
                functools.partial(fox.fox_attention, x(2, 1, 4, K), x(2, 1024, 2, K), x(2, 1024, 2, K),
                                  log_decay=wide(2, 1024, 4), impl="triton"),
            )  # fmt: skip


def needs(kernel: Any) -> dict[str, Any]:
    """Shared memory, products of warpgroups, and where there is machine code registers and stack (spills) per thread."""
    ptx = kernel.asm["ptx"]
    found = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, "wgmma": ptx.count("wgmma.mma_async")}
    if kernel.asm.get("cubin"):
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", "-"], input=kernel.asm["cubin"], capture_output=True).stdout
        found |= {k.lower(): int(n) for k, n in re.findall(r"(REG|STACK):(\d+)", usage.decode())}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--calls", default="", help="of calls() those whose names match")
    parser.add_argument("--kernels", default="", help="of their kernels those whose names match")
    parser.add_argument("--ptx", action="store_true", help="stop before ptxas")
    args = parser.parse_args()
    capability = tuple(map(int, args.capability.split(".")))
    failed = False
    run = JITFunction.run

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        nonlocal failed
        name = self.fn.__name__
        if not re.search(args.kernels, name):
            return
        row = {"triton": triton.__version__, "capability": args.capability, "call": call, "kernel": name}
        try:
            kernel = run(self, *given, grid=grid, warmup=True, **options)
        except Exception as error:
            failed = True
            print(json.dumps(row | {"failed": f"{type(error).__name__}: {error}"[:2000]}), flush=True)
            return
        if id(kernel) not in seen:
            seen[id(kernel)] = kernel
            row |= needs(kernel)
            if row["shared"] > 1024 * device.shared_memory(capability):
                failed = True
                row["failed"] = f"expected at most {device.shared_memory(capability)} KiB of shared memory"
            print(json.dumps(row), flush=True)

    seen: dict[int, Any] = {}
    triton.runtime.driver.set_active(NoGPU(capability))
    JITFunction.run = compile_only
    if args.ptx:
        from triton.backends.nvidia.compiler import CUDABackend

        CUDABackend.make_cubin = lambda *given: b""
    device.capability = lambda of: capability
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    device.triton_version = lambda: release
    for api in (fox, path):
        api.kernels_unavailable = lambda *given, **limits: ""
    path._check = lambda *given: None  # values of nothing
    for call, function in calls():
        if not re.search(args.calls, call):
            continue
        with torch.set_grad_enabled("step" not in call):
            o = function()
        o = [y for y in (o if isinstance(o, tuple) else (o,)) if y.requires_grad]
        if o:
            torch.autograd.backward(o, [torch.ones_like(y) for y in o])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
