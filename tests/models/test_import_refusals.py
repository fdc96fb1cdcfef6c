"""What cannot be imported, or is not read, is named."""

from __future__ import annotations

import pytest
import torch
from imported import CASES, MAMBA, NEXT, SIZES, configuration, peer
from peer_kernels import in_plain_torch

from attnzoo.models.peers import from_peer, peer_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    in_plain_torch(monkeypatch)


OF_LAYERS = {**SIZES, "model_type": "olmo3", "rms_norm_eps": 1e-5, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llamma"}, "did you mean 'llama'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"model_type": "llama"}, "expected a value of 'hidden_size'"),
        ({"model_type": "samba-project_fox"}, "'samba-project_fox' is not supported: its Mamba layers"),
        ({"model_type": "attnzoo"}, "it is a model of this library already; .*generate FOLDER.*start_from=FOLDER"),
        ({"model_type": "gdn2"}, "'gdn2' is not supported: it erases by a gate per channel .*'rwkv7' load"),
        (OF_LAYERS | {"rope_theta": 10000.0}, "rope_theta: expected 500000.0 or a base for each kind .*, got 10000.0"),
        (
            OF_LAYERS | {"rope_parameters": {"rope_theta": 9.0}},
            "rope_parameters: expected those of full_attention, sliding_attention, got {'rope_theta': 9.0}",
        ),
        (OF_LAYERS | {"sliding_window": None}, "sliding_window: expected a number beside layers of sliding_attention"),
        (
            OF_LAYERS | {"rope_parameters": {"full_attention": {"rope_type": "yarn", "truncate": False}}},
            r"rope_parameters.full_attention.truncate = False is not supported",
        ),
        (
            {
                **SIZES,
                "model_type": "olmo_hybrid",
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"partial_rotary_factor": 0.5},
            },
            r"rope_parameters\.partial_rotary_factor = 0\.5 is not supported \(only 1\.0\)",
        ),
        ({"model_type": "granite"}, "it scales what each layer adds, .*; 'llama' loads"),
        ({"model_type": "gemma3"}, "expected a value of 'hidden_size'"),
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
            r"activation_function = 'relu' is not supported \(only 'gelu_new', 'gelu_pytorch_tanh', ",
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


OLMOS = "'olmo2', 'olmo3', 'olmo_hybrid'"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "flex_olmo", "num_experts": 7}, rf"its layers have experts, .*; of its family load {OLMOS}$"),
        (
            {"model_type": "gemma9", "vision_config": {"a": 1}, "audio_config": {"a": 1}},
            "it reads images and sounds, .*; of its family load 'gemma', 'gemma2', 'gemma3_text', 'gemma3'$",
        ),
        (
            {
                "model_type": "qwen9_omni",
                "thinker_config": {"audio_config": {"a": 1}, "text_config": {"num_experts": 8}},
            },
            "it reads sounds, for which .* place, and its layers have experts, .* load 'qwen2', 'qwen3'",
        ),
        (
            {"model_type": "seer", "vision_config": {"a": 1}, "text_config": {"model_type": "llama"}},
            r"it reads images, for which nothing here has a place \(the language model within it, .* is of 'llama'\)$",
        ),
    ],
)
def test_experts_images_and_sounds_of_kinds_without_an_entry_are_named(fields, message):
    with pytest.raises(
        ValueError, match=rf"^config\.json: model_type '{fields['model_type']}' is not supported: {message}"
    ):
        peer_of(fields)
    plain = {"model_type": fields["model_type"], "num_experts": 0, "vision_config": None}
    with pytest.raises(ValueError, match="unknown model_type"):
        peer_of(plain)


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


def test_layers_of_experts_are_refused_by_name(rows):
    options = {
        **NEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="num_experts = 4 in 1 layers is not supported"):
        from_peer(peer("Qwen3Next", options))
    theirs = peer("Qwen3Next", {**options, "mlp_only_layers": [1]})
    torch.testing.assert_close(from_peer(theirs)(rows).logits, theirs(rows).logits, rtol=1e-5, atol=1e-4)


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


@pytest.mark.parametrize("case", ["llama, dynamic", "phi3, half of the channels"])
def test_angles_that_change_with_the_length_are_a_line_of_the_log(case, caplog):
    from_peer(peer(*CASES[case]))
    assert [message for message in caplog.messages if "angles are those of contexts of up to 256 tokens" in message]


def test_what_differs_on_purpose_is_a_line_of_the_log(caplog):
    from_peer(peer("Llama", {}))
    assert not caplog.records
    from_peer(peer("Mamba2", MAMBA))
    first, second = (record.getMessage() for record in caplog.records)
    assert "residual_in_fp32" in first
    assert second.startswith("config.json: ")
    assert second.endswith(": not read, as nothing here is like it")
    assert "num_attention_heads" in second  # of the tests' sizes, which this class has no use for


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
