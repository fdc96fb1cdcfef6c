"""The kernels of log decays: a program has BT tokens of BX logits, in the backward several such tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.activations import log_sigmoid
from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import addressable, cdiv, power_of_2
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.partial_sums import partial_sums, program_shares
from attnzoo.kernels.linear.parts import DecayLogits

Some = Tensor | None


@triton.jit
def _logits(p_x, p_bias, o_r, o_x, m_rx, m_x, T, stride_b, stride_t, BIAS: tl.constexpr, OPPOSITE: tl.constexpr):
    """With their bias; less them where they are OPPOSITE. # [BT, BX] float32"""
    o_t = (o_r // T).to(tl.int64) * stride_b + (o_r % T).to(tl.int64) * stride_t
    b_x = tl.load(p_x + o_t[:, None] + o_x[None, :], mask=m_rx, other=0.0).to(tl.float32)
    if BIAS:
        b_x += tl.load(p_bias + o_x, mask=m_x, other=0.0).to(tl.float32)[None, :]
    return -b_x if OPPOSITE else b_x


@launched
@triton.jit(do_not_specialize=["T", "ROWS"])
def log_decays_kernel(
    p_x, p_bias, p_a, p_g, p_step, T, ROWS, stride_b, stride_t, factor, X: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, A: tl.constexpr, OPPOSITE: tl.constexpr, STEP: tl.constexpr, BT: tl.constexpr,
    BX: tl.constexpr,
):  # fmt: skip
    """K: logits of each head."""
    o_r = tl.program_id(0) * BT + tl.arange(0, BT)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    m_x = o_x < X
    m_rx = (o_r < ROWS)[:, None] & m_x[None, :]
    b_log = log_sigmoid(_logits(p_x, p_bias, o_r, o_x, m_rx, m_x, T, stride_b, stride_t, BIAS, OPPOSITE))
    o_out = o_r[:, None].to(tl.int64) * X + o_x[None, :]
    if STEP:
        tl.store(p_step + o_out, -b_log, mask=m_rx)
    b_factor = tl.zeros([BX], tl.float32) + factor
    if A:
        b_factor *= tl.exp(tl.load(p_a + o_x // K, mask=m_x, other=0.0).to(tl.float32))
    tl.store(p_g + o_out, b_log * b_factor[None, :], mask=m_rx)


@launched
@triton.jit(do_not_specialize=["T", "ROWS", "TILES"])
def log_decays_bwd_kernel(
    p_x, p_bias, p_a, p_dg, p_dstep, p_dx, p_dbias, p_da, T, ROWS, TILES, stride_b, stride_t, factor, X: tl.constexpr,
    K: tl.constexpr, BIAS: tl.constexpr, A: tl.constexpr, OPPOSITE: tl.constexpr, DECAY: tl.constexpr,
    STEP: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits, and a share of those of bias and log_a, per logit; DECAY, STEP: whose are given."""
    i_p = tl.program_id(0)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    m_x = o_x < X
    b_factor = tl.zeros([BX], tl.float32) + factor
    if A:
        b_factor *= tl.exp(tl.load(p_a + o_x // K, mask=m_x, other=0.0).to(tl.float32))
    b_dbias = tl.zeros([BT, BX], tl.float32)
    b_da = tl.zeros([BT, BX], tl.float32)
    for i in range(TILES):
        o_r = (i_p * TILES + i) * BT + tl.arange(0, BT)
        m_rx = (o_r < ROWS)[:, None] & m_x[None, :]
        o_out = o_r[:, None].to(tl.int64) * X + o_x[None, :]
        b_x = _logits(p_x, p_bias, o_r, o_x, m_rx, m_x, T, stride_b, stride_t, BIAS, OPPOSITE)
        b_dlog = tl.zeros([BT, BX], tl.float32)
        if DECAY:
            b_dlog = tl.load(p_dg + o_out, mask=m_rx, other=0.0) * b_factor[None, :]
            if A:
                b_da += b_dlog * log_sigmoid(b_x)
        if STEP:
            b_dlog -= tl.load(p_dstep + o_out, mask=m_rx, other=0.0)
        b_dx = b_dlog * tl.sigmoid(-b_x)
        b_dx = -b_dx if OPPOSITE else b_dx
        tl.store(p_dx + o_out, b_dx.to(p_dx.dtype.element_ty), mask=m_rx)
        b_dbias += b_dx
    o_share = i_p.to(tl.int64) * X + o_x
    if BIAS:
        tl.store(p_dbias + o_share, tl.sum(b_dbias, 0), mask=m_x)
    if A:
        tl.store(p_da + o_share, tl.sum(b_da, 0), mask=m_x)


class DecayInputs(NamedTuple):
    """Inputs of the forward op, which :func:`attnzoo.kernels.linear.log_decays` explains."""

    of: DecayLogits
    steps: bool


class DecayOutputs(NamedTuple):
    decay: Tensor
    step: Some


class DecayBackward(NamedTuple):
    of: DecayLogits
    ddecay: Some
    dstep: Some


class DecayGradients(NamedTuple):
    logits: Tensor
    bias: Some
    log_a: Some


def _tile(of: DecayLogits) -> tuple[int, int, int, int]:
    """Logits of a token and of a head, and the tile."""
    X = of.logits.shape[2]
    BX = min(64, max(16, power_of_2(X)))
    return X, 1 if of.log_a is None else X // len(of.log_a), 1024 // BX, BX


def _given(of: DecayLogits) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, bias and log_a as kernels read them."""
    x = addressable(of.logits)
    return x, *(x if one is None else one.contiguous() for one in (of.bias, of.log_a))  # type: ignore[return-value]


def _forward(x: DecayInputs) -> DecayOutputs:
    of, (B, T, _) = x.of, x.of.logits.shape
    X, K, BT, BX = _tile(of)
    g = torch.empty(of.logits.shape, dtype=torch.float32, device=of.logits.device)
    step = torch.empty_like(g) if x.steps else None
    logits, bias, a = _given(of)
    with on_device_of(logits):
        log_decays_kernel[(cdiv(B * T, BT), cdiv(X, BX))](
            logits, bias, a, g, g if step is None else step, T, B * T, *logits.stride()[:2], float(of.factor), X, K,
            of.bias is not None, of.log_a is not None, of.opposite, x.steps, BT, BX, num_warps=4,
        )  # fmt: skip
    return DecayOutputs(g, step)


def _forward_fake(x: DecayInputs) -> DecayOutputs:
    g = x.of.logits.new_empty(x.of.logits.shape, dtype=torch.float32)
    return DecayOutputs(g, g.new_empty(g.shape) if x.steps else None)


def _backward(x: DecayBackward) -> DecayGradients:
    of, (B, T, _) = x.of, x.of.logits.shape
    X, K, BT, BX = _tile(of)
    dx = torch.empty(of.logits.shape, dtype=of.logits.dtype, device=of.logits.device)
    each, programs = program_shares(B * T, BT, cdiv(X, BX), 4)
    dbias, da = (None if y is None else dx.new_empty(programs, X, dtype=torch.float32) for y in (of.bias, of.log_a))
    logits, bias, a = _given(of)
    given = (logits if dy is None else dy.contiguous() for dy in (x.ddecay, x.dstep))
    with on_device_of(logits):
        log_decays_bwd_kernel[(programs, cdiv(X, BX))](
            logits, bias, a, *given, dx, dx if dbias is None else dbias, dx if da is None else da, T, B * T, each,
            *logits.stride()[:2], float(of.factor), X, K, of.bias is not None, of.log_a is not None, of.opposite,
            x.ddecay is not None, x.dstep is not None, BT, BX, num_warps=4,
        )  # fmt: skip
        shares = [(y, like) for y, like in ((dbias, of.bias), (da, of.log_a)) if y is not None and like is not None]
        sums = iter(_summed(shares) if shares else ())
    return DecayGradients(dx, *(None if y is None else next(sums) for y in (dbias, da)))


def _summed(shares: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The sums of shares [P, X] each, of all logits of a head where there is one number ``like`` of each head."""
    whole = partial_sums(*((y, like if len(like) == y.shape[1] else y[0]) for y, like in shares))
    return [
        y if len(like) == len(y) else partial_sums((y.view(len(like), -1).t(), like))[0]
        for y, (_, like) in zip(whole, shares, strict=True)
    ]


def _backward_fake(x: DecayBackward) -> DecayGradients:
    return DecayGradients(*(None if y is None else y.new_empty(y.shape) for y in x.of[:3]))  # type: ignore[arg-type]


def _gradients(x: DecayInputs, made: DecayOutputs, grads: DecayOutputs, wanted: set[str]) -> dict[str, Some]:
    return backward_op(DecayBackward(x.of, *grads))._asdict()


forward_op = NamedOp(
    "attnzoo::log_decays_forward", DecayInputs, DecayOutputs, _forward, _forward_fake, replays=True, together=True
)
backward_op = NamedOp(
    "attnzoo::log_decays_backward", DecayBackward, DecayGradients, _backward, _backward_fake, replays=True
)
forward_op.differentiable(_gradients, inputs=("logits", "bias", "log_a"), outputs=())
backward_op.refuse_second_derivatives()
