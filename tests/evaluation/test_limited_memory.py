"""Losses within a memory: what every rule keeps, and that no limit is no change."""

from __future__ import annotations

import pytest
import torch

from attnzoo.evaluation import forgetting
from attnzoo.evaluation.cost import decoding
from attnzoo.evaluation.forgetting import RULES, ages_of_forgetting, held_keys, limited, loss_within, needed
from attnzoo.evaluation.long_text import stepped_losses
from attnzoo.evaluation.losses import token_losses
from attnzoo.forgetting.rules import NETWORKS, Forgetting, contributions, future_utility
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig


def model_of(name="fox", bias=None, **options):
    torch.manual_seed(0)
    attention = [{"name": name, "options": {"forgetting": {"window": 3, "width": 8}, "qk_norm": "rms", **options}}]
    config = ModelConfig(attention=attention, hidden_size=16, num_layers=2, num_heads=2, initializer_range=0.3)
    model = LanguageModel(config).eval()
    with torch.no_grad():  # nothing is left at zero
        for layer in model.attentions():
            for parameter in layer.forget.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
            if bias is not None:
                layer.forget.bias.fill_(bias)
    return model


WINDOWS = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))


EVICTING = [rule for rule in RULES if rule != "retrieval"]


@pytest.mark.parametrize("rule", EVICTING)
def test_rules_hold_no_more_than_the_budget_and_nothing_comes_back(rule):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 4, 20, 20, generator=generator).masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf)
    given = torch.rand(1, 2, 20, 20, generator=generator)
    held = held_keys(a, rule, 7, given, heads=2)
    assert (held.sum(-1) == torch.arange(1, 21).clamp(max=7)).all()
    assert held.diagonal(dim1=-2, dim2=-1).all()
    again = held[:, :, 1:] & ~held[:, :, :-1]
    assert (again == torch.eye(20, dtype=torch.bool)[1:]).all()


@pytest.mark.parametrize("rule", EVICTING)
def test_room_for_several_rows_is_within_the_budget(rule):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 2, 75, 75, generator=generator).masked_fill(~torch.ones(75, 75).tril().bool(), -torch.inf)
    held = held_keys(a, rule, 35, torch.rand(1, 2, 75, 75, generator=generator), heads=2)
    count = held.sum(-1)[0, 0]
    assert count.tolist() == [*range(1, 35), *[34, 35] * 20, 35]  # the last row is alone
    again = held[:, :, 1:] & ~held[:, :, :-1]
    assert (again == torch.eye(75, dtype=torch.bool)[1:]).all()
    assert held_keys(a, rule, 75, torch.rand(1, 2, 75, 75, generator=generator), heads=2)[0, 0, -1].all()


@pytest.mark.parametrize("budget", [1, 3, 7, 20, 40, 200])
def test_retrieval_reads_the_blocks_whose_mean_key_fits_the_query_best(budget):
    """By mean keys of two query heads' group, block by block; a retrieved block may come back later."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 90, 8, generator=generator), torch.randn(2, 90, 8, generator=generator)
    triangle = torch.ones(90, 90).tril().bool()
    a = torch.einsum("htk,hjk->htj", q, k.repeat_interleave(2, 0)).masked_fill(~triangle, -torch.inf)
    held, size = held_keys(a[None], "retrieval", budget, heads=2)[0], max(1, budget // 8)
    for g in range(2):
        for t in range(90):
            means = {n: k[g, n * size : (n + 1) * size].mean(0) for n in range(t // size)}
            score = {n: float(mean @ q[2 * g, t] + mean @ q[2 * g + 1, t]) for n, mean in means.items()}
            best = sorted(score, key=lambda n: -score[n])[: budget // size - 1]
            read = {j for n in (*best, t // size) for j in range(n * size, min((n + 1) * size, t + 1))}
            assert set(held[g, t].nonzero()[:, 0].tolist()) == read
            assert len(read) <= budget
    assert budget != 20 or bool((held[:, 1:] & ~held[:, :-1] & ~torch.eye(90).bool()[1:]).any())


@pytest.mark.parametrize("rule", ["window", "sinks", "retention"])
@pytest.mark.parametrize("name", ["rope", "fox"])
def test_long_texts_are_read_as_short_ones(rule, name, monkeypatch):
    """Memory O(T) beyond some length gives what the dense weights give, for one and for several keys at a time."""
    model = model_of(name, sinks=True)
    for budget in (1, 7, 35):
        windows = torch.randint(256, (2, 76), generator=torch.Generator().manual_seed(2))
        [dense] = loss_within(model, windows, [rule], [budget])
        with monkeypatch.context() as patched:
            patched.setattr(forgetting, "DENSE", 16)
            [long] = loss_within(model, windows, [rule], [budget])
        assert long.loss == pytest.approx(dense.loss, rel=1e-6)
        assert (long.held, long.late) == pytest.approx((dense.held, dense.late))
        assert long.late <= budget
    assert layer_of(model, rule).last is None


def layer_of(model, rule):
    """The first layer after a call in memory O(T)."""
    with limited(model, rule, 5, long=True) as layers:
        token_losses(model, WINDOWS)
    return layers[0]


def test_rules_that_need_all_weights_stay_dense():
    for rule, model in (("h2o", model_of("rope")), ("window", model_of("path")), ("window", model_of(window=9))):
        assert layer_of(model, rule).last is not None


def test_a_model_steps_through_a_text_within_its_budget():
    """With room for all the losses are those of whole rows; with a limit heads hold as many keys on average."""
    model = model_of("rope")
    with limited(model, "window", 1000):
        whole = token_losses(model, WINDOWS)
    for layer in model.attentions():
        layer.forget.blend = 0.1  # as in the first phase of training
    assert stepped_losses(model, WINDOWS, 1000).losses == pytest.approx(whole, rel=1e-5)
    each = 2 * 8 * 4
    for budget in (5, f"{2 * 5 * each} B", f"{4 * 5 * each} B total"):
        assert stepped_losses(model, WINDOWS, budget).held == 5
    assert {(x.forget.options.threshold, x.forget.blend) for x in model.attentions()} == {(0.5, 0.1)}


def test_the_cost_of_a_step_counts_what_its_caches_hold():
    """Bytes of keys, values and books are those of a cache; a rule's operations come on top of the attention's."""
    model = model_of("rope")
    layer, cache = model.attentions()[0], model.new_cache(budget=6)
    with torch.no_grad():
        model.hidden(WINDOWS[:1], cache=cache)
    state = cache[0].state.settled()
    held = int(state.live[0, 0])
    slots = sum(x[0, :, :held].nbytes for x in state.slots.values())
    cost = decoding(layer, "retention", 32, held, itemsize=4)
    assert (cost.held, cost.bytes) == (held, slots)
    window, found = decoding(layer, "window", 999, 96), decoding(layer, "retrieval", 999, 96)
    assert (window.held, window.read, found.held, found.read) == (96, 96, 1000, 96)
    assert window.operations == 96 * 2 * (2 * 8 + 2 * 8)
    assert found.operations == window.operations + (1000 // 12) * 2 * 2 * 8
    assert decoding(layer, "window", 999).read == 1000


def test_rules_by_position_are_what_their_papers_say():
    a = torch.zeros(1, 1, 20, 20)
    assert held_keys(a, "window", 6, heads=1)[0, 0, 15].nonzero()[:, 0].tolist() == [10, 11, 12, 13, 14, 15]
    assert held_keys(a, "sinks", 6, heads=1)[0, 0, 15].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 14, 15]


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_that_has_learnt_nothing_keeps_a_window(network):
    options = {"forgetting": {"window": 2, "width": 4, "network": network}}
    config = ModelConfig(attention="rope", attention_options=options, hidden_size=16, num_layers=1, num_heads=2)
    model = LanguageModel(config).eval()
    held = []
    for rule in ("retention", "window"):
        with limited(model, rule, 7) as [layer]:
            token_losses(model, WINDOWS)
            held.append(layer.last)
    assert torch.equal(*held)


@pytest.mark.parametrize("rule", ["h2o", "snapkv"])
def test_rules_by_attention_keep_what_was_attended_to(rule):
    a = torch.zeros(1, 1, 20, 20)
    a[..., 2] = 5.0
    held = held_keys(a, rule, 6, heads=1)[0, 0]
    assert held[2:, 2].all()
    assert held[19, 17:].all()


def test_given_scores_keep_their_largest():
    score = torch.rand(1, 1, 1, 20, generator=torch.Generator().manual_seed(0)).expand(1, 1, 20, 20)
    held = held_keys(torch.zeros(1, 1, 20, 20), "retention", 6, score, heads=1)[0, 0, 18]
    best = score[0, 0, 0, :18].topk(5).indices
    assert set(held.nonzero()[:, 0].tolist()) == {18, *best.tolist()}


def test_what_a_row_itself_needs_is_not_given_up_before_it_is_read():
    a = torch.zeros(1, 1, 12, 12).masked_fill(~torch.ones(12, 12).tril().bool(), -torch.inf)
    for row, key in ((7, 2), (9, 4), (11, 0)):  # each once, and by no other row
        a[..., row, key] = 8.0
    need = needed(a, torch.ones(1, 12, 1, 2))
    exists = torch.ones(12, 12, dtype=torch.bool).tril()
    of_rows = future_utility(contributions(a.softmax(-1), torch.ones(1, 12, 1, 2)), exists, Forgetting(), 1.0)
    assert torch.allclose(need, of_rows, atol=1e-6)
    held = held_keys(a, "utility", 4, need, heads=1)[0, 0]
    assert held[7, 2]
    assert held[9, 4]
    assert held[11, 0]


def test_a_budget_for_all_tokens_changes_nothing():
    model = model_of("nope")
    with limited(model, "window", 32):
        whole = token_losses(model, WINDOWS).mean()
    for point in loss_within(model, WINDOWS, ["h2o", "retention"], [32, 99]):
        assert point.loss == pytest.approx(whole, abs=1e-6)
        assert point.held == pytest.approx(16.5)
    [small] = loss_within(model, WINDOWS, ["window"], [4])
    assert abs(small.loss - whole) > 1e-3


@pytest.mark.parametrize("name", ["fox", "path"])
def test_forgets_is_what_the_layers_do_by_themselves(name):
    model = model_of(name, bias=1.5)
    by_itself = token_losses(model, WINDOWS)
    [point] = loss_within(model, WINDOWS, ["forgets"], [])
    assert point.loss == pytest.approx(by_itself.mean(), abs=1e-6)
    assert 3 < point.held < 16
    assert (token_losses(model, WINDOWS) == by_itself).all()  # the networks are back


def test_keys_that_are_held_do_not_depend_on_the_batches():
    model = model_of("fox", bias=1.5)
    windows = torch.cat([WINDOWS, WINDOWS.flip(1), WINDOWS[:, :1].expand_as(WINDOWS)])
    [together] = loss_within(model, windows, ["forgets"], [], batch_size=len(windows))
    [apart] = loss_within(model, windows, ["forgets"], [], batch_size=len(windows) - 1)  # the last batch is smaller
    assert (apart.held, apart.late) == pytest.approx((together.held, together.late), rel=1e-9)


@pytest.mark.parametrize("rule", [*RULES, "certified", "forgets"])
def test_a_model_with_a_window_holds_no_key_beyond_it(rule):
    model = model_of("fox", window=8)
    with limited(model, "window", 32):
        whole = token_losses(model, WINDOWS)
    enough = 12 if rule == "sinks" else 8  # whose first four tokens are beyond the window
    for budget in (enough, 32) if rule in RULES else (0,):
        [point] = loss_within(model, WINDOWS, [rule], [budget])
        assert point.late <= 8
        if rule in RULES:  # these are all that a row sees: none of them has to go
            assert point.loss == pytest.approx(whole.mean(), abs=1e-6)
            assert (point.held, point.late) == pytest.approx((8 - 28 / 32, 8))


def test_certified_keys_matter_to_no_row():
    model = model_of("fox")
    with torch.no_grad():
        for layer in model.attentions():
            layer.gate.forget_proj.bias.fill_(-3.0)
    with limited(model, "window", 32):
        whole = token_losses(model, WINDOWS).mean()
    [point] = loss_within(model, WINDOWS, ["certified"], [], eps=1e-4)
    assert point.held < 12
    assert point.loss == pytest.approx(whole, abs=1e-3)


def test_what_a_rule_lacks_is_said():
    with pytest.raises(ValueError, match="unknown rule 'windo'.*did you mean 'window'"):
        held_keys(torch.zeros(1, 1, 4, 4), "windo", 2, heads=1)
    with pytest.raises(ValueError, match="budget: expected at least 1"):
        held_keys(torch.zeros(1, 1, 4, 4), "window", 0, heads=1)
    plain = LanguageModel(ModelConfig(attention="nope", hidden_size=16, num_layers=1, num_heads=2)).eval()
    with pytest.raises(ValueError, match="a layer that forgets for 'retention'"):
        loss_within(plain, WINDOWS, ["retention"], [4])
    with pytest.raises(ValueError, match="a decay and QK-norm for 'certified'"):
        loss_within(plain, WINDOWS, ["certified"], [])


def test_ages_of_forgetting_count_the_rows_that_saw_a_token():
    model = model_of("fox", bias=1.5)
    tokens = WINDOWS[0]
    ages = ages_of_forgetting(model, tokens)
    assert [x.shape for x in ages] == [(2, 33)] * 2
    assert all(3 <= int(age) <= 33 - j for x in ages for row in x for j, age in enumerate(row) if age >= 0)
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens[None], cache=cache)
    for layer, found in zip(cache, ages, strict=True):
        held = (layer.state.slots["kept"] >= 0.5).sum(-1)[0]
        assert torch.equal(held, (found < 0).sum(-1))
