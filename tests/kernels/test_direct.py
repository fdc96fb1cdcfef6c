"""Launches that are repeated give Triton's launcher in C what Triton gives it, with less of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
import triton
from triton.backends.nvidia import driver
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnzoo.kernels.common import direct, replay
from attnzoo.kernels.common.launched import descriptor

GRID, STREAM, BEGIN = (1, 2, 3), 7, ("function", (4, 1, 0), None, None, None)
META = {"swizzle": 1, "elem_size": 2, "elem_type": 5, "block_size": [1, 64], "fp4_padded": False}


class Encoded:
    def __init__(self, *given: Any) -> None:
        self.given = given


class Triton:
    """A launcher of the Triton that is installed, of which what is written in C does nothing but note.

    Attributes:
        given: what the launcher in C was given, launch by launch; encoded descriptors by their address.
        encoded: addresses that were encoded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[list[Any]] = []
        self.encoded: list[int] = []
        utils = SimpleNamespace(
            launch=self.launch, build_signature_metadata=lambda types: "|".join(types).encode(),
            fill_tma_descriptor=self.encode, fill_tma_descriptor_tiled=self.encode,
        )  # fmt: skip
        monkeypatch.setattr(driver, "PyKernelArg", lambda **named: SimpleNamespace(**named), raising=False)
        monkeypatch.setattr(driver, "PyCUtensorMap", Encoded, raising=False)
        monkeypatch.setattr(driver, "library_dirs", list)
        monkeypatch.setattr(driver, "compile_module_from_src", lambda **_: utils, raising=False)
        triton.runtime.driver.set_active(SimpleNamespace(utils=utils))

    def launch(self, *given: Any) -> None:
        self.given.append([self.plain(x) for x in given])

    def encode(self, *given: Any) -> Encoded | None:
        if hasattr(driver, "TmaDescKernelParam"):  # Triton 3.4 writes to memory that it made
            where, pointer, *rest = given
            ctypes.c_int64.from_address(where).value = pointer
        else:
            pointer, *rest = given
        self.encoded.append(pointer)
        return Encoded(pointer, *rest)

    def plain(self, x: Any) -> Any:
        if isinstance(x, Encoded):
            return "encoded", x.given[0]
        if hasattr(x, "tma_desc_cpu_ptr"):
            return "encoded", ctypes.c_int64.from_address(x.tma_desc_cpu_ptr()).value
        if hasattr(x, "data_ptr"):
            return x.data_ptr()
        return [*map(self.plain, x)] if isinstance(x, list | tuple) else x

    def launcher(self, described: bool = True, encoded: bool = True, scratch: int = 0) -> Any:
        kind = "tensordesc<fp16[1, 64],layout>" if described else "*fp16"
        types = ("*fp16", kind, "i32", "fp32", kind, "*fp32", "constexpr", "constexpr")
        source = SimpleNamespace(constants={(6,): 64, (7,): None}, signature=dict(enumerate(types)))
        metadata = SimpleNamespace(
            tensordesc_meta=[META, META] if described and encoded else [], num_ctas=1, cluster_dims=(1, 1, 1),
            global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=False, launch_pdl=False, instrumentation_mode="",
        )  # fmt: skip
        return driver.CudaLauncher(source, metadata)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    before = {**vars(triton.runtime.driver)}
    yield Triton(monkeypatch)
    vars(triton.runtime.driver).update(before)


def tensors(n: int) -> list[torch.Tensor]:
    return [torch.zeros(4, 64, dtype=torch.float16) for _ in range(n)]


def arguments(x: list[torch.Tensor], described: bool = True) -> list[Any]:
    """The kernel's arguments, x[0] being ``p_x``, x[1][1:] ``d_k``, x[2] ``d_v`` and x[3][2:] ``p_y``."""
    k, v = (descriptor(TensorDescriptor, y, [1, 64]) if described else y for y in (x[1][1:], x[2]))
    return [x[0], k, 5, 0.5, v, x[3][2:], 64, None]


def again(run: Any, x: list[torch.Tensor], described: bool = True) -> direct.Repeated:
    args = [0 if isinstance(y, torch.Tensor) else y for y in arguments(x, described)]
    args = [direct.placeless(y) if isinstance(y, TensorDescriptor) else y for y in args]
    tiles = [(1, 1, 128), (4, 2, 0)]
    pointers = [(0, 0, 0), (5, 3, 256), *([] if described else tiles)]
    return direct.repeat(run, GRID, BEGIN, args, pointers, tiles if described else [])


def replayed(launch: direct.Repeated, x: list[torch.Tensor], stream: int = STREAM) -> None:
    recording = replay._Recording(len(x), x[0].device, {}, [], [])
    recording._steps.append(launch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_stream", lambda device: stream)
        recording(x, [y.data_ptr() for y in x], 0)


@pytest.mark.parametrize("kind", ["encoded", "taken apart", "none"])
def test_the_launcher_in_c_is_given_what_triton_gives_it(kind: str, installed: Triton) -> None:
    described = kind != "none"
    run = installed.launcher(described, kind == "encoded")
    launch = again(run, tensors(4), described)
    assert launch.run is not run, "Triton's launcher in Python is called"
    for stream in (STREAM, STREAM + 1):
        x = tensors(4)
        for _ in range(2):
            installed.given.clear()
            replayed(launch, x, stream)
            run(*GRID, stream, *BEGIN, *arguments(x, described))
            ours, triton_gave = installed.given
            assert ours == triton_gave
            assert sum(isinstance(y, tuple) for y in [*ours, *(ours[-1] if isinstance(ours[-1], list) else ())]) == (
                2 * (kind == "encoded")
            )


def test_descriptors_are_encoded_once_an_address_as_long_as_few_are_met(
    installed: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    launch = again(installed.launcher(), tensors(4))
    steps = [tensors(4) for _ in range(3)]
    installed.encoded.clear()
    for _ in range(3):
        for x in steps:
            replayed(launch, x)
    assert installed.encoded == [p for x in steps for p in (x[1][1:].data_ptr(), x[2].data_ptr())]
    monkeypatch.setattr(direct, "MOST", 4)
    many = [tensors(4) for _ in range(9)]
    for x in many:
        replayed(launch, x)
        assert all(len(known) <= 4 for *_, known in launch.descriptors)


def add_attribute(run: Any) -> None:
    run.something_new = True


def take_profile(run: Any) -> None:
    run.profile_scratch_size = 8


def watch_memory(run: Any) -> None:
    run.gsan_enabled = True


def be_another(run: Any) -> None:
    run.__class__ = type("CudaLauncher", (type(run),), {})


def launch_otherwise(run: Any) -> None:
    launch = run.launch
    run.launch = lambda *given: launch(*given)


def encode_nothing(run: Any) -> None:
    run.launch = triton.runtime.driver.active.utils.launch


@pytest.mark.parametrize(
    "change", [add_attribute, take_profile, watch_memory, be_another, launch_otherwise, encode_nothing]
)
def test_a_launcher_that_may_do_more_is_called_itself(change: Callable[[Any], None], installed: Triton) -> None:
    run = installed.launcher()
    change(run)
    x = tensors(4)
    launch = again(run, x)
    assert launch.run is run
    calls: list[tuple[Any, ...]] = []
    replayed(launch._replace(run=lambda *given: calls.append(given)), x)
    (given,) = calls
    assert given[:9] == (*GRID, STREAM, *BEGIN)
    p_x, d_k, n, scale, d_v, p_y, *rest = given[9:]
    pointers = (p_x, d_k.base.data_ptr(), d_v.base.data_ptr(), p_y)
    assert pointers == (x[0].data_ptr(), x[1][1:].data_ptr(), x[2].data_ptr(), x[3][2:].data_ptr())
    assert (n, scale, *rest) == (5, 0.5, 64, None)


def test_a_launcher_that_takes_memory_is_called_itself(installed: Triton) -> None:
    run = installed.launcher(scratch=128)
    assert again(run, tensors(4)).run is run
