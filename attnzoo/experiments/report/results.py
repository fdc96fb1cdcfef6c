"""The result of one run in a comparison, saved in the run's folder as ``evaluation.json`` and ``evaluation.npz``."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import platform
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnzoo.errors import did_you_mean_path
from attnzoo.evaluation import Array, GateMap, PruneMap, mean_and_error, perplexity_over_lengths
from attnzoo.files import digest, json_digest, parse_json, write_whole
from attnzoo.layer.attention import Attention
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig

JSON_NAME, ARRAYS_NAME = "evaluation.json", "evaluation.npz"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Facts:
    """The numbers and names of one run.

    Args:
        key: name of the run's directory, unique in a comparison.
        label: shown name, such as ``fox (acp)``.
        variant: name in the registry.
        side: ``softmax`` or ``linear``.
        pair: number of its pair in the table of pairs, from 1.
        dual: name of the variant on the other side.
        parameters: trainable parameters of the whole model.
        context: tokens per training sequence.
        steps: optimiser steps.
        tokens: tokens trained on.
        seconds: time of the training steps.
        tokens_per_second: median over the logged steps.
        unit: ``byte`` or ``token``.
        model: sizes and layer, in words.
        parts: parts of its attention layers besides projections, gate and core.
        text: training data, in words.
        settings: the run's configuration as YAML.
        command: the command line that trained it.
        machine: name of the machine.
        checkpoint: identity of the measured checkpoint (`attnzoo.training.checkpoint.identity`).
        heldout: a digest of the held-out windows.
        group: group of runs that are shown together; empty where all are.
    """

    key: str
    label: str
    variant: str
    side: str
    pair: int
    dual: str
    parameters: int
    context: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    unit: str
    model: str
    parts: list[str]
    text: str
    settings: str
    command: str
    machine: dict[str, str]
    checkpoint: str = ""
    heldout: str = ""
    group: str = ""


@dataclass(frozen=True)
class RunResult:
    """The measurements of one run.

    Args:
        facts: numbers and names.
        losses: held-out negative log-likelihoods in nats, ``[windows, length]``.
        curve: tokens seen and training loss at the logged steps, ``[2, points]``.
        gates: forget-gate maps, one per gated layer.
    """

    facts: Facts
    losses: Array
    curve: Array
    gates: tuple[GateMap, ...] = ()

    @property
    def length(self) -> int:
        """Tokens per evaluation window."""
        return int(self.losses.shape[1])

    @property
    def token_loss(self) -> Array:
        """L(i), the mean loss by position, ``[length]``."""
        return np.asarray(self.losses.mean(0), dtype=np.float64)

    @property
    def perplexity(self) -> Array:
        """P(l), the perplexity by context length, ``[length]``."""
        return perplexity_over_lengths(self.token_loss)

    @property
    def final_loss(self) -> tuple[float, float]:
        """Mean held-out loss over the training context and its standard error over windows, in nats."""
        return mean_and_error(self.losses[:, : self.facts.context])

    def behind(self, other: RunResult) -> tuple[float, float]:
        """The difference of its final loss and ``other``'s, and its standard error over the shared windows."""
        context = self.facts.context
        return mean_and_error(self.losses[:, :context] - other.losses[:, :context])

    def kept(self, bound: str) -> float:
        """The computed share of blocks by ``bound``, mean over the heads of all layers; nan where no layer prunes."""
        shares = [gate.prune[bound].kept.mean() for gate in self.gates if bound in gate.prune]
        return float(np.mean(shares)) if shares else math.nan


def save_result(result: RunResult, run_dir: Path) -> None:
    """Write ``result`` into ``run_dir``; the JSON goes last and makes it count as finished."""
    arrays: dict[str, Array] = {"losses": result.losses.astype(np.float32), "curve": result.curve}
    gates: list[dict[str, Any]] = []
    for gate in result.gates:
        name = f"gate{gate.layer}"
        arrays[f"{name}.decay"] = gate.decay.astype(np.float16)
        for bound, prune in gate.prune.items():
            arrays[f"{name}.{bound}.first"] = prune.first
            arrays[f"{name}.{bound}.kept"] = prune.kept
        blocks = {bound: prune.block for bound, prune in gate.prune.items()}
        gates.append({"layer": gate.layer, "length": gate.length, "window": gate.window, "bounds": blocks})
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    write_whole(run_dir / ARRAYS_NAME, packed.getvalue())
    saved = {"facts": asdict(result.facts), "gates": gates, "arrays": hashlib.sha256(packed.getvalue()).hexdigest()}
    write_whole(run_dir / JSON_NAME, json.dumps({**saved, "digest": json_digest(saved)}, indent=1) + "\n")


def load_result(run_dir: Path) -> RunResult:
    """The result that :func:`save_result` wrote.

    Raises:
        FileNotFoundError: the run has not been evaluated.
        ValueError: a file in it is not what was written.
    """
    if not (run_dir / JSON_NAME).is_file():
        raise FileNotFoundError(f"{run_dir}: no {JSON_NAME} in it, so it is no finished run of a comparison")
    try:
        saved = parse_json((run_dir / JSON_NAME).read_text(encoding="utf-8"))
        if "digest" in saved and saved.pop("digest") != json_digest(saved):
            raise ValueError("its content is not what was written")
        if "arrays" in saved and saved["arrays"] != digest(run_dir / ARRAYS_NAME):
            raise ValueError(f"{ARRAYS_NAME} is not what was written with it")
        with np.load(run_dir / ARRAYS_NAME) as archive:
            arrays = {name: archive[name].astype(np.float64) for name in archive.files}
        gates = tuple(_load_gate(row, arrays) for row in saved["gates"])
        return RunResult(Facts(**saved["facts"]), arrays["losses"], arrays["curve"], gates)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{run_dir}: {JSON_NAME} is not readable ({error}); run attnzoo compare again") from error


def _load_gate(row: dict[str, Any], arrays: dict[str, Array]) -> GateMap:
    name = f"gate{row['layer']}"
    prune = {
        bound: PruneMap(arrays[f"{name}.{bound}.first"], arrays[f"{name}.{bound}.kept"], block)
        for bound, block in row["bounds"].items()
    }
    return GateMap(row["layer"], arrays[f"{name}.decay"], row["length"], row["window"], prune)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders of ``paths``, each a run or a folder with runs directly inside it.

    Of a folder only measured runs count, or all runs if none is measured; runs that are left out are logged.

    Raises:
        FileNotFoundError: a path does not exist, or there is no run in it.
    """
    runs = []
    for path in paths:
        if not path.is_dir():
            why = "is a file" if path.exists() else f"is not there{did_you_mean_path(path, folders=True)}"
            raise FileNotFoundError(f"expected the folder of a run, or of runs: {str(path)!r} {why}")
        inside: list[Path] = []
        for name in (JSON_NAME, "config.yaml"):
            inside = inside or ([path] if (path / name).is_file() else sorted(f.parent for f in path.glob(f"*/{name}")))
        if not inside:
            raise FileNotFoundError(f"no run in {str(path)!r}")
        runs += inside
    every = {file.parent for path in paths if path not in runs for file in path.glob("*/config.yaml")}
    if left := sorted(map(str, every - set(runs))):
        logger.warning("left out, as not measured while others are: %s; name a run to have it", ", ".join(left))
    return runs


def describe_machine(accelerator: bool = True) -> dict[str, str]:
    """A description of this machine (processor, cores, GPU if used, versions), without names of its owner."""
    machine = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if accelerator and torch.cuda.is_available():
        machine["accelerator"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return machine | {"python": platform.python_version()} | dict(_versions(("torch", "attnzoo", "accelerate")))


def _versions(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_sizes(model: ModelConfig) -> str:
    """A model's sizes and the block of its layers, in words."""
    block = model.attention_options.get("block")
    layer = f"in the block {block!r}" if block else "each variant in the layer of its own paper"
    return f"{model.num_layers} layers of size {model.hidden_size} with {model.num_heads} heads, {layer}"


def describe_layers(model: LanguageModel) -> list[str]:
    """The parts of the attention layers besides projections, gate and core."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    layers = [layer.config for layer in attentions]
    present = {
        "short convolution": any(layer.conv_size for layer in layers),
        "KV-shift": any(layer.kv_shift for layer in layers),
        "QK-norm": any(layer.qk_norm != "none" for layer in layers),
        "feature map": any(layer.feature_map != "identity" for layer in layers),
        "rotation": any(layer.rotary is not None for layer in layers),
        "output norm": any(layer.output_norm != "none" for layer in layers),
        "output gate": any(layer.output_gate != "none" for layer in layers),
        "skip": any(layer.skip for layer in layers),
        "grouped heads": any(min(layer.query_heads, layer.kv_heads) < layer.num_heads for layer in layers),
        "window": any(layer.window is not None for layer in layers),
        "sinks": any(layer.sinks for layer in layers),
        "forget network": any(layer.forget is not None for layer in attentions),
    }
    return [name for name, there in present.items() if there]
