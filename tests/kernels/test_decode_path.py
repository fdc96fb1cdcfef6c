"""PaTH's steps over pages against float64, at ragged lengths around the borders of pages, and what they leave."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fox_cases import DEVICE, Sizes
from torch import Tensor

from attnzoo.algebra import oracle
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune
from attnzoo.forms.caches.pages.page_table import PAGE, PoolSizes
from attnzoo.forms.caches.path_pages.attention import attend_carried
from attnzoo.forms.caches.path_pages.pool import CarriedPool
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.readout import attend_with_sink
from attnzoo.kernels.decode import PathTokens, paged_path_step
from attnzoo.kernels.decode.plan import override_plan


@dataclass(frozen=True)
class Case(Sizes):
    """A step of T tokens, of which sequence b gets the last ``count[b]``, to ``lengths[b]`` tokens."""

    lengths: tuple[int, ...] = (150, 3)
    T: int = 1
    gate: str = "open"  # none, or mixed: with closed ones
    first: tuple[int, ...] = ()  # evicted pages of each sequence
    count: tuple[int, ...] = ()
    factors: int | None = None
    group: int = 1  # pages


CASES = [
    Case(lengths=(150, 1, 129), H=4, G=2),
    Case(lengths=(196, 70, 20), T=16, H=2, gate="none", V=32, options={"sink": 0.5}),
    Case(lengths=(260,), H=2, G=2, first=(2,)),
    Case(lengths=(129,), T=2, G=1, factors=2, group=2),
    Case(lengths=(140, 133), T=5, gate="mixed", count=(5, 3), options={"window": 66, "scale": 0.4}),
]


@dataclass
class Inputs:
    """Tokens, and a pool that has all but the last ones."""

    q: Tensor  # [B, S, H, K]
    k: Tensor  # [B, S, G, K]
    v: Tensor
    gate: Gate
    pool: CarriedPool
    options: SoftmaxOptions

    def new(self, case: Case, b: int | None = None) -> tuple[Tensor, Tensor, Tensor, Gate]:
        """The last T tokens of sequence b, or of all."""
        rows = torch.tensor(case.lengths, device=self.q.device)[:, None] - case.T
        at = (torch.arange(len(case.lengths), device=rows.device)[:, None], rows + torch.arange(case.T).to(rows))
        part = {name: getattr(self.gate, name)[at] for name in self.gate.parts}
        return self.q[at], self.k[at], self.v[at], Gate(**part)


def inputs(case: Case, dtype: torch.dtype = torch.float32, pages: torch.dtype | None = None) -> Inputs:
    """Drawn tokens in ``dtype``, the pages in that or another."""
    generator = torch.Generator().manual_seed(0)
    B, S, R = len(case.lengths), max(case.lengths), case.H // case.G

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = randn(B, S, case.H, case.K), randn(B, S, case.G, case.K), randn(B, S, case.G, case.V)
    each = () if case.factors is None else (case.factors,)
    w = torch.nn.functional.normalize(randn(B, S, case.G, *each, case.K), dim=-1)
    beta = 2 * torch.rand(B, S, case.G, *each, generator=generator)
    g = None if case.gate == "none" else torch.nn.functional.logsigmoid(randn(B, S, case.H) + 3)
    if g is not None and case.gate == "mixed":
        g = g.masked_fill(torch.rand(g.shape, generator=generator) < 0.02, -math.inf)
    q, k, v, w, beta, g = (None if x is None else x.to(DEVICE) for x in (q, k, v, w, beta, g))
    gate = Gate(log_decay=g, w=w.to(dtype), beta=beta)
    sink = None if "sink" not in case.options else torch.full((case.H,), case.options["sink"], device=DEVICE)
    x = Inputs(q.to(dtype), k.to(dtype), v.to(dtype), gate, None, SoftmaxOptions(**{**case.options, "sink": sink}))
    x.pool = CarriedPool.empty(
        PoolSizes(B, case.G, R, case.K, case.V), dtype=pages or dtype, device=DEVICE, decays=g is not None, tokens=S,
        group=case.group,
    )  # fmt: skip
    before = torch.tensor(case.lengths, device=DEVICE) - torch.tensor(case.count or (case.T,) * B, device=DEVICE)
    x.pool.add(x.k, x.v, x.gate, torch.arange(S, device=DEVICE) < before[:, None])
    for b, n in enumerate(case.first):
        ids = x.pool.pages[b, :, :n].flatten()
        x.pool.k[ids.long()], x.pool.v[ids.long()], x.pool.factors[b, :, : n // case.group] = (math.nan,) * 3
        x.pool.pages[b, :, :n], x.pool.first[b] = -1, n
        x.pool.table.copy_(x.pool.pages)
    x.pool.reserve(case.count or [case.T] * B)
    return x


def exact(case: Case, x: Inputs) -> Tensor:
    """Each sequence alone in float64, without what has been evicted."""
    rows, given = [], x.options
    for b, n in enumerate(case.lengths):
        one = Gate(**{name: getattr(x.gate, name)[b : b + 1, :n].double() for name in x.gate.parts})
        s, d = oracle.scores(x.q[b : b + 1, :n], x.k[b : b + 1, :n], one, scale=given.scale)
        logits = (s + d)[:, :, -case.T :]
        j, t = torch.arange(n, device=s.device), torch.arange(n, device=s.device)[-case.T :, None]
        hidden = j > t
        hidden |= j < (case.first[b] if case.first else 0) * PAGE
        hidden |= j <= t - (given.window or n)
        logits = logits.masked_fill(hidden, -math.inf)
        if given.sink is not None:
            logits = torch.cat([logits, given.sink.double()[:, None, None].expand(1, -1, case.T, 1)], -1)
        v = x.v[b : b + 1, :n].double().repeat_interleave(case.H // case.G, 2).transpose(1, 2)
        rows.append((logits.softmax(-1)[..., :n] @ v).transpose(1, 2))
    return torch.cat(rows)


def plain(case: Case, x: Inputs, pool: CarriedPool) -> Tensor:
    """The step in plain operations of PyTorch."""
    q, k, v, gate = x.new(case)
    scaled = q.float().transpose(1, 2) * (case.K**-0.5 if x.options.scale is None else x.options.scale)
    there = None
    if case.count:
        there = torch.arange(case.T) >= case.T - torch.tensor(case.count)[:, None]
        there = there.to(q.device)
    o, lse = attend_carried(scaled, k, v, gate, pool, there, SoftmaxOptions(window=x.options.window))
    pool.add(k, v, gate, there)
    return attend_with_sink(o, lse, x.options.sink)[0].transpose(1, 2).to(v.dtype)


def ours(case: Case, x: Inputs) -> Tensor:
    count = None if not case.count else torch.tensor(case.count, dtype=torch.int32, device=DEVICE)
    o = x.pool.step(*x.new(case), x.options, count)
    x.pool.lengths = list(case.lengths)
    return o


def check_error(case: Case, got: Tensor, near: Tensor, want: Tensor) -> None:
    """That of ``got`` against float64 is at most twice that of plain operations, plus rounding."""
    band = (16 * torch.finfo(torch.float32).eps + torch.finfo(got.dtype).eps / 8) * float(want.norm())
    error, budget = (float((o.double() - want).norm()) for o in (got, near))
    assert error <= 2 * budget + band, f"{case}: error {error:.2e}, budget {2 * budget + band:.2e}"


def within_budget(case: Case, dtype: torch.dtype) -> None:
    """Error against float64 at most twice that of plain operations, plus rounding; and the same pages are left."""
    x = inputs(case, dtype)
    other, want = inputs(case, dtype, torch.float32).pool, exact(case, x)
    there = torch.arange(case.T) >= case.T - torch.tensor(case.count or (case.T,) * len(case.lengths))[:, None]
    got, near = ours(case, x), plain(case, x, other)
    there = there.to(want.device)
    check_error(case, *(o[there] for o in (got, near, want)))
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for b, n in enumerate(case.lengths):
        opened, S = other.open_page(n), other.span
        for page in range(int(x.pool.first[b].max()), -(-n // PAGE)):
            rows = min(PAGE, n - page * PAGE)
            if page < opened:
                mine, theirs = (pool.k[pool.table[b, :, page].long()].float() for pool in (x.pool, other))
                torch.testing.assert_close(
                    x.pool.k_norm[b, :, page], other.k_norm[b, :, page], rtol=2 * rounding, atol=0
                )
            else:
                start = (page - opened) * PAGE
                mine, theirs = (pool.open_keys[b, :, start : start + rows] for pool in (x.pool, other))
            torch.testing.assert_close(mine, theirs, rtol=rounding, atol=1e-5)
            assert (x.pool.k_norm[b, :, page] >= mine.double().norm(dim=-1).amax(-1)).all()
        whole = slice(int(x.pool.first[b].max()) // case.group, n // S)
        torch.testing.assert_close(x.pool.factors[b, :, whole], other.factors[b, :, whole], rtol=0, atol=1e-5)
        if n % S:
            torch.testing.assert_close(x.pool.open_factor[b], other.open_factor[b], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_within_budget_and_leaves_the_pages_as_plain_operations_do(case: Case) -> None:
    within_budget(case, torch.float32)


def test_values_of_16_bits_and_any_number_of_programs() -> None:
    with override_plan(programs=5, extra=1, BS=16):
        within_budget(Case(lengths=(66, 65), H=4, T=2, K=32, gate="mixed"), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case(lengths=(9000, 70, 4097), T=2, H=8, G=2, K=128, V=128),
        Case(lengths=(3000, 2500), T=1, H=12, G=12, K=64, V=64),
        Case(lengths=(3000, 2500), T=16, H=12, G=3, K=64, V=64, gate="mixed"),
    ],
    ids=str,
)
def test_a_step_is_within_budget_on_a_gpu(case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        within_budget(case, dtype)


def in_groups(case: Case, x: Inputs, start: int, each: int) -> tuple[CarriedPool, Tensor]:
    """A pool that has had all tokens of ``x`` from ``start`` on, ``each`` at a time, and what the last step gave.

    Steps of several tokens are proposals, of which the last two are wrong and taken back.
    """
    (B, S, G, K), decays = x.k.shape, x.gate.log_decay is not None
    sizes = PoolSizes(B, G, case.H // G, K, case.V)
    given: dict[str, Any] = {"dtype": x.v.dtype, "device": DEVICE, "decays": decays, "group": case.group}
    pool = CarriedPool.empty(sizes, tokens=S, **given)
    for b in range(B):
        one = CarriedPool.empty(sizes._replace(B=1), **given)
        row = x.gate.map(lambda y, b=b: y[b : b + 1, :start])
        one.add(x.k[b : b + 1, :start], x.v[b : b + 1, :start], row, None)
        pool.adopt(b, CarriedPool.copy_of(one), start)
    pool.lengths = [start] * B
    all_of_them, wrong = torch.full((B,), each, dtype=torch.int32, device=DEVICE), 2 if each > 2 else 0
    for at in range(start, S, each - wrong):
        kept = min(each - wrong, S - at)
        index = torch.arange(at, at + each, device=DEVICE) % S  # the first tokens again are wrong ones
        index = torch.where(index < at + kept, index, 0)
        pool.reserve([each] * B)
        q, k, v, gate = x.q[:, index], x.k[:, index], x.v[:, index], x.gate.map(lambda y, index=index: y[:, index])
        o = pool.step(q, k, v, gate, x.options, all_of_them, carry=each == 1)[:, :kept]
        if each > 1:
            pool.crop_sums(torch.full_like(pool.length, at + kept))
            pool.carry(k, gate, torch.full_like(pool.length, kept).long())
        pool.lengths = [at + kept] * B
    return pool, o


def within_budget_in_groups(case: Case, dtype: torch.dtype, start: int, each: int) -> None:
    """The last row, beside plain operations whose keys are float32; and no key is longer than is said."""
    x = inputs(case, dtype, torch.float32)
    pool, o = in_groups(case, x, start, each)
    check_error(case, o[:, -1:], plain(case, x, x.pool), exact(case, x))
    S = case.lengths[0]
    for page in range(-(-S // PAGE)):
        rows = min(PAGE, S - page * PAGE)
        longest = pool.k[pool.table[:, :, page].long()][:, :, :rows].double().norm(dim=-1).amax(-1)
        assert (pool.k_norm[:, :, page] >= longest).all()


@pytest.mark.parametrize(("case", "dtype", "start", "each"), [
    (Case(lengths=(196,), H=2, G=1), torch.float32, 126, 16),
    (Case(lengths=(259,), H=2, G=2, gate="mixed", factors=2, group=2), torch.float16, 254, 1),
    (Case(lengths=(210,), H=2, G=2, gate="none", options={"window": 150}), torch.float32, 184, 16),
], ids=["grouped-query", "one-float16", "window"])  # fmt: skip
def test_groups_become_whole_as_sequences_go_on_and_tokens_are_taken_back(
    case: Case, dtype: torch.dtype, start: int, each: int
) -> None:
    within_budget_in_groups(case, dtype, start, each)


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "G", "each"), [(64, 12, 1), (64, 12, 16), (128, 2, 1)])
def test_keys_of_16_bits_in_groups_are_within_budget_on_a_gpu(K: int, G: int, each: int) -> None:
    within_budget_in_groups(Case(lengths=(1700, 1700), H=12, G=G, K=K, V=K, group=8), torch.bfloat16, 600, each)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("bounded", [False, True], ids=["", "bounded"])
def test_pruning_reads_no_page_that_no_row_needs(group: int, bounded: bool) -> None:
    """The values of pages that weigh less than eps are no numbers here; the first head needs all of them."""
    case = Case(lengths=(300,), T=2, H=4, G=2)
    x = inputs(case)
    x.gate = replace(x.gate, log_decay=torch.tensor([-1e-3, -1e-3, -0.5, -0.6], device=DEVICE).expand(1, 300, 4))
    x.options = replace(
        x.options, prune=Prune(1e-4), logit_bound=torch.full((4,), 9.0, device=DEVICE) if bounded else None
    )
    want = exact(case, x)
    sizes = PoolSizes(1, 2, 2, 16, 16)
    pool = CarriedPool.empty(sizes, dtype=torch.float32, device=DEVICE, tokens=300, group=group)
    pool.add(x.k[:, :298], x.v[:, :298], x.gate.map(lambda y: y[:, :298]), None)
    pool.reserve([2])
    pool.v[pool.table[0, 1, :3].long()] = math.nan
    last = x.new(case)
    o = pool.step(*last, x.options)
    assert float((o.double() - want).abs().max()) <= 2e-4 * float(x.v.abs().max())


def test_what_does_not_fit_is_refused_by_name() -> None:
    x = inputs(Case(lengths=(3,)))
    q, k, v, gate = x.new(Case(lengths=(3,)))
    tokens, state = PathTokens(k, gate.w, gate.beta), x.pool.state()._replace(gates=None)
    groups = x.pool.groups
    with pytest.raises(ValueError, match="gates: expected None without log_decay, got GateState"):
        paged_path_step(q, v, tokens, x.pool.state(), groups)
    with pytest.raises(ValueError, match=r"factors: expected torch.float32 \(1, 1, 16, 16, 16\), got torch.float64"):
        paged_path_step(q, v, tokens, state, groups._replace(factors=groups.factors.double()))
    many = PathTokens(*(y.expand(-1, 17, *y.shape[2:]) for y in (k, gate.w, gate.beta)))
    with pytest.raises(ValueError, match="k: expected 1 to 16 tokens, got T=17"):
        paged_path_step(q.expand(-1, 17, -1, -1), v.expand(-1, 17, -1, -1), many, state, groups)
