"""PaTH's kernels behind rotations of q, k and w: against the oracle of the product, with all that the kernels take."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, KVCache, Prune, get, oracle
from attnzoo.algebra.transitions import Product
from attnzoo.encodings.turned import TurnedMemory, fold, turned
from attnzoo.forms.backends.fox_path import path_kernel
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.protocol import Call
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.kernels.path.reference import path_reference_lse
from attnzoo.recurrences.complex_linear import Rotation, phases, rotate_all, rotate_rounded
from attnzoo.recurrences.deltanet import Householder
from attnzoo.samples import random_inputs
from attnzoo.testing import Inputs, in_float64, relative_error, value_and_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 2e-5  # float32
FORMS = SoftmaxForms(Product(Rotation(), Householder()), kernels={"triton": turned(path_kernel())})
TRITON = FORMS.forms["triton"]


def inputs_of(
    name: str = "path_fox", angles: str = "heads", B: int = 1, T: int = 66, H: int = 2, G: int = 1,
    factors: int | None = None, regime: Any = "open",
) -> Inputs:  # fmt: skip
    """Of ``name`` and an angle for each ``heads``, ``tokens`` (all heads alike) or one for all (``shared``)."""
    q, k, v, gate = random_inputs(name, B, T, H, G, 16, 16, regime=regime, dtype=torch.float32, factors=factors)
    angle = cast(Tensor, random_inputs("rope", B, T, H, G, 16, dtype=torch.float32)[3].angle)
    angle = {"heads": angle, "tokens": angle[:, :, :1], "shared": angle[0, 0, 0]}[angles]
    gate = replace(gate, angle=angle)
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), gate.map(lambda part: part.to(DEVICE))


@pytest.mark.parametrize(("name", "angles"), [("path_fox", "heads"), ("path", "shared")])
def test_values_and_gradients_equal_the_oracle(name: str, angles: str) -> None:
    """Those of the angles among them, whatever heads share them."""
    inputs = inputs_of(name, angles)
    expected = value_and_gradients(oracle.softmax, in_float64(inputs))
    got = value_and_gradients(TRITON, inputs)
    for part, x in got.items():
        assert relative_error(x, expected[part]) <= CLOSE, part


def test_windows_sinks_and_the_lse() -> None:
    inputs, sink = inputs_of(T=20, H=4, G=2), torch.linspace(-1, 1, 4, device=DEVICE)
    options: dict[str, Any] = {"window": 9, "sink": sink, "scale": 0.3, "return_lse": True}
    with torch.no_grad():
        expected = oracle.softmax(*in_float64(inputs), **options)
        assert max(map(relative_error, TRITON(*inputs, **options), expected)) <= CLOSE


@torch.no_grad()
def test_packed_and_padded_sequences() -> None:
    q, k, v, gate = inputs = inputs_of(T=40, angles="tokens")
    borders = torch.tensor([0, 20, 21, 40], device=DEVICE)
    packed = TRITON(*inputs, cu_seqlens=borders)
    for a, b in itertools.pairwise(borders.tolist()):
        alone = oracle.softmax(*in_float64((q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b))))
        assert relative_error(packed[:, a:b], cast(Tensor, alone)) <= CLOSE
    valid = torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
    valid[0, :5], valid[0, 30:34] = False, False
    hole = valid[..., None, None]
    nothing = [x.masked_fill(~hole, torch.nan) for x in (q, k, v)]
    broken = gate.map(lambda x: x.masked_fill(~valid.view(1, 40, *(1,) * (x.ndim - 2)), torch.nan))
    expected, _ = FORMS.extend(*in_float64(inputs), valid=valid)
    assert relative_error(TRITON(*nothing, broken, valid=valid)[valid], expected[valid]) <= CLOSE


@torch.no_grad()
def test_pruned_rows_lose_no_more_than_eps() -> None:
    """A rotation changes no length: the certificate is that of PaTH-FoX."""
    q, k, v, gate = inputs_of(T=150, H=1, angles="shared")
    gate = replace(gate, log_decay=torch.full_like(cast(Tensor, gate.log_decay), -0.12))
    eps = 1e-2
    (_, lse), (_, whole) = (TRITON(0.1 * q, k, v, gate, prune=x, return_lse=True) for x in (Prune(eps=eps), None))
    lost = 1 - (lse - whole).exp()
    assert 1e-5 < float(lost.max()) <= eps


@pytest.mark.parametrize(("angles", "factors"), [("heads", None), ("shared", 2)])
@torch.no_grad()
def test_steps_of_kernels_and_of_the_reference_go_on_from_one_another(angles: str, factors: int | None) -> None:
    """Grouped heads: where each query head turns by its own angle, keys have a copy for each, and values have not."""
    inputs = inputs_of(T=14, H=4, G=2, angles=angles, factors=factors)
    q, k, v, gate = inputs
    expected = cast(Tensor, oracle.softmax(*in_float64(inputs)))
    _, last = FORMS.extend(*in_float64(inputs))
    for forms in (("reference", "triton", "triton", "reference"), ("triton", "triton", "reference", "triton")):
        state, outputs = None, []
        for form, (a, b) in zip(forms, itertools.pairwise((0, 8, 9, 11, 14)), strict=True):
            now = q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b)
            if FORMS.refuses(form, Call(*now, state, True)):  # several factors over a whole sequence
                form = "reference"
            o, state = FORMS.extend(*now, state, form=form)
            outputs.append(o)
        assert relative_error(torch.cat(outputs, 1), expected) <= CLOSE
        assert isinstance(state, KVCache)
        assert state.v.shape == v.shape
        step = 4 // state.k.shape[2]
        assert relative_error(state.k, last.k[:, :, ::step]) <= CLOSE


@torch.no_grad()
def test_padding_in_steps() -> None:
    inputs = inputs_of(B=2, T=14, angles="tokens")
    q, k, v, gate = inputs
    valid = torch.ones(2, 14, dtype=torch.bool, device=DEVICE)
    valid[0, :3], valid[1, 11] = False, False
    expected, _ = FORMS.extend(*in_float64(inputs), valid=valid)
    state, outputs = None, []
    for a, b in ((0, 10), (10, 11), (11, 12), (12, 14)):
        o, state = FORMS.extend(
            q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), state, form="triton", valid=valid[:, a:b]
        )
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1)[valid], expected[valid]) <= CLOSE


@torch.no_grad()
def test_steps_in_place() -> None:
    """Rows that joined after different numbers of tokens, each in its own frame."""
    inputs = inputs_of(B=2, T=16, H=4, G=2, angles="tokens")
    q, k, v, gate = inputs
    expected, starts, batch = cast(Tensor, oracle.softmax(*in_float64(inputs))), (7, 12), BatchRows.idle(2, DEVICE)
    memory, steps = None, list(starts)
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        part = gate.map(lambda x, one=one: x if x.ndim == 1 else x[one])  # type: ignore[misc]
        _, state = FORMS.extend(
            q[one, :start], k[one, :start], v[one, :start], part.slice(0, start), None, form="triton"
        )  # fmt: skip
        if memory is None:
            memory = cast(Any, FORMS.kernels["triton"].in_place)(state, batch, 24, DEVICE)
            assert isinstance(memory, TurnedMemory)
        memory.admit(row, state, 24)
        batch.begin(row, start)
    assert memory is not None
    for _ in range(4):
        at = [torch.tensor(steps, device=DEVICE)]
        index = (torch.arange(2, device=DEVICE), *at)
        now = gate.map(lambda x, index=index: x if x.ndim == 1 else x[index][:, None])  # type: ignore[misc]
        call = Call(*(x[index][:, None] for x in (q, k, v)), now, None, True)
        o = memory.step(call, cast(Any, None))
        for row in range(2):
            assert relative_error(o[row, 0], expected[row, steps[row]]) <= CLOSE
        steps = [t + 1 for t in steps]
        batch.length += 1
        batch.lengths[:] = steps


@torch.no_grad()
def test_late_tokens_turn_as_exactly_as_early_ones() -> None:
    """Phases are sums in float64: behind 40000 radians a short text reads as it does in front of them."""
    q, k, v, gate = inputs_of("path", T=20, angles="tokens")
    turn = torch.full((1, 20, 1, 8), 2000.0, device=DEVICE)
    angle = cast(Tensor, gate.angle) + turn
    o = TRITON(q, k, v, replace(gate, angle=angle))
    assert relative_error(o, cast(Tensor, oracle.softmax(*in_float64((q, k, v, replace(gate, angle=angle)))))) <= CLOSE


def test_a_gradient_of_a_step_is_refused() -> None:
    q, k, v, gate = inputs_of(T=10)
    _, state = FORMS.extend(q[:, :9], k[:, :9], v[:, :9], gate.slice(0, 9), form="triton")
    call = Call(q[:, 9:].requires_grad_(), k[:, 9:], v[:, 9:], gate.slice(9, 10), state, True)
    assert "a cached step of the triton form has no gradient" in FORMS.refuses("triton", call)
    assert FORMS.options("triton") == SoftmaxForms(Householder(), kernels={"triton": path_kernel()}).options("triton")


def budget(dtype: torch.dtype, T: int, K: int) -> dict[str, tuple[float, float]]:
    """Errors against float64, of the output and each gradient, beside those of dense PyTorch in ``dtype``."""
    q, k, v, gate = random_inputs("path_fox", 1, T, 4, 2, K, K, regime="open", dtype=torch.float64)
    angle = random_inputs("rope", 1, T, 4, 2, K, dtype=torch.float64)[3].angle
    gate = replace(gate, angle=angle).map(lambda x: x.float().to(DEVICE))
    rounded: Inputs = (*(x.to(DEVICE, dtype) for x in (q, k, v)), gate)  # type: ignore[assignment]

    def dense(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        (q, k, v, gate), *_ = fold(q, k, v, gate, None)
        parts = {"w": gate.w, "beta": gate.beta, "log_decay": gate.log_decay}
        return path_reference_lse(q.to(dtype), k.to(dtype), v, **parts, compute_dtype=dtype)[0]  # type: ignore[arg-type]

    exact = value_and_gradients(FORMS.parallel, in_float64(rounded))
    ours, plain = value_and_gradients(TRITON, rounded), value_and_gradients(dense, rounded)
    return {name: (relative_error(ours[name], x), relative_error(plain[name], x)) for name, x in exact.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [64, 128])
def test_long_sequences_within_budget_on_a_gpu(dtype: torch.dtype, K: int) -> None:
    for name, (error, plain) in budget(dtype, 1000, K).items():
        summed = math.sqrt(1000) if name in ("log_decay", "angle") else 1.0  # and so are their roundings
        allowed = 2 * plain + torch.finfo(dtype).eps + 16 * summed * torch.finfo(torch.float32).eps
        assert error <= allowed, f"{name} off by {error:.2e}, allowed {allowed:.2e}"


class Attention16(torch.autograd.Function):
    """Attention as kernels compute it: what they are given, and the gradients they return, are in bfloat16."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
        q, k = (x.detach().double().requires_grad_() for x in (q, k))
        with torch.enable_grad():
            gate = Gate(log_decay=torch.full(q.shape[:3], -0.2, dtype=torch.float64))
            total = (cast(Tensor, oracle.softmax(q, k, v, gate)) * do).sum()
        ctx.grads = torch.autograd.grad(total, (q, k))
        return total.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (*(x.bfloat16() for x in ctx.grads), None, None)


@pytest.mark.parametrize("shared", [False, True])
def test_rounding_spoils_no_sum_of_the_angles(shared: bool) -> None:
    """The gradient of an angle, a sum over later tokens: exact without rounding, and with it better than plain."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 160, 2, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    angle = 0.1 * torch.randn(1, 160, 1 if shared else 2, 8, generator=generator, dtype=torch.float64)
    angle.requires_grad_()
    gate = Gate(angle=angle, log_decay=torch.full((1, 160, 2), -0.2, dtype=torch.float64))
    (exact,) = torch.autograd.grad((cast(Tensor, oracle.softmax(q, k, v, gate)) * do).sum(), angle)

    def error(q: Tensor, k: Tensor, rounds: bool) -> float:
        if rounds:
            total = Attention16.apply(q, k, v, do)  # type: ignore[no-untyped-call]
        else:
            total = (cast(Tensor, oracle.softmax(q, k, v, replace(gate, angle=None))) * do).sum()
        return relative_error(torch.autograd.grad(total, angle)[0], exact)

    assert error(*rotate_rounded(angle, phases(angle, 1), q, k, dtype=q.dtype), False) <= 1e-12
    plain = error(*(x.bfloat16() for x in rotate_all(phases(angle, 1), q, k)), True)
    assert error(*rotate_rounded(angle, phases(angle, 1), q, k, dtype=torch.bfloat16), True) < 0.9 * plain


@pytest.mark.parametrize(("name", "shared"), [("fox_rope", False), ("fox_rope", True), ("rope_path_fox", False)])
def test_gradients_of_angles_are_as_exact_as_the_others(name: str, shared: bool) -> None:
    """In float16, though they are sums over all later tokens: those of q and k reach the rotation unrounded.

    Three roundings, of O, dS and the result, are each eps / sqrt(12) in the mean: 4.9e-4 in quadrature.
    """
    q, k, v, gate = random_inputs(name, 1, 130, 2, 2, 16, 16, regime="mixed", dtype=torch.float32)
    if shared:
        gate = replace(gate, angle=cast(Tensor, gate.angle)[:, :, :1])
    half = (*(x.to(DEVICE, torch.float16) for x in (q, k, v)), gate.map(lambda x: x.to(DEVICE)))
    exact = value_and_gradients(get(name).forms["parallel"], in_float64(half))  # type: ignore[arg-type]
    got = value_and_gradients(get(name).forms["triton"], half)  # type: ignore[arg-type]
    for part, x in exact.items():
        error = float((got[part].double() - x).norm() / x.norm())
        assert error <= 8e-4, f"{part} off by {error:.1e}"
