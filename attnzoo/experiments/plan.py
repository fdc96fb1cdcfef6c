"""The schedule of an experiment: size, folder, seeds and overrides, and the training of each run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from attnzoo.data.tasks import build_task
from attnzoo.errors import at_least
from attnzoo.experiments.experiment import Arm, Experiment, find_size, rate_in_words
from attnzoo.settings import names_key, read_settings
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import digest_of_own
from attnzoo.training.recipe import load_config

ALWAYS = ("progress=quiet", "tensorboard=false", "eval_every=0", "checkpoint_every=0")
OWN = ("output_dir", "seed", "data.seed", "optimizer.lr", "model.attention", "model.attention_options", "device")


@dataclass(frozen=True)
class Schedule:
    """The schedule of an experiment's runs.

    Args:
        name: name of a built-in experiment, or the path of a file with one.
        size: name of the size.
        out: folder of the runs and of the page.
        seeds: runs per arm.
        overrides: `key=value` of the training, for all runs.
        device: `auto` or `cpu`.
        rates: arm -> learning rate that was chosen before at another size and is not searched.
        claims: orderings that are asked in place of the experiment's own, as of :func:`asked`.
    """

    name: str
    size: str
    out: Path
    seeds: int
    overrides: tuple[str, ...] = ()
    device: str = "auto"
    rates: Mapping[str, float] = field(default_factory=dict)
    claims: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 2, "seeds")

    def grid(self, experiment: Experiment, arm: Arm) -> tuple[float, ...]:
        """The learning rates to try for an arm before any search; a single one is used without trying."""
        chosen = self.rates.get(arm.name)
        return (chosen,) if chosen is not None else arm.lrs or find_size(experiment, self.size).lrs

    def config(self, experiment: Experiment, arm: Arm, lr: float, seed: int, tries: bool = False) -> TrainConfig:
        """The training configuration of one run.

        Args:
            experiment: the experiment.
            arm: the arm.
            lr: the learning rate.
            seed: seed of weights and data.
            tries: whether the run only tries the learning rate, and may be shorter.
        """
        size = find_size(experiment, self.size)
        given = (*experiment.settings, *size.settings, *(size.after if arm.after else ()), *arm.settings)
        shorter = size.tries if tries else ()
        given += shorter
        settings = read_settings([*ALWAYS, *given])
        own = (*OWN, *(["start_from"] if arm.after else []), *(["teacher"] if arm.teacher else []))
        for key in (key for key in own if key != "model.attention_options" and names_key(settings, key)):
            raise ValueError(f"settings: {key} is set for each run (learning rates are lrs); other keys can be given")
        _multiply(settings, arm.times)
        settings |= {"device": self.device, "seed": seed}
        settings.setdefault("optimizer", {})["lr"] = lr
        settings.setdefault("data", {})["seed"] = seed
        model = settings.get("model", {})
        options = {**model.get("attention_options", {}), **experiment.options, **arm.options_at(self.size)}
        settings["model"] = {**model, "attention": arm.variant_at(self.size), "attention_options": options}
        settings["output_dir"] = self._folder(arm, lr, seed) + ("-tried" if shorter else "")
        if arm.after:
            before = experiment.arm(arm.after)
            rates = self.grid(experiment, before)
            if len(rates) > 1:
                raise ValueError(
                    f"after: expected an arm with one learning rate, got {before.name!r} with {len(rates)}"
                )
            settings["start_from"] = self._folder(before, rates[0], seed)
        if arm.teacher:
            teacher = experiment.arm(arm.teacher)
            settings["teacher"] = self._folder(teacher, self.grid(experiment, teacher)[0], seed)
        config = _loaded(json.dumps(settings), self.overrides)
        overrides = read_settings(self.overrides)
        for key in (key for key in own if names_key(overrides, key)):
            raise ValueError(f"{key}: the experiment sets it for each run; other settings can be given")
        if config.data.task is not None:
            words = len(build_task(config.data.task, config.data.task_options).words)
            config = replace(config, model=replace(config.model, vocab_size=words))
        return config

    def _folder(self, arm: Arm, lr: float, seed: int) -> str:
        own = digest_of_own(arm.variant_at(self.size))[:8]
        return str(self.out / "-".join(filter(None, (folder_of(arm), own))) / f"lr{rate_in_words(lr)}-seed{seed}")


def _multiply(settings: dict[str, Any], times: Mapping[str, float]) -> None:
    """Multiply whole numbers among the settings, in place."""
    for key, factor in times.items():
        *path, last = key.split(".")
        try:
            into = reduce(getitem, path, settings)
            into[last] = round(into[last] * factor)
        except (KeyError, TypeError) as error:
            raise ValueError(f"times: expected a number of the size's settings, got {key!r}") from error


@cache
def _loaded(settings: str, overrides: tuple[str, ...]) -> TrainConfig:
    """The configuration of settings in JSON; kept, as the same ones are asked for whenever a run ends."""
    return load_config(json.loads(settings), overrides)


def folder_of(arm: Arm) -> str:
    """The name of the folder of an arm's runs.

    Raises:
        ValueError: its name has neither a letter nor a digit.
    """
    key = re.sub(r"[^\w.=]+", "-", arm.name).strip("-.")
    if not key:
        raise ValueError(f"arm {arm.name!r}: expected a letter or digit in its name")
    return key


def device_of(size: str) -> str:
    """The default device of a size: a CPU if its name begins with `cpu`."""
    return "cpu" if size.startswith("cpu") else "auto"
