"""Checkpoints that are whole or absent, and the run folder around them.

    RUN/config.yaml  metrics.jsonl  tensorboard/  checkpoints/step-00000100/{model.safetensors, optimizer.bin,
    config.yaml, progress.json, digests.json, ...}, where a model is sharded with folders of their own

A checkpoint is written beside its place, flushed to the disk and then renamed; an old one is renamed before
it is removed. So a folder named `step-*` is always whole, whenever the process is killed. What happens to its files
later shows in their digests: a run goes on from the newest checkpoint that is as it was written.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from attnzoo.files import (
    PART,
    damaged_name,
    digest,
    parse_json,
    part_of,
    scratch_content,
    scratch_folder,
    sync,
    write_whole,
)
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import MODEL, WEIGHTS, damage, read_digests, weights_in, write_digests
from attnzoo.training.forgetting import networks, set_phase
from attnzoo.training.recipe import config_differences, load_config, to_yaml
from attnzoo.training.sharding import TrainState, read_weights

if TYPE_CHECKING:
    from attnzoo.data import Data
    from attnzoo.models import LanguageModel

logger = logging.getLogger(__name__)

# These may change when a run goes on: beyond rounding, no number that it trains depends on them.
FREE = frozenset(
    [
        "output_dir",
        "compile",
        "recompute",
        "sharding",
        "device",
        "gradient_accumulation",
        "log_every",
        "eval_every",
        "eval_tokens",
        "checkpoint_every",
        "keep_checkpoints",
        "progress",
        "tensorboard",
    ]
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or continued from."""


class OtherRunError(CheckpointError):
    """A folder holds a run of other settings or data.

    Args:
        found: how it differs.
        advice: what to do; who trains in folders of their own choice says something else.
    """

    def __init__(self, found: str, advice: str):
        super().__init__(f"{found}. {advice}")
        self.found = found


@dataclass(frozen=True)
class Progress:
    """Where a run stands; what a checkpoint holds besides accelerate's own files."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data_fingerprint: str = ""
    metrics: str = ""  # digest of the rows so far


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The last checkpoint of a run, whatever became of its files, or None."""
    return next(reversed(checkpoints_in(Path(run_dir) / "checkpoints")), None)


def step_of(checkpoint: Path) -> int:
    """The step by which a checkpoint's folder is named."""
    return int(checkpoint.name.removeprefix("step-"))


def usable_checkpoint(run_dir: Path, names: Collection[str] = ()) -> Path | None:
    """The newest checkpoint whose files are as they were written, or None where there is no checkpoint at all.

    A line of the log says which newer one is damaged, and which file of it.

    Args:
        run_dir: the run's folder.
        names: of the files to look at; none given means all of them.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
        FileNotFoundError: the folder is that of a checkpoint.
    """
    problems: list[str] = []
    for checkpoint in reversed(checkpoints_in(run_dir / "checkpoints")):
        problem = _problem(checkpoint, names)
        if problem is None:
            for earlier in problems:
                logger.warning("%s; using the checkpoint before it, %s", earlier, checkpoint.name)
            return checkpoint
        problems.append(problem)
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}; no other checkpoint is left in {run_dir}")
    if (run_dir / "progress.json").is_file():
        run = str(run_dir.absolute().parents[1])
        raise FileNotFoundError(f"{str(run_dir)!r} is one checkpoint of a run: expected the run's folder, {run!r}")
    return None


def identity(checkpoint: Path) -> str:
    """A text that is another one for every other checkpoint: its name and the digest of its weights."""
    try:
        digests = read_digests(checkpoint)
        return " ".join([checkpoint.name, *(weights_in(digests) if digests else [digest(checkpoint / WEIGHTS)])])
    except (OSError, ValueError) as error:
        return f"{checkpoint.name} damaged: {error}"


def read_progress(checkpoint: Path) -> Progress:
    """What a checkpoint says about itself.

    Raises:
        CheckpointError: its `progress.json` is missing, malformed or of another step.
    """
    path = checkpoint / "progress.json"
    try:
        progress = Progress(**parse_json(path.read_text(encoding="utf-8")))
        if not (isinstance(progress.step, int) and isinstance(progress.tokens, int) and progress.tokens >= 0):
            raise ValueError(f"expected whole numbers of steps and tokens, got {progress.step!r}, {progress.tokens!r}")
        if not (isinstance(progress.seconds, float | int) and math.isfinite(progress.seconds)):
            raise ValueError(f"expected a number of seconds, got {progress.seconds!r}")
        if not (isinstance(progress.data_fingerprint, str) and isinstance(progress.metrics, str)):
            raise ValueError(f"expected texts, got {progress.data_fingerprint!r}, {progress.metrics!r}")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint} is not a checkpoint of this version: {path.name}: {error}") from error
    if progress.step != step_of(checkpoint):
        raise CheckpointError(f"{path} is of step {progress.step}, and its folder is {checkpoint.name}")
    return progress


def write_checkpoint(state: TrainState, run_dir: Path, progress: Progress, config: TrainConfig) -> Path:
    """Save everything that the next step depends on; called by all processes.

    Raises:
        CheckpointError: it could not be written, for one because the disk is full. What was there before
            stays.
    """
    accelerator, folder = state.accelerator, run_dir / "checkpoints"
    final = folder / f"step-{progress.step:08d}"
    main = accelerator.is_main_process
    try:
        with scratch_folder(part_of(final)) if main else nullcontext(scratch_content(part_of(final))) as temporary:
            accelerator.wait_for_everyone()
            state.save(temporary)
            accelerator.wait_for_everyone()
            if main:
                _finish(temporary, final, progress, config)
        if main:
            remove_stale(folder, config.keep_checkpoints)
    except Exception as error:  # a full disk shows as OSError, RuntimeError or SafetensorError, by who was writing
        before = newest_checkpoint(run_dir)
        kept = f"the checkpoint {before.name} is whole" if before else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not write the checkpoint of step {progress.step} to {folder}: {error} ({kept})"
        ) from error
    accelerator.wait_for_everyone()
    return final


def _finish(temporary: Path, final: Path, progress: Progress, config: TrainConfig) -> None:
    """Add to a saved state what says which it is, flush everything to the disk, and give it its name."""
    (temporary / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
    (temporary / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    files = list(temporary.rglob("*"))
    with ThreadPoolExecutor(1) as pool:  # reading them for their digests costs no time while they are flushed
        digests = pool.submit(write_digests, temporary)
        for path in files:
            sync(path)
        digests.result()
    sync(temporary)
    os.replace(temporary, final)
    sync(final.parent)


def load_state(state: TrainState, checkpoint: Path) -> None:
    """Load everything that the next step depends on; called by all processes.

    Raises:
        CheckpointError: a file of it cannot be read, which a checkpoint without digests shows only now.
    """
    try:
        state.load(checkpoint)
    except Exception as error:  # an EOFError, RuntimeError, SafetensorError or UnpicklingError, by what is damaged
        raise CheckpointError(f"{checkpoint} cannot be read: {type(error).__name__}: {error}") from error


def remove_stale(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and what a kill left half-written or half-removed.

    Nothing else in the folder is touched; a line of the log says what stands in the way.
    """
    for checkpoint in checkpoints_in(folder)[:-keep]:
        try:
            with scratch_folder(part_of(checkpoint)) as going:
                os.replace(checkpoint, going)
        except FileExistsError as error:
            logger.warning("%s stays: %s", checkpoint, error)
    for leftover in folder.glob(f".step-*{PART}"):
        with suppress(FileExistsError), scratch_folder(leftover):  # which goes with what is in it
            pass


def check_data(run_dir: Path, config: TrainConfig, progress: Progress, data: Data) -> None:
    """Refuse data that are not those of a run.

    Raises:
        CheckpointError: the source has changed since.
    """
    if progress.data_fingerprint == data.fingerprint:
        return
    if progress.data_fingerprint == data.earlier_fingerprint:
        logger.warning("%s is of a version that read only the ends of large files: their middle may differ", run_dir)
    else:
        found = f"{run_dir} was trained on other data: {config.data.title!r} has changed since"
        raise OtherRunError(found, "Give output_dir a new folder.")


def check_resumable(run_dir: Path, config: TrainConfig, data: Data) -> Path | None:
    """The checkpoint to go on from (None: start anew), when `config` and the data are those of the run.

    Raises:
        CheckpointError: they are not, and the error names the fields that differ; or every checkpoint is damaged.
    """
    if newest_checkpoint(run_dir) is None:
        return None
    before, what = read_config(run_dir), f"{run_dir} holds another run"
    _check_same(what, before, config)
    checkpoint = usable_checkpoint(run_dir)
    assert checkpoint is not None
    _check_same(what, before, config, step_of(checkpoint))
    config_of(run_dir, checkpoint)
    if read_digests(checkpoint) is None:
        logger.warning("%s is of a version that wrote no digests: its files are not checked", checkpoint)
    check_data(run_dir, config, read_progress(checkpoint), data)
    return checkpoint


def _check_same(what: str, before: TrainConfig, now: TrainConfig, step: int = 0) -> None:
    """Refuse a configuration that does not train what another one trains up to a step, or only to another end."""
    differences = _differences(before, now, step)
    if differences:
        listed = "; ".join(f"{key} was {old!r} and is {new!r} now" for key, (old, new) in differences.items())
        hint = ""
        if now.steps > before.steps:
            hint = (
                f" To train longer, `attnzoo extend {quote(now.output_dir)} --steps {now.steps} --schedule constant "
                "--lr RATE` goes on at a level learning rate, and `--schedule cosine` along a new cosine."
            )
        raise OtherRunError(f"{what}: {listed}", f"Give output_dir a new folder, or restore these.{hint}")


def is_other(run_dir: Path, config: TrainConfig) -> bool:
    """Whether a folder's run has other settings than these, in more than is free to change."""
    if not (run_dir / "config.yaml").is_file():
        return False
    try:
        return bool(_differences(read_config(run_dir), config))
    except CheckpointError:  # it cannot be read
        return True


def _differences(before: TrainConfig, now: TrainConfig, step: int = 0) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations differ that are not free to, nor only in how long they train after a step."""
    longer = ("steps", "optimizer.extensions") if _extends(before, now, step) else ()
    return {key: x for key, x in config_differences(before, now).items() if key not in FREE and key not in longer}


def _extends(before: TrainConfig, now: TrainConfig, step: int) -> bool:
    """Whether `now` is `before` made longer at `step` or later, so that up to there they train the same."""
    known = len(before.optimizer.extensions)
    added = now.optimizer.extensions[known:]
    same = now.optimizer.extensions[:known] == before.optimizer.extensions
    return same and bool(added) and added[0].planned == before.steps and added[0].after >= step


def read_config(run_dir: Path) -> TrainConfig:
    """The configuration of a run.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return load_config(run_dir / "config.yaml")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the configuration of the run in {run_dir} cannot be read: {error}") from error


def config_of(run_dir: Path, checkpoint: Path) -> TrainConfig:
    """The configuration of a run, when it is the one that its checkpoint was trained with.

    Raises:
        CheckpointError: it is not, or cannot be read.
    """
    config = read_config(run_dir)
    if (checkpoint / "config.yaml").is_file():  # earlier versions wrote none
        what = f"{run_dir / 'config.yaml'} is not what {checkpoint.name} was trained with"
        _check_same(what, read_config(checkpoint), config, step_of(checkpoint))
    return config


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write the resolved configuration, whole or not at all."""
    write_whole(run_dir / "config.yaml", to_yaml(config))


def make_folder(run_dir: Path) -> None:
    """Make a run's folder.

    Raises:
        OSError: it cannot be made, where `check_folder` could not tell; the error names `output_dir`.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(error.errno, f"output_dir: {error.strerror}", str(run_dir)) from error


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Hold the run folder, so that two processes do not write one run.

    Raises:
        CheckpointError: another process holds it.
    """
    import fcntl

    with open(run_dir / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"another process is training in {run_dir}") from error
        yield


def load_run(
    run_dir: str | Path, device: str = "cpu", checkpoint: Path | None = None
) -> tuple[LanguageModel, TrainConfig]:
    """The model of a run's newest checkpoint, in evaluation mode, and the run's configuration.

    Its weights have the dtype in which they were trained.

    Where that one is damaged, a line of the log says so, and the model is that of the one before it.

    Args:
        run_dir: the run's folder.
        device: where the model goes.
        checkpoint: the one to load; None for the newest that is whole.

    Raises:
        FileNotFoundError: no run in that folder, or none that has reached its first checkpoint.
        CheckpointError: the configuration is not the checkpoint's, does not fit the weights or cannot be read, or every
            checkpoint is damaged.
    """
    import torch

    from attnzoo.training.model import new_model

    run_dir = Path(run_dir)
    if not (run_dir / "config.yaml").is_file():
        raise FileNotFoundError(f"no run in {str(run_dir)!r}: there is no config.yaml")
    checkpoint = checkpoint or usable_checkpoint(run_dir, MODEL)
    if checkpoint is None:
        raise FileNotFoundError(f"the run in {str(run_dir)!r} has no checkpoint yet")
    config = config_of(run_dir, checkpoint)
    with torch.device("meta"):  # first weights would be drawn for nothing
        model = new_model(config)
    try:
        state = read_weights(checkpoint)
        if config.model.tie_embeddings:
            state.setdefault("head.weight", state["embedding.weight"])  # safetensors holds a tied weight once
        model.load_state_dict(state, assign=True)
    except Exception as error:
        raise CheckpointError(f"{checkpoint} does not fit {run_dir / 'config.yaml'}: {error}") from error
    if config.model.tie_embeddings:
        model.head.weight = model.embedding.weight
    at_once = config.forgetting.anneal_steps == 0  # nothing lies between the phases: the first ends in the second
    set_phase(networks(model), config.forgetting, step_of(checkpoint) + at_once)
    return model.to(device).eval(), config


def checkpoints_in(folder: Path) -> list[Path]:
    """Oldest first. Only what is named exactly as `write_checkpoint` does counts: a copy of a user's is left alone."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def _problem(checkpoint: Path, names: Collection[str]) -> str | None:
    try:
        read_progress(checkpoint)
    except CheckpointError as error:
        return str(error)
    return damage(checkpoint, names)


def set_aside_after(checkpoint: Path) -> None:
    """Rename newer checkpoints, which are damaged, to `damaged-step-*`, out of the way of those to come."""
    found = checkpoints_in(checkpoint.parent)
    for damaged in found[found.index(checkpoint) + 1 :]:
        os.replace(damaged, damaged_name(damaged))
    sync(checkpoint.parent)
