"""Forgetting attention on one GPU: ours beside every peer that is installed, in one run.

    attnzoo bench fox [--out DIR] [--official FILE] [--shapes 2,24,16384,64]... [--kv-heads 6] [--plot] [--seconds 500]

Peers: scaled_dot_product_attention (cuDNN and FlashAttention; no gate, the ceiling), flash-linear-attention,
FlexAttention, flash-sparse-attn (with one of its tiles) and the official FoX kernel (``forgetting_transformer``, or its
single file with --official). Each is checked against float64 before it is timed; a wrong result gets no speed. Writes
results.json and results.md, and with --plot time against context length (1k to 128k) as plot.svg. With --kv-heads query
heads share key heads: ours and flash-linear-attention's kernel do so, for the others k and v are repeated in each call.

Ours is timed with One-Pass Forgetting too (a retention per key that falls with its age, and pruning), and in a sliding
window.

Gates: 75% of the heads decay with a 1/e length log-uniform in 8..256 tokens, the rest in 1e5..1e6; q and k are
RMS-normed per head. TFLOP/s are nominal: 4 B H T^2 K / 2 forward and 3.5 times that forward + backward, pruned or not.
"Over its share": forward + backward over the share of blocks that are kept of the time without pruning; 1.00 would be
time proportional to what is kept. "Of the host": milliseconds after which forward + backward returns to Python.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune
from attnzoo.benchmarks import attention
from attnzoo.benchmarks.attention import (
    Contender,
    Inputs,
    compare,
    host_time_of,
    ratio,
    shape_tables,
    texts_of,
    time_peer,
)
from attnzoo.benchmarks.measure import (
    Result,
    ceiling,
    chosen,
    describe_versions,
    error_lines,
    headline,
    keeper,
    load_peer,
    not_measured,
    race,
    save,
)
from attnzoo.files import run_file
from attnzoo.forms.backends import fla_kernels
from attnzoo.kernels.common.retention import Retention, Rule
from attnzoo.kernels.fox import fox_attention, kept_fraction
from attnzoo.kernels.fox.reference import fox_reference
from attnzoo.registry import get

SHAPES = (
    (2, 24, 16384, 64), (2, 16, 16384, 128), (8, 24, 4096, 64), (1, 24, 65536, 64),
    (64, 12, 1024, 64), (16, 12, 2048, 64), (4, 12, 512, 64),  # the host counts
)  # fmt: skip
IN_KEYS = "gates in keys"
IN_16_BITS = "dg in 16 bits"  # the sum of a key channel's gradients, which a kernel has rounded
# of relative errors: twice the peers' usual ones in bf16
LIMITS = {"o": 4e-3, "dq": 6e-3, "dk": 6e-3, "dv": 6e-3, "dg": 8e-3, "dr": 8e-3, IN_16_BITS: 5e-2}
PRUNE = {bound: Prune(math.exp(-10.0), bound) for bound in ("paper", "tail")}


WINDOW = 1024
IN_WINDOW = f"a window of {WINDOW}"
FORGETS = Rule(temperature=64.0, threshold=0.5, limit=30.0, remembers=16)  # the defaults of attnzoo.Forgetting

draw = functools.partial(attention.draw, parts="g r")


def official_module(path: Path | None) -> Any:
    """The official kernel, from the installed package or from its file.

    Raises:
        ImportError: it is not installed.
        ValueError: the file fails.
    """
    if path is None:
        return importlib.import_module("forgetting_transformer.ops.forgetting_attention")
    return run_file(path)


def contenders(official: Path | None) -> tuple[list[Contender], list[str]]:
    """The contenders that can be called here, and the reasons why others cannot."""
    found: list[Contender] = []
    missing: list[str] = []
    apart: dict[str, Any] = {"head_first": True, "shares": False}

    def ours(prune: Prune | None, forgets: bool = False, window: int | None = None) -> Callable[[Inputs], Tensor]:
        def call(x: Inputs) -> Tensor:
            options: dict[str, Any] = {"retention": Retention(x.r, FORGETS)} if forgets else {"window": window}
            o: Tensor = fox_attention(x.q, x.k, x.v, log_decay=x.g, prune=prune, impl="triton", **options)
            return o

        return call

    def sdpa(backend: SDPBackend) -> Callable[[Inputs], Tensor]:
        def call(x: Inputs) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)

        return call

    def in_keys(backend: SDPBackend) -> Callable[[Inputs], Tensor]:
        form = get("fox").forms["sdpa"]

        def call(x: Inputs) -> Tensor:
            with sdpa_kernel(backend):
                o: Tensor = form(x.q, x.k, x.v, Gate(log_decay=x.g))
                return o

        return call

    found.append(Contender("ours", ours(None)))
    found += [Contender(f"ours, pruned ({bound})", ours(PRUNE[bound])) for bound in PRUNE]
    found.append(Contender("ours, One-Pass Forgetting", ours(PRUNE["tail"], forgets=True), "q k v g r"))
    found.append(Contender(f"ours, {IN_WINDOW}", ours(None, window=WINDOW)))
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention", SDPBackend.FLASH_ATTENTION)):
        found.append(Contender(f"SDPA {name} (no gate)", sdpa(backend), "q k v", **apart))
        found.append(Contender(f"SDPA {name}, {IN_KEYS}", in_keys(backend)))
    kernel = load_peer("official", lambda: official_module(official).forgetting_attention, missing)
    if kernel is not None:

        def threshold(x: Inputs) -> Tensor:
            B, H, T, K = x.q.shape
            return torch.full((B, H), -(2 * math.sqrt(K) + math.log(T)) - 10.0, device="cuda")

        def official_call(pruned: bool) -> Callable[[Inputs], Tensor]:
            def call(x: Inputs) -> Tensor:
                limit = threshold(x) if pruned else None
                o: Tensor = kernel(x.q, x.k, x.v, x.g, head_first=True, adaptive_threshold=limit)
                return o

            return call

        found += [
            Contender("official", official_call(False), **apart),
            Contender("official, pruned", official_call(True), **apart),
        ]
    parallel = load_peer(
        "FLA", lambda: importlib.import_module("fla.ops.forgetting_attn").parallel_forgetting_attn, missing
    )
    if parallel is not None:
        alone = {fla_kernels.SWITCHES["tilelang"]: "0"}
        found.append(Contender("FLA", lambda x: parallel(x.q, x.k, x.v, x.g), switches=alone))
        other = load_peer("FLA, TileLang", fla_kernels.require_tilelang, missing)
        if other is not None:
            found.append(replace(found[-1], name="FLA, TileLang", switches=other))
    gated = load_peer("flash-sparse-attn", flash_sparse, missing)
    if gated is not None:
        found += [
            Contender("flash-sparse-attn", lambda x: gated(x, 0.0), shares=False, lengths=(16384,)),
            Contender("flash-sparse-attn, skipping", lambda x: gated(x, None), shares=False, lengths=(16384,)),
        ]
    found.append(Contender("FlexAttention", FlexFox(), **apart, lengths=(16384,)))
    return found, missing


SPARSE_TILES = {  # of flash-sparse-attn's 54 for each: rows, keys, warps, stages and programs of a cluster
    "fwd_gated": (128, 64, 8, 3, 1),
    "bwd_gated": (64, 128, 8, 2, 1),
}


def flash_sparse() -> Callable[[Inputs, float | None], Tensor]:
    """FoX by flash-sparse-attn's gated kernels, a function of inputs and a threshold for skipping blocks (None: its
    own).

    Its logits are scale (q k + alpha delta): FoX with alpha = 1 and delta = -c / scale, c the running sum of the gate.
    """
    folder = "flash_sparse_attn.ops.triton"
    if importlib.util.find_spec("flash_sparse_attn") is not None and importlib.util.find_spec("triton_kernels") is None:
        # its projections, not used here, import a package that no index has
        for part, name in (("flash_proj_fwd", "_flash_proj_forward"), ("flash_proj_bwd", "_flash_proj_backward")):
            stub = ModuleType(f"{folder}.{part}")
            setattr(stub, name, None)
            sys.modules.setdefault(stub.__name__, stub)
    attend = importlib.import_module("flash_sparse_attn").flash_gated_attn_func
    # its tuning takes minutes, and its first call returns the sum of all measured tiles' gradients
    tiles: Any = importlib.import_module(f"{folder}.launch_template")
    tiles.load_launch_config = lambda **options: SPARSE_TILES[options["kernel_name"]]

    def call(x: Inputs, threshold: float | None) -> Tensor:
        c = x.g.cumsum(1)
        o: Tensor = attend(
            x.q, x.k, x.v, torch.ones_like(c), -c * math.sqrt(x.q.shape[-1]), is_causal=True,
            softmax_threshold=threshold, gate_threshold=threshold, is_logsigmoid_gate=False,
        )  # fmt: skip
        return o

    return call


class FlexFox:
    """FlexAttention with the gate as a score modification; block masks are cached per length."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.mask: dict[int, Any] = {}
        self.create, self.flex = create_block_mask, torch.compile(flex_attention, dynamic=False)

    def __call__(self, x: Inputs) -> Tensor:
        T = x.q.shape[2]
        if T not in self.mask:
            self.mask[T] = self.create(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")
        c = x.g.cumsum(-1)
        rows, keys = c, c.clone()  # its backward refuses one tensor indexed by both i and j

        def bias(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + rows[b, h, i] - keys[b, h, j]

        return self.flex(x.q, x.k, x.v, score_mod=bias, block_mask=self.mask[T])


def errors(peer: Contender, H: int, K: int, T: int = 2048, *, kv_heads: int | None = None) -> dict[str, float]:
    """The errors of output and gradients against float64 on the same bf16 inputs, which are enough for pruning."""

    def exact(x: Inputs) -> Tensor:
        retention = Retention(x.r, FORGETS) if peer.reads("r") else None
        window = WINDOW if IN_WINDOW in peer.name else None
        gates = x.g if peer.reads("g") else None
        return fox_reference(x.q, x.k, x.v, log_decay=gates, retention=retention, window=window)

    found = compare(peer, draw(texts_of(peer.prunes, H, T, K), H, T, K, kv_heads=kv_heads), exact)
    return {IN_16_BITS if name == "dg" and IN_KEYS in peer.name else name: error for name, error in found.items()}


def run(
    out: Path, shapes: Sequence[tuple[int, ...]], only: Sequence[str], rep: int, seconds: float, official: Path | None,
    plot: bool, kv_heads: int | None = None,
) -> None:  # fmt: skip
    """Measure, print the table, and write results.json, results.md and (for ``plot``) plot.svg to ``out``.

    Args:
        out: an existing folder, or one to make.
        shapes: (B, H, T, K) each; empty for the usual ones.
        only: names of contenders, or their beginnings (:func:`~attnzoo.benchmarks.measure.chosen_names`).
        rep: milliseconds of measuring for each time.
        seconds: time after which no further contender is started.
        official: file of the authors' kernel; None: without it.
        plot: whether times by context length are measured and drawn too.
        kv_heads: heads of k and v; None: as many as query heads.

    Raises:
        ValueError: heads that cannot share ``kv_heads`` evenly; an unknown contender.
    """
    found, missing = contenders(official)
    peers, keep = chosen(found, only), keeper(out, table)
    result: Result = {"machine": describe_versions(), "missing": missing, "matmul_tflops": ceiling()}
    print(result["machine"], f"matmul {result['matmul_tflops']:.0f} TFLOP/s", flush=True)
    print(*not_measured(missing), sep="\n", flush=True)

    def kept(x: Inputs) -> Result:
        if not any(peer.prunes for peer in peers):
            return {}
        bound = torch.full((x.q.shape[2],), math.sqrt(x.q.shape[3]), device="cuda")
        shares = {
            name: kept_fraction(x.q, x.k, log_decay=x.g, prune=prune, logit_bound=bound if name == "paper" else None)
            for name, prune in PRUNE.items()
        }
        return {"kept": {name: round(share.mean().item(), 4) for name, share in shares.items()}}

    def times(peer: Contender, x: Inputs) -> Result | None:
        B, T, H, K = x.q.shape
        if peer.lengths and T not in peer.lengths:
            return None
        forward, both = time_peer(peer, x, rep)
        flops = 2 * B * H * T * T * K
        rate = 3.5 * flops / both / 1e9
        return {
            "forward_ms": round(forward, 3),
            "both_ms": round(both, 3),
            "host_ms": round(host_time_of(peer, x), 3),
            "forward_tflops": round(flops / forward / 1e9),
            "both_tflops": round(rate),
            "of_matmul": round(rate / result["matmul_tflops"], 3),
        }

    race(
        result, peers, shapes or SHAPES, seconds, draw=draw, errors=errors, limits=LIMITS, common=kept, times=times,
        keep=keep, kv_heads=kv_heads,
    )  # fmt: skip
    save(out, result, table(result))
    if plot:
        result["lengths"] = lengths(seconds, official, {row["name"] for row in result["rows"]})
        save(out, result, table(result))
        draw_lengths(result, out)
    print(table(result))


def table(result: Result) -> str:
    """The results as Markdown; ratios are to the official kernel without and with pruning."""
    lines = [
        headline(result),
        f"8192^3 matmul: {result['matmul_tflops']:.0f} TFLOP/s.",
        *not_measured(result["missing"]),
    ]
    if "kv_heads" in result:
        lines.append("Each call of a kernel that cannot share keys, as ours and FLA do, repeats k and v.")

    def cells(r: Result, both: dict[str, float]) -> list[object]:
        shares = r.get("kept", {})
        share = shares.get(r["name"].removeprefix("ours, pruned (").removesuffix(")"), 0.0) * both.get("ours", 0.0)
        over = f"{r['both_ms'] / share:.3f}" if share else "-"
        ratios = (ratio(both.get(o), r["both_ms"]) for o in ("official", "official, pruned"))
        return [r["both_tflops"], f"{r['of_matmul']:.2f}", over, *ratios]

    def kept(r: Result) -> str:
        shares = [f"{bound} {share:.3f}" for bound, share in r.get("kept", {}).items()]
        return f"; blocks kept: {', '.join(shares)}" if shares else ""

    columns = ("nominal TFLOP/s", "of matmul", "over its share", "x official", "x official, pruned")
    lines += ["", *shape_tables(result, columns, cells, kept)]
    return "\n".join([*lines, *error_lines(result, tuple(LIMITS))]) + "\n"


def lengths(seconds: float, official: Path | None, timed: Collection[str]) -> list[dict[str, Any]]:
    """The forward + backward times by context length of the timed contenders, with B T = 131072."""
    deadline = time.time() + seconds
    wanted = ("ours", "ours, pruned (tail)", "SDPA cuDNN (no gate)", "official", "official, pruned", "FLA")
    peers = [p for p in contenders(official)[0] if p.name in wanted and p.name in timed]
    rows: list[dict[str, Any]] = []
    for T in (2**n for n in range(10, 18)):
        x = draw(131072 // T, 8, T, 64)
        for peer in peers:
            if time.time() > deadline:
                print("out of time at", T, peer.name, flush=True)
                return rows
            rows.append({"name": peer.name, "T": T, "both_ms": time_peer(peer, x, 40)[1]})
            print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    return rows


def draw_lengths(result: Result, out: Path) -> None:
    """Draw time against context length, as ``plot.svg`` in the folder ``out``."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.4, 4))
    rows = result["lengths"]
    for name in dict.fromkeys(r["name"] for r in rows):
        points = [(r["T"], r["both_ms"]) for r in rows if r["name"] == name]
        ax.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name, base=2)
    ax.set(
        xlabel="context length",
        ylabel="forward + backward, ms",
        title=f"131072 tokens, 8 heads of 64, {result['machine']['gpu']}",
    )
    ax.legend(fontsize=8)
    fig.savefig(out / "plot.svg", bbox_inches="tight")
