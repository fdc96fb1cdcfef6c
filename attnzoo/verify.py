"""The equalities on fresh random inputs: every law of a variant, and its kernels against the float64 oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import UnavailableError, message
from attnzoo.forms.protocol import Call, is_brief
from attnzoo.precision import wide_dtype
from attnzoo.registry import get, list_variants
from attnzoo.registry.variant import Variant
from attnzoo.samples import random_inputs
from attnzoo.testing.compare import (
    KERNEL_FORMS,
    Form,
    reference_forms,
    relative_error,
    straightforward,
    value_and_gradients,
)
from attnzoo.testing.laws import LAWS, Trial

KERNEL = "kernel"  # what the check of a kernel is called, where those of laws have their names
SHAPES = {"cuda": (1, 128, 4, 64), "cpu": (1, 40, 2, 16)}  # B, T, H, K; a kernel on a CPU is interpreted
FEW = 32  # tokens of a kernel for few of them


@dataclass(frozen=True)
class Where:
    """The device, dtype and inputs of a verification.

    Args:
        device: ``"cpu"`` or ``"cuda"``; laws are held on the CPU.
        dtype: float64 for the laws; another for every form in it, as kernels are held.
        interpret: whether Triton's interpreter runs the kernels on the CPU.
        shape: B, T, H and K of all inputs; None to draw them.
        seed: of the inputs.
        examples: of each law.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    interpret: bool = False
    shape: tuple[int, int, int, int] | None = None
    seed: int = 0
    examples: int = 10

    def __post_init__(self) -> None:
        if self.interpret and self.dtype == torch.bfloat16:
            raise ValueError("dtype: expected float32 or float16, for Triton's interpreter computes bfloat16 wrongly")

    @property
    def kernel_dtype(self) -> torch.dtype:
        """The dtype that kernels are held in: ``dtype``, or bfloat16 where that is float64."""
        if self.dtype != torch.float64:
            return self.dtype
        return torch.float32 if self.device == "cpu" else torch.bfloat16


def verify(names: Sequence[str] = (), where: Where | None = None) -> Iterator[Trial]:
    """Check every law and every kernel of the variants ``names`` (none given: all), one result each; of a variant whose
    module cannot be imported one that has failed.

    Raises:
        TypeError: one name in place of a sequence of them.
        ValueError: an unknown name.
        UnavailableError: the module of a variant that is named cannot be imported, or Hypothesis is missing.
    """
    return (check() for check in checks(names, where or Where()))


def checks(names: Sequence[str], where: Where) -> list[Callable[[], Trial]]:
    """The checks that :func:`verify` makes, as functions to be called."""
    if isinstance(names, str):
        raise TypeError(f"names: expected a sequence of names such as ['fox'], got {names!r}")
    found: list[Callable[[], Trial]] = []
    for name in [get(name).name for name in names] or [*list_variants(), *list_variants("other")]:
        try:
            variant = get(name)
        except (UnavailableError, TypeError) as error:  # a plugin's: the others are checked all the same
            found.append(functools.partial(Trial, name, "", 0.0, said=str(error)))
            continue
        if where.dtype == torch.float64:
            found += [functools.partial(_law, name, law, where) for law in LAWS]
        else:
            found += [functools.partial(in_precision, variant, form, where) for form in reference_forms(variant)]
        kernels = [form for form in KERNEL_FORMS if form in variant.forms]
        found += [functools.partial(_kernel, variant, form, where) for form in kernels]
    return found


def _law(name: str, law: str, where: Where) -> Trial:
    from attnzoo.testing import run_law  # needs Hypothesis

    return run_law(name, law, where.examples, where.seed, where.shape)


def _kernel(variant: Variant, form: str, where: Where) -> Trial:
    if where.device == "cuda" or (where.interpret and form == "triton"):
        return in_precision(variant, form, where)
    return Trial(variant.name, KERNEL, 0.0, {form: 0.0}, refused="needs a GPU")


def in_precision(variant: Variant, form: str, where: Where) -> Trial:
    """A form in the dtype of ``where``: its error may be twice that of the parallel form, or of what one would write
    in a line or two, in the same precision.

    A kernel for a few tokens at a time is given few, and has no gradient. One that refuses the inputs is skipped, and
    one that raises all the same has failed.
    """
    brief, dtype, device = is_brief(variant.form_set, form), where.kernel_dtype, where.device
    B, T, H, K = where.shape or SHAPES[device]
    T = min(T, FEW) if brief else T
    q, k, v, gate = random_inputs(variant.name, B, T, H, H, K, K, regime="open", seed=where.seed)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    gate = gate.map(lambda part: part.to(device, wide_dtype(dtype)))
    if gate.w is not None:
        gate = replace(gate, w=gate.w.to(dtype))
    inputs, tie = (q, k, v, gate), _tied if form == "fla" and gate.w is not None else _same
    kernel = form in KERNEL_FORMS
    plain = variant.forms["parallel"] if kernel else straightforward(variant, dtype)
    expected = value_and_gradients(tie(variant.oracle), inputs)
    yardstick = value_and_gradients(tie(plain), inputs)
    label = KERNEL if kernel else "precision"
    try:
        run = tie(variant.forms[form])
        got = {"o": run(*inputs)} if brief else value_and_gradients(run, inputs)
    except Exception as error:  # a compiler's, a GPU's, another library's
        call = Call(q, k, v, gate, options={} if tie is _same else {"delta_rule": True})
        refused = variant.refuses(form, call)
        said = "" if refused else f"{form} of {variant.name!r}: {message(error)}"
        return Trial(variant.name, label, 0.0, {form: 0.0}, refused=refused, said=said)
    allowed = 2 * max(relative_error(yardstick[part], expected[part]) for part in expected) + torch.finfo(dtype).eps
    off = {part: relative_error(x, expected[part]) for part, x in got.items()}
    wrong = "; ".join(f"{part} off by {error:.2g}" for part, error in off.items() if not error <= allowed)
    said = f"{form} of {variant.name!r} in {dtype}: {wrong} (allowed {allowed:.2g})" if wrong else ""
    return Trial(variant.name, label, allowed, {form: max(off.values())}, 1, said=said)


def _same(form: Form) -> Form:
    return form


def _tied(form: Form) -> Form:
    """The delta rule proper, all that its kernel computes: one key to erase and to write, and one strength."""

    def tied(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        return cast(Tensor, form(q, cast(Tensor, gate.w), v, gate, delta_rule=True))

    return tied
