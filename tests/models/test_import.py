"""Imported models compute what the peer's own class computes, on random weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from imported import CASES, MAMBA, NEXT, SIZES, YARN, old, peer
from peer_kernels import in_plain_torch

from attnzoo.cli import app
from attnzoo.models.peers import Weights, build_peer, from_peer, peer_of
from attnzoo.models.peers.table import AROUND, PEERS, WITHOUT

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    in_plain_torch(monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_peers(case, rows):
    theirs = peer(*CASES[case])
    ours = from_peer(theirs)
    expected = theirs(rows).logits
    torch.testing.assert_close(ours(rows).logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


FOLDERS = [
    "llama", "qwen3_next", "mamba2", "phi3", "olmo2", "olmo3", "smollm3", "qwen3_5", "olmo_hybrid", "gemma2", "gemma3",
    "gpt2",
]  # fmt: skip


@pytest.mark.parametrize("case", [*FOLDERS, "qwen3, windows"])
def test_continuations_are_the_peers(case, rows):
    theirs = peer(*CASES[case])
    expected = theirs.generate(rows, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(from_peer(theirs).generate(rows, 12, temperature=0), expected)


def test_another_attention_keeps_where_each_layer_of_olmo_hybrid_has_its_norms():
    """A bare name in place of the list of layers says nothing of norms, which are the block's."""
    config = from_peer(peer(*CASES["olmo_hybrid, still"])).config
    places = [layer.norm for layer in config.layers()]
    assert places == ["after", "before"]
    assert [layer.norm for layer in replace(config, attention="fox").layers()] == places


@pytest.mark.parametrize(
    ("case", "shards"), [("llama", "20KB"), *((case, "1GB") for case in (*FOLDERS, "olmo_hybrid, still"))]
)
def test_a_folder_gives_what_the_model_gives(case, shards, rows, tmp_path):
    """Some classes of transformers save their weights by other names than they have in memory."""
    theirs = peer(*CASES[case])
    theirs.save_pretrained(tmp_path, max_shard_size=shards)
    assert torch.equal(from_peer(tmp_path)(rows).logits, from_peer(theirs)(rows).logits)


def test_dtype_of_the_weights_leaves_angles_alone():
    theirs = peer("Llama", {})
    model = from_peer(theirs, dtype=torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16
    assert model.blocks[0].attention.gate.angle.dtype == torch.float32


@pytest.mark.parametrize(("kind", "more"), [("Qwen3", {"head_dim": 16}), ("Olmo2", {"rope_parameters": YARN})])
def test_command_writes_a_folder_that_auto_classes_load(kind, more, rows, tmp_path):
    theirs = peer(kind, {**more, "eos_token_id": 5})
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.eos_token_id == 5
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    assert torch.equal(ours(rows).logits, from_peer(theirs)(rows).logits)


def test_the_table_of_what_loads_has_every_kind(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["import", "--list"])
    assert shown.exit_code == 0, shown.output
    for kind in (*PEERS, *AROUND, *WITHOUT):
        assert f" {kind} " in shown.output


@pytest.mark.parametrize("command", ["import", "evaluate"])
def test_what_stands_beside_a_list_is_refused(command):
    done = CliRunner().invoke(app, [command, "--list", "qwen3"])
    assert done.exit_code == 2
    assert "--list: expected nothing beside it, got qwen3" in done.output


SEEING = {
    "Qwen3_5": (
        {name: value for name, value in NEXT.items() if name != "num_experts"},
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}, {},
    ),
    "Gemma3": (
        {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16,
         "image_size": 8, "patch_size": 4},
        {"mm_tokens_per_image": 4, "image_token_id": 69, "eos_token_id": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SEEING)
def test_the_language_model_within_a_model_of_images_is_taken_alone(kind, rows, tmp_path, caplog):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("this transformers does not have it")
    torch.manual_seed(0)
    text, vision, more = SEEING[kind]
    text, rows = {**SIZES, **text, "eos_token_id": 3}, rows.clamp(max=68)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **more)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")
    theirs = whole._from_config(config, attn_implementation="eager").eval()
    expected = theirs(input_ids=rows).logits
    torch.testing.assert_close(from_peer(theirs)(rows).logits, expected, rtol=1e-5, atol=1e-5)
    alone = "its language model alone is taken, without what reads images"
    assert f"{theirs.config.model_type}: {alone}" in caplog.messages
    theirs.save_pretrained(tmp_path / "theirs")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(ours(rows).logits, expected, rtol=1e-5, atol=1e-5)
    assert ours.config.eos_token_id == 3


@pytest.mark.parametrize("kind", ["mamba2", "mamba2-project_fox"])
def test_a_step_without_bounds_is_read_from_a_file(kind, rows, tmp_path):
    theirs = peer("Mamba2", MAMBA)
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": kind}))
    assert torch.equal(from_peer(tmp_path)(rows).logits, from_peer(theirs)(rows).logits)


@pytest.mark.parametrize("case", ["olmo3", "gemma3"])
def test_angles_of_each_kind_of_layers_are_read_from_fields_of_early_files(case):
    theirs = peer(*CASES[case])
    fields = theirs.config.to_dict()
    given = {name: value for name, value in CASES[case][1].items() if name.startswith("rope_")}
    flat = {name: value for name, value in fields.items() if name not in ("rope_parameters", "layer_types")} | given
    ours = [build_peer(peer_of(one), Weights.of_state(theirs.state_dict())) for one in (fields, flat)]
    assert ours[0].config == ours[1].config
    angles = [[block.attention.gate.angle for block in one.blocks] for one in ours]
    assert all(torch.equal(*both) for both in zip(*angles, strict=True))
    assert len({tuple(angle.tolist()) for angle in angles[0]}) == 2
    if case == "gemma3":
        named = {f"language_model.{name}": x for name, x in theirs.state_dict().items()} | {
            "vision_tower.x": torch.zeros(1), "multi_modal_projector.x": torch.zeros(1),
        }  # fmt: skip
        outer = {"model_type": "gemma3", "text_config": fields, "tie_word_embeddings": True}
        again = build_peer(peer_of(outer), Weights.of_state(named))
        assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours[0].state_dict().items())


def test_sizes_that_files_of_gemma_3_leave_out_are_those_of_its_class():
    """As the files of 4 billion parameters do."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = peer_of({"model_type": "gemma3", "text_config": text}).config
    assert (config.vocab_size, config.num_heads, config.tie_embeddings) == (262208, 8, True)
    assert (config.attention_options["head_dim"], config.attention_options["num_kv_heads"]) == (256, 4)
    layers = [(layer.options["theta"], layer.options.get("window")) for layer in config.layers()]
    assert layers == [(1e4, 1024) if (i + 1) % 6 else (1e6, None) for i in range(34)]


@pytest.mark.parametrize("case", ["qwen3, windows", "qwen3_next, as published"])
def test_kinds_of_layers_that_no_list_names(case, rows):
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
    ours = build_peer(peer_of(fields), Weights.of_state(theirs.state_dict()))
    assert torch.equal(ours(rows).logits, from_peer(theirs)(rows).logits)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Llama", {"sliding_window": 5}),
        ("Qwen2", {"sliding_window": 5, "max_window_layers": 0}),
        ("Qwen2", {"sliding_window": 5, "use_sliding_window": True}),
        ("Mistral", {"sliding_window": 5, "max_window_layers": 1, "use_sliding_window": False}),
    ],
)
def test_windows_are_those_that_the_peer_reads(name, fields, rows, tmp_path):
    """A file may lack what decides on them, or have what this kind of model does not read."""
    peer(name, {}).save_pretrained(tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())
    for field in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        known.pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps({**known, **fields}))
    theirs = getattr(transformers, f"{name}ForCausalLM").from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(from_peer(tmp_path)(rows).logits, theirs(rows).logits, rtol=1e-5, atol=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(known))
    window = transformers.AutoConfig.from_pretrained(tmp_path).to_dict().get("sliding_window")
    assert peer_of(known).config.layers()[0].options.get("window") == window


def test_tables_of_angles_are_left_unread(rows):
    theirs = peer("Llama", {})
    state = {**theirs.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    ours = build_peer(peer_of(theirs.config.to_dict()), Weights.of_state(state))
    assert torch.equal(ours(rows).logits, from_peer(theirs)(rows).logits)


def test_the_older_name_of_mamba_2s_embedding_is_known(rows):
    theirs = peer("Mamba2", MAMBA)
    state = theirs.state_dict()
    state["backbone.embedding.weight"] = state.pop("backbone.embeddings.weight")
    ours = build_peer(peer_of(theirs.config.to_dict()), Weights.of_state(state))
    assert torch.equal(ours(rows).logits, from_peer(theirs)(rows).logits)


def test_names_and_masks_of_gpt_2s_first_files_are_known(rows):
    theirs = peer(*CASES["gpt2"])
    state = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    del state["lm_head.weight"]
    ours = build_peer(peer_of(theirs.config.to_dict()), Weights.of_state(state))
    assert torch.equal(ours(rows).logits, from_peer(theirs)(rows).logits)


def test_a_tied_head_that_differs_from_the_embedding_is_taken_as_transformers_does(tmp_path, rows, caplog):
    from safetensors.torch import load_file, save_file

    def saved(state):
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        caplog.clear()
        return from_peer(tmp_path), transformers.LlamaForCausalLM.from_pretrained(tmp_path)(rows).logits

    theirs = peer("Llama", {"tie_word_embeddings": True})
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    head = state["model.embed_tokens.weight"].clone()  # some releases write it too
    ours, expected = saved({**state, "lm_head.weight": head})
    torch.testing.assert_close(ours(rows).logits, expected, rtol=1e-5, atol=1e-5)
    assert ours.tied
    assert not caplog.records
    ours, expected = saved({**state, "lm_head.weight": head + torch.randn_like(head)})
    if not old:  # which drops the file's head
        torch.testing.assert_close(ours(rows).logits, expected, rtol=1e-5, atol=1e-4)
    assert not ours.tied
    assert not ours.config.tie_embeddings
    assert ["config.json says that the head is the embedding, but the file's is another" in r.getMessage()
            for r in caplog.records if r.name.startswith("attnzoo")] == [True]  # fmt: skip
    if not old:  # which ties the other way round, too
        del state["model.embed_tokens.weight"]
        ours, expected = saved({**state, "lm_head.weight": head})
        torch.testing.assert_close(ours(rows).logits, expected, rtol=1e-5, atol=1e-5)
        assert ours.tied
