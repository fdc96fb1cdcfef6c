"""Forms under the transforms of ``torch.func``, and on tensors that have shapes and no values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

from attnzoo import Gate, get, list_variants
from attnzoo.samples import random_inputs
from attnzoo.testing import CPU_FORMS, block_sizes, extend_with_steps, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for in-place products


def ways(name: str) -> dict[str, Callable[..., Tensor]]:
    variant = get(name)
    forms = {form: run for form, run in variant.forms.items() if form in CPU_FORMS}
    return {**forms, "extend": lambda *inputs: extend_with_steps(variant, inputs)}


@pytest.mark.parametrize("name", list_variants())
def test_gradients_of_single_samples(name: str) -> None:
    """``vmap(grad(...))`` over the batch, with checks of values on, equals a loop over it."""
    q, k, v, gate = random_inputs(name, B=2, T=5, H=2, G=1, K=4, V=3)
    leaves = {"q": q, "k": k, "v": v, **{part: getattr(gate, part) for part in gate.parts}}
    for way, form in ways(name).items():

        def loss(sample: dict[str, Tensor], form: Callable[..., Tensor] = form) -> Tensor:
            rest = {part: x[None] for part, x in sample.items()}
            q, k, v = (rest.pop(part) for part in ("q", "k", "v"))
            return form(q, k, v, Gate(**rest)).square().sum()

        got = vmap(grad(loss))(leaves)
        for b in range(2):
            sample = {part: x[b].clone().requires_grad_() for part, x in leaves.items()}
            single = dict(zip(sample, torch.autograd.grad(loss(sample), list(sample.values())), strict=True))
            of_transform = grad(loss)({part: x[b] for part, x in leaves.items()})
            for part, expected in single.items():
                assert relative_error(got[part][b], expected) < 1e-10, (way, part)
                assert relative_error(of_transform[part], expected) < 1e-10, (way, part)


@pytest.mark.parametrize("name", list_variants())
def test_forward_derivatives_are_those_of_the_oracle(name: str) -> None:
    q, k, v, gate = random_inputs(name, B=1, T=5, H=2, G=1, K=4, V=3, regime="open")
    leaves = {"q": q, "k": k, "v": v, **{part: getattr(gate, part) for part in gate.parts}}
    tangents = {part: x.flip(-1) - 0.3 for part, x in leaves.items()}

    def along(form: Callable[..., Tensor]) -> Tensor:
        def whole(q: Tensor, k: Tensor, v: Tensor, **parts: Tensor) -> Tensor:
            return form(q, k, v, Gate(**parts))

        return jvp(lambda leaves: whole(**leaves), (leaves,), (tangents,))[1]

    expected = along(get(name).oracle)
    for way, form in ways(name).items():
        assert relative_error(along(form), expected) < 1e-10, way


@pytest.mark.parametrize("name", ["nope", "deltanet"])
def test_second_derivatives_by_transforms(name: str) -> None:
    """Forward over reverse, in vmap."""
    q, k, v, gate = random_inputs(name, B=1, T=3, H=1, G=1, K=2, V=1, regime="open")
    found = [hessian(lambda k, form=form: form(q, k, v, gate).square().sum())(k) for form in (
        get(name).oracle, get(name).forms["parallel"])]  # fmt: skip
    assert relative_error(found[1], found[0]) < 1e-10


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_a_transform_of_many_rows(name: str) -> None:
    """Past the lengths at which the forms checkpoint their blocks and take fused kernels, which no transform can."""
    q, k, v, gate = random_inputs(name, B=1, T=300, H=1, G=1, K=2, V=1, regime="open")
    run = get(name).forms["parallel"]
    expected = torch.autograd.grad(run(q.requires_grad_(), k, v, gate).square().sum(), q)[0]
    assert relative_error(grad(lambda q: run(q, k, v, gate).square().sum())(q.detach()), expected) < 1e-10


@pytest.mark.parametrize("name", ["nope", "fox", "path", "gated_deltanet"])
def test_forward_derivatives_need_no_transform(name: str) -> None:
    """In lengths of fused kernels, which have none."""
    form = get(name).forms["parallel" if get(name).side == "softmax" else "chunk"]
    for T in (40, 300):
        q, k, v, gate = random_inputs(name, B=1, T=T, H=1, G=1, K=8, V=8, regime="open")
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(form(forward_ad.make_dual(q, q.flip(-1)), k, v, gate)).tangent
        expected = jvp(lambda q: form(q, k, v, gate), (q,), (q.flip(-1),))[1]  # noqa: B023  called at once
        assert relative_error(got, expected) < 1e-10


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "meta") for name in list_variants()), *((name, "fake") for name in ("gla", "fox", "path"))],
)
def test_shapes_alone_go_through_every_form(name: str, kind: str) -> None:
    q, k, v, gate = random_inputs(name, B=2, T=6, H=2, G=1, K=4, V=3)
    mode = FakeTensorMode()

    def hollow(x: Tensor) -> Tensor:
        return (x.to("meta") if kind == "meta" else mode.from_tensor(x)).requires_grad_()

    with block_sizes(4), mode if kind == "fake" else contextlib.nullcontext():
        leaves = [hollow(x) for x in (q, k, v)]
        parts = gate.map(hollow)
        for way, form in ways(name).items():
            short = [x[:, :3] for x in leaves] if way in ("recurrent", "extend") else leaves
            o = form(*short, parts.slice(0, short[0].shape[1]))
            assert o.shape == (2, short[0].shape[1], 2, 3)
            torch.autograd.grad(o.sum(), leaves)
