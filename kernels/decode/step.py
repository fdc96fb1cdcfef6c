"""A whole step over pages, from the products with weights to the normed and gated output of each head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.validation import check_scale
from attnzoo.algebra.values import as_given
from attnzoo.kernels.common.arguments import check_shapes, check_window
from attnzoo.kernels.common.checks import Impl, pick_implementation
from attnzoo.kernels.common.parts import Finish, Norm
from attnzoo.kernels.decode.api import (
    check_pages,
    check_prune,
    check_sums,
    check_table,
    check_tokens,
    of_gates,
    shapes_of_sums,
    triton_unavailable,
)
from attnzoo.kernels.decode.parts import Forget, Shift

from .reference import append_reference, paged_reference


@torch.no_grad()
def paged_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    past: Tensor,
    count: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    first: Tensor,
    length: Tensor,
    k_norm: Tensor,
    gate: Tensor | Forget | None = None,
    decay: Tensor | None = None,
    page_sum: Tensor | None = None,
    total: Tensor | None = None,
    since: Tensor | None = None,
    n_log: Tensor | None = None,
    closed: Tensor | None = None,
    shift: Shift | None = None,
    norm: Norm | None = None,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    prune: Prune | None = None,
    logit_bound: Tensor | None = None,
    finish: Finish | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Shift, norm and write T new tokens of each sequence into its pages, in place, attend, norm and gate.

    Three launches, four with ``prune``, no host synchronisation, no gradient. Between what is read and what is written
    the kernels compute in float32, and sums of gates in float64.

    Args:
        q: [B, T, H, K], k: [B, T, G, K], v: [B, T, G, V], 1 <= T <= 16, of one dtype; k is shifted, then q and k are
            normed.
        past: [B] int32 or int64, what ``length`` is before the step; another tensor, which does not change.
        count: [B] int32, T for sequences that get these tokens, 0 for the others, whose output means nothing.
        gate: log decays [B, T, H], <= 0, or what they are made of; None where nothing decays.
        shift, norm, finish: None where there is none.
        keys, values, table, length, k_norm, decay, page_sum, total, since, n_log, closed: as ``paged_append``.
        first, scale, window, sink, prune, logit_bound, impl: as ``paged_attention``.

    Returns:
        [B, T, H, V] in the dtype of ``values``.

    Raises:
        ValueError, TypeError, ImportError: as ``paged_attention``.
    """
    sums = {"decay": decay, "page_sum": page_sum, "total": total, "since": since, "n_log": n_log, "closed": closed}
    pool = {"k": keys, "v": values, "table": table, "length": length}
    logits = gate.logits if isinstance(gate, Forget) else gate
    bias = gate.bias if isinstance(gate, Forget) else None
    others = {"first": first, "k_norm": k_norm, "past": past, "count": count, "gate": logits, "bias": bias, **sums}
    finish = finish or Finish()
    others |= {"sink": sink, "logit_bound": logit_bound, "finish.scale": finish.scale, "finish.gate": finish.gate}
    check_pages(k, pool, others, "k_norm", "keys", "values")
    (B, T, G), (P, PAGE, V), N, (H, K) = k.shape[:3], values.shape, table.shape[2], q.shape[2:]
    check_tokens("q", T)
    if not G or H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}")
    check_sums(sums, gate, "a gate")
    shifted = dict.fromkeys(Shift._fields) if shift is None else shift._asdict()
    normed = {"q": None, "k": None} if norm is None else {"q": norm.q, "k": norm.k}
    shared = norm is not None and norm.q.ndim == 1
    int32 = torch.int32
    counted = int32 if past.dtype == int32 else torch.int64
    check_shapes({
        "q": (q, (B, T, H, keys.shape[2]), k.dtype), "k": (k, (B, T, table.shape[1], K), None),
        "v": (v, (B, T, G, V), k.dtype), "gate": (logits, (B, T, H), None), "bias": (bias, (H,), None),
        "past": (past, (B,), counted), "count": (count, (B,), int32), "first": (first, (B, G), int32),
        "k_norm": (k_norm, (B, G, N), torch.float32),
        **shapes_of_sums(sums, (B, H, N), (P, PAGE, H // G), of_gates(keys)), "sink": (sink, (H,), None),
        "logit_bound": (logit_bound, (H,), torch.float32), "shift.k": (shifted["k"], (B, T, G), None),
        "shift.v": (shifted["v"], (B, T, G), None), "shift.k_before": (shifted["k_before"], (B, G, K), None),
        "shift.v_before": (shifted["v_before"], (B, G, V), None),
        "norm.q": (normed["q"], (K,) if shared else (H, K), None),
        "norm.k": (normed["k"], (K,) if shared else (G, K), None),
        "finish.scale": (finish.scale, (V,) if _is_shared(finish.scale) else (H, V), None),
        "finish.gate": (finish.gate, (B, T, H, V), None),
    }, strided=("q", "k", "v", "gate", "shift.k", "shift.v", "finish.gate"))  # fmt: skip
    check_prune(prune, decay, None, k_norm, n_log, logit_bound)
    check_window(window)
    check_scale(scale)
    check_table(table, PAGE, length, count, T)
    scale = K**-0.5 if scale is None else float(scale)
    kept = (keys, values, table, length, k_norm, decay, page_sum, total, since, n_log, closed)
    if pick_implementation("decode_step", impl, triton_unavailable(keys, values)) == "triton":
        from attnzoo.kernels.decode.op import step

        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        if finish.gate is not None and finish.gate.stride(3) != 1:
            finish = finish._replace(gate=finish.gate.contiguous())
        log_eps = None if prune is None else prune.log_eps
        return step(
            q, k, v, gate, shift, norm, past, count, first, *kept, sink, logit_bound, scale, window or 0, log_eps,
            finish,
        )  # fmt: skip
    q, k, v, g = _rows(q, k, v, gate, shift, norm, count)
    q, k, v = (x.to(keys.dtype) for x in (q, k, v))
    seen = append_reference(k, v, None if g is None else g.to(of_gates(keys)), count, *kept)
    read: dict[str, Any] = {"decay": decay, "page_sum": page_sum, "since": None if g is None else seen}
    if prune is not None:
        read |= {"prune": prune, "k_norm": k_norm, "n_log": n_log, "logit_bound": logit_bound}
    with as_given(q):
        o = paged_reference(q, keys, values, table, first, length, scale=scale, window=window, sink=sink, **read)
    return _finished(o, finish)


def _is_shared(scale: Tensor | None) -> bool:
    return scale is not None and scale.ndim == 1


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rows(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | Forget | None, shift: Shift | None, norm: Norm | None,
    count: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """q, k, v and log decays as they are attended to, in at least float32; windows move on."""
    q, k, v = (_wide(x) for x in (q, k, v))
    if shift is not None:
        mixed = []
        for x, logits, before in ((k, shift.k, shift.k_before), (v, shift.v, shift.v_before)):
            past = torch.cat([before[:, None].to(x.dtype), x[:, :-1]], 1)
            mixed.append(x.lerp(past, _wide(logits).sigmoid()[..., None].to(x.dtype)))
            if x.shape[1] == 1:
                before.copy_(torch.where(count[:, None, None] > 0, x[:, 0].to(before.dtype), before))
        k, v = mixed
    if norm is not None:
        q, k = (F.rms_norm(x, x.shape[-1:], eps=norm.eps) * w for x, w in ((q, norm.q), (k, norm.k)))
    if isinstance(gate, Forget):
        logits = _wide(gate.logits)
        return q, k, v, F.logsigmoid(logits if gate.bias is None else logits + gate.bias) * gate.factor
    return q, k, v, gate


def _finished(o: Tensor, finish: Finish) -> Tensor:
    """[B, T, H, V] in o's dtype."""
    x = _wide(o)
    if finish.scale is not None:
        x = x - x.mean(-1, keepdim=True) if finish.centred else x
        x = F.rms_norm(x, x.shape[-1:], eps=finish.eps) * finish.scale
    if finish.gate is not None:
        x = x * (F.silu if finish.swish else torch.sigmoid)(_wide(finish.gate))
    return x.to(o.dtype)
