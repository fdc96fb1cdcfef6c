"""Probes of models whose heads hold a limited number of keys: losses, answers, and held keys."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

from attnzoo.errors import several, unknown
from attnzoo.evaluation.answers import Guess, measure_guess
from attnzoo.evaluation.cost import decoding
from attnzoo.evaluation.forgetting import OF_NETWORKS, RULES, UNLIMITED, knows, limited, loss_within
from attnzoo.evaluation.long_text import stepped_losses
from attnzoo.evaluation.losses import token_losses
from attnzoo.experiments.probes import ByLength, Probed, examples_of, wrong_share


@dataclass(frozen=True)
class _Within:
    """The base of probes whose places are limits of a head's keys; see :class:`AddedLoss`."""

    name: str
    rule: str
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        several(self, "shares", of=f"the probe {self.name!r}")
        if self.rule not in (*RULES, *UNLIMITED):
            raise unknown("rule", self.rule, (*RULES, *UNLIMITED), of=f"the probe {self.name!r}")
        for share in self.shares:
            if not 0 < share <= 1:
                raise ValueError(f"shares: expected numbers in (0, 1] of the probe {self.name!r}, got {share}")

    @property
    def at(self) -> tuple[float, ...]:
        return (1.0,) if self.rule in UNLIMITED else self.shares

    @property
    def places(self) -> str:
        return "" if self.rule in UNLIMITED else "keys held, of the training context"


@dataclass(frozen=True)
class AddedLoss(_Within):
    """The loss that a limit on a head's keys adds to that of the same model, nats per token.

    Args:
        name: what a reader sees.
        rule: which keys go (:mod:`attnzoo.evaluation.forgetting`); nothing is measured where the layers do not know it,
            nor what is that of another run: a rule that asks no network, where a network alone was trained.
        shares: of the training context, that a head may hold; for ``certified`` and ``forgets`` the limit is their own.
    """

    shares: tuple[float, ...] = (0.125, 0.25, 0.5)
    percent: bool = False
    task: ClassVar[bool] = False

    def measure(self, subject: Probed) -> dict[float, float]:
        if not _measures(subject, self.rule):
            return {}
        windows, T = subject.windows(1.0), subject.config.data.context_length
        [whole] = loss_within(subject.model, windows, ["window"], [T])
        budgets = [max(1, round(share * T)) for share in self.shares]
        found = loss_within(subject.model, windows, [self.rule], budgets)
        return {at: point.loss - whole.loss for at, point in zip(self.at, found, strict=True)}


@dataclass(frozen=True)
class KeysHeld:
    """The keys that a head holds with ``certified`` or ``forgets``, as a share of the training context: the mean over
    heads, layers and the last quarter of the rows."""

    name: str
    rule: str
    places: str = ""
    percent: bool = True
    at: ClassVar[tuple[float, ...]] = (1.0,)

    def __post_init__(self) -> None:
        if self.rule not in UNLIMITED:
            raise unknown("rule", self.rule, UNLIMITED, of=f"the probe {self.name!r}")

    def measure(self, subject: Probed) -> dict[float, float]:
        if not _measures(subject, self.rule):
            return {}
        T = subject.config.data.context_length
        if subject.config.data.task is None:
            [point] = loss_within(subject.model, subject.windows(1.0), [self.rule], [])
            return {1.0: point.late / T}
        with limited(subject.model, self.rule) as layers:
            wrong_share(subject, {}, 1.0)
        return {1.0: statistics.fmean(x for layer in layers for x in layer.late) / T}


@dataclass(frozen=True)
class WrongWithin(_Within):
    """The share of a task's answers that are wrong while a head may hold so many keys.

    Its arguments are those of :class:`AddedLoss`.
    """

    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0)
    percent: bool = True
    task: ClassVar[bool] = True

    def measure(self, subject: Probed) -> dict[float, float]:
        if not _measures(subject, self.rule):
            return {}
        found = {}
        for share in self.at:
            with limited(subject.model, self.rule, max(1, round(share * subject.config.data.context_length))):
                found[share] = wrong_share(subject, {}, 1.0)
        return found

    def guess(self, subject: Probed) -> dict[float, Guess]:
        return dict.fromkeys(self.at, measure_guess(examples_of(subject.config, {}, 1.0), subject.rows))


@dataclass(frozen=True)
class AddedInCache:
    """The loss that a budget of the cache adds where the model reads token by token, nats per token: over a budget with
    room for all keys.

    Args:
        name: what a reader sees.
        shares: of the training context, that a key head may hold on average.
        among: who divides the budget: each ``head`` has its own, or the heads of a ``layer`` or of all layers of the
            ``model`` compete for one.
    """

    name: str
    among: str
    shares: tuple[float, ...] = (0.0625, 0.125)
    places: str = "keys held, of the training context"
    percent: bool = False
    task: ClassVar[bool] = False

    def __post_init__(self) -> None:
        several(self, "shares", of=f"the probe {self.name!r}")
        if self.among not in ("head", "layer", "model"):
            raise unknown("among", self.among, ("head", "layer", "model"), of=f"the probe {self.name!r}")

    @property
    def at(self) -> tuple[float, ...]:
        return self.shares

    def measure(self, subject: Probed) -> dict[float, float]:
        if not knows(subject.model, "retention"):
            return {}
        windows, T = subject.windows(1.0), subject.config.data.context_length
        [whole] = loss_within(subject.model, windows, ["window"], [T])
        layers = subject.model.attentions()
        each = sum(x.kv_heads * (x.key_dim + x.v_dim) for x in (layer.config for layer in layers))
        each *= next(subject.model.parameters()).element_size()
        found = {}
        for share in self.shares:
            keys = max(1, round(share * T))
            if self.among == "head":
                budget: int | str = keys
            else:
                budget = f"{keys * each} B total" if self.among == "model" else f"{keys * each // len(layers)} B"
            found[share] = float(stepped_losses(subject.model, windows, budget).losses.mean()) - whole.loss
        return found


@dataclass(frozen=True)
class LongLoss(ByLength):
    """The loss of long texts while a head holds few keys, nats per token.

    Args:
        name: what a reader sees.
        rule: which keys go; ``""`` for none.
        share: of the training context, that a head may hold.
        lengths: of the texts, in training contexts.
    """

    name: str
    rule: str
    share: float = 0.5
    lengths: tuple[float, ...] = (1.0, 128.0)
    percent: bool = False
    task: ClassVar[bool] = False

    def __post_init__(self) -> None:
        several(self, "lengths", of=f"the probe {self.name!r}")
        if self.rule not in ("", *RULES):
            raise unknown("rule", self.rule, RULES, of=f"the probe {self.name!r}")

    @property
    def longest(self) -> float:
        return max(self.lengths)

    def measure(self, subject: Probed) -> dict[float, float]:
        if not _measures(subject, self.rule or "window"):
            return {}
        budget = max(1, round(self.share * subject.config.data.context_length))
        found = {}
        for length in self.lengths:
            windows = subject.windows(length)
            if self.rule:
                found[length] = loss_within(subject.model, windows, [self.rule], [budget])[0].loss
            else:
                found[length] = float(token_losses(subject.model, windows).mean())
        return found


@dataclass(frozen=True)
class DecodeCost(ByLength):
    """The cost of a token of decoding after a text, of all layers' cores, computed from their sizes: KiB that a
    sequence holds in 16 bits, or thousand operations.

    Args:
        name: what a reader sees.
        rule: which keys go, or are read.
        what: ``bytes`` or ``operations``.
        share: of the training context, that a head may hold or read; 0 for all keys.
        lengths: of the texts, in training contexts.
    """

    name: str
    rule: str
    what: str
    share: float = 0.25
    lengths: tuple[float, ...] = (1.0, 16.0, 128.0)
    percent: bool = False
    task: ClassVar[bool] = False

    def __post_init__(self) -> None:
        several(self, "lengths", of=f"the probe {self.name!r}")
        if self.what not in ("bytes", "operations"):
            raise unknown("what", self.what, ("bytes", "operations"), of=f"the probe {self.name!r}")

    def measure(self, subject: Probed) -> dict[float, float]:
        if not _measures(subject, self.rule):
            return {}
        T, unit = subject.config.data.context_length, 1024 if self.what == "bytes" else 1000
        budget = max(1, round(self.share * T)) if self.share else None
        return {
            length: sum(
                getattr(decoding(layer, self.rule, round(length * T), budget), self.what)
                for layer in subject.model.attentions()
            )
            / unit
            for length in self.lengths
        }


def _measures(subject: Probed, rule: str) -> bool:
    return knows(subject.model, rule) and (rule in OF_NETWORKS or not subject.config.forgetting.alone)
