"""The one-pass backward over the levels. What surrounds the pass is plain Triton and runs under the interpreter, with a
stand-in for the pass; the pass itself needs a GPU."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fox_cases import DEVICE
from path_cases import Case, inputs, lse_within_budget, triton, within_budget
from thinning import in_long
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common import device as device_facts
from attnzoo.kernels.common.device import Machine
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.levels import plan
from attnzoo.kernels.levels.layout import levels_of
from attnzoo.kernels.levels.plan import HOPPER_BACKWARD

gluon = pytest.mark.skipif(device_facts.triton_version() < (3, 6), reason="needs Triton 3.6 for Gluon")
M, N = HOPPER_BACKWARD.BT // 16, HOPPER_BACKWARD.num_warps // (HOPPER_BACKWARD.BT // 16)


def _as_held(x: Tensor) -> Tensor:
    """Tiles [..., BT, BK] in the order in which the threads of a product hold them."""
    t = x.unflatten(-2, (M, 2, 8)).unflatten(-1, (N, x.shape[-1] // N // 8, 4, 2))
    n = t.ndim - 7
    return t.permute(*range(n), n + 4, n + 3, n, n + 2, n + 5, n + 1, n + 6).reshape(x.shape)


class Pass:
    """``path_bwd_hopper_kernel`` in PyTorch, all keys of a level at once."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self

    def __call__(
        self, d_q: Any, d_k: Any, d_v: Any, d_do: Any, d_rows: Any, d_delta: Any, d_dq: Any, d_dk: Any, d_dv: Any,
        own: Tensor, sums: Tensor, dc: Tensor, c: Tensor, base: Tensor, left: Tensor, start: Tensor, cut: Tensor,
        end: Tensor, full: Tensor, B: int, T: int, Tq: int, n: int, heads: int, scale: float, *_: Any, **options: Any,
    ) -> None:  # fmt: skip
        H, REP, BK, BT = (options[name] for name in ("H", "REP", "BK", "BT"))
        k, v, do, q = (x.base.float() for x in (d_k, d_v, d_do, d_q))
        K, V = q.shape[-1], v.shape[-1]
        rows, delta = (x.base.view(B, H, -1) for x in (d_rows, d_delta))
        dv = own[:, :, :T, :V].clone()
        dk = torch.zeros_like(k)
        held = d_dq.base.view(n, B, H, -1, BT, BK)
        for i, level in enumerate(levels_of(T)):
            h = level.h
            for u in range(level.nodes):
                mid, stop = (2 * u + 1) * h, min((2 * u + 2) * h, T)
                t, s = torch.arange(mid, stop), torch.arange(mid - h, mid)
                for b in range(B):
                    for head in range(H):
                        g = head // REP
                        see = torch.ones(len(t), h, dtype=torch.bool)
                        if options["HAS_SINCE"]:
                            first = left[b % left.shape[0], head % left.shape[1]]
                            see &= s >= first[t][:, None]
                        if options["HAS_START"]:
                            see &= s >= start[b, head][t // 128][:, None]
                        b_q = torch.where(see.any(1)[:, None], q[i * B + b, t - (u + 1) * h, head], 0.0)
                        b_k = torch.where(see.any(0)[:, None], k[i * B + b, s - u * h, g], 0.0)
                        y = b_q @ b_k.T * scale / 0.6931471805599453
                        if options["GATE"]:
                            at = base[b, head][t // 128 * 2] + c[b, head][t // 128 * 128]
                            y += (at[:, None] - base[b, head][s // 64] - c[b, head][s]).float()
                        p = torch.where(see, (y - rows[b, head, t][:, None]).exp2(), 0.0)
                        b_do = do[b, t, head]
                        ds = p * (b_do @ v[b, s, g].T - delta[b, head, t][:, None])
                        r = t - (u + 1) * h
                        dq = ds @ b_k
                        dk[i * B + b, s - u * h, g] += ds.T @ b_q * scale
                        dv[b, g, s] += p.T @ b_do
                        if options["GATE"]:
                            dc[b, head, s] += ds.sum(0)
                            sums.view(B, H, -1)[b, head].index_add_(0, t // 2, ds.sum(1))
                        pad = torch.zeros(-(-len(t) // BT) * BT, BK)
                        pad[: len(t), :K] = dq
                        tile = int(r[0]) // BT
                        add = _as_held(pad.view(-1, BT, BK))
                        seen = see.any(1).nonzero().flatten() // BT
                        for x in set(seen.tolist()):
                            held[i, b, head, tile + x] += add[x]
        d_dk.base.copy_(dk)
        d_dv.base.copy_(dv.transpose(1, 2))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the one-pass backward with ``Pass`` in the place of its Gluon kernel."""
    from attnzoo.kernels.levels.hopper import backward as one_pass
    from attnzoo.kernels.path import op
    from attnzoo.kernels.wall import op as wall_op

    def merged(call: plan.LevelsCall, machine: Machine) -> Plan:
        return dataclasses.replace(plan.plan(call, machine), backward="hopper", keeps_rest=call.needs_gate_grad)

    monkeypatch.setattr(one_pass, "path_bwd_hopper_kernel", Pass())
    monkeypatch.setattr(one_pass, "gluon_descriptor", lambda x, rows: SimpleNamespace(base=x))
    monkeypatch.setattr(op, "plan", merged)
    monkeypatch.setattr(wall_op, "plan", merged)


SURROUNDED = [
    Case(T=140, gate="none", V=32),
    Case(T=130, B=2, H=2, G=1, K=48, gate="open"),
    Case(T=390, H=1, gate="strong", options={"prune": Prune(), "scale": 0.1}),
    Case(T=140, cu_seqlens=(0, 60, 140)),
    Case(T=140, gate="open", sink=True, options={"window": 90}),
    Case(T=290, H=1, K=64, gate="strong", options={"prune": Prune(), "scale": 0.1}),
    Case(T=in_long(270, 530), H=1, K=80, gate="none"),
]


@gluon
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in SURROUNDED]
    + [(SURROUNDED[n], torch.float16) for n in in_long((2, 4), (0, 2, 4, 6))],
    ids=str,
)
def test_what_surrounds_the_pass(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


@gluon
@pytest.mark.parametrize("gate", ["open", "none"])
def test_what_surrounds_the_pass_with_a_gradient_of_the_log_sum_exp(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    case = Case(T=130, H=1, gate=gate, sink=True)
    lse_within_budget(case, inputs(case, torch.float32))


@gluon
@pytest.mark.parametrize("case", [SURROUNDED[1], SURROUNDED[in_long(2, 5)]], ids=str)
def test_kept_carries_change_no_bit_of_what_surrounds_the_pass(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    x = inputs(case, torch.float32)
    want = triton(case, x)
    kept = triton(dataclasses.replace(case, options=case.options | {"keep_carries": True}), x)
    assert all(torch.equal(kept[name], want[name]) for name in want)


def test_without_what_rounding_dropped_the_two_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when deterministic algorithms are asked for in the forward alone."""
    from attnzoo.kernels.path import op

    def forgetful(call: plan.LevelsCall, machine: Machine) -> Plan:
        backward = "portable" if call.deterministic else "hopper"
        return dataclasses.replace(plan.plan(call, machine), backward=backward, keeps_rest=False)

    monkeypatch.setattr(op, "plan", forgetful)
    case = Case(T=130, gate="open")
    x = inputs(case, torch.float32)
    within_budget(case, x, triton(case, x))


ON_GPU = [
    Case(T=300, K=64, V=64, gate="none"),
    Case(T=1100, K=128, V=128),
    Case(T=1100, B=2, H=4, G=2, K=48, V=64, gate="open"),
    Case(T=2500, H=4, G=1, K=64, V=128, gate="none", beta="two"),
    Case(T=700, H=4, G=4, K=128, V=64, gate="strong", options={"prune": Prune(), "scale": 0.1}),
    Case(T=1300, H=8, G=2, K=128, V=128, gate="open", options={"prune": Prune(), "scale": 0.1}),
    Case(T=2500, H=2, G=1, K=64, V=64, gate="open", options={"prune": Prune(), "scale": 0.1}),
    Case(T=1100, K=128, V=128, cu_seqlens=(0, 1, 330, 900, 1100)),
    Case(T=1100, K=64, V=64, gate="none", cu_seqlens=(0, 640, 1100)),
    Case(T=1100, K=64, V=64, gate="shut"),
    Case(T=1100, K=128, V=128, gate="open", sink=True, options={"window": 300}),
    Case(T=700, H=4, G=2, K=64, V=64, gate="none", sink=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype", "merged"),
    [(case, torch.bfloat16, True) for case in ON_GPU]
    + [(ON_GPU[1], torch.float16, True), (ON_GPU[1], torch.bfloat16, False), (ON_GPU[5], torch.bfloat16, False)],
    ids=str,
)
def test_both_ways_within_budget(case: Case, dtype: torch.dtype, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = plan.LevelsCall(case.T, case.K, case.V, dtype)
    if plan.plan(call, device_facts.machine(torch.device(DEVICE))).backward != "hopper":
        pytest.skip("the one-pass backward does not run here")
    if not merged:
        portable = functools.partial(dataclasses.replace, backward="portable", keeps_rest=False)
        monkeypatch.setattr("attnzoo.kernels.path.op.plan", lambda *call: portable(plan.plan(*call)))
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1000, 4096])
def test_every_gradient_is_written_on_the_gpu(T: int) -> None:
    """What a first call leaves in memory, NaN, does not show in a second."""
    case = Case(T=T, H=4, G=2, K=64, V=64, gate="open", options={"prune": Prune()})
    x = inputs(case, torch.bfloat16)
    want = triton(case, x)
    poison = torch.full((1 << 30,), float("nan"), device=DEVICE)
    del poison
    got = triton(case, x)
    for name in want:
        error = (got[name].double() - want[name].double()).norm() / want[name].double().norm()
        assert float(error) <= 1e-3, name
