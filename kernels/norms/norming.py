"""The kernels: a program has BT tokens of the N channels normed together, in the backward several such tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, head_block, side_by_side
from attnzoo.kernels.common.partial_sums import partial_sums, program_shares
from attnzoo.kernels.norms.parts import Gated, Skip

Some = Tensor | None


@triton.jit
def _tile(p_x, o_r, m_tn, T, stride_b, stride_t, o_n):
    """Channels o_n of tokens o_r, which are counted through all sequences. # [BT, BN] float32"""
    o_x = (o_r // T).to(tl.int64) * stride_b + (o_r % T).to(tl.int64) * stride_t
    return tl.load(p_x + o_x[:, None] + o_n[None, :], mask=m_tn, other=0.0).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["T", "ROWS"])
def head_norm_kernel(
    p_x, p_weight, p_gate, p_v, p_scale, p_y, T, ROWS, eps, stride_b, stride_t, stride_gb, stride_gt, stride_vb,
    stride_vt, H: tl.constexpr, V: tl.constexpr, N: tl.constexpr, REPEAT: tl.constexpr, WEIGHT: tl.constexpr,
    GATE: tl.constexpr, SWISH: tl.constexpr, FIRST: tl.constexpr, SKIP: tl.constexpr, CENTRED: tl.constexpr,
    MEAN: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """WEIGHT: 0 for none, 1 for one of all heads, 2 for one of each. REPEAT: heads of x for each of v."""
    R: tl.constexpr = H * V // N
    o_r = tl.program_id(0) // R * BT + tl.arange(0, BT)
    o_c = tl.arange(0, BN)
    o_n = tl.program_id(0) % R * N + o_c  # of all channels of a token
    m_tn = (o_r < ROWS)[:, None] & (o_c < N)[None, :]
    b_x = _tile(p_x, o_r, m_tn, T, stride_b, stride_t, o_n)
    if SKIP:
        o_v = o_n if REPEAT == 1 else o_n // V // REPEAT * V + o_n % V
        b_scale = tl.load(p_scale + o_n // V, mask=o_c < N, other=0.0).to(tl.float32)
        b_x += b_scale[None, :] * _tile(p_v, o_r, m_tn, T, stride_vb, stride_vt, o_v)
    if GATE:
        b_gate = _tile(p_gate, o_r, m_tn, T, stride_gb, stride_gt, o_n)
        b_gate = tl.sigmoid(b_gate) * (b_gate if SWISH else 1.0)
        if FIRST:
            b_x *= b_gate
    if CENTRED:
        b_x = tl.where(m_tn, b_x - (tl.sum(b_x, 1) / N)[:, None], 0.0)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) / (N if MEAN else 1) + eps)[:, None]
    if WEIGHT > 0:
        b_x *= tl.load(p_weight + (o_n if WEIGHT == 2 else o_n % V), mask=o_c < N, other=0.0).to(tl.float32)[None, :]
    if GATE and not FIRST:
        b_x *= b_gate
    tl.store(p_y + o_r[:, None].to(tl.int64) * (H * V) + o_n[None, :], b_x.to(p_y.dtype.element_ty), mask=m_tn)


@launched
@triton.jit(do_not_specialize=["T", "ROWS", "TILES"])
def head_norm_bwd_kernel(
    p_x, p_weight, p_gate, p_v, p_scale, p_dy, p_dx, p_dweight, p_dgate, p_dv, p_dscale, T, ROWS, TILES, eps,
    stride_b, stride_t, stride_gb, stride_gt, stride_vb, stride_vt, stride_db, stride_dt,
    H: tl.constexpr, V: tl.constexpr, N: tl.constexpr, REPEAT: tl.constexpr, WEIGHT: tl.constexpr,
    GATE: tl.constexpr, SWISH: tl.constexpr, FIRST: tl.constexpr, SKIP: tl.constexpr, CENTRED: tl.constexpr,
    MEAN: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of x, the gate and v (of each head of x), and a share of those of weight and scale, per channel."""
    R: tl.constexpr = H * V // N
    i_p = tl.program_id(0) // R
    o_c = tl.arange(0, BN)
    o_n = tl.program_id(0) % R * N + o_c
    m_n = o_c < N
    b_dweight = tl.zeros([BT, BN], tl.float32)
    b_dscale = tl.zeros([BT, BN], tl.float32)
    if WEIGHT > 0:
        b_weight = tl.load(p_weight + (o_n if WEIGHT == 2 else o_n % V), mask=m_n, other=0.0).to(tl.float32)
    if SKIP:
        o_v = o_n if REPEAT == 1 else o_n // V // REPEAT * V + o_n % V
        b_scale = tl.load(p_scale + o_n // V, mask=m_n, other=0.0).to(tl.float32)
    for i in range(TILES):
        o_r = (i_p * TILES + i) * BT + tl.arange(0, BT)
        m_tn = (o_r < ROWS)[:, None] & m_n[None, :]
        o_out = o_r[:, None].to(tl.int64) * (H * V) + o_n[None, :]
        b_dy = _tile(p_dy, o_r, m_tn, T, stride_db, stride_dt, o_n)
        b_x = _tile(p_x, o_r, m_tn, T, stride_b, stride_t, o_n)
        if SKIP:
            b_v = _tile(p_v, o_r, m_tn, T, stride_vb, stride_vt, o_v)
            b_x += b_scale[None, :] * b_v
        b_u = b_x
        if GATE:
            b_logit = _tile(p_gate, o_r, m_tn, T, stride_gb, stride_gt, o_n)
            b_open = tl.sigmoid(b_logit)
            b_gate = b_open * (b_logit if SWISH else 1.0)
            b_slope = b_open * (1.0 + b_logit * (1.0 - b_open)) if SWISH else b_open * (1.0 - b_open)
            if FIRST:
                b_u = b_x * b_gate
        if CENTRED:
            b_u = tl.where(m_tn, b_u - (tl.sum(b_u, 1) / N)[:, None], 0.0)
        b_factor = tl.rsqrt(tl.sum(b_u * b_u, 1) / (N if MEAN else 1) + eps)[:, None]
        b_u *= b_factor
        if GATE and not FIRST:
            b_dgate = b_dy * b_u * b_slope
            if WEIGHT > 0:
                b_dgate *= b_weight[None, :]
            tl.store(p_dgate + o_out, b_dgate.to(p_dgate.dtype.element_ty), mask=m_tn)
            b_dy *= b_gate
        if WEIGHT > 0:
            b_dweight += b_dy * b_u
            b_dy *= b_weight[None, :]
        b_du = b_factor * (b_dy - b_u * (tl.sum(b_dy * b_u, 1) / (N if MEAN else 1))[:, None])
        if CENTRED:
            b_du -= (tl.sum(b_du, 1) / N)[:, None]
        if GATE and FIRST:
            b_dgate = b_du * b_x * b_slope
            tl.store(p_dgate + o_out, b_dgate.to(p_dgate.dtype.element_ty), mask=m_tn)
            b_du *= b_gate
        tl.store(p_dx + o_out, b_du.to(p_dx.dtype.element_ty), mask=m_tn)
        if SKIP:
            tl.store(p_dv + o_out, (b_scale[None, :] * b_du).to(p_dv.dtype.element_ty), mask=m_tn)
            b_dscale += b_du * b_v
    o_share = i_p.to(tl.int64) * (H * V) + o_n
    if WEIGHT > 0:
        tl.store(p_dweight + o_share, tl.sum(b_dweight, 0), mask=m_n)
    if SKIP:
        tl.store(p_dscale + o_share, tl.sum(b_dscale, 0), mask=m_n)


class Launch(NamedTuple):
    """Arguments that both kernels are launched with.

    Attributes:
        tensors: x, weight, logits of the gate, v and its scale; x stands for what is not there.
        strides: of x, logits and v, between sequences and tokens.
    """

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    constants: tuple[int | bool, ...]
    BT: int
    num_warps: int


def _launch(
    x: Tensor, weight: Some, gate: Gated | None, skip: Skip | None, kind: str, groups: int, tile: int
) -> Launch:
    """``tile``: channels of a program."""
    H, V = x.shape[2:]
    x = side_by_side(x)
    w = x if weight is None else weight.contiguous()
    logits = x if gate is None else side_by_side(gate.logits)
    v, scale = (x, x) if skip is None else (side_by_side(skip.v), skip.scale.contiguous())
    N = H // groups * V
    BN = head_block(N)
    BT = max(1, tile // BN)
    constants = (
        H, V, N, H // v.shape[2], 0 if weight is None else weight.ndim, gate is not None,
        gate is not None and gate.swish, gate is not None and gate.first, skip is not None, kind == "group",
        kind != "l2", BT, BN,
    )  # fmt: skip
    strides = (*x.stride()[:2], *logits.stride()[:2], *v.stride()[:2])
    return Launch((x, w, logits, v, scale), strides, constants, BT, min(16, max(4, 4 * BN // tile)))


def norm(x: Tensor, weight: Some, gate: Gated | None, skip: Skip | None, kind: str, eps: float, groups: int) -> Tensor:
    """``y [B, T, H, V]``."""
    B, T = x.shape[:2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = _launch(x, weight, gate, skip, kind, groups, 2048)
    head_norm_kernel[(cdiv(B * T, launch.BT) * groups,)](
        *launch.tensors, y, T, B * T, eps, *launch.strides, *launch.constants, num_warps=launch.num_warps
    )
    return y


def norm_bwd(
    x: Tensor, weight: Some, gate: Gated | None, skip: Skip | None, kind: str, eps: float, groups: int, dy: Tensor
) -> tuple[Tensor, Some, Some, Some, Some]:
    """Gradients of x, weight, the gate's logits, v and its scale."""
    B, T, H, V = x.shape
    launch, dy = _launch(x, weight, gate, skip, kind, groups, 1024), side_by_side(dy)
    each, programs = program_shares(B * T, launch.BT, groups, launch.num_warps)

    def made(like: Some, *shape: int, dtype: torch.dtype | None = None) -> Some:
        return None if like is None else torch.empty(shape, dtype=dtype or like.dtype, device=x.device)

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dlogits = made(None if gate is None else gate.logits, B, T, H * V)
    scale = None if skip is None else skip.scale
    alone = skip is None or skip.v.shape[2] == H
    dv = made(None if skip is None else skip.v, B, T, H, V, dtype=None if alone else torch.float32)
    of_weight, of_scale = (made(one, programs, H, V, dtype=torch.float32) for one in (weight, scale))
    written = (dx if one is None else one for one in (of_weight, dlogits, dv, of_scale))
    head_norm_bwd_kernel[(programs * groups,)](
        *launch.tensors, dy, dx, *written, T, B * T, each, eps, *launch.strides, *dy.stride()[:2], *launch.constants,
        num_warps=launch.num_warps,
    )  # fmt: skip
    shares = [] if of_scale is None else [(of_scale, of_scale[0])]
    if weight is not None and of_weight is not None:
        shares.append((of_weight if weight.ndim == 2 else of_weight.view(-1, V), weight))
    sums, dscale = partial_sums(*shares) if shares else [], None
    if skip is not None and dv is not None:
        (dscale,) = partial_sums((sums.pop(0).t(), skip.scale))
        dv = dv if alone else dv.view(B, T, skip.v.shape[2], -1, V).sum(3).to(skip.v.dtype)
    dweight = sums[0] if sums else None
    return dx, dweight, dlogits, dv, dscale
