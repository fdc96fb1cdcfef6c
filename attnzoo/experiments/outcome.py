"""The outcome of an experiment: the numbers of every run, and their file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnzoo.evaluation.answers import Guess
from attnzoo.experiments.claims import UNDECIDED, Claim, Value, Verdict
from attnzoo.experiments.experiment import Expectation, Experiment
from attnzoo.experiments.statistics import Array
from attnzoo.files import json_digest, parse_json, write_whole

BETTER = 4.0  # standard errors by which an error must be below a guess's to count as learnt


@dataclass(frozen=True)
class Trained:
    """The numbers of one run.

    Args:
        arm: name of the arm.
        lr: peak learning rate.
        seed: seed of weights and data.
        validation: held-out loss at the end of training, nats; infinite where it diverged.
        values: the probes' numbers: probe -> place -> number. Empty where only the learning rate was tried.
        parameters: number of trained parameters.
        tokens: number of training tokens.
        seconds: time of the training.
        note: the reason why it has no numbers.
        date: date of the measurement, as 2026-01-31.
        guesses: errors of a constant answer: probe -> place -> guess. Empty where no answers are asked.
        key: digest of its settings, text and probes.
        weights: identity of the weights that were measured; empty if none were.
        machine: that of the result that it was taken from; empty if it was made where its result was.
        curve: the training losses that were logged: tokens read, and the loss of that step's batch, nats per token.
    """

    arm: str
    lr: float
    seed: int
    validation: float
    values: Mapping[str, Mapping[float, float]]
    parameters: int = 0
    tokens: int = 0
    seconds: float = 0.0
    note: str = ""
    date: str = ""
    guesses: Mapping[str, Mapping[float, Guess]] = field(default_factory=dict)
    key: str = ""
    weights: str = ""
    machine: str = ""
    curve: tuple[tuple[int, float], ...] = ()

    def betters(self, probe: str, by: float = BETTER) -> bool:
        """Whether a probe's number, at any place, is better than a guess by ``by`` standard errors.

        The standard error includes the model's own, as a guess that is never right has none.
        """
        values = self.values.get(probe, {})
        guesses = {place: self.guesses[probe][place] for place in values}
        return any(_betters(values[place], guess, by) for place, guess in guesses.items())


@dataclass(frozen=True)
class Outcome:
    """The outcome of an experiment: the numbers of all runs.

    Args:
        experiment: name of the experiment.
        size: name of the size.
        runs: the measured runs, by arm and then by seed.
        tried: the runs that chose the learning rates, of one seed, by arm and then by rate.
        date: date of the last run, as 2026-01-31.
        command: the command line.
        machine: name of the machine.
        settings: configuration of the first run, as YAML.
        planned: planned runs per arm; 0 where unknown.
    """

    experiment: str
    size: str
    runs: tuple[Trained, ...]
    tried: tuple[Trained, ...]
    date: str
    command: str
    machine: Mapping[str, str]
    settings: str
    planned: int = 0

    def of(self, arm: str) -> list[Trained]:
        """The measured runs of an arm."""
        return [run for run in self.runs if run.arm == arm]

    def places(self, arm: str, probe: str) -> list[float]:
        """The places at which a probe measured the runs of an arm; empty if there was nothing to measure."""
        return sorted({place for run in self.of(arm) for place in run.values.get(probe, {})})

    def values(self, value: Value) -> Array:
        """The number of every run of an arm by seed, ``[seeds]``; nan for runs without it.

        Raises:
            ValueError: a place where nothing was measured.
        """
        places = self.places(value.arm, value.probe)
        at = value.at if value.at is not None or not places else places[-1]
        if places and at not in places:
            known = ", ".join(f"{place:g}" for place in places)
            raise ValueError(f"at: expected a place of {value.probe!r}, {known}, got {at:g}")
        found = [run.values.get(value.probe, {}).get(at, math.nan) for run in self.of(value.arm)]  # type: ignore[arg-type]
        return np.array(found, dtype=np.float64)

    def verdicts(self, experiment: Experiment) -> list[tuple[Expectation, Verdict]]:
        """The verdict of each expectation that can be judged at this size."""
        return [(each, self.verdict(each.claim)) for each in experiment.judged(self.size)]

    def verdict(self, claim: Claim) -> Verdict:
        """The verdict of a claim; undecided while its runs are missing, or where no model is better than a guess."""
        missing = self.missing(claim)
        if missing:
            return Verdict(UNDECIDED, "; ".join(missing))
        verdict = claim.judge(self.values)
        if any(value.probe in self.unlearnt() for value in claim.values):
            return Verdict(UNDECIDED, f"{verdict.why}; no model is better than a guess")
        return verdict

    def unlearnt(self) -> dict[str, float]:
        """The probes in which no run is better than a guess, with the guess's share of wrong answers."""
        found = {}
        for probe in {probe: None for run in self.runs for probe in run.guesses}:
            asked = [run for run in self.runs if run.values.get(probe) and run.guesses.get(probe)]
            spreads = [guess.uncertainty for run in asked for guess in run.guesses[probe].values()]
            if asked and all(map(math.isfinite, spreads)) and not any(run.betters(probe) for run in asked):
                found[probe] = min(guess.wrong for guess in asked[0].guesses[probe].values())
        return found

    def guess(self, probe: str, place: float) -> float | None:
        """The error of a guess at a place of a probe; None where no answers are asked, or others of each arm."""
        found = {run.guesses[probe][place].wrong for run in self.runs if place in run.guesses.get(probe, {})}
        return found.pop() if len(found) == 1 else None

    def missing(self, claim: Claim) -> list[str]:
        """Descriptions of the claim's arms that have fewer runs than planned, or lack the probe."""
        counts = {value.arm: len(self.of(value.arm)) for value in claim.values}
        few = [f"{arm}: {n} of {self.planned} seeds" for arm, n in counts.items() if n < max(self.planned, 1)]
        ended = {arm: [run for run in self.of(arm) if not run.note] for arm in counts}
        asked = dict.fromkeys((value.arm, value.probe) for value in claim.values)
        lacking = [(arm, probe) for arm, probe in asked if any(not run.values.get(probe) for run in ended[arm])]
        return few or [f"{arm}: {probe} was not measured" for arm, probe in lacking]


def save_outcome(outcome: Outcome, path: Path) -> None:
    """Write an outcome as JSON, whole or not at all."""
    kept = asdict(replace(outcome, runs=(), tried=()))
    for name in ("runs", "tried"):
        kept[name] = [as_json(run) for run in getattr(outcome, name)]
    text = json.dumps({**kept, "digest": json_digest(kept)}, indent=1)
    write_whole(path, re.sub(r"\[\s+([^][{}\"\s]+,)\s+([^][{}\"\s,]+)\s+\]", r"[\1 \2]", text) + "\n")  # a pair, a line


def load_outcome(path: Path, option: str = "") -> Outcome:
    """Read what `save_outcome` wrote; errors begin with the option that names the file.

    Raises:
        ValueError: the file is not what was written.
    """
    try:
        kept = parse_json(path.read_text(encoding="utf-8"))
        if kept.pop("digest") != json_digest(kept):
            raise ValueError("its content is not what was written")
        runs = {name: tuple(from_json(run) for run in kept[name]) for name in ("runs", "tried")}
        return Outcome(**{**kept, **runs})
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            error = FileNotFoundError("there is no such result.json of `attnzoo experiment run`")
        raise ValueError(f"{f'{option}: ' if option else ''}{path} is not readable: {error}") from error


def as_json(run: Trained) -> dict[str, Any]:
    """A run as a dict for JSON."""
    values = {probe: [[place, _number(x)] for place, x in found.items()] for probe, found in run.values.items()}
    guesses = {
        probe: [[place, guess.wrong, _number(guess.uncertainty), guess.asked] for place, guess in found.items()]
        for probe, found in run.guesses.items()
    }
    curve = [[tokens, _number(loss)] for tokens, loss in run.curve]
    return {**asdict(run), "validation": _number(run.validation), "values": values, "guesses": guesses, "curve": curve}


def from_json(kept: Mapping[str, Any]) -> Trained:
    """The run of a dict of `as_json`."""
    values = {
        probe: {place: math.nan if x is None else x for place, x in found} for probe, found in kept["values"].items()
    }
    guesses = {
        probe: {place: Guess(wrong, math.nan if error is None else error, *n) for place, wrong, error, *n in found}
        for probe, found in kept.get("guesses", {}).items()
    }
    validation = math.inf if kept["validation"] is None else kept["validation"]
    curve = tuple((tokens, math.nan if loss is None else loss) for tokens, loss in kept.get("curve", ()))
    return Trained(**{**kept, "validation": validation, "values": values, "guesses": guesses, "curve": curve})


def best_rate(tried: Sequence[Trained]) -> float:
    """The learning rate whose run had the lowest held-out loss at the end."""
    return min(tried, key=lambda run: run.validation).lr


def _betters(wrong: float, guess: Guess, by: float) -> bool:
    own = math.sqrt(wrong * (1 - wrong) / guess.asked) if guess.asked and 0 <= wrong <= 1 else 0.0
    return wrong < guess.wrong - by * math.hypot(guess.uncertainty, own)


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None
