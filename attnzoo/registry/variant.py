"""A variant: one side of a pair, or another readout of a pair's gate, with its forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, cast

from torch import Tensor

from attnzoo.algebra import oracle
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.readout import Readout
from attnzoo.algebra.transitions import Transition
from attnzoo.errors import unknown
from attnzoo.forms.checked import CheckedForms, checked_extend
from attnzoo.forms.protocol import REFERENCE, Call, Forms, FormSet
from attnzoo.forms.weighed import ReadoutForms
from attnzoo.parallel.attention import shared
from attnzoo.registry.pair import Pair, Side
from attnzoo.registry.readout_variant import ReadoutVariant


@dataclass(frozen=True)
class Variant:
    """One side of a pair.

    Args:
        name: registry name.
        side: ``"linear"``, ``"softmax"``, or ``"other"`` for another readout of a pair's gate.
        title: name in print.
        paper: source.
        requires: the gate parts it takes, all of them and no others.
        pair: its row of the table; of another readout, that of its gate.
        forms: name -> ``form(q, k, v, gate, *, ...) -> [B, T, H, V]``, inputs checked; see :meth:`options`. An unknown
            name raises a KeyError that is a ValueError, too, and lists the forms.
        extend: ``extend(q, k, v, gate, state=None, *, form="reference", ...) -> (o, state)``, for one token or many.
        module: the module of the forms.
        form_set: the module's ``FORMS``, whose :meth:`~attnzoo.forms.protocol.Forms.whole` checks no inputs.
        own: whether its forms and their transition are this package's: those take the inputs of a layer unchecked.
        lookup: :func:`attnzoo.get`.
    """

    name: str
    side: Side
    title: str
    paper: str
    requires: tuple[str, ...]
    pair: Pair
    forms: Mapping[str, Callable[..., Any]] = field(repr=False)
    extend: Callable[..., Any] = field(repr=False)
    module: ModuleType = field(repr=False)
    form_set: FormSet = field(repr=False)
    own: bool = field(repr=False)
    lookup: Callable[[str], Variant] = field(repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.lookup, (self.name,)  # copies and pickles of a layer have the name alone

    @property
    def dual(self) -> Variant:
        """The variant on the other side of its pair; of another readout, the softmax side."""
        return self.lookup(self.pair.linear if self.side == "softmax" else self.pair.softmax)

    def options(self, form: str = REFERENCE) -> tuple[str, ...]:
        """The keyword options that a form honours; ``"reference"``: those of ``extend``.

        Raises:
            ValueError: no such form; the message lists them and names the nearest.
        """
        if form not in (known := (REFERENCE, *self.forms)):
            raise unknown("form", form, known, of=repr(self.name))
        return self.form_set.options(form)

    def refuses(self, form: str, call: Call) -> str:
        """The reason why a form cannot serve a call, or ""."""
        return self.form_set.refuses(form, call)

    @property
    def transition(self) -> Transition | None:
        """The transition R_t of its pair's linear forms; None where they have none."""
        own = self.dual if self.side == "softmax" else self
        return getattr(own.form_set, "transition", None)

    @property
    def readout(self) -> Readout | None:
        """The readout that its forms apply to scores and decays; None for the linear and the softmax one."""
        return getattr(self.form_set, "readout", None)

    @property
    def causal(self) -> bool:
        """Whether no output depends on later tokens."""
        return self.readout is None or self.readout.causal

    @property
    def oracle(self) -> Callable[..., Tensor]:
        """The float64 reference of its forms, ``(q, k, v, gate, *, scale=None) -> [B, T, H, V]``: its side's readout
        over the matrices of :attr:`transition`."""
        if self.readout is not None:
            return functools.partial(oracle.weighed, readout=self.readout, transition=self.transition)
        readout = oracle.linear if self.side == "linear" else oracle.softmax
        return functools.partial(cast(Callable[..., Tensor], readout), transition=self.transition)

    @property
    def note(self) -> str:
        return self.pair.note

    @property
    def prunable(self) -> bool:
        """Whether Adaptive Computation Pruning can be certified: a softmax with a scalar decay, whose transition makes
        no vector longer.
        """
        return self.side == "softmax" and "log_decay" in self.requires and not self.expands

    @property
    def truncates(self) -> bool:
        """Whether Adaptive Computation Pruning leaves out states: a recurrence whose chunk kernels do, by its scalar
        decay."""
        honoured = getattr(getattr(self.form_set, "kernels", {}).get("triton"), "honours", None) or ()
        return self.side == "linear" and "log_decay" in self.requires and "prune" in honoured

    @property
    def expands(self) -> bool:
        """Whether its transition may make a vector longer."""
        made = getattr(getattr(self.form_set, "transition", None), "expands", False)
        return made or any(PARTS[part].expands for part in self.requires)

    @property
    def carries(self) -> bool:
        """Whether its gate carries keys: it has more than a scalar decay."""
        return any(PARTS[part].carries for part in self.requires)


def with_readout(base: Variant, one: ReadoutVariant) -> Variant:
    """The variant of another readout, of the gate of ``base``.

    Raises:
        ValueError: a gate without a transition.
    """
    if base.transition is None:
        raise ValueError(f"variant {one.name!r}: expected a gate with a transition, got that of {one.of!r}")
    forms, name = ReadoutForms(base.transition, one.readout), one.name
    requires = (*base.requires, *one.readout.parts)
    module = ModuleType(f"attnzoo.readouts.{name}", f"Another readout of the gate of {one.of}.")
    layer = dict(getattr(base.module, "LAYER", {}))
    gate, own = layer.get("gate", "none"), [PARTS[part].projections for part in one.readout.parts]
    gates = gate if isinstance(gate, list | tuple) else () if gate == "none" else (gate,)
    if gates or not base.requires:
        layer["gate"] = (*gates, *(each[0] for each in own if each)) or "none"
    module.__dict__.update(FORMS=forms, LAYER=layer | dict(one.layer))
    return Variant(
        name=name,
        side="other",
        title=one.title or name,
        paper=one.readout.paper,
        requires=requires,
        pair=base.pair,
        forms=MappingProxyType(CheckedForms(name, requires, forms, shared)),
        extend=checked_extend(name, requires, "other", forms),
        module=module,
        form_set=forms,
        own=is_own(forms),
        lookup=base.lookup,
    )


def is_own(forms: FormSet) -> bool:
    """Whether forms, and the transition and readout that they are of, are this package's."""
    transition = getattr(forms, "transition", None)
    made_of = (forms, getattr(forms, "readout", None), *getattr(transition, "factors", (transition,)))
    ours = all(type(one).__module__.startswith("attnzoo.") for one in made_of if one is not None)
    return ours and isinstance(forms, Forms)
