"""Experiments, run: learning rates tried, seeds trained, numbers measured, expectations judged, one page written."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attnzoo.data import build_data
from attnzoo.data.config import DataConfig
from attnzoo.data.windows import heldout_starts
from attnzoo.errors import unknown
from attnzoo.experiments.experiment import Arm, Experiment, Size, find, find_size, rate_in_words
from attnzoo.experiments.outcome import Outcome, Trained, as_json, chosen, from_json, save_outcome
from attnzoo.experiments.plan import Plan, folder_of
from attnzoo.experiments.probes import Probe, Subject
from attnzoo.experiments.processes import apart
from attnzoo.experiments.report.experiment import hints, markdown, row_in_words, verdict_table, write_page
from attnzoo.experiments.report.results import describe_machine
from attnzoo.files import parse_json, write_whole
from attnzoo.models import LanguageModel
from attnzoo.terminal import print_table
from attnzoo.training import load_run, newest_checkpoint, read_metrics, train
from attnzoo.training.checkpoint import CheckpointError, OtherRunError, identity, read_progress
from attnzoo.training.recipe import TrainConfig, load_config, to_yaml
from attnzoo.training.throughput import Operations

# Below so many operations per step a model is small: launching its kernels takes the host longer than a GPU takes to
# run them, and a GPU does the work of several processes, each of which keeps a CPU core busy.
SMALL = 1e12
ROOM = 8 * 2**30  # bytes of a GPU for a small model in a process of its own
PAGE, RESULT, SUMMARY, MEASURED = "report.html", "result.json", "result.md", "measured.json"


def run_experiment(
    plan: Plan, console: Console, command: str = "", jobs: int | None = None, minutes: float | None = None,
    only: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Train and measure what is not yet, print what was seen, and write a page about it.

    A run that is finished is not trained again, one that was stopped goes on; what was measured is not measured again
    unless the probes have changed.

    Args:
        plan: what to run.
        console: where progress and the table go.
        command: the command line, for the page.
        jobs: models at a time, each in a process of its own and on one CPU thread; None for as many as there are cores,
            on a GPU one, unless all models are small: then as many as there are cores, and 8 GiB of the GPU for each.
        minutes: after which the runs under way are stopped; the page is then about those that are finished.
        only: arms that are trained and measured, with those that they start from; none for all. Of the others the page
            has what is finished, and what is printed are these rows of its table.

    Returns:
        The page, `report.html` in the plan's folder.

    Raises:
        ChildProcessError: a run in a process of its own failed.
        TimeoutError: nothing was finished in so many minutes.
        ValueError, OSError: the experiment, its settings, its data or its folder are not usable; found before any
            training.
    """
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    experiment = find(plan.name)
    size = find_size(experiment, plan.size)
    folders = [folder_of(arm) for arm in experiment.arms]
    if len(set(folders)) < len(folders):
        raise ValueError(f"arms: expected names that stay distinct as folders, got {', '.join(folders)}")
    first: TrainConfig | None = None
    operations = 0  # of the costliest step: two per weight and token forwards, four backwards
    for arm in experiment.arms:  # a wrong option of the last arm must not show after an hour
        try:
            config = plan.config(experiment, arm, (arm.lrs or size.lrs)[0], 0)
            with torch.device("meta"):
                weights = Operations(LanguageModel(config.model)).parameters
            operations = max(operations, 6 * weights * config.batch_size * config.data.context_length)
            for probe in experiment.probes:
                _check_probe(probe, config)
        except ValueError as error:
            raise ValueError(f"arm {arm.name!r}: {error}") from error
        first = first or config
    assert first is not None
    _check_text(experiment.probes, first)
    arms = _with_those_before(experiment, only or experiment.arm_names)
    on_cpu = plan.device == "cpu" or not torch.cuda.is_available()
    jobs = jobs or _jobs_at_a_time(None if on_cpu else torch.cuda.mem_get_info()[1], operations)
    if on_cpu or jobs > 1:
        torch.set_num_threads(1)  # models this small gain nothing from more, and a result may depend on their number
    tasks, after = _tasks(plan, experiment, arms)
    for number, label in enumerate(apart(tasks, jobs, until, after) if jobs > 1 or minutes is not None else tasks, 1):
        run = tasks[label]()  # what another process has finished is only read
        said = run.note or f"held-out loss {run.validation:.4g}"
        console.print(f"[{number}/{len(tasks)}] {label}: {said}", markup=False, highlight=False)
    found = [_finished(plan, experiment, arm) for arm in experiment.arms]
    tried, runs = ([run for arm in found for run in arm[kind]] for kind in (0, 1))
    if not runs:
        when = "" if minutes is None else f" in {minutes:g} minutes"
        raise TimeoutError(f"no model was trained and measured{when}; the same command goes on")
    outcome = Outcome(
        Path(plan.name).stem, plan.size, tuple(runs), tuple(tried), max(run.date for run in runs), command,
        describe_machine(accelerator=not on_cpu),
        to_yaml(replace(first, output_dir=os.path.relpath(first.output_dir, plan.out))), plan.seeds,
    )  # fmt: skip
    save_outcome(outcome, plan.out / RESULT)
    write_whole(plan.out / SUMMARY, markdown(experiment, outcome))
    page = write_page(experiment, outcome, plan.out / PAGE)
    if only:
        for arm in arms:
            console.print(row_in_words(experiment, outcome, arm), markup=False, highlight=False, soft_wrap=True)
    else:
        print_table(verdict_table(experiment, outcome), console)
    for hint in hints(outcome):
        console.print(hint, markup=False, highlight=False)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    return page


def run_rate(plan: Plan, name: str, lr: float) -> Trained:
    """The run of an arm with the first seed that tries a learning rate."""
    experiment, arm = _find(plan, name)
    return run_once(plan, experiment, arm, lr, 0, measure=len(_rates(plan, experiment, arm)) == 1)


def run_seed(plan: Plan, name: str, seed: int) -> Trained:
    """The run of an arm with a seed, at the learning rate that is the best of those tried."""
    experiment, arm = _find(plan, name)
    rates = _rates(plan, experiment, arm)
    best = rates[0] if len(rates) == 1 else chosen([run_rate(plan, name, lr) for lr in rates])
    return run_once(plan, experiment, arm, best, seed, measure=True)


def _check_probe(probe: Probe, config: TrainConfig) -> None:
    """Raise ValueError where a probe cannot be measured of a run."""
    if getattr(probe, "task", None) not in (None, config.data.task is not None):
        wanted = "a task" if config.data.task is None else "a text"
        raise ValueError(f"{probe.name!r}: expected a run on {wanted}, got {config.data.title!r}")
    if hasattr(probe, "check"):
        try:
            probe.check(config)
        except ValueError as error:
            raise ValueError(f"{probe.name!r}: {error}") from error


def _check_text(probes: Sequence[Probe], config: TrainConfig) -> None:
    """Raise ValueError where the data are not usable, or their text is shorter than a window of a probe."""
    held, T = build_data(config.data).heldout, config.data.context_length
    for probe in probes:
        try:
            if config.data.task is None:
                heldout_starts(len(held), int(T * getattr(probe, "longest", 1)), 1)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{probe.name!r}: {error}") from error


def _with_those_before(experiment: Experiment, names: Sequence[str]) -> list[Arm]:
    """The arms of these names and those that they start from, in the experiment's order."""
    wanted = set()
    for name in names:
        if name not in experiment.arm_names:
            raise unknown("arm", name, experiment.arm_names)
        while name and name not in wanted:
            wanted.add(name)
            name = experiment.arm(name).after
    return [arm for arm in experiment.arms if arm.name in wanted]


def _jobs_at_a_time(memory: int | None, operations: int) -> int:
    """How many models are trained at a time.

    Args:
        memory: bytes of the GPU; None on a CPU.
        operations: of a training step, in the costliest model.
    """
    cores = os.cpu_count() or 1
    if memory is None:
        return cores
    return max(1, min(cores, memory // ROOM)) if operations < SMALL else 1


def _tasks(
    plan: Plan, experiment: Experiment, arms: Sequence[Arm]
) -> tuple[dict[str, Callable[[], Trained]], dict[str, list[str]]]:
    """Runs for processes, by label, and the labels of those that each waits for: that try its arm's learning rates, or
    that it starts from. Learning rates come first, then the seeds of all arms in turns."""
    tasks: dict[str, Callable[[], Trained]] = {}
    after: dict[str, list[str]] = {}
    tries: dict[str, list[str]] = {arm.name: [] for arm in arms}

    def add(label: str, task: Callable[[], Trained], arm: Arm, seed: int) -> None:
        tasks[label] = task
        after[label] = [*tries[arm.name], *([_seeded(arm.after, seed)] if arm.after else [])]

    for arm in arms:
        rates = _rates(plan, experiment, arm)
        labels = [f"{arm.name}, learning rate {rate_in_words(lr)}" for lr in rates] if len(rates) > 1 else []
        for label, lr in zip(labels, rates, strict=False):
            add(label, partial(run_rate, plan, arm.name, lr), arm, 0)
        tries[arm.name] = labels
    for seed in range(plan.seeds):
        for arm in arms:
            add(_seeded(arm.name, seed), partial(run_seed, plan, arm.name, seed), arm, seed)
    return tasks, after


def _seeded(name: str, seed: int) -> str:
    return f"{name}, seed {seed}"


def _find(plan: Plan, name: str) -> tuple[Experiment, Arm]:
    experiment = find(plan.name)
    return experiment, experiment.arm(name)


def _rates(plan: Plan, experiment: Experiment, arm: Arm) -> tuple[float, ...]:
    return arm.lrs or find_size(experiment, plan.size).lrs


def _finished(plan: Plan, experiment: Experiment, arm: Arm) -> tuple[list[Trained], list[Trained]]:
    """What the folder holds of an arm: the runs that tried a learning rate, and if those are all there, the measured
    ones."""
    rates = _rates(plan, experiment, arm)
    tried = [run for lr in rates if (run := _known(*_place(plan, experiment, arm, lr, 0)))]
    seeds = range(plan.seeds) if len(tried) == len(rates) or len(rates) == 1 else ()
    best = rates[0] if len(rates) == 1 else chosen(tried) if seeds else 0.0
    runs = [run for seed in seeds if (run := _known(*_place(plan, experiment, arm, best, seed)))]
    return [replace(run, values={}, guesses={}) for run in tried], [run for run in runs if run.note or run.values]


def _place(plan: Plan, experiment: Experiment, arm: Arm, lr: float, seed: int) -> tuple[Path, str]:
    """The folder of a run, and the key of what is to be measured of it."""
    config = plan.config(experiment, arm, lr, seed)
    key = _key(config, experiment, find_size(experiment, plan.size), arm.after)
    if arm.after:
        before, key_before = _place_before(plan, experiment, arm, seed)
        key += key_before + _weights_measured(before, key_before)
    return Path(config.output_dir), key


def _place_before(plan: Plan, experiment: Experiment, arm: Arm, seed: int) -> tuple[Path, str]:
    """The same of the run whose weights an arm's run starts from."""
    before = experiment.arm(arm.after)
    return _place(plan, experiment, before, _rates(plan, experiment, before)[0], seed)


def run_once(plan: Plan, experiment: Experiment, arm: Arm, lr: float, seed: int, measure: bool) -> Trained:
    """A run, trained and measured unless it is already.

    Where only its weights are gone, and a run that is not finished starts from them, it is trained once more. On a GPU
    other weights may come out; then it is measured anew, and so is all that starts from it.
    """
    torch.set_flush_denormal(True)  # for what needs no training any more, as in training
    config, size = plan.config(experiment, arm, lr, seed), find_size(experiment, plan.size)
    folder, key = _place(plan, experiment, arm, lr, seed)
    known = _known(folder, key)
    if known is not None and (known.note or known.values or not measure):
        if known.note or newest_checkpoint(folder) or not _to_start_from(plan, experiment, arm, seed):
            return known
        train(config)
        if _weights(folder) == _weights_measured(folder, key):
            return known
    try:
        before = _known(*_place_before(plan, experiment, arm, seed)) if arm.after else None
        if before is not None and before.note:
            raise FloatingPointError(f"{before.arm}, whose weights it would start from: {before.note}")
        train(config)
    except FloatingPointError as error:  # too large a learning rate is an answer, too
        found = Trained(arm.name, lr, seed, float("inf"), {}, note=str(error))
    except OtherRunError as error:
        raise CheckpointError(f"{error.found}. Give --out a new folder.") from error
    else:
        found = _measured(experiment, arm, config, size, measure)
    folder.mkdir(parents=True, exist_ok=True)
    found = replace(found, date=datetime.date.today().isoformat())
    kept = {"key": key, "weights": _weights(folder), "run": as_json(found)}
    write_whole(folder / MEASURED, json.dumps(kept, indent=1) + "\n")
    return found


def _to_start_from(plan: Plan, experiment: Experiment, arm: Arm, seed: int) -> bool:
    """Whether a run that is not finished starts from the weights of an arm's run."""
    return any(
        seed not in [run.seed for run in _finished(plan, experiment, later)[1]]
        or _to_start_from(plan, experiment, later, seed)
        for later in experiment.arms
        if later.after == arm.name
    )


def _measured(experiment: Experiment, arm: Arm, config: TrainConfig, size: Size, measure: bool) -> Trained:
    folder = Path(config.output_dir)
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None
    progress, metrics = read_progress(checkpoint), read_metrics(folder)
    device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    model, _ = load_run(folder, device)
    subject = Subject(model, config, build_data(config.data), metrics, size.rows, size.tokens)
    return Trained(
        arm.name,
        config.optimizer.lr,
        config.seed,
        validation=next(row["loss"] for row in reversed(metrics) if row["kind"] == "eval"),
        values={probe.name: probe.measure(subject) for probe in experiment.probes} if measure else {},
        guesses={probe.name: probe.guess(subject) for probe in experiment.probes if hasattr(probe, "guess")}
        if measure
        else {},
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        tokens=progress.tokens,
        seconds=progress.seconds,
    )


def _key(config: TrainConfig, experiment: Experiment, size: Size, after: str) -> str:
    """Of all that decides what a run is and what is measured of it, but its place and that of the run before it: the
    text, too, since one source may hold another on another machine."""
    config = replace(config, output_dir="-", start_from=after or config.start_from)
    text = f"{to_yaml(config)}{_named(experiment.probes)}{size.rows} {size.tokens}"
    text += _fingerprint(json.dumps(asdict(replace(config.data, seed=0))))
    return hashlib.sha256(text.encode()).hexdigest()


def _named(probes: Sequence[Probe]) -> str:
    """Probes with their options, the same in every process: a default repr has the object's place in memory instead."""
    plain = (probe for probe in probes if type(probe).__repr__ is object.__repr__)
    options = [
        {name: value for name in dir(probe) if name[0] != "_" and not callable(value := getattr(probe, name))}
        for probe in plain
    ]
    return re.sub(r" at 0x[0-9a-fA-F]+", "", f"{probes}{options or ''}")


@cache
def _fingerprint(data: str) -> str:
    """Of what a source holds now; `data` is a DataConfig as JSON."""
    return build_data(load_config(json.loads(data), (), DataConfig)).fingerprint


def _weights(folder: Path) -> str:
    """What the newest checkpoint's weights are known by; empty without one."""
    checkpoint = newest_checkpoint(folder)
    return "" if checkpoint is None else identity(checkpoint)


def _weights_measured(folder: Path, key: str) -> str:
    """What the weights are known by that were measured of a run; empty if none were."""
    return str(_kept(folder, key).get("weights", ""))


def _known(folder: Path, key: str) -> Trained | None:
    """What was measured of a run before; None if nothing was, or of another run or in another way."""
    try:
        return from_json(_kept(folder, key)["run"])
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _kept(folder: Path, key: str) -> dict[str, Any]:
    """What a run's folder holds of what was measured by this key; nothing if that is damaged."""
    try:
        kept = parse_json((folder / MEASURED).read_text(encoding="utf-8"))
        return kept if kept["key"] == key else {}
    except (OSError, KeyError, TypeError, ValueError):
        return {}
