"""The decoder behind Hugging Face's interface: `generate` is the decoder's own."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hf_models import HYBRID, SOME, build, ids, peft_of_this_release

from attnzoo.forms.caches import device_memory

transformers = pytest.importorskip("transformers")
pytest_plugins = ("hf_models",)

from attnzoo.models.hf import AttnzooForCausalLM, ModelCache  # noqa: E402
from attnzoo.models.hf.cache import NAME  # noqa: E402
from attnzoo.models.hf.config import CACHE_NAMES  # noqa: E402
from attnzoo.models.hf.generate import NeedsLoopError, request_of  # noqa: E402
from attnzoo.models.hf.generate import _engines as generators  # noqa: E402


@pytest.mark.parametrize("attention", SOME, ids=ids)
def test_generate_is_the_decoders_own(attention, tokens):
    model = build(attention)
    greedy = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(greedy, model.model.generate(tokens, 8, temperature=0))
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    left = model.generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=8, do_sample=False)
    assert torch.equal(left[:, 3:], greedy)
    assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=False), greedy)


def test_sampling_draws_from_the_models_distribution(tokens):
    model = build()
    torch.manual_seed(3)
    theirs = model.generate(tokens, max_new_tokens=6, do_sample=True, top_k=5, num_return_sequences=3)
    assert theirs.shape == (6, 15)
    logits = model(theirs[:, :-1]).logits[:, 8:]
    allowed = logits.topk(5).indices
    assert (allowed == theirs[:, 9:, None]).any(-1).all()
    assert len(torch.unique(theirs, dim=0)) > 2


def test_samples_are_the_decoders_own(tokens):
    model = build()
    torch.manual_seed(3)
    theirs = model.generate(tokens, max_new_tokens=12, do_sample=True, top_k=5, temperature=0.7)
    torch.manual_seed(3)
    assert torch.equal(theirs, model.model.generate(tokens, 12, temperature=0.7, top_k=5))


def test_continuing_embedded_tokens(tokens):
    model = build()
    embedded = model.get_input_embeddings()(tokens)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(inputs_embeds=embedded, **greedy), model.generate(tokens, **greedy)[:, 9:])


@pytest.mark.parametrize("attention", ["fox", "gated_deltanet"])
def test_beams_are_those_of_a_search_without_a_cache(attention, tokens):
    model = build(attention)
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 3, "do_sample": False}
    cached = model.generate(tokens, **options)
    assert torch.equal(cached, model.generate(tokens, **options, use_cache=False))
    scores = [model(row[None], labels=row[None]).loss for row in cached[:3]]
    assert scores == sorted(scores)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_goes_on_where_it_stopped(tokens, name):
    """By the name of any release, in a call and in a loop."""
    model = build(HYBRID)
    whole = model(tokens).logits
    first = model(tokens[:, :5], use_cache=True)
    assert first[NAME] is first.past_key_values
    second = model(tokens[:, 5:], **{name: first[NAME]}, logits_to_keep=1)
    assert first[NAME].get_seq_length() == 9
    torch.testing.assert_close(second.logits, whole[:, -1:], rtol=1e-4, atol=1e-5)
    begun, given = model(tokens[:, :5], use_cache=True)[NAME], {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(tokens, **given, **{name: begun}), model.generate(tokens, **given))
    assert begun.get_seq_length() == 12
    two = dict.fromkeys(CACHE_NAMES, begun)
    for call in (model.forward, model.generate):
        with pytest.raises(ValueError, match="cache: expected None beside past_key_values"):
            call(tokens, **two)


@pytest.mark.parametrize("number", [-3, torch.tensor(-3), torch.tensor(6)], ids=str)
def test_rejected_tokens_are_taken_back(number):
    model = build("fox")
    rows = torch.randint(1, 64, (2, 9))
    cache = ModelCache(model.model.new_cache())
    model(rows, past_key_values=cache)
    cache.crop(number)
    assert cache.get_seq_length() == 6
    again = model(rows[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(again, model(rows).logits[:, 6:], rtol=1e-4, atol=1e-5)


def test_a_cache_that_cannot_give_tokens_back_says_so_and_stays_as_it_was(tokens):
    model = build(["fox", "mamba2"])
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="expected all 9"):
        cache.crop(4)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]


@pytest.mark.parametrize("attention", ["fox", "mamba2"])
def test_a_cache_that_forgets_everything_is_a_new_one(attention, tokens):
    """What the weights of QK-norm promised, too: they may have changed since."""
    model = build(attention, attention_options={"qk_norm": "rms", "acp": True} if attention == "fox" else {})
    cache, new = (ModelCache(model.model.new_cache()) for _ in range(2))
    model(tokens, past_key_values=cache)
    assert any(vars(was) != vars(fresh) for was, fresh in zip(cache.memories, new.memories, strict=True))
    cache.reset()
    assert [vars(was) for was in cache.memories] == [vars(fresh) for fresh in new.memories]
    assert torch.equal(model(tokens[:1], past_key_values=cache).logits, model(tokens[:1]).logits)


def test_assisted_generation_is_greedy_generation(tokens):
    model, helper = build("fox"), build("fox", seed=1)
    row = tokens[:1]
    greedy = model.generate(row, max_new_tokens=8, do_sample=False)
    assisted = {"max_new_tokens": 8, "do_sample": False, "assistant_model": helper}
    assert torch.equal(model.generate(row, **assisted), greedy)
    assert torch.equal(model.generate(row, **assisted, engine=True), greedy)
    assisted["assistant_model"] = build("mamba2")
    assert torch.equal(model.generate(row, **assisted, engine=True), greedy)
    with pytest.raises(ValueError, match="assistant_model: expected layers that take rejected tokens back.*'mamba2'"):
        model.generate(row, **assisted)
    lookup = {"max_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 3, "engine": True}
    assert torch.equal(model.generate(row, **lookup), greedy)
    path = build("path")
    assert torch.equal(path.generate(row, **lookup), path.generate(row, max_new_tokens=8, do_sample=False))
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: expected layers that take rejected.*'path'"):
        path.generate(row, **{**lookup, "engine": None})


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_proposes_is_in_its_own_mode_afterwards(fails, tokens):
    model, helper = build(), build("mamba2", seed=1).train()
    frozen = helper.model.blocks[0].eval()
    seen = []

    def step(*_):
        seen.append(any(part.training for part in helper.model.modules()))
        if fails:
            raise ArithmeticError("a step that fails")

    helper.model.embedding.register_forward_hook(step)
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        model.generate(tokens[:1], max_new_tokens=4, do_sample=False, assistant_model=helper, engine=True)
    assert set(seen) == {False}
    assert all(part.training == (part not in set(frozen.modules())) for part in helper.modules())


@pytest.mark.parametrize(
    ("attention", "options"), [("fox_rope", {}), ("rope", {"gate": "selective", "angle_conv_size": 0})]
)
def test_proposals_are_refused_by_name_where_angles_come_from_the_input(attention, options, tokens):
    model, row = build(attention, attention_options=options), tokens[:1]
    given = {"max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ValueError, match="assistant_model: expected layers that take rejected tokens back"):
        model.generate(row, assistant_model=build(seed=1), **given)
    assert torch.equal(
        model.generate(row, prompt_lookup_num_tokens=3, engine=True, **given), model.generate(row, **given)
    )


def test_a_budget_holds_in_the_loop_and_on_the_engine(tokens):
    model = build("rope", attention_options={"forgetting": {"window": 2, "width": 4}})
    given = {"max_new_tokens": 6, "do_sample": False}
    expected = model.model.generate(tokens, 6, temperature=0, budget=3)
    for engine in (False, True):
        assert torch.equal(model.generate(tokens, **given, budget=3, engine=engine), expected)
    assert not torch.equal(model.generate(tokens, **given), expected)
    with pytest.raises(ValueError, match="budget: expected None .a budget is for layers with forget=...., got 3"):
        build("rope").generate(tokens, **given, budget=3)
    cache = ModelCache(model.model.new_cache())
    with pytest.raises(ValueError, match=f"budget: expected None beside {NAME}"):
        model.generate(tokens, **given, budget=3, past_key_values=cache)


def test_what_a_cache_gives_up_is_refused_where_none_is_kept(tokens):
    model, given = build("alibi", attention_options={"qk_norm": "rms"}), {"max_new_tokens": 4, "use_cache": False}
    for more in ({"evict": 0.1}, {"past_key_values": ModelCache(model.model.new_cache())}):
        with pytest.raises(ValueError, match=f"use_cache: expected True beside {NAME}, evict or budget, got F"):
            model.generate(tokens, **given, **more)


ENGINE = ["fox", "path_fox", HYBRID]


@pytest.mark.parametrize("attention", ENGINE, ids=ids)
def test_the_engine_gives_the_same_greedy_tokens(attention, tokens, caplog):
    model = build(attention).train()
    frozen = next(part for part in model.modules() if isinstance(part, torch.nn.Linear)).eval()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    padded[1, 3:6] = 0
    given = {"input_ids": padded, "attention_mask": (padded != 0).long(), "max_new_tokens": 20, "do_sample": False}
    with caplog.at_level("INFO", logger="attnzoo"):
        expected = model.generate(**given)
        found = model.generate(**given, engine=True)
    assert torch.equal(found, expected)
    assert all(part.training == (part is not frozen) for part in model.modules())
    assert [record.message for record in caplog.records if record.message.startswith("generate")] == [
        "generate runs the loop of transformers: on cpu (engine=True runs it)",
        "generate ran on the engine",
    ]
    stop = {"eos_token_id": [int(expected[0, 15]), int(expected[1, 20])], "pad_token_id": 0}
    assert torch.equal(model.generate(**given, **stop, engine=True), model.generate(**given, **stop))
    short = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(tokens[:1], short, engine=True), model.generate(tokens[:1], short))


def test_none_takes_the_place_of_the_configurations_value_on_the_engine(tokens):
    model, given = build(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = int(model.generate(tokens, **given)[0, 10])
    for end in ({}, {"eos_token_id": None}):
        loop, engine = (model.generate(tokens, engine=engine, **given, **end) for engine in (False, True))
        assert torch.equal(engine, loop)
    model.generation_config.top_k = 1
    drawn = {"max_new_tokens": 8, "do_sample": True, "top_k": None, "eos_token_id": None, "engine": True}
    assert len(torch.unique(model.generate(tokens[:1].repeat(20, 1), **drawn), dim=0)) > 1


def test_the_engine_is_kept_until_another_one_is_needed(tokens):
    model = build()
    for row in (tokens, tokens.flip(0)):
        first = generators.get(model)
        found = model.generate(row, max_new_tokens=4, do_sample=False, engine=True)
        assert first in (None, generators[model])
        assert torch.equal(found, model.generate(row, max_new_tokens=4, do_sample=False))
    model.load_state_dict({name: x.neg() for name, x in model.state_dict().items()})
    greedy = {"max_new_tokens": 300, "do_sample": False, "eos_token_id": list(range(64))}  # ends at once
    assert torch.equal(model.generate(tokens, **greedy, engine=True), model.generate(tokens, **greedy))
    assert generators[model][1].max_tokens == 512
    model.release_engine()
    assert model not in generators
    assert isinstance(copy.deepcopy(model), AttnzooForCausalLM)


def test_threads_that_share_a_model_get_what_each_gets_alone(tokens):
    model = build(HYBRID)
    prompts = [tokens[:, : 3 + n] for n in range(4)] * 2
    call = partial(model.generate, max_new_tokens=8, do_sample=False, engine=True)
    expected = [call(prompt) for prompt in prompts]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(call, prompts))
    finally:
        sys.setswitchinterval(before)
    assert all(map(torch.equal, found, expected))


def test_the_engine_takes_no_more_tokens_than_there_are_learned_positions(tokens):
    model, given = build("rope", learned_positions=20), {"max_new_tokens": 11, "do_sample": False}
    assert torch.equal(model.generate(tokens, **given, engine=True), model.generate(tokens, **given))
    with pytest.raises(ValueError, match=r"at most 20 \(learned_positions\), got 21"):
        model.generate(tokens, max_new_tokens=12, do_sample=False, engine=True)


@pytest.mark.parametrize(("device", "refused"), [("cpu", False), ("cuda", True)])
def test_a_hook_within_the_model_is_called_at_every_token(device, refused, tokens, monkeypatch):
    """A graph would call it once."""
    model = build()
    model.model.blocks[1].register_forward_hook(lambda *_: None)
    monkeypatch.setattr(AttnzooForCausalLM, "device", torch.device(device))
    asked = {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(NeedsLoopError, match="hooks: expected none") if refused else nullcontext():
        request_of(model, tokens, None, asked, {})
    (adapted := build()).enable_input_require_grads()  # as for adapters with gradient checkpointing
    request_of(adapted, tokens, None, asked, {})
    (own := build()).forward = torch.compile(model.forward)  # as transformers' documentation proposes: the same
    request_of(own, tokens, None, asked, {})
    own.forward = model.forward
    with pytest.raises(NeedsLoopError, match="hooks: expected none"):
        request_of(own, tokens, None, asked, {})


def test_the_engine_has_the_adapters_of_the_call(tokens):
    """What a GPU has recorded adds the adapters of then, whatever the model's settings are by now."""
    peft = peft_of_this_release()
    model, given = build("fox"), {"max_new_tokens": 6, "do_sample": False, "engine": True}
    alone = model.generate(tokens, **given)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=64))
    adapted, with_adapters = model.generate(tokens, **given), generators[model][1]
    assert not torch.equal(adapted, alone)
    assert torch.equal(model.generate(tokens, **given), adapted)
    assert generators[model][1] is with_adapters
    model.disable_adapters()
    assert torch.equal(model.generate(tokens, **given), alone)
    assert generators[model][1] is not with_adapters


def test_a_model_in_training_drops_nothing_on_the_engine(tokens):
    peft = peft_of_this_release()
    model, given = build("fox"), {"max_new_tokens": 12, "do_sample": False, "engine": True}
    drops = {"lora_dropout": 0.6, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model.add_adapter(peft.LoraConfig(lora_alpha=64, **drops))
    expected = model.eval().generate(tokens, **given)
    for _ in range(2):
        assert torch.equal(model.train().generate(tokens, **given), expected)
        assert model.training


def test_the_likeliest_token_alone_is_what_a_top_p_of_zero_leaves(tokens):
    model = build()
    given = {"max_new_tokens": 8, "do_sample": True, "top_p": 0.0}
    likeliest = model.generate(tokens, max_new_tokens=8, do_sample=False)
    for engine in (True, False):
        assert torch.equal(model.generate(tokens, engine=engine, **given), likeliest)


def test_the_engine_samples_from_the_models_distribution(tokens):
    model = build()
    for settings in ({"top_k": 5}, {"top_p": 0.6, "top_k": 5}, {"temperature": 0.5, "top_k": 0}):
        torch.manual_seed(3)
        given = {"max_new_tokens": 8, "do_sample": True, "engine": True, **settings}
        drawn = model.generate(tokens.repeat(4, 1), **given)
        assert len(torch.unique(drawn[:, 9:], dim=0)) > 4
        p = (model(drawn[:, :-1]).logits[:, 8:] / settings.get("temperature", 1.0)).softmax(-1)
        mine = p.gather(-1, drawn[:, 9:, None])
        if settings.get("top_k"):
            assert ((p > mine).sum(-1) < 5).all()
        if "top_p" in settings:
            assert (p.masked_fill(p <= mine, 0).sum(-1) < 0.6 * p.topk(5).values.sum(-1)).all()
    torch.manual_seed(3)
    assert torch.equal(model.generate(tokens.repeat(4, 1), **given), drawn)
    torch.manual_seed(3)
    several = model.generate(tokens[:1], num_return_sequences=8, **given)
    assert torch.equal(several[:, :9], tokens[:1].expand(8, -1))
    assert len(torch.unique(several, dim=0)) > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams: expected 1, got 2"),
        ({"repetition_penalty": 1.5}, "repetition_penalty: expected 1.0, got 1.5"),
        ({"do_sample": True, "temperature": 0.0}, "temperature: expected above 0 with do_sample, got 0.0"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate: expected False, got True"),
        ({"use_cache": False}, "use_cache: expected True, got False"),
        ({"max_new_tokens": None, "max_length": 30}, "max_new_tokens: expected a number, got None"),
        ({"stopping_criteria": [lambda *_, **__: False]}, "stopping_criteria: expected none"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]] * 2)}, "attention_mask: expected .* padding on the left"),
        ({"position_ids": torch.arange(9)[None]}, "position_ids: expected none"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_engine_cannot_do_is_the_loops(options, message, tokens):
    model = build()
    with pytest.raises(ValueError, match=f"engine: expected None or False here .*{message}"):
        model.generate(tokens, **{"max_new_tokens": 4, **options}, engine=True)


def test_prompts_with_the_padding_token_need_a_mask_on_the_engine(tokens):
    with pytest.raises(ValueError, match="attention_mask: expected one beside prompts with the padding token"):
        build().generate(tokens, max_new_tokens=2, pad_token_id=int(tokens[0, 0]), engine=True)


def test_what_would_fill_the_memory_is_refused_with_the_number(tokens, monkeypatch):
    model, prompt = build(), tokens.repeat(1, 28)
    monkeypatch.setattr(device_memory, "available", lambda device: 1000)
    given = {"max_new_tokens": 300, "do_sample": False}
    with pytest.raises(
        MemoryError, match=r"cache of 253 tokens.*: expected room for \d+\.\d\d GiB on cpu, got 0\.00 GiB"
    ):
        model.generate(prompt, **given)
    with pytest.raises(ValueError, match="here .caches of 2 sequences of 768 tokens .with .* for a step.: "):
        model.generate(prompt, **given, engine=True)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ENGINE, ids=ids)
def test_generate_runs_on_the_engine_of_a_gpu(attention, tokens, caplog):
    model = build(attention, hidden_size=64).cuda()
    with caplog.at_level("INFO", logger="attnzoo"):
        found = model.generate(tokens.cuda(), max_new_tokens=80, do_sample=False)
        model.generate(tokens.cuda(), max_new_tokens=8, do_sample=False)
    assert [record.message for record in caplog.records if record.message.startswith("generate")] == [
        "generate ran on the engine",
        "generate runs the loop of transformers: max_new_tokens: expected at least 64 to be worth it, got 8",
    ]
    assert torch.equal(found, model.generate(tokens.cuda(), max_new_tokens=80, do_sample=False, engine=False))


def test_another_kind_of_cache_is_refused_by_name(tokens):
    with pytest.raises(ValueError, match="cache_implementation: .*'static'"):
        build().generate(tokens, max_new_tokens=2, cache_implementation="static")


def test_a_foreign_cache_is_refused(tokens):
    for name in CACHE_NAMES:
        with pytest.raises(TypeError, match=f"{name}: expected .*ModelCache, got DynamicCache"):
            build()(tokens, **{name: transformers.DynamicCache()})
    model = build()
    with pytest.raises(TypeError, match="forward: expected a cache as past_key_values or cache, got one as 'memory'"):
        model(tokens, memory=ModelCache(model.model.new_cache()))


@pytest.mark.skipif(not hasattr(transformers.GenerationMixin, "generate_batch"), reason="this release has none")
def test_continuous_batching_of_transformers_is_refused():
    with pytest.raises(ValueError, match=r"continuous batching: expected attnzoo\.models\.Generator"):
        build("fox").generate_batch([[1, 2, 3], [4, 5]])
