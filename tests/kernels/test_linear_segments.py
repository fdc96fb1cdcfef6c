"""Sequences split into segments: exact sums of what segments leave, and what certified truncation leaves out."""

from __future__ import annotations

import math

import pytest
import torch
from test_linear_chunks import DEVICE, Shape, differentiated, exactly, inputs_of, off
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.linear import chunk_backward, chunk_op, chunks, linear_chunks, segments


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and segments of few tokens."""
    for module in (chunks, chunk_op, chunk_backward):
        monkeypatch.setattr(module, "CHUNK", 16 if DEVICE == "cpu" else 64)


def into(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def split(programs: int, count: int, device: torch.device, packed: bool) -> segments.Segments:
        length = -(-count // many)
        return segments.Segments(-(-count // length), length)

    monkeypatch.setattr(chunks, "split", split)


@pytest.mark.parametrize("many", [2, 5])
@pytest.mark.parametrize("gate", ["token", "none"])
def test_segments_add_up_to_the_sequence(many: int, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, states and all gradients, with closed gates and without any gate."""
    shape = Shape(1, 150, 2, 1, 16, 20, gate, () if gate == "none" else (0, 37, 64, 149))
    leaves = inputs_of(shape)
    do, dlast = torch.randn(1, 150, 2, 20, device=DEVICE), torch.randn(1, 2, 16, 20, device=DEVICE)
    wide = [None if x is None else x.double() for x in leaves]
    expected = differentiated(exactly, wide, do.double(), dlast.double())
    into(many, monkeypatch)
    got = differentiated(lambda *x: linear_chunks(*x, keeps_state=True), leaves, do, dlast)
    assert off(got, expected) == {}


def test_packed_sequences_are_split_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 40, 64, 130, 200, 200], device=DEVICE)
    q, k, v, g, _ = inputs_of(Shape(1, 200, 2, 1, 16, 16))
    do = torch.randn(1, 200, 2, 16, device=DEVICE)

    def packed(*x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return linear_chunks(*x[:4], cu_seqlens=cu_seqlens)  # type: ignore[arg-type]

    whole = differentiated(packed, (q, k, v, g, None), do, None)
    into(4, monkeypatch)
    assert off(differentiated(packed, (q, k, v, g, None), do, None), whole) == {}


def weights_of(g: Tensor, starts: tuple[int, ...] = ()) -> Tensor:
    """``exp(d_tj)`` in float64, [H, T, T], of g [1, T, H]."""
    g = g[0].T.double()
    closed = g.isneginf()
    closed[:, list(starts)] = True
    c, n = g.masked_fill(closed, 0.0).cumsum(-1), closed.cumsum(-1)
    future = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
    return (c[:, :, None] - c[:, None]).masked_fill(future | (n[:, :, None] != n[:, None]), -torch.inf).exp()


@pytest.mark.parametrize("kind", ["steady", "opens again", "closes", "packed", "after a state"])
def test_what_is_left_out_weighs_at_most_eps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ones for q, k, v and the output's gradient o has the sums of rows, and dv those of columns."""
    T, H = 230, 2
    torch.manual_seed(1)
    g = -torch.rand(1, T, H, device=DEVICE) * torch.tensor([0.6, 0.02], device=DEVICE)
    starts, state = (), None
    if kind == "opens again":
        g[:, 60:80], g[:, 80:] = -0.4, 0.0
    if kind == "closes":
        g[:, [5, 64, 100, 101]] = -torch.inf
    if kind == "packed":
        starts = (0, 50, 128, 140)
    if kind == "after a state":
        state = torch.ones(1, H, 1, 1, device=DEVICE)
    cu_seqlens = torch.tensor([*starts, T], device=DEVICE) if starts else None
    one = torch.ones(1, T, H, 1, device=DEVICE)

    def run(prune: Prune | None) -> dict[str, Tensor]:
        def call(*x: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return linear_chunks(*x, scale=1.0, cu_seqlens=cu_seqlens, keeps_state=state is not None, prune=prune)  # type: ignore[arg-type]

        return differentiated(call, (one, one, one, g, state), one, state)

    into(5, monkeypatch)
    whole = run(None)
    slack = 1e-5 * whole["o"].abs().max()
    weights = weights_of(g, starts)
    n, m = weights.sum(-1).T, weights.sum(-2).T
    for eps in (1e-1, 1e-3):
        lost = {name: whole[name].double() - x.double() for name, x in run(Prune(eps)).items()}
        if kind != "packed":
            assert lost["o"].max() > 1e-2 * eps, "nothing was left out"
        for name in ("o", "q", "k", "v", *(("last", "state") if state is not None else ())):
            assert -slack <= lost[name].min() <= lost[name].max() <= eps + slack, (name, eps)
        assert bool((lost["g"][0].abs() <= eps * (n + m + 2) + 30 * slack).all()), eps


def test_a_boundary_keeps_no_more_than_the_weights_say() -> None:
    """Of a constant gate, whose weights are a geometric series."""
    size, f, eps = chunks.CHUNK, 0.9, 1e-3
    g = torch.full((1, 20 * size, 1), math.log(f), device=DEVICE)
    sums = chunks.chunk_gates(g, None)
    found = segments.spans(segments.Segments(5, 4), *sums, size, eps, False, False)
    needs = math.ceil(math.log(eps * (1 - f)) / math.log(f))  # tokens back from a segment's start
    expected = [max(0, 4 * s - math.ceil(needs / size)) for s in range(5)]
    assert found.begin is not None
    assert found.until is not None
    assert found.begin.flatten().tolist() == expected
    assert found.until.flatten().tolist() == [min(20, 4 * s + math.ceil(needs / size)) for s in range(5)]
    exact = segments.spans(segments.Segments(5, 4), *sums, size, 0.0, False, False)
    assert exact.begin is not None
    assert exact.begin.flatten().tolist() == [0, 0, 0, 0, 0]


def test_few_programs_over_long_texts_are_split() -> None:
    """A GPU of 132 multiprocessors that has all it can run, or a text of few chunks, is not."""

    def many(programs: int, count: int, packed: bool = False) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "multiprocessors", lambda device: 132)
            return segments.split(programs, count, torch.device("cpu"), packed).many

    assert many(16, 256) == 22
    assert many(24, 4096) == 22
    assert many(16, 170) == many(25, 4096) == many(200, 1024, packed=True) == 1
    assert many(50, 1024, packed=True) == 10
    assert many(1, 0) == 1
