"""Which rows read a unit of keys, against every pair of a row and a key."""

from __future__ import annotations

import pytest
import torch
from fox_cases import DEVICE
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.key_bounds import key_bounds

B, H = 2, 2


def first_keys(T: int, S: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """First keys of all positions [B, H, S], and of units of rows [B, H, ceil(T / ROW_UNIT)]; neither moves left."""
    here = torch.arange(S)
    since = (torch.rand(B, H, S, generator=generator) < 0.01).int() * here
    units = torch.arange(0, T, ROW_UNIT)
    drawn = torch.rand(B, H, len(units), generator=generator) * (units + S - T + 1)
    start = drawn.int() // KEY_UNIT * KEY_UNIT
    return since.cummax(-1).values.int(), start.cummax(-1).values.int()


@pytest.mark.parametrize("kinds", ["since", "start", "since start"])
@pytest.mark.parametrize(("T", "S"), [(300, 300), (130, 517), (512, 512)])
def test_bounds_of_keys_are_those_of_rows(T: int, S: int, kinds: str) -> None:
    since, start = first_keys(T, S, torch.Generator().manual_seed(T))
    own = since[..., S - T :] if "since" in kinds else since.new_zeros((B, H, T))
    kept = start.repeat_interleave(ROW_UNIT, -1)[..., :T] if "start" in kinds else own.new_zeros((B, H, T))
    bounds = key_bounds(
        since.to(DEVICE) if "since" in kinds else None, start.to(DEVICE) if "start" in kinds else None, B, T, H, S
    )

    def rows_before(first: Tensor, key: Tensor) -> Tensor:
        """How many rows have a first key up to ``key``: they come before all others."""
        return (first[..., None, :] <= key[:, None]).sum(-1)

    begin = torch.arange(0, S, KEY_UNIT)
    last = begin + KEY_UNIT - 1
    both = torch.maximum(own, kept)
    expected = {"end": rows_before(both, last), "full": rows_before(both, begin), "open": rows_before(own, begin)}
    if "start" in kinds:
        expected["cut"] = rows_before(kept, last)
    for name, rows in expected.items():
        assert torch.equal(getattr(bounds, name).cpu(), rows.int()), name
