"""The protocol of ``FORMS``, the object in a variant's file that has all forms of the variant.

The registry, the layer and ``attnzoo verify`` know a variant only through the four members of :class:`FormSet`.
:class:`Forms` implements them for a set of reference forms and any number of :class:`Kernel`; the two sides
(:class:`~attnzoo.forms.linear.LinearForms`, :class:`~attnzoo.forms.softmax.SoftmaxForms`) derive from it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import nearest
from attnzoo.forms.options import Options

REFERENCE = "reference"  # the form in plain PyTorch, which runs everywhere


@dataclass(frozen=True, eq=False)
class Call:
    """The inputs and options of one call, by which a form decides whether it can serve it.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, G, K]``.
        v: ``[B, T, G, V]``.
        gate: the parts that the variant requires.
        state: the state of an earlier call, or None.
        keeps_state: whether the state after the last token is to be returned.
        options: the keyword options of the call, by name, without those that are at their defaults: a mapping, or the
            :class:`~attnzoo.forms.options.Options` of a layer, which is one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    state: Any = None
    keeps_state: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class FormSet(Protocol):
    """The members that ``FORMS`` of a variant's module must have."""

    @property
    def forms(self) -> Mapping[str, Callable[..., Any]]:
        """Every form by name: ``form(q, k, v, gate, *, ...) -> [B, T, H, V]``."""

    def options(self, form: str) -> tuple[str, ...]:
        """The keyword options that a form honours; ``"reference"`` stands for :meth:`extend` without a ``form``."""

    def refuses(self, form: str, call: Call) -> str:
        """The reason why a form cannot serve a call on these tensors and this machine, or ""."""

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any = None, *, form: str = REFERENCE, **options: Any
    ) -> tuple[Any, Any]:
        """The output of one or more tokens after ``state`` (None: empty) by ``form``, and the new state.

        Returns:
            The form's output, and the state after the last token. Every form with states takes those of every other
            form of the variant, ``"reference"`` included.
        """


def _serves(call: Call) -> str:
    return ""


@dataclass(frozen=True)
class Kernel:
    """A form beside the reference forms: a fused kernel, or another library.

    Args:
        run: ``run(q, k, v, gate, options) -> [B, T, H, V]`` with the options of its side as one object
            (:mod:`attnzoo.forms.options`), checked. Where ``honours`` is None: ``run(q, k, v, gate, *, ...)``, whose
            keyword-only parameters are the options it honours.
        extend: ``extend(q, k, v, gate, state, options) -> (output, state)``, or by keyword as ``run``; None where it
            has no states.
        refuses: a function of a :class:`Call` that returns why it cannot be served, or "". It need not check the
            options' names.
        explain: a function of a :class:`Call` that returns the kernels it runs on, and why no faster ones, or "".
        brief: whether the kernel is for a few tokens at a time, so that refusing more is not reported.
        parts: gate parts that the kernel reads; None for all.
        in_place: ``in_place(state, rows, tokens, device)`` returns an in-place memory for the kernel's steps
            (:mod:`attnzoo.forms.caches.inplace`), or None where it has none.
        honours: names of the options that the kernel takes.
        doubts: a function of a :class:`Call` that returns why ``impl="auto"`` does not take the kernel although it
            serves, or "".
        steps_whole: whether a layer's step of one token may run on the fused kernels of ``attnzoo.kernels.linear``.
    """

    run: Callable[..., Any]
    extend: Callable[..., tuple[Any, Any]] | None = None
    refuses: Callable[[Call], str] = _serves
    explain: Callable[[Call], tuple[str, str]] | None = None
    brief: bool = False
    in_place: Callable[..., Any] | None = None
    parts: frozenset[str] | None = None
    honours: frozenset[str] | None = None
    doubts: Callable[[Call], str] = _serves
    steps_whole: bool = False

    def whole(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Options) -> Any:
        """The output for whole sequences."""
        if self.honours is None:
            return self.run(q, k, v, gate, **options.given())
        return self.run(q, k, v, gate, options)

    def go_on(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any, options: Options) -> tuple[Any, Any]:
        """The output after ``state``, and the new state."""
        assert self.extend is not None
        if self.honours is None:
            return self.extend(q, k, v, gate, state, **options.given())
        return self.extend(q, k, v, gate, state, options)

    def takes(self, steps: bool, whole: Sequence[str]) -> frozenset[str]:
        """The names of the options honoured on whole sequences, or in ``steps``, where options in ``whole`` do not
        exist."""
        if self.honours is not None:
            return self.honours.difference(whole) if steps else self.honours
        function = self.extend if steps else self.run
        return frozenset() if function is None else frozenset(keywords(function))

    def knows(self, parts: Iterable[str]) -> bool:
        """Whether the kernel reads all of these gate parts."""
        return self.parts is None or self.parts.issuperset(parts)


def is_brief(forms: FormSet, form: str) -> bool:
    """Whether a form is a kernel for a few tokens at a time."""
    kernel = getattr(forms, "kernels", {}).get(form)
    return kernel is not None and kernel.brief


def doubts(forms: FormSet, form: str, call: Call) -> str:
    """The reason why ``impl="auto"`` does not take a form although it serves the call, or ""."""
    kernel = getattr(forms, "kernels", {}).get(form)
    return "" if kernel is None else kernel.doubts(call)


@dataclass(frozen=True)
class Forms:
    """Reference forms and kernels of one variant; see :class:`FormSet`.

    Args:
        kernels: kernels by the name of their form; ``impl="auto"`` tries ``"triton"``, ``"fla"`` and ``"sdpa"`` on a
            GPU.
    """

    REFERENCES: ClassVar[tuple[str, ...]] = ()  # reference forms of whole sequences
    OPTIONS: ClassVar[type[Options]]  # dataclass of the options
    STATE: ClassVar[type]  # class of the state
    WHOLE: ClassVar[tuple[str, ...]] = ("cu_seqlens",)  # options that exist for whole sequences alone
    OF_KERNELS: ClassVar[tuple[str, ...]] = ()  # options that change nothing in the reference forms

    kernels: Mapping[str, Kernel] = field(default_factory=dict, kw_only=True)

    @property
    def forms(self) -> Mapping[str, Callable[..., Any]]:
        return {name: getattr(self, name) for name in self.REFERENCES} | {
            name: self._by_keyword(kernel) for name, kernel in self.kernels.items()
        }

    def _by_keyword(self, kernel: Kernel) -> Callable[..., Any]:
        """The form of a kernel, with its options by keyword, checked."""
        if kernel.honours is None:
            return kernel.run

        @functools.wraps(kernel.run)
        def form(q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Any:
            given = self.OPTIONS(**options)
            self.check(q, k, v, gate, given)
            return kernel.whole(q, k, v, gate, given)

        return form

    def options(self, form: str) -> tuple[str, ...]:
        return self._taken(form, steps=form == REFERENCE)

    def _taken(self, form: str, steps: bool) -> tuple[str, ...]:
        """The options that a form honours on whole sequences, or in ``steps``, in the order of their declaration."""
        names: tuple[str, ...] = self.OPTIONS.__match_args__  # its fields
        kernel = self.kernels.get(form)
        if kernel is None:
            left_out = (*self.OF_KERNELS, *self.WHOLE) if steps else self.OF_KERNELS
            return tuple(name for name in names if name not in left_out)
        taken = kernel.takes(steps, (*self.OF_KERNELS, *self.WHOLE))
        return (*(name for name in names if name in taken), *sorted(taken.difference(names)))

    def refuses(self, form: str, call: Call) -> str:
        kernel = self.kernels.get(form)
        if kernel is None and form not in (REFERENCE, *self.REFERENCES):
            return f"there is no {form} form (there is {', '.join(self.forms)})"
        if kernel is not None and call.keeps_state and kernel.extend is None:
            return f"the {form} form serves whole sequences and keeps no state"
        for name in call.options:
            if name not in (taken := self._taken(form, call.keeps_state)):
                return f"the {form} form has no option {name} here (it takes {', '.join(taken)})"
        if kernel is None:
            return ""
        if not kernel.knows(call.gate.parts):
            return f"the {form} form reads no gate part but {', '.join(sorted(kernel.parts or ()))}"
        return kernel.refuses(call)

    def check(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Any) -> None:
        """Raise where the options do not fit the inputs, or the inputs do not fit each other.

        Raises:
            TypeError, ValueError: an input or option that does not fit.
        """
        raise NotImplementedError

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any = None, *, form: str = REFERENCE, **options: Any
    ) -> tuple[Any, Any]:
        """The output of one or more tokens after ``state`` (None: empty), and the new state; see
        :meth:`FormSet.extend`.

        Raises:
            TypeError: a state of another kind.
            ValueError: a form without states.
        """
        kernel = self.kernels.get(form)
        if kernel is not None and kernel.honours is None and kernel.extend is not None:
            self.check_state(state)
            return kernel.extend(q, k, v, gate, state, **options)
        given = self.OPTIONS(**options)
        self.check(q, k, v, gate, given)
        return self.go_on(form, q, k, v, gate, state, given)

    def check_state(self, state: Any) -> None:
        """Raise where ``state`` is neither None nor of this side's class.

        Raises:
            TypeError: another object.
        """
        if state is not None and not isinstance(state, self.STATE):
            raise TypeError(f"state: expected attnzoo.{self.STATE.__name__} or None, got {type(state).__name__}")

    def whole(self, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Any) -> Any:
        """The output for whole sequences of a kernel, or of the side's fastest reference form (``REFERENCE``).

        Inputs and options have been checked.
        """
        return self.kernels[form].whole(q, k, v, gate, options)

    def go_on(
        self, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any, options: Any
    ) -> tuple[Any, Any]:
        """:meth:`extend` with inputs and options that have been checked."""
        self.check_state(state)
        if form == REFERENCE:
            return self._extend(q, k, v, gate, state, options)
        kernel = self.kernels.get(form)
        if kernel is None or kernel.extend is None:
            able = [name for name, kernel in self.kernels.items() if kernel.extend is not None]
            raise ValueError(f"form: expected one that keeps a state ({', '.join((REFERENCE, *able))}), got {form!r}")
        return kernel.go_on(q, k, v, gate, state, options)

    def _extend(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any, options: Any) -> tuple[Any, Any]:
        """The reference form's ``extend``, which each side implements."""
        raise NotImplementedError


def keywords(run: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the keyword-only parameters of a function."""
    parameters = inspect.signature(run).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def check_options(what: str, given: Iterable[str], taken: Iterable[str]) -> None:
    """Raise where a given option is not among ``taken``.

    Raises:
        TypeError: an unknown option; the message lists the known ones and the nearest.
    """
    taken = tuple(taken)
    for name in given:
        if name not in taken:
            close = nearest(name, taken)
            meant = f"; did you mean {close!r}?" if close else ""
            listed = ", ".join(taken) or "none"
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}: it takes {listed}{meant}")
