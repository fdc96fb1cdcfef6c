"""The forward that splits the keys: few rows over many keys."""

from __future__ import annotations

import pytest
import torch
from fox_cases import Case, inputs, triton, within_budget

from attnzoo import Prune
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.fox.portable import decode

CASES = [
    Case(T=1, S=600, H=2, G=2),
    Case(T=1, S=700, H=4, G=1, gate="open"),
    Case(B=2, T=3, S=300, H=2, G=1, K=8, V=24),
    Case(T=24, S=900, H=2, G=1, gate="strong"),
    Case(T=16, S=300, H=2, G=1, gate="shut"),
    Case(T=1, S=513, H=2, G=1, gate="const", sink=True),
    Case(T=1, S=300, H=2, G=1, gate="const_shut", sink=True),
    Case(T=4, S=520, H=4, G=2, gate="none"),
    Case(T=2, S=520, H=2, G=1, sink=True),
    Case(T=3, S=600, H=2, G=1, options={"window": 70}),
    Case(T=2, S=260, H=1, G=1, K=136, V=40, gate="open"),
    Case(T=3, S=300, H=2, G=1, sink=True, options={"softcap": 0.8}),
]


@pytest.fixture
def split_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of chunks of each call that splits."""
    seen: list[int] = []
    whole = decode._chunk

    def record(programs: int, S: int, device: torch.device) -> int:
        chunk = min(256, whole(programs, S, device))
        seen.append(-(-S // chunk))
        return chunk

    monkeypatch.setattr(decode, "_chunk", record)
    return seen


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.float16) for case in CASES[1:4])],
    ids=str,
)
def test_split_keys_within_budget(case: Case, dtype: torch.dtype, split_calls: list[int]) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))
    assert split_calls[0] > 1, "one chunk: nothing was combined"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, Case(B=2, T=1, S=20000, H=8, G=2, K=128, V=128)], ids=str)
def test_split_keys_within_budget_bf16(case: Case) -> None:
    x = inputs(case, torch.bfloat16)
    within_budget(case, x, triton(case, x, None))


@pytest.mark.parametrize("bound", ["tail", "paper"])
@pytest.mark.parametrize("known", [False, True], ids=["norms", "known bound"])
def test_pruned_step_drops_at_most_eps(bound: str, known: bool, split_calls: list[int]) -> None:
    """Values of 1 at the dropped keys and 0 elsewhere show the mass that was dropped."""
    case = Case(T=1, S=1500, H=2, G=1, gate="open")
    x = inputs(case, torch.float32)
    prune = Prune(eps=1e-3, bound=bound)  # type: ignore[arg-type]
    q, k, g = 0.3 * x["q"], 0.3 * x["k"], x["log_decay"]
    limit = (torch.einsum("bthk,bsgk->bhs", q, k).abs().amax((0, 2)) * case.K**-0.5) if known else None
    options = {"log_decay": g, "logit_bound": limit, "impl": "triton"}
    exact = fox_attention(q.double(), k.double(), x["v"].double(), log_decay=g.double(), impl="reference")
    got = fox_attention(q, k, x["v"], prune=prune, **options)
    far = x["v"].clone()
    far[:, :512] = torch.nan  # certified away: never read
    assert torch.equal(fox_attention(q, k, far, prune=prune, **options), got)
    assert float((got - exact).abs().max()) <= 2 * prune.eps * float(x["v"].abs().max()) + 1e-5


def test_segments_of_any_size_equal_one_call() -> None:
    """Up to float32's rounding of the exponents, which open gates keep below 21."""
    case = Case(T=300, S=300, H=2, G=1, gate="open")
    x = inputs(case, torch.float32)
    x["log_decay"][:, 150] = -torch.inf
    options = {"log_decay": x["log_decay"], "impl": "triton"}
    whole = fox_attention(x["q"], x["k"], x["v"], **options)
    for T in (1, 7, 32):
        last = fox_attention(x["q"][:, -T:], x["k"], x["v"], **options)
        torch.testing.assert_close(last, whole[:, -T:], atol=5e-7, rtol=2e-6)
