"""Wall as an operator: schemas, compilers, autocast, what is refused, and which gradients are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_ops import assert_casts_operands_alone, assert_one_graph, assert_only_asked_for, layer_of
from fox_cases import DEVICE
from named_ops import FAKES, opcheck
from path_cases import large_tiles
from transforms import assert_only_auto_is_transformed
from wall_cases import Case, inputs

from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.wall import wall_attention
from attnzoo.kernels.wall.operands import WallBackward, WallForward, WallOperands, WallWanted
from attnzoo.kernels.wall.reference import wall_reference, wall_reference_lse

__all__ = ["large_tiles"]
ORDER = ("q", "k", "v", "log_diag", "log_decay", "sink")


def test_opcheck() -> None:
    from attnzoo.kernels.wall.op import wall_backward_op, wall_forward_op

    x = inputs(Case(T=40, H=1, sink=True, decay="open"), torch.float32)
    borders = torch.tensor([0, 30, 40], device=DEVICE)
    leaves = {n: x[n].clone().requires_grad_() for n in ORDER} | {"log_decay": None}
    packed = WallOperands(**leaves, options=OpOptions(borders, None, 0.3, 9))  # type: ignore[arg-type]
    opcheck(wall_forward_op, WallForward(packed, False, False, True))
    pruned = WallOperands(*(x[n] for n in ORDER), OpOptions(None, None, 0.3, 0, "tail", -3.0))
    forward = WallForward(pruned, True, False, True)
    opcheck(wall_forward_op, forward, FAKES)
    made = wall_forward_op(forward)
    assert made.row_lse is not None
    for wanted in (WallWanted(*[True] * 6), WallWanted(True, False, False, True, False, False)):
        call = WallBackward(x["do"], torch.ones_like(made.row_lse), pruned, made, False, False, wanted)
        opcheck(wall_backward_op, call, FAKES)


def test_the_log_sum_exp_and_its_gradients() -> None:
    x = inputs(Case(T=140, H=1, sink=True, decay="open"), torch.float32)

    def run(fn: Any, **more: Any) -> list[torch.Tensor]:
        leaves = {n: x[n].detach().clone().requires_grad_() for n in ORDER}
        o, lse = fn(**leaves, **more)
        return [o, lse, *torch.autograd.grad((o * x["do"]).sum() + lse.sin().sum(), list(leaves.values()))]

    for got, want in zip(run(wall_attention, impl="triton", return_lse=True), run(wall_reference_lse), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


def test_frozen_inputs_have_no_gradient() -> None:
    x = inputs(Case(T=40, H=2, G=1, sink=True, decay="open"), torch.float32)
    assert_only_asked_for(wall_attention, x, (("v", "sink"), ("k",)))


def test_compiles_as_one_graph_for_any_length() -> None:
    assert_one_graph(layer_of(wall_attention), (inputs(Case(T=T, H=1), torch.float32) for T in (40, 131)))


def test_autocast_casts_the_operands_and_keeps_the_gates() -> None:
    x = inputs(Case(T=66), torch.float32)
    assert_casts_operands_alone(wall_attention, x, {"log_diag": x["log_diag"].double()})


def test_shapes_alone_are_enough() -> None:
    q, k = (torch.empty(2, 5, heads, 16, device="meta") for heads in (4, 2))
    o = wall_attention(q, k, k, log_diag=torch.empty(2, 5, 4, 16, device="meta"))
    assert o.is_meta
    assert o.shape == q.shape


BAD: list[tuple[dict[str, Any], str]] = [
    ({"log_diag": None}, r"log_diag: expected a tensor, got NoneType"),
    ({"log_diag": torch.zeros(1, 4, 1, 16)}, r"log_diag: expected \[B=1, T=4, H=2, K=16\] as q"),
    ({"log_diag": torch.zeros(1, 4, 2, 16).half()}, r"log_diag: expected float32"),
    ({"log_diag": torch.full((1, 4, 2, 16), 0.5)}, r"log_diag: expected natural logs <= 0, got 0.5"),
    ({"q": torch.zeros(1, 3, 2, 16), "log_diag": torch.zeros(1, 3, 2, 16)}, r"k: expected as many tokens as q"),
    ({"v": torch.zeros(1, 4, 1, 16)}, r"v: expected \[B=1, S=4, G=2, V\]"),
    ({"window": 0}, r"window: expected at least 1"),
    ({"cu_seqlens": torch.tensor([1, 4])}, r"cu_seqlens: expected borders rising from 0 to T = 4"),
    ({"impl": "tritn"}, r"impl: expected one of auto, .*got 'tritn'; did you mean 'triton'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:22] for _, m in BAD])
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {n: torch.zeros(1, 4, 2, 16) for n in ("q", "k", "v", "log_diag")} | change
    with pytest.raises((ValueError, TypeError), match=message):
        wall_attention(**args)


@pytest.mark.parametrize(("K", "V"), [(8, 16), (144, 16), (16, 8)])
def test_head_dims_that_the_kernels_do_not_have(K: int, V: int) -> None:
    x = {n: t for n, t in inputs(Case(T=20, K=K, V=V), torch.float32).items() if n != "do"}
    with pytest.raises(ValueError, match="cannot run here: expected [KV] a multiple of 16 up to 128"):
        wall_attention(**x, impl="triton")
    assert torch.equal(wall_attention(**x), wall_reference(**x))


def test_transforms_of_functions_take_the_reference() -> None:
    x = inputs(Case(T=9, gate="open"), torch.float32)

    def loss(q: torch.Tensor, impl: Any) -> torch.Tensor:
        return wall_attention(q, x["k"], x["v"], log_diag=x["log_diag"], impl=impl).square().sum()

    assert_only_auto_is_transformed(loss, x["q"])
