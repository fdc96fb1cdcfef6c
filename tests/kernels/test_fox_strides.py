"""Tensors whose heads lie far apart, strides of every kind, and tensors of another GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fox_cases import DEVICE, SMALL, Case, far_apart, inputs
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.fox import GateSums, fox_attention, kept_fraction, plan


@pytest.mark.parametrize(("T", "S"), [(70, 70), (1, 300)], ids=["rows", "split keys"])
def test_heads_far_apart(T: int, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # or each launch would copy the buffer onto itself
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    x = inputs(Case(T=T, S=S, H=3, G=3, gate="open"), torch.float16)
    results = []
    for t in (x, far_apart(x, ("q", "k", "v", "do"))):
        leaves = [t[n].requires_grad_() for n in ("q", "k", "v", "log_decay")]
        with plan.override({"fwd": SMALL, "dq": SMALL, "dkdv": SMALL}):
            o = fox_attention(*leaves[:3], log_decay=leaves[3], prune=Prune(), impl="triton")
            results.append([o.detach(), *torch.autograd.grad(o, leaves, t["do"])])
    for near, far in zip(*results, strict=True):
        assert torch.equal(near, far)


def test_kept_fraction_takes_any_strides() -> None:
    x = inputs(Case(T=200, S=200, gate="strong"), torch.float32)
    turned = {n: x[n].transpose(1, 3).contiguous().transpose(1, 3) for n in "qk"}
    assert turned["q"].stride(-1) != 1
    options: dict[str, Any] = {"log_decay": x["log_decay"], "prune": Prune(eps=0.1), "impl": "triton"}
    assert torch.equal(kept_fraction(**turned, **options), kept_fraction(x["q"], x["k"], **options))


@pytest.mark.parametrize("spread", [lambda x: torch.stack([x, -x], -1)[:, 0], lambda x: x[:1].expand(3)])
def test_numbers_of_the_heads_may_have_any_strides(spread: Any) -> None:
    x = inputs(Case(T=140, S=140, H=3, gate="const", sink=True), torch.float32)
    slope, sink, bound = (spread(y) for y in (4.0 * x["log_decay"], x["sink"], torch.tensor([1e-3, 4.0, 9.0])))
    results = []
    for g, s, b in ((slope, sink, bound), [y.contiguous() for y in (slope, sink, bound)]):
        leaves = [y.detach().requires_grad_() for y in (x["q"], x["k"], x["v"], g, s)]
        assert leaves[3].stride() == g.stride()
        options: dict[str, Any] = {"prune": Prune(0.1), "logit_bound": b.to(DEVICE), "impl": "triton"}
        o = fox_attention(*leaves[:3], log_decay=leaves[3], sink=leaves[4], **options)
        kept = kept_fraction(x["q"], x["k"], log_decay=g, **options)
        results.append([o, kept, *torch.autograd.grad(o, leaves, x["do"])])
    assert not results[0][1].eq(1).all()
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_launch_on_the_gpu_that_holds_the_tensors() -> None:
    from attnzoo.kernels.path import carry_keys, path_attention, path_extend

    x = inputs(Case(T=300, S=300, K=64, V=64, gate="open", sink=True), torch.bfloat16)
    w = torch.nn.functional.normalize(x["k"].float(), dim=-1)
    beta = torch.rand(1, 300, 1, device=DEVICE)

    def run(device: str) -> list[Tensor]:
        t = {n: y.to(device).requires_grad_() for n, y in x.items() if n != "do"}
        do, unit, strength = x["do"].to(device), w.to(device), beta.to(device)
        q, k, v, g, sink = t.values()
        options: dict[str, Any] = {"log_decay": g, "prune": Prune(), "impl": "triton"}
        o = fox_attention(q, k, v, sink=sink, **options)
        p = path_attention(q, k, v, w=unit, beta=strength, **options)
        found = [o, p, *torch.autograd.grad([o, p], [q, k, v, g, sink], [do, do])]
        with torch.no_grad():
            found.append(kept_fraction(q, k, log_decay=g, prune=Prune()))
            sums = GateSums.of(g[:, :299]).append(g[:, 299:])
            found.append(fox_attention(q[:, -1:], k, v, log_decay=None, gate_sums=sums, impl="triton"))
            keys = carry_keys(k[:, :299], unit[:, :299], strength[:, :299])
            last = (q[:, 299:], k[:, 299:], unit[:, 299:], strength[:, 299:])
            found.append(path_extend(*last, keys, v, g)[0])
        return [y.detach().cpu() for y in found]

    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    try:
        here, there = run("cuda:0"), run("cuda:1")
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)
