"""A whole step over pages, from the products with weights to the normed and gated output of each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.values import as_given
from attnzoo.kernels.common.argument_checks import check_shapes
from attnzoo.kernels.common.call_checks import Impl, pick_implementation
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.parts import Finish
from attnzoo.kernels.decode.api import (
    NO_OPTIONS,
    check_gates,
    check_page_options,
    check_pages,
    check_table,
    check_tokens,
    shapes_of_gates,
    shapes_of_options,
    triton_unavailable,
)
from attnzoo.kernels.decode.parts import Forget, Shift, TokenParts
from attnzoo.kernels.decode.state import PagedState
from attnzoo.precision import wide_dtype

from .reference import append_reference, paged_reference

NO_PARTS = TokenParts()


@torch.no_grad()
def paged_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PagedState,
    *,
    past: Tensor,
    count: Tensor,
    parts: TokenParts = NO_PARTS,
    options: AttentionOptions = NO_OPTIONS,
    impl: Impl = "auto",
) -> Tensor:
    """Shift, norm and write T new tokens of each sequence into its pages, in place, attend, norm and gate.

    Three launches, four with pruning, no host synchronisation, no gradient. Between what is read and what is written
    the kernels compute in float32, and sums of gates in float64.

    Args:
        q: [B, T, H, K], k: [B, T, G, K], v: [B, T, G, V], 1 <= T <= 16, of one dtype; k is shifted, then q and k are
            normed.
        state: as before these tokens; changed, as by ``paged_append``.
        past: [B] int32 or int64, what ``length`` is before the step; another tensor, which does not change.
        count: [B] int32, T for sequences that get these tokens, 0 for the others, whose output means nothing.
        parts: gate, shift, norm and finish.
        options, impl: as ``paged_attention``.

    Returns:
        [B, T, H, V] in the dtype of ``values``, or of q where these have 8 bits.

    Raises:
        ValueError, TypeError, ImportError: as ``paged_attention``.
    """
    (keys, values, _, exponents), _, _ = state
    _check(q, k, v, state, past, count, parts, options)
    like = keys if exponents is None else q
    if pick_implementation("decode_step", impl, triton_unavailable(like, values)) == "triton":
        from attnzoo.kernels.decode.op import page_step

        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        gate = parts.finish.gate
        if gate is not None and gate.stride(3) != 1:
            parts = parts._replace(finish=parts.finish._replace(gate=gate.contiguous()))
        return page_step((q, k, v), state, past, count, parts, options.sink, options.of_op(q.shape[3]))
    q, k, v, g = _rows((q, k, v), parts, count)
    q = q.to(like.dtype)
    if exponents is None:
        k, v = k.to(q.dtype), v.to(q.dtype)
    visible = append_reference(k, v, None if g is None else g.to(wide_dtype(keys.dtype)), count, state)
    with as_given(q):
        o = paged_reference(q, state, first_visible=visible, options=options)
    return _finished(o, parts.finish)


def _check(
    q: Tensor, k: Tensor, v: Tensor, state: PagedState, past: Tensor, count: Tensor, parts: TokenParts,
    options: AttentionOptions,
) -> None:  # fmt: skip
    """Types, shapes, dtypes, devices and options."""
    gate, shift, norm, finish = parts
    (keys, values, k_norm, _), (table, first, _), _ = state
    logits, bias = (gate.logits, gate.bias) if isinstance(gate, Forget) else (gate, None)
    others = {"past": past, "count": count, "gate": logits, "bias": bias, "sink": options.sink}
    others |= {"logit_bound": options.logit_bound, "finish.scale": finish.scale, "finish.gate": finish.gate}
    check_pages("k", k, state, others, needed=("k_norm",))
    (B, T, G), (_, PAGE, V), N, (H, K) = k.shape[:3], values.shape, table.shape[2], q.shape[2:]
    check_tokens("q", T)
    if not G or H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}")
    check_gates(state, gate, "a gate")
    shifted = dict.fromkeys(Shift._fields) if shift is None else shift._asdict()
    normed = {"q": None, "k": None} if norm is None else {"q": norm.q, "k": norm.k}
    shared = norm is not None and norm.q.ndim == 1
    int32 = torch.int32
    counted = int32 if past.dtype == int32 else torch.int64
    check_shapes({
        "q": (q, (B, T, H, keys.shape[2]), k.dtype), "k": (k, (B, T, table.shape[1], K), None),
        "v": (v, (B, T, G, V), k.dtype), "gate": (logits, (B, T, H), None), "bias": (bias, (H,), None),
        "past": (past, (B,), counted), "count": (count, (B,), int32), "first": (first, (B, G), int32),
        "k_norm": (k_norm, (B, G, N), torch.float32), **shapes_of_gates(state, H), **shapes_of_options(options, H),
        "shift.k": (shifted["k"], (B, T, G), None),
        "shift.v": (shifted["v"], (B, T, G), None), "shift.k_before": (shifted["k_before"], (B, G, K), None),
        "shift.v_before": (shifted["v_before"], (B, G, V), None),
        "norm.q": (normed["q"], (K,) if shared else (H, K), None),
        "norm.k": (normed["k"], (K,) if shared else (G, K), None),
        "finish.scale": (finish.scale, (V,) if _is_shared(finish.scale) else (H, V), None),
        "finish.gate": (finish.gate, (B, T, H, V), None),
    }, strided=("q", "k", "v", "gate", "shift.k", "shift.v", "finish.gate"))  # fmt: skip
    check_page_options(options, state)
    check_table(table, PAGE, state.table.length, count, T)


def _is_shared(scale: Tensor | None) -> bool:
    return scale is not None and scale.ndim == 1


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rows(
    tokens: tuple[Tensor, Tensor, Tensor], parts: TokenParts, count: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and log decays as they are attended to, in at least float32; windows move on."""
    (q, k, v), (gate, shift, norm, _) = (_wide(x) for x in tokens), parts
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
    """The core's output o [B, T, H, V] after norm and gate, in its dtype."""
    x = _wide(o)
    if finish.scale is not None:
        x = x - x.mean(-1, keepdim=True) if finish.centred else x
        x = F.rms_norm(x, x.shape[-1:], eps=finish.eps) * finish.scale
    if finish.gate is not None:
        x = x * (F.silu if finish.swish else torch.sigmoid)(_wide(finish.gate))
    return x.to(o.dtype)
