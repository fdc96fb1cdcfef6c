"""The short convolution's kernels: values and gradients beside PyTorch's, packed, continued, strided."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from named_ops import opcheck
from part_cases import ALSO_ON_A_GPU, DEVICE, assert_within_budget, drawn, outcome
from torch import Tensor

from attnzoo.kernels.convolution import causal_convolution
from attnzoo.kernels.convolution.op import ConvolutionInputs, forward_op

pytestmark = ALSO_ON_A_GPU

HALF = torch.float16
CASES: dict[str, tuple[tuple[int, ...], bool, bool, list[int] | None, bool, torch.dtype]] = {
    # B, T, X, n; a bias; tokens before; borders; a SiLU
    "whole": ((2, 70, 10, 4), True, False, None, True, HALF),
    "continued": ((1, 40, 70, 3), False, True, None, True, torch.float32),
    "packed, one document empty": ((1, 90, 5, 4), True, False, [0, 1, 1, 30, 64, 66, 90], True, HALF),
    "one token": ((2, 1, 16, 2), True, True, None, False, torch.float32),
    "one token wide": ((1, 9, 16, 1), True, True, None, True, torch.float32),
    "one document": ((1, 33, 16, 4), False, False, [0, 33], False, torch.float32),
}


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, borders: list[int] | None, silu: bool
) -> Tensor:
    n, parts = weight.shape[1] - 1, []
    for start, stop in pairwise(borders or [0, x.shape[1]]):
        document = x[:, start:stop]
        past = document.new_zeros(len(x), n, x.shape[2]) if before is None else before
        z = (
            F.conv1d(torch.cat([past, document], 1).mT, weight[:, None], bias, groups=len(weight)).mT
            if stop > start
            else document
        )
        parts.append(F.silu(z) if silu else z)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_as_near_to_float64_as_plain_pytorch(name: str) -> None:
    (B, T, X, n), bias, before, borders, silu, dtype = CASES[name]
    leaves = drawn((B, T, X), (X, n), (X,) if bias else None, (B, n - 1, X) if before else None, dtype=dtype)
    cut = None if borders is None else torch.tensor(borders, dtype=torch.int32, device=DEVICE)
    assert_within_budget(
        lambda x, w, b, past: causal_convolution(x, w, b, before=past, cu_seqlens=cut, silu=silu),
        lambda x, w, b, past: plain(x, w, b, past, borders, silu),
        leaves,
    )


@torch.no_grad()
def test_pieces_one_after_another_give_the_whole() -> None:
    x, weight = drawn((2, 30, 8), (8, 4))
    assert x is not None
    assert weight is not None
    pieces, past = [], torch.zeros(2, 3, 8, device=DEVICE)
    for piece in x.split([13, 1, 2, 14], 1):
        pieces.append(causal_convolution(piece, weight, before=past, silu=True))
        past = torch.cat([past, piece], 1)[:, -3:]
    assert torch.equal(torch.cat(pieces, 1), causal_convolution(x, weight, silu=True))


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_finite_reaches_no_token_beyond_the_window(size: int) -> None:
    x, weight = drawn((1, 9, 4), (4, size))
    assert x is not None
    assert weight is not None
    x[0, 3] = torch.inf
    y = causal_convolution(x.requires_grad_(), weight)
    assert (~y.isfinite()).any(-1)[0].nonzero()[:, 0].tolist() == list(range(3, 3 + size))
    dy = torch.ones_like(y).index_fill(1, torch.tensor([5], device=DEVICE), torch.inf)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert (~dx.isfinite()).any(-1)[0].nonzero()[:, 0].tolist() == list(range(6 - size, 6))


def test_a_slice_of_a_projection_is_read_where_it_lies() -> None:
    whole, weight = drawn((2, 20, 3 * 16), (16, 4))
    assert whole is not None

    def of_slice(x: Tensor, weight: Tensor) -> Tensor:
        return causal_convolution(x[..., 16:32], weight, silu=True)

    def of_copy(x: Tensor, weight: Tensor) -> Tensor:
        return causal_convolution(x[..., 16:32].contiguous(), weight, silu=True)

    for x, y in zip(outcome(of_slice, [whole, weight], None), outcome(of_copy, [whole, weight], None), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("packed", [False, True])
def test_weights_biases_and_borders_of_any_strides_give_the_same(packed: bool) -> None:
    x = torch.randn(1, 9, 6, device=DEVICE)
    weight, bias = (torch.randn(size, device=DEVICE, requires_grad=True) for size in ((6, 3), (6,)))
    borders = torch.tensor([0, 2, 2, 9], device=DEVICE) if packed else None
    apart = [torch.stack([one.detach(), 7 - one.detach()], -1)[..., 0].requires_grad_() for one in (weight, bias)]
    cu = None if borders is None else torch.stack([borders, 7 - borders], -1)[:, 0]
    expected = causal_convolution(x, weight, bias, cu_seqlens=borders, silu=True)
    found = causal_convolution(x, *apart, cu_seqlens=cu, silu=True)
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(found.square().sum(), apart)
    for a, b in zip(gradients, torch.autograd.grad(expected.square().sum(), (weight, bias)), strict=True):
        assert torch.equal(a, b)


def test_opcheck() -> None:
    """Fakes, autograd and functionalisation of the op; fakes of packed rows too."""
    x, weight, bias, before = (
        None if t is None else t.requires_grad_() for t in drawn((1, 9, 8), (8, 3), (8,), (1, 2, 8))
    )
    assert x is not None
    assert weight is not None
    opcheck(forward_op, ConvolutionInputs(x, weight, bias, before, None, True))
    cut = torch.tensor([0, 4, 9], device=DEVICE)
    opcheck(forward_op, ConvolutionInputs(x, weight, None, None, cut, False), ["test_faketensor"])


def test_what_is_wrong_is_named() -> None:
    x, weight, before = drawn((2, 5, 4), (4, 3), (2, 2, 4))
    assert x is not None
    assert weight is not None
    assert before is not None
    cut = torch.tensor([0, 5], device=DEVICE)
    for given, message in (
        ({"weight": weight[:2]}, r"weight: expected \[X=4, n\], a token at least, got \(2, 3\)"),
        ({"bias": x[0, 0, :2]}, r"bias: expected a floating dtype \(4,\)"),
        ({"before": x}, r"before: expected torch.float32 \(2, 2, 4\)"),
        ({"cu_seqlens": cut}, r"cu_seqlens: expected int32 or int64 borders \[N\+1\] of one row"),
        ({"x": x[:1], "cu_seqlens": cut, "before": before[:1]}, "before: expected None with cu_seqlens"),
        ({"silu": 1}, "silu: expected True or False, got 1"),
        ({"weight": torch.ones(4, 5, device=DEVICE)}, "expected windows of up to 4 tokens, got 5"),
        ({"x": x.double()}, "x, weight: expected bfloat16, float16 or float32"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            causal_convolution(**{"x": x, "weight": weight, **given})  # type: ignore[arg-type]


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, weight = drawn((1, 5, 4), (4, 3))
    assert x is not None
    assert weight is not None
    y = causal_convolution(x.requires_grad_(), weight, silu=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(dx.sum(), x)
