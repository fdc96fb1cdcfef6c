"""Attention over pages: every feature against float64, at ragged lengths around the borders of pages."""

from __future__ import annotations

import pytest
import torch
from decode_cases import Case, inputs, ours, within_budget

from attnzoo.kernels.decode.plan import override_plan

CASES = [
    Case(lengths=(0, 1, 63, 64, 65), H=4, G=2, gate="none"),
    Case(lengths=(200, 3, 130), H=4, G=2, first=(0, 2, 0, 0, 2, 1)),
    Case(lengths=(5, 129, 0, 70), T=16, H=2, G=2),
    Case(lengths=(300, 66), T=3, H=8, G=1, gate="strong", K=8, V=24, sink=True, first=(3, 0)),
    Case(lengths=(150, 140), T=4, H=2, G=2, gate="mixed"),
    Case(lengths=(150,), T=2, H=4, G=2, gate="const", sink=True),
    Case(lengths=(260, 70), T=5, H=2, G=1, options={"window": 70}),
    Case(lengths=(150, 70), T=2, H=4, G=2, sink=True, options={"softcap": 0.8}),
    Case(lengths=(130, 2), T=16, H=6, G=1, gate="none", sink=True, options={"window": 1}),
    Case(lengths=(70, 20), T=2, H=1, G=1, K=136, V=40, gate="open", page=16),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.float16) for case in CASES[1:5])],
    ids=str,
)
def test_every_feature_is_within_budget(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, ours(case, x))
    within_budget(case, x, ours(case, x, "reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, Case(lengths=(20000, 70, 5000), H=8, G=2, K=128, V=128, T=2)], ids=str)
def test_every_feature_is_within_budget_bf16(case: Case) -> None:
    x = inputs(case, torch.bfloat16)
    within_budget(case, x, ours(case, x))


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize("extra", [1, 7])
def test_any_number_of_programs_computes_the_same(programs: int, extra: int) -> None:
    """Shares end within heads, at their ends and before their first page; most programs may have nothing to read."""
    case = Case(lengths=(200, 0, 64), H=2, G=2, T=2, first=(1, 0, 0, 0, 0, 0))
    x = inputs(case, torch.float32)
    with override_plan(programs=programs, extra=extra):
        within_budget(case, x, ours(case, x))
    with override_plan(programs=programs, extra=extra, BS=16, BT=16):
        within_budget(case, x, ours(case, x))
