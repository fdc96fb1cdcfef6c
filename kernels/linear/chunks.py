"""The kernels of a scalar decay over chunks of tokens: states between chunks, with their gradients, and outputs.

Within a chunk the running sum of gates starts anew, so no difference of sums grows with the text. A gate that is closed
or leaves nothing in float32, and the begin of a packed sequence, adds nothing to the sum; it moves ``since``, the first
token of the chunk that a row sees, which is -1 where the row sees what came before the chunk. So no difference is
inf - inf, and none is rounded as a large gate before it would have it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.dense_reference import segment_starts
from attnzoo.kernels.common.device import machine
from attnzoo.kernels.common.gate_sums import HEADS, load_gates, maximum
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, dot_precision, head_block, power_of_2
from attnzoo.kernels.linear.segments import left_before, needed, needed_by_others, spans, split

CHUNK = 64  # tokens
NOTHING = tl.constexpr(-150.0)  # 2**-150 is 0 in float32


class ChunkTiles(NamedTuple):
    """Most channels of q, k and of v that a program takes at a time, its warps, and stages of its loops."""

    BK: int
    BV: int
    warps: int
    stages: int

    def launch(self, q: Tensor, v: Tensor) -> dict[str, int]:
        """What a launch for the channels of q and v is given: on Hopper 64 at least, as ptxas 12.8 (of Triton 3.6 and
        3.7) leaves out what sets the address of a narrower product's operand; in float32 what small GPUs hold."""
        least, exact = 64 if machine(q.device).hopper else 16, q.dtype == torch.float32
        BK, BV = (min(most, max(least, head_block(x.shape[3]))) for most, x in ((self.BK, q), (self.BV, v)))
        stages = min(2, self.stages) if exact else self.stages
        return {"BK": BK, "BV": min(64, BV) if exact else BV, "num_warps": self.warps, "num_stages": stages}


TILES = {"states": ChunkTiles(64, 64, 8, 3), "output": ChunkTiles(64, 128, 4, 3), "backward": ChunkTiles(64, 64, 4, 3)}


@launched
@triton.jit(do_not_specialize=["T", "NC", "stride_b"])
def chunk_gates_kernel(
    p_g, p_doc, p_c, p_since, T, NC, H, stride_b, stride_t, stride_h, HAS_DOC: tl.constexpr, BH: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Per token: the running sum of log2 gates within its chunk, and the first token there that it sees."""
    i_n, i_p, n_h = tl.program_id(0), tl.program_id(1), tl.cdiv(H, BH)
    i_b, o_h, o_t = (i_p // n_h).to(tl.int64), i_p % n_h * BH + tl.arange(0, BH), tl.arange(0, C)
    o_pos = i_n * C + o_t
    b_g, m_closed = load_gates(p_g + i_b * stride_b, o_pos, o_h, T, H, stride_t, stride_h)
    m_closed |= b_g <= NOTHING
    b_g = tl.where(m_closed, 0.0, b_g)
    b_since = tl.associative_scan(tl.where(m_closed, o_t[:, None], -1), 0, maximum)  # [C, BH]
    if HAS_DOC:
        b_doc = tl.load(p_doc + tl.minimum(o_pos, T - 1)) - i_n * C
        b_since = tl.maximum(b_since, tl.where(b_doc < 0, -1, b_doc)[:, None])
    p_tile = (i_b * H + o_h[None, :]) * NC * C + o_pos[:, None]
    m_h = (o_h < H)[None, :]
    tl.store(p_c + p_tile, tl.cumsum(b_g, 0).to(tl.float32), mask=m_h)
    tl.store(p_since + p_tile, b_since, mask=m_h)


@triton.jit
def entering(p_c, p_since, o_t):
    """Weights of the state before the chunk in its rows. # [C]"""
    return tl.where(tl.load(p_since + o_t) < 0, tl.exp2(tl.load(p_c + o_t)), 0.0)


@triton.jit
def leaving(p_c, p_since, o_t, C: tl.constexpr):
    """Weights of the chunk's tokens, and of the state before it, in the state after it. # [C], []"""
    b_last, i_since = tl.load(p_c + C - 1), tl.load(p_since + C - 1)
    b_w = tl.where(o_t >= i_since, tl.exp2(b_last - tl.load(p_c + o_t)), 0.0)
    return b_w, tl.where(i_since < 0, tl.exp2(b_last), 0.0)


@triton.jit
def within(p_c, p_since, o_t, GATED: tl.constexpr):
    """Weights of the chunk's tokens in its rows. # [C, C] float32"""
    m_seen = o_t[:, None] >= o_t[None, :]
    if GATED:
        b_c = tl.load(p_c + o_t)
        m_seen &= o_t[None, :] >= tl.load(p_since + o_t)[:, None]
        return tl.exp2(tl.where(m_seen, b_c[:, None] - b_c[None, :], -float("inf")))
    return tl.where(m_seen, 1.0, 0.0)


@triton.jit
def _scan(
    b_s, p_x, p_y, p_c, p_since, p_states, stride_x, stride_y, i_from, i_until, T, scale, o_k, o_v, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, STORE: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the state after some chunks, from that before them; with BACK of its gradient before them, from that
    after. With STORE also what each of them starts from."""
    o_t, m_k, m_v = tl.arange(0, C), o_k < K, o_v < V
    o_s = o_k[:, None] * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    for i in range(i_until - i_from):
        i_n = i_from + i
        if BACK:
            i_n = i_until - 1 - i
        i_n = i_n.to(tl.int64)
        if STORE:
            tl.store(p_states + i_n * K * V + o_s, b_s.to(p_states.dtype.element_ty), mask=m_s)
        m_t = i_n * C + o_t < T
        p_tx, p_ty = p_x + i_n * C * stride_x, p_y + i_n * C * stride_y
        b_x = tl.load(p_tx + o_t[None, :] * stride_x + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0.0)
        b_y = tl.load(p_ty + o_t[:, None] * stride_y + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
        if GATED:
            b_w, b_total = leaving(p_c + i_n * C, p_since + i_n * C, o_t, C)
            if BACK:
                b_w = entering(p_c + i_n * C, p_since + i_n * C, o_t) * scale
            b_x = (b_x * b_w[None, :]).to(b_y.dtype)
            b_s *= b_total
        elif BACK:
            b_x = (b_x * scale).to(b_y.dtype)
        b_s += tl.dot(b_x, b_y, input_precision=PRECISION)
    return b_s


@triton.jit
def _segment(
    p_x, p_y, p_c, p_since, p_states, p_first, p_last, p_parts, p_from, p_until, p_left, stride_x, stride_y, i_s, S, L,
    T, NC, scale, o_k, o_v, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, BACK: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the states before the chunks of a segment; with BACK, of the gradients of those after. With PARTS, of
    what the segment alone leaves to the others."""
    o_s = o_k[:, None] * V + o_v[None, :]
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    b_s = tl.zeros([o_k.shape[0], o_v.shape[0]], tl.float32)
    i_a, i_b = tl.minimum(i_s * L, NC), tl.minimum((i_s + 1) * L, NC)
    if PARTS:
        i_a, i_b = needed_by_others(p_from, p_until, i_a, i_b, i_s, S, GATED, BACK)
    else:
        m_first = m_s
        if SPLIT:
            i_need = needed(p_from, p_until, i_s, S, NC, GATED, BACK)
            m_first &= i_need == (NC if BACK else 0)
        if FIRST:
            b_s += tl.load(p_first + o_s, mask=m_first, other=0.0).to(tl.float32)
        if SPLIT:
            b_s = left_before(b_s, p_parts, p_left, i_s, i_need, L, o_s, m_s, K * V, GATED, BACK)
    b_s = _scan(b_s, p_x, p_y, p_c, p_since, p_states, stride_x, stride_y, i_a, i_b, T, scale, o_k, o_v, K, V, C, GATED,
                not PARTS, BACK, PRECISION)  # fmt: skip
    if PARTS:
        tl.store(p_parts + i_s.to(tl.int64) * K * V + o_s, b_s, mask=m_s)
    elif LAST:
        tl.store(p_last + o_s, b_s, mask=m_s & (i_s == (0 if BACK else S - 1)))


@launched
@triton.jit(do_not_specialize=["T", "NC", "S", "L"])
def chunk_states_kernel(
    p_k, p_v, p_q, p_do, p_c, p_since, p_h, p_dh, p_first, p_last, p_dlast, p_dfirst, p_parts, p_dparts, p_from,
    p_until, p_left, T, NC, S, L, scale, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_qb,
    stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GATED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, DLAST: tl.constexpr,
    DFIRST: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States before each chunk, and (programs of axis 2 after the first) gradients of those after each. With PARTS what
    each segment of S, of L chunks each, leaves to the others of them."""
    i_s, i_bh, i_tile = tl.program_id(0) % S, (tl.program_id(0) // S).to(tl.int64), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    o_k, o_v = i_tile // tl.cdiv(V, BV) * BK + tl.arange(0, BK), i_tile % tl.cdiv(V, BV) * BV + tl.arange(0, BV)
    i_g = i_h // (H // G)
    p_c += i_bh * NC * C
    p_since += i_bh * NC * C
    p_from += i_bh * S
    p_until += i_bh * S
    p_left += i_bh * S
    o_states, o_state = i_bh * NC * K * V, i_bh * K * V
    if tl.program_id(2) == 0:
        _segment(p_k + i_b * stride_kb + i_g * stride_kh, p_v + i_b * stride_vb + i_g * stride_vh, p_c, p_since,
                 p_h + o_states, p_first + o_state, p_last + o_state, p_parts + S * o_state, p_from, p_until, p_left,
                 stride_kt, stride_vt, i_s, S, L, T, NC, scale, o_k, o_v, K, V, C, GATED, FIRST, LAST, False, PARTS,
                 SPLIT, PRECISION)  # fmt: skip
    else:
        _segment(p_q + i_b * stride_qb + i_h * stride_qh, p_do + i_b * stride_db + i_h * stride_dh, p_c, p_since,
                 p_dh + o_states, p_dlast + o_state, p_dfirst + o_state, p_dparts + S * o_state, p_from, p_until,
                 p_left, stride_qt, stride_dt, i_s, S, L, T, NC, scale, o_k, o_v, K, V, C, GATED, DLAST, DFIRST, True,
                 PARTS, SPLIT, PRECISION)  # fmt: skip


@launched
@triton.jit(do_not_specialize=["T", "NC"])
def chunk_output_kernel(
    p_q, p_k, p_v, p_h, p_c, p_since, p_o, T, NC, scale, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt,
    stride_kh, stride_vb, stride_vt, stride_vh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, STATE_PRECISION: tl.constexpr,
):  # fmt: skip
    """o of a chunk, BV channels of a head."""
    i_bh, i_n, i_v = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h, i_bh = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh.to(tl.int64)
    i_g = i_h // (H // G)
    o_t, o_v = tl.arange(0, C), i_v * BV + tl.arange(0, BV)
    m_t, m_v = i_n * C + o_t < T, o_v < V
    p_q += i_b * stride_qb + i_n * C * stride_qt + i_h * stride_qh
    p_k += i_b * stride_kb + i_n * C * stride_kt + i_g * stride_kh
    p_v += i_b * stride_vb + i_n * C * stride_vt + i_g * stride_vh
    p_h += (i_bh * NC + i_n) * K * V
    p_c += (i_bh * NC + i_n) * C
    p_since += (i_bh * NC + i_n) * C
    b_a = tl.zeros([C, C], tl.float32)
    b_o = tl.zeros([C, BV], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_q = tl.load(p_q + o_t[:, None] * stride_qt + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_k = tl.load(p_k + o_t[None, :] * stride_kt + o_k[:, None], mask=m_t[None, :] & m_k[:, None], other=0.0)
        b_h = tl.load(p_h + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0.0)
        b_a += tl.dot(b_q, b_k, input_precision=PRECISION)  # [C, C]
        b_o += tl.dot(b_q.to(b_h.dtype), b_h, input_precision=STATE_PRECISION)  # [C, BV]
    b_v = tl.load(p_v + o_t[:, None] * stride_vt + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
    if GATED:
        b_o *= entering(p_c, p_since, o_t)[:, None]
    b_a = b_a * within(p_c, p_since, o_t, GATED) * scale
    b_o = b_o * scale + tl.dot(b_a.to(b_v.dtype), b_v, input_precision=PRECISION)
    p_tile = p_o + ((i_b * T + i_n * C + o_t[:, None]) * H + i_h) * V + o_v[None, :]
    tl.store(p_tile, b_o.to(p_o.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])


class ChunkGates(NamedTuple):
    """Sums of log2 gates within the chunks and the first tokens seen there, [B, H, chunks * CHUNK]."""

    c: Tensor
    since: Tensor


def chunk_gates(log_decay: Tensor, cu_seqlens: Tensor | None) -> ChunkGates:
    """The sums of gates [B, T, H], of any strides."""
    B, T, H = log_decay.shape
    NC, BH = cdiv(T, CHUNK), min(HEADS, power_of_2(H))
    c = log_decay.new_empty((B, H, NC * CHUNK), dtype=torch.float32)
    since, doc = torch.empty_like(c, dtype=torch.int32), segment_starts(cu_seqlens, T)
    chunk_gates_kernel[(NC, B * cdiv(H, BH))](
        log_decay, since if doc is None else doc, c, since, T, NC, H, *log_decay.stride(), HAS_DOC=doc is not None,
        BH=BH, C=CHUNK, num_warps=1,
    )  # fmt: skip
    return ChunkGates(c, since)


class Chunked(NamedTuple):
    """What all launches of a call read: q, k, v, their gates, the borders of packed sequences, the scale, and the
    weight that segments may leave out."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: ChunkGates | None
    cu_seqlens: Tensor | None
    scale: float
    eps: float = 0.0

    @property
    def shape(self) -> dict[str, object]:
        K, V = self.q.shape[3], self.v.shape[3]
        return {
            "H": self.q.shape[2], "G": self.k.shape[2], "K": K, "V": V, "C": CHUNK, "GATED": self.gates is not None,
            "PRECISION": dot_precision(self.q.dtype),
        }  # fmt: skip

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of states between chunks: float16 would overflow."""
        return torch.float32 if self.q.dtype == torch.float16 else self.q.dtype

    @property
    def state_precision(self) -> str:
        return "tf32" if self.q.dtype == torch.float16 else dot_precision(self.q.dtype)


def chunk_states(
    x: Chunked, first: Tensor | None, last: Tensor | None, do: Tensor | None = None, dlast: Tensor | None = None,
    dfirst: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The states before the chunks [B, H, chunks, K, V], and with do the gradients of those after; fills last and
    dfirst."""
    (B, T, H, K), V = x.q.shape, x.v.shape[3]
    NC, ways = cdiv(T, CHUNK), 1 if do is None else 2
    h = x.q.new_empty((B, H, NC, K, V), dtype=x.state_dtype)
    dh = h if do is None else torch.empty_like(h)
    tiles = TILES["states"].launch(x.q, x.v)
    programs = cdiv(K, tiles["BK"]) * cdiv(V, tiles["BV"])
    parts = split(B * H * programs * ways, NC, x.q.device, x.cu_seqlens is not None)
    many, c, since = parts.many, *(x.gates or (h, h))
    if many > 1 and x.gates is not None:
        parts = spans(parts, *x.gates, CHUNK, x.eps, first is not None, dlast is not None)
    left = [x.q.new_empty((B, H, many, K, V), dtype=torch.float32) if many > 1 else h for _ in range(ways)]
    d = x.v if do is None else do
    for alone in (True, False) if many > 1 else (False,):
        chunk_states_kernel[(B * H * many, programs, ways)](
            x.k, x.v, x.q, d, c, since, h, dh, *(h if y is None else y for y in (first, last, dlast, dfirst, left[0],
            left[-1], *parts[2:])), T, NC, many, parts.chunks, x.scale, *x.k.stride()[:3], *x.v.stride()[:3],
            *x.q.stride()[:3], *d.stride()[:3], **x.shape, **tiles, FIRST=first is not None, LAST=last is not None,
            DLAST=dlast is not None, DFIRST=dfirst is not None, PARTS=alone, SPLIT=many > 1,
        )  # fmt: skip
    return h, dh


def chunk_outputs(x: Chunked, h: Tensor) -> Tensor:
    """o [B, T, H, V]."""
    (B, T, H), V = x.q.shape[:3], x.v.shape[3]
    NC, o = cdiv(T, CHUNK), x.v.new_empty((B, T, H, V))
    c, since = x.gates or (h, h)
    tiles = TILES["output"].launch(x.q, x.v)
    chunk_output_kernel[(B * H, NC, cdiv(V, tiles["BV"]))](
        x.q, x.k, x.v, h, c, since, o, T, NC, x.scale, *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3],
        **x.shape, **tiles, STATE_PRECISION=x.state_precision,
    )  # fmt: skip
    return o
