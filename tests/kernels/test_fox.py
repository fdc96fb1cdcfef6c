"""The fox kernels against the float64 definition: values and gradients, every option, and the laws."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from fox_cases import DEVICE, SMALL, Case, inputs, oracle, run, triton, within_budget
from thinning import in_long

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common.constants import KEY_UNIT
from attnzoo.kernels.common.launching import addressable
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.tiles import Tiles
from attnzoo.kernels.fox import fox_attention, plan

CASES = [
    Case(gate="open"),
    Case(B=2, T=70, S=70, H=4, G=2, K=8, V=24, sink=True),
    Case(gate="strong", T=1, S=1),
    Case(T=1, S=130, sink=True),
    Case(T=70, S=200, G=2, sink=True),
    Case(gate="shut", T=66, S=66),
    Case(gate="ones", T=100, S=100),
    Case(gate="strong", T=140, S=140, K=40),
    Case(gate="const", sink=True),
    Case(gate="const", T=90, S=160, options={"window": 40}),
    Case(gate="const_shut", T=140, S=140, H=4, G=2, sink=True, options={"window": 100}),
    Case(gate="const_shut", T=90, S=150),
    Case(gate="none", sink=True),
    Case(gate="none", options={"window": 33}),
    Case(T=140, S=140, sink=True, options={"window": 70}),
    Case(T=150, S=150, cu_seqlens=(0, 1, 71, 71, 140, 150)),
    Case(gate="const", T=150, S=150, cu_seqlens=(0, 70, 150)),
    Case(gate="none", T=150, S=150, cu_seqlens=(0, 3, 150), options={"window": 50}),
    Case(options={"scale": 0.7}),
    Case(T=70, S=130, G=2, sink=True, options={"softcap": 0.8}),
    Case(gate="const", options={"softcap": 5.0, "scale": 3.0, "window": 90}),
    Case(gate="none", T=70, S=70, options={"softcap": 1e6}),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [(case, torch.float16) for case in CASES[::3]],
    ids=str,
)
def test_kernel_within_budget(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))


@pytest.mark.parametrize(
    ("tiles", "T", "S"),
    [
        (Tiles(128, 64, 4, 1), 130, 170),
        (Tiles(16, 16, 4, 1), 20, 50),
        (Tiles(64, 64, 4, 1, tma=True, heads=1), 70, 130),
    ],
    ids=["large", "small", "descriptors"],
)
def test_every_tiling_computes_the_same(tiles: Tiles, T: int, S: int) -> None:
    case = Case(T=T, S=S, sink=True)
    x = inputs(case, torch.float32)
    within_budget(case, x, triton(case, x, tiles))


def test_key_tiles_may_be_wider_than_a_unit() -> None:
    case = Case(T=70, S=150)
    x = inputs(case, torch.float32)
    with plan.override({"fwd": SMALL, "dq": SMALL, "dkdv": Tiles(32, 128, 4, 1)}):
        within_budget(case, x, run(fox_attention, case, x, impl="triton"))


def test_two_runs_give_the_same_bits() -> None:
    case = Case(T=70, S=130, sink=True)
    x = inputs(case, torch.float32)
    first, second = triton(case, x), triton(case, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_closed_gate_equals_a_border_between_sequences() -> None:
    case = Case(gate="open")
    x = inputs(case, torch.float32)
    packed = triton(Case(gate="open", cu_seqlens=(0, 57, 130)), x)
    closed = dict(x, log_decay=x["log_decay"].clone())
    closed["log_decay"][:, 57] = -math.inf
    cut = triton(case, closed)
    for name in packed:
        torch.testing.assert_close(cut[name], packed[name], rtol=1e-4, atol=2e-5)


def test_packed_equals_separate() -> None:
    x = inputs(Case(T=190, S=190), torch.float32)
    packed = triton(Case(T=190, S=190, cu_seqlens=(0, 80, 190)), x)
    for a, b in ((0, 80), (80, 190)):
        part = {name: t if name == "sink" else t[:, a:b] for name, t in x.items()}
        alone = triton(Case(T=b - a, S=b - a), part)
        for name in alone:
            torch.testing.assert_close(packed[name][:, a:b], alone[name], rtol=1e-4, atol=5e-5)


def test_padding_on_the_left_is_neutral_once_its_gate_is_closed() -> None:
    case = Case(T=100, S=100, gate="open")
    x = inputs(case, torch.float32)
    pad = {n: torch.cat([torch.full_like(t[:, :37], 1e3 if n in "kv" else 0.0), t], 1) for n, t in x.items()}
    pad["log_decay"][:, 37] = -math.inf
    padded, alone = triton(Case(T=137, S=137, gate="open"), pad), triton(case, x)
    for name in alone:
        got = padded[name][:, 37:]
        if name == "dlog_decay":
            got, alone[name] = got[:, 1:], alone[name][:, 1:]  # the first real gate is the closed one
        torch.testing.assert_close(got, alone[name], rtol=1e-4, atol=1e-5)


def test_the_future_changes_nothing() -> None:
    case = Case()
    x = inputs(case, torch.float32)
    y = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "log_decay"):
        y[name][:, 100:] = -3.0
    # the tiles' order may depend on closed gates, so equal up to rounding
    torch.testing.assert_close(triton(case, x)["o"][:, :100], triton(case, y)["o"][:, :100], rtol=1e-5, atol=1e-6)


def test_constant_gates_and_no_gate_are_special_cases_of_gates() -> None:
    x = inputs(Case(gate="const", H=2), torch.float32)
    full = dict(x, log_decay=x["log_decay"].expand(1, 130, 2).contiguous())
    const, gated = triton(Case(gate="const"), x), triton(Case(), full)
    for name in ("o", "dq", "dk", "dv"):
        torch.testing.assert_close(const[name], gated[name], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(const["dlog_decay"], gated["dlog_decay"].sum((0, 1)), rtol=2e-4, atol=1e-5)
    nope = {name: t for name, t in x.items() if name != "log_decay"}
    ones = dict(x, log_decay=torch.zeros(1, 130, 2, device=DEVICE))
    none, gated = triton(Case(gate="none"), nope), triton(Case(gate="ones"), ones)
    for name in none:
        torch.testing.assert_close(none[name], gated[name], rtol=2e-5, atol=2e-6)


def test_gate_sums_do_not_lose_precision_with_length() -> None:
    """Mean |log gate| 1: the bias between neighbours near the end of a long sequence, against float64."""
    from attnzoo.kernels.common.gate_sums import gate_sums

    S = in_long(8192, 131072)
    g = -2 * torch.rand(1, S, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    c, base, left, _ = gate_sums(g, None, S)
    exact = (g.double() / math.log(2)).cumsum(1)[0, :, 0]
    unit = torch.arange(S, device=DEVICE) // KEY_UNIT

    def bias(i: int, j: torch.Tensor) -> torch.Tensor:  # as the kernels form it: base to base, then within the unit
        shift = (base[0, 0, unit[i]] + c[0, 0, i].double() - base[0, 0, unit[j]]).float()
        return shift - c[0, 0, j]

    worst = []
    for end in (2048, S):
        j = torch.arange(end - 256, end, device=DEVICE)
        worst.append((bias(end - 128, j).double() - (exact[end - 128] - exact[j])).abs().max().item())
    assert int(left.max()) == 0
    assert worst[1] <= 2 * worst[0]
    assert worst[1] < 1e-4


@pytest.mark.parametrize(("kind", "options"), [("constant", {}), ("constant", {"sink": True}), ("per token", {})])
def test_gate_gradients_do_not_lose_precision_with_length(kind: str, options: dict[str, Any]) -> None:
    """The gradient of log gates of -0.5 and -2 after 512 tokens, against float64."""
    (S, H), wide = (in_long(512, 1024), 2), Tiles(128, 64, 4, 1)  # the interpreter's fastest
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, S, H, K, generator=generator).to(DEVICE) for K in (8, 8, 40, 40))
    g = torch.tensor([-0.5, -2.0], device=DEVICE)
    g = g if kind == "constant" else g.expand(1, S, H).contiguous()
    given = {**options, "sink": torch.zeros(H, device=DEVICE)} if "sink" in options else options

    def gradient(dtype: torch.dtype, impl: str) -> torch.Tensor:
        x = [t.to(dtype) for t in (q, k, v)]
        log_decay = g.to(dtype).requires_grad_()
        kwargs = {name: t.to(dtype) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
        with plan.override({"fwd": wide, "dq": wide, "dkdv": wide} if DEVICE == "cpu" else {}):
            o = fox_attention(*x, log_decay=log_decay, impl=impl, **kwargs)
        return torch.autograd.grad((o * do.to(dtype)).sum(), log_decay)[0].double()

    exact, found = gradient(torch.float64, "reference"), gradient(torch.float32, "triton")
    assert (found - exact).abs().max() <= 1e-4 * exact.abs().max()


@pytest.mark.parametrize(("B", "S", "H"), [(2, 70, 3), (1, 130, 10), (3, 64, 1), (1, 200, 24)])
@pytest.mark.parametrize(
    ("heads_first", "short", "documents", "window"),  # each pair of them once
    [
        (False, False, False, None), (True, True, False, None), (True, False, True, None), (False, True, True, None),
        (False, True, False, 50), (True, False, False, 50),
    ],
)  # fmt: skip
def test_gate_sums_of_any_heads_and_strides(
    B: int, S: int, H: int, heads_first: bool, documents: bool, window: int | None, short: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Sums, first visible keys and tails of gates [B, S, H] in any order in memory, against float64."""
    from attnzoo.kernels.common import gate_sums as kernels
    from attnzoo.kernels.common.gate_sums import gate_sums

    monkeypatch.setattr(kernels, "SHORT_UNITS", S if short else 0)
    monkeypatch.setattr(kernels, "UNITS", 2)
    torch.manual_seed(0)
    g = -torch.rand((B, H, S) if heads_first else (B, S, H)).to(DEVICE)
    g = g.transpose(1, 2) if heads_first else g
    g[torch.rand_like(g) < 0.02] = -float("inf")
    first = torch.arange(S, device=DEVICE, dtype=torch.int32) // 37 * 37 if documents else None
    c, base, since, tails = gate_sums(g, first, window or S)

    g = g.double().transpose(1, 2)  # [B, H, S]
    pos, closed = torch.arange(S, device=DEVICE), g == -math.inf
    exact = torch.where(closed, 0.0, g / math.log(2)).cumsum(2)
    torch.testing.assert_close(base[:, :, pos // KEY_UNIT] + c[:, :, :S], exact, rtol=1e-6, atol=1e-5)
    seen = torch.where(closed, pos, 0).cummax(2).values
    seen = seen.maximum(pos - window + 1) if window else seen.maximum(first) if first is not None else seen
    assert torch.equal(since.long(), seen.long())
    last = torch.arange(tails.shape[2], device=DEVICE) * KEY_UNIT + KEY_UNIT - 1
    mass = (-exact * math.log(2)).logcumsumexp(2) / math.log(2)
    torch.testing.assert_close(tails, mass[:, :, last.clamp(max=S - 1)], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("documents", [False, True])
def test_gradients_of_gates_of_short_and_long_texts_are_the_same(
    documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnzoo.kernels.common import gate_sums as kernels

    B, S, T, H = 2, 200, 170, 3
    generator = torch.Generator().manual_seed(0)
    columns, rows, g = (torch.randn(shape, generator=generator) for shape in ((B, H, S), (B, H, T), (B, S, H)))
    g[:, 60] = -math.inf
    first = torch.arange(S, dtype=torch.int32) // 37 * 37 if documents else None
    given = [x if x is None else x.to(DEVICE) for x in (columns, rows, g, first)]
    monkeypatch.setattr(kernels, "UNITS", 2)
    whole = kernels.gate_gradient(*given, T)
    monkeypatch.setattr(kernels, "SHORT_UNITS", 0)
    torch.testing.assert_close(kernels.gate_gradient(*given, T), whole, rtol=1e-6, atol=1e-6)
    dc = -columns.double()
    dc[..., S - T :] += rows
    closed = (g.transpose(1, 2) == -math.inf) | (torch.arange(S) == (0 if first is None else first))
    exact = dc.flip(-1).cumsum(-1).flip(-1).masked_fill(closed, 0.0).transpose(1, 2)
    exact[:, 0] = 0.0
    torch.testing.assert_close(whole.double().cpu(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "stride", "copied"), [(64, 2**24 - 8, False), (64, 2**24, True), (1, 2**24, False)])
def test_tokens_too_far_apart_for_offsets_of_32_bits_are_copied(tokens: int, stride: int, copied: bool) -> None:
    x = torch.empty_strided((1, tokens, 1, 8), (tokens * stride, stride, 8, 1), device="meta")
    assert (addressable(x) is not x) == copied


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [2**31 // 200 // 64 * 64, 2**24 + 64])
def test_offsets_are_64_bit(stride: int) -> None:
    """Keys and queries whose last tokens lie past 2^31 elements would wrap around in 32 bits."""
    case = Case(T=256, S=256, H=1, K=64, V=64)
    x = inputs(case, torch.bfloat16)
    far = dict(x)
    for name in "qkv":
        storage = torch.empty(255 * stride + 64, dtype=torch.bfloat16, device=DEVICE)
        far[name] = storage.as_strided((1, 256, 1, 64), (256 * stride, stride, 64, 1)).copy_(x[name])
    with torch.no_grad():
        near_o, far_o = (
            fox_attention(t["q"], t["k"], t["v"], log_decay=t["log_decay"], impl="triton") for t in (x, far)
        )
    assert torch.equal(near_o, far_o)


BIG = [Case(K=256, V=256), Case(T=700, S=700, K=64, V=64), Case(T=600, S=900, K=128, V=64)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *BIG], ids=str)
def test_kernel_within_budget_bf16(case: Case) -> None:
    x = inputs(case, torch.bfloat16)
    within_budget(case, x, triton(case, x, None))


ONE_PASS = [
    Case(T=700, S=700, G=2, K=64, V=64, gate="none"),
    Case(T=700, S=700, G=2, K=128, V=128, gate="open", sink=True),
    Case(B=2, T=600, S=901, H=4, G=2, K=128, V=64),
    Case(T=999, S=999, K=72, V=120, sink=True),
    Case(T=900, S=900, K=64, V=64, gate="const", options={"window": 300}),
    Case(T=901, S=901, H=4, G=2, K=64, V=64, gate="strong", options={"prune": Prune()}),
    Case(T=900, S=900, K=128, V=128, cu_seqlens=(0, 1, 200, 201, 640, 900)),
    Case(T=900, S=1000, K=64, V=64, gate="none", sink=True, options={"window": 100}),
    Case(T=1, S=130, K=64, V=64),
    Case(T=130, S=130, K=64, V=64, gate="shut"),
    Case(T=700, S=700, K=64, V=64, gate="const_shut", sink=True),
    Case(T=900, S=900, H=4, G=2, K=128, V=128, gate="const_shut", options={"prune": Prune()}),
    Case(T=900, S=900, H=8, G=2, K=128, V=128, gate="strong", options={"prune": Prune()}),
    # more blocks of rows than a GPU has multiprocessors
    Case(B=2, T=1300, S=1300, H=16, G=8, K=128, V=128, sink=True),
    Case(B=2, T=1250, S=1400, H=16, G=16, K=128, V=128, gate="strong", options={"prune": Prune()}),
    Case(B=2, T=1300, S=1300, H=16, G=16, K=64, V=64, gate="open", options={"prune": Prune(), "window": 700}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ONE_PASS, ids=str)
def test_one_pass_and_two_kernels_within_budget(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of this GPU, and the portable ones where those are others."""
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x, None))
    for forced in ({"backward": "portable", "keeps_rest": False}, {"forward": "portable"}):

        def portable(*args: Any, **forced: Any) -> Plan:
            return dataclasses.replace(plan.plan(*args), **forced)

        monkeypatch.setattr("attnzoo.kernels.fox.op.plan", functools.partial(portable, **forced))
        within_budget(case, x, triton(case, x, None))


APART = [
    Case(B=2, T=700, S=901, H=8, G=2, K=64, V=64, gate="open"),
    Case(T=900, S=900, H=8, G=2, K=128, V=128, gate="strong"),
    Case(T=700, S=700, H=3, K=72, V=120, gate="none", sink=True),
    Case(T=130, S=300, H=4, K=64, V=128, gate="open"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", APART, ids=str)
def test_query_heads_with_programs_of_their_own_within_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As calls of many rows have them where query heads share keys."""
    monkeypatch.setattr(plan, "APART_ROWS", 0)
    x = inputs(case, torch.bfloat16)
    within_budget(case, x, triton(case, x, None))


@pytest.mark.gpu
def test_two_runs_give_the_same_bits_under_deterministic_algorithms() -> None:
    case = Case(T=1500, S=1500, K=64, V=64, gate="open")
    x = inputs(case, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [triton(case, x, None) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0][name], other[name]) for other in runs[1:] for name in other)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
def test_errors_are_not_above_the_peers(K: int) -> None:
    """Figures of the official kernel at T = 2048 (relative to float64 on the same inputs)."""
    case = Case(T=2048, S=2048, H=4, G=4, K=K, V=K, gate="open")
    x = inputs(case, torch.bfloat16)
    x["q"], x["k"] = (torch.nn.functional.rms_norm(x[n].float(), (K,)).bfloat16() for n in "qk")
    exact, ours = oracle(case, x), triton(case, x, None)
    for name, limit in {"o": 2.05e-3, "dq": 2.9e-3, "dk": 2.9e-3, "dv": 2.9e-3, "dlog_decay": 3.0e-3}.items():
        error = (ours[name].double() - exact[name]).norm() / exact[name].norm()
        assert error <= limit, f"{name}: {error:.2e}"


@pytest.mark.gpu
def test_long_sequences_on_the_gpu() -> None:
    """T = 131072, mean |log gate| 1: the last rows equal those of the same tokens cut out (the past has decayed)."""
    case = Case(T=131072, S=131072, H=1, K=64, V=64, gate="open")
    x = inputs(case, torch.bfloat16)
    x["log_decay"] = -2 * torch.rand_like(x["log_decay"])
    cut = {name: t[:, -2048:].contiguous() for name, t in x.items()}
    whole, part = triton(case, x, None), triton(Case(T=2048, S=2048, H=1, K=64, V=64, gate="open"), cut, None)
    exact = oracle(Case(T=2048, S=2048, H=1, K=64, V=64, gate="open"), cut)
    for name in ("o", "dq"):
        a, b, e = (t[name][:, -1024:].double() for t in (whole, part, exact))
        assert (a - e).norm() <= 1.05 * (b - e).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_more_blocks_than_the_second_axis_of_a_grid_counts(deterministic: bool) -> None:
    """Four million tokens and a window: the last rows equal those of the same tokens cut out."""
    T, tail, window = (1 << 22) + 200, 2048, 500
    torch.manual_seed(0)
    x = {name: torch.randn(1, T, 1, 64, device=DEVICE, dtype=torch.bfloat16) for name in "qkv"}
    x["log_decay"] = -0.1 * torch.rand(1, T, 1, device=DEVICE)
    cotangent = torch.randn(1, T, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    found = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for begin in (0, T - tail):
            leaves = {name: t[:, begin:].contiguous().requires_grad_() for name, t in x.items()}
            o = fox_attention(**leaves, window=window, prune=Prune())
            grads = torch.autograd.grad(o, list(leaves.values()), cotangent[:, begin:])
            found.append([t[:, -tail + window :].float() for t in (o.detach(), *grads)])
    finally:
        torch.use_deterministic_algorithms(False)
    for whole, part in zip(*found, strict=True):
        assert (whole - part).norm() <= 5e-3 * part.norm()
