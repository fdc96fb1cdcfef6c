"""A budget that the heads of all layers share: whose keys go, by an oracle; in place as in a cache; and in training."""

from __future__ import annotations

import pytest
import torch

from attnzoo.config import ForgettingConfig
from attnzoo.forgetting import rules as dense
from attnzoo.forgetting.rules import Forgetting
from attnzoo.forgetting.student import Panel
from attnzoo.models import Generator, LanguageModel
from attnzoo.models.config import ModelConfig
from attnzoo.models.generation.proposals import look_up
from attnzoo.training.forgetting import extra_loss, networks, set_phase

WINDOW = 2


def forgetful(name="rope", layers=2, **options):
    """A model in float64 whose networks value keys of its layers and heads differently."""
    torch.manual_seed(0)
    given = {"forgetting": {"window": WINDOW, "width": 4, "threshold": 1e-9, **options}}
    sizes = {"hidden_size": 16, "num_layers": layers, "num_heads": 2}
    model = LanguageModel(ModelConfig(attention=name, attention_options=given, **sizes)).double().eval()
    for number, network in enumerate(networks(model)):
        with torch.no_grad():
            network.key.mul_(3)
            network.out.copy_(torch.randn(4))
            network.bias.add_(torch.tensor([0.5, -0.5]) + 2 * number)
    return model


class Masked(torch.nn.Module):
    """In place of a layer's forget network: rows see the keys of a mask alone, and the keys' retention is noted."""

    def __init__(self, network, seen):
        super().__init__()
        self.options, self.network, self.seen = network.options, network, seen

    def run(self, forms, teacher, call, policy=None, fused=False):
        T = call.q.shape[1]
        one = torch.eye(T, dtype=call.v.dtype)[:, None].expand(*call.v.shape[:3], T)
        weights = teacher(call.q, call.k, one, call.gate, **call.options)[0].transpose(1, 2)  # [B, H, T, T]
        weights = weights.masked_fill(~self.seen, 0.0)
        age = (torch.arange(T)[:, None] - torch.arange(T))[None, None]
        retention = self.network.join(self.network.of_keys(call.k, call.v), self.network.of_rows(call.q))
        self.retention = retention(Panel(0, T, age)).sigmoid().masked_fill(age < WINDOW, 1.0)
        return ((weights / weights.sum(-1, keepdim=True)) @ call.v.transpose(1, 2)).transpose(1, 2), None


@torch.no_grad()
def by_definition(model, tokens, keys):
    """The last hidden states of a model whose heads may hold ``keys`` keys of a sequence together, computed anew with
    the masks of all rows at each row, and the keys (layer, head, position) that each sequence holds in the end."""
    B, T = tokens.shape
    layers = model.attentions()
    networks = [layer.forget for layer in layers]
    masks = [Masked(network, torch.eye(T, dtype=torch.bool).expand(B, 2, T, T).clone()) for network in networks]
    places = [(layer, head) for layer in range(len(layers)) for head in range(2)]
    held, rows = [set() for _ in range(B)], []
    for layer, mask in zip(layers, masks, strict=True):
        layer.forget = mask
    for t in range(T):
        for b in range(B):
            held[b] |= {(*place, t) for place in places}
            for layer, head, key in held[b]:
                masks[layer].seen[b, head, t, key] = True
        rows.append(model.hidden(tokens)[:, t])
        for b in range(B):
            young = {one for one in held[b] if t - one[2] < WINDOW}
            worth = {one: float(masks[one[0]].retention[b, one[1], t, one[2]]) for one in held[b] - young}
            held[b] = young | set(sorted(worth, key=lambda one: -worth[one])[: max(0, keys - len(young))])
    for layer, network in zip(layers, networks, strict=True):
        layer.forget = network
    return torch.stack(rows, 1), held


def held_by(cache):
    """The keys (layer, head, position) of each sequence of a batch, from the caches of all layers."""
    found = [set() for _ in range(len(cache[0].seen))]
    for layer, one in enumerate(cache):
        state = one.state.settled()
        for b, slot in state.in_use()[:, :, 0].nonzero().tolist():
            found[b].add((layer, int(state.slots["head"][b, slot]), int(state.slots["position"][b, slot])))
    return found


@pytest.mark.parametrize("name", ["rope", "fox"])
@pytest.mark.parametrize("keys", [8, 13, 1000])
def test_keys_of_all_layers_compete_for_one_budget(name, keys):
    """Below the window's 8 keys, between two layers' shares, and with room for all."""
    model, tokens = forgetful(name), torch.randint(256, (2, 9))
    each = 2 * 8 * 8  # a key and a value of 8 channels in float64
    cache = model.new_cache(budget=f"{keys * each} B total")
    with torch.no_grad():
        got = torch.cat([model.hidden(one, cache=cache) for one in tokens.split(1, 1)], 1)
    expected, held = by_definition(model, tokens, keys)
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)
    assert held_by(cache) == held
    counts = [sum(layer == 0 for layer, _, _ in of) for of in held]
    assert keys != 13 or all(count not in (6, 7) for count in counts)  # layers are not alike


def test_a_long_call_ends_within_the_budget_of_all_layers():
    model, tokens = forgetful(), torch.randint(256, (2, 30))
    cache = model.new_cache(budget=f"{20 * 2 * 8 * 8} B total")
    with torch.no_grad():
        model.hidden(tokens, cache=cache)
    assert [len(of) for of in held_by(cache)] == [20, 20]
    alone = model.attentions()[0]
    lone = alone.new_cache(budget=f"{20 * 2 * 8 * 8} B total")
    with torch.no_grad():
        alone(torch.randn(2, 30, 16).double(), cache=lone)
    assert lone.state.settled().live.sum(1).tolist() == [20, 20]


def test_a_generator_shares_one_budget_as_a_cache_does():
    """Slots grow and shrink with what a layer holds; drafts are refused, as keys go after each token."""
    model, budget = forgetful().float(), f"{150 * 2 * 8 * 4} B total"
    prompts = [torch.randint(256, (n,)) for n in (5, 40)]
    generator = Generator(model, 2, 160, budget=budget)
    ids = [generator.add(prompt, 100, temperature=0) for prompt in prompts]
    generator.run()
    for prompt, number in zip(prompts, ids, strict=True):
        expected = model.generate(prompt[None], 100, temperature=0, budget=budget)[0, len(prompt) :].tolist()
        assert generator.requests[number].tokens == expected
        assert sum(map(sum, generator.requests[number].kept)) == 150
    slots = sum(cache.memory.cache.size for cache in generator.batch.caches)
    assert slots < 2 * 150
    generator.add(prompts[0], 9)
    with pytest.raises(ValueError, match="draft: expected None with a budget of all layers"):
        generator.run(look_up())


def test_a_shared_budget_counts_the_keys_of_all_layers_and_heads():
    """L_b of rows whose heads together hold what they may is 0, however unequal the heads are."""
    torch.manual_seed(0)
    triangle, options = torch.ones(7, 7).tril().bool(), Forgetting(budget=0.5, shared_budget=True)
    kept = [torch.rand(2, heads, 7, 7).double() for heads in (2, 3)]
    counts = [(9.0 * (r - 0.5)).sigmoid().masked_fill(~triangle, 0.0).sum(-1) for r in kept]
    n = triangle.sum(-1)
    expected = sum(abs(sum(count[b, :, t].sum() for count in counts) / 5 - 0.5 * n[t]) / n[t]
                   for b in range(2) for t in range(7)) / 14  # fmt: skip
    over = [dense.excess(count, n.expand(count.shape), options, None) for count in counts]
    assert torch.isclose(dense.shared_gap(over), expected)
    apart = [torch.stack([n * 1.0, n * 0.0], 0)[None].double()]
    assert dense.shared_gap([dense.excess(x, n.expand(x.shape), options, None) for x in apart]) == 0
    with pytest.raises(ValueError, match="learned_budget: expected False with shared_budget"):
        Forgetting(learned_budget=True, shared_budget=True)


def test_training_adds_the_loss_of_a_shared_budget_once_for_all_layers():
    config, found = ForgettingConfig(0, 0, budget=0.5), {}
    for shared in (False, True):
        model = forgetful(threshold=0.5, shared_budget=shared).train()
        found[shared] = networks(model)
        with torch.no_grad():
            for network, bias in zip(found[shared], (-20.0, 20.0), strict=True):
                network.bias.fill_(bias)  # one layer holds its window, the other all
        set_phase(found[shared], config, 1)
        model.hidden(torch.arange(24).view(2, 12))
        terms = [network.terms for network in found[shared]]
        extra = extra_loss(found[shared], config, 1)
        gap = dense.shared_gap([term.excess for term in terms]) if shared else sum(t.budget for t in terms) / 2
        assert torch.isclose(extra.loss, 0.5 * gap)
        assert float(extra.row["budget"]) == pytest.approx(float(gap.detach()))
        found[shared] = gap
    assert found[True] < found[False]
