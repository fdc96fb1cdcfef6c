"""The small trained models: how they are made, and that they are read by name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from rich.console import Console

from attnzoo.evaluation import token_losses
from attnzoo.experiments.builtin import built_in
from attnzoo.experiments.compare import CompareConfig, plan, run_comparison
from attnzoo.experiments.evaluate.saved import find_model
from attnzoo.models import LanguageModel
from attnzoo.models.swap import Unfilled
from attnzoo.trained import exchange
from attnzoo.trained import model as trained_model
from attnzoo.trained.continuation import Continuation, load_text_model
from attnzoo.trained.conversion import phases, write_phases
from attnzoo.training import load_run, read_metrics, small
from attnzoo.training.checkpoint import CheckpointError
from attnzoo.training.recipe import load_config

SMALL = built_in("compare")["small"]
TINY = (
    "train.model.hidden_size=16", "train.model.num_layers=1", "train.model.num_heads=1", "train.steps=2",
    "train.model.intermediate_size=16", "train.batch_size=2", "train.data.context_length=32", "train.compile=false",
    "train.optimizer.warmup_steps=1", "train.eval_tokens=64", "train.progress=quiet", "train.device=cpu",
    "evaluate.tokens=64", "evaluate.block=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of the packed models, and of their runs, all made as `make small` makes them but tiny."""
    folder = tmp_path_factory.mktemp("small")
    for number in range(3):
        file = folder / "small_text" / f"{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"x{n} = {n * number}\n" for n in range(200)))
    places = (f"output_dir={folder / 'runs'}", f"train.data.source={folder / 'small_text'}")
    run_comparison(load_config(SMALL, [*TINY, *places], schema=CompareConfig), Console(quiet=True))
    for run in (folder / "runs").glob("*-small"):
        exchange.bare_run(run, folder / "packed" / run.name)
    return folder


def test_small_models_are_two_pairs_of_one_size_under_eight_megabytes():
    runs = plan(load_config(SMALL, schema=CompareConfig))
    assert [run.label for run in runs] == ["mamba2-small", "fox-small", "gated_deltanet-small", "path_fox-small"]
    for run in runs:
        with torch.device("meta"), Unfilled():
            model = LanguageModel(run.config.model)
        assert sum(2 * p.numel() for p in model.parameters()) < 8e6
        assert run.config.data.context_length == 4096


def test_the_small_models_of_the_package_know_python():
    """Each is far from a fresh model's 5.5 nats per byte on a text that it has not seen."""
    assert small.small_models() == sorted(run.label for run in plan(load_config(SMALL, schema=CompareConfig)))
    text = Path(argparse.__file__).read_text(encoding="utf-8")[2000:3024]
    for name in small.small_models():
        model = trained_model.load_trained(name)
        tokens = torch.tensor([model.encode(text)])
        assert token_losses(model.model, tokens)[0, 256:].mean() < 2, name
        (last,) = [row for row in read_metrics(small.SMALL / name) if row["kind"] == "eval"]
        assert last["step"] == 600
        assert last["loss"] < 0.9
        assert sum(file.stat().st_size for file in (small.SMALL / name).rglob("*")) < 8e6


def test_a_small_model_gives_keys_up_and_says_the_same():
    """FoX has learnt to forget: eviction leaves few of its keys, and the likeliest text is the same."""
    prompt = Path(argparse.__file__).read_text(encoding="utf-8")[2000:2512]
    model = load_text_model("fox-small", "cpu")
    all_keys, few = (Continuation(model, prompt, 16, evict, sampling={"temperature": 0.0}) for evict in (None, 1e-4))
    assert "".join(all_keys) == "".join(few)
    kept = sum(sum(heads) for heads in few.request.kept)
    assert 0 < kept < 0.4 * sum(sum(heads) for heads in all_keys.request.kept)


def test_a_bare_run_is_the_run_in_bfloat16_and_nothing_else(made):
    for run in (made / "runs").glob("*-small"):
        packed = made / "packed" / run.name
        (model, config), (bare, same) = load_run(run), load_run(packed)
        assert config == same
        for (name, x), (other, y) in zip(model.state_dict().items(), bare.state_dict().items(), strict=True):
            assert name == other
            torch.testing.assert_close(y.float(), x.to(y.dtype).float(), rtol=0, atol=0)
        assert {p.dtype for p in bare.parameters() if p.dim() > 1} == {torch.bfloat16}
        (checkpoint,) = (packed / "checkpoints").iterdir()
        assert {f.name for f in checkpoint.iterdir()} == {"model.safetensors", "progress.json", "digests.json"}
        assert read_metrics(packed) == read_metrics(run)


def test_a_small_model_is_found_by_its_name(made, monkeypatch):
    monkeypatch.setattr(small, "SMALL", made / "packed")
    model = load_text_model("fox-small", "cpu")
    assert {p.dtype for p in model.model.parameters()} == {torch.float32}
    assert "".join(Continuation(model, "x1 = ", 5, sampling={"temperature": 0.0})) is not None
    found = find_model("path_fox-small")
    assert found.model.config.layers()[0].name == "path_fox"
    assert found.folder is None  # so that no evaluation is written into the package


def test_a_small_model_is_converted_by_its_name(made, monkeypatch, tmp_path):
    monkeypatch.setattr(small, "SMALL", made / "packed")
    found = phases(Path("fox-small"), tmp_path, "mamba2", [f"data.source={made / 'small_text'}"], tokens=2**20)
    assert [(each.start_from, each.teacher) for each in found.values()] == [
        ("fox-small", "fox-small"), (str(tmp_path / "align"), "fox-small"), (str(tmp_path / "distil"), None),
    ]  # fmt: skip
    write_phases(Path("fox-small"), tmp_path, found)
    assert load_config(tmp_path / "align.yaml").model.layers()[0].name == "mamba2"


def test_a_small_model_is_not_measured_on_another_text_than_the_one_it_held_out(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = trained_model.load_trained("mamba2-small")
    with pytest.raises(ValueError, match="text: expected a file, a folder or 'stdlib', for what mamba2-small held out"):
        trained_model.held_out_text(model)
    (tmp_path / "small_text").mkdir()
    for name in "ab":
        (tmp_path / "small_text" / f"{name}.py").write_text(f"{name} = 1\n" * 5000)
    with pytest.raises(CheckpointError, match="other data"):
        trained_model.held_out_text(model)


def test_an_unknown_name_is_answered_with_the_nearest_small_model(made, monkeypatch):
    monkeypatch.setattr(small, "SMALL", made / "packed")
    with pytest.raises(FileNotFoundError, match="did you mean 'fox-small'"):
        load_text_model("fox-smal", "cpu")
    with pytest.raises(FileNotFoundError, match="one of .*, fox-small, .*did you mean 'fox-small'"):
        find_model("fox-smal")


def test_a_folder_of_that_name_goes_before_the_small_model(made, monkeypatch, tmp_path):
    monkeypatch.setattr(small, "SMALL", made / "packed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fox-small").mkdir()
    with pytest.raises(FileNotFoundError, match=r"neither config.yaml nor config.json"):
        load_text_model("fox-small", "cpu")
