"""Kernels that are compiled side by side before the first of them is launched.

Triton compiles a kernel where it is launched, in a second or several; the first step of a layer launches a dozen.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from attnzoo.kernels.common.device import interpreted
from attnzoo.kernels.common.recording import recorders

_logger = logging.getLogger("attnzoo.kernels.together")


class Passes:
    """What the passes of a torch.autograd.Function are given in place of autograd's context."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def can_compile_together() -> bool:
    """Whether Triton can: from 3.5 on."""
    import triton

    return hasattr(triton, "AsyncCompileMode")


def compile_together(run: Callable[[], object]) -> None:
    """Compile all kernels that ``run()`` would launch at the same time, where that can be; none is launched."""
    if recorders.compiles or interpreted() or not can_compile_together() or torch.cuda.is_current_stream_capturing():
        return
    try:
        with compiled_together():
            run()
    except Exception as error:  # seen where it is launched
        _logger.debug("kernels are compiled one after the other: %r", error)


@contextlib.contextmanager
def compiled_together() -> Iterator[list[Any]]:
    """A context in which Triton's launches of this thread compile, all at the same time, and launch nothing.

    What is computed there is not to be used. What fails is compiled again, and its error seen, where it is launched. It
    gives the list of the kernels, without their tuners.
    """
    from triton import AsyncCompileMode

    from attnzoo.kernels.common.launched import in_place_of_launches

    met: list[Any] = []

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        met.append(kernel)
        return launch(kernel, *args, **{**options, "warmup": True})

    recorders.compiles = True
    try:
        with (
            ThreadPoolExecutor(os.cpu_count() or 1) as pool,
            AsyncCompileMode(pool, ignore_errors=True),
            in_place_of_launches(compile_only) as launch,
        ):
            yield met
    finally:
        recorders.compiles = False
        for kernel in met:
            for compiled, *_ in kernel.device_caches.values():
                for key in [key for key, made in compiled.items() if vars(made).get("kernel", made) is None]:
                    del compiled[key]
