"""A run becomes a model folder that transformers loads, whole or not at all; and a run starts from a folder."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from attnzoo.config import DataConfig, ModelConfig, load_config
from attnzoo.data.sources import decode, encode
from attnzoo.data.tokenizer import parse_tokenizer, tokenize
from attnzoo.models import LanguageModel
from attnzoo.trained import exchange
from attnzoo.trained.model import load_trained
from attnzoo.training import load_run, train
from attnzoo.training.start import start_from

transformers = pytest.importorskip("transformers")

from attnzoo.models.hf import AttnzooForCausalLM  # noqa: E402

SMALL = (
    "model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "steps=1", "data.context_length=16",
    "batch_size=2", "eval_tokens=50", "progress=quiet", "optimizer.warmup_steps=0",
)  # fmt: skip


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
    return exchange.export_run(run, tmp_path_factory.mktemp("models") / "mine")


def test_loaded_model_is_the_runs(run, folder):
    model, _ = load_run(run)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([encode("3 and 4 make")])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    text = loaded.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(text, model.generate(tokens, 5, temperature=0))


def test_a_run_with_weights_in_bfloat16_is_exported_so(run, tmp_path):
    config = load_config(run / "config.yaml", [f"output_dir={tmp_path / 'run'}", "mixed_precision=pure_bf16"])
    model, _ = load_run(train(config))
    folder = exchange.export_run(tmp_path / "run", tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for (name, x), theirs in zip(model.named_parameters(), loaded.model.parameters(), strict=True):
        assert x.dtype == theirs.dtype, name
        assert torch.equal(x, theirs), name
    assert {x.dtype for x in loaded.parameters()} == {torch.bfloat16, torch.float32}
    tokens = torch.tensor([encode("3 and 4 make")])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


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


def test_a_pipeline_writes_several_texts_at_once(folder):
    write = transformers.pipeline("text-generation", model=str(folder), device="cpu")
    options = {"max_new_tokens": 4, "do_sample": False, "batch_size": 2}
    together = write(["3 and", "a longer prompt"], **options)
    assert together[0] == write("3 and", **options)
    assert together[1][0]["generated_text"].startswith("a longer prompt")


def test_a_run_keeps_the_tokenizer_of_its_tokens_and_export_carries_it(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(500)))
    shards = tokenize([tmp_path / "text.txt"], tmp_path / "tokens", vocab_size=300).shards
    content = shards.tokenizer.read_bytes()
    options = ["model.vocab_size=310", f"data.source={shards.folder}", f"output_dir={tmp_path / 'run'}"]
    run = train(load_config(None, [*SMALL, *options]))
    shutil.rmtree(shards.folder)
    subject = load_trained(run)
    assert (
        subject.encode("3 and 4 make") == parse_tokenizer(content).encode("3 and 4 make").ids != encode("3 and 4 make")
    )
    assert subject.decode(subject.encode("3 and 4 make")) == "3 and 4 make"
    folder = exchange.export_run(run, tmp_path / "model")
    assert (folder / "tokenizer.json").read_bytes() == content
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (model.config.eos_token_id, model.config.pad_token_id, tokenizer.eos_token_id) == (0, 0, 0)
    prompt = tokenizer("3 and 4 make", return_tensors="pt")
    assert set(prompt) == {"input_ids", "attention_mask"}
    written = model.generate(**prompt, max_new_tokens=20, do_sample=True)[0]
    assert tokenizer.decode(written).startswith("3 and 4 make")
    assert tokenizer.decode([305, 309]) == ""  # beyond the tokenizer's vocabulary


def test_card_says_what_the_model_is(folder):
    card = (folder / "README.md").read_text()
    assert "mamba2, fox" in card
    assert "for 2 steps" in card


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="expected a folder that is empty.*" + tmp_path.name):
        exchange.export_run(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_a_failure_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(exchange, "_card", fail)
    with pytest.raises(OSError, match="no space"):
        exchange.export_run(run, tmp_path / "model")
    assert not list(tmp_path.iterdir())


# starting from a folder


def starting(tmp_path, source, *options):
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(500)))
    sizes = ["model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "batch_size=2", "eval_tokens=50"]
    rest = ["progress=quiet", "optimizer.warmup_steps=0", "optimizer.lr=1e-12", "steps=1", "data.context_length=16"]
    places = [f"data.source={tmp_path / 'text.txt'}", f"output_dir={tmp_path / 'run'}", f"start_from={source}"]
    return train(load_config(None, [*sizes, *rest, *places, *options]))


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_a_run_starts_from_weights(kind, run, folder, tmp_path):
    started, _ = load_run(starting(tmp_path, {"run": run, "folder": folder}[kind], "model.attention=[mamba2,fox]"))
    for (name, ours), (_, theirs) in zip(started.named_parameters(), load_run(run)[0].named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_another_variant_starts_from_what_both_have(run, tmp_path, caplog):
    swapped_run = starting(tmp_path, run, "model.attention=[mamba2,path_fox]")
    swapped, _ = load_run(swapped_run)
    before, _ = load_run(run)
    torch.testing.assert_close(swapped.blocks[1].attention.q_proj.weight, before.blocks[1].attention.q_proj.weight)
    (line,) = [record.getMessage() for record in caplog.records if "starting anew" in record.getMessage()]
    assert "starting anew: blocks.*.attention.gate.members.*.w_down.weight" in line
    assert line.endswith("left there: none")
    theirs = before.blocks[1].attention.gate.forget_proj
    torch.testing.assert_close(swapped.blocks[1].attention.gate.members[1].forget_proj.weight, theirs.weight)
    back = LanguageModel(replace(before.config, attention=["mamba2", "fox"]))
    start_from(back, str(swapped_run), DataConfig(source=str(tmp_path / "text.txt")))
    torch.testing.assert_close(back.blocks[1].attention.gate.forget_proj.weight, theirs.weight)


def test_what_two_projections_of_a_gate_call_alike_starts_anew(tmp_path, caplog):
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    one = LanguageModel(ModelConfig("fox", {"gate": "softplus"}, **sizes))
    two = LanguageModel(ModelConfig("gated_wall", {"gate": ["channel_softplus", "softplus"]}, **sizes))
    AttnzooForCausalLM.of(one).save_pretrained(tmp_path)
    start_from(two, str(tmp_path), DataConfig())
    (line,) = [record.getMessage() for record in caplog.records if "starting anew" in record.getMessage()]
    assert "gate.members.*.log_a" in line.partition("left there")[0]
    assert torch.equal(two.blocks[0].attention.gate.members[1].dt_bias, one.blocks[0].attention.gate.dt_bias)


def test_a_head_starts_as_the_embedding_that_it_was(run, tmp_path):
    data = [f"data.source={run.parent / 'text.txt'}", f"output_dir={tmp_path / 'tied'}", "model.tie_embeddings=true"]
    source, _ = load_run(train(load_config(None, [*SMALL, *data])))
    for tied in (True, False):
        model = LanguageModel(replace(source.config, tie_embeddings=tied))
        start_from(model, str(tmp_path / "tied"), DataConfig())
        assert torch.equal(model.embedding.weight, source.embedding.weight)
        assert torch.equal(model.head.weight, source.embedding.weight)


def test_a_head_of_its_own_is_not_taken_for_the_embedding(run, folder):
    model = LanguageModel(replace(load_run(run)[0].config, tie_embeddings=True))
    for source in (run, folder):
        with pytest.raises(ValueError, match=r"start_from: the head of .* is not its embedding, .*tie_embeddings"):
            start_from(model, str(source), DataConfig())


def test_a_run_that_goes_on_does_not_start_again(run, tmp_path, caplog):
    options = ["model.attention=[mamba2,fox]", "checkpoint_every=1"]
    starting(tmp_path, run, *options)
    caplog.clear()
    starting(tmp_path, run, *options)
    assert not [record for record in caplog.records if "starting anew" in record.getMessage()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.vocab_size=300"], r"embedding\.weight has the shape \[256, 16\]"),
        (["start_from=nowhere"], "start_from: expected a run or a model folder, got 'nowhere', which does not exist"),
        (["start_from=fox-smal"], "which does not exist; did you mean 'fox-small'?"),
        (["start_from=fox-small"], "in 'fox-small', and"),  # which is found, and is wider
    ],
)
def test_what_cannot_be_started_from_is_named(options, message, run, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        starting(tmp_path, run, "model.attention=[mamba2,fox]", *options)


def test_data_by_another_tokenizer_is_refused(run, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(500)))
    shards = tokenize([text], tmp_path / "tokens", vocab_size=280).shards
    options = ["model.attention=[mamba2,fox]", "model.vocab_size=280", f"data.source={shards.folder}"]
    for source in (run, folder):
        with pytest.raises(ValueError, match="tokens' has tokens of another one, and .* has a tokenizer of its own"):
            starting(tmp_path, source, *options)
    other = train(load_config(None, [*SMALL, *options[1:], f"output_dir={tmp_path / 'other'}"]))
    with pytest.raises(ValueError, match=r"is read byte by byte, .*tokenize --tokenizer .*other/tokenizer` writes"):
        starting(tmp_path, other, "model.vocab_size=280")
    starting(tmp_path, other, "model.num_layers=1", *options[1:])


def test_an_imported_llama_trains_on_as_fox(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    exchange.import_model(tmp_path / "llama", tmp_path / "ours")
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(500)))
    small = ["steps=2", "batch_size=2", "eval_tokens=50", "progress=quiet", "optimizer.warmup_steps=0"]
    places = [f"data.source={tmp_path / 'text.txt'}", f"output_dir={tmp_path / 'run'}", "data.context_length=16"]
    run = train(load_config(tmp_path / "ours" / "train.yaml", ["model.attention=fox", *small, *places]))
    exchange.export_run(run, tmp_path / "fox")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fox")
    assert model.config.attention == "fox"
    assert model.generate(torch.tensor([encode("3 and")]), max_new_tokens=3).shape == (1, 8)
