"""Tile sizes of one launch, and forcing them in tests and sweeps. ``plan.py`` of a family chooses among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from attnzoo.kernels.common.device import Machine

Kind = Literal["fwd", "dq", "dkdv"]
_changes = 0


@dataclass(frozen=True)
class Tiles:
    """One launch configuration: BT query rows by BS keys."""

    BT: int
    BS: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers per thread, to fit more programs on a multiprocessor
    tma: bool = False  # load tiles through tensor descriptors (Hopper and later)
    heads: int = 1 << 20  # heads scheduled together

    def __post_init__(self) -> None:
        if self.BT not in (16, 32, 64, 128):
            raise ValueError(f"BT: expected one of (16, 32, 64, 128), got {self.BT}")
        if self.BS not in (16, 32, 64, 128):
            raise ValueError(f"BS: expected one of (16, 32, 64, 128), got {self.BS}")


class TileTable(NamedTuple):
    """A family's tiles of portable kernels, by kernel and by the head dims that they serve up to.

    Attributes:
        tuned: those in 16 bits on some architectures, by ``Machine.architecture``.
        safe: those in 16 bits on the others.
        float32: those in 32 bits.
    """

    tuned: Mapping[str, Mapping[Kind, Mapping[int, Tiles]]]
    safe: Mapping[Kind, Mapping[int, Tiles]]
    float32: Mapping[Kind, Mapping[int, Tiles]]

    def of(self, kind: Kind, size: int, dtype: torch.dtype, machine: Machine) -> Tiles:
        """Tiles for head dims up to ``size``; a Triton without descriptors gets none, nor a limit of registers.

        Triton 3.4 does not compile dkdv where its sums lie in tensor memory, which tiles of 32 keys do not use.
        """
        if dtype == torch.float32:
            return self.float32[kind][size]
        t = self.tuned.get(machine.architecture, self.safe)[kind][size]
        if kind == "dkdv" and machine.blackwell and machine.triton == (3, 4):
            return replace(t, BS=32)
        return t if machine.descriptors else replace(t, tma=False, maxnreg=None)


@contextlib.contextmanager
def override(forced: dict[Kind, Tiles], tiles: dict[Kind, Tiles]) -> Iterator[None]:
    """Force ``tiles``, by kernel, for tests and sweeps; affects every head dim while the context is open.

    Args:
        forced: what the plan of the kernel family asks first.
    """
    global _changes
    before = dict(forced)
    forced.update(tiles)
    _changes += 1
    try:
        yield
    finally:
        forced.clear()
        forced.update(before)
        _changes += 1


def changes() -> int:
    """The number of times that tiles were forced or freed; a plan made before may be another one now."""
    return _changes
