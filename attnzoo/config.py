"""Typed configuration, read from YAML with `key=value` overrides; defined in :mod:`attnzoo.training.recipe`."""

from attnzoo.data.config import DataConfig, WeightedSource
from attnzoo.models.config import LayerSpec, ModelConfig
from attnzoo.training.config import Extension, ForgettingConfig, OptimizerConfig, TrainConfig
from attnzoo.training.recipe import config_differences, load_config, save_config, to_yaml

__all__ = [
    "DataConfig", "Extension", "ForgettingConfig", "LayerSpec", "ModelConfig", "OptimizerConfig", "TrainConfig",
    "WeightedSource", "config_differences", "load_config", "save_config", "to_yaml",
]  # fmt: skip
