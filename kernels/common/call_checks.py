"""Checks of whole calls of attention, and the choice between the Triton kernels and the reference."""

from __future__ import annotations

import logging
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.values import OPAQUE, counted, in_transform, reads_values
from attnzoo.errors import did_you_mean
from attnzoo.kernels.common.argument_checks import check_log_dtype, check_numbers, check_tensors, check_values
from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.device import device_unavailable, interpreted
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.running_gates import GateSums

Impl = Literal["auto", "triton", "reference"]
IMPLS = get_args(Impl)
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST = 1024  # kinds of calls that are remembered
_said: set[tuple[str, str]] = set()
_right: set[tuple[Any, ...]] = set()  # kinds of calls that were checked


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, options: AttentionOptions, *,
    valid: Tensor | None = None, gate_sums: GateSums | None = None,
) -> None:  # fmt: skip
    """Types, shapes, dtypes, devices and options, and values where they may be read (``check_values``).

    Raises:
        TypeError: something that is no tensor, or no number.
        ValueError: all else; the message names the argument.
    """
    kind = _kind(q, k, v, log_decay, options) if valid is None and gate_sums is None else None
    if kind is not None and kind in _right:  # in compiled code there is no kind, and no set that changes is read
        return
    prune, sink, cu_seqlens, logit_bound = options.prune, options.sink, options.cu_seqlens, options.logit_bound
    if gate_sums is not None and not isinstance(gate_sums, GateSums):
        raise TypeError(f"gate_sums: expected GateSums or None, got {type(gate_sums).__name__}")
    tensors = {
        "q": q, "k": k, "v": v, "log_decay": log_decay, "sink": sink, "cu_seqlens": cu_seqlens,
        "logit_bound": logit_bound, "valid": valid, "gate_sums": None if gate_sums is None else gate_sums.c,
    }  # fmt: skip
    check_tensors(tensors, needed=("q", "k", "v"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 dimensions [batch, tokens, heads, dim], got shape {tuple(x.shape)}")
        if x.dtype != q.dtype or not x.is_floating_point():
            raise ValueError(f"{name}: expected the floating dtype of q ({q.dtype}), got {x.dtype}")
    B, T, H, K = q.shape
    S, G = k.shape[1], k.shape[2]
    if k.shape[0] != B or k.shape[3] != K:
        raise ValueError(f"k: expected [B={B}, S, G, K={K}] as in q, got {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected [B={B}, S={S}, G={G}, V] as in k, got {tuple(v.shape)}")
    exchanged = "; heads and tokens look exchanged (layout='bhtd' where heads come first)"
    hint = exchanged if S < T and G in (H, T) else ""
    if G == 0 or H == 0 or H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}{hint}")
    if K == 0:
        raise ValueError(f"q: expected at least one channel, got {tuple(q.shape)}")
    if T > S or T == 0:
        raise ValueError(f"q: expected 1 <= T <= S={S} (queries are the last T tokens), got T={T}{hint}")
    if log_decay is not None:
        if log_decay.shape != (B, S, H) and log_decay.shape != (H,):
            hint = exchanged if log_decay.shape == (B, H, S) else ""
            raise ValueError(
                f"log_decay: expected [B={B}, S={S}, H={H}] or [H={H}], a gate per query head, "
                f"got {tuple(log_decay.shape)}{hint}"
            )
        check_log_dtype("log_decay", log_decay, q)
    for name, per_head in (("sink", sink), ("logit_bound", logit_bound)):
        if per_head is not None and (per_head.shape != (H,) or not per_head.is_floating_point()):
            got = f"{per_head.dtype} {tuple(per_head.shape)}"
            raise ValueError(f"{name}: expected a floating tensor of shape [H={H}], got {got}")
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens: expected int32 or int64 [N+1] with N >= 1, got {got}")
        if B != 1 or T != S:
            raise ValueError(f"cu_seqlens: expected B=1 and T=S (packed sequences), got B={B}, T={T}, S={S}")
    check_numbers(options)
    if valid is not None and (valid.shape != (B, S) or valid.dtype != torch.bool):
        raise ValueError(f"valid: expected bool [B={B}, S={S}], got {valid.dtype} {tuple(valid.shape)}")
    if gate_sums is not None:
        if log_decay is not None or cu_seqlens is not None:
            given = "log_decay" if log_decay is not None else "cu_seqlens"
            raise ValueError(f"{given}: expected None with gate_sums (the gates of whole rows, already summed)")
        if gate_sums.c.shape[:2] != (B, H) or len(gate_sums) != S:
            got = f"[B={gate_sums.c.shape[0]}, S={len(gate_sums)}, H={gate_sums.c.shape[1]}]"
            raise ValueError(f"gate_sums: expected the sums of [B={B}, S={S}, H={H}] gates, got {got}")
        longest = gate_sums.longest
        if longest is not None and longest.shape != (B, G):
            got = f"B={longest.shape[0]}, G={longest.shape[1]}"
            raise ValueError(f"gate_sums: expected the longest of keys with B={B}, G={G} heads, got {got}")
    if prune is not None and not isinstance(prune, Prune):
        eps = f"(eps={prune})" if isinstance(prune, float) else "()"
        raise ValueError(f"prune: expected attnzoo.Prune{eps} or None, got {type(prune).__name__}")
    if prune is not None and log_decay is None and gate_sums is None:
        raise ValueError("prune: expected a log_decay (nothing decays without one), got log_decay=None")
    if logit_bound is not None and prune is None:
        raise ValueError("logit_bound: expected None without prune (nothing else reads it), got a tensor")
    check_values(q, log_decay=log_decay, sink=sink, logit_bound=logit_bound, cu_seqlens=cu_seqlens)
    if kind is not None:
        if len(_right) >= MOST:
            _right.clear()
        _right.add(kind)


def _kind(*given: Any) -> tuple[Any, ...] | None:
    """A key of all that the checks of a call look at; None where they also read values, or tensors of another kind."""
    *tensors, options = given
    if torch.compiler.is_compiling() or not isinstance(given[0], Tensor) or reads_values(given[0]):
        return None
    kind: list[Any] = []
    for x in (*tensors, *options):
        if type(x) is Tensor or type(x) is Parameter:
            kind += (x.shape, x.dtype, x.device, x.layout)
        elif x is None or type(x) in (int, float, Prune):
            kind += (type(x), x)
        else:
            return None
    return tuple(kind)


def check_whole_sequences(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, options: AttentionOptions) -> None:
    """``check_attention``, and as many keys as queries, with a gate per token or none."""
    check_tensors({"q": q, "log_decay": log_decay}, needed=("q",))
    if log_decay is not None and log_decay.ndim != 3:
        raise ValueError(f"log_decay: expected [B, T, H], got shape {tuple(log_decay.shape)}")
    check_attention(q, k, v, log_decay, options)
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k: expected as many tokens as q (T={q.shape[1]}), got {tuple(k.shape)}")


def check_receivers(receivers: tuple[Tensor, ...] | None, *of: Tensor) -> None:
    """Raise TypeError unless they are a tuple of tensors or None, and ValueError unless there is one of each shape."""
    if receivers is None:
        return
    if not isinstance(receivers, tuple | list) or not all(isinstance(x, Tensor) for x in receivers):
        raise TypeError(f"receivers: expected a tuple of tensors or None, got {receivers!r}")
    expected = [x.shape for x in of]
    if [x.shape for x in receivers if x.dtype == torch.float32] != expected:
        got = [f"{x.dtype} {tuple(x.shape)}" for x in receivers]
        raise ValueError(f"receivers: expected float32 tensors of shapes {[*map(tuple, expected)]}, got {got}")


def refuse_receivers(receivers: tuple[Tensor, ...] | None, why: str) -> None:
    """Raise ValueError where the reference runs, which rounds no gradients; ``why``: there are no kernels."""
    if receivers is not None:
        raise ValueError(f"receivers: expected None in the reference{f' ({why})' if why else ''}, got tensors")


def pick_implementation(function: str, impl: str, why: str) -> str:
    """The implementation to run, with the reason ``why`` Triton cannot; an explicit choice never falls back."""
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLS)}, got {impl!r}{did_you_mean(impl, IMPLS)}")
    if impl == "triton" and why:
        error = ImportError if "installed" in why else ValueError
        raise error(f"impl: 'triton' cannot run here: {why}")
    picked = ("reference" if why else "triton") if impl == "auto" else impl
    if impl == "auto" and not torch.compiler.is_compiling() and (function, picked) not in _said:
        _said.add((function, picked))
        logger = logging.getLogger(f"attnzoo.kernels.{function.removesuffix('_attention')}")
        logger.info("%s: auto picked %s%s", function, picked, f" ({why})" if why else "")
    return picked


def share_kept(first_visible: Tensor | None, first_computed: Tensor | None, q: Tensor, S: int) -> Tensor:
    """Share of the causal blocks that lie right of the first visible and the first computed keys, [B, H].

    Args:
        first_visible: [B, H, S], first_computed: [B, H, ceil(T / ROW_UNIT)]; None for 0.
        q: [B, T, H, K], the last T of S positions.
    """
    B, T, H, _ = q.shape
    first = torch.arange(0, T, ROW_UNIT, device=q.device) + (S - T)
    stop = ((first + ROW_UNIT).clamp(max=S) + KEY_UNIT - 1) // KEY_UNIT  # blocks up to the diagonal
    begin = torch.zeros(B, H, first.numel(), dtype=torch.int64, device=q.device)
    if first_visible is not None:
        begin = begin.maximum(first_visible[..., first].long() // KEY_UNIT)
    if first_computed is not None:
        begin = begin.maximum(first_computed.long() // KEY_UNIT)
    return (stop - begin).sum(-1).float() / stop.sum()


def kernels_unavailable(q: Tensor, v: Tensor, multiple: int, most: int) -> str:
    """Why Triton kernels for head dims that are a ``multiple`` up to ``most`` cannot take these tensors, or "".

    Args:
        q: [..., K]; v: [..., V].
    """
    why = device_unavailable(q)
    if why:
        return why
    if not q.shape[0]:
        return f"expected at least one sequence{counted(q.shape)}"
    if in_transform():
        return OPAQUE
    if q.dtype not in KERNEL_DTYPES:
        return f"expected bfloat16, float16 or float32, got {q.dtype}"
    if interpreted() and q.dtype == torch.bfloat16:
        return "the Triton interpreter computes bfloat16 wrongly"
    for name, dim in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if dim % multiple or not 0 < dim <= most:
            return f"expected {name} a multiple of {multiple} up to {most}, got {dim}"
    return ""
