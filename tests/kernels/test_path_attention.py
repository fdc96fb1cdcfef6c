"""The attention kernels of path: every tiling, any cut of the heads into workspaces, and rows that are never read."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from path_cases import Case, inputs, triton, within_budget
from path_definitions import needed
from thinning import in_long

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common.device import Machine
from attnzoo.kernels.common.tiles import Kind, Tiles
from attnzoo.kernels.levels import head_groups, plan
from attnzoo.kernels.levels.layout import Carried, Leaves, Levels, levels_of
from attnzoo.kernels.path import passes
from attnzoo.kernels.path.portable import blocks_backward, carry

LONG = Case(T=260, H=2, G=1, K=16, V=32)
PACKED = Case(T=140, H=2, G=2, gate="none", cu_seqlens=(0, 1, 70, 130, 140))
PRUNED = Case(T=270, H=1, G=1, gate="strong", options={"prune": Prune(1e-4)})


TALL: dict[Kind, Tiles] = {"fwd": Tiles(128, 64, 4, 1), "dq": Tiles(128, 64, 4, 1), "dkdv": Tiles(64, 64, 4, 1)}
SMALL: dict[Kind, Tiles] = {"fwd": Tiles(64, 32, 4, 1), "dq": Tiles(64, 32, 4, 1), "dkdv": Tiles(32, 64, 4, 1)}


TILED = [
    *(pytest.param(case, SMALL, id=f"{case}-small") for case in (LONG, PACKED, PRUNED)),
    *(pytest.param(case, TALL, id=f"{case}-tall") for case in in_long((PRUNED,), (LONG, PACKED, PRUNED))),
]


@pytest.mark.parametrize(("case", "tiles"), TILED)
def test_tilings_stay_within_budget(case: Case, tiles: dict[Kind, Tiles]) -> None:
    """Those of ``test_path`` are tall."""
    x = inputs(case, torch.float32)
    with plan.override(tiles):
        within_budget(case, x, triton(case, x))


def test_workspaces_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(B=2, T=20, H=2, G=2, options={"prune": Prune(1e-4)})
    x = inputs(case, torch.float32)
    with plan.override(TALL):
        whole = triton(case, x)
        monkeypatch.setattr(head_groups, "BUDGET", 1)  # one key head at a time
        pieces = triton(case, x)
    for name, y in pieces.items():
        assert torch.equal(y, whole[name]), name


def test_carries_are_gone_before_the_blocks_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(T=140, H=1)
    x, seen, given_back = inputs(case, torch.float32), [], []

    def carry_backward(block: Leaves, carried: Carried, d: Levels, *rest: Any) -> Any:
        seen.extend(weakref.ref(t) for t in (block.m, *carried.levels, *d))
        return carry.carry_backward(block, carried, d, *rest)

    def block_level_backward(*given: Any) -> Any:
        assert len(seen) == 5
        assert not any(ref() is not None for ref in seen)
        given_back.append(True)
        return blocks_backward.block_level_backward(*given)

    monkeypatch.setattr(passes, "carry_backward", carry_backward)
    monkeypatch.setattr(passes, "block_level_backward", block_level_backward)
    triton(case, x)
    assert given_back


@pytest.mark.parametrize("budget", [1, 1 << 20, 3 << 20, 1 << 40])
@pytest.mark.parametrize(("B", "H", "G"), [(1, 6, 3), (3, 4, 4), (2, 5, 5)])
def test_parts_cover_every_head_once(B: int, H: int, G: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_groups, "BUDGET", budget)
    q, k = torch.empty(B, 600, H, 16), torch.empty(B, 600, G, 16)
    queries, keys = torch.zeros(B, 1, H), torch.zeros(B, 1, G)
    for group in head_groups.head_groups(q, k, backward=True):
        group.queries(queries).add_(1)
        group.keys(keys).add_(1)
        assert group.h.start * G == group.g.start * H
    assert torch.equal(queries, torch.ones_like(queries))
    assert torch.equal(keys, torch.ones_like(keys))


def test_pruned_carries_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a level's rows that pruning spares nor those past its own number of rows."""
    x = inputs(PRUNED, torch.float32)
    with plan.override(TALL):
        clean = triton(PRUNED, x)
    spared = 0

    def poison(carry: Any) -> Any:
        def spoiled(block: Leaves, start: torch.Tensor, out: Levels | None = None) -> Carried:
            nonlocal spared
            carried = carry(block, start, out)
            levels = Levels(torch.full_like(carried.levels.q, torch.nan), torch.full_like(carried.levels.k, torch.nan))
            for s, level in enumerate(levels_of(PRUNED.T)):
                m_q, m_k = needed(start, level, PRUNED.G)
                spared += int((~m_q).sum() + (~m_k).sum())
                for y, z, m in ((levels.q, carried.levels.q, m_q), (levels.k, carried.levels.k, m_k)):
                    n = m.shape[1]
                    y[s, :, :n] = z[s, :, :n].where(m, torch.nan)
            return Carried(levels, carried.nodes)

        return spoiled

    monkeypatch.setattr(passes, "carry", poison(passes.carry))
    with plan.override(TALL):
        poisoned = triton(PRUNED, x)
    for name, y in poisoned.items():
        assert torch.equal(y, clean[name]), name
    assert spared > 0


@pytest.mark.parametrize(("kind", "tiles"), [("fwd", Tiles(64, 128, 4, 1)), ("dkdv", Tiles(128, 64, 4, 1))])
def test_a_tile_must_fit_a_block(kind: Any, tiles: Tiles) -> None:
    with plan.override({kind: tiles}), pytest.raises(ValueError, match=f"{kind} tiles: expected BS"):
        plan.plan(plan.LevelsCall(300, 64, 64, torch.float16), Machine((8, 0), (3, 6)))
