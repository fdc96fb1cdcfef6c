"""Which kernels and tiles one call of ``wall_attention`` runs on: those that PaTH's plan gives a call of its size.

Past the carries, which are Wall's own, a call is one of PaTH: the same kernels read the same levels.
"""

from __future__ import annotations

import torch

from attnzoo.kernels.common.device import Machine
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.levels.plan import Call
from attnzoo.kernels.levels.plan import plan as path_plan

# Channels and blocks at a time, and launch options, of the kernels of the carries.
_CARRY: dict[str, dict[str, int]] = {
    "carry": {"BC": 64, "BN": 16, "num_warps": 4, "num_stages": 1},
    "carry_bwd": {"BC": 64, "BN": 16, "num_warps": 4, "num_stages": 1},
}


def plan(
    T: int, K: int, V: int, dtype: torch.dtype, deterministic: bool, described: bool, machine: Machine,
    learns: bool = False, shortened: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a call on a machine.

    Args:
        described: whether descriptors can address v.
        learns: whether gradients will be asked for: that of every operand but v reads what the rounding of o drops.
        shortened: whether pruning leaves short rows.
    """
    return path_plan(Call(T, K, V, dtype, learns, deterministic, shortened, described), machine)


def launch(part: str) -> dict[str, int]:
    """Channels, blocks and launch options of a kernel of the carries."""
    return _CARRY[part]
