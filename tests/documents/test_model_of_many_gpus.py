"""The model of many GPUs beside the code's own certificate, and beside times that it was not fitted to."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from attnzoo import Gate, Prune, get
from attnzoo.benchmarks.measure import decay_lengths
from attnzoo.parallel import Fragments
from attnzoo.parallel.pruned import Needed
from attnzoo.parallel.rows import Rows

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FIGURES))
    import many_gpus

    return many_gpus


def test_keys_that_cross_are_those_of_the_certificate(model: ModuleType) -> None:
    T, ranks, H, K = 4096, 4, model.HEADS, model.CHANNELS
    generator = torch.Generator().manual_seed(0)
    tau = decay_lengths(H, generator)
    q, k = (F.rms_norm(torch.randn(1, T, H, K, generator=generator), (K,)) for _ in range(2))
    gate = Gate(log_decay=-torch.rand(1, T, H, generator=generator) * 2 / tau)
    rows = Rows(q, k, k[..., :1], gate, get("fox").form_set.OPTIONS(prune=Prune(math.exp(model.LOG_EPS))))
    fragments = Fragments.zigzag(T, ranks)

    def counted(rank: int) -> torch.Tensor:
        local = [fragments.shard(x) for x in (rows.q, rows.k, rows.v, gate.log_decay)]
        own = Rows(*local[:3], Gate(log_decay=local[3]), rows.options)
        return Needed.of(own, fragments, H).by_rank

    found = on_ranks(ranks, counted)[0]  # [fragments, ranks, 1, H]
    by_head = found.sum((0, 1, 2)).double().numpy()
    assert by_head.sum() == pytest.approx(model.sent(T, ranks).sum(), rel=0.1)
    assert by_head == pytest.approx(model.sent(T, ranks).sum((0, 1)), rel=0.25)


def test_the_model_gives_other_times_of_one_gpu_and_the_bounds_of_two(model: ModuleType) -> None:
    assert model.worst() < 0.05
    for tokens in model.TWO:
        for pruned in (False, True):
            assert model.alone(tokens, pruned) == pytest.approx(
                model.measured(tokens, "gather", pruned, "one_ms"), 0.05
            )
            gain = model.measured(tokens, "gather", pruned, "times_one")
            assert model.gain(tokens, 2, "gather", pruned) == pytest.approx(gain, 0.02)  # two numbers for four times
    assert (model.bound(True), model.bound(False)) == pytest.approx((1.82, 1.93), rel=0.02)
    costs = model.costs()
    assert min(costs) > 0
    for way in ("gather", "heads", "pruned", "mixed"):
        assert model.gain(131072, 8, way, True) < model.gain(131072, 8, way, True, today=False) < 8


def test_the_model_gives_the_shares_of_ranks_that_it_was_not_fitted_to(model: ModuleType) -> None:
    for pruned in (False, True):
        for ranks in (2, 4, 8):
            busiest = model.share(131072, ranks, pruned, "busiest")
            assert model.work(131072, ranks, "gather", pruned) == pytest.approx(busiest, 0.08)


def test_a_key_that_all_ranks_need_is_sent_to_each_and_gathered_once(model: ModuleType) -> None:
    open_heads = model.spans(seen="sent") > 131072
    keys = model.sent(131072, 16)
    assert keys[0, 1:, open_heads].sum() == pytest.approx(4 * 15 * 131072 / 32, rel=0.01)
    assert model.links(131072, 16, "pruned") > model.links(131072, 16, "gather") > model.links(131072, 16, "mixed")
