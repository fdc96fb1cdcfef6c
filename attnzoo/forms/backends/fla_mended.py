"""A kernel of ours in place of one of flash-linear-attention's that Triton 3.4 to 3.7.0 miscompiles on Hopper.

The library refuses the gradients of a gated delta rule there. It is given this one by its registry of backends, as it
takes TileLang's where that is installed; but first the kernel must agree with its definition on that very machine.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.kernels.common.recording import recorders
from attnzoo.kernels.common.untraced import cached_in_traces, constant_in_traces

logger = logging.getLogger("attnzoo.fla")

NAME = "attnzoo"  # in its registry
CHUNK = 64  # tokens
MOST_ERROR = 2**-6  # of the kernel in 16 bits, relative, by norms
TEXTS = [0, 5, 71, 199], [0, 130]  # borders of those that prove the kernel


def verified(
    q: Tensor, v: Tensor, w: Tensor | None = None, g: Tensor | None = None, g_gamma: Tensor | None = None,
    dv: Tensor | None = None, state_v_first: bool = False, chunk_size: int = 64, **others: Any,
) -> tuple[bool, str | None]:  # fmt: skip
    """Whether the kernel serves a call of ``chunk_bwd_dqkwg``, and why not."""
    if w is None or g is None or g_gamma is not None or dv is None:
        return False, "expected a gated delta rule"
    if state_v_first or chunk_size != 64 or q.dtype == torch.float32:
        return False, "expected states [K, V] of chunks of 64 tokens, and 16 bits"
    if not proven(heads_of(q, v), q.dtype, q.device):
        return False, "expected a kernel that agrees with its definition"
    return True, None


def gradients(
    *, scale: float | None = None, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What its ``chunk_bwd_dqkwg`` returns."""
    from attnzoo.kernels.linear.delta_backward import DeltaChunks, delta_gradients

    if chunk_indices is None and cu_seqlens is not None:
        chunk_indices = importlib.import_module("fla.ops.utils").prepare_chunk_indices(cu_seqlens, 64)
    x = DeltaChunks(*(given[name].contiguous() for name in DeltaChunks._fields))
    G, H, K = x.k.shape[2], x.v.shape[2], x.k.shape[3]
    dq, dk, dw, dg = delta_gradients(x, K**-0.5 if scale is None else scale, cu_seqlens, chunk_indices)
    if G != H:
        dq, dk = (y.unflatten(2, (G, H // G)).sum(3) for y in (dq, dk))
    return dq, dk, dw, dg


def chunks_of(borders: list[int]) -> list[tuple[int, int]]:
    """The sequence of each chunk of packed sequences, and its number there."""
    lengths = [b - a for a, b in itertools.pairwise(borders)]
    return [(n, i) for n, length in enumerate(lengths) for i in range(-(-length // CHUNK))]


def drawn(sizes: tuple[int, int, int, int], borders: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of :func:`gradients` for sizes (G, H, K, V), of one row of packed sequences, on the CPU."""
    (G, H, K, V), make, T = sizes, torch.Generator().manual_seed(0), borders[-1]
    shapes = {"q": (G, K), "k": (G, K), "v": (H, V), "do": (H, V), "dv": (H, V), "w": (H, K)}
    found = {name: torch.randn(1, T, *shape, generator=make).to(dtype) for name, shape in shapes.items()}
    chunks = chunks_of(borders)
    found |= {name: torch.randn(1, len(chunks), H, K, V, generator=make).to(dtype) for name in ("h", "dh")}
    g = -torch.rand(1, T, H, generator=make) / 3
    for n, i in chunks:
        rows = slice(borders[n] + i * CHUNK, min(borders[n] + (i + 1) * CHUNK, borders[n + 1]))
        g[:, rows] = g[:, rows].cumsum(1)
    return found | {"g": g, "cu_seqlens": torch.tensor(borders), "chunk_indices": torch.tensor(chunks)}


def definition(x: dict[str, Tensor], scale: float) -> list[Tensor]:
    """What :func:`gradients` returns for what is :func:`drawn`, chunk by chunk in float64."""
    (G, H), borders = (x[n].shape[2] for n in "qv"), x["cu_seqlens"].tolist()
    each = {n: y[0].double() for n, y in x.items() if n not in ("cu_seqlens", "chunk_indices")}
    q, k = (each[n].repeat_interleave(H // G, 1) for n in "qk")
    dq, dk, dw, dg = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(each["g"])
    for chunk, (n, i) in enumerate(x["chunk_indices"].tolist()):
        at = slice(borders[n] + i * CHUNK, min(borders[n] + (i + 1) * CHUNK, borders[n + 1]))
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


@constant_in_traces
def proven(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel agrees with its definition for heads of sizes (G, H, K, V) here, packed and not; else a line
    is logged."""
    if not recorders.compiles:
        return _proven(sizes, dtype, device)
    for _, x in cases(drawn, TEXTS, sizes, dtype, device):
        gradients(**x, scale=0.3)
    return True  # no launch has computed anything yet


def cases(
    drawn: Callable[..., dict[str, Tensor]], texts: Sequence[list[int]], sizes: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:  # fmt: skip
    """Arguments ``drawn`` for sizes and borders of texts: on the CPU, packed; on the device, one text not packed."""
    for borders in texts:
        with torch.device("cpu"):  # whatever the default device
            given = drawn(sizes, borders, dtype)
        alone = {} if len(borders) > 2 else {"cu_seqlens": None, "chunk_indices": None}
        yield given, {name: y.to(device) for name, y in given.items()} | alone


def agree(
    kernel: Callable[..., Sequence[Tensor]], definition: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    of: Iterator[tuple[dict[str, Tensor], dict[str, Any]]], most: float,
) -> bool:  # fmt: skip
    """Whether a kernel is off from its definition by ``most`` at most in all cases, relative, by norms."""
    for given, x in of:
        with torch.device("cpu"):
            wanted = definition(given)
        for got, want in zip(kernel(**x), wanted, strict=True):
            if not (got.cpu() - want).norm() <= most * want.norm():
                return False
    return True


@functools.cache
@torch.no_grad()
def _proven(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> bool:
    by = functools.partial(gradients, scale=0.3), functools.partial(definition, scale=0.3)
    agrees = agree(*by, cases(drawn, TEXTS, sizes, dtype, device), MOST_ERROR)
    if not agrees:
        logger.warning(
            "the backward kernel of a gated delta rule is miscompiled here for G=%d, H=%d, K=%d, V=%d: "
            "flash-linear-attention's kernels with a decay per channel run instead", *sizes,
        )  # fmt: skip
    return agrees


def hand_over(operation: str, name: str, verifier: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Give the library a function of ours in place of its ``name`` where the verifier says so; False where it takes
    none: by the owner's wish, or as its release cannot."""
    try:
        backends: Any = importlib.import_module("fla.backends")
        importlib.import_module(f"fla.ops.{operation}.backends")
    except ImportError:
        return False
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return False
    calls = {f"{name}_verifier": staticmethod(verifier), name: staticmethod(function)}
    last = {"backend_type": NAME, "priority": 9}  # behind all others
    backends.register(operation)(type("Backend", (backends.BaseBackend,), calls | last))
    return True


@cached_in_traces
def register() -> bool:
    """Give the library the kernel, where it takes one."""
    return hand_over("common", "chunk_bwd_dqkwg", verified, gradients)
