"""Several trainings at a time, each in a process of its own."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing import connection, get_context
from typing import Any

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that a process sees


def apart(
    tasks: Mapping[str, Callable[[], object]],
    jobs: int,
    until: float = math.inf,
    after: Mapping[str, Collection[str]] | None = None,
    gpus: int = 1,
    failed: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Do tasks in processes beside this one, ``jobs`` at a time, and yield the label of each that is done.

    A process goes on to another task when it is done with one. Each has as many threads as this one has, since a result
    may depend on their number. They wait for each other without keeping a core busy, which two processes on the same
    cores would otherwise pay for many times over.

    Args:
        tasks: label -> a function of a module and its arguments, as :func:`functools.partial` makes them; what it
            prints is dropped, and progress comes in lines, not as a bar.
        jobs: processes at a time.
        until: by `time.monotonic`, when the tasks that are left are given up, and those that run told to stop.
        after: label -> labels of tasks that must be done before; the others start in the order of `tasks`.
        gpus: how many GPUs the processes are spread over, each of which then sees one of them; 1 leaves them as they
            are.
        failed: called with what a task that failed says; the others go on, but for those that wait for it. None: the
            others are told to stop, as by SIGTERM.

    Raises:
        ChildProcessError: a task failed, with its label and its message, and `failed` is None.
    """
    after = after or {}
    waiting, done = list(tasks), set[str]()
    idle: list[_Worker] = []
    running: dict[Any, tuple[str, _Worker]] = {}  # by the channel that says when it is done
    with _environment("OMP_WAIT_POLICY", "passive"), _interrupted_by(signal.SIGTERM, signal.SIGHUP):
        try:
            while (waiting or running) and time.monotonic() < until:
                ready = [label for label in waiting if done.issuperset(after.get(label, ()))]
                if not ready and not running:  # all that is left waits for a task that failed
                    return
                for label in ready[: jobs - len(running)]:
                    waiting.remove(label)
                    busy = [worker.gpu for _, worker in running.values()]
                    gpu = min(range(gpus), key=busy.count)  # the one with the least to do
                    worker = next((worker for worker in idle if worker.gpu == gpu), None) or _Worker(gpu, gpus > 1)
                    idle = [other for other in idle if other is not worker]
                    worker.channel.send(tasks[label])
                    running[worker.channel] = (label, worker)
                left = None if until == math.inf else max(until - time.monotonic(), 0.0)
                for channel in connection.wait(list(running), left):
                    label, worker = running.pop(channel)
                    try:
                        worker.check(label)
                    except ChildProcessError as error:
                        if failed is None:
                            running[channel] = (label, worker)
                            raise
                        failed(str(error))
                    else:
                        done.add(label)
                    if not worker.ended:
                        idle.append(worker)
                    if label in done:
                        yield label
        finally:
            workers = [*idle, *(worker for _, worker in running.values())]
            for worker in workers:
                worker.channel.close()  # one that is just done waits for another task, not for SIGTERM
                worker.process.terminate()
            for worker in workers:
                worker.process.join()


class _Worker:
    """A process that does what it is sent, a task after the other."""

    def __init__(self, gpu: int, alone: bool) -> None:
        self.gpu, self.ended = gpu, False
        context = get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, torch.get_num_threads()))
        with _environment(VISIBLE, _visible(gpu), anew=True) if alone else nullcontext():
            self.process.start()
        theirs.close()

    def check(self, label: str) -> None:
        """Wait for the task; ChildProcessError if it failed."""
        try:
            error = self.channel.recv()
        except EOFError:
            self.process.join()
            self.ended = True
            error = f"ended with {self.process.exitcode}"
        if error is not None:
            raise ChildProcessError(f"{label}: {error}")


class _Lines(io.TextIOWrapper):
    """Not a terminal, on which the bars of several processes would overwrite each other."""

    def isatty(self) -> bool:
        return False


def _work(channel: connection.Connection, threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    sys.stderr = _Lines(sys.stderr.buffer, line_buffering=True)
    with open(os.devnull, "w") as sys.stdout:
        try:
            while True:
                channel.send(_failure(channel.recv()))
        except (KeyboardInterrupt, EOFError, ConnectionError):  # the last two: nobody waits for it any more
            sys.exit(130)


def _failure(task: Callable[[], object]) -> str | None:
    """Do a task; its message if it failed."""
    try:
        task()
    except Exception as error:
        return str(error) or repr(error)
    return None


def _visible(gpu: int) -> str:
    """The name of one of the GPUs that this process sees."""
    names = os.environ.get(VISIBLE)
    return names.split(",")[gpu] if names else str(gpu)


@contextmanager
def _environment(name: str, value: str, anew: bool = False) -> Iterator[None]:
    """``name`` is ``value`` for what is started meanwhile; where it was set before, only where ``anew``."""
    before = os.environ.get(name)
    if before is not None and not anew:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


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
