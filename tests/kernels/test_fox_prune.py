"""Pruning: the mass that is dropped, measured; the boundaries against their float64 definition; adversaries."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from attention_ops import assert_share_kept
from fox_cases import DEVICE, Case, inputs, run, triton, within_budget
from torch import Tensor

import attnzoo.forms.additive
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune, first_kept_keys
from attnzoo.encodings.fox import FORMS
from attnzoo.forms.caches.state import KVCache
from attnzoo.kernels.common.call_checks import share_kept
from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.dense_reference import first_visible, running_sums
from attnzoo.kernels.common.device import Machine
from attnzoo.kernels.common.head_order import head_order
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.tiles import Tiles
from attnzoo.kernels.fox import fox_attention, kept_fraction, plan
from attnzoo.kernels.fox.operands import FoxOperands
from attnzoo.kernels.fox.reference import prune_starts_reference

EPS = math.exp(-10.0)
BOUNDS = ("tail", "paper")


def starts(q: Tensor, k: Tensor, log_decay: Tensor, prune: Prune | None, **options: Any) -> Tensor:
    """The first key of each row unit as the kernels find it."""
    from attnzoo.kernels.fox.op import row_gates

    asked = AttentionOptions(prune=prune, **options).of_op(q.shape[3])
    start = row_gates(FoxOperands(q, k, k, log_decay, None, asked)).first_computed
    assert start is not None
    return start


def dropped_mass(
    q: Tensor, k: Tensor, log_decay: Tensor, start: Tensor, scale: float | None = None, softcap: float = math.inf
) -> Tensor:
    """Attention weight before each row's start, in float64: [B, H, T]."""
    B, T, H, K = q.shape
    S = k.shape[1]
    c, closed = running_sums(log_decay, B, S, H, q.device)
    pos = torch.arange(S - T, S, device=q.device)
    j = torch.arange(S, device=q.device)
    rep = H // k.shape[2]
    s = torch.einsum("bthk,bshk->bhts", q.double(), k.double().repeat_interleave(rep, 2)) * (scale or K**-0.5)
    s = s if softcap == math.inf else softcap * (s / softcap).tanh()
    visible = (j <= pos[:, None]) & (j >= first_visible(closed, None, None)[..., S - T :, None])
    s = (s + c[..., S - T :, None] - c[..., None, :]).masked_fill(~visible, -math.inf)
    cut = start.repeat_interleave(ROW_UNIT, -1)[..., :T, None]
    return torch.where(j < cut, s.softmax(-1), 0.0).sum(-1)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("gate", ["open", "strong", "mixed", "const"])
def test_boundaries_follow_their_definition(bound: str, gate: str) -> None:
    case = Case(T=390, S=520, H=2, K=8, gate=gate)
    x = inputs(case, torch.float32)
    if gate == "const":
        x["log_decay"] = 4 * x["log_decay"]
    prune = Prune(bound=bound)
    found = starts(x["q"], x["k"], x["log_decay"], prune, scale=0.1).long()
    c, closed = running_sums(x["log_decay"], 1, 520, 2, x["q"].device)
    exact = prune_starts_reference(x["q"], x["k"], c, first_visible(closed, None, None), AttentionOptions(0.1, prune))
    assert bool((found <= exact).all())  # rounding may only prune less
    assert bool((exact - found <= KEY_UNIT).all())
    assert int(exact.max()) > 0, "nothing was pruned: the case shows nothing"
    assert float(dropped_mass(x["q"], x["k"], x["log_decay"], found, 0.1).max()) <= EPS


@pytest.mark.parametrize("bound", BOUNDS)
def test_boundaries_of_capped_scores_follow_their_definition(bound: str) -> None:
    """Scores lie far beyond the cap: both the bound of a row's scores and that of its sum are those of capped ones."""
    x = inputs(Case(T=390, S=520, H=2, K=8, gate="open"), torch.float32)
    options = AttentionOptions(4.0, Prune(bound=bound), softcap=0.5)  # type: ignore[arg-type]
    found = starts(x["q"], x["k"], x["log_decay"], **options._asdict()).long()
    c, closed = running_sums(x["log_decay"], 1, 520, 2, x["q"].device)
    exact = prune_starts_reference(x["q"], x["k"], c, first_visible(closed, None, None), options)
    assert bool((found <= exact).all())
    assert bool((exact - found <= KEY_UNIT).all())
    assert int(found.sum()) > int(starts(x["q"], x["k"], x["log_decay"], options.prune, scale=4.0).sum())
    assert float(dropped_mass(x["q"], x["k"], x["log_decay"], found, 4.0, 0.5).max()) <= EPS


def test_rows_that_drop_nothing_are_told_by_their_gates() -> None:
    """The log-sum-exp of such rows is not computed; from where it is, boundaries are those of the definition."""
    x = inputs(Case(T=1800, S=1800, H=1, K=8), torch.float32)
    x["log_decay"] = torch.full_like(x["log_decay"], -0.008)
    found = starts(x["q"], x["k"], x["log_decay"], Prune(), scale=0.1).long()
    c, closed = running_sums(x["log_decay"], 1, 1800, 1, x["q"].device)
    exact = prune_starts_reference(x["q"], x["k"], c, first_visible(closed, None, None), AttentionOptions(0.1, Prune()))
    assert 0 < int((exact == 0).sum()) < exact.numel()
    assert bool((found <= exact).all())
    assert bool((exact - found <= KEY_UNIT).all())


def test_the_references_boundaries_take_a_long_row_in_pieces() -> None:
    """All scores at once would be 8 T S bytes for each head: 2 GiB of a sequence of 16384 tokens."""
    from attnzoo.kernels.fox import reference

    x = inputs(Case(B=2, T=700, S=900, H=2, G=1, K=8, gate="mixed"), torch.float32)
    c, closed = running_sums(x["log_decay"], 2, 900, 2, x["q"].device)
    since = first_visible(closed, None, None)
    valid = torch.ones(2, 900, dtype=torch.bool, device=x["q"].device)
    valid[0, 300:340] = False
    for there in (None, valid):
        args = (x["q"], x["k"], c, since, AttentionOptions(0.1, Prune()), there)
        whole = prune_starts_reference(*args)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "ROWS", 2 * ROW_UNIT)
            assert torch.equal(prune_starts_reference(*args), whole)
    assert int(whole.max()) > 0


def test_what_is_soon_computed_is_not_searched_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys; and few products, which a GPU has done before the host has launched the search."""
    monkeypatch.setattr(plan, "SEARCHED_FROM", 1536)
    monkeypatch.setattr(plan, "SEARCHED_WORK", 4e10)
    gpu, interpreter = Machine((9, 0), (3, 6)), Machine((0, 0), (3, 6))
    found = {
        (B, T, H, S, K): plan.searched((B, T, H, K), S, "tail", gpu)
        for B, T, H, S, K in (
            (64, 1024, 12, 1024, 64), (16, 2048, 12, 2048, 64), (4, 2048, 12, 2048, 64), (8, 4096, 16, 4096, 128),
            (1, 16384, 24, 16384, 64), (1, 2048, 4, 16384, 64), (1, 1, 12, 1535, 64), (1, 1, 12, 1536, 64),
        )
    }  # fmt: skip
    assert list(found.values()) == [False, True, False, True, True, False, False, True]
    assert plan.searched((1, 64, 2, 16), 64, "tail", interpreter)
    assert not plan.searched((16, 16384, 12, 64), 16384, "", gpu)


@pytest.mark.parametrize("gate", ["strong", "const"])
def test_what_is_not_searched_is_as_without_pruning(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnzoo.kernels.fox import op

    case = Case(T=300, S=300, gate=gate)
    x = inputs(case, torch.float32)
    pruned = functools.partial(fox_attention, prune=Prune(0.1), impl="triton")
    plain = run(functools.partial(fox_attention, impl="triton"), case, x)
    monkeypatch.setattr(op, "_searched", lambda given: False)
    for name, got in run(pruned, case, x).items():
        assert torch.equal(got, plain[name])
    x = {name: y.detach() for name, y in x.items()}
    assert torch.equal(pruned(x["q"], x["k"], x["v"], log_decay=x["log_decay"]), plain["o"])


def test_keys_of_heads_that_drop_nothing_are_not_measured() -> None:
    """Key heads of which no query head closes enough; what the others drop stays the same."""
    from attnzoo.kernels.common.gate_sums import gate_sums
    from attnzoo.kernels.common.pruning import none_above, norm_max

    x = inputs(Case(T=900, S=900, H=4, G=2, K=8), torch.float32)
    x["log_decay"] = torch.full_like(x["log_decay"], -1e-3)
    x["log_decay"][..., 3] = -0.05
    _, base, *_ = gate_sums(x["log_decay"], None, 900)
    found = norm_max(x["k"], base=base, none=none_above(Prune().log_eps, 512))
    whole = norm_max(x["k"])
    assert bool((found[:, 0] == 0).all())
    assert torch.equal(found[:, 1], whole[:, 1])
    assert bool((whole > 0).all())


@pytest.mark.parametrize("at", [3, 350, 899])
def test_the_longest_key_counts_wherever_it_is(at: int) -> None:
    """Also among rows that drop nothing, and for a head whose key head another one reads that drops nothing at all."""
    x = inputs(Case(T=900, S=900, H=2, G=1, K=8), torch.float32)
    x["log_decay"] = torch.full_like(x["log_decay"], -0.016)
    x["log_decay"][..., 1] = 0.0
    plain = starts(x["q"], x["k"], x["log_decay"], Prune(), scale=0.1)
    x["k"][:, at] *= 3
    found = starts(x["q"], x["k"], x["log_decay"], Prune(), scale=0.1).long()
    c, closed = running_sums(x["log_decay"], 1, 900, 2, x["q"].device)
    exact = prune_starts_reference(x["q"], x["k"], c, first_visible(closed, None, None), AttentionOptions(0.1, Prune()))
    assert bool((found <= exact).all())
    assert bool((exact - found <= KEY_UNIT).all())
    assert 0 < int(found.max()) < int(plain.max())
    assert int(found[:, 1].max()) == 0


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("gate", ["open", "const"])
def test_forward_and_backward_use_the_same_boundaries(bound: str, gate: str) -> None:
    """Against the dense definition with the same blocks removed: values and gradients."""
    options = {"prune": Prune(bound=bound), "scale": 0.1}
    case = Case(T=260, S=400, H=2, K=8, V=8, gate=gate, sink=True, options=options)
    x = inputs(case, torch.float32)
    within_budget(case, x, triton(case, x, Tiles(128, 64, 4, 1)))


def adversary(kind: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, log_decay and scale of inputs built against the certificate; decay fast enough to prune."""
    S, K = 640, 8
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, S, 2, K, generator=generator), torch.randn(1, S, 2, K, generator=generator)
    g = torch.full((1, S, 2), -0.15)
    if kind == "at the bound":  # far keys aligned with every query, near ones against it: |logit| = U everywhere
        q = torch.ones(1, S, 2, K)
        k = torch.ones(1, S, 2, K)
        k[:, ::2] = -1.0
        k[:, 256:] = -1.0
    elif kind == "one dominating key":  # far away, ten times the norm of the others and aligned with the queries
        q = torch.ones(1, S, 2, K) + 0.1 * q
        k[:, 3] = 3.0
    elif kind == "gates open and close":
        g = torch.where((torch.arange(S) // 64 % 2 == 0)[None, :, None], torch.tensor(0.0), torch.tensor(-0.5)).expand(
            1, S, 2
        )
        g = g.clone()
        g[:, 300] = -math.inf
        g[:, 301:] = -0.2
    elif kind == "all at once":  # a burst: no decay for 500 tokens, then 30 nats in one
        g = torch.zeros(1, S, 2)
        g[:, 511] = -30.0
    elif kind == "zero keys":
        k = torch.zeros(1, S, 2, K)
    return q.to(DEVICE), k.to(DEVICE), g.to(DEVICE), 1.0


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    "kind", ["at the bound", "one dominating key", "gates open and close", "all at once", "zero keys"]
)
def test_dropped_mass_stays_below_eps(kind: str, bound: str) -> None:
    q, k, g, scale = adversary(kind)
    for eps in (EPS, 1e-2):
        start = starts(q, k, g, Prune(eps=eps, bound=bound), scale=scale)
        assert float(dropped_mass(q, k, g, start, scale).max()) <= eps
    assert bool((start.diff(dim=-1) >= 0).all())
    assert int(starts(q, k, g, Prune(eps=0.5, bound="tail"), scale=0.01).max()) > 0  # it does prune where it may


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_smaller_of_a_known_bound_and_the_norms_counts(bound: str) -> None:
    """A loose bound keeps what norms keep, a tight one less; so say the kernels, their reference and the algebra."""
    case = Case(T=256, S=256, H=2, G=2, K=8, gate="open")
    x = inputs(case, torch.float32)
    q, k, g = x["q"], x["k"], 3 * x["log_decay"]
    c, closed = running_sums(g, 1, 256, 2, q.device)
    since = first_visible(closed, None, None)

    def found(known: float | None) -> list[Tensor]:
        limit = None if known is None else torch.full((2,), known, device=DEVICE)
        prune, heads = Prune(bound=bound), [t.transpose(1, 2) for t in (1.5 * q, k)]
        return [
            starts(q, k, g, prune, scale=1.5, logit_bound=limit).long(),
            prune_starts_reference(q, k, c, since, AttentionOptions(1.5, prune, logit_bound=limit)),
            first_kept_keys(*heads, g.transpose(1, 2), prune, limit),
        ]

    for loose, norms, tight in zip(found(1e4), found(None), found(0.5), strict=True):
        assert torch.equal(loose, norms)
        assert bool((tight >= norms).all())
        assert int(tight.sum()) > int(norms.sum())


@pytest.mark.covering
@pytest.mark.parametrize("known", [None, 1e4, 1.0], ids=["norms", "loose bound", "tight bound"])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("T", [1, 40, 300])
def test_forms_and_kernels_prune_alike(
    T: int, bound: Any, known: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same certificate on any device, for a step, a chunk and a sequence; the kernels round towards keeping."""
    x, seen = inputs(Case(T=T, S=1300, H=2, K=8, gate="open"), torch.float32), list[Tensor]()
    prune, limit = Prune(eps=1e-3, bound=bound), None if known is None else torch.full((2,), known, device=DEVICE)
    past = KVCache(*(x[n][:, :-T] for n in ("k", "v", "log_decay")))

    def record(*args: Any, **options: Any) -> Tensor:
        seen.append(first_kept_keys(*args, **options))
        return seen[-1]

    monkeypatch.setattr(attnzoo.forms.additive, "first_kept_keys", record)
    new = (x["q"], x["k"][:, -T:], x["v"][:, -T:], Gate(log_decay=x["log_decay"][:, -T:]))
    FORMS.extend(*new, past, prune=prune, logit_bound=limit)
    found = starts(x["q"], x["k"], x["log_decay"], prune, logit_bound=limit).long()
    assert float(found.max()) > 0
    assert bool(((found <= seen[0]) & (seen[0] <= found + KEY_UNIT)).all())
    shares = [share_kept(None, start, x["q"], 1300) for start in (found, seen[0])]
    torch.testing.assert_close(*shares, atol=0.01, rtol=0)


def test_kept_fraction_agrees_with_the_reference() -> None:
    assert_share_kept(kept_fraction, inputs(Case(T=400, S=450, H=2, K=8, gate="open"), torch.float32))


def test_the_tail_bound_prunes_at_least_as_much_on_normed_heads() -> None:
    case = Case(T=512, S=512, H=2, G=2, K=16, gate="strong")
    x = inputs(case, torch.float32)
    q, k = (torch.nn.functional.rms_norm(x[n], (16,)) for n in "qk")
    tail, paper = (kept_fraction(q, k, log_decay=x["log_decay"], prune=Prune(bound=b)) for b in BOUNDS)
    assert bool((tail <= paper).all())


@pytest.mark.gpu
@pytest.mark.parametrize("bound", BOUNDS)
def test_pruned_within_budget_bf16(bound: str) -> None:
    for gate in ("open", "mixed", "const"):
        case = Case(T=2000, S=2100, H=2, K=64, V=64, gate=gate, options={"prune": Prune(bound=bound), "scale": 0.05})
        x = inputs(case, torch.bfloat16)
        within_budget(case, x, triton(case, x, None))


@pytest.mark.gpu
def test_pruning_does_not_wait_for_the_device() -> None:
    case = Case(T=1024, S=1024, K=64, V=64, options={"prune": Prune()})
    x = inputs(case, torch.bfloat16)
    run(fox_attention, case, x)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(fox_attention, case, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("B", "G", "rep", "T"), [(1, 1, 1, 1), (2, 3, 2, 1000), (1, 40, 1, 300)])
def test_heads_with_the_most_left_come_first(B: int, G: int, rep: int, T: int) -> None:
    start = torch.randint(0, 4, (B, G * rep, -(-T // ROW_UNIT)), dtype=torch.int32, device=DEVICE) * KEY_UNIT
    order = head_order(start, G)
    assert order is not None
    assert torch.equal(order.long(), start.view(B * G, -1).sum(1).argsort(stable=True))
