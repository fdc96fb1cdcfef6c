"""The decoder behind Hugging Face's interface: its configuration, and what is saved is what is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields

import pytest
import torch
from hf_models import HYBRID, build, ids, load

from attnzoo.algebra.pruning import Prune
from attnzoo.forgetting.rules import Forgetting
from attnzoo.models.config import ModelConfig
from attnzoo.registry import list_variants

transformers = pytest.importorskip("transformers")
pytest_plugins = ("hf_models",)

from attnzoo.models.hf import AttnzooConfig, AttnzooForCausalLM  # noqa: E402
from attnzoo.models.hf.config import THEIRS  # noqa: E402

# configuration


def test_configuration_holds_every_field_of_the_decoder():
    native = ModelConfig(
        HYBRID, {"window": 8}, 48, 8, 3, 80, 77, True, 1e-5, norm_kind="layer", mlp_activation="gelu", mlp_gated=False,
        mlp_bias=True, embedding_scale=2.0, learned_positions=9, logit_softcap=30.0, initializer_range=0.01,
        norm="both", mlp_mix=True, embedding_norm=True,
    )  # fmt: skip
    plain = ModelConfig()
    assert not [field.name for field in fields(plain) if getattr(native, field.name) == getattr(plain, field.name)]
    theirs = AttnzooConfig.of(native)
    assert theirs.native() == native
    again = AttnzooConfig.from_dict(json.loads(theirs.to_json_string()))
    assert again.native() == native
    assert (again.num_hidden_layers, again.num_attention_heads, again.tie_word_embeddings) == (8, 3, True)


def test_options_that_are_objects_are_written_as_a_file_spells_them():
    options = {"acp": Prune(1e-3), "forgetting": Forgetting(window=4)}
    theirs = AttnzooConfig.of(ModelConfig(["fox", {"name": "rope", "options": options}], {"acp": Prune(1e-4)}))
    again = AttnzooConfig.from_dict(json.loads(theirs.to_json_string())).native()
    assert again.attention_options == {"acp": {"eps": 1e-4, "bound": "tail"}}
    kept = again.layers()[1].options
    assert (kept["acp"]["eps"], kept["forgetting"]) == (1e-3, asdict(options["forgetting"]))


@pytest.mark.parametrize(("ours", "theirs"), sorted(THEIRS.items()))
def test_one_name_for_one_thing(ours, theirs):
    with pytest.raises(ValueError, match=f"{ours}: .*{theirs}"):
        AttnzooConfig(**{ours: 2})


def test_sizes_that_the_decoder_refuses_are_refused():
    with pytest.raises(ValueError, match="does not fill num_layers=3"):
        AttnzooConfig(HYBRID, num_hidden_layers=3)
    with pytest.raises(ValueError, match="did you mean 'fox'"):
        build("foxx")
    with pytest.raises(ValueError, match="did you mean 'num_hidden_layers'"):
        build(num_hidden_layer=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acp", r"acp: expected in attention_options, as \{'acp': 1\}"),
        ("gate_bias", "gate_bias: expected in attention_options"),
        ("num_key_value_heads", r"num_key_value_heads: expected in attention_options, as \{'num_kv_heads': 1\}"),
        ("sliding_window", "as {'window': 1}"),
        ("rope_theta", "as {'theta': 1}"),
        ("rms_norm_eps", "rms_norm_eps: it is called norm_eps here"),
    ],
)
def test_options_of_layers_are_not_taken_for_attributes(name, message):
    with pytest.raises(ValueError, match=message):
        AttnzooConfig(**{name: 1})
    again = AttnzooConfig.from_dict(AttnzooConfig(attention_options={"num_kv_heads": 1}).to_dict())
    assert again.native().attention_options == {"num_kv_heads": 1}


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


@pytest.mark.parametrize(
    ("attention", "options"), [(HYBRID, {}), ("fox", {"block": "pro", "acp": True}), ("fox_rope", {})], ids=ids
)
def test_blocks_on_the_disk_give_the_same(attention, options, tmp_path, tokens):
    model = build(attention, attention_options=options)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embedding": "cpu", "model.blocks.0": "disk", "model.blocks.1": "cpu", "model.norm": "cpu"}
    loaded = load(tmp_path / "model", device_map={**places, "model.head": "disk"}, offload_folder=tmp_path / "disk")
    assert loaded.model.blocks[0].mlp.up.weight.is_meta
    torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-6)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(tokens, **greedy), model.generate(tokens, **greedy))
    if options:
        with pytest.raises(ValueError, match="evict: expected 'offload', or a device map that leaves"):
            loaded.generate(tokens, **greedy, evict=1e-3)


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


@pytest.mark.parametrize("auto", [True, False])
def test_scaled_angles_stay_where_another_attention_is_asked_for(auto, tmp_path, tokens):
    plain = build("rope")
    for block in plain.model.blocks:
        block.attention.gate.angle.mul_(0.3)  # as of a stretched context
    plain.save_pretrained(tmp_path / "rope")
    gate = {"gate": ["forget", "rotary"], "gate_bias": 30.0}
    loader = transformers.AutoModelForCausalLM if auto else AttnzooForCausalLM
    changed = loader.from_pretrained(tmp_path / "rope", attention="fox_rope", attention_options=gate)
    angles = changed.model.blocks[0].attention.gate.members[1].angle
    assert torch.equal(angles, plain.model.blocks[0].attention.gate.angle)
    torch.testing.assert_close(changed(tokens).logits, plain.eval()(tokens).logits, atol=1e-4, rtol=1e-4)
    changed.save_pretrained(tmp_path / "fox")
    again = loader.from_pretrained(tmp_path / "fox")
    assert torch.equal(again(tokens).logits, changed(tokens).logits)
    back = loader.from_pretrained(tmp_path / "fox", attention="rope", attention_options={})
    assert torch.equal(back.model.blocks[0].attention.gate.angle, angles)


@pytest.mark.parametrize("auto", [True, False])
def test_another_attention_alone_leaves_out_the_options_that_it_has_no_use_for(auto, tmp_path, caplog):
    build("rope", attention_options={"theta": 500.0, "num_kv_heads": 1}).save_pretrained(tmp_path)
    loader = transformers.AutoModelForCausalLM if auto else AttnzooForCausalLM
    changed = loader.from_pretrained(tmp_path, attention="fox")
    assert changed.config.attention_options == {"num_kv_heads": 1}
    assert "model.attention: fox has no use for theta, left out" in caplog.messages
    with pytest.raises(ValueError, match="unknown option 'theta' of 'fox'"):  # typed
        loader.from_pretrained(tmp_path, attention="fox", attention_options={"theta": 500.0})
    kept = loader.from_pretrained(tmp_path, attention="rope")
    assert kept.config.attention_options == {"theta": 500.0, "num_kv_heads": 1}


def test_auto_classes_know_the_model_when_transformers_came_first(tmp_path):
    """The other order is that of a tutorial, whose code runs in a process of its own too."""
    build().save_pretrained(tmp_path)
    code = "import transformers, attnzoo; from transformers import AutoModelForCausalLM as A; "
    code += f"print(type(A.from_pretrained({str(tmp_path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "AttnzooForCausalLM", done.stderr
