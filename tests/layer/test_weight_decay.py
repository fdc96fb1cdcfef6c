"""Groups of parameters for an optimizer: every trainable one in one of the two, and only matrices decay."""

import pytest
import torch
from torch import nn

import attnzoo
from attnzoo import build_attention, list_variants, param_groups
from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel


@pytest.mark.parametrize("name", list_variants())
def test_vectors_and_numbers_per_head_do_not_decay(name):
    layer = build_attention(name, hidden_size=32, num_heads=2)
    layer.o_proj.weight.requires_grad_(False)
    decay, spared = param_groups(layer, weight_decay=0.1)
    assert (decay["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    trainable = {id(p) for p in layer.parameters() if p.requires_grad}
    ids = [id(p) for group in (decay, spared) for p in group["params"]]
    assert sorted(ids) == sorted(trainable)
    assert all(p.ndim >= 2 for p in decay["params"])
    names = {id(p): path.rpartition(".")[2] for path, p in layer.named_parameters()}
    assert not {"bias", "log_a", "skip", "sinks", "dt_bias", "log_gamma"} & {names[id(p)] for p in decay["params"]}
    torch.optim.AdamW([decay, spared], lr=1e-3)


def test_groups_of_a_model_are_those_of_the_recipe():
    from attnzoo.training.config import OptimizerConfig
    from attnzoo.training.optimizer import build_optimizer

    layers = ["mamba2", {"name": "fox", "options": {"sinks": True}}]
    model = LanguageModel(ModelConfig(layers, hidden_size=32, num_layers=2, num_heads=2, tie_embeddings=True))
    config = OptimizerConfig()
    groups = build_optimizer(model, config).param_groups
    own = param_groups(model, config.weight_decay)
    for group, expected in zip(groups, own, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in expected["params"]]
        assert group["weight_decay"] == expected["weight_decay"]
    names = {id(p): path for path, p in model.named_parameters()}
    spared = {names[id(p)] for p in own[1]["params"]}
    assert {"blocks.0.attention.skip", "blocks.0.attention.gate.log_a", "blocks.1.attention.sinks"} < spared
    assert "embedding.weight" not in spared


def test_what_is_no_model_or_no_share_is_named():
    with pytest.raises(TypeError, match="^model: expected a module, got list"):
        attnzoo.param_groups([], 0.1)
    for wrong in (-0.1, "0.1", float("nan")):
        with pytest.raises(ValueError, match="^weight_decay: expected "):
            param_groups(nn.Linear(2, 2), wrong)
