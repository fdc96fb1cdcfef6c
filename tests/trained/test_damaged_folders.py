"""A damaged folder of one of our models: one line that names the file and the field, whoever reads it."""

from __future__ import annotations

import json
import logging
import re
import shutil
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from hf_models import build
from safetensors.torch import load_file, save_file

from attnzoo.config import ModelConfig
from attnzoo.data.config import DataConfig
from attnzoo.data.tokenizer import byte_tokenizer, special_tokens, tokenizer_files
from attnzoo.models import LanguageModel
from attnzoo.models.hf import AttnzooConfig
from attnzoo.trained.continuation import load_text_model
from attnzoo.trained.exchange import recipe_of
from attnzoo.trained.model import load_trained, of_folder
from attnzoo.training.start import config_in, start_from

LONG = "[" * 200_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    build("fox", vocab_size=256, num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(folder)
    for name, content in tokenizer_files(byte_tokenizer()).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def changed(folder, file, **fields):
    known = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**known, **fields}))


ODD = [None, True, -1, 1.5, float("nan"), 10**30, "16", [], ["a"], {}, {"content": None}, [[[]]]]
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize("name", [*SIZES, "tie_word_embeddings", "norm_eps", "attention_options"])
def test_a_damaged_field_is_named_with_its_file(name, folder):
    good = {"tie_word_embeddings": ["True"], "attention_options": ["{}"], "norm_eps": ["1.5", str(10**30)]}
    for value in (value for value in ODD if str(value) not in good.get(name, [])):
        changed(folder, "config.json", **{name: value})
        for read in (load_text_model, load_trained):
            with pytest.raises(ValueError, match=r"^config\.json: ") as refused:
                read(folder, "cpu")
            assert name in str(refused.value) or "unknown option" in str(refused.value)
            assert type(refused.value) is ValueError


def test_a_configuration_without_a_variant_is_refused_by_the_field_and_not_read_as_fox(folder):
    """Whatever we write has the field; another variant's weights may well have FoX's names."""
    fields = json.loads((folder / "config.json").read_text())
    del fields["attention"]
    (folder / "config.json").write_text(json.dumps(fields))
    said = "attention: expected the variant of each layer, found no such field"
    readers = partial(load_text_model, device="cpu"), load_trained, recipe_of, AttnzooConfig.from_pretrained
    for read in readers:
        with pytest.raises(ValueError, match=f"^config.json: {said}"):
            read(folder)
    with pytest.raises(ValueError, match=said):
        config_in(str(folder), "teacher")
    assert AttnzooConfig.from_pretrained(folder, attention="nope").attention == "nope"


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_no_model_has_is_named_before_anything_is_made_of_it(name, folder):
    for value in (9_999, 10**7, 10**9, 2**31 - 1):
        changed(folder, "config.json", **{name: value})
        for read in (load_text_model, load_trained):
            with pytest.raises(
                ValueError, match=rf"^config\.json: .*({name}|num_heads = 9999)|^embedding\.weight: expected shape"
            ):
                read(folder, "cpu")


@pytest.mark.parametrize("value", [[], "load", "float8_e4m3fn", 32, {"": "float32"}])
def test_a_dtype_that_is_none_is_named(value, folder):
    changed(folder, "config.json", dtype=value)
    with pytest.raises(ValueError, match=r"^config\.json: unknown dtype "):
        load_trained(folder)


@pytest.mark.parametrize("value", [None, "", 3, {"a": 1}])
def test_a_kind_that_is_none_is_named(value, folder):
    changed(folder, "config.json", model_type=value)
    for read in (load_text_model, load_trained):
        with pytest.raises(ValueError, match=r"^config\.json: .*model_type"):
            read(folder, "cpu")
    with pytest.raises(ValueError, match=r"^config\.json: .*model_type"):
        recipe_of(folder)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("value", [True, 0, 1.5, [], ["a"], {}, {"a": 1}, {"content": 3}])
def test_a_special_token_without_a_text_is_named(file, value, folder):
    if file != "tokenizer_config.json":
        (folder / "tokenizer_config.json").unlink()
    for kind in ("eos_token", "pad_token", "bos_token"):
        (folder / file).write_text(json.dumps({kind: value}))
        with pytest.raises(ValueError, match=rf"^{file} of the model in .*: {kind}: expected the text of a token"):
            load_text_model(folder, "cpu")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [True, 1.5, "3", {}, ["a"], [[1]], 10**30])
def test_an_end_that_is_no_number_is_named(file, value, folder):
    changed(folder, file, eos_token_id=value)
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id: expected a whole number"):
        load_text_model(folder, "cpu")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", LONG], ids=lambda content: content[:9] or "empty")
def test_a_file_that_is_no_json_object_is_named(file, content, folder):
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder / file))}( |:)") as refused:
        load_text_model(folder, "cpu")
    assert type(refused.value) is ValueError


def test_a_tokenizer_that_is_none_is_named_with_its_folder(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"tokenizer\.json of the model in {re.escape(str(folder))} cannot be read"):
        load_text_model(folder, "cpu")


def test_an_end_that_the_tokenizer_lacks_is_said(folder, caplog):
    changed(folder, "tokenizer_config.json", eos_token="<|im_end|>", pad_token="[PAD]")
    with caplog.at_level(logging.WARNING, logger="attnzoo"):
        assert load_text_model(folder, "cpu").stop == frozenset()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("attnzoo")] == [
        f"{kind}_token: the tokenizer's settings name '{name}', which is no token of tokenizer.json"
        for kind, name in (("eos", "<|im_end|>"), ("pad", "[PAD]"))
    ]
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    assert special_tokens(files) == {}


def test_a_head_beside_a_tied_configuration_is_taken_by_every_reader(folder, caplog):
    from transformers import AutoModelForCausalLM, __version__

    state = load_file(folder / "model.safetensors")
    head = torch.randn_like(state["model.embedding.weight"])
    save_file({**state, "model.head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = of_folder(folder, "cpu")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "attnzoo.models.peers"]
    assert "the file's is another: it is taken" in line
    tokens = torch.arange(20)[None]
    assert torch.equal(ours.head.weight, head)
    if not __version__.startswith("4."):  # whose readers drop the file's head
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)
    assert not ours.tied
    assert not ours.config.tie_embeddings
    sizes = {"attention": "fox", "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    fresh = LanguageModel(ModelConfig(**sizes))
    start_from(fresh, str(folder), DataConfig(source="stdlib"))
    assert torch.equal(fresh.head.weight, head)
    tied = LanguageModel(ModelConfig(**sizes, tie_embeddings=True))
    with pytest.raises(ValueError, match="the head of '.*' is not its embedding"):
        start_from(tied, str(folder), DataConfig(source="stdlib"))


def test_weights_that_are_quantised_are_refused_by_every_reader(folder):
    state = load_file(folder / "model.safetensors")
    state = {name: x.to(torch.int8) if "proj" in name and x.ndim == 2 else x for name, x in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    fresh = LanguageModel(ModelConfig("fox", hidden_size=32, num_layers=1, num_heads=2))
    for read in (lambda: of_folder(folder, "cpu"), lambda: start_from(fresh, str(folder), DataConfig(source="stdlib"))):
        with pytest.raises(ValueError, match=r"expected weights of float64, .*, got I8 \(model\.blocks"):
            read()


def test_tied_embeddings_stay_tied():
    def made():
        torch.manual_seed(0)
        return LanguageModel(ModelConfig("fox", hidden_size=16, num_layers=1, num_heads=2, tie_embeddings=True))

    state = made().state_dict()
    for assign in (False, True):
        with torch.device("meta"):
            model = made()
        if not assign:
            model.to_empty(device="cpu")
            assert model.tied
        model.load_state_dict(state, assign=assign)
        assert model.tied
        assert torch.equal(model.embedding.weight, state["embedding.weight"])
        assert sum(p is model.head.weight for p in model.parameters()) == 1
        with pytest.raises(ValueError, match=r"head\.weight: expected the embedding \(config\.tie_embeddings\), got"):
            model.load_state_dict({**state, "head.weight": state["head.weight"] + 1}, assign=assign)
    own = LanguageModel(ModelConfig("fox", hidden_size=16, num_layers=1, num_heads=2))
    assert not own.to(torch.float64).tied
