"""The rows' log-sum-exp, and gradients of some inputs alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fox_cases import DEVICE, SMALL, Case, inputs, triton, within_budget
from torch import Tensor

from attnzoo.kernels.common.tiles import Kind, Tiles
from attnzoo.kernels.fox import fox_attention, plan
from attnzoo.kernels.fox.reference import fox_reference

TILES: dict[Kind, Tiles] = {"fwd": SMALL, "dq": SMALL, "dkdv": SMALL}
WITH = {"return_lse": True}
LSE = [
    Case(T=150, S=170, gate="mixed", sink=True, options=WITH),
    Case(T=140, S=140, gate="mixed", options=WITH),
    Case(T=140, S=140, gate="const", sink=True, options=WITH),
    Case(T=140, S=140, gate="const_shut", sink=True, options=WITH),
    Case(B=2, T=70, S=90, gate="none", options=WITH),
    Case(T=3, S=300, H=4, G=2, gate="open", sink=True, options={"window": 90, **WITH}),
]


@pytest.mark.parametrize("case", LSE, ids=str)
def test_lse_and_its_gradient_equal_the_definitions(case: Case) -> None:
    x = inputs(case, torch.float32)
    within_budget(case, x, triton(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(T=700, S=700, H=4, G=2, K=64, V=128, gate="open", sink=True, options=WITH),
        Case(B=2, T=600, S=700, K=128, V=128, gate="mixed", options=WITH),
        Case(T=500, S=500, K=64, V=64, gate="none", sink=True, options={"window": 200, **WITH}),
        Case(T=2, S=900, H=8, G=2, K=128, V=128, gate="open", options=WITH),
    ],
    ids=str,
)
def test_lse_within_budget_bf16(case: Case) -> None:
    x = inputs(case, torch.bfloat16)
    within_budget(case, x, triton(case, x, None))


def test_the_reference_is_the_logsumexp() -> None:
    x = inputs(Case(T=20, S=20, H=2, G=2, gate="none"), torch.float64)
    sink = torch.randn(2, dtype=torch.float64, device=DEVICE)
    _, lse = fox_reference(x["q"], x["k"], x["v"], log_decay=None, sink=sink, return_lse=True)
    logits = torch.einsum("bthk,bshk->bths", x["q"], x["k"]) / 4
    logits = logits.masked_fill(torch.ones(20, 20, device=DEVICE).triu(1).bool()[:, None, :], -torch.inf)
    logits = torch.cat([logits, sink[:, None].expand(1, 20, 2, 1)], -1)
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_two_halves_of_the_keys_merge_by_their_lse() -> None:
    """What the log-sum-exp is for: attention over parts of the keys, put together."""
    x = inputs(Case(T=4, S=300, gate="none"), torch.float32)
    options: Any = {"log_decay": None, "impl": "triton", "return_lse": True}
    o, lse = fox_attention(x["q"], x["k"], x["v"], **options)
    near, far = torch.arange(300, device=DEVICE) >= 150, torch.arange(300, device=DEVICE) < 150
    parts = [fox_attention(x["q"], x["k"], x["v"], valid=m[None], **options) for m in (near, far)]
    top = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(p * (m - top).exp()[..., None] for p, m in parts)
    torch.testing.assert_close(merged, o, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(top, lse)


NAMES = ("q", "k", "v", "log_decay", "sink")


@functools.cache
def gradients(names: tuple[str, ...]) -> dict[str, Tensor]:
    """Gradients of the inputs that are named, the others frozen."""
    x = inputs(Case(T=100, S=110, H=1, K=8, V=8, gate="open", sink=True), torch.float32)
    leaves = {n: x[n].clone().requires_grad_(n in names) for n in NAMES}
    q, k, v, g, sink = leaves.values()
    with plan.override(TILES):
        fox_attention(q, k, v, log_decay=g, sink=sink, impl="triton").backward(x["do"])
    assert all(leaves[n].grad is None for n in NAMES if n not in names)
    return {n: leaf.grad for n in names if (leaf := leaves[n]).grad is not None}


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v", "sink"), ("log_decay",), ("sink",), ("q", "k", "v")], ids=str)
def test_gradients_of_some_inputs_are_those_of_all(wanted: tuple[str, ...]) -> None:
    every, some = gradients(NAMES), gradients(wanted)
    for name in wanted:
        # the kernel that owns rows corrects delta for the keys' gradients where it runs
        torch.testing.assert_close(some[name], every[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        (("q",), {"fox_dq_portable_kernel"}),
        (("k",), {"fox_dkdv_portable_kernel"}),
        (("v",), {"fox_dkdv_portable_kernel"}),
        (("sink",), {"fox_dq_portable_kernel"}),
        (("log_decay",), {"fox_dq_portable_kernel", "fox_dkdv_portable_kernel"}),
    ],
)
def test_no_kernel_runs_for_gradients_that_nobody_wants(
    wanted: tuple[str, ...], kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnzoo.kernels.fox.portable import backward

    ran: set[str] = set()

    class Spy:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: ran.add(self.name)

    for name in ("fox_dq_portable_kernel", "fox_dkdv_portable_kernel"):
        monkeypatch.setattr(backward, name, Spy(name))
    x = inputs(Case(T=20, S=20, gate="open", sink=True), torch.float32)
    q, k, v, g, sink = (x[n].clone().requires_grad_(n in wanted) for n in NAMES)
    fox_attention(q, k, v, log_decay=g, sink=sink, impl="triton").backward(x["do"])
    assert ran == kernels


def test_upstream_gradients_of_any_stride() -> None:
    case = Case(T=40, S=40, H=2, G=1, K=8, V=8, gate="open", sink=True)
    x = inputs(case, torch.float32)
    results = []
    for turn in (False, True):
        q, k, v, g, sink = (x[n].clone().requires_grad_() for n in NAMES)
        if turn:  # heads before tokens, and a gradient that is broadcast from one number
            q, k = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k))
        o, lse = fox_attention(q, k, v, log_decay=g, sink=sink, impl="triton", return_lse=True)
        do = x["do"].transpose(1, 3).contiguous().transpose(1, 3) if turn else x["do"]
        dlse = torch.ones((), device=DEVICE).expand_as(lse) if turn else torch.ones_like(lse)
        results.append(torch.autograd.grad([o, lse], [q, k, v, g, sink], [do, dlse]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_with_backward_on_transposed_inputs() -> None:
    case = Case(T=33, S=33, H=2, G=2, K=8, V=8, gate="open")
    x = inputs(case, torch.float32)

    def loss(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        o, lse = fox_attention(q.transpose(1, 2), k.transpose(1, 2), v, log_decay=g, impl="triton", return_lse=True)
        return o.square().sum() + lse.sum()

    results = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x["q"].transpose(1, 2).contiguous(), x["k"].transpose(1, 2).contiguous(), x["v"], x["log_decay"]]
        leaves = [t.clone().requires_grad_() for t in leaves]
        fn(*leaves).backward()
        results.append([t.grad for t in leaves])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]
