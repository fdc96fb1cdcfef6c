"""PaTH and PaTH-FoX on one GPU: ours, our FoX and flash-linear-attention's PaTH, in one run.

    attnzoo bench path [--out DIR] [--shapes 2,24,16384,64]... [--kv-heads 6] [--only NAME]... [--seconds 330]

Each contender is checked against float64 (output and all gradients) before it is timed; a wrong result gets no speed.
Writes results.json and results.md. Decoding: one token after a cache, beside the same step in PyTorch operations.

q and k are RMS-normed per head, w is of unit length and beta uniform in 0..2, both float32; gates as in fox.py.
"Kept" is ``keep_carries``; what it keeps counts as extra memory.
flash-linear-attention multiplies the log gate by the scale; it is given log_decay / scale, so that all compute the
same function.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.benchmarks import attention
from attnzoo.benchmarks.attention import Contender, Inputs, compare, ratio, shape_tables, texts_of, time_and_memory
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
    markdown_table,
    milliseconds,
    preface,
    race,
    relative,
)
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.path import kept_fraction, path_attention, path_extend
from attnzoo.kernels.path.reference import path_reference

SHAPES = (
    (2, 24, 16384, 64), (2, 16, 16384, 128), (1, 24, 65536, 64),
    (64, 12, 1024, 64), (16, 12, 2048, 64), (8, 16, 4096, 128),  # the host counts
)  # fmt: skip
DECODE = ((32, 24, 16384, 64), (8, 24, 65536, 64))
ERRORS = ("o", "dq", "dk", "dv", "dw", "dbeta", "dg")
LIMIT = 2e-2  # largest allowed relative error in bf16
PRUNE = Prune(math.exp(-10.0))


draw = functools.partial(attention.draw, parts="w beta g")


def contenders() -> tuple[list[Contender], list[str]]:
    """The contenders that can be called here, and the reasons why others cannot."""

    def path(gated: bool, prune: Prune | None = None, keep: bool = False) -> Callable[[Inputs], Tensor]:
        return lambda x: path_attention(
            x.q, x.k, x.v, w=x.w, beta=x.beta, log_decay=x.g if gated else None, prune=prune, impl="triton",
            keep_carries=keep,
        )  # fmt: skip

    def fox(prune: Prune | None) -> Callable[[Inputs], Tensor]:
        return lambda x: fox_attention(x.q, x.k, x.v, log_decay=x.g, prune=prune, impl="triton")

    found = [
        Contender("PaTH", path(False), "q k v w beta"),
        Contender("PaTH-FoX", path(True), "q k v w beta g"),
        Contender("PaTH-FoX, pruned", path(True, PRUNE), "q k v w beta g"),
        Contender("PaTH, kept", path(False, keep=True), "q k v w beta"),
        Contender("PaTH-FoX, kept", path(True, keep=True), "q k v w beta g"),
        Contender("PaTH-FoX, pruned, kept", path(True, PRUNE, keep=True), "q k v w beta g"),
        Contender("FoX", fox(None), "q k v g"),
        Contender("FoX, pruned", fox(PRUNE), "q k v g"),
    ]
    missing: list[str] = []
    peer = load_peer("FLA", lambda: importlib.import_module("fla.ops.path_attn.parallel").parallel_path_attn, missing)
    if peer is None:
        return found, missing
    found.append(Contender("FLA PaTH", lambda x: peer(x.q, x.k, x.v, x.w, x.beta)[0], "q k v w beta"))
    found.append(
        Contender(
            "FLA PaTH-FoX",
            lambda x: peer(x.q, x.k, x.v, x.w, x.beta, x.g * math.sqrt(x.q.shape[-1]))[0],
            "q k v w beta g",
        )
    )
    return found, missing


def errors(peer: Contender, H: int, K: int, T: int = 2048, *, kv_heads: int | None = None) -> dict[str, float]:
    """The errors of output and gradients against float64 on the same bf16 inputs."""

    def exact(x: Inputs) -> Tensor:
        beta = x.beta if peer.reads("beta") else torch.zeros_like(x.beta)
        return path_reference(x.q, x.k, x.v, w=x.w, beta=beta, log_decay=x.g if peer.reads("g") else None)

    return compare(peer, draw(texts_of(peer.prunes, H, T, K), H, T, K, kv_heads=kv_heads), exact)


def decode_row(B: int, H: int, S: int, K: int, bandwidth: float, rep: int) -> dict[str, Any]:
    """A row of times for one token after S cached ones: our fused step, and the step in PyTorch operations."""
    keys = torch.randn(B, S, H, K, device="cuda")
    values = torch.randn(B, S + 1, H, K, device="cuda").bfloat16()
    x = draw(B, H, 1, K)
    gates = x.g.expand(B, S + 1, H).contiguous()

    def plain() -> tuple[Tensor, Tensor]:
        moved = torch.cat([keys - (x.beta[..., None] * (keys * x.w).sum(-1, keepdim=True)) * x.w, x.k.float()], 1)
        c = gates.flip(1).cumsum(1).flip(1) - gates
        logits = torch.einsum("bshk,bthk->bsht", moved, x.q.float())[..., 0] * K**-0.5 + c
        return torch.einsum("bsh,bshv->bhv", logits.softmax(1).bfloat16(), values)[:, None], moved

    def ours() -> tuple[Tensor, Tensor]:
        return path_extend(x.q, x.k, x.w, x.beta, keys, values, gates)

    with torch.no_grad():
        error = max(relative(a, b.double()) for a, b in zip(ours(), plain(), strict=True))
        bytes_moved = B * H * S * (8 * K + 2 * K + 4)
        row = {"B": B, "H": H, "S": S, "K": K, "error": f"{error:.1e}", "floor_ms": bytes_moved / bandwidth / 1e9}
        if error <= LIMIT:
            row |= {"ours_ms": milliseconds(ours, rep), "pytorch_ms": milliseconds(plain, rep)}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def run(
    out: Path, shapes: Sequence[tuple[int, ...]], only: Sequence[str], rep: int, seconds: float, decode: bool,
    kv_heads: int | None = None,
) -> None:  # fmt: skip
    """Measure, with ``decode`` cached steps too, print the table, and write results.json and results.md to ``out``.

    Args, and what is raised: as of :func:`attnzoo.benchmarks.fox.run`.
    """
    found, missing = contenders()
    peers, keep = chosen(found, only), keeper(out, table)
    result: Result = {"machine": describe_versions(), "missing": missing, "matmul_tflops": ceiling()}
    result |= {"copy_TBps": copy_bandwidth(), "decode": []}
    print(result, flush=True)

    def kept(x: Inputs) -> Result:
        if not any(peer.prunes for peer in peers):
            return {}
        share = kept_fraction(x.q, x.k, w=x.w, beta=x.beta, log_decay=x.g, prune=PRUNE)
        return {"kept": round(share.mean().item(), 4)}

    limits = dict.fromkeys(ERRORS, LIMIT)
    whole = race(
        result, peers, shapes or SHAPES, seconds, draw=draw, errors=errors, limits=limits, common=kept,
        times=lambda peer, x: time_and_memory(peer, x, rep), keep=keep, kv_heads=kv_heads,
    )  # fmt: skip
    for shape in DECODE if decode and whole else ():
        result["decode"].append(decode_row(*shape, result["copy_TBps"], rep))
        print(json.dumps(result["decode"][-1]), flush=True)
        keep(result)
        torch.cuda.empty_cache()
    finish(out, result, table)


def table(result: Result) -> str:
    """The results as Markdown."""
    lines = preface(result)

    def cells(r: Result, both: dict[str, float]) -> list[object]:
        fox = "FoX, pruned" if "pruned" in r["name"] else "FoX"
        same = f"FLA {r['name'].removeprefix('FLA ').partition(',')[0]}"  # the peer that computes the same function
        ratios = ratio(both.get(same), r["both_ms"]), ratio(r["both_ms"], both.get(fox))
        return [*ratios, f"{r['extra_GiB']:.2f}"]

    columns = ("times faster than FLA", "time / our FoX", "extra memory GiB")

    def kept(r: Result) -> str:
        return f"; PaTH-FoX's pruning keeps {r['kept']:.3f} of the blocks" if "kept" in r else ""

    lines += shape_tables(result, columns, cells, kept)
    if result["decode"]:
        lines += [
            "### One token after S cached ones (floor: keys read and written in float32, values and gates read)",
            "",
            *markdown_table(
                ("(B, H, S, K)", "ours ms", "floor ms", "PyTorch operations ms"),
                [
                    (tuple(r[n] for n in "BHSK"), *(r.get(n, "-") for n in ("ours_ms", "floor_ms", "pytorch_ms")))
                    for r in result["decode"]
                ],
            ),
            "",
        ]
    return "\n".join([*lines, *error_lines(result, ERRORS)]) + "\n"
