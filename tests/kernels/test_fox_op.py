"""The custom ops under torch.library's checks, torch.compile and autocast; the public function's errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_ops import assert_broadcasts, assert_casts_operands_alone, assert_one_graph, layer_of, results
from fox_cases import DEVICE, Case, inputs
from named_ops import FAKES, opcheck
from transforms import assert_only_auto_is_transformed

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.retention import Rule
from attnzoo.kernels.fox import GateSums, fox_attention
from attnzoo.kernels.fox.operands import FoxForward, FoxOperands
from attnzoo.kernels.fox.reference import fox_reference

CASE = Case(T=70, S=90, H=2, G=1, K=8, V=8, sink=True)


@pytest.mark.parametrize("kind", ["gates", "const", "none", "retention"])
def test_opcheck(kind: str) -> None:
    from attnzoo.kernels.fox.op import fox_forward_op

    gate = {"gates": "mixed", "retention": "none"}.get(kind, kind)
    case = Case(T=70, S=90, K=8, V=8, gate=gate, sink=kind == "gates")
    x = {n: t.requires_grad_() for n, t in inputs(case, torch.float32).items() if n != "do"}
    prune = ("tail", -10.0) if kind == "gates" else ("", 0.0)
    options = OpOptions(None, None, 0.3, 40 if kind == "none" else 0, *prune)
    operands = FoxOperands(x["q"], x["k"], x["v"], x.get("log_decay"), x.get("sink"), options)
    if kind == "retention":
        keys = torch.rand(1, 90, 1, 2, device=DEVICE).requires_grad_()
        operands = operands._replace(retention=keys, rule=Rule(4.0, 0.5, 9.0, 3))
    opcheck(fox_forward_op, FoxForward(operands, True, False, True))


@pytest.mark.parametrize(
    "case", [CASE, Case(T=70, S=70, H=2, G=2, gate="none"), Case(T=70, S=90, H=4, gate="open")], ids=str
)
def test_receivers_get_the_gradients_unrounded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of q and k; all else is as it was. On a GPU by the kernels of one pass, too."""
    from attnzoo.kernels.fox.op import fox_forward_op

    monkeypatch.setattr("attnzoo.kernels.fox.plan.APART_ROWS", 0)
    K = 64 if DEVICE == "cuda" else case.K
    x = inputs(replace(case, K=K, V=K), torch.float16)
    do = x.pop("do")
    leaves = [t.requires_grad_() for t in x.values()]
    to = [torch.zeros(t.shape, device=DEVICE, requires_grad=True) for t in leaves[:2]]
    call = {"log_decay": x.get("log_decay"), "sink": x.get("sink"), "impl": "triton"}
    plain = torch.autograd.grad(fox_attention(*leaves[:3], **call), leaves, do)
    o = fox_attention(*leaves[:3], **call, receivers=(to[0], to[1]))
    none, nothing, *rest, dq, dk = torch.autograd.grad(o, [*leaves, *to], do, allow_unused=True)
    assert none is nothing is None
    for got, want in zip((dq, dk, *rest), plain, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-3, atol=2e-3)
    assert all(bool((t != t.half()).any()) for t in (dq, dk))
    operands = FoxOperands(*leaves[:3], call["log_decay"], call["sink"], OpOptions(None, None, 0.3))
    opcheck(fox_forward_op, FoxForward(operands, True, False, False, *to), FAKES)


PRUNED = layer_of(fox_attention, prune=Prune())


def test_compiles_as_one_graph_for_any_length() -> None:
    cases = (Case(T=T, S=T, K=8, V=8, gate="open") for T in (66, 80, 131))
    assert_one_graph(PRUNED, (inputs(case, torch.float32) for case in cases))


def test_autocast_casts_the_operands_and_keeps_the_gate() -> None:
    x = inputs(Case(T=66, S=66, K=8, V=8, gate="open"), torch.float32)
    assert_casts_operands_alone(fox_attention, x, {"log_decay": x["log_decay"].half()})


def test_autocast_does_not_reach_inside_the_reference() -> None:
    x = inputs(Case(T=66, S=66, K=8, V=8, gate="open"), torch.float32)
    options: dict[str, Any] = {"log_decay": x["log_decay"], "return_lse": True, "impl": "reference"}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = fox_attention(x["q"], x["k"], x["v"], **options)
    want = fox_attention(*(x[n].bfloat16() for n in "qkv"), **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_inputs_need_not_be_contiguous() -> None:
    case = Case(T=66, S=66, H=2, G=2, K=8, V=8)
    x = inputs(case, torch.float32)
    strided = {
        n: t.transpose(1, 2).contiguous().transpose(1, 2) if n in ("q", "k", "v", "do") else t for n, t in x.items()
    }
    strided["log_decay"] = x["log_decay"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["k"] = torch.cat([x["k"], x["v"]], -1)[..., :8]
    strided["v"] = x["v"].transpose(-1, -2).contiguous().transpose(-1, -2)
    call = {"log_decay": x["log_decay"], "impl": "triton"}
    want = fox_attention(x["q"], x["k"], x["v"], **call)
    call["log_decay"] = strided["log_decay"]
    torch.testing.assert_close(fox_attention(strided["q"], strided["k"], strided["v"], **call), want, rtol=0, atol=0)


def test_broadcast_keys_and_gradients() -> None:
    assert_broadcasts(fox_attention, inputs(Case(T=66, S=66, K=8, V=8), torch.float32), "k v")


def test_auto_takes_what_the_device_can_run() -> None:
    x = inputs(CASE, torch.float64)
    want = fox_reference(x["q"], x["k"], x["v"], log_decay=x["log_decay"])
    assert torch.equal(fox_attention(x["q"], x["k"], x["v"], log_decay=x["log_decay"]), want)  # no float64 kernel
    with pytest.raises(ValueError, match="'triton' cannot run here.*float64"):
        fox_attention(x["q"], x["k"], x["v"], log_decay=x["log_decay"], impl="triton")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(1, 4, 2)}, r"q: expected 4 dimensions"),
    ({"k": torch.zeros(1, 4, 2, 16)}, r"k: expected \[B=1, S, G, K=8\]"),
    ({"v": torch.zeros(1, 5, 2, 8)}, r"v: expected \[B=1, S=4, G=2, V\]"),
    ({"v": torch.zeros(1, 4, 2, 8, dtype=torch.float16)}, r"v: expected the floating dtype of q"),
    ({"q": torch.zeros(1, 4, 3, 8)}, r"q: expected H a multiple of the key heads G=2, got H=3"),
    ({"q": torch.zeros(1, 9, 2, 8)}, r"q: expected 1 <= T <= S=4"),
    ({"log_decay": torch.zeros(1, 4, 1)}, r"log_decay: expected \[B=1, S=4, H=2\]"),
    ({"log_decay": torch.zeros(1, 4, 2, dtype=torch.float16)}, r"log_decay: expected float32"),
    ({"sink": torch.zeros(3)}, r"sink: expected a floating tensor of shape \[H=2\]"),
    ({"log_decay": torch.full((1, 4, 2), 0.5)}, r"log_decay: expected natural logs <= 0, got 0.5"),
    ({"log_decay": torch.full((2,), torch.nan)}, r"log_decay: expected natural logs <= 0, got nan"),
    ({"sink": torch.tensor([0.0, torch.inf])}, r"sink: expected logits that are finite or -inf, got \[0.0, inf\]"),
    ({"logit_bound": torch.zeros(1)}, r"logit_bound: expected"),
    ({"logit_bound": torch.ones(2)}, r"logit_bound: expected None without prune"),
    ({"logit_bound": torch.tensor([1.0, -1.0]), "prune": Prune()}, r"logit_bound: expected bounds >= 0"),
    ({"logit_bound": torch.full((2,), torch.nan), "prune": Prune()}, r"logit_bound: expected bounds >= 0"),
    ({"cu_seqlens": torch.zeros(3)}, r"cu_seqlens: expected int32 or int64"),
    ({"cu_seqlens": torch.tensor([4])}, r"cu_seqlens: expected int32 or int64 \[N\+1\] with N >= 1"),
    ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens: expected borders rising from 0 to T = 4, got \[0, 3\]"),
    ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, r"cu_seqlens: expected borders rising from 0 to T = 4"),
    ({"window": 0}, r"window: expected at least 1"),
    ({"window": 2.5}, r"window: expected a number of tokens or None, got 2.5"),
    ({"window": True}, r"window: expected a number of tokens or None, got True"),
    ({"scale": -1.0}, r"scale: expected a positive finite number"),
    ({"scale": math.inf}, r"scale: expected a positive finite number or None, got inf"),
    ({"scale": math.nan}, r"scale: expected a positive finite number"),
    ({"scale": torch.ones(())}, r"scale: expected a float or None, got Tensor"),
    ({"sink": [0.0, 0.0]}, r"sink: expected a tensor or None, got list"),
    ({"q": [0.0]}, r"q: expected a tensor, got list"),
    ({"q": torch.zeros(1, 4, 2, 0), "k": torch.zeros(1, 4, 2, 0)}, r"q: expected at least one channel"),
    ({"prune": Prune(), "log_decay": None}, r"prune: expected a log_decay"),
    ({"prune": 1e-3}, r"prune: expected attnzoo.Prune\(eps=0.001\) or None, got float"),
    ({"gate_sums": torch.zeros(1, 4, 2), "log_decay": None}, r"gate_sums: expected GateSums or None, got Tensor"),
    ({"receivers": 3}, r"receivers: expected a tuple of tensors or None, got 3"),
    ({"receivers": (1, 2)}, r"receivers: expected a tuple of tensors or None, got \(1, 2\)"),
    ({"receivers": (torch.zeros(1, 4, 2, 8),)}, r"receivers: expected float32 tensors of shapes"),
    ({"receivers": (torch.zeros(1, 4, 2, 8),) * 2, "impl": "reference"}, r"receivers: expected None in the reference"),
    ({"impl": "tritn"}, r"impl: expected one of auto, .*got 'tritn'; did you mean 'triton'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:22] for _, m in BAD])
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {n: torch.zeros(1, 4, 2, 8) for n in "qkv"} | {"log_decay": torch.zeros(1, 4, 2)} | change
    q, k, v = (args.pop(n) for n in "qkv")
    with pytest.raises((ValueError, TypeError), match=message):
        fox_attention(q, k, v, **args)


def test_a_call_that_was_right_hides_no_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one kind are checked once where no values are read."""
    monkeypatch.setenv("ATTNZOO_VALIDATE", "0")
    x, g = torch.randn(1, 4, 2, 8, device=DEVICE), torch.zeros(1, 4, 2, device=DEVICE)
    right: dict[str, Any] = {"log_decay": g, "scale": 1, "window": 1}
    for wrong in ({"scale": True}, {"window": True}, {"scale": -1}, {"log_decay": g[:, :3]}, {"log_decay": g.half()}):
        fox_attention(x, x, x, **right)
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))}: expected"):
            fox_attention(x, x, x, **{**right, **wrong})
    with pytest.raises(ValueError, match="v: expected the floating dtype of q"):
        fox_attention(x, x, x.half(), **right)


def test_sums_of_gates_above_zero_are_refused() -> None:
    good, bad = torch.zeros(1, 4, 2), torch.full((1, 1, 2), 0.5)
    with pytest.raises(ValueError, match="log_decay: expected natural logs <= 0, got 0.5"):
        GateSums.of(bad)
    with pytest.raises(ValueError, match="log_decay: expected natural logs <= 0, got nan"):
        GateSums.of(good).append(bad * torch.nan)
    with pytest.raises(TypeError, match="log_decay: expected a tensor, got list"):
        GateSums.of([0.0])  # type: ignore[arg-type]


def test_sums_on_a_device_without_triton_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"log_decay: expected CUDA tensors \(or TRITON_INTERPRET=1\), got cpu"):
        GateSums.of(torch.zeros(1, 4, 2))


@pytest.mark.parametrize("prune", [None, Prune()])
def test_transforms_of_functions_take_the_reference(prune: Prune | None) -> None:
    """``torch.func`` has no way into a kernel: an explicit choice says so, ``auto`` takes what can be transformed."""
    x = inputs(Case(T=9, S=9, gate="open"), torch.float32)

    def loss(q: torch.Tensor, impl: Any) -> torch.Tensor:
        o = fox_attention(q, x["k"], x["v"], log_decay=x["log_decay"], prune=prune, impl=impl)
        return o.square().sum()

    assert_only_auto_is_transformed(loss, x["q"])


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    x, above = torch.zeros(1, 4, 2, 8, device=DEVICE), torch.full((1, 4, 2), 0.5, device=DEVICE)
    fox_attention(x, x, x, log_decay=above)
    monkeypatch.setenv("ATTNZOO_VALIDATE", "1")
    with pytest.raises(ValueError, match="log_decay: expected natural logs <= 0"):
        fox_attention(x, x, x, log_decay=above)


@pytest.mark.gpu
def test_compiles_with_inductor() -> None:
    compiled = torch.compile(PRUNED, fullgraph=True, dynamic=True)
    for T in (300, 500):
        x = inputs(Case(T=T, S=T, K=64, V=64, gate="open"), torch.bfloat16)
        torch.testing.assert_close(results(compiled, x), results(PRUNED, x), rtol=2e-2, atol=2e-2)
