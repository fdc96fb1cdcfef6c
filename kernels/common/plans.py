"""The result of a family's ``plan.py``: which kernels and tiles a call runs on. It is logged once."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from attnzoo.kernels.common.device import Machine
from attnzoo.kernels.common.tiles import Kind, Tiles

TUNED = ((0, 0), (8, 0), (8, 6), (8, 9), (9, 0))  # capabilities that the tiles of all families were chosen for
WORDS = {"hopper": "Gluon", "split": "split-key"}  # for kernels that are called otherwise than their launcher
_said: set[tuple[str, int, str]] = set()


@dataclass(frozen=True, kw_only=True)
class Announced:
    """The part of a family's plan that is told to the log; plans are cached, and so hashable.

    Attributes:
        why: why a GPU does without the kernels that are made for its architecture, or "".
        tuned: whether the family has tiles that were chosen for the GPU's architecture.
    """

    why: str = ""
    tuned: bool = False


@dataclass(frozen=True, eq=False)  # plans are cached: the same call has the same object
class Plan(Announced):
    """The kernels of a call and the tiles of the portable ones.

    Attributes:
        forward, backward: names in the family's tables of launchers. The forward "split" divides the keys among
            programs (few rows), the others have one program per block of rows.
        keeps_rest: the forward keeps what the rounding of o drops, for the gate's gradient in one pass. Lengths and
            addresses do not count: compilers ask before they know these.
    """

    forward: str
    backward: str
    keeps_rest: bool
    tiles: tuple[tuple[Kind, Tiles], ...]

    def kernels(self, backward: bool) -> str:
        """The kernels that run, in words."""
        forward, back = (WORDS.get(name, name) for name in (self.forward, self.backward))
        return f"{forward} forward" + (f", {back} backward" if backward else "")

    @property
    def splits_keys(self) -> bool:
        """Whether the forward divides the keys among programs."""
        return self.forward == "split"

    @property
    def one_pass(self) -> bool:
        """Whether the backward is one pass, whose programs add up the gradients of the queries in an order that varies;
        the portable one is two deterministic kernels."""
        return self.backward != "portable"

    def of(self, kind: Kind) -> Tiles:
        """Tiles of one portable kernel."""
        return dict(self.tiles)[kind]


@functools.cache
def launcher(place: str) -> Callable[..., Any]:
    """The function at ``"module:name"``, whose module is imported when it is first asked for: it needs Triton."""
    module, name = place.split(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))


@functools.lru_cache(maxsize=1024)
def announce(family: str, plan: Announced, where: Machine) -> None:
    """Log a plan once, and once each reason why a GPU does without the kernels made for it."""
    logger = logging.getLogger(f"attnzoo.kernels.{family}")
    lines = [(logging.INFO, f"{family}: {plan}")]
    if where.capability not in TUNED and not plan.tuned:
        lines.append((logging.INFO, f"{family}: no tiles are tuned for compute capability {where.capability}"))
    if plan.why:
        lines.append((logging.WARNING, f"{family}: portable kernels on a {where.architecture.title()} GPU: {plan.why}"))
    for level, line in lines:
        if (family, level, line) not in _said:
            _said.add((family, level, line))
            logger.log(level, "%s", line)
