"""Kept beginnings of prompts: sequences share the pages of their keys, and go on as if they had read them."""

import random

import pytest
import torch
from generated import alone, build, forgetful
from test_engine_pruning import small_things_are_looked_through_too  # noqa: F401

from attnzoo.forms.caches.pages.pool import PAGE
from attnzoo.models import Generator

KINDS = {  # pages alone, and pages whose steps are pruned beside states, shifts and convolutions
    "pages": lambda: build(attention=["fox", "rope"], attention_options={"num_kv_heads": 1}),
    "states": lambda: forgetful("fox", acp=True),
}


def text(tokens, seed=0):
    return torch.randint(0, 40, (tokens,), generator=torch.Generator().manual_seed(seed))


def remembering(model, rows, tokens, limit=8, **options):
    generator = Generator(model, rows, tokens, check_every=1, **options)
    generator.prefill.piece = PAGE
    generator.remember(limit)
    return generator


def pools(generator):
    memories = [cache.memory for cache in generator.batch.caches]
    return [memory.pool for memory in memories if hasattr(memory, "pool")]


def left(generator, row):
    """All that the layers remember of a row, and the token that follows."""
    found = [generator.batch.tokens[row]]
    for cache in generator.batch.caches:
        found += [window[row] for window in cache.windows.values()]
        if not hasattr(cache.memory, "pool"):
            found.append(cache.memory.matrix[row])
            continue
        pool = cache.memory.pool
        found += [x for g in range(pool.table.shape[1]) for x in pool.gather(row, g)[:3] if x is not None]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_leaves_bit_for_bit_what_reading_anew_does(kind):
    model, first, found = KINDS[kind](), text(192), []
    second = torch.cat([first[:150], text(30, 1)])
    for limit in (0, 8):
        generator = remembering(model, 2, 256, limit)
        generator.add(first, 1)
        generator.run()
        number = generator.add(second, 20, temperature=0)
        generator.admit()
        found.append(left(generator, 0))
        assert generator.requests[number].found == (128 if limit else 0)
        assert generator.run()[number] == alone(model, second, 20)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("kind", "kv_dtype"), [*((kind, None) for kind in KINDS), ("states", "fp8")])
def test_sequences_with_one_beginning_have_its_pages_once(kind, kv_dtype):
    model, common, own = KINDS[kind](), text(3 * PAGE), (10, 70, 30, 5)
    generator = remembering(model, len(own), 5 * PAGE, kv_dtype=kv_dtype)
    prompts = [torch.cat([common, text(n, n)]) for n in own]
    ids = [generator.add(prompt, 20, temperature=0) for prompt in prompts]
    while generator.waiting:
        generator.step()
    behind = sum(-(-(n + 20) // PAGE) for n in own)
    for pool in pools(generator):
        G = pool.table.shape[1]
        assert pool.used() == G * (3 + behind)
        assert int(pool.live().sum()) == G * (3 * len(own) + behind)
    generator.run()
    assert [generator.requests[number].found for number in ids] == [0, *[3 * PAGE] * 3]
    if kv_dtype is None:
        assert [generator.requests[n].tokens for n in ids] == [alone(model, prompt, 20) for prompt in prompts]
    for pool in pools(generator):
        assert pool.used() == pool.table.shape[1] * 4  # of what is kept: one sequence had another whole page
    generator.remember(0)
    assert not any(pool.used() for pool in pools(generator))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_read_the_pages_of_a_kept_beginning(kind):
    model, common, found = KINDS[kind]().cuda(), text(150), []
    for limit in (0, 8):
        generator = remembering(model, 3, 256, limit)
        ids = [generator.add(torch.cat([common, text(n, n)]), 40, temperature=0) for n in (5, 30, 60)]
        generator.run()
        found.append([generator.requests[number].tokens for number in ids])
    assert found[0] == found[1]
    assert [generator.requests[number].found for number in ids] == [0, 128, 128]


def test_what_is_kept_makes_way_for_a_sequence_that_needs_its_pages():
    model = KINDS["pages"]()
    generator, prompts, found = remembering(model, 1, 5 * PAGE), [text(4 * PAGE, seed) for seed in (1, 2)], []
    sizes = [len(pool.refs) for pool in pools(generator)]
    for prompt in (prompts[0], prompts[1], prompts[1], prompts[0]):
        number = generator.add(torch.cat([prompt, text(3)]), 20, temperature=0)
        assert generator.run()[number] == alone(model, torch.cat([prompt, text(3)]), 20)
        found.append(generator.requests[number].found)
    assert found == [0, 0, 4 * PAGE, 0]
    assert [len(pool.refs) for pool in pools(generator)] == sizes


def check(generator, seen):
    """Each page is counted by those that have it, free if nobody has, and shared only where no token can come."""
    kept = generator.prefill.prefixes.kept
    for layer, pool in enumerate(pools(generator)):
        held = [one.paged[layer].pages.flatten() for one in kept]
        users = torch.cat([pool.pages[pool.pages >= 0], *held]).long()
        assert torch.equal(users.bincount(minlength=len(pool.refs)), pool.refs.long())
        assert sorted(pool.free) == (pool.refs == 0).nonzero()[:, 0].tolist()
        assert torch.equal(pool.table, pool.pages)
        for row, n in enumerate(pool.lengths):
            open_pages = pool.pages[row, :, n // PAGE :]
            assert bool((pool.refs[open_pages[open_pages >= 0].long()] == 1).all())
    contents = {
        one: [x[paged.pages.long()] for paged in one.paged for x in paged.pool.of_pages().values()] for one in kept
    }
    for one in contents.keys() & seen.keys():
        assert all(map(torch.equal, contents[one], seen[one]))
    return contents


@torch.no_grad()
@pytest.mark.parametrize(("kind", "kv_dtype"), [("pages", None), ("states", None), ("pages", "fp8")])
def test_pages_are_counted_and_shared_ones_stay_while_sequences_come_and_go(kind, kv_dtype):
    """They are added, cancelled (also while they are read), preempted and gone on with; what is kept is dropped."""
    model, draws, common = KINDS[kind](), random.Random(5), [text(200, seed) for seed in (8, 9)]
    generator, wanted, seen = remembering(model, 3, 5 * PAGE, kv_dtype=kv_dtype), {}, {}
    sizes = [len(pool.refs) for pool in pools(generator)]

    def add(prompt, new):
        wanted[generator.add(prompt, new, temperature=0)] = prompt, new

    def any_of(requests):
        return draws.choice([one for one in requests if one is not None and not one.done] or [None])

    for _ in range(32):
        what = draws.choices(("add", "step", "cancel", "preempt", "drop"), (8, 18, 2, 3, 2))[0]
        if what == "add":
            own = text(draws.randint(1, 60), draws.randrange(10**6))
            add(torch.cat([draws.choice(common)[: draws.randint(50, 200)], own]), draws.randint(1, 30))
        elif what == "step":
            for _ in range(draws.randint(1, 4)):
                generator.step()
        elif what == "cancel" and (one := any_of(generator.waiting)):
            generator.cancel(one.id)
        elif what == "preempt" and (one := any_of(generator.rows)):
            generator.cancel(one.id)
            add(torch.tensor(one.prompt + one.tokens), one.max_new_tokens - len(one.tokens))
        elif what == "drop":
            generator.prefill.prefixes.spare()
        seen = check(generator, seen)
    generator.run()
    check(generator, seen)
    assert sum(generator.requests[number].found > 0 for number in wanted) > 5
    generator.remember(0)
    assert [len(pool.refs) for pool in pools(generator)] == sizes
    assert not any(pool.used() for pool in pools(generator))
    if kv_dtype is None:
        anew = Generator(model, 8, 5 * PAGE)
        others = [anew.add(prompt, new, temperature=0) for prompt, new in wanted.values()]
        anew.run()
        for number, other in zip(wanted, others, strict=True):
            tokens = generator.requests[number].tokens
            assert anew.requests[other].tokens[: len(tokens)] == tokens
