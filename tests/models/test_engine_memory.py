"""Generators that give up keys: for good, to the host, or as layers learned to; and memory that would not be enough."""

import math

import pytest
import torch
from generated import LENGTHS, alone, build, forgetful, that_forgets

from attnzoo.forms.caches import device_memory
from attnzoo.forms.caches.device_memory import GIB
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.pages.pool import PAGE
from attnzoo.models import Generator
from attnzoo.models.generation import batch
from attnzoo.models.generation.sampling import Sampling

pytestmark = pytest.mark.usefixtures("small_groups")


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_keys_that_are_given_up_change_no_greedy_token_and_their_pages_are_free(name):
    model, draws = forgetful(name), torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 40, (T,), generator=draws) for T in (150, 70)]
    generator = Generator(model, 1, 400, evict=math.exp(-10))
    ids = [generator.add(prompt, 66, temperature=0) for prompt in prompts]
    found = generator.run()
    for number, prompt in zip(ids, prompts, strict=True):
        assert found[number] == alone(model, prompt, 66)
        forgets, remembers = generator.requests[number].kept[0]
        assert remembers == len(prompt) + 65
        assert forgets <= min(3 * PAGE, remembers - PAGE)
        assert generator.requests[number].kept[1] is None
    pool = generator.batch.caches[0].memory.pool
    assert pool.used() == 0
    if name == "fox":
        whole = Generator(model, 1, 400)
        assert generator.bytes() < whole.bytes()


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_keys_on_the_host_come_back_for_tokens_that_need_them(name):
    """Without QK-norm; the query of one token is long, so that keys which had gone count again."""
    model, draws, kept = forgetful(name, qk_norm="none"), torch.Generator().manual_seed(2), []
    with torch.no_grad():
        model.embedding.weight[:, -1], model.attentions()[0].q_proj.weight[:, -1] = 0, 40
        model.embedding.weight[7], model.head.weight[7] = torch.eye(32)[-1], 0  # it is hardly drawn
    first, second = (torch.randint(8, 40, (T,), generator=draws) for T in (100, 150))
    cache = model.new_cache("offload")
    with torch.no_grad():
        for start, stop in ((0, 149), (149, 150)):
            known = int(model(second[None, start:stop], cache=cache).logits[0, -1].argmax())
    assert cache[0].state.pool.first.any()
    generator = Generator(model, 2, 400, evict="offload", check_every=4)
    away = generator.batch.caches[0].memory.evict.offload
    keep, away.keep = away.keep, lambda pool, gone: kept.append(len(gone)) or keep(pool, gone)
    ids = [generator.add(first, 66, temperature=0), generator.resume(cache, known, 9, Sampling(0.0))]
    found = generator.run()
    assert [found[number] for number in ids] == [alone(model, first, 66), alone(model, second, 10)[1:]]
    assert sum(kept) > 0
    assert away.returned == 0
    number = generator.resume(cache, 7, 9, Sampling(0.0))
    assert generator.run()[number] == alone(model, torch.cat([second, torch.tensor([7])]), 9)
    assert away.returned > 0
    assert not any(head for row in away.pages for head in row)


def test_a_step_that_fails_between_its_layers_is_not_gone_on_from(monkeypatch):
    model = build()
    generator = Generator(model, 1, 32, check_every=1)
    generator.add([1, 2, 3], 9)
    generator.step()
    memory = type(generator.batch.caches[1].memory)
    monkeypatch.setattr(memory, "whole_step", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        generator.step()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="step: expected a generator whose last step ended"):
        generator.step()


def test_eviction_that_no_step_can_promise_is_refused():
    with pytest.raises(ValueError, match="graph: expected None or False .*, got True"):
        Generator(forgetful(), 1, 8, graph=True, evict="offload")
    with pytest.raises(ValueError, match="evict: expected None or a layer with qk_norm"):
        Generator(build(), 1, 8, evict=0.1)


@torch.no_grad()
@pytest.mark.parametrize("begun", [False, True], ids=["", "begun"])
@pytest.mark.parametrize("kind", ["fox", "path_fox", "learned"])
def test_keys_are_given_up_by_the_weights_when_a_sequence_joins(kind, begun):
    """With longer queries no key may go that went before; in a cache that another loop began, neither."""
    model = that_forgets("fox", {"threshold": 1e-6}) if kind == "learned" else forgetful(kind)
    prompt, kept = torch.randint(0, 40, (150,), generator=torch.Generator().manual_seed(2)), []
    generator = Generator(model, 1, 400, evict=math.exp(-10))
    for stretch in (1, 40):
        model.attentions()[0].q_norm.weight *= stretch
        for each in (generator, Generator(model, 1, 400, evict=math.exp(-10))):
            if begun:
                cache = model.new_cache()
                model(prompt[None, :-1], cache=cache)
                number = each.resume(cache, int(prompt[-1]), 9, Sampling(0.0))
            else:
                number = each.add(prompt, 9, temperature=0)
            each.run()
            kept.append(each.requests[number].kept[0])
    assert kept[0] == kept[1]
    assert kept[2] == kept[3] != kept[0]


@torch.no_grad()
@pytest.mark.parametrize("evict", [None, math.exp(-10), "offload"], ids=["", "evicting", "offload"])
@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_sequences_that_go_on_from_one_cache_share_its_whole_pages(name, evict):
    """While they come and go, give up keys and check drafts; what they share is nobody's in the end."""
    options = {} if evict != "offload" else {"qk_norm": "none"}
    model, draws = forgetful(name, **options), torch.Generator().manual_seed(2)
    prompt, other = (torch.randint(0, 40, (T,), generator=draws) for T in (180, 70))
    cache = model.new_cache(evict)
    model(prompt[None], cache=cache)
    generator, expected = Generator(model, 3, 300, evict=evict), {}
    memory = generator.batch.caches[0].memory

    def resume(token, new):
        number = generator.resume(cache, token, new, Sampling(0.0))
        expected[number] = alone(model, torch.cat([prompt, torch.tensor([token])]), new)

    for token, new in ((1, 3), (2, 67), (3, 20)):  # over one border of pages, and more than a page
        resume(token, new)
    number = generator.add(other, 20, temperature=0)
    expected[number] = alone(model, other, 20)
    generator.admit()
    if name == "fox" or evict:  # PaTH's keys lie in no pages here else
        pages = memory.pool.pages[:, :, : 180 // PAGE]
        assert bool((pages == pages[:1]).all())
        shared = int((pages[0] >= 0).sum())
        assert shared > 0
        assert memory.pool.used() == int(memory.pool.live().sum()) - 2 * shared
    found = generator.run()
    resume(4, 20)  # nobody has these pages any more
    resume(5, 9)
    found |= generator.run(draft=lambda request: expected[request.id][len(request.tokens) :][:5])
    assert found == expected
    if name == "fox" or evict:
        assert memory.pool.used() == 0
        assert sorted(memory.pool.free) == list(range(len(memory.pool.refs)))


@torch.no_grad()
@pytest.mark.parametrize("away", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_a_cache_that_a_generator_goes_on_from_keeps_its_own_keys(name, away):
    """However little the generator keeps; so tokens of it can still be taken back, and its own eps holds."""
    model, draws = forgetful(name, **({"qk_norm": "none"} if away else {})), torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 40, (150,), generator=draws)
    cache = model.new_cache("offload" if away else 1e-30)
    known = int(model(prompt[None], cache=cache).logits[0, -1].argmax())
    pool = cache[0].state.pool
    live, used = pool.live().tolist(), pool.used()
    generator = Generator(model, 1, 400, evict="offload" if away else 0.5)
    generator.resume(cache, known, 9, Sampling(0.0))
    generator.run()
    assert min(generator.requests[0].kept[0]) < PAGE * max(live[0])
    assert (pool.live().tolist(), pool.used(), int(pool.first.sum())) == (live, used, 0)
    assert not away or not any(cache[0].state.evict.offload.pages[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_a_sequence_whose_pages_have_gone_on_without_it_ends_alone(name):
    model = forgetful(name)
    cache, generator, prompt = model.new_cache(1e-30), Generator(model, 2, 100, evict=1e-30), torch.arange(9)
    model(prompt[None], cache=cache)
    gone = generator.resume(cache, 7, 9, Sampling(0.0))
    for _ in range(2):  # the pages are known as they were before the last call
        model(prompt[None], cache=cache)
    number = generator.add(prompt, 9, temperature=0)
    with pytest.raises(ValueError, match="state: expected the last that this pool of keys has given"):
        generator.run()
    assert generator.requests[gone].done
    assert generator.run() == {number: alone(model, prompt, 9)}


@pytest.mark.parametrize("away", [False, True], ids=["", "offload"])
def test_keys_that_were_carried_to_the_last_token_go_on_in_pages(away):
    """Over the end of the page that is not whole, and from one on."""
    model, draws = build(attention="path", attention_options={"window": 70}), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 40, (T,), generator=draws) for T in (60, 130)]
    generator, ids = Generator(model, 2, 160, evict="offload" if away else 1e-30), []
    for prompt in prompts:
        cache = model.new_cache()
        with torch.no_grad():
            known = int(model(prompt[None], cache=cache).logits[0, -1].argmax())
        ids.append(generator.resume(cache, known, 9, Sampling(0.0)))
    found = generator.run()
    assert [found[n] for n in ids] == [alone(model, prompt, 10)[1:] for prompt in prompts]


def test_what_a_window_hides_is_given_up_and_changes_no_greedy_token(prompts):
    """Sequences of their own lengths, that wait for each other, over the borders of pages."""
    options = {"window": 9, "sinks": True, "num_kv_heads": 1}
    model = build(attention="path", attention_options=options, num_layers=1)
    generator = Generator(model, 2, 200, evict=1e-6)
    news = (60, 125, 9, 5)
    ids = [generator.add(prompt, new, temperature=0) for prompt, new in zip(prompts, news, strict=True)]
    found = generator.run()
    for number, prompt, new in zip(ids, prompts, news, strict=True):
        assert found[number] == alone(model, prompt, new)
    assert generator.requests[1].kept[0][0] <= LENGTHS[1] + 124 - PAGE
    assert generator.batch.caches[0].memory.pool.used() == 0


@pytest.mark.parametrize("evict", [None, 1e-4], ids=["whole", "evicting"])
def test_caches_and_what_a_step_computes_in_are_refused_before_they_fill_the_memory(evict, monkeypatch):
    model = forgetful("path_fox" if evict else "fox")
    generator = Generator(model, 2, 300, evict=evict)
    beside = max(cache.workspace() for cache in generator.batch.caches)
    need = generator.bytes() + beside
    assert beside > 0
    monkeypatch.setattr(device_memory, "available", lambda device: need)
    Generator(model, 2, 300, evict=evict)
    monkeypatch.setattr(device_memory, "available", lambda device: need - 1)
    numbers = rf"\(with {beside / GIB:.2f} GiB for a step\): expected room for {need / GIB:.2f} GiB on cpu, got"
    with pytest.raises(MemoryError, match=rf"caches of 2 sequences of 300 tokens {numbers}"):
        Generator(model, 2, 300, evict=evict)


@pytest.mark.parametrize("evict", [None, 1e-4, "offload"], ids=["whole", "evicting", "offloading"])
@pytest.mark.parametrize("name", ["fox", "path_fox", "rope", "mamba2"])
def test_more_sequences_than_any_memory_holds_are_counted_and_none_is_made(name, evict, monkeypatch):
    """Tables with a row for each took gigabytes and seconds before the caches were counted."""
    made = []
    idle = BatchRows.idle
    monkeypatch.setattr(
        BatchRows, "idle", staticmethod(lambda rows, *given: (made.append(rows), idle(rows, *given))[1])
    )
    if evict is not None and name not in ("fox", "path_fox"):
        evict = None
    with pytest.raises(MemoryError, match=r"caches of 1000000000 sequences of 64 tokens .* GiB on cpu, got"):
        Generator(forgetful(name) if evict else build(attention=name), 10**9, 64, evict=evict)
    assert max(made) <= 64


@pytest.mark.parametrize("name", ["fox", "path_fox", "rope", "mamba2"])
def test_the_bytes_of_many_sequences_are_those_that_are_made(name, monkeypatch):
    model, seen = build(attention=name), []
    monkeypatch.setattr(batch, "check_memory", lambda needed, device, what: seen.append(needed))
    generator = Generator(model, 150, 40)
    assert seen == [generator.bytes() + max(cache.workspace() for cache in generator.batch.caches)]


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_caches_larger_than_any_memory_are_counted_and_not_made(name):
    with pytest.raises(MemoryError, match=r"caches of 1000 sequences of 1000000000 tokens .* GiB on cpu, got"):
        Generator(build(attention=name), 1000, 10**9)


FORGETTING = {
    "fox": {"attention": ["mamba2", "fox"]},
    "path_fox": {"attention": "path_fox"},
    "rope-pairs": {"attention": "rope", "forgetting": {"network": "pair"}, "num_kv_heads": 1, "window": 40},
    "wall-decay": {"attention": "wall", "forgetting": {"network": "decay"}, "sinks": True},
}


@torch.no_grad()
def alone_within(model, prompt, new, limits):
    """A greedy continuation, and the keys that each head of the last layer holds in the end."""
    cache, tokens, step = model.new_cache(**limits), [], prompt[None]
    for _ in range(new):
        step = model(step, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(step))
    return tokens, cache[-1].state.settled().live[0].tolist()


@pytest.mark.parametrize(("name", "limits"), [
    ("fox", {}), ("wall-decay", {}), *((name, {"budget": 4}) for name in ("path_fox", "rope-pairs")),
    *((name, {"budget": "1 KiB"}) for name in FORGETTING), ("fox", {"budget": "1 KiB", "evict": 1e-30}),
    ("fox", {"budget": 6, "evict": 1e-30}),
], ids=str)  # fmt: skip
def test_layers_that_forget_go_on_as_each_sequence_does_alone(name, limits, prompts):
    model = that_forgets(**FORGETTING[name])
    generator = Generator(model, 2, 80, check_every=3, **limits)
    news = (5, 28)
    ids = [generator.add(prompt, new, temperature=0) for prompt, new in zip(prompts, news, strict=False)]
    found = generator.run()
    for number, prompt, new in zip(ids, prompts, news, strict=False):
        tokens, heads = alone_within(model, prompt, new, limits)
        assert found[number] == tokens, (name, number)
        assert generator.requests[number].kept[-1] == heads
    longest = generator.requests[ids[1]].kept[-1]
    assert max(longest) < len(prompts[1]) + 27  # something has gone
    if limits == {"budget": 4}:
        assert max(longest) == 4
        assert generator.batch.caches[-1].memory.cache.slots["k"].shape[2] == 5
    if limits == {"budget": "1 KiB"}:
        assert sum(longest) == 1024 // (2 * 16 * 4)


def test_slots_are_made_and_given_back_while_sequences_that_forget_come_and_go(monkeypatch):
    model = that_forgets("fox", {"threshold": 1e-6})  # everything is kept
    generator = Generator(model, 2, 400)
    slots = []
    for T, new in ((300, 3), (50, 30)):
        prompt = torch.arange(T) % 40
        number = generator.add(prompt, new, temperature=0)
        assert generator.run()[number] == alone(model, prompt, new)
        slots.append(generator.batch.caches[0].memory.cache.slots["k"].shape[2])
    assert slots == [320, 128]
    monkeypatch.setattr(device_memory, "available", lambda device: 1 << 10)
    generator.add(torch.arange(200) % 40, 3, temperature=0)
    with pytest.raises(MemoryError, match="slots for 256 keys of each head that forgets: expected room for 0.00 GiB"):
        generator.run()


def test_a_sequence_without_room_waits_while_others_go_on_and_is_refused_when_it_is_alone(monkeypatch):
    model = that_forgets("fox", {"threshold": 1e-6})  # everything is kept, so that slots are made
    small, large = torch.arange(20) % 40, torch.arange(200) % 40
    generator, plenty = Generator(model, 2, 400, check_every=1), device_memory.available
    first = generator.add(small, 20, temperature=0)
    generator.step()
    monkeypatch.setattr(device_memory, "available", lambda device: 1 << 10)
    second, asked = generator.add(large, 3, temperature=0), list[int]()
    begin = generator.batch.begin
    monkeypatch.setattr(generator.batch, "begin", lambda row, request: (asked.append(request.id), begin(row, request)))
    while not generator.requests[first].done:
        generator.step()
    assert generator.requests[first].tokens == alone(model, small, 20)
    assert asked == [second]  # not prefilled again in each step
    with pytest.raises(MemoryError, match="slots for 256 keys of each head that forgets: expected room"):
        generator.run()
    monkeypatch.setattr(device_memory, "available", plenty)
    assert generator.run()[second] == alone(model, large, 3)


def test_a_sequence_without_room_that_is_cancelled_lets_the_next_one_join(monkeypatch):
    model = that_forgets("fox", {"threshold": 1e-6})
    generator = Generator(model, 2, 400)
    generator.add([1, 2], 20)
    generator.step()
    monkeypatch.setattr(device_memory, "available", lambda device: 1 << 10)
    large, small = generator.add(torch.arange(200) % 40, 3), generator.add([3], 20)
    generator.step()
    generator.cancel(large)
    generator.step()
    assert generator.requests[small] in generator.rows


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("evict", [None, math.exp(-10)], ids=["", "evicting"])
@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_graphs_read_the_pages_that_sequences_share(name, evict):
    model = forgetful(name).cuda()
    prompt = torch.randint(0, 40, (150,), generator=torch.Generator().manual_seed(2)).cuda()
    cache, generator = model.new_cache(evict), Generator(model, 3, 300, evict=evict)
    model(prompt[None], cache=cache)
    pool = generator.batch.caches[0].memory.pool
    numbers = [generator.resume(cache, token, 60, Sampling(0.0)) for token in (1, 2, 3)]
    generator.admit()
    assert (pool.used() < int(pool.live().sum())) == (name == "fox")
    found = generator.run()
    for token, number in zip((1, 2, 3), numbers, strict=True):
        assert found[number] == alone(model, torch.cat([prompt, prompt.new_tensor([token])]), 60)
    assert pool.used() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "compiled"), [("fox", False), ("fox", True), ("path_fox", False), ("path_fox", True)])
def test_a_graph_of_pages_that_are_given_up_is_captured_anew_when_they_move(name, compiled):
    model = forgetful(name).cuda()
    prompts = [torch.randint(0, 40, (T,), device="cuda") for T in (150, 250, 900)]
    generator = Generator(model, 2, 1280, evict=math.exp(-10), compile=compiled)
    ids = [generator.add(prompt, 200, temperature=0) for prompt in prompts]
    found = generator.run()
    for number, prompt in zip(ids, prompts, strict=True):
        assert found[number] == alone(model, prompt, 200)
        forgets, remembers = generator.requests[number].kept[0]
        assert forgets <= min(3 * PAGE, remembers - PAGE)


@pytest.mark.gpu
@pytest.mark.parametrize("limits", [{}, {"budget": 40}, {"budget": "16 KiB"}], ids=str)
@pytest.mark.parametrize("name", FORGETTING)
def test_slots_of_layers_that_forget_change_in_a_graph(name, limits):
    """In float64, where ties of retention are none."""
    model = that_forgets(**FORGETTING[name]).double().cuda()
    prompts = [torch.randint(0, 40, (T,), device="cuda") for T in (150, 30, 90)]
    generator = Generator(model, 2, 256, **limits)
    assert generator.batch.graphed
    ids = [generator.add(prompt, 80, temperature=0) for prompt in prompts]
    found = generator.run()
    for number, prompt in zip(ids, prompts, strict=True):
        tokens, heads = alone_within(model, prompt, 80, limits)
        assert found[number] == tokens, (name, number)
        assert generator.requests[number].kept[-1] == heads


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_keys_come_back_from_the_host_of_a_gpu(name, caplog):
    model = forgetful(name, qk_norm="none").cuda()
    with torch.no_grad():
        model.embedding.weight[:, -1], model.attentions()[0].q_proj.weight[:, -1] = 0, 40
        model.embedding.weight[7], model.head.weight[7] = torch.eye(32)[-1], 0
    prompt = torch.randint(8, 40, (150,), generator=torch.Generator().manual_seed(0)).cuda()
    cache = model.new_cache("offload")
    with torch.no_grad():
        for start, stop in ((0, 149), (149, 150)):
            model(prompt[None, start:stop], cache=cache)
    caplog.set_level("INFO", "attnzoo.models.generation")
    generator = Generator(model, 2, 1280, evict="offload")
    assert "a step is no CUDA graph with evict='offload'" in caplog.text
    number = generator.resume(cache, 7, 90, Sampling(0.0))
    found = generator.run()[number]
    assert generator.batch.caches[0].memory.evict.offload.returned > 0
    assert found == alone(model, torch.cat([prompt, prompt.new_tensor([7])]), 90)
