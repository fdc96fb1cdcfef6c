"""What a tokenizer puts before and behind texts: prompts begin with it, nothing ends in it, and runs never saw it."""

import json
import shutil

import numpy as np
import pytest
from tiny_runs import config_of, said

from attnzoo.data.tasks import Examples
from attnzoo.evaluation.needle import text_needle
from attnzoo.training import train

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from hf_models import build  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from attnzoo.data.tokenizer import opening, parse_tokenizer, tokenize, unadorned  # noqa: E402
from attnzoo.trained.continuation import load_text_model  # noqa: E402
from attnzoo.trained.exchange import export_run  # noqa: E402
from attnzoo.trained.model import held_out_text, load_trained  # noqa: E402

WORDS = ["<s>", "</s>", "the", "cat", "sat", "on", "mat", "The", "secret", "number", "is", "What", "Answer"]
WORDS += [str(n) for n in range(10)] + list(".?:")
TEMPLATES = {"$A": ([], []), "<s> $A": ([0], []), "$A </s>": ([], [1]), "<s> $A </s>": ([0], [1])}


def words(template):
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="on"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if template != "$A":
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return tokenizer


def folder_of(path, template, **settings):
    """A model folder with that tokenizer."""
    build("fox", vocab_size=len(WORDS)).save_pretrained(path)
    words(template).save(str(path / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_begin_with_it_and_end_in_the_text(template, tmp_path):
    before, behind = TEMPLATES[template]
    tokenizer = words(template)
    assert opening(tokenizer) == before
    assert tokenizer.encode("the cat").ids == [*before, 2, 3, *behind]
    folder = folder_of(tmp_path / "model", template)
    subject = load_trained(folder)
    for encode in (subject.encode, load_text_model(folder, "cpu").encode):
        assert encode("the cat") == [*before, 2, 3]
        assert encode("") == before
        assert encode("the </s> cat") == [*before, 2, 1, 3]
    (tmp_path / "text.txt").write_text("the cat sat")
    assert held_out_text(subject, tmp_path / "text.txt").tolist() == [*before, 2, 3, 4, 1]  # ends once
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": b'{"add_bos_token": true}'}
    plain = unadorned(files)
    assert parse_tokenizer(plain["tokenizer.json"]).encode("the cat").ids == [2, 3]
    assert json.loads(plain["tokenizer_config.json"]) == {"add_bos_token": not (before or behind)}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_needle_asks_for_the_number(template, tmp_path):
    subject = load_trained(folder_of(tmp_path / "model", template))
    task = text_needle(np.full(500, 3), subject.encode, "standard", digits=1)(0.5)
    tokens, targets = Examples(task, 60, 1, held_out=True)[0]
    asked = targets[targets >= 0]
    assert [WORDS[n] for n in asked] == [WORDS[tokens[list(tokens).index(WORDS.index("is")) + 1]]]
    assert WORDS[asked[0]].isdigit()
    assert not {0, 1} & set(tokens.tolist())


def test_a_run_is_asked_as_it_was_trained(tmp_path):
    """`tokenize` writes documents with nothing around them; the run, its export and transformers prompt alike."""
    from transformers import AutoTokenizer

    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(4):
        (texts / f"{n}.txt").write_text("the cat sat on the mat . " * 20)
    given = folder_of(tmp_path / "given", "<s> $A", add_bos_token=True)
    tokenize([texts], tmp_path / "tokens", tokenizer=given, heldout_fraction=0.3)
    model = f"model={{hidden_size: 32, intermediate_size: 32, num_layers: 1, num_heads: 2, vocab_size: {len(WORDS)}}}"
    run = train(config_of(tmp_path, "run", f"data.source={tmp_path / 'tokens'}", "data.context_length=8", model))
    out = export_run(run, tmp_path / "out")
    assert 0 not in held_out_text(load_trained(run))[:].tolist()
    for source in (run, out):
        assert load_trained(source).encode("the cat") == load_text_model(source, "cpu").encode("the cat") == [2, 3]
    assert AutoTokenizer.from_pretrained(out)("the cat")["input_ids"] == [2, 3]


@pytest.mark.parametrize(("config", "generation", "settings", "expected"), [
    ({"eos_token_id": None}, None, {}, [1]),
    ({"eos_token_id": [1, 6]}, None, {}, [1, 6]),
    ({"eos_token_id": 5}, {"eos_token_id": [5, 6]}, {}, [1, 5, 6]),
    ({"eos_token_id": 5}, None, {"eos_token": None}, [5]),
    ({"eos_token_id": None}, None, {"eos_token": None}, []),
])  # fmt: skip
def test_all_tokens_that_end_a_text_do(config, generation, settings, expected, tmp_path):
    """A chat model's settings name more of them than its tokenizer."""
    folder = folder_of(tmp_path / "model", "$A", **settings)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    subject = load_trained(folder)
    assert load_text_model(folder, "cpu").stop == subject.stop == set(expected)
    assert subject.end == next(iter(expected), None)


def test_a_run_that_begins_anew_keeps_no_other_tokenizer(tmp_path):
    """An attempt may have died before its first checkpoint, and the next one read other data."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat . " * 60)
    for name in "ab":
        tokenize([tmp_path / "text.txt"], tmp_path / name, tokenizer=folder_of(tmp_path / f"{name}0", "$A"))
    content = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(content))  # the same in other bytes
    model = f"model={{hidden_size: 32, intermediate_size: 32, num_layers: 1, num_heads: 2, vocab_size: {len(WORDS)}}}"
    for name in "ab":
        settings = (f"data.source={tmp_path / name}", "data.context_length=8", model)
        run = train(config_of(tmp_path, "run", *settings))
        kept = (run / "tokenizer" / "tokenizer.json").read_bytes()
        assert kept == (tmp_path / name / "tokenizer.json").read_bytes()
        shutil.rmtree(run / "checkpoints")


def test_a_run_that_goes_on_says_that_the_tokenizer_of_its_data_is_another(tmp_path, caplog):
    """Its tokens are the same, so it goes on, and keeps its own."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat . " * 60)
    tokenize([tmp_path / "text.txt"], tmp_path / "data", tokenizer=folder_of(tmp_path / "own", "$A"))
    model = f"model={{hidden_size: 32, intermediate_size: 32, num_layers: 1, num_heads: 2, vocab_size: {len(WORDS)}}}"
    config = config_of(tmp_path, "run", f"data.source={tmp_path / 'data'}", "data.context_length=8", model)
    run = train(config)
    kept = (run / "tokenizer" / "tokenizer.json").read_bytes()
    train(config)
    assert not said(caplog)
    changed = kept.replace(b'"cat"', b'"dog"')
    (tmp_path / "data" / "tokenizer.json").write_bytes(changed)
    train(config)
    assert said(caplog) == [
        f"tokenizer.json of the data is not the one that this run began with, which stays: {run / 'tokenizer'}"
    ]
    assert (run / "tokenizer" / "tokenizer.json").read_bytes() == kept != changed
