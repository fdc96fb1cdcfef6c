"""New tokens into pages: what a step writes, against the definition and against pages filled as a whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_cases import Case, attend, inputs, ours, state_of, within_budget
from fox_cases import DEVICE
from torch import Tensor

from attnzoo.kernels.decode import PageTable, paged_append, paged_crop

BITS = {"rtol": 0, "atol": 0}
CASE = Case(lengths=(66, 5, 140), T=3, H=4, G=2, gate="mixed", first=(0, 0, 0, 0, 1, 0))


def emptied(case: Case, x: Any, before: list[int]) -> dict[str, Tensor]:
    """Pages as ``before[b]`` tokens of each sequence left them, with what an append carries on."""
    B, g = len(x.k), x.log_decay
    pool = {"keys": torch.full_like(x.pool["keys"], math.nan), "values": torch.full_like(x.pool["values"], math.nan)}
    pool |= {name: x.pool[name] for name in ("table", "first")}
    N = pool["table"].shape[2]
    pool["length"] = torch.zeros(B, dtype=torch.int32, device=DEVICE)
    pool["k_norm"] = torch.zeros(B, case.G, N, device=DEVICE)
    if g is not None:
        pool["decay"] = torch.full_like(x.pool["decay"], math.nan)
        for name in ("page_sum", "n_log"):
            pool[name] = torch.full((B, case.H, N), math.nan, dtype=torch.float64, device=DEVICE)
        pool["total"] = torch.zeros(B, case.H, dtype=torch.float64, device=DEVICE)
        pool["since"] = torch.zeros(B, case.H, dtype=torch.int32, device=DEVICE)
        pool["closed"] = torch.full((B, case.H, N), -1, device=DEVICE)  # what tokens that were taken back have left
    for t in range(0, max(before), 16):
        count = [min(16, max(0, n - t)) for n in before]
        write(pool, x, [t + n for n in count], count, 16, "reference")
    return pool


def write(pool: dict[str, Tensor], x: Any, end: list[int], count: list[int], T: int, impl: str) -> Tensor | None:
    """Append the last ``count[b]`` of the first ``end[b]`` tokens, in rows of T."""
    rows = torch.tensor(end)[:, None] - T + torch.arange(T)
    row, there = torch.arange(len(end))[:, None], torch.tensor(count, dtype=torch.int32, device=DEVICE)
    k, v, g = (None if y is None else y[row.to(DEVICE), rows.clamp(min=0).to(DEVICE)] for y in (x.k, x.v, x.log_decay))
    assert k is not None
    assert v is not None
    return paged_append(k, v, state_of(pool), log_decay=g, count=there, impl=impl)  # type: ignore[arg-type]


@pytest.mark.parametrize("gate", ["mixed", "none"])
def test_append_follows_its_definition(gate: str) -> None:
    case = Case(lengths=CASE.lengths, T=3, H=4, G=2, gate=gate, first=CASE.first)
    x, before = inputs(case, torch.float16), [62, 0, 125]
    pools = [emptied(case, x, before) for _ in range(2)]
    for end, count in (([63, 1, 128], [1, 1, 3]), ([66, 4, 128], [3, 3, 0])):
        seen = [write(pool, x, end, count, 3, impl) for pool, impl in zip(pools, ("triton", "reference"), strict=True)]
        for name, want in pools[1].items():
            exact = name not in ("k_norm", "decay", "page_sum", "total", "n_log")
            torch.testing.assert_close(
                pools[0][name], want, equal_nan=True, **({"rtol": 0, "atol": 0} if exact else {})
            )
        assert (seen[0] is None) == (gate == "none")
        if seen[0] is not None and seen[1] is not None:
            assert torch.equal(seen[0], seen[1])
    assert pools[0]["length"].tolist() == [66, 4, 128]


def test_steps_after_steps_equal_the_whole() -> None:
    """Appends of any number of tokens, then attention: as over pages that were filled at once."""
    x = inputs(CASE, torch.float32)
    pool = emptied(CASE, x, [60, 0, 130])
    write(pool, x, [63, 2, 137], [3, 2, 7], 7, "triton")
    seen = write(pool, x, [66, 5, 140], [3, 3, 3], 3, "triton")
    o = attend(x.q, pool | {"first_visible": seen})
    within_budget(CASE, x, o)
    torch.testing.assert_close(o, ours(CASE, x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("gate", ["mixed", "none"])
def test_tokens_that_are_taken_back_leave_what_was_before_them(gate: str) -> None:
    """Over borders of pages, back to one, to nothing, and none at all; closed gates among what goes, from the first
    token on, and what stays."""
    lengths = (66, 5, 140, 130, 70)
    case = Case(lengths=lengths, T=3, H=4, G=2, gate=gate)
    x, kept, before = inputs(case, torch.float16), [62, 0, 140, 128, 64], [60, 0, 126, 126, 62]
    for b, n in enumerate(kept):
        if x.log_decay is not None:
            x.log_decay[b, n : n + 1, 0] = -math.inf
    want, pool = emptied(case, x, kept), emptied(case, x, before)
    write(pool, x, list(lengths), [n - m for n, m in zip(lengths, before, strict=True)], 14, "triton")
    paged_crop(state_of(pool), torch.tensor(kept, device=DEVICE))
    for name in ("length", "since", "total", "k_norm", "n_log"):
        if name not in pool:
            continue
        for b, n in enumerate(kept):
            found, expected = (p[name][b, ..., : -(-n // 64)] if name == "n_log" else p[name][b] for p in (pool, want))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    if gate == "mixed":
        assert bool((want["since"] > 0).any())
        assert bool((pool["since"] < torch.tensor(kept, device=DEVICE)[:, None].clamp(min=1)).all())


def test_kept_norms_and_sums_bound_what_they_speak_of() -> None:
    """k_norm is never less than a key; n_log is the log of the sum that eviction needs, in float64."""
    case = Case(lengths=(100,), H=2, G=1, gate="strong")
    x = inputs(case, torch.float16)
    pool = emptied(case, x, [90])
    write(pool, x, [100], [10], 10, "triton")
    norms = x.k[0, :, 0].double().norm(dim=-1)
    assert float(pool["k_norm"][0, 0, 0]) >= float(norms[:64].max()) * (1 - 1e-12)
    assert float(pool["k_norm"][0, 0, 1]) == pytest.approx(float(norms[64:].max()), rel=1e-4)
    c = x.log_decay[0].double().cumsum(0)
    want = torch.stack([(-c[:n]).logsumexp(0) for n in (64, 100)], -1)
    torch.testing.assert_close(pool["n_log"][0, :, :2], want, rtol=1e-12, atol=1e-12)


def test_a_sequence_without_a_page_is_not_written() -> None:
    case = Case(lengths=(64, 64), G=1, gate="open")
    x = inputs(case, torch.float32)
    pool = emptied(case, x, [64, 64])
    pool["table"][0, 0, 1] = -1
    pool["table"][1, 0, 1] = int(next(i for i in range(len(pool["keys"])) if i not in pool["table"].tolist()[1][0]))
    before = pool["keys"].clone()
    write(pool, x, [64, 64], [1, 1], 1, "triton")
    changed = (pool["keys"] != before) & ~(pool["keys"].isnan() & before.isnan())
    assert changed.flatten(1).any(1).nonzero().flatten().tolist() == [int(pool["table"][1, 0, 1])]


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_tokens_beyond_the_table_are_refused(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be written to the pages of the next head."""
    monkeypatch.setenv("ATTNZOO_VALIDATE", "1")
    x = inputs(Case(lengths=(128, 64), G=1, gate="open"), torch.float32)
    pool = emptied(Case(lengths=(128, 64), G=1, gate="open"), x, [128, 64])
    end = pool["table"].shape[2] * 64
    pool["length"][0] = end - 1
    write(pool, x, [1, 1], [1, 0], 2, impl)
    with pytest.raises(ValueError, match=rf"table: expected an entry for each page of {end + 1} tokens, got"):
        write(pool, x, [1, 1], [1, 2], 2, impl)
    pool["length"][0] = end + 1
    with pytest.raises(ValueError, match=rf"table: expected an entry for each page of {end + 1} tokens, got"):
        attend(x.q, {name: (x.pool | pool)[name] for name in ("keys", "values", *PageTable._fields)}, impl)
