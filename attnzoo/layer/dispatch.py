"""The choice of the form that runs: by device for ``impl="auto"``, else by name; and the call of it."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.values import as_given
from attnzoo.errors import UnavailableError
from attnzoo.forms.caches.state import check_state
from attnzoo.forms.options import Options
from attnzoo.forms.protocol import REFERENCE, Call, Forms, FormSet, doubts, is_brief
from attnzoo.kernels.common.untraced import constant_in_traces, exporting
from attnzoo.layer.exported import exported
from attnzoo.registry import get
from attnzoo.registry.table import BUILT_IN
from attnzoo.registry.variant import Variant

logger = logging.getLogger(__name__)

KERNELS = ("triton", "fla", "sdpa")  # what auto tries on a GPU, in this order
IMPLS = ("auto", *KERNELS, REFERENCE)
REFERENCES = ("chunk", "parallel", "recurrent")  # of whole sequences, the fastest first


def choose(variant: Variant, impl: str, call: Call) -> str:
    """The form to run: one of ``KERNELS`` or ``"reference"``.

    Raises:
        UnavailableError: an explicit ``impl`` that cannot serve this variant, device or call; it never falls back.
        ValueError: an option that no form of the variant can honour in this call.
    """
    plain = impl == REFERENCE or (impl == "auto" and not on_gpu(call.q))
    if plain and type(variant) is Variant and variant.own:
        return REFERENCE  # the reference takes every option
    if impl == "auto":
        if on_gpu(call.q):
            for form in KERNELS:
                if not passed_over(variant, form, call):
                    return form
        reason = variant.refuses(REFERENCE, call)
        if reason:
            raise UnavailableError(f"no form of {variant.name!r} serves this call: {reason}")
        return REFERENCE
    reason = variant.refuses(impl, call)
    if reason:
        raise UnavailableError(f"impl={impl!r}: {reason}; use impl='auto' or 'reference'")
    return impl


def passed_over(variant: Variant, form: str, call: Call) -> str:
    """The reason why ``auto`` does not run a form, or ""."""
    return variant.refuses(form, call) or doubts(variant.form_set, form, call)


def expected(variant: Variant, call: Call) -> list[str]:
    """The names of a variant's kernels that are made for calls of this kind, the fastest first."""
    return _made(variant.form_set, brief=call.q.shape[1] == 1)


def _made(forms: FormSet, brief: bool) -> list[str]:
    """The names of the kernels among ``forms``; with ``brief`` those for a few tokens at a time, too."""
    return [form for form in KERNELS if form in forms.forms and (brief or not is_brief(forms, form))]


def of_all_ranks(variant: Variant, form: str, call: Call) -> str:
    """The form, and in place of a kernel for a few tokens the one for more, as other ranks may have more."""
    if not is_brief(variant.form_set, form):
        return form
    made = _made(variant.form_set, brief=False)
    return next((name for name in made if not passed_over(variant, name, call)), REFERENCE)


def missed(variant: Variant, call: Call) -> str:
    """The reasons why ``auto`` runs no kernel on a GPU, with remedies; "" where it runs one."""
    if not on_gpu(call.q):
        return ""
    forms = expected(variant, call)
    if not forms:
        return f"there is none for {', '.join(variant.requires) or 'no part'} together{_nearest(variant.name)}"
    return "; ".join(f"{form}: {passed_over(variant, form, call)}" for form in forms)


@constant_in_traces
def _nearest(name: str) -> str:
    """The variants of the same side that have a kernel and share the most gate parts with this one, in words."""
    able: dict[int, list[str]] = {}
    for near in map(get, (getattr(pair, get(name).side, name) for pair in BUILT_IN)):
        if set(near.requires) <= set(get(name).requires) and _made(near.form_set, brief=False):
            able.setdefault(len(near.requires), []).append(near.name)
    return f" (there is for {' and for '.join(able[max(able)])})" if able else ""


def chosen(variant: Variant, impl: str, call: Call, last: str = "") -> str:
    """The form that :func:`choose` gives; it and the reasons against faster ones are logged once per process.

    Args:
        last: the form of the layer's last call on this device, which has been logged.
    """
    form = choose(variant, impl, call)
    if form == last and impl in ("auto", REFERENCE) and (form != REFERENCE or call.q.is_cpu):
        return form  # there are no doubts of it, and no kernel was missed
    _say(f"{variant.name}: impl={impl!r} runs {form} on {call.q.device.type}")
    doubt = doubts(variant.form_set, form, call)
    if doubt:
        _say(f"{variant.name}: {form}: {doubt}", logging.WARNING)
    if form == REFERENCE and impl == "auto":
        lost = missed(variant, call)
        if lost:
            _say(f"{variant.name}: no kernel runs, and the reference is slower: {lost}", logging.WARNING)
    return form


_said: set[str] = set()


@constant_in_traces  # a compiled layer logs while it is compiled
def _say(picked: str, level: int = logging.INFO) -> None:
    """Log what runs, once per process."""
    if picked not in _said:
        _said.add(picked)
        logger.log(level, "%s", picked)


def serves(impl: str, part: str, why: str) -> bool:
    """Whether a kernel computes a part of a layer of this ``impl``; where none does, the log says so once.

    Args:
        part: its name in words.
        why: the reason why the kernel cannot, or "".

    Raises:
        UnavailableError: ``"triton"``, which never falls back.
    """
    if why and impl == "triton":
        raise UnavailableError(f"impl='triton': {part}: {why}; use impl='auto' or 'reference'")
    if why:
        _say(f"{part}: no kernel runs, and PyTorch is slower: {why}", logging.WARNING)
    return not why


def on_gpu(x: Tensor) -> bool:
    """Whether ``auto`` looks for a kernel: ``x`` is on a device of its own."""
    return x.device.type not in ("cpu", "meta")


def run(variant: Variant, form: str, call: Call, checked: bool = True) -> tuple[Any, Any]:
    """Output ``[B, T, H, V]`` and the new state (None where none is kept).

    Args:
        checked: whether the inputs need checks: not where this package's own layer parts have made them.
    """
    inputs, options = (call.q, call.k, call.v, call.gate), call.options
    if call.keeps_state:
        if checked and form == REFERENCE:
            o, state = variant.extend(*inputs, call.state, **options)
            return o, state
        if call.state is not None:
            check_state(variant.side, call.state, *inputs)
        with as_given(call.q):
            if variant.own:
                forms = cast(Forms, variant.form_set)
                given = options if isinstance(options, Options) else forms.OPTIONS(**options)
                return forms.go_on(form, *inputs, call.state, given)
            return variant.form_set.extend(*inputs, call.state, form=form, **options)
    if form == REFERENCE and torch.compiler.is_exporting() and exporting():
        return exported(variant.name, _fastest(variant), *inputs, options), None
    if not checked:
        with as_given(call.q):
            return cast(Forms, variant.form_set).whole(form, *inputs, options), None
    if form == REFERENCE:
        form = _fastest(variant)
        if form == REFERENCE:  # third-party forms may have other names
            return variant.extend(*inputs, **options)[0], None
    return variant.forms[form](*inputs, **options), None


def _fastest(variant: Variant) -> str:
    """The name of the fastest reference form of whole sequences that a variant has."""
    return next((name for name in REFERENCES if name in variant.forms), REFERENCE)
