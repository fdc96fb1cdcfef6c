"""Checkpoints that are whole or absent, and the run folder around them.

    RUN/config.yaml  metrics.jsonl  tensorboard/  checkpoints/step-00000100/{model.safetensors, optimizer.bin,
    ...}

A checkpoint is written beside its place, flushed to the disk and then renamed; an old one is renamed before
it is removed. So a folder named `step-*` is always whole, whenever the process is killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnzoo.config import config_differences, load_config, to_yaml
from attnzoo.training.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

    from attnzoo.models import LanguageModel

# These may change when a run goes on: beyond rounding, no number that it trains depends on them.
FREE = frozenset(
    [
        "output_dir",
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


@dataclass(frozen=True)
class Progress:
    """Where a run stands; what a checkpoint holds besides accelerate's own files."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data_fingerprint: str = ""


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The last whole checkpoint of a run, or None."""
    found = sorted((Path(run_dir) / "checkpoints").glob("step-*"))
    return found[-1] if found else None


def read_progress(checkpoint: Path) -> Progress:
    """What a checkpoint says about itself.

    Raises:
        CheckpointError: its `progress.json` is missing or malformed.
    """
    try:
        return Progress(**json.loads((checkpoint / "progress.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint} is not a checkpoint of this version: {error}") from error


def write_checkpoint(accelerator: Accelerator, run_dir: Path, progress: Progress, keep: int) -> Path:
    """Save everything that the next step depends on; called by all processes.

    Raises:
        CheckpointError: it could not be written, for one because the disk is full. What was there before
            stays.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step-{progress.step:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (temporary / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
            for path in [*temporary.rglob("*"), temporary]:
                _fsync(path)
            os.replace(temporary, final)
            _fsync(folder)
            remove_stale(folder, keep)
    except Exception as error:  # a full disk shows as OSError, RuntimeError or SafetensorError, by who was writing
        shutil.rmtree(temporary, ignore_errors=True)
        before = newest_checkpoint(run_dir)
        kept = f"the checkpoint {before.name} is whole" if before else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not write the checkpoint of step {progress.step} to {folder}: {error} ({kept})"
        ) from error
    accelerator.wait_for_everyone()
    return final


def remove_stale(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and what a kill left half-written."""
    for checkpoint in sorted(folder.glob("step-*"))[:-keep]:
        os.replace(checkpoint, folder / f".{checkpoint.name}.old")
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)


def check_resumable(run_dir: Path, config: TrainConfig, fingerprint: str) -> Path | None:
    """The checkpoint to go on from (None: start anew), when `config` and the data are those of the run.

    Raises:
        CheckpointError: they are not; the error names the fields that differ.
    """
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        return None
    try:
        before = load_config(run_dir / "config.yaml")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run_dir} holds checkpoints, but its configuration cannot be read: {error}") from error
    differences = {key: pair for key, pair in config_differences(before, config).items() if key not in FREE}
    if differences:
        listed = "; ".join(f"{key} was {old!r} and is {new!r} now" for key, (old, new) in differences.items())
        raise CheckpointError(f"{run_dir} holds another run: {listed}. Give output_dir a new folder, or restore these.")
    if read_progress(checkpoint).data_fingerprint != fingerprint:
        raise CheckpointError(
            f"{run_dir} was trained on other data: {config.data.source!r} has changed since. "
            "Give output_dir a new folder."
        )
    return checkpoint


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write the resolved configuration, whole or not at all."""
    temporary = run_dir / ".config.yaml.tmp"
    temporary.write_text(to_yaml(config), encoding="utf-8")
    _fsync(temporary)
    os.replace(temporary, run_dir / "config.yaml")


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


def load_run(run_dir: str | Path, device: str = "cpu") -> tuple[LanguageModel, TrainConfig]:
    """The model of a run's newest checkpoint, in evaluation mode, and the run's configuration.

    Args:
        run_dir: the run's folder.
        device: where the model goes.

    Raises:
        FileNotFoundError: no run in that folder, or none that has reached its first checkpoint.
        CheckpointError: the weights do not fit the configuration.
    """
    from safetensors.torch import load_model

    from attnzoo.models import LanguageModel

    run_dir = Path(run_dir)
    if not (run_dir / "config.yaml").is_file():
        raise FileNotFoundError(f"no run in {str(run_dir)!r}: there is no config.yaml")
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise FileNotFoundError(f"the run in {str(run_dir)!r} has no checkpoint yet")
    config = load_config(run_dir / "config.yaml")
    model = LanguageModel(config.model)
    try:
        load_model(model, checkpoint / "model.safetensors")
    except Exception as error:
        raise CheckpointError(f"{checkpoint} does not fit {run_dir / 'config.yaml'}: {error}") from error
    return model.to(device).eval(), config


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
