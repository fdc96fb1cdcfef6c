"""Processes that train, forked from one that has imported all they need, so that each costs a fraction of a second."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from attnzoo.config import TrainConfig


def environment() -> dict[str, str]:
    """For a process that a test starts: this checkout, on one thread."""
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def import_all(config: TrainConfig) -> None:
    """Import what each child would otherwise import for itself; no backward pass, for its threads do not fork."""
    import accelerate  # noqa: F401
    import rich.console  # noqa: F401
    import torch._dynamo
    import torch.distributed.tensor

    from attnzoo.models import LanguageModel
    from attnzoo.training.optimizer import build_optimizer

    torch.set_num_threads(1)
    model = LanguageModel(config.model)
    build_optimizer(model, config.optimizer)
    model(torch.zeros(1, 4, dtype=torch.int64))
    gc.collect()
    gc.freeze()  # each training collects garbage: not in all that was imported


def start_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process; returns its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except KeyboardInterrupt:
            status = 130
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def end_of(child: int) -> int:
    """How a process ended: minus the signal, or the exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process and return how it ended."""
    return end_of(start_child(work))
