"""Stretches of a text have the mean loss of the whole, and a text that is read again is asked the second time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from attnzoo.data import Data
from attnzoo.experiments.forgetting_probes import WrongWithin
from attnzoo.experiments.probes import (
    AddedByLength,
    KeptBlocks,
    Loss,
    LossByPlace,
    Probe,
    Probed,
    PrunedLoss,
    Wrong,
)
from attnzoo.experiments.text_probes import ByEps, KeptByDepth, KeptByHead, LossByStretch, Needle, ReadAgain
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig
from attnzoo.training.config import TrainConfig
from attnzoo.training.recipe import load_config


class Copier(nn.Module):
    """Expects the token ``period`` places before the one it predicts, where there is one."""

    def __init__(self, period: int, words: int = 16):
        super().__init__()
        self.period, self.words, self.weight = period, words, nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor, **_: object) -> SimpleNamespace:
        known = torch.roll(tokens, self.period - 1, 1)
        known[:, : self.period - 1] = 0
        return SimpleNamespace(logits=50.0 * nn.functional.one_hot(known, self.words).float())


def subject(model: nn.Module, tokens: int = 4096, context: int = 32, rows: int = 1) -> Probed:
    config: TrainConfig = load_config({"data": {"context_length": context}}, ())
    held = np.random.default_rng(0).integers(1, 16, 8192).astype(np.uint16)
    data = Data(16, None, held, "")  # type: ignore[arg-type]
    return Probed(model, config, data, [], rows, tokens)  # type: ignore[arg-type]


def forgetting(biases: list[list[float]]) -> LanguageModel:
    """A model of FoX with these biases of the forget gates, by layer and head."""
    torch.manual_seed(0)
    H = len(biases[0])
    config = ModelConfig(attention="fox", hidden_size=8 * H, num_layers=len(biases), num_heads=H, vocab_size=16)
    model = LanguageModel(config).eval()
    gates = [each for name, each in model.named_parameters() if name.endswith("forget_proj.bias")]
    for gate, bias in zip(gates, biases, strict=True):
        gate.data[:] = torch.tensor(bias)
    return model


PLAIN = ModelConfig(hidden_size=16, attention="nope", num_layers=1, num_heads=1, vocab_size=16)


def test_loss_of_a_text_read_again_is_that_of_its_second_half():
    """A model that looks half a row back knows all of it, one that looks elsewhere nothing."""
    probe = ReadAgain(lengths=(1.0, 4.0))
    knows_short = probe.measure(subject(Copier(16)))
    assert knows_short[1.0] < 1e-3 < 5 < knows_short[4.0]
    assert probe.measure(subject(Copier(64)))[4.0] < 1e-3


def test_stretches_have_the_mean_loss_of_the_whole_text():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(hidden_size=16, num_layers=1, num_heads=1, vocab_size=16)).eval()
    asked = subject(model)
    found = LossByStretch(stretches=8).measure(asked)
    assert list(found) == list(LossByStretch(stretches=8).at)
    assert np.mean(list(found.values())) == pytest.approx(Loss().measure(asked)[1.0])
    assert len(set(found.values())) == 8


def test_histogram_of_heads_tells_local_from_global_ones():
    """Of four heads three forget at once and one never does."""
    found = KeptByHead(block=2).measure(subject(forgetting([[-30.0, -30.0, 30.0, -30.0]])))
    assert found == {0.25: 0.75, 0.5: 0, 0.75: 0, 1.0: 0.25}


def test_blocks_kept_by_depth_are_those_of_a_quarter_of_the_layers():
    """Of eight layers the first two forget at once; of three, quarters share the one between."""
    asked = subject(forgetting([[-30.0]] * 2 + [[30.0]] * 6), context=512)
    found = KeptByDepth().measure(asked)
    assert found[0.25] < 0.5 < found[0.5] == found[0.75] == found[1.0] == 1
    three = KeptByDepth().measure(subject(forgetting([[-30.0], [30.0], [30.0]]), context=512))
    assert three[0.25] < three[0.5] < three[0.75] == three[1.0] == 1


def test_a_larger_eps_keeps_fewer_blocks_and_moves_the_loss_further():
    asked = subject(forgetting([[3.0, 5.0]]), tokens=2048, context=512)
    kept, change = (ByEps("x", of, (1e-8, 0.5)).measure(asked) for of in ("kept", "change"))
    assert 1 >= kept[1e-8] > kept[0.5] > 0
    assert abs(change[0.5]) > abs(change[1e-8])
    assert all(milliseconds > 0.01 for milliseconds in ByEps("x", "seconds", (0.5,)).measure(asked).values())


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_probes_of_pruning_read_as_many_tokens_at_once_as_the_training(factor):
    """Kernels look for what to leave out in batches that are large enough, alone."""
    asked = subject(forgetting([[3.0]]), tokens=2048, context=64)
    asked = replace(asked, config=replace(asked.config, batch_size=8, gradient_accumulation=2))
    read = []
    [first, *_] = [layer for layer in asked.model.modules() if isinstance(layer, nn.Linear)]
    first.register_forward_pre_hook(lambda layer, given: read.append(given[0].shape[:2].numel()))
    PrunedLoss(length=factor).measure(asked)
    assert {*read} == {4 * 64}
    for of, each in (("change", 4 * 64), ("seconds", 4 * 64), ("kept", 64)):  # the share is counted in one window
        read.clear()
        ByEps("x", of, (0.1,)).measure(asked)
        assert {*read} == {each}


def test_a_probe_by_eps_reads_what_it_measures_alone():
    """Two settings: without pruning and with it; of 32 windows in batches of 16."""
    asked = subject(forgetting([[3.0]]), tokens=2048, context=64)
    asked = replace(asked, config=replace(asked.config, batch_size=16))
    read = []
    asked.model.embedding.register_forward_hook(lambda *_: read.append(1))
    for of, passes in (("change", 2 * 2), ("seconds", 2 * 3), ("kept", 1)):
        read.clear()
        ByEps("x", of, (0.1,)).measure(asked)
        assert len(read) == passes, of


@pytest.mark.parametrize("attention", ["nope", "mamba2"])
def test_probes_of_pruning_do_not_read_a_text_with_a_model_that_has_nothing_to_prune(attention):
    model = LanguageModel(replace(PLAIN, attention=attention)).eval()
    for layer in model.modules():
        layer.register_forward_pre_hook(lambda layer, given: pytest.fail("read a text for nothing"))
    probes: list[Probe] = [KeptBlocks(), KeptByHead(), KeptByDepth(), ByEps("x", "kept"), PrunedLoss()]
    assert [probe.measure(subject(model)) for probe in probes] == [{}] * len(probes)


def test_needle_is_found_by_a_model_that_copies_what_followed_the_question(monkeypatch):
    """At depth 1 the needle ends where the question begins, which is a needle without its number."""
    reads = SimpleNamespace(encode=lambda text: list(text.encode()))
    monkeypatch.setattr("attnzoo.experiments.text_probes.load_trained", lambda folder: reads)
    probe = Needle(at=(0.0, 1.0))
    behind = len(" What is the secret number? Answer: The secret number is 1234.")
    found = probe.measure(subject(Copier(behind, 128), rows=4))
    assert found[1.0] == 0 < 0.7 < found[0.0]
    guesses = probe.guess(subject(Copier(behind, 128), rows=4))
    assert all(0.5 < guess.wrong <= 1 and guess.asked == 20 for guess in guesses.values())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("none", torch.float32)])
def test_models_are_measured_in_the_precision_of_the_training(precision, dtype, monkeypatch):
    reads = SimpleNamespace(encode=lambda text: [letter % 16 for letter in text.encode()])
    monkeypatch.setattr("attnzoo.experiments.text_probes.load_trained", lambda folder: reads)
    model, used = LanguageModel(replace(PLAIN, attention="fox")).eval(), []
    [hooked, *_] = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooked.register_forward_hook(lambda layer, given, out: used.append(out.dtype))
    of = subject(model)
    of = replace(of, config=replace(of.config, mixed_precision=precision))
    probes = Loss(), LossByStretch(), LossByPlace(factor=2), AddedByLength(factor=2), ReadAgain(), Needle(at=(0.5,))
    pruning = KeptBlocks(lengths=(1.0,)), KeptByHead(), KeptByDepth(), ByEps("x", "kept"), ByEps("x", "seconds")
    for probe in (*probes, *pruning):
        used.clear()
        probe.measure(of)
        assert {*used} == {dtype}, probe.name
    for probe in (PrunedLoss(length=1.0), ByEps("x", "change")):  # a difference that rounding would hide
        used.clear()
        probe.measure(of)
        assert {*used} == {torch.float32}, probe.name
    task = load_config({"data": {"source": "task:parity", "context_length": 64}, "mixed_precision": precision}, ())
    of = replace(of, config=task, model=LanguageModel(replace(PLAIN, attention="fox", vocab_size=16)).eval())
    [hooked, *_] = [layer for layer in of.model.modules() if isinstance(layer, nn.Linear)]
    hooked.register_forward_hook(lambda layer, given, out: used.append(out.dtype))
    for probe in (Wrong("x"), WrongWithin("x", "window")):
        used.clear()
        probe.measure(of)
        assert {*used} == {dtype}, probe.name
