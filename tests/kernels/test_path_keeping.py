"""Carries that the forward keeps for the backward: the same numbers to the last bit, and as much memory as is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from path_cases import DEVICE, Case, inputs, large_tiles  # noqa: F401  (a fixture)
from thinning import in_long

from attnzoo import Forgetting, build_attention
from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.levels import head_groups
from attnzoo.kernels.path import kept_transitions, passes, path_attention

CASES = {
    "one block": (Case(T=1, gate="none"), torch.float32),
    "levels": (Case(B=2, T=140, H=2, G=2), torch.float32),
    "half": (Case(T=140, H=2, G=1, K=48, V=32, gate="open"), torch.float16),
    "pruned": (Case(T=260, H=2, G=2, gate="strong", options={"prune": Prune(1e-4)}), torch.float32),
    "window": (Case(T=140, H=2, G=2, gate="none", options={"window": 100}), torch.float32),
}


TOGETHER = ("one block", "half", "window"), CASES.keys()  # usually, and in the long profile
ONE_BY_ONE = ("levels", "pruned"), CASES.keys()


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        *(pytest.param(CASES[name], "together", id=f"{name}-together") for name in in_long(*TOGETHER)),
        *(pytest.param(CASES[name], "one by one", id=f"{name}-one by one") for name in in_long(*ONE_BY_ONE)),
        # the interpreter computes bfloat16 wrongly
        *(
            pytest.param((case, torch.bfloat16), groups, id=f"{name} bf16-{groups}", marks=pytest.mark.gpu)
            for name, (case, _) in CASES.items()
            for groups in ("together", "one by one")
        ),
    ],
)
def test_kept_carries_change_no_bit(case: Any, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they change with a second backward pass; nothing of the transitions is made again."""
    call, dtype = case
    x = inputs(call, dtype)
    if groups == "one by one":
        monkeypatch.setattr(head_groups, "BUDGET", 1)
        monkeypatch.setattr(head_groups, "KEPT_BUDGET", 1)
    do = x.pop("do")
    leaves = [t.requires_grad_() for t in x.values()]
    with torch.no_grad():
        before = [t.clone() for t in leaves]
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # one pass adds up in an order that varies
    try:
        want = path_attention(**x, **call.options, impl="triton")
        want_grads = torch.autograd.grad(want, leaves, do)
        o = path_attention(**x, **call.options, impl="triton", keep_carries=True)
        for name in ("block_level", "carry"):
            monkeypatch.setattr(passes, name, None)
        for again in (True, False):
            for g, expected in zip(torch.autograd.grad(o, leaves, do, retain_graph=again), want_grads, strict=True):
                assert torch.equal(g, expected)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert torch.equal(o, want)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))


@pytest.mark.parametrize("T", [1, 150, 330])
def test_places_overlap_only_where_carries_replace_the_second_piece_of_the_nodes(
    T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_groups, "KEPT_BUDGET", 1)
    q = torch.randn(2, T, 4, 16, device=DEVICE).bfloat16()
    k, w = q[:, :, :2], q[:, :, :2].float()
    buffer = torch.zeros(kept_transitions.kept_bytes(q, k, w), dtype=torch.uint8, device=DEVICE)
    end = 0
    for _, made in kept_transitions.kept_places(buffer, q, k, w):
        leaves = made.block
        for x in (*made.kept[:2], leaves.diag, leaves.q, leaves.k, made.kept.w, leaves.m[0], *made.levels):
            at = x.data_ptr() - buffer.data_ptr()
            assert not x.numel() or at >= end
            end = max(end, at + x.numel() * x.element_size())
        second = leaves.m[1].data_ptr() - buffer.data_ptr()
        assert second >= leaves.m[0].data_ptr() - buffer.data_ptr() + leaves.m[0].numel() * 2
        end = max(end, second + leaves.m[1].numel() * 2)
    assert end <= buffer.numel()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has the cases above in bfloat16")
@pytest.mark.parametrize("case", [Case(T=100, gate="none"), Case(T=140, H=2, G=2, gate="none")], ids=str)
def test_what_the_second_piece_leaves_is_enough(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which the interpreter rounds wrongly, but alike for kept carries and others."""
    from attnzoo.kernels.path import api

    monkeypatch.setattr(api, "triton_unavailable", lambda *_: "")
    monkeypatch.setattr(head_groups, "KEPT_BUDGET", 1)
    x = inputs(case, torch.bfloat16)
    do = x.pop("do")
    leaves = [t.requires_grad_() for t in x.values()]
    want, kept = (
        torch.autograd.grad(path_attention(**x, impl="triton", keep_carries=keep), leaves, do) for keep in (False, True)
    )
    assert all(bool(g.isfinite().all()) for g in want)
    assert all(torch.equal(a, b) for a, b in zip(kept, want, strict=True))


def test_kept_carries_compile() -> None:
    """As one graph, also where lengths are symbols: each length has its own, since a buffer's size depends on it."""

    def call(q: Any, k: Any, v: Any, w: Any, beta: Any) -> torch.Tensor:
        return path_attention(q, k, v, w=w, beta=beta, impl="triton", keep_carries=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (20, 130):
        x = inputs(Case(T=T, H=1, gate="none"), torch.float32)
        do = x.pop("do")
        leaves = [t.requires_grad_() for t in x.values()]
        got, want = (torch.autograd.grad(f(*leaves), leaves, do) for f in (compiled, call))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_size_is_what_is_said() -> None:
    """33 K bytes a token and key head in bf16 with K = 128, 34 K with 64."""
    for B, T, K, H in ((2, 16384, 64, 24), (2, 16384, 128, 16), (1, 16384, 128, 16)):
        q = torch.empty(B, T, H, K, dtype=torch.bfloat16, device="meta")
        assert 32.9 * K <= kept_transitions.kept_bytes(q, q, q.float()) / (B * T * H) <= 34 * K


def test_only_a_gradient_keeps_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnzoo.kernels.path import op

    def never(*_: Any) -> int:
        raise AssertionError("kept without a gradient to come")

    x = inputs(Case(T=70), torch.float32)
    x.pop("do")
    monkeypatch.setattr(op, "kept_bytes", never)
    path_attention(**x, impl="triton", keep_carries=True)


@pytest.mark.parametrize("name", in_long(["path_fox", "rope_path"], ["path", "path_fox", "rope_path", "rope_path_fox"]))
def test_layers_keep_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, too; a layer without gradients and its caches are as they were."""
    torch.manual_seed(0)
    plain = build_attention(name, hidden_size=32, num_heads=2, impl="triton").to(DEVICE)
    kept = build_attention(name, hidden_size=32, num_heads=2, impl="triton", keep_carries=True).to(DEVICE)
    kept.load_state_dict(plain.state_dict())
    x = torch.randn(2, 20, 32, device=DEVICE)
    mask = torch.ones(2, 20, dtype=torch.int32, device=DEVICE)
    mask[1, 12:] = 0
    for given in (None, mask):
        want, o = (layer(x, attention_mask=given) for layer in (plain, kept))
        assert torch.equal(o, want)
        plain.zero_grad()
        kept.zero_grad()
        want.square().sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(passes, "block_level", None)
            o.square().sum().backward()
        for (n, p), q in zip(plain.named_parameters(), kept.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=n)
    with torch.no_grad():
        assert torch.equal(kept(x[:, :9], cache=kept.new_cache()), plain(x[:, :9], cache=plain.new_cache()))
    assert torch.equal(
        build_attention("path", hidden_size=32, num_heads=2, keep_carries=True)(torch.ones(1, 5, 32)).isfinite(),
        torch.ones(1, 5, 32, dtype=torch.bool),
    )


def test_layers_without_carries_refuse() -> None:
    for name in ("fox", "mamba2", "wall", "path_wall"):
        with pytest.raises(ValueError, match="keep_carries: expected False .* it serves path, path_fox, rope_path"):
            build_attention(name, keep_carries=True)
    with pytest.raises(ValueError, match="keep_carries: expected False with forgetting"):
        build_attention("path", forgetting=Forgetting(), keep_carries=True)
    with pytest.raises((TypeError, ValueError), match="keep_carries: expected"):
        build_attention("path", keep_carries="yes")  # type: ignore[arg-type]


def test_refusals() -> None:
    x = inputs(Case(T=20, H=2, G=2, diag="open"), torch.float32)
    x.pop("do")
    with pytest.raises(ValueError, match="keep_carries: expected False with log_diag"):
        path_attention(**x, impl="triton", keep_carries=True)
    x.pop("log_diag")
    with pytest.raises((TypeError, ValueError), match="keep_carries: expected"):
        path_attention(**x, impl="triton", keep_carries=1)  # type: ignore[arg-type]
