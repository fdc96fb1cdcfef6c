"""Prompts that are read in pieces between steps, and states that later prompts with the same beginning go on from."""

import pytest
import torch
from generated import LAYERS, alone, build

from attnzoo.forms.caches.pages.pool import PAGE
from attnzoo.models import Generator

NAMES = ["hybrid", "fox-pro-acp", "mamba2-groups", "rope-grouped"]


def prompt_of(tokens, seed=0):
    return torch.randint(0, 40, (tokens,), generator=torch.Generator().manual_seed(seed))


def pieces_of(model, piece, **options):
    generator = Generator(model, 3, 256, check_every=1, **options)
    generator.prefill.piece = piece
    return generator


@pytest.mark.parametrize("name", NAMES)
def test_others_go_on_while_a_long_prompt_is_read(name):
    model = build(**LAYERS[name])
    generator, short, long = pieces_of(model, 8), prompt_of(3), prompt_of(40, 1)
    first = generator.add(short, 20, temperature=0)
    generator.step()
    second, third = generator.add(long, 6, temperature=0), generator.add(short, 6, temperature=0)
    known = [generator.step() for _ in range(5)]
    assert [len(new[first]) for new in known] == [1] * 5  # one token in each step
    assert [second in new for new in known] == [False] * 4 + [True]
    assert third not in known[-1]  # which waits for its turn
    generator.run()
    found = {number: generator.requests[number].tokens for number in (first, second, third)}
    assert found == {first: alone(model, short, 20), second: alone(model, long, 6), third: alone(model, short, 6)}


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_goes_on_from_what_an_earlier_one_has_in_common_as_if_it_were_read_anew(name):
    model = build(**LAYERS[name])
    generator, prompt = pieces_of(model, PAGE), prompt_of(180)
    generator.remember(8)
    beside = torch.cat([prompt[:150], prompt_of(9, 1)])  # which parts in the third piece
    longer = torch.cat([prompt, prompt_of(7, 2)])
    expected = {"prompt": 0, "again": 128, "beside": 128, "longer": 180}
    for (case, found), one in zip(expected.items(), (prompt, prompt, beside, longer), strict=True):
        number = generator.add(one, 6, temperature=0)
        assert generator.run()[number] == alone(model, one, 6), case
        assert generator.requests[number].found == found, case
    ids = [generator.add(one, 6, temperature=0) for one in (longer, beside, prompt)]  # at once
    assert generator.run() == dict(zip(ids, (alone(model, one, 6) for one in (longer, beside, prompt)), strict=True))
    assert all(generator.requests[number].found for number in ids)


def test_what_was_used_longest_ago_makes_room_and_other_weights_discard_all():
    model = build(attention=["mamba2", "fox"])
    generator = pieces_of(model, 64)
    generator.remember(1)
    prompts = [prompt_of(20, seed) for seed in range(4)]
    generator.add(prompts[0], 1)
    generator.run()
    kept = generator.prefill.prefixes
    each = kept.bytes()
    kept.limit = 3 * each
    for one in (prompts[1], prompts[2], prompts[0], prompts[3]):
        generator.add(one, 1)
        generator.run()
        assert kept.bytes() <= 3 * each
    generator.remember(1)
    found = []
    for one in prompts:
        number = generator.add(torch.cat([one, one[:1]]), 1)
        generator.run()
        found.append(generator.requests[number].found)
    assert found == [20, 0, 20, 20]
    with torch.no_grad():
        model.embedding.weight.mul_(0.5)
    number = generator.add(torch.cat([prompts[0], prompts[0]]), 5, temperature=0)
    assert generator.run()[number] == alone(model, torch.cat([prompts[0], prompts[0]]), 5)
    assert generator.requests[number].found == 0


def test_a_generator_that_gives_up_keys_remembers_no_prompts():
    model = build(**LAYERS["fox-pro-acp"])
    generator = pieces_of(model, 4, evict=1e-3)
    with pytest.raises(ValueError, match="limit: expected 0 with evict, whose states depend on"):
        generator.remember(1)
    with pytest.raises(ValueError, match="limit: expected at least 0, got -1"):
        generator.remember(-1)
    number = generator.add(prompt_of(20), 4, temperature=0)
    generator.step()  # reads it whole
    assert generator.requests[number].tokens


def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_its_turn():
    model = build(attention=["mamba2", "fox"])
    generator = pieces_of(model, 4)
    first = generator.add(prompt_of(3), 20, temperature=0)
    generator.step()
    second, third = generator.add(prompt_of(30), 4), generator.add(prompt_of(5), 4, temperature=0)
    generator.step()
    assert generator.requests[second].reading is not None
    generator.cancel(second)
    assert generator.requests[second].reading is None
    generator.run()
    assert generator.requests[first].tokens == alone(model, prompt_of(3), 20)
    assert generator.requests[third].tokens == alone(model, prompt_of(5), 4)
    assert not generator.requests[second].tokens
