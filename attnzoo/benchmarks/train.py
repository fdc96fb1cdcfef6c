"""Speed and memory of the training step, as ``attnzoo train`` takes it: data, forward, backward, clipping, AdamW.

``attnzoo bench train CONFIG [KEY=VALUE]...`` warms up for some steps and takes the median of several measurements of as
many steps each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from attnzoo.benchmarks.measure import Result, machine, save
from attnzoo.models import LanguageModel
from attnzoo.training import train
from attnzoo.training.config import TrainConfig
from attnzoo.training.metrics import Row


class _Measured(Exception):  # noqa: N818 - no error: it ends a run that is not to be evaluated or saved
    pass


def speeds(config: TrainConfig, steps: int, repeats: int) -> list[float]:
    """Tokens per second of ``repeats`` measurements of ``steps`` training steps each, after as many to warm up."""
    found: list[float] = []

    def note(row: Row) -> None:
        found.append(row["tokens_per_second"])
        if len(found) == repeats + 1:
            raise _Measured

    with tempfile.TemporaryDirectory() as folder:
        quiet = replace(
            config,
            output_dir=folder,
            steps=steps * (repeats + 1),
            log_every=steps,
            eval_every=0,
            checkpoint_every=0,
            progress="quiet",
            tensorboard=False,
            optimizer=replace(config.optimizer, warmup_steps=0),
        )
        with suppress(_Measured):
            train(quiet, note)
    return found[1:]


def measure(config: TrainConfig, steps: int, repeats: int) -> Result:
    on_gpu = config.device != "cpu"
    parameters = sum(p.numel() for p in LanguageModel(config.model).parameters())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found = speeds(config, steps, repeats)
    tokens = config.batch_size * config.data.context_length
    speed = statistics.median(found)
    return {
        "machine": machine(),
        "device": "GPU" if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "attention": [layer.name for layer in config.model.layers()],
        "parameters": parameters,
        "batch": config.batch_size,
        "context": config.data.context_length,
        "mixed_precision": config.mixed_precision,
        "steps": steps,
        "tokens_per_second": found,
        "ms_per_step": 1e3 * tokens / speed,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def table(result: Result) -> str:
    """The result as Markdown."""
    m, found = result["machine"], result["tokens_per_second"]
    peak = "-" if result["peak_GiB"] is None else f"{result['peak_GiB']:.2f}"
    shape = f"{result['batch']} x {result['context']}"
    return "\n".join(
        [
            f"{m['gpu']}, torch {m['torch']}, Triton {m['triton']}, FLA {m['fla']}, {m['date']}; {result['device']}, "
            f"mixed precision {result['mixed_precision']}; median of {len(found)} x {result['steps']} steps.",
            "",
            "| layers | parameters | B x T | ms per step | tokens/s (least, most) | peak GiB |",
            "|---|---|---|---|---|---|",
            f"| {', '.join(result['attention'])} | {result['parameters']:,} | {shape} | {result['ms_per_step']:.1f} | "
            f"{statistics.median(found):,.0f} ({min(found):,.0f}, {max(found):,.0f}) | {peak} |",
            "",
        ]
    )


def run(config: TrainConfig, out: Path, steps: int, repeats: int) -> None:
    """Measure, print the table, and write results.json and results.md to ``out``.

    Raises:
        ValueError: under a launcher of several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"bench train: expected one process, got WORLD_SIZE={os.environ['WORLD_SIZE']}")
    result = measure(config, steps, repeats)
    save(out, result, table(result))
    print(table(result))
