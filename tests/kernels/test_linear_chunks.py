"""The chunk kernels of a scalar decay: values, states and all gradients against float64."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from named_ops import FAKES, opcheck
from part_cases import ALSO_ON_A_GPU, DEVICE
from torch import Tensor

from attnzoo import Gate, get
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.options import LinearOptions
from attnzoo.kernels.linear import linear_chunks
from attnzoo.testing import relative_error

pytestmark = ALSO_ON_A_GPU
CLOSE = 1e-5  # float32


class Shape(NamedTuple):
    """Sizes of a call; ``gate``: "token", "head", "none"; ``closed``: tokens whose gates are -inf."""

    B: int
    T: int
    H: int
    G: int
    K: int
    V: int
    gate: str = "token"
    closed: tuple[int, ...] = ()


SHAPES = [
    Shape(2, 70, 4, 2, 16, 24),
    Shape(1, 1, 2, 1, 5, 3),
    Shape(1, 130, 2, 2, 20, 70, closed=(0, 1, 63, 64, 100, 129)),
    Shape(2, 65, 2, 2, 72, 16, "head"),
    Shape(1, 128, 2, 1, 16, 16, "none"),
]


def inputs_of(shape: Shape, open_by: float = 0.2) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """q, k, v, gate and state in float32."""
    B, T, H, G, K, V, gate, closed = shape
    torch.manual_seed(T)
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, G, K), torch.randn(B, T, G, V)
    g = None if gate == "none" else -open_by * torch.rand(*((H,) if gate == "head" else (B, T, H)))
    for t in closed:
        g[:, t, t % H :] = -torch.inf  # type: ignore[index]
    return *(x.to(DEVICE) if x is not None else x for x in (q, k, v, g)), torch.randn(B, H, K, V, device=DEVICE)  # type: ignore[return-value]


def exactly(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    o, last = get("mamba2").form_set._recur(  # type: ignore[attr-defined]
        q, k, v, Gate(log_decay=g), q.dtype, q.shape[-1] ** -0.5, state
    )
    return o, last


def differentiated(function, leaves, do, dlast) -> dict[str, Tensor]:
    given = [None if x is None else x.detach().clone().requires_grad_() for x in leaves]
    o, last = function(*given)
    loss = (o * do).sum() if dlast is None else (o * do).sum() + (last * dlast).sum()
    found = torch.autograd.grad(loss, [x for x in given if x is not None])
    names = [name for name, x in zip(("q", "k", "v", "g", "state"), given, strict=True) if x is not None]
    return {"o": o, **({} if dlast is None else {"last": last}), **dict(zip(names, found, strict=True))}


def off(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == expected.keys()
    errors = {name: relative_error(got[name], x.to(got[name].device)) for name, x in expected.items()}
    return {name: error for name, error in errors.items() if not error <= CLOSE}


def test_a_gate_that_leaves_nothing_costs_later_tokens_no_digits() -> None:
    """A sum that it stays in would be rounded to 1/1024 from there on."""
    q, k, v, g, state = inputs_of(Shape(1, 40, 1, 1, 16, 16))
    g[:, [1, 20]] = torch.tensor([-9999.0, -105.0], device=DEVICE)[:, None]  # type: ignore[index]
    leaves, do, dlast = (q, k, v, g, state), torch.randn_like(v), torch.randn_like(state)
    wide = [None if x is None else x.double() for x in leaves]
    expected = differentiated(exactly, wide, do.double(), dlast.double())
    assert off(differentiated(lambda *x: linear_chunks(*x, keeps_state=True), leaves, do, dlast), expected) == {}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s[:7])))
def test_values_states_and_gradients_are_those_of_the_recurrence(shape: Shape) -> None:
    leaves = inputs_of(shape)
    B, T, H, _, K, V, *_ = shape
    do, dlast = torch.randn(B, T, H, V, device=DEVICE), torch.randn(B, H, K, V, device=DEVICE)
    wide = [None if x is None else x.double() for x in leaves]
    expected = differentiated(exactly, wide, do.double(), dlast.double())
    got = differentiated(lambda *x: linear_chunks(*x, keeps_state=True), leaves, do, dlast)
    assert off(got, expected) == {}
    if shape.closed:
        closed = leaves[3] == -torch.inf  # type: ignore[operator]
        assert bool((got["g"][closed] == 0).all())


def test_pieces_equal_the_whole_with_gradients_through_the_states() -> None:
    q, k, v, g, state = inputs_of(Shape(1, 150, 2, 1, 16, 20, closed=(0, 70)))
    do, dlast = torch.randn(1, 150, 2, 20, device=DEVICE), torch.randn(1, 2, 16, 20, device=DEVICE)

    def in_pieces(q, k, v, g, state):
        outputs = []
        for start, stop in itertools.pairwise([0, 64, 65, 150]):
            now = slice(start, stop)
            o, state = linear_chunks(q[:, now], k[:, now], v[:, now], g[:, now], state, keeps_state=True)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    whole = differentiated(lambda *x: linear_chunks(*x, keeps_state=True), (q, k, v, g, state), do, dlast)
    assert off(differentiated(in_pieces, (q, k, v, g, state), do, dlast), whole) == {}


@pytest.mark.parametrize("gate", ["token", "none"])
def test_packed_sequences_equal_the_sequences_apart(gate: str) -> None:
    """Among them empty ones, ones within a chunk, and ones that begin and end at chunks' borders."""
    borders = [0, 3, 3, 40, 64, 128, 200, 200]
    q, k, v, g, _ = inputs_of(Shape(1, 200, 2, 1, 16, 16, gate))
    do = torch.randn(1, 200, 2, 16, device=DEVICE)

    def apart(q, k, v, g, state):
        rows = [slice(a, b) for a, b in itertools.pairwise(borders) if a < b]
        parts = [(q[:, r], k[:, r], v[:, r], None if g is None else g[:, r]) for r in rows]
        return torch.cat([linear_chunks(*x)[0] for x in parts], 1), None

    cu_seqlens = torch.tensor(borders, device=DEVICE)
    packed = differentiated(lambda *x: linear_chunks(*x, cu_seqlens=cu_seqlens), (q, k, v, g, None), do, None)
    expected = differentiated(apart, (q, k, v, g, None), do, None)
    if g is not None:  # nothing comes before a sequence
        expected["g"][:, [b for b in borders if b < 200]] = 0
    assert off(packed, expected) == {}


def test_strided_inputs_and_one_head_for_all() -> None:
    q, k, v, g, _ = inputs_of(Shape(2, 66, 3, 3, 16, 16))
    laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g)]
    assert torch.equal(linear_chunks(*laid)[0], linear_chunks(q, k, v, g)[0])
    leaves = (q[:, :, :1], k[:, :, :1], v, g, None)
    found = [
        differentiated(lambda *x, lay=lay: linear_chunks(lay(x[0]), lay(x[1]), *x[2:]), leaves, v, None)
        for lay in (lambda x: x.expand(-1, -1, 3, -1), lambda x: x.expand(-1, -1, 3, -1).contiguous())
    ]
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_the_form_trains_prefills_and_steps() -> None:
    """Padding and write strengths are those of the reference; a prefill of many tokens goes on in few."""
    variant = get("mamba2")
    q, k, v, g, _ = inputs_of(Shape(2, 100, 4, 2, 16, 12))
    gate, valid = Gate(log_decay=g), torch.rand(2, 100, device=DEVICE) > 0.3
    write = torch.rand(2, 100, 4, device=DEVICE)
    k = k.masked_fill(~valid[:, :, None, None], torch.nan)
    here = valid[..., None, None]
    got, expected = (variant.forms[form](q, k, v, gate, valid=valid, write=write) for form in ("triton", "chunk"))
    assert relative_error(got * here, expected * here) <= CLOSE
    outputs, state = [], None
    for start, stop in itertools.pairwise([0, 80, 81, 100]):
        now = slice(start, stop)
        o, state = variant.extend(
            q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, form="triton", valid=valid[:, now],
            write=write[:, now],
        )  # fmt: skip
        outputs.append(o)
    assert isinstance(state, RecurrentState)
    assert len(state) == 100
    assert relative_error(torch.cat(outputs, 1) * here, expected * here) <= CLOSE


def test_a_compiled_call_is_one_graph() -> None:
    """Of packed sequences with int32 borders, forward and backward."""
    forms, cu_seqlens = get("retnet").form_set, torch.tensor([0, 9, 70], device=DEVICE, dtype=torch.int32)
    q, k, v, g, _ = inputs_of(Shape(1, 70, 2, 1, 16, 16, "head"))

    def run(*given: Tensor) -> tuple[Tensor, None]:
        *qkv, decay, _ = given
        options = LinearOptions(cu_seqlens=cu_seqlens)
        return forms.whole("triton", *qkv, Gate(log_decay=decay), options), None  # type: ignore[attr-defined]

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    do = torch.randn(1, 70, 2, 16, device=DEVICE)
    expected = differentiated(run, (q, k, v, g, None), do, None)
    assert off(differentiated(compiled, (q, k, v, g, None), do, None), expected) == {}


def test_the_ops_are_ops_of_torch() -> None:
    from attnzoo.kernels.linear.chunk_op import ChunkInputs, chunk_forward_op

    q, k, v, g, state = inputs_of(Shape(1, 70, 2, 1, 16, 16))
    leaves = [x.requires_grad_() for x in (q, k, v, g, state)]
    opcheck(chunk_forward_op, ChunkInputs(*leaves, None, 0.25, True), (*FAKES, "test_autograd_registration"))
    cu_seqlens = torch.tensor([0, 9, 70], device=DEVICE)
    opcheck(chunk_forward_op, ChunkInputs(*leaves[:3], None, None, cu_seqlens, 0.25, False), FAKES)


def test_what_the_kernels_do_not_serve_is_said() -> None:
    q, k, v, g, state = inputs_of(Shape(1, 4, 2, 1, 16, 12))
    with pytest.raises(ValueError, match=r"state: expected torch.float32 \(1, 2, 16, 12\), got .*\(1, 2, 12, 16\)"):
        linear_chunks(q, k, v, g, state.mT.contiguous())
    with pytest.raises(ValueError, match="cu_seqlens: expected None with a state"):
        linear_chunks(q, k, v, g, state, cu_seqlens=torch.tensor([0, 4], device=DEVICE))
    with pytest.raises(ValueError, match=r"k: expected as many tokens as q \(T=3\)"):
        linear_chunks(q[:, :3], k, v, g)
    wide = torch.zeros(1, 4, 2, 320, device=DEVICE)
    with pytest.raises(ValueError, match="expected K a multiple of 1 up to 256, got 320"):
        linear_chunks(wide, wide, wide)
    o, _ = linear_chunks(q.requires_grad_(), k, v, g)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(dq.sum(), q)
