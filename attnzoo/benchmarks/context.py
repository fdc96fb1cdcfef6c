"""Context parallelism of FoX: one sequence on the GPUs of a host, beside the same on one of them.

A process per GPU, such as torchrun starts, checks outputs and gradients against one GPU, times forward + backward of
the attention, and counts the bytes that it sends. :mod:`attnzoo.benchmarks.shares` times what each of more ranks would
compute.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attnzoo import Gate, Prune, get
from attnzoo.benchmarks.measure import (
    Result,
    chosen_names,
    decay_lengths,
    describe_versions,
    headline,
    markdown_table,
    relative,
    save,
)
from attnzoo.parallel import Fragments
from attnzoo.parallel.collectives import traffic

SHAPES = ((1, 16, 32768, 128), (1, 16, 131072, 128))
EPS = math.exp(-10)
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gather": ("zigzag", "gather", {}),
    "heads": ("contiguous", "heads", {}),
    "ACP, gather": ("zigzag", "gather", {"prune": Prune(EPS)}),
    "ACP, heads": ("contiguous", "heads", {"prune": Prune(EPS)}),
    "ACP, pruned": ("contiguous", "pruned", {"prune": Prune(EPS)}),
    "ACP, pruned, zigzag": ("zigzag", "pruned", {"prune": Prune(EPS)}),
}


def run(out: Path, shapes: Sequence[tuple[int, ...]] = (), only: Sequence[str] = (), repeats: int = 5) -> None:
    """Measure every way of every shape, in each of the processes; the first writes what came out."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    backend = "nccl" if dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, device_id=torch.device("cuda", rank), **alone)
    try:
        rows = [row for shape in shapes or SHAPES for row in measure(shape, only, repeats)]
        if dist.get_rank() == 0:
            result: Result = {"machine": describe_versions(), "rows": rows}
            save(out, result, table(result))
    finally:
        dist.destroy_process_group()


def table(result: Result) -> str:
    """The results as Markdown."""
    shown = ("way", "shape", "ranks", "one_ms", "ms", "times_one", "sent_MB", "peak_GiB")
    lines = [headline(result), "", *markdown_table(shown, ([row[name] for name in shown] for row in result["rows"]))]
    return "\n".join(lines) + "\n"


def inputs(B: int, H: int, T: int, K: int) -> list[Tensor]:
    """q, k (normed), v and log decays of local and global heads, and an output's gradient, the same in each process."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, K, device="cuda").bfloat16() for _ in range(4))
    q, k = (F.rms_norm(x.float(), (K,)).bfloat16() for x in (q, k))
    generator = torch.Generator().manual_seed(0)
    g = -torch.rand(B, T, H, generator=generator) * 2 / decay_lengths(H, generator)
    return [q, k, v, g.cuda(), do]


def measure(shape: Sequence[int], only: Sequence[str], repeats: int) -> list[Result]:
    """Rows of one shape (B, H, T, K): the milliseconds of each way of exchange, beside those of one GPU."""
    B, H, T, K = shape
    *leaves, do = inputs(B, H, T, K)
    form = get("fox").forms["triton"]
    rows: list[Result] = []
    alone: dict[str, float] = {}
    for name in chosen_names([*WAYS], only):
        table, transport, options = WAYS[name]
        fragments = getattr(Fragments, table)(T, dist.group.WORLD)
        kind = "pruned" if options else "dense"
        whole = functools.partial(both, form, leaves, do, **options)
        if kind not in alone:
            alone[kind] = timed(whole, repeats)
        local = [fragments.shard(x).contiguous() for x in leaves]
        given = {"fragments": fragments, "transport": transport, **options}
        shared = functools.partial(both, form, local, fragments.shard(do), **given)
        errors = [relative(x, fragments.shard(y)) for x, y in zip(shared(), whole(), strict=True)]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = traffic.bytes
        shared()
        sent = torch.tensor(float(traffic.bytes - before), device="cuda")
        dist.all_reduce(sent)
        took, one = timed(shared, repeats), alone[kind]
        row = {
            "way": name, "shape": list(shape), "ranks": fragments.ranks, "one_ms": round(one, 2), "ms": round(took, 2),
            "times_one": round(one / took, 2), "sent_MB": round(float(sent) / 1e6, 1),
            "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2), "errors": [f"{x:.1e}" for x in errors],
        }  # fmt: skip
        rows.append(row)
        if dist.get_rank() == 0:
            print(row, flush=True)
    return rows


def both(form: Callable[..., Tensor], leaves: Sequence[Tensor], do: Tensor, **options: Any) -> list[Tensor]:
    """The output and gradients of q, k, v and the gate."""
    q, k, v, g = (x.detach().requires_grad_() for x in leaves)
    o = form(q, k, v, Gate(log_decay=g), **options)
    return [o, *torch.autograd.grad(o, (q, k, v, g), do)]


def timed(call: Callable[[], Any], repeats: int) -> float:
    """The median milliseconds of a call that all processes make together."""
    wait: Callable[[], Any] = dist.barrier if dist.is_initialized() else lambda: None
    times = []
    for n in range(repeats + 2):
        torch.cuda.synchronize()
        wait()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wait()
        if n >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
