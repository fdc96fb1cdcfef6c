"""flash-linear-attention's own kernels where there is no GPU: in Triton's interpreter, each with one tile."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
import torch

from attnzoo.forms import fla, fla_tuning

FAMILIES = ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
HERE = "cuda" if torch.cuda.is_available() else "cpu"


class _Index(int):
    """A loop's index, which the compiler gives a dtype."""

    def to(self, dtype: Any) -> _Index:
        return self


def _indices(*args: Any) -> list[_Index]:
    return [_Index(i) for i in builtins.range(*args)]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ``fla`` forms run here; on a GPU they do without this."""
    if HERE == "cuda":
        return
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    for family in FAMILIES:
        __import__(f"fla.ops.{family}")
    for _, tuner in fla_tuning.tuners():
        monkeypatch.setattr(tuner, "configs", tuner.configs[:1])
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            monkeypatch.setattr(module, "range", _indices, raising=False)
