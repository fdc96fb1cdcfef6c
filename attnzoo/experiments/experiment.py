"""The declaration of an experiment: arms that differ in one thing, one budget for all, probes, and expectations.

The built-in experiments are the files of `attnzoo.experiments.catalogue`. Each defines ``EXPERIMENT``, and so does a
user's file.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from attnzoo.errors import at_least, several, unknown
from attnzoo.experiments.claims import AtLeast, AtMost, Claim, Value, power
from attnzoo.experiments.probes import Probe
from attnzoo.files import given_by, python_file

CATALOGUE = "attnzoo.experiments.catalogue"


@dataclass(frozen=True)
class Arm:
    """An arm: one of the models that an experiment compares.

    Args:
        name: shown in reports; it also names the folders of its runs.
        variant: the layers' variants, a value of `model.attention`.
        options: options of its layers, beside those of all arms.
        settings: `key=value` of the training, which override the size's.
        lrs: the learning rates to try, where they are not the size's.
        after: an earlier arm with one learning rate, from whose run with the same seed its weights start.
        teacher: an arm that it comes after, directly or not, whose run with the same seed is its `teacher`.
        times: setting -> factor by which its value is that of the size, as `{"steps": 2}` for twice the steps.
        at: size -> options of its layers at that size, which override ``options``; ``variant`` among them replaces the
            variants.
    """

    name: str
    variant: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    lrs: tuple[float, ...] = ()
    after: str = ""
    at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    teacher: str = ""
    times: Mapping[str, float] = field(default_factory=dict)

    def options_at(self, size: str) -> dict[str, Any]:
        """The options of its layers at a size."""
        return {**self.options, **{key: value for key, value in self.at.get(size, {}).items() if key != "variant"}}

    def variant_at(self, size: str) -> Any:
        """The variants of its layers at a size."""
        return self.at.get(size, {}).get("variant", self.variant)

    def __post_init__(self) -> None:
        several(self, "settings", "lrs")


def arms_of(*variants: str) -> tuple[Arm, ...]:
    """Arms named after their variants, without options of their layers."""
    return tuple(Arm(variant, variant) for variant in variants)


@dataclass(frozen=True)
class Size:
    """The budget of an experiment, the same for every arm.

    Args:
        settings: `key=value` of the training: model, data, steps.
        lrs: the learning rates to try for every arm, with the first seed.
        tries: `key=value` of trainings that only try a learning rate, added to `settings`, such as fewer steps. With
            `tries` the search continues beyond `lrs`, along 1, 2, 5, 10, ..., until the best rate has a worse one on
            both sides.
        rows: number of a task's rows that each probe asks.
        tokens: number of held-out tokens that each probe reads.
        after: `key=value` of the training of arms that start from others, added to `settings`.
    """

    settings: tuple[str, ...]
    lrs: tuple[float, ...]
    rows: int = 256
    tokens: int = 65536
    after: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        several(self, "settings", "lrs", "after", "tries")
        at_least(self, 1, "rows", "tokens")
        if not self.lrs:
            raise ValueError("lrs: expected at least one learning rate, got none")


def training(
    steps: int, batch_size: int, context_length: int, model: str, *, warmup: int, eval_tokens: int,
    log_every: int = 100, first: tuple[str, ...] = (), last: tuple[str, ...] = (),
) -> tuple[str, ...]:  # fmt: skip
    """The usual settings of a :class:`Size`.

    Args:
        steps, batch_size, context_length, eval_tokens, log_every: see `TrainConfig` and `DataConfig`.
        model: fields of `ModelConfig`, such as `hidden_size: 64, num_heads: 2`.
        warmup: steps of the learning rate's rise.
        first, last: further settings before these and after them.
    """
    sizes = (f"steps={steps}", f"batch_size={batch_size}", f"data.context_length={context_length}")
    logs = (f"log_every={log_every}", f"eval_tokens={eval_tokens}")
    return (*first, *sizes, *logs, f"model={{{model}}}", f"optimizer.warmup_steps={warmup}", *last)


@dataclass(frozen=True)
class Expectation:
    """An expectation of an experiment's outcome, with its source.

    Args:
        text: the expectation in a sentence.
        source: the paper, with the table, figure or section.
        claim: the claim about the runs.
        sizes: sizes at which it is judged; empty for all.
    """

    text: str
    source: str
    claim: Claim
    sizes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        several(self, "sizes")
        if not hasattr(self.claim, "judge"):
            raise ValueError(f"claim: expected one, as AtMost(Value(...), 0.01), got {self.claim!r}")


@dataclass(frozen=True)
class Grid:
    """A table of arms on the page, coloured by one number of them.

    Args:
        title: above it.
        rows: names at the left.
        columns: names on top.
        arms: in its fields, row by row; an empty name leaves a field empty.
        probe: what is shown.
        at: at which place; None for the largest.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    arms: tuple[tuple[str, ...], ...]
    probe: str
    at: float | None = None


@dataclass(frozen=True)
class Overlay:
    """A figure of several arms' numbers, with standard errors over the seeds.

    Args:
        title: above it.
        axis: what the numbers are.
        curves: label, arm and probe of each, over the places of the probes, which are the same.
        points: label, arm, probe of the place and probe of the number of each, at their only places.
    """

    title: str
    axis: str
    curves: tuple[tuple[str, str, str], ...]
    points: tuple[tuple[str, str, str, str], ...] = ()

    @property
    def values(self) -> list[Value]:
        """The values that it shows."""
        return [Value(arm, probe) for _, arm, *probes in (*self.curves, *self.points) for probe in probes]


@dataclass(frozen=True)
class Measured:
    """A recorded result in the documentation.

    Args:
        size: size of the experiment.
        date: as 2026-01-31.
        machine: the machine that it ran on.
        result: the file in docs/results.
        tried: what else was tried where a claim was not seen, or was decided after the numbers were in.
        lacks: arms of which it has no runs: those that came after it, or for which time was short.
        seeds: runs that each other arm has at least; fewer than three only where ``tried`` says so.
    """

    size: str
    date: str
    machine: str
    result: str
    tried: str = ""
    lacks: tuple[str, ...] = ()
    seeds: int = 3

    def __post_init__(self) -> None:
        several(self, "lacks")
        at_least(self, 1, "seeds")


@dataclass(frozen=True)
class Experiment:
    """An experiment: arms, budgets, probes and expectations.

    Args:
        title: the heading of its page.
        question: what it asks, and how, in a few sentences.
        arms: what is compared.
        sizes: by name; `cpu` ends within 15 minutes on two cores, `gpu` within 15 on one H200.
        probes: what is measured of every run.
        expectations: what is judged.
        settings: `key=value` of the training, for all arms and sizes.
        options: of the layers of all arms.
        seeds: runs per arm.
        grids: tables of arms that the page shows.
        overlays: pictures of several arms and probes, at the top of the page.
        maps: probes with the same places, which the page shows as a table of places and probes for each arm.
        measured: results that are recorded.

    Raises:
        ValueError: names that are given twice, no arms, a claim about an arm, a probe or a place that is not there, a
            size that is not, of a claim or of an arm's options, or one thing in place of a tuple.
    """

    title: str
    question: str
    arms: tuple[Arm, ...]
    sizes: Mapping[str, Size]
    probes: tuple[Probe, ...]
    expectations: tuple[Expectation, ...]
    settings: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 3
    grids: tuple[Grid, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    maps: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        several(self, "arms", "probes", "expectations", "settings", "grids", "overlays", "maps", "measured")
        at_least(self, 2, "seeds")
        if not isinstance(self.sizes, Mapping) or not self.sizes:
            raise ValueError(f'sizes: expected some by name, as {{"cpu": Size(...)}}, got {self.sizes!r}')
        for kind in ("arms", "probes"):
            names = [thing.name for thing in getattr(self, kind)]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"{kind}: expected some, with distinct names, got {', '.join(names) or 'none'}")
        for probe in self.probes:
            if hasattr(probe, "at"):
                several(probe, "at", of=f"the probe {probe.name!r}")
        self._check_sizes()
        self._check_values()
        for number, arm in enumerate(self.arms):
            if arm.after and arm.after not in self.arm_names[:number]:
                raise unknown("after", arm.after, self.arm_names[:number], of=f"the arm {arm.name!r}")
            if arm.teacher and arm.teacher not in (before := self.before(arm)):
                raise unknown("teacher", arm.teacher, before, of=f"the arm {arm.name!r}")
        for each in self.measured:
            for name in each.lacks:
                if name not in self.arm_names:
                    raise unknown("lacks", name, self.arm_names, of=f"the result {each.result!r}")

    def _check_sizes(self) -> None:
        """Raise where arms or expectations name an unknown size."""
        named = [(size, f"the expectation {each.text!r}") for each in self.expectations for size in each.sizes]
        named += [(size, f"the arm {arm.name!r}") for arm in self.arms for size in arm.at]
        for size, of in named:
            if size not in self.sizes:
                raise unknown("size", size, self.sizes, of=of)

    def _check_values(self) -> None:
        """Raise where claims or figures name an unknown arm, probe or place."""
        claimed = [value for expectation in self.expectations for value in expectation.claim.values]
        gridded = [Value(arm, grid.probe, grid.at) for grid in self.grids for row in grid.arms for arm in row if arm]
        shown = [value for overlay in self.overlays for value in overlay.values]
        probes = {probe.name: getattr(probe, "at", None) for probe in self.probes}
        for value in (*claimed, *gridded, *shown, *(Value(self.arms[0].name, probe) for probe in self.maps)):
            if value.arm not in self.arm_names:
                raise unknown("arm", value.arm, self.arm_names, of="a claim or a picture")
            if value.probe not in probes:
                raise unknown("probe", value.probe, probes, of="a claim or a picture")
            places = probes[value.probe]
            if places is not None and value.at is not None and value.at not in places:
                known = ", ".join(f"{place:g}" for place in places)
                raise ValueError(
                    f"at: expected a place of {value.probe!r}, {known}, got {value.at:g} for {value.arm!r}"
                )
        shares = {probe.name for probe in self.probes if probe.percent}
        for claim in (one for each in self.expectations for one in getattr(each.claim, "claims", (each.claim,))):
            if isinstance(claim, AtMost | AtLeast) and claim.value.probe in shares and not 0 < claim.limit < 1:
                raise ValueError(
                    f"limit: expected a share between 0 and 1 of {claim.value}, got {claim.limit:g}: such a claim is "
                    "always seen or never"
                )

    @property
    def arm_names(self) -> list[str]:
        return [arm.name for arm in self.arms]

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return self.arms[self.arm_names.index(name)]

    def before(self, arm: Arm) -> list[str]:
        """The names of the arms that one comes after, the nearest first."""
        return [arm.after, *self.before(self.arm(arm.after))] if arm.after else []

    def judged(self, size: str) -> list[Expectation]:
        """The expectations that can be judged at a size."""
        return [expectation for expectation in self.expectations if size in (expectation.sizes or [size])]


def rate_in_words(lr: float) -> str:
    """A learning rate in six digits if these are exact, else in all digits."""
    return f"{lr:g}" if float(f"{lr:g}") == lr else repr(float(lr))


def layers_of(experiment: Experiment, arm: Arm, size: str = "") -> str:
    """A description of an arm's layers and training as far as arms differ, at a size or at all sizes."""
    given = [f"{key}={value}" for key, value in {**experiment.options, **arm.options_at(size)}.items()]
    rates = [f"learning rates {', '.join(map(rate_in_words, arm.lrs))}"] if arm.lrs else []
    after = [f"from the weights of {arm.after}"] if arm.after else []
    after += [f"with the teacher {arm.teacher}"] if arm.teacher else []
    others = {} if size else arm.at
    elsewhere = [f"at size {name} {key}={value}" for name, own in others.items() for key, value in own.items()]
    times = [f"{factor:g} × {key}" for key, factor in arm.times.items()]
    return ", ".join([str(arm.variant_at(size)), *given, *arm.settings, *times, *rates, *after, *elsewhere])


def cost_of(experiment: Experiment, name: str) -> str:
    """A description of the settings, learning rates and measurements of a size."""
    size = find_size(experiment, name)
    kinds = {getattr(probe, "task", None) for probe in experiment.probes}
    settings = {setting.partition("=")[0]: setting for setting in (*experiment.settings, *size.settings)}
    words = f"{' '.join(settings.values())}; "
    words += f"learning rates {', '.join(map(rate_in_words, size.lrs))}"
    words += (
        f", and further ones until the best lies between two, tried with {' '.join(size.tries)}" if size.tries else ""
    )
    words += f"; models that start from others: {' '.join(size.after)}" if size.after else ""
    if any(hasattr(probe, "guess") for probe in experiment.probes):
        words += f"; measured on {size.rows:,} rows {'of the task' if True in kinds else 'with a needle'}"
    return words + (f"; measured on {size.tokens:,} tokens of held-out text" if False in kinds else "")


def meanings_of(experiment: Experiment) -> dict[str, str]:
    """The first paragraph of each probe class's docstring -> the names of its probes, with their options."""
    found: dict[str, list[str]] = {}
    for probe in experiment.probes:
        words = " ".join((inspect.getdoc(type(probe)) or "").partition("\n\n")[0].replace("``", "`").split())
        found.setdefault(words, []).append(probe.name + _options_of(probe))
    return {words: "; ".join(named) for words, named in found.items()}


def _options_of(probe: Probe) -> str:
    if not is_dataclass(probe):
        return ""
    options = [option for option in fields(probe) if option.name not in ("name", "places", "percent")]
    values = {option.name: (getattr(probe, option.name), option.default) for option in options}
    given = ", ".join(f"{name}={value}" for name, (value, default) in values.items() if value not in (default, (), {}))
    return f" ({given})" if given else ""


def power_of(experiment: Experiment, seeds: int, size: str = "") -> list[str]:
    """What the tests of the expectations see with so many seeds, at a size or at all sizes: a line for each kind."""
    judged = experiment.judged(size) if size else experiment.expectations
    return list(dict.fromkeys(line for each in judged for line in power(each.claim, seeds)))


def names() -> list[str]:
    """The names of the built-in experiments."""
    return sorted(path.stem for path in Path(__file__).with_name("catalogue").glob("[!_]*.py"))


def find(name: str) -> Experiment:
    """An experiment by its name, or from a file that ends in ``EXPERIMENT``.

    Raises:
        ValueError: neither is there (the built-in names are listed, and the nearest one is named), or the file fails.
        TypeError: a file without an Experiment of that name.
    """
    if name in names():
        return importlib.import_module(f"{CATALOGUE}.{name}").EXPERIMENT  # type: ignore[no-any-return]
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise unknown("experiment", name, names(), python_file(name), see="attnzoo experiment list")
    experiment = given_by(path, "EXPERIMENT")
    if not isinstance(experiment, Experiment):
        raise TypeError(f"{path}: expected an Experiment as EXPERIMENT, got {experiment!r}")
    return experiment


def find_size(experiment: Experiment, size: str) -> Size:
    """A size by its name.

    Raises:
        ValueError: no such size.
    """
    if size not in experiment.sizes:
        raise unknown("size", size, experiment.sizes)
    return experiment.sizes[size]
