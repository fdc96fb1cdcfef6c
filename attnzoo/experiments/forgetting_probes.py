"""Probes of models whose heads hold a limited number of keys: losses, answers, and held keys."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

from attnzoo.errors import several, unknown
from attnzoo.evaluation.answers import Guess, measure_guess
from attnzoo.evaluation.forgetting import OF_NETWORKS, RULES, UNLIMITED, knows, limited, loss_within
from attnzoo.experiments.probes import Probed, examples_of, wrong_share


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


def _measures(subject: Probed, rule: str) -> bool:
    return knows(subject.model, rule) and (rule in OF_NETWORKS or not subject.config.forgetting.alone)
