"""Several processes of one host, whose failure is reported in one line."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

logger = logging.getLogger(__name__)

QUIET = "ATTNZOO_LAUNCHED"  # set for processes whose launcher reports errors
PR_SET_PDEATHSIG = 1  # of prctl(2)
GONE = "another process has gone"
# Messages of gloo and NCCL about a lost peer, or one that hangs; neither has an error class for it.
LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited",
    (WAITED := "Timed out waiting"),
)  # fmt: skip


class LaunchError(RuntimeError):
    """One of several training processes has failed, and all have ended."""


def check_processes(processes: int, device: str) -> None:
    """Raise where ``processes`` training processes cannot be started.

    Args:
        processes: number of processes.
        device: `TrainConfig.device`.

    Raises:
        ValueError: more processes than GPUs, where GPUs are used; or this process was itself launched.
    """
    import torch

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            f"processes={processes}: this is a process of a launcher already, which says how many there are"
        )
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if 0 < gpus < processes:
        raise ValueError(f"processes={processes}: expected one for each GPU, and this machine has {gpus}")


def launch(command: Sequence[str], processes: int) -> None:
    """Run a command in several connected processes of this host, and wait for all of them.

    When one fails the others are ended.

    Args:
        command: the words of the command.
        processes: number of processes.

    Raises:
        LaunchError: one failed; with its error message or the signal that ended it.
        KeyboardInterrupt: this process was told to stop.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # its tables and tracebacks would hide our line
    os.environ[QUIET] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with tempfile.TemporaryDirectory(prefix="attnzoo-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            raise LaunchError(first_failure(error.failures, processes)) from None
        except SignalException as error:
            raise KeyboardInterrupt(f"stopped by {error.sigval.name}") from None


@contextmanager
def waiting_for_others(limit: timedelta) -> Iterator[None]:
    """The block that connects this process with others; it says for how long it waits for those that nobody launched.

    Variables left over in the environment may name processes that nobody starts; the error says so.

    Args:
        limit: time until it gives up.

    Raises:
        TimeoutError: the other processes have not started.
    """
    import torch

    processes = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ or not processes.isdecimal() or int(processes) < 2:
        yield
        return
    rank, seconds = os.environ.get("RANK", "0"), limit.total_seconds()
    alone = "unset RANK and WORLD_SIZE to train in one process"
    text = "RANK=%s and WORLD_SIZE=%s are set: this process waits for the others, at most %g seconds; %s"
    logger.warning(text, rank, processes, seconds, alone)
    try:
        yield
    except torch.distributed.DistError as error:
        raise TimeoutError(
            f"RANK={rank}, WORLD_SIZE={processes}: the other processes have not come in {seconds:g} seconds; {alone}"
        ) from error


@contextmanager
def connected(device: str, limit: timedelta) -> Iterator[tuple[str, Any]]:
    """The block in which the processes of a launcher are connected: this one's device, and the group of all.

    Args:
        device: `cpu` or `cuda`.
        limit: time that an exchange may take.

    Yields:
        `device` and None in a process that no launcher started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield device, None
        return
    import torch
    from torch import distributed as dist

    end_with_launcher()
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=limit)
    try:
        yield device, dist.group.WORLD
    finally:
        dist.destroy_process_group()


def end_with_launcher() -> None:
    """Have this process stopped when the process of :func:`launch` ends, even by SIGKILL (on Linux)."""
    if QUIET in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def first_failure(failures: Mapping[int, ProcessFailure], processes: int) -> str:
    """A line that says which process failed and why; not one that failed because it lost another."""

    def secondary(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        return GONE in str(failure.message), failure.exitcode == -signal.SIGTERM, rank

    rank = min(failures, key=secondary)
    failure = failures[rank]
    if failure.exitcode < 0:
        waited = next((other for other in failures if WAITED in str(failures[other].message)), None)
        why = f"ended by {signal.Signals(-failure.exitcode).name}"
        if waited is not None:  # by the launcher, after that
            why = f"no answer in the time that an exchange may take (process {waited} has waited)"
        why += "; the same command goes on from the last checkpoint"
    elif os.path.isfile(failure.error_file):
        why = str(failure.message)
    else:
        why = f"ended with status {failure.exitcode}"
    return f"process {rank} of {processes}: {why}"


def tell_launcher(message: str) -> bool:
    """Write a message to torch's error file; return whether the launcher will print it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with open(path, "w") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)
    return bool(path) and QUIET in os.environ


def lost_another(error: Exception) -> bool:
    """Whether an error means that another process of the run was lost."""
    return isinstance(error, RuntimeError) and "RANK" in os.environ and any(words in str(error) for words in LOST)
