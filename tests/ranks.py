"""Ranks as threads of one process, with torch's own threaded process group: quick, and each has its own gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded


def on_ranks(ranks: int, fn: Callable[[int], Any]) -> list[Any]:
    """What ``fn(rank)`` gives on each of so many ranks; the first error of any."""
    found: list[Any] = [None] * ranks
    failed: list[BaseException] = []

    def work(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            found[rank] = fn(rank)
        except BaseException as error:
            failed.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        store = dist.HashStore()
        threads = [threading.Thread(target=work, args=(rank, store), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for the others"
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failed:
        raise next((error for error in failed if not isinstance(error, SystemExit)), failed[0])
    return found
