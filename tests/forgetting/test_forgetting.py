"""One-Pass Forgetting: its definitions, and the panels that compute the same with memory O(T)."""

from __future__ import annotations

import math
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from layers import assert_same
from thinning import given_variant

import attnzoo.forgetting.panels as panels
import attnzoo.forgetting.student as forms
import attnzoo.forgetting.target as forgetting_goal
from attnzoo import get, list_variants, oracle
from attnzoo.forgetting import rules as dense
from attnzoo.forgetting.rules import Forgetting
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.samples import random_inputs
from attnzoo.testing import assert_close

SOFTMAX = list_variants("softmax")
TRIANGLE = torch.ones(7, 7, dtype=torch.bool).tril()


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Retention:
    """A little network of every feature: what it gives for a panel is what it gives for all pairs at once."""

    def __init__(self, G, T, of_pairs, seed=0):
        self.keys, self.rows = drawn(G, T, seed=seed), drawn(G, T, seed=seed + 1)
        self.weights = drawn(4, seed=seed + 2).requires_grad_()
        self.of_pairs = of_pairs

    def __call__(self, panel):
        w, age = self.weights, panel.age.clamp(min=0).double().log1p()
        x = w[0] + 2 * self.keys[:, None, panel.start : panel.stop] - (0.2 + w[1].square()) * age
        if self.of_pairs:
            x = x + self.rows[:, panel.start :, None] + 3 * w[2] * panel.logits + 3 * w[3] * panel.attention
        return x


def whole(retention, logits, options, G):
    """The retention of all pairs, from features by their definitions, which are constants for the gradient."""
    T, logits = logits.shape[-1], logits.detach()
    age = torch.arange(T)[:, None] - torch.arange(T)
    features = ()
    if options.of_pairs:
        squashed = dense.squashed(logits).unflatten(1, (G, -1)).mean(2)
        features = squashed, dense.running_mean(dense.shares(logits, G), options.memory)
    return retention(forms.Panel(0, T, age[None, None], *features)), age


def by_definition(name, inputs, retention, options, tau, *, window=None, sink=None, scale=None):
    """The student's output and losses, each quantity of the paper from the one before; the oracle knows no names."""
    q, k, v, gate = inputs
    T, G = q.shape[1], k.shape[2]
    s, d = oracle.scores(q, k, gate, scale=scale)
    exists = torch.ones(T, T, dtype=torch.bool).tril()
    if window is not None:
        exists = exists.triu(1 - window)
    logits = (s + d).masked_fill(~exists, -torch.inf)
    with_sink = logits
    if sink is not None:
        with_sink = torch.cat([logits, sink[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    weights = with_sink.softmax(-1)[..., :T]
    x, age = whole(retention, logits, options, G)
    kept = dense.remembered(x.sigmoid().masked_fill(~exists, 1.0), age, options)
    bias = dense.forgetful_bias(kept, options, tau)
    o = dense.student(logits, bias, v, sink, dense.full_bias(options, tau))
    target = dense.target_retention(
        dense.future_utility(dense.contributions(weights, v), exists, options, tau), exists, options.normalize
    )
    return {
        "o": o,
        "distillation": dense.distillation_loss(target, x, exists, age, options),
        "budget": dense.budget_loss(kept, exists, options, tau),
    }


@contextmanager
def small_panels(rows):
    """Few rows have many panels and chunks; a backward pass, which computes them again, belongs within this, too."""
    kept = rows % 2  # few utilities are kept, many are found again
    with (
        mock.patch.object(panels, "COLUMNS", 4), mock.patch.object(forgetting_goal, "KEEPS", kept),
        mock.patch.object(forgetting_goal, "CHUNK", 3),
    ):  # fmt: skip
        yield


def by_panels(name, inputs, retention, options, tau, *, sink=None, **call):
    q, k, v, gate = inputs
    variant = get(name)
    given = {**call, **({} if sink is None else {"sink": sink})}
    teacher, lse = variant.forms["parallel"](q, k, v, gate, return_lse=True, **given)
    logits = panels.Logits(variant.form_set, q, k, gate, SoftmaxOptions(**call))
    found = forms.forgetful_attention(
        logits, v, lse, retention, options, tau, teacher=teacher.detach(), sink=sink, losses=True
    )
    return {"o": found.o, "distillation": found.distillation, "budget": found.budget}


def with_gradients(run, name, inputs, retention, *args, **call):
    q, k, v, gate = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    gate = gate.map(lambda part: part.detach().requires_grad_())
    wanted = {**dict(zip("qkv", leaves, strict=True)), **{p: getattr(gate, p) for p in gate.parts}}
    wanted["network"] = retention.weights
    with small_panels(q.shape[1]):
        found = run(name, (*leaves, gate), retention, *args, **call)
        loss = found["o"].sin().sum() + 3 * found["distillation"] + 2 * found["budget"]
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    named = {f"d{n}": torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), grads, strict=True)}
    return {**{n: x.detach() for n, x in found.items()}, **named}


@pytest.mark.parametrize("name", SOFTMAX)
@given_variant(data=st.data())
def test_panels_equal_the_definitions(name, data):
    """Values and gradients, for every variant, network, pool, normaliser and divergence."""
    B, G, R, T = (data.draw(st.integers(1, most)) for most in (2, 2, 2, 11))
    regime = data.draw(st.sampled_from(["mixed", "open", "closed"]))
    inputs = random_inputs(name, B, T, G * R, G, 4, 3, regime=regime, seed=data.draw(st.integers(0, 99)))
    options = Forgetting(
        network=data.draw(st.sampled_from(["key", "pair"])), pool=data.draw(st.sampled_from(dense.POOLS)),
        discount=data.draw(st.sampled_from([1.0, 0.9])), normalize=data.draw(st.sampled_from(dense.NORMALIZERS)),
        divergence=data.draw(st.sampled_from(dense.DIVERGENCES)), window=data.draw(st.integers(1, 4)),
        budget=data.draw(st.sampled_from([0.3, 5])), monotone=data.draw(st.booleans()),
    )  # fmt: skip
    tau = data.draw(st.sampled_from([2.0, 20.0]))
    call = {"window": data.draw(st.sampled_from([None, 6])), "scale": data.draw(st.sampled_from([None, 0.7]))}
    if data.draw(st.booleans()):
        call["sink"] = torch.randn(G * R, dtype=torch.float64)
    retention = Retention(G, T, options.of_pairs, seed=T)
    expected = with_gradients(by_definition, name, inputs, retention, options, tau, **call)
    got = with_gradients(by_panels, name, inputs, retention, options, tau, **call)
    assert_close(got, expected, what=f"{options}, {call}")


def test_contribution_is_the_ratio_of_squared_lengths():
    """Section 2.1's s; of two query heads on one key, of their outputs beside each other."""
    weights, v = drawn(1, 4, 7, 7).masked_fill(~TRIANGLE, -torch.inf).softmax(-1), drawn(1, 7, 2, 3, seed=1)
    s = dense.contributions(weights, v)
    t, j, g = 5, 2, 1
    u = torch.cat([weights[0, h, t, j] * v[0, j, g] for h in (2, 3)])
    y = torch.cat([weights[0, h, t] @ v[0, :, g] for h in (2, 3)])
    assert torch.isclose(s[0, g, t, j], u.square().sum() / y.square().sum())
    assert torch.equal(s, s.tril())


@pytest.mark.parametrize("pool", dense.POOLS)
def test_future_utility_is_a_soft_maximum_of_later_rows(pool):
    """Section 2.1's S: between mean and maximum of the discounted contributions, and the latter where tau is large."""
    s = drawn(1, 1, 7, 7).square().tril()
    for discount in (1.0, 0.8):
        options = Forgetting(pool=pool, discount=discount)
        soft, sharp = (dense.future_utility(s, TRIANGLE, options, tau)[0, 0] for tau in (1.0, 1e5))
        for t, j in ((2, 1), (4, 0), (6, 3)):
            x = torch.stack([discount ** (i - t) * s[0, 0, i, j] for i in range(t, 7)])
            assert x.mean() - 1e-12 <= soft[t, j] <= x.max() + 1e-12
            assert torch.isclose(sharp[t, j], x.max(), rtol=1e-3)


@pytest.mark.parametrize("pool", ["power", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pooling_by_chunks_equals_the_definition(pool, dtype):
    """Over many chunks and with a strong discount; float32 within the rounding of its logarithms times tau."""
    R, n, tau = 300, 5, 20.0
    log_s, there = 3 * drawn(1, 1, R, n) - 12, torch.arange(R)[:, None] >= torch.arange(n)
    log_s[..., 100:150, 2] = -torch.inf
    for discount in (1.0, 0.9):
        options = Forgetting(pool=pool, discount=discount)
        s = F.pad(log_s.exp(), (0, R - n))
        exists = F.pad(there, (0, R - n))
        expected = dense.future_utility(s, exists, options, tau)[..., :n]
        got = forgetting_goal.pooled(log_s.to(dtype), there[None, None], options, tau).masked_fill(~there, 0.0)
        assert got.dtype == dtype
        rounding = 1e-10 if dtype == torch.float64 else 4 * 20 * tau * 2**-24
        assert ((got - expected).abs() <= rounding * expected).all()


def test_the_minimum_so_far_by_chunks_is_that_of_all_rows():
    x = drawn(2, 1, 300, 3).requires_grad_()
    found, expected = -forgetting_goal.so_far(-x, 0.0, largest=True), x.cummin(-2).values
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    assert_same(*grads)


def test_panels_are_wide_on_a_gpu_where_sequences_are_few():
    assert [panels.panel_width(rows) for rows in (2**15, 3 * 2**13, 2**22, 64)] == [1024, 1344, 256, 2048]


def test_power_pooling_does_not_depend_on_the_unit():
    s, options = drawn(1, 1, 7, 7).square().tril(), Forgetting(pool="power", discount=0.9)
    once, scaled = (dense.future_utility(c * s, TRIANGLE, options, 3.0) for c in (1.0, 1e-6))
    assert torch.allclose(1e-6 * once, scaled, rtol=1e-12, atol=0)


def test_target_retention_keeps_the_order_and_is_half_for_the_average_key():
    """Section 2.4's normalised utilities."""
    utility = drawn(1, 1, 7, 7).square().tril()
    for normalize in dense.NORMALIZERS:
        target = dense.target_retention(utility, TRIANGLE, normalize)
        assert ((target >= 0) & (target <= 1)).all()
        assert torch.allclose(target, dense.target_retention(1e-5 * utility, TRIANGLE, normalize), rtol=1e-12)
        assert torch.equal(target[0, 0, 6].argsort(), utility[0, 0, 6].argsort())
    flat = dense.target_retention(torch.ones(1, 1, 7, 7).tril(), TRIANGLE, "mean")
    assert torch.allclose(flat, 0.5 * TRIANGLE)
    assert dense.target_retention(utility, TRIANGLE, "max").amax(-1).eq(1).all()


def test_forgetful_bias_is_a_clipped_log_sigmoid():
    """Section 2.2's B."""
    options = Forgetting(threshold=0.4, limit=5.0)
    r = torch.tensor([0.0, 0.39, 0.4, 0.41, 1.0], dtype=torch.float64)
    bias = dense.forgetful_bias(r, options, 100.0)
    assert torch.allclose(bias[2], torch.tensor(0.5).double().log())
    assert torch.allclose(bias[1], torch.tensor(1 / (1 + math.e)).double().log())
    assert bias[0] == -5.0
    assert (bias.diff() > 0).all()
    assert (bias <= 0).all()
    assert dense.full_bias(options, 100.0) == bias[-1]


def test_nothing_is_remembered_again():
    """Section 2.2: B is column-monotone; the remember window is spared, whatever the network says of it."""
    r, age = drawn(2, 3, 9, 9).sigmoid(), torch.arange(9)[:, None] - torch.arange(9)
    kept = dense.remembered(r, age, Forgetting(window=3))
    bias = dense.forgetful_bias(kept, Forgetting(), 8.0)
    assert (bias.diff(dim=-2) <= 0).all()
    assert (kept[..., (age >= 0) & (age < 3)] == 1).all()
    assert torch.equal(kept[..., 7, 2], r[..., 5:8, 2].amin(-1))
    free = dense.remembered(r, age, Forgetting(window=3, monotone=False))
    assert torch.equal(free[..., 7, 2], r[..., 7, 2])


def test_running_mean_forgets_geometrically():
    """Section 2.2's EMA: the weights of a key's rows are powers of ``memory`` and sum to 1."""
    x = drawn(1, 1, 7, 7).sigmoid().tril()
    weights = [0.25 * 0.75**n for n in range(3)] + [0.75**3]  # of rows 5, 4, 3 and 2, for key 2
    expected = sum(w * x[0, 0, 5 - n, 2] for n, w in enumerate(weights))
    assert abs(sum(weights) - 1) < 1e-12
    for got in (dense.running_mean(x, 0.75), forms.running_mean(x, 0.75, 2)):
        assert torch.isclose(got[0, 0, 5, 2], expected)


def test_divergence_is_that_of_two_coins():
    """Section 2.4's L_r."""
    target, x = torch.tensor([0.0, 0.2, 0.7, 1.0]).double().requires_grad_(), drawn(4).requires_grad_()
    coins = [torch.distributions.Bernoulli(probs=p) for p in (target.detach(), x.sigmoid().detach())]
    found = dense.divergence(target, x, "bernoulli")
    assert torch.allclose(found, torch.distributions.kl_divergence(*coins))
    assert torch.allclose(dense.divergence(target, x, "mse"), (target - x.sigmoid()).square())
    assert torch.autograd.grad(found.sum(), [target, x], allow_unused=True)[0] is None
    same = torch.tensor([0.2, 0.7]).double()
    for kind in dense.DIVERGENCES:
        assert dense.divergence(same, same.logit(), kind).abs().max() < 1e-15


def test_budget_loss_counts_expected_keys():
    """Section 2.4's L_b, beside a budget in tokens and one as a share."""
    kept = drawn(1, 2, 7, 7).sigmoid()
    chance = (9.0 * (kept - 0.5)).sigmoid().masked_fill(~TRIANGLE, 0.0)
    for budget, wanted in ((0.4, [0.4 * (t + 1) for t in range(7)]), (3, [min(3, t + 1) for t in range(7)])):
        expected = sum(abs(chance[0, g, t].sum() - wanted[t]) / (t + 1) for g in range(2) for t in range(7)) / 14
        found = dense.budget_loss(kept, TRIANGLE, Forgetting(budget=budget), 9.0)
        assert torch.isclose(found, expected)
    wanted = [[min(0.8 * part * (t + 1), t + 1) for t in range(7)] for part in (0.5, 1.5)]  # no more than there are
    expected = sum(abs(chance[0, g, t].sum() - wanted[g][t]) / (t + 1) for g in range(2) for t in range(7)) / 14
    uneven = dense.budget_loss(kept, TRIANGLE, Forgetting(budget=0.8), 9.0, torch.tensor([0.5, 1.5]).double())
    assert torch.isclose(uneven, expected)


def test_gradients_pass_through_the_student_alone():
    """Sections 2.3 and 2.4."""
    teacher, student = drawn(3).requires_grad_(), drawn(3, seed=1).requires_grad_()
    mixed = dense.blended(teacher, student, 0.3)
    assert torch.allclose(mixed, 0.7 * teacher + 0.3 * student)
    to_teacher, to_student = torch.autograd.grad(mixed.sum(), [teacher, student], allow_unused=True)
    assert to_teacher is None
    assert torch.allclose(to_student, torch.full_like(student, 0.3))


@pytest.mark.parametrize("name", SOFTMAX)
def test_full_retention_is_the_teacher(name):
    q, k, v, gate = random_inputs(name, 2, 21, 4, 2, 4, 3)
    sink = drawn(4)
    everything = lambda panel: torch.full_like(panel.age, torch.inf, dtype=torch.float64).expand(2, 2, -1, -1)  # noqa: E731
    with mock.patch.object(panels, "COLUMNS", 8):
        o, lse = get(name).forms["parallel"](q, k, v, gate, sink=sink, return_lse=True)
        logits = panels.Logits(get(name).form_set, q, k, gate)
        student = forms.forgetful_attention(logits, v, lse, everything, Forgetting(window=1), 3.0, sink=sink)
    assert_same(student.o, o)


def test_what_is_forgotten_is_masked_where_tau_is_sharp():
    q, k, v, gate = random_inputs("fox", 1, 19, 2, 2, 4, 3, regime="open")
    options, retention = Forgetting(window=3, limit=60.0), Retention(2, 19, False)
    with small_panels(q.shape[1]):
        got = by_panels("fox", (q, k, v, gate), retention, options, 1e7)["o"]
    s, d = oracle.scores(q, k, gate)
    x, age = whole(retention, s, options, 2)
    gone = (dense.remembered(x.sigmoid().masked_fill(age < 0, 1.0), age, options) < 0.5) & (age >= 0)
    assert 0.1 < gone.double().mean() < 0.9
    weights = (s + d).masked_fill(gone, -torch.inf).softmax(-1)
    assert_same(got, torch.einsum("bhtj,bjhv->bthv", weights, v))
