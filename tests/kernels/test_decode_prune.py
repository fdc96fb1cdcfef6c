"""Pruning within a step over pages: what is dropped weighs at most eps, and is never read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_cases import Case, Inputs, attend, for_pruning, inputs, oracle
from thinning import in_long
from torch import Tensor

from attnzoo.algebra.pruning import Prune

EPS = 1e-3
CASES = [
    Case(lengths=(400, 130, 0, 70), H=2, G=2),
    Case(lengths=(333, 400), T=4, H=4, G=2, first=(1, 0, 0, 2), sink=True),
    Case(lengths=(300,), T=3, H=4, G=2, gate="mixed", options={"window": 250}),
    Case(lengths=(520, 140), T=2, H=2, G=2, gate="const"),
    Case(lengths=(400, 300), T=2, H=2, G=1, options={"softcap": 0.5, "scale": 3.0}),
]


def begins(
    case: Case, x: Inputs, kept: dict[str, Tensor], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """The first pages that the kernel and the reference read; ``kept``: what pruning needs besides the pool."""
    from attnzoo.kernels.decode import reference
    from attnzoo.kernels.decode.portable import attention

    found: list[Tensor] = []
    drop, first_pages = attention.drop_pages, reference._first_pages

    def record(pages: Any, walked: Any, shares: Any, *args: Any) -> None:
        drop(pages, walked, shares, *args)
        found.append(shares.begin.view_as(shares.first))

    def record_reference(*args: Any) -> Tensor:
        found.append(first_pages(*args))
        return found[-1]

    monkeypatch.setattr(attention, "drop_pages", record)
    monkeypatch.setattr(reference, "_first_pages", record_reference)
    for impl in ("triton", "reference"):
        attend(x.q, x.pool | kept, impl, **options, **case.options)
    return found


@pytest.mark.parametrize(
    ("case", "known"),
    [
        *(pytest.param(case, False, id=f"{case}-norms") for case in CASES),
        *(pytest.param(case, True, id=f"{case}-known bound") for case in in_long(CASES[1:3], CASES)),
    ],
)
def test_pruned_step_drops_at_most_eps(case: Case, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(case, torch.float32)
    x.k[:, :64] *= 1.5  # long ones where they are dropped first
    for b in range(len(case.lengths)):
        for h, page in enumerate(x.pool["table"][b, :, 0].tolist()):
            if page >= 0:
                x.pool["keys"][page] *= 1.5
                assert torch.equal(x.pool["keys"][page][:1], x.k[b, :1, h])
    kept, options = for_pruning(case, x), {"prune": Prune(EPS)}
    if known:
        R, scaled = case.H // case.G, x.q * case.K**-0.5
        scores = torch.einsum("bthk,bshk->bhts", scaled, x.k.repeat_interleave(R, 2)).abs()
        options["logit_bound"] = scores.amax((0, 2, 3)) * 1.0001
    got, want = begins(case, x, kept, options, monkeypatch)
    assert torch.equal(got, want)
    assert bool((got > x.pool["first"]).any()), "nothing was dropped"
    exact = oracle(case, x)
    options["sink"] = x.sink
    o = attend(x.q, x.pool | kept, **options, **case.options)
    assert float((o - exact).abs().max()) <= 2 * EPS * float(x.v.abs().max()) + 1e-5
    for b in range(len(case.lengths)):
        for h in range(case.G):
            gone = x.pool["table"][b, h, int(x.pool["first"][b, h]) : int(got[b, h])].long()
            x.pool["keys"][gone], x.pool["values"][gone] = math.nan, math.nan  # certified away: never read
    assert torch.equal(attend(x.q, x.pool | kept, **options, **case.options), o)


def test_keys_along_the_query_get_at_most_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost to the bound of the scores here: what is dropped comes close to eps and stays below."""
    largest = 0.0
    for rate in (0.05, 0.055, 0.06, 0.07, 0.08):
        case = Case(lengths=(512,), H=1, G=1)
        x = inputs(case, torch.float32)
        ids = x.pool["table"][0, 0, :8].long()
        c = -rate * torch.arange(1, 513, dtype=torch.float64, device=ids.device)
        start = torch.nn.functional.pad(c[63::64], (1, 0))
        x.pool["keys"][ids] = x.q[0, 0, 0]
        x.pool["page_sum"][0, 0] = start
        x.pool["decay"][ids] = (c.view(8, 64) - start[:8, None])[..., None].float()
        k_norm = torch.full((1, 1, 9), 1.00001 * float(x.q.norm()), device=ids.device)
        n_log = torch.nn.functional.pad((-c).logcumsumexp(0)[63::64], (0, 1))[None, None].contiguous()
        for begin in begins(case, x, {"k_norm": k_norm, "n_log": n_log}, {"prune": Prune(EPS)}, monkeypatch):
            dropped = float((-c).softmax(0)[: 64 * int(begin[0, 0])].sum())
            assert dropped <= EPS
            largest = max(largest, dropped)
        monkeypatch.undo()
    assert largest > EPS / 3


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prune": 1e-3}, r"prune: expected attnzoo.Prune\(\) or None, got float"),
    ({"prune": Prune(bound="paper")}, r"prune: expected bound='tail' over pages, got 'paper'"),
    ({"decay": None, "page_sum": None}, r"prune: expected gates or log_decay"),
    ({"k_norm": None}, r"k_norm: expected the lengths of each page's longest key"),
    ({"n_log": None}, r"n_log: expected a tensor, got NoneType"),
    ({"n_log": torch.zeros(1, 2, 2)}, r"n_log: expected torch.float64 \(1, 2, 4\), got"),
    ({"prune": None, "logit_bound": torch.ones(2)}, r"logit_bound: expected None without prune"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:24] for _, m in BAD])
def test_what_pruning_needs_is_named(change: dict[str, Any], message: str) -> None:
    case = Case(H=2, G=1)
    x = inputs(case, torch.float32)
    given = {"prune": Prune(), **x.pool, **for_pruning(case, x)} | change
    options = {name: given[name] for name in ("prune", "logit_bound") if name in given}
    with pytest.raises((ValueError, TypeError), match=message):
        attend(x.q, given, "auto", **options)
