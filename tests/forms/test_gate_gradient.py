"""The gradient of the gates in float32: as exact after many tokens as after few."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo import Gate, get

K = 16


def inputs_of(T: int, mean: float, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and log gates ``[1, T, 1, ...]``, unit vectors, and the gradient of the output, in float32's numbers."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad, w = (torch.randn(1, T, 1, K, generator=generator).double() for _ in range(5))
    g = -mean * torch.empty(1, T, 1).exponential_(generator=generator).double()
    return [x.float().double() for x in (q, k, v, g)], F.normalize(w, dim=-1), grad.float().double()


def dense(q: Tensor, k: Tensor, v: Tensor, g: Tensor, sink: bool) -> Tensor:
    """The whole matrix of one head, in float64."""
    c = g[0, :, 0].cumsum(0)
    logits = q[0, :, 0] @ k[0, :, 0].mT * K**-0.5 + c[:, None] - c
    logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    logits = F.pad(logits, (0, 1), value=0.0 if sink else -torch.inf)
    return (logits.softmax(-1)[:, :-1] @ v[0, :, 0])[None, :, None]


def gradient_of_gates(name: str, x: list[Tensor], w: Tensor, grad: Tensor, sink: bool) -> Tensor:
    q, k, v, g = (y.clone().requires_grad_() for y in x)
    options = {"sink": torch.zeros(1, dtype=g.dtype)} if sink else {}
    if name == "dense":
        o = dense(q, k, v, g, sink)
    elif name == "path_fox":  # the same function where nothing is erased
        nothing = Gate(log_decay=g, w=w.to(g.dtype), beta=torch.zeros(w.shape[:3], dtype=g.dtype))
        o = get(name).forms["parallel"](q, k, v, nothing, **options)
    else:
        o = get(name).forms["parallel"](q, k, v, Gate(log_decay=g), **options)
    return torch.autograd.grad(o, g, grad.to(o.dtype))[0]


def errors_of(T: int, mean: float, sink: bool = False) -> dict[str, float]:
    """The error of the gradients of many texts, or of one long text, together: of a single short text it is up to three
    times the usual one, and that on another text where a sum is vectorised otherwise."""
    squares, norm = {"fox": 0.0, "path_fox": 0.0}, 0.0
    for seed in range(24 if T < 1024 else 3 if T < 2048 else 1):
        x, w, grad = inputs_of(T, mean, seed)
        exact = gradient_of_gates("dense", x, w, grad, sink)
        norm += float(exact.norm()) ** 2
        for name in squares:
            got = gradient_of_gates(name, [y.float() for y in x], w, grad, sink)
            squares[name] += float((got.double() - exact).norm()) ** 2
    return {name: (square / norm) ** 0.5 for name, square in squares.items()}


@pytest.fixture(scope="module")
def after_few() -> dict[str, float]:
    return errors_of(300, 1e-3)


def test_the_gradient_of_foxs_gates_is_nearly_as_exact_as_that_of_path_fox(after_few: dict[str, float]) -> None:
    """In eight times 24 texts it was off by 1.8 to 2.7 times as much, with PyTorch's code for AVX-512, for AVX2 and for
    neither. Both round the weights; the fused kernel as much again in three sums over keys or rows (of the output, and
    of a logit's gradients by row and by column), and a part of that in the log-sum-exp."""
    assert after_few["fox"] <= 3 * after_few["path_fox"], after_few


@pytest.mark.parametrize(("T", "sink"), [(1024, False), (1024, True), (2048, False), (4096, False)])
def test_it_is_as_exact_after_many_tokens_as_after_few(T: int, sink: bool, after_few: dict[str, float]) -> None:
    """Here a quarter more is chance. Sums in float32 are off by twice as much after 2048 tokens, one sum over a whole
    text by four times as much, blocks of 1024 rows whatever the gates by 2.3 to 3.8 times."""
    errors = errors_of(T, 0.05, sink)
    assert all(errors[name] <= 1.25 * few for name, few in after_few.items()), (errors, after_few)
