"""The folder of a run around its checkpoints: its configuration, who holds it, and whether it may be gone on with.

RUN/config.yaml  metrics.jsonl  tensorboard/  tokenizer/  checkpoints/  .lock
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from attnzoo.errors import no_run
from attnzoo.files import damaged_name, write_whole
from attnzoo.training.checkpoint import (
    CheckpointError,
    Progress,
    newest_checkpoint,
    read_progress,
    step_of,
    usable_checkpoint,
)
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import DIGESTS, MODEL, PARTS, digest_of_own
from attnzoo.training.forgetting import networks, set_phase
from attnzoo.training.recipe import config_differences, load_config, to_yaml
from attnzoo.training.sharding import read_weights

if TYPE_CHECKING:
    from attnzoo.data import Data
    from attnzoo.models import LanguageModel

logger = logging.getLogger(__name__)

# These may change when a run goes on: beyond rounding, no number that it trains depends on them.
FREE = frozenset([
    "output_dir", "compile", "recompute", "context_parallel", "exchange_timeout", "sharding", "device",
    "gradient_accumulation", "log_every", "eval_every", "eval_tokens", "checkpoint_every", "keep_checkpoints",
    "progress", "tensorboard", "teacher",  # whose weights are compared
])  # fmt: skip

LATER = {  # files of a checkpoint that earlier versions did not write: what they hold, and what follows without it
    DIGESTS: ("digests", "its files are not checked"),
    "config.yaml": ("configuration", "whether it was trained with that of the run is not known"),
    "random_states_*.pkl": ("random states", "random numbers are drawn anew"),
}


class OtherRunError(CheckpointError):
    """A folder holds a run of other settings or data.

    Args:
        found: how it differs.
        advice: what to do; who trains in folders of their own choice says something else.
    """

    def __init__(self, found: str, advice: str):
        super().__init__(f"{found}. {advice}")
        self.found = found


def check_data(run_dir: Path, config: TrainConfig, progress: Progress, data: Data) -> None:
    """Raise where a run was trained on other data.

    Raises:
        CheckpointError: the source has changed since.
    """
    if progress.data_fingerprint != data.fingerprint:
        found = f"{run_dir} was trained on other data: {config.data.title!r} has changed since"
        raise OtherRunError(found, "Give output_dir a new folder.")


def check_same_teacher(run_dir: Path, config: TrainConfig, before: str, now: str) -> None:
    """Refuse a teacher with other weights than the one that a run has learnt from so far.

    Raises:
        CheckpointError: it has changed since.
    """
    if before != now:
        found = f"{run_dir} has learnt from another teacher: {config.teacher!r} has changed since"
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
    lacking = [f"{name}: {so}" for file, (name, so) in LATER.items() if not any(checkpoint.glob(file))]
    if lacking and not (checkpoint / PARTS).is_dir():  # a sharded one has no random states
        logger.warning("%s is of a version that wrote no %s", checkpoint, "; no ".join(lacking))
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
    """Whether a folder's run has other settings than these, in more than is free to change, or none that are known."""
    try:
        return bool(_differences(read_config(run_dir), config))
    except CheckpointError:
        return True


def check_config_file(run_dir: Path) -> None:
    """Refuse a folder whose `config.yaml` is somebody else's.

    Raises:
        FileExistsError: it is no configuration of a run, and there is no checkpoint that would make it one.
    """
    path = run_dir / "config.yaml"
    if not os.path.lexists(path) or newest_checkpoint(run_dir) is not None:
        return
    try:
        read_config(run_dir)
    except CheckpointError as error:
        raise FileExistsError(
            f"output_dir: expected no {str(path)!r}, where a run keeps its configuration, or one that can be read; "
            f"rename it, or give another folder ({error.__cause__})"
        ) from error


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

    A line of the log says where the Python file of a variant of one's own is another than the run began with.

    Raises:
        CheckpointError: it is not, or cannot be read.
    """
    config = read_config(run_dir)
    if (checkpoint / "config.yaml").is_file():  # earlier versions wrote none
        what = f"{run_dir / 'config.yaml'} is not what {checkpoint.name} was trained with"
        _check_same(what, read_config(checkpoint), config, step_of(checkpoint))
    began = read_progress(checkpoint).own
    if began and began != digest_of_own(config.model.attention):
        logger.warning("%s: the Python file of %s has changed since this run began", run_dir, config.model.attention)
    return config


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write the resolved configuration, whole or not at all.

    What was there is kept under another name where its words are a user's, or of another run; a line says so.
    """
    path = run_dir / "config.yaml"
    there = path.read_text(encoding="utf-8") if path.is_file() else None
    if there is not None and (there != to_yaml(read_config(run_dir)) or is_other(run_dir, config)):
        aside = damaged_name(path, "earlier-")
        os.replace(path, aside)
        logger.warning("%s: what was there before is kept as %s", path, aside.name)
    write_whole(path, to_yaml(config))


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

    from attnzoo.models.swap import Unfilled
    from attnzoo.training.model import new_model

    run_dir = Path(run_dir)
    if not (run_dir / "config.yaml").is_file():
        raise no_run(run_dir, "config.yaml")
    checkpoint = checkpoint or usable_checkpoint(run_dir, MODEL)
    if checkpoint is None:
        raise FileNotFoundError(f"the run in {str(run_dir)!r} has no checkpoint yet")
    config = config_of(run_dir, checkpoint)
    with torch.device("meta"), Unfilled():  # first weights would be drawn for nothing
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
