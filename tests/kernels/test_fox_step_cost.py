"""What a cached step of a layer costs the host, counted: PyTorch's operations and the kernels' launches."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from fox_cases import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import build_attention
from attnzoo.kernels.common import named_op


class Counted(TorchDispatchMode):
    """Counts operations that are no views, and calls of attnzoo's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.work = self.own = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.own += func.namespace == "attnzoo"
        self.work += not func.is_view and func.name() not in ("aten::_unsafe_view", "aten::promote_types")
        return func(*args, **(kwargs or {}))


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
    with torch.no_grad():
        cache = attention.new_cache()
        attention(x, cache=cache)
        attention(x[:, :1], cache=cache)
        monkeypatch.setattr(InterpretedFunction, "run", lambda self, *_, **__: launched.append(self.__name__))
        for module in [
            m for name, m in sys.modules.items() if name.startswith("attnzoo") and hasattr(m, "reads_values")
        ]:
            monkeypatch.setattr(module, "reads_values", lambda *_: False)  # as on a GPU
        monkeypatch.setattr(named_op, "dispatched", lambda leaves: False)  # as where nobody counts
        torch.use_deterministic_algorithms(False)  # filling new memory is work that only tests have
        with Counted() as count:
            attention(x[:, :1], cache=cache)
    assert count.own == 0, "a step took the way through the dispatcher"
    assert len(launched) <= launches, launched
    assert count.work <= most
