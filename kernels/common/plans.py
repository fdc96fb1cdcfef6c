"""The result of a family's ``plan.py``: which kernels and tiles a call runs on. It is logged once."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Literal, Protocol

from attnzoo.kernels.common.device import Machine
from attnzoo.kernels.common.tiles import Kind, Tiles

TUNED = ((0, 0), (8, 0), (8, 6), (8, 9), (9, 0))  # capabilities whose tiles were chosen for them
_said: set[tuple[str, int, str]] = set()


@dataclass(frozen=True, eq=False)  # plans are cached: the same call has the same object
class Plan:
    """The kernels of a call, the tiles of the portable ones, and why a Hopper GPU does without its own (or "").

    Attributes:
        forward: "split" divides the keys among programs (few rows), the others one program per block of rows.
        backward: "hopper" is one pass that adds up the gradients of the queries in an order that varies, "portable" two
            deterministic kernels.
        keeps_rest: the forward keeps what the rounding of o drops, for the gate's gradient in one pass. Lengths and
            addresses do not count: compilers ask before they know these.
    """

    forward: Literal["split", "hopper", "portable"]
    backward: Literal["hopper", "portable"]
    keeps_rest: bool
    tiles: tuple[tuple[Kind, Tiles], ...]
    why: str = ""

    def kernels(self, backward: bool) -> str:
        """What runs, in words."""
        words = {"hopper": "Gluon", "portable": "portable", "split": "split-key"}
        return f"{words[self.forward]} forward" + (f", {words[self.backward]} backward" if backward else "")

    def of(self, kind: Kind) -> Tiles:
        """Tiles of one portable kernel."""
        return dict(self.tiles)[kind]


class Decided(Protocol):
    """What a plan of any family says besides itself; plans are cached, and so hashable."""

    @property
    def why(self) -> str: ...
    def __hash__(self) -> int: ...


@functools.lru_cache(maxsize=1024)
def announce(family: str, plan: Decided, where: Machine) -> None:
    """Log a plan once, and once each reason why a Hopper GPU does without its own kernels."""
    logger = logging.getLogger(f"attnzoo.kernels.{family}")
    lines = [(logging.INFO, f"{family}: {plan}")]
    if where.capability not in TUNED:
        lines.append((logging.INFO, f"{family}: no tiles are tuned for compute capability {where.capability}"))
    if plan.why:
        lines.append((logging.WARNING, f"{family}: portable kernels on a Hopper GPU: {plan.why}"))
    for level, line in lines:
        if (family, level, line) not in _said:
            _said.add((family, level, line))
            logger.log(level, "%s", line)
