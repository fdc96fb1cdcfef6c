"""The runs in an experiment's folder, and whether their numbers are still valid: of the same settings, text and
probes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from attnzoo.data import build_data
from attnzoo.data.config import DataConfig
from attnzoo.errors import unknown
from attnzoo.experiments.experiment import Arm, Experiment, Size, find, find_size, rate_in_words
from attnzoo.experiments.outcome import Outcome, Trained, as_json, best_rate, from_json
from attnzoo.experiments.plan import Schedule
from attnzoo.experiments.probes import Probe
from attnzoo.files import parse_json, write_whole
from attnzoo.training import newest_checkpoint
from attnzoo.training.checkpoint import identity
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import digest_of_own
from attnzoo.training.recipe import load_config, to_yaml

MEASURED = "measured.json"


def finished(plan: Schedule, experiment: Experiment, arm: Arm) -> tuple[list[Trained], list[Trained]]:
    """The finished runs of an arm: those that tried a learning rate, and, if these are complete, the measured ones."""
    rates = plan.grid(experiment, arm)
    tried = tried_of(plan, experiment, arm)
    seeds = range(plan.seeds) if len(rates) == 1 or not untried(plan, experiment, arm) else ()
    best = rates[0] if len(rates) == 1 else best_rate(tried) if seeds else 0.0
    runs = [run for seed in seeds if (run := known_run(*place(plan, experiment, arm, best, seed)))]
    tried = [replace(run, values={}, guesses={}, curve=()) for run in tried]
    return tried, [run for run in runs if run.note or run.values]


def tried_of(plan: Schedule, experiment: Experiment, arm: Arm) -> list[Trained]:
    """The finished runs that tried a learning rate of an arm, by rate: the grid's, and those of the search beyond."""
    rates, found = list(plan.grid(experiment, arm)), list[Trained]()
    tries = len(rates) > 1
    for lr in rates:
        if run := known_run(*place(plan, experiment, arm, lr, 0, tries)):
            found.append(run)
        searched = tries and find_size(experiment, plan.size).tries and len(found) == len(rates)
        if searched and (beyond := further(losses_of(found))) is not None:
            rates.append(beyond)
    return sorted(found, key=lambda run: run.lr)


def untried(plan: Schedule, experiment: Experiment, arm: Arm) -> list[float]:
    """The learning rates still to try for an arm: those of its grid, then one at a time of the search."""
    tried = tried_of(plan, experiment, arm)
    missing = [lr for lr in plan.grid(experiment, arm) if lr not in [run.lr for run in tried]]
    if missing or not find_size(experiment, plan.size).tries:
        return missing
    beyond = further(losses_of(tried))
    return [] if beyond is None else [beyond]


def losses_of(tried: Sequence[Trained]) -> dict[float, float]:
    """The held-out losses by learning rate."""
    return {run.lr: run.validation for run in tried}


def further(losses: Mapping[float, float]) -> float | None:
    """The next learning rate of a search along 1, 2, 5, 10, ..., where the best so far is the largest or smallest.

    None where the best lies between two others, or where all runs diverged.
    """
    rates, best = sorted(losses), min(losses, key=losses.__getitem__)
    if all(map(math.isinf, losses.values())) or rates[0] < best < rates[-1]:
        return None
    up = best == rates[-1]
    exponent = math.floor(math.log10(best))
    steps = [float(f"{digit}e{power}") for power in range(exponent - 1, exponent + 2) for digit in (1, 2, 5)]
    return min(x for x in steps if x > best * 1.001) if up else max(x for x in steps if x < best * 0.999)


def rates_of(records: Sequence[Outcome], searched: bool = True) -> dict[str, float]:
    """The learning rates of the runs in earlier results, by arm, of which a :class:`Schedule` searches none.

    Args:
        records: the results.
        searched: whether arms for which they tried several rates are left out, since :func:`take` takes the tries, too.
    """
    tries = {(run.arm, run.lr) for record in records for run in record.tried} if searched else set()
    tried = Counter(arm for arm, _ in tries)
    return {run.arm: run.lr for record in records for run in record.runs if tried[run.arm] < 2}


def take(plan: Schedule, experiment: Experiment, record: Outcome) -> None:
    """Put the runs of an earlier result into the plan's folder where it has none, as if they had been made there.

    The result may be of another experiment whose runs are the same; arms that no claim of the plan asks for are left.

    Raises:
        ValueError: a run of another size, arm, seed or learning rate, or of other settings, text or probes.
    """
    if record.size != plan.size:
        raise ValueError(f"--resume-from: expected a result of the size {plan.size!r}, got {record.size!r}")
    arms = find(plan.name).arm_names if plan.claims else experiment.arm_names
    machine = ", ".join(value for name, value in record.machine.items() if name != "before")
    for run in (*record.tried, *record.runs):
        said = f"--resume-from: {run.arm}, seed {run.seed}, learning rate {rate_in_words(run.lr)}"
        if run.arm not in experiment.arm_names:
            if run.arm in arms:
                continue
            raise unknown("arm", run.arm, arms, of="--resume-from")
        if run.seed >= plan.seeds:
            raise ValueError(f"{said}: expected seeds below {plan.seeds}; `--seeds {run.seed + 1}` takes this one")
        if (chosen := plan.rates.get(run.arm, run.lr)) != run.lr:
            raise ValueError(f"{said}: expected that of --rates or of another result, {rate_in_words(chosen)}")
        arm = experiment.arm(run.arm)
        tries = run in record.tried and len(plan.grid(experiment, arm)) > 1
        folder, key = place(plan, experiment, arm, run.lr, run.seed, tries)
        if run.key != key:
            why = "was of other settings, another text or other probes" if run.key else "has no digest of its settings"
            raise ValueError(f"{said} {why}: expected runs as this command makes them")
        known = known_run(folder, key)
        if known is None or not (known.values or known.note):
            keep(folder, replace(run, machine=run.machine or machine))


def place(
    plan: Schedule, experiment: Experiment, arm: Arm, lr: float, seed: int, tries: bool = False
) -> tuple[Path, str]:
    """The folder of a run, and the key of its settings and probes."""
    config = plan.config(experiment, arm, lr, seed, tries)
    key = _key(config, experiment, find_size(experiment, plan.size), arm)
    if arm.after:
        before, key_before = place_before(plan, experiment, arm, seed)
        key += key_before + weights_measured(before, key_before)
    return Path(config.output_dir), key


def place_before(plan: Schedule, experiment: Experiment, arm: Arm, seed: int) -> tuple[Path, str]:
    """The folder and key of the run from whose weights an arm's run starts."""
    before = experiment.arm(arm.after)
    return place(plan, experiment, before, plan.grid(experiment, before)[0], seed)


def keep(folder: Path, run: Trained) -> None:
    """Save the numbers of a run in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"key": run.key, "weights": run.weights, "run": as_json(replace(run, key="", weights=""))}
    write_whole(folder / MEASURED, json.dumps(kept, indent=1) + "\n")


def known_run(folder: Path, key: str) -> Trained | None:
    """The saved numbers of a run; None without any, or where they have another key."""
    try:
        kept = _kept(folder, key)
        return replace(from_json(kept["run"]), key=key, weights=kept.get("weights", ""))
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def weights_of(folder: Path) -> str:
    """The identity of the newest checkpoint's weights; empty without one."""
    checkpoint = newest_checkpoint(folder)
    return "" if checkpoint is None else identity(checkpoint)


def weights_measured(folder: Path, key: str) -> str:
    """The identity of the weights that were measured; empty if none were."""
    return str(_kept(folder, key).get("weights", ""))


def _kept(folder: Path, key: str) -> dict[str, Any]:
    """The saved record of a run's numbers under this key; empty if there is none or it is damaged."""
    try:
        kept = parse_json((folder / MEASURED).read_text(encoding="utf-8"))
        return kept if kept["key"] == key else {}
    except (OSError, KeyError, TypeError, ValueError):
        return {}


def _key(config: TrainConfig, experiment: Experiment, size: Size, arm: Arm) -> str:
    """A digest of a run's settings, text and probes, and of the file of a variant of one's own, without folders.

    The text is in it, as one source may hold other text on another machine.
    """
    start, teacher = arm.after or config.start_from, arm.teacher or config.teacher
    config = replace(config, output_dir="-", start_from=start, teacher=teacher)
    text = f"{to_yaml(config)}{_named(experiment.probes)}{size.rows} {size.tokens}"
    text += _fingerprint(json.dumps(asdict(replace(config.data, seed=0)))) + digest_of_own(config.model.attention)
    return hashlib.sha256(text.encode()).hexdigest()


def _named(probes: Sequence[Probe]) -> str:
    """The probes with their options, the same text in every process (a default repr has a memory address)."""
    plain = (probe for probe in probes if type(probe).__repr__ is object.__repr__)
    options = [
        {name: value for name in dir(probe) if name[0] != "_" and not callable(value := getattr(probe, name))}
        for probe in plain
    ]
    return re.sub(r" at 0x[0-9a-fA-F]+", "", f"{probes}{options or ''}")


@cache
def _fingerprint(data: str) -> str:
    """The fingerprint of a source's present tokens; `data` is a DataConfig as JSON."""
    return build_data(load_config(json.loads(data), (), DataConfig)).fingerprint
