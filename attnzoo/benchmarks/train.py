"""Speed and memory of the training step, as ``attnzoo train`` takes it: data, forward, backward, clipping, AdamW.

``attnzoo bench train CONFIG [KEY=VALUE]...`` warms up for some steps and takes the median of several measurements of as
many steps each.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from attnzoo.benchmarks.measure import Result, decay_lengths, describe_versions, finish, headline
from attnzoo.layer.gates.decay import ForgetGate
from attnzoo.models import LanguageModel
from attnzoo.precision import GateAffine
from attnzoo.training import train
from attnzoo.training.config import TrainConfig
from attnzoo.training.metrics import Row

USED = ("blocks_kept", "mfu", "mfu_dense")  # metrics that a table shows where known


class _Measured(Exception):  # noqa: N818 - no error: it ends a run that is not to be evaluated or saved
    pass


def trained_gates(config: TrainConfig, folder: Path) -> None:
    """Write a model folder with constant forget gates alone, whose decay lengths are those of :func:`decay_lengths`.

    Raises:
        ValueError: no layer has forget gates.
    """
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = LanguageModel(config.model)
    gates: dict[str, Tensor] = {}
    for name, (projection, bias) in trained_biases(model).items():
        gates |= {f"model.{name}.bias": bias, f"model.{name}.weight": torch.zeros(projection.weight.shape)}
    if not gates:
        raise ValueError(f"trained_gates: expected layers with forget gates (fox, path_fox), got {_names(config)}")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "attnzoo"}))
    save_file(gates, folder / "model.safetensors")


def trained_biases(model: nn.Module) -> dict[str, tuple[GateAffine, Tensor]]:
    """The projections to forget gates by name, each with the bias of a constant gate with the decay of trained
    models."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if isinstance(module, ForgetGate):
            projection = module.forget_proj
            open_ = 1 / (module.factor * decay_lengths(projection.out_features, generator))  # -log sigmoid(bias)
            found[f"{name}.forget_proj"] = projection, -open_.expm1().log()
    return found


def _names(config: TrainConfig) -> list[str]:
    return [layer.name for layer in config.model.layers()]


def rows(config: TrainConfig, steps: int, repeats: int, trained: bool = False) -> list[Row]:
    """The metrics of ``repeats`` measurements of ``steps`` training steps each, after as many to warm up.

    Args:
        config: configuration of the run.
        steps: steps of one measurement.
        repeats: number of measurements.
        trained: whether to use the gates of :func:`trained_gates`, which the updates do not change.
    """
    found: list[Row] = []

    def note(row: Row) -> None:
        found.append(row)
        if len(found) == repeats + 1:
            raise _Measured

    with tempfile.TemporaryDirectory() as folder:
        optimizer = replace(config.optimizer, warmup_steps=0, extensions=[])
        if trained:
            trained_gates(config, Path(folder) / "gates")
            config = replace(config, start_from=str(Path(folder) / "gates"))
            optimizer = replace(optimizer, lr=1e-30)
        quiet = replace(
            config,
            output_dir=str(Path(folder) / "run"),
            steps=steps * (repeats + 1),
            log_every=steps,
            eval_every=0,
            checkpoint_every=0,
            progress="quiet",
            tensorboard=False,
            optimizer=optimizer,
        )
        with suppress(_Measured):
            train(quiet, note)
    return found[1:]


def measure(config: TrainConfig, steps: int, repeats: int, trained: bool = False) -> Result:
    """The tokens per second of each repeat, and the memory and operations of the steps; see :func:`rows`."""
    on_gpu = config.device != "cpu"
    parameters = sum(p.numel() for p in LanguageModel(config.model).parameters())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    measured = rows(config, steps, repeats, trained)
    found = [row["tokens_per_second"] for row in measured]
    used = {name: statistics.median(row[name] for row in measured) for name in USED if name in measured[0]}
    tokens = config.batch_size * config.data.context_length
    speed = statistics.median(found)
    return {
        "machine": describe_versions(),
        "device": "GPU" if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "attention": _names(config),
        "gates": "as trained" if trained else "as at the start",
        "parameters": parameters,
        "batch": config.batch_size,
        "context": config.data.context_length,
        "mixed_precision": config.mixed_precision,
        "compile": config.compile,
        "recompute": config.recompute,
        "steps": steps,
        "tokens_per_second": found,
        "ms_per_step": 1e3 * tokens / speed,
        **used,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def table(result: Result) -> str:
    """The result as Markdown."""
    found = result["tokens_per_second"]
    peak = "-" if result["peak_GiB"] is None else f"{result['peak_GiB']:.2f}"
    shape = f"{result['batch']} x {result['context']}"
    counted: Counter[str] = Counter(result["attention"])
    layers = ", ".join(f"{n} {name}" for name, n in counted.items())
    used = " | ".join(f"{result[name]:.3f}" if name in result else "-" for name in USED)
    compiled = "".join(f", {option}" for option in ("compile", "recompute") if result[option])
    how = f"{result['device']}, mixed precision {result['mixed_precision']}{compiled}"
    return "\n".join(
        [
            headline(result, f"{how}, gates {result['gates']}; median of {len(found)} x {result['steps']} steps."),
            "",
            "| layers | parameters | B x T | ms per step | tokens/s (least, most) | GiB | kept | MFU | dense MFU |",
            "|---|---|---|---|---|---|---|---|---|",
            f"| {layers} | {result['parameters']:,} | {shape} | {result['ms_per_step']:.1f} | "
            f"{statistics.median(found):,.0f} ({min(found):,.0f}, {max(found):,.0f}) | {peak} | {used} |",
            "",
        ]
    )


def run(config: TrainConfig, out: Path, steps: int, repeats: int, trained_gates: bool = False) -> None:
    """Measure, print the table, and write results.json and results.md to ``out``.

    Raises:
        ValueError: under a launcher of several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"bench train: expected one process, got WORLD_SIZE={os.environ['WORLD_SIZE']}")
    result = measure(config, steps, repeats, trained_gates)
    finish(out, result, table)
