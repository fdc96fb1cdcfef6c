"""path_attention against the float64 definition: values and gradients, every option, and the laws."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import get_args

import pytest
import torch
from attention_ops import assert_written_out
from path_cases import (
    DEVICE,
    Case,
    inputs,
    large_tiles,  # noqa: F401  (a fixture)
    lse_within_budget,
    oracle,
    run,
    triton,
    within_budget,
)
from thinning import in_long
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.levels import plan
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.path.reference import path_reference, path_reference_lse
from attnzoo.samples import Regime

CASES = [
    Case(gate="open"),
    Case(T=70, H=4, G=2, K=32, V=48),
    Case(gate="strong", T=1),
    Case(gate="shut", B=2, T=66, H=1),
    Case(gate="ones", T=100, beta="two"),
    Case(gate="none", T=140, H=2, G=2, K=48, V=16),
    Case(gate="open", T=260, H=2, K=48, V=32),
    Case(gate="none", T=130, beta="two"),
    Case(gate="open", T=140, beta="zero"),
    Case(gate="strong", T=140, H=1, K=32),
    Case(T=140, cu_seqlens=(0, 1, 71, 71, 130, 140)),
    Case(gate="none", T=140, H=1, cu_seqlens=(0, 65, 140)),
    Case(T=130, H=1, options={"scale": 0.7}),
    Case(T=64, H=1),
    Case(gate="open", T=520, H=1),  # three levels of carries
    Case(T=140, H=2, G=1, sink=True, options={"softcap": 0.6}),
]
ROWS = [  # what bounds a row or takes part in its softmax besides its keys
    Case(T=260, H=1, options={"window": 70}),
    Case(gate="none", T=140, G=2, sink=True, options={"window": 20}),
    Case(gate="open", T=140, sink=True),
    Case(gate="none", T=140, H=1, sink=True, cu_seqlens=(0, 10, 140), options={"window": 125}),
    Case(gate="strong", T=300, H=1, sink=True, options={"prune": Prune(), "scale": 0.1, "window": 200}),
]
HOPPER = [  # what the Gluon forward takes
    Case(gate="open", T=700, H=4, G=2, K=64, V=64, sink=True, options={"window": 300}),
    Case(gate="none", T=500, K=128, V=128, sink=True),
    Case(gate="none", T=129, H=2, G=2, K=64, V=64),
    Case(gate="open", B=2, T=1100, H=4, G=2, K=64, V=64),
    Case(T=300, K=48, V=128),
    Case(gate="strong", T=700, K=128, V=64),
    Case(T=1000, K=128, V=128, cu_seqlens=(0, 1, 130, 130, 700, 1000)),
    Case(gate="none", T=1000, K=64, V=64, cu_seqlens=(0, 500, 1000)),
    Case(gate="strong", B=2, T=1100, H=2, K=128, V=128, options={"prune": Prune(), "scale": 0.1}),
    Case(gate="strong", T=1100, K=64, V=64, options={"prune": Prune(bound="paper"), "scale": 0.1}),
]
LONG = [Case(gate="none", T=1100, H=1, beta="two"), Case(T=2000, K=64, V=64), Case(T=1500, H=4, K=128, V=64)]


@pytest.mark.parametrize("regime", get_args(Regime))
@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_the_definition_is_the_product_written_out(name: str, regime: Regime) -> None:
    assert_written_out(path_reference, name, 40, regime)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in (*CASES, *ROWS)]
    + [(case, torch.float16) for case in in_long((CASES[1], CASES[9]), CASES)],
    ids=str,
)
def test_kernel_within_budget(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


def test_w_and_beta_in_the_dtype_of_q() -> None:
    case = Case(T=100)
    x = inputs(case, torch.float16)
    x["w"], x["beta"] = x["w"].half(), x["beta"].half()
    ours = triton(case, x)
    assert ours["dw"].dtype == ours["dbeta"].dtype == torch.float16
    within_budget(case, x, ours)


def test_two_runs_give_the_same_bits() -> None:
    case = Case(T=130)
    x = inputs(case, torch.float32)
    first, second = triton(case, x), triton(case, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def forward(x: dict[str, Tensor]) -> Tensor:
    return path_attention(**{name: t for name, t in x.items() if name != "do"}, impl="triton")


def close(got: dict[str, Tensor], want: dict[str, Tensor], names: tuple[str, ...] | None = None) -> None:
    for name in names or want:
        torch.testing.assert_close(got[name], want[name], rtol=2e-4, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_beta_zero_is_fox() -> None:
    case = Case(T=140, H=1, beta="zero", sink=True, options={"window": 90})
    x = inputs(case, torch.float32)
    plain = {name: t for name, t in x.items() if name not in ("w", "beta")}
    fox = run(fox_attention, case, plain, impl="triton")
    close(triton(case, x), fox)


def test_no_gate_is_a_gate_of_one() -> None:
    case = Case(gate="ones", T=140, H=1)
    x = inputs(case, torch.float32)
    close(triton(case, x), triton(case, {name: t for name, t in x.items() if name != "log_decay"}))


def test_one_reflection_turns_the_keys_before_it() -> None:
    """beta = 2 at token 50 alone, across a block later: those rows see the keys before it mirrored."""
    case = Case(T=150, H=1, gate="none", beta="zero")
    x = inputs(case, torch.float32)
    x["beta"][:, 50] = 2.0
    w = x["w"][:, 50:51]
    mirrored = x["k"] - 2 * (x["k"] * w).sum(-1, keepdim=True) * w
    flat = dict(x, beta=torch.zeros_like(x["beta"]), k=torch.cat([mirrored[:, :50], x["k"][:, 50:]], 1))
    torch.testing.assert_close(forward(x)[:, 50:], forward(flat)[:, 50:], rtol=1e-4, atol=1e-5)


def test_packed_equals_separate() -> None:
    x = inputs(Case(T=140, H=1), torch.float32)
    packed = triton(Case(T=140, H=1, cu_seqlens=(0, 60, 140)), x)
    for a, b in ((0, 60), (60, 140)):
        alone = triton(Case(T=b - a, H=1), {name: t[:, a:b] for name, t in x.items()})
        close({name: t[:, a:b] for name, t in packed.items()}, alone)


def test_a_closed_gate_equals_a_border_between_sequences() -> None:
    case = Case(T=140, H=1, gate="open")
    x = inputs(case, torch.float32)
    packed = triton(Case(T=140, H=1, gate="open", cu_seqlens=(0, 57, 140)), x)
    x["log_decay"] = x["log_decay"].clone()
    x["log_decay"][:, 57] = -math.inf
    close(triton(case, x), packed)


def test_padding_on_the_left_is_neutral_once_its_gate_is_closed() -> None:
    case = Case(T=100, H=1, gate="open")
    x = inputs(case, torch.float32)
    pad = {n: torch.cat([torch.full_like(t[:, :37], 1e3 if n in "kv" else 0.0), t], 1) for n, t in x.items()}
    pad["log_decay"][:, 37] = -math.inf
    padded, alone = triton(Case(T=137, H=1, gate="open"), pad), triton(case, x)
    names = ("o", "dq", "dk", "dv", "dw", "dbeta")
    trimmed = {name: padded[name][:, 37:] for name in names}
    for name in ("dw", "dbeta"):  # the first real transition carries nothing in either
        trimmed[name], alone[name] = trimmed[name][:, 1:], alone[name][:, 1:]
    close(trimmed, alone, names)


def test_the_future_changes_nothing() -> None:
    case = Case(T=200)
    x = inputs(case, torch.float32)
    y = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "log_decay"):
        y[name][:, 100:] = -3.0
    y["w"][:, 100:] = x["w"][:, 100:].flip(1)
    torch.testing.assert_close(forward(x)[:, :100], forward(y)[:, :100], rtol=1e-5, atol=1e-6)


LSE = [
    Case(T=130, G=2, sink=True),
    Case(gate="none", T=70, H=1, sink=True),
    Case(T=130, H=1, options={"window": 40}),
    Case(gate="none", T=130, H=1),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in LSE]
    + [
        pytest.param(case, torch.bfloat16, marks=pytest.mark.gpu)
        for case in (Case(gate="open", T=700, K=64, V=64, sink=True), Case(gate="none", T=300, K=128, V=128, sink=True))
    ],
    ids=str,
)
def test_log_sum_exp_and_its_gradients(case: Case, dtype: torch.dtype) -> None:
    lse_within_budget(case, inputs(case, dtype))


def test_log_sum_exp_alone_has_gradients() -> None:
    x = inputs(Case(T=70, H=1), torch.float32)
    leaves = {name: x[name].requires_grad_() for name in ("q", "k", "v", "w", "beta", "log_decay")}
    lse = path_attention(**leaves, impl="triton", return_lse=True)[1]
    want = path_reference_lse(**leaves)[1]
    grads = [torch.autograd.grad(y.sum(), list(leaves.values()), materialize_grads=True) for y in (lse, want)]
    for name, got, exact in zip(leaves, *grads, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"d{n}: {m}")


def test_a_window_as_long_as_the_text_and_a_sink_of_minus_infinity_are_none() -> None:
    case = Case(T=70, H=1)
    x = inputs(case, torch.float32)
    plain = triton(case, x)
    close(triton(Case(T=70, H=1, options={"window": 70}), x), plain)
    with_sink = triton(case, x | {"sink": torch.full((1,), -math.inf, device=DEVICE)})
    assert torch.equal(with_sink.pop("dsink"), torch.zeros(1, device=DEVICE))
    close(with_sink, plain)


def test_a_window_of_one_is_the_value_itself() -> None:
    x = inputs(Case(T=140), torch.float32)
    o = path_attention(**{n: t for n, t in x.items() if n != "do"}, window=1, impl="triton")
    torch.testing.assert_close(o, x["v"].expand_as(o))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *ROWS, *LONG], ids=str)
def test_kernel_within_budget_bf16(case: Case) -> None:
    x = inputs(case, torch.bfloat16)
    within_budget(case, x, triton(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_both_forwards_within_budget(case: Case, gluon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gluon:
        portable = functools.partial(dataclasses.replace, forward="portable")
        monkeypatch.setattr("attnzoo.kernels.path.op.plan", lambda *call: portable(plan.plan(*call)))
    x = inputs(case, torch.bfloat16)
    within_budget(case, x, triton(case, x))


@pytest.mark.gpu
def test_errors_do_not_grow_with_length() -> None:
    """beta = 2 throughout, whole products of 8192 factors: the error is that of a short sequence, about."""
    errors = []
    for T in (512, 8192):
        case = Case(T=T, H=1, G=1, K=64, V=64, gate="none", beta="two")
        x = inputs(case, torch.bfloat16)
        exact, ours = oracle(case, x), triton(case, x)
        errors.append(max(float((ours[n].double() - e).norm() / e.norm()) for n, e in exact.items()))
    assert errors[1] <= 2 * errors[0]


@pytest.mark.gpu
def test_memory_grows_linearly_and_stays_small() -> None:
    """At most 2 GiB beyond inputs, outputs and gradients at (1, 24, 65536, 64)."""
    shape = (1, 65536, 24, 64)
    q, k, v, w = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    w = torch.nn.functional.normalize(w, dim=-1)
    beta, gate = 2 * torch.rand(shape[:3], device=DEVICE), -0.01 * torch.rand(shape[:3], device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, w, beta, gate)]
    do = torch.randn_like(v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = path_attention(q, k, v, w=w, beta=beta, log_decay=gate)
    grads = torch.autograd.grad(o, leaves, do)
    own = sum(x.numel() * x.element_size() for x in (o, *grads))
    assert torch.cuda.max_memory_allocated() - before - own <= 2 << 30


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1 << 20, (1 << 22) + 200])
def test_millions_of_tokens(T: int) -> None:
    shape = (1, T, 1, 64)
    q, k, v, w = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    w = torch.nn.functional.normalize(w.float(), dim=-1)
    beta, gate = 2 * torch.rand(shape[:3], device=DEVICE), -0.5 * torch.rand(shape[:3], device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, w, beta, gate)]
    o = path_attention(q, k, v, w=w, beta=beta, log_decay=gate, prune=Prune())
    grads = torch.autograd.grad(o, leaves, torch.randn_like(o))
    tail = {name: x[:, -2048:].detach().double() for name, x in zip("qkvwbg", leaves, strict=True)}
    want = path_reference(tail["q"], tail["k"], tail["v"], w=tail["w"], beta=tail["b"], log_decay=tail["g"])
    error = (o[:, -1024:].double() - want[:, -1024:]).norm() / want[:, -1024:].norm()  # decay: 2048 keys hold the mass
    assert float(error) <= 4e-3
    assert all(bool(g.isfinite().all()) for g in grads)
