"""How the tuning of flash-linear-attention's kernels is taken over, on tuners that are made here."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from attnzoo.forms.backends import fla_tuning

triton = pytest.importorskip("triton")


def configs(**numbers: tuple[int, ...]) -> list[Any]:
    return [
        triton.Config({"BK": bk}, num_warps=warps, num_stages=stages)
        for bk in numbers.get("BK", (32, 64))
        for warps in numbers.get("warps", (1, 2, 4, 8))
        for stages in numbers.get("stages", (2, 3, 4))
    ]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A tuner in a module of the peer's name, which has not been taken over."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ATTNZOO_FLA_TUNING", raising=False)
    monkeypatch.setattr(fla_tuning, "_shortened", set())
    monkeypatch.setattr(fla_tuning, "_said", set())

    @triton.heuristics({"EVEN": lambda args: True})
    @triton.autotune(configs=configs(), key=["T"])
    @triton.jit
    def pretended_kernel(x, T, BK, EVEN):  # type: ignore[no-untyped-def]
        pass

    module = types.ModuleType("fla.ops.pretend")
    module.kernel = pretended_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.pretend", module)
    return pretended_kernel.fn


def test_few_tiles_are_left() -> None:
    left = fla_tuning.few(configs(), {"num_stages": (3,), "num_warps": (4, 2), "BV": (7,)})
    assert {(c.kwargs["BK"], c.num_warps, c.num_stages) for c in left} == {
        (32, 2, 3), (32, 4, 3), (64, 2, 3), (64, 4, 3),
    }  # fmt: skip
    left = fla_tuning.few(configs(stages=(1,)), {"num_stages": (3,), "BK": (64,)})
    assert {(c.kwargs["BK"], c.num_stages) for c in left} == {(64, 1)}  # no stages of 3 there


def test_tuners_are_found_and_shortened_once(tuner: Any) -> None:
    assert ("pretended_kernel", tuner) in list(fla_tuning.tuners())
    fla_tuning.shorten()
    assert {(c.num_warps, c.num_stages) for c in tuner.configs} == {(2, 3), (4, 3)}
    left, look_up = tuner.configs, tuner.check_disk_cache
    fla_tuning.shorten()
    assert tuner.configs is left
    assert tuner.check_disk_cache is look_up


def test_the_owner_may_keep_their_tuning(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNZOO_FLA_TUNING", "full")
    fla_tuning.shorten()
    assert len(tuner.configs) == 24
    monkeypatch.setenv("ATTNZOO_FLA_TUNING", "all")
    with pytest.raises(ValueError, match=r"ATTNZOO_FLA_TUNING: expected full \(all tiles\) or unset .* got 'all'"):
        fla_tuning.shorten()


def test_a_tuning_is_announced_once_for_a_shape(
    tuner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import triton.testing

    lengths: list[Any] = []
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **options: lengths.append(options) or call())
    fla_tuning.shorten()
    with caplog.at_level(logging.WARNING, "attnzoo.fla"):
        for shape in ("H=2, K=64", "H=2, K=64", "H=2, K=128"):
            fla_tuning.will_run(shape)
            assert tuner.do_bench(lambda: 7, quantiles=(0.5, 0.2, 0.8)) == 7
    assert [("K=64" in line, "K=128" in line, str(tmp_path) in line) for line in caplog.messages] == [
        (True, False, True),
        (False, True, True),
    ]
    assert all(options["warmup"] + options["rep"] <= 25 for options in lengths)


def test_a_tuning_that_is_not_kept_says_so(
    monkeypatch: pytest.MonkeyPatch, tuner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import triton.testing

    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **options: call())
    monkeypatch.delattr(type(tuner), "check_disk_cache")  # before Triton 3.4
    fla_tuning.shorten()
    with caplog.at_level(logging.WARNING, "attnzoo.fla"):
        tuner.do_bench(lambda: 7, quantiles=(0.5, 0.2, 0.8))
    assert caplog.messages[0].endswith("seconds to a minute, in every process (Triton 3.4 and later keep it)")


def test_where_none_of_the_few_fits_all_are_measured(
    tuner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.errors import OutOfResources

    launched: list[int] = []

    def launch(room: int) -> int:
        """The tuner's own run, where a tile of n stages needs n of room."""
        launched.append(len(tuner.configs))
        needed = min(c.num_stages for c in tuner.configs)
        if needed > room:
            raise OutOfResources(needed, room, "shared memory")
        return room

    monkeypatch.setattr(tuner, "run", launch)
    fla_tuning.shorten()
    assert tuner.run(3) == 3
    assert tuner.given is None  # no tensor of a call lives on
    tuner.cache["of another shape"] = tuner.configs[0]
    with caplog.at_level(logging.WARNING, "attnzoo.fla"):
        assert tuner.run(room=2) == 2
        assert not tuner.cache
        with pytest.raises(OutOfResources, match="Required: 2, Hardware limit: 1"):
            tuner.run(1)
    assert launched == [4, 4, 24, 24]
    assert [r.getMessage()[:95] for r in caplog.records] == [
        "flash-linear-attention's pretended_kernel: all its tiles are measured, as none of a few fits (o"
    ]


@pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="before Triton 3.5")
@pytest.mark.parametrize("found", [False, True])
def test_tiles_are_compiled_at_the_same_time_before_they_are_measured(
    found: bool, tuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be compiled is left to the measurement; where a result is found, nothing is compiled."""
    from triton.runtime import _async_compile

    order: list[Any] = []
    begun = threading.Barrier(3)
    kernels: dict[Any, Any] = {}
    made = types.SimpleNamespace()
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def compile_(stages: int) -> Any:
        begun.wait(5)
        if stages == 4:
            raise RuntimeError("too many")
        order.append(stages)
        return made

    def launch(x: int, *, grid: Any, warmup: bool, num_stages: int, **rest: Any) -> None:
        assert (x, grid, warmup, rest["BK"]) == (7, (1,), True, 64)
        mode = _async_compile.active_mode.get()
        assert mode is not None
        kernels[num_stages] = mode.submit(
            num_stages, functools.partial(compile_, num_stages), functools.partial(kernels.__setitem__, num_stages)
        )

    monkeypatch.setattr(tuner, "fn", types.SimpleNamespace(run=launch, device_caches={0: (kernels,)}))
    look_up = lambda key, configs, measure: "found" if found else measure()  # noqa: E731
    monkeypatch.setattr(tuner, "check_disk_cache", look_up)
    three = configs(BK=(64,), warps=(4,))
    run = lambda *args, **options: tuner.check_disk_cache("key", three, lambda: order.append("measured"))  # noqa: E731
    monkeypatch.setattr(tuner, "run", run)
    fla_tuning.shorten()
    assert tuner.run(7, grid=(1,), warmup=False) == ("found" if found else None)
    assert [*map(str, sorted(order, key=str))] == ([] if found else ["2", "3", "measured"])
    assert order[-1:] == ([] if found else ["measured"])
    assert kernels == ({} if found else {2: made, 3: made})
    monkeypatch.setattr(tuner, "fn", types.SimpleNamespace(device_caches={}))  # a Triton that does it in another way
    assert tuner.run(7, grid=(1,), warmup=False) == ("found" if found else None)
    assert order[-2:] == ([] if found else ["measured"] * 2)


def test_one_process_measures_and_the_others_wait(tuner: Any) -> None:
    """Locks of files bind every opening of them, in this process too."""
    order: list[str] = []
    measuring, waited = threading.Event(), threading.Event()

    def look_up(who: str) -> None:
        order.append(f"{who} begins")
        if who == "first":
            measuring.set()
            waited.wait(0.3)
        order.append(f"{who} ends")

    first = threading.Thread(target=fla_tuning._alone, args=("kernel", look_up, "first"))
    first.start()
    measuring.wait()
    fla_tuning._alone("kernel", look_up, "second")
    first.join()
    assert order == ["first begins", "first ends", "second begins", "second ends"]


@pytest.mark.parametrize("connected", [True, False])
def test_a_process_that_takes_the_lock_has_no_collective_under_way(
    connected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measuring waits for the whole GPU, and a collective on it for a process that may wait for the lock."""
    events: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: connected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("ended"))
    lock = fla_tuning._lock
    monkeypatch.setattr(fla_tuning, "_lock", lambda path: events.append("locks") or lock(path))
    fla_tuning._alone("kernel", lambda: events.append("looks up"))
    assert events == ["ended"] * connected + ["locks", "looks up"]


def test_a_folder_that_cannot_be_locked_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert fla_tuning._alone("kernel", lambda x: x + 1, 1) == 2
