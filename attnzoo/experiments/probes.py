"""The probes of experiments, which measure a number of a trained model at each of several places."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.data import Data, heldout_windows
from attnzoo.data.tasks import Examples, build_task
from attnzoo.data.windows import Joined, Tokens
from attnzoo.evaluation import Array, GateMap, gate_maps, token_losses
from attnzoo.evaluation.answers import Guess, measure_answers, measure_guess
from attnzoo.evaluation.pruning import pruning
from attnzoo.layer.attention import Attention
from attnzoo.models import LanguageModel
from attnzoo.training.config import TrainConfig
from attnzoo.training.metrics import Row

P = TypeVar("P")
ROWS_SEED = 1000  # seed of the rows that are asked, other than those of validation


@dataclass(frozen=True)
class Probed:
    """A trained run that probes measure.

    Args:
        model: the model in evaluation mode, on the device of the measurement.
        config: the run's configuration.
        data: the run's data.
        metrics: the metrics of its training.
        rows: number of a task's rows that a probe asks.
        tokens: number of held-out tokens that a probe reads.
    """

    model: LanguageModel
    config: TrainConfig
    data: Data
    metrics: list[Row]
    rows: int
    tokens: int

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def text(self) -> Tokens | Joined:
        """The held-out text; ValueError where the run was trained on a task."""
        if isinstance(self.data.heldout, Examples):
            raise ValueError(f"expected a run on a text, got one on {self.config.data.source!r}")
        return self.data.heldout

    def windows(self, factor: float) -> Tensor:
        """Held-out text in windows of `factor` training contexts, ``[N, length + 1]``.

        Raises:
            ValueError: the run was trained on a task, or the text is too short.
        """
        length = int(self.config.data.context_length * factor)
        return torch.from_numpy(heldout_windows(self.text, length, self.tokens)).to(self.device)

    def losses(self, windows: Tensor) -> Array:
        """The loss of every token of windows ``[N, L + 1]``, in the precision and by the kernels of the training.

        Of bf16 it was at most 0.0004 nats above float32's in the mean (26 + 177 models on H200, over one context).
        """
        with self.precision():
            return token_losses(self.model, windows)

    def wrong(self, rows: Examples) -> float:
        """The share of wrong answers to as many rows as a probe asks, in the precision of the training."""
        with self.precision():
            return measure_answers(self.model, rows, self.rows).error

    def maps(self, factor: float, block: int) -> list[GateMap]:
        """The gates of a window of `factor` training contexts, and the blocks of `block` tokens that pruning keeps, in
        the precision of the training."""
        with self.precision():
            return gate_maps(self.model, self.windows(factor)[0, :-1], block=block)

    def precision(self) -> torch.autocast:
        """A context in which the model computes in the precision of its training."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.mixed_precision)
        return torch.autocast(self.device.type, half, enabled=half is not None)

    def at_once(self, factor: float) -> int:
        """The number of windows of `factor` training contexts with about as many tokens as a pass of the training has,
        at least 1: kernels do not prune where there is little to leave out."""
        return max(1, int(self.config.batch_size // self.config.gradient_accumulation / factor))


class Probe(Protocol):
    """A probe: a measurement with its name and the label of its places ("" if there is one).

    A probe may have ``at``, its places, ``task``, whether it asks answers of a task or reads a text, and ``longest``,
    the training contexts in its longest window of text: then a claim about another place, a run on other data or a text
    that is too short is refused before any training. A probe of a task may have ``guess``, with the arguments of
    ``measure``: the error of a constant answer for each place; claims stay undecided where no model is better. A probe
    with options may have ``check``, which raises ValueError for a run's configuration if nothing could be measured.
    """

    @property
    def name(self) -> str: ...

    @property
    def places(self) -> str: ...

    @property
    def percent(self) -> bool: ...

    def measure(self, subject: Probed) -> dict[float, float]:
        """The number at each place; empty where the model has nothing to measure."""


class _Asking:
    """The base of probes of a task's answers."""

    def asked(self) -> dict[float, tuple[Mapping[str, Any], float]]:
        """Place -> the task's options and the length of its rows in training contexts."""
        raise NotImplementedError(f"{type(self).__name__}.asked: expected every probe of answers to define it")

    def check(self, config: TrainConfig) -> None:
        known = build_task(config.data.task, config.data.task_options).words if config.data.task else ()
        for options, length in self.asked().values() if config.data.task else ():
            examples = examples_of(config, options, length)
            examples[0]
            if list(examples.task.words) != list(known):
                raise ValueError(f"expected the {len(known)} tokens of training, got {len(examples.task.words)} others")

    def measure(self, subject: Probed) -> dict[float, float]:
        return {place: wrong_share(subject, *asked) for place, asked in self.asked().items()}

    def guess(self, subject: Probed) -> dict[float, Guess]:
        return {
            place: measure_guess(examples_of(subject.config, *asked), subject.rows)
            for place, asked in self.asked().items()
        }


def of_pruning(measure: Callable[[P, Probed], dict[float, float]]) -> Callable[[P, Probed], dict[float, float]]:
    """A probe's ``measure`` that finds nothing where no layer of the model can prune, and reads no text for that."""

    @functools.wraps(measure)
    def measured(self: P, subject: Probed) -> dict[float, float]:
        layers = (layer for layer in subject.model.modules() if isinstance(layer, Attention))
        return measure(self, subject) if any(layer.variant.prunable for layer in layers) else {}

    return measured


class ByLength:
    """The base of probes whose places are the lengths of rows, in training contexts."""

    lengths: tuple[float, ...]

    @property
    def at(self) -> tuple[float, ...]:
        return self.lengths

    @property
    def places(self) -> str:
        return "length, in training contexts" if len(self.lengths) > 1 else ""


@dataclass(frozen=True)
class Wrong(ByLength, _Asking):
    """The share of a task's answers that are wrong, on held-out rows.

    Args:
        name: what a reader sees.
        options: of the task, where they are not those of training.
        lengths: of the rows, in training contexts.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[float, ...] = (1.0,)
    percent: bool = True
    task: ClassVar[bool] = True

    def asked(self) -> dict[float, tuple[Mapping[str, Any], float]]:
        return {length: (self.options, length) for length in self.lengths}


@dataclass(frozen=True)
class WrongOver(_Asking):
    """The share of a task's answers that are wrong, over the values of one of its options.

    Args:
        name: what a reader sees.
        option: of the task.
        at: its values.
        length: of the rows, in training contexts.
        options: other ones that are not those of training.
    """

    name: str
    option: str
    at: tuple[float, ...]
    length: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    percent: bool = True
    task: ClassVar[bool] = True

    @property
    def places(self) -> str:
        return self.option

    def asked(self) -> dict[float, tuple[Mapping[str, Any], float]]:
        return {value: ({**self.options, self.option: value}, self.length) for value in self.at}


@dataclass(frozen=True)
class Loss:
    """Mean held-out loss over the training context, nats per token."""

    name: str = "loss"
    places: str = ""
    percent: bool = False
    at: ClassVar[tuple[float, ...]] = (1.0,)
    task: ClassVar[bool] = False

    def measure(self, subject: Probed) -> dict[float, float]:
        return {1.0: float(text_losses(subject, 1.0).mean())}


@dataclass(frozen=True)
class LossByPlace:
    """L(i), the loss of the token at index i of a held-out window (Lin et al., 2025, section 4.2), in means over bands.

    Args:
        name: what a reader sees.
        factor: length of the windows, in training contexts.
        bands: of equal length, per training context.
    """

    name: str = "L(i)"
    factor: int = 4
    bands: int = 4
    places: str = "token index i, in training contexts"
    percent: bool = False
    task: ClassVar[bool] = False

    @property
    def at(self) -> tuple[float, ...]:
        return tuple((band + 1) / self.bands for band in range(self.factor * self.bands))

    @property
    def longest(self) -> float:
        return self.factor

    def check(self, config: TrainConfig) -> None:
        T = config.data.context_length
        if not 1 <= self.bands <= T:
            raise ValueError(f"bands: expected 1 to {T}, the tokens of the training context, got {self.bands}")

    def measure(self, subject: Probed) -> dict[float, float]:
        losses = text_losses(subject, self.factor).mean(0)
        context = subject.config.data.context_length
        cuts = [round(end * context) for end in self.at]
        return {end: float(losses[a:b].mean()) for end, a, b in zip(self.at, [0, *cuts], cuts, strict=False)}


@dataclass(frozen=True)
class AddedByLength:
    """The loss that a row beyond the training context adds: that of the last quarter of each further context, minus
    that of the same tokens where their row begins with this context. (L(i) at two indices is that of different text.)

    Args:
        name: what a reader sees.
        factor: length of the rows, in training contexts.
    """

    name: str = "loss added by a longer context"
    factor: int = 4
    places: str = "length, in training contexts"
    percent: bool = False
    task: ClassVar[bool] = False

    @property
    def at(self) -> tuple[float, ...]:
        return tuple(float(n) for n in range(2, self.factor + 1))

    @property
    def longest(self) -> float:
        return self.factor

    def measure(self, subject: Probed) -> dict[float, float]:
        windows, T = subject.windows(self.factor), subject.config.data.context_length
        far, found = subject.losses(windows), {}
        for at in self.at:
            end = round(at * T)
            near = subject.losses(windows[:, end - T : end + 1])
            found[at] = float((far[:, end - T : end] - near)[:, T * 3 // 4 :].mean())
        return found


@dataclass(frozen=True)
class KeptBlocks(ByLength):
    """The share of the blocks of a held-out window, of those that causality and a layer's window leave, that pruning
    with the tail bound keeps: the mean over heads and layers.

    Args:
        name: what a reader sees.
        lengths: of the windows, in training contexts.
        block: rows and keys per block.
    """

    name: str = "blocks kept"
    lengths: tuple[float, ...] = (1.0, 4.0)
    block: int = 16
    percent: bool = True
    task: ClassVar[bool] = False

    @property
    def longest(self) -> float:
        return max(self.lengths)

    @of_pruning
    def measure(self, subject: Probed) -> dict[float, float]:
        found = {}
        for length in self.lengths:
            maps = subject.maps(length, self.block)
            shares = [float(gate.prune["tail"].kept.mean()) for gate in maps if "tail" in gate.prune]
            if shares:
                found[length] = statistics.fmean(shares)
        return found


@dataclass(frozen=True)
class PrunedLoss:
    """The loss that pruning (tail bound, eps = e^-10) adds to the same model's on the same text, nats per token."""

    name: str = "loss added by pruning"
    length: float = 4.0
    places: str = ""
    percent: bool = False
    at: ClassVar[tuple[float, ...]] = (1.0,)
    task: ClassVar[bool] = False

    @property
    def longest(self) -> float:
        return self.length

    @of_pruning
    def measure(self, subject: Probed) -> dict[float, float]:
        losses, windows = [], subject.windows(self.length)
        for prune in (None, Prune()):  # in float32: what 16 bits round may be more than the difference
            with pruning(subject.model, prune):
                losses.append(float(token_losses(subject.model, windows, subject.at_once(self.length)).mean()))
        return {1.0: losses[1] - losses[0]}


@dataclass(frozen=True)
class Speed:
    """Thousand tokens trained per second, median over the logged steps."""

    name: str = "training speed"
    places: str = ""
    percent: bool = False
    at: ClassVar[tuple[float, ...]] = (1.0,)

    def measure(self, subject: Probed) -> dict[float, float]:
        return {
            1.0: statistics.median(row["tokens_per_second"] for row in subject.metrics if row["kind"] == "train") / 1e3
        }


def wrong_share(subject: Probed, options: Mapping[str, Any], length: float) -> float:
    """The share of wrong answers to a task with these options, on rows of ``length`` training contexts."""
    return subject.wrong(examples_of(subject.config, options, length))


def examples_of(config: TrainConfig, options: Mapping[str, Any], length: float) -> Examples:
    """Held-out rows of a run's task; ValueError for one on a text."""
    data = config.data
    if data.task is None:
        raise ValueError(f"expected a run on a task, got one on {data.title!r}")
    task = build_task(data.task, {**data.task_options, **options})
    return Examples(task, round(data.context_length * length), ROWS_SEED, held_out=True)


def text_losses(subject: Probed, factor: float) -> Array:
    """The loss of every token of held-out windows of ``factor`` training contexts, ``[N, length]``."""
    return subject.losses(subject.windows(factor))
