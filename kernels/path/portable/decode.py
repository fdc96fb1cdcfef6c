"""One token or a chunk after a cache: one kernel advances every cached key by the new factors and attends to it.

For each cached key a program reads it, multiplies it by the factors of the new tokens, writes it to the next cache and
attends to it. Programs share the keys out in ranges and walk a range from its last key to its first. The log decay
between a key and the end of the range is then a running sum that grows as they walk; no two long sums are ever
subtracted from each other. A second, small kernel combines the ranges in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.dense_reference import window_starts
from attnzoo.kernels.common.device import multiprocessors, on_device_of
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import addressable, cdiv, head_block, per_head, power_of_2
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.online_softmax import weights_of
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.path.chunk import CHUNK, close_chunk
from attnzoo.kernels.path.operands import Advanced, PathStep

ROOM = 256  # keys are stored in multiples of this many tokens, so that growing reuses the allocator's blocks
MAX_SPLITS = 128


@triton.jit
def _there(p_valid, o_s, m, MASKED: tl.constexpr):
    """The mask of the tokens o_s within m that exist."""
    if MASKED:
        m = m & (tl.load(p_valid + o_s, mask=m, other=0) != 0)
    return m


@launched
@triton.jit(do_not_specialize=["N", "S", "SPLIT", "NS", "window", "stride_gb", "stride_mb"])
def path_advance_kernel(
    p_q, p_w, p_beta, p_a, p_total, p_keys, p_next, p_v, p_g, p_valid, p_since, p_o, p_m, p_l, p_sum,
    stride_kb, stride_kt, stride_nb, stride_vb, stride_vt, stride_gb, stride_gt, stride_mb,
    N, S, SPLIT, NS, window, scale2,
    ONE: tl.constexpr, FACTORS: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Keys lo..hi of one head: advance and store them, and attend to them from BR of the R = rep N rows of the group.

    ONE (N = 1, with FACTORS of its own and, DECAYED, log gates p_a [B, 1, G, K]): p_q holds the query itself, attending
    to the advanced keys. Otherwise p_q holds queries carried back to the start of the chunk, attending to the keys as
    they were; p_total is ``(R_1 ... R_N)^T``. Parts: [B, G, NS, R, .].
    A window over tokens of which some do not exist (MASKED) comes as the first key of each row, p_since [B, N].
    """
    i_bg, i_s, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    REP: tl.constexpr = H // G
    p_valid += i_b * stride_mb
    if ONE:
        N = 1  # known when compiled: no divisions, no mask of rows
    R = REP * N
    o_r = i_r * BR + tl.arange(0, BR)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_r, m_k, m_v = o_r < R, o_k < K, o_v < V
    o_h = i_g * REP + o_r // N  # query head of each row
    lo = i_s * SPLIT
    hi = tl.minimum(lo + SPLIT, S)
    p_q += ((i_b * N + o_r % N) * H + o_h)[:, None] * K + o_k[None, :]
    b_q = tl.load(p_q, mask=m_r[:, None] & m_k[None, :], other=0.0).to(tl.float32)  # [BR, BK]
    if ONE and FACTORS == 1:
        b_w = tl.load(p_w + i_bg * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_beta = tl.load(p_beta + i_bg).to(tl.float32)
    if ONE and DECAYED:
        b_decay = tl.exp(tl.load(p_a + i_bg * K + o_k, mask=m_k, other=0.0).to(tl.float32))
    p_total += i_bg.to(tl.int64) * K * K
    p_keys += i_b * stride_kb + i_g * K
    p_next += i_b * stride_nb + i_g * K
    p_v += i_b * stride_vb + i_g * V
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_o = tl.zeros([BR, BV], tl.float32)
    b_sum = tl.zeros([BR], tl.float32)  # gates between the current tile and hi
    n_tiles = tl.cdiv(hi - lo, BS)
    for t in range(n_tiles):
        o_s = lo + (n_tiles - 1 - t) * BS + tl.arange(0, BS)
        m_s = o_s < hi
        o_s64 = o_s.to(tl.int64)
        m_key = m_s[:, None] & m_k[None, :]
        b_k = tl.load(p_keys + o_s64[:, None] * stride_kt + o_k[None, :], mask=m_key, other=0.0)  # [BS, BK]
        if ONE:
            if DECAYED:
                b_k *= b_decay[None, :]
            for i_n in tl.static_range(FACTORS):
                if FACTORS > 1:
                    b_w = tl.load(p_w + (i_bg * FACTORS + i_n) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
                    b_beta = tl.load(p_beta + i_bg * FACTORS + i_n).to(tl.float32)
                b_k -= (b_beta * tl.sum(b_k * b_w[None, :], 1))[:, None] * b_w[None, :]
            tl.store(p_next + o_s64[:, None] * (G * K) + o_k[None, :], b_k, mask=m_key)
        elif i_r == 0:
            for i_c in tl.static_range(0, BK, BC):  # in slices: all of the product would not fit the registers
                o_c = i_c + tl.arange(0, BC)
                m_c = o_c < K
                p_slice = p_total + o_c[:, None] * K + o_k[None, :]
                b_total = tl.load(p_slice, mask=m_c[:, None] & m_k[None, :], other=0.0)  # [BC, BK]
                b_next = tl.dot(b_k, tl.trans(b_total), input_precision="tf32x3")
                tl.store(p_next + o_s64[:, None] * (G * K) + o_c[None, :], b_next, mask=m_s[:, None] & m_c[None, :])
        if BR == 1:
            b_s = tl.sum(b_q[:, None, :] * b_k[None, :, :], 2)
        else:
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
        b_s = scores(b_s, scale2)  # [BR, BS]
        if GATED:
            m_after = _there(p_valid, o_s + 1, o_s + 1 < hi, MASKED)
            p_after = p_g + i_b * stride_gb + o_h[:, None] + (o_s64 + 1)[None, :] * stride_gt
            b_g = tl.load(p_after, mask=m_r[:, None] & m_after[None, :], other=0.0).to(tl.float32) * TL_LOG2E
            b_s += tl.cumsum(b_g, 1, reverse=True) + b_sum[:, None]
            b_sum += tl.sum(b_g, 1)
        m_there = _there(p_valid, o_s, m_s, MASKED)
        m_seen = m_there[None, :]
        if WINDOW:
            if MASKED:
                b_since = tl.load(p_since + i_b * N + o_r % N, mask=m_r, other=0)
                m_seen = m_seen & (o_s[None, :] >= b_since[:, None])
            else:
                m_seen = m_seen & (o_s[None, :] > (S + o_r % N - window)[:, None])
        b_s = tl.where(m_seen, b_s, float("-inf"))
        b_m, b_p, b_scale = weights_of(b_s, b_m)
        b_l = b_l * b_scale + tl.sum(b_p, 1)
        m_value = m_there[:, None] & m_v[None, :]  # values that do not exist may be anything
        b_v = tl.load(p_v + o_s64[:, None] * stride_vt + o_v[None, :], mask=m_value, other=0.0)  # [BS, BV]
        if BR == 1:
            b_part = tl.sum(b_p[:, :, None] * b_v.to(tl.float32)[None, :, :], 1)
        else:
            b_part = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="tf32x3")
        b_o = b_o * b_scale[:, None] + b_part
    o_part = (i_bg.to(tl.int64) * NS + i_s) * R + o_r
    if GATED:
        p_first = p_g + i_b * stride_gb + lo.to(tl.int64) * stride_gt + o_h
        m_first = _there(p_valid, lo, lo < hi, MASKED)
        b_sum += tl.load(p_first, mask=m_r & m_first, other=0.0).to(tl.float32) * TL_LOG2E
        tl.store(p_sum + o_part, b_sum, mask=m_r)
    tl.store(p_m + o_part, b_m, mask=m_r)
    tl.store(p_l + o_part, b_l, mask=m_r)
    tl.store(p_o + o_part[:, None] * V + o_v[None, :], b_o, mask=m_r[:, None] & m_v[None, :])


@launched
@triton.jit(do_not_specialize=["N", "S", "NS", "window", "stride_gb", "stride_mb"])
def path_combine_kernel(
    p_o, p_m, p_l, p_sum, p_scores, p_q, p_k, p_next, p_v, p_g, p_valid, p_since, p_sink, p_out, p_lse,
    stride_nb, stride_vb, stride_vt, stride_gb, stride_gt, stride_mb, N, S, NS, window, scale2,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINK: tl.constexpr,
):  # fmt: skip
    """One row: the NS parts over the cached keys, and the chunk's own N keys with scores [B, H, N, N].

    With N = 1 (BN = 1) the score is that of p_q and p_k, and the key is written behind those of the next cache.
    """
    i_bh, i_n = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    REP: tl.constexpr = H // G
    o_v, o_p, o_j = tl.arange(0, BV), tl.arange(0, BP), tl.arange(0, BN)
    m_v, m_p, m_j = o_v < V, o_p < NS, o_j <= i_n
    p_valid += i_b * stride_mb
    if BN == 1:
        N = 1
    R = REP * N
    row = (i_b * G + i_h // REP) * NS * R + (i_h % REP) * N + i_n
    b_m = tl.load(p_m + row + o_p * R, mask=m_p, other=float("-inf"))
    b_l = tl.load(p_l + row + o_p * R, mask=m_p, other=0.0)
    if BN == 1:
        o_k = tl.arange(0, BK)
        m_k = o_k < K
        b_q = tl.load(p_q + i_bh.to(tl.int64) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + (i_b * G + i_h // REP) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_own = tl.zeros([BN], tl.float32) + tl.sum(b_q * b_k, 0)
        if i_h % REP == 0:
            tl.store(p_next + i_b * stride_nb + (S.to(tl.int64) * G + i_h // REP) * K + o_k, b_k, mask=m_k)
    else:
        b_own = tl.load(p_scores + (i_bh.to(tl.int64) * N + i_n) * N + o_j, mask=m_j, other=0.0)
    b_own = scores(b_own, scale2)
    if GATED:
        p_g += i_b * stride_gb + i_h
        m_upto = _there(p_valid, S + o_j, m_j, MASKED)
        b_g = tl.load(p_g + (S + o_j).to(tl.int64) * stride_gt, mask=m_upto, other=0.0).to(tl.float32)
        b_after = tl.load(p_sum + row + (o_p + 1) * R, mask=o_p + 1 < NS, other=0.0)
        b_m += tl.cumsum(b_after, 0, reverse=True) + tl.sum(b_g, 0) * TL_LOG2E
        m_after = _there(p_valid, S + 1 + o_j, o_j < i_n, MASKED)
        b_g = tl.load(p_g + (S + 1 + o_j).to(tl.int64) * stride_gt, mask=m_after, other=0.0).to(tl.float32)
        b_own += tl.cumsum(b_g, 0, reverse=True) * TL_LOG2E
    m_j = _there(p_valid, S + o_j, m_j, MASKED)
    if WINDOW:
        if MASKED:
            m_j &= S + o_j >= tl.load(p_since + i_b * N + i_n)
        else:
            m_j &= o_j > i_n - window
    b_own = tl.where(m_j, b_own, float("-inf"))
    b_top = tl.maximum(tl.max(b_m, 0), tl.max(b_own, 0))
    if HAS_SINK:
        b_sink = tl.load(p_sink + i_h).to(tl.float32) * TL_LOG2E
        b_top = tl.maximum(b_top, b_sink)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_a, b_own = tl.exp2(b_m - b_top), tl.exp2(b_own - b_top)
    p_v += i_b * stride_vb + (i_h // REP) * V
    o_s = (S + o_j).to(tl.int64)
    m_there = _there(p_valid, S + o_j, o_j < N, MASKED)
    b_v = tl.load(p_v + o_s[:, None] * stride_vt + o_v[None, :], mask=m_there[:, None] & m_v[None, :], other=0.0)
    b_parts = tl.load(p_o + (row + o_p * R)[:, None] * V + o_v[None, :], mask=m_p[:, None] & m_v[None, :], other=0.0)
    b_o = tl.sum(b_parts * b_a[:, None], 0) + tl.sum(b_v.to(tl.float32) * b_own[:, None], 0)
    b_l = tl.sum(b_l * b_a, 0) + tl.sum(b_own, 0)
    if HAS_SINK:
        b_l += tl.exp2(b_sink - b_top)
    i_row = (i_b * N + i_n) * H + i_h
    tl.store(p_lse + i_row, (b_top + tl.log2(b_l)) / TL_LOG2E)
    b_o /= tl.where(b_l > 0.0, b_l, 1.0)  # a row without any valid key
    tl.store(p_out + i_row * V + o_v, b_o.to(p_out.dtype.element_ty), mask=m_v)


def _splits(S: int, programs: int, BS: int, device: torch.device) -> tuple[int, int]:
    """Number of splits of S cached keys, and keys per split: enough programs to fill the device."""
    wanted = min(MAX_SPLITS, max(1, 4 * multiprocessors(device) // programs), cdiv(S, BS))
    size = cdiv(cdiv(S, wanted), BS) * BS
    return cdiv(S, size), size


def _advance(x: PathStep) -> Advanced:
    following = _new_keys(x.keys, x.values.shape[1])
    return Advanced(*advance_into(following, x), following)


def advance_into(following: Tensor, x: PathStep) -> tuple[Tensor, Tensor]:
    """o and lse of a step, whose keys go to ``following`` [B, S + N, G, K] float32.

    For one token this may begin with ``x.keys`` themselves, if each is read by one program alone (:func:`in_place`).
    """
    q, k, w, beta, keys, values, gates, valid, sink, log_diag, options = x
    window, scale2 = options.window, options.scale2
    B, N, H, K = q.shape
    S, G, V = keys.shape[1], keys.shape[2], values.shape[3]
    if N > CHUNK:
        raise ValueError(f"q: expected at most {CHUNK} new tokens, got {N}")
    keys, values = _dense_heads(keys), _dense_heads(values)
    gates, valid = (x if x is None else addressable(x) for x in (gates, valid))
    sink = per_head(sink)
    if N == 1:
        rows, k, w, beta = q.contiguous(), k.contiguous(), w.contiguous(), beta.contiguous()
        chunk = total = following
    else:
        chunk, rows, own, total = close_chunk(q, k, w, beta, log_diag)
        following[:, S:] = own
    R, factors = H // G * N, beta.shape[3] if N == 1 and beta.ndim == 4 else 1
    wide = max(K, V) > 64
    BR = 1 if R == 1 else min(_most_rows(K, V), max(16, power_of_2(R)))
    BS = 32 if R > 1 and values.dtype == torch.float32 else 64
    warps = 8 if wide else 4
    row_tiles = cdiv(R, BR)
    splits, size = _splits(S, B * G * row_tiles, BS, q.device)
    parts = q.new_empty(B, G, splits, R, V, dtype=torch.float32)
    top, mass, sums = (q.new_empty(B, G, splits, R, dtype=torch.float32) for _ in range(3))
    o = q.new_empty(B, N, H, V, dtype=values.dtype)
    BK, BV = head_block(K), head_block(V)
    BC = 32 if wide else BK
    BP = power_of_2(splits) if N == 1 else MAX_SPLITS
    g, there = parts if gates is None else gates, parts if valid is None else valid
    gate_strides = (g.stride(0), g.stride(1))
    lse = q.new_empty(B, N, H, dtype=torch.float32)
    flags = {"GATED": gates is not None, "MASKED": valid is not None, "WINDOW": window > 0}
    decay = parts if log_diag is None else log_diag.contiguous()
    since = there
    if valid is not None and window > 0:
        since = window_starts(valid, window)[:, S:].int().contiguous()
    with on_device_of(q):
        path_advance_kernel[(B * G, splits, row_tiles)](
            rows, w, beta, decay, total, keys, following, values, g, there, since, parts, top, mass, sums,
            keys.stride(0), keys.stride(1), following.stride(0), values.stride(0), values.stride(1), *gate_strides,
            there.stride(0), N, S, size, splits, window, scale2, N == 1, factors, G, H, K, V, BR, BS, BK, BC, BV,
            **flags, DECAYED=log_diag is not None, num_warps=warps, num_stages=1,
        )  # fmt: skip
        path_combine_kernel[(B * H, N)](
            parts, top, mass, sums, chunk, rows, k, following, values, g, there, since,
            lse if sink is None else sink, o, lse,
            following.stride(0), values.stride(0), values.stride(1), *gate_strides, there.stride(0), N, S, splits,
            window, scale2, G, H, K, V, 1 if N == 1 else CHUNK, BP, BK, BV, **flags, HAS_SINK=sink is not None,
            num_warps=4,
        )  # fmt: skip
    return o, lse


def in_place(H: int, G: int, K: int, V: int) -> bool:
    """Whether one program alone reads each key in a step of one token."""
    return _most_rows(K, V) >= H // G


def _most_rows(K: int, V: int) -> int:
    """The most rows of a program within registers and 99 KiB of shared memory (compiled for compute capability 9.0)."""
    return 32 if max(K, V) > 64 else 64


def _dense_heads(x: Tensor) -> Tensor:
    """``x [B, S, G, D]``, copied unless the heads of a token are contiguous; batch and tokens may have any strides."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def _new_keys(keys: Tensor, tokens: int) -> Tensor:
    B, _, G, K = keys.shape
    return keys.new_empty(B, (tokens + ROOM - 1) // ROOM * ROOM, G, K)[:, :tokens]


def _advance_fake(x: PathStep) -> Advanced:
    o = x.q.new_empty(*x.q.shape[:3], x.values.shape[3], dtype=x.values.dtype)
    return Advanced(o, x.q.new_empty(x.q.shape[:3], dtype=torch.float32), _new_keys(x.keys, x.values.shape[1]))


path_advance_op = NamedOp("attnzoo::path_advance", PathStep, Advanced, _advance, _advance_fake)
