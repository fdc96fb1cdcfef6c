"""A sequence cut into fragments gives what the whole gives, on both sides of every pair."""

from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo import dual, get, list_variants
from attnzoo.algebra import fragments
from attnzoo.algebra.transitions import HeadGate, heads_first
from attnzoo.samples import random_inputs
from attnzoo.testing import assert_close, value_and_gradients


def pieces(name, q, k, v, gate, borders):
    """Each fragment in closed form, with scaled queries, and its values, heads first."""
    transition, H = dual(name).form_set.transition, q.shape[2]
    for a, b in pairwise(borders):
        rows = [heads_first(x[:, a:b], H, torch.float64) for x in (q * q.shape[-1] ** -0.5, k, v)]
        yield fragments.carried(transition, *rows[:2], HeadGate.of(gate.slice(a, b), q[:, a:b])), rows[2]


def softmax_side(name, borders):
    """The rows of a fragment over its own keys by the variant itself, over earlier ones by dense attention."""

    def form(q, k, v, gate):
        found, outputs = list(pieces(name, q, k, v, gate, borders)), []
        for b, (own, _) in enumerate(found):
            first, stop = borders[b : b + 2]
            inputs = (*(x[:, first:stop] for x in (q, k, v)), gate.slice(first, stop))
            o, lse = get(name).forms["parallel"](*inputs, return_lse=True)
            parts, between, decay = [(o.transpose(1, 2), lse.transpose(1, 2))], None, torch.zeros_like(own.decay)
            for other, values in reversed(found[:b]):
                bias = other.exit + decay[..., None]
                o, lse = fragments.attend(own.q, fragments.times(between, other.k), values, bias)
                parts.append((o, lse + own.entry))
                between, decay = fragments.joined(other.total, between), decay + other.decay
            outputs.append(fragments.merge(parts)[0])
        return torch.cat(outputs, 2).transpose(1, 2)

    return form


def linear_side(name, borders):
    """The rows of a fragment from nothing by the variant itself, and what the state before it adds."""

    def form(q, k, v, gate):
        found = list(pieces(dual(name).name, q, k, v, gate, borders))
        left = [fragments.state_of(own, values) for own, values in found]
        before = fragments.starts([own.total for own, _ in found], [own.decay for own, _ in found], left)
        outputs = []
        for b, (own, _) in enumerate(found):
            first, stop = borders[b : b + 2]
            inputs = (*(x[:, first:stop] for x in (q, k, v)), gate.slice(first, stop))
            o = get(name).forms["recurrent"](*inputs)
            outputs.append(o + fragments.read(own, before[b], 1.0).transpose(1, 2))
        return torch.cat(outputs, 1)

    return form


@pytest.mark.parametrize("name", list_variants())
@settings(max_examples=4)
@given(data=st.data())
def test_fragments_together_are_the_whole_sequence(name, data):
    T = 21
    cuts = data.draw(st.sets(st.integers(1, T - 1), max_size=4))
    regime = data.draw(st.sampled_from(("mixed", "open", "closed", "closing")))
    inputs = random_inputs(name, B=1, T=T, H=2, G=1, K=4, V=3, regime=regime, seed=data.draw(st.integers(0, 99)))
    borders = [0, *sorted(cuts), T]
    if data.draw(st.booleans(), label="closed exactly at the cuts"):
        for part in ("log_decay", "log_diag"):
            gates = getattr(inputs[3], part)
            if gates is not None and gates.ndim > 1:
                gates[:, borders[1:-1]] = -torch.inf
    with mock.patch.object(fragments, "BLOCK", 4):
        side = linear_side if get(name).side == "linear" else softmax_side
        cut = value_and_gradients(side(name, borders), inputs)
    whole = value_and_gradients(get(name).forms["parallel"], inputs)
    assert_close({"o": cut.pop("o")}, {"o": whole.pop("o")}, 1e-10)
    assert_close(cut, whole, 1e-9)


def test_products_of_blocks_are_made_in_their_order():
    """Those before and after each of n matrices, for every n up to 9."""
    generator = torch.Generator().manual_seed(0)
    for n in range(1, 10):
        matrices = torch.randn(1, 1, n, 1, 3, 3, dtype=torch.float64, generator=generator)
        before, after, total = fragments._around(matrices)
        product = torch.eye(3, dtype=torch.float64)
        for i in range(n):
            assert torch.allclose(before[0, 0, i, 0], product)
            product = matrices[0, 0, i, 0] @ product
            later = torch.eye(3, dtype=torch.float64)
            for j in range(i + 1, n):
                later = matrices[0, 0, j, 0] @ later
            assert torch.allclose(after[0, 0, i, 0], later)
        assert torch.allclose(total[0, 0, 0], product)
