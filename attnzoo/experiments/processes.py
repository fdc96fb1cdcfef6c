"""Several trainings in parallel, each in its own process."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection, get_context
from typing import Any

from attnzoo.errors import message

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that a process sees
PATIENCE = 60  # seconds that a stopped process has to put away what it holds: a checkpoint, semaphores of PyTorch
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read by torch when it is imported


def run_tasks(
    tasks: Mapping[str, Callable[[], object]],
    jobs: int,
    until: float = math.inf,
    after: Mapping[str, Collection[str]] | None = None,
    gpus: int = 1,
    failed: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Run tasks in ``jobs`` processes beside this one, and yield the label of each finished task.

    A process takes another task when it has finished one. Each has as many threads as this process, since a result may
    depend on their number. OpenMP threads wait without spinning, which would slow processes on the same cores.

    Args:
        tasks: label -> a function of a module and its arguments, as :func:`functools.partial` makes them; what it
            prints is dropped, and progress comes in lines, not as a bar.
        jobs: processes at a time.
        until: the time by `time.monotonic` at which remaining tasks are dropped and running ones are stopped: by
            SIGTERM, and killed where that does not end them in a minute.
        after: label -> labels of tasks that must be done before; the others start in the order of `tasks`.
        gpus: the number of GPUs that the processes are spread over, each of which then sees one; 1 changes nothing, nor
            does a single process.
        failed: called with the message of a failed task; other tasks continue unless they wait for it. None: the others
            are stopped, as by SIGTERM.

    Raises:
        ChildProcessError: a task failed, with its label and its message, and `failed` is None.
    """
    after = after or {}
    waiting, done = list(tasks), set[str]()
    gpus = min(gpus, jobs)
    idle: list[_Worker] = []
    running: dict[Any, tuple[str, _Worker]] = {}  # by the channel that reports the end of a task
    with _environment("OMP_WAIT_POLICY", "passive"), _interrupted_by(signal.SIGTERM, signal.SIGHUP):
        try:
            while (waiting or running) and time.monotonic() < until:
                ready = [label for label in waiting if done.issuperset(after.get(label, ()))]
                if not ready and not running:  # all remaining tasks wait for a failed one
                    return
                for label in ready[: jobs - len(running)]:
                    waiting.remove(label)
                    busy = [worker.gpu for _, worker in running.values()]
                    gpu = min(range(gpus), key=busy.count)  # the GPU with the fewest processes
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
                worker.channel.close()  # an idle worker ends when its channel closes
                worker.process.terminate()
            for worker in workers:
                worker.process.join(PATIENCE)
                worker.process.kill()
                worker.process.join()


def gpus_of(device: str) -> int:
    """The number of GPUs that trainings with this `device` are spread over: 1 where they run on a CPU."""
    import torch

    return torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 1


class _Worker:
    """A process that runs the tasks it is sent, one after the other."""

    def __init__(self, gpu: int, alone: bool) -> None:
        import torch

        self.gpu, self.ended = gpu, False
        context = get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,))
        own = dict.fromkeys(THREADS, str(torch.get_num_threads()))
        if alone:
            own[VISIBLE] = _visible(gpu)
        with ExitStack() as stack:
            for name, value in own.items():
                stack.enter_context(_environment(name, value, anew=True))
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
    """An output stream that is no terminal, so that processes print no progress bars over each other."""

    def isatty(self) -> bool:
        return False


def _work(channel: connection.Connection) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stderr = _Lines(sys.stderr.buffer, line_buffering=True)
    with open(os.devnull, "w") as sys.stdout:
        # the parent has closed the channel or ended; a signal may come while this is found
        with suppress(KeyboardInterrupt), suppress(EOFError, ConnectionError):
            while True:
                channel.send(_failure(channel.recv()))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(130)


def _failure(task: Callable[[], object]) -> str | None:
    """Run a task; return its error message if it failed."""
    try:
        task()
    except Exception as error:
        return message(error)
    return None


def _visible(gpu: int) -> str:
    """The name, for CUDA_VISIBLE_DEVICES, of one of the GPUs that this process sees."""
    names = os.environ.get(VISIBLE)
    return names.split(",")[gpu] if names else str(gpu)


@contextmanager
def _environment(name: str, value: str, anew: bool = False) -> Iterator[None]:
    """A context in which the environment variable ``name`` is ``value``; one already set changes only if ``anew``."""
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
    """A context in which these signals raise KeyboardInterrupt, so that the processes are stopped too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
