"""Displays of the progress of a training: a bar, lines, or nothing."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from attnzoo.training.metrics import Row

if TYPE_CHECKING:
    from attnzoo.training.config import TrainConfig


class Display(Protocol):
    """A display of training steps; a context manager."""

    def step(self, step: int) -> None: ...

    def row(self, row: Row) -> None: ...

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def build_display(config: TrainConfig, start: int) -> Display:
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
    """A display of nothing."""

    def step(self, step: int) -> None:
        pass

    def row(self, row: Row) -> None:
        pass

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Lines(Quiet):
    """A line every tenth of the way, for logs."""

    def __init__(self, title: str, steps: int, start: int):
        self.title, self.steps = title, steps
        self.shown = start * 10 // steps

    def row(self, row: Row) -> None:
        if row["kind"] == "eval":
            print(
                f"{self.title}: step {row['step']}/{self.steps}, held-out loss {row['loss']:.4f}",
                file=sys.stderr,
                flush=True,
            )
        elif row["step"] * 10 // self.steps > self.shown:
            self.shown = row["step"] * 10 // self.steps
            speed = f"{row['tokens_per_second']:,.0f} tokens/s"
            print(
                f"{self.title}: step {row['step']}/{self.steps}, loss {row['loss']:.4f}, {speed}",
                file=sys.stderr,
                flush=True,
            )


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

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a closed terminal must not hide why the run ended
            self.progress.stop()
