"""Imported models compute what the peer's own class computes, on random weights."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from peer_kernels import in_plain_torch

from attnzoo.cli import app
from attnzoo.models.peers import AROUND, PEERS, WITHOUT, Weights, build, from_peer, peer_of
from attnzoo.models.peers.table import BECOMES

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 70, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500.0,
}  # fmt: skip
NEXT = {  # the second of three layers attends; larger weights make more of roundings, which differ between CPUs
    "initializer_range": 0.05,
    "num_experts": 0, "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
MAMBA = {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}
CASES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_next": ("Qwen3Next", NEXT),
    "qwen3_next, as many values": ("Qwen3Next", {**NEXT, "linear_num_value_heads": 2, "partial_rotary_factor": 0.5}),
    "mamba2": ("Mamba2", MAMBA),
    "mamba2, in groups": ("Mamba2", {**MAMBA, "n_groups": 3}),
    "mamba2, tied": ("Mamba2", {**MAMBA, "use_conv_bias": False, "tie_word_embeddings": True}),
    "qwen3, windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "head_dim": 16},
    ),
}

SCALED = {"original_max_position_embeddings": 16, "factor": 4.0, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", **SCALED}
SHORT = {"rope_type": "longrope", **SCALED, "original_max_position_embeddings": 256, "short_factor": [1.0, 1.5, 2.0],
         "long_factor": [3.0] * 3}  # fmt: skip
LINEAR = "linear_attention"
HYBRID = {
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "pad_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.05,
}  # fmt: skip
KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 9,
    "linear_head_dim": 16, "linear_num_heads": 2, "mlp_layer_types": ["dense"] * 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "layer_types": [LINEAR, "full_attention"],
}  # fmt: skip
CASES |= {
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen3, yarn, other numbers": (
        "Qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": 9}),
    "phi3, half of the channels": (
        "Phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 256,
                 "max_position_embeddings": 1024, "rope_parameters": {**SHORT, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2, biases, yarn": ("Olmo2", {"attention_bias": True, "rope_parameters": YARN}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": True}),
    "smollm3, a list": ("SmolLM3", {"no_rope_layers": [0, 1], "pad_token_id": 0}),
    "olmo_hybrid": ("OlmoHybrid", {**HYBRID, "linear_num_value_heads": 4}),
    "olmo_hybrid, still": (
        "OlmoHybrid", {**HYBRID, "linear_allow_neg_eigval": False, "layer_types": ["full_attention", LINEAR],
                       "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "llama, biases of the MLP": ("Llama", {"mlp_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 30, "attn_logit_softcapping": 2.0,
                   "final_logit_softcapping": 3.0},
    ),
    "gemma2, other fields": (
        "Gemma2", {"head_dim": 16, "attention_bias": True, "layer_types": ["full_attention"] * 2,
                   "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
                   "rope_parameters": YARN},
    ),
    "gpt2": ("GPT2", {"n_positions": 64}),
    "gpt2, other fields": (
        "GPT2", {"n_inner": 40, "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True,
                 "scale_attn_weights": False, "reorder_and_upcast_attn": True, "tie_word_embeddings": False},
    ),
    "kimi_linear": ("KimiLinear", KIMI),
    "kimi_linear, as published": (
        "KimiLinear", {
            **{name: value for name, value in KIMI.items() if not name.endswith("layer_types")},
            "first_k_dense_replace": 2, "mla_use_nope": True,
            "linear_attn_config": {
                "full_attn_layers": [1], "kda_layers": [2], "head_dim": 12, "num_heads": 3, "short_conv_kernel_size": 3,
            },
        },
    ),
    "qwen3_5": ("Qwen3_5Text", {k: v for k, v in NEXT.items() if k != "num_experts"}),
}  # fmt: skip

old = int(transformers.__version__.split(".")[0]) < 5


def configuration(name, options):
    if old and "rope_parameters" in options:  # two fields there
        scaling = dict(options["rope_parameters"])
        options = {**options, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
        options.pop("rope_parameters")
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this transformers does not have it")
    try:
        return getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    except ValueError as error:
        if old and str(error).startswith("`rope_scaling` must be a dictionary"):
            pytest.skip(f"this transformers has no such angles for {name}")
        raise


def peer(name, options):
    torch.manual_seed(0)
    if options.get("n_groups", 1) > 1:
        from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

        if "group_size" not in inspect.signature(MambaRMSNormGated).parameters:
            pytest.skip("this transformers norms all groups together, its kernels and the authors' do not")
    config = configuration(name, options)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name.removesuffix('Text')}{head}")._from_config(
        config, attn_implementation="eager"
    )
    for parameter in model.parameters():  # norms and biases that do something
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    in_plain_torch(monkeypatch)


@pytest.fixture
def tokens():
    return torch.randint(1, 70, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_peers(case, tokens):
    theirs = peer(*CASES[case])
    ours = from_peer(theirs)
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "qwen3, windows",
        "qwen3_next",
        "mamba2",
        "phi3",
        "olmo2",
        "smollm3",
        "qwen3_5",
        "olmo_hybrid",
        "gemma2",
        "gpt2",
    ],
)
def test_continuations_are_the_peers(case, tokens):
    theirs = peer(*CASES[case])
    expected = theirs.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(from_peer(theirs).generate(tokens, 12, temperature=0), expected)


def test_another_attention_keeps_where_each_layer_of_olmo_hybrid_has_its_norms():
    """A bare name in place of the list of layers says nothing of norms, which are the block's."""
    config = from_peer(peer(*CASES["olmo_hybrid, still"])).config
    places = [layer.norm for layer in config.layers()]
    assert places == ["after", "before"]
    assert [layer.norm for layer in replace(config, attention="fox").layers()] == places


FOLDERS = [
    "llama",
    "qwen3_next",
    "mamba2",
    "phi3",
    "olmo2",
    "smollm3",
    "qwen3_5",
    "olmo_hybrid",
    "olmo_hybrid, still",
    "gemma2",
    "gpt2",
]


@pytest.mark.parametrize(("case", "shards"), [("llama", "20KB"), *((case, "1GB") for case in FOLDERS)])
def test_a_folder_gives_what_the_model_gives(case, shards, tokens, tmp_path):
    """Some classes of transformers save their weights by other names than they have in memory."""
    theirs = peer(*CASES[case])
    theirs.save_pretrained(tmp_path, max_shard_size=shards)
    assert torch.equal(from_peer(tmp_path)(tokens).logits, from_peer(theirs)(tokens).logits)


def test_dtype_of_the_weights_leaves_angles_alone():
    theirs = peer("Llama", {})
    model = from_peer(theirs, dtype=torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16
    assert model.blocks[0].attention.gate.angle.dtype == torch.float32


@pytest.mark.parametrize(("kind", "more"), [("Qwen3", {"head_dim": 16}), ("Olmo2", {"rope_parameters": YARN})])
def test_command_writes_a_folder_that_auto_classes_load(kind, more, tokens, tmp_path):
    theirs = peer(kind, {**more, "eos_token_id": 5})
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.eos_token_id == 5
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    assert torch.equal(ours(tokens).logits, from_peer(theirs)(tokens).logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llamma"}, "did you mean 'llama'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"model_type": "llama"}, "expected a value of 'hidden_size'"),
        ({"model_type": "samba-project_fox"}, "'samba-project_fox' is not supported: its Mamba layers"),
        ({"model_type": "rwkv7"}, "'rwkv7' is not supported: it erases along another vector .*; 'kda' loads"),
        ({"model_type": "olmo3"}, "its layers with windows turn by other angles than the rest; 'olmo2' loads"),
        ({"model_type": "granite"}, "it scales what each layer adds, .*; 'llama' loads"),
        ({"model_type": "gemma3"}, "'gemma3' is not supported: it reads images, .*; 'gemma2' loads"),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 27,
                "num_attention_heads": 32,
                "num_experts": 256,
                "first_k_dense_replace": 1,
            },
            "26 of 27 layers have experts, .* a Kimi Linear whose layers are all dense loads",
        ),
        (
            {
                "model_type": "gpt2",
                "n_embd": 8,
                "n_head": 2,
                "n_layer": 1,
                "n_positions": 9,
                "vocab_size": 5,
                "activation_function": "relu",
            },
            "activation_function = 'relu' is not supported",
        ),
        ({"model_type": "gpt2", "n_embd": "8"}, "n_embd: expected"),
        ({"model_type": "gpt2", "n_embd": 8, "n_head": 9, "n_layer": 1}, "num_attention_heads: expected at most"),
        ({"model_type": "mamba2", "time_step_limit": [0.0, 1.0]}, r"time_step_limit = \[0.0, 1.0\] is not supported"),
        ({"model_type": "mamba2", "use_bias": True}, "use_bias = True is not supported"),
        ({"model_type": "hgrn2-project_fox", "elementwise_affine": False}, "elementwise_affine = False"),
    ],
)
def test_what_cannot_be_imported_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        peer_of(fields)


def test_the_table_of_what_loads_has_every_kind(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["import", "--list"])
    assert shown.exit_code == 0, shown.output
    for kind in (*PEERS, *AROUND, *WITHOUT):
        assert f" {kind} " in shown.output
    assert set(BECOMES) == {*PEERS, *AROUND}


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_without_a_language_head_is_named(kind):
    model = getattr(transformers, kind)(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=rf"^source: expected a causal language model with its head.*, got {kind}$"):
        from_peer(model)


def test_what_is_no_model_is_named():
    with pytest.raises(ValueError, match=r"^source: expected a causal language model.*, got Linear$"):
        from_peer(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^source: expected a folder or a model, got int$"):
        from_peer(3)


def test_a_kind_of_scaling_that_is_not_known_is_refused():
    rope = {"rope_type": "spiral", "factor": 4.0, "rope_theta": 100.0}
    with pytest.raises(ValueError, match="rope_type = 'spiral' is not supported .only 'default', 'linear', 'llama3'"):
        peer_of({"model_type": "llama", **SIZES, "rms_norm_eps": 1e-6, "rope_parameters": rope})


def test_the_language_model_within_a_model_of_images_is_taken_alone(tokens, tmp_path, caplog):
    if not hasattr(transformers, "Qwen3_5Config"):
        pytest.skip("this transformers does not have it")
    torch.manual_seed(0)
    text = {**SIZES, **{name: value for name, value in NEXT.items() if name != "num_experts"}, "eos_token_id": 3}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    theirs = transformers.Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    expected = theirs(input_ids=tokens).logits
    torch.testing.assert_close(from_peer(theirs)(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert "qwen3_5: its language model alone is taken, without what reads images" in caplog.messages
    theirs.save_pretrained(tmp_path / "theirs")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert ours.config.eos_token_id == 3


@pytest.mark.parametrize("case", ["llama, dynamic", "phi3, half of the channels"])
def test_angles_that_change_with_the_length_are_a_line_of_the_log(case, caplog):
    from_peer(peer(*CASES[case]))
    assert [message for message in caplog.messages if "angles are those of contexts of up to 256 tokens" in message]


def test_layers_of_experts_are_refused_by_name(tokens):
    options = {
        **NEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="num_experts = 4 in 1 layers is not supported"):
        from_peer(peer("Qwen3Next", options))
    theirs = peer("Qwen3Next", {**options, "mlp_only_layers": [1]})
    torch.testing.assert_close(from_peer(theirs)(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba2", "mamba2-project_fox"])
def test_a_step_without_bounds_is_read_from_a_file(kind, tokens, tmp_path):
    theirs = peer("Mamba2", MAMBA)
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": kind}))
    assert torch.equal(from_peer(tmp_path)(tokens).logits, from_peer(theirs)(tokens).logits)


@pytest.mark.parametrize("case", ["qwen3, windows", "qwen3_next, as published"])
def test_kinds_of_layers_that_no_list_names(case, tokens):
    """As in configurations of the hub, which give the rule instead."""
    every = {
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
    theirs = peer(*CASES.get(case, ("Qwen3Next", {**NEXT, **every})))
    fields = {**theirs.config.to_dict(), "full_attention_interval": 2}
    kinds = fields.pop("layer_types")
    assert len(set(kinds)) == 2
    ours = build(peer_of(fields), Weights.of_state(theirs.state_dict()))
    assert torch.equal(ours(tokens).logits, from_peer(theirs)(tokens).logits)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Llama", {"sliding_window": 5}),
        ("Qwen2", {"sliding_window": 5, "max_window_layers": 0}),
        ("Qwen2", {"sliding_window": 5, "use_sliding_window": True}),
        ("Mistral", {"sliding_window": 5, "max_window_layers": 1, "use_sliding_window": False}),
    ],
)
def test_windows_are_those_that_the_peer_reads(name, fields, tokens, tmp_path):
    """A file may lack what decides on them, or have what this kind of model does not read."""
    peer(name, {}).save_pretrained(tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())
    for field in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        known.pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps({**known, **fields}))
    theirs = getattr(transformers, f"{name}ForCausalLM").from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(from_peer(tmp_path)(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(known))
    window = transformers.AutoConfig.from_pretrained(tmp_path).to_dict().get("sliding_window")
    assert peer_of(known).config.layers()[0].options.get("window") == window


def test_tables_of_angles_are_left_unread(tokens):
    theirs = peer("Llama", {})
    state = {**theirs.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    ours = build(peer_of(theirs.config.to_dict()), Weights.of_state(state))
    assert torch.equal(ours(tokens).logits, from_peer(theirs)(tokens).logits)


def test_the_older_name_of_mamba_2s_embedding_is_known(tokens):
    theirs = peer("Mamba2", MAMBA)
    state = theirs.state_dict()
    state["backbone.embedding.weight"] = state.pop("backbone.embeddings.weight")
    ours = build(peer_of(theirs.config.to_dict()), Weights.of_state(state))
    assert torch.equal(ours(tokens).logits, from_peer(theirs)(tokens).logits)


def test_names_and_masks_of_gpt_2s_first_files_are_known(tokens):
    theirs = peer(*CASES["gpt2"])
    state = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    del state["lm_head.weight"]
    ours = build(peer_of(theirs.config.to_dict()), Weights.of_state(state))
    assert torch.equal(ours(tokens).logits, from_peer(theirs)(tokens).logits)


def test_what_differs_on_purpose_is_a_line_of_the_log(caplog):
    from_peer(peer("Llama", {}))
    assert not caplog.records
    from_peer(peer("Mamba2", MAMBA))
    first, second = (record.getMessage() for record in caplog.records)
    assert "residual_in_fp32" in first
    assert second.startswith("config.json: ")
    assert second.endswith(": not read, as nothing here is like it")
    assert "num_attention_heads" in second  # of the tests' sizes, which this class has no use for


def test_weights_left_over_or_missing_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = peer("Llama", {})
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "model.extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no place: model\.extra\.weight"):
        from_peer(tmp_path)
    state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        from_peer(tmp_path)


def test_a_tied_head_that_differs_from_the_embedding_is_taken_as_transformers_does(tmp_path, tokens, caplog):
    from safetensors.torch import load_file, save_file

    def saved(state):
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        caplog.clear()
        return from_peer(tmp_path), transformers.LlamaForCausalLM.from_pretrained(tmp_path)(tokens).logits

    theirs = peer("Llama", {"tie_word_embeddings": True})
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    head = state["model.embed_tokens.weight"].clone()  # some releases write it too
    ours, expected = saved({**state, "lm_head.weight": head})
    torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert ours.tied
    assert not caplog.records
    ours, expected = saved({**state, "lm_head.weight": head + torch.randn_like(head)})
    if not old:  # which drops the file's head
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-5, atol=1e-4)
    assert not ours.tied
    assert not ours.config.tie_embeddings
    assert ["config.json says that the head is the embedding, but the file's is another" in r.getMessage()
            for r in caplog.records if r.name.startswith("attnzoo")] == [True]  # fmt: skip
    if not old:  # which ties the other way round, too
        del state["model.embed_tokens.weight"]
        ours, expected = saved({**state, "lm_head.weight": head})
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        assert ours.tied


@pytest.mark.parametrize("damage", [b"", b"garbage that is no safetensors file"])
def test_weights_that_cannot_be_read_are_named(damage, tmp_path):
    peer("Llama", {}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(ValueError, match="its weights cannot be read"):
        from_peer(tmp_path)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json$"):
        from_peer(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"an adapter, which `merge_and_unload` puts into its model"):
        from_peer(tmp_path)
    with pytest.raises(FileNotFoundError, match="hf download meta-llama/Llama-3.2-1B --local-dir"):
        from_peer("meta-llama/Llama-3.2-1B")


@pytest.mark.parametrize("case", CASES)
def test_every_field_of_the_peers_own_class_is_read_or_known_to_change_nothing(case):
    """But for dropout in training, and for sizes of the tests that a class has no use for."""
    name, options = CASES[case]
    fields = configuration(name, options).to_dict()
    left = [note for note in peer_of(fields).notes if "not read" in note]
    listed = left[0].removeprefix("config.json: ").partition(":")[0].split(", ") if left else []
    assert {field for field in listed if not field.endswith("_pdrop")} <= {*SIZES}


def test_a_field_that_nothing_reads_is_a_line_of_the_log():
    fields = {**transformers.LlamaConfig(**SIZES).to_dict(), "clip_qkv": 8.0, "attention_dropout": 0.1, "sparse": False}
    assert peer_of(fields).notes[-1] == "config.json: attention_dropout, clip_qkv: not read, as nothing here is like it"
