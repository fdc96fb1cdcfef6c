"""Keys that do not exist, and sums of gates that are kept from step to step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fox_cases import DEVICE, Case, draw_gate, inputs
from named_ops import opcheck
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.tiles import Tiles
from attnzoo.kernels.fox import GateSums, fox_attention, plan
from attnzoo.kernels.fox.operands import FoxInference, FoxOperands, KeptSums
from attnzoo.kernels.fox.reference import fox_reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def gates(S: int, kind: str = "mixed", H: int = 2, B: int = 1, seed: int = 0) -> Tensor:
    drawn = draw_gate(Case(B=B, S=S, H=H, gate=kind), torch.Generator().manual_seed(seed))
    assert drawn is not None
    return drawn.to(DEVICE)


def there(B: int, S: int) -> Tensor:
    """Padding on the left of the first row, holes in the others."""
    valid = torch.rand(B, S, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.7
    valid[0] = torch.arange(S, device=DEVICE) >= S // 3
    valid[:, -2:] = True
    return valid


VALID = [
    Case(B=2, T=100, S=110, gate="open"),
    Case(B=2, T=70, S=70, gate="none", sink=True),
    Case(B=2, T=3, S=400, H=4, G=2, gate="open", sink=True),
    Case(B=2, T=1, S=300, gate="const", options={"window": 60}),
    Case(B=2, T=70, S=150, gate="const_shut"),
    Case(B=2, T=70, S=150, gate="const_shut", sink=True, options={"window": 50}),
    Case(B=2, T=2, S=500, gate="strong", options={"prune": Prune()}),
    Case(B=2, T=70, S=200, H=1, gate="strong", options={"prune": Prune()}),
]


@pytest.mark.parametrize("case", VALID, ids=str)
def test_keys_that_do_not_exist_get_no_weight(case: Case) -> None:
    x, valid = inputs(case, torch.float32), there(case.B, case.S)
    named: dict[str, Any] = {"log_decay": x.get("log_decay"), "sink": x.get("sink"), "valid": valid} | case.options
    with plan.override({"fwd": Tiles(64, 64, 4, 1)}):
        o, lse = fox_attention(x["q"], x["k"], x["v"], impl="triton", return_lse=True, **named)
    double = {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in named.items()}
    want, want_lse = fox_reference(x["q"].double(), x["k"].double(), x["v"].double(), return_lse=True, **double)
    exact = "prune" not in case.options
    torch.testing.assert_close(o.double(), want, atol=2e-6 if exact else 1e-3, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5 if exact else 1e-3, rtol=1e-5)


@pytest.mark.parametrize("T", [2, 100])
@pytest.mark.parametrize("gate", ["mixed", "strong", "shut"])
def test_strong_gates_over_keys_that_do_not_exist_stay_in_the_budget(gate: str, T: int) -> None:
    """Twice the error of PyTorch in float32 and a band of rounding; what stands in the other keys is nothing."""
    case = Case(B=2, T=T, S=400, gate=gate)
    x, valid = inputs(case, torch.float32), there(2, 400)
    poison = torch.where(valid[..., None, None], 0.0, math.nan)
    with plan.override({"fwd": Tiles(64, 64, 4, 1)}):
        clean, o = (
            fox_attention(x["q"], k, v, log_decay=x["log_decay"], valid=valid, impl="triton")
            for k, v in ((x["k"], x["v"]), (x["k"] + poison, x["v"] + poison))
        )
    assert torch.equal(o, clean)
    plain = fox_reference(x["q"], x["k"] + poison, x["v"] + poison, log_decay=x["log_decay"], valid=valid)
    qkvg = (x[n].double() for n in ("q", "k", "v", "log_decay"))
    q, k, v, g = qkvg
    exact = fox_reference(q, k, v, log_decay=g, valid=valid)
    sums = torch.nn.functional.pad(g.masked_fill(g <= -1e4, 0.0).cumsum(1), (0, 0, 128, 0))
    exponent = 1.45 * float((sums[:, :-128] - sums[:, 128:]).max())  # of the float32 exponents, as ``within_budget``
    band = (16 + exponent) * torch.finfo(torch.float32).eps
    error, budget = ((y.double() - exact).norm() / exact.norm() for y in (o, plain))
    assert error <= 2 * budget + band


@pytest.mark.parametrize("kept", [False, True], ids=["scanned", "kept sums"])
@pytest.mark.parametrize("T", [1, 130])
def test_pruning_does_not_count_keys_that_do_not_exist(T: int, kept: bool) -> None:
    """Large scores of near keys that do not exist say nothing about a row: far keys must stay."""
    S = 440
    q, v = torch.ones(1, T, 1, 8, device=DEVICE), torch.randn(1, S, 1, 8, device=DEVICE)
    k = torch.full((1, S, 1, 8), 4.0, device=DEVICE)
    k[:, 160:] = 5.0
    valid = torch.ones(1, S, dtype=torch.bool, device=DEVICE)
    valid[:, 160 : S - T] = False
    k[:, S - T :] = 0.0
    g = torch.full((1, S, 1), -0.12, device=DEVICE)
    gate: dict[str, Any] = {"log_decay": None, "gate_sums": GateSums.of(g)} if kept else {"log_decay": g}
    options: dict[str, Any] = {"scale": 1.0, "valid": valid, **gate}
    exact = fox_attention(q, k, v, impl="reference", **options)
    for impl in ("triton", "reference"):
        pruned = fox_attention(q, k, v, prune=Prune(), impl=impl, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(pruned, exact, atol=1e-3, rtol=1e-3)


def test_padding_on_the_left_changes_nothing() -> None:
    x = inputs(Case(T=200, S=200, gate="open"), torch.float32)
    valid = torch.arange(200, device=DEVICE)[None] >= 70
    padded = fox_attention(x["q"], x["k"], x["v"], log_decay=x["log_decay"], valid=valid, impl="triton")
    alone = fox_attention(*(x[n][:, 70:] for n in "qkv"), log_decay=x["log_decay"][:, 70:], impl="triton")
    torch.testing.assert_close(padded[:, 70:], alone, atol=1e-6, rtol=1e-5)
    assert not padded[:, :70].any()  # rows without any valid key


def test_valid_has_no_gradient_in_the_kernels_and_one_in_the_reference() -> None:
    x = inputs(Case(T=20, S=20, gate="open"), torch.float32)
    q = x["q"].requires_grad_()
    options: Any = {"log_decay": x["log_decay"], "valid": there(1, 20)}
    with pytest.raises(ValueError, match="valid has no gradient in the kernels"):
        fox_attention(q, x["k"], x["v"], impl="triton", **options)
    fox_attention(q, x["k"], x["v"], impl="reference", **options).sum().backward()
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


def assert_same(a: GateSums, b: GateSums) -> None:
    assert len(a) == len(b)
    units, S = len(a) // 64, len(a)
    assert torch.equal(a.since[..., :S], b.since[..., :S])
    torch.testing.assert_close(a.c[..., :S], b.c[..., :S], atol=0, rtol=2e-7)
    torch.testing.assert_close(a.base[..., : units + 1], b.base[..., : units + 1], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(a.tails[..., :units], b.tails[..., :units], atol=1e-5, rtol=1e-7)


@pytest.mark.parametrize("kind", ["mixed", "open", "shut"])
@pytest.mark.parametrize("first", [1, 64, 130])
def test_many_steps_equal_one_scan(kind: str, first: int) -> None:
    g = gates(300, kind, H=3, B=2)
    sums, at = GateSums.of(g[:, :first]), first
    for n in (1, 1, 61, 1, 3, 64, 1, 7):
        sums, at = sums.append(g[:, at : at + n]), at + n
    assert_same(sums, GateSums.of(g[:, :at]))


def test_sums_can_be_continued_twice() -> None:
    g, other = gates(200), gates(200, seed=1)
    start = GateSums.of(g[:, :100])
    one = start.append(g[:, 100:150])
    two = start.append(other[:, 100:150])  # the room is taken: this one goes elsewhere
    assert_same(one, GateSums.of(g[:, :150]))
    assert_same(two, GateSums.of(torch.cat([g[:, :100], other[:, 100:150]], 1)))
    assert_same(start, GateSums.of(g[:, :100]))


def test_a_step_works_on_the_new_tokens_alone() -> None:
    """The past is not read: only where the buffers are full are they copied."""
    g = gates(400)
    sums = GateSums.of(g[:, :300]).append(g[:, 300:301])  # has room now
    place = sums.c.data_ptr()
    sums.c[..., :256], sums.since[..., :256] = torch.nan, -1
    sums.base[..., :4], sums.tails[..., :4] = torch.nan, torch.nan
    after = sums.append(g[:, 301:302])
    assert after.c.data_ptr() == place
    whole = GateSums.of(g[:, :302])
    torch.testing.assert_close(after.c[..., 301], whole.c[..., 301])
    torch.testing.assert_close(after.base[..., 4], whole.base[..., 4])


@pytest.mark.parametrize("options", [{"window": 70}, {"prune": Prune()}], ids=str)
def test_a_step_with_kept_sums_equals_one_that_scans(options: dict[str, Any]) -> None:
    x = inputs(Case(B=2, T=400, S=400, H=2, G=1, gate="open"), torch.float32)
    x["log_decay"][:, 200] = -torch.inf
    sums, named = GateSums.of(x["log_decay"][:, :300]), {"return_lse": True, **options}
    with plan.override({"fwd": Tiles(64, 64, 4, 1)}):
        for S, T in ((301, 1), (308, 7), (400, 92)):  # split keys, split keys, a chunk of rows
            sums = sums.append(x["log_decay"][:, S - T : S])
            args = (x["q"][:, S - T : S], x["k"][:, :S], x["v"][:, :S])
            kept, lse = fox_attention(*args, log_decay=None, gate_sums=sums, impl="triton", **named)
            want, want_lse = fox_attention(*args, log_decay=x["log_decay"][:, :S], impl="triton", **named)
            torch.testing.assert_close(kept, want, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
            plain = fox_reference(*args, log_decay=None, gate_sums=sums, **options)
            torch.testing.assert_close(kept, plain, atol=1e-3 if "prune" in options else 1e-5, rtol=1e-4)


@pytest.mark.parametrize("bound", ["tail", "paper"])
def test_a_pruned_step_reads_no_key_that_it_drops(bound: Any) -> None:
    """The longest key comes with the sums: it need not be looked for among all."""
    x = inputs(Case(B=2, T=1, S=1500, H=4, G=2, gate="open"), torch.float32)
    k, g, prune = 0.3 * x["k"], x["log_decay"], Prune(eps=1e-3, bound=bound)
    sums = GateSums.of(g[:, :700], k[:, :700]).append(g[:, 700:1499], k[:, 700:1499]).append(g[:, 1499:], k[:, 1499:])
    assert sums.longest is not None
    torch.testing.assert_close(sums.longest, k.square().sum(-1).amax(1))
    far = torch.where(torch.arange(1500, device=DEVICE) < 512, torch.nan, 0.0)[:, None, None]
    options: dict[str, Any] = {"log_decay": None, "gate_sums": sums, "prune": prune, "impl": "triton"}
    want = fox_attention(0.3 * x["q"], k, x["v"], **options)
    assert torch.equal(fox_attention(0.3 * x["q"], k + far, x["v"] + far, **options), want)
    scanned = fox_attention(0.3 * x["q"], k, x["v"], log_decay=g, prune=prune, impl="triton")
    torch.testing.assert_close(want, scanned, atol=1e-6, rtol=1e-5)


def test_rows_of_a_batch_can_be_reordered() -> None:
    g = gates(130, B=3)
    index = torch.tensor([2, 0, 0], device=DEVICE)
    picked = GateSums.of(g).reorder(index)
    assert_same(picked.append(g[:, :5]), GateSums.of(torch.cat([g[index], g[:, :5]], 1)))
    k = torch.randn(3, 130, 2, 8, device=DEVICE)
    assert torch.equal(GateSums.of(g, k).reorder(index).longest, GateSums.of(g[index], k[index]).longest)  # type: ignore[arg-type]


def test_wrong_sums_are_refused() -> None:
    x = inputs(Case(T=20, S=20, gate="open"), torch.float32)
    sums = GateSums.of(x["log_decay"])
    args = (x["q"], x["k"], x["v"])
    with pytest.raises(ValueError, match="log_decay: expected None with gate_sums"):
        fox_attention(*args, log_decay=x["log_decay"], gate_sums=sums, impl="triton")
    with pytest.raises(ValueError, match=r"gate_sums: expected the sums of \[B=1, S=20, H=2\] gates, got"):
        fox_attention(*args, log_decay=None, gate_sums=sums.append(x["log_decay"]), impl="triton")
    with pytest.raises(ValueError, match=r"log_decay: expected \[B=1, n, H=2\]"):
        sums.append(x["log_decay"][..., :1])
    with pytest.raises(ValueError, match="log_decay: expected float32"):
        GateSums.of(x["log_decay"].half())
    with pytest.raises(ValueError, match=r"k: expected the keys of the same tokens, \[B=1, 20, G, K\]"):
        GateSums.of(x["log_decay"], x["k"][:, 1:])
    others = GateSums.of(x["log_decay"], torch.cat([x["k"]] * 3, 2))
    with pytest.raises(ValueError, match="gate_sums: expected the longest of keys with B=1, G=1 heads, got B=1, G=3"):
        fox_attention(*args, log_decay=None, gate_sums=others, impl="triton")
    for heads in (1, 6):
        with pytest.raises(ValueError, match=r"k: expected the keys of G=3 heads, as before, got \(1, 20, \d, 16\)"):
            others.append(x["log_decay"], torch.cat([x["k"]] * heads, 2))
    with pytest.raises(ValueError, match="no gradient"):
        GateSums.of(x["log_decay"].clone().requires_grad_())
    with pytest.raises(ValueError, match=r"valid: expected bool \[B=1, S=20\]"):
        fox_attention(*args, log_decay=None, valid=torch.ones(1, 19, dtype=torch.bool, device=DEVICE))


@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck_of_inference(return_lse: bool) -> None:
    from attnzoo.kernels.fox.op import fox_infer_op

    x = inputs(Case(T=2, S=300, gate="open"), torch.float32)
    s = GateSums.of(x["log_decay"], x["k"])
    sums = KeptSums(s.c, s.base, s.since, s.tails, s.longest)
    operands = FoxOperands(x["q"], x["k"], x["v"], None, None, OpOptions(None, None, 0.25, 0, "tail", -10.0))
    opcheck(fox_infer_op, FoxInference(operands, sums, there(1, 300), return_lse))
