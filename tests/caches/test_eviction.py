"""Keys that are given up for ever: what they would have weighed in every later row, measured."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import QueryBounds
from attnzoo.forms.caches.pages.page_table import PoolSizes
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool
from attnzoo.forms.caches.path_pages.attention import attend_carried
from attnzoo.forms.caches.path_pages.pool import CarriedPool
from attnzoo.forms.options import NOTHING_ASKED

LOG_EPS = -10.0
Q, LONG = 2.0, 3.0  # the longest query and key: no score exceeds 6
BOUNDS = QueryBounds(torch.tensor([Q]), torch.tensor([Q * LONG]), torch.tensor([Q * LONG]))
T = 4096
TURNS = (400, 1031, 2060, 3100)


def gates(kind: str) -> Tensor:
    """``[T]``, float64."""
    g = torch.full((T,), -1 / 8).double()
    if kind == "random":
        g = torch.nn.functional.logsigmoid(torch.randn(T, generator=torch.Generator().manual_seed(0)).double() + 3)
    if kind == "opens again":  # far away for 40 tokens, then nothing is forgotten any more
        g = torch.zeros(T).double()
        g[1000:1040], g[2000:2100] = -0.7, -0.4
    if kind == "closes":
        g[1500], g[3000] = -math.inf, -2e4
    return g


def evicted(k: Tensor, g: Tensor, bounds: QueryBounds, piece: int = PAGE) -> Tensor:
    """How many of the keys ``[B, T, K]`` are gone when each row is computed, ``[B, T]``; evicted before each piece."""
    B, gone = len(k), []
    pool = KeyPool.empty(PoolSizes(B, 1, 1, k.shape[2], 1), dtype=torch.float64)
    for start in range(0, T, piece):
        pool.evict(LOG_EPS, bounds)
        now = slice(start, min(start + piece, T))
        pool.append(k[:, now, None], k[:, now, None, :1], g[now, None].expand(B, -1, 1))
        gone.append((pool.first * PAGE).expand(B, now.stop - start))
    assert pool.used() == int(pool.live().sum()) == B * -(-T // PAGE) - int(pool.first.sum())
    return torch.cat(gone, 1)


def against(turn: int, length: float) -> Tensor:
    """Keys ``[T, 1]``: up to the turn along every query and that long, then as long as they may be against it."""
    return torch.where(torch.arange(T) < turn, length, -LONG).double()[:, None]


def dropped(k: Tensor, g: Tensor, gone: Tensor) -> Tensor:
    """The weight of the first ``gone [T]`` keys in every row, with the longest query, ``[T]``."""
    sums = torch.logcumsumexp(Q * k[:, 0] - g.clamp(min=-2e4).cumsum(0), 0)  # each row's log-sum-exp, up to its c
    return torch.where(gone > 0, (sums[(gone - 1).clamp(min=0)] - sums).exp(), 0.0)


@pytest.mark.parametrize("kind", ["constant", "random", "opens again", "closes"])
@pytest.mark.parametrize("length", [LONG, LONG / 5])
def test_no_later_row_loses_more_than_eps(kind: str, length: float) -> None:
    """Old keys along every query, new ones against it: as far as the norms allow, wherever it turns."""
    g = gates(kind)
    k = torch.stack([against(turn, length) for turn in TURNS])
    gone = evicted(k, g, BOUNDS)
    lost = torch.stack([dropped(k[b], g, gone[b]) for b in range(len(TURNS))])
    assert lost.max() <= math.exp(LOG_EPS)
    assert kind == "closes" or lost.max() > 0
    for b, turn in enumerate(TURNS):
        assert gone[b, -1] >= (1984 if kind == "opens again" else turn)


@pytest.mark.parametrize("kind", ["constant", "opens again"])
def test_no_later_row_loses_more_than_eps_where_keys_are_carried(kind: str) -> None:
    """Reflections in all directions, and queries that follow them: old keys stay along each, new ones against it."""
    turns, tokens, v = (400, 1031), 1152, torch.ones(2, 1152, 1, 1).double()
    w = torch.nn.functional.normalize(
        torch.randn(tokens, 4, generator=torch.Generator().manual_seed(0)).double(), dim=1
    )
    along = [torch.eye(4)[0].double()]
    for direction in w:
        along.append(along[-1] - 2 * (along[-1] @ direction) * direction)
    k = torch.stack([against(turn, LONG)[:tokens] for turn in turns])[:, :, None] * torch.stack(along[1:])[:, None]
    q = Q * torch.stack(along[1:]).expand(2, 1, tokens, 4)
    of_all = {"log_decay": gates(kind)[:tokens, None], "w": w[:, None], "beta": torch.full((tokens, 1), 2.0).double()}
    gate = Gate(**{name: x.expand(2, *x.shape) for name, x in of_all.items()})
    pool, whole = (CarriedPool.empty(PoolSizes(2, 1, 1, 4, 1), dtype=torch.float64, group=1) for _ in range(2))
    lost = []
    for start in range(0, tokens, PAGE):
        pool.evict(LOG_EPS, BOUNDS)
        now = slice(start, start + PAGE)
        part = gate.slice(now.start, now.stop)
        if start:
            kept, all_of_it = (
                attend_carried(q[:, :, now], k[:, now], v[:, now], part, one, None, NOTHING_ASKED)[1]
                for one in (pool, whole)
            )
            lost.append(-torch.expm1(kept - all_of_it))
        for one in (pool, whole):
            one.add(k[:, now], v[:, now], part, None)
    assert 0 < torch.cat(lost, 2).max() <= math.exp(LOG_EPS)
    assert (pool.first >= 6).all()
    assert pool.used() == int(pool.live().sum()) < whole.used()


def test_the_output_moves_by_at_most_twice_eps() -> None:
    """Values of 1 along the query and -1 against it; scores and softmax written out."""
    g, turn, now = gates("random"), 1031, slice(1031, 1500)
    k = against(turn, LONG)
    gone = evicted(k[None], g, BOUNDS)[0]
    c, index = g.cumsum(0), torch.arange(T)
    logits = (Q * k[:, 0] + c[now, None] - c).masked_fill(index > index[now, None], -math.inf)
    v = torch.where(index < turn, 1.0, -1.0).double()
    kept = logits.masked_fill(index < gone[now, None], -math.inf)
    moved = ((logits.softmax(-1) - kept.softmax(-1)) @ v).abs()
    assert torch.allclose(logits.softmax(-1).masked_fill(index >= gone[now, None], 0).sum(-1), dropped(k, g, gone)[now])
    assert 0 < moved.max() <= 2 * math.exp(LOG_EPS)


def test_only_one_bound_may_know_the_norms_of_old_keys() -> None:
    """The other one is about keys that do not exist yet: here the first that is against the query, after a gap."""
    g, k = gates("constant"), against(1984, LONG / 6)
    g[1984:2048] = 0.0
    g[2047] = -12.01 + math.log(1 - math.exp(-1 / 8))  # both scores within 1: 12 and log n_b
    both = replace(BOUNDS, own=torch.tensor([Q * LONG / 6]))
    assert dropped(k, g, evicted(k[None], g, BOUNDS)[0]).max() <= math.exp(LOG_EPS)
    assert dropped(k, g, evicted(k[None], g, both)[0]).max() > 50 * math.exp(LOG_EPS)


def test_a_long_key_keeps_what_short_ones_would_let_go() -> None:
    """In a later page it counts for the earlier ones too, and a head that forgets nothing keeps all."""
    k, g = torch.full((T, 1), 0.1).double(), gates("constant")
    keys = torch.stack([k, k, k])
    keys[1, 1000] = LONG
    short, long, _ = evicted(keys, g, BOUNDS)
    assert (long <= short).all()
    assert long[1280] < short[1280]
    assert evicted(keys, torch.zeros(T).double(), BOUNDS).max() == 0


def test_the_head_that_reaches_furthest_holds_the_page_of_its_group() -> None:
    pool = KeyPool.empty(PoolSizes(1, 1, 2, 4, 4), dtype=torch.float32)
    k, g = torch.randn(1, 640, 1, 4), torch.tensor([-1.0, -0.001]).expand(1, 640, 2)
    pool.append(k, k, g)
    bounds = QueryBounds(torch.tensor([0.1, 0.1]), torch.tensor([1.0, 1.0]))
    assert pool.evict(LOG_EPS, bounds) == 0
    pool.append(k, k, torch.full((1, 640, 2), -1.0))
    assert pool.evict(LOG_EPS, bounds) > 0


def test_what_a_window_or_a_closed_gate_hides_goes_without_bounds() -> None:
    pool = KeyPool.empty(PoolSizes(2, 1, 1, 4, 4), dtype=torch.float32)
    k, g = torch.randn(2, 640, 1, 4), torch.zeros(2, 640, 1)
    g[0, 320] = -math.inf
    pool.append(k, k, g)
    pool.evict(LOG_EPS, None)
    assert pool.first.tolist() == [[5], [0]]
    pool.evict(LOG_EPS, None, window=129)  # the next row, 640, sees 512 to 640
    assert pool.first.tolist() == [[8], [8]]
    assert pool.evict(LOG_EPS, None, window=128) == 0
    pool.append(k[:, :1], k[:, :1], g[:, :1])
    assert pool.evict(LOG_EPS, None, window=66) == 2
