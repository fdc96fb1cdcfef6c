"""Retention in the fox kernels: a bias per key and age, values and gradients against the definition in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fox_cases import DEVICE, SMALL, Case, inputs, oracle, run, triton, within_budget
from named_ops import opcheck
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common.retention import Retention, Rule
from attnzoo.kernels.common.tiles import Tiles
from attnzoo.kernels.fox import fox_attention, plan
from attnzoo.kernels.fox.reference import fox_reference
from attnzoo.kernels.retention import held_keys

SOFT = Rule(temperature=8.0, threshold=0.5, limit=3.0, remembers=5)
SHARP = Rule(temperature=64.0, threshold=0.4, limit=30.0, remembers=1)
HARD = Rule(temperature=math.inf, threshold=0.5, limit=30.0, remembers=3)


def forgetting(function: Any, rule: Rule) -> Any:
    """``function`` with its retention given as the tensor of keys."""

    @functools.wraps(function)
    def call(*given: Tensor, retention: Tensor, **options: Any) -> Any:
        return function(*given, retention=Retention(retention, rule), **options)

    return call


def run_kernel(rule: Rule, case: Case, x: dict[str, Tensor], tiles: Tiles = SMALL) -> dict[str, Tensor]:
    with plan.override({"fwd": tiles, "dq": tiles, "dkdv": tiles}):
        return run(functools.partial(forgetting(fox_attention, rule), impl="triton"), case, x)


def drawn(case: Case, dtype: torch.dtype, numbers: int) -> dict[str, Tensor]:
    """Inputs with base and fade, or a rate: some keys stay for all of a text, others go at once."""
    x, generator = inputs(case, dtype), torch.Generator().manual_seed(7)
    shape = case.B, case.S, case.G
    fade = 2 * torch.rand(shape, generator=generator)
    keys = torch.stack([3 * torch.randn(shape, generator=generator) + 2, fade], -1)
    x["retention"] = (keys if numbers == 2 else 0.05 * fade[..., None]).to(DEVICE)
    return x


CASES = [
    (Case(gate="open"), SOFT, 2),
    (Case(B=2, T=70, S=70, H=4, G=2, K=8, V=24, sink=True), SOFT, 2),
    (Case(gate="none", T=140, S=140), SHARP, 2),
    (Case(gate="const", T=90, S=160, options={"window": 40}), SOFT, 1),
    (Case(T=150, S=150, H=4, G=2, cu_seqlens=(0, 1, 71, 140, 150)), SHARP, 2),
    (Case(gate="none", T=70, S=130, options={"softcap": 0.8, "scale": 0.7}), SOFT, 1),
    (Case(T=1, S=130, gate="open"), SOFT, 2),
]


@pytest.mark.parametrize(
    ("case", "rule", "numbers", "dtype"),
    [(*one, torch.float32) for one in CASES] + [(*one, torch.float16) for one in CASES[:3]],
    ids=str,
)
def test_kernel_with_retention_within_budget(case: Case, rule: Rule, numbers: int, dtype: torch.dtype) -> None:
    x = drawn(case, dtype, numbers)
    within_budget(
        case, x, run_kernel(rule, case, x), forgetting(fox_reference, rule), summed=("dlog_decay", "dretention")
    )


def test_keys_below_the_threshold_are_not_seen_where_the_temperature_is_infinite() -> None:
    case = Case(T=140, S=140, H=4, G=2, gate="open")
    x = drawn(case, torch.float32, 2)
    found = run_kernel(HARD, case, x)
    within_budget(case, x, found, forgetting(fox_reference, HARD))
    assert not found["dretention"].any()
    gone = torch.tensor([-9.0, 0.0], device=DEVICE).expand(x["retention"].shape)
    alone, window = run_kernel(HARD, case, dict(x, retention=gone)), replace(case, options={"window": 3})
    torch.testing.assert_close(alone["o"], triton(window, {n: t for n, t in x.items() if n != "retention"})["o"])


def test_what_is_remembered_in_full_is_attention_as_it_is() -> None:
    case = Case(T=70, S=130, G=1, sink=True)
    x = inputs(case, torch.float32)
    kept = dict(x, retention=torch.tensor([80.0, 0.0], device=DEVICE).expand(1, 130, 1, 2))
    plain, found = triton(case, x), run_kernel(SHARP, case, kept)
    for name, want in plain.items():
        assert torch.equal(found[name], want), name


def soon_gone(case: Case, numbers: int) -> dict[str, Tensor]:
    """Inputs whose keys are all half forgotten after some ten tokens and wholly after a hundred, but for a few in the
    middle."""
    x = drawn(case, torch.float32, numbers)
    keys = x["retention"]
    if numbers == 2:
        x["retention"] = torch.stack([3 + keys[..., 0].sigmoid(), 1.2 + 0.3 * keys[..., 1]], -1)
    else:
        x["retention"] = 0.05 + keys
    x["retention"][:, 64:100, :, 0] = 60.0 if numbers == 2 else 0.0
    return x


@pytest.mark.parametrize("rule", [SOFT, SHARP._replace(threshold=0.6), HARD], ids=str)
@pytest.mark.parametrize("numbers", [1, 2])
def test_what_is_forgotten_as_far_as_it_may_be_counts_as_its_definition_says(rule: Rule, numbers: int) -> None:
    case = Case(B=2, T=270, S=300, H=4, G=2, gate="open")
    x = soon_gone(case, numbers)
    summed = ("dlog_decay", "dretention")
    within_budget(case, x, run_kernel(rule, case, x), forgetting(fox_reference, rule), summed=summed)


@pytest.mark.parametrize(("rule", "bound"), [(SHARP, "tail"), (HARD, "tail"), (SHARP, "paper")], ids=str)
def test_pruned_rows_lose_at_most_eps_whatever_is_forgotten(rule: Rule, bound: str) -> None:
    """Near keys that a row would read, had it not forgotten them, hide how much it reads of the far ones that stay."""
    T, eps, large, rule = 520, 1e-3, Tiles(128, 64, 4, 1), rule._replace(remembers=1)
    case = Case(T=T, S=T, H=1, K=8, V=8, gate="open", options={"scale": 1.0})
    x, j = drawn(case, torch.float32, 2), torch.arange(T, device=DEVICE)
    x["q"], x["k"] = 0.1 * x["q"], 0.1 * x["k"]
    x["q"][..., 0], x["k"][..., 0] = 1.0, (6.0 * (j % 2))[:, None]
    x["log_decay"] = torch.full_like(x["log_decay"], -0.07)
    x["retention"][..., 0] = torch.where(j < T // 2, 50.0, -50.0)[:, None]
    pruned = replace(case, options={"scale": 1.0, "prune": Prune(eps, bound)})  # type: ignore[arg-type]
    found, reference = run_kernel(rule, pruned, x, large), oracle(pruned, x, forgetting(fox_reference, rule))
    whole = oracle(case, x, forgetting(fox_reference, rule))
    largest = float(x["v"].norm(dim=-1).max())
    assert float((reference["o"] - whole["o"]).norm()) > 1e-9, "nothing was pruned: the case shows nothing"
    for less in (found, reference):
        assert float((less["o"] - whole["o"]).norm(dim=-1).max()) <= 2 * eps * largest
        for name, want in whole.items():
            error = (less[name] - want).norm() / want.norm().clamp(min=1e-3)
            assert float(error) <= 2 * eps, (name, error)


def test_a_call_with_retention_compiles_as_one_graph() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, temperature: float) -> Tensor:
        retention = Retention(keys, SOFT._replace(temperature=temperature))
        return 2 * fox_attention(q, k, v, log_decay=None, retention=retention, impl="triton")

    x = drawn(Case(T=66, S=66, K=8, V=8, gate="none"), torch.float32, 2)
    given = [x[name].requires_grad_() for name in ("q", "k", "v", "retention")]
    compiled = torch.compile(layer, fullgraph=True, backend=lambda graph, _: graph.forward)
    got, want = (torch.autograd.grad(f(*given, 3.0).sin().sum(), given) for f in (compiled, layer))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"retention": 0.5}, r"retention: expected Retention\(keys, Rule\(...\)\) or None, got float"),
        ({"retention": Retention(torch.zeros(1, 5, 1, 2), SOFT)}, r"retention.keys: expected .*S=6, G=1, 1 or 2"),
        ({"retention": Retention(torch.zeros(1, 6, 1, 3), SOFT)}, r"got torch.float32 \(1, 6, 1, 3\)"),
        ({"retention": Retention(torch.zeros(1, 6, 1, 2).half(), SOFT)}, "got torch.float16"),
        ({"retention": Retention(torch.zeros(1, 6, 1, 2), SOFT._replace(threshold=1.0))}, r"threshold: .*\(0, 1\)"),
        ({"retention": Retention(torch.zeros(1, 6, 1, 2), SOFT._replace(limit=61.0))}, r"limit: .*\(0, 60\], got 61"),
        ({"valid": torch.ones(1, 6, dtype=torch.bool)}, "valid: expected None with retention"),
    ],
    ids=str,
)
def test_wrong_retention_is_named(change: dict[str, Any], error: str) -> None:
    call = {"retention": Retention(torch.zeros(1, 6, 1, 2), SOFT), "log_decay": None} | change
    with pytest.raises((TypeError, ValueError), match=error):
        fox_attention(*(torch.zeros(1, 6, 1, 8) for _ in range(3)), **call)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize(
    ("numbers", "options"), [(2, {}), (1, {"window": 90}), (2, {"cu_seqlens": (0, 3, 3, 140, 150)})]
)
def test_rows_hold_as_many_keys_as_their_definition_says(numbers: int, options: dict[str, Any], gone: bool) -> None:
    T = 300 if gone and "cu_seqlens" not in options else 150
    case = Case(B=1 if "cu_seqlens" in options else 2, T=T, S=T, G=2, gate="none")
    rule = Rule(64.0, 0.6, 30.0, 5) if gone else SOFT
    keys = (soon_gone(case, numbers) if gone else drawn(case, torch.float32, numbers))["retention"].requires_grad_()
    if "cu_seqlens" in options:
        options = {"cu_seqlens": torch.tensor(options["cu_seqlens"], device=DEVICE)}
    found = []
    for one, impl in ((keys, "triton"), (keys.detach().double().requires_grad_(), "reference")):
        held = held_keys(Retention(one, rule), impl=impl, **options)  # type: ignore[arg-type]
        found.append((held.detach(), *torch.autograd.grad((held / 10).sin().sum(), one)))
    for got, want in zip(*found, strict=True):
        assert float((got.double() - want).norm() / want.norm()) <= 3e-6


def test_opcheck_of_held_keys() -> None:
    from attnzoo.kernels.retention.op import HeldForward, held_forward_op

    keys = drawn(Case(T=70, S=70, gate="none"), torch.float32, 2)["retention"].requires_grad_()
    first = torch.arange(70, device=DEVICE, dtype=torch.int32) // 2
    opcheck(held_forward_op, HeldForward(keys, SOFT, first, (2 * first + 2).clamp(max=70)))
