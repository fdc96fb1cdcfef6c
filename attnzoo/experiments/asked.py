"""Orderings of models that somebody asks of an experiment on the command line, in place of its own expectations."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from attnzoo import registry
from attnzoo.errors import unknown
from attnzoo.experiments.claims import Value, in_order
from attnzoo.experiments.experiment import Arm, Expectation, Experiment
from attnzoo.settings import read_settings


def asked(experiment: Experiment, claims: Sequence[str]) -> Experiment:
    """The experiment with the models and expectations of ``claims`` alone; without any, as it is.

    A claim is an ordering, ``fox < rope`` or ``L(i) @ 4: fox < rope < nope``: of the first probe or a named one, at its
    largest place or a given one. A model is an arm of the experiment, or a variant with options of its layers beside
    those of all arms, as in ``fox block=llama qk_norm=rms``, or ``FILE.py:NAME`` for a variant of one's own.

    Raises:
        ValueError: no ordering, an unknown arm, variant, probe or place.
    """
    if not claims:
        return experiment
    arms: dict[str, Arm] = {}
    expectations = []
    for claim in claims:
        [(head, order)] = re.findall(r"(?s)^(?:([^<]*?)(?<!\.py):)?(.*)$", claim)
        probe, _, at = (part.strip() for part in head.partition("@"))
        names = [name.strip() for name in order.split("<")]
        if len(names) < 2 or not all(names) or len(set(names)) < len(names):
            raise ValueError(f"claim: expected an ordering of models, each once, as 'fox < rope', got {claim!r}")
        try:
            place = float(at) if at else None
        except ValueError:
            raise ValueError(f"claim: expected a number behind @, got {at!r} in {claim!r}") from None
        probe = probe or experiment.probes[0].name
        arms |= {each.name: each for name in names for each in _with_those_before(experiment, name)}
        ordered = in_order(*(Value(name, probe, place) for name in names))
        expectations.append(Expectation(f"{probe}{f' at {at}' if at else ''}: {' < '.join(names)}.", "asked", ordered))
    own = [name for name in experiment.arm_names if name in arms]
    shown = tuple(arms[name] for name in dict.fromkeys([*own, *arms]))
    return replace(experiment, arms=shown, expectations=tuple(expectations), grids=(), overlays=(), measured=())


def _with_those_before(experiment: Experiment, name: str) -> list[Arm]:
    """The arm of that name, after those that it comes after; or that of a variant with options."""
    if name in experiment.arm_names:
        arm = experiment.arm(name)
        return [*map(experiment.arm, reversed(experiment.before(arm))), arm]
    try:
        variant, *options = shlex.split(name)
    except ValueError as error:
        raise ValueError(f"claim: expected a variant with options as in a shell, got {name!r} ({error})") from None
    if ".py" in variant:
        variant, *others = registry.names_of(variant)
        if others:
            raise ValueError(f"claim: expected FILE.py:NAME with one of {variant}, {', '.join(others)}, got {name!r}")
    variants = *registry.list_variants(), *registry.list_variants("other")
    if variant not in variants:
        known = dict.fromkeys([*experiment.arm_names, *variants])
        raise unknown("arm", name, known, "a variant with options, as 'fox block=llama', or FILE.py:NAME")
    try:
        return [Arm(name, variant, read_settings(options))]
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"claim: expected options that can be read, as 'window=512', got {name!r}") from error
