"""A cache that forgets: stepping is the whole sequence, budgets hold, and what certainly matters to no row goes too."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import assert_same, layer, pieces, rows
from thinning import given_variant

import attnzoo.forgetting.panels as panels
from attnzoo import list_variants
from attnzoo.forgetting import rules as dense
from attnzoo.forgetting.cache import swap_delete
from attnzoo.forgetting.rules import Forgetting, parse_budget
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig

SOFTMAX = list_variants("softmax")


def forgetful(name, network="key", *, remembers=2, **options):
    """A layer in evaluation that forgets about half of what it may."""
    attn = layer(name, forgetting=Forgetting(network=network, window=remembers, width=8), **options).eval()
    with torch.no_grad():
        attn.forget.key.mul_(2)
        if network != "decay":
            attn.forget.bias.fill_(1.5)
            attn.forget.out.sub_(attn.forget.out.mean()).mul_(3)
    return attn


@torch.no_grad()
def stepped(attn, x, cuts, cache=None, **options):
    cache = attn.new_cache(**options) if cache is None else cache
    return torch.cat([attn(x[:, a:b], cache=cache) for a, b in cuts], 1), cache


def live(cache):
    """Keys that each head holds once those that have been given up are gone."""
    return cache.state.settled().live


@pytest.mark.parametrize("name", SOFTMAX)
@given_variant(data=st.data())
def test_pieces_through_a_cache_are_the_whole_sequence(name, data):
    network = data.draw(st.sampled_from(dense.NETWORKS))
    options = {"window": data.draw(st.sampled_from([None, 9])), "sinks": data.draw(st.booleans())}
    options["softcap"] = data.draw(st.sampled_from([None, 0.3]))
    attn = forgetful(name, network, seed=data.draw(st.integers(0, 3)), **options)
    T = data.draw(st.integers(2, 14))
    x = rows(2, T)
    budget = data.draw(st.sampled_from([None, "1 MiB"]))  # the latter has room for all, in slots that heads share
    with mock.patch.object(panels, "COLUMNS", 4):
        got, cache = stepped(attn, x, pieces(data.draw, T), budget=budget)
        assert_same(got, attn(x))
    assert cache.state.shared == (budget is not None)
    assert len(cache.state) == T


def test_some_keys_are_forgotten_and_their_memory_is_free():
    x = rows(2, 300)
    for network in dense.NETWORKS:
        attn = forgetful("fox", network)
        _, cache = stepped(attn, x, [(0, 290), *((t, t + 1) for t in range(290, 300))])
        assert 2 < live(cache).double().mean() < 200
        assert cache.state.slots["k"].shape[2] <= 64 * math.ceil(int(live(cache).max()) / 64) * 2


def test_hard_rows_are_the_student_where_tau_is_sharp():
    """Eviction at inference is the mask of training, but for keys that are all but at the threshold."""
    for name in ("rope", "path_fox"):
        attn = forgetful(name)
        hard = attn(rows(2, 30))
        attn.train()
        attn.forget.temperature, attn.forget.blend = 1e9, 1.0
        object.__setattr__(attn.forget.options, "limit", 60.0)
        assert_same(attn(rows(2, 30)), hard)


@pytest.mark.covering
@pytest.mark.parametrize("budget", [None, "1 MiB"])
@pytest.mark.parametrize("network", ["key", "pair"])
@pytest.mark.parametrize("name", ["fox", "rope", "path", "wall"])
def test_padding_leaves_no_trace_in_a_cache(name, network, budget):
    attn = forgetful(name, network)
    x = rows(1, 9)
    pad = rows(1, 3, seed=8)
    alone, _ = stepped(attn, x, [(0, 5), (5, 9)])
    for left in (True, False):
        first = torch.cat([pad, x[:, :5]] if left else [x[:, :5], pad], 1)
        mask = torch.tensor([[0] * 3 + [1] * 5 if left else [1] * 5 + [0] * 3])
        cache = attn.new_cache(budget=budget)
        with torch.no_grad():
            begun = attn(first, attention_mask=mask, cache=cache)[:, mask[0].bool()]
            after = attn(
                torch.cat([x[:, 5:7], pad[:, :1], x[:, 7:]], 1),
                attention_mask=torch.tensor([[1, 1, 0, 1, 1]]),
                cache=cache,
            )
        assert_same(torch.cat([begun, after[:, [0, 1, 3, 4]]], 1), alone)


def test_a_budget_in_tokens_holds_for_each_head():
    attn = forgetful("nope", remembers=3)
    x = rows(2, 40)
    _, cache = stepped(attn, x, [(0, 20), *((t, t + 1) for t in range(20, 40))], budget=6)
    state = cache.state.settled()
    assert int(state.live.max()) == 6
    ages = state.age()[state.in_use()].view(2, -1)
    assert all({0, 1, 2} <= set(row.tolist()) for row in ages)


def test_a_budget_takes_the_least_retained_first():
    attn = forgetful("nope", remembers=1)
    x = rows(1, 12)
    _, whole = stepped(attn, x, [(0, 12)])
    _, tight = stepped(attn, x, [(0, 12)], budget=3)
    for g in range(2):
        full, left = (
            s.slots["kept"][0, g, : int(s.live[0, g])] for s in (whole.state.settled(), tight.state.settled())
        )
        assert torch.equal(left.sort().values, full.sort().values[-3:])


def test_of_keys_that_are_worth_the_same_the_oldest_goes_first():
    attn = forgetful("nope", remembers=1)
    _, cache = stepped(attn, rows(1, 9), [(0, 9)])
    slots = {**cache.state.slots, "kept": torch.full_like(cache.state.slots["kept"], 0.9)}
    state = replace(cache.state, slots=slots, policy=replace(cache.state.policy, tokens=4)).within_budget().settled()
    assert [sorted(row) for row in state.slots["position"][0, :, :4].tolist()] == [[5, 6, 7, 8]] * 2


def test_what_the_certificate_goes_by_is_the_same_in_steps_and_at_once():
    """Sums of gates and the longest key so far, of sequences with padding."""
    attn, x = forgetful("fox", qk_norm="rms", remembers=40), rows(2, 30)
    with torch.no_grad():
        attn.k_norm.weight[:, ::2] *= 5  # keys differ in length
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :4], mask[1, 20] = False, False
    states = []
    for cuts in ([(0, 30)], [(0, 7), *((t, t + 1) for t in range(7, 30))]):
        cache = attn.new_cache(evict=1e-30)
        with torch.no_grad():
            for a, b in cuts:
                attn(x[:, a:b], attention_mask=mask[:, a:b], cache=cache)
        states.append(cache.state)
    once, steps = states
    for name in ("c", "closed", "tail", "longest"):
        assert_same(steps.sums[name].double(), once.sums[name].double())
        for b, tokens in enumerate(mask.sum(1).tolist()):
            mine, other = (s.slots[name][b, :, :tokens].double() for s in (steps, once))
            order = once.slots["position"][b, 0, :tokens].argsort()
            assert_same(mine, other[:, order])


@pytest.mark.parametrize("name", ["rope", "fox"])
def test_a_budget_is_not_spent_on_keys_that_no_row_to_come_sees(name):
    """Those behind the attention window, or behind a gate that has closed, make room for those that are seen."""
    attn = forgetful(name, remembers=1, **({"window": 8} if name == "rope" else {}))
    with torch.no_grad():
        attn.forget.bias.fill_(9.0)  # the network remembers all
    _, cache = stepped(attn, rows(2, 30), [(0, 30)])
    state = cache.state
    assert name == "fox" or (live(cache) == 7).all()  # and the row itself: a window of 8
    if name == "fox":
        closed = state.slots["closed"].clone()
        closed[:, :, 22:] += 1
        slots, sums = {**state.slots, "closed": closed}, {**state.sums, "closed": state.sums["closed"] + 1}
        state = replace(state, slots=slots, sums=sums)
    held = replace(state, policy=replace(state.policy, tokens=5)).within_budget().settled()
    assert (held.live == 5).all()


def test_heads_compete_for_a_budget_in_bytes():
    attn = forgetful("nope", remembers=1)
    each = 2 * 8 * 8  # a key and a value of 8 channels in float64
    _, cache = stepped(attn, rows(2, 40), [(0, 30), (30, 31), (31, 40)], budget=f"{10 * each} B")
    held = live(cache)
    assert (held.sum(1) == 10).all()
    assert bool((held[:, 0] != held[:, 1]).any())


def test_a_budget_in_bytes_is_spent_where_the_keys_are():
    """One head remembers all, the other its window alone: no slot is kept for what only the first has."""
    attn, T = forgetful("fox", remembers=2), 200
    with torch.no_grad():
        attn.forget.out.zero_()
        attn.forget.bias.copy_(torch.tensor([60.0, -60.0]))
    each, x = 2 * 8 * 8, rows(2, T)
    steps = [(0, 100), *((t, t + 1) for t in range(100, T))]
    for keys, first in ((150, 148), (1000, T)):  # within the budget, and what is wanted
        _, cache = stepped(attn, x, steps, budget=f"{keys * each} B")
        state = cache.state
        assert state.settled().live.tolist() == [[first, 2]] * 2
        slots = state.slots["k"].nbytes + state.slots["v"].nbytes
        assert slots <= 2 * min(keys + 2, -(-(T + 4) // 64) * 64) * each
        whole = stepped(attn, x, steps)[1].state.slots
        assert slots < 0.7 * (whole["k"].nbytes + whole["v"].nbytes)


def test_what_a_long_prompt_need_not_keep_is_given_back_at_once():
    for budget in (20, f"{40 * 2 * 8 * 8} B"):
        _, cache = stepped(forgetful("fox", remembers=2), rows(1, 500), [(0, 500)], budget=budget)
        assert cache.state.slots["k"][..., 0, 0].numel() <= (42 if budget == 20 else 44)


def test_a_budget_in_tokens_has_no_slots_beside_it_but_for_the_next_token():
    attn, x = forgetful("fox", remembers=2), rows(2, 140)
    with torch.no_grad():
        attn.forget.bias.fill_(60.0)
    for prompt in (3, 60, 100):
        _, cache = stepped(attn, x, [(0, prompt), *((t, t + 1) for t in range(prompt, 140))], budget=66)
        assert cache.state.slots["k"].shape[2] == 67


@pytest.mark.parametrize("budget", [None, "1 MiB"])
def test_what_no_row_needs_by_its_gates_goes_besides(budget):
    """The certificate of pruning.11 holds with a bias: of all keys that it gives up no row loses more than eps."""
    attn = forgetful("fox", qk_norm="rms", remembers=40)
    x = rows(1, 400)
    with torch.no_grad():
        attn.gate.forget_proj.bias.fill_(-1.0)
    steps = [(0, 300), *((t, t + 1) for t in range(300, 400))]
    exact, whole = stepped(attn, x, steps, budget=budget)
    close, pruned = stepped(attn, x, steps, evict=1e-4, budget=budget)
    assert live(pruned).sum() < 0.8 * live(whole).sum()
    largest = attn.project(x).v.norm(dim=-1).max() * attn.o_proj.weight.norm()
    assert (exact - close).abs().max() < 2e-4 * largest


@given(data=st.data())
def test_swap_delete_keeps_what_stays_and_fills_the_holes(data):
    N = data.draw(st.sampled_from([3, 130]))
    live = torch.tensor(data.draw(st.lists(st.integers(0, N), min_size=4, max_size=4))).view(2, 2)
    gone = (torch.rand(2, 2, N) < data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))) & (
        torch.arange(N) < live[..., None]
    )
    slots = {"a": torch.arange(4 * N).view(2, 2, N), "b": torch.rand(2, 2, N, 3)}
    moved, left = swap_delete(slots, live, gone)
    assert torch.equal(left, live - gone.sum(-1))
    for b in range(2):
        for g in range(2):
            n, kept = int(left[b, g]), ~gone[b, g, : live[b, g]]
            order = moved["a"][b, g, :n]
            assert sorted(order.tolist()) == slots["a"][b, g, : live[b, g]][kept].tolist()
            assert torch.equal(moved["b"][b, g, :n], slots["b"][b, g, order - slots["a"][b, g, 0]])
            first = slots["a"][b, g, :n]
            assert torch.equal(order[kept[:n]], first[kept[:n]])  # what may stay where it is does


@pytest.mark.parametrize("budget", [None, "1 MiB"])
@pytest.mark.parametrize("name", ["rope", "path_fox"])
def test_rows_of_a_cache_are_reordered_and_a_failed_call_leaves_it(name, budget):
    attn = forgetful(name, "pair")
    x, index = rows(3, 20), torch.tensor([2, 0])
    _, cache = stepped(attn, x[:, :15], [(0, 9), (9, 15)], budget=budget)
    with pytest.raises(ValueError, match="cache: expected 3 rows"):
        stepped(attn, x[:2, 15:], [(0, 5)], cache)
    cache.reorder(index)
    got, _ = stepped(attn, x[index, 15:], [(0, 2), (2, 5)], cache)
    assert_same(got, attn(x)[index, 15:].detach())
    with pytest.raises(ValueError, match="forgotten keys are gone"):
        cache.state.crop(3)
    assert cache.state.to("cpu").bytes() == cache.state.detach().bytes() > 0


def test_a_model_generates_within_a_budget():
    torch.manual_seed(0)
    attention = ["mamba2", {"name": "fox", "options": {"forgetting": {"window": 4, "width": 4}}}]
    model = LanguageModel(ModelConfig(attention=attention, hidden_size=16, num_layers=2, num_heads=2))
    prompt = torch.randint(256, (2, 20))
    assert model.generate(prompt, 8, temperature=0, budget=6).shape == (2, 28)
    free = model.generate(prompt, 8, temperature=0)
    assert torch.equal(free, model.generate(prompt, 8, temperature=0, budget=1000))
    plain = LanguageModel(ModelConfig(attention="fox", hidden_size=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="budget: expected None"):
        plain.generate(prompt, 2, budget=6)


def test_caches_that_cannot_forget_say_why():
    x = rows(1, 4)
    attn = forgetful("rope")
    attn.forget.blend = 0.5
    with pytest.raises(ValueError, match=r"cache: expected blend = 1 .*got 0\.5"):
        stepped(attn, x, [(0, 4)])
    fresh = forgetful("rope")
    cache = fresh.new_cache()
    with pytest.raises(ValueError, match=r"expected torch.no_grad\(\)"):
        fresh(x, cache=cache)
    free = layer("rope", forgetting=Forgetting(monotone=False))
    with pytest.raises(ValueError, match="expected forgetting.monotone=True"):
        free.new_cache()
    with pytest.raises(ValueError, match="budget: expected None"):
        layer("rope").new_cache(budget=9)
    with pytest.raises(ValueError, match="evict: expected a weight where the layer forgets"):
        layer("fox", forgetting=Forgetting(), qk_norm="rms").new_cache(evict="offload")
    with pytest.raises(
        ValueError, match="evict: expected None or a layer with qk_norm or softcap, which bound later scores, got"
    ):
        layer("fox", forgetting=Forgetting()).new_cache(evict=1e-3)  # offloading would be refused as well


def test_budgets_are_tokens_or_bytes():
    assert [parse_budget(x) for x in (None, 7, "96 KiB", "3MiB", "2 MiB total")] == [
        (None, None, False),
        (7, None, False),
        (None, 96 << 10, False),
        (None, 3 << 20, False),
        (None, 2 << 20, True),
    ]
    for wrong in (0, True, "7", "7 KB", "0 B", 2.5, "7 total", "2 MiBtotal", "0 B total", "8589934592 GiB"):
        with pytest.raises(
            ValueError, match="budget: expected a number of tokens or a text such as '96 KiB' or '2 MiB t"
        ):
            parse_budget(wrong)
