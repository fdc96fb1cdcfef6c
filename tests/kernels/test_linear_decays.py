"""Log decays of logits, per head and per channel: values and gradients beside PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from named_ops import opcheck
from part_cases import ALSO_ON_A_GPU, DEVICE, assert_within_budget, drawn
from torch import Tensor

from attnzoo.kernels.linear import DecayLogits, log_decays, written_values
from attnzoo.kernels.linear.decaying import DecayInputs, forward_op
from attnzoo.kernels.linear.writing import WriteInputs
from attnzoo.kernels.linear.writing import forward_op as write_op
from attnzoo.precision import wide

pytestmark = ALSO_ON_A_GPU

CASES = {  # B, T, C; a bias; heads of log_a; factor; opposite; steps
    "Mamba-2's": ((2, 19, 5), True, 5, 1.0, True, True),
    "KDA's": ((1, 70, 96), True, 3, 1.0, True, False),
    "GLA's": ((2, 40, 64), True, 0, 1 / 16, False, False),
    "HGRN2's": ((1, 1, 130), False, 0, 1.0, False, False),
}


def plain(of: DecayLogits, steps: bool) -> tuple[Tensor, Tensor | None]:
    x = wide(of.logits) if of.bias is None else wide(of.logits) + wide(of.bias)
    log, factor = F.logsigmoid(-x if of.opposite else x), of.factor
    if of.log_a is None:
        return log * factor, -log if steps else None
    return log * wide(of.log_a).exp().repeat_interleave(x.shape[2] // len(of.log_a)), -log if steps else None


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_as_near_to_float64_as_plain_pytorch(name: str) -> None:
    shape, bias, heads, factor, opposite, steps = CASES[name]
    logits, *rest = drawn(shape, (shape[2],) if bias else None, (heads,) if heads else None)
    assert logits is not None
    for dtype in (torch.float16, torch.float32):
        assert_within_budget(
            lambda *x: log_decays(DecayLogits(*x, factor, opposite), steps),
            lambda *x: plain(DecayLogits(*x, factor, opposite), steps),
            [(4 * logits).to(dtype), *rest],
        )


@torch.no_grad()
def test_gates_that_hardly_close_keep_their_digits() -> None:
    x = torch.tensor([[[-100.0, -20.0, 5.0, 20.0, 80.0, 100.0]]], device=DEVICE)
    for opposite in (False, True):
        found, step = log_decays(DecayLogits(x, opposite=opposite), steps=opposite)
        exact = F.logsigmoid((-x if opposite else x).double())
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-38)
        assert step is None or torch.equal(step, -found)


def test_opcheck() -> None:
    """Fakes, autograd and functionalisation of the op; fakes of a bare one too."""
    logits, bias, a = (x.requires_grad_() for x in drawn((1, 5, 8), (8,), (2,)) if x is not None)
    opcheck(forward_op, DecayInputs(DecayLogits(logits, bias, a, 1.0, True), True))
    opcheck(forward_op, DecayInputs(DecayLogits(logits), False), ["test_faketensor"])


def test_written_values_are_as_near_to_float64_as_plain_pytorch() -> None:
    v, write = drawn((2, 19, 3, 24), (2, 19, 3))
    assert v is not None

    def plain_writing(v: Tensor, write: Tensor) -> Tensor:
        return (v * write[..., None]).to(v.dtype)

    for dtype in (torch.float16, torch.float32):
        assert_within_budget(written_values, plain_writing, [v.to(dtype), write])
    assert write is not None
    strided = v.mT.contiguous().mT
    assert torch.equal(written_values(strided, write), written_values(v, write))
    opcheck(write_op, WriteInputs(v.requires_grad_(), write.requires_grad_()))
    with pytest.raises(ValueError, match=r"write: expected a floating dtype \(2, 19, 3\), got"):
        written_values(v, write[:1])


def test_what_is_wrong_is_named() -> None:
    logits, bias, a = (x for x in drawn((1, 5, 8), (8,), (2,)) if x is not None)
    for of, steps, message in (
        (DecayLogits(logits[0]), False, r"logits: expected \[B, T, H\] or \[B, T, H K\]"),
        (DecayLogits(logits, bias[:3]), False, r"bias: expected a floating dtype \(8,\)"),
        (DecayLogits(logits, bias, bias[:3]), False, "log_a: .*divisor of the 8 logits of a token, got H=3"),
        (DecayLogits(logits, bias, a), True, "steps: expected False unless"),
        (DecayLogits(logits.double()), False, "logits: expected up to float32"),
    ):
        with pytest.raises(ValueError, match=message):
            log_decays(of, steps)
