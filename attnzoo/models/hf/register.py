"""Registration of `model_type: attnzoo` with transformers' Auto classes, when those are loaded.

`import attnzoo` must not import transformers, and `AutoModelForCausalLM.from_pretrained(folder)` must work whichever is
imported first. So the classes are registered at once where the Auto modules are loaded already, else right after they
are loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

AUTO = "transformers.models.auto"


def register_auto_classes() -> None:
    """Register the configuration and the model, now or when transformers loads its Auto classes."""
    waiting = {}
    for name, classes in (("configuration_auto", _configuration), ("modeling_auto", _model)):
        if f"{AUTO}.{name}" in sys.modules:
            classes(sys.modules[f"{AUTO}.{name}"])
        else:
            waiting[f"{AUTO}.{name}"] = classes
    if waiting:
        sys.meta_path.insert(0, _WhenLoaded(waiting))


def _configuration(auto: Any) -> None:
    from attnzoo.models.hf.config import AttnzooConfig

    auto.AutoConfig.register(AttnzooConfig.model_type, AttnzooConfig, exist_ok=True)


def _model(auto: Any) -> None:
    from attnzoo.models.hf.config import AttnzooConfig
    from attnzoo.models.hf.model import AttnzooForCausalLM

    auto.AutoModelForCausalLM.register(AttnzooConfig, AttnzooForCausalLM, exist_ok=True)
    # Trainer reads this table to shift labels before smoothing, and pipelines to check the model
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnzooConfig.model_type] = AttnzooForCausalLM.__name__


class _WhenLoaded(MetaPathFinder):
    """An import finder that calls back once each named module has been executed."""

    def __init__(self, waiting: dict[str, Any]) -> None:
        self.waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self.waiting.pop(fullname))
        return spec


class _Calling(Loader):
    """A module loader with a callback after it."""

    def __init__(self, loader: Loader, then: Any) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.then(module)
