"""A variant's forms as the registry exposes them: with checked inputs and outside autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from attnzoo.algebra.validation import check_inputs
from attnzoo.algebra.values import as_given
from attnzoo.errors import UnknownKeyError, unknown
from attnzoo.forms.caches.state import check_state
from attnzoo.forms.protocol import REFERENCE, FormSet, check_options

# a form over fragments: forms, the form's name, (q, k, v, gate), the options, the fragments, the transport
Shared = Callable[[FormSet, str, tuple[Any, ...], dict[str, Any], Any, str], Any]


def form_set(module: ModuleType) -> FormSet:
    """The object ``FORMS`` of a variant's module.

    Raises:
        TypeError: no ``FORMS``, or one that lacks a member of the protocol.
    """
    forms = getattr(module, "FORMS", None)
    if forms is None:
        raise TypeError(f"{module.__name__}: expected an object FORMS (LinearForms, SoftmaxForms, ...), got none")
    for member in ("forms", "options", "refuses", "extend"):
        if not hasattr(forms, member):
            raise TypeError(f"{module.__name__}.FORMS: expected a {member} (attnzoo.forms.protocol), got {forms!r}")
    return cast(FormSet, forms)


class CheckedForms(dict[str, Callable[..., Any]]):
    """The checked forms of a variant by name; errors for unknown forms name the variant.

    Raises:
        UnknownKeyError: asked for another form; the message lists them and names the nearest.
    """

    def __init__(self, name: str, requires: tuple[str, ...], forms: FormSet, shared: Shared) -> None:
        super().__init__({form: checked(name, requires, forms, form, shared) for form in forms.forms})
        self.name = name

    def __missing__(self, form: object) -> Callable[..., Any]:
        raise UnknownKeyError(str(unknown("form", form, self, of=repr(self.name))))


def checked(name: str, requires: tuple[str, ...], forms: FormSet, form: str, shared: Shared) -> Callable[..., Any]:
    """A form of the variant ``name`` with checks of its options, inputs and gate parts (``requires``).

    With ``fragments=``, and ``transport=`` beside it, the inputs are this rank's rows of sequences that ranks share.
    """
    run, taken = forms.forms[form], forms.options(form)

    @functools.wraps(run)
    def run_checked(
        q: Any, k: Any, v: Any, gate: Any, *, fragments: Any = None, transport: str = "auto", **options: Any
    ) -> Any:
        check_options(f"{form!r} of {name!r}", options, taken)
        check_inputs(name, requires, q, k, v, gate, options.get("scale"), options.get("valid"))
        with as_given(q):
            if fragments is None:
                return run(q, k, v, gate, **options)
            return shared(forms, form, (q, k, v, gate), options, fragments, transport)

    return run_checked


def checked_extend(name: str, requires: tuple[str, ...], side: str, forms: FormSet) -> Callable[..., Any]:
    """The variant's ``extend`` with the checks of :func:`checked` and of ``state``; ``side`` is ``"linear"`` or
    ``"softmax"``.

    The returned function also raises ValueError for an unknown ``form``.
    """
    taken = {form: forms.options(form) for form in (REFERENCE, *forms.forms)}

    @functools.wraps(forms.extend)
    def run_checked(
        q: Any, k: Any, v: Any, gate: Any, state: Any = None, *, form: str = REFERENCE, **options: Any
    ) -> Any:
        if form not in taken:
            raise unknown("form", form, taken, of=repr(name))
        check_options(f"'extend' of {name!r}", options, taken[form])
        check_inputs(name, requires, q, k, v, gate, options.get("scale"), options.get("valid"))
        check_state(side, state, q, k, v, gate)
        with as_given(q):
            return forms.extend(q, k, v, gate, state, form=form, **options)

    return run_checked
