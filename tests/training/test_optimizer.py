"""Muon beside AdamW: which parameters it moves, how far, and that a run with it resumes."""

import pytest
import tiny_runs
import torch
from tiny_runs import StoppedError, numbers, stop_at, weights

from attnzoo.config import ModelConfig, OptimizerConfig
from attnzoo.models import LanguageModel
from attnzoo.training import train
from attnzoo.training.optimizer import Muon, build_optimizer

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 48, "vocab_size": 64}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_moves_the_inner_matrices_alone(tied):
    model = LanguageModel(ModelConfig(attention=["path_fox", "gated_deltanet"], tie_embeddings=tied, **SMALL))
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    by_muon = {id(p): group["muon"] for group in optimizer.param_groups for p in group["params"]}
    names = dict(model.named_parameters())
    assert by_muon.keys() == {id(p) for p in names.values()}
    moved = {name for name, p in names.items() if by_muon[id(p)]}
    assert {f"blocks.{i}.attention.{x}_proj.weight" for i in (0, 1) for x in "qkvo"} <= moved
    assert {f"blocks.0.mlp.{x}.weight" for x in ("gate", "up", "down")} <= moved
    outside = ("embedding", "head.", "norm", "gate.forget", "conv", "bias")
    assert not [name for name in moved if any(word in name for word in outside)], moved


def test_a_matrix_moves_by_the_size_of_an_update_of_adamw():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(attention="fox", **SMALL))
    config = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.0)
    optimizer = build_optimizer(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randint(64, (4, 64))).logits.square().mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        step = (p.detach() - before[name]).square().mean().sqrt()
        if name.endswith(("q_proj.weight", "down.weight")):
            assert 0.7 < step / (0.2 * config.lr) < 1.3, name


@pytest.mark.parametrize("alone", ["forget_proj", "q_proj"])
def test_what_is_trained_may_be_of_one_kind_alone(alone):
    """As forget networks are beside frozen weights: none of their parameters is a matrix of Muon's."""
    model = LanguageModel(ModelConfig(attention="fox", **SMALL))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{alone}." in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    model(torch.randint(64, (4, 64))).logits.square().mean().backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_stopped_run_with_muon_goes_on_to_the_same_bits(tmp_path):
    def config_of(run):
        text = tmp_path / "text.txt"
        text.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(500)))
        own = [f"output_dir={tmp_path / run}", f"data.source={text}", "data.context_length=24", "batch_size=4"]
        return tiny_runs.config_of(tmp_path, run, *own, "optimizer.name=muon", "eval_tokens=200")

    reference, config = train(config_of("reference")), config_of("run")
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(5))
    train(config)
    assert numbers(config.output_dir) == numbers(reference)
    assert weights(config.output_dir) == weights(reference)


def test_a_torch_without_muon_and_an_unknown_name_are_named(monkeypatch):
    with pytest.raises(ValueError, match="one of adamw, muon; did you mean 'muon'"):
        OptimizerConfig(name="muom")
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"optimizer.name: muon needs torch 2.9"):
        Muon([], OptimizerConfig(name="muon"))
