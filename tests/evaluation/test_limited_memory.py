"""Losses within a memory: what every rule keeps, and that no limit is no change."""

from __future__ import annotations

import pytest
import torch

from attnzoo.evaluation.forgetting import RULES, ages_of_forgetting, held_keys, limited, loss_within, needed
from attnzoo.evaluation.losses import token_losses
from attnzoo.forgetting.rules import NETWORKS, Forgetting, contributions, future_utility
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig


def model_of(name="fox", **options):
    torch.manual_seed(0)
    attention = [{"name": name, "options": {"forgetting": {"window": 3, "width": 8}, "qk_norm": "rms", **options}}]
    config = ModelConfig(attention=attention, hidden_size=16, num_layers=2, num_heads=2, initializer_range=0.3)
    model = LanguageModel(config).eval()
    with torch.no_grad():  # nothing is left at zero
        for layer in model.attentions():
            for parameter in layer.forget.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return model


WINDOWS = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", RULES)
def test_rules_hold_no_more_than_the_budget_and_nothing_comes_back(rule):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 4, 20, 20, generator=generator).masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf)
    given = torch.rand(1, 2, 20, 20, generator=generator)
    held = held_keys(a, rule, 7, given, heads=2)
    assert (held.sum(-1) == torch.arange(1, 21).clamp(max=7)).all()
    assert held.diagonal(dim1=-2, dim2=-1).all()
    again = held[:, :, 1:] & ~held[:, :, :-1]
    assert (again == torch.eye(20, dtype=torch.bool)[1:]).all()


@pytest.mark.parametrize("rule", RULES)
def test_room_for_several_rows_is_within_the_budget(rule):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 2, 75, 75, generator=generator).masked_fill(~torch.ones(75, 75).tril().bool(), -torch.inf)
    held = held_keys(a, rule, 35, torch.rand(1, 2, 75, 75, generator=generator), heads=2)
    count = held.sum(-1)[0, 0]
    assert count.tolist() == [*range(1, 35), *[34, 35] * 20, 35]  # the last row is alone
    again = held[:, :, 1:] & ~held[:, :, :-1]
    assert (again == torch.eye(75, dtype=torch.bool)[1:]).all()
    assert held_keys(a, rule, 75, torch.rand(1, 2, 75, 75, generator=generator), heads=2)[0, 0, -1].all()


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
    model = model_of(name)
    with torch.no_grad():
        for layer in model.attentions():
            layer.forget.bias.fill_(1.5)
    by_itself = token_losses(model, WINDOWS)
    [point] = loss_within(model, WINDOWS, ["forgets"], [])
    assert point.loss == pytest.approx(by_itself.mean(), abs=1e-6)
    assert 3 < point.held < 16
    assert (token_losses(model, WINDOWS) == by_itself).all()  # the networks are back


def test_keys_that_are_held_do_not_depend_on_the_batches():
    model = model_of("fox")
    with torch.no_grad():
        for layer in model.attentions():
            layer.forget.bias.fill_(1.5)
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
    model = model_of("fox")
    with torch.no_grad():
        for layer in model.attentions():
            layer.forget.bias.fill_(1.5)
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
