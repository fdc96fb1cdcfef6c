"""Training runs of a fraction of a second, and what must be equal of two of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnzoo.config import TrainConfig, load_config
from attnzoo.settings import read_settings

SMALL = (
    "data.context_length=16",
    "model={hidden_size: 16, intermediate_size: 16, num_layers: 1, num_heads: 2}",
    "optimizer={warmup_steps: 2, lr: 0.01}",
    "steps=8",
    "batch_size=2",
    "log_every=1",
    "eval_every=4",
    "eval_tokens=100",
    "checkpoint_every=2",
    "progress=quiet",
    "device=cpu",
    "tensorboard=false",
)
EXPERIMENT = (  # of each run of an experiment
    "steps=2", "batch_size=2", "eval_tokens=64", "log_every=1", "optimizer.warmup_steps=1",
    "model={hidden_size: 16, intermediate_size: 16, num_layers: 1, num_heads: 2}",
)  # fmt: skip


def write_text(folder: Path) -> Path:
    """What the runs in a folder are trained on, `text.txt` in it."""
    path = folder / "text.txt"
    path.write_text("".join(f"{number} and one is {number + 1}.\n" for number in range(300)))
    return path


def config_of(folder: Path, run: str = "run", *overrides: str) -> TrainConfig:
    """The configuration of a run in a folder, on its text."""
    settings = [f"output_dir={folder / run}", f"data.source={folder / 'text.txt'}"]
    return load_config(read_settings(SMALL), [*settings, *overrides])


class StoppedError(Exception):
    """Stands for a crash at a chosen row."""


def stop_at(step: int) -> Callable[[dict[str, Any]], None]:
    def on_row(row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise StoppedError

    return on_row


def numbers(run_dir: str | Path) -> list[dict[str, Any]]:
    """The metrics, without the timings."""
    from attnzoo.training import read_metrics

    timings = ("seconds", "tokens_per_second", "mfu", "mfu_dense")
    return [{key: value for key, value in row.items() if key not in timings} for row in read_metrics(run_dir)]


def weights(run_dir: str | Path) -> bytes:
    """The file of the newest checkpoint's weights."""
    from attnzoo.training import newest_checkpoint

    newest = newest_checkpoint(run_dir)
    assert newest is not None
    return (newest / "model.safetensors").read_bytes()


def outcome(run_dir: str | Path) -> tuple[list[dict[str, Any]], bytes]:
    """All that must be equal: every number but the timings, and the weights."""
    return numbers(run_dir), weights(run_dir)


def said(caplog: Any) -> list[str]:
    """The warnings so far."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
