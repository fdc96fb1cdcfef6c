"""The norms' kernels: values and gradients beside PyTorch's, with gates before and after, and with what is added."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from named_ops import opcheck
from part_cases import ALSO_ON_A_GPU, assert_within_budget, drawn, outcome
from torch import Tensor

from attnzoo.kernels.norms import Gated, Skip, head_norm, unit_vectors
from attnzoo.kernels.norms.op import NormInputs, UnitInputs, forward_op, units_op
from attnzoo.precision import wide

pytestmark = ALSO_ON_A_GPU

HALF = torch.float16
CASES: dict[str, tuple[tuple[int, ...], str, int | None, int, tuple[bool, bool] | None, int, torch.dtype]] = {
    # B, T, H, V; axes of the weight; a SwiSH or sigmoid, first or not; heads of v
    "gated by swish": ((2, 19, 3, 16), "rms", None, 2, (True, False), 0, HALF),
    "mean taken away, two groups": ((1, 7, 4, 24), "group", 2, 1, (False, False), 0, torch.float32),
    "unit vectors": ((2, 33, 2, 64), "l2", None, 0, None, 0, HALF),
    "Mamba-2's": ((2, 5, 4, 12), "rms", 1, 2, (True, True), 4, HALF),
    "v of several heads": ((1, 5, 4, 12), "group", None, 2, (True, True), 2, torch.float32),
    "one token, wide": ((1, 1, 2, 256), "rms", None, 2, None, 1, torch.float32),
}


def plain(
    x: Tensor, weight: Tensor | None, kind: str, groups: int | None, gate: Gated | None, skip: Skip | None
) -> Tensor:
    dtype, shape = x.dtype, x.shape
    if skip is not None:
        x = x + (skip.scale[:, None] * skip.v.repeat_interleave(shape[2] // skip.v.shape[2], 2)).to(dtype)
    act = None if gate is None else (F.silu if gate.swish else torch.sigmoid)(gate.logits).view(shape)
    if gate is not None and gate.first:
        x = x * act
    u = wide(x).reshape(*shape[:2], groups or shape[2], -1)
    if kind == "group":
        u = u - u.mean(-1, keepdim=True)
    square = u.square()
    u = (u * ((square.sum if kind == "l2" else square.mean)(-1, keepdim=True) + 1e-5).rsqrt()).reshape(shape)
    u = (u if weight is None else u * weight).to(dtype)
    return u if gate is None or gate.first else u * act


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_as_near_to_float64_as_plain_pytorch(name: str) -> None:
    (B, T, H, V), kind, groups, axes, gated, heads, dtype = CASES[name]
    weight = ((), (V,), (H, V))[axes] if axes else None
    leaves = drawn(
        (B, T, H, V), weight, (B, T, H * V) if gated else None, (B, T, heads, V) if heads else None,
        (H,) if heads else None, dtype=dtype,
    )  # fmt: skip

    def parts(logits: Tensor | None, v: Tensor | None, scale: Tensor | None) -> tuple[Gated | None, Skip | None]:
        gate = None if logits is None or gated is None else Gated(logits, *gated)
        return gate, None if v is None or scale is None else Skip(v, scale)

    def ours(x: Tensor, weight: Tensor | None, *rest: Tensor | None) -> Tensor:
        gate, skip = parts(*rest)
        return head_norm(x, weight, kind=kind, eps=1e-5, groups=groups, gate=gate, skip=skip)  # type: ignore[arg-type]

    assert_within_budget(ours, lambda x, weight, *rest: plain(x, weight, kind, groups, *parts(*rest)), leaves)


def test_strides_do_not_matter() -> None:
    wider, weight, logits = drawn((2, 9, 3, 3, 16), (3, 16), (2, 9, 2 * 48))

    def ours(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return head_norm(x, weight, gate=Gated(logits, True))

    def of_slices(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return ours(x[:, :, 1], weight.mT.contiguous().mT, logits[..., 48:])

    def of_copies(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return ours(x[:, :, 1].contiguous(), weight, logits[..., 48:].contiguous())

    leaves = [wider, weight, logits]
    for x, y in zip(outcome(of_slices, leaves, None), outcome(of_copies, leaves, None), strict=True):
        assert torch.equal(x, y)


def test_opcheck() -> None:
    """Fakes, autograd and functionalisation of the op; fakes without a gate and a weight too."""
    x, weight, logits, v, scale = (
        t.requires_grad_() for t in drawn((1, 3, 2, 8), (2, 8), (1, 3, 16), (1, 3, 1, 8), (2,)) if t is not None
    )
    opcheck(forward_op, NormInputs(x, weight, Gated(logits, True, True), Skip(v, scale), "rms", 1e-5, 1))
    opcheck(forward_op, NormInputs(x, None, None, None, "l2", 1e-5, 2), ["test_faketensor"])


@pytest.mark.parametrize("used", ["qk", "q", "k"])
def test_unit_vectors_of_two_tensors_are_those_of_each(used: str) -> None:
    """Also where one of them lies within a wider tensor, and where one is not used."""
    q, rows = drawn((2, 9, 3, 16), (2, 9, 100), dtype=HALF)
    assert q is not None
    assert rows is not None
    q, rows = q.requires_grad_(), rows.requires_grad_()
    k = rows[..., 4:68].view(2, 9, 2, 32)
    ours, each = (
        dict(zip("qk", unit_vectors(q, k), strict=True)),
        {"q": head_norm(q, kind="l2"), "k": head_norm(k, kind="l2")},
    )
    found = []
    for made in (ours, each):
        total = torch.stack([made[name].float().square().mul(1 + made[name]).sum() for name in used]).sum()
        found.append(torch.autograd.grad(total, (q, rows), allow_unused=True))
    assert all(torch.equal(ours[name], each[name]) for name in "qk")
    for a, b in zip(*found, strict=True):
        assert a is b is None or (a is not None and b is not None and torch.equal(a, b))
    opcheck(units_op, UnitInputs(q, k, 1e-6))
    with pytest.raises(ValueError, match=r"k: expected \[B, T, H, K\], .*got \(2, 9, 100\)"):
        unit_vectors(q, rows)
    with pytest.raises(ValueError, match="k: expected bfloat16, float16 or float32 on .*got torch.float64"):
        unit_vectors(q, k.double())


def test_what_is_wrong_is_named() -> None:
    x, weight, logits = (t for t in drawn((1, 3, 4, 8), (4, 8), (1, 3, 32)) if t is not None)
    for given, message in (
        ({"weight": weight[:2]}, r"weight: expected a floating dtype \(4, 8\)"),
        ({"kind": "rmss"}, "kind.*did you mean 'rms'"),
        ({"groups": 3}, "groups: expected a divisor of H=4, or None, got 3"),
        ({"gate": Gated(logits[..., 1:])}, r"gate.logits: expected a floating dtype \(1, 3, 32\)"),
        ({"skip": Skip(x[:, :, :3], weight[:, 0])}, r"skip.v: expected a number of heads that divides H=4, got 3"),
        ({"x": x.double()}, "x: expected bfloat16, float16 or float32"),
    ):
        with pytest.raises(ValueError, match=message):
            head_norm(**{"x": x, "weight": weight, **given})
