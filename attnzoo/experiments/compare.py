"""Comparison of several variants trained on the same data and budget, with one report."""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from attnzoo.data import Data, build_data, heldout_windows
from attnzoo.data.own import check_replaceable
from attnzoo.data.tasks import Examples
from attnzoo.errors import at_least, unknown
from attnzoo.evaluation import gate_maps, token_losses
from attnzoo.experiments import figures
from attnzoo.experiments.processes import gpus_of, run_tasks
from attnzoo.experiments.report import Facts, RunResult, load_result, save_result, terminal_table, write_report
from attnzoo.experiments.report.results import JSON_NAME, describe_layers, describe_machine, describe_sizes
from attnzoo.files import check_folder
from attnzoo.registry import get
from attnzoo.settings import names_key, read_settings, read_yaml
from attnzoo.terminal import print_table
from attnzoo.training import check_run, load_run, newest_checkpoint, train
from attnzoo.training.checkpoint import identity, read_progress, usable_checkpoint
from attnzoo.training.config import TrainConfig, check_folder_name
from attnzoo.training.digests import MODEL
from attnzoo.training.folder import check_data, read_config
from attnzoo.training.metrics import rows_until
from attnzoo.training.recipe import to_yaml
from attnzoo.training.start import is_bytes

ENTRY_KEYS = ("name", "label", "options", "group")
OWN = ("train.model.attention", "train.output_dir")
PAGE = "report.html"
logger = logging.getLogger(__name__)


@dataclass
class EvaluateConfig:
    """The configuration of the measurements of each trained model.

    Args:
        length_factor: length of the windows in training contexts.
        tokens: number of held-out tokens, the same ones for every variant.
        batch_size: windows per forward pass.
        block: rows and keys per block when pruning is measured.

    Raises:
        ValueError: a number below 1.
    """

    length_factor: int = 4
    tokens: int = 65536
    batch_size: int = 4
    block: int = 16

    def __post_init__(self) -> None:
        at_least(self, 1, "length_factor", "tokens", "batch_size", "block")


@dataclass
class CompareConfig:
    """The configuration of a comparison: variants that share one training configuration.

    An entry of `variants` is a name, or `{name: fox, options: {acp: true}, label: fox (acp)}`: `options` are added to
    `train.model.attention_options`, and `label` is what the report shows; entries with one `group`, a few words such as
    `equal layers`, are shown side by side, apart from those of other groups. `train.model.attention` and
    `train.output_dir` are set per variant: a run goes to `output_dir` under its label.

    Args:
        title: the report's heading.
        output_dir: folder of the runs and of `report.html`.
        variants: the variants to compare, as above.
        train: the shared training configuration.
        evaluate: the measurements.
    """

    title: str = "comparison"
    output_dir: str = "runs/comparison"
    variants: list[Any] = field(default_factory=list)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison: ``key`` names its folder, ``label`` is shown, beside the other runs of ``group``."""

    key: str
    label: str
    variant: str
    config: TrainConfig
    group: str = ""


def plan(config: CompareConfig) -> list[PlannedRun]:
    """The runs of a comparison, each with its whole training configuration.

    Raises:
        ValueError: no variants, an unknown one, an entry of another shape, two entries with one label, or a label
            that names no folder inside `output_dir`.
    """
    if not config.variants:
        raise ValueError("variants: expected at least one name, got none")
    check_folder_name(config.output_dir)
    runs = [_plan_one(config, entry) for entry in config.variants]
    keys = [run.key for run in runs]
    for run in runs:
        if keys.count(run.key) > 1:
            raise ValueError(f"variants: expected distinct labels, got {run.label!r} twice")
    return runs


def check_own(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Raise where a comparison's file or overrides set a field that each variant sets itself.

    Raises:
        ValueError: such a field is set.
    """
    file = dict(path) if isinstance(path, Mapping) else read_yaml(Path(path).read_text(encoding="utf-8"))
    for settings in (file, read_settings(overrides)):
        for own in OWN:
            if names_key(settings, own):
                raise ValueError(f"{own}: expected none, since each of the variants has its own")


def _plan_one(config: CompareConfig, entry: object) -> PlannedRun:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValueError(f"variants: expected a name or a mapping with a name, got {entry!r}")
    for key in entry:
        if key not in ENTRY_KEYS:
            raise unknown("key", key, ENTRY_KEYS, of="a variant")
    options = entry.get("options") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"variants: expected a mapping as options of {entry['name']}, got {options!r}")
    variant = get(entry["name"]).name
    extras = ", ".join(str(key) if value is True else f"{key}={value}" for key, value in options.items())
    for key in ("label", "group"):
        words = entry.get(key)
        # YAML reads 1.10 as 1.1, and no as False
        if isinstance(words, bool) or not isinstance(words, str | int | None):
            raise ValueError(f"variants: expected words in quotes as {key} of {variant}, got {words!r}")
    given = entry.get("label")
    label = str(given) if given is not None else f"{variant} ({extras})" if extras else variant
    key = re.sub(r"[^\w.=]+", "-", label).strip("-")
    if not re.search(r"\w", key) or key.startswith(".") or key == PAGE:
        raise ValueError(
            f"variants: label {label!r} gives the run's folder its name: expected a letter or digit in it, "
            f"no dot in front, and not {PAGE!r}"
        )
    model = replace(
        config.train.model, attention=variant, attention_options={**config.train.model.attention_options, **options}
    )
    train_config = replace(config.train, output_dir=f"{config.output_dir}/{key}", model=model)
    return PlannedRun(key, label, variant, train_config, str(entry.get("group") or ""))


def run_comparison(config: CompareConfig, console: Console, command: str = "", jobs: int = 1) -> Path:
    """Train and measure the runs that are not finished, print a table and write the report.

    Args:
        config: the comparison.
        console: the console for progress and the table.
        command: the command line, for the report.
        jobs: the number of runs at a time, each in its own process if there are several, spread over all GPUs.

    Returns:
        The report, ``report.html`` in ``config.output_dir``.

    Raises:
        ChildProcessError: a run in a process of its own failed.
        ValueError, OSError: the configuration, its folder or its data are not usable; found before any training.
    """
    runs = plan(config)
    page = Path(config.output_dir) / PAGE
    check_replaceable(page, "output_dir")
    for run in runs:
        check_folder(Path(run.config.output_dir))
    data = build_data(config.train.data)
    _windows(data, config.train, config.evaluate)  # refuse a text too short to measure before training
    for run in runs:  # refuse a faulty variant before any training
        try:
            check_run(run.config, data)
        except ValueError as error:
            raise ValueError(f"variant {run.label!r}: {error}") from error
    if jobs > 1:
        tasks = {run.label: partial(_trained_apart, run, config.evaluate, command) for run in runs}
        for number, label in enumerate(run_tasks(tasks, jobs, gpus=gpus_of(config.train.device)), 1):
            console.print(f"[{number}/{len(runs)}] {label}: done", markup=False, highlight=False)
        results = [_measured(run, config.evaluate, data, command) for run in runs]
    else:
        results = []
        for number, run in enumerate(runs, 1):
            console.print(f"[{number}/{len(runs)}] {run.label}", markup=False, highlight=False)
            results.append(_trained(run, config.evaluate, data, command))
    print_table(terminal_table(results), console)
    path = write_report(results, page, title=config.title, command=command)
    console.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)
    return path


def _trained(run: PlannedRun, evaluate: EvaluateConfig, data: Data, command: str) -> RunResult:
    """The result of a run, after training and measuring it where that is not done."""
    torch.set_flush_denormal(True)  # as in training, for runs that are only evaluated
    train(run.config)
    return _measured(run, evaluate, data, command)


def _trained_apart(run: PlannedRun, evaluate: EvaluateConfig, command: str) -> RunResult:
    """The result of a run trained in its own process, which memory-maps the data itself."""
    return _trained(run, evaluate, build_data(run.config.data), command)


def _measured(run: PlannedRun, evaluate: EvaluateConfig, data: Data, command: str) -> RunResult:
    """The result of a trained run: read if its checkpoint was measured with these settings before, else measured and
    saved."""
    run_dir = Path(run.config.output_dir)
    saved, newest = _saved_result(run_dir), newest_checkpoint(run_dir)
    if saved is not None and newest is not None:
        known = (saved.facts.settings, saved.facts.label, saved.facts.group, saved.facts.heldout)
        wanted = (_settings(run.config, evaluate), run.label, run.group, _digest(_windows(data, run.config, evaluate)))
        if known == wanted and saved.facts.checkpoint == identity(newest):
            return saved
    save_result(measure(run, evaluate, data, command), run_dir)
    return load_result(run_dir)  # the saved numbers, which later reports show too


def result_of(run_dir: Path) -> RunResult:
    """The result of any run: read if its newest checkpoint was measured before, else measured and saved.

    A run that was measured at an earlier checkpoint is measured again with the same settings.

    Raises:
        FileNotFoundError: no run in that folder, none that has reached its first checkpoint, or its data are gone.
        ValueError: its results cannot be read, and it has no checkpoint to measure; or its data cannot be read.
        CheckpointError: its settings cannot be read, its checkpoints are damaged, or it was trained on other data than
            its source holds now.
    """
    newest = newest_checkpoint(run_dir)
    if newest is None and (run_dir / JSON_NAME).is_file():
        return load_result(run_dir)  # the saved result of a run whose checkpoints were deleted
    saved = _saved_result(run_dir)
    if saved is not None and newest is not None and saved.facts.checkpoint == identity(newest):
        return saved
    config = replace(read_config(run_dir), output_dir=str(run_dir))
    key = run_dir.resolve().name
    names = dict.fromkeys(layer.name for layer in config.model.layers())
    run, evaluate, command = PlannedRun(key, key, " + ".join(names), config), EvaluateConfig(), ""
    if saved is not None:
        run = replace(run, label=saved.facts.label, group=saved.facts.group)
        command = saved.facts.command
        evaluate = EvaluateConfig(**(read_yaml(saved.facts.settings).get("evaluate") or {}))
    try:
        data = build_data(config.data)
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"the data of the run in {str(run_dir)!r}: {error}") from error
    result = measure(run, evaluate, data, command)
    try:
        save_result(result, run_dir)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        logger.warning("%s cannot be written to: what was measured of the run is not kept there", run_dir)
        return result
    return load_result(run_dir)


def _saved_result(run_dir: Path) -> RunResult | None:
    """The saved result of a run; None where there is none, or where it cannot be read, which is logged."""
    try:
        return load_result(run_dir)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("%s; it is measured again", error)
        return None


def _settings(config: TrainConfig, evaluate: EvaluateConfig) -> str:
    """The settings that determine a checkpoint's measurements, as YAML."""
    return to_yaml(config) + "evaluate:\n" + "".join(f"  {line}\n" for line in to_yaml(evaluate).splitlines())


def _windows(data: Data, config: TrainConfig, evaluate: EvaluateConfig) -> Tensor:
    """Held-out windows of ``length_factor`` training contexts, ``[N, length + 1]``."""
    length = config.data.context_length * evaluate.length_factor
    if isinstance(data.heldout, Examples):
        raise ValueError(
            f"compare measures the loss over a text: expected a data.source with text or tokens, got "
            f"{config.data.source!r}; `attnzoo experiment` compares models on tasks"
        )
    return torch.from_numpy(heldout_windows(data.heldout, length, evaluate.tokens))


def _digest(windows: Tensor) -> str:
    return hashlib.sha256(f"{list(windows.shape)}".encode() + windows.cpu().numpy().tobytes()).hexdigest()


def measure(run: PlannedRun, evaluate: EvaluateConfig, data: Data, command: str) -> RunResult:
    """The result of measuring a run's newest whole checkpoint.

    Args:
        run: a run that has a checkpoint.
        evaluate: the measurements.
        data: the data that it was trained on.
        command: the command line, for the report.

    Raises:
        FileNotFoundError: it has no checkpoint.
        CheckpointError: all of them are damaged, or it was trained on other data.
        ValueError: the held-out tokens are too few for one window.
    """
    run_dir = Path(run.config.output_dir)
    checkpoint = usable_checkpoint(run_dir, MODEL)
    if checkpoint is None:
        raise FileNotFoundError(f"the run in {str(run_dir)!r} has no checkpoint yet")
    progress = read_progress(checkpoint)
    check_data(run_dir, run.config, progress, data)
    device = "cuda" if torch.cuda.is_available() and run.config.device != "cpu" else "cpu"
    model, config = load_run(run_dir, device, checkpoint)
    windows = _windows(data, config, evaluate)
    heldout, windows = _digest(windows), windows.to(device)
    losses = token_losses(model, windows, evaluate.batch_size)
    rows = [row for row in rows_until(run_dir, progress.step, progress.metrics) if row["kind"] == "train"]
    curve = np.array([[row["tokens"], row["loss"]] for row in rows], dtype=np.float64).reshape(-1, 2).T
    speeds = [row["tokens_per_second"] for row in rows] or [progress.tokens / max(progress.seconds, 1e-9)]
    side, pair, dual = figures.kind_of(run.variant.split(" + "))
    facts = Facts(
        key=run.key,
        label=run.label,
        variant=run.variant,
        side=side,
        pair=pair,
        dual=dual,
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        context=config.data.context_length,
        steps=progress.step,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=statistics.median(speeds),
        unit="byte" if is_bytes(config.data) else "token",
        model=describe_sizes(config.model),
        parts=describe_layers(model),
        text="the Python standard library's own source" if config.data.title == "stdlib" else config.data.title,
        settings=_settings(run.config, evaluate),
        command=command,
        machine=describe_machine(),
        checkpoint=identity(checkpoint),
        heldout=heldout,
        group=run.group,
    )
    gates = gate_maps(model, windows[0, :-1], block=evaluate.block)
    return RunResult(facts, losses, curve, tuple(gates))
