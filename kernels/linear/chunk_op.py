"""The linear readout of a scalar decay by chunks as two custom ops (forward, backward)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.launching import addressable, cdiv
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.linear.chunk_backward import chunk_gradients
from attnzoo.kernels.linear.chunks import CHUNK, Chunked, ChunkGates, chunk_gates, chunk_outputs, chunk_states

Some = Tensor | None


class ChunkInputs(NamedTuple):
    """Inputs of the forward op, as :func:`attnzoo.kernels.linear.linear_chunks` takes them; gates are those of each
    token."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Some
    state: Some
    cu_seqlens: Some
    scale: float
    keeps_state: bool
    eps: float = 0.0


class ChunkOutputs(NamedTuple):
    """o [B, T, H, V], the state after the last token, and the sums of gates (``chunks.ChunkGates``)."""

    o: Tensor
    last: Some
    c: Some
    since: Some


class ChunkBackward(NamedTuple):
    do: Tensor
    dlast: Some
    given: ChunkInputs
    c: Some
    since: Some
    of_gate: bool
    of_state: bool


class ChunkGradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Some
    state: Some


def _chunked(x: ChunkInputs, c: Some, since: Some) -> Chunked:
    q, k, v = (addressable(y) for y in x[:3])
    return Chunked(q, k, v, None if c is None or since is None else ChunkGates(c, since), x.cu_seqlens, x.scale, x.eps)


def _gates(x: ChunkInputs) -> Some:
    """The gates [B, T, H]: 0 where only the begins of packed sequences close."""
    if x.log_decay is None and x.cu_seqlens is not None:
        return x.q.new_zeros((), dtype=torch.float32).expand(x.q.shape[:3])
    return x.log_decay


def _forward(x: ChunkInputs) -> ChunkOutputs:
    (B, _, H, K), V = x.q.shape, x.v.shape[3]
    with on_device_of(x.q):
        g = _gates(x)
        c, since = (None, None) if g is None else chunk_gates(g, x.cu_seqlens)
        last = x.q.new_empty((B, H, K, V), dtype=torch.float32) if x.keeps_state else None
        given = _chunked(x, c, since)
        h, _ = chunk_states(given, None if x.state is None else x.state.contiguous(), last)
        return ChunkOutputs(chunk_outputs(given, h), last, c, since)


def _forward_fake(x: ChunkInputs) -> ChunkOutputs:
    (B, T, H, K), V = x.q.shape, x.v.shape[3]
    last = x.q.new_empty((B, H, K, V), dtype=torch.float32) if x.keeps_state else None
    c = since = None
    if _gates(x) is not None:
        c = x.q.new_empty((B, H, cdiv(T, CHUNK) * CHUNK), dtype=torch.float32)
        since = torch.empty_like(c, dtype=torch.int32)
    return ChunkOutputs(x.v.new_empty((B, T, H, V)), last, c, since)


def _backward(x: ChunkBackward) -> ChunkGradients:
    given, (k, v) = _chunked(x.given, x.c, x.since), x.given[1:3]
    do, state = addressable(x.do), x.given.state
    with on_device_of(k):
        dstate = state.new_empty(state.shape) if state is not None and x.of_state else None
        first, dlast = (None if y is None else y.contiguous() for y in (state, x.dlast))
        h, dh = chunk_states(given, first, None, do, dlast, dstate)
        dq, dk, dv, dg = chunk_gradients(given, do, h, dh, x.of_gate)
        return ChunkGradients(dq, _summed(dk, k), _summed(dv, v), dg if x.of_gate else None, dstate)


def _summed(each: Tensor, of: Tensor) -> Tensor:
    """The gradient of keys or values from those of each query head."""
    G = of.shape[2]
    return each if each.shape[2] == G else each.unflatten(2, (G, -1)).sum(3)


def _backward_fake(x: ChunkBackward) -> ChunkGradients:
    q, k, v, g, state, *_ = x.given
    dq, dk, dv = (y.new_empty(y.shape) for y in (q, k, v))
    dg = None if g is None or not x.of_gate else g.new_empty(g.shape)
    return ChunkGradients(dq, dk, dv, dg, None if state is None or not x.of_state else state.new_empty(state.shape))


chunk_forward_op = NamedOp(
    "attnzoo::linear_chunks_forward", ChunkInputs, ChunkOutputs, _forward, _forward_fake, replays=True, together=True
)
chunk_backward_op = NamedOp(
    "attnzoo::linear_chunks_backward", ChunkBackward, ChunkGradients, _backward, _backward_fake, replays=True
)


def _gradients(x: ChunkInputs, made: ChunkOutputs, grads: ChunkOutputs, wanted: set[str]) -> dict[str, Some]:
    if grads.o is None and grads.last is None:
        return {}
    do = torch.zeros(x.q.shape[:3] + x.v.shape[3:], dtype=x.v.dtype, device=x.v.device) if grads.o is None else grads.o
    of_gate, of_state = "log_decay" in wanted, "state" in wanted
    found = chunk_backward_op(ChunkBackward(do, grads.last, x, made.c, made.since, of_gate, of_state))
    return {name: grad for name, grad in found._asdict().items() if name in wanted}


chunk_forward_op.differentiable(
    _gradients, inputs=("q", "k", "v", "log_decay", "state", "cu_seqlens"), outputs=("c", "since")
)
chunk_backward_op.refuse_second_derivatives()
