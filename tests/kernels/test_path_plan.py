"""What a call of path_attention runs on, decided for machines that are not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnzoo.kernels.common.device import GLUON, Machine
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.tiles import Tiles
from attnzoo.kernels.levels.plan import LevelsCall, override, plan
from attnzoo.kernels.path.fits import block_backward_at_once, blocks_in_gluon

HOPPER, AMPERE = Machine((9, 0), (3, 6)), Machine((8, 0), (3, 6))
CALL = LevelsCall(T=1000, K=64, V=128, dtype=torch.bfloat16, needs_gate_grad=True)
TILE = Tiles(64, 64, 4, 1)


def decide(machine: Machine = HOPPER, **changes: Any) -> Plan:
    return plan(CALL._replace(**changes), machine)


@pytest.mark.parametrize("release", GLUON)
def test_a_hopper_runs_its_own_kernels(release: tuple[int, int]) -> None:
    chosen = decide(Machine((9, 0), release))
    assert (chosen.forward, chosen.backward, chosen.keeps_rest, chosen.why) == ("hopper", "hopper", True, "")
    assert not decide(needs_gate_grad=False).keeps_rest


@pytest.mark.parametrize(
    ("machine", "changes", "forward", "backward", "why"),
    [
        (HOPPER, {"dtype": torch.float32}, "portable", "portable", "expected bfloat16 or float16"),
        (HOPPER, {"K": 32}, "portable", "portable", "head dims of 33 to 128"),
        (HOPPER, {"portable_alone": "softcap"}, "portable", "portable", "the Gluon kernels know no softcap"),
        (HOPPER, {"K": 66}, "portable", "hopper", "descriptors cannot address the carried queries"),
        (HOPPER, {"described": False}, "portable", "portable", "descriptors cannot address v"),
        (HOPPER, {"deterministic": True}, "hopper", "portable", "deterministic algorithms"),
        (HOPPER, {"T": 128}, "portable", "portable", ""),  # no levels: nothing to run in one pass
        (Machine((9, 0), (3, 5)), {}, "portable", "portable", "expected Triton 3.6 to 3.9 for the Gluon kernels"),
        (Machine((9, 0), (3, 6), rocm=True), {}, "portable", "portable", ""),
        (AMPERE, {}, "portable", "portable", ""),
    ],
)
def test_where_portable_kernels_run_and_why(
    machine: Machine, changes: Any, forward: str, backward: str, why: str
) -> None:
    chosen = decide(machine, **changes)
    assert (chosen.forward, chosen.backward) == (forward, backward)
    assert (why in chosen.why) if why else not chosen.why


def test_the_rest_of_o_is_kept_for_a_gates_gradient_in_one_pass_alone() -> None:
    assert not decide(AMPERE).keeps_rest
    assert not decide(deterministic=True).keeps_rest
    assert decide(T=1).keeps_rest == decide(described=False).keeps_rest == decide().keeps_rest


def test_forced_tiles() -> None:
    with override({"fwd": TILE}):
        assert (decide().forward, decide().backward) == ("portable", "hopper")
    with override({"dkdv": TILE}):
        assert (decide().forward, decide().backward, decide().of("dkdv")) == ("hopper", "portable", TILE)


def test_tiles_follow_capability_pruning_and_triton() -> None:
    assert decide(K=128).of("fwd").tma
    assert not decide(Machine((9, 0), (3, 3)), K=128).of("fwd").tma  # no host-side descriptors yet
    assert decide(K=64, V=64, shortened=True).of("fwd") != decide(K=64, V=64).of("fwd")
    assert decide(AMPERE).of("fwd") == decide(Machine((12, 3), (3, 6))).of("fwd")


def test_which_kernels_make_a_block_and_its_gradients() -> None:
    others = (AMPERE, Machine((10, 0), (3, 7)), Machine((9, 0), (3, 7), rocm=True))
    assert blocks_in_gluon(128, torch.bfloat16, HOPPER)
    assert block_backward_at_once(torch.bfloat16, HOPPER)
    assert block_backward_at_once(torch.bfloat16, Machine((9, 0), (3, 3)))  # no Gluon in it
    assert not block_backward_at_once(torch.bfloat16, Machine((9, 0), (3, 8)))
    for dtype, machine in ((torch.float16, HOPPER), (torch.float32, HOPPER), *((torch.bfloat16, x) for x in others)):
        assert not blocks_in_gluon(128, dtype, machine)
        assert not block_backward_at_once(dtype, machine)
