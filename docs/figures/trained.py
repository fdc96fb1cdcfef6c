"""The trained models behind the figures, and what is read off them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.oracle import default_scale
from attnzoo.config import TrainConfig, load_config
from attnzoo.data import build_data, heldout_windows
from attnzoo.evaluation.layers import each_layer
from attnzoo.experiments.compare import CompareConfig, plan
from attnzoo.layer.attention import Attention
from attnzoo.layer.projected import Projected
from attnzoo.models import LanguageModel
from attnzoo.training import load_run, train

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Array = npt.NDArray[np.float64]


def configured(name: str, schema: Any = TrainConfig) -> Any:
    """The configuration in a file beside this one, with its folder below the repository's."""
    config = load_config(HERE / name, [], schema)
    config.output_dir = str(ROOT / config.output_dir)
    return config


def zoo_config() -> CompareConfig:
    """The comparison of all variants."""
    return configured("zoo.yaml", CompareConfig)


def fox_config() -> TrainConfig:
    """The FoX of the figures about gates and pruning."""
    return configured("fox.yaml")


def path_config() -> TrainConfig:
    """The PaTH of the comparison."""
    return next(run.config for run in plan(zoo_config()) if run.key == "path")


def model_of(config: TrainConfig) -> LanguageModel:
    """The model of a run, trained now if it is not there; on one core, so that it is the same on every machine."""
    torch.set_num_threads(1)
    model, _ = load_run(train(config), "cpu")
    return model


def heldout(length: int) -> Tensor:
    """The first ``length`` held-out tokens, ``[length]``."""
    data = build_data(fox_config().data).heldout
    window = heldout_windows(data, length, length + 1)[0, :length]
    return torch.from_numpy(window)


@dataclass(frozen=True)
class Core:
    """What the core of one layer is given, q scaled: float64, q and k ``[T, H, K]``, v ``[T, H, V]``."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate


def cores(model: LanguageModel, tokens: Tensor) -> list[Core]:
    """Every layer's core on one sequence of token ids ``[T]``."""

    def given(layer: Attention, core: Projected) -> tuple[Tensor, Tensor, Tensor, Gate]:
        scale = default_scale(core.q) if layer.scale is None else layer.scale
        q, k, v = (x[0].double() for x in (core.q, core.k, core.v))
        return q * scale, k, v, core.gate.map(lambda part: part.double())

    return [Core(number, *found) for number, found in each_layer(model, tokens, given)]
