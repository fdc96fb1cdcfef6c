"""Wall kernels against the definition in float64: values and gradients, within the project's budget."""

from __future__ import annotations

import pytest
import torch
from wall_cases import Case, inputs, large_tiles, triton, within_budget

from attnzoo.algebra.oracle import softmax
from attnzoo.kernels.wall.reference import wall_reference
from attnzoo.samples import random_inputs

__all__ = ["large_tiles"]

CASES = [
    Case(gate="open"),
    Case(B=2, T=70, H=4, G=2, K=32, V=48),
    Case(gate="strong", T=1),
    Case(gate="shut", T=66),
    Case(gate="ones", T=100),
    Case(T=140, H=2, G=2, K=48, V=16),
    Case(gate="strong", T=200, H=1, K=32),
    Case(T=220, cu_seqlens=(0, 1, 71, 71, 190, 220)),
    Case(options={"scale": 0.7}),
    Case(T=64, H=1),
    Case(gate="open", T=600, H=1),  # three levels of carries
    Case(T=300, H=1, options={"window": 70}),
    Case(gate="open", T=140, G=2, sink=True, options={"window": 20}),
    Case(T=200, H=1, sink=True, cu_seqlens=(0, 90, 200), options={"window": 150}),
]


@pytest.mark.parametrize("regime", ["open", "closing", "zero", "closed", "mixed"])
def test_the_definition_is_the_product_written_out(regime: str) -> None:
    q, k, v, gate = random_inputs("wall", B=1, T=41, H=4, G=2, K=8, V=6, regime=regime)  # type: ignore[arg-type]
    assert gate.log_diag is not None
    leaves = [x.requires_grad_() for x in (q, k, v, gate.log_diag)]
    results = []
    for o in (wall_reference(q, k, v, log_diag=gate.log_diag), softmax(q, k, v, gate)):
        results.append([o, *torch.autograd.grad(o.sin().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [(case, torch.float16) for case in (CASES[1], CASES[6], CASES[10])],
    ids=str,
)
def test_kernel_within_budget(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    within_budget(case, x, triton(case, x))
