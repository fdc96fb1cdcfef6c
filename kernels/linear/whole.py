"""The kernels of a whole step: from the products with weights to the normed and gated output of each head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.activations import finished, log_sigmoid
from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, power_of_2
from attnzoo.kernels.common.parts import Norm
from attnzoo.kernels.linear.parts import MAPS, Convolution, DecayLogits, RecurrentParts

TILE = 4096  # entries of the state in one program, where it need not hold all columns of a head
MOST = 8192  # of one that holds them all
CHANNELS = 1024  # of a window that one program moves


@triton.jit
def _convolved(p_x, p_before, p_weight, p_bias, o_c, m_c, X: tl.constexpr, SIZE: tl.constexpr, BIAS: tl.constexpr,
               SILU: tl.constexpr):  # fmt: skip
    """The channels o_c of X, after the convolution over SIZE tokens if that is not 0. # [channels] float32"""
    b_y = tl.load(p_x + o_c, mask=m_c, other=0.0).to(tl.float32)
    if SIZE:
        b_y *= tl.load(p_weight + o_c * SIZE + SIZE - 1, mask=m_c, other=0.0).to(tl.float32)
        for i in tl.static_range(SIZE - 1):
            b_w = tl.load(p_weight + o_c * SIZE + i, mask=m_c, other=0.0).to(tl.float32)
            b_y += b_w * tl.load(p_before + i * X + o_c, mask=m_c, other=0.0).to(tl.float32)
        if BIAS:
            b_y += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
        if SILU:
            b_y *= tl.sigmoid(b_y)
    return b_y


@triton.jit
def _move(p_x, p_before, o_c, m_c, X: tl.constexpr, SIZE: tl.constexpr):
    """The channels o_c of a window go on by a token."""
    for i in tl.static_range(SIZE - 1):
        p_next = p_before + (i + 1) * X if i < SIZE - 2 else p_x
        b_x = tl.load(p_next + o_c, mask=m_c)
        tl.debug_barrier()  # every thread has read what will be written to
        tl.store(p_before + i * X + o_c, b_x.to(p_before.dtype.element_ty), mask=m_c)


@triton.jit
def _mapped(b_x, m_x, MAP: tl.constexpr):
    """Feature maps by their number in MAPS."""
    if MAP == 1:
        b_x *= tl.sigmoid(b_x)
    if MAP == 2:
        b_x = tl.maximum(b_x, 0.0)
    if MAP == 3:
        b_x = tl.where(m_x, tl.where(b_x > 0.0, b_x + 1.0, tl.exp(b_x)), 0.0)
    return b_x


@triton.jit
def _normed(b_x, p_scale, m_x, eps, X: tl.constexpr, NORM: tl.constexpr):
    """A vector of length 1 ("l2"), or over its root mean square and times a scale ("rms"). # [X] float32"""
    if NORM == "l2":
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) + eps)
    if NORM == "rms":
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) / X + eps) * tl.load(p_scale, mask=m_x, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _log_decay(p_logits, p_bias, p_a, m_x, factor, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, OPPOSITE: tl.constexpr):
    """``parts.DecayLogits``, and the softplus that it is made of where it is OPPOSITE."""
    b_x = tl.load(p_logits, mask=m_x, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_x += tl.load(p_bias, mask=m_x, other=0.0).to(tl.float32)
    b_x = log_sigmoid(-b_x if OPPOSITE else b_x)
    b_g = b_x * factor
    if HAS_A:
        b_g *= tl.exp(tl.load(p_a).to(tl.float32))
    return b_g, -b_x


@launched
@triton.jit
def linear_step_kernel(
    p_q, p_k, p_v, p_active, p_state, p_o, p_q_before, p_k_before, p_v_before, p_q_conv, p_k_conv, p_v_conv, p_q_bias,
    p_k_bias, p_v_bias, p_q_scale, p_k_scale, p_decay, p_decay_bias, p_decay_a, p_diag, p_diag_bias, p_diag_a, p_beta,
    p_skip, p_scale, p_gate, stride_q, stride_k, stride_v, stride_decay, stride_diag, stride_beta, stride_gate, scale,
    norm_eps, decay_factor, diag_factor, beta_factor, eps,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SIZE: tl.constexpr, CONV_BIAS: tl.constexpr, SILU: tl.constexpr,
    MOVES: tl.constexpr, Q_MAP: tl.constexpr, K_MAP: tl.constexpr, NORM: tl.constexpr, NORM_SHARED: tl.constexpr,
    DECAY: tl.constexpr, DECAY_BIAS: tl.constexpr, DECAY_A: tl.constexpr, DECAY_OPPOSITE: tl.constexpr,
    DIAG: tl.constexpr, DIAG_BIAS: tl.constexpr, DIAG_A: tl.constexpr, DIAG_OPPOSITE: tl.constexpr, BETA: tl.constexpr,
    STEP: tl.constexpr, SKIP: tl.constexpr, HAS_NORM: tl.constexpr, SHARED: tl.constexpr, CENTRED: tl.constexpr,
    HAS_GATE: tl.constexpr, SWISH: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """One program per sequence, head and BV columns of its state; with MOVES it is the only one that reads a window.

    DECAY: a number per head ("head"), or made of logits ("logits"). STEP: the softplus of these scales v.
    """
    i_bh, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    i_q, i_k, i_g = i_h // (H // HQ), i_h // (H // HK), i_h // (H // HV)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    p_out = p_o + (i_b * H + i_h) * V + o_v
    if tl.load(p_active + i_b) == 0:
        tl.store(p_out, tl.zeros([BV], p_o.dtype.element_ty), mask=m_v)
        return
    p_tile = p_state + (i_b * H + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    m_tile = m_k[:, None] & m_v[None, :]
    b_s = tl.load(p_tile, mask=m_tile, other=0.0)  # [BK, BV]

    p_qb, p_kb, p_vb = p_q + i_b * stride_q, p_k + i_b * stride_k, p_v + i_b * stride_v
    p_q_window = p_q_before + i_b * (SIZE - 1) * HQ * K
    p_k_window = p_k_before + i_b * (SIZE - 1) * HK * K
    p_v_window = p_v_before + i_b * (SIZE - 1) * HV * V
    o_qk, o_kk, o_vv = i_q * K + o_k, i_k * K + o_k, i_g * V + o_v
    b_q = _convolved(p_qb, p_q_window, p_q_conv, p_q_bias, o_qk, m_k, HQ * K, SIZE, CONV_BIAS, SILU)  # [BK]
    b_k = _convolved(p_kb, p_k_window, p_k_conv, p_k_bias, o_kk, m_k, HK * K, SIZE, CONV_BIAS, SILU)  # [BK]
    b_v = _convolved(p_vb, p_v_window, p_v_conv, p_v_bias, o_vv, m_v, HV * V, SIZE, CONV_BIAS, SILU)  # [BV]
    b_q, b_k = _mapped(b_q, m_k, Q_MAP), _mapped(b_k, m_k, K_MAP)
    b_q = _normed(b_q, p_q_scale + (o_k if NORM_SHARED else o_qk), m_k, norm_eps, K, NORM)
    b_k = _normed(b_k, p_k_scale + (o_k if NORM_SHARED else o_kk), m_k, norm_eps, K, NORM)

    b_new = b_v
    if DECAY == "head":
        b_s *= tl.exp(tl.load(p_decay + i_h).to(tl.float32))
    if DECAY == "logits":
        p_x = p_decay + i_b * stride_decay + i_h
        b_g, b_step = _log_decay(p_x, p_decay_bias + i_h, p_decay_a + i_h, i_h >= 0, decay_factor, DECAY_BIAS, DECAY_A,
                                 DECAY_OPPOSITE)  # fmt: skip
        b_s *= tl.exp(b_g)
        if STEP:
            b_new = b_v * b_step
    if DIAG:
        o_hk = i_h * K + o_k
        b_a, _ = _log_decay(p_diag + i_b * stride_diag + o_hk, p_diag_bias + o_hk, p_diag_a + i_h, m_k, diag_factor,
                            DIAG_BIAS, DIAG_A, DIAG_OPPOSITE)  # fmt: skip
        b_s *= tl.exp(b_a)[:, None]
    if BETA:
        b_beta = beta_factor * tl.sigmoid(tl.load(p_beta + i_b * stride_beta + i_g).to(tl.float32))
        b_new = b_beta * (b_new - tl.sum(b_k[:, None] * b_s, 0))
    b_s += b_k[:, None] * b_new[None, :]
    tl.store(p_tile, b_s, mask=m_tile)
    b_o = tl.sum(b_q[:, None] * b_s, 0) * scale  # [BV]
    if SKIP:
        b_o += tl.load(p_skip + i_h).to(tl.float32) * b_v
    o_out = i_h * V + o_v
    b_o = finished(b_o, m_v, p_scale + (o_v if SHARED else o_out), p_gate + i_b * stride_gate + o_out, V, eps, HAS_NORM,
                   CENTRED, HAS_GATE, SWISH, GATE_FIRST)  # fmt: skip
    tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_v)
    if MOVES:
        _move(p_qb, p_q_window, o_qk, m_k, HQ * K, SIZE)
        _move(p_kb, p_k_window, o_kk, m_k, HK * K, SIZE)
        _move(p_vb, p_v_window, o_vv, m_v, HV * V, SIZE)


@launched
@triton.jit
def linear_finish_kernel(
    p_q, p_k, p_v, p_active, p_q_before, p_k_before, p_v_before, p_raw, p_o, p_scale, p_gate, stride_q, stride_k,
    stride_v, stride_gate, eps,
    QX: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr, SIZE: tl.constexpr, BX: tl.constexpr, GROUPS: tl.constexpr,
    N: tl.constexpr, BN: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr, CENTRED: tl.constexpr,
    HAS_GATE: tl.constexpr, SWISH: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """What waits for all heads: norms of GROUPS of N channels in their programs, windows of q, k and v in others."""
    i_b, i_p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_active = tl.load(p_active + i_b) != 0
    if i_p < GROUPS:
        o_n = tl.arange(0, BN)
        m_n, o_x = o_n < N, i_p * N + o_n
        p_row = i_b * (GROUPS * N) + o_x
        b_o = tl.load(p_raw + p_row, mask=m_n, other=0.0)  # [BN]
        p_weight, p_x = p_scale + (o_x % V if SHARED else o_x), p_gate + i_b * stride_gate + o_x
        b_o = finished(b_o, m_n, p_weight, p_x, N, eps, True, CENTRED, HAS_GATE, SWISH, GATE_FIRST)
        b_o = tl.where(is_active, b_o, 0.0)  # the gate of an idle sequence may be anything
        tl.store(p_o + p_row, b_o.to(p_o.dtype.element_ty), mask=m_n)
        return
    if not is_active:
        return
    o_x = (i_p - GROUPS) * BX + tl.arange(0, BX)
    if SIZE > 1:
        _move(p_q + i_b * stride_q, p_q_before + i_b * (SIZE - 1) * QX, o_x, o_x < QX, QX, SIZE)
        _move(p_k + i_b * stride_k, p_k_before + i_b * (SIZE - 1) * KX, o_x, o_x < KX, KX, SIZE)
        _move(p_v + i_b * stride_v, p_v_before + i_b * (SIZE - 1) * VX, o_x, o_x < VX, VX, SIZE)


def whole_step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, active: Tensor, parts: RecurrentParts) -> Tensor:
    """Launch the kernels on what ``step.linear_step`` takes, checked."""
    conv, maps, norm, decay, writes, diag, beta, beta_factor, skip, finish, gate_first, groups, scale = parts
    convs: tuple[Convolution, ...] = tuple(conv or ())
    (B, _, HQ, K), HK, (HV, V), H = q.shape, k.shape[2], v.shape[2:], state.shape[1]
    bias = [conv.bias for conv in convs] if convs else [None] * 3
    before, weights = [conv.before for conv in convs] or [q, k, v], [conv.weight for conv in convs] or [q, k, v]
    size = convs[0].weight.shape[1] if convs else 0
    conv_bias, silu = (bias[0] is not None, convs[0].silu) if convs else (False, False)
    of_head = finish.scale is not None and groups in (None, H)
    BK, BV = max(2, power_of_2(K)), power_of_2(V)
    own = size > 1 and HQ == HK == HV == H
    if BK * BV > MOST or not (of_head or (own and finish.scale is None)):
        BV = min(BV, max(8, TILE // BK))
    one = BV >= V
    moves, here = own and one, finish.scale is None or (of_head and one)
    o = v.new_empty(B, 1, H, V)
    raw = o if here else state.new_empty(B, 1, H, V)
    softened, channels = (
        decay if isinstance(decay, DecayLogits) else DecayLogits(q if decay is None else decay),
        diag or DecayLogits(q),
    )
    norm_kind = "none" if norm is None else "rms" if isinstance(norm, Norm) else "l2"
    q_scale, k_scale, norm_eps = norm if isinstance(norm, Norm) else (q, k, norm or 0.0)
    weight, gate = finish.scale, finish.gate
    shared = weight is not None and weight.ndim == 1
    rows = {"stride_q": q.stride(0), "stride_k": k.stride(0), "stride_v": v.stride(0)}
    rows["stride_gate"] = 0 if gate is None else gate.stride(0)
    windows = {f"p_{x}_before": window for x, window in zip("qkv", before, strict=True)}
    shape = {"V": V, "SIZE": size, "SHARED": shared, "CENTRED": finish.centred, "SWISH": finish.swish}
    pointers = {
        "p_q": q, "p_k": k, "p_v": v, "p_active": active, "p_scale": o if weight is None else weight,
        "p_gate": o if gate is None else gate,
    }  # fmt: skip
    with on_device_of(q):
        linear_step_kernel[(B * H, cdiv(V, BV))](
            **pointers, **windows, **rows, **shape, p_state=state, p_o=raw,
            **{f"p_{x}_conv": w for x, w in zip("qkv", weights, strict=True)},
            **{f"p_{x}_bias": o if b is None else b for x, b in zip("qkv", bias, strict=True)},
            p_q_scale=q_scale, p_k_scale=k_scale, p_decay=softened.logits, p_diag=channels.logits,
            p_decay_bias=o if softened.bias is None else softened.bias,
            p_decay_a=o if softened.log_a is None else softened.log_a,
            p_diag_bias=o if channels.bias is None else channels.bias,
            p_diag_a=o if channels.log_a is None else channels.log_a,
            p_beta=o if beta is None else beta, p_skip=o if skip is None else skip,
            stride_decay=softened.logits.stride(0), stride_diag=channels.logits.stride(0),
            stride_beta=0 if beta is None else beta.stride(0), scale=K**-0.5 if scale is None else float(scale),
            norm_eps=norm_eps,
            decay_factor=softened.factor, diag_factor=channels.factor, beta_factor=beta_factor, eps=finish.eps,
            H=H, HQ=HQ, HK=HK, HV=HV, K=K, BK=BK, BV=BV, CONV_BIAS=conv_bias, SILU=silu, MOVES=moves,
            Q_MAP=MAPS.index(maps[0]), K_MAP=MAPS.index(maps[1]), NORM=norm_kind, NORM_SHARED=q_scale.ndim == 1,
            DECAY="none" if decay is None else "logits" if isinstance(decay, DecayLogits) else "head",
            DECAY_BIAS=softened.bias is not None, DECAY_A=softened.log_a is not None,
            DECAY_OPPOSITE=softened.opposite, DIAG=diag is not None, DIAG_BIAS=channels.bias is not None,
            DIAG_A=channels.log_a is not None, DIAG_OPPOSITE=channels.opposite, BETA=beta is not None, STEP=writes,
            SKIP=skip is not None, HAS_NORM=here and weight is not None, HAS_GATE=here and gate is not None,
            GATE_FIRST=gate_first, num_warps=max(1, min(8, BK * BV // 1024)),
        )  # fmt: skip
        rest = 0 if moves or size < 2 else cdiv(max(HQ * K, HK * K, HV * V), CHANNELS)
        norms = 0 if here else groups or H
        if rest or norms:
            N = H * V // norms if norms else 1
            linear_finish_kernel[(B, norms + rest)](
                **pointers, **windows, **rows, **shape, p_raw=raw, p_o=o, eps=finish.eps, QX=HQ * K, KX=HK * K,
                VX=HV * V, BX=CHANNELS, GROUPS=norms, N=N, BN=power_of_2(N), HAS_GATE=gate is not None,
                GATE_FIRST=gate_first, num_warps=8 if norms else 4,
            )  # fmt: skip
    return o
