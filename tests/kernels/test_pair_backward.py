"""Gradients of KDA from pairs of tokens of a chunk: the kernel against autograd, its place in the peer's registry."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.forms.backends import fla_pairs
from attnzoo.kernels.linear.pair_backward import TILES, Pairs, PairTiles, pair_gradients
from attnzoo.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("dq", "dk", "db", "dg")


def by_autograd(x: dict[str, Tensor]) -> list[Tensor]:
    """The definition once more: from sums over pairs of weights times their given gradients, by autograd in float64."""
    names = ("q", "k", "beta", "g")
    q, k, beta, g = leaves = [x[name][0].double().requires_grad_() for name in names]
    total, H, borders = torch.zeros((), dtype=torch.float64), g.shape[1], x["cu_seqlens"].tolist()
    q, k = (y.repeat_interleave(H // y.shape[1], 1) for y in (q, k))
    for n, i in x["chunk_indices"].tolist():
        for t in range(first := borders[n] + 64 * i, min(first + 64, borders[n + 1])):
            weights = (g[t] - g[first : t + 1]).exp2() * k[first : t + 1]  # [s, H, K]
            of_q, of_k = (x[name][0, t, :, : t + 1 - first].double().T for name in ("dAqk", "dAkk"))
            total = total + (of_q * (q[t] * weights).sum(-1)).sum()
            total = total + (of_k * beta[t] * (k[t] * weights).sum(-1))[:-1].sum()
    dq, dk, db, dg = torch.autograd.grad(total, leaves)
    found = [y.repeat_interleave(H // y.shape[1], 1) / (H // y.shape[1]) for y in (dq, dk)]
    return [y + x[name][0] for name, y in zip(NAMES, (*found, db, dg / math.log(2)), strict=True)]


@pytest.mark.parametrize("borders", [[0, 70], [0, 5, 5, 64, 150]])
@pytest.mark.parametrize("closed", [-115.0, -1.0])
@pytest.mark.parametrize(("R", "BK"), [(16, 64), (64, 16)])
def test_gradients_are_those_of_autograd(
    R: int, BK: int, closed: float, borders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With decays next to nothing and without, for channels of one block and of two."""
    monkeypatch.setattr(fla_pairs, "CLOSED", closed)
    x = fla_pairs.drawn((2, 2, 24), borders, torch.float16)
    there = {name: y.to(DEVICE) for name, y in x.items()}
    given, tiles = Pairs(*(there[name] for name in fla_pairs.ARGUMENTS)), PairTiles(R, BK, 4, TILES.near)
    found = pair_gradients(given, there["cu_seqlens"], there["chunk_indices"], tiles)
    wanted, defined = by_autograd(x), fla_pairs.definition(x)
    for name, got, want, same in zip(NAMES, found, wanted, defined, strict=True):
        assert relative_error(got[0], want.to(DEVICE)) <= (1e-3 if DEVICE == "cuda" else 1e-6), name
        assert relative_error(same[0], want) <= 1e-9, name
        assert got.dtype == torch.float32


def test_heads_may_share_queries_and_keys() -> None:
    x = {name: y.to(DEVICE) for name, y in fla_pairs.drawn((1, 2, 16), [0, 3, 40], torch.float16).items()}
    for name, got, want in zip(NAMES, fla_pairs.gradients(**x), fla_pairs.definition(x), strict=True):
        assert relative_error(got, want) <= 1e-3, name


@pytest.mark.parametrize("unread", ["above", "beyond"])
def test_what_is_no_pair_is_not_read(unread: str) -> None:
    """Columns above a row's own, and of a chunk's tokens beyond the end."""
    x = fla_pairs.drawn((1, 1, 16), [0, 70], torch.float16)
    want = fla_pairs.definition(x)
    for t in range(70):
        own = t % 64 + 1
        for name, strict in (("dAqk", 0), ("dAkk", 1)):
            x[name][:, t, :, own - strict if unread == "above" else max(own, 6) :] = math.nan
    x |= {"cu_seqlens": None, "chunk_indices": None}  # type: ignore[dict-item]
    found = fla_pairs.gradients(**{name: y if y is None else y.to(DEVICE) for name, y in x.items()})
    assert all(relative_error(got, y) <= 1e-3 for got, y in zip(found, want, strict=True))


def test_a_gate_that_opens_is_served() -> None:
    """Sums that grow, as no layer of ours makes them."""
    x = fla_pairs.drawn((1, 1, 16), [0, 64], torch.float16)
    x["g"] = -x["g"] / 20
    found = fla_pairs.gradients(**{name: y.to(DEVICE) for name, y in x.items()})
    assert all(relative_error(got, y) <= 1e-3 for got, y in zip(found, fla_pairs.definition(x), strict=True))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a stub of the peer's registry is given."""
    found: list[Any] = []
    backends: Any = types.ModuleType("fla.backends")

    def register(operation: str) -> Callable[[Any], None]:
        return lambda backend: found.append((operation, backend))

    backends.BaseBackend, backends.register = type("BaseBackend", (), {"priority": 5}), register
    for name, module in (("fla", types.ModuleType("fla")), ("fla.backends", backends)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("fla.ops", "fla.ops.kda", "fla.ops.kda.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    fla_pairs.register.cache_clear()
    yield found
    fla_pairs.register.cache_clear()


def test_the_peer_is_given_the_kernel_once_and_asks_it_last(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fla_pairs.register()
    assert fla_pairs.register()
    ((operation, backend),) = registered
    assert (operation, backend.backend_type) == ("kda", "attnzoo")
    assert backend.priority > 5
    x = fla_pairs.drawn((1, 1, 16), [0, 3], torch.float16)
    ask = backend().chunk_kda_bwd_intra_verifier
    if DEVICE == "cpu":
        assert not ask(**x, safe_gate=False)[0]
    monkeypatch.setattr(fla_pairs, "serves", lambda q: True)
    assert ask(**x, safe_gate=False) == (True, None)
    for wrong in ({"chunk_size": 32}, {"use_graph": True}, {"g": x["g"].half()}, {"dAqk": x["dAqk"].half()}):
        assert not ask(**(x | wrong))[0]
    found = backend().chunk_kda_bwd_intra(**x, chunk_size=64, safe_gate=False, lower_bound=None)
    assert all(relative_error(a, b) <= 1e-3 for a, b in zip(found, fla_pairs.definition(x), strict=True))


def test_the_proof_does_not_depend_on_the_default_device() -> None:
    fla_pairs._proven.cache_clear()
    with torch.device("meta"):
        assert fla_pairs.proven((1, 2, 16), torch.float16, torch.device(DEVICE))


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_a_kernel_is_taken_where_it_agrees_with_its_definition(
    wrong: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = fla_pairs.gradients

    def spoiled(**given: Any) -> tuple[Tensor, ...]:
        found = run(**given)
        if wrong is not None and given["cu_seqlens"] is None:
            found[wrong][:, 64:] *= 1.1
        return found

    monkeypatch.setattr(fla_pairs, "gradients", spoiled)
    fla_pairs._proven.cache_clear()
    assert fla_pairs.proven((1, 2, 16), torch.float16, torch.device(DEVICE)) == (wrong is None)
    assert ("is miscompiled here for G=1, H=2, K=16" in caplog.text) == (wrong is not None)
    fla_pairs._proven.cache_clear()
