"""The conversion of a trained model: what its layers become, what they begin with, and the runs that train them."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_runs import config_of, write_text

from attnzoo.cli import app
from attnzoo.config import ModelConfig, load_config
from attnzoo.layer.build import build_attention
from attnzoo.models import LanguageModel
from attnzoo.trained.conversion import Target, phases
from attnzoo.trained.model import load_trained
from attnzoo.training import load_run, train
from attnzoo.training.start import start_from
from attnzoo.training.teacher import changed_layers

FAR = 10**7  # a context after which no gate of a short text has closed
HYBRID = [{"name": "rope", "options": {"num_kv_heads": 2}}, "fox", {"name": "rope", "norm": "after"}]


def scaled(config, seed=0):
    """A model with angles that are no powers of a base, as of a stretched context, and a head that stands out."""
    torch.manual_seed(seed)
    model = LanguageModel(config).eval()
    for layer in model.attentions():
        for name, buffer in layer.gate.named_buffers():
            if name.endswith("angle"):
                buffer.mul_(torch.linspace(1, 0.125, buffer.numel()))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model folder `model`, tied, grouped, of six layers of two kinds, and a text."""
    from attnzoo.models.hf import AttnzooForCausalLM

    folder = tmp_path_factory.mktemp("conversion")
    write_text(folder)
    sizes = {"hidden_size": 24, "num_heads": 4, "num_layers": 6, "intermediate_size": 24, "tie_embeddings": True}
    model = scaled(ModelConfig(attention=HYBRID, **sizes))
    AttnzooForCausalLM.of(model, max_position_embeddings=40).save_pretrained(folder / "model")
    return folder


def converted(folder, to, **given):
    """The converted model with its first weights, and the original."""
    original = load_trained(folder / "model").model
    torch.manual_seed(1)
    model = LanguageModel(Target(to, FAR, **given).model(original.config))
    start_from(model, str(folder / "model"), config_of(folder).data)
    return model.eval(), original


def test_the_tokens_of_a_conversion_are_those_asked_whatever_the_sizes_of_a_step(folder):
    sizes = [f"data.source={folder / 'text'}", "batch_size=4", "data.context_length=16", "optimizer.warmup_steps=0"]
    found = phases(folder / "model", folder / "out", "fox", sizes, tokens=2560)
    assert sum(phase.steps * phase.batch_size * phase.data.context_length for phase in found.values()) == 2560
    assert {phase.rows_per_part(1) for phase in found.values()} == {1}


def test_beside_their_rotations_open_gates_begin_where_the_original_ended(folder):
    tokens = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(0))
    for to in ("fox", "alibi", ["fox", "same", "wall"]):
        model, original = converted(folder, to)
        names = [layer.name for layer in model.config.layers()]
        assert names[:3] == {"fox": ["fox_rope", "fox", "fox_rope"], "alibi": ["fox_rope", "alibi", "fox_rope"]}.get(
            str(to), ["fox_rope", "fox", "rope_wall"]
        )
        assert [spec.norm for spec in model.config.layers()] == ["before", "before", "after"] * 2
        assert model.head.weight is model.embedding.weight
        if to != "alibi":
            torch.testing.assert_close(model(tokens).logits, original(tokens).logits, atol=2e-4, rtol=0)


def test_without_the_rotation_it_is_left_there(folder):
    model, original = converted(folder, "fox", rotation=False)
    assert {layer.name for layer in model.config.layers()} == {"fox"}
    assert changed_layers(original.config, model.config) == [0, 2, 3, 5]
    for ours, theirs in zip(model.attentions(), original.attentions(), strict=True):
        assert torch.equal(ours.k_proj.weight, theirs.k_proj.weight)  # of two key heads, or of four


def test_from_pretrained_keeps_scaled_angles_beside_a_new_gate(folder):
    from transformers import AutoModelForCausalLM

    model, original = converted(folder, "fox")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "model", attention=model.config.attention)
    for n in (0, 2):
        assert torch.equal(theirs.model.attentions()[n].gate.members[1].angle, original.attentions()[n].gate.angle)
        assert torch.equal(model.attentions()[n].gate.members[1].angle, original.attentions()[n].gate.angle)


OPEN = ["fox", "path_fox", "mamba2", "gated_deltanet", "gla", "wall", "gated_wall", "mamba3"]


@pytest.mark.parametrize("block", ["pro", None])
def test_gates_reach_eight_contexts_where_their_projections_give_nothing(block):
    options = {"block": block, "num_kv_heads": 2} if block else {"qk_norm": "rms", "head_dim": 6}
    source = ModelConfig(attention="rope", attention_options=options, hidden_size=32, num_heads=4, num_layers=2)
    for to in OPEN:
        for rotation in (True, False):
            model = LanguageModel(Target(to, 100, rotation).model(source))
            layer = model.attentions()[0]
            gate = layer.project(torch.zeros(1, 3, 32)).gate
            for decay in (gate.log_decay, gate.log_diag):
                if decay is not None:
                    torch.testing.assert_close(-1 / decay, torch.full_like(decay, 800.0), rtol=2e-3, atol=0)
            assert layer.variant.name == to or ("angle" in layer.variant.requires) is rotation
            assert (
                layer.v_proj.weight.shape
                == build_attention("rope", hidden_size=32, num_heads=4, **options).v_proj.weight.shape
            )
            if layer.variant.side == "linear":
                assert layer.config.output_norm == "rms"


@pytest.fixture(scope="module")
def run(folder):
    """A finished run of RoPE, at a learning rate of its own."""
    return train(
        config_of(folder, "run", "model.attention=rope", "optimizer.lr=0.02", "optimizer.min_lr=0.005", "steps=100")
    )


def test_phases_follow_each_other_and_are_the_runs_own(folder, run):
    found = phases(run, folder / "out", "gated_deltanet", ["log_every=3"], tokens=2000)
    own = load_config(run / "config.yaml")
    assert {config.batch_size for config in found.values()} == {own.batch_size}
    assert {config.log_every for config in found.values()} == {3}
    assert [(c.objective, c.teacher is not None) for c in found.values()] == [
        ("align", True), ("distil", True), ("text", False),
    ]  # fmt: skip
    starts = [str(run), str(folder / "out" / "align"), str(folder / "out" / "distil")]
    assert [config.start_from for config in found.values()] == starts
    assert [config.steps * 32 for config in found.values()] == [384, 1216, 384]
    assert [config.optimizer.lr for config in found.values()] == pytest.approx([0.02, 0.01, 0.002])
    assert [config.optimizer.min_lr for config in found.values()] == pytest.approx([0.005, 0.005, 0.002])


def test_a_folder_says_its_context_and_its_runs_are_long_and_slow(folder):
    found = phases(folder / "model", folder / "out", ["fox", "same", "same"], [f"data.source={folder / 'text.txt'}"])
    align = found["align"]
    assert align.data.context_length == 40
    assert align.mixed_precision == "bf16"
    assert sum(c.steps for c in found.values()) * align.batch_size * 40 == pytest.approx(2**29, rel=0.01)
    assert align.model.layers()[0].options["gate_bias"] == pytest.approx(math.log(320), abs=0.01)
    longer = phases(folder / "model", folder / "out", "fox", context=50_000)
    assert longer["text"].data.context_length == 4096


def invoke(*words, code=0):
    ran = CliRunner().invoke(app, [str(word) for word in words])
    assert (ran.exit_code == 0) is (code == 0), ran.output
    return ran.output if code == 0 else str(ran.exception)


def test_the_commands_that_are_printed_convert_and_measure(folder, run, monkeypatch):
    monkeypatch.chdir(folder)
    asked = ("convert", "run", "--to", "[fox]", "--out", "made", "--tokens", 320, "optimizer.warmup_steps=0")
    said = invoke(*asked)
    assert "layer 0: fox_rope with block=llama, gate_bias=4.848, gate=['forget', 'rotary']" in said
    assert "starting anew: blocks.*.attention.gate.members.*.forget_proj.weight" in said
    assert invoke(*asked) == said
    assert "give another folder" in invoke(*asked, "seed=3", code=2)
    lines = [line.partition("attnzoo ")[2].split() for line in said.splitlines() if " attnzoo " in line]
    assert [words[0] for words in lines] == ["train"] * 3 + ["evaluate"]
    for words in lines:
        told = invoke(*words)
    assert re.search(r"before: rope; after: fox_rope", told)
    assert re.search(r"pruned, % +- +\d", told)
    assert re.search(r"tokens/s, forward +[\d,]+ +[\d,]+ +x \d", told)
    assert load_run("made/text")[1].start_from == str(Path("made/distil"))


def test_networks_that_forget_are_trained_alone_first(folder, run):
    found = phases(run, folder / "out", "forgetting", ["model.attention_options.forgetting={window: 4}"], tokens=2000)
    assert [(c.objective, c.forgetting.alone) for c in found.values()] == [
        ("text", True), ("distil", True), ("text", False),
    ]  # fmt: skip
    assert found["text"].model.layers()[0].options["forgetting"]["window"] == 4
    schedules = [(c.forgetting.distill_steps, c.forgetting.anneal_steps) for c in found.values()]
    assert schedules == [(12, 300), (0, 19), (0, 0)]


def test_what_cannot_be_converted_is_named(folder, run, tmp_path):
    for to, overrides, given, said in (
        ("foks", [], {}, "unknown variant 'foks'.*did you mean 'fox'"),
        ("rope", [], {}, "--to: expected other layers than the model's own, got 'rope'"),
        (["fox", "same"], [], {}, "does not fill num_layers=1 evenly"),
        ("fox", ["model.attention_options.gate_biass=3"], {}, "unknown option 'gate_biass' .*did you mean 'gate_bias'"),
        ("forgetting", ["model.attention_options.acp=true"], {}, "--to forgetting: expected no changes .*, got acp"),
        ("forgetting", [], {"rotation": False}, "--to forgetting: expected no changes .*, got --drop-rotation"),
        ("fox", ["model.hidden_size=3"], {}, "model.hidden_size: the conversion sets it"),
        ("fox", ["teacher=x"], {}, "teacher: the conversion sets it"),
        ("fox", [], {"tokens": 10}, "--tokens: expected at least 240, two steps in each phase, got 10"),
    ):
        with pytest.raises(ValueError, match=said):
            LanguageModel(phases(run, folder / "out", to, overrides, **{"tokens": 2000, **given})["align"].model)
    with pytest.raises(FileNotFoundError, match="expected a run or a model folder, got '.*nowhere'"):
        phases(tmp_path / "nowhere", tmp_path, "fox")
    told = tmp_path / "told"
    shutil.copytree(folder / "model", told)
    (told / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    data = f"data.source={folder / 'text.txt'}"
    refused = invoke("convert", told, "--to", "fox", "--out", tmp_path / "x", data, code=2)
    assert re.search("is read byte by byte, and '.*told' has a tokenizer of its own", refused)
    broken = invoke("convert", run, "--to", "[fox", "--out", tmp_path / "x", code=2)
    assert broken == "--to: expected a variant, or a list such as '[mamba2, same]', got '[fox'"
    assert not (tmp_path / "x").exists()
