"""Losses and answers at any length: what is held, and what is counted where."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnzoo.config import ModelConfig
from attnzoo.data.tasks import UNASKED, build_task
from attnzoo.data.tasks.haystack import DIGIT, FACT
from attnzoo.evaluation import (
    growing_lengths,
    measure_lengths,
    measure_losses,
    measure_needle,
    scores,
    synthetic_needle,
    text_needle,
)
from attnzoo.models import LanguageModel


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(attention="fox", hidden_size=16, num_layers=1, num_heads=2, vocab_size=50)).eval()


@pytest.mark.parametrize("limit", [1, 350, 10**9])
def test_long_row_needs_the_logits_of_a_few_tokens_at_a_time(model, monkeypatch, limit):
    monkeypatch.setattr(scores, "LOGITS", limit)
    read = []
    hook = model.head.register_forward_pre_hook(lambda module, args: read.append(args[0].numel() // 16))
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(40) % 3 == 0, UNASKED)
    nats, wrong = scores.score_targets(model, tokens, targets)
    hook.remove()
    assert max(read) <= max(1, limit // 50)
    assert sum(read) == (targets != UNASKED).sum()  # nothing is computed where nothing is asked
    logits = model(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 40)
    torch.testing.assert_close(nats, expected.double(), rtol=1e-5, atol=1e-6)
    assert torch.equal(wrong, (logits.argmax(-1) != targets) & (targets != UNASKED))


def test_loss_curve_is_the_mean_over_windows_and_perplexity_that_over_positions(model):
    windows = torch.randint(0, 50, (3, 33), generator=torch.Generator().manual_seed(1))
    found = measure_losses(model, windows, context=16)
    logp = model(windows[:, :-1]).logits.double().log_softmax(-1)
    losses = -logp.gather(-1, windows[:, 1:, None])[..., 0].detach().numpy()
    np.testing.assert_allclose(found.loss, losses.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.error, losses.std(0, ddof=1) / math.sqrt(3), rtol=1e-4)
    np.testing.assert_allclose(found.perplexity[[0, 31]], np.exp([losses[:, 0].mean(), losses.mean()]), rtol=1e-5)
    assert (found.context, found.windows, found.loss.shape) == (16, 3, (32,))
    assert found.around(10, 5) == pytest.approx(found.loss[7:12].mean())  # indices 8 to 12, counted from 1
    assert found.around(1, 5) == pytest.approx(found.loss[:3].mean())
    assert found.around(32, 5) == pytest.approx(found.loss[-3:].mean())
    assert np.isnan(measure_losses(model, windows[:1]).error).all()


def test_lengths_double_up_to_the_factor():
    assert growing_lengths(16) == (16, 32, 64, 128)
    assert growing_lengths(10, 3) == (10, 20)
    with pytest.raises(ValueError, match="at least 1"):
        growing_lengths(16, 0)


class Searcher(nn.Module):
    """Says the digits behind `fact` where that is among the last `reach` tokens, else 0."""

    def __init__(self, reach: int):
        super().__init__()
        self.reach = reach

    def forward(self, tokens):
        said = torch.full_like(tokens, DIGIT)
        for row, ids in zip(said, tokens.tolist(), strict=True):
            start = ids.index(FACT) if FACT in ids else len(ids)
            for number, place in enumerate(range(len(ids) - 4, len(ids))):
                if place - start < self.reach:
                    row[place] = ids[start + 1 + number]
        return SimpleNamespace(logits=F.one_hot(said, 141).float())


def test_needle_is_found_where_it_is_within_reach():
    found = measure_needle(Searcher(40), synthetic_needle("standard"), "standard", (32, 64), (0.0, 0.5, 1.0), rows=3)
    assert found.whole.tolist() == [[1, 0], [1, 1], [1, 1]]
    assert [cell.length for cell in found.answers[0]] == [32, 64]
    found = measure_needle(Searcher(21), synthetic_needle("standard"), "standard", (32, 64), (0.0, 0.5), rows=3)
    assert found.whole.tolist() == [[0, 0], [1, 0]]


def test_a_task_is_asked_at_every_length():
    class Recent(nn.Module):
        """Knows the parity of the last 10 bits."""

        def forward(self, tokens):
            total = F.pad(tokens.cumsum(1), (10, 0))
            return SimpleNamespace(logits=F.one_hot((total[:, 10:] - total[:, :-10]) % 2, 2).float())

    found = measure_lengths(Recent(), build_task("parity"), (10, 400), 20, context=10)
    short, long = found.answers
    assert (found.context, short.length, long.length) == (10, 10, 400)
    assert short.error == 0
    assert 0.4 < long.error < 0.6


@pytest.mark.parametrize("mode", ["easy", "standard"])
def test_number_in_a_text_is_asked_after_a_question_that_only_the_easy_hay_has(mode):
    hay = np.frombuffer(b"abcdefgh" * 100, dtype=np.uint8)
    question = b" What is the secret number? Answer: The secret number is"
    for depth in (0.0, 0.25, 1.0):
        task = text_needle(hay, lambda text: [1, *text.encode()], mode, digits=3)(depth)  # 1: as some tokenizers begin
        tokens, targets = task.draw(np.random.default_rng(0), 300)
        assert len(tokens) == 300
        text = bytes(tokens.tolist())
        answer = bytes(targets[targets != UNASKED].tolist())
        assert text.endswith(question + answer[:-1])
        body = text[: -len(question + answer[:-1])]
        needle = (question if mode == "easy" else b" The secret number is") + answer + b"."
        assert body.count(needle) == 1
        before, after = body.split(needle)
        assert len(before) == round(depth * len(before + after))
        assert before[-1:] + after[:1] in b"abcdefgha"  # the text goes on behind it
        assert (question in body) == (mode == "easy")
        assert np.flatnonzero(targets != UNASKED).tolist() == list(range(300 - len(answer), 300))


def test_needle_without_room_or_hay_is_refused():
    def encode(text):
        return list(text.encode())

    with pytest.raises(ValueError, match="expected at least .* tokens for the needle"):
        text_needle(np.zeros(500, dtype=np.int64), encode, "easy")(0.5).draw(np.random.default_rng(0), 50)
    with pytest.raises(ValueError, match="hay: expected at least .* got 20"):
        text_needle(np.zeros(20, dtype=np.int64), encode, "easy")(0.5).draw(np.random.default_rng(0), 300)
    with pytest.raises(ValueError, match="did you mean 'easy'"):
        text_needle(np.zeros(20, dtype=np.int64), encode, "easi")
    with pytest.raises(ValueError, match="depth: expected 0 to 1"):
        synthetic_needle("easy")(2.0)
