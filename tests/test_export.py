"""A run becomes a model folder that transformers loads, whole or not at all."""

from __future__ import annotations

import pytest
import torch

from attnzoo.config import load_config
from attnzoo.data.sources import decode, encode
from attnzoo.training import export, load_run, train

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(500)))
    sizes = ["model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.attention=[mamba2,fox]"]
    steps = ["steps=2", "batch_size=2", "eval_tokens=50", "progress=quiet", "optimizer.warmup_steps=1"]
    data = [f"data.source={folder / 'text.txt'}", "data.context_length=16", f"output_dir={folder / 'run'}"]
    return train(load_config(None, [*sizes, *steps, *data]))


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    return export.export_run(run, tmp_path_factory.mktemp("models") / "mine")


def test_loaded_model_is_the_runs(run, folder):
    model, _ = load_run(run)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([encode("3 and 4 make")])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    text = loaded.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(text, model.generate(tokens, 5, temperature=0))


@pytest.mark.parametrize("text", ["3 and 4 make 7.\n", "naïve Ġ Ā čafé 漢字 \t\r\n", "", "a  b"])
def test_tokenizer_gives_the_bytes(folder, text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(encode(text)) == text == decode(encode(text))


def test_every_byte_has_a_token(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 256
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)


def test_card_says_what_the_model_is(folder):
    card = (folder / "README.md").read_text()
    assert "mamba2, fox" in card
    assert "for 2 steps" in card


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="expected a folder that is empty.*" + tmp_path.name):
        export.export_run(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_a_failure_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(export, "_card", fail)
    with pytest.raises(OSError, match="no space"):
        export.export_run(run, tmp_path / "model")
    assert not list(tmp_path.iterdir())
