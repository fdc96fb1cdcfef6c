"""The forms on flash-linear-attention's kernels: their budget on a GPU, their refusal elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from strategies import Inputs, relative_error, value_and_gradients
from torch import Tensor

from attnzoo import Gate, get, list_variants
from attnzoo.forms.fla import fla_unavailable
from attnzoo.forms.protocol import Call
from attnzoo.samples import random_inputs

SERVED = [name for name in list_variants() if "fla" in get(name).forms]
EPS = 2**-7  # of bfloat16


def tied(inputs: Inputs) -> Inputs:
    """One key to erase along and to write: all that its delta rule computes."""
    q, k, v, gate = inputs
    if gate.w is None:
        return inputs
    w = gate.w.to(k.dtype)
    return q, w, v, replace(gate, w=w)


def rule(name: str) -> dict[str, bool]:
    """The option that its delta rule needs."""
    return {"delta_rule": True} if "w" in get(name).requires else {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA GPU serves the form")
@pytest.mark.parametrize("name", SERVED)
def test_fla_form_without_a_gpu_says_why(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"form 'fla': .*CUDA.*got cpu; use the 'chunk' form"):
        get(name).forms["fla"](*tied(random_inputs(name, dtype=torch.float32)), **rule(name))


@pytest.mark.parametrize("name", [name for name in SERVED if "w" in get(name).requires])
def test_fla_delta_rule_refuses_another_erasing_key(name: str) -> None:
    inputs = random_inputs(name, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="erases along the key it writes, .*delta_rule=True"):
        get(name).forms["fla"](*inputs)
    with pytest.raises(ValueError, match="gate.w: expected k itself with delta_rule"):
        get(name).forms["fla"](*inputs, delta_rule=True)


def test_every_linear_variant_has_the_form() -> None:
    assert list(list_variants("linear")) == SERVED


@pytest.mark.gpu
@pytest.mark.fla
@pytest.mark.parametrize("T", [64, 200, 1024])
@pytest.mark.parametrize("name", SERVED)
def test_fla_within_budget_of_float64(name: str, T: int) -> None:
    """In bfloat16: at most twice the error of the chunk form, plus an eps band, in values and gradients."""
    inputs = random_inputs(name, 1, T, 4, 2, 64, 64, dtype=torch.float32, regime="open")
    q, k, v = (x.to("cuda", torch.bfloat16) for x in inputs[:3])
    q, k, v, gate = tied((q, k, v, inputs[3].map(Tensor.cuda)))
    wide: Inputs = (q.double(), k.double(), v.double(), gate.map(Tensor.double))

    def with_one_key(form: str):  # type: ignore[no-untyped-def]
        def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
            gate = gate if gate.w is None else replace(gate, w=k)
            return get(name).forms[form](q, k, v, gate, **rule(name))  # type: ignore[no-any-return]

        return run

    reason = fla_unavailable(Call(q, k, v, gate, options=rule(name)))
    if reason:  # its backward cannot be trusted here: refused, and the values are checked alone
        with pytest.raises(RuntimeError, match="miscompiled"):
            with_one_key("fla")(q, k, v, gate)
        with torch.no_grad():
            got = with_one_key("fla")(q, k, v, gate)
            chunk = with_one_key("chunk")(q, k, v, gate)
            expected = with_one_key("chunk")(*wide)
        assert relative_error(got, expected) <= 2 * relative_error(chunk, expected) + 2 * EPS
        return

    expected = value_and_gradients(with_one_key("chunk"), wide)
    chunk = value_and_gradients(with_one_key("chunk"), (q, k, v, gate))
    got = value_and_gradients(with_one_key("fla"), (q, k, v, gate))
    for part, x in got.items():
        budget = 2 * relative_error(chunk[part], expected[part]) + 2 * EPS
        error = relative_error(x, expected[part])
        assert error <= budget, f"{name}: {part} off by {error:.2e}, budget {budget:.2e}"


@pytest.mark.gpu
@pytest.mark.fla
@pytest.mark.parametrize("name", SERVED)
def test_fla_output_has_the_shape_and_dtype_of_chunk(name: str) -> None:
    inputs = random_inputs(name, 2, 100, 4, 2, 64, 32, dtype=torch.float32, regime="open")
    q, k, v = (x.to("cuda", torch.bfloat16) for x in inputs[:3])
    tied_inputs = tied((q, k, v, inputs[3].map(Tensor.cuda)))
    with torch.no_grad():
        fla, chunk = (get(name).forms[form](*tied_inputs, **rule(name)) for form in ("fla", "chunk"))
    assert (fla.shape, fla.dtype) == (chunk.shape, chunk.dtype)


@pytest.mark.gpu
@pytest.mark.fla
@pytest.mark.parametrize("name", SERVED)
def test_fla_packed_equals_separate(name: str) -> None:
    inputs = random_inputs(name, 1, 200, 4, 2, 64, 64, dtype=torch.float32, regime="open")
    q, k, v = (x.to("cuda", torch.bfloat16) for x in inputs[:3])
    q, k, v, gate = tied((q, k, v, inputs[3].map(Tensor.cuda)))
    run = get(name).forms["fla"]
    with torch.no_grad():
        packed = run(q, k, v, gate, cu_seqlens=torch.tensor([0, 70, 200], device="cuda"), **rule(name))
        ends = ((0, 70), (70, 200))
        alone = [run(q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), **rule(name)) for a, b in ends]
    assert relative_error(packed, torch.cat(alone, 1)) <= 2 * EPS
