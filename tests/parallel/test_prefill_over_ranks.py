"""A prompt that several ranks read together leaves on each of them the cache of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from generated import LAYERS, alone, build
from ranks import on_ranks

from attnzoo import Prune
from attnzoo.models import Generator
from attnzoo.parallel import Fragments, prefill

T = 23
TABLES = (
    Fragments.of([(0, 1, 1), (1, 3, 0), (3, 4, 1), (4, 11, 0), (11, 22, 1), (22, T, 0)], 2),
    Fragments.zigzag(T, 3),
    Fragments.contiguous(T, 1),
)


def prompt(tokens, seed=1):
    return torch.randint(0, 40, (tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_every_rank_goes_on_as_one_process_does(name):
    model, text = build(**LAYERS[name]).double(), prompt(T + 3)[None]
    for layer in model.attentions():
        layer.prune = layer.prune and Prune(1e-30)
    expected = model(text).logits[:, T - 1 :]
    for fragments in TABLES if name == "hybrid" else TABLES[:1]:

        def rank(_, fragments=fragments):
            mine = copy.deepcopy(model)
            cache, last = prefill(mine, text[:, :T], fragments)
            assert {layer.tokens for layer in cache} == {T}
            return torch.cat([mine.logits(last)[:, None], mine(text[:, T:], cache=cache).logits], 1)

        found = on_ranks(fragments.ranks, rank) if fragments.ranks > 1 else [rank(0)]
        for logits in found:
            assert (logits - expected).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize("name", ["hybrid", "fox-pro-acp", "rope-grouped", "mamba2-groups", "wall"])
def test_a_generator_that_shares_its_prompts_draws_the_tokens_of_one_process(name):
    model, prompts = build(**LAYERS[name]).double(), [prompt(T), prompt(1), prompt(9, 2)]
    expected = [alone(model, text, 6) for text in prompts]

    def rank(_):
        generator = Generator(copy.deepcopy(model), 2, T + 6)
        generator.share(dist.group.WORLD)
        ids = [generator.add(text, 6, temperature=0) for text in prompts]
        found = generator.run()
        return [found[number] for number in ids]

    assert on_ranks(2, rank) == [expected, expected]


def test_a_prompt_that_cannot_be_shared_is_refused_by_name():
    model = build(**LAYERS["fox-pro-acp"])
    with pytest.raises(ValueError, match="over: expected None with evict"):
        Generator(model, 1, 8, evict=1e-3).share(object())
    generator = Generator(build(**LAYERS["hybrid"]), 1, 8)
    generator.remember(1)
    with pytest.raises(ValueError, match="over: expected None with remember"):
        generator.share(object())
    generator.remember(0)
    generator.share(object())
    with pytest.raises(ValueError, match="limit: expected 0 with share, .* got 1"):
        generator.remember(1)
    with pytest.raises(ValueError, match="cache: expected an empty one that keeps all of one text .* got documents"):
        prefill(model, prompt(T)[None], Fragments.contiguous([0, 5, T], 1))
    with pytest.raises(ValueError, match="x: expected 23 tokens along axis 1"):
        prefill(model, prompt(9)[None], TABLES[0])
