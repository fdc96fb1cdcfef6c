"""Runs that are replayed give what the run itself gives, on any tensors of its kind; others are run."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import fox_cases
import numpy as np
import path_cases
import pytest
import torch
import wall_cases
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common import memory, replay, tiles
from attnzoo.kernels.common.recording import recorders
from attnzoo.kernels.common.replay import Replay
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.wall import wall_attention

B, N = 3, 40


def _floats(pointer: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * (B * N)).from_address(pointer))


def multiply_add(gx: int, gy: int, gz: int, stream: int, p_x: int, p_y: int, p_z: int, factor: float) -> None:
    """A launcher: z += factor x y of B N floats."""
    _floats(p_z)[:] += np.float32(factor) * _floats(p_x) * _floats(p_y)


def launch(x: Any, y: Any, z: Any, factor: float) -> None:
    args = [x, y, z, factor]
    if recorders.current is not None:
        recorders.current.launched(multiply_add, (1, 1, 1), (), args)
    multiply_add(1, 1, 1, 0, *(a.data_ptr() if isinstance(a, Tensor) else a for a in args))  # type: ignore[arg-type]


runs: list[int] = []


def plain(leaves: Sequence[Any]) -> list[Tensor | None]:
    """x^2 y, 2 x as part of a larger tensor, None."""
    x, y, factor = leaves
    runs.append(1)
    square, cube = torch.zeros_like(x), x.new_zeros(x.shape)
    launch(x, x, square, 1.0)
    launch(square, y, cube, factor)
    del square
    pair = x.new_zeros((2, *x.shape))
    if factor == 7:
        largest, _ = (x * 2)[1:].max(0)
        pair = torch.stack((x - x, y[1:].sum() * 0 + largest.expand(x.shape))).clamp_(min=0.5).contiguous()
    elif factor == 8 and x.sum().item() > 0:
        pair = pair.clone()
    elif factor == 9:
        x.new_empty((0, N)), torch.empty_like(x[:0])
    ones = x.new_zeros(x.shape) + x[:0].sum()
    launch(x, y, ones, 0.0)
    launch(x, y, pair[1], 2 * factor)
    return [cube, pair[1], None]


def test_runs_on_a_cpu_ask_for_no_gpu_which_torch_for_gpus_refuses_without_a_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_current_device", lambda: pytest.fail("asked"))
    made = Replay(plain)
    x, y = torch.randn(2, B, N)
    for _ in range(3):
        torch.testing.assert_close(made((x, y, 1.0))[0], x * x * y)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``Replay`` of ``plain`` on a CPU, asserting that it is right."""
    monkeypatch.setattr(replay, "_FIRST_DEVICE", -1)
    monkeypatch.setattr(replay, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    made = Replay(plain)

    def call(x: Tensor, y: Tensor, factor: float = 1.0) -> bool:
        runs.clear()
        got = made((x, y, factor))
        ran = bool(runs)
        for a, b in zip(got, plain((x, y, factor)), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                assert torch.equal(a, b)
        return ran

    yield call
    torch.use_deterministic_algorithms(before)


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(B, N), torch.randn(B, N)


def test_the_third_run_of_a_kind_is_replayed_on_other_tensors(again: Any) -> None:
    assert [again(*pair()) for _ in range(5)] == [True, True, False, False, False]


def test_outputs_of_replays_are_new_each_time_and_nothing_else_is_kept(again: Any) -> None:
    for _ in range(3):
        again(*pair())
    made = Replay(plain)
    found = [made((*pair(), 2.0)) for _ in range(4)]
    assert len({x.data_ptr() for x, *_ in found}) == 4  # type: ignore[union-attr]
    x, y = pair()
    made((x, y, 2.0))
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("x", "y", "factor"),
    [
        (torch.randn(N, B).t(), torch.randn(B, N), 1.0),
        (torch.randn(N, B), torch.randn(N, B), 1.0),
        (torch.randn(B * N + 1)[1:].view(B, N), torch.randn(B, N), 1.0),
        (torch.randn(B, N), torch.randn(B, N), 3.0),
    ],
    ids=["strides", "shape", "alignment", "number"],
)
def test_what_a_run_depends_on_makes_another_kind(x: Tensor, y: Tensor, factor: float, again: Any) -> None:
    for _ in range(3):
        again(*pair())
    assert again(x, y, factor)
    assert not again(*pair())


def test_tensors_that_share_memory_are_told_apart(again: Any) -> None:
    x, y = pair()
    assert [again(x, x) for _ in range(4)] == [True] * 4  # which is which could not be recorded
    assert [again(x, y), again(x, y)] == [True, False]
    assert not again(x, x)
    whole = torch.randn(2 * B, N)
    assert not again(whole[:B], whole[B:])


def test_forced_tiles_make_another_kind(again: Any) -> None:
    for _ in range(3):
        again(*pair())
    with tiles.override({}, {}):
        assert again(*pair())


def test_what_torch_computes_is_computed_again(again: Any) -> None:
    assert [again(*pair(), 7) for _ in range(5)] == [True, True, False, False, False]


def test_memory_without_an_element_is_no_obstacle(again: Any) -> None:
    assert [again(*pair(), 9) for _ in range(4)] == [True, True, False, False]


def test_runs_that_read_numbers_are_never_replayed(again: Any) -> None:
    assert [again(*pair(), 8) for _ in range(5)] == [True] * 5


def test_nothing_is_replayed_where_new_memory_is_filled_or_launches_are_watched(
    again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        again(*pair())
    torch.use_deterministic_algorithms(True)
    assert again(*pair())
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(type(recorders), "watched", lambda self: True)
    assert again(*pair())


def test_what_ends_early_gives_its_memory_back_in_replays(monkeypatch: pytest.MonkeyPatch, again: Any) -> None:
    monkeypatch.setattr(memory, "SMALL", 0)
    made = Replay(plain)
    for _ in range(3):
        made((*pair(), 2.0))
    (recording,) = made._known.values()
    steps = [step if isinstance(step, int) else type(step).__name__ for step in recording._steps]  # type: ignore[union-attr]
    at = steps.index(2)  # the square, the first that is made after two tensors that are given
    assert steps[:at].count("Repeated") == 2
    assert steps[at:].count("Repeated") == 2
    assert again(*pair())


def test_kinds_are_forgotten_rather_than_piled_up(again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST", 4)
    made = Replay(plain)
    for factor in range(2, 30):
        for _ in range(3):
            made((*pair(), float(factor)))
        assert len(made._known) <= 4


@pytest.mark.parametrize("told", [True, False])
def test_a_recording_is_believed_where_it_gives_the_numbers_in_spoiled_memory(
    told: bool, again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Of what is not proven, rows may be left unwritten."""

    def run(leaves: Sequence[Any]) -> list[Tensor]:
        x, y = leaves
        runs.append(1)
        square, kept = torch.zeros_like(x), torch.empty(2, *x.shape)
        launch(x, x, square, 1.0)
        kept[0] = square
        with recorders.listening(recorders.current if told else None):
            launch(x, y, square, 1.0)
        return [square, kept]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = Replay(run, proven=1)
    for n in range(4):
        runs.clear()
        x, y = pair()
        square, kept = made((x, y))
        assert bool(runs) == (n < 2 or not told)
        torch.testing.assert_close(square, x * x + x * y)
        assert torch.equal(kept[0], x * x)


def test_an_output_that_no_launch_is_known_to_write_is_not_believed(
    again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(leaves: Sequence[Any]) -> list[Tensor]:
        runs.append(1)
        square, kept = torch.zeros_like(leaves[0]), torch.empty_like(leaves[0])
        launch(leaves[0], leaves[0], square, 1.0)
        _floats(kept.data_ptr())[:] = 5
        return [square, kept]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = Replay(run, proven=1)
    runs.clear()
    for n in range(4):
        assert bool((made(pair())[1] == 5).all())
        assert len(runs) == n + 1


def test_where_no_memory_is_left_for_the_proof_a_run_is_not_replayed(
    again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def full(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError

    def run(leaves: Sequence[Any]) -> list[Tensor]:
        runs.append(1)
        square = torch.zeros_like(leaves[0])
        launch(leaves[0], leaves[0], square, 1.0)
        return [square]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(replay._Recording, "__call__", full)
    made = Replay(run, proven=1)
    runs.clear()
    for n in range(4):
        x, y = pair()
        torch.testing.assert_close(made((x, y))[0], x * x)
        assert len(runs) == n + 1


def test_gradients_of_several_at_once_are_refused_by_name() -> None:
    """Torch had said that a tensor has no storage."""
    q = torch.randn(1, 4, 1, 16, requires_grad=True)
    o = fox_attention(q, q, q, log_decay=None, impl="triton")
    with pytest.raises(NotImplementedError, match="one gradient at a time: .*is_grads_batched"):
        torch.autograd.grad(o, q, torch.randn(2, *o.shape), is_grads_batched=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "family", "case"),
    [
        (fox_attention, fox_cases, fox_cases.Case(T=200, S=200, K=64, V=64)),
        (fox_attention, fox_cases, fox_cases.Case(T=200, S=200, K=64, V=64, options={"prune": Prune(eps=1e-4)})),
        (path_attention, path_cases, path_cases.Case(T=200, K=64, V=64)),
        (path_attention, path_cases, path_cases.Case(T=200, K=64, V=64, options={"prune": Prune(eps=1e-4)})),
        (path_attention, path_cases, path_cases.Case(T=200, K=64, V=64, options={"keep_carries": True})),
        (path_attention, path_cases, path_cases.Case(T=90, K=32, V=32, diag="mixed")),
        (wall_attention, wall_cases, wall_cases.Case(T=200, K=64, V=64)),
    ],
    ids=["fox", "fox-pruned", "path", "path-pruned", "path-kept", "path-decayed", "wall"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_replayed_on_a_gpu_give_what_they_give_when_they_are_run(
    function: Any, family: Any, case: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What a replay leaves out would be NaN."""
    for seed in range(4):  # replayed from the third on
        spoiled = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 24, *[1 << 16] * 32)]
        del spoiled
        x = family.inputs(case, dtype, seed)
        got = fox_cases.run(function, case, x, impl="triton")
        with monkeypatch.context() as patch:
            patch.setattr(type(recorders), "watched", lambda self: True)  # nothing is replayed where it is watched
            want = fox_cases.run(function, case, x, impl="triton")
        for name, y in want.items():  # the gradients of queries add up in an order that varies
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(got[name], y, rtol=tolerance, atol=tolerance * float(y.abs().max()))
