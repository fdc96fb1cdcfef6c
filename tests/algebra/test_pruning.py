"""Certified pruning: what is dropped is at most eps, whatever q, k and the gates are."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import given_variant
from torch import Tensor

from attnzoo import Gate, Prune, get, list_variants, oracle
from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.pruning import Bound, dropped_mass, first_kept_keys, kept_fraction, may_prune
from attnzoo.samples import random_inputs
from attnzoo.testing import Inputs, assert_close, block_sizes, relative_error, value_and_gradients

PRUNABLE = [name for name in list_variants() if get(name).prunable]
BOUNDS: tuple[Bound, ...] = ("tail", "paper")
ROWS, COLS = 8, 4
MANY = settings(max_examples=12 * settings.default.max_examples)  # these examples are cheap


def logits_of(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """q, k ``[B, H, T or S, K]``, g ``[B, H, S]``: the rows are the last T, in float64."""
    T, S = q.shape[2], k.shape[2]
    n, c = g.isneginf().cumsum(-1), g.double().masked_fill(g.isneginf(), 0).cumsum(-1)
    apart = (n[..., -T:, None] != n[..., None, :]) | torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    d = (c[..., -T:, None] - c[..., None, :]).masked_fill(apart, -torch.inf)
    return q.double() @ k.double().mT + d


def adversarial(kind: str, T: int, S: int, seed: int, size: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled q, k and gates that press on the certificate."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, n, 4, dtype=torch.float64, generator=draw) for n in (T, S))
    g = -torch.rand(1, 2, S, dtype=torch.float64, generator=draw)
    if kind == "at the bound":  # every past logit is |q| |k| and every own logit is -|q| |k|: worst l_i, worst U_i
        axis = torch.zeros(4, dtype=torch.float64)
        axis[0] = size**0.5
        q, k = axis.expand(1, 2, T, 4).clone(), axis.expand(1, 2, S, 4).clone()
        k[:, :, S // 2 :] *= -1
    if kind == "one bad row":  # the same, but only in one row of each block, and not in the first
        axis = torch.tensor([size, 0.0, 0.0, 0.0], dtype=torch.float64)
        k = axis.expand(1, 2, S, 4).clone()
        k[:, :, S // 2 :] *= -1
        q = q.new_zeros(1, 2, T, 4)
        q[:, :, 1 + seed % (ROWS - 1) :: ROWS, 0] = 1.0
        g = g * size / 6
    if kind == "one far key":
        k, q = 0.01 * k, q.abs()
        k[:, :, seed % max(S // 3, 1)] = size
    if kind == "gates that open and close":
        g = torch.where((torch.arange(S) // 5) % 2 == 0, 0.0, -size) * torch.ones_like(g)
    if kind == "closed gates":
        g = g.masked_fill(torch.rand(g.shape, generator=draw) < 0.1, -torch.inf)
    if kind == "one flood":
        g = torch.zeros_like(g)
        g[..., S // 2] = -size * 3
    if kind == "strong":
        g = g * size
    return q, k, g


KINDS = (
    "random",
    "at the bound",
    "one bad row",
    "one far key",
    "gates that open and close",
    "closed gates",
    "one flood",
    "strong",
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    S = draw(st.integers(1, 90), label="S")
    T = draw(st.integers(1, S), label="T")
    kind = draw(st.sampled_from(KINDS), label="kind")
    return adversarial(kind, T, S, draw(st.integers(0, 2**16), label="seed"), draw(st.sampled_from((0.5, 3.0, 12.0))))


@pytest.mark.parametrize("bound", BOUNDS)
@MANY
@given(problem=problems(), eps=st.sampled_from((1e-12, math.exp(-10), 1e-2, 0.5)))
def test_dropped_mass_is_at_most_eps(bound: Bound, problem: tuple[Tensor, Tensor, Tensor], eps: float) -> None:
    first = first_kept_keys(*problem, Prune(eps, bound), rows=ROWS, cols=COLS)
    mass = dropped_mass(logits_of(*problem).softmax(-1), first, rows=ROWS)
    assert float(mass.max()) <= eps * (1 + 1e-9)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", PRUNABLE)
@given_variant(seed=st.integers(0, 2**16), regime=st.sampled_from(("mixed", "open", "closing", "zero", "closed")))
def test_dropped_mass_of_variant_is_at_most_eps(name: str, bound: Bound, seed: int, regime: str) -> None:
    """With the variant's own logits, matrix transitions included."""
    eps = 1e-3
    q, k, v, gate = random_inputs(name, 1, 60, 2, 1, 4, 3, regime=regime, seed=seed)  # type: ignore[arg-type]
    s, d = oracle.scores(q, k, gate)
    scaled, keys = q.transpose(1, 2) / 2, k.transpose(1, 2).repeat_interleave(2, 1)
    first = first_kept_keys(scaled, keys, gate.log_decay.transpose(1, 2), Prune(eps, bound), rows=ROWS, cols=COLS)  # type: ignore[union-attr]
    assert float(dropped_mass((s + d).softmax(-1), first, rows=ROWS).max()) <= eps


@MANY
@given(problem=problems(), eps=st.sampled_from((1e-6, 1e-2)))
def test_tail_keeps_no_more_than_paper(problem: tuple[Tensor, Tensor, Tensor], eps: float) -> None:
    """Its bound is never larger: U_i and -l_i are at most U, and n_b at most S."""
    tail, paper = (first_kept_keys(*problem, Prune(eps, bound), rows=ROWS, cols=COLS) for bound in BOUNDS)
    assert bool((tail >= paper).all())


def test_tail_keeps_fewer_blocks_than_paper_on_ordinary_inputs() -> None:
    q, k, g = adversarial("random", 512, 512, 0, 1.0)
    tail, paper = (first_kept_keys(q, k, g / 4, Prune(bound=bound), rows=32, cols=16) for bound in BOUNDS)
    shares = [float(kept_fraction(first, 512, rows=32, cols=16).mean()) for first in (tail, paper)]
    assert shares[0] < 0.9 * shares[1] < 0.9


@pytest.mark.parametrize("bound", BOUNDS)
@MANY
@given(problem=problems(), eps=st.sampled_from((1e-6, 1e-2, 0.5)))
def test_boundaries_are_monotone_block_starts(bound: Bound, problem: tuple[Tensor, Tensor, Tensor], eps: float) -> None:
    q, k, _ = problem
    T, S = q.shape[2], k.shape[2]
    first = first_kept_keys(*problem, Prune(eps, bound), rows=ROWS, cols=COLS)
    assert first.shape == (1, 2, -(-T // ROWS))
    assert first.dtype == torch.int64
    assert bool((first.diff(dim=-1) >= 0).all())
    assert bool((first % COLS == 0).all())
    starts = S - T + torch.arange(first.shape[-1]) * ROWS
    assert bool((first >= 0).all())
    assert bool((first <= starts).all()), "a block must see its own rows"


@pytest.mark.parametrize("bound", BOUNDS)
@MANY
@given(problem=problems(), factor=st.sampled_from((10.0, 1e4)))
def test_larger_eps_prunes_no_less(bound: Bound, problem: tuple[Tensor, Tensor, Tensor], factor: float) -> None:
    small, large = (first_kept_keys(*problem, Prune(e, bound), rows=ROWS, cols=COLS) for e in (1e-6, 1e-6 * factor))
    assert bool((large >= small).all())


@pytest.mark.parametrize("bound", BOUNDS)
def test_closed_gate_drops_everything_before_it(bound: Bound) -> None:
    q, k, g = adversarial("random", 64, 64, 1, 1.0)
    g = torch.zeros_like(g)
    g[..., 24] = -torch.inf
    first = first_kept_keys(100 * q, k, g, Prune(1e-12, bound), rows=ROWS, cols=COLS)
    assert first[0, 0].tolist() == [0, 0, 0, 24, 24, 24, 24, 24]


@pytest.mark.parametrize("bound", BOUNDS)
def test_open_gates_drop_nothing(bound: Bound) -> None:
    q, k, g = adversarial("random", 64, 64, 1, 1.0)
    assert not first_kept_keys(q, k, torch.zeros_like(g), Prune(bound=bound), rows=ROWS, cols=COLS).any()


# kept_fraction and dropped_mass


@given(data=st.data())
def test_kept_fraction_equals_count_of_blocks(data: st.DataObject) -> None:
    S = data.draw(st.integers(1, 70), label="S")
    T = data.draw(st.integers(1, S), label="T")
    rows, cols = data.draw(st.sampled_from(((8, 4), (4, 8), (16, 16), (5, 3))))
    N = -(-T // rows)
    first = torch.zeros(2, 3, N, dtype=torch.int64)
    for n in range(N):
        first[:, :, n] = torch.randint(0, (S - T + n * rows) // cols + 1, (2, 3)) * cols
    share = torch.zeros(3, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            kept = total = 0
            for n in range(N):
                last_row = S - T + min((n + 1) * rows, T) - 1
                for start in range(0, last_row + 1, cols):
                    total += 1
                    kept += start >= int(first[b, h, n])
            share[h] += kept / total / 2
    got = kept_fraction(first, S, queries=T, rows=rows, cols=cols)
    assert got.shape == (3,)
    assert float((got - share).abs().max()) <= 1e-12
    if T == S:
        assert torch.equal(kept_fraction(first, S, rows=rows, cols=cols), got)


def test_kept_fraction_is_one_when_nothing_is_dropped() -> None:
    assert kept_fraction(torch.zeros(2, 3, 4, dtype=torch.int64), 500).tolist() == [1.0] * 3


def test_dropped_mass_sums_the_dropped_weights() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]).expand(1, 1, 3, 3)
    got = dropped_mass(weights, torch.tensor([[[0, 2]]]), rows=2)
    assert torch.allclose(got, torch.tensor([[[0.0, 0.0, 0.6]]]))


# the pruned forms


def decaying(name: str, T: int, rate: float = 1.0) -> Inputs:
    """Gates under which most of a long past weighs nothing."""
    q, k, v, gate = random_inputs(name, 1, T, 2, 1, 4, 3, regime="open")
    g = -rate * torch.rand(1, T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return q, k, v, replace(gate, log_decay=g)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Records the boundaries that the forms compute."""
    import attnzoo.forms.additive
    import attnzoo.forms.softmax

    seen: list[Tensor] = []

    def record(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(first_kept_keys(*args, **kwargs, cols=COLS))
        return seen[-1]

    for forms in (attnzoo.forms.additive, attnzoo.forms.softmax):
        monkeypatch.setattr(forms, "first_kept_keys", record)
    return seen


@given(problem=problems())
def test_where_no_block_of_keys_is_before_a_block_of_rows_nothing_is_pruned(
    problem: tuple[Tensor, Tensor, Tensor],
) -> None:
    T, S = problem[0].shape[2], problem[1].shape[2]
    first = first_kept_keys(*problem, Prune(0.5), rows=ROWS, cols=COLS)
    assert may_prune(T, S, ROWS, COLS) or not first.any()


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_no_bound_is_searched_for_among_too_few_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, form = spy(monkeypatch), get(name).forms["parallel"]
    inputs = decaying(name, 100)
    assert torch.equal(form(*inputs, prune=Prune(0.5)), form(*inputs))
    assert not seen
    form(*decaying(name, 200), prune=Prune(0.5))
    assert seen


@pytest.mark.covering
@pytest.mark.parametrize("eps", [math.exp(-10), 1e-3])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", PRUNABLE)
def test_pruned_is_within_eps_of_unpruned(name: str, bound: Bound, eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mass eps moved from some values to others: at most 2 eps of the largest value, and it must really prune."""
    seen = spy(monkeypatch)
    inputs = decaying(name, 150)
    with block_sizes(16):
        got = get(name).forms["parallel"](*inputs, prune=Prune(eps, bound))
    expected = oracle.softmax(*inputs)
    assert float(seen[0][..., -1].min()) > 0, "nothing was pruned: the test shows nothing"
    assert float((got - expected).abs().max()) <= 2 * eps * float(inputs[2].abs().max())
    assert not torch.equal(got, get(name).forms["parallel"](*inputs))


@pytest.mark.parametrize("name", PRUNABLE)
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_known_logit_bound_prunes_more_and_stays_within_eps(
    name: str, bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two long vectors that never meet spoil the norms, not the bound of what their products really are."""
    seen = spy(monkeypatch)
    q, k, v, gate = decaying(name, 150)
    q[:, 0], k[:, -1] = 30 * q[:, 0], 30 * k[:, -1]
    q[:, -1], k[:, 0] = 0, 0
    s, _ = oracle.scores(q, k, gate)
    known = s.abs().amax((0, 2, 3))
    with block_sizes(16):
        plain = get(name).extend(q, k, v, gate, prune=Prune(bound=bound))[0]
        got = get(name).extend(q, k, v, gate, prune=Prune(bound=bound), logit_bound=known)[0]
    assert bool((seen[1] >= seen[0]).all())
    assert bool((seen[1] > seen[0]).any()) or bound == "tail"
    for o in (plain, got):
        assert float((o - oracle.softmax(q, k, v, gate)).abs().max()) <= 2 * Prune().eps * float(v.abs().max())


def test_a_logit_bound_of_the_wrong_kind_is_refused() -> None:
    q, k, v, gate = decaying("fox", 20)
    with pytest.raises(ValueError, match="logit_bound: expected None without prune"):
        get("fox").extend(q, k, v, gate, logit_bound=torch.ones(q.shape[2]))
    with pytest.raises(ValueError, match=r"logit_bound: expected a floating tensor of shape \[H=2\]"):
        get("fox").extend(q, k, v, gate, prune=Prune(), logit_bound=torch.ones(7))


@pytest.mark.parametrize("name", PRUNABLE)
def test_pruned_equals_attention_over_the_kept_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the certified keys are left out, in values and gradients: no more and no fewer."""
    seen = spy(monkeypatch)
    inputs = decaying(name, 90)
    prune = Prune(1e-2)
    with block_sizes(16):
        got = value_and_gradients(lambda *x: get(name).forms["parallel"](*x, prune=prune), inputs)
    dropped = torch.arange(90) < seen[0].repeat_interleave(16, -1)[..., :90, None]

    def kept_only(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        s, d = oracle.scores(q, k, gate)
        weights = (s + d).masked_fill(dropped, -torch.inf).softmax(-1)
        return torch.einsum("bhtj,bjhv->bthv", weights, expand_heads(v, 2))

    assert dropped.any()
    assert_close(got, value_and_gradients(kept_only, inputs))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", PRUNABLE)
def test_pruned_gradient_is_close_to_unpruned(name: str, bound: Bound, monkeypatch: pytest.MonkeyPatch) -> None:
    spy(monkeypatch)
    inputs, eps = decaying(name, 120), math.exp(-10)
    with block_sizes(16):
        got = value_and_gradients(lambda *x: get(name).forms["parallel"](*x, prune=Prune(eps, bound)), inputs)
        expected = value_and_gradients(get(name).forms["parallel"], inputs)
    assert_close(got, expected, 20 * eps)


@pytest.mark.parametrize("name", PRUNABLE)
def test_pruning_nothing_changes_nothing(name: str) -> None:
    q, k, v, gate = random_inputs(name, T=50)
    gate = replace(gate, log_decay=torch.zeros_like(gate.log_decay))  # type: ignore[arg-type]
    with block_sizes(16):
        got = value_and_gradients(lambda *x: get(name).forms["parallel"](*x, prune=Prune()), (q, k, v, gate))
        expected = value_and_gradients(get(name).forms["parallel"], (q, k, v, gate))
    assert_close(got, expected, 1e-13)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", PRUNABLE)
@given_variant(data=st.data())
def test_pruned_with_a_cache_is_within_eps(name: str, bound: Bound, data: st.DataObject) -> None:
    """Prefill and steps, each pruned over cached keys, with the real block sizes."""
    T, eps = 300, 1e-4
    cut = data.draw(st.integers(128, T - 1), label="cut")
    q, k, v, gate = decaying(name, T)
    variant, options = get(name), {"prune": Prune(eps, bound)}
    first, state = variant.extend(q[:, :cut], k[:, :cut], v[:, :cut], gate.slice(0, cut), **options)
    next_one = slice(cut, cut + 1)
    second, state = variant.extend(
        q[:, next_one], k[:, next_one], v[:, next_one], gate.slice(cut, cut + 1), state, **options
    )
    outputs = [first, second]
    if cut + 1 < T:
        rest = slice(cut + 1, T)
        outputs.append(variant.extend(q[:, rest], k[:, rest], v[:, rest], gate.slice(cut + 1, T), state, **options)[0])
    expected = variant.forms["parallel"](q, k, v, gate)
    assert float((torch.cat(outputs, 1) - expected).abs().max()) <= 2 * eps * float(v.abs().max())


@pytest.mark.parametrize("name", PRUNABLE)
def test_pruned_step_leaves_far_keys_out(name: str) -> None:
    """Huge values far behind the boundary must not be felt: the step really leaves them out."""
    q, k, v, gate = decaying(name, 200, rate=4.0)
    variant = get(name)
    _, state = variant.extend(q[:, :199], k[:, :199], v[:, :199], gate.slice(0, 199))
    step = q[:, 199:], k[:, 199:], v[:, 199:], gate.slice(199, 200)
    far = state.v.clone()
    far[:, :32] += 1e9
    o, _ = variant.extend(*step, replace(state, v=far), prune=Prune(1e-6))
    expected, _ = variant.extend(*step, state)
    assert relative_error(o, expected) <= 1e-5


@pytest.mark.parametrize("name", PRUNABLE)
def test_pruning_goes_with_padding(name: str) -> None:
    q, k, v, gate = decaying(name, 200)
    valid = torch.ones(1, 200, dtype=torch.bool)
    valid[:, 40:90] = False
    eps, variant = 1e-4, get(name)
    o, _ = variant.extend(q, k, v, gate, valid=valid, prune=Prune(eps))
    expected, _ = variant.extend(q, k, v, gate, valid=valid)
    assert float((o - expected)[valid].abs().max()) <= 2 * eps * float(v.abs().max())


@pytest.mark.parametrize("name", [name for name in list_variants("softmax") if name not in PRUNABLE])
def test_prune_is_refused_without_a_scalar_decay(name: str) -> None:
    with pytest.raises(ValueError, match="prune: expected None"):
        get(name).forms["parallel"](*random_inputs(name), prune=Prune())


@pytest.mark.parametrize("eps", [0.0, 1.0, -1.0, 2.0, math.nan, math.inf, True, "1e-3", None])
def test_bad_eps_is_refused(eps: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"eps: expected a float in (0, 1), got {eps!r}")):
        Prune(eps)


def test_bad_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bound.*'tail'.*'paper'.*'tial'|bound.*tail, paper.*'tail'"):
        Prune(bound="tial")  # type: ignore[arg-type]


def test_kept_fraction_refuses_blocks_that_do_not_fit() -> None:
    first = torch.zeros(1, 1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="queries: expected 257 to 384 for 3 blocks of 128 rows, got 256"):
        kept_fraction(first, 256)
    with pytest.raises(ValueError, match="keys: expected at least as many as the 300 queries, got 200"):
        kept_fraction(first, 200, queries=300)
