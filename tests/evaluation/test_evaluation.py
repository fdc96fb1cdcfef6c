"""What is measured of a trained model, against numbers worked out another way."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnzoo import Gate, Prune, get, list_variants, oracle
from attnzoo.config import ModelConfig
from attnzoo.evaluation import (
    LossCurve,
    decay_matrix,
    gate_maps,
    mean_and_error,
    moving_mean,
    perplexity_over_lengths,
    prune_maps,
    token_losses,
)
from attnzoo.evaluation.gates import _shown_length
from attnzoo.forms.options import NOTHING_ASKED
from attnzoo.models import LanguageModel
from attnzoo.samples import random_inputs


class Bigram(nn.Module):
    """Predicts the next token from the last one alone, with known probabilities."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table.log()[tokens])


def test_token_loss_is_minus_log_of_the_probability_given_to_the_next_token() -> None:
    table = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 1e-9, 1e-9]])
    losses = token_losses(Bigram(table), torch.tensor([[0, 1, 1, 2, 0], [2, 0, 0, 0, 1]]), batch_size=1)
    expected = -np.log([[0.25, 0.8, 0.1, 1.0], [1.0, 0.5, 0.5, 0.25]])
    np.testing.assert_allclose(losses, expected, atol=1e-6)


def test_batch_size_changes_no_loss() -> None:
    windows = torch.randint(0, 5, (5, 9), generator=torch.Generator().manual_seed(0))
    model = Bigram(torch.softmax(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)), -1))
    np.testing.assert_array_equal(token_losses(model, windows, 1), token_losses(model, windows, 3))


def test_loss_of_a_token_depends_on_nothing_after_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(attention="fox", hidden_size=32, num_layers=1, num_heads=2)).eval()
    windows = torch.randint(0, 256, (1, 33))
    changed = windows.clone()
    changed[:, 20:] = (changed[:, 20:] + 7) % 256
    before, after = token_losses(model, windows), token_losses(model, changed)
    np.testing.assert_allclose(before[:, :19], after[:, :19], atol=1e-5)
    assert abs(before[0, 25] - after[0, 25]) > 1e-4


@pytest.mark.parametrize("window", [1, 2, 5, 22, 23, 30, 40, 45, 101])
def test_moving_mean_is_the_mean_of_its_neighbourhood(window: int) -> None:
    values = np.random.default_rng(0).normal(size=23)
    smooth = moving_mean(values, window)
    curve = LossCurve(None, 1, values, values, values)
    for i in range(values.size):
        near = values[max(0, i - window // 2) : i + (window - 1) // 2 + 1]
        assert math.isclose(smooth[i], near.mean(), rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(curve.around(i + 1, window), near.mean(), rel_tol=1e-9, abs_tol=1e-12)


def test_moving_mean_of_no_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        moving_mean(np.ones(3), 0)


def test_perplexity_of_a_uniform_guess_is_the_vocabulary_at_every_length() -> None:
    np.testing.assert_allclose(perplexity_over_lengths(np.full(50, math.log(256))), 256)


def test_perplexity_over_a_length_is_exp_of_the_mean_loss_up_to_it() -> None:
    loss = np.random.default_rng(0).uniform(0, 3, size=12)
    for length in (1, 5, 12):
        assert math.isclose(perplexity_over_lengths(loss)[length - 1], math.exp(loss[:length].mean()))


def test_standard_error_shrinks_with_the_root_of_the_windows() -> None:
    losses = np.random.default_rng(0).normal(2.0, 1.0, size=(4000, 1))
    few, many = mean_and_error(losses[:40]), mean_and_error(losses)
    assert 7 < few[1] / many[1] < 14
    assert abs(many[0] - 2.0) < 4 * many[1]
    assert math.isnan(mean_and_error(losses[:1])[1])


def test_decay_matrix_is_exp_of_the_oracles_distance() -> None:
    q, k, _, gate = random_inputs("fox", B=1, T=17, H=3, G=3, regime="mixed")
    expected = oracle.scores(q, k, gate)[1][0].exp()
    np.testing.assert_allclose(decay_matrix(gate, 17), expected.numpy(), atol=1e-12)


def test_decay_matrix_samples_from_the_first_to_the_last_token() -> None:
    _, _, _, gate = random_inputs("fox", B=1, T=41, H=2, G=2, regime="open")
    whole, sampled = decay_matrix(gate, 41), decay_matrix(gate, 5)
    rows = [0, 10, 20, 30, 40]
    np.testing.assert_allclose(sampled, whole[:, rows][:, :, rows])


def test_decay_of_a_gate_per_channel_is_its_mean_over_channels() -> None:
    log_diag = -torch.rand(1, 3, 1, 4, dtype=torch.float64)
    decay = decay_matrix(Gate(log_diag=log_diag), 3)
    assert math.isclose(decay[0, 2, 0], float((log_diag[0, 1, 0] + log_diag[0, 2, 0]).exp().mean()))


def test_decay_matrix_of_a_gate_that_does_not_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="log_decay or log_diag"):
        decay_matrix(Gate(), 4)


@pytest.mark.parametrize("regime", ["open", "closing", "mixed"])
def test_cut_keys_weigh_at_most_eps_and_the_share_counts_them(regime: str) -> None:
    block, eps = 8, 1e-3
    q, k, _, gate = random_inputs("fox", B=1, T=64, H=4, G=2, regime=regime)  # type: ignore[arg-type]
    s, d = oracle.scores(q, k, gate)
    weights = (s + d).softmax(-1)[0].numpy()
    maps = prune_maps(q, k, gate, NOTHING_ASKED, eps, block)
    assert set(maps) == {"tail", "paper"}
    for bound in maps.values():
        kept = np.zeros(4)
        for head in range(4):
            for row, first in enumerate(bound.first[head].astype(int)):
                rows = weights[head, row * block : (row + 1) * block]
                assert rows[:, :first].sum(1).max(initial=0) <= eps
                kept[head] += row + 1 - first // block
        np.testing.assert_allclose(bound.kept, kept / 36)  # 8 * 9 / 2 causal blocks
    assert (maps["tail"].kept <= maps["paper"].kept).all()


@pytest.mark.parametrize("T", [64, 61])
@pytest.mark.parametrize("window", [1, 8, 9, 20, 64, 100])
def test_share_of_a_layer_with_a_window_is_of_the_blocks_that_a_row_sees(window: int, T: int) -> None:
    block = 8
    model = LanguageModel(
        ModelConfig(attention="fox", attention_options={"window": window}, hidden_size=32, num_layers=1, num_heads=2)
    ).eval()
    with torch.no_grad():
        [layer] = model.attentions()
        layer.gate.forget_proj.bias.copy_(torch.tensor([-1.0, 20.0]))
    [found] = gate_maps(model, torch.randint(0, 256, (T,)), block=block)
    rows, keys = np.arange(T)[:, None], np.arange(T)
    seen = (keys <= rows) & (keys > rows - window)
    edges = np.arange(0, T, block)
    for bound in found.prune.values():
        for head in range(2):
            pruned = seen & (keys >= bound.first[head].repeat(block)[:T, None])
            blocks = [np.add.reduceat(np.add.reduceat(of, edges, 0), edges, 1) > 0 for of in (seen, pruned)]
            assert bound.kept[head] == pytest.approx(blocks[1].sum() / blocks[0].sum())
        assert bound.kept[1] == 1.0  # what hardly forgets keeps all that it sees
    assert found.prune["tail"].kept[0] < 1 or window < 20


def test_gate_maps_are_found_for_the_gated_layers_of_a_hybrid_only() -> None:
    torch.manual_seed(0)
    config = ModelConfig(attention=["nope", "fox", "rope", "gla"], hidden_size=32, num_layers=4, num_heads=2)
    maps = gate_maps(LanguageModel(config).eval(), torch.randint(0, 256, (48,)), samples=12, block=16)
    assert [gate.layer for gate in maps] == [1, 3]
    assert [set(gate.prune) for gate in maps] == [{"tail", "paper"}, set()]
    for gate in maps:
        assert gate.decay.shape == (2, 12, 12)
        np.testing.assert_allclose(np.diagonal(gate.decay, axis1=1, axis2=2), 1.0, atol=1e-6)
        assert ((gate.decay >= 0) & (gate.decay <= 1)).all()


@pytest.mark.parametrize(("bias", "shown"), [(-3.0, 128), (-0.05, 512), (-1e-4, 700)])
def test_faster_forgetting_is_shown_on_fewer_tokens(bias: float, shown: int) -> None:
    assert _shown_length(Gate(log_decay=torch.full((1, 700, 2), bias)), 700) == shown


def test_gate_maps_use_the_eps_that_the_model_prunes_with() -> None:
    kept = {}
    for eps in (1e-9, 0.5):
        torch.manual_seed(0)
        config = ModelConfig(
            attention="alibi", attention_options={"acp": Prune(eps=eps)}, hidden_size=32, num_layers=1, num_heads=2
        )
        maps = gate_maps(LanguageModel(config).eval(), torch.randint(0, 256, (96,)), block=8)
        kept[eps] = maps[0].prune["tail"].kept
    assert (kept[0.5] < kept[1e-9]).any()


@pytest.mark.parametrize("name", list_variants())
def test_gate_maps_run_for_every_variant(name: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(attention=name, hidden_size=32, num_layers=1, num_heads=2)).eval()
    maps = gate_maps(model, torch.randint(0, 256, (24,)), block=8)
    decays = {"log_decay", "log_diag"} & set(get(name).requires)
    assert len(maps) == len(decays)
