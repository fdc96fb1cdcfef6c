"""Vectors turned by phases of angles from the input: values and gradients against float64, however long the text."""

from __future__ import annotations

import math

import pytest
import torch
from named_ops import opcheck
from torch import Tensor

from attnzoo.kernels.rotation import rotate
from attnzoo.kernels.rotation.op import Dtypes, RotationInputs, Vectors, forward_op
from attnzoo.recurrences.complex_linear import phases, rotate_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Shapes = tuple[int, int, int, int, int, int, int]
SHAPES: dict[str, Shapes] = {  # B, T, heads of q, heads of k and w, batch and heads of the angles, K
    "a head's own": (1, 300, 2, 2, 1, 2, 16),
    "all heads'": (2, 70, 4, 2, 2, 1, 24),
    "all rows'": (2, 70, 2, 1, 1, 1, 64),
}


def drawn(shapes: Shapes, dtype: torch.dtype, w: bool = True) -> list[Tensor]:
    """Angles, q, k and w; what is rounded is so in the exact computation too."""
    B, T, HQ, HK, BA, HA, K = shapes
    generator = torch.Generator().manual_seed(0)
    sizes = [(BA, T, HA, K // 2), (B, T, HQ, K), (B, T, HK, K), (B, T, HK, K)]
    angle, q, k, other = (torch.randn(size, generator=generator) for size in sizes)
    given = [angle, q.to(dtype), k.to(dtype), *([other] if w else [])]
    return [x.to(DEVICE).requires_grad_() for x in given]


def outcome(given: list[Tensor], dtype: torch.dtype, received: bool, balanced: bool = False) -> list[Tensor]:
    """What comes out of the kernels, and the gradients of it all for one and the same gradient of that."""
    angle, q, k, *w = given
    turned = rotate(angle, q, k, *w, dtype=dtype, received=received, balanced=balanced)
    assert torch.equal(turned.phase, phases(angle.detach(), 1)[:, -1:])
    ys = [y for y in turned[:3] if y is not None]
    ends = turned.receivers if received else ys
    assert ends is not None
    assert [y.dtype for y in ys] == [dtype, dtype, torch.float32][: len(ys)]
    grads = torch.autograd.grad(ends, given, [dy.to(y.dtype) for dy, y in zip(drawn_gradients(ys), ends, strict=True)])
    assert [x.dtype for x in grads] == [x.dtype for x in given]
    return [x.detach() for x in (*ys, *grads)]


def plain(
    given: list[Tensor], dtype: torch.dtype, wide: torch.dtype, received: bool, balanced: bool = False
) -> list[Tensor]:
    """The same in PyTorch, in ``wide`` and rounded as a cast would (in float64 not at all)."""
    angle, *xs = (x.detach() for x in given)
    phase = phases(angle, 1)
    exact = wide == torch.float64
    dtypes = [wide] * 3 if exact else [dtype, dtype, torch.float32]
    ys = [y.to(d) for y, d in zip(rotate_all(phase, *(x.to(wide) for x in xs)), dtypes, strict=False)]
    turn, noise = torch.zeros_like(phase), torch.zeros_like(phase)
    dys = [
        dy.to(wide) if exact or received else dy.to(y.dtype).to(wide)
        for dy, y in zip(drawn_gradients(ys), ys, strict=True)
    ]
    for y, dy in zip(ys, dys, strict=True):
        (a, b), (da, db) = (x.unflatten(-1, (-1, 2)).unbind(-1) for x in (y.to(wide), dy))
        turn += (db * a - da * b).double().sum_to_size(phase.shape)
        noise += ((a * a + b * b) * (da * da + db * db)).double().sum_to_size(phase.shape)
    if balanced:
        turn -= noise * (turn.sum(1, True) / noise.sum(1, True))
    dangle = turn.flip(1).cumsum(1).flip(1)
    dxs = rotate_all(-phase, *dys)
    return (
        [*ys, dangle, *dxs]
        if exact
        else [*ys, dangle.to(angle.dtype), *(d.to(x.dtype) for d, x in zip(dxs, xs, strict=True))]
    )


def drawn_gradients(ys: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y.device) for y in ys]


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def assert_near(given: list[Tensor], dtype: torch.dtype, received: bool, balanced: bool) -> None:
    """Not further from float64 than PyTorch. What ``balanced`` takes away is no error here, where nothing cancels."""
    exact = plain(given, dtype, torch.float64, received, balanced)
    ours, other = outcome(given, dtype, received, balanced), plain(given, dtype, torch.float32, received, balanced)
    for x, a, b in zip(exact, ours, other, strict=True):
        assert error(a, x) <= 1.05 * error(b, x) + 2e-8


@pytest.mark.parametrize(
    ("shapes", "dtype"), [("a head's own", torch.float16), ("all heads'", torch.float32), ("all rows'", torch.float16)]
)
def test_values_and_gradients_are_as_near_to_float64_as_plain_pytorch(shapes: str, dtype: torch.dtype) -> None:
    given = drawn(SHAPES[shapes], dtype, w=shapes != "all heads'")
    assert_near(given, dtype, received=shapes != "all rows'", balanced=shapes == "a head's own")


@torch.no_grad()
def test_late_tokens_turn_as_exactly_as_early_ones() -> None:
    """25000 radians into a text, in float32."""
    T = 16384
    angle = math.pi * torch.rand(1, T, 1, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    q = torch.tensor([1.0, 0.0, 0.0, 1.0], device=DEVICE).expand(1, T, 1, 4)
    turned, _, _, phase, _ = rotate(angle, q, q[:, :, :1], dtype=torch.float32)
    (exact,) = rotate_all(phases(angle, 1), q.double())
    assert (turned - exact).abs().max() <= 2e-7
    assert torch.allclose(phase[0, 0, 0], angle.double().sum((0, 1, 2)), rtol=1e-14, atol=0)


@torch.no_grad()
def test_fixed_angles_are_counted() -> None:
    q = torch.randn(2, 70, 3, 12, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    angle = torch.linspace(0.1, 3, 6, device=DEVICE)
    position = torch.arange(1, 71, device=DEVICE).double()[:, None, None]
    expected = rotate_all(position * angle.double(), q.double(), q[:, :, :1].double())
    turned_q, turned_k, w, phase, _ = rotate(angle, q, q[:, :, :1], dtype=torch.float32)
    assert w is None
    assert max(map(error, (turned_q, turned_k), expected)) <= 1e-7
    assert torch.equal(phase[0, 0, 0], 70 * angle.double())


def test_vectors_turn_back_in_the_gradient_of_fixed_angles() -> None:
    q, k = (torch.randn(1, 20, 2, 12, device=DEVICE, requires_grad=True) for _ in range(2))
    turned_q, turned_k, *_ = rotate(torch.linspace(0.1, 3, 6, device=DEVICE), q, k, dtype=torch.float32)
    dq, dk = torch.autograd.grad(turned_q.square().sum() + 2 * turned_k.square().sum(), (q, k))
    assert error(dq, 2 * q.detach().double()) <= 2e-7
    assert error(dk, 4 * k.detach().double()) <= 2e-7


def test_strides_do_not_matter() -> None:
    given = drawn(SHAPES["a head's own"], torch.float32)
    strided = [x.detach().mT.contiguous().mT.requires_grad_() for x in given]
    angle, *xs = given
    together = torch.cat(xs, -1).detach().flatten(2).split([x[0, 0].numel() for x in xs], -1)  # of one product
    apart = [x.unflatten(2, like.shape[2:]) for x, like in zip(together, xs, strict=True)]
    assert not any(x.is_contiguous() for x in apart)
    same = [x.detach().contiguous().requires_grad_() for x in apart]
    expected = outcome(given, torch.float32, False), outcome([angle, *same], torch.float32, False)
    found = strided, [angle, *(x.requires_grad_() for x in apart)]
    for ours, plainly in zip(found, expected, strict=True):
        for x, y in zip(outcome(ours, torch.float32, False), plainly, strict=True):
            assert torch.equal(x, y)


def test_opcheck() -> None:
    """Fakes, autograd and functionalisation of the op; fakes without w too."""
    angle, *xs = drawn((1, 18, 2, 2, 1, 2, 16), torch.float32)
    dtypes = Dtypes(*[torch.float32] * 3)
    opcheck(forward_op, RotationInputs(angle, Vectors(*xs), torch.float32, dtypes, True, True))
    fixed = RotationInputs(angle.detach()[0, 0, 0], Vectors(*xs[:2], None), torch.float32, dtypes, False, False)
    opcheck(forward_op, fixed, ["test_faketensor"])


def test_what_is_refused() -> None:
    angle, q, k, w = (x.detach() for x in drawn((2, 20, 4, 2, 2, 1, 16), torch.float32))
    wrong = {
        r"k: expected \[B=2, T=20, heads, K=16\] as in q, got \(2, 19, 2, 16\)": (angle, q, k[:, :19]),
        r"angle: expected \[B=2 or 1, T=20, 1 or heads, K/2=8\] or \[8\], got \(2, 20, 1, 7\)": (angle[..., :7], q, k),
        r"k: expected 4 heads, as angle has, got 2": (angle.expand(-1, -1, 4, -1), q, k),
        r"angle: expected a floating dtype, got torch.int64": (angle.long(), q, k),
        r"angles \[K/2\] of every token have no gradient": (angle[0, 0, 0].clone().requires_grad_(), q, k),
        r"w: expected \[B=2, T=20, heads, K=16\] as in q, got \(2, 20, 2, 1, 16\)": (angle, q, k, w[:, :, :, None]),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            rotate(*given, dtype=torch.float32)
    with pytest.raises(ValueError, match="dtype: expected bfloat16, float16 or float32, got torch.float64"):
        rotate(angle, q, k, dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shapes", [(1, 16384, 24, 24, 1, 24, 64), (2, 1000, 8, 2, 2, 1, 128), (1, 700, 3, 3, 1, 3, 256)]
)
def test_long_sequences_on_a_gpu(shapes: Shapes) -> None:
    given = drawn(shapes, torch.bfloat16)
    for received, balanced in ((False, False), (True, False), (True, True)):
        assert_near(given, torch.bfloat16, received, balanced)
