"""Running sums of the gates and their gradient, by parallel scans: the first kernels of every gated call.

The kernels never see a long float32 sum: the running sum of log2 gates is kept as a float64 per unit of
KEY_UNIT tokens (``base``, the sum before the unit) and a float32 per token within its unit (``c``), so a
difference of two entries is as good at token 1,000,000 as at token 100.

A closed gate (log gate <= CLOSED, -inf included) adds nothing to the sum; it moves ``since``, the first key that a row
may see, which makes the cut exact and free of inf - inf. Packed segments and sliding windows are the
same thing and use the same array.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT
from attnzoo.kernels.common.jit_constants import TL_CLOSED, TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv

HEADS = 8  # per program of the sums: gates [B, S, H] in float32 are read in whole sectors of 32 bytes
UNITS = 16  # key units per program of their gradient, or at a time
SHORT_UNITS = 64  # key units up to which a program takes a whole head: short texts wait for launches


@triton.jit
def _logaddexp2(m_a, s_a, m_b, s_b):
    """Combine two (maximum, sum of 2^(x - maximum)) pairs."""
    m = tl.maximum(m_a, m_b)
    return m, s_a * tl.exp2((m_a - m).to(tl.float32)) + s_b * tl.exp2((m_b - m).to(tl.float32))


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def load_gates(p_g, o_pos, o_h, S, H, stride_s, stride_h):
    """Log2 gates with the closed ones set to 0, and which were closed. # [KU, BH]"""
    m_g = (o_pos < S)[:, None] & (o_h < H)[None, :]
    p_tile = p_g + o_pos[:, None].to(tl.int64) * stride_s + o_h[None, :].to(tl.int64) * stride_h
    b_g = tl.load(p_tile, mask=m_g, other=0.0).to(tl.float32)
    m_closed = b_g <= TL_CLOSED
    return tl.where(m_closed, 0.0, b_g).to(tl.float64) * TL_LOG2E, m_closed


@triton.jit
def _unit_and_heads(NU, H, BH: tl.constexpr):
    """A program's row of the batch, its key unit, and its heads. # [], [], [BH]"""
    i, i_u, n_h = tl.program_id(0) // NU, tl.program_id(0) % NU, tl.cdiv(H, BH)
    return (i // n_h).to(tl.int64), i_u, i % n_h * BH + tl.arange(0, BH)


@launched
@triton.jit(do_not_specialize=["S", "NU", "stride_b"])
def gate_units_kernel(
    p_g, p_base, p_tail, p_closed, S, NU, H, stride_b, stride_s, stride_h, BH: tl.constexpr, KU: tl.constexpr
):
    """Per key unit: sum of log2 gates, log2 sum_l 2^(c_end - c_l), last closed position."""
    i_b, i_u, o_h = _unit_and_heads(NU, H, BH)
    o_pos = i_u * KU + tl.arange(0, KU)
    b_g, m_closed = load_gates(p_g + i_b * stride_b, o_pos, o_h, S, H, stride_s, stride_h)
    b_c = tl.cumsum(b_g, 0)  # [KU, BH]
    b_sum = tl.sum(b_g, 0)  # [BH]
    b_tail = tl.where((o_pos < S)[:, None], tl.exp2((b_sum[None, :] - b_c).to(tl.float32)), 0.0)
    o_bh, m_h = i_b * H + o_h, o_h < H
    tl.store(p_base + o_bh * (NU + 1) + i_u + 1, b_sum, mask=m_h)
    tl.store(p_tail + o_bh * NU + i_u, tl.log2(tl.sum(b_tail, 0)), mask=m_h)
    tl.store(p_closed + o_bh * NU + i_u, tl.max(tl.where(m_closed, o_pos[:, None], -1), 0), mask=m_h)


@launched
@triton.jit(do_not_specialize=["NU"])
def gate_scan_kernel(p_base, p_tail, p_closed, p_tails, NU, BU: tl.constexpr):
    """Scans over key units: base (in place), tails_b = log2 sum_{l<=b} 2^(-c_l), last closed position (in place).

    One program per head, but every step is a parallel scan over BU units (BU * KEY_UNIT tokens).
    """
    i_bh = tl.program_id(0).to(tl.int64)
    p_base += i_bh * (NU + 1)
    tl.store(p_base, tl.zeros([], tl.float64))
    c_sum = tl.zeros([], tl.float64)
    c_m = tl.full([], -1e30, tl.float64)
    c_s = tl.zeros([], tl.float32)
    c_closed = tl.full([], -1, tl.int32)
    for i in range(0, NU, BU):
        o_u = i + tl.arange(0, BU)
        m_u = o_u < NU
        p_u = i_bh * NU + o_u
        b_c = c_sum + tl.cumsum(tl.load(p_base + 1 + o_u, mask=m_u, other=0.0), 0)  # [BU]
        b_m = tl.where(m_u, tl.load(p_tail + p_u, mask=m_u, other=0.0).to(tl.float64) - b_c, -1e30)
        b_m, b_s = tl.associative_scan((b_m, tl.where(m_u, 1.0, 0.0)), 0, _logaddexp2)
        b_m, b_s = _logaddexp2(b_m, b_s, c_m, c_s)
        b_x = b_m + tl.log2(b_s).to(tl.float64)
        b_closed = tl.associative_scan(tl.load(p_closed + p_u, mask=m_u, other=-1), 0, maximum)
        b_closed = tl.maximum(b_closed, c_closed)
        tl.store(p_base + 1 + o_u, b_c, mask=m_u)
        tl.store(p_tails + p_u, b_x, mask=m_u)
        tl.store(p_closed + p_u, b_closed, mask=m_u)
        c_sum = tl.min(b_c, 0)  # gates are <= 0, so the last sum is the least; padding repeats it
        c_m = tl.max(tl.where(m_u, b_x, -1e30), 0)
        c_s = tl.full([], 1.0, tl.float32)
        c_closed = tl.max(b_closed, 0)


@launched
@triton.jit(do_not_specialize=["S", "NU", "stride_b", "window"])
def gate_tokens_kernel(
    p_g, p_closed, p_doc, p_c, p_since, S, NU, H, stride_b, stride_s, stride_h, window,
    HAS_DOC: tl.constexpr, BH: tl.constexpr, KU: tl.constexpr,
):  # fmt: skip
    """Per token: the running sum within its unit [B, H, NU * KU], and the first visible key [B, H, S]."""
    i_b, i_u, o_h = _unit_and_heads(NU, H, BH)
    o_pos = i_u * KU + tl.arange(0, KU)
    b_g, m_closed = load_gates(p_g + i_b * stride_b, o_pos, o_h, S, H, stride_s, stride_h)
    o_bh, m_h, m_pos = i_b * H + o_h, o_h < H, (o_pos < S)[:, None]
    b_since = tl.associative_scan(tl.where(m_closed, o_pos[:, None], 0), 0, maximum)  # [KU, BH]
    b_since = tl.maximum(b_since, tl.load(p_closed + o_bh * NU + i_u - 1, mask=m_h & (i_u > 0), other=0)[None, :])
    b_since = tl.maximum(b_since, (o_pos - window + 1)[:, None])
    if HAS_DOC:
        b_since = tl.maximum(b_since, tl.load(p_doc + o_pos, mask=o_pos < S, other=0)[:, None])
    b_c = tl.cumsum(b_g, 0).to(tl.float32)
    tl.store(p_c + o_bh[None, :] * NU * KU + o_pos[:, None], b_c, mask=m_h[None, :])
    tl.store(p_since + o_bh[None, :] * S + o_pos[:, None], b_since, mask=m_h[None, :] & m_pos)


@launched
@triton.jit(do_not_specialize=["S", "NU", "stride_b", "window"])
def gate_head_kernel(
    p_g, p_doc, p_c, p_base, p_since, p_tails, S, NU, H, stride_b, stride_s, stride_h, window,
    HAS_DOC: tl.constexpr, BU: tl.constexpr, KU: tl.constexpr,
):  # fmt: skip
    """What the three kernels above compute, of a short text: one program per head, BU key units at a time."""
    i_bh = tl.program_id(0)
    p_g += (i_bh // H).to(tl.int64) * stride_b + (i_bh % H).to(tl.int64) * stride_h
    i_bh = i_bh.to(tl.int64)
    p_base += i_bh * (NU + 1)
    tl.store(p_base, tl.zeros([], tl.float64))
    c_sum = tl.zeros([], tl.float64)
    c_m = tl.full([], -1e30, tl.float64)
    c_s = tl.zeros([], tl.float32)
    c_closed = tl.full([], 0, tl.int32)
    for i in range(0, NU, BU):
        o_u = i + tl.arange(0, BU)
        o_pos = o_u[:, None] * KU + tl.arange(0, KU)[None, :]  # [BU, KU]
        m_u, m_pos = o_u < NU, o_pos < S
        b_g = tl.load(p_g + o_pos.to(tl.int64) * stride_s, mask=m_pos, other=0.0).to(tl.float32)
        m_closed = b_g <= TL_CLOSED
        b_g = tl.where(m_closed, 0.0, b_g).to(tl.float64) * TL_LOG2E
        b_c, b_sum = tl.cumsum(b_g, 1), tl.sum(b_g, 1)
        b_tail = tl.where(m_pos, tl.exp2((b_sum[:, None] - b_c).to(tl.float32)), 0.0)
        b_tail = tl.log2(tl.where(m_u, tl.sum(b_tail, 1), 1.0))
        b_base = c_sum + tl.cumsum(b_sum, 0)  # [BU]
        b_m = tl.where(m_u, b_tail.to(tl.float64) - b_base, -1e30)
        b_m, b_s = tl.associative_scan((b_m, tl.where(m_u, 1.0, 0.0)), 0, _logaddexp2)
        b_m, b_s = _logaddexp2(b_m, b_s, c_m, c_s)
        b_x = b_m + tl.log2(b_s).to(tl.float64)
        b_since = tl.associative_scan(tl.where(m_closed, o_pos, 0), 1, maximum)
        b_last = tl.max(b_since, 1)
        b_before = tl.max(tl.where(o_u[None, :] < o_u[:, None], b_last[None, :], 0), 1)  # of the units before
        b_since = tl.maximum(tl.maximum(b_since, tl.maximum(b_before, c_closed)[:, None]), o_pos - window + 1)
        if HAS_DOC:
            b_since = tl.maximum(b_since, tl.load(p_doc + o_pos, mask=m_pos, other=0))
        tl.store(p_c + i_bh * NU * KU + o_pos, b_c.to(tl.float32), mask=m_u[:, None])
        tl.store(p_since + i_bh * S + o_pos, b_since, mask=m_pos)
        tl.store(p_base + 1 + o_u, b_base, mask=m_u)
        tl.store(p_tails + i_bh * NU + o_u, b_x, mask=m_u)
        c_sum = tl.min(b_base, 0)
        c_m = tl.max(tl.where(m_u, b_x, -1e30), 0)
        c_s = tl.full([], 1.0, tl.float32)
        c_closed = tl.maximum(c_closed, tl.max(b_last, 0))


@triton.jit
def _load_dc(p_key, p_row, o_pos, S, T, HAS_ROW: tl.constexpr):
    """Gradient of the running sum: minus the key part; the row part is 0 but for a sink. # [BU, KU] float64"""
    b_dc = -tl.load(p_key + o_pos, mask=o_pos < S, other=0.0).to(tl.float64)
    if HAS_ROW:
        o_row = o_pos - (S - T)
        b_dc += tl.load(p_row + o_row, mask=(o_row >= 0) & (o_pos < S), other=0.0).to(tl.float64)
    return b_dc


@launched
@triton.jit(do_not_specialize=["S", "T", "NU"])
def dgate_units_kernel(p_key, p_row, p_sum, S, T, NU, HAS_ROW: tl.constexpr, BU: tl.constexpr, KU: tl.constexpr):
    """Per key unit: sum of the gradient of the running gate sum."""
    i_bh, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_u = i_c * BU + tl.arange(0, BU)
    o_pos = o_u[:, None] * KU + tl.arange(0, KU)[None, :]
    b_dc = _load_dc(p_key + i_bh * S, p_row + i_bh * T, o_pos, S, T, HAS_ROW)
    tl.store(p_sum + i_bh * NU + o_u, tl.sum(b_dc, 1), mask=o_u < NU)


@launched
@triton.jit(do_not_specialize=["S", "T", "NU", "stride_b"])
def dgate_tokens_kernel(
    p_key, p_row, p_sum, p_g, p_doc, p_dg, S, T, NU, H, stride_b, stride_s, stride_h,
    HAS_DOC: tl.constexpr, HAS_ROW: tl.constexpr, BU: tl.constexpr, KU: tl.constexpr, BN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """dg_l = sum of dc over t >= l; exactly 0 for a closed gate and for the first of a segment.

    A program has BU key units, and p_sum of those after them; WHOLE: one has all of a head, from the last BU on.
    """
    i_bh, i_c = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    p_u = i_bh.to(tl.int64) * NU
    p_g += i_b * stride_b + i_h.to(tl.int64) * stride_h
    i_bh = i_bh.to(tl.int64)
    b_after = tl.zeros([], tl.float64)
    n_c = 1
    if WHOLE:
        n_c = tl.cdiv(NU, BU)
    else:
        for i in range((i_c + 1) * BU, NU, BN):
            o_n = i + tl.arange(0, BN)
            b_after += tl.sum(tl.load(p_sum + p_u + o_n, mask=o_n < NU, other=0.0), 0)
    for n in range(n_c):
        i_n = n_c - 1 - n if WHOLE else i_c
        o_u = i_n * BU + tl.arange(0, BU)
        o_pos = o_u[:, None] * KU + tl.arange(0, KU)[None, :]
        m_pos = o_pos < S
        b_dc = _load_dc(p_key + i_bh * S, p_row + i_bh * T, o_pos, S, T, HAS_ROW)
        b_unit = tl.sum(b_dc, 1) if WHOLE else tl.load(p_sum + p_u + o_u, mask=o_u < NU, other=0.0)  # [BU]
        b_later = b_after + tl.cumsum(b_unit, 0, reverse=True) - b_unit
        b_dg = b_later[:, None] + tl.cumsum(b_dc, 1, reverse=True)
        b_g = tl.load(p_g + o_pos.to(tl.int64) * stride_s, mask=m_pos, other=0.0)
        m_zero = (b_g <= TL_CLOSED) | (o_pos == 0)
        if HAS_DOC:
            m_zero |= tl.load(p_doc + o_pos, mask=m_pos, other=0) == o_pos
        tl.store(p_dg + (i_b * S + o_pos) * H + i_h, tl.where(m_zero, 0.0, b_dg).to(tl.float32), mask=m_pos)
        b_after += tl.sum(b_unit, 0)


def gate_sums(log_decay: Tensor, doc: Tensor | None, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Running sums of log2 gates, first visible keys, and the tail sums for pruning.

    Args:
        log_decay: [B, S, H] float32.
        doc: [S] int32, first position of each token's segment, or None.
        window: visible keys per row, a number >= S for no window.

    Returns:
        With U = ceil(S / KEY_UNIT): c [B, H, U * KEY_UNIT] float32 within the unit; base [B, H, U + 1] float64 before
        the unit; since [B, H, S] int32; tails [B, H, U] float64, log2 sum_{l <= b} 2^(-c_l) at the last key b of each.
    """
    B, S, H = log_decay.shape
    NU, new = cdiv(S, KEY_UNIT), log_decay.new_empty
    base, tails = new((B, H, NU + 1), dtype=torch.float64), new((B, H, NU), dtype=torch.float64)
    c, since = new((B, H, NU * KEY_UNIT)), new((B, H, S), dtype=torch.int32)
    BH, strides = min(HEADS, triton.next_power_of_2(H)), log_decay.stride()
    if NU <= SHORT_UNITS:
        gate_head_kernel[(B * H,)](
            log_decay, c if doc is None else doc, c, base, since, tails, S, NU, H, *strides, window,
            HAS_DOC=doc is not None, BU=min(UNITS, triton.next_power_of_2(NU)), KU=KEY_UNIT,
        )  # fmt: skip
        return c, base, since, tails
    tail, closed = new((B, H, NU)), new((B, H, NU), dtype=torch.int32)
    grid = (B * cdiv(H, BH) * NU,)
    gate_units_kernel[grid](log_decay, base, tail, closed, S, NU, H, *strides, BH=BH, KU=KEY_UNIT, num_warps=1)
    gate_scan_kernel[(B * H,)](base, tail, closed, tails, NU, BU=min(1024, triton.next_power_of_2(NU)))
    gate_tokens_kernel[grid](
        log_decay, closed, closed if doc is None else doc, c, since, S, NU, H, *strides, window,
        HAS_DOC=doc is not None, BH=BH, KU=KEY_UNIT, num_warps=1,
    )  # fmt: skip
    return c, base, since, tails


def gate_gradient(dkey: Tensor, drow: Tensor | None, log_decay: Tensor, doc: Tensor | None, T: int) -> Tensor:
    """Gradient of log_decay [B, S, H] from dS: column sums dkey [B, H, S] and, with a sink, row sums drow [B, H, T]."""
    B, S, H = log_decay.shape
    NU, row = cdiv(S, KEY_UNIT), dkey if drow is None else drow
    total = dkey.new_empty((B, H, NU), dtype=torch.float64)
    dg = dkey.new_empty((B, S, H))
    grid, has_row, whole = (B * H, cdiv(NU, UNITS)), drow is not None, NU <= SHORT_UNITS
    if whole:
        grid = (B * H, 1)
    else:
        dgate_units_kernel[grid](dkey, row, total, S, T, NU, HAS_ROW=has_row, BU=UNITS, KU=KEY_UNIT)
    dgate_tokens_kernel[grid](
        dkey, row, total, log_decay, log_decay if doc is None else doc, dg, S, T, NU, H, *log_decay.stride(),
        HAS_DOC=doc is not None, HAS_ROW=has_row, BU=UNITS, KU=KEY_UNIT, BN=1024, WHOLE=whole,
    )  # fmt: skip
    return dg


@launched
@triton.jit(do_not_specialize=["L", "n", "NS", "stride_b"])
def gate_append_kernel(p_g, p_old, p_new, p_c, p_base, p_since, p_tails, L, n, NS, H, stride_b, stride_s, stride_h,
                       KU: tl.constexpr):  # fmt: skip
    """What the three kernels above compute, for n tokens after L whose sums are there; one program per head."""
    i_bh = tl.program_id(0).to(tl.int64)
    p_g += i_bh // H * stride_b + i_bh % H * stride_h
    p_c += i_bh * NS * KU
    p_since += i_bh * NS * KU
    p_tails += i_bh * NS
    p_base += i_bh * (NS + 1)
    b_base = tl.load(p_base + L // KU)
    b_sum, b_mass = tl.load(p_old + i_bh * 3), tl.load(p_old + i_bh * 3 + 1)
    b_closed = tl.load(p_old + i_bh * 3 + 2).to(tl.int32)
    for u in range(L // KU, tl.cdiv(L + n, KU)):
        o_pos = u * KU + tl.arange(0, KU)
        m_new = (o_pos >= L) & (o_pos < L + n)
        b_g = tl.load(p_g + (o_pos - L).to(tl.int64) * stride_s, mask=m_new, other=0.0).to(tl.float32)
        m_closed = b_g <= TL_CLOSED
        b_g = tl.where(m_closed, 0.0, b_g).to(tl.float64) * TL_LOG2E
        b_c = b_sum + tl.cumsum(b_g, 0)  # [KU]
        b_end = b_sum + tl.sum(b_g, 0)
        b_seen = tl.maximum(b_closed, tl.associative_scan(tl.where(m_closed, o_pos, 0), 0, maximum))
        tl.store(p_c + o_pos, b_c.to(tl.float32), mask=m_new)
        tl.store(p_since + o_pos, b_seen, mask=m_new)
        b_new = tl.sum(tl.where(m_new, tl.exp2((b_end - b_c).to(tl.float32)), 0.0), 0)
        b_mass = b_mass * tl.exp2((b_end - b_sum).to(tl.float32)) + b_new
        b_closed = tl.max(b_seen, 0)
        m_full = (u + 1) * KU <= L + n
        tl.store(p_base + u + 1, b_base + b_end, mask=m_full)
        tl.store(p_tails + u, tl.log2(b_mass.to(tl.float32)).to(tl.float64) - b_base - b_end, mask=m_full)
        b_base += tl.where(m_full, b_end, 0.0)
        b_sum = tl.where(m_full, 0.0, b_end)
    tl.store(p_new + i_bh * 3, b_sum)
    tl.store(p_new + i_bh * 3 + 1, b_mass)
    tl.store(p_new + i_bh * 3 + 2, b_closed.to(tl.float64))


def append_gates(
    log_decay: Tensor, length: int, c: Tensor, base: Tensor, since: Tensor, tails: Tensor, state: Tensor
) -> Tensor:
    """Write the sums of log_decay [B, n, H] after ``length`` tokens into buffers with room; returns the new state.

    The buffers are those of ``running_gates.GateSums``, contiguous.
    """
    (B, n, H), new = log_decay.shape, torch.empty_like(state)
    gate_append_kernel[(B * H,)](
        log_decay, state, new, c, base, since, tails, length, n, tails.shape[2], H, *log_decay.stride(), KU=KEY_UNIT
    )
    return new
