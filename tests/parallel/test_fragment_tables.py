"""Tables of fragments: which tokens each rank has, what is wrong with a table, and whole rows from their parts."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from attnzoo.parallel import Fragments


@given(tokens=st.integers(8, 60), ranks=st.integers(1, 4), kind=st.sampled_from(["contiguous", "zigzag"]))
def test_every_token_is_on_one_rank_in_order_and_shares_are_even(tokens, ranks, kind):
    fragments = getattr(Fragments, kind)(tokens, ranks)
    index = [fragments.index(rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(index).sort().values, torch.arange(tokens))
    assert all(torch.equal(one, one.sort().values) for one in index)
    counts = [fragments.count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= (1 if kind == "contiguous" else 2)
    if kind == "zigzag":  # of pairs that causality allows
        pairs = [int((one + 1).sum()) for one in index]
        assert max(pairs) - min(pairs) <= 3 * tokens


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.integers(1, 4))
def test_balanced_fragments_share_out_the_work(work, ranks):
    tokens = 60
    fragments = Fragments.balanced([float(x) for x in work], ranks, tokens)
    assert [row.rank for row in fragments.table] == list(range(ranks))
    each = torch.tensor(work, dtype=torch.float64).repeat_interleave(tokens // len(work)) * len(work) / tokens
    shares = [float(each[row.start : min(row.stop, len(each))].sum()) for row in fragments.table]
    assert max(shares) <= sum(work) / ranks + max(work) + 1  # to a block of work, and one of rounding


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fragments.of([(0, 4, 0), (5, 9, 1)], 2), "table: expected a fragment from token 4 on, got (5, 9, 1)"),
        (lambda: Fragments.of([(0, 4, 0), (3, 9, 1)], 2), "table: expected a fragment from token 4 on, got (3, 9, 1)"),
        (lambda: Fragments.of([(0, 4, 0), (4, 9, 2)], 2), "table: expected ranks from 0 to 1, got (4, 9, 2)"),
        (lambda: Fragments.zigzag(3, 4), "tokens: expected at least one for each of 4 ranks, got 3"),
        (lambda: Fragments.balanced([1, 1], 4, 3), "tokens: expected at least one for each of 4 ranks, got 3"),
        (lambda: Fragments.of([(0, 9, 0)], 2), "table: expected tokens for each of 2 ranks, got none for rank 1"),
        (lambda: Fragments.of([(0, 9, 0)], 1, 8), "table: expected fragments of all 8 tokens, got 9"),
        (lambda: Fragments.contiguous([0, 5, 3], 2), "tokens: expected a number above 0, or borders that rise from 0"),
        (lambda: Fragments.contiguous(9, 0), "over: expected at least one rank, got 0"),
        (lambda: Fragments.balanced([1.0, -1.0], 2, 9), "work: expected numbers of 0 or more, and some above"),
        (lambda: Fragments.zigzag(9, 1).shard(torch.zeros(1, 8, 2)), "x: expected 9 tokens along axis 1"),
        (lambda: Fragments.zigzag(9, 2).shard(torch.zeros(1, 9)), "expected a process group of 2 ranks, got one of 1"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_whole_rows_come_back_and_give_their_gradients():
    fragments, x = Fragments.zigzag([0, 4, 13], 3), torch.randn(2, 13, 3, dtype=torch.float64)

    def rank(_):
        mine = fragments.shard(x).requires_grad_()
        whole = fragments.gather(mine)
        (grad,) = torch.autograd.grad(whole.square().sum(), mine)
        return whole.detach(), grad, fragments.gather(fragments.shard(x[0], dim=0), dim=0)

    for number, (whole, grad, first) in enumerate(on_ranks(3, rank)):
        assert torch.equal(whole, x)
        assert torch.equal(first, x[0])
        assert torch.allclose(grad, 3 * 2 * x[:, fragments.index(number)])
