"""Several trainings at a time, each in a process of its own."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any

import torch


def apart(
    work: Callable[..., object], tasks: Mapping[str, tuple[Any, ...]], jobs: int, until: float = math.inf
) -> Iterator[str]:
    """Call ``work(*arguments)`` for every task, ``jobs`` at a time, and yield the label of each that is done.

    Each process has as many threads as this one has, since a result may depend on their number. They wait for each
    other without keeping a core busy, which two processes on the same cores would otherwise pay for many times over.

    Args:
        work: a function of a module; what it prints is dropped, and progress comes in lines, not as a bar.
        tasks: label -> arguments.
        jobs: processes at a time.
        until: by `time.monotonic`, when the tasks that are left are given up, and those that run told to stop.

    Raises:
        ChildProcessError: a task failed, with its label and its message; the others are told to stop, as by SIGTERM.
    """
    context = get_context("spawn")
    errors = context.SimpleQueue()
    waiting = list(tasks)
    running: dict[Any, tuple[str, BaseProcess]] = {}  # by what says that the process has ended
    with _environment("OMP_WAIT_POLICY", "passive"), _interrupted_by(signal.SIGTERM, signal.SIGHUP):
        try:
            while (waiting or running) and time.monotonic() < until:
                while waiting and len(running) < jobs:
                    label = waiting.pop(0)
                    started = context.Process(target=_call, args=(errors, torch.get_num_threads(), work, tasks[label]))
                    started.start()
                    running[started.sentinel] = (label, started)
                left = None if until == math.inf else max(until - time.monotonic(), 0.0)
                for sentinel in connection.wait(list(running), left):
                    label, process = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        reason = f"ended with {process.exitcode}" if errors.empty() else errors.get()
                        raise ChildProcessError(f"{label}: {reason}")
                    yield label
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.join()


class _Lines(io.TextIOWrapper):
    """Not a terminal, on which the bars of several processes would overwrite each other."""

    def isatty(self) -> bool:
        return False


def _call(errors: Any, threads: int, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    sys.stderr = _Lines(sys.stderr.buffer, line_buffering=True)
    try:
        with open(os.devnull, "w") as sys.stdout:
            work(*arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        errors.put(str(error) or repr(error))
        sys.exit(1)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """``name`` is ``value`` for what is started meanwhile, unless it was set before."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """These signals raise KeyboardInterrupt, so that the processes are stopped too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
