"""What keys learn from later rows, by kernels: values and gradients against the definitions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fox_cases import DEVICE, Case, inputs
from named_ops import opcheck
from torch import Tensor

from attnzoo.forgetting import rules
from attnzoo.kernels.common.dense_reference import summed_gates
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.retention import Lesson, Retention, Rule, key_divergence

RULE = Rule(temperature=4.0, threshold=0.5, limit=30.0, remembers=3)
SHARP = RULE._replace(temperature=64.0, remembers=1)


def drawn(case: Case, numbers: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs of attention, its outputs, and base and fade, or a rate, of each key."""
    x, generator = inputs(case, dtype), torch.Generator().manual_seed(7)
    del x["do"]
    options = dict(case.options)
    if case.cu_seqlens is not None:
        x["cu_seqlens"] = torch.tensor(case.cu_seqlens, device=DEVICE)
    x["o"], x["lse"] = fox_attention(
        x["q"], x["k"], x["v"], log_decay=x.get("log_decay"), sink=x.pop("sink", None), impl="reference",
        cu_seqlens=x.get("cu_seqlens"), return_lse=True, **options,
    )  # fmt: skip
    fade = 2 * torch.rand((case.B, case.T, case.G), generator=generator)
    keys = torch.stack([3 * torch.randn(fade.shape, generator=generator) + 2, fade], -1)
    x["retention"] = (keys if numbers == 2 else 0.05 * fade[..., None]).to(DEVICE)
    return x


def found(case: Case, x: dict[str, Tensor], rule: Rule, lesson: Lesson, impl: str) -> tuple[Tensor, Tensor]:
    """The divergences of keys, and the gradient of a loss that weighs them."""
    named: dict[str, Any] = {name: t for name, t in x.items() if name in ("log_decay", "cu_seqlens")}
    keys = x["retention"].clone().requires_grad_()
    named |= {"retention": Retention(keys, rule), "lesson": lesson, "impl": impl, **case.options}
    each = key_divergence(x["q"], x["k"], x["v"], (x["o"], x["lse"]), **{"log_decay": None} | named)
    weight = 1.5 + torch.arange(each.numel(), device=DEVICE).view(each.shape).cos()
    return each.detach(), torch.autograd.grad((each * weight).sum(), keys)[0]


def by_rules(case: Case, x: dict[str, Tensor], rule: Rule, lesson: Lesson) -> Tensor:
    """The sum of divergences as ``rules`` defines it, for one row of each head, from dense weights."""
    q, k, v, place = x["q"], x["k"], x["v"], torch.arange(case.T, device=DEVICE)
    _, near = summed_gates(None, q, case.T, case.options.get("window"), x.get("cu_seqlens"))
    c, since = summed_gates(x.get("log_decay"), q, case.T, case.options.get("window"), x.get("cu_seqlens"))
    r = case.H // case.G
    scores = torch.einsum("bthk,bjhk->bhtj", q, k.repeat_interleave(r, 2)) * case.options.get("scale", case.K**-0.5)
    if "softcap" in case.options:
        scores = case.options["softcap"] * (scores / case.options["softcap"]).tanh()
    logits = scores + c[..., :, None] - c[..., None, :]
    seen = (place <= place[:, None]) & (place >= since[..., None])
    weights = (logits - x["lse"].transpose(1, 2)[..., None]).exp().masked_fill(~seen, 0.0)
    up = weights.square() * v.square().sum(-1).transpose(1, 2).repeat_interleave(r, 1)[:, :, None]
    low = x["o"].square().sum(-1).transpose(1, 2)
    s = up.unflatten(1, (-1, r)).sum(2) / low.unflatten(1, (-1, r)).sum(2)[..., None]
    exists = ((place <= place[:, None]) & (place >= near[:, :1, :, None])).expand(s.shape)
    options = rules.Forgetting(
        pool=lesson.pool, discount=lesson.discount, normalize=lesson.normalize, divergence=lesson.divergence,
        window=rule.remembers,
    )  # fmt: skip
    rho = rules.target_retention(rules.future_utility(s, exists, options, rule.temperature), exists, lesson.normalize)
    age = place[:, None] - place
    n, numbers = age.clamp(min=1).double(), x["retention"].transpose(1, 2)[:, :, None]
    lost = numbers[..., -1] * n
    logit = (
        numbers[..., 0] - numbers[..., 1] * n.log1p() if numbers.shape[-1] == 2 else -lost - (1 - (-lost).exp()).log()
    )
    each = rules.divergence(rho, logit, lesson.divergence)
    return each.masked_fill(~exists | (age < rule.remembers), 0.0).sum(-2).transpose(1, 2)


CASES = [
    (Case(T=130, S=130, gate="open", H=1), RULE, Lesson(), 2),
    (Case(B=2, T=70, S=70, H=4, G=2, K=8, V=24, sink=True), RULE, Lesson(), 2),
    (Case(gate="none", T=100, S=100, H=1, options={"softcap": 0.8, "scale": 0.7}), SHARP, Lesson(divergence="mse"), 1),
    (Case(gate="const", T=90, S=90, options={"window": 40}), RULE, Lesson(discount=0.9), 1),
    (Case(T=150, S=150, H=1, cu_seqlens=(0, 1, 71, 140, 150)), SHARP, Lesson("max", 0.8, "max"), 2),
    (Case(gate="const_shut", T=70, S=70), RULE, Lesson("softmax", normalize="max", divergence="mse"), 2),
    (Case(T=1, S=1, gate="open"), SHARP, Lesson(), 2),
]


@pytest.mark.parametrize(
    ("case", "rule", "lesson", "numbers", "dtype"),
    [(*one, torch.float32) for one in CASES] + [(*one, torch.float16) for one in CASES[:2]],
    ids=str,
)
def test_kernel_within_budget_of_the_definition(
    case: Case, rule: Rule, lesson: Lesson, numbers: int, dtype: torch.dtype
) -> None:
    x = drawn(case, numbers, dtype)
    exact = {name: t.double() if t.is_floating_point() else t for name, t in x.items()}
    with torch.no_grad():
        want = by_rules(case, exact, rule, lesson)
    reference, kernels = found(case, exact, rule, lesson, "reference"), found(case, x, rule, lesson, "triton")
    assert (reference[0] - want).norm() <= 1e-9 * max(want.norm(), 1e-3)
    for got, right in zip(kernels, reference, strict=True):
        assert float((got.double() - right).norm() / right.norm().clamp(min=1e-3)) <= 3e-6


@pytest.mark.parametrize("lesson", [Lesson(), Lesson("max", 0.9, "max", "mse"), Lesson("softmax")], ids=str)
@pytest.mark.parametrize("numbers", [1, 2])
def test_rows_whose_outputs_are_0_teach_numbers(lesson: Lesson, numbers: int) -> None:
    """Where values are long, contributions to such rows were infinite."""
    case = Case(T=40, S=40, K=16, V=16)
    x = drawn(case, numbers)
    x |= {"v": 1e3 * x["v"], "o": 1e3 * x["o"]}
    x["o"][:, 20] = 0.0
    exact = {name: t.double() for name, t in x.items()}
    kernels, reference = found(case, x, RULE, lesson, "triton"), found(case, exact, RULE, lesson, "reference")
    for got, right in zip(kernels, reference, strict=True):
        assert got.isfinite().all()
        if lesson.pool != "softmax":  # of contributions: float32 cannot tell those of such a row apart
            assert float((got.double() - right).norm() / right.norm()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("lesson", [Lesson(), Lesson("max", 0.9, "max", "mse")], ids=str)
def test_bfloat16_within_budget(lesson: Lesson) -> None:
    case = Case(B=2, T=1500, S=1500, H=4, G=2, K=64, V=64, gate="open")
    x = drawn(case, 2, torch.bfloat16)
    exact = {name: t.double() for name, t in x.items()}
    found_by = [found(case, given, RULE, lesson, impl) for given, impl in ((x, "triton"), (exact, "reference"))]
    for got, right in zip(*found_by, strict=True):
        assert float((got.double() - right).norm() / right.norm()) <= 3e-5
    again = found(case, x, RULE, lesson, "triton")
    assert all(torch.equal(a, b) for a, b in zip(again, found_by[0], strict=True))


@pytest.mark.gpu
def test_memory_grows_linearly() -> None:
    """At most 1 GiB at (1, 24, 65536, 64), where the weights of one head alone would take 17."""
    q, k, v, o = (torch.randn(1, 65536, 24, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    keys = torch.rand(1, 65536, 24, 2, device=DEVICE, requires_grad=True)
    lse = 11.0 + torch.rand(1, 65536, 24, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    each = key_divergence(q, k, v, (o, lse), Retention(keys, RULE), Lesson(), log_decay=None)
    torch.autograd.grad(each.sum(), keys)
    assert torch.cuda.max_memory_allocated() - before <= 1 << 30


def test_there_is_no_gradient_of_the_gradient() -> None:
    case = CASES[1][0]
    x = drawn(case, 2)
    keys = x["retention"].requires_grad_()
    given, gate = (x["q"], x["k"], x["v"], (x["o"], x["lse"])), x["log_decay"]
    each = key_divergence(*given, Retention(keys, RULE), Lesson(), log_decay=gate, impl="triton")
    first = torch.autograd.grad(each.sum(), keys, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="first derivatives only.*expects impl='reference'"):
        torch.autograd.grad(first.square().sum(), keys)


@pytest.mark.parametrize("gate", ["open", "none"])
def test_opcheck(gate: str) -> None:
    from attnzoo.kernels.common.options import AttentionOptions
    from attnzoo.kernels.retention.distillation import Distillation, distillation_op

    x = drawn(Case(T=40, S=40, gate=gate, options={"window": 9}), 2)
    keys, options = x["retention"].requires_grad_(), AttentionOptions(window=9).of_op(16)
    given = x["q"], x["k"], x["v"], x["o"], x["lse"], keys, x.get("log_decay"), options, RULE, Lesson()
    opcheck(distillation_op, Distillation(*given))


def test_heads_may_have_keys_of_their_own_beside_shared_numbers() -> None:
    case = Case(T=70, S=70, H=4, G=2, gate="open")
    x = drawn(case, 2)
    shared = found(case, x, RULE, Lesson(), "triton")
    for impl in ("triton", "reference"):
        own = found(case, x | {n: x[n].repeat_interleave(2, 2) for n in "kv"}, RULE, Lesson(), impl)
        for got, want in zip(own, shared, strict=True):
            assert (got - want).norm() <= 3e-6 * want.norm()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"lesson": "power"}, r"lesson: expected Lesson\(...\), got str"),
        ({"lesson": Lesson("soft")}, "unknown lesson.pool 'soft'.*did you mean 'softmax'"),
        ({"lesson": Lesson("softmax", 0.9)}, "lesson.discount: expected 1 with pool='softmax', got 0.9"),
        ({"lesson": Lesson(discount=0.4)}, "lesson.discount: expected a number from 0.5 to 1, got 0.4"),
        (
            {"attended": (torch.zeros(1, 6, 1, 8),) * 2},
            r"attended: expected .* and \(1, 6, 1\), got .* and \(1, 6, 1, 8\)",
        ),
        ({"k": torch.zeros(1, 7, 1, 8), "v": torch.zeros(1, 7, 1, 8)}, "k: expected as many tokens as q"),
        ({"retention": Retention(torch.zeros(1, 5, 1, 2), RULE)}, r"retention.keys: expected .*S=6, G=1, 1 or 2"),
        ({"retention": Retention(torch.zeros(1, 6, 2, 2), RULE)}, r"retention.keys: expected .*S=6, G=1, 1 or 2"),
    ],
    ids=str,
)
def test_wrong_calls_are_named(change: dict[str, Any], error: str) -> None:
    q, right = torch.zeros(1, 6, 1, 8), Retention(torch.zeros(1, 6, 1, 2), RULE)
    call: dict[str, Any] = {"q": q, "k": q, "v": q, "attended": (q, q[..., 0]), "retention": right, "lesson": Lesson()}
    with pytest.raises((TypeError, ValueError), match=error):
        key_divergence(**call | change, log_decay=None)
