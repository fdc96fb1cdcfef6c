"""Which kernels and tiles one call of ``wall_attention`` runs on: those that PaTH's plan gives a call of its size.

Past the carries, which are Wall's own, a call is one of PaTH: the same kernels read the same levels.
"""

from __future__ import annotations

from attnzoo.kernels.levels.plan import LevelsCall, plan

# Channels and blocks at a time, and launch options, of the kernels of the carries.
_CARRY: dict[str, dict[str, int]] = {
    "carry": {"BC": 64, "BN": 16, "num_warps": 4, "num_stages": 1},
    "carry_bwd": {"BC": 64, "BN": 16, "num_warps": 4, "num_stages": 1},
}


def launch(part: str) -> dict[str, int]:
    """Channels, blocks and launch options of a kernel of the carries."""
    return _CARRY[part]


__all__ = ["LevelsCall", "launch", "plan"]
