"""Training of FoX (Pro) with and without pruning by certificate: tokens a second, the share of blocks that is computed,
and the search's share of the attention's time.

    attnzoo bench acp [--size gpu-25m]... [KEY=VALUE]... [--learn 120] [--steps 20] [--repeats 4] [--seconds 500]

Figure 2 and Table 4 of Lin et al., "Adaptive Computation Pruning for the Forgetting Transformer" (2025), at the sizes
of the experiment `acp_throughput` and with its text. A model of each size first learns for some steps in the shortest
context; all contexts are then timed from these weights, which the timed steps do not change, with and without pruning.
Kernels that run with pruning alone are its search. Alone on the GPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from attnzoo.algebra.pruning import Prune
from attnzoo.benchmarks.measure import Result, describe_versions, finish, headline, keeper, markdown_table, not_measured
from attnzoo.benchmarks.train import rows
from attnzoo.data import build_data, heldout_windows
from attnzoo.evaluation.layers import each_layer
from attnzoo.experiments.experiment import find, find_size
from attnzoo.experiments.plan import Schedule
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.layer import dispatch
from attnzoo.layer.attention import Attention
from attnzoo.layer.projected import Projected
from attnzoo.training import load_run, train
from attnzoo.training.config import TrainConfig

EXPERIMENT = "acp_throughput"
FROZEN = 1e-30  # a learning rate that changes no weight


def search_share(pruned: Mapping[str, float], plain: Mapping[str, float]) -> float:
    """The share of the time of a pruned attention in kernels that one without pruning does not run.

    Args:
        pruned: kernel -> microseconds.
        plain: the same without pruning.
    """
    return sum(time for name, time in pruned.items() if name not in plain) / sum(pruned.values())


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """The microseconds of each kernel that a call runs on a GPU, or of each operation on a CPU, by name; the third call
    counts."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else torch.cpu.synchronize
    for _ in range(2):  # the first compiles
        call()
    wait()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as taken:
        call()
        wait()
    of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return {row.key: float(getattr(row, of)) for row in taken.key_averages() if getattr(row, of) > 0}


def attention_times(model: nn.Module, tokens: torch.Tensor, batch: int) -> Result:
    """The kernels' milliseconds of all layers' attention without gradients on one window ``[T]``, repeated to a batch,
    plain and pruned, and the search's share of the latter."""

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.repeat(batch, *[1] * (x.dim() - 1))

    def measure(layer: Attention, core: Projected) -> tuple[dict[str, float], dict[str, float]]:
        bound = layer.logit_bound(core.q.dtype)
        q, k, v, gate = *map(batched, (core.q, core.k, core.v)), core.gate.map(batched)

        def attend(prune: Prune | None) -> object:
            given = cast(SoftmaxOptions, layer.step_options(None if prune is None else bound))
            options = replace(given, prune=prune)
            call = Call(q, k, v, gate, None, False, options)
            return dispatch.run(layer.variant, dispatch.choose(layer.variant, layer.impl, call), call)

        return kernel_times(lambda: attend(Prune())), kernel_times(lambda: attend(None))

    with torch.autocast(tokens.device.type, torch.bfloat16):
        layers = [times for _, times in each_layer(model, tokens, measure)]
    pruned, plain = (sum((Counter(times) for times in kind), Counter()) for kind in zip(*layers, strict=True))
    share = search_share(pruned, plain)
    return {"pruned_ms": sum(pruned.values()) / 1e3, "plain_ms": sum(plain.values()) / 1e3, "search": share}


def measured(
    size: str, overrides: tuple[str, ...], device: str, learn: int, steps: int, repeats: int, folder: Path
) -> Iterator[Result]:
    """The rows of a size, one for each context.

    Args:
        size: of the experiment.
        overrides: `key=value` of the training, for all runs.
        device: `auto` or `cpu`.
        learn: steps that the model learns for.
        steps: of one measurement.
        repeats: number of measurements.
        folder: where the run goes.
    """
    experiment = find(EXPERIMENT)
    rate = find_size(experiment, size).lrs[0]
    plan = Schedule(EXPERIMENT, size, folder / size, 2, overrides, device)
    configs = [plan.config(experiment, arm, rate, 0) for arm in experiment.arms]
    pairs = list(zip(configs[::2], configs[1::2], strict=True))  # plain and ACP by context
    shortest = pairs[0][1]
    warmup = min(shortest.optimizer.warmup_steps, max(1, learn // 10))
    learned = train(replace(shortest, steps=learn, optimizer=replace(shortest.optimizer, warmup_steps=warmup)))
    for plain, pruned in pairs:
        speeds, kept = [], 1.0
        for config in (plain, pruned):
            frozen = replace(config.optimizer, lr=FROZEN, min_lr=0.0)
            torch._dynamo.reset()  # shapes that are known when a step is compiled are faster
            found = rows(replace(config, start_from=str(learned), optimizer=frozen), steps, repeats)
            speeds.append([row["tokens_per_second"] for row in found])
            kept = statistics.median(row.get("blocks_kept", 1.0) for row in found)
        T = plain.data.context_length
        row = {"size": size, "context": T, "batch": plain.batch_size, "plain": speeds[0], "pruned": speeds[1]}
        row |= {"learned": learn, "kept": kept, **describe(learned, pruned)}
        yield row


def describe(learned: Path, config: TrainConfig) -> Result:
    """The number of weights beside the embeddings, and :func:`attention_times` on held-out text."""
    model, _ = load_run(learned, "cpu" if config.device == "cpu" else "cuda")
    weights = sum(p.numel() for p in model.parameters()) - 2 * config.model.vocab_size * config.model.hidden_size
    T = config.data.context_length
    text: Any = build_data(config.data).heldout
    window = torch.from_numpy(heldout_windows(text, T, T))[0, :-1].to(next(model.parameters()).device)
    return {"weights": weights, **attention_times(model, window, config.batch_size)}


def table(result: Result) -> str:
    """The result as Markdown."""
    how = (
        f"bf16, compiled; medians of {result['repeats']} x {result['steps']} training steps. Attention: the kernels of "
        "all layers, forward, on a batch of one window. Search: its share of their time."
    )

    def cells(row: Result) -> list[str]:
        plain, pruned = (statistics.median(row[kind]) for kind in ("plain", "pruned"))
        ends = f"{min(row['pruned']) / max(row['plain']):.2f}, {max(row['pruned']) / min(row['plain']):.2f}"
        attention = [f"{row[kind]:.3f}" if kind in row else "-" for kind in ("plain_ms", "pruned_ms")]
        search = f"{row['search']:.1%}" if "search" in row else "-"
        speeds = [f"{plain:,.0f}", f"{pruned:,.0f}", f"{pruned / plain:.2f} ({ends})"]
        shape = [f"{row['weights']:,}", str(row["learned"]), f"{row['batch']} x {row['context']}"]
        return [*shape, *speeds, f"{row['kept']:.3f}", *attention, search]

    columns = (
        "weights", "steps learned", "B x T", "tokens/s", "pruned", "ratio (least, most)", "kept", "attention ms",
        "pruned", "search",
    )  # fmt: skip
    lines = [headline(result, how), "", *markdown_table(columns, map(cells, result["rows"])), ""]
    return "\n".join([*lines, *not_measured(result["missing"])]).rstrip() + "\n"


def run(
    out: Path, size: Sequence[str], overrides: tuple[str, ...], device: str, learn: int, steps: int, repeats: int,
    seconds: float,
) -> None:  # fmt: skip
    """Measure, print the table, and write results.json and results.md to ``out``.

    Raises:
        ValueError: a size that the experiment does not have, or a wrong setting.
    """
    deadline = time.monotonic() + seconds
    for name in size:
        find_size(find(EXPERIMENT), name)
    result: Result = {"machine": describe_versions(), "steps": steps, "repeats": repeats, "rows": [], "missing": []}
    keep = keeper(out, table)
    with tempfile.TemporaryDirectory() as folder:
        for name in size:
            for row in measured(name, overrides, device, learn, steps, repeats, Path(folder)):
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
                keep(result)
                if time.monotonic() > deadline:
                    result["missing"].append(f"what comes after {name} at {row['context']} tokens: no time was left")
                    finish(out, result, table)
                    return
    finish(out, result, table)
