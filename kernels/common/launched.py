"""Launches that repeat: what Triton finds out about a kernel's arguments at each launch is found out once.

Triton looks at every argument, writes down what it may assume of them, and looks the kernel up under that: 20 to 60
microseconds a launch, as much as a short text's kernels take. Here a launch is looked up under the arguments: numbers
as they are, of tensors the dtype and whether 16 bytes divide the address, which is all that Triton asks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from attnzoo.kernels.common.device import triton_version
from attnzoo.kernels.common.recording import recorders

MOST = 4096  # launches of a kernel that are remembered: lengths are among what they are remembered by
_current_device = getattr(torch._C, "_cuda_getDevice", int)  # torch for CPUs has none
_PLAIN = frozenset((float, bool, type(None)))
Descriptor = TypeVar("Descriptor")


def launched(function: Any) -> Any:
    """A kernel of ``triton.jit`` or ``gluon.jit``, launched as before (``kernel[grid](...)``), sooner when it repeats.

    The interpreter's, and those of a Triton before 3.4, stay what they are. Parameters that are no constants are given
    by position, descriptors are made by :func:`descriptor`.
    """
    compiled = isinstance(function, JITFunction) and triton_version() >= (3, 4)
    return _Launched(function) if compiled else function


def descriptor(kind: type[Descriptor], base: Tensor, block: list[int], layout: Any = None) -> Descriptor:
    """Triton's or Gluon's descriptor (``kind``) of a tensor that ``launching.can_describe``, without its checks."""
    made: Any = kind.__new__(kind)
    made.base, made.shape, made.strides, made.block_shape = base, [*base.shape], [*base.stride()], block
    if layout is not None:
        made.layout = layout
    made.looked_up_by = (base.dtype, *block, id(layout))
    return made  # type: ignore[no-any-return]


class _InPlace(threading.local):
    run: Callable[..., Any] | None = None  # called in place of Triton's launches of this thread


_in_place = _InPlace()
_lock = threading.Lock()
_users = 0  # contexts that are entered, of all threads
_launch_of_triton: Any = None


def _launch(function: Any, *args: Any, **options: Any) -> Any:
    run = _in_place.run
    return _launch_of_triton(function, *args, **options) if run is None else run(function, *args, **options)


@contextlib.contextmanager
def in_place_of_launches(run: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A context in which this thread calls ``run(function, *args, grid=, warmup=, **options)`` where Triton would
    launch a kernel, its own as well as those of other packages; it gives the launch that is replaced."""
    global _users, _launch_of_triton
    with _lock:
        if not _users:
            _launch_of_triton, JITFunction.run = JITFunction.run, _launch
        _users += 1
    before, _in_place.run = _in_place.run, run
    try:
        yield _launch_of_triton
    finally:
        _in_place.run = before
        with _lock:
            _users -= 1
            if not _users:
                JITFunction.run = _launch_of_triton


def tell(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """Triton's own launch of a kernel, of which this thread's recorder is told."""
    made = _launch_of_triton(function, *args, grid=grid, warmup=warmup, **options)
    bound = function.device_caches[_current_device()][-1](*args, **options)[0]
    whole = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
    begin = made.function, made.packed_metadata, None, None, None
    recorders.current.launched(made.run, whole, begin, [*bound.values()])
    return made


class _Launched:
    def __init__(self, function: JITFunction[Any]) -> None:
        from triton import knobs

        type(recorders).hooks = knobs.runtime
        self._function = function
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._constants = {x.name for x in function.params if x.is_constexpr}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
        key: list[Any] = [*constants, *constants.values()]
        given: list[Any] = []
        for x in args:
            kind = type(x)
            if kind is int:
                key.append(x)
            elif isinstance(x, Tensor):
                key.append(x.dtype)
                x = x.data_ptr()
                key.append(x % 16 == 0)
            elif kind in _PLAIN:
                key.append((kind, x))
            elif kind is tuple and _PLAIN.issuperset(map(type, x)):
                key.append((*map(type, x), x))
            elif hasattr(x, "looked_up_by"):
                key.append(x.looked_up_by)
            else:
                return self._launch_new(None, grid, args, constants)
            given.append(x)
        device = _current_device()
        key.append(device)
        entry = self._known.get(found := tuple(key))
        if entry is None or recorders.watched():
            return self._launch_new(found, grid, args, constants)
        made, run, begin, rest = entry
        whole = (*grid, 1, 1)[:3]
        if recorders.current is not None:
            recorders.current.launched(run, whole, begin, [*args, *rest])
        run(*whole, torch._C._cuda_getCurrentRawStream(device), *begin, *given, *rest)
        return made

    def _launch_new(
        self, key: tuple[Any, ...] | None, grid: tuple[int, ...], args: tuple[Any, ...], constants: Any
    ) -> Any:
        """Triton's own launch; it is remembered under ``key`` where all that follows ``args`` are constants."""
        made = self._function[grid](*args, **constants)
        names = self._function.arg_names[len(args) :]
        known = all(name in self._constants and name in constants for name in names)
        if key is not None and known and isinstance(made, CompiledKernel) and not recorders.compiles:
            if len(self._known) >= MOST:
                self._known.clear()
            begin = made.function, made.packed_metadata, None, None, None
            self._known[key] = made, made.run, begin, tuple(constants[name] for name in names)
        if recorders.current is not None:
            recorders.current.why = f"{self._function.__name__} is launched by Triton"
        return made
