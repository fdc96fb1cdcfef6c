"""The generator: every sequence goes on as it would alone, whatever the others are, and comes and goes."""

import functools
import math

import pytest
import torch
from layers import assert_same, layer, rows
from torch._dynamo.utils import counters

from attnzoo import build_attention
from attnzoo.config import ModelConfig
from attnzoo.errors import UnavailableError
from attnzoo.forms import memory
from attnzoo.forms.fixed import CarriedMemory, Rows
from attnzoo.forms.memory import GIB
from attnzoo.forms.pool import PAGE
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.layer.fixed import FixedCache
from attnzoo.models import Generator, LanguageModel
from attnzoo.models.sampling import FILTERED, Samplers, Sampling, uniform
from attnzoo.registry import get, list_variants

LAYERS = {name: {"attention": name} for name in list_variants()} | {
    "hybrid": {"attention": ["gated_deltanet", "path_fox"]},
    "fox-pro-acp": {"attention": "fox", "attention_options": {"block": "pro", "acp": True}},
    "fox-window-sinks": {"attention": "fox", "attention_options": {"window": 5, "sinks": True, "num_kv_heads": 1}},
    "path-fox-window-sinks": {
        "attention": "path_fox",
        "attention_options": {"window": 5, "sinks": True, "num_kv_heads": 1, "block": "pro"},
    },
    "rope-grouped": {"attention": "rope", "attention_options": {"num_kv_heads": 1, "window": 9}},
    "wall-grouped": {"attention": "wall", "attention_options": {"num_kv_heads": 1}},
    "mamba2-groups": {"attention": "mamba2", "attention_options": {"num_qk_heads": 1, "skip": True, "conv_size": 4}},
    "retnet-rotary": {"attention": "retnet", "attention_options": {"rotary": 10000.0}},
    "hgrn2": {"attention": "gla", "attention_options": {"block": "hgrn2"}},
}
LENGTHS = (3, 11, 1, 6)


def build(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "initializer_range": 0.3}
    model = LanguageModel(ModelConfig(**{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def prompts():
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (T,), generator=draws) for T in LENGTHS]


def alone(model, prompt, new):
    return model.generate(prompt[None], new, temperature=0)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", LAYERS)
def test_greedy_sequences_of_any_length_go_on_as_each_does_alone(name, prompts):
    model = build(**LAYERS[name])
    generator = Generator(model, 3, 32, check_every=3)  # one of the four must wait until another leaves
    news = (9, 4, 7, 12)
    ids = [generator.add(prompt, new, temperature=0) for prompt, new in zip(prompts, news, strict=True)]
    found = generator.run()
    for number, prompt, new in zip(ids, prompts, news, strict=True):
        assert found[number] == alone(model, prompt, new), (name, number)
    assert any(len(set(tokens)) > 1 for tokens in found.values())


@pytest.mark.parametrize("name", list_variants())
@pytest.mark.parametrize("options", [{}, {"window": 6, "sinks": True}, {"block": "pro"}], ids=["", "window", "pro"])
@pytest.mark.parametrize("paged", [None, False], ids=["paged", "whole"])
def test_a_step_in_place_is_the_layers_own_step(name, options, paged):
    if "window" in options and get(name).side == "linear":
        options = {"kv_shift": True, "conv_size": 3, "rotary": 100.0}
    attn = layer(name, **options)
    lengths = (1, 9, 4)
    caches = [attn.new_cache() for _ in lengths]
    with torch.no_grad():
        like = attn.new_cache()
        attn(rows(1, 1), cache=like)
        batch = Rows.idle(len(lengths))
        fixed = FixedCache.of(attn, like, batch, 16, paged=paged)
        for row, (T, cache) in enumerate(zip(lengths, caches, strict=True)):
            attn(rows(1, T, seed=row), cache=cache)
            fixed.admit(row, cache, 16)
            batch.begin(row, T)
        for step in range(7):
            x = rows(len(lengths), 1, seed=10 + step)
            y = attn(x, cache=fixed)
            expected = torch.cat([attn(x[n : n + 1], cache=cache) for n, cache in enumerate(caches)])
            assert_same(y, expected)
            batch.length += 1


@pytest.mark.parametrize("options", [{}, {"window": 6, "sinks": True}], ids=["", "window"])
@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_the_kernel_of_path_steps_where_the_keys_stand(name, options):
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, **options)
    lengths, batch = (1, 9, 4, 0), Rows.idle(4)
    caches, like = [attn.new_cache() for _ in lengths[:3]], attn.new_cache()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        attn(torch.randn(1, 1, 32, generator=draw), cache=like)
        memory = attn.variant.form_set.kernels["triton"].fixed(like.state, batch, 16, "cpu")
        assert isinstance(memory, CarriedMemory)
        windows = {name: x.new_zeros(4, *x.shape[1:]) for name, x in like.windows.items()}
        fixed = FixedCache(memory, windows, batch)
        for row, (T, cache) in enumerate(zip(lengths, caches, strict=False)):
            attn(torch.randn(1, T, 32, generator=draw), cache=cache)
            fixed.admit(row, cache, 16)
            batch.begin(row, T)
        for _ in range(7):
            x = torch.randn(4, 1, 32, generator=draw)
            y = attn(x, cache=fixed)
            expected = torch.cat([attn(x[n : n + 1], cache=cache) for n, cache in enumerate(caches)])
            torch.testing.assert_close(y[:3], expected, rtol=0, atol=2e-6 * float(expected.abs().max()) + 1e-8)
            batch.length += batch.active


def test_a_sequence_that_joins_late_changes_nothing_for_itself_and_others(prompts):
    model = build(attention=["mamba2", "fox"])
    generator = Generator(model, 2, 32, check_every=1)
    first = generator.add(prompts[0], 10, temperature=0)
    found = {}
    for step in range(30):
        if step == 4:
            second = generator.add(prompts[1].tolist(), 5, temperature=0)
        for number, tokens in generator.step().items():
            found.setdefault(number, []).extend(tokens)
    assert found == {first: alone(model, prompts[0], 10), second: alone(model, prompts[1], 5)}
    assert not any(generator.rows)
    third = generator.add(prompts[3], 6, temperature=0)  # into a row that was used
    assert generator.run() == {third: alone(model, prompts[3], 6)}


def test_a_sequence_that_another_loop_began_goes_on(prompts):
    model = build(attention=["mamba2", "fox"])
    cache = model.new_cache()
    with torch.no_grad():
        model(prompts[1][None, :-1], cache=cache)
    generator = Generator(model, 2, 32)
    ids = [generator.resume(cache, int(prompts[1][-1]), 8, Sampling(0.0)) for _ in range(2)]
    found = generator.run()
    assert found[ids[0]] == found[ids[1]] == alone(model, prompts[1], 8)


@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
def test_blocks_that_are_compiled_give_the_same_tokens_and_layers_share_the_code(fuse, prompts, monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = build(num_layers=2, attention_options={"block": "pro"})
    generator = Generator(model, 1, 32, compile=True, fuse=fuse)
    number = generator.add(prompts[0], 5, temperature=0)
    assert generator.run()[number] == alone(model, prompts[0], 5)
    assert counters["stats"]["unique_graphs"] < 8  # four of a layer: around its attention, and around its pages


def maps_of(generator):
    """Names of the maps that are one product in the first block."""
    names = {one: name for name, one in generator.model.blocks[0].named_modules()}
    found = [[names.get(one) for one in product.maps] for product in generator._products]
    return [[str(name).rpartition("attention.")[2] for name in maps] for maps in found if None not in maps]


@pytest.mark.parametrize("name", ["fox-pro-acp", "path_fox", "gated_deltanet", "gla"])
def test_maps_of_one_input_are_one_product_and_the_same_to_rounding(name, prompts):
    model = build(**LAYERS[name]).double()
    whole, fused = Generator(model, 2, 32), Generator(model, 2, 32, fuse=True)
    expected = {
        "fox-pro-acp": ["k_shift.proj", "v_shift.proj", "gate.forget_proj", "output_gate"],
        "path_fox": ["gate.members.0.w_down", "gate.members.0.beta_proj", "gate.members.1.forget_proj"],
        "gated_deltanet": ["gate.members.0.dt_proj", "gate.members.1.beta_proj", "output_gate"],
        "gla": ["gate.down", "output_gate"],
    }
    first, second = maps_of(fused)
    assert first == ["q_proj", "k_proj", "v_proj", *expected[name]]
    assert second == ["mlp.gate", "mlp.up"]
    assert fused.weight_bytes() == sum(one.weight.nbytes for product in fused._products for one in product.maps) > 0
    assert whole.weight_bytes() == 0
    given = {id(generator): [] for generator in (whole, fused)}
    for generator in (whole, fused):
        keep = given[id(generator)]
        hook = model.head.register_forward_hook(lambda *call, keep=keep: keep.append(call[2]))
        ids = [generator.add(prompt, 6, temperature=0) for prompt in prompts[:2]]
        generator.run()
        assert [generator.requests[n].tokens for n in ids] == [alone(model, prompt, 6) for prompt in prompts[:2]]
        hook.remove()
    for a, b in zip(*given.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_weights_that_change_in_place_count_from_the_next_sequence_on(prompts):
    model = build(attention_options={"block": "pro"})
    generator = Generator(model, 2, 32, fuse=True)
    generator.add(prompts[0], 3, temperature=0)
    generator.run()
    with torch.no_grad():
        model.blocks[1].attention.output_gate.weight.neg_()
        model.blocks[0].mlp.up.weight.mul_(-3)
    number = generator.add(prompts[1], 9, temperature=0)
    assert generator.run()[number] == alone(model, prompts[1], 9)


def test_maps_with_hooks_and_those_of_other_classes_are_left_as_they_are(prompts):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build()
    attention, mlp = model.blocks[0].attention, model.blocks[0].mlp
    attention.k_proj.__class__ = Doubled
    mlp.up.register_forward_hook(lambda module, given, y: 2 * y)
    generator = Generator(model, 1, 32, fuse=True)
    assert maps_of(generator) == [["q_proj", "v_proj", "gate.forget_proj"]]
    number = generator.add(prompts[1], 9, temperature=0)
    assert generator.run()[number] == alone(model, prompts[1], 9)


def test_a_stop_token_ends_its_sequence_alone(prompts):
    model = build()
    whole = [alone(model, prompt, 12) for prompt in prompts]
    stop = whole[0][5]
    generator = Generator(model, 4, 32, check_every=4)
    ids = [generator.add(prompt, 12, temperature=0, stop=[stop]) for prompt in prompts]
    found = generator.run()
    for number, tokens in zip(ids, whole, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else 12
        assert found[number] == tokens[:end]
        assert generator.requests[number].done


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.5}], ids=str)
def test_samples_depend_on_their_seed_alone(settings, prompts):
    model = build(attention=["gla", "fox"])

    def draw(seeds, rows):
        generator = Generator(model, rows, 40, check_every=2)
        for seed, prompt in zip(seeds, prompts, strict=False):
            generator.add(prompt, 20, temperature=1.5, seed=seed, **settings)
        return list(generator.run().values()), generator

    together, generator = draw((3, 4, 5, 6), 4)
    assert draw((3, 4, 5, 6), 2)[0] == together
    generator.add(prompts[0], 20, temperature=1.5, seed=3, **settings)
    assert next(iter(generator.run().values())) == together[0]
    assert draw((7,), 4)[0][0] != together[0]
    greedy = Generator(model, 2, 40)
    number = greedy.add(prompts[0], 20, temperature=0)
    greedy.add(prompts[1], 20, temperature=1.5, seed=4, **settings)
    assert greedy.run()[number] == alone(model, prompts[0], 20)  # beside one that samples


def forgetful(name="fox", **options):
    """A model with one head per layer that forgets within some tokens, and one that never does."""
    layers = [{"name": n, "options": {"block": "pro", **(options if n == name else {})}} for n in (name, "mamba2")]
    model = build(attention=layers)
    with torch.no_grad():
        attention = model.attentions()[0]
        gate = attention.gate if name == "fox" else attention.gate.members[1]
        gate.forget_proj.weight.mul_(0.1)
        gate.forget_proj.bias.copy_(torch.tensor([-1.0, 12.0]))
    return model


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
    pool = generator.caches[0].memory.pool
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
    away = generator.caches[0].memory.evict.offload
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
    monkeypatch.setattr(type(generator.caches[1].memory), "step", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
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
    model = build(attention="path", attention_options={"window": 70})
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
    generator = Generator(model, 1, 32, evict=0.1)
    generator.resume(cache, 3, 4, Sampling(0.0))
    with pytest.raises(ValueError, match=r"cache: expected that of new_cache\(evict=\.\.\.\) \(keys that have been"):
        generator.run()


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
    assert generator.caches[0].memory.pool.used() == 0


def test_draws_follow_the_probabilities_among_the_tokens_that_are_left():
    rows, vocabulary = 40_000, 6
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    for top_k, top_p in ((None, 1.0), (3, 1.0), (None, 0.75), (2, 0.9)):
        samplers = Samplers.empty(rows, torch.device("cpu"))
        samplers.set(0, Sampling(0.7, top_k, top_p), vocabulary)
        for part in (samplers.temperature, samplers.top_k, samplers.top_p):
            part.fill_(part[0].item())
        samplers.seed.copy_(torch.arange(rows))
        found = torch.bincount(samplers.draw(logits.expand(rows, -1), FILTERED), minlength=vocabulary) / rows
        p = (logits / 0.7).softmax(0)
        kept = [n for n in range(vocabulary) if (top_k is None or n < top_k) and float(p[:n].sum()) < top_p]
        expected = torch.zeros(vocabulary).index_copy(0, torch.tensor(kept), p[kept] / p[kept].sum())
        assert not found[expected == 0].any()
        torch.testing.assert_close(found, expected, rtol=0, atol=5 * 0.5 / rows**0.5)


def test_random_numbers_are_even_and_not_related():
    seed, number = torch.meshgrid(torch.arange(64), torch.arange(256), indexing="ij")
    x = uniform(seed, number)
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    n = x.numel() ** 0.5
    assert abs(float(x.mean()) - 0.5) < 4 * 0.289 / n
    centred = x - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1)), centred.roll((1, -1), (0, 1))):
        assert abs(float((centred * other).mean())) < 4 / 12 / n


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: Generator(m.blocks[0], 1, 8), TypeError, "model: expected LanguageModel, got DecoderBlock"),
        (lambda m: Generator(m, 0, 8), ValueError, "max_sequences: expected at least 1, got 0"),
        (lambda m: Generator(m, 1, 8, check_every=0), ValueError, "check_every: expected at least 1, got 0"),
        (lambda m: Generator(m, 1, 8, graph=True), ValueError, "graph: expected None or False on cpu"),
        (lambda m: Generator(m, 1, 8).add([], 3), ValueError, "prompt: expected .* at least one token"),
        (lambda m: Generator(m, 1, 8).add([[1]], 3), ValueError, r"prompt: expected one sequence \[T\], got shape"),
        (lambda m: Generator(m, 1, 8).add([40], 3), ValueError, "prompt: expected tokens from 0 to 39, got 40"),
        (lambda m: Generator(m, 1, 8).add([1, 2], 7), ValueError, "max_new_tokens: expected at most 6 after 2 tokens"),
        (lambda m: Generator(m, 1, 8).add([1], 0), ValueError, "max_new_tokens: expected at least 1, got 0"),
        (lambda m: Generator(m, 1, 8).add([1], 2, temperature=-1.0), ValueError, "temperature: expected at least 0"),
        (lambda m: Generator(m, 1, 8).add([1], 2, top_k=0), ValueError, "top_k: expected at least 1, got 0"),
        (lambda m: Generator(m, 1, 8).add([1], 2, top_p=0.0), ValueError, "top_p: expected above 0 and at most 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make(build())


def test_a_cache_of_fixed_size_takes_one_token_of_each_sequence():
    model = build()
    generator = Generator(model, 2, 8)
    layer, cache = model.attentions()[0], generator.caches[0]
    with pytest.raises(ValueError, match=r"x: expected one token of each of 2 rows, got \(2, 2, 32\)"):
        layer(torch.randn(2, 2, 32), cache=cache)
    with pytest.raises(ValueError, match="attention_mask: expected None with a cache of fixed size"):
        layer(torch.randn(2, 1, 32), cache=cache, attention_mask=torch.ones(2, 1))


def test_steps_in_place_are_refused_where_nothing_that_was_asked_for_takes_them(monkeypatch):
    model = build(attention="path")
    like = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), cache=like)
    layer = model.attentions()[0]
    layer.impl = "triton"
    with pytest.raises(UnavailableError, match="impl='triton': no kernel takes a step of 'path' in place"):
        FixedCache.of(layer, like[0], Rows.idle(1), 8)
    monkeypatch.delattr(SoftmaxForms, "fixed")
    with pytest.raises(ValueError, match="variant: expected one whose FORMS offer a memory of fixed size, got 'path'"):
        Generator(build(attention="path"), 1, 8)


@pytest.mark.parametrize("evict", [None, 1e-4], ids=["whole", "evicting"])
def test_caches_and_what_a_step_computes_in_are_refused_before_they_fill_the_memory(evict, monkeypatch):
    model = forgetful("path_fox" if evict else "fox")
    generator = Generator(model, 2, 300, evict=evict)
    beside = max(cache.workspace for cache in generator.caches)
    need = generator.bytes() + beside
    assert beside > 0
    monkeypatch.setattr(memory, "available", lambda device: need)
    Generator(model, 2, 300, evict=evict)
    monkeypatch.setattr(memory, "available", lambda device: need - 1)
    numbers = rf"\(with {beside / GIB:.2f} GiB for a step\): expected room for {need / GIB:.2f} GiB on cpu, got"
    with pytest.raises(MemoryError, match=rf"caches of 2 sequences of 300 tokens {numbers}"):
        Generator(model, 2, 300, evict=evict)


FORGETTING = {
    "fox": {"attention": ["mamba2", "fox"]},
    "path_fox": {"attention": "path_fox"},
    "rope-pairs": {"attention": "rope", "forgetting": {"network": "pair"}, "num_kv_heads": 1, "window": 40},
    "wall-decay": {"attention": "wall", "forgetting": {"network": "decay"}, "sinks": True},
}


def that_forgets(attention, forgetting=None, **options):
    """A model whose softmax layers forget about half of what they may."""
    names = [attention] if isinstance(attention, str) else attention
    given = {**options, "block": "pro", "forgetting": {"window": 3, "width": 8, **(forgetting or {})}}
    layers = [{"name": n, "options": given if get(n).side == "softmax" else {}} for n in names]
    model = build(attention=layers)
    with torch.no_grad():
        for layer in model.attentions():
            if layer.forget is not None and layer.forget.options.network == "decay":
                layer.forget.fade_bias.fill_(-2.0)
            elif layer.forget is not None:
                layer.forget.bias.fill_(2.5)
                layer.forget.out.sub_(layer.forget.out.mean()).mul_(8)
    return model


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
    ("fox", {"budget": "1 KiB"}), ("fox", {"budget": 6, "evict": 1e-30}),
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
        assert generator.caches[-1].memory.cache.slots["k"].shape[2] == 5
    if limits == {"budget": "1 KiB"}:
        assert sum(longest) == 1024 // (2 * 16 * 4)


def test_slots_are_made_and_given_back_while_sequences_that_forget_come_and_go(prompts, monkeypatch):
    model = that_forgets("fox", {"threshold": 1e-6})  # everything is kept
    generator = Generator(model, 2, 400)
    slots = []
    for T, new in ((300, 3), (50, 30)):
        prompt = torch.arange(T) % 40
        number = generator.add(prompt, new, temperature=0)
        assert generator.run()[number] == alone(model, prompt, new)
        slots.append(generator.caches[0].memory.cache.slots["k"].shape[2])
    assert slots == [320, 128]
    monkeypatch.setattr(memory, "available", lambda device: 1 << 10)
    generator.add(torch.arange(200) % 40, 3, temperature=0)
    with pytest.raises(MemoryError, match="slots for 256 keys of each head that forgets: expected room for 0.00 GiB"):
        generator.run()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_in_a_graph_stays_right_while_sequences_grow_come_and_go(name):
    sizes = {"hidden_size": 128, "initializer_range": 0.1, "vocab_size": 500}
    model = build(**{**LAYERS[name], **sizes}).cuda()
    draws = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 500, (T,), generator=draws).cuda() for T in (3, 130, 1, 64)]
    generator = Generator(model, 3, 256, check_every=3)
    ids = [generator.add(prompt, 70, temperature=0) for prompt in prompts]
    found = generator.run()
    assert generator.graphed
    for number, prompt in zip(ids, prompts, strict=True):
        assert found[number] == alone(model, prompt, 70), (name, number)
    sampled = [generator.add(prompts[1], 40, temperature=1.0, top_k=50, top_p=0.9, seed=5) for _ in range(2)]
    found = generator.run()
    assert found[sampled[0]] == found[sampled[1]]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("name", ["fox-pro-acp", "path_fox", "gated_deltanet"])
def test_maps_that_are_one_product_give_the_same_tokens_in_a_graph(name, compiled, prompts):
    model = build(**{**LAYERS[name], "hidden_size": 128, "initializer_range": 0.1}).cuda()
    generator = Generator(model, 3, 64, compile=compiled, fuse=True)
    ids = [generator.add(prompt.cuda(), 40, temperature=0) for prompt in prompts]
    found = generator.run()
    for number, prompt in zip(ids, prompts, strict=True):
        assert found[number] == alone(model, prompt.cuda(), 40), (name, number)


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
    assert generator.graphed
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
    caplog.set_level("INFO", "attnzoo.models.engine")
    generator = Generator(model, 2, 1280, evict="offload")
    assert "a step is no CUDA graph with evict='offload'" in caplog.text
    number = generator.resume(cache, 7, 90, Sampling(0.0))
    found = generator.run()[number]
    assert generator.caches[0].memory.evict.offload.returned > 0
    assert found == alone(model, torch.cat([prompt, prompt.new_tensor([7])]), 90)
