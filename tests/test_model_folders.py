"""Weights of a folder in Hugging Face's layout: in which files they are, and what may be missing."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import build
from safetensors.torch import load_file, save_file

from attnzoo.data.config import DataConfig
from attnzoo.training.exchange import start_from
from attnzoo.training.subject import load_subject


def test_a_head_that_is_missing_is_not_the_embedding(tmp_path):
    folder = tmp_path / "model"
    model = build("fox", tie_word_embeddings=False)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"head\.weight"):
        load_subject(folder)
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
    found = load_subject(tmp_path).model.state_dict()
    assert all((found[name] == x).all() for name, x in new.model.state_dict().items())


def test_pickled_parts_are_read_by_their_index(tmp_path):
    """As older folders of large models are."""
    model = build("fox")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors, pytorch_model.bin, or an index of parts"):
        load_subject(tmp_path)
    place = {name: f"pytorch_model-0000{n % 2 + 1}-of-00002.bin" for n, name in enumerate(state)}
    for part in set(place.values()):
        torch.save({name: x for name, x in state.items() if place[name] == part}, tmp_path / part)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": place}))
    found = load_subject(tmp_path).model.state_dict()
    assert all((found[name] == x).all() for name, x in model.model.state_dict().items())
