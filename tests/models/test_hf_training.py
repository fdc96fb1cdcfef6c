"""The decoder behind Hugging Face's interface: what `forward` takes and gives, and what trains it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import HYBRID, build, ids, peft_of_this_release

transformers = pytest.importorskip("transformers")
pytest_plugins = ("hf_models",)

from attnzoo import param_groups  # noqa: E402
from attnzoo.models.hf.cache import NAME  # noqa: E402


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


def test_a_cache_beside_recomputed_blocks_is_refused(tokens):
    model = build("fox").train()
    model.gradient_checkpointing_enable()
    assert model(tokens).past_key_values is None
    with pytest.raises(ValueError, match=f"use_cache, {NAME}: expected neither with gradient checkpointing"):
        model(tokens, use_cache=True)
    assert model.eval()(tokens, use_cache=True).past_key_values.get_seq_length() == 9


def test_each_block_or_every_nth_runs_twice_where_it_is_recomputed(tokens):
    model = build(num_hidden_layers=3).train()
    runs = []
    for block in model.model.blocks:
        block.register_forward_pre_hook(lambda block, args: runs.append(block))

    def times():
        runs.clear()
        model(tokens, labels=tokens).loss.backward()
        return [runs.count(block) for block in model.model.blocks]

    assert times() == [1, 1, 1]
    model.gradient_checkpointing_enable()
    assert times() == [2, 2, 2]
    if hasattr(model, "activation_checkpointing_enable"):  # of later releases
        model.activation_checkpointing_enable(every_n_layers=2)
        assert times() == [2, 1, 2]
        model.activation_checkpointing_disable()
        assert times() == [1, 1, 1]


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


def test_packed_rows_without_their_borders_are_refused():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7]}]
    packed = transformers.DataCollatorWithFlattening(return_seq_idx=True)(rows)
    assert build()(**packed).loss.isfinite()
    del packed["position_ids"]  # as with return_position_ids=False
    with pytest.raises(ValueError, match="seq_idx: expected position_ids or cu_seq_lens_q beside it"):
        build()(**packed)


def test_positions_that_cannot_be_are_refused(tokens):
    model = build("rope")
    rising = torch.arange(9).expand(2, 9)
    assert torch.equal(model(tokens, position_ids=rising + 3).logits, model(tokens).logits)
    for wrong in (2 * rising, rising.flip(1), torch.cat([rising[:, :4], rising[:, :5]], 1)):
        with pytest.raises(ValueError, match="position_ids: expected positions that rise by one"):
            model(tokens, position_ids=wrong)
    for shape in ((2, 8), (9,), (3, 9)):
        with pytest.raises(ValueError, match=r"position_ids: expected \[B, T\] = \(2, 9\) or \(1, 9\), got"):
            model(tokens, position_ids=torch.arange(9)[: shape[-1]].expand(shape))
    with pytest.raises(ValueError, match=r"from 0 each, got \[\[0, 1, 1, 2\]\]"):
        model(tokens[:1, :4], position_ids=torch.tensor([[0, 1, 1, 2]]))


def test_positions_follow_the_mask_and_the_cached_tokens(tokens):
    model = build("rope")
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0  # padding on the left
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    right = model(tokens, attention_mask=mask).logits
    for positions in (counted, counted + 5, torch.arange(9)[None]):
        assert torch.equal(model(tokens, attention_mask=mask, position_ids=positions).logits, right)
        cache = model(tokens[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5]).past_key_values
        with pytest.raises(ValueError, match="position_ids: expected positions that go on from the cached tokens"):
            model(tokens[:, 5:], attention_mask=mask, position_ids=positions[:, 5:] + 2, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        given = {"attention_mask": mask.flip(0), "position_ids": positions[:, 5:].flip(0), "past_key_values": cache}
        torch.testing.assert_close(model(tokens[:, 5:].flip(0), **given).logits, right[:, 5:].flip(0))
    gap = torch.tensor([[0, 1, 2, 3, 20, 21, 22, 23, 24]])
    with pytest.raises(ValueError, match="position_ids: expected positions that rise by one over the tokens that att"):
        model(tokens, attention_mask=mask, position_ids=gap)
    with pytest.raises(ValueError, match="position_ids: expected positions that rise by one over the tokens that att"):
        model(tokens[:1], attention_mask=mask[:1], position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))  # packed
    cache = model(tokens[:, :5]).past_key_values
    with pytest.raises(ValueError, match=r"go on from the cached tokens, at \[5, 5\], got \[\[0, 1, 2, 3\]"):
        model(tokens[:, 5:], position_ids=torch.arange(4)[None], past_key_values=cache)
    with pytest.raises(ValueError, match=r"position_ids: expected positions that rise by one between the borders"):
        model(tokens[:1], cu_seq_lens_q=torch.tensor([0, 5, 9], dtype=torch.int32), position_ids=gap)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("attention_masks", "attention_mask"), ("label", "labels"), ("positions_ids", "position_ids"),
     ("past_key_value", "past_key_values"), ("cu_seqlens_q", "cu_seq_lens_q")],
)  # fmt: skip
def test_misspelt_keywords_are_refused(name, meant, tokens):
    with pytest.raises(TypeError, match=f"unknown keyword '{name}'; did you mean '{meant}'"):
        build()(tokens, **{name: tokens})


def test_keywords_of_other_models_are_no_concern(tokens):
    """Such as collators and trainers hand to every model."""
    others = {"token_type_ids": tokens, "cache_position": tokens[0], "pixel_values": None, "cu_seq_lens_k": None}
    model = build()
    assert torch.equal(model(tokens, **others).logits, model(tokens).logits)


def test_states_of_all_blocks_are_given(tokens):
    model = build()
    out = model(tokens, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(model.model.head(out.hidden_states[-1]), out.logits)
    assert torch.equal(out.hidden_states[0], model.model.embedding(tokens))


def test_labels_have_the_shape_of_the_tokens(tokens):
    with pytest.raises(ValueError, match=r"labels: expected \[B, T\] = \(2, 9\), got \(2, 5\)"):
        build("fox")(tokens, labels=tokens[:, :5])


def test_labels_that_cannot_be_are_refused_by_name(tokens):
    model = build("fox")
    beyond = model.config.vocab_size
    for wrong in (beyond, -1):
        labels = torch.where(tokens == tokens[0, 3], wrong, tokens)
        with pytest.raises(ValueError, match=rf"labels: expected tokens from 0 to {beyond - 1}, got {wrong}"):
            model(tokens, labels=labels)
    assert model(tokens, labels=torch.where(tokens == tokens[0, 3], -1, tokens), ignore_index=-1).loss.isfinite()
    with pytest.raises(ValueError, match=r"labels: expected int64 tokens, got torch.float32"):
        model(tokens, labels=tokens.float())
    for some in (3, torch.arange(9)):
        with pytest.raises(ValueError, match="logits_to_keep: expected 0 beside labels, got"):
            model(tokens, labels=tokens, logits_to_keep=some)
    nothing = torch.full_like(tokens, -100)  # of the pieces of a batch, one may ask for nothing
    assert model(tokens, labels=nothing, num_items_in_batch=torch.tensor(7)).loss == 0


def test_the_configuration_says_what_is_given(tokens, tmp_path):
    build("fox").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_hidden_states=True)
    assert len(model(tokens).hidden_states) == model.config.num_hidden_layers + 1
    assert model(tokens, output_hidden_states=False).hidden_states is None
    model.config.return_dict = False
    assert isinstance(model(tokens), tuple)
    assert model(tokens, return_dict=True).hidden_states is not None
    model.config._output_attentions = True  # what `output_attentions=True` sets
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens)


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


def test_the_documented_trainer_decays_what_our_own_training_decays(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "hugging_face.md"
    (code,) = re.findall(r"```python\n(import transformers\n.*?class Trainer.*?)```", page.read_text(), re.DOTALL)
    made: dict[str, Any] = {}
    exec(code, made)
    model = build(
        ["mamba2", "mamba3", "rwkv7", {"name": "fox", "options": {"sinks": True, "block": "pro"}}], num_hidden_layers=4
    )
    arguments = transformers.TrainingArguments(str(tmp_path), weight_decay=0.1, use_cpu=True, report_to=[])

    def decayed(kind):
        groups = kind(model, arguments).create_optimizer().param_groups
        return {id(one) for group in groups for one in group["params"] if group["weight_decay"]}

    ours = {id(one) for one in param_groups(model, 0.1)[0]["params"]}
    assert decayed(made["Trainer"]) == ours
    names = {name.rpartition("attention.")[2] for name, one in model.named_parameters() if id(one) not in ours}
    assert {"gate.log_a", "skip", "bonus", "token_mix.weight", "sinks"} < names
    theirs = decayed(transformers.Trainer)  # else the page has no need of a subclass
    assert ours < theirs


def test_trainer_smooths_labels_of_the_next_token(tokens, tmp_path):
    model = build()
    arguments = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    loss = transformers.Trainer(model, arguments).compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
    predicted = model(tokens).logits[:, :-1].flatten(0, 1)
    right = torch.nn.functional.cross_entropy(predicted, tokens[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, right)


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


def test_virtual_tokens_and_rows_of_the_embedding_are_trained(tokens):
    peft = peft_of_this_release()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for given in (
        peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2], task_type="CAUSAL_LM"),
    ):
        adapted = peft.get_peft_model(build(HYBRID), given)
        adapted(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
        made = adapted.eval().generate(input_ids=tokens, attention_mask=mask, max_new_tokens=3, do_sample=False)
        assert made.shape == (len(tokens), tokens.shape[1] + 3)


def test_a_mask_of_floats_holds_0_and_1(tokens):
    model, mask = build(), torch.ones(tokens.shape)
    mask[0, :3] = 0
    assert torch.equal(model(tokens, attention_mask=mask).logits, model(tokens, attention_mask=mask.long()).logits)
    with pytest.raises(ValueError, match=r"attention_mask: expected 1 for tokens and 0 for padding, got \[-inf, 0"):
        model(tokens, attention_mask=mask.log())


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
