"""Certified truncation of recurrences: what states leave out weighs at most eps, in values and in gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnzoo import Gate, Prune, get, oracle
from attnzoo.algebra.block_decay import block_decay
from attnzoo.algebra.pruning import certified_starts
from attnzoo.algebra.truncation import kept_chunks
from attnzoo.forms.linear import LinearForms
from attnzoo.recurrences.deltanet import Householder
from attnzoo.samples import random_inputs
from attnzoo.testing import relative_error

KINDS = ("steady", "opens again", "closes", "one flood", "hardly closes")
SIZE = 8  # tokens of a chunk


def gates_of(kind: str, T: int, seed: int) -> Tensor:
    """``[1, T, 2]`` in float64."""
    draw = torch.Generator().manual_seed(seed)
    g = -torch.rand(1, T, 2, dtype=torch.float64, generator=draw)
    if kind == "opens again":
        g[:, T // 2 :] *= 1e-4
    if kind == "closes":
        g = g.masked_fill(torch.rand(g.shape, generator=draw) < 0.1, -torch.inf)
    if kind == "one flood":
        g = torch.zeros_like(g)
        g[:, T // 2] = -9.0
    if kind == "hardly closes":
        g = g / 20
    return g


def small(name: str, size: int = SIZE) -> LinearForms:
    return LinearForms(get(name).form_set.transition, chunk_size=size)  # type: ignore[attr-defined]


def leaves_of(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs]


@given(
    kind=st.sampled_from(KINDS), T=st.integers(2, 90), seed=st.integers(0, 999),
    eps=st.sampled_from((1e-6, 1e-3, 0.1)), packed=st.booleans(),
)  # fmt: skip
def test_sums_of_what_is_left_out_are_at_most_eps(kind: str, T: int, seed: int, eps: float, packed: bool) -> None:
    """With ones for q, k, v and the output's gradient o has the sums of rows, and dv those of columns."""
    g, one = gates_of(kind, T, seed), torch.ones(1, T, 2, 1, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, T // 3, T]) if packed else None
    found = []
    for prune in (None, Prune(eps)):
        q, k, v, decay = leaves_of(one, one, one, g)
        o = small("mamba2").chunk(q, k, v, Gate(log_decay=decay), scale=1.0, cu_seqlens=cu_seqlens, prune=prune)
        found.append((o.detach(), *torch.autograd.grad(o.sum(), (q, k, v, decay))))
    lost = [whole - cut for whole, cut in zip(*found, strict=True)]
    for summed in lost[:4]:
        assert -1e-12 <= float(summed.min()) <= float(summed.max()) <= eps * (1 + 1e-9)
    rows, columns = found[0][0][..., 0], found[0][3][..., 0]  # n_t, m_t
    assert bool((lost[4].abs() <= eps * (rows + columns)).all())


@pytest.mark.parametrize("name", ["mamba2", "mamba3", "gated_deltanet"])
def test_the_output_moves_by_at_most_eps_times_the_largest_product(name: str) -> None:
    """With transitions in between, after a state, which counts as one more key of its norm's length."""
    T, eps = 70, 1e-2
    q, k, v, gate = random_inputs(name, 1, T, 2, 2, 4, 3, seed=4)
    state = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    forms, ready = small(name), (q, k, v, gate, v.dtype, 0.5)
    (o, last), (whole, final) = (forms._chunked(*ready, state, True, prune) for prune in (Prune(eps), None))
    largest = torch.maximum((k.norm(dim=-1) * v.norm(dim=-1)).amax(1), torch.linalg.matrix_norm(state, 2))  # [B, H]
    limit = eps * 0.5 * q.norm(dim=-1) * largest[:, None]
    moved = (o - whole).norm(dim=-1)
    assert float(moved.max()) > 1e-9
    assert bool((moved <= limit).all())
    assert bool((torch.linalg.matrix_norm(last - final, 2) <= eps * largest).all())


def test_it_is_the_tail_certificate_without_scores() -> None:
    g, eps = gates_of("steady", 15 * SIZE, 0), 1e-2
    rows, columns = kept_chunks(block_decay(g.mT.unflatten(-1, (-1, SIZE))), eps)
    sums, none = g.mT.cumsum(-1), torch.zeros(1, 2, 15 * SIZE, dtype=torch.float64)
    starts = certified_starts(none, sums, Prune(eps), None, none, rows=SIZE, cols=SIZE)  # of the rows of a chunk
    first = rows[..., 1:].long().argmax(-1)[..., :-1]  # of those of the chunk before and of all later ones
    assert bool((first <= starts // SIZE).all())
    assert bool((first >= starts // SIZE - 1).all())
    assert bool((columns.sum(-1) < 15).all())


def test_what_leaves_nothing_out_is_the_recurrence() -> None:
    """``recurrent`` and ``parallel`` carry all; so does ``chunk`` where no gate closes."""
    q, k, v, gate = random_inputs("mamba2", 1, 300, 2, 1, 4, 3, regime="open", seed=1)
    gate = Gate(log_decay=gate.log_decay / 1000)  # type: ignore[operator]
    expected = oracle.linear(q, k, v, gate)
    for form in ("recurrent", "parallel", "chunk"):
        assert relative_error(get("mamba2").forms[form](q, k, v, gate, prune=Prune(1e-9)), expected) <= 1e-12


def test_a_transition_that_makes_vectors_longer_certifies_nothing() -> None:
    class Growing(Householder):
        expands = True

    q, k, v, gate = random_inputs("gated_deltanet")
    with pytest.raises(ValueError, match=r"prune: expected None \(Growing makes vectors longer\)"):
        LinearForms(Growing()).chunk(q, k, v, gate, prune=Prune())
