"""Stretches of a text have the mean loss of the whole, and a text that is read again is asked the second time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from attnzoo.data import Data
from attnzoo.experiments.probes import Loss, Probed
from attnzoo.experiments.text_probes import KeptByHead, LossByStretch, ReadAgain
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig
from attnzoo.training.config import TrainConfig
from attnzoo.training.recipe import load_config


class Copier(nn.Module):
    """Expects the token ``period`` places before the one it predicts, where there is one."""

    def __init__(self, period: int):
        super().__init__()
        self.period, self.weight = period, nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor, **_: object) -> SimpleNamespace:
        known = torch.roll(tokens, self.period - 1, 1)
        known[:, : self.period - 1] = 0
        return SimpleNamespace(logits=50.0 * nn.functional.one_hot(known, 16).float())


def subject(model: nn.Module, tokens: int = 4096) -> Probed:
    config: TrainConfig = load_config({"data": {"context_length": 32}}, ())
    held = np.random.default_rng(0).integers(1, 16, 8192).astype(np.uint16)
    data = Data(16, None, held, "")  # type: ignore[arg-type]
    return Probed(model, config, data, [], 1, tokens)  # type: ignore[arg-type]


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
    torch.manual_seed(0)
    config = ModelConfig(attention="fox", hidden_size=32, num_layers=1, num_heads=4, vocab_size=16)
    model = LanguageModel(config).eval()
    (gate,) = (each for name, each in model.named_parameters() if name.endswith("forget_proj.bias"))
    gate.data[:] = torch.tensor([-30.0, -30.0, 30.0, -30.0])
    found = KeptByHead(block=2).measure(subject(model))
    assert found == {0.25: 0.75, 0.5: 0, 0.75: 0, 1.0: 0.25}
    model = LanguageModel(
        ModelConfig(hidden_size=16, attention="nope", num_layers=1, num_heads=1, vocab_size=16)
    ).eval()
    assert KeptByHead().measure(subject(model)) == {}
