"""What a cached step and a training step of a layer cost the host, counted: operations of PyTorch, launches, calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fox_cases import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import build_attention
from attnzoo.benchmarks.host import calls
from attnzoo.kernels.common import named_op, replay
from attnzoo.kernels.common.recording import recorders


class Counted(TorchDispatchMode):
    """Counts operations that are no views, and calls of attnzoo's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.work = self.own = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.own += func.namespace == "attnzoo"
        self.work += not func.is_view and func.name() not in ("aten::_unsafe_view", "aten::promote_types")
        return func(*args, **(kwargs or {}))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what only a CPU and tests ask for: values read, ops that a mode sees, memory that is filled."""
    for module in [m for name, m in sys.modules.items() if name.startswith("attnzoo") and hasattr(m, "reads_values")]:
        monkeypatch.setattr(module, "reads_values", lambda *_: False)
    monkeypatch.setattr(named_op, "dispatched", lambda leaves: False)
    torch.use_deterministic_algorithms(False)


STEPS = [  # cached tokens, operations, launches
    ("nope", {}, 260, 13, 2),
    ("rope", {}, 260, 30, 2),
    ("alibi", {}, 260, 17, 3),
    ("fox", {"block": "pro", "acp": True}, 260, 31, 9),  # three norms, and one that keeps the longest key
    ("path_fox", {"acp": True}, 20, 28, 4),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="counted under Triton's interpreter")
@pytest.mark.parametrize(("name", "options", "tokens", "most", "launches"), STEPS, ids=[step[0] for step in STEPS])
def test_a_step_asks_little_of_the_host(
    name: str, options: dict[str, Any], tokens: int, most: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host sets the pace of generation at small batches: no work per token is added unseen."""
    from triton.runtime.interpreter import InterpretedFunction

    attention = build_attention(name, hidden_size=64, num_heads=2, impl="triton", **options).half()
    x = torch.randn(1, tokens, 64, dtype=torch.float16)
    launched: list[str] = []
    as_on_a_gpu(monkeypatch)
    with torch.no_grad():
        cache = attention.new_cache()
        attention(x, cache=cache)
        attention(x[:, :1], cache=cache)
        monkeypatch.setattr(InterpretedFunction, "run", lambda self, *_, **__: launched.append(self.__name__))
        with Counted() as count:
            attention(x[:, :1], cache=cache)
    assert count.own == 0, "a step took the way through the dispatcher"
    assert len(launched) <= launches, launched
    assert count.work <= most


TRAINED = {  # calls of Python, operations, launches
    "nope": (141, 29, 4), "fox": (145, 41, 7), "rope": (197, 31, 6), "path_fox": (294, 77, 19), "mamba2": (391, 46, 17),
}  # fmt: skip
COMPILED = {"nope": 19, "fox": 19, "rope": 37, "path_fox": 58, "mamba2": 73}  # calls of Python


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched, which do nothing; ops are replayed as on a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    ran: list[str] = []

    def launch(self: Any, *_: Any, **__: Any) -> None:
        ran.append(self.__name__)
        if recorders.current is not None:
            recorders.current.launched(lambda *_: None, (1, 1, 1), (), [])

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    for which, value in (("_FIRST_DEVICE", -1), ("_current_device", lambda: -1), ("_stream", lambda device: 0)):
        monkeypatch.setattr(replay, which, value)
    return ran


def training(attention: Any) -> Callable[[], None]:
    """Forward and backward of a layer, under autocast."""
    x = torch.randn(1, 128, 64, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            y = attention(x)
        y.sum().backward()

    return step


@pytest.mark.skipif(DEVICE == "cuda", reason="counted under Triton's interpreter")
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_asks_little_of_the_host(
    name: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed as on a GPU, with launches that do nothing."""
    as_on_a_gpu(monkeypatch)
    step = training(build_attention(name, hidden_size=64, num_heads=1, impl="triton"))
    step()
    assert len(launches) <= TRAINED[name][2]
    step()  # recorded
    launches.clear()
    python, _ = calls(step)
    with Counted() as count:
        step()
    assert not launches, "a run was not replayed"
    assert python <= TRAINED[name][0]
    assert count.work <= TRAINED[name][1]


@pytest.mark.skipif(DEVICE == "cuda", reason="counted under Triton's interpreter")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_training_step_repeats_nothing_but_its_launches(
    name: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check, no plan, and none of what torch does around an op of Python that records no gradient."""
    asks = named_op.dispatched
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(named_op, "dispatched", asks)
    torch._dynamo.reset()
    attention = build_attention(name, hidden_size=64, num_heads=1, impl="triton")
    step = training(torch.compile(attention, backend="aot_eager", fullgraph=True))
    for _ in range(3):  # compiled and run, recorded, then replayed
        step()
    launches.clear()
    python, _ = calls(step)
    around, _ = calls(step, torch._library)
    assert not launches, "a run was not replayed"
    assert python <= COMPILED[name]
    assert around == 0
