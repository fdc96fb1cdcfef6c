"""Displays of the progress of a training: a bar, lines, or nothing."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from attnzoo.training.metrics import Row

if TYPE_CHECKING:
    from attnzoo.training.config import TrainConfig


def build_display(config: TrainConfig, start: int) -> Quiet:
    """The display that `config.progress` asks for; `start` is the step from which the run continues."""
    from rich.console import Console

    console = Console(stderr=True)
    choice = config.progress
    if choice == "auto":
        choice = "bar" if console.is_terminal else "lines"
    title = config.output_dir.rstrip("/").rsplit("/", 1)[-1]
    if choice == "bar":
        return Bar(title, config.steps, start)
    return Lines(title, config.steps, start) if choice == "lines" else Quiet()


class Quiet:
    """A display of training steps that shows nothing, a context manager; the base of the others."""

    def step(self, step: int) -> None:
        pass

    def row(self, row: Row) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Lines(Quiet):
    """A line every tenth of the way, for logs."""

    def __init__(self, title: str, steps: int, start: int):
        self.title, self.steps, self.start = title, steps, start
        self.shown = start * 10 // steps

    def __enter__(self) -> Self:
        if self.start:
            with suppress(OSError):  # a closed pipe ends the run at its first row
                self._say(self.start, "from whose checkpoint it goes on")
        return self

    def row(self, row: Row) -> None:
        if row["kind"] == "eval":
            self._say(row["step"], f"held-out loss {row['loss']:.4f}")
        elif row["step"] * 10 // self.steps > self.shown:
            self.shown = row["step"] * 10 // self.steps
            self._say(row["step"], f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s")

    def _say(self, step: int, what: str) -> None:
        print(f"{self.title}: step {step}/{self.steps}, {what}", file=sys.stderr, flush=True)


class Bar(Quiet):
    """A bar with the loss, the speed and the time left."""

    def __init__(self, title: str, steps: int, start: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  held-out {task.fields[heldout]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task(title, total=steps, completed=start, loss="-", heldout="-", speed="-")

    def step(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def row(self, row: Row) -> None:
        if row["kind"] == "eval":
            self.progress.update(self.task, heldout=f"{row['loss']:.4f}")
        else:
            self.progress.update(self.task, loss=f"{row['loss']:.4f}", speed=f"{row['tokens_per_second']:,.0f}")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # a closed terminal must not hide why the run ended
            self.progress.stop()
