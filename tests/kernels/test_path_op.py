"""The custom ops under torch.library's checks, torch.compile and autocast; the public function's errors."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from attention_ops import (
    assert_broadcasts,
    assert_casts_operands_alone,
    assert_one_graph,
    assert_only_asked_for,
    layer_of,
    results,
)
from named_ops import FAKES, opcheck
from path_cases import DEVICE, Case, inputs, large_tiles  # noqa: F401  (a fixture)
from transforms import assert_only_auto_is_transformed

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common import call_checks
from attnzoo.kernels.common.device import Machine, machine
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.levels.layout import Wanted
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.path.fits import too_small
from attnzoo.kernels.path.operands import PathBackward, PathForward, PathGradients, PathOperands
from attnzoo.kernels.path.reference import path_reference

ORDER = ("q", "k", "v", "w", "beta", "log_decay", "sink", "log_diag")
OPTIONS = OpOptions(None, None, 0.3)
ALL = Wanted(*[True] * 8)
PLAIN = ALL._replace(log_diag=False)


def operands(x: dict[str, Any], options: OpOptions = OPTIONS) -> PathOperands:
    return PathOperands(*(x.get(n) for n in ORDER), options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pruned", "packed", "window", "none", "kept"])
def test_opcheck(kind: str) -> None:
    from attnzoo.kernels.path.op import path_forward_op

    x = inputs(Case(T=40, gate="none" if kind == "none" else "mixed", sink=kind == "window"), torch.float32)
    x = {n: t.requires_grad_() for n, t in x.items() if n != "do"}
    prune = ("tail", -10.0) if kind == "pruned" else ("", 0.0)
    borders = torch.tensor([0, 30, 40], device=DEVICE) if kind == "packed" else None
    window = 9 if kind == "window" else 0
    given = operands(x, OpOptions(borders, None, 0.3, window, *prune))
    opcheck(path_forward_op, PathForward(given, True, False, kind == "window", kind == "kept"))


def test_receivers_get_the_gradients_unrounded() -> None:
    """In place of q, k and w; all else is as it was."""
    x = inputs(Case(T=70, H=2, G=1, gate="open"), torch.float16)
    do = x.pop("do")
    leaves, to = [t.requires_grad_() for t in x.values()], {n: x[n].float().detach().requires_grad_() for n in "qkw"}
    want = dict(zip(x, torch.autograd.grad(path_attention(**x, impl="triton"), leaves, do), strict=True))
    o = path_attention(**x, impl="triton", receivers=tuple(to.values()))
    got = torch.autograd.grad(o, [*leaves, *to.values()], do, allow_unused=True)
    assert {n for n, g in zip(x, got, strict=False) if g is None} == set(to)
    unrounded = dict(zip(to, got[len(x) :], strict=True))
    for n, g in (dict(zip(x, got, strict=False)) | unrounded).items():
        torch.testing.assert_close(g.float(), want[n].float(), rtol=2e-3, atol=2e-3)
        assert n not in to or bool((g != g.half()).any())
    with pytest.raises(ValueError, match=r"receivers: expected float32 tensors of shapes \[\(1, 70, 2, 16\), "):
        path_attention(**x, impl="triton", receivers=(to["q"],))
    with pytest.raises(ValueError, match="receivers: expected None in the reference"):
        path_attention(**x, impl="reference", receivers=tuple(to.values()))


def turned(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same numbers, heads before tokens in memory."""
    return {n: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim > 1 else t for n, t in x.items()}


def backward_call(x: dict[str, torch.Tensor], wanted: Wanted, unrounded: bool = False) -> PathBackward:
    """Inputs of the backward op after a forward at x, for a gradient of both its results."""
    from attnzoo.kernels.path.op import path_forward_op

    given = operands(x)
    made = path_forward_op(PathForward(given, True, False, True, False))
    assert made.row_lse is not None
    return PathBackward(x["do"], torch.ones_like(made.row_lse), given, made, False, unrounded, wanted)


def test_opcheck_of_the_backward_on_transposed_inputs() -> None:
    from attnzoo.kernels.path.op import path_backward_op, path_forward_op

    x = turned(inputs(Case(T=40, H=2, G=2, sink=True, diag="mixed"), torch.float32))  # its forward is checked, too
    opcheck(path_forward_op, PathForward(operands(x), True, False, True, False), FAKES)
    plain = {n: t for n, t in x.items() if n != "log_diag"}
    some = Wanted(True, False, False, False, True, False, True)
    for given, unrounded, wanted in ((x, False, ALL), (plain, True, PLAIN), (plain, False, some)):
        opcheck(path_backward_op, backward_call(given, wanted, unrounded), FAKES)


FROZEN = {  # wanted alone: kernels of the backward that it has no use for
    ("v",): {"path_dq", "path_carry_bwd", "path_node_bwd", "path_block_bwd", "path_product_bwd", "dgate"},
    ("q",): {"path_node_bwd", "path_product_bwd", "dgate"},
    ("k", "v"): {"path_dq", "path_node_bwd", "path_product_bwd", "dgate"},
    ("w",): {"dgate"},
    ("sink",): {"path_carry_bwd", "path_node_bwd", "path_block_bwd", "path_product_bwd", "dgate"},
    ("log_decay",): {"path_carry_bwd", "path_node_bwd", "path_block_bwd", "path_product_bwd"},
}


@functools.cache
def all_gradients() -> tuple[PathBackward, PathGradients]:
    """A call of the backward op for all gradients, and what it gave."""
    from attnzoo.kernels.path.op import path_backward_op

    call = backward_call(turned(inputs(Case(T=150, H=2, G=1, gate="open", sink=True), torch.float32)), PLAIN)
    return call, path_backward_op(call)


@pytest.mark.parametrize("names", FROZEN, ids="+".join)
def test_no_kernel_runs_for_gradients_that_nobody_wants(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some inputs only, from an upstream gradient of any stride: the numbers are those of all gradients."""
    from attnzoo.kernels.path.op import path_backward_op

    call, full = all_gradients()
    ran = set()
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        launch = InterpretedFunction.run
        monkeypatch.setattr(InterpretedFunction, "run", lambda f, *a, **kw: ran.add(f.__name__) or launch(f, *a, **kw))
    some = path_backward_op(call._replace(wanted=Wanted(*(n in names for n in ORDER))))
    for name, got, want in zip(ORDER, some, full, strict=True):
        if name in names:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"d{n}: {m}")
        else:
            assert got is None
    assert not {k for k in ran for useless in FROZEN[names] if k.startswith(useless)}
    assert ran or DEVICE != "cpu"


def test_frozen_inputs_have_no_gradient() -> None:
    x = inputs(Case(T=40, gate="open", sink=True), torch.float32)
    assert_only_asked_for(path_attention, x, (("v", "beta"), ("q", "log_decay"), ("sink",)))


PRUNED = layer_of(path_attention, prune=Prune())


def test_compiles_as_one_graph_for_any_length() -> None:
    assert_one_graph(PRUNED, (inputs(Case(T=T, H=1, gate="open"), torch.float32) for T in (40, 66, 131)))


def test_autocast_casts_the_operands_and_keeps_the_gates() -> None:
    x = inputs(Case(T=66, gate="open"), torch.float32)
    assert_casts_operands_alone(path_attention, x, {name: x[name].half() for name in ("w", "beta", "log_decay")})


def test_inputs_need_not_be_contiguous() -> None:
    x = inputs(Case(T=66, H=2, G=2), torch.float32)
    strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items() if n != "do"}
    strided["k"] = torch.cat([x["k"], x["v"]], -1)[..., :16]
    strided["v"] = x["v"].transpose(-1, -2).contiguous().transpose(-1, -2)
    strided["beta"] = x["beta"][:1].expand(1, 66, 2)
    x = {n: t for n, t in x.items() if n != "do"}
    assert torch.equal(path_attention(**strided, impl="triton"), path_attention(**x, impl="triton"))


def test_broadcast_keys_and_gradients() -> None:
    assert_broadcasts(path_attention, inputs(Case(T=66), torch.float32), "k v w beta")


def test_auto_takes_what_the_device_can_run(caplog: pytest.LogCaptureFixture) -> None:
    x = {n: t.double() for n, t in inputs(Case(T=40), torch.float32).items() if n != "do"}
    call_checks._said.clear()
    with caplog.at_level(logging.INFO, "attnzoo.kernels.path"):
        with pytest.raises(ValueError, match=r"w: expected q's dtype \(torch.float32\)"):
            path_attention(x["q"].float(), x["k"].float(), x["v"].float(), w=x["w"], beta=x["beta"])
        x["log_decay"] = x["log_decay"].float()
        o = path_attention(**x)  # no float64 kernel
    assert torch.equal(o, path_reference(**x))
    assert "path_attention: auto picked reference (expected bfloat16, float16 or float32" in caplog.text
    with pytest.raises(ValueError, match="'triton' cannot run here.*float64"):
        path_attention(**x, impl="triton")


@pytest.mark.parametrize(("K", "V"), [(8, 16), (24, 16), (144, 16), (16, 8), (16, 256)])
def test_head_dims_that_the_kernels_do_not_have(K: int, V: int) -> None:
    x = {n: t for n, t in inputs(Case(T=20, K=K, V=V), torch.float32).items() if n != "do"}
    with pytest.raises(ValueError, match="cannot run here: expected [KV] a multiple of 16 up to 128"):
        path_attention(**x, impl="triton")
    assert torch.equal(path_attention(**x), path_reference(**x))


UNIT = torch.nn.functional.normalize(torch.ones(1, 4, 2, 16), dim=-1)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(1, 4, 2)}, r"q: expected 4 dimensions"),
    ({"q": torch.zeros(1, 3, 2, 16)}, r"k: expected as many tokens as q \(T=3\)"),
    ({"q": torch.zeros(1, 5, 2, 16)}, r"q: expected 1 <= T <= S=4"),
    ({"q": torch.zeros(1, 4, 3, 16)}, r"q: expected H a multiple of the key heads G=2, got H=3"),
    ({"k": torch.zeros(1, 4, 2, 32)}, r"k: expected \[B=1, S, G, K=16\]"),
    ({"v": torch.zeros(1, 4, 1, 16)}, r"v: expected \[B=1, S=4, G=2, V\]"),
    ({"v": torch.zeros(1, 4, 2, 16, dtype=torch.float16)}, r"v: expected the floating dtype of q"),
    ({"w": UNIT[:, :, :1]}, r"w: expected \[B, T, G, K\] = \(1, 4, 2, 16\), got \(1, 4, 1, 16\)"),
    ({"w": UNIT.bfloat16()}, r"w: expected q's dtype \(torch.float32\) or float32, got torch.bfloat16"),
    ({"w": 1.1 * UNIT}, r"w: expected lengths of at most 1, got 1.1"),
    ({"w": torch.full_like(UNIT, torch.nan)}, r"w: expected lengths of at most 1, got nan"),
    ({"beta": torch.ones(1, 4)}, r"beta: expected \[B, T, G\] = \(1, 4, 2\), got \(1, 4\)"),
    ({"beta": torch.full((1, 4, 2), 2.5)}, r"beta: expected values in \[0, 2\], got 2.5 to 2.5"),
    ({"beta": torch.full((1, 4, 2), torch.nan)}, r"beta: expected values in \[0, 2\]"),
    ({"log_decay": torch.zeros(2)}, r"log_decay: expected \[B, T, H\], got shape \(2,\)"),
    ({"log_decay": torch.zeros(1, 4, 1)}, r"log_decay: expected \[B=1, S=4, H=2\]"),
    ({"log_decay": torch.zeros(1, 4, 2, dtype=torch.float16)}, r"log_decay: expected float32"),
    ({"log_decay": torch.full((1, 4, 2), 0.5)}, r"log_decay: expected natural logs <= 0, got 0.5"),
    ({"logit_bound": torch.zeros(1)}, r"logit_bound: expected"),
    ({"cu_seqlens": torch.zeros(3)}, r"cu_seqlens: expected int32 or int64"),
    ({"cu_seqlens": torch.tensor([1, 4])}, r"cu_seqlens: expected borders rising from 0 to T = 4, got \[1, 4\]"),
    ({"sink": torch.full((2,), torch.nan)}, r"sink: expected logits that are finite or -inf"),
    ({"logit_bound": -torch.ones(2), "prune": Prune()}, r"logit_bound: expected bounds >= 0"),
    ({"window": -1}, r"window: expected at least 1"),
    ({"w": None}, r"w: expected a tensor, got NoneType"),
    ({"scale": -1.0}, r"scale: expected a positive finite number"),
    ({"prune": Prune(), "log_decay": None}, r"prune: expected a log_decay"),
    ({"prune": 1e-3}, r"prune: expected attnzoo.Prune"),
    ({"impl": "tritn"}, r"impl: expected one of auto, .*got 'tritn'; did you mean 'triton'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:22] for _, m in BAD])
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {n: torch.zeros(1, 4, 2, 16) for n in "qkv"}
    args |= {"w": UNIT, "beta": torch.ones(1, 4, 2), "log_decay": torch.zeros(1, 4, 2)} | change
    with pytest.raises((ValueError, TypeError), match=message):
        path_attention(**args)


def test_an_idle_factor_needs_no_direction() -> None:
    x = torch.randn(1, 4, 2, 16)
    path_attention(x, x, x, w=torch.zeros_like(x), beta=torch.zeros(1, 4, 2))


@pytest.mark.parametrize("prune", [None, Prune()])
def test_transforms_of_functions_take_the_reference(prune: Prune | None) -> None:
    """``torch.func`` has no way into a kernel: an explicit choice says so, ``auto`` takes what can be transformed."""
    x = inputs(Case(T=9, gate="open"), torch.float32)

    def loss(q: torch.Tensor, impl: Any) -> torch.Tensor:
        parts = {name: x[name] for name in ("k", "v", "w", "beta", "log_decay")}
        return path_attention(q, **parts, prune=prune, impl=impl).square().sum()

    assert_only_auto_is_transformed(loss, x["q"])


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 4, 2, 16, device=DEVICE)
    beta = torch.full((1, 4, 2), 3.0, device=DEVICE)
    path_attention(x, x, x, w=UNIT.to(DEVICE), beta=beta)
    monkeypatch.setenv("ATTNZOO_VALIDATE", "1")
    with pytest.raises(ValueError, match="beta: expected values"):
        path_attention(x, x, x, w=UNIT.to(DEVICE), beta=beta)


def test_a_compiled_graph_may_ask_for_the_machine() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * machine(x.device).triton[0]

    x = torch.ones(2)
    assert torch.equal(torch.compile(scaled, fullgraph=True, backend="eager")(x), scaled(x))


@pytest.mark.gpu
def test_compiles_with_inductor() -> None:
    compiled = torch.compile(PRUNED, fullgraph=True, dynamic=True)
    for T in (300, 700):
        x = inputs(Case(T=T, K=64, V=64, gate="open"), torch.bfloat16)
        if T == 700:
            x = turned(x)
        torch.testing.assert_close(results(compiled, x), results(PRUNED, x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "release", "fits"),
    [
        (torch.bfloat16, 128, (8, 0), (3, 3), True),
        (torch.float32, 128, (9, 0), (3, 7), True),
        (torch.float32, 128, (8, 0), (3, 7), True),  # its block kernels need 160 KiB
        (torch.float32, 128, (8, 0), (3, 9), False),
        (torch.float32, 128, (8, 6), (3, 7), False),
        (torch.float32, 64, (8, 6), (3, 3), True),
        (torch.float32, 64, (12, 0), (3, 8), False),  # its block kernels need 112 KiB
        (torch.float32, 64, (8, 0), (3, 8), True),
        (torch.float32, 64, (12, 0), (3, 9), True),
        (torch.bfloat16, 64, (12, 0), (3, 8), True),
        (torch.float16, 128, (8, 9), (3, 7), True),
        (torch.float16, 128, (8, 9), (3, 5), False),
        (torch.bfloat16, 128, (8, 6), (3, 8), False),  # its block kernels need 104 KiB
        (torch.bfloat16, 128, (12, 0), (3, 6), True),
    ],
    ids=str,
)
def test_gpus_with_too_little_shared_memory_are_refused(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], release: tuple[int, int], fits: bool
) -> None:
    why = too_small(dtype, head_dim, Machine(capability, release))
    assert (why == "") == fits
    assert fits or "KiB of shared memory" in why
