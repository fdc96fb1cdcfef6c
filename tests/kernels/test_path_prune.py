"""Pruning: the mass that is dropped, measured; the boundaries against their float64 definition; adversaries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_ops import assert_share_kept
from path_cases import DEVICE, Case, inputs, large_tiles, run, triton, within_budget  # noqa: F401  (a fixture)
from torch import Tensor

import attnzoo.forms.softmax
from attnzoo import Gate, get
from attnzoo.algebra.pruning import Prune, first_kept_keys
from attnzoo.kernels.common.call_checks import share_kept
from attnzoo.kernels.common.dense_reference import first_visible, running_sums
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.fox.plan import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.path import kept_fraction, path_attention
from attnzoo.kernels.path.reference import path_scores, prune_starts_reference

EPS = math.exp(-10.0)
BOUNDS = ("tail", "paper")


def starts(x: dict[str, Tensor], prune: Prune, scale: float, logit_bound: Tensor | None = None) -> Tensor:
    """The first key of each row unit as the kernels find it."""
    from attnzoo.kernels.path.op import PathOperands, row_gates

    q, k, w, beta, log_decay = (x[name] for name in ("q", "k", "w", "beta", "log_decay"))
    options = AttentionOptions(scale, prune, logit_bound=logit_bound).of_op(q.shape[3])
    start = row_gates(PathOperands(q, k, k, w, beta, log_decay, None, None, options)).first_computed
    assert start is not None
    return start


def logits(x: dict[str, Tensor], scale: float) -> Tensor:
    """In float64, -inf where a row does not look."""
    q, k, w, beta = (x[name].double() for name in ("q", "k", "w", "beta"))
    B, T, H, _ = q.shape
    c, closed = running_sums(x["log_decay"], B, T, H, q.device)
    pos = torch.arange(T, device=q.device)
    visible = (pos <= pos[:, None]) & (pos >= first_visible(closed, None, None)[..., None])
    s = scale * path_scores(q, k, w, beta)
    return (s + c[..., :, None] - c[..., None, :]).masked_fill(~visible, -math.inf)


def dropped_mass(x: dict[str, Tensor], start: Tensor, scale: float) -> Tensor:
    """Attention weight before each row's start: [B, H, T]."""
    T = x["q"].shape[1]
    cut = start.repeat_interleave(ROW_UNIT, -1)[..., :T, None]
    seen = torch.arange(T, device=cut.device) >= cut
    return logits(x, scale).softmax(-1).masked_fill(seen, 0.0).sum(-1)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("gate", ["open", "strong", "mixed"])
def test_boundaries_follow_their_definition(bound: str, gate: str) -> None:
    x = inputs(Case(T=520, H=1, gate=gate), torch.float32)
    prune = Prune(bound=bound)  # type: ignore[arg-type]
    found = starts(x, prune, 0.1).long()
    c, closed = running_sums(x["log_decay"], 1, 520, 1, x["q"].device)
    parts = (x["q"], x["k"], x["w"], x["beta"])
    exact = prune_starts_reference(*parts, c, first_visible(closed, None, None), AttentionOptions(0.1, prune))
    assert bool((found <= exact).all())  # rounding may only prune less
    assert bool((exact - found <= KEY_UNIT).all())
    assert int(exact.max()) > 0, "nothing was pruned: the case shows nothing"
    assert float(dropped_mass(x, found, 0.1).max()) <= EPS


def test_rows_that_drop_nothing_are_told_by_their_gates() -> None:
    """The log-sum-exp of such rows is not computed; from where it is, boundaries are those of the definition."""
    x = inputs(Case(T=900, H=1, beta="zero"), torch.float32)
    x["log_decay"] = torch.full_like(x["log_decay"], -0.016)
    found = starts(x, Prune(), 0.1).long()
    c, closed = running_sums(x["log_decay"], 1, 900, 1, x["q"].device)
    parts = (x["q"], x["k"], x["w"], x["beta"])
    exact = prune_starts_reference(*parts, c, first_visible(closed, None, None), AttentionOptions(0.1, Prune()))
    assert 0 < int((exact == 0).sum()) < exact.numel()
    assert bool((found <= exact).all())
    assert bool((exact - found <= KEY_UNIT).all())


@pytest.mark.parametrize("bound", BOUNDS)
def test_forward_and_backward_use_the_same_boundaries(bound: str) -> None:
    """Against the dense definition with the same blocks removed: values and gradients."""
    case = Case(T=300, H=1, gate="open", options={"prune": Prune(bound=bound), "scale": 0.1})  # type: ignore[arg-type]
    x = inputs(case, torch.float32)
    within_budget(case, x, triton(case, x))


def adversary(kind: str) -> dict[str, Tensor]:
    """Inputs built against the certificate; decay fast enough to prune."""
    T, K = 640, 16
    x = inputs(Case(T=T, H=1, K=K), torch.float32, seed=1)
    x["log_decay"] = torch.full((1, T, 1), -0.15)
    if kind == "at the bound":  # far keys aligned with every query, near ones against it: |logit| = U everywhere
        x["q"], x["k"] = torch.ones(1, T, 1, K), torch.ones(1, T, 1, K)
        x["k"][:, ::2] = -1.0
        x["k"][:, 256:] = -1.0
        x["beta"] = torch.zeros(1, T, 1)
    elif kind == "turned against the row":  # reflections along the key make every second one of them its own negative
        x["q"], x["k"] = torch.ones(1, T, 1, K), torch.ones(1, T, 1, K)
        x["w"], x["beta"] = torch.full((1, T, 1, K), K**-0.5), torch.zeros(1, T, 1)
        x["beta"][:, 3::7] = 2.0
    elif kind == "one dominating key":  # far away, of ten times the norm of the others, aligned with the queries
        x["q"] = torch.ones(1, T, 1, K) + 0.1 * x["q"].cpu()
        x["k"] = x["k"].cpu()
        x["k"][:, 3] = 3.0
        x["beta"] = torch.zeros(1, T, 1)
    elif kind == "gates open and close":
        g = torch.where(torch.arange(T) // 64 % 2 == 0, 0.0, -0.5)
        g[300] = -math.inf
        g[301:] = -0.2
        x["log_decay"] = g[None, :, None]
    elif kind == "all at once":  # a burst: no decay for 500 tokens, then 30 nats in one
        x["log_decay"] = torch.zeros(1, T, 1)
        x["log_decay"][:, 511] = -30.0
    return {name: t.to(DEVICE) for name, t in x.items()}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    "kind", ["at the bound", "turned against the row", "one dominating key", "gates open and close", "all at once"]
)
def test_dropped_mass_stays_below_eps(kind: str, bound: str) -> None:
    x = adversary(kind)
    for eps in (EPS, 1e-2):
        start = starts(x, Prune(eps=eps, bound=bound), 1.0)  # type: ignore[arg-type]
        assert float(dropped_mass(x, start, 1.0).max()) <= eps
    assert bool((start.diff(dim=-1) >= 0).all())
    assert int(starts(x, Prune(eps=0.5, bound="paper"), 0.01).max()) > 0  # it does prune where it may


def test_a_known_bound_counts_beside_the_norms() -> None:
    x = inputs(Case(T=256, H=1, gate="strong"), torch.float32)
    for bound in BOUNDS:
        prune = Prune(bound=bound)  # type: ignore[arg-type]
        with_norms = starts(x, prune, 0.25)
        tight, loose = (starts(x, prune, 0.25, torch.full((1,), u, device=DEVICE)) for u in (1.0, 1e6))
        assert bool((tight >= with_norms).all())
        assert int(tight.max()) > 0
        assert torch.equal(loose, with_norms)


@pytest.mark.parametrize("known", [None, 1.0], ids=["norms", "tight bound"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_forms_and_kernels_prune_alike(bound: Any, known: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same certificate on any device; the kernels round towards keeping."""
    x, seen = inputs(Case(T=900, K=16, gate="open"), torch.float32), list[Tensor]()
    x["q"], x["log_decay"] = 0.3 * x["q"], 0.5 * x["log_decay"]  # a row's own key is little of its near keys
    prune, limit = Prune(eps=1e-3, bound=bound), None if known is None else torch.full((2,), known, device=DEVICE)

    def record(*args: Any, **options: Any) -> Tensor:
        seen.append(first_kept_keys(*args, **options))
        return seen[-1]

    monkeypatch.setattr(attnzoo.forms.softmax, "first_kept_keys", record)
    gate = Gate(log_decay=x["log_decay"], w=x["w"], beta=x["beta"])
    get("path_fox").forms["parallel"](x["q"], x["k"], x["v"], gate, prune=prune, logit_bound=limit)
    found = starts(x, prune, 16**-0.5, limit).long()
    assert float(found.max()) > 0
    assert bool(((found <= seen[0]) & (seen[0] <= found + KEY_UNIT)).all())
    shares = [share_kept(None, start, x["q"], 900) for start in (found, seen[0])]
    torch.testing.assert_close(*shares, atol=0.02, rtol=0)


def test_kept_fraction_agrees_with_the_reference() -> None:
    assert_share_kept(kept_fraction, inputs(Case(T=400, gate="open"), torch.float32))


def test_nothing_of_a_pruned_key_reaches_the_result() -> None:
    """Values and keys behind every row's start may be anything: not even NaN is seen."""
    case = Case(T=640, H=1, gate="open", options={"prune": Prune(), "scale": 0.1})
    x = inputs(case, torch.float32)
    first = int(starts(x, Prune(), 0.1)[..., -1].min())
    assert first >= 128, "the last rows keep everything: the case shows nothing"
    clean, dirty = dict(x), dict(x, v=x["v"].clone())
    dirty["v"][:, : first // 2] = 1e4
    with torch.no_grad():
        a, b = (
            path_attention(**{n: t for n, t in y.items() if n != "do"}, **case.options, impl="triton")
            for y in (clean, dirty)
        )
    assert torch.equal(a[:, -64:], b[:, -64:])


@pytest.mark.gpu
@pytest.mark.parametrize("bound", BOUNDS)
def test_pruned_within_budget_bf16(bound: str) -> None:
    for gate in ("open", "mixed"):
        options = {"prune": Prune(bound=bound), "scale": 0.05}  # type: ignore[arg-type]
        case = Case(T=2100, H=4, G=2, K=64, V=64, gate=gate, options=options)
        x = inputs(case, torch.bfloat16)
        within_budget(case, x, triton(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize("bound", BOUNDS)
def test_dropped_mass_at_length(bound: str) -> None:
    x = inputs(Case(T=4096, H=4, G=2, K=64, V=64, gate="open"), torch.bfloat16)
    start = starts(x, Prune(bound=bound), 0.05)  # type: ignore[arg-type]
    assert int(start.max()) >= 2048
    assert float(dropped_mass(x, start, 0.05).max()) <= EPS


@pytest.mark.gpu
def test_pruning_does_not_wait_for_the_device() -> None:
    case = Case(T=1024, K=64, V=64, options={"prune": Prune()})
    x = inputs(case, torch.bfloat16)
    run(path_attention, case, x)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(path_attention, case, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
