"""A whole step over pages: the kernels against the definition in plain torch, and that against the parts of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from decode_cases import Case, inputs, state_of
from fox_cases import DEVICE
from test_decode_append import emptied
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.common.parts import Finish, Norm
from attnzoo.kernels.decode import AttentionOptions, Forget, Shift, TokenParts, paged_step


@dataclass(frozen=True)
class Step:
    """A step of ``case.T`` tokens after all but that many of its lengths."""

    case: Case
    shift: bool = False
    norm: str = ""  # or "heads", "shared"
    logits: str = ""  # or "bias", "factor"
    finish: str = ""  # or "gate", "rms", "group", "shared"
    idle: int | None = None

    def __str__(self) -> str:
        parts = (self.shift and "shift", self.norm, self.logits, self.finish)
        return "-".join([str(self.case), *map(str, filter(None, parts))])


GQA = Case(lengths=(67, 4, 140), T=1, H=4, G=2, gate="mixed", first=(0, 0, 0, 0, 1, 0), K=16, V=24)
STEPS = [
    Step(Case(lengths=(150,))),
    Step(GQA, shift=True, norm="heads", logits="bias", finish="rms", idle=1),
    Step(replace(GQA, T=2, sink=True), shift=True, norm="shared", logits="factor", finish="shared"),
    Step(replace(GQA, gate="none", options={"window": 70}), norm="heads", finish="group", shift=True),
    Step(replace(GQA, T=3, G=1, first=(), gate="strong", options={"prune": Prune(1e-3)}), finish="gate", idle=0),
    Step(Case(lengths=(1, 64, 128), T=1, H=3, G=3, K=8, V=8, gate="open"), logits="bias", shift=True),
    Step(Case(lengths=(65,), T=16, H=3, G=1, K=40, V=16, gate="none"), norm="shared", finish="gate"),
]


def drawn(step: Step, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v as strided views of one product, and all that ``paged_step`` is given; pages filled up to the step."""
    case, x = step.case, inputs(step.case, dtype)
    (B, T, H, K), G, V = x.q.shape, case.G, case.V
    before = [n - T for n in case.lengths]
    pool = emptied(case, x, before)
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(like).to(DEVICE)

    widths = (H * K, G * K, G * V, G, G, H, H * V)
    q, k, v, k_mix, v_mix, logits, out = randn(B, T, sum(widths)).split(widths, -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (G, K)), v.unflatten(-1, (G, V))
    given: dict[str, Any] = {"past": torch.tensor(before, device=DEVICE), "first": x.pool["first"], "sink": x.sink}
    active = torch.tensor([b != step.idle for b in range(B)], device=DEVICE)
    given |= {"count": active.int() * T, **case.options, **pool}
    if step.shift:
        given["shift"] = Shift(k_mix, v_mix, randn(B, G, K), randn(B, G, V))
    if step.norm:
        given["norm"] = Norm(*(randn(K) if step.norm == "shared" else randn(n, K) for n in (H, G)), 1e-5)
    if x.log_decay is not None:
        bias = randn(H, like=torch.float32) if step.logits == "bias" else None
        last = torch.tensor(before)[:, None] + torch.arange(T)
        gates = x.log_decay[torch.arange(B)[:, None].to(DEVICE), last.to(DEVICE)]
        given["gate"] = Forget(logits, bias, 0.5 if step.logits == "factor" else 1.0) if step.logits else gates
    if step.finish:
        scale = None if step.finish == "gate" else randn(V) if step.finish == "shared" else randn(H, V)
        gate = None if step.finish == "group" else out.unflatten(-1, (H, V))
        given["finish"] = Finish(scale, 1e-6, step.finish == "group", gate, step.finish == "shared")
    return [q, k, v], given


def run(rows: list[Tensor], given: dict[str, Any], impl: Any = "auto") -> Tensor:
    """``paged_step`` of a state, parts and options by their names."""
    parts, options = (
        kind(**{name: given[name] for name in kind._fields if name in given}) for kind in (TokenParts, AttentionOptions)
    )  # type: ignore[attr-defined]
    return paged_step(
        *rows, state_of(given), past=given["past"], count=given["count"], parts=parts, options=options, impl=impl
    )  # type: ignore[call-arg]


def both(step: Step, dtype: torch.dtype) -> list[tuple[Tensor, dict[str, Any]]]:
    """The output and what is changed, by the kernels and by the reference."""
    found = []
    for impl in ("triton", "reference"):
        rows, given = drawn(step, dtype)
        o = run(rows, given, impl)
        shift = given.pop("shift", None)
        changed = {name: given[name] for name in given if isinstance(given[name], Tensor)}
        found.append((o, changed if shift is None else changed | {"k before": shift[2], "v before": shift[3]}))
    return found


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_is_its_definition(step: Step) -> None:
    (o, ours), (want, theirs) = both(step, torch.float32)
    rows = [b for b in range(len(want)) if b != step.idle]
    torch.testing.assert_close(o[rows], want[rows], rtol=2e-5, atol=2e-6)
    assert o.isfinite().all()
    for name, x in theirs.items():
        torch.testing.assert_close(
            ours[name], x, rtol=2e-6, atol=2e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    if step.idle is not None:
        assert int(ours["length"][step.idle]) == step.case.lengths[step.idle] - step.case.T


def test_rows_and_gates_of_outputs_may_have_any_strides() -> None:
    outputs = []
    for turn in (lambda x: x, lambda x: x.mT.contiguous().mT):
        rows, given = drawn(STEPS[4], torch.float32)
        given["finish"] = given["finish"]._replace(gate=turn(given["finish"].gate))
        outputs.append(run([*map(turn, rows)], given, "triton"))
    assert torch.equal(*(o[1:] for o in outputs))


def test_gates_are_log_sigmoids_to_rounding_however_near_to_one() -> None:
    """A gate of -1e-7 must not become 0: a sequence adds up thousands of them."""
    logits = torch.tensor([-80.0, -6.0, -0.1, 0.0, 0.1, 3.0, 9.0, 16.0], device=DEVICE)
    rows, given = drawn(Step(Case(lengths=(1,), H=8, G=8, K=8, V=8), logits="bias"), torch.float32)
    given["gate"] = Forget(logits.view(1, 1, 8), None)
    run(rows, given, "triton")
    want = torch.nn.functional.logsigmoid(logits.double())
    torch.testing.assert_close(given["total"][0], want, rtol=4e-6, atol=0)  # exp(-x) in float32 loses x roundings


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_is_its_definition_bf16(step: Step) -> None:
    """The reference rounds what the kernels keep in float32, so two roundings are allowed."""
    (o, ours), (want, theirs) = both(step, torch.bfloat16)
    rows = [b for b in range(len(want)) if b != step.idle]
    torch.testing.assert_close(o[rows], want[rows], rtol=2e-2, atol=2e-2)
    for name in ("total", "length", "since", "decay"):
        if name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past": torch.zeros(3)}, r"past: expected torch.int64 \(1,\), got torch.float32 \(3,\)"),
        ({"gate": None}, "gates: expected None without a gate, got GateState"),
        ({"norm": Norm(torch.ones(4), torch.ones(8), 0.0)}, r"norm.q: expected a floating dtype \(8,\)"),
        ({"finish": Finish(torch.ones(3, 8))}, r"finish.scale: expected a floating dtype \(2, 8\)"),
        ({"logit_bound": torch.ones(2)}, "logit_bound: expected None without prune"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    rows, given = drawn(Step(Case(lengths=(3,), H=2, G=1, K=8, V=8)), torch.float32)
    with pytest.raises(ValueError, match=message):
        run(rows, given | change)
