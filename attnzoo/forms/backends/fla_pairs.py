"""A kernel of ours in place of flash-linear-attention's slowest one of KDA, on Hopper GPUs: the gradients of q, k,
decays and strengths from pairs of tokens of a chunk. It is taken for heads for which it agrees with its definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.forms.backends.fla_replaced import CHUNK, Replacement, chunks_of, in_chunks, indices_of_chunks
from attnzoo.kernels.common.device import machine
from attnzoo.kernels.common.untraced import cached_in_traces, constant_in_traces

ARGUMENTS = ("q", "k", "g", "beta", "dAqk", "dAkk", "dq", "dk", "db", "dg")  # by that library's names
CLOSED = -115.0  # log2 of a decay that is next to nothing


def serves(q: Tensor) -> bool:
    """Whether the kernel is made for the GPU and dtype of q."""
    return q.is_cuda and machine(q.device).hopper and q.dtype != torch.float32


def verified(
    q: Tensor, g: Tensor, dAqk: Tensor, dAkk: Tensor, chunk_size: int = 64, use_graph: bool = False, **others: Any
) -> tuple[bool, str | None]:
    """Whether the kernel serves a call of ``chunk_kda_bwd_intra``, and why not."""
    if use_graph or chunk_size != CHUNK or not serves(q):
        return False, "expected chunks of 64 tokens, 16 bits and a Hopper GPU, and no use_graph"
    if dAqk.dtype != torch.float32 or dAkk.dtype != torch.float32 or g.dtype != torch.float32:
        return False, "expected float32 sums of gates and gradients of pairs"
    if not proven((q.shape[2], g.shape[2], q.shape[3]), q.dtype, q.device):
        return False, "expected a kernel that agrees with its definition"
    return True, None


def gradients(
    *, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What its ``chunk_kda_bwd_intra`` returns."""
    from attnzoo.kernels.linear.pair_backward import Pairs, pair_gradients

    chunks = indices_of_chunks(cu_seqlens, chunk_indices)
    return pair_gradients(Pairs(*(given[name].contiguous() for name in ARGUMENTS)), cu_seqlens, chunks)


def drawn(sizes: tuple[int, int, int], borders: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of :func:`gradients` for sizes (G, H, K), of one row of packed sequences, on the CPU; decays of the
    last half of the tokens may be next to nothing."""
    (G, H, K), make, T = sizes, torch.Generator().manual_seed(0), borders[-1]
    shapes = {"dAqk": (H, CHUNK), "dAkk": (H, CHUNK), "dq": (H, K), "dk": (H, K), "dg": (H, K), "db": (H,)}
    found = {name: torch.randn(1, T, *shape, generator=make) for name, shape in shapes.items()}
    found |= {name: torch.randn(1, T, G, K, generator=make).to(dtype) for name in "qk"}
    found["beta"] = torch.rand(1, T, H, generator=make).to(dtype)
    shut = (torch.rand(1, T, H, K, generator=make) < 0.1) & (torch.arange(T) >= T // 2)[:, None, None]
    return found | in_chunks(torch.where(shut, CLOSED, -torch.rand(1, T, H, K, generator=make)), borders)


def definition(x: dict[str, Tensor]) -> list[Tensor]:
    """What :func:`gradients` returns for what is :func:`drawn`, chunk by chunk in float64."""
    G, H = x["q"].shape[2], x["g"].shape[2]
    each = {n: y[0].double() for n, y in x.items() if n not in ("cu_seqlens", "chunk_indices")}
    q, k = (each[n].repeat_interleave(H // G, 1) for n in "qk")
    dq, dk, db, dg = (each[n].clone() for n in ("dq", "dk", "db", "dg"))
    for *_, at in chunks_of(x["cu_seqlens"].tolist()):
        c, t = each["g"][at], torch.arange(len(each["g"][at]))
        seen, before = (t[:, None] >= t)[..., None], (t[:, None] > t)[..., None]
        weights = (c[:, None] - c[None]).masked_fill(~seen[..., None], -torch.inf).exp2()  # [t, s, H, K]
        of_q, of_k = (each[n][at, :, : len(t)].mT for n in ("dAqk", "dAkk"))
        of_q, of_k = of_q.where(seen, 0.0)[..., None] * weights, of_k.where(before, 0.0)[..., None] * weights
        beta = each["beta"][at][..., None]
        rows, erased = torch.einsum("tshk,shk->thk", of_q, k[at]), torch.einsum("tshk,shk->thk", of_k, k[at])
        columns = torch.einsum("tshk,thk->shk", of_q, q[at]) + torch.einsum("tshk,thk->shk", of_k, beta * k[at])
        dq[at] += rows
        dk[at] += beta * erased + columns
        db[at] += (erased * k[at]).sum(-1)
        dg[at] += q[at] * rows + k[at] * (beta * erased - columns)
    return [y[None] for y in (dq, dk, db, dg)]


REPLACEMENT = Replacement(
    "kda", "chunk_kda_bwd_intra", verified, gradients, drawn, definition, texts=([0, 5, 75], [0, 70]),
    most_error=2**-9, refused="the kernel of gradients of pairs is miscompiled here for G=%d, H=%d, K=%d: "
    "flash-linear-attention's own runs instead",
)  # fmt: skip


@constant_in_traces
def proven(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel agrees with its definition for heads of sizes (G, H, K) here; else a line is logged."""
    return REPLACEMENT.proven(sizes, dtype, device)


register = cached_in_traces(REPLACEMENT.hand_over)
