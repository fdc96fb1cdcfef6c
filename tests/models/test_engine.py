"""The generator: every sequence goes on as it would alone, whatever the others are, and comes and goes."""

import functools

import pytest
import torch
from generated import LAYERS, alone, build
from torch._dynamo.utils import counters

from attnzoo.errors import NotFiniteError
from attnzoo.models import Generator
from attnzoo.models.generation.sampling import FILTERED, Samplers, Sampling, uniform


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


def test_a_prompt_that_changes_while_it_waits_is_what_it_was(prompts):
    model, prompt = build(attention=["mamba2", "fox"]), prompts[1].clone()
    generator = Generator(model, 1, 32)
    number = generator.add(prompt, 8, temperature=0)
    prompt.zero_()
    assert generator.run()[number] == alone(model, prompts[1], 8)


def test_a_sequence_that_another_loop_began_goes_on(prompts):
    model = build(attention=["mamba2", "fox"])
    cache = model.new_cache()
    with torch.no_grad():
        model(prompts[1][None, :-1], cache=cache)
    generator = Generator(model, 2, 32)
    ids = [generator.resume(cache, int(prompts[1][-1]), 8, Sampling(0.0)) for _ in range(2)]
    found = generator.run()
    assert found[ids[0]] == found[ids[1]] == alone(model, prompts[1], 8)


@torch.no_grad()
@pytest.mark.parametrize("evict", [None, 1e-30], ids=["", "pages"])
@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_it_goes_on_from_what_the_cache_was(name, evict):
    """Its tokens that were taken back are not there, and those that came later neither."""
    model = build(attention=name, attention_options={"qk_norm": "rms", **({} if name == "fox" else {"w_conv_size": 0})})
    prompt, kept = torch.randint(0, 40, (140,), generator=torch.Generator().manual_seed(3)), 140
    cache, generator = model.new_cache(evict), Generator(model, 2, 160, evict=evict)
    model(prompt[None], cache=cache)
    if name == "fox" or evict:
        kept = 131
        for one in cache:
            one.crop(kept)
    number = generator.resume(cache, 7, 9, Sampling(0.0))
    model(prompt[None, :5], cache=cache)
    assert generator.run()[number] == alone(model, torch.cat([prompt[:kept], torch.tensor([7])]), 9)
    number = generator.resume(cache, 7, 9, Sampling(0.0))
    assert generator.run()[number] == alone(model, torch.cat([prompt[:kept], prompt[:5], torch.tensor([7])]), 9)


@torch.no_grad()
def test_a_cache_that_no_sequence_can_go_on_from_is_refused(prompts):
    model, other = build(attention=["mamba2", "fox"]), build(attention=["mamba2", "fox"])
    generator, x = Generator(model, 2, 32), prompts[1][None]

    def cache(tokens=x, **options):
        found = model.new_cache()
        model(tokens, cache=found, **options)
        return found

    mask = torch.ones_like(x)
    mask[:, 0] = 0
    for wrong, message in (
        (model.new_cache(), r"cache: expected the same tokens in each layer, at least one, got \[0\] tokens"),
        (cache()[:1], "cache: expected what 2 layers remember, got 1"),
        ([*cache()[:1], *cache(x[:, 1:])[1:]], r"cache: expected the same tokens in each layer, .* got \[\d+, \d+\]"),
        (cache(x.expand(2, -1)), "cache: expected one sequence, got 2"),
        (cache(attention_mask=mask), "cache: expected a sequence without padding, got .* of .* tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            generator.resume(wrong, 3, 9, Sampling(0.0))
    with pytest.raises(ValueError, match="cache: expected what new_cache\\(\\) of this very model gave"):
        Generator(other, 1, 32).resume(cache(), 3, 9, Sampling(0.0))
    with pytest.raises(TypeError, match="cache: expected a list of LayerCache"):
        generator.resume(cache()[0], 3, 9, Sampling(0.0))
    with pytest.raises(TypeError, match="sampling: expected Sampling, got float"):
        generator.resume(cache(), 3, 9, 0.5)
    assert not generator.requests


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
    found = [[names.get(one) for one in product.maps] for product in generator.batch.products]
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
    assert (
        fused.weight_bytes() == sum(one.weight.nbytes for product in fused.batch.products for one in product.maps) > 0
    )
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


@pytest.mark.parametrize("seen", [lambda weight: weight, lambda weight: weight.data], ids=["weight", "data"])
def test_weights_that_change_in_place_count_from_the_next_sequence_on(seen, prompts):
    model = build(attention_options={"block": "pro"})
    generator = Generator(model, 2, 32, fuse=True)
    generator.add(prompts[0], 3, temperature=0)
    generator.run()
    with torch.no_grad():
        seen(model.blocks[1].attention.output_gate.weight).neg_()
        seen(model.blocks[0].mlp.up.weight).mul_(-3)
    number = generator.add(prompts[1], 9, temperature=0)
    assert generator.run()[number] == alone(model, prompts[1], 9)


def test_maps_with_hooks_and_those_of_other_classes_are_left_as_they_are(prompts):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build(num_layers=3)
    attention, mlp, own, normed = model.blocks[0].attention, model.blocks[0].mlp, *model.blocks[1:]
    attention.k_proj.__class__ = Doubled
    mlp.up.register_forward_hook(lambda module, given, y: 2 * y)
    plain = own.mlp.up.forward
    own.mlp.up.forward = lambda x: 2 * plain(x)
    torch.nn.utils.parametrizations.weight_norm(normed.mlp.up)
    generator = Generator(model, 1, 32, fuse=True)
    assert maps_of(generator) == [["q_proj", "v_proj", "gate.forget_proj"]]
    number = generator.add(prompts[1], 9, temperature=0)
    assert generator.run()[number] == alone(model, prompts[1], 9)


@pytest.mark.parametrize("kind", ["hook", "forward"])
def test_hooks_of_blocks_count(kind, prompts):
    model = build()
    block = model.blocks[0]
    if kind == "hook":
        block.register_forward_hook(lambda block, given, y: -y)
    else:
        plain = block.forward
        block.forward = lambda *given, **more: -plain(*given, **more)
    generator = Generator(model, 1, 32)
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


@pytest.mark.parametrize("new", [1, 6])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("attention", ["fox", "mamba2", ["gated_deltanet", "path_fox"]])
def test_a_sequence_whose_logits_are_not_finite_ends_with_an_error_and_the_others_go_on(attention, every, new, prompts):
    """On a CPU, too, where gates are checked: one of no numbers would fail the step of all."""
    model = build(attention=attention)
    wholes = [alone(model, prompt, 6) for prompt in prompts[:2]]
    odd = min({*range(model.config.vocab_size)}.difference(*wholes, *(prompt.tolist() for prompt in prompts[:2])))
    with torch.no_grad():
        model.embedding.weight[odd] = torch.nan
    generator = Generator(model, 2, 32, check_every=every)
    first = generator.add(prompts[0], 6, temperature=0)
    broken = generator.add([odd, *prompts[0].tolist()], new, temperature=0)
    second = generator.add(prompts[1], 6, temperature=0)  # in the row that the broken one leaves
    with pytest.raises(NotFiniteError, match=f"sequence {broken}: a weight is one of them") as refused:
        generator.run()
    assert refused.value.sequences == [broken]
    assert (generator.requests[broken].done, generator.requests[broken].tokens) == (True, [])
    assert generator.run() == {first: wholes[0], second: wholes[1]}


def test_tokens_are_looked_at_every_few_steps_alone(prompts):
    generator = Generator(build(), 2, 32, check_every=4)
    number = generator.add(prompts[0], 12, temperature=0)
    known = [len(generator.step().get(number, [])) for _ in range(11)]  # the first is drawn as it joins
    assert known == [0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 3]


@pytest.mark.parametrize("evict", [None, 1e-9], ids=["", "evicting"])
def test_sequences_that_are_cancelled_leave_the_others_as_they_are(evict, prompts):
    model = build(attention="fox", attention_options={"block": "pro"})
    generator = Generator(model, 2, 32, check_every=3, evict=evict)
    ids = [generator.add(prompts[n], 12, temperature=0) for n in range(4)]
    for _ in range(4):
        generator.step()
    for number in (ids[0], ids[3], ids[0]):  # one under way, one that waits, one that has ended
        generator.cancel(number)
    assert generator.requests[ids[0]].tokens == alone(model, prompts[0], 12)[:4]
    del generator.requests[ids[0]]  # as whoever serves for long does
    late = [generator.add(prompts[n], 5, temperature=0) for n in (1, 3)]
    generator.run()
    assert len({*ids, *late}) == 6
    assert generator.requests[ids[3]].tokens == []
    for number, prompt, new in ((ids[1], 1, 12), (ids[2], 2, 12), (late[0], 1, 5), (late[1], 3, 5)):
        assert generator.requests[number].tokens == alone(model, prompts[prompt], new), number


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.5}], ids=str)
def test_samples_depend_on_their_seed_alone(settings, prompts):
    model = build(attention=["gla", "fox"])

    def draw(seeds, rows):
        generator = Generator(model, rows, 40, check_every=2)
        for seed, prompt in zip(seeds, prompts, strict=False):
            generator.add(prompt, 12, temperature=1.5, seed=seed, **settings)
        return list(generator.run().values()), generator

    together, generator = draw((3, 4, 5, 6), 4)
    assert draw((3, 4, 5, 6), 2)[0] == together
    generator.add(prompts[0], 12, temperature=1.5, seed=3, **settings)
    assert next(iter(generator.run().values())) == together[0]
    assert draw((7,), 4)[0][0] != together[0]
    mixed = Generator(model, 3, 40)  # beside one that takes the likeliest, and one among few tokens
    greedy = mixed.add(prompts[0], 12, temperature=0)
    number = mixed.add(prompts[1], 12, temperature=1.5, seed=4, **settings)
    mixed.add(prompts[2], 12, temperature=1.5, seed=5, top_k=3, top_p=0.9)
    found = mixed.run()
    assert found[greedy] == alone(model, prompts[0], 12)
    assert found[number] == together[1]


def test_draws_follow_the_probabilities_among_the_tokens_that_are_left():
    rows, vocabulary = 40_000, 6
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    for top_k, top_p in ((None, 1.0), (3, 1.0), (None, 0.75), (2, 0.8)):
        samplers = Samplers.empty(rows, torch.device("cpu"))
        samplers.set(0, Sampling(0.7, top_k, top_p), vocabulary)
        for part in (samplers.temperature, samplers.top_k, samplers.top_p):
            part.fill_(part[0].item())
        samplers.seed.copy_(torch.arange(rows))
        found = torch.bincount(samplers.draw(logits.expand(rows, -1), FILTERED), minlength=vocabulary) / rows
        p = (logits / 0.7).softmax(0)
        kept = [n for n in range(top_k or vocabulary) if float(p[:n].sum()) < top_p * float(p[:top_k].sum())]
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
        (lambda m: Generator(m, 1, 8, fuse=1), ValueError, "fuse: expected True or False, got 1"),
        (lambda m: Generator(m, 1, 8, compile="x"), ValueError, "compile: expected True or False, got 'x'"),
        (lambda m: Generator(m, 1, 8, graph="no"), ValueError, "graph: expected True or False or None, got 'no'"),
        (lambda m: Generator(m, 1, 8, graph=True), ValueError, "graph: expected None or False on cpu"),
        (lambda m: Generator(m, 1, 8).add([], 3), ValueError, "prompt: expected .* at least one token"),
        (lambda m: Generator(m, 1, 8).add([[1]], 3), TypeError, r"prompt: expected whole numbers, got \[1\]"),
        (
            lambda m: Generator(m, 1, 8).add(torch.tensor([[1]]), 3),
            ValueError,
            r"prompt: expected one sequence \[T\], got shape \[1, 1\]",
        ),
        (lambda m: Generator(m, 1, 8).add([1.5, 2], 3), TypeError, "prompt: expected whole numbers, got 1.5"),
        (lambda m: Generator(m, 1, 8).add("abc", 3), TypeError, "prompt: expected whole numbers, got 'a'"),
        (lambda m: Generator(m, 1, 8).add(5, 3), TypeError, "prompt: expected a sequence of whole numbers, got 5"),
        (lambda m: Generator(m, 1, 8).add([1], 3, stop=["a"]), TypeError, "stop: expected whole numbers, got 'a'"),
        (lambda m: Generator(m, 1, 8).add([1], 3, stop=3), TypeError, "stop: expected a sequence of whole .*, got 3"),
        (lambda m: Generator(m, 1, 8).add([40], 3), ValueError, "prompt: expected tokens from 0 to 39, got 40"),
        (lambda m: Generator(m, 1, 8).add([1, 2], 7), ValueError, "max_new_tokens: expected at most 6 after 2 tokens"),
        (lambda m: Generator(m, 1, 8).cancel(3), ValueError, "number: expected one that add or resume gave, got 3"),
        (lambda m: Generator(m, 1, 8).add([1], 0), ValueError, "max_new_tokens: expected at least 1, got 0"),
        (lambda m: Generator(m, 1, 8).add([1], 2, temperature=-1.0), ValueError, "temperature: expected at least 0"),
        (lambda m: Generator(m, 1, 8).add([1], 2, top_k=0), ValueError, "top_k: expected at least 1, got 0"),
        (lambda m: Generator(m, 1, 8).add([1], 2, top_p=0.0), ValueError, "top_p: expected above 0 and at most 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make(build())


def test_tokens_that_end_a_sequence_may_come_in_a_tensor():
    model = build()
    generator = Generator(model, 1, 32)
    following = alone(model, torch.tensor([1, 2]), 9)
    number = generator.add([1, 2], 9, temperature=0, stop=torch.tensor(following[:1]))
    assert generator.run()[number] == following[:1]


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
    assert generator.batch.graphed
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
