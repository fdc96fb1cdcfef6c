"""The kernel of a gated delta rule's gradients over chunks of tokens, from what flash-linear-attention has of a chunk:
the state before it and the gradient of that after it, values without what they erase, and running sums of gates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.linear.chunks import CHUNK, TILES


@launched
@triton.jit(do_not_specialize=["T", "NC"])
def delta_backward_kernel(
    p_q, p_k, p_v, p_do, p_dv, p_h, p_dh, p_c, p_cu, p_chunks, p_dq, p_dk, p_dw, p_dg, T, NC, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's queries, keys, erasing keys and sums of gates for one head.

    dg is that of the running sums; the sum over a chunk's tokens from t on is the gradient of gate t.
    """
    i_bh, i_n = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    i_tile = (i_b * NC + i_n) * H + i_h
    i_0, n_t = i_b * T + i_n * C, T - i_n * C
    if PACKED:
        i_doc, i_c = tl.load(p_chunks + i_n * 2).to(tl.int64), tl.load(p_chunks + i_n * 2 + 1).to(tl.int64)
        i_first = tl.load(p_cu + i_doc).to(tl.int64)
        i_0, n_t = i_first + i_c * C, tl.load(p_cu + i_doc + 1).to(tl.int64) - i_first - i_c * C
    o_t = tl.arange(0, C)
    m_t = o_t < n_t
    o_g, o_h = (i_0 + o_t) * G + i_h // (H // G), (i_0 + o_t) * H + i_h  # rows of q and k; of all else
    p_h += i_tile * K * V
    p_dh += i_tile * K * V

    b_da = tl.zeros([C, C], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        b_do = tl.load(p_do + o_h[:, None] * V + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_v = tl.load(p_v + o_h[None, :] * V + o_v[:, None], mask=m_t[None, :] & m_v[:, None], other=0.0)
        b_da += tl.dot(b_do, b_v)
    b_c = tl.load(p_c + o_h, mask=m_t, other=0.0)
    b_last = tl.load(p_c + (i_0 + tl.minimum(n_t, C) - 1) * H + i_h)
    m_seen = (o_t[:, None] >= o_t[None, :]) & m_t[:, None]
    b_w = tl.exp2(tl.where(m_seen, b_c[:, None] - b_c[None, :], -float("inf")))
    b_da = (b_da * b_w * scale).to(p_q.dtype.element_ty)
    b_in = tl.exp2(b_c) * scale
    b_out = tl.where(m_t, tl.exp2(b_last - b_c), 0.0)

    b_rows, b_keys = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    b_past = tl.zeros([], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_dq = tl.zeros([C, BK], tl.float32)
        b_dk = tl.zeros([C, BK], tl.float32)
        b_dw = tl.zeros([C, BK], tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < V
            m_tv, m_s = m_t[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
            b_do = tl.load(p_do + o_h[:, None] * V + o_v[None, :], mask=m_tv, other=0.0)
            b_v = tl.load(p_v + o_h[:, None] * V + o_v[None, :], mask=m_tv, other=0.0)
            b_dv = tl.load(p_dv + o_h[:, None] * V + o_v[None, :], mask=m_tv, other=0.0)
            b_h = tl.load(p_h + o_k[None, :] * V + o_v[:, None], mask=m_s, other=0.0)  # [BV, BK]
            b_dh = tl.load(p_dh + o_k[None, :] * V + o_v[:, None], mask=m_s, other=0.0)
            b_dq += tl.dot(b_do, b_h.to(b_do.dtype))
            b_dk += tl.dot(b_v, b_dh.to(b_v.dtype))
            b_dw += tl.dot(b_dv.to(b_v.dtype), b_h.to(b_v.dtype))
            b_past += tl.sum(tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 0), 0)
        m_tk = m_t[:, None] & m_k[None, :]
        b_q = tl.load(p_q + o_g[:, None] * K + o_k[None, :], mask=m_tk, other=0.0)
        b_k = tl.load(p_k + o_g[:, None] * K + o_k[None, :], mask=m_tk, other=0.0)
        b_dq = b_dq * b_in[:, None] + tl.dot(b_da, b_k)
        b_dk *= b_out[:, None]
        b_near = tl.dot(tl.trans(b_da), b_q)
        b_rows += tl.sum(b_q.to(tl.float32) * b_dq - b_k.to(tl.float32) * b_near, 1)
        b_keys += tl.sum(b_k.to(tl.float32) * b_dk, 1)
        o_tk = o_h[:, None] * K + o_k[None, :]
        tl.store(p_dq + o_tk, b_dq.to(p_dq.dtype.element_ty), mask=m_tk)
        tl.store(p_dk + o_tk, (b_dk + b_near).to(p_dk.dtype.element_ty), mask=m_tk)
        tl.store(p_dw + o_tk, (-b_dw).to(p_dw.dtype.element_ty), mask=m_tk)
    b_total = tl.sum(b_keys, 0) + b_past * tl.exp2(b_last)
    b_dg = b_rows - b_keys + tl.where(o_t == tl.minimum(n_t, C) - 1, b_total, 0.0)
    tl.store(p_dg + o_h, b_dg, mask=m_t)


class DeltaChunks(NamedTuple):
    """What the gradients of a gated delta rule need, contiguous, by flash-linear-attention's names.

    Args:
        q, k: ``[B, T, G, K]``.
        v: values without what they erase, ``[B, T, H, V]``, do and dv gradients of outputs and of these.
        w: keys that erase, ``[B, T, H, K]``.
        h, dh: the state before each chunk and the gradient of that after it, ``[B, chunks, H, K, V]``.
        g: sums of log2 gates from the begin of the chunk on, ``[B, T, H]`` float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    do: Tensor
    dv: Tensor
    h: Tensor
    dh: Tensor
    g: Tensor


def delta_gradients(
    x: DeltaChunks, scale: float, cu_seqlens: Tensor | None, chunks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q and k ``[B, T, H, K]``, of w, and of the sums of gates.

    Args:
        cu_seqlens: borders ``[N + 1]`` int64 of packed sequences.
        chunks: the sequence of each chunk and its number there, ``[n, 2]`` int64.
    """
    (B, T, G, K), (H, V) = x.k.shape, x.v.shape[2:]
    NC = cdiv(T, CHUNK) if chunks is None else len(chunks)
    dq, dk, dw = x.q.new_empty((B, T, H, K)), x.k.new_empty((B, T, H, K)), torch.empty_like(x.w)
    dg = torch.empty(x.g.shape, dtype=torch.float32, device=x.g.device)
    delta_backward_kernel[(B * H, NC)](
        x.q, x.k, x.v, x.do, x.dv, x.h, x.dh, x.g, x.g if cu_seqlens is None else cu_seqlens,
        x.g if chunks is None else chunks, dq, dk, dw, dg, T, NC, scale, G, H, K, V, C=CHUNK,
        PACKED=chunks is not None, **TILES["backward"].launch(x.q, x.v),
    )  # fmt: skip
    return dq, dk, dw, dg
