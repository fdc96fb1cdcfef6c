"""Where ``valid`` is false nothing that stands there matters: not NaN, not infinity, on no side, in no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, get, list_variants
from attnzoo.samples import random_inputs
from attnzoo.testing import CPU_FORMS

T = 12
WAYS = (*CPU_FORMS, "extend")


def _in_steps(name: str) -> Callable[..., Tensor]:
    def form(q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, valid: Tensor, **options: Any) -> Tensor:
        state, outputs = None, []
        for a, b in ((0, 5), (5, 6), (6, 7), (7, T)):
            now = slice(a, b)
            rest = {key: x[:, now] if isinstance(x, Tensor) else x for key, x in options.items()}
            o, state = get(name).extend(
                q[:, now], k[:, now], v[:, now], gate.slice(a, b), state, valid=valid[:, now], **rest
            )
            outputs.append(o)
        return torch.cat(outputs, 1)

    return form


def outputs_and_gradients(
    form: Callable[..., Tensor], leaves: dict[str, Tensor], valid: Tensor, **options: Any
) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    given = dict(leaves)
    if options.get("delta_rule"):
        given["w"] = given["k"]
    q, k, v = (given.pop(name) for name in ("q", "k", "v"))
    if "write" in given:
        options["write"] = given.pop("write")
    o = form(q, k, v, Gate(**given), valid=valid, **options)
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).to(o) * valid[..., None, None]
    grads = torch.autograd.grad(o, list(leaves.values()), cotangent, allow_unused=True)
    return {"o": o.detach(), **{name: g for name, g in zip(leaves, grads, strict=True) if g is not None}}


@pytest.mark.covering
@pytest.mark.parametrize(("validate", "value"), [("", math.nan), ("0", math.inf)])
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in list_variants() for way in (*get(name).forms, "extend") if way in WAYS]
)
def test_nothing_at_absent_tokens_is_felt(
    name: str, way: str, validate: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNZOO_VALIDATE", validate)
    q, k, v, gate = random_inputs(name, B=2, T=T, H=2, G=1, K=4, V=3)
    valid = torch.ones(2, T, dtype=torch.bool)
    valid[0, :3], valid[1, 5:7], valid[1, -2:] = False, False, False
    leaves = {"q": q, "k": k, "v": v, **{part: getattr(gate, part) for part in gate.parts}}
    options: dict[str, Any] = {}
    if get(name).side == "linear":
        leaves["write"] = torch.rand(2, T, 1).double()
    if name == "gated_deltanet":
        del leaves["write"], leaves["w"]
        leaves["k"], options["delta_rule"] = torch.nn.functional.normalize(k, dim=-1), True
    form = _in_steps(name) if way == "extend" else get(name).forms[way]
    expected = outputs_and_gradients(form, leaves, valid, **options)
    dirty = {part: x.masked_fill(~valid.reshape(2, T, *(1,) * (x.ndim - 2)), value) for part, x in leaves.items()}
    got = outputs_and_gradients(form, dirty, valid, **options)
    for part, x in got.items():
        assert x.isfinite().all(), part
        there = valid if part == "o" else slice(None)
        torch.testing.assert_close(x[there], expected[part][there], rtol=1e-12, atol=1e-12, msg=part)
