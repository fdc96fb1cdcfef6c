"""Laws of the softcap: every softmax side against dense definitions, pruning within its mass, bounds of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, Prune, build_attention, get, list_variants, oracle
from attnzoo.layer.gates.decay import ForgetGate
from attnzoo.samples import random_inputs
from attnzoo.testing import LIMIT, assert_close, block_sizes, relative_error, value_and_gradients

SOFTMAX = list_variants("softmax")
CAP = 0.7  # of scores of about 1


def dense(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """Gemma 2's definition on the scores and decays of the variant: capped, and only then biased."""
    s, d = oracle.scores(q, k, gate)
    weights = (CAP * torch.tanh(s / CAP) + d).softmax(-1)
    return torch.einsum("bhtj,bjhv->bthv", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2))


@pytest.mark.parametrize("name", SOFTMAX)
def test_values_and_gradients_are_those_of_the_dense_definition(name: str) -> None:
    inputs = random_inputs(name, 1, 21, 2, 1, 4, 3)
    expected = value_and_gradients(dense, inputs)
    assert relative_error(oracle.softmax(*inputs, softcap=CAP), expected["o"]) <= LIMIT
    with block_sizes(8):
        for form in ("parallel", "recurrent"):
            run = get(name).forms[form]
            assert_close(value_and_gradients(lambda *x, run=run: run(*x, softcap=CAP), inputs), expected, what=form)


@pytest.mark.parametrize("name", SOFTMAX)
def test_a_large_cap_is_none_and_a_small_one_leaves_the_decays(name: str) -> None:
    inputs = random_inputs(name, 1, 21, 2, 1, 4, 3)
    run = get(name).forms["parallel"]
    assert relative_error(run(*inputs, softcap=1e7), run(*inputs)) <= LIMIT
    q, *rest = inputs
    assert relative_error(run(*inputs, softcap=1e-13), run(torch.zeros_like(q), *rest)) <= LIMIT


@pytest.mark.parametrize("gemma", [False, True], ids=["fused", "gemma2"])
def test_past_the_fused_row_blocks_it_is_what_transformers_computes(gemma: bool) -> None:
    """Long enough for the fused kernel, which knows no cap; without a decay Gemma 2's own attention is the measure."""
    q, k, v, gate = random_inputs("nope", 1, 520, 2, 1, 8, 8)
    got = get("nope").forms["parallel"](q, k, v, gate, softcap=CAP)
    expected = oracle.softmax(q, k, v, gate, softcap=CAP)
    if gemma:
        modeling = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
        module = torch.nn.Module().eval()
        module.num_key_value_groups = 2
        mask = torch.full((520, 520), -torch.inf, dtype=q.dtype).triu(1)
        x = (y.transpose(1, 2) for y in (q, k, v))
        expected = modeling.eager_attention_forward(module, *x, mask, scaling=8**-0.5, softcap=CAP)[0]
        assert relative_error(got, expected.double()) <= 1e-6  # its softmax is in float32
    else:
        assert relative_error(got, expected) <= LIMIT


@pytest.mark.parametrize("bound", ["tail", "paper"])
@pytest.mark.parametrize("name", ["fox", "path_fox", "gated_wall"])
def test_pruning_drops_no_more_than_its_mass(name: str, bound: Any) -> None:
    """Scores far beyond the cap: a row's own logit is the capped one, and only the capped one bounds its sum."""
    q, k, v, gate = random_inputs(name, 1, 300, 2, 1, 8, 8, regime="open")
    gate = replace(gate, log_decay=torch.full_like(gate.log_decay, -0.3))
    run, options = get(name).forms["parallel"], {"softcap": CAP, "scale": 4.0}
    exact = run(q, k, v, gate, **options)
    for known in (None, torch.full((2,), CAP, dtype=q.dtype)):
        pruned = run(q, k, v, gate, **options, prune=Prune(1e-6, bound), logit_bound=known)
        lost = float((pruned - exact).abs().max())
        assert lost <= 2e-6 * float(v.abs().max())
    assert lost > 0, "nothing was pruned: the case shows nothing"


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_a_softcap_certifies_eviction_without_qk_norm(name: str) -> None:
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=16, num_heads=2, block="llama", softcap=2.0).double()
    bounds = attn.query_bounds(torch.float64)
    assert bounds is not None
    assert attn.logit_bound().tolist() == pytest.approx([2.0, 2.0], rel=1e-5)
    with torch.no_grad():
        for module in attn.gate.modules():
            if isinstance(module, ForgetGate):
                module.forget_proj.bias.fill_(-1.0)
        x = torch.randn(1, 400, 16, dtype=torch.float64)
        kept, short = attn.new_cache(), attn.new_cache(evict=1e-6)
        for start in range(0, 400, 50):
            now = x[:, start : start + 50]
            assert relative_error(attn(now, cache=short), attn(now, cache=kept)) <= 1e-4
    assert bool(short.state.pool.first.all()), "nothing was evicted: the case shows nothing"


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_cap_that_is_no_positive_finite_number_is_named(cap: float) -> None:
    inputs = random_inputs("fox", 1, 4)
    for call in (
        lambda: get("fox").forms["parallel"](*inputs, softcap=cap),
        lambda: build_attention("fox", hidden_size=16, num_heads=2, softcap=cap),
    ):
        with pytest.raises(ValueError, match="softcap: expected"):
            call()


def test_the_linear_side_has_no_cap() -> None:
    with pytest.raises(ValueError, match="softcap: expected None .* without a softmax"):
        build_attention("mamba2", hidden_size=16, num_heads=2, softcap=50.0)
