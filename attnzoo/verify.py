"""Verification of every form of a variant against the float64 oracle, on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast, get_args

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import UnavailableError
from attnzoo.forms.protocol import Call, is_brief
from attnzoo.registry import Variant, get, list_variants
from attnzoo.samples import Regime, random_inputs

LIMIT = 1e-10
LENGTHS = (1, 13, 71)  # a single token, a ragged length, and more than one chunk
GPU_FORMS = ("fla", "triton")

Inputs = tuple[Tensor, Tensor, Tensor, Gate]
Form = Callable[..., Tensor]


@dataclass(frozen=True)
class Check:
    """The largest relative errors of one form over all inputs that were drawn.

    Args:
        variant: registry name.
        form: name of the form.
        value: error of the outputs.
        gradient: error of the gradients of q, k, v and every gate part.
        limit: largest allowed error of both.
        skipped: the reason why the form was not run, or "".
        failed: the error that it raised, or "".
    """

    variant: str
    form: str
    value: float
    gradient: float
    limit: float = LIMIT
    skipped: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.skipped) or (not self.failed and (self.value <= self.limit and self.gradient <= self.limit))


def verify(names: Sequence[str] = (), seed: int = 0) -> Iterator[Check]:
    """Yield a result for every form of the variants ``names`` (without any: all).

    A form that raises has failed; a variant whose module cannot be imported has one failed result.

    The inputs go through every gate regime of :func:`~attnzoo.samples.random_inputs` and ``LENGTHS``, in float64
    with fewer key heads than query heads and K != V.

    Raises:
        TypeError: one name in place of a sequence of them.
        ValueError: an unknown name.
        UnavailableError: the module of a variant that is named cannot be imported.
    """
    if isinstance(names, str):
        raise TypeError(f"names: expected a sequence of names such as ['fox'], got {names!r}")
    for name in [get(name).name for name in names] or list_variants():
        try:
            variant = get(name)
        except (UnavailableError, TypeError) as error:  # a plugin's error must not stop the other checks
            yield Check(name, "", 0.0, 0.0, failed=str(error))
        else:
            yield from _verify_variant(variant, seed)


def _verify_variant(variant: Variant, seed: int) -> Iterator[Check]:
    forms: dict[str, Form] = {name: form for name, form in variant.forms.items() if name not in GPU_FORMS}
    forms["extend"] = lambda q, k, v, gate: _in_pieces(variant, q, k, v, gate)
    errors = dict.fromkeys(forms, (0.0, 0.0))
    failed = dict.fromkeys(forms, "")
    for number, (length, regime) in enumerate((t, r) for t in LENGTHS for r in get_args(Regime)):
        inputs = random_inputs(variant.name, B=1, T=length, regime=regime, seed=seed * 1000 + number)
        cotangent = torch.randn(
            _output_shape(inputs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        expected = _value_and_gradients(variant.oracle, inputs, cotangent)
        for name, form in forms.items():
            if failed[name]:
                continue
            try:
                got = _value_and_gradients(form, inputs, cotangent)
            except Exception as error:  # third-party code may raise anything
                failed[name] = str(error) or repr(error)
                continue
            value, gradient = errors[name]
            errors[name] = (
                max(value, relative_error(got[0], expected[0])),
                max(gradient, *map(relative_error, got[1:], expected[1:])),
            )
    for name, (value, gradient) in errors.items():
        yield Check(variant.name, name, value, gradient, failed=failed[name])
    for name in GPU_FORMS:
        if name in variant.forms:
            if torch.cuda.is_available():
                yield verify_kernel(variant, name, seed, "cuda")
            else:
                yield Check(variant.name, name, 0.0, 0.0, skipped="needs a GPU")


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest entry of ``expected``; infinite where ``got`` is not finite."""
    if not got.isfinite().all():
        return float("inf")
    size = float(expected.abs().max())
    return float((got.double() - expected.double()).abs().max()) / (size if size > 0 else 1.0)


def _output_shape(inputs: Inputs) -> tuple[int, ...]:
    q, _, v, _ = inputs
    return (*q.shape[:3], v.shape[3])


def _in_pieces(variant: Variant, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """The output by ``extend`` in pieces: a prefill, some single steps and the rest."""
    T = q.shape[1]
    cuts = sorted({0, T // 2, min(T // 2 + 1, T), min(T // 2 + 2, T), T})
    state, outputs = None, []
    for start, stop in pairwise(cuts):
        now = slice(start, stop)
        o, state = variant.extend(q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state)
        outputs.append(o)
    return torch.cat(outputs, 1)


def _value_and_gradients(form: Form, inputs: Inputs, cotangent: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k, v and each gate part, in that order."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    gate = inputs[3].map(lambda part: part.detach().clone().requires_grad_())
    leaves = [q, k, v, *(getattr(gate, part) for part in gate.parts)]
    output = form(q, k, v, gate)
    gradients = torch.autograd.grad(output, leaves, cotangent.to(output), allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)]
    return [output.detach(), *filled]


def verify_kernel(variant: Variant, form: str, seed: int, device: str) -> Check:
    """The result of a kernel in bfloat16, whose error may be twice that of the parallel form in the same precision.

    A kernel for few tokens gets few, without gradients. A kernel that refuses the inputs is skipped; one that raises
    although it did not refuse has failed.
    """
    brief = is_brief(variant.form_set, form)
    T = 32 if brief else 128
    inputs = random_inputs(variant.name, B=1, T=T, H=4, G=4, K=64, V=64, regime="open", seed=seed)
    q, k, v = (x.to(device, torch.bfloat16) for x in inputs[:3])
    gate = inputs[3].map(lambda part: part.to(device, torch.float32))
    if gate.w is not None:
        gate = replace(gate, w=gate.w.to(torch.bfloat16))
    cotangent = torch.randn(_output_shape(inputs), generator=torch.Generator().manual_seed(seed)).to(device)
    tie = _tied if form == "fla" and gate.w is not None else _same
    expected = _value_and_gradients(tie(variant.oracle), (q, k, v, gate), cotangent)
    reference = _value_and_gradients(tie(variant.forms["parallel"]), (q, k, v, gate), cotangent)
    try:
        run = tie(variant.forms[form])
        got = [run(q, k, v, gate)] if brief else _value_and_gradients(run, (q, k, v, gate), cotangent)
    except Exception as error:  # errors of compilers, GPUs and other libraries
        call = Call(q, k, v, gate, options={} if tie is _same else {"delta_rule": True})
        reason = variant.refuses(form, call)
        return Check(variant.name, form, 0.0, 0.0, skipped=reason, failed="" if reason else str(error) or repr(error))
    allowed = 2 * max(map(relative_error, reference, expected)) + torch.finfo(torch.bfloat16).eps
    value, *gradients = map(relative_error, got, expected)
    return Check(variant.name, form, value, max(gradients, default=0.0), allowed)


def _same(form: Form) -> Form:
    return form


def _tied(form: Form) -> Form:
    """The form with w = k and beta as the write strength, the only case that the delta rule's kernel computes."""

    def tied(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        return form(q, cast(Tensor, gate.w), v, gate, delta_rule=True)

    return tied
