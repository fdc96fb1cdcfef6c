"""The ``fla`` forms: our algebra on the chunk kernels of flash-linear-attention, where they can be trusted.

Imported lazily; every function raises ``UnavailableError`` with the reason where the kernels do not serve. Gates
must be finite here: a closed gate (-inf) is served by the ``chunk`` form.
"""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import version
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.errors import UnavailableError
from attnzoo.forms.options import LinearOptions, check_linear
from attnzoo.forms.protocol import Call, Kernel

INSTALLED = importlib.util.find_spec("fla") is not None


def fla_unavailable(call: Call) -> str:
    """Why flash-linear-attention cannot serve a call, or "".

    Its gated chunk backward refuses Hopper GPUs with Triton >= 3.4 and < 3.7.1 (miscompiled there), and its
    delta-rule kernels take 16-bit inputs only.
    """
    q, gate = call.q, call.gate
    if gate.w is not None and not call.options.get("delta_rule"):
        return "its delta rule erases along the key it writes, with the strength it writes with (delta_rule=True)"
    if q.device.type != "cuda":
        return f"flash-linear-attention needs CUDA tensors, got {q.device.type}"
    if not INSTALLED:
        return "flash-linear-attention is not installed (pip install 'attnzoo[fla]')"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"flash-linear-attention takes float16, bfloat16 or float32, got {q.dtype}"
    if gate.w is not None and q.dtype == torch.float32:
        return "its delta-rule kernels do not take float32"
    gated = gate.log_decay is not None
    hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    if gated and hopper and torch.is_grad_enabled() and Version("3.4") <= _triton() < Version("3.7.1"):
        return f"its gated backward is miscompiled by Triton {_triton()} on Hopper (3.7.1 mends it)"
    return ""


@functools.cache  # asked at every call of a layer, and read from disk
def _triton() -> Version:
    return Version(version("triton"))


def _ready(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, write: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Check, then k and v of H heads, v with its write strength."""
    check_linear(LinearOptions(write=write, **options), q, k, gate)
    reason = fla_unavailable(Call(q, k, v, gate, options=options))
    if reason:
        raise UnavailableError(f"form 'fla': {reason}; use the 'chunk' form")
    k, v = expand_heads(k, q.shape[2]), expand_heads(v, q.shape[2])
    return k, v if write is None else (v * expand_heads(write, q.shape[2])[..., None]).to(v.dtype)


def fla_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, write: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``chunk_simple_gla`` without a decay, which its ``chunk_linear_attn`` is before it normalises."""
    k, v = _ready(q, k, v, gate, write, cu_seqlens=cu_seqlens)
    from fla.ops.simple_gla import chunk_simple_gla

    return _output(chunk_simple_gla(q, k, v, scale=scale, cu_seqlens=_borders(cu_seqlens)))


def fla_scalar_decay(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, write: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``chunk_simple_gla``: a scalar decay per head."""
    k, v = _ready(q, k, v, gate, write, cu_seqlens=cu_seqlens)
    from fla.ops.simple_gla import chunk_simple_gla

    g = gate.per_token(q).log_decay
    return _output(chunk_simple_gla(q, k, v, g=g, scale=scale, cu_seqlens=_borders(cu_seqlens)))


def fla_diagonal_decay(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, write: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``chunk_gla``: a decay per channel."""
    k, v = _ready(q, k, v, gate, write, cu_seqlens=cu_seqlens)
    from fla.ops.gla import chunk_gla

    return _output(chunk_gla(q, k, v, gate.log_diag, scale=scale, cu_seqlens=_borders(cu_seqlens)))


def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, delta_rule: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``beta_t v_t k_t^T`` is written: ``chunk_delta_rule`` or ``chunk_gated_delta_rule``, with ``delta_rule=True``.

    They have one key for erasing and writing, and one strength.

    Raises:
        RuntimeError: ``delta_rule`` is not True.
    """
    beta = expand_heads(cast(Tensor, gate.beta), q.shape[2])
    k, v = _ready(q, k, v, gate, delta_rule=delta_rule, cu_seqlens=cu_seqlens)
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    g, borders = gate.per_token(q).log_decay, _borders(cu_seqlens)
    if g is None:
        return _output(chunk_delta_rule(q, k, v, beta.to(v.dtype), scale=scale, cu_seqlens=borders))
    return _output(chunk_gated_delta_rule(q, k, v, g, beta.to(v.dtype), scale=scale, cu_seqlens=borders))


def _borders(cu_seqlens: Tensor | None) -> Tensor | None:
    """In the dtype that its kernels take."""
    return None if cu_seqlens is None else cu_seqlens.long()


def _output(result: Any) -> Tensor:
    return cast(Tensor, result[0])


FLA_LINEAR_ATTENTION = Kernel(fla_linear_attention, refuses=fla_unavailable)
FLA_SCALAR_DECAY = Kernel(fla_scalar_decay, refuses=fla_unavailable)
FLA_DIAGONAL_DECAY = Kernel(fla_diagonal_decay, refuses=fla_unavailable)
FLA_DELTA_RULE = Kernel(fla_delta_rule, refuses=fla_unavailable)
