"""The decoder behind Hugging Face's interface: what is saved is what is loaded, and `generate` is the decoder's own."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch

from attnzoo.forms import memory
from attnzoo.models.config import ModelConfig
from attnzoo.registry import list_variants

transformers = pytest.importorskip("transformers")

from attnzoo.models.hf import AttnzooConfig, AttnzooForCausalLM, ModelCache  # noqa: E402
from attnzoo.models.hf.config import THEIRS  # noqa: E402
from attnzoo.models.hf.generate import _engines as generators  # noqa: E402

HYBRID = ["mamba2", "fox"]
SOME = ["fox", "path_fox", "complex_linear", "retnet", "gated_deltanet", HYBRID]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def build(attention="fox", seed=0, **options):
    torch.manual_seed(seed)
    config = AttnzooConfig(attention, **{**SIZES, "pad_token_id": 0, "eos_token_id": None, **options})
    return AttnzooForCausalLM(config).eval()


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def ids(model):
    return "-".join(model) if isinstance(model, list) else model


@pytest.fixture
def tokens():
    return torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))


# configuration


def test_configuration_holds_every_field_of_the_decoder():
    native = ModelConfig(HYBRID, {"window": 8}, 48, 4, 3, 80, 77, True, 1e-5, 0.01)
    theirs = AttnzooConfig.of(native)
    assert theirs.native() == native
    again = AttnzooConfig.from_dict(json.loads(theirs.to_json_string()))
    assert again.native() == native
    assert (again.num_hidden_layers, again.num_attention_heads, again.tie_word_embeddings) == (4, 3, True)


@pytest.mark.parametrize(("ours", "theirs"), sorted(THEIRS.items()))
def test_one_name_for_one_thing(ours, theirs):
    with pytest.raises(ValueError, match=f"{ours}: .*{theirs}"):
        AttnzooConfig(**{ours: 2})


def test_sizes_that_the_decoder_refuses_are_refused():
    with pytest.raises(ValueError, match="does not fill num_layers=3"):
        AttnzooConfig(HYBRID, num_hidden_layers=3)
    with pytest.raises(ValueError, match="did you mean 'fox'"):
        build("foxx")


# saving and loading


@pytest.mark.parametrize("attention", [*list_variants(), HYBRID], ids=ids)
def test_what_is_saved_is_what_is_loaded(attention, tmp_path, tokens):
    model = build(attention)
    model.save_pretrained(tmp_path)
    torch.manual_seed(5)
    loaded = load(tmp_path)
    for (name, ours), (_, theirs) in zip(tensors(model), tensors(loaded), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.dtype == theirs.dtype, name
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


def tensors(model):
    return [*model.named_parameters(), *model.named_buffers()]


def test_weights_in_several_files(tmp_path, tokens):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(model(tokens).logits, load(tmp_path).eval()(tokens).logits)


@pytest.mark.parametrize("attention", ["fox", "alibi", "complex_linear", "retnet", "mamba2", "path_fox"])
def test_gates_stay_in_float32_whatever_the_weights_are_loaded_in(attention, tmp_path):
    model = build(attention)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=torch.bfloat16)
    kept = dict(tensors(model.bfloat16()))
    fine = 0
    for name, tensor in tensors(loaded):
        assert tensor.dtype == kept[name].dtype, name
        if tensor.dtype != torch.bfloat16:
            fine += 1
            assert torch.equal(tensor, dict(tensors(build(attention)))[name]), name  # never rounded
    assert fine
    assert loaded.model.head.weight.dtype == torch.bfloat16


def test_tied_weights_are_one_matrix_after_loading(tmp_path):
    model = build(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.model.head.weight is loaded.model.embedding.weight
    assert torch.equal(loaded.model.head.weight, model.model.embedding.weight)


def test_device_map(tmp_path, tokens):
    model = build(HYBRID)
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path, device_map="cpu").eval()(tokens).logits, model(tokens).logits)


def test_blocks_on_the_disk_give_the_same(tmp_path, tokens):
    model = build(HYBRID)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embedding": "cpu", "model.blocks.0": "disk", "model.blocks.1": "cpu", "model.norm": "cpu"}
    loaded = load(tmp_path / "model", device_map={**places, "model.head": "disk"}, offload_folder=tmp_path / "disk")
    assert loaded.model.blocks[0].mlp.up.weight.is_meta
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(tokens, **greedy), model.generate(tokens, **greedy))


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_can_grow(tied, tmp_path, tokens):
    model = build(tie_word_embeddings=tied)
    before = model(tokens).logits
    model.resize_token_embeddings(70)
    torch.testing.assert_close(model(tokens).logits[..., :64], before)
    assert (model.model.head.weight is model.model.embedding.weight) == tied
    assert model.model.config.vocab_size == 70
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(tokens + 5).logits, model(tokens + 5).logits)


def test_what_a_checkpoint_lacks_starts_as_the_decoder_starts_it(tmp_path):
    build("nope").save_pretrained(tmp_path)
    loaded = load(tmp_path, attention="fox")
    fresh = build("fox").model.blocks[0].attention.gate
    gate = loaded.model.blocks[0].attention.gate
    assert torch.equal(gate.forget_proj.bias, fresh.forget_proj.bias)
    spread = [projection.weight.std().item() for projection in (gate.forget_proj, fresh.forget_proj)]
    assert spread[0] == pytest.approx(spread[1], rel=0.5)
    assert torch.equal(loaded.model.embedding.weight, build("nope").model.embedding.weight)


def test_auto_classes_know_the_model_when_transformers_came_first(tmp_path):
    """The other order is that of a tutorial, whose code runs in a process of its own too."""
    build().save_pretrained(tmp_path)
    code = "import transformers, attnzoo; from transformers import AutoModelForCausalLM as A; "
    code += f"print(type(A.from_pretrained({str(tmp_path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "AttnzooForCausalLM", done.stderr


# generating


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


def test_a_cache_goes_on_where_it_stopped(tokens):
    model = build(HYBRID)
    whole = model(tokens).logits
    first = model(tokens[:, :5], use_cache=True)
    second = model(tokens[:, 5:], past_key_values=first.past_key_values, logits_to_keep=1)
    assert first.past_key_values.get_seq_length() == 9
    torch.testing.assert_close(second.logits, whole[:, -1:], rtol=1e-4, atol=1e-5)


def test_rejected_tokens_are_taken_back():
    model = build("fox")
    rows = torch.randint(1, 64, (2, 9))
    cache = ModelCache(model.model.new_cache())
    model(rows, past_key_values=cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    again = model(rows[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(again, model(rows).logits[:, 6:], rtol=1e-4, atol=1e-5)


def test_a_cache_that_cannot_give_tokens_back_says_so_and_stays_as_it_was(tokens):
    model = build(["fox", "mamba2"])
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="expected all 9"):
        cache.crop(4)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]


def test_assisted_generation_is_greedy_generation(tokens):
    model, helper = build("fox"), build("fox", seed=1)
    row = tokens[:1]
    greedy = model.generate(row, max_new_tokens=8, do_sample=False)
    assisted = {"max_new_tokens": 8, "do_sample": False, "assistant_model": helper}
    assert torch.equal(model.generate(row, **assisted), greedy)
    assert torch.equal(model.generate(row, **assisted, engine=True), greedy)
    lookup = {"max_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 3, "engine": True}
    assert torch.equal(model.generate(row, **lookup), greedy)
    with pytest.raises(ValueError, match="engine: expected None .*draft: expected None .no token is taken back"):
        build("path").generate(row, **lookup)


def test_a_budget_holds_in_the_loop_and_on_the_engine(tokens):
    model = build("rope", attention_options={"forgetting": {"window": 2, "width": 4}})
    given = {"max_new_tokens": 6, "do_sample": False}
    expected = model.model.generate(tokens, 6, temperature=0, budget=3)
    for engine in (False, True):
        assert torch.equal(model.generate(tokens, **given, budget=3, engine=engine), expected)
    assert not torch.equal(model.generate(tokens, **given), expected)
    with pytest.raises(ValueError, match="budget: expected None .no layer forgets., got 3"):
        build("rope").generate(tokens, **given, budget=3)
    cache = ModelCache(model.model.new_cache())
    with pytest.raises(ValueError, match="budget: expected None beside past_key_values"):
        model.generate(tokens, **given, budget=3, past_key_values=cache)


ENGINE = ["fox", "path_fox", HYBRID]


@pytest.mark.parametrize("attention", ENGINE, ids=ids)
def test_the_engine_gives_the_same_greedy_tokens(attention, tokens, caplog):
    model = build(attention).train()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    padded[1, 3:6] = 0
    given = {"input_ids": padded, "attention_mask": (padded != 0).long(), "max_new_tokens": 20, "do_sample": False}
    with caplog.at_level("INFO", logger="attnzoo"):
        expected = model.generate(**given)
        found = model.generate(**given, engine=True)
    assert torch.equal(found, expected)
    assert model.training
    assert [record.message for record in caplog.records if record.message.startswith("generate")] == [
        "generate runs the loop of transformers: on cpu (engine=True runs it)",
        "generate ran on the engine",
    ]
    stop = {"eos_token_id": [int(expected[0, 15]), int(expected[1, 20])], "pad_token_id": 0}
    assert torch.equal(model.generate(**given, **stop, engine=True), model.generate(**given, **stop))
    short = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(tokens[:1], short, engine=True), model.generate(tokens[:1], short))


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


def test_the_engine_samples_from_the_models_distribution(tokens):
    model = build()
    for settings in ({"top_k": 5}, {"top_p": 0.6, "top_k": 0}, {"temperature": 0.5, "top_k": 0}):
        torch.manual_seed(3)
        given = {"max_new_tokens": 8, "do_sample": True, "engine": True, **settings}
        drawn = model.generate(tokens.repeat(4, 1), **given)
        assert len(torch.unique(drawn[:, 9:], dim=0)) > 4
        p = (model(drawn[:, :-1]).logits[:, 8:] / settings.get("temperature", 1.0)).softmax(-1)
        mine = p.gather(-1, drawn[:, 9:, None])
        if settings.get("top_k"):
            assert ((p > mine).sum(-1) < 5).all()
        if "top_p" in settings:
            assert (p.masked_fill(p <= mine, 0).sum(-1) < 0.6).all()
    torch.manual_seed(3)
    assert torch.equal(model.generate(tokens.repeat(4, 1), **given), drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams: expected 1, got 2"),
        ({"repetition_penalty": 1.5}, "repetition_penalty: expected 1.0, got 1.5"),
        ({"do_sample": True, "top_k": 5, "top_p": 0.5}, "top_k, top_p: expected one of the two"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences: expected 1, got 2"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate: expected False, got True"),
        ({"use_cache": False}, "use_cache: expected True, got False"),
        ({"max_new_tokens": None, "max_length": 30}, "max_new_tokens: expected a number, got None"),
        ({"stopping_criteria": [lambda *_, **__: False]}, "stopping_criteria: expected none"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]] * 2)}, "attention_mask: expected .* padding on the left"),
        ({"position_ids": torch.arange(9)[None]}, "position_ids: expected none"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_engine_cannot_do_is_the_loops(options, message, tokens, caplog):
    model = build()
    with pytest.raises(ValueError, match=f"engine: expected None or False here .*{message}"):
        model.generate(tokens, **{"max_new_tokens": 4, **options}, engine=True)


def test_what_would_fill_the_memory_is_refused_with_the_number(tokens, monkeypatch):
    model, prompt = build(), tokens.repeat(1, 28)
    monkeypatch.setattr(memory, "available", lambda device: 1000)
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
    with pytest.raises(TypeError, match="past_key_values: expected .*ModelCache, got DynamicCache"):
        build()(tokens, past_key_values=transformers.DynamicCache())


# training


def test_loss_is_that_of_the_decoder_with_shifted_targets(tokens):
    model = build()
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    torch.testing.assert_close(model(tokens, labels=tokens).loss, model.model(tokens, targets).loss)


@pytest.mark.parametrize("attention", ["fox", "gated_deltanet"])
@pytest.mark.parametrize("how", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_recomputing_blocks_changes_no_gradient(attention, how, tokens):
    def gradients(recompute):
        model = build(attention).train()
        if recompute:
            model.gradient_checkpointing_enable(how)
        model(tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for kept, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(kept, recomputed)


def test_packed_sequences_know_nothing_of_each_other(tokens):
    model = build()
    row = tokens.reshape(1, -1)
    packed = model(row, cu_seq_lens_q=torch.tensor([0, 9, 18], dtype=torch.int32)).logits
    torch.testing.assert_close(packed.reshape(2, 9, -1), model(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("borders", [False, True])
@pytest.mark.parametrize("attention", ["rope", HYBRID], ids=ids)
def test_flattened_rows_are_separate_sequences(attention, borders):
    model = build(attention)
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7]}]
    packed = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=borders)(rows)
    alone = [model(torch.tensor([row["input_ids"]])).logits for row in rows]
    torch.testing.assert_close(model(**packed).logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_positions_that_cannot_be_are_refused(tokens):
    model = build("rope")
    rising = torch.arange(9).expand(2, 9)
    assert torch.equal(model(tokens, position_ids=rising + 3).logits, model(tokens).logits)
    for wrong in (2 * rising, rising.flip(1), torch.cat([rising[:, :4], rising[:, :5]], 1)):
        with pytest.raises(ValueError, match="position_ids: expected positions that rise by one"):
            model(tokens, position_ids=wrong)
    with pytest.raises(ValueError, match=r"from 0 each, got \[\[0, 1, 1, 2\]\]"):
        model(tokens[:1, :4], position_ids=torch.tensor([[0, 1, 1, 2]]))


def test_states_of_all_blocks_are_given(tokens):
    model = build()
    out = model(tokens, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(model.model.head(out.hidden_states[-1]), out.logits)
    assert torch.equal(out.hidden_states[0], model.model.embedding(tokens))


def test_attention_matrices_are_refused_rather_than_left_out(tokens):
    with pytest.raises(ValueError, match="output_attentions"):
        build()(tokens, output_attentions=True)


def test_trainer_learns_and_goes_on_where_it_was_stopped(tmp_path):
    rows = [{"input_ids": list(range(1, 17)), "labels": list(range(1, 17))}] * 8

    def train(folder, steps, resume=None):
        model = build()
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
            save_steps=3, logging_steps=1, lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    straight, losses = train(tmp_path / "a", 6)
    assert losses[-1] < losses[0] - 1
    train(tmp_path / "b", 3)
    resumed, _ = train(tmp_path / "b", 6, str(tmp_path / "b" / "checkpoint-3"))
    for ours, theirs in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_lora_adapts_the_projections_alone(tokens):
    peft = pytest.importorskip("peft")
    model = build()
    before = model(tokens).logits
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    torch.testing.assert_close(adapted(tokens).logits, before)  # adapters start at 0
    adapted.train()(input_ids=tokens, labels=tokens).loss.backward()
    trained = {name.split(".")[-4] for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained == {"q_proj", "v_proj"}


def test_adapters_are_saved_loaded_and_merged(tokens, tmp_path):
    peft = pytest.importorskip("peft")
    names = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(build(HYBRID), names)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    logits = adapted(input_ids=tokens).logits
    assert (logits - build(HYBRID)(tokens).logits).abs().max() > 0.01
    greedy = adapted.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(HYBRID), tmp_path).eval()
    assert torch.equal(loaded(input_ids=tokens).logits, logits)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(merged.generate(tokens, max_new_tokens=4, do_sample=False), greedy)
