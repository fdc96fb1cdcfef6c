"""Wall on one GPU: ours, our FoX without a gate and flash-linear-attention's Wall, in one run.

    attnzoo bench wall [--out DIR] [--shapes 2,24,16384,64]... [--only NAME]... [--seconds 400]

Each contender is checked against float64 (output and all gradients) before it is timed; a wrong result gets no speed.
Writes results.json and results.md.

q and k are RMS-normed per head; the gates of channels are what fox.py has for heads, float32. FoX without a gate is
plain softmax attention on our kernels: what Wall's decays cost. Tuning the peer over its 24 tiles takes many minutes,
so it runs with one of them (``TILES`` of ``forms/backends/fla_tuning.py``); ``ATTNZOO_FLA_TUNING=full`` measures all.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.benchmarks import attention
from attnzoo.benchmarks.attention import Contender, Inputs, compare, ratio, shape_tables, time_and_memory
from attnzoo.benchmarks.measure import (
    Result,
    ceiling,
    chosen,
    copy_bandwidth,
    describe_versions,
    error_lines,
    finish,
    keeper,
    load_peer,
    preface,
    race,
)
from attnzoo.forms.backends import fla_tuning
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.wall import wall_attention
from attnzoo.kernels.wall.reference import wall_reference

SHAPES = ((2, 24, 16384, 64), (2, 16, 16384, 128), (8, 24, 4096, 64))
ERRORS = ("o", "dq", "dk", "dv", "da")
LIMIT = 2e-2  # largest allowed relative error in bf16


draw = functools.partial(attention.draw, parts="a")


def contenders() -> tuple[list[Contender], list[str]]:
    """The contenders that can be called here, and the reasons why others cannot."""
    found = [
        Contender("Wall", lambda x: wall_attention(x.q, x.k, x.v, log_diag=x.a, impl="triton"), "q k v a"),
        Contender("FoX without a gate", lambda x: fox_attention(x.q, x.k, x.v, log_decay=None, impl="triton"), "q k v"),
    ]
    missing: list[str] = []
    peer = load_peer("FLA", _peer, missing)
    if peer is not None:
        found.append(Contender("FLA Wall", lambda x: peer(x.q, x.k, x.v, x.a), "q k v a"))
    return found, missing


def _peer() -> Callable[..., Tensor]:
    call: Callable[..., Tensor] = importlib.import_module("fla.ops.wall_attn").parallel_wall_attn
    fla_tuning.will_run("Wall, a benchmark")
    fla_tuning.shorten()
    return call


def errors(peer: Contender, x: Inputs) -> dict[str, float]:
    """The errors of output and gradients against float64 on the same bf16 inputs."""

    def exact(x: Inputs) -> Tensor:
        return wall_reference(x.q, x.k, x.v, log_diag=x.a if peer.reads("a") else torch.zeros_like(x.a))

    return compare(peer, x, exact)


def run(out: Path, shapes: Sequence[tuple[int, ...]], only: Sequence[str], rep: int, seconds: float) -> None:
    """Measure, print the table, and write results.json and results.md to ``out``.

    Args: as of :func:`attnzoo.benchmarks.fox.run`.
    """
    found, missing = contenders()
    result: Result = {"machine": describe_versions(), "missing": missing, "matmul_tflops": ceiling()}
    result |= {"copy_TBps": copy_bandwidth(), "all_tiles": fla_tuning.all_tiles()}
    print(result, flush=True)
    race(
        result, chosen(found, only), shapes or SHAPES, seconds, draw=draw, limits=dict.fromkeys(ERRORS, LIMIT),
        errors=lambda peer, H, K: errors(peer, draw(1, H, 2048, K)), common=lambda x: {},
        times=lambda peer, x: time_and_memory(peer, x, rep), keep=keeper(out, table),
    )  # fmt: skip
    finish(out, result, table)


def table(result: Result) -> str:
    """The results as Markdown."""
    tiles = "the fastest of their tiles" if result["all_tiles"] else "one of their tiles"
    lines = preface(result, f"FLA's kernels run with {tiles}.")

    def cells(r: Result, both: dict[str, float]) -> list[object]:
        peer = both.get("FLA Wall") if "Wall" in r["name"] else None  # FoX has another function and no ratio
        ratios = ratio(peer, r["both_ms"]), ratio(r["both_ms"], both.get("FoX without a gate"))
        return [*ratios, f"{r['extra_GiB']:.2f}"]

    columns = ("times faster than FLA", "time / our FoX without a gate", "extra memory GiB")
    lines += shape_tables(result, columns, cells)
    return "\n".join([*lines, *error_lines(result, ERRORS)]) + "\n"
