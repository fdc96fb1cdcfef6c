"""A variant's forms as the registry hands them out: their inputs are checked, and no autocast reaches them."""

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


def form_set(module: ModuleType) -> FormSet:
    """What a variant's module ends in.

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
    """The forms of the variant of that name, which is told with a form that is not there.

    Raises:
        UnknownKeyError: asked for another form; the message lists them and names the nearest.
    """

    def __init__(self, name: str, requires: tuple[str, ...], forms: FormSet) -> None:
        super().__init__({form: checked(name, requires, forms, form) for form in forms.forms})
        self.name = name

    def __missing__(self, form: object) -> Callable[..., Any]:
        raise UnknownKeyError(str(unknown("form", form, self, of=repr(self.name))))


def checked(name: str, requires: tuple[str, ...], forms: FormSet, form: str) -> Callable[..., Any]:
    """A form of the variant of that name, whose gate has the parts ``requires``: its options and inputs are checked."""
    run, taken = forms.forms[form], forms.options(form)

    @functools.wraps(run)
    def run_checked(q: Any, k: Any, v: Any, gate: Any, **options: Any) -> Any:
        check_options(f"{form!r} of {name!r}", options, taken)
        check_inputs(name, requires, q, k, v, gate, options.get("scale"), options.get("valid"))
        with as_given(q):
            return run(q, k, v, gate, **options)

    return run_checked


def checked_extend(name: str, requires: tuple[str, ...], side: str, forms: FormSet) -> Callable[..., Any]:
    """The same for its ``extend``, whose ``state`` is checked too: of the ``"linear"`` or the ``"softmax"`` side.

    What it gives raises TypeError or ValueError, as a form does, and ValueError for an unknown ``form``.
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
