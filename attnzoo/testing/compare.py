"""The distance between two computations, in values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra import oracle
from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.registry.variant import Variant
from attnzoo.testing.case import Inputs

LIMIT = 1e-10  # float64: relative to the largest entry of what is expected
CPU_FORMS = ("recurrent", "parallel", "chunk")
KERNEL_FORMS = ("fla", "triton")
Form = Callable[..., Any]


def reference_forms(variant: Variant) -> dict[str, Form]:
    """The forms of a variant that run everywhere, in float64 too."""
    return {name: form for name, form in variant.forms.items() if name not in KERNEL_FORMS}


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    """q, k, v and each gate part by name."""
    q, k, v, gate = inputs
    return {"q": q, "k": k, "v": v, **{part: getattr(gate, part) for part in gate.parts}}


def value_and_gradients(form: Form, inputs: Inputs) -> dict[str, Tensor]:
    """The output under ``"o"`` and the gradient of every input and gate part, for one fixed cotangent."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    gate = inputs[3].map(lambda part: part.detach().clone().requires_grad_())
    leaves = leaves_of((q, k, v, gate))
    o = form(q, k, v, gate)
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o)
    grads = torch.autograd.grad(o, tuple(leaves.values()), cotangent, allow_unused=True)
    filled = {
        name: x.new_zeros(x.shape) if g is None else g for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return {"o": o.detach(), **filled}


def relative_error(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry of ``expected`` (or ``floor``); infinite unless ``got`` is finite."""
    if not got.isfinite().all():
        return float("inf")
    size = max(float(expected.detach().abs().max()), floor)
    return float((got.detach().double() - expected.detach().double()).abs().max()) / (size or 1.0)


def relative_errors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """:func:`relative_error` of every entry; infinite for one of another shape.

    A gradient that should be zero comes out as the rounding of terms that cancel: it is measured against the others,
    and one that all tokens share against as many of them.
    """
    assert got.keys() == expected.keys()
    floor = 1e-4 * max(float(x.abs().max()) for x in expected.values())
    tokens = expected["q"][..., 0, 0].numel() if "q" in expected else 1
    return {
        name: relative_error(x, expected[name], floor * (tokens if x.ndim == 1 else 1))
        if x.shape == expected[name].shape
        else float("inf")
        for name, x in got.items()
    }


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], limit: float = LIMIT, what: str = "") -> None:
    """Every entry of ``got`` within ``limit`` of ``expected``, with all that are off in the message."""
    for name, x in got.items():
        assert x.shape == expected[name].shape, f"{what} {name}: shape {tuple(x.shape)}"
    off = relative_errors(got, expected)
    wrong = {name: f"{error:.2e}" for name, error in off.items() if not error <= limit}
    assert not wrong, f"{what}: relative errors over {limit:g}: {wrong}"


def straightforward(variant: Variant, dtype: torch.dtype) -> Form:
    """The plain computation in ``dtype``, of a line or two: the yardstick of the low-precision tests."""

    if variant.readout is not None:
        return variant.forms["parallel"]

    def form(q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None) -> Tensor:
        T, H, K = q.shape[1:]
        g, R = oracle.matrices(q, gate, variant.transition)
        g, R = g.to(dtype), R.to(dtype)
        q = q * (K**-0.5 if scale is None else scale)
        k, v = (expand_heads(x, H).to(dtype) for x in (k, v))
        keys, past = k[:, :0], g[:, :0]
        outputs = []
        for t in range(T):
            keys = torch.cat([torch.einsum("bhkl,bjhk->bjhl", R[:, t], keys), k[:, t : t + 1]], 1)
            past = torch.cat([past + g[:, t : t + 1], torch.zeros_like(g[:, :1])], 1)
            s, d = torch.einsum("bjhk,bhk->bhj", keys, q[:, t].to(dtype)), past.transpose(1, 2)
            weight = s * d.exp() if variant.side == "linear" else (s + d).softmax(-1)
            outputs.append(torch.einsum("bhj,bjhv->bhv", weight, v[:, : t + 1]))
        return torch.stack(outputs, 1)

    return form


def extend_in_segments(
    variant: Variant, inputs: Inputs, edges: Sequence[int], scale: float | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Any]:
    """The output over all segments between ``edges`` ``[0, ..., T]``, and the last state."""
    q, k, v, gate = inputs
    state, outputs = None, []
    for start, stop in itertools.pairwise(edges):
        now = slice(start, stop)
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        options |= {} if valid is None else {"valid": valid[:, now]}
        o, state = variant.extend(q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, **options)
        outputs.append(o)
    return torch.cat(outputs, 1), state


def extend_with_steps(variant: Variant, inputs: Inputs) -> Tensor:
    """The output of a prefill, two steps and a rest."""
    T = inputs[0].shape[1]
    edges = sorted({0, T // 2, min(T // 2 + 1, T), min(T // 2 + 2, T), T})
    return extend_in_segments(variant, inputs, edges)[0]
