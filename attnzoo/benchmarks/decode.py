"""One decoding step of FoX on one GPU, beside its peers: one query token per head over cached keys.

    attnzoo bench decode [--out DIR] [--official FILE] [--shapes 32,24,16384,64]...

Shapes are B, H, cached tokens, K. Gates and pruning as in fox.py; q and k are RMS-normed per head, so ours is
given the logit bound sqrt(K), as a layer with QK-norm gives it. One-Pass Forgetting has a budget of 4096 keys; to be
comparable with a window of as many it holds the last ones. Each contender is checked against float64 before it is
timed. The floor is the bytes of k and v at the measured copy bandwidth. Writes results.json and results.md.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.benchmarks.attention import Inputs
from attnzoo.benchmarks.fox import PRUNE, draw, official_module
from attnzoo.benchmarks.measure import (
    Result,
    copy_bandwidth,
    describe_versions,
    finish,
    headline,
    keeper,
    load_peer,
    markdown_table,
    milliseconds,
    not_measured,
    relative,
)
from attnzoo.encodings.fox import FORMS
from attnzoo.forgetting.network import ForgetNetwork
from attnzoo.forgetting.rules import Forgetting
from attnzoo.forgetting.steps import extend_forgetting, take_token
from attnzoo.forms.caches.pages.page_table import PAGE, PoolSizes
from attnzoo.forms.caches.pages.pool import KeyPool
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.kernels.decode import paged_attention
from attnzoo.kernels.fox import GateSums, fox_attention
from attnzoo.kernels.fox.reference import fox_reference

SHAPES = ((32, 24, 16384, 64), (8, 24, 65536, 64), (16, 16, 16384, 128))
LIMIT = 6e-3  # largest allowed error of the output in bf16
LIMIT_OF_8_BITS = 0.06  # with keys and values in e4m3
KEPT = 4096
IN_WINDOW = f"a window of {KEPT}"
Step = Callable[[], Tensor]


def contenders(x: Inputs, official: Path | None, missing: list[str]) -> dict[str, Step]:
    """The contenders' steps, which return [B, 1, H, V] for x with the last token's q, each in its fastest layout."""
    B, S, H, K = x.k.shape
    bound = torch.full((H,), math.sqrt(K), device="cuda")
    k, v, g = (t.transpose(1, 2).contiguous() for t in (x.k, x.v, x.g))  # [B, H, S, .]
    q = x.q.transpose(1, 2).contiguous()

    def ours(gate: dict[str, Any], **options: Any) -> Step:
        return lambda: fox_attention(x.q, x.k, x.v, impl="triton", **gate, **options)

    kept = {"log_decay": None, "gate_sums": GateSums.of(x.g, x.k)}  # as a cache passes them to a step
    steps: dict[str, Step] = {
        "ours": ours({"log_decay": x.g}),
        "ours, pruned (tail)": ours(kept, prune=PRUNE["tail"], logit_bound=bound),
        f"ours, {IN_WINDOW}": ours({**kept}, window=KEPT),
        f"ours, One-Pass Forgetting in {IN_WINDOW}": forgetful_step(x),
        **over_pages(x),
        "SDPA (no gate)": lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2),
    }
    kernel = load_peer("official", lambda: official_module(official).forgetting_attention, missing)
    if kernel is not None:
        threshold = torch.full((B, H), -(2 * math.sqrt(K) + math.log(S)) - 10.0, device="cuda")
        steps["official"] = lambda: kernel(q, k, v, g, head_first=True).transpose(1, 2)
        steps["official, pruned"] = lambda: kernel(q, k, v, g, head_first=True, adaptive_threshold=threshold).transpose(
            1, 2
        )
    one_step = load_peer(
        "FLA", lambda: importlib.import_module("fla.ops.attn.decoding").attn_decoding_one_step, missing
    )
    if one_step is not None:
        packed = [t.flatten(0, 1)[None].contiguous() for t in (x.k, x.v, x.g)]
        first = x.q.transpose(0, 1).contiguous()  # [1, B, H, K]
        borders = torch.arange(0, (B + 1) * S, S, device="cuda", dtype=torch.int32)
        steps["FLA"] = lambda: one_step(first, *packed, cu_seqlens=borders).transpose(0, 1)
    return steps


@torch.no_grad()
def forgetful_step(x: Inputs) -> Step:
    """A step over the keys that a budget leaves of a text, as an in-place memory takes it; on a GPU one CUDA graph."""
    (_, S, H, K), options = x.k.shape, SoftmaxOptions()
    network = ForgetNetwork(Forgetting(), H, K, K).to(x.k.device)
    network.bias.fill_(80.0)  # all is remembered
    pieces = network.network(fused=x.k.is_cuda)
    before, now = slice(max(0, S - KEPT), S - 1), slice(S - 1, S)
    policy, k, v, g = network.policy(KEPT, None, None), x.k[:, before], x.v[:, before], x.g[:, before]
    _, state = extend_forgetting(FORMS, k, k, v, Gate(log_decay=g), pieces, policy, None, options)
    state, gate = state.with_room(), Gate(log_decay=x.g[:, now])

    def step() -> Tensor:
        o, after = take_token(FORMS, x.q, x.k[:, now], x.v[:, now], gate, pieces, state, options)
        after.within_budget()
        return o

    return captured(step) if x.k.is_cuda else step


def captured(step: Step) -> Step:
    """A step as one CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()

    def replay(read: Step = step) -> Tensor:  # the graph reads tensors that only the step holds
        graph.replay()
        return o

    return replay


def over_pages(x: Inputs) -> dict[str, Step]:
    """Our steps over pages, in the dtype of x and in 8 bits."""
    B, S, H, K = x.k.shape
    pool = KeyPool.empty(
        PoolSizes(B, H, 1, K, K), dtype=x.k.dtype, device=x.k.device, pages=B * H * -(-S // PAGE), tokens=S
    )
    pool.append(x.k, x.v, x.g)
    states = {"ours, pages": pool.state(), "ours, pages, fp8": pool.in_eight_bits().state()}
    return {name: partial(paged_attention, x.q, state, impl="triton") for name, state in states.items()}


def measure(
    shape: tuple[int, ...], official: Path | None, bandwidth: float, missing: list[str]
) -> list[dict[str, Any]]:
    """A row per contender of one shape, printed at once: its error, and the time if the error is within the limit.

    Args:
        shape: (B, H, S, K) with S cached tokens.
        official: file of the authors' kernel; None: without it.
        bandwidth: TB/s of a copy, for the floor.
        missing: a list to which peers that cannot be called are added.
    """
    B, H, S, K = shape
    x = draw(B, H, S, K)
    x.q = x.q[:, -1:].contiguous()
    gates = fox_reference(x.q[:1].double(), x.k[:1].double(), x.v[:1].double(), log_decay=x.g[:1].double())
    plain = fox_reference(x.q[:1].double(), x.k[:1].double(), x.v[:1].double(), log_decay=None)
    near = fox_reference(x.q[:1].double(), x.k[:1].double(), x.v[:1].double(), log_decay=x.g[:1].double(), window=KEPT)
    rows = []
    for name, step in contenders(x, official, missing).items():
        row: dict[str, Any] = {"name": name, **dict(zip("BHSK", shape, strict=True))}
        try:
            with torch.no_grad():
                exact = plain if "no gate" in name else near if IN_WINDOW in name else gates
                row["error"] = relative(step()[:1], exact)
                if row["error"] <= (LIMIT_OF_8_BITS if "fp8" in name else LIMIT):
                    row["ms"] = milliseconds(step, 150)
                    row["of_floor"] = 4 * B * S * H * K / bandwidth / 1e9 / row["ms"]
        except Exception as e:
            row["failed"] = repr(e)[:200]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def table(result: Result) -> str:
    """The result as a page of Markdown."""
    lines = [
        headline(result, "bf16, one token, medians."),
        f"Copy bandwidth {result['bandwidth']:.2f} TB/s; the floor reads all of k and v at that rate.",
        *not_measured(result["missing"]),
        "",
    ]

    def cells(r: Result) -> list[object]:
        times = [f"{r['ms']:.3f}", f"{r['of_floor']:.2f}"] if "ms" in r else [r.get("failed", "wrong: not timed"), "-"]
        return [tuple(r[n] for n in "BHSK"), r["name"], *times, f"{r.get('error', math.nan):.1e}"]

    columns = ("(B, H, cached, K)", "", "ms", "floor / time", "error")
    return "\n".join([*lines, *markdown_table(columns, map(cells, result["rows"]))]) + "\n"


def run(out: Path, shapes: Sequence[tuple[int, ...]], official: Path | None) -> None:
    """Measure, print the table, and write results.json and results.md to ``out``."""
    missing: list[str] = []
    result: Result = {"machine": describe_versions(), "bandwidth": copy_bandwidth(), "missing": missing, "rows": []}
    keep = keeper(out, table)
    for shape in shapes or SHAPES:
        result["rows"] += measure(shape, official, result["bandwidth"], missing)
        keep(result)
        torch.cuda.empty_cache()
    result["missing"] = list(dict.fromkeys(missing))
    finish(out, result, table)
