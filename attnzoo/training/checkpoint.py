"""Checkpoints that are whole or absent.

    RUN/checkpoints/step-00000100/{model.safetensors, optimizer.bin, config.yaml, progress.json, digests.json, ...},
    where a model is sharded with folders of their own

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
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from attnzoo.files import PART, damaged_name, digest, parse_json, part_of, scratch_content, scratch_folder, sync
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import WEIGHTS, damage, read_digests, weights_in, write_digests
from attnzoo.training.recipe import to_yaml
from attnzoo.training.sharding import TrainState

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or continued from."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run, which a checkpoint holds besides accelerate's own files."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data_fingerprint: str = ""
    metrics: str = ""  # digest of the rows so far
    teacher: str = ""  # digest of its weights
    own: str = ""  # digest of the files of variants of one's own, as the run began


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
    """The progress that a checkpoint was written at.

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
    with ThreadPoolExecutor(1) as pool:  # digests are computed while files are flushed
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


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of a run's checkpoints, oldest first.

    Only names that `write_checkpoint` gives count; a user's copy beside them is left alone.
    """
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
