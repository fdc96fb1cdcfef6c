"""The kernels, tiles and features of attention over levels in one call of PaTH or Wall; only ``plan`` decides them."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from attnzoo.kernels.common import tiles as tile_sizes
from attnzoo.kernels.common.device import Machine, not_gluon
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.tiles import Kind, Tiles, TileTable

from .layout import BLOCK, level_count

# Head dims up to the key -> tiles. Measured on an H200 (docs/benchmarks/log/path.md), 16-bit inputs.
_HOPPER: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3, tma=True, heads=8)},
    "dq": {64: Tiles(128, 64, 8, 3, maxnreg=128, tma=True), 128: Tiles(128, 64, 8, 3, tma=True, heads=8)},
    "dkdv": {64: Tiles(64, 64, 4, 4, heads=8), 128: Tiles(32, 64, 4, 4, heads=8)},
}
# Where they differ with pruning, which leaves short rows.
_HOPPER_PRUNED: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(128, 64, 8, 3, maxnreg=128, tma=True)},
    "dq": {128: Tiles(64, 64, 4, 2, tma=True, heads=8)},
}
# The Gluon forward (``hopper/forward.py``), pruned or not; num_warps are those of each of its two warpgroups.
HOPPER_FORWARD = {64: Tiles(128, 128, 4, 3, tma=True, heads=8), 128: Tiles(128, 128, 4, 2, tma=True, heads=8)}
# The Gluon backward.
HOPPER_BACKWARD = Tiles(64, 128, 8, 2, tma=True, heads=2)
# Fits the 99 KiB of shared memory of capability 8.6 / 8.9, so it is safe on anything from 8.0 up.
_SAFE: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2)},
    "dq": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2)},
    "dkdv": {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2)},
}
_FLOAT32: dict[Kind, dict[int, Tiles]] = {kind: {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 32, 4, 1)} for kind in _SAFE}
_TILES = TileTable({"hopper": _HOPPER}, _SAFE, _FLOAT32)
_SHORTENED = _TILES._replace(
    tuned={"hopper": {kind: tiles | _HOPPER_PRUNED.get(kind, {}) for kind, tiles in _HOPPER.items()}}
)
# Launchers by the name that a plan calls them, all with the same arguments.
FORWARD = {
    "portable": "attnzoo.kernels.levels.portable.forward:levels_forward",
    "hopper": "attnzoo.kernels.levels.hopper.forward:levels_forward_hopper",
}
BACKWARD = {
    "portable": "attnzoo.kernels.levels.portable.backward:levels_backward",
    "hopper": "attnzoo.kernels.levels.hopper.backward:levels_backward_hopper",
}
REFUSED = {"hopper": not_gluon}  # why kernels made for one architecture do not serve a call, by that architecture
_forced: dict[Kind, Tiles] = {}
override = functools.partial(tile_sizes.override, _forced)


class LevelsCall(NamedTuple):
    """A call as plans see it: T tokens, head dims K and V."""

    T: int
    K: int
    V: int
    dtype: torch.dtype
    needs_gate_grad: bool = False  # a backward pass will be asked for the gate's gradient
    deterministic: bool = False
    shortened: bool = False  # pruning or a window leaves short rows
    described: bool = True  # descriptors can address v: 16-byte strides and addresses
    portable_alone: str = ""  # an option that only the portable kernels serve


def plan(call: LevelsCall, machine: Machine) -> Plan:
    """The plan of a call on a machine; equal arguments give equal plans.

    A key tile lies in one block of 64 tokens (as do the dkdv kernel's row tiles), a row tile of fwd and dq in one
    pair of blocks.

    Raises:
        ValueError: tiles that tests or sweeps force (``override``) do not fit.
    """
    return _plan(call._replace(T=0), level_count(call.T) > 0, machine, tuple(_forced.items()))


@functools.lru_cache(maxsize=1024)
def _plan(call: LevelsCall, leveled: bool, machine: Machine, forced: tuple[tuple[Kind, Tiles], ...]) -> Plan:
    size = 64 if max(call.K, call.V) <= 64 else 128
    table = _SHORTENED if call.shortened else _TILES
    sizes: dict[Kind, Tiles] = {kind: table.of(kind, size, call.dtype, machine) for kind in _SAFE}
    sizes.update(forced)
    for kind, t in forced:
        if t.BS > BLOCK or (kind == "dkdv" and t.BT > BLOCK):
            got = f"BT={t.BT}, BS={t.BS}"
            raise ValueError(f"{kind} tiles: expected BS (and in dkdv BT) of at most {BLOCK}, got {got}")
    kinds = dict(forced).keys()
    own, refused = machine.architecture, REFUSED.get(machine.architecture)
    never = refused(machine, call.K, call.V, call.dtype, call.portable_alone) if refused else "this GPU has none"
    levels = "" if leveled else "too few tokens for a level"
    here = "" if call.described else "descriptors cannot address v (strides of 16 bytes)"
    once = never or ("deterministic algorithms are asked for" if call.deterministic else "")
    once = once or ("tiles are forced" if {"dq", "dkdv"} & kinds else "")
    forward = never or here or ("tiles are forced" if "fwd" in kinds else "")
    forward = forward or ("" if call.K % 8 == 0 else "descriptors cannot address the carried queries")
    why = (forward or once or here) if refused and not levels else ""
    return Plan(
        "portable" if levels or forward else own, "portable" if levels or once or here else own,
        call.needs_gate_grad and not once, tuple(sizes.items()), why=why, tuned=own in table.tuned,
    )  # fmt: skip


def one_pass_tiles(shortened: bool) -> Tiles:
    """Tiles of the one-pass backward; where pruning leaves heads of different lengths, more of them at a time."""
    return dataclasses.replace(HOPPER_BACKWARD, heads=8) if shortened else HOPPER_BACKWARD


def pair_warps(rep: int, head_dim: int) -> int:
    """Warps of a program of the own pair of blocks, which adds up what ``rep`` query heads that share keys give."""
    return 8 if rep > 1 and head_dim > 64 else 4


def pair_width(t: Tiles, head_dim: int) -> int:
    """Keys per tile within the own pair of blocks, where diag takes registers besides."""
    return min(t.BS, 32) if head_dim > 64 else t.BS
