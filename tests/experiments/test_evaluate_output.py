"""What the files, tables, pictures and pages of ``attnzoo evaluate`` hold, whatever was measured."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from attnzoo import list_variants
from attnzoo.config import ModelConfig
from attnzoo.data.tasks import TASKS
from attnzoo.evaluation import (
    Answers,
    AttentionMaps,
    EffectiveContext,
    LayerMap,
    LengthCurve,
    LossCurve,
    NeedlePicture,
    PrunedShares,
)
from attnzoo.evaluation.forgetting import RULES, UNLIMITED, Point
from attnzoo.experiments.evaluate import forgetting, lines, measures, pictures
from attnzoo.experiments.evaluate.saved import as_json, file_name, save
from attnzoo.experiments.evaluate.table import EVALUATIONS
from attnzoo.models import LanguageModel


def test_json_holds_no_number_that_is_none():
    @dataclasses.dataclass
    class Found:
        a: float
        b: tuple[float, ...]
        c: np.ndarray

    found = as_json(Found(math.nan, (1 / 3, math.inf), np.array([[1.0, np.nan]])))
    assert found == {"a": None, "b": [0.333333, None], "c": [[1.0, None]]}


def test_name_of_a_file_is_one_in_any_folder():
    assert file_name("loss", {}) == "loss"
    assert file_name("loss", {"length": (8, 16), "text": Path("a/b/c.txt")}) == "loss-length=8-16-text=c.txt"
    assert file_name("harness", {"task": "../a b/c.yaml"}) == "harness-task=..-a-b-c.yaml"
    assert Path(file_name("harness", {"task": "../a"})).name == file_name("harness", {"task": "../a"})


def test_table_of_one_row_has_no_uncertainty():
    found = LengthCurve(8, (Answers(8, 1, 8, 0.5, math.nan, 0.0, 0.7), Answers(16, 1, 16, 0.5, 0.01, 0.0, 0.7)))
    first, second = lines.answers(found)[1:]
    assert first.endswith("training length")
    assert "-" in first.split()
    assert second.split() == ["16", "16", "50.000", "1.000", "0.00", "0.7000"]


def test_tables_of_large_numbers_fit_eighty_columns():
    large = Answers(2**20, 256, 2**28, 1.0, 1.0, 1.0, 12.3456)
    curve = LossCurve(2**20, 3, *(np.full(2**20, number) for number in (12.3, 1.2345, 123456.789)))
    context = EffectiveContext(2**20, 1e-5, tuple(range(100)), ((2**20,) * 32,) * 100, ((2**20,) * 32,) * 100)
    limits = [2**n for n in range(20)]
    points = [Point(rule, limit, 1e6, 123.4567, 1e6) for rule in RULES for limit in limits]
    points += [Point(rule, 0, 1e6, 123.4567, 1e6) for rule in UNLIMITED]
    words = tuple(f"incomprehensibility{n % 16}" for n in range(64))
    text = forgetting.ForgottenText("h2o", 16, words, (0,), (np.ones((2, 64)),))
    within = forgetting.lines(forgetting.MemoryCurves(2**20, 3, 1.2345, tuple(points), text))
    assert [len(re.findall(r"\+122.2222", line)) for line in within if "H2O" in line] == [6, 6, 6, 2]
    assert sum("incomprehensibility" in word for line in within for word in line.split()) == 16
    assert "certified, without a limit: 1,000,000 keys, +122.2222 nats" in within
    tables = (lines.answers(LengthCurve(2**20, (large,))), lines.loss(curve), lines.context(context), within)
    for found in tables:
        assert max(map(len, found)) <= 80


def test_no_evaluation_has_the_name_of_a_task():
    assert not set(EVALUATIONS) & set(TASKS)


def test_text_is_the_more_coloured_the_sooner_a_token_was_given_up():
    ages = (np.array([[2.0, 2.0, -1.0, -1.0]]), np.array([[1.0, -1.0, 1.0, -1.0]]))
    text = forgetting.ForgottenText("h2o", 2, ("a", "<b", "c", "d"), (1, 3), ages)
    page = forgetting.page(forgetting.MemoryCurves(4, 1, 1.0, (), text), "a model")
    assert "&lt;b" in page
    assert re.findall(r"layer \d, key head \d", page) == ["layer 1, key head 0", "layer 3, key head 0"]
    found = re.findall(r'<span style="--s: (\d+)%" title="(never given up|given up after \d tokens)">', page)
    expected = [100 * (1 - math.log1p(age) / math.log1p(most)) for age, most in ((2, 4), (2, 3), (1, 4), (1, 2))]
    a, b, c, d = (f"{share:.0f}" for share in expected)
    assert [share for share, _ in found] == [a, b, "0", "0", c, "0", d, "0"]
    assert [said for _, said in found[:3]] == ["given up after 2 tokens"] * 2 + ["never given up"]


def test_layers_of_a_forgotten_text_have_the_numbers_that_they_have_in_the_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 4, "num_heads": 2}
    model = LanguageModel(ModelConfig(attention=["gla", "fox"], **sizes)).eval()
    tokens = torch.randint(0, 256, (2, 25))
    found = forgetting.measure_memory(model, tokens, tokens[0, :-1], ["a"] * 24, 1, None)
    assert found.text.layers == (1, 3)
    assert len(found.text.ages) == 2


def test_each_way_to_read_an_answer_has_its_error_beside_it():
    scores = {"sample_len": 9.0, "match,strict": 0.5, "match_stderr,strict": 0.25, "acc": 0.75, "acc_stderr": 0.125}
    found = SimpleNamespace(window=8, samples={"sums": 9}, scores={"sums": scores}, average=None)
    assert [line.split() for line in lines.harness(found)[2:]] == [
        ["sums", "9", "match,strict", "0.5000", "0.2500"],
        ["sums", "9", "acc", "0.7500", "0.1250"],
    ]


def test_titles_of_maps_do_not_run_into_each_other():
    names = max(list_variants(), key=len)
    matrix = np.tril(np.ones((3, 8, 8)))
    figure = pictures.maps(AttentionMaps(tuple("abcdefgh"), (LayerMap(10, names, matrix, matrix),)))
    renderer = FigureCanvasAgg(figure).get_renderer()
    titles = [text for text in figure.findobj(Text) if text.get_text().startswith("layer 10")]
    boxes = [title.get_window_extent(renderer) for title in titles]
    assert len(boxes) == 6
    for line in (boxes[:3], boxes[3:]):
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(line))


def test_tokens_in_letters_that_one_font_lacks_are_shown_without_a_warning(tmp_path, recwarn):
    matrix = np.tril(np.ones((1, 2, 2)))
    figure = pictures.maps(AttentionMaps(("日", "本"), (LayerMap(0, "fox", matrix, matrix),)))
    save(tmp_path, "maps", {}, figure)
    assert ">日</text>" in (tmp_path / "maps.svg").read_text(encoding="utf-8")
    assert not recwarn.list


def test_words_of_small_pictures_stay_within_them():
    answers = tuple(Answers(length, 4, 8, 0.0, 0.0, 1.0, 0.1) for length in (32, 64, 128))
    needles = [NeedlePicture(mode, 64, (0.0, 1.0), (32, 64, 128), (answers,) * 2) for mode in ("easy", "standard")]
    shares = PrunedShares(1, 9, 0.1, "tail", (0,), ((0.5, 0.5),))
    found = measures.NeedlePictures(tuple(needles)), measures.PruningHistory((shares, shares))
    for figure in (pictures.haystack(found[0]), pictures.pruning(found[1]), pictures.lengths(LengthCurve(32, answers))):
        renderer = FigureCanvasAgg(figure).get_renderer()
        panels = [axes.get_tightbbox(renderer) for axes in figure.axes]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(panels))
        assert panels[-1].x1 <= figure.bbox.x1


@pytest.mark.parametrize(("wrong", "spread"), [(0.0, 0.0), (0.006, 0.002), (0.5, math.nan), (1.0, 0.0)])
def test_picture_of_wrong_answers_has_no_share_below_none(wrong, spread):
    answers = (Answers(8, 4, 8, 0.0, 0.0, 1.0, 0.1), Answers(16, 4, 8, wrong, spread, 0.0, 0.1))
    [axes] = pictures.lengths(LengthCurve(8, answers)).axes
    bottom, top = axes.get_ylim()
    assert -0.05 * top < bottom < 0
    assert top > 100 * (wrong + (0.0 if math.isnan(spread) else spread))
    assert min(tick for tick in axes.get_yticks() if bottom <= tick <= top) == 0
