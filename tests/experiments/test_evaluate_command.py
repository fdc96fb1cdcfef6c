"""`attnzoo evaluate`: what may be measured, what becomes of a result, and mistakes by their names."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shlex
import shutil
import socket
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import tiny_runs
import torch
from click.testing import CliRunner
from pages import DOCS, FENCE

from attnzoo.cli import app
from attnzoo.config import load_config
from attnzoo.data import build_data, heldout_windows
from attnzoo.data.bpe import END, train_bpe
from attnzoo.data.config import WeightedSource
from attnzoo.data.tasks import Examples, build_task
from attnzoo.data.texts import held_out_names, stdlib_files
from attnzoo.data.tokenizer import read_tokenizer, tokenize
from attnzoo.evaluation import measure_context, measure_losses, measure_pruning
from attnzoo.experiments.evaluate import lines, measures
from attnzoo.experiments.evaluate.saved import file_name, find_model
from attnzoo.experiments.evaluate.table import EVALUATIONS, Common, measure
from attnzoo.models import LanguageModel
from attnzoo.trained.model import TrainedModel, held_out_text, load_trained
from attnzoo.training import load_run, train
from attnzoo.training.checkpoint import CheckpointError, checkpoints_in


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on text with two checkpoints."""
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_runs.write_text(folder)
    sizes = ("model={hidden_size: 16, intermediate_size: 16, num_layers: 2, num_heads: 2}", "data.context_length=32")
    train(tiny_runs.config_of(folder, "run", *sizes, "steps=4", "data.heldout_fraction=0.3"))
    return folder / "run"


def invoke(*arguments, code=0):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=code != 0)
    assert bool(done.exit_code) == bool(code), done.output
    return done


@pytest.mark.parametrize(("asked", "said"), [
    ("loss:tokens=1024", "256 tokens, 8 training contexts, 4"),
    ("loss:tokens=256", "128 tokens, 4 training contexts, 2"),
    ("loss:tokens=10", "32 tokens, a training context, 1"),
    ("loss:factor=3,tokens=10", "96 tokens, 3 training contexts, 1"),
])  # fmt: skip
def test_losses_say_their_windows_and_leave_room_for_two(run, asked, said, tmp_path, caplog):
    """8 training contexts of a long one would be one window, of more tokens than were asked for."""
    invoke(run, "--on", asked, "--out", tmp_path)
    assert f"loss: windows of {said} of them" in caplog.messages
    caplog.clear()
    invoke(run, "--on", "loss:tokens=10", "--length", 64, "--out", tmp_path)
    assert not caplog.messages


def test_several_processes_share_each_window_of_a_loss_and_of_nothing_else(run, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("attnzoo.training.launch.launch", lambda *arguments: given.append(arguments))
    words = [run, "--on=loss:tokens=256", "--length=64", "--device=cpu", f"--out={tmp_path / 'together'}"]
    invoke(*words, "--processes", 2)
    assert given == [([sys.executable, "-m", "attnzoo", "evaluate", *map(str, words)], 2)]
    refused = invoke(run, "--on", "loss", "--on", "pruning", "--processes", 2, code=1)
    assert str(refused.exception) == "--processes: only --on loss shares a text over processes, got loss, pruning"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launched = {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(measures, "measure_losses", lambda *given: seen.append(given[3]) or measure_losses(*given))
    invoke(*words)  # as a process of a launcher
    for name in launched:
        monkeypatch.delenv(name)
    invoke(*words[:-1], "--out", tmp_path / "alone")
    assert seen[0] is not None
    assert seen[1] is None
    files = [next((tmp_path / name).glob("*.json")) for name in ("together", "alone")]
    together, alone = (json.loads(file.read_text()) for file in files)
    assert together["options"] == alone["options"] == {"tokens": 256, "length": [64]}
    assert together["result"]["loss"] == pytest.approx(alone["result"]["loss"], abs=1e-6)


def test_results_of_another_model_are_not_written_over(run, tmp_path):
    asked = ("--on", "loss:tokens=256", "--out", tmp_path)
    for _ in range(2):  # its own are
        invoke(run, *asked)
    [file] = tmp_path.glob("*.json")
    kept = file.read_bytes()
    other = shutil.copytree(run, tmp_path / "other")
    done = invoke(other, *asked, code=1)
    assert f"folder of its own for the run {other}, and '{file}' is of the run {run}" in str(done.exception)
    assert file.read_bytes() == kept
    file.write_text("[]")
    assert "is of no evaluation" in str(invoke(run, *asked, code=1).exception)


SMALL = {
    "loss": "loss:factor=4,tokens=512",
    "haystack": "haystack:depths=2,digits=2",
    "pruning": "pruning",
    "eps": "eps:count=2,tokens=128",
    "context": "context:eps=0.1",
    "maps": "maps:tokens=8",
    "memory": "memory:halvings=2,piece=20",
}


def test_every_evaluation_gives_a_table_a_file_and_a_picture(run, tmp_path):
    on = [word for given in SMALL.values() for word in ("--on", given)]
    done = invoke(run, *on, "--length", 160, "--rows", 2, "--out", tmp_path)
    assert max(map(len, (line for line in done.output.splitlines() if str(tmp_path) not in line))) <= 80
    for name, given in SMALL.items():
        options = dict(one.split("=") for one in given.partition(":")[2].split(",") if one)
        options |= {} if name == "maps" else {"length": 160}
        stem = file_name(name, options | ({"rows": 2} if name == "haystack" else {}))
        assert f"{tmp_path / stem}.json" in done.output
        saved = json.loads((tmp_path / f"{stem}.json").read_text())
        assert saved["evaluation"] == name
        assert saved["model"] == f"the run {run}"
        assert saved["checkpoint"].startswith("step-00000004")
        assert saved["context"] == 32
        root = ElementTree.parse(tmp_path / f"{stem}.svg").getroot()
        assert root.tag.endswith("svg")
    assert "given up" in (tmp_path / "memory-halvings=2-piece=20-length=160.html").read_text()
    assert not (run / "evaluations").exists()
    assert {*SMALL, "lengths", "harness", "conversion"} == set(EVALUATIONS)


def test_loss_is_of_the_text_that_the_run_held_out(run):
    found = measure(load_trained(run), "loss", {"factor": 4, "tokens": 512}, Common())
    model, config = load_run(run)
    windows = torch.from_numpy(heldout_windows(build_data(config.data).heldout, 128, 512))
    np.testing.assert_allclose(found.loss, measure_losses(model, windows).loss, rtol=1e-6)
    assert (found.context, found.windows, len(found.loss)) == (32, 4, 128)


def test_result_goes_beside_the_run_and_pruning_is_followed_over_its_checkpoints(run):
    done = invoke(run, "--on", "pruning:eps=0.01")
    saved = json.loads((run / "evaluations" / "pruning-eps=0.01.json").read_text())
    steps = saved["result"]["steps"]
    assert [step["step"] for step in steps] == [2, 4]
    assert "local heads" in done.output
    too_short = "nothing can be pruned of 128 tokens or fewer"
    assert too_short in done.output
    for length, said in ((128, True), (129, False)):
        found = measure(load_trained(run), "pruning", {"eps": 0.9, "history": False}, Common(length=(length,)))
        assert (too_short in " ".join(lines.pruning(found))) is said
        assert not said or found.steps[0].share == 0
    first = load_trained(run, checkpoint=checkpoints_in(run / "checkpoints")[0])
    window = torch.from_numpy(heldout_windows(held_out_text(first), 32, 1))[0, :-1]
    assert steps[0]["heads"][0] == pytest.approx(measure_pruning(first.model, window).heads[0], abs=1e-6)
    alone = measure(load_trained(run), "pruning", {"history": False}, Common())
    assert [step.step for step in alone.steps] == [4]


@pytest.mark.parametrize(("length", "said"), [(128, True), (129, False)])
def test_sweep_of_eps_says_where_nothing_can_be_pruned(run, length, said):
    swept = measure(load_trained(run), "eps", {"count": 2, "tokens": 129}, Common(length=(length,)))
    assert ("nothing can be pruned of 128 tokens or fewer" in " ".join(lines.eps(swept))) is said


def test_damaged_earlier_checkpoint_is_named_with_what_to_do(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    first = checkpoints_in(tmp_path / "run" / "checkpoints")[0]
    weights = first / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # it can still be read
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"history: {weights}.*; move {first} away .* or give history=false"):
        measure(load_trained(tmp_path / "run"), "pruning", {}, Common())
    first.rename(tmp_path / "away")
    assert [step.step for step in measure(load_trained(tmp_path / "run"), "pruning", {}, Common()).steps] == [4]


def test_task_is_asked_at_growing_lengths(tmp_path):
    task = ("data.source=task:parity", "model.vocab_size=2", "steps=3")
    train(load_config(None, [f"output_dir={tmp_path / 'run'}", *tiny_runs.SMALL, *task]))
    found = json.loads(invoke(tmp_path / "run", "--on", "lengths:last_only=true", "--rows", 3, "--json").output)
    assert [row["length"] for row in found["result"]["answers"]] == [16, 32, 64, 128]
    assert [row["asked"] for row in found["result"]["answers"]] == [3] * 4
    own = json.loads(invoke(tmp_path / "run", "--rows", 3, "--length", 5, "--json").output)
    assert own["evaluation"] == "parity"
    assert own["options"] == {"length": [5], "rows": 3}
    assert own["result"]["answers"][0]["asked"] == 15
    assert (tmp_path / "run" / "evaluations" / "parity-length=5-rows=3.json").is_file()
    subject = load_trained(tmp_path / "run")
    row = Examples(build_task("parity"), 16, held_out=True)[0][0]
    maps = measure(subject, "maps", {"tokens": 6, "start": 2}, Common())
    assert maps.tokens == tuple("01"[bit] for bit in row[2:8])
    assert measure(subject, "context", {}, Common()) == measure_context(subject.model, torch.from_numpy(row), 0.01)
    longer = torch.from_numpy(Examples(build_task("parity"), 40, held_out=True)[0][0])
    [shares] = measure(subject, "pruning", {"history": False}, Common(length=(40,))).steps
    assert shares.heads == measure_pruning(subject.model, longer).heads
    others = Common(length=(5, 9), seed=3)  # which a task asked beside them reads
    assert measure(subject, "maps", {"tokens": 6, "start": 2}, others).tokens == maps.tokens
    assert measure(subject, "context", {}, Common(seed=3)) == measure(subject, "context", {}, Common())
    with pytest.raises(ValueError, match="expected room for 17 tokens in the 16 of the row"):
        measure(subject, "maps", {"tokens": 17}, Common())
    says = "is of 'parity', whose tokens stand for no text.*evaluated on parity, lengths, pruning, context and maps"
    for name, text in itertools.product(("loss", "eps", "memory"), (None, "stdlib")):
        with pytest.raises(ValueError, match=says):
            measure(subject, name, {}, Common(text=text))
    for name in ("haystack", "pruning", "context", "maps"):
        with pytest.raises(ValueError, match=says + ".*"):
            measure(subject, name, {}, Common(text="stdlib"))
    with pytest.raises(ValueError, match="tokens are others than those of 'needle'"):
        measure(load_trained(tmp_path / "run"), "haystack", {}, Common())


def test_needles_have_the_digits_that_the_run_was_trained_to_find(tmp_path):
    task = ("data.source=task:needle", "data.task_options.digits=2", "model.vocab_size=141", "steps=3")
    train(load_config(None, [f"output_dir={tmp_path / 'run'}", *tiny_runs.SMALL, *task]))
    subject = load_trained(tmp_path / "run")
    for options, digits in (({}, 2), ({"digits": 3}, 3)):
        found = measure(subject, "haystack", {"depths": 1, **options}, Common(rows=5))
        assert {answers.asked for picture in found.pictures for (answers, *_) in picture.answers} == {5 * digits}


def test_name_of_a_configuration_is_measured_with_fresh_weights(tmp_path):
    path = tmp_path / "mine.yaml"
    tiny_runs.write_text(tmp_path)
    path.write_text(
        f"data: {{source: {tmp_path / 'text.txt'}, context_length: 16, heldout_fraction: 0.3}}\n"
        "model: {hidden_size: 16, num_layers: 1, num_heads: 2}\n"
    )
    done = invoke(path, "--on", "loss:factor=2,tokens=64")
    assert done.output.startswith(f"{path} with fresh weights\n")
    subject = find_model(str(path))
    assert not list(tmp_path.rglob("evaluations"))
    losses = measure(subject, "loss", {"factor": 2, "tokens": 640}, Common()).loss
    assert losses.mean() == pytest.approx(math.log(256), rel=0.05)
    again = find_model(str(path)).model.embedding.weight
    assert torch.equal(again, subject.model.embedding.weight)


def test_a_text_has_the_tokens_that_training_would_have(tmp_path):
    pytest.importorskip("tokenizers")
    from tokenizers.processors import TemplateProcessing

    texts, theirs = tmp_path / "texts", tmp_path / "tokenizer.json"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"number {number}, not the {END} of a text\n" * 5)
    tokenizer = train_bpe([file.read_text() for file in texts.iterdir()], 290)
    tokenizer.add_special_tokens(["<s>"])
    first = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=first)  # as Llama's
    tokenizer.save(str(theirs))
    shards = tokenize([texts], tmp_path / "tokens", tokenizer=theirs, end=END).shards
    held = [int(name[0]) for name in held_out_names([f"{number}.txt" for number in range(4)], 0.05)]
    config = tiny_runs.config_of(tmp_path, "run", f"data.source={tmp_path / 'tokens'}", "model.vocab_size=300")
    subject = TrainedModel(
        "a run", LanguageModel(config.model), config=config, files=read_tokenizer(tmp_path / "tokens")
    )
    for number in held:
        found = held_out_text(subject, texts / f"{number}.txt")
        assert found.tolist() == shards.held_out[0].tokens.tolist()
    assert subject.encode("a")[0] == first[0][1]  # a prompt begins as the tokenizer has it


def test_other_text_may_be_given(run, tmp_path):
    (tmp_path / "b.txt").write_text("two" * 50)
    (tmp_path / "a.txt").write_bytes(b"one\r\n" * 50)
    subject = load_trained(run)
    tokens = held_out_text(subject, str(tmp_path))
    assert bytes(tokens.tolist()) == b"one\r\n" * 50 + b"\0" + b"two" * 50 + b"\0"
    assert held_out_text(subject, tmp_path) is tokens  # read once
    assert len(held_out_text(subject, "stdlib")) > 10**5
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    subject = load_trained(run)
    for text, message in ((tmp_path / "c.txt", "file, a folder of them or 'stdlib', got"), (tmp_path, "not UTF-8")):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            held_out_text(subject, str(text))
    (tmp_path / "b.txt").write_bytes(b"two\0" * 50)
    (tmp_path / "c.txt").write_bytes(b"three")
    for text, message in (
        ("b.txt", r"b\.txt' has a zero byte, which would"),
        ("c.txt", r"c\.txt' has 6 tokens: a length"),
    ):
        with pytest.raises(ValueError, match=message):
            raise invoke(run, "--on", "loss", "--text", tmp_path / text, "--out", tmp_path / "out", code=1).exception


def test_standard_library_is_held_out_as_the_run_held_it_out(run):
    subject = load_trained(run)
    usual = len(held_out_text(subject, "stdlib"))
    data = dataclasses.replace(subject.config.data, source="stdlib", heldout_fraction=0.01)
    mixed = dataclasses.replace(data, heldout_fraction=0.02, sources=[WeightedSource("stdlib"), WeightedSource("a")])
    fewer = [dataclasses.replace(subject.config, data=each) for each in (data, mixed)]
    lengths = [len(held_out_text(dataclasses.replace(subject, config=config, texts={}), "stdlib")) for config in fewer]
    files = stdlib_files()
    held = held_out_names(list(files), 0.01)
    assert lengths[0] == sum(len(files[name].read_bytes()) + 1 for name in held)
    assert lengths[0] < lengths[1] < usual
    whole = dataclasses.replace(subject.config, data=dataclasses.replace(mixed, heldout_source="a"))
    with pytest.raises(ValueError, match="text: expected another text than 'stdlib', on all of which .* was trained"):
        held_out_text(dataclasses.replace(subject, config=whole, texts={}), "stdlib")


def test_rows_that_are_too_short_for_a_needle_are_left_out_and_said(run):
    subject = load_trained(run)
    long = dataclasses.replace(subject.config, data=dataclasses.replace(subject.config.data, context_length=160))
    found = measure(dataclasses.replace(subject, config=long), "haystack", {"depths": 1}, Common(rows=1))
    assert [picture.lengths for picture in found.pictures] == [(160, 320)] * 2
    assert lines.haystack(found)[-1] == "left out, too short for the question: rows of 80 tokens"
    with pytest.raises(ValueError, match="length: expected at least .* for the needle, the question and the number, g"):
        measure(subject, "haystack", {}, Common(rows=1))
    with pytest.raises(ValueError, match="got 80"):
        measure(subject, "haystack", {}, Common((80, 320), rows=1))


def test_model_folders_are_measured_as_their_runs_are_others_too(run, tmp_path):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from attnzoo.trained.exchange import export_run

    text = str(run.parent / "text.txt")
    folder = export_run(run, tmp_path / "folder")
    common = Common(length=(64,), text=text)
    here, there = (measure(load_trained(path), "loss", {"tokens": 256}, common) for path in (run, folder))
    np.testing.assert_allclose(here.loss, there.loss, rtol=1e-4)
    assert there.context is None
    needle = {"mode": "standard", "depths": 1}
    assert measure(load_trained(folder), "haystack", needle, Common((160,), 1, text=text)).pictures[0].lengths == (160,)
    with pytest.raises(ValueError, match="names no data of its own"):
        measure(load_trained(folder), "loss", {}, Common(length=(64,)))
    with pytest.raises(ValueError, match="does not say its training context"):
        measure(load_trained(folder), "loss", {}, Common(text=text))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300)).eval()
    llama.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"has no tokenizer \(tokenizer.json\)"):
        measure(load_trained(tmp_path / "llama"), "loss", {}, common)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "llama" / file).write_bytes((folder / file).read_bytes())
    subject = load_trained(tmp_path / "llama")
    found = measure(subject, "loss", {"tokens": 64}, common)
    tokens = torch.from_numpy(heldout_windows(held_out_text(subject, text), 64, 64))
    with torch.no_grad():
        theirs = llama(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    np.testing.assert_allclose(found.loss, -theirs[0, :, 0].numpy(), rtol=1e-4)


def test_commands_of_the_how_to_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_runs.write_text(tmp_path)
    page = (DOCS / "how-to" / "evaluate.md").read_text()
    lines = [line for match in FENCE.finditer(page) if match[1] == "bash" for line in match[2].splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert [words[:3] for words in commands[:2]] == [
        ["attnzoo", "evaluate", "--list"],
        ["attnzoo", "evaluate", "fox-small"],
    ]
    del commands[1]  # of a larger model, for half a minute
    for _, name, *words in commands:
        if name == "train":
            sizes = ("steps=3", "data.source=text.txt", "data.heldout_fraction=0.5", "data.context_length=32")
            words = [*words, *tiny_runs.SMALL, *sizes]
            words = list({word.partition("=")[0]: word for word in words}.values())  # the small sizes for the page's
        elif words[0] == "tiny":
            words += ["--text", "text.txt"]
        words = [word.replace("1024", "192").replace("512", "160") for word in words]
        ran = CliRunner().invoke(app, [name, *words], catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
    assert {path.suffix for path in Path("runs/fox/evaluations").iterdir()} == {".json", ".svg"}
    assert [path.name for path in sorted(Path("long").iterdir())] == [
        "loss-tokens=65536-length=192.json",
        "loss-tokens=65536-length=192.svg",
    ]
    listed = CliRunner().invoke(app, ["evaluate", "--list"]).output
    assert all(f"| `{line.partition(':')[0]}` |" in page for line in listed.splitlines()[:-1] if line[0] != " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "los"], "did you mean 'loss'"),
        (["--on", "loss:fctor=2"], "did you mean 'factor'"),
        (["--on", "loss:factor=two"], "factor: expected a whole number"),
        (["--on", "loss:factor=2,factor=3"], "option 'factor=3': expected factor once, got it twice"),
        (["--on", "loss:factor=1:30"], "factor: expected a whole number"),
        (["--on", "loss:factor=1e-1"], r"factor: expected a whole number.*0\.1"),
        (["--on", "loss:factor=0"], "expected at least 1, got 0"),
        (["--on", "loss", "--rows", "3"], "--rows: loss does not read it"),
        (["--on", "loss", "--length", "8", "--length", "9"], r"expected one, .* got \[8, 9\]"),
        (["--on", "loss", "--length", "99999"], "a length of 99999 needs"),
        (["--on", "haystack:mode=eay"], "did you mean 'easy'"),
        (["--on", "maps:layer=7"], "numbers from 0 to 1, got 7"),
        (["--on", "maps:start=999999"], "expected room for 32 tokens"),
        (["--on", "harness"], "expected task=..., got none"),
        (["--on", "parity"], "not of a task: it cannot be asked 'parity'"),
        ([], "has no task of its own"),
    ],
)
def test_mistake_is_named(run, arguments, message):
    done = invoke(run, *arguments, code=1)
    with pytest.raises((ValueError, SystemExit), match=message):
        raise done.exception


def test_a_place_that_nothing_can_be_written_to_is_refused_before_anything_is_measured(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("attnzoo.experiments.evaluate.table.measure", None)
    done = invoke(run, "--on", "loss", "--out", tmp_path / "file" / "here", code=1)
    assert re.search("--out='.*here': '.*file' is not a folder", str(done.exception))


def test_what_is_not_there_is_named():
    done = invoke("tinny", "--on", "loss", code=1)
    assert "did you mean 'tiny'" in str(done.exception)


def test_list_names_every_evaluation_with_its_options():
    listed = invoke("--list").output
    for name, evaluation in EVALUATIONS.items():
        assert f"{name}: {evaluation.summary}" in listed
        assert all(f"  {option}=" in listed for option in evaluation.options)
        assert list(evaluation.words) == list(evaluation.options)  # each is said to be something
    assert "  eps=4.54e-05: weight that a row may lose." in listed


def test_earlier_checkpoints_are_measured_in_the_weights_dtype_that_was_asked_for(run, monkeypatch):
    seen = []
    monkeypatch.setattr(measures, "measure_pruning", lambda model, *_: seen.append(model.embedding.weight.dtype))
    measure(load_trained(run, dtype=torch.bfloat16), "pruning", {}, Common())
    assert seen == [torch.bfloat16] * 2
