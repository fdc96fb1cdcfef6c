"""A kernel of ours in place of one of flash-linear-attention's that Triton 3.4 to 3.7.0 miscompiles on Hopper: the
gradients of a gated delta rule, which the library refuses there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.forms.backends.fla_replaced import CHUNK, Replacement, chunks_of, in_chunks, indices_of_chunks
from attnzoo.kernels.common.untraced import cached_in_traces, constant_in_traces


def verified(
    q: Tensor, v: Tensor, w: Tensor | None = None, g: Tensor | None = None, g_gamma: Tensor | None = None,
    dv: Tensor | None = None, state_v_first: bool = False, chunk_size: int = 64, **others: Any,
) -> tuple[bool, str | None]:  # fmt: skip
    """Whether the kernel serves a call of ``chunk_bwd_dqkwg``, and why not."""
    if w is None or g is None or g_gamma is not None or dv is None:
        return False, "expected a gated delta rule"
    if state_v_first or chunk_size != CHUNK or q.dtype == torch.float32:
        return False, "expected states [K, V] of chunks of 64 tokens, and 16 bits"
    if not proven(heads_of(q, v), q.dtype, q.device):
        return False, "expected a kernel that agrees with its definition"
    return True, None


def gradients(
    *, scale: float | None = None, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What its ``chunk_bwd_dqkwg`` returns."""
    from attnzoo.kernels.linear.delta_backward import DeltaChunks, delta_gradients

    x = DeltaChunks(*(given[name].contiguous() for name in DeltaChunks._fields))
    G, H, K = x.k.shape[2], x.v.shape[2], x.k.shape[3]
    chunks = indices_of_chunks(cu_seqlens, chunk_indices)
    dq, dk, dw, dg = delta_gradients(x, K**-0.5 if scale is None else scale, cu_seqlens, chunks)
    if G != H:
        dq, dk = (y.unflatten(2, (G, H // G)).sum(3) for y in (dq, dk))
    return dq, dk, dw, dg


def drawn(sizes: tuple[int, int, int, int], borders: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of :func:`gradients` for sizes (G, H, K, V), of one row of packed sequences, on the CPU."""
    (G, H, K, V), make, T = sizes, torch.Generator().manual_seed(0), borders[-1]
    shapes = {"q": (G, K), "k": (G, K), "v": (H, V), "do": (H, V), "dv": (H, V), "w": (H, K)}
    found = {name: torch.randn(1, T, *shape, generator=make).to(dtype) for name, shape in shapes.items()}
    NC = len(chunks_of(borders))
    found |= {name: torch.randn(1, NC, H, K, V, generator=make).to(dtype) for name in ("h", "dh")}
    return found | in_chunks(-torch.rand(1, T, H, generator=make) / 3, borders)


def definition(x: dict[str, Tensor], scale: float | None = None) -> list[Tensor]:
    """What :func:`gradients` returns for what is :func:`drawn`, chunk by chunk in float64."""
    G, H, K, _ = heads_of(x["q"], x["v"])
    scale = K**-0.5 if scale is None else scale
    each = {n: y[0].double() for n, y in x.items() if n not in ("cu_seqlens", "chunk_indices")}
    q, k = (each[n].repeat_interleave(H // G, 1) for n in "qk")
    dq, dk, dw, dg = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(each["g"])
    for chunk, (*_, at) in enumerate(chunks_of(x["cu_seqlens"].tolist())):
        h, dh, c = each["h"][chunk], each["dh"][chunk], each["g"][at]  # [H, K, V], [t, H]
        seen = torch.ones(len(c), len(c), dtype=torch.bool, device=c.device).tril()[..., None]
        weights = torch.where(seen, (c[:, None] - c[None]).clamp(max=0).exp2(), 0.0)  # [t, s, H]
        of_pair = torch.einsum("thv,shv->tsh", each["do"][at], each["v"][at]) * weights * scale
        rows = torch.einsum("thv,hkv->thk", each["do"][at], h) * c.exp2()[..., None] * scale
        keys = torch.einsum("shv,hkv->shk", each["v"][at], dh) * (c[-1] - c).exp2()[..., None]
        rows += torch.einsum("tsh,shk->thk", of_pair, k[at])
        near = torch.einsum("tsh,thk->shk", of_pair, q[at])
        dq[at], dk[at] = rows, keys + near
        dw[at] = -torch.einsum("thv,hkv->thk", each["dv"][at], h)
        dg[at] = (q[at] * rows - k[at] * (keys + near)).sum(-1)
        dg[at][-1] += (k[at] * keys).sum((0, 2)) + (h * dh).sum((1, 2)) * c[-1].exp2()
    return [*(y.unflatten(1, (G, H // G)).sum(2)[None] for y in (dq, dk)), dw[None], dg[None]]


def heads_of(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """The heads of q ``[B, T, G, K]`` and of v ``[B, T, H, V]`` with their channels: (G, H, K, V)."""
    return q.shape[2], v.shape[2], q.shape[3], v.shape[3]


REPLACEMENT = Replacement(
    "common", "chunk_bwd_dqkwg", verified, gradients, drawn, definition,
    texts=([0, 5, 71, 199], [0, 130]), most_error=2**-6,
    refused="the backward kernel of a gated delta rule is miscompiled here for G=%d, H=%d, K=%d, V=%d: "
    "flash-linear-attention's kernels with a decay per channel run instead",
)  # fmt: skip


@constant_in_traces
def proven(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel agrees with its definition for heads of sizes (G, H, K, V) here; else a line is logged."""
    return REPLACEMENT.proven(sizes, dtype, device)


register = cached_in_traces(REPLACEMENT.hand_over)
