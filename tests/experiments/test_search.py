"""The search of a learning rate ends where the best of 1, 2, 5, 10, ... has a worse one on either side."""

import json
import math

import pytest
import tiny_runs
from click.testing import CliRunner

from attnzoo.cli import app
from attnzoo.experiments import search as module
from attnzoo.experiments.search import last_loss, search


@pytest.mark.parametrize(
    ("best", "first", "tried"),
    [
        (2e-3, 1e-3, [1e-3, 2e-3, 5e-3]), (1e-3, 1e-3, [1e-3, 2e-3, 5e-4]),
        (1e-2, 3e-3, [3e-3, 5e-3, 1e-2, 2e-2]), (2e-4, 1e-3, [1e-3, 2e-3, 5e-4, 2e-4, 1e-4]),
    ],
)  # fmt: skip
def test_the_best_rate_has_a_worse_one_on_either_side(best, first, tried, monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(module, "train", lambda config: ran.append(config.optimizer.lr) or config.optimizer.lr)
    monkeypatch.setattr(module, "last_loss", lambda lr: abs(math.log(lr / best)))
    config = tiny_runs.config_of(tmp_path, "search", f"optimizer.lr={first}")
    losses = search(config)
    assert sorted(ran) == sorted(losses) == pytest.approx(sorted(tried))
    assert min(losses, key=losses.get) == pytest.approx(best)


def test_rates_that_diverge_are_worse_than_all(monkeypatch, tmp_path):
    def train(config):
        if config.optimizer.lr > 1e-2:
            raise FloatingPointError("the loss is nan")
        return config.optimizer.lr

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "last_loss", lambda lr: abs(math.log(lr / 5e-3)))
    losses = search(tiny_runs.config_of(tmp_path, "search", "optimizer.lr=0.5"))
    assert min(losses, key=losses.get) == pytest.approx(5e-3)
    monkeypatch.setattr(module, "last_loss", lambda lr: math.inf)
    assert all(map(math.isinf, search(tiny_runs.config_of(tmp_path, "search", "optimizer.lr=0.001")).values()))


def test_the_last_tokens_of_a_run_count(tmp_path):
    rows = [{"kind": "train", "step": n, "tokens": 10 * n, "loss": float(n)} for n in range(1, 101)]
    rows = [{**row, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 1.0, "seconds": 1.0} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_loss(tmp_path) == 95.5


def test_the_command_trains_and_names_the_best(tmp_path):
    tiny_runs.write_text(tmp_path)
    words = [f"output_dir={tmp_path / 'search'}", f"data.source={tmp_path / 'text.txt'}", *tiny_runs.SMALL]
    (tmp_path / "small.yaml").write_text("{}")
    done = CliRunner().invoke(app, ["search", str(tmp_path / "small.yaml"), *words])
    assert done.exit_code == 0, done.output
    *tried, last = done.output.splitlines()
    assert len(tried) == len(list((tmp_path / "search").iterdir())) >= 3
    best = min(tried, key=lambda line: float(line.rpartition(" ")[2])).partition(":")[0]
    assert last == f"best learning rate: {best}"
