"""What a call of fox_attention runs on, decided for machines that are not here."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fox_cases import SMALL, Case, inputs, triton

from attnzoo.kernels.common import call_checks, plans
from attnzoo.kernels.common.device import GLUON, Machine, sums_over_loops
from attnzoo.kernels.common.plans import Plan, announce
from attnzoo.kernels.fox import plan as fox_plan
from attnzoo.kernels.fox.plan import FoxCall, heads_apart, override, plan

HOPPER, AMPERE, INTERPRETER = Machine((9, 0), (3, 6)), Machine((8, 0), (3, 6)), Machine((0, 0), (3, 7))
CALL = FoxCall(T=1000, S=1000, rep=1, K=64, V=128, dtype=torch.bfloat16, needs_gate_grad=True)


def decide(machine: Machine = HOPPER, **changes: Any) -> Plan:
    return plan(CALL._replace(**changes), machine)


@pytest.mark.parametrize("release", GLUON)
def test_a_hopper_runs_its_own_kernels(release: tuple[int, int]) -> None:
    chosen = decide(Machine((9, 0), release))
    assert (chosen.forward, chosen.backward, chosen.keeps_rest, chosen.why) == ("hopper", "hopper", True, "")


@pytest.mark.parametrize(
    ("machine", "changes", "why"),
    [
        (HOPPER, {"dtype": torch.float32}, "expected bfloat16 or float16"),
        (HOPPER, {"V": 256}, "head dims of 33 to 128"),
        (HOPPER, {"K": 32}, "head dims of 33 to 128"),
        (HOPPER, {"deterministic": True}, "deterministic algorithms"),
        (HOPPER, {"lags": True, "deterministic": True}, "the gradient of a constant gate is asked for"),
        (HOPPER, {"described": False}, "descriptors cannot address"),
        (HOPPER, {"portable_alone": "softcap"}, "the Gluon kernels know no softcap"),
        (HOPPER, {"portable_alone": "retention"}, "the Gluon kernels know no retention"),
        (Machine((9, 0), (3, 5)), {}, "expected Triton 3.6 to 3.9 for the Gluon kernels, got 3.5 (torch 2.10"),
        (Machine((9, 0), (3, 10)), {}, "got 3.10 (a newer attnzoo"),
        (Machine((9, 0), (3, 6), rocm=True), {}, ""),
        (AMPERE, {}, ""),
        (INTERPRETER, {}, ""),
    ],
)
def test_the_portable_backward_runs_elsewhere_and_says_why(machine: Machine, changes: Any, why: str) -> None:
    chosen = decide(machine, **changes)
    assert chosen.backward == "portable"
    assert (why in chosen.why) if why else not chosen.why


def test_the_rest_of_o_is_kept_for_a_gates_gradient_in_one_pass_alone() -> None:
    assert decide().keeps_rest
    assert not decide(needs_gate_grad=False).keeps_rest
    assert not decide(deterministic=True).keeps_rest
    assert not decide(AMPERE).keeps_rest


def test_forwards() -> None:
    assert decide(deterministic=True).forward == "hopper"  # it is deterministic
    assert decide(T=100).forward == "portable"  # rows for one warpgroup only
    assert decide(V=64).forward == "portable"  # no slower there
    assert decide(masked=True).forward == "portable"
    assert decide(described=False).forward == "portable"
    for T, S, rep, split in (
        (1, 256, 1, True), (8, 4096, 8, True), (1, 200, 1, False), (64, 64, 1, False), (16, 4096, 8, False),
    ):  # fmt: skip
        assert (decide(T=T, S=S, rep=rep).forward == "split") == split
    assert decide(T=1, S=4096, portable_alone="retention").forward == "portable"  # whose bias the others do not make


def test_query_heads_that_share_keys_work_apart_where_their_rows_are_many() -> None:
    assert heads_apart(16384, 4, 128, 128, pruned=False)
    assert heads_apart(4096, 8, 64, 33, pruned=False)
    assert not heads_apart(16384, 4, 128, 128, pruned=True)
    assert not heads_apart(16384, 2, 128, 128, pruned=False)
    assert not heads_apart(4096, 4, 128, 128, pruned=False)
    assert not heads_apart(16384, 8, 64, 128, pruned=False)  # dK and dV leave through one place


def test_a_backward_of_rows_alone_takes_the_kernel_that_owns_rows() -> None:
    """It is no fallback, and what the forward keeps does not depend on it."""
    chosen = decide(needs_key_grads=False)
    assert (chosen.backward, chosen.keeps_rest, chosen.why) == ("portable", True, "")


def test_forced_tiles() -> None:
    with override({"dq": SMALL}):
        chosen = decide()
        assert (chosen.forward, chosen.backward, chosen.of("dq")) == ("hopper", "portable", SMALL)
    with override({"fwd": SMALL}):
        assert (decide().forward, decide().backward) == ("portable", "hopper")


def test_tiles_follow_capability_and_triton() -> None:
    assert decide(K=128).of("fwd").tma
    assert not decide(Machine((9, 0), (3, 3)), K=128).of("fwd").tma  # no host-side descriptors yet
    assert decide(AMPERE, K=128).of("fwd") == decide(Machine((12, 0), (3, 6)), K=128).of("fwd")
    assert decide(dtype=torch.float32).of("fwd").BT == 32


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell_keeps_sums_out_of_tensor_memory_where_triton_does_not_compile_them(
    capability: tuple[int, int],
) -> None:
    def keys(release: tuple[int, int], **given: Any) -> int:
        return decide(Machine(capability, release), **given).of("dkdv").BS

    assert [keys((3, minor)) for minor in (3, 4, 5, 6)] == [64, 32, 64, 64]
    assert keys((3, 4), K=128, V=128) == 32
    assert decide(Machine((8, 0), (3, 4))).of("dkdv").BS == 64
    assert sums_over_loops(Machine(capability, (3, 5))) == {"num_warps": 16}
    assert not sums_over_loops(Machine(capability, (3, 6)))
    assert not sums_over_loops(Machine((9, 0), (3, 5)))


def test_a_plan_is_logged_once_and_a_reason_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    plans._said.clear()
    announce.cache_clear()
    machine = Machine((9, 0), (3, 5))
    with caplog.at_level(logging.INFO, "attnzoo.kernels.fox"):
        for T in (1000, 1001, 1000):
            chosen = decide(machine, T=T)
            announce("fox", chosen, machine)
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]
    assert "portable kernels on a Hopper GPU: expected Triton 3.6 to 3.9 for the Gluon kernels, got 3.5" in caplog.text


def test_a_call_announces_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    plans._said.clear()
    announce.cache_clear()
    case = Case(T=20, S=20)
    with caplog.at_level(logging.INFO, "attnzoo.kernels.fox"):
        for _ in range(2):
            triton(case, inputs(case, torch.float32))
    assert sum("forward='portable'" in r.message for r in caplog.records) == 1


def test_kernels_for_another_architecture_are_rows_of_the_plans_tables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Launchers, refusals and tiles by the architecture's name are all that a plan and its log ask for."""
    blackwell, announced = Machine((10, 0), (3, 7)), "no tiles are tuned for compute capability (10, 0)"
    assert (decide(blackwell).forward, decide(blackwell).backward) == ("portable", "portable")
    place = fox_plan.FORWARD["portable"]
    for table, row in (
        (fox_plan.FORWARD, place), (fox_plan.BACKWARD, place), (fox_plan._TILES.tuned, fox_plan._HOPPER),
        (fox_plan.REFUSED, lambda machine, K, V, dtype, option: f"no {option}" if option else ""),
    ):  # fmt: skip
        monkeypatch.setitem(table, "blackwell", row)
    fox_plan._plan.cache_clear()
    try:
        chosen = decide(blackwell)
        assert (chosen.forward, chosen.backward, chosen.why) == ("blackwell", "blackwell", "")
        assert decide(blackwell, portable_alone="softcap").why == "no softcap"
        with caplog.at_level(logging.INFO, "attnzoo.kernels.fox"):
            announce("fox", chosen, blackwell)
        assert "forward='blackwell'" in caplog.text
        assert announced not in caplog.text
    finally:
        fox_plan._plan.cache_clear()
        plans._said.clear()
        announce.cache_clear()


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    q = torch.zeros(1, 4, 1, 16)
    assert "never run on ROCm" in call_checks.kernels_unavailable(q, q, multiple=8, most=256)


def test_a_cache_that_grows_keeps_its_plan() -> None:
    """A step looks its plan up: the same object, so that it is not announced again either."""
    steps = [decide(T=1, S=S) for S in (300, 301, 4096)]
    assert steps[0].forward == "split"
    assert all(step is steps[0] for step in steps)
