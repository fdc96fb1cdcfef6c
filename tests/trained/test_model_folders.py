"""Weights of a folder in Hugging Face's layout: in which files they are, and what may be missing."""

import json
import re

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import build
from safetensors.torch import load_file, save_file

from attnzoo.data.config import DataConfig
from attnzoo.data.tokenizer import byte_tokenizer
from attnzoo.trained.model import load_trained
from attnzoo.training.start import start_from


def test_a_head_that_is_missing_is_not_the_embedding(tmp_path):
    folder = tmp_path / "model"
    model = build("fox", tie_word_embeddings=False)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"head\.weight"):
        load_trained(folder)
    head = model.model.head.weight.clone()
    start_from(model.model, str(folder), DataConfig(source="stdlib"))
    assert (model.model.head.weight == head).all()  # starts anew


def test_one_file_counts_beside_an_old_index(tmp_path):
    """As for transformers, whose `save_pretrained` over shards leaves the index of those that it has removed."""
    old, new = build("fox", seed=0), build("fox", seed=1)
    old.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    new.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    found = load_trained(tmp_path).model.state_dict()
    assert all((found[name] == x).all() for name, x in new.model.state_dict().items())


def test_pickled_parts_are_read_by_their_index(tmp_path):
    """As older folders of large models are."""
    model = build("fox")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors, pytorch_model.bin, or an index of parts"):
        load_trained(tmp_path)
    place = {name: f"pytorch_model-0000{n % 2 + 1}-of-00002.bin" for n, name in enumerate(state)}
    for part in set(place.values()):
        torch.save({name: x for name, x in state.items() if place[name] == part}, tmp_path / part)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": place}))
    found = load_trained(tmp_path).model.state_dict()
    assert all((found[name] == x).all() for name, x in model.model.state_dict().items())


def test_parts_that_are_not_what_their_index_says_are_named(tmp_path):
    pickled = tmp_path / "pickled"
    build("fox").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    place = json.loads(index.read_text())["weight_map"]
    (part, other), name = sorted(set(place.values()))[:2], next(iter(place))
    index.write_text(json.dumps({"weight_map": {**place, name: part if place[name] != part else other}}))
    with pytest.raises(ValueError, match=rf"cannot be read: model-.* does not hold {re.escape(name)}, and the index"):
        load_trained(tmp_path)
    for wrong in ("[]", "{", "{}", '{"weight_map": [1]}'):
        index.write_text(wrong)
        with pytest.raises(ValueError, match="cannot be read: model.safetensors.index.json"):
            load_trained(tmp_path)
    index.write_text(json.dumps({"weight_map": place}))
    (tmp_path / part).unlink()
    with pytest.raises(FileNotFoundError, match=part):
        load_trained(tmp_path)
    build("fox").save_pretrained(pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "part.bin")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin.index.json").write_text('{"weight_map": {"model.gone": "part.bin"}}')
    with pytest.raises(ValueError, match="part.bin does not hold model.gone"):
        load_trained(pickled)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged_settings_of_a_folder_are_named(tmp_path, name, content):
    pytest.importorskip("tokenizers")
    build("fox").save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load_trained(tmp_path).stop is not None
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}( is not readable as JSON|: expected a JSON object, got list)"):
        load_trained(tmp_path).stop  # noqa: B018
