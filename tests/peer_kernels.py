"""Peers' kernels where there is no GPU: in Triton's interpreter, each with one tile, or their definitions instead."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import sys
from typing import Any

import pytest
import torch

from attnzoo.forms.backends import fla, fla_tuning

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


def in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Qwen3-Next and Kimi Linear of transformers run their own definitions, though kernels for them may be
    installed."""
    with contextlib.suppress(ImportError):  # an old transformers
        module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
        rules = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
        for name in (*rules, "causal_conv1d_fn", "causal_conv1d_update"):
            monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    rules = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    for name in (*rules, "causal_conv1d_fn", "causal_conv1d_update"):
        if getattr(module, name) is not None:
            monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "FusedRMSNormGated"):  # transformers 4
        monkeypatch.setattr(module, name, None, raising=False)
