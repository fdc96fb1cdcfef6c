"""Which kernels, tiles and features one call of ``fox_attention`` runs on: ``plan`` decides, nothing else does."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from attnzoo.kernels.common import tiles as tile_sizes
from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.device import Machine, not_gluon
from attnzoo.kernels.common.launching import head_block
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.tiles import Kind, Tiles, TileTable

_HERE = "attnzoo.kernels.fox"
# Launchers by the name that a plan calls them, all with the same arguments.
FORWARD = {
    "split": f"{_HERE}.portable.decode:fox_split_forward",
    "portable": f"{_HERE}.portable.forward:fox_forward",
    "hopper": f"{_HERE}.hopper.forward:fox_forward_hopper",
}
BACKWARD = {
    "portable": f"{_HERE}.portable.backward:fox_backward",
    "hopper": f"{_HERE}.hopper.backward:fox_backward_hopper",
}
REFUSED = {"hopper": not_gluon}  # why kernels made for one architecture do not serve a call, by that architecture
SEARCHED_FROM = 1536  # keys: of fewer, what pruning leaves out takes less time than the search for it
SEARCHED_WORK = 4e10  # products (B H T S K) of whole texts: of fewer, launching takes longer than what is left out
SPLIT_ROWS = 64  # packed rows (T * H / G) up to which the keys are split

# Head dims up to the key -> tiles. Measured on an H200 (docs/benchmarks/log/fox.md), 16-bit inputs.
_HOPPER: dict[Kind, dict[int, Tiles]] = {
    "fwd": {
        64: Tiles(128, 64, 4, 3),
        128: Tiles(128, 64, 8, 2, maxnreg=128, tma=True, heads=8),
        256: Tiles(128, 64, 8, 2),
    },
    "dq": {
        64: Tiles(128, 64, 8, 3, maxnreg=128, tma=True),
        128: Tiles(128, 64, 8, 3, tma=True, heads=8),
        256: Tiles(64, 32, 8, 2),
    },
    "dkdv": {64: Tiles(64, 64, 4, 4, heads=8), 128: Tiles(32, 64, 4, 4, heads=8), 256: Tiles(32, 64, 8, 2)},
}
# The Gluon forward; num_warps are those of each of its two warpgroups. Head dims over 64 up to 128: at 64 it is no
# faster than the portable one.
HOPPER_FORWARD = Tiles(128, 128, 4, 2, tma=True, heads=4)
# The Gluon backward, by the larger head dim; up to 64, two programs share a multiprocessor.
HOPPER_BACKWARD = {
    64: Tiles(64, 64, 4, 3, maxnreg=128, tma=True, heads=2),
    128: Tiles(64, 128, 8, 2, tma=True, heads=4),
}
APART_ROWS = 1 << 15  # of the query heads that share keys, from which on each has programs of its own there
# Fits the 99 KiB of shared memory of capability 8.6 / 8.9, so it is safe on anything from 8.0 up.
_SAFE: dict[Kind, dict[int, Tiles]] = {
    "fwd": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 32, 8, 1)},
    "dq": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    "dkdv": {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 2), 256: Tiles(32, 32, 4, 1)},
}
# Exact float32 products run on the scalar units and need the registers.
_FLOAT32: dict[Kind, dict[int, Tiles]] = {
    kind: {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)} for kind in _SAFE
}
_TILES = TileTable({"hopper": _HOPPER}, _SAFE, _FLOAT32)
# With retention, whose bias takes registers. Up to 64 by time on an H200 (docs/benchmarks/log/linear.md), wider ones by
# what ptxas spills and how many programs a multiprocessor holds. Two warpgroups on 64 keys each compute all biases.
_HOPPER_RETENTION: dict[Kind, dict[int, Tiles]] = {
    "fwd": {**_HOPPER["fwd"], 64: Tiles(64, 64, 4, 3, maxnreg=168, tma=True), 128: Tiles(64, 64, 4, 2, tma=True)},
    "dq": {**_HOPPER["dq"], 64: Tiles(64, 64, 4, 3, maxnreg=168, tma=True), 128: Tiles(64, 64, 4, 2, tma=True)},
    "dkdv": {**_HOPPER["dkdv"], 64: Tiles(32, 64, 4, 3, heads=8), 128: Tiles(32, 128, 8, 2, heads=8)},
}
_SAFE_RETENTION = {**_SAFE, "dkdv": {**_SAFE["dkdv"], 64: Tiles(32, 64, 4, 2)}}
_WITH_RETENTION = TileTable({"hopper": _HOPPER_RETENTION}, _SAFE_RETENTION, _FLOAT32)
_PRUNE = {  # of the rows whose log-sum-exp pruning computes, by architecture
    "hopper": Tiles(64, KEY_UNIT, 4, 3, tma=True),
    "safe": Tiles(128, KEY_UNIT, 4, 2),
    "wide": Tiles(32, KEY_UNIT, 4, 1),
}
_forced: dict[Kind, Tiles] = {}
override = functools.partial(tile_sizes.override, _forced)


class FoxCall(NamedTuple):
    """What a plan depends on besides the machine: T rows, S keys, ``rep`` query heads per key head, head dims K, V."""

    T: int
    S: int
    rep: int
    K: int
    V: int
    dtype: torch.dtype
    needs_gate_grad: bool = False  # a backward pass will be asked for the gate's gradient
    deterministic: bool = False
    masked: bool = False  # with ``valid``
    described: bool = True  # descriptors can address q, k and v: 16-byte strides and addresses
    lags: bool = False  # the gradient of a constant gate will be asked for
    needs_key_grads: bool = True  # a backward pass is asked for gradients of k, v or the gate
    portable_alone: str = ""  # an option that only the portable kernels serve


def plan(call: FoxCall, machine: Machine) -> Plan:
    """The plan of a call on a machine; equal arguments give equal plans.

    Raises:
        ValueError: tiles that tests or sweeps force (``override``) do not fit.
    """
    # lengths are not part of what is looked up: a cache grows at every step
    key = call._replace(T=0, S=0, rep=0)
    few = few_rows(call.T, call.S, call.rep) and call.portable_alone != "retention"  # which the split kernels lack
    return _plan(key, few, call.T >= ROW_UNIT, machine, tuple(_forced.items()))


def few_rows(T: int, S: int, rep: int) -> bool:
    """Whether there are so few rows that the keys are split."""
    return T * rep <= SPLIT_ROWS and max(4 * T, 4 * KEY_UNIT) <= S


def searched(rows: Sequence[int], S: int, bound: str, machine: Machine) -> bool:
    """Whether a call looks for what it may leave out; the interpreter always.

    Args:
        rows: the shape of q, [B, T, H, K].
        S: number of keys.
        bound: of ``Prune``, or "".
        machine: see :func:`plan`.
    """
    enough = S >= SEARCHED_FROM and (rows[1] < ROW_UNIT or math.prod(rows) * S >= SEARCHED_WORK)
    return bool(bound) and (enough or machine.capability == (0, 0))


def heads_apart(T: int, rep: int, K: int, V: int, pruned: bool) -> bool:
    """Whether Hopper's backward gives each of ``rep`` query heads that share keys programs of its own, which add up.

    A program of all of them goes through one after the other, and programs drift apart: what they read and add to then
    leaves the L2 cache. What pruning leaves is read while it is there.
    """
    return not pruned and rep > 2 and rep * T >= APART_ROWS and head_block(K) == head_block(V)


@functools.lru_cache(maxsize=1024)
def _plan(call: FoxCall, few: bool, many: bool, machine: Machine, forced: tuple[tuple[Kind, Tiles], ...]) -> Plan:
    size = next((n for n in (64, 128) if max(call.K, call.V) <= n), 256)
    tiles = _WITH_RETENTION if call.portable_alone == "retention" else _TILES
    sizes: dict[Kind, Tiles] = {kind: tiles.of(kind, size, call.dtype, machine) for kind in _SAFE}
    sizes.update(forced)
    for kind, t in forced:
        if kind != "dkdv" and t.BS > KEY_UNIT:
            raise ValueError(f"BS: expected at most {KEY_UNIT} in {kind} (one gate base per tile), got {t.BS}")
    own, refused = machine.architecture, REFUSED.get(machine.architecture)
    never = refused(machine, call.K, call.V, call.dtype, call.portable_alone) if refused else "this GPU has none"
    here = never or ("" if call.described else "descriptors cannot address q, k and v (strides of 16 bytes)")
    once = never or ("the gradient of a constant gate is asked for" if call.lags else "")
    once = once or ("deterministic algorithms are asked for" if call.deterministic else "")
    rest = call.needs_gate_grad and not once and not {"dq", "dkdv"} & dict(forced).keys()
    backward = once or here or ("tiles are forced" if {"dq", "dkdv"} & dict(forced).keys() else "")
    forward = "portable"
    if few:
        forward = "split"
    elif not here and "fwd" not in dict(forced) and many and max(call.K, call.V) > 64 and not call.masked:
        forward = own  # where it is faster, and there are rows for both warpgroups
    why = (here or backward) if refused else ""
    back = own if not backward and call.needs_key_grads else "portable"
    return Plan(forward, back, rest, tuple(sizes.items()), why=why, tuned=own in tiles.tuned)


def prune_tiles(T: int, K: int, dtype: torch.dtype, machine: Machine, described: bool = True) -> Tiles:
    """Tiles of the rows whose log-sum-exp pruning computes, and of keys; ``described``: see ``FoxCall``."""
    if head_block(K) * dtype.itemsize > 256:  # small enough for the shared memory of small multiprocessors
        return _PRUNE["wide"]
    if described and machine.descriptors and dtype.itemsize == 2 and T >= 64:
        return _PRUNE.get(machine.architecture, _PRUNE["safe"])
    return _PRUNE["safe"]
