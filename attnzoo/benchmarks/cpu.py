"""CPU speed of the reference forms, as ratios measured in one run.

``attnzoo bench cpu`` prints three tables (Markdown): chunk against recurrent for every linear variant, FoX's parallel
form against causal SDPA, and what a layer's forward costs the host (:mod:`attnzoo.benchmarks.host`). Each is timed in
turn with what it is compared to, several times over, and the fastest run of each counts.
"""

import platform
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo import Gate, get, list_variants
from attnzoo.benchmarks import host
from attnzoo.samples import random_gate


def interleaved(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The seconds of the fastest run of each function, measured alternately."""
    best = [float("inf"), float("inf")]
    for round_ in range(repeats + 1):
        for i, run in enumerate((first, second)):
            start = time.perf_counter()
            run()
            if round_:  # the first round warms up
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0], best[1]


def linear_table(T: int, repeats: int) -> list[tuple[str, float, float]]:
    """Rows (variant, recurrent ms, chunk ms) of the forward pass at B=1, H=4, K=V=64 in float32."""
    rows = []
    for name in list_variants("linear"):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, T, 4, 64) for _ in range(3))
        gate = random_gate(name, 1, T, 4, 4, 64, dtype=torch.float32, regime="open")
        forms = get(name).forms
        with torch.no_grad():
            slow, fast = interleaved(
                partial(forms["recurrent"], q, k, v, gate), partial(forms["chunk"], q, k, v, gate), repeats
            )
        rows.append((name, 1e3 * slow, 1e3 * fast))
    return rows


def fox_table(T: int, repeats: int) -> list[tuple[str, float, float]]:
    """Rows (gates, SDPA ms, FoX ms) of forward + backward at B=1, H=4, K=V=64 in float32."""
    rows = []
    for label, mean in (
        ("mean decay per token 0.01", 0.01),
        ("mean decay per token 0.1", 0.1),
        ("mean decay per token 1", 1.0),
    ):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, T, 4, 64, requires_grad=True) for _ in range(3))
        g = (-2 * mean * torch.rand(1, T, 4)).requires_grad_()
        grad = torch.randn(1, T, 4, 64)

        slow, fast = interleaved(partial(causal_sdpa, q, k, v, grad), partial(fox_parallel, q, k, v, g, grad), repeats)
        rows.append((label, 1e3 * slow, 1e3 * fast))
    return rows


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    torch.autograd.grad(o, (q, k, v), grad.transpose(1, 2))


def fox_parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(get("fox").forms["parallel"](q, k, v, Gate(log_decay=g)), (q, k, v, g), grad)


def run(length: int, repeats: int) -> None:
    """Print the tables for ``length`` tokens; the fastest of ``repeats`` runs counts."""
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"\nB=1, H=4, K=V=64, T={length}, float32, forward\n")
    print("| variant | recurrent ms | chunk ms | ratio |\n|---|---|---|---|")
    for name, slow, fast in linear_table(length, repeats):
        print(f"| {name} | {slow:.0f} | {fast:.1f} | {slow / fast:.1f} x |", flush=True)
    print("\nForward and backward\n\n| gates | causal SDPA ms | FoX parallel ms | ratio |\n|---|---|---|---|")
    for label, sdpa, ours in fox_table(length, repeats):
        print(f"| {label} | {sdpa:.0f} | {ours:.0f} | {ours / sdpa:.2f} x |", flush=True)
    host.run(20 * repeats)
