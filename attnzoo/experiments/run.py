"""The execution of an experiment: trying learning rates, training seeds, measuring, judging, and writing a page."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from attnzoo.data import build_data
from attnzoo.data.own import check_replaceable
from attnzoo.data.windows import heldout_starts
from attnzoo.errors import unknown
from attnzoo.experiments.asked import asked
from attnzoo.experiments.experiment import Arm, Experiment, Size, find, find_size, power_of, rate_in_words
from attnzoo.experiments.kept import (
    finished,
    keep,
    known_run,
    place,
    place_before,
    take,
    tried_of,
    untried,
    weights_measured,
    weights_of,
)
from attnzoo.experiments.outcome import Outcome, Trained, save_outcome
from attnzoo.experiments.plan import Schedule, folder_of
from attnzoo.experiments.probes import Probe, Probed
from attnzoo.experiments.processes import gpus_of, run_tasks
from attnzoo.experiments.report.experiment import hints, markdown, row_in_words, verdict_table, write_page
from attnzoo.experiments.report.results import describe_machine
from attnzoo.files import write_whole
from attnzoo.models import LanguageModel
from attnzoo.models.swap import Unfilled
from attnzoo.terminal import print_table
from attnzoo.training import load_run, newest_checkpoint, read_metrics, train
from attnzoo.training.checkpoint import CheckpointError, read_progress
from attnzoo.training.config import TrainConfig
from attnzoo.training.folder import OtherRunError
from attnzoo.training.recipe import to_yaml
from attnzoo.training.throughput import Operations

# Below so many operations per step a model is small: launching its kernels takes the host longer than a GPU takes to
# run them, and a GPU does the work of several processes, each of which keeps a CPU core busy.
SMALL = 1e12
MODEL_MEMORY = 8 * 2**30  # bytes of GPU memory for each process with a small model
PAGE, RESULT, SUMMARY = "report.html", "result.json", "result.md"


def run_experiment(
    plan: Schedule, console: Console, command: str = "", jobs: int | None = None, minutes: float | None = None,
    only: Sequence[str] = (), records: Sequence[Outcome] = (),
) -> Path:  # fmt: skip
    """Train and measure the runs that are not finished, print the verdicts, and write a page.

    A finished run is not trained again, a stopped one continues; measured runs are measured again only if the probes
    have changed.

    Args:
        plan: the schedule.
        console: the console for progress and the table.
        command: the command line, for the page.
        jobs: models at a time, each in its own process and on one CPU thread. None: one per core on a CPU, and one on a
            GPU, or, if all models are small, as many as there are cores and 8 GiB parts of the GPU's memory.
        minutes: time after which running trainings are stopped; the page then has the finished ones.
        only: arms to train and measure, with those that they start from; empty for all. The page has the finished runs
            of other arms, too; the printed table has these arms alone.
        records: earlier results, of other machines perhaps, whose runs count as finished.

    Returns:
        The page, `report.html` in the plan's folder.

    Raises:
        ChildProcessError: runs in processes of their own failed; raised when all others are done and the page is
            written.
        TimeoutError: nothing was finished in so many minutes.
        ValueError, OSError: the experiment, its settings, its data or its folder are not usable; found before any
            training.
    """
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    experiment = asked(find(plan.name), plan.claims)
    find_size(experiment, plan.size)
    for name in (PAGE, RESULT, SUMMARY):
        check_replaceable(plan.out / name, "--out")
    folders = [folder_of(arm) for arm in experiment.arms]
    if len(set(folders)) < len(folders):
        raise ValueError(f"arms: expected names that stay distinct as folders, got {', '.join(folders)}")
    first, operations = check_arms(plan, experiment)
    _check_text(experiment.probes, first)
    for record in records:
        take(plan, experiment, record)
    arms = _with_those_before(experiment, only or experiment.arm_names)
    on_cpu = plan.device == "cpu" or not torch.cuda.is_available()
    gpus = gpus_of(plan.device)
    jobs = jobs or gpus * _jobs_at_a_time(None if on_cpu else torch.cuda.mem_get_info()[1], operations, gpus)
    if on_cpu or jobs > 1:
        torch.set_num_threads(1)  # small models gain nothing from more threads, and a result may depend on their number
    tasks, after = _tasks(plan, experiment, arms)
    for line in () if only else power_of(experiment, plan.seeds, plan.size):
        console.print(f"{plan.seeds} seeds see {line}", markup=False, highlight=False, soft_wrap=True)
    failures: list[str] = []
    side_by_side = partial(run_tasks, tasks, jobs, until, after, gpus, failures.append)
    for number, label in enumerate(side_by_side() if jobs > 1 or minutes is not None else tasks, 1):
        run = tasks[label]()  # reads the result if another process has finished the run
        said = run.note or f"held-out loss {run.validation:.4g}"
        console.print(f"[{number}/{len(tasks)}] {label}: {said}", markup=False, highlight=False)
    found = [finished(plan, experiment, arm) for arm in experiment.arms]
    tried, runs = ([run for arm in found for run in arm[kind]] for kind in (0, 1))
    if not runs and failures:
        raise ChildProcessError("; ".join(failures))
    if not runs:
        when = "" if minutes is None else f" in {minutes:g} minutes"
        raise TimeoutError(f"no model was trained and measured{when}; the same command goes on")
    outcome = Outcome(
        Path(plan.name).stem, plan.size, tuple(runs), tuple(tried), max(run.date for run in runs), command,
        describe_machine(accelerator=not on_cpu) | _before(runs),
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
    if failures:
        raise ChildProcessError("; ".join(failures))
    return page


def _before(runs: Sequence[Trained]) -> dict[str, str]:
    """What is said, beside the machine, of the runs that were taken from earlier results."""
    counts = Counter(run.machine for run in runs if run.machine)
    return {"before": "; ".join(f"{n} runs on {machine}" for machine, n in counts.items())} if counts else {}


def run_rate(plan: Schedule, name: str, lr: float) -> Trained:
    """The result of an arm's run that tries a learning rate, with the first seed."""
    experiment, arm = _find(plan, name)
    return run_once(plan, experiment, arm, lr, 0, measure=False, tries=True)


def run_search(plan: Schedule, name: str) -> Trained:
    """The best run of an arm's search of learning rates, after the runs that the search still needs."""
    experiment, arm = _find(plan, name)
    while untried(plan, experiment, arm):
        for lr in untried(plan, experiment, arm):
            run_rate(plan, name, lr)
    return min(tried_of(plan, experiment, arm), key=lambda run: run.validation)


def run_seed(plan: Schedule, name: str, seed: int) -> Trained:
    """The result of an arm's run with a seed, at the best learning rate that was tried."""
    experiment, arm = _find(plan, name)
    rates = plan.grid(experiment, arm)
    best = rates[0] if len(rates) == 1 else run_search(plan, name).lr
    return run_once(plan, experiment, arm, best, seed, measure=True)


def check_arms(plan: Schedule, experiment: Experiment) -> tuple[TrainConfig, int]:
    """The training of the first arm, and the operations of the costliest step of all: two per weight and token
    forwards, four backwards.

    Raises:
        ValueError: settings, options or probes that do not fit an arm, which is named.
    """
    configs, operations = [], 0
    for arm in experiment.arms:
        try:
            config = plan.config(experiment, arm, plan.grid(experiment, arm)[0], 0)
            with torch.device("meta"), Unfilled():
                weights = Operations(LanguageModel(config.model)).parameters
            for probe in experiment.probes:
                _check_probe(probe, config)
        except ValueError as error:
            raise ValueError(f"arm {arm.name!r}: {error}") from error
        configs.append(config)
        operations = max(operations, 6 * weights * config.batch_size * config.data.context_length)
    return configs[0], operations


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
    """The named arms and the arms that they start from, in the experiment's order."""
    wanted = set()
    for name in names:
        if name not in experiment.arm_names:
            raise unknown("arm", name, experiment.arm_names)
        while name and name not in wanted:
            wanted.add(name)
            name = experiment.arm(name).after
    return [arm for arm in experiment.arms if arm.name in wanted]


def _jobs_at_a_time(memory: int | None, operations: int, gpus: int = 1) -> int:
    """The number of models to train at a time on one of ``gpus`` GPUs, or on a CPU.

    Args:
        memory: bytes of the GPU; None on a CPU.
        operations: operations of a training step of the costliest model.
        gpus: number of GPUs that share the CPU's cores.
    """
    cores = max(1, (os.cpu_count() or 1) // gpus)
    if memory is None:
        return cores
    return max(1, min(cores, memory // MODEL_MEMORY)) if operations < SMALL else 1


def _tasks(
    plan: Schedule, experiment: Experiment, arms: Sequence[Arm]
) -> tuple[dict[str, Callable[[], Trained]], dict[str, list[str]]]:
    """The runs as tasks by label, and for each the labels of the tasks that must come before it, which stand before it.

    Those are the tries of its arm's learning rates, and the run that it starts from. Else tries come first, then the
    seeds of all arms in turns.
    """
    tasks: dict[str, Callable[[], Trained]] = {}
    after: dict[str, list[str]] = {}
    tries: dict[str, list[str]] = {arm.name: [] for arm in arms}

    def add(label: str, task: Callable[[], Trained], arm: Arm, seed: int) -> None:
        tasks[label] = task
        after[label] = [*tries[arm.name], *([_seeded(arm.after, seed)] if arm.after else [])]

    for arm in arms:
        rates = plan.grid(experiment, arm)
        labels = [f"{arm.name}, learning rate {rate_in_words(lr)}" for lr in rates] if len(rates) > 1 else []
        for label, lr in zip(labels, rates, strict=False):
            add(label, partial(run_rate, plan, arm.name, lr), arm, 0)
        tries[arm.name] = labels
    for arm in arms:
        if tries[arm.name] and find_size(experiment, plan.size).tries:
            searched = f"{arm.name}, best learning rate"
            add(searched, partial(run_search, plan, arm.name), arm, 0)
            tries[arm.name] = [searched]
    for seed in range(plan.seeds):
        for arm in arms:
            add(_seeded(arm.name, seed), partial(run_seed, plan, arm.name, seed), arm, seed)
    ordered: dict[str, Callable[[], Trained]] = {}

    def put(label: str) -> None:
        for before in after[label]:
            put(before)
        ordered.setdefault(label, tasks[label])

    for label in tasks:
        put(label)
    return ordered, after


def _seeded(name: str, seed: int) -> str:
    return f"{name}, seed {seed}"


def _find(plan: Schedule, name: str) -> tuple[Experiment, Arm]:
    experiment = asked(find(plan.name), plan.claims)
    return experiment, experiment.arm(name)


def run_once(
    plan: Schedule, experiment: Experiment, arm: Arm, lr: float, seed: int, measure: bool, tries: bool = False
) -> Trained:
    """The result of a run, after training and measuring it where that is not done.

    A finished run whose weights were deleted is trained again if an unfinished run starts from them. On a GPU its
    weights may then differ; it is measured again, and so are the runs that start from it.
    """
    torch.set_flush_denormal(True)  # as in training, for runs that are only measured
    config, size = plan.config(experiment, arm, lr, seed, tries), find_size(experiment, plan.size)
    folder, key = place(plan, experiment, arm, lr, seed, tries)
    known = known_run(folder, key)
    if known is not None and (known.note or known.values or not measure):
        if known.note or newest_checkpoint(folder) or not _to_start_from(plan, experiment, arm, seed):
            return known
        train(config)
        if weights_of(folder) == weights_measured(folder, key):
            return known
    try:
        before = known_run(*place_before(plan, experiment, arm, seed)) if arm.after else None
        if before is not None and before.note:
            raise FloatingPointError(f"{before.arm}, whose weights it would start from: {before.note}")
        train(config)
    except FloatingPointError as error:  # a diverged run is a result, too
        found = Trained(arm.name, lr, seed, float("inf"), {}, note=str(error))
    except OtherRunError as error:
        raise CheckpointError(f"{error.found}. Give --out a new folder.") from error
    else:
        found = _measured(experiment, arm, config, size, measure)
    found = replace(found, date=datetime.date.today().isoformat(), key=key, weights=weights_of(folder))
    keep(folder, found)
    return found


def _to_start_from(plan: Schedule, experiment: Experiment, arm: Arm, seed: int) -> bool:
    """Whether an unfinished run starts from the weights of this arm's run."""
    return any(
        seed not in [run.seed for run in finished(plan, experiment, later)[1]]
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
    probes = experiment.probes if measure else ()
    subject = Probed(model, config, build_data(config.data), metrics, size.rows, size.tokens)
    return Trained(
        arm.name,
        config.optimizer.lr,
        config.seed,
        validation=next(row["loss"] for row in reversed(metrics) if row["kind"] == "eval"),
        values={probe.name: probe.measure(subject) for probe in probes},
        guesses={probe.name: probe.guess(subject) for probe in probes if hasattr(probe, "guess")},
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        tokens=progress.tokens,
        seconds=progress.seconds,
        curve=tuple((row["tokens"], row["loss"]) for row in metrics if row["kind"] == "train") if measure else (),
    )
