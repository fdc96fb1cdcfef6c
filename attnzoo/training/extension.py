"""The extension of a run to more steps, with a learning rate that continues from its last one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attnzoo.errors import no_run
from attnzoo.training.checkpoint import step_of, usable_checkpoint
from attnzoo.training.config import Extension, TrainConfig
from attnzoo.training.folder import config_of
from attnzoo.training.optimizer import learning_rate


def extend(
    run_dir: str | Path, steps: int, schedule: str, *, lr: float | None = None, warmup_steps: int | None = None
) -> TrainConfig:
    """The configuration of a run extended from its newest whole checkpoint, for `train` to continue.

    A run that already has this extension keeps its configuration, so that an interrupted command can be repeated.

    Args:
        run_dir: the run's folder.
        steps: the number of updates of the extended run.
        schedule: `constant` or `cosine`.
        lr: the learning rate to reach; None for the one at the checkpoint.
        warmup_steps: updates of the linear change to `lr`; None for the run's first warm-up, or 0 where `lr` is None.

    Raises:
        FileNotFoundError: no run in the folder, or a run without a checkpoint.
        CheckpointError: its files are damaged.
        ValueError: too few steps; a cosine that has ended and no `lr`; or a rate that would jump.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "config.yaml").is_file():
        raise no_run(run_dir, "config.yaml")
    checkpoint = usable_checkpoint(run_dir)
    if checkpoint is None:
        raise FileNotFoundError(f"the run in {str(run_dir)!r} has no checkpoint yet")
    config, after = replace(config_of(run_dir, checkpoint), output_dir=str(run_dir)), step_of(checkpoint)
    if _is_already(config, steps, schedule, lr, warmup_steps):
        return config
    if steps <= after:
        raise ValueError(f"steps: expected more than the {after} of the run's newest checkpoint, got {steps}")
    rate = learning_rate(after, config.steps, config.optimizer)
    last = config.optimizer.extensions[-1:]
    if lr is None:
        if after == config.steps and (not last or last[0].schedule == "cosine"):
            raise ValueError(
                f"lr: expected the rate to come to, as the cosine has ended: it is {rate:.2g} at step {after}, and its "
                f"peak was {config.optimizer.lr:g}"
            )
        lr, warmup_steps = rate, warmup_steps or 0
    elif warmup_steps is None:
        warmup_steps = max(1, config.optimizer.warmup_steps)
    elif warmup_steps < 1 and lr != rate:
        raise ValueError(f"warmup_steps: expected at least 1, as the rate goes from {rate:.2g} to {lr:g}; got 0")
    added = Extension(after, config.steps, schedule, lr, warmup_steps)
    optimizer = replace(config.optimizer, extensions=[*config.optimizer.extensions, added])
    return replace(config, steps=steps, optimizer=optimizer)


def _is_already(config: TrainConfig, steps: int, schedule: str, lr: float | None, warmup_steps: int | None) -> bool:
    if not config.optimizer.extensions or config.steps != steps:
        return False
    last = config.optimizer.extensions[-1]
    return last.schedule == schedule and lr in (None, last.lr) and warmup_steps in (None, last.warmup_steps)
