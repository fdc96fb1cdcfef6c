"""Wall kernels against the definition in float64: values and gradients, within the project's budget."""

from __future__ import annotations

import functools
import math
from typing import get_args

import pytest
import torch
import triton as tr
import triton.language as tl
from attention_ops import assert_written_out
from fox_cases import DEVICE, run
from path_cases import large_tiles
from test_path_one_pass import stand_in
from thinning import in_long
from wall_cases import Case, inputs, triton, within_budget

from attnzoo import Prune
from attnzoo.kernels.common.channel_gates import to_nearest
from attnzoo.kernels.common.device import triton_version
from attnzoo.kernels.wall import wall_attention
from attnzoo.kernels.wall.reference import wall_reference
from attnzoo.samples import Regime

__all__ = ["large_tiles"]

CASES = [
    Case(gate="open", B=2, T=66, H=1, K=32, V=48),
    Case(gate="strong", T=1),
    Case(gate="shut", T=66),
    Case(gate="ones", T=100, K=48),
    Case(gate="strong", T=140, H=1, K=32),
    Case(T=220, H=1, cu_seqlens=(0, 1, 71, 71, 190, 220), options={"scale": 0.7}),
    Case(T=520, H=1),  # three levels of carries
    Case(T=270, H=1, decay="open", options={"softcap": 0.6}),
    Case(gate="open", T=140, sink=True, options={"window": 70}),
    Case(T=140, G=1, H=2, decay="mixed", sink=True),
    Case(T=150, H=1, decay="open", cu_seqlens=(0, 1, 71, 150), options={"scale": 0.7, "window": 40}),
    Case(T=530, H=1, decay="open", options={"prune": Prune(eps=1e-8)}),  # two levels' keys go
]
GPU = [  # what the Gluon kernels take
    Case(gate="open", B=2, T=1100, H=4, G=2, K=64, V=64),
    Case(gate="strong", T=700, K=128, V=64),
    Case(T=1000, K=128, V=128, cu_seqlens=(0, 1, 130, 130, 700, 1000), sink=True),
    Case(T=2000, K=64, V=64, options={"window": 300}),
    Case(T=1500, H=4, G=2, K=64, V=64, decay="mixed", sink=True),
    Case(T=1500, K=128, V=128, decay="open", options={"prune": Prune(eps=1e-30)}),
]


@pytest.mark.parametrize("regime", get_args(Regime))
def test_the_definition_is_the_product_written_out(regime: Regime) -> None:
    assert_written_out(wall_reference, "wall", 41, regime)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in CASES), (CASES[4], torch.float16)], ids=str
)
def test_kernel_within_budget(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


@torch.no_grad()
def test_pruned_rows_lose_no_more_than_eps() -> None:
    """And as many blocks go as in the reference."""
    x = inputs(Case(gate="open", T=200, H=2, G=1), torch.float32)
    qkv, eps = (0.1 * x["q"], x["k"], x["v"]), 1e-2
    gates = {"log_diag": x["log_diag"], "log_decay": torch.full((1, 200, 2), -0.12, device=x["q"].device)}
    run = functools.partial(wall_attention, *qkv, **gates, return_lse=True)
    (_, lse), (_, whole), (_, want) = (
        run(impl=impl, prune=prune)
        for impl, prune in (("triton", Prune(eps)), ("triton", None), ("reference", Prune(eps)))
    )
    lost = 1 - (lse - whole).exp()
    assert 1e-6 < float(lost.max()) <= eps
    torch.testing.assert_close(lse, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", GPU, ids=str)
def test_kernel_within_budget_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


def test_a_closed_gate_has_no_gradient_at_all() -> None:
    x = inputs(Case(T=150, H=1), torch.float32)
    ours = triton(Case(T=150, H=1), x)
    closed = x["log_diag"] <= -1e4
    assert bool(closed.any())
    assert bool((ours["dlog_diag"][closed] == 0).all())
    assert bool((ours["dlog_diag"][~closed] != 0).any())


def test_errors_do_not_grow_after_strong_gates() -> None:
    """A sum over all tokens would drown the weak gates that follow: here 100 tokens of -50 precede them."""
    case = Case(gate="open", T=150, H=1)
    x = inputs(case, torch.float32)
    x["log_diag"][:, :100] = -50.0
    within_budget(case, x, triton(case, x))


def test_inputs_need_not_be_contiguous() -> None:
    case = Case(T=40, H=2, G=2)
    x = inputs(case, torch.float32)
    turned = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    got, want = triton(case, turned), triton(case, x)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_numbers_of_the_heads_may_have_any_strides() -> None:
    x = inputs(Case(T=40, H=2, G=2, sink=True), torch.float32)
    x.pop("do")
    sink = torch.stack([x.pop("sink"), torch.zeros(2, device=DEVICE)], 1)[:, 0]
    got, want = (wall_attention(**x, sink=y, impl="triton") for y in (sink, sink.contiguous()))
    assert torch.equal(got, want)


@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 for Gluon")
@pytest.mark.parametrize("decay", ["", "open"])
def test_the_queries_gradient_is_rounded_once(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the one-pass backward: not level by level, and without the error of the rounded output in all of a row.

    Rounding the exact gradient is the least error there can be; carried operands in float16 add up to a tenth.
    """
    stand_in(monkeypatch)
    case = Case(gate="ones", T=in_long(400, 900), H=1, K=64, V=64, decay=decay)
    x = inputs(case, torch.float16)
    exact = run(wall_reference, case, {n: t.double() for n, t in x.items()})["dq"]
    least = (exact.half().double() - exact).norm()
    assert (triton(case, x)["dq"].double() - exact).norm() <= 1.12 * least


@tr.jit
def to_nearest_kernel(p_x, p_y, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(p_y + o_n, to_nearest(tl.load(p_x + o_n), "tf32"))


def test_factors_round_to_the_nearest_and_what_is_no_number_stays() -> None:
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # the first is what a GPU makes
    x = torch.cat([torch.randn(60), torch.tensor([math.inf, -math.inf]), nan]).to(DEVICE)
    y = torch.empty_like(x)
    to_nearest_kernel[(1,)](x, y, 64)
    assert not bool(y[60:].isfinite().any())
    cut = (y[:60].view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert bool(((cut - x[:60]).abs() <= x[:60].abs() * 2**-11).all())
