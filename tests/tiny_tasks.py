"""Tasks of processes beside a test, in a module that is imported at once: it has no torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def note_variable(seen: Path, name: str, seconds: float) -> None:
    """Write down a variable of this process's environment."""
    with open(seen, "a") as file:
        file.write(os.environ[name] + "\n")
    time.sleep(seconds)


def note(path: Path, name: str, seconds: float) -> None:
    """Write down a task and its process."""
    time.sleep(seconds)
    with path.open("a") as file:
        file.write(f"{name} {os.getpid()}\n")


def done_when_told_to_stop(ready: Path) -> None:
    """As a training whose last step is under way when it is told."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    ready.touch()
    while not told:
        time.sleep(0.01)


def puts_away_what_it_holds(ready: Path, gone: Path) -> None:
    """As PyTorch's compiler in the midst of its work."""
    try:
        ready.touch()
        time.sleep(600)
    finally:
        gone.touch()


def deaf(ready: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.touch()
    time.sleep(600)


def fails_after(ready: Path) -> None:
    while not ready.exists():
        time.sleep(0.01)
    raise ValueError("it failed")
