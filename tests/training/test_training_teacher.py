"""Training runs that learn from another model: layer by layer, and from its logits."""

from __future__ import annotations

import shutil

import pytest
import torch
from tiny_runs import StoppedError, config_of, numbers, outcome, stop_at, write_text

from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel
from attnzoo.training import load_run, read_metrics, train
from attnzoo.training.checkpoint import CheckpointError
from attnzoo.training.teacher import _aligned, learn_from

DEEP = ("model.num_layers=2", "model.attention=rope")
TO_FOX = ("model.num_layers=2", "model.attention=[rope,fox]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a finished run, `first`, of RoPE."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    train(config_of(folder, "first", *DEEP))
    return folder


def learning(folder, run, objective, *overrides):
    first = folder / "first"
    given = (f"start_from={first}", f"teacher={first}", f"objective={objective}")
    return config_of(folder, run, *TO_FOX, *given, *overrides)


def losses(run):
    return [row["loss"] for row in read_metrics(run) if row["kind"] == "train"]


def test_alignment_changes_the_layers_that_differ_alone_and_brings_them_nearer(folder):
    run = train(learning(folder, "aligned", "align", "steps=16"))
    first, aligned = (dict(load_run(folder / name)[0].named_parameters()) for name in ("first", "aligned"))
    moved = {name for name in first if not torch.equal(first[name], aligned[name])}
    assert moved == {f"blocks.1.attention.{name}_proj.weight" for name in "qkvo"}
    found = losses(run)
    assert found[-1] < 0.8 * found[0] < 1


def test_losses_are_those_of_their_definitions(folder):
    teacher, _ = load_run(folder / "first")
    teacher.requires_grad_(False)
    torch.manual_seed(3)
    tokens, targets = torch.randint(256, (2, 9)), torch.randint(256, (2, 9))
    targets[0, 4:] = -100
    counted = targets != -100
    for objective in ("align", "distil"):
        student = LanguageModel(config_of(folder, "-", *TO_FOX).model).train()
        learn_from(teacher, student, objective)
        found = student(tokens, targets=targets, with_logits=False).loss
        if objective == "distil":
            p, q = (model(tokens).logits.log_softmax(-1) for model in (teacher, student.eval()))
            each = (p.exp() * (p - q)).sum(-1)
        else:
            states = []
            teacher.hidden(tokens, states=states)
            x = teacher.blocks[1].attention_norm(states[1])
            a, b = (model.blocks[1].attention(x) for model in (student, teacher))
            each = (a - b).square().sum(-1) / b.square().sum(-1)
        torch.testing.assert_close(found, each[counted].mean())
        assert student.eval()(tokens, targets=targets).loss > 1  # of the text


def test_layers_that_share_the_first_ones_values_are_aligned_on_the_teachers():
    torch.manual_seed(3)
    later = {"name": "gla", "options": {"value_residual": 3, "head_dim": 8}}
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}
    teacher, student = (
        LanguageModel(ModelConfig([first, later], **sizes)) for first, later in (("fox", later), ("rope", later))
    )
    student.blocks[1].load_state_dict(teacher.blocks[1].state_dict())
    tokens = torch.randint(256, (2, 9))
    errors = {}
    for names in ([0], [0, 1]):
        with torch.no_grad():
            errors[len(names)] = float(_aligned(names, teacher, student, tokens, tokens))
    assert errors[2] == pytest.approx(errors[1] / 2)  # the second layer is the teacher's, of the teacher's values


def test_a_teacher_of_the_same_weights_teaches_nothing(folder):
    same = ("model.attention=rope", "objective=distil", "steps=1", "optimizer.warmup_steps=0")
    run = train(learning(folder, "same", "distil", *same))
    [row] = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert abs(row["loss"]) < 1e-6
    assert row["grad_norm"] < 1e-5


@pytest.mark.parametrize("objective", ["align", "distil"])
def test_parts_and_recomputation_change_no_loss_and_a_stop_no_bit(folder, objective):
    anew = ("start_from=null", "steps=4", "eval_every=0")  # a divergence of 0.001 would be rounded to three digits
    whole = train(learning(folder, f"{objective}-whole", objective, *anew))
    config = learning(folder, f"{objective}-stopped", objective, *anew)
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(3))
    assert outcome(train(config)) == outcome(whole)
    slower = ("gradient_accumulation=2", "recompute=true")
    parts = train(learning(folder, f"{objective}-parts", objective, *anew, *slower))
    for one, other in zip(numbers(whole), numbers(parts), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_teacher_that_has_changed_is_refused(folder):
    train(config_of(folder, "other", *DEEP, "steps=2", "seed=1", "optimizer.warmup_steps=1"))
    config = learning(folder, "changed", "distil")
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(5))
    changed = learning(folder, "changed", "distil", f"teacher={folder / 'other'}")
    with pytest.raises(CheckpointError, match="has learnt from another teacher: .*other' has changed since"):
        train(changed)


def test_teachers_that_cannot_teach_are_refused_by_name(folder, tmp_path):
    for overrides, said in (
        (("objective=align", "teacher=null"), "teacher: expected a run or a model folder with align, got None"),
        (("objective=text",), "teacher: expected null with objective=text"),
        (("objective=distill",), "objective"),
        (("objective=align", "sharding=fsdp"), "beside which sharding=fsdp is not served"),
    ):
        with pytest.raises(ValueError, match=said):
            learning(folder, "-", "distil", *overrides)
    told = tmp_path / "told"
    shutil.copytree(folder / "first", told)
    (told / "tokenizer").mkdir()
    (told / "tokenizer" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    for overrides, said in (
        ((f"teacher={tmp_path / 'none'}",), "teacher: expected a run or a model folder, got '.*none'"),
        (("model.vocab_size=300", "start_from=null"), "teacher: expected a model with vocab_size=300, .* got 256"),
        (("objective=align", "model.hidden_size=32", "start_from=null"), "teacher: .* hidden_size=32, .* got 16"),
        (("objective=align", "model.attention=rope"), "objective=align: expected layers other than those of"),
        ((f"teacher={told}",), "teacher: data.source=.* is read byte by byte, and '.*told' has a tokenizer of its own"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            train(learning(folder, "refused", "distil", *overrides))
