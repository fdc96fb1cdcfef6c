"""What is refused, and that the message names the argument, what was expected and what was got."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo.algebra.values
from attnzoo import Gate, Prune, RecurrentState, get, list_variants
from attnzoo.algebra.validation import check_values
from attnzoo.algebra.values import reads_values
from attnzoo.samples import random_inputs

B, T, H, G, K, V = 2, 5, 4, 2, 8, 6


def inputs(name: str = "gated_deltanet") -> dict[str, Any]:
    q, k, v, gate = random_inputs(name, B, T, H, G, K, V, dtype=torch.float32)
    return {"q": q, "k": k, "v": v, "gate": gate}


def with_part(part: str, change: Callable[[Tensor], Any], name: str = "gated_deltanet") -> dict[str, Any]:
    given = inputs(name)
    return {**given, "gate": replace(given["gate"], **{part: change(getattr(given["gate"], part))})}


def put(value: float) -> Callable[[Tensor], Tensor]:
    """The tensor with one entry set."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[0] = value
        return x

    return change


SHAPES = {
    "q that is a list": ({"q": [1.0]}, TypeError, "q: expected a tensor, got list"),
    "k of 3 axes": (
        {"k": torch.zeros(B, T, K)},
        ValueError,
        f"k: expected 4 axes [B, T, heads, channels], got shape ({B}, {T}, {K})",
    ),
    "integer v": (
        {"v": torch.zeros(B, T, G, V, dtype=torch.int64)},
        TypeError,
        "v: expected a floating dtype, got torch.int64",
    ),
    "k of another dtype": (
        {"k": torch.zeros(B, T, G, K).double()},
        TypeError,
        "k: expected the dtype of q, torch.float32, got torch.float64",
    ),
    "v of another dtype": (
        {"v": torch.zeros(B, T, G, V).half()},
        TypeError,
        "v: expected the dtype of q, torch.float32, got torch.float16",
    ),
    "k elsewhere": (
        {"k": torch.zeros(B, T, G, K, device="meta")},
        ValueError,
        "k: expected the device of q, cpu, got meta",
    ),
    "gate that is a tensor": ({"gate": torch.zeros(B, T, H)}, TypeError, "gate: expected attnzoo.Gate, got Tensor"),
    "no tokens": (
        {"q": torch.zeros(B, 0, H, K)},
        ValueError,
        f"q: expected at least one token, got shape ({B}, 0, {H}, {K})",
    ),
    "heads that do not divide": (
        {"k": torch.zeros(B, T, 3, K)},
        ValueError,
        f"k: expected a number of heads that divides q's {H}, got 3",
    ),
    "no key heads": (
        {"k": torch.zeros(B, T, 0, K)},
        ValueError,
        f"k: expected a number of heads that divides q's {H}, got 0",
    ),
    "more key heads than query heads": (
        {"k": torch.zeros(B, T, 8, K)},
        ValueError,
        f"k: expected a number of heads that divides q's {H}, got 8",
    ),
    "k of other channels": (
        {"k": torch.zeros(B, T, G, 6)},
        ValueError,
        f"k: expected [B, T, G, K] = {(B, T, G, K)}, got {(B, T, G, 6)}",
    ),
    "v of other heads": (
        {"v": torch.zeros(B, T, 1, V)},
        ValueError,
        f"v: expected [B, T, G, V] = {(B, T, G, V)}, got {(B, T, 1, V)}",
    ),
    "v of other length": (
        {"v": torch.zeros(B, 4, G, V)},
        ValueError,
        f"v: expected [B, T, G, V] = {(B, T, G, V)}, got {(B, 4, G, V)}",
    ),
    "no key channels": (
        {"q": torch.zeros(B, T, H, 0), "k": torch.zeros(B, T, G, 0)},
        ValueError,
        f"q: expected at least one channel, got shape ({B}, {T}, {H}, 0)",
    ),
    "sparse k": (
        {"k": torch.zeros(B, T, G, K).to_sparse()},
        TypeError,
        "k: expected a dense tensor, got one of layout",
    ),
    "no gate": ({"gate": None}, TypeError, "gate: expected attnzoo.Gate, got NoneType"),
    "scale that is a tensor": ({"scale": torch.tensor(1.0)}, TypeError, "scale: expected a float or None, got Tensor"),
    "scale that is True": ({"scale": True}, TypeError, "scale: expected a float or None, got bool"),
    "scale of nan": ({"scale": math.nan}, ValueError, "scale: expected a positive finite number or None, got nan"),
    "infinite scale": ({"scale": math.inf}, ValueError, "scale: expected a positive finite number or None, got inf"),
    "negative scale": ({"scale": -1}, ValueError, "scale: expected a positive finite number or None, got -1"),
    "scale of 0": ({"scale": 0.0}, ValueError, "scale: expected a positive finite number or None, got 0.0"),
    "valid that is a list": (
        {"valid": [[True] * T] * B},
        TypeError,
        "valid: expected a tensor [B, T] or None, got list",
    ),
    "additive mask": (
        {"valid": torch.tensor([[0.0, 0.0, 0.0, -1e4, -1e4]] * B)},
        TypeError,
        "valid: expected torch.bool (True where a token exists), got torch.float32",
    ),
    "delta_rule that is a word": ({"delta_rule": "no"}, TypeError, "delta_rule: expected True or False, got 'no'"),
    "write that is a list": ({"write": [1.0]}, TypeError, "write: expected a tensor [B, T, G] or [B, T, H] or None"),
}


@pytest.mark.parametrize("form", ["parallel", "extend"])
@pytest.mark.parametrize(("change", "error", "message"), SHAPES.values(), ids=SHAPES.keys())
def test_bad_tensor_is_refused(change: dict[str, Any], error: type[Exception], message: str, form: str) -> None:
    variant = get("gated_deltanet")
    with pytest.raises(error, match=re.escape(message)):
        (variant.extend if form == "extend" else variant.forms[form])(**{**inputs(), **change})


OPTIONS = {
    "prune that is True": ({"prune": True}, TypeError, "prune: expected attnzoo.Prune(eps=...) or None, got True"),
    "prune that is eps": ({"prune": 1e-3}, TypeError, "prune: expected attnzoo.Prune(eps=...) or None, got 0.001"),
    "nan bound": (
        {"prune": Prune(), "logit_bound": torch.tensor([1.0, math.nan, 1.0, 1.0])},
        ValueError,
        "logit_bound: expected bounds of 0 or more, got [1.0, nan, 1.0, 1.0]",
    ),
    "negative bound": (
        {"prune": Prune(), "logit_bound": torch.tensor([1.0, -1.0, 1.0, 1.0])},
        ValueError,
        "logit_bound: expected bounds of 0 or more, got [1.0, -1.0, 1.0, 1.0]",
    ),
    "nan sink": (
        {"sink": torch.tensor([0.0, 0.0, math.nan, 0.0])},
        ValueError,
        "sink: expected logits below infinity, got [0.0, 0.0, nan, 0.0]",
    ),
    "return_lse that is 1": ({"return_lse": 1}, TypeError, "return_lse: expected True or False, got 1"),
    "window of 0": ({"window": 0}, ValueError, "window: expected at least 1 (the row itself), got 0"),
    "window that is True": ({"window": True}, TypeError, "window: expected a number of tokens or None, got True"),
}


@pytest.mark.parametrize("form", ["parallel", "extend"])
@pytest.mark.parametrize(("change", "error", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_bad_option_is_refused(change: dict[str, Any], error: type[Exception], message: str, form: str) -> None:
    variant = get("path_fox")
    with pytest.raises(error, match=re.escape(message)):
        (variant.extend if form == "extend" else variant.forms[form])(**{**inputs("path_fox"), **change})


BORDERS = {
    "unsorted": (torch.tensor([0, 4, 2, T]), ValueError, f"borders rising from 0 to T = {T}, got [0, 4, 2, {T}]"),
    "past the end": (torch.tensor([0, T + 1]), ValueError, f"borders rising from 0 to T = {T}, got [0, {T + 1}]"),
    "before the end": (torch.tensor([0, T - 1]), ValueError, f"borders rising from 0 to T = {T}, got [0, {T - 1}]"),
    "not from 0": (torch.tensor([1, T]), ValueError, f"borders rising from 0 to T = {T}, got [1, {T}]"),
    "empty": (torch.tensor([], dtype=torch.int64), ValueError, "one axis [N + 1] with N >= 1, got shape (0,)"),
    "floats": (torch.tensor([0.0, T]), TypeError, "an int32 or int64 tensor [N + 1], got torch.float32"),
    "a list": ([0, T], TypeError, "an int32 or int64 tensor [N + 1], got list"),
}


@pytest.mark.parametrize(("borders", "error", "message"), BORDERS.values(), ids=BORDERS.keys())
def test_bad_borders_are_refused(borders: Any, error: type[Exception], message: str) -> None:
    for name in ("gated_deltanet", "path_fox"):
        for form in get(name).forms.keys() - {"fla", "triton"}:
            with pytest.raises(error, match=re.escape(f"cu_seqlens: expected {message}")):
                get(name).forms[form](*random_inputs(name, 1, T, H, G), cu_seqlens=borders)


PARTS = {
    "log_decay of other heads": (
        "log_decay",
        lambda x: x[..., :2],
        ValueError,
        f"gate.log_decay: expected [B, T, H] = {(B, T, H)}, got {(B, T, 2)}",
    ),
    "w per query head": (
        "w",
        lambda x: x.repeat_interleave(2, 2),
        ValueError,
        f"gate.w: expected [B, T, G, K] = {(B, T, G, K)}, got {(B, T, H, K)}",
    ),
    "beta of one row": (
        "beta",
        lambda x: x[:1],
        ValueError,
        f"gate.beta: expected [B, T, G] = {(B, T, G)}, got {(1, T, G)}",
    ),
    "beta that is a float": ("beta", lambda x: 0.5, TypeError, "gate.beta: expected a tensor, got float"),
    "half log_decay": (
        "log_decay",
        lambda x: x.half(),
        TypeError,
        "gate.log_decay: expected float32 (or float64), got torch.float16",
    ),
    "half w": ("w", lambda x: x.half(), TypeError, "gate.w: expected float32 (or float64), got torch.float16"),
    "log_decay elsewhere": (
        "log_decay",
        lambda x: x.to("meta"),
        ValueError,
        "gate.log_decay: expected the device of q, cpu, got meta",
    ),
    "positive log_decay": ("log_decay", put(0.25), ValueError, "gate.log_decay: expected natural logs <= 0, got 0.25"),
    "nan log_decay": ("log_decay", put(math.nan), ValueError, "gate.log_decay: expected natural logs <= 0, got nan"),
    "beta over 2": ("beta", put(2.5), ValueError, "gate.beta: expected values in [0, 2], got"),
    "negative beta": ("beta", put(-0.5), ValueError, "gate.beta: expected values in [0, 2], got -0.5 to"),
    "nan beta": ("beta", put(math.nan), ValueError, "gate.beta: expected values in [0, 2], got nan"),
    "w that is too long": ("w", lambda x: 1.1 * x, ValueError, "gate.w: expected lengths of at most 1, got 1.1"),
    "nan w": ("w", put(math.nan), ValueError, "gate.w: expected lengths of at most 1, got nan"),
}


@pytest.mark.parametrize(("part", "change", "error", "message"), PARTS.values(), ids=PARTS.keys())
def test_bad_gate_is_refused(part: str, change: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    given = with_part(part, change)
    if part == "w" and "nan" not in message:
        given["gate"] = replace(given["gate"], beta=torch.ones(B, T, G))
    for name in ("gated_deltanet", "path_fox"):
        with pytest.raises(error, match=re.escape(message)):
            get(name).forms["recurrent"](**given)


@pytest.mark.parametrize("value", [0.25, math.nan, math.inf])
def test_bad_log_diag_is_refused(value: float) -> None:
    shown = "nan" if math.isnan(value) else f"{value:g}"
    with pytest.raises(ValueError, match=f"gate.log_diag: expected natural logs <= 0, got {shown}"):
        get("gla").forms["chunk"](**with_part("log_diag", put(value), "gla"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_angle_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"gate.angle: expected finite radians, got inf or nan"):
        get("rope").forms["parallel"](**with_part("angle", put(value), "rope"))


def test_bad_angle_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("gate.angle: expected [K/2] = (4,), got (3,)")):
        get("rope").forms["parallel"](**with_part("angle", lambda x: x[0, 0, 0, :3], "rope"))
    with pytest.raises(ValueError, match=re.escape(f" = {(B, T, H, 4)}, got {(B, T, H, 3)}")):
        get("rope").forms["parallel"](**with_part("angle", lambda x: x[..., :3], "rope"))
    q, k, v, _ = random_inputs("nope", K=5)
    with pytest.raises(ValueError, match=r"even number of key channels .* got K=5"):
        get("rope").forms["parallel"](q, k, v, Gate(angle=torch.zeros(2)))


@pytest.mark.parametrize("name", list_variants())
def test_missing_or_surplus_part_is_named(name: str) -> None:
    q, k, v, gate = random_inputs(name)
    variant = get(name)
    for part in variant.requires:
        with pytest.raises(ValueError, match=f"gate: '{name}' needs {part} \\(it takes .*\\), got Gate\\("):
            variant.forms["parallel"](q, k, v, replace(gate, **{part: None}))
    spare = {
        "log_decay": torch.zeros(2, 24, 4), "log_diag": torch.zeros(2, 24, 4, 8), "angle": torch.zeros(4),
        "beta": torch.zeros(2, 24, 2),
    }  # fmt: skip
    for part, x in spare.items():
        if part not in variant.requires:
            with pytest.raises(ValueError, match=f"gate: '{name}' has no use for {part} \\(it takes "):
                variant.forms["parallel"](q, k, v, replace(gate, **{part: x.double()}))


@pytest.mark.parametrize("name", list_variants())
def test_bad_valid_is_refused(name: str) -> None:
    given, extend = random_inputs(name), get(name).extend
    with pytest.raises(ValueError, match=re.escape("valid: expected [B, T] = (2, 24), got (2, 23)")):
        extend(*given, valid=torch.ones(2, 23, dtype=torch.bool))
    with pytest.raises(
        TypeError, match=re.escape("valid: expected torch.bool (True where a token exists), got torch.int64")
    ):
        extend(*given, valid=torch.ones(2, 24, dtype=torch.int64))


@pytest.mark.parametrize("name", list_variants("linear"))
def test_bad_matrix_state_is_refused(name: str) -> None:
    given = random_inputs(name)
    _, cache = get("nope").extend(*random_inputs("nope"))
    with pytest.raises(
        ValueError, match=re.escape("state.matrix: expected [B, H, K, V] = (2, 4, 8, 6), got (1, 4, 8, 6)")
    ):
        get(name).extend(*given, RecurrentState(torch.zeros(1, 4, 8, 6)))
    with pytest.raises(TypeError, match=re.escape("state: expected attnzoo.RecurrentState, got KVCache")):
        get(name).extend(*given, cache)
    with pytest.raises(TypeError, match=re.escape("state: expected attnzoo.RecurrentState, got Tensor")):
        get(name).extend(*given, torch.zeros(2, 4, 8, 6))


@pytest.mark.parametrize("name", list_variants("softmax"))
def test_bad_cache_is_refused(name: str) -> None:
    extend = get(name).extend
    _, cache = extend(*random_inputs(name, B=1))
    with pytest.raises(ValueError, match=r"state.k: expected \[B, S, G, K\] = \(2, 24, 2, 8\), got \(1, "):
        extend(*random_inputs(name), cache)
    with pytest.raises(ValueError, match=r"state.v: expected \[B, S, G, V\] = \(2, 24, 2, 6\), got "):
        extend(*random_inputs(name), extend(*random_inputs(name, V=5))[1])
    with pytest.raises(TypeError, match="state: expected attnzoo.KVCache, got Tensor"):
        extend(*random_inputs(name), torch.zeros(2, 4, 8, 6))


@pytest.mark.parametrize("name", list_variants())
def test_unknown_option_is_refused(name: str) -> None:
    for form in ("parallel", "recurrent"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'sclae'"):
            get(name).forms[form](*random_inputs(name), sclae=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sclae'"):
        get(name).extend(*random_inputs(name), sclae=1.0)


@pytest.mark.parametrize("name", list_variants())
def test_a_state_that_is_none_of_ours_is_refused(name: str) -> None:
    for state in ({}, (), "state", 0):
        with pytest.raises(TypeError, match=r"state: expected attnzoo.\w+ or None, got \w+"):
            get(name).extend(*random_inputs(name), state)


# when values are read


def test_values_on_a_gpu_are_read_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = SimpleNamespace(is_cpu=False)
    monkeypatch.setattr(attnzoo.algebra.values, "has_values", lambda x: True)
    for value, on_gpu, on_cpu in ((None, False, True), ("0", False, False), ("", False, True), ("1", True, True)):
        if value is None:
            monkeypatch.delenv("ATTNZOO_VALIDATE", raising=False)
        else:
            monkeypatch.setenv("ATTNZOO_VALIDATE", value)
        assert reads_values(gpu) is on_gpu
        assert reads_values(torch.zeros(1)) is on_cpu


def test_checks_of_values_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    given = with_part("log_decay", put(0.25), "fox")
    with pytest.raises(ValueError, match="log_decay"):
        get("fox").forms["parallel"](**given)
    monkeypatch.setenv("ATTNZOO_VALIDATE", "0")
    assert get("fox").forms["parallel"](**given).isfinite().all()
    monkeypatch.setenv("ATTNZOO_VALIDATE", "yes")
    with pytest.raises(ValueError, match=r"ATTNZOO_VALIDATE: expected 0 .* got 'yes'"):
        get("fox").forms["parallel"](**given)


def test_values_are_not_read_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert reads_values(torch.zeros(1)) is False


def test_good_values_pass() -> None:
    closed = torch.tensor([[[-torch.inf, 0.0, -0.0, -3.0]]])
    check_values(Gate(log_decay=closed, beta=torch.tensor([[[0.0, 2.0]]]), w=torch.eye(4)[None, None, :2]))


def test_w_is_free_where_beta_is_zero() -> None:
    """A token that is not there has no direction: zero, or anything at all."""
    check_values(Gate(w=torch.zeros(1, 2, 1, 4), beta=torch.zeros(1, 2, 1)))


def test_half_precision_w_has_room_for_its_rounding() -> None:
    w = torch.nn.functional.normalize(torch.randn(1, 50, 2, 64), dim=-1).bfloat16()
    check_values(Gate(w=w, beta=torch.ones(1, 50, 2)))
