"""The shares of ranks that one GPU times: each rank's fragments with the keys before them, and what they allow."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from attnzoo import get
from attnzoo.benchmarks import context, shares
from attnzoo.benchmarks.measure import describe_versions

T = 32


def drawn(B: int, H: int, T: int, K: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, K) for _ in range(4))
    return [q, k, v, -torch.rand(B, T, H), do]


def test_shares_are_timed_by_fragment_and_the_busiest_rank_bounds_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(call: partial[Any], repeats: int) -> float:  # what a call would take if pairs were all
        start, stop = call.args[2:] if call.func is shares.fragment else (0, T)
        return float(sum(range(start + 1, stop + 1)))

    monkeypatch.setattr(shares, "inputs", drawn)
    monkeypatch.setattr(shares, "timed", pairs)
    rows = {(row["way"], row["ranks"]): row for row in shares.measure((1, 2, T, 16), (2, 4), ("dense",), 1)}
    assert rows["dense, zigzag", 2]["each_ms"] == [264.0, 264.0]
    assert rows["dense, zigzag", 4]["limit"] == 4
    assert rows["dense, contiguous", 2]["each_ms"] == [136.0, 392.0]
    assert rows["dense, contiguous", 2]["limit"] == round(528 / 392, 2)
    assert all(row["efficiency"] == 1 and float(row["error"]) < 1e-5 for row in rows.values())
    table = shares.table({"machine": describe_versions(), "rows": list(rows.values())})
    assert "| dense, zigzag | [1, 2, 32, 16] | 4 |" in table


def test_gradients_of_all_fragments_add_up_to_those_of_the_whole() -> None:
    *leaves, do = drawn(1, 2, T, 16)
    found = [torch.zeros_like(x) for x in leaves]
    for start, stop in ((0, 9), (9, T)):
        o, *grads = shares.fragment(leaves, do, start, stop)
        for total, grad, first in zip(found, grads, (start, 0, 0, 0), strict=True):
            total[:, first:stop] += grad
        assert o.shape[1] == stop - start
    _, *whole = context.both(get("fox").forms["parallel"], leaves, do)
    for got, expected in zip(found, whole, strict=True):
        assert float((got - expected).abs().max()) < 1e-4 * float(expected.abs().max())
