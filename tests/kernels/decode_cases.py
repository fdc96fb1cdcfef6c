"""Pools of pages filled token by token, and the float64 oracle of each sequence and key head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from fox_cases import DEVICE, Sizes, draw_gate
from fox_cases import Case as FoxCase
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.kernels.decode import AttentionOptions, GateState, KeyPages, PagedState, PageTable, paged_attention
from attnzoo.kernels.fox.reference import fox_reference


@dataclass(frozen=True)
class Case(Sizes):
    """One call of paged_attention; ``lengths`` say B, ``first`` the evicted pages of each (sequence, key head)."""

    lengths: tuple[int, ...] = (150,)
    T: int = 1
    gate: str = "open"  # as in fox_cases
    first: tuple[int, ...] = ()
    page: int = 64
    sink: bool = False


@dataclass
class Inputs:
    """Tokens as sequences, padded to the longest, and the same in pages."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, S, G, K]
    v: Tensor
    log_decay: Tensor | None  # [B, S, H] or [H]
    sink: Tensor | None
    pool: dict[str, Tensor]  # keys and gates, by their names in the state, and rows' first visible keys


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Pages in a random order; what holds no key is nan, tables end in room for more."""
    generator = torch.Generator().manual_seed(seed)
    B, S, R, P = len(case.lengths), max(*case.lengths, 1), case.H // case.G, case.page

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k = randn(B, case.T, case.H, case.K), randn(B, S, case.G, case.K)
    v, sink = randn(B, S, case.G, case.V), torch.randn(case.H, generator=generator) if case.sink else None
    g = draw_gate(FoxCase(B=B, S=S, H=case.H, gate=case.gate), generator)
    N = -(-S // P) + 1
    ids = torch.randperm(B * case.G * N, generator=generator).view(B, case.G, N)
    table = torch.full((B, case.G, N), -1, dtype=torch.int32)
    first = torch.tensor(case.first or (0,) * (B * case.G), dtype=torch.int32).view(B, case.G)
    length = torch.tensor(case.lengths, dtype=torch.int32)
    keys = torch.full((ids.numel(), P, case.K), math.nan, dtype=dtype)
    values = torch.full((ids.numel(), P, case.V), math.nan, dtype=dtype)
    pool = {"keys": keys, "values": values, "table": table, "first": first, "length": length}
    if g is not None and g.ndim == 3:
        open_g = g.double().masked_fill(is_closed(g), 0.0)
        sums = torch.nn.functional.pad(open_g.cumsum(1), (0, 0, 1, 0))  # [B, S + 1, H]
        pool["decay"] = torch.full((ids.numel(), P, R), math.nan)
        pool["page_sum"] = torch.full((B, case.H, N), math.nan, dtype=torch.float64)
        seen = torch.where(is_closed(g), torch.arange(S)[:, None], 0).cummax(1).values  # [B, S, H]
        rows = (length[:, None].long() - case.T + torch.arange(case.T)).clamp(min=0)
        pool["first_visible"] = seen.gather(1, rows[..., None].expand(B, case.T, case.H)).mT.int().contiguous()
    elif g is not None:
        pool["log_decay"] = g
    for b, n in enumerate(case.lengths):
        for u in range(-(-n // P)):
            at = slice(u * P, min((u + 1) * P, n))
            if "page_sum" in pool:
                pool["page_sum"][b, :, u] = sums[b, u * P]
            for h in range(case.G):
                if u < first[b, h]:
                    continue
                page = int(ids[b, h, u])
                table[b, h, u] = page
                keys[page, : at.stop - at.start], values[page, : at.stop - at.start] = k[b, at, h], v[b, at, h]
                if "decay" in pool:
                    within = sums[b, at.start + 1 : at.stop + 1] - sums[b, u * P]
                    pool["decay"][page, : at.stop - at.start] = within[:, h * R : (h + 1) * R].float()
    pool = {name: x.to(DEVICE) for name, x in pool.items()}
    given = [None if x is None else x.to(DEVICE) for x in (q, k, v, g, sink)]
    return Inputs(*given, pool)  # type: ignore[arg-type]


def state_of(pool: dict[str, Any]) -> PagedState:
    """The tensors of ``pool`` by their names; sums of gates that are missing beside ``decay`` mean nothing."""
    gates = None
    if pool.get("decay") is not None:
        page_sum = pool["page_sum"]
        like = page_sum if isinstance(page_sum, Tensor) else pool["table"].double()
        spare = {"total": like[..., 0] * 0, "since": like[..., 0].int(), "n_log": like * 0, "closed": like.long()}
        gates = GateState(**{name: {**spare, **pool}[name] for name in GateState._fields})
    pages = KeyPages(pool["keys"], pool["values"], pool.get("k_norm"), pool.get("exponents"))
    return PagedState(pages, PageTable(*(pool[name] for name in PageTable._fields)), gates)


def attend(q: Tensor, pool: dict[str, Any], impl: Any = "triton", **options: Any) -> Tensor:
    """``paged_attention`` of a pool and options by their names, rows' first visible keys and log decays among them."""
    rest = {name: pool.get(name) for name in ("first_visible", "log_decay")}
    return paged_attention(q, state_of(pool), **rest, options=AttentionOptions(**options), impl=impl)


def for_pruning(case: Case, x: Inputs) -> dict[str, Tensor]:
    """The lengths of each page's longest key, and sums of gates: what ``paged_append`` keeps of the same tokens."""
    S, N = x.k.shape[1], x.pool["table"].shape[2]
    there = torch.arange(S, device=DEVICE)[:, None] < x.pool["length"][:, None, None]  # [B, S, 1]
    norms = x.k.double().norm(dim=-1).masked_fill(~there, 0.0)
    norms = torch.nn.functional.pad(norms, (0, 0, 0, N * case.page - S)).unflatten(1, (N, case.page)).amax(2)
    found = {"k_norm": norms.mT.float().contiguous() * 1.00001}
    if x.log_decay is not None and x.log_decay.ndim == 3:
        g = x.log_decay.double().masked_fill(is_closed(x.log_decay), 0.0)
        tails = (-g.cumsum(1)).logcumsumexp(1).mT[..., case.page - 1 :: case.page]
        found["n_log"] = torch.nn.functional.pad(tails, (0, N - tails.shape[2])).contiguous()
    return found


def oracle(case: Case, x: Inputs, **options: Any) -> Tensor:
    """Each sequence and key head alone, from its first live key on, by FoX's dense definition."""
    R, o = case.H // case.G, x.q.new_zeros((*x.q.shape[:3], case.V), dtype=options.pop("out", torch.float64))
    for b, n in enumerate(case.lengths):
        for h in range(case.G):
            heads, begin = slice(h * R, (h + 1) * R), int(x.pool["first"][b, h]) * case.page
            rows = min(case.T, n - begin)
            sink = None if x.sink is None else x.sink[heads].to(o.dtype)
            g = x.log_decay
            if g is not None:
                g = g[heads].to(o.dtype) if g.ndim == 1 else g[b : b + 1, begin:n, heads].to(o.dtype)
            if rows > 0:
                tokens = [y[b : b + 1, begin:n, h : h + 1].to(o.dtype) for y in (x.k, x.v)]
                q = x.q[b : b + 1, case.T - rows :, heads].to(o.dtype)
                o[b, case.T - rows :, heads] = fox_reference(
                    q, *tokens, log_decay=g, sink=sink, **case.options, **options
                )[0]
    return o


def ours(case: Case, x: Inputs, impl: str = "triton") -> Tensor:
    return attend(x.q, x.pool, impl, sink=x.sink, **case.options)


def within_budget(case: Case, x: Inputs, got: Tensor) -> None:
    """Error against float64 at most twice that of PyTorch in the same dtype, plus a band of rounding.

    The band is an eighth of a rounding of the input dtype, plus 16 of float32, plus those of the float32 exponents:
    gates make these as large as what the log2 gates of a page add up to.
    """
    dtype = x.q.dtype
    exact = oracle(case, x).detach()
    plain = oracle(case, x, out=torch.float32, compute_dtype=dtype).to(dtype)
    exponent = 1.45 * float(x.pool["decay"].nan_to_num().abs().max()) if "decay" in x.pool else 0.0
    scale = exact.norm().clamp(min=0.1 * exact.numel() ** 0.5)
    band = torch.finfo(dtype).eps / 8 + (16 + exponent) * torch.finfo(torch.float32).eps
    error = float((got.double() - exact).norm() / scale)
    budget = 2 * float((plain.double() - exact).norm() / scale) + band
    assert math.isfinite(error), f"{case}: not finite"
    assert error <= budget, f"{case}: error {error:.2e}, budget {budget:.2e}"
