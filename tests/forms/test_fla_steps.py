"""Training steps of flash-linear-attention that repeat are replayed, on a function that is made here in its manner."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnzoo import Gate
from attnzoo.forms.backends import fla, fla_kernels, fla_steps
from attnzoo.kernels.common import replay
from attnzoo.kernels.common.recording import recorders

N = 96
runs: list[str] = []
untold: list[bool] = []
autocast: list[bool] = []  # whether it was on, by backward pass


def _floats(pointer: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * N).from_address(pointer))


def multiply_add(gx: int, gy: int, gz: int, stream: int, p_x: int, p_y: int, p_z: int) -> None:
    """A launcher: z += x y of N floats."""
    _floats(p_z)[:] += _floats(p_x) * _floats(p_y)


def launch(x: Tensor, y: Tensor, z: Tensor) -> None:
    if recorders.current is not None and untold != [True]:
        recorders.current.launched(multiply_add, (1, 1, 1), (), [x, y, z])
    multiply_add(1, 1, 1, 0, x.data_ptr(), y.data_ptr(), z.data_ptr())


class Chunks(torch.autograd.Function):
    """o = scale q k (v + state), in a layout of its own, with a last state of k (v + state)."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, initial_state: Any, output_final_state: bool,
        state_v_first: bool, cu_seqlens: Any, chunk_size: int = 64,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert (state_v_first, cu_seqlens, chunk_size) == (False, None, 64)
        runs.append("forward")
        v = v if initial_state is None else v + initial_state
        last, o = torch.zeros_like(k), torch.zeros_like(q)
        launch(k, v, last)
        launch(q, last, o)
        state = last
        if untold == [False]:  # of half of the state alone
            state = torch.empty_like(last)
            state[:, :, 0] = last[:, :, 0]
            _floats(state.data_ptr()).reshape(-1, 2, 4)[:, 1] = last[0, :, 1].numpy()
        kept = last.clone()
        ctx.save_for_backward(q, k, v, kept, None, kept, v)
        ctx.scale, ctx.carried, ctx.shape = scale, initial_state is not None, q.shape
        return o * scale, state if output_final_state else None

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor, dlast: Tensor | None) -> tuple[Any, ...]:
        runs.append("backward")
        autocast.append(torch.is_autocast_enabled("cpu"))
        assert do.shape == ctx.shape
        (q, k, v, last, none, again, same), do = ctx.saved_tensors, do * ctx.scale
        assert none is None
        assert (again.data_ptr(), same.data_ptr()) == (last.data_ptr(), v.data_ptr())
        dq, dkv, dk, dv = (torch.zeros_like(q) for _ in range(4))
        launch(do, last, dq)
        launch(do, q, dkv)
        dkv = dkv if dlast is None else dkv.add_(dlast)
        launch(dkv, v, dk)
        launch(dkv, k, dv)
        return dq, dk, dv, None, dv.clone() if ctx.carried else None, None, None, None, None


def operation(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, cu_seqlens: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    runs.append("operation")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o, state = Chunks.apply(q, k, v, scale, initial_state, output_final_state, False, None)
    return o, state


OPERATION = fla_steps.FlaOp(
    "pretended", "operation", "Chunks",
    lambda x: (None if x.initial_state is None else torch.empty_like(x.v), torch.empty_like(x.k)),
)  # fmt: skip


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> Iterator[fla_steps.FlaOp]:
    module = types.ModuleType("fla.ops.pretended.chunk")
    module.Chunks = Chunks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", types.ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.pretended", types.ModuleType("fla.ops.pretended"))
    monkeypatch.setitem(sys.modules, "fla.ops.pretended.chunk", module)
    monkeypatch.setitem(fla_steps.OPERATIONS, "operation", OPERATION)
    monkeypatch.setitem(vars(OPERATION), "library", operation)
    monkeypatch.setattr(fla_steps, "known", lambda version: True)
    monkeypatch.setattr(fla_steps, "shorten", lambda: None)
    monkeypatch.setattr(replay, "_FIRST_DEVICE", -1)
    monkeypatch.setattr(replay, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    untold.clear()
    OPERATION.kinds.clear()
    yield OPERATION
    torch.use_deterministic_algorithms(before)


def step(function: Any, seed: int, **given: Any) -> list[Tensor]:
    """Outputs and gradients."""
    torch.manual_seed(seed)
    leaves = [torch.randn(1, N // 8, 2, 4).requires_grad_() for _ in range(3)]
    if given.get("initial_state"):
        given["initial_state"] = torch.randn(1, N // 8, 2, 4).requires_grad_()
        leaves.append(given["initial_state"])
    options = {"scale": None, "initial_state": None, "output_final_state": False, "cu_seqlens": None} | given
    made = [x for x in function(*leaves[:3], **options) if x is not None]
    return [*made, *torch.autograd.grad(made, leaves, [torch.randn_like(x) for x in made])]


@pytest.mark.parametrize("given", [{}, {"scale": 2.0}, {"initial_state": True, "output_final_state": True}], ids=str)
def test_steps_from_the_third_on_are_replayed_with_the_same_numbers(given: Any, repeating: Any) -> None:
    for seed in range(5):
        runs.clear()
        got = step(repeating, seed, **given)
        assert runs == (["forward", "backward"] if seed < 2 else [])
        for a, b in zip(got, step(operation, seed, **given), strict=True):
            assert torch.equal(a, b)


def test_calls_of_several_lengths_have_gradients_of_their_own(repeating: Any) -> None:
    options = {"scale": None, "initial_state": None, "output_final_state": False, "cu_seqlens": None}
    inputs = [torch.ones(1, T, 2, N // T // 2).requires_grad_() for T in (12, 24)]
    made = [repeating(x, x.detach() + 1, x.detach() + 2, **options)[0] for x in inputs]
    for x, y in zip(inputs, made, strict=True):
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 6 * x.shape[3] ** -0.5))


def test_tensors_that_are_not_contiguous_are_made_so(repeating: Any) -> None:
    q, k, v = (torch.randn(1, N // 8, 2, 4) for _ in range(3))
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    options = {"scale": 2.0, "initial_state": None, "output_final_state": False, "cu_seqlens": None}
    assert torch.equal(repeating(strided, k, v, **options)[0], repeating(q, k, v, **options)[0])


def test_kinds_that_are_too_many_are_forgotten(repeating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_steps, "MOST", 2)
    for scale in (1.0, 2.0, 3.0, 4.0):
        step(repeating, 0, scale=scale)
        assert len(repeating.kinds) <= 2


class Summed(torch.autograd.Function):
    """o = q exp(running sums of g), which are saved in place of g."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, output_final_state: bool
    ) -> tuple[Tensor, None]:
        sums = g.cumsum(1)
        ctx.save_for_backward(q, sums)
        ctx.scale = scale
        return scale * q * sums.exp(), None

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor | None) -> tuple[Any, ...]:
        q, sums = ctx.saved_tensors
        do = do * ctx.scale * sums.exp()
        return do, None, None, (do * q).flip(1).cumsum(1).flip(1), None, None


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_that_are_saved_stand_for_their_gates(compiled: bool, repeating: Any) -> None:
    sys.modules["fla.ops.pretended.chunk"].Summed = Summed  # type: ignore[attr-defined]
    operation = fla_steps.FlaOp(
        "pretended", f"summed_{compiled}", "Summed", lambda x: (torch.empty_like(x.v),), summed=True
    )
    options: dict[str, Any] = {"scale": 1.0, "initial_state": None, "output_final_state": False}

    def run(q: Tensor, g: Tensor) -> Tensor:
        return operation(q, torch.ones_like(q), torch.ones_like(q), g=g, **options)[0]

    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        q, g = (torch.randn(1, 4, 2, 4).requires_grad_() for _ in range(2))
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            o = run(q, g)
        assert not any(x.data_ptr() == g.data_ptr() for x in saved)
        expected, do = q * g.cumsum(1).exp(), torch.randn_like(o)
        found = torch.autograd.grad(o, (q, g), do), torch.autograd.grad(expected, (q, g), do)
        for got, want in zip((o, *found[0]), (expected, *found[1]), strict=True):
            torch.testing.assert_close(got, want)
    assert len(operation.kinds) == 1


def test_a_last_state_alone_has_gradients(repeating: Any) -> None:
    options = {"scale": None, "initial_state": None, "output_final_state": True, "cu_seqlens": None}
    q, k, v = (torch.randn(1, N // 8, 2, 4).requires_grad_() for _ in range(3))
    found = [
        torch.autograd.grad(run(q, k, v, **options)[1].square().sum(), (q, k, v)) for run in (repeating, operation)
    ]
    assert all(map(torch.equal, *found))


def test_one_tensor_in_several_places_leaves_the_gradients_of_other_calls_alone(repeating: Any) -> None:
    options = {"scale": 2.0, "initial_state": None, "output_final_state": False, "cu_seqlens": None}
    q, k, v = (torch.randn(1, N // 8, 2, 4).requires_grad_() for _ in range(3))
    calls = [(q, k, v), (q, q, v), (q, v, v), (v, v, v)]
    made = [[function(*call, **options)[0].sum() for call in calls] for function in (repeating, operation)]
    for call, *sums in zip(calls, *made, strict=True):
        found = [torch.autograd.grad(one, {*call}) for one in sums]
        assert all(map(torch.equal, *found))


def test_a_backward_pass_is_within_autocast_where_its_forward_pass_was(repeating: Any) -> None:
    options = {"scale": 2.0, "initial_state": None, "output_final_state": False, "cu_seqlens": None}
    x, made = torch.randn(1, N // 8, 2, 4).requires_grad_(), []
    for on in (True, False):
        with torch.autocast("cpu", enabled=on):
            made.append(repeating(x, x + 1, x + 2, **options)[0].sum())
    autocast.clear()
    for one in made:
        torch.autograd.grad(one, x)
    assert autocast == [True, False]


@pytest.mark.parametrize(("whole", "ran"), [(True, ["forward", "backward"]), (False, ["forward"])])
def test_a_launch_that_nobody_hears_of_ends_all_replays(whole: bool, ran: list[str], repeating: Any) -> None:
    untold.append(whole)
    for seed in range(4):
        runs.clear()
        got = step(repeating, seed, output_final_state=True)
        assert runs[: len(ran)] == ran
        for a, b in zip(got, step(operation, seed, output_final_state=True), strict=True):
            assert torch.equal(a, b)


def call(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """As the forms call an operation of the library."""
    options = {"scale": None, "initial_state": None, "output_final_state": False, "cu_seqlens": None} | given
    return fla._op("operation", fla.Prepared(q, k, v, Gate(), options))


def test_packed_calls_are_the_librarys_own(repeating: Any) -> None:
    x = torch.randn(1, N // 8, 2, 4)
    for tensors in ((x, x + 1, x + 2), (x.clone().requires_grad_(), x + 1, x + 2)):
        runs.clear()
        call(*tensors, cu_seqlens=torch.tensor([0, 2]))
        assert runs == ["operation", "forward"]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("given", [{}, {"scale": 2.0, "output_final_state": True}], ids=str)
def test_calls_without_a_gradient_are_the_librarys_own_until_they_come_again(
    guard: Any, given: Any, repeating: Any
) -> None:
    """And training of the same shapes knows nothing of them."""
    for seed in range(5):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, N // 8, 2, 4) for _ in range(3))
        runs.clear()
        with guard():
            got = call(q, k, v, **given)
            assert runs == [["operation", "forward"], ["forward"], ["forward"], [], []][seed]
            for a, b in zip(got, operation(q, k, v, **given), strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
        step(call, seed, **given)
    assert len(repeating.kinds) == 2


def test_a_mode_sees_the_librarys_own_call_where_no_gradient_is_recorded(repeating: Any) -> None:
    x = torch.randn(1, N // 8, 2, 4)
    for _ in range(4):
        call(x, x + 1, x + 2)
    runs.clear()
    with FlopCounterMode(display=False):
        call(x, x + 1, x + 2)
    assert runs == ["operation", "forward"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_steps_are_one_graph_and_replayed_as_others_are(dynamic: bool, repeating: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seed in range(5):
        runs.clear()
        got = step(compiled, seed, scale=2.0, initial_state=True)
        assert runs == (["forward", "backward"] if seed < 2 else [])
        for a, b in zip(got, step(operation, seed, scale=2.0, initial_state=True), strict=True):
            assert torch.equal(a, b)


def test_compiled_calls_without_a_gradient_are_of_the_same_graph(repeating: Any) -> None:
    torch._dynamo.reset()
    x = torch.randn(1, N // 8, 2, 4)
    with torch.no_grad():
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(x, x + 1, x + 2)[0]
    assert torch.equal(got, operation(x, x + 1, x + 2)[0])


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no such tag")
def test_no_operation_is_captured_in_a_cuda_graph() -> None:
    for operation in fla_steps.OPERATIONS.values():
        for op in (operation.op.op, operation.backward_op.op):
            assert torch.Tag.cudagraph_unsafe in op.tags


@pytest.mark.parametrize("carried", [False, True])
def test_an_operation_is_an_op_of_torch(carried: bool, repeating: Any) -> None:
    q, k, v, state = (torch.randn(1, N // 8, 2, 4).requires_grad_() for _ in range(4))
    given = q, k, v, None, None, None, state if carried else None, 2.0, False, None
    torch.library.opcheck(OPERATION.op.op, given)


def test_a_kind_that_was_forgotten_before_its_backward_pass_is_met_again(repeating: Any) -> None:
    q, k, v = (torch.randn(1, N // 8, 2, 4).requires_grad_() for _ in range(3))
    sums = [function(q, k, v)[0].sum() for function in (call, operation)]
    OPERATION.kinds.clear()
    found = [torch.autograd.grad(one, (q, k, v)) for one in sums]
    assert all(map(torch.equal, *found))


def test_a_gradient_of_a_gradient_is_refused(repeating: Any) -> None:
    x = torch.randn(1, N // 8, 2, 4).requires_grad_()
    o, _ = repeating(x, x + 1, x + 2, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None)
    (dx,) = torch.autograd.grad(o.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("version", "others", "triton", "gluon", "expected"),
    [
        ("0.6.0", [], (3, 6), "0", True),
        ("0.7.0", [], (3, 6), "0", False),
        ("0.6.1", ["tilelang"], (3, 6), "0", False),
        ("0.6.1", ["flash_qla"], (3, 6), "0", True),
        ("0.6.0", [], (3, 3), "0", False),
        ("0.6.0", [], (3, 6), "1", False),
    ],
)
def test_what_nobody_has_read_is_the_librarys_own(
    version: str,
    others: list[str],
    triton: tuple[int, int],
    gluon: str,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fla_kernels, "installed", lambda: others)
    monkeypatch.delenv("FLA_TILELANG", raising=False)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")  # installed, and switched off
    monkeypatch.setattr(fla_steps, "triton_version", lambda: triton)
    monkeypatch.setenv("FLA_GLUON", gluon)
    fla_steps.known.cache_clear()  # type: ignore[attr-defined]
    assert fla_steps.known(version) == expected
    fla_steps.known.cache_clear()  # type: ignore[attr-defined]
