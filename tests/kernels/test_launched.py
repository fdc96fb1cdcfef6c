"""Launches that repeat are found again by what Triton compiles for, and go out as its own launches do."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.4")
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from attnzoo.kernels.common import launched, together
from attnzoo.kernels.common.launched import descriptor
from attnzoo.kernels.common.recording import recorders


def add_kernel(p_x, p_y, n, scale, D: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Recorder:
    """Stands in for Triton's own launch (``first``) and for the launcher of a compiled kernel (``again``)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        monkeypatch.setattr(JITFunction, "run", self.compile)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
        monkeypatch.setattr(launched, "_current_device", int)  # which torch for GPUs asks a driver for
        self.kernel = launched.launched(JITFunction(add_kernel))

    def compile(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> CompiledKernel:
        self.first.append(args)
        made: CompiledKernel = CompiledKernel.__new__(CompiledKernel)
        launcher = {"run": lambda *given: self.again.append(given), "_run": lambda *given: self.again.append(given)}
        vars(made).update(launcher, function="function", packed_metadata="metadata", module=None)
        return made

    def times(self) -> tuple[int, int]:
        return len(self.first), len(self.again)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


X = torch.zeros(64)


def test_a_repeated_launch_passes_addresses_numbers_and_constants_in_the_kernels_order(recorder: Recorder) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    recorder.kernel[(3, 2)](X, X, 5, 0.5, FLAG=True, D=16, num_warps=2)
    recorder.kernel[(4, 2)](x, y, 5, 0.5, FLAG=True, D=16, num_warps=2)
    assert recorder.times() == (1, 1)
    numbers = (5, 0.5, 16, True)
    pointers = (x.data_ptr(), y.data_ptr())
    assert recorder.again == [(4, 2, 1, 7, "function", "metadata", None, None, None, *pointers, *numbers)]


@pytest.mark.parametrize(
    "other",
    [
        {"x": X[1:]}, {"x": X.half()}, {"x": None}, {"n": 6}, {"n": 1}, {"scale": 1.0}, {"scale": (0.5, None)},
        {"D": 32}, {"FLAG": False}, {"num_warps": 4},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_triton_may_compile_for_is_looked_up(other: dict[str, Any], recorder: Recorder) -> None:
    given: dict[str, Any] = {"x": X, "y": X, "n": 5, "scale": 0.5, "D": 16, "FLAG": True, "num_warps": 2}
    for call in (given, given | other):
        x, y, n, scale, *_ = call.values()
        recorder.kernel[(1,)](x, y, n, scale, **{name: call[name] for name in ("D", "FLAG", "num_warps")})
    assert recorder.times() == (2, 0)


def test_numbers_in_a_tuple_are_found_again(recorder: Recorder) -> None:
    for scale in ((0.5, None), (0.5, None), (0.5, 1.0), (0.5, 1.0), (None, 0.5)):
        recorder.kernel[(1,)](X, X, 5, scale, D=16, FLAG=True)
    assert recorder.times() == (3, 2)
    assert recorder.again[-1][-4:] == (5, (0.5, 1.0), 16, True)


def test_a_descriptor_is_looked_up_by_dtype_tile_and_layout(recorder: Recorder) -> None:
    def call(x: Tensor, rows: int, layout: object) -> None:
        made = descriptor(SimpleNamespace, x, [1, rows], layout)
        assert (made.shape, made.strides, made.block_shape) == ([*x.shape], [*x.stride()], [1, rows])
        recorder.kernel[(1,)](made, X, 5, 0.5, D=16, FLAG=True)

    layout = object()
    call(X[None], 16, layout)
    call(torch.zeros(2, 48), 16, layout)
    assert recorder.times() == (1, 1)
    for x, rows, kind in ((X[None], 32, layout), (X[None].half(), 16, layout), (X[None], 16, object())):
        call(x, rows, kind)
    assert recorder.times() == (4, 1)


def test_triton_launches_what_cannot_be_found_again(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # numbers by name, an object that nothing is known of
        recorder.kernel[(1,)](X, X, n=5, scale=0.5, D=16, FLAG=True)
        recorder.kernel[(1,)](X, (X, X), 5, 0.5, D=16, FLAG=True)
    assert recorder.times() == (4, 0)
    for _ in range(2):
        recorder.kernel[(1,)](X, X, 5, 0.5, D=16, FLAG=True)
    assert recorder.times() == (5, 1)
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)  # a profiler
    recorder.kernel[(1,)](X, X, 5, 0.5, D=16, FLAG=True)
    assert recorder.times() == (6, 1)


def test_no_more_launches_are_remembered_than_said(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "MOST", 3)
    for n in range(10):
        recorder.kernel[(1,)](X, X, n, 0.5, D=16, FLAG=True)
        assert 0 < len(recorder.kernel._known) <= 3


def test_every_kernel_of_a_replayed_op_reports_its_launches() -> None:
    """A replay does what was recorded: a launch that nobody writes down would be left out of it."""
    root = Path(launched.__file__).parents[1]
    jits = re.compile(r"((?:^@.+\n)*)^@(?:triton|gluon)\.jit.*\n^def (\w+_kernel)\(", re.MULTILINE)
    found = {name: above for file in root.rglob("*.py") for above, name in jits.findall(file.read_text())}
    assert {"fox_fwd_hopper_kernel", "path_block_fwd_hopper_kernel", "path_block_fwd_kernel"} <= found.keys()
    assert [name for name, above in found.items() if "@launched\n" not in above] == []


def test_launches_of_other_packages_are_told_with_their_arguments_in_the_kernels_order(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(JITFunction, "run", lambda function, *args, **options: recorder.compile(*args, **options))
    kernel = recorder.kernel._function
    kernel.device_caches = {
        launched._current_device(): ({}, lambda p_x, p_y, **rest: ({"p_x": p_x, "p_y": p_y, **rest},))
    }
    noted: list[Any] = []
    with (
        recorders.listening(SimpleNamespace(launched=lambda *told: noted.append(told))),
        launched.in_place_of_launches(launched.tell),
    ):
        kernel[lambda bound: (bound["n"], 2)](X, p_y=X, n=5, scale=0.5, D=16, FLAG=True)
    (run, grid, begin, args), (first,) = noted[0], recorder.first
    assert (grid, begin) == ((5, 2, 1), ("function", "metadata", None, None, None))
    assert all(x is X for x in args[:2])
    assert args[2:] == [5, 0.5, 16, True]
    assert first[0] is X
    run(*grid, 7, *begin, *args)
    assert len(recorder.again) == 1
    kernel[(1,)](X, X, 5, 0.5, D=16, FLAG=True)
    assert len(noted) == 1


def test_what_is_compiled_only_is_no_launch_that_repeats(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """It has not been loaded onto a GPU."""
    monkeypatch.setattr(recorders, "compiles", True)
    recorder.kernel[(1,)](X, X, 5, 0.5, D=16, FLAG=True)
    monkeypatch.setattr(recorders, "compiles", False)
    for _ in range(2):
        recorder.kernel[(1,)](X, X, 5, 0.5, D=16, FLAG=True)
    assert recorder.times() == (2, 1)


def test_kernels_are_compiled_side_by_side_and_those_that_fail_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    if not together.can_compile_together():
        pytest.skip("before Triton 3.5")
    from triton.runtime import _async_compile

    begun, compiled = threading.Barrier(3), {}  # type: ignore[var-annotated]
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def compile_(size: int) -> Any:
        begun.wait(5)
        if size == 32:
            raise RuntimeError("too large")
        return SimpleNamespace(size=size)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, D: int) -> None:
        assert warmup
        assert recorders.compiles
        mode = _async_compile.active_mode.get()
        assert mode is not None
        compiled[D] = mode.submit(D, partial(compile_, D), partial(compiled.__setitem__, D))

    monkeypatch.setattr(JITFunction, "run", run)
    kernel: Any = JITFunction(add_kernel)
    kernel.device_caches = {0: (compiled,)}
    with together.compiled_together() as met:
        for D in (16, 32, 64):
            kernel[(1,)](X, D=D)
    assert met == [kernel] * 3
    assert {D: made.size for D, made in compiled.items()} == {16: 16, 64: 64}
    assert not recorders.compiles
    assert JITFunction.run is run
