"""Views of other memory, and no tokens at all: forms and kernels give what they give for tensors of their own."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo.forms.backends.sdpa
import attnzoo.layer.dispatch
from attnzoo import Gate, build_attention, get, list_variants
from attnzoo.errors import UnavailableError
from attnzoo.forgetting.rules import Forgetting
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig
from attnzoo.samples import random_inputs
from attnzoo.testing import CPU_FORMS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [name for name in list_variants("softmax") if "triton" in get(name).forms]
PEERS = ["gla", "gated_deltanet", "mamba2"]  # one of each kernel of flash-linear-attention
REFUSED = (UnavailableError, ValueError)
Inputs = tuple[Tensor, Tensor, Tensor, Gate]


def _with_gaps(x: Tensor) -> Tensor:
    """The batch innermost, and a gap behind each of its rows."""
    B, *rest = x.shape
    strides, step = [], B + 1
    for n in reversed(rest):
        strides.append(step)
        step *= n
    buffer = x.new_full((step,), torch.nan)
    return buffer.as_strided(x.shape, (1, *reversed(strides))).copy_(x)


# each gives a view [B, T, heads, ...] of memory that holds NaN wherever the view is not
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of the last axis": lambda x: F.pad(x, (3, 2), value=torch.nan)[..., 3:-2],
    "one head for all": lambda x: x[:, :, :1].expand(x.shape),
    "every other token": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1, 2)[:, ::2],
    "with gaps": _with_gaps,
    "begins later": lambda x: torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape),
}


def inputs_of(name: str, T: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """Inputs whose gate is in float32 beside a ``dtype`` below that."""
    q, k, v, gate = random_inputs(name, 2, T, *sizes, dtype=torch.promote_types(dtype, torch.float32), regime="open")
    return *(x.to(DEVICE, dtype) for x in (q, k, v)), gate.map(lambda part: part.to(DEVICE))  # type: ignore[return-value]


def found(form: Callable[..., Tensor], inputs: Inputs, grad: Tensor | None) -> dict[str, Tensor]:
    """The output, and where ``grad`` is its gradient those of all inputs, whose strides stay as they are."""
    q, k, v, gate = inputs
    leaves = {"q": q, "k": k, "v": v, **{part: getattr(gate, part) for part in gate.parts}}
    if grad is None:
        with torch.no_grad():
            return {"o": form(q, k, v, gate)}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    parts = dict(leaves)
    o = form(*(parts.pop(name) for name in ("q", "k", "v")), Gate(**parts))
    grads = torch.autograd.grad(o, list(leaves.values()), grad)
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_as_exact(
    name: str, got: dict[str, Tensor], own: dict[str, Tensor], inputs: Inputs, grad: Tensor | None
) -> None:
    """At most twice the error of what tensors of their own give, plus some roundings, against float64."""
    band = 8 * torch.finfo(got["o"].dtype).eps
    q, k, v = (x.double() for x in inputs[:3])
    form = whole(name, "parallel") if inputs[3].parts == get(name).requires else delta_rule(name, "parallel")
    exact = found(form, (q, k, v, inputs[3].map(Tensor.double)), None if grad is None else grad.double())
    for label, x in got.items():
        want = exact[label]
        error, usual = ((y.double() - want).norm() / want.norm().clamp(min=1e-3) for y in (x, own[label]))
        assert error <= 2 * usual + band, f"{label}: error {error:.1e}, of tensors of their own {usual:.1e}"


def assert_views_are_read_right(
    name: str, form: Callable[..., Tensor], inputs: Inputs, gradients: bool = True, turns: Sequence[int] = (0, 3)
) -> None:
    """Every tensor has another layout, and with each of ``turns`` the one that lies so much further in their list."""
    q, k, v, gate = inputs
    cotangent = torch.cos(torch.arange(q[..., 0].numel() * v.shape[3])).to(v).view(*q.shape[:3], v.shape[3])
    for turn in turns:
        layouts = itertools.islice(itertools.cycle(LAYOUTS.values()), turn, None)
        views = [next(layouts)(x) for x in (q, k, v)]
        parts, grad = gate.map(lambda x: next(layouts)(x)), next(layouts)(cotangent)  # noqa: B023  called at once
        up = grad.contiguous() if gradients else None
        own = *(x.contiguous() for x in views), parts.map(Tensor.contiguous)
        got = found(form, (*views, parts), grad if gradients else None)  # type: ignore[arg-type]
        assert_as_exact(name, got, found(form, own, up), own, up)  # type: ignore[arg-type]


def whole(name: str, form: str) -> Callable[..., Tensor]:
    return get(name).forms[form]


def delta_rule(name: str, form: str) -> Callable[..., Tensor]:
    """The form of a variant with w, of inputs whose gate has none: it erases along the key it writes."""

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        return whole(name, form)(q, k, v, replace(gate, w=k), delta_rule=True)

    return run


def of_delta_rule(inputs: Inputs) -> Inputs:
    """Inputs of :func:`delta_rule`, whose keys are unit vectors."""
    q, _, v, gate = inputs
    return q, gate.w.to(q.dtype), v, replace(gate, w=None)  # type: ignore[union-attr]


def last_tokens(name: str, before: int, form: str) -> Callable[..., Tensor]:
    """The tokens from ``before`` on, one by one after a cache of those before."""

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
        def piece(a: int, b: int) -> Any:
            return [x[:, a:b] for x in (q, k, v)], gate.slice(a, b)

        tokens, part = piece(0, before)
        first = form if get(name).side == "softmax" else "reference"
        o, state = get(name).extend(*tokens, part, None, form=first)
        outputs = [o]
        for t in range(before, q.shape[1]):
            tokens, part = piece(t, t + 1)
            o, state = get(name).extend(*tokens, part, state, form=form)
            outputs.append(o)
        return torch.cat(outputs, 1)

    return run


@pytest.mark.parametrize("name", list_variants())
def test_references_read_views_right(name: str) -> None:
    for form in (form for form in get(name).forms if form in CPU_FORMS):
        assert_views_are_read_right(name, whole(name, form), inputs_of(name, 9, (2, 2, 4, 6), torch.float64))


@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
def test_the_delta_rule_of_the_references_reads_views_right(name: str) -> None:
    inputs = of_delta_rule(inputs_of(name, 9, (2, 2, 4, 6), torch.float64))
    for form in ("chunk", "recurrent"):
        assert_views_are_read_right(name, delta_rule(name, form), inputs)


@pytest.mark.skipif(DEVICE != "cpu", reason="of a CPU")
@pytest.mark.parametrize("name", ["nope", "fox", "path"])
def test_row_blocks_read_views_right(name: str) -> None:
    """Past the length from which the forms take blocks of rows, on PyTorch's fused kernel where they can."""
    assert_views_are_read_right(name, whole(name, "parallel"), inputs_of(name, 300, (2, 2, 4, 6), torch.float32))


@pytest.mark.skipif(DEVICE != "cpu", reason="of a CPU")
@pytest.mark.parametrize("T", [40, 300])
@pytest.mark.parametrize("name", ["nope", "fox"])
def test_channels_of_one_sequence_may_lie_apart(name: str, T: int) -> None:
    """Of as many channels as PyTorch's fused CPU kernel takes, which nothing copies on the way to it."""
    apart = (
        lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2],
        lambda x: x.mT.contiguous().mT,
    )
    for V, view in itertools.product((8, 16), apart):
        own = random_inputs(name, 1, T, 2, 2, 8, V, dtype=torch.float32, regime="open")
        views = *(view(x) for x in own[:3]), own[3]
        for grad in (None, torch.ones(1, T, 2, V)):
            torch.testing.assert_close(
                found(whole(name, "parallel"), views, grad), found(whole(name, "parallel"), own, grad)
            )


@pytest.mark.parametrize("name", ["fox", "rope", "wall", "path", "gated_deltanet"])
def test_kernels_in_the_interpreter_read_views_right(name: str) -> None:
    pytest.importorskip("triton")
    inputs, linear = inputs_of(name, 3, (2, 2, 16, 16), torch.float32), get(name).side == "linear"
    assert_views_are_read_right(name, whole(name, "triton"), inputs, gradients=not linear, turns=[0])
    assert_views_are_read_right(name, last_tokens(name, 2, "triton"), inputs, gradients=False, turns=[3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_on_a_gpu_read_views_right(name: str) -> None:
    inputs = inputs_of(name, 200, (2, 2, 64, 64), torch.bfloat16)
    assert_views_are_read_right(name, whole(name, "triton"), inputs, turns=range(6))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in list_variants() if "triton" in get(name).forms])
def test_steps_on_a_gpu_read_views_right(name: str) -> None:
    inputs = inputs_of(name, 71, (2, 2, 64, 64), torch.bfloat16)
    assert_views_are_read_right(name, last_tokens(name, 68, "triton"), inputs, gradients=False, turns=range(6))


@pytest.mark.gpu
@pytest.mark.fla
@pytest.mark.parametrize("name", PEERS)
def test_the_peers_kernels_on_a_gpu_read_views_right(name: str) -> None:
    inputs, form = inputs_of(name, 128, (2, 2, 64, 64), torch.bfloat16), whole(name, "fla")
    if "w" in get(name).requires:
        inputs, form = of_delta_rule(inputs), delta_rule(name, "fla")
    assert_views_are_read_right(name, form, inputs)


def assert_empty_sequences_are_nothing(name: str, form: str, inputs: Inputs) -> None:
    """Packed with sequences of no token at the start, between and at the end: as without them, gradients too."""
    q, k, v, gate = *(x[:1] for x in inputs[:3]), inputs[3].map(lambda part: part[:1])
    T, H, V = *q.shape[1:3], v.shape[3]
    grad = torch.cos(torch.arange(T * H * V)).to(v).view(1, T, H, V)
    results = []
    for borders in ([0, 0, T - 3, T - 3, T - 3, T, T], [0, T - 3, T]):
        packed = partial(whole(name, form), cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=DEVICE))
        results.append(found(packed, (q, k, v, gate), grad))
    for label, x in results[0].items():
        torch.testing.assert_close(x, results[1][label], msg=label)


@pytest.mark.parametrize("name", list_variants())
def test_empty_sequences_are_nothing_to_the_references(name: str) -> None:
    form = "parallel" if get(name).side == "softmax" else "chunk"
    assert_empty_sequences_are_nothing(name, form, inputs_of(name, 9, (2, 1, 4, 6), torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_empty_sequences_are_nothing_to_the_kernels_on_a_gpu(name: str) -> None:
    assert_empty_sequences_are_nothing(name, "triton", inputs_of(name, 150, (2, 1, 64, 64), torch.bfloat16))


def assert_an_empty_batch_goes_through(attn: torch.nn.Module) -> None:
    x = torch.zeros(0, 70, 32, device=DEVICE, dtype=attn.o_proj.weight.dtype, requires_grad=True)  # type: ignore[union-attr]
    y = attn(x)
    assert y.shape == x.shape
    grads = torch.autograd.grad(y.sum(), [x, *attn.parameters()])
    assert all(not g.any() for g in grads)
    with torch.no_grad():
        cache = attn.new_cache()  # type: ignore[operator]
        assert [attn(part, cache=cache).shape[1] for part in x.split([68, 1, 1], 1)] == [68, 1, 1]


@pytest.mark.parametrize("name", list_variants())
def test_an_empty_batch_goes_through_a_layer(name: str) -> None:
    assert_an_empty_batch_goes_through(build_attention(name, hidden_size=32, num_heads=2).to(DEVICE))


@pytest.mark.parametrize("options", [{"training_groups": 4}, {"forgetting": Forgetting(window=2, width=4)}], ids=str)
def test_an_empty_batch_goes_through_shifted_groups_and_through_what_forgets(options: dict[str, Any]) -> None:
    assert_an_empty_batch_goes_through(build_attention("fox", hidden_size=32, num_heads=2, **options).to(DEVICE))


@torch.no_grad()
@pytest.mark.parametrize("budget", [None, 3, "1 KiB", "1 KiB total"])
def test_an_empty_batch_goes_through_a_cache_with_a_budget(budget: int | str | None) -> None:
    options = {"forgetting": {"window": 2, "width": 4}}
    config = ModelConfig(attention="fox", attention_options=options, hidden_size=16, num_layers=2, num_heads=2)
    model = LanguageModel(config).eval()
    cache = model.new_cache(budget=budget)
    assert [model.hidden(torch.zeros(0, T, dtype=torch.long), cache=cache).shape[1] for T in (5, 1)] == [5, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", list_variants())
def test_an_empty_batch_goes_through_a_layer_on_a_gpu_in_bfloat16(name: str) -> None:
    assert_an_empty_batch_goes_through(
        build_attention(name, hidden_size=32, num_heads=2, head_dim=64).cuda().bfloat16()
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="of a CPU")
@pytest.mark.parametrize("name", ["nope", "fox", "rope"])
def test_auto_does_not_give_an_empty_batch_to_pytorchs_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which on a GPU returns no tensor for it."""
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: True)
    monkeypatch.setattr(attnzoo.forms.backends.sdpa, "attend_augmented", lambda *given: None)
    assert_an_empty_batch_goes_through(build_attention(name, hidden_size=32, num_heads=2, head_dim=16))
    attn = build_attention(name, hidden_size=32, num_heads=2, impl="sdpa")
    with pytest.raises(UnavailableError, match="impl='sdpa': expected at least one sequence, got shape"):
        attn(torch.zeros(0, 7, 32))


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("name", ["fox", "path", "wall", "rope", "mamba2"])
def test_a_kernel_refuses_an_empty_batch_by_name(name: str) -> None:
    q, k, v, gate = inputs_of(name, 5, (2, 2, 16, 16), torch.float32)
    with torch.no_grad(), pytest.raises(REFUSED, match=r"expected at least one sequence, got shape \(0, 5, 2, 16\)"):
        whole(name, "triton")(*(x[:0] for x in (q, k, v)), gate.map(lambda part: part[:0]))
