"""The ``fla`` forms: our algebra on the chunk kernels of flash-linear-attention, where they can be trusted.

Imported lazily; every function raises ``RuntimeError`` with the reason where the kernels do not serve. Gates
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


def fla_unavailable(q: Tensor, gate: Gate) -> str | None:
    """Why flash-linear-attention cannot serve these inputs, or None where it can.

    Its gated chunk backward refuses Hopper GPUs with Triton >= 3.4 and < 3.7.1 (miscompiled there), and its
    delta-rule kernels take 16-bit inputs only.
    """
    if q.device.type != "cuda":
        return f"flash-linear-attention needs CUDA tensors, got {q.device.type}"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'attnzoo[fla]')"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"flash-linear-attention takes float16, bfloat16 or float32, got {q.dtype}"
    if gate.w is not None and q.dtype == torch.float32:
        return "its delta-rule kernels do not take float32"
    gated = gate.log_decay is not None
    hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    if gated and hopper and torch.is_grad_enabled() and Version("3.4") <= _triton() < Version("3.7.1"):
        return f"its gated backward is miscompiled by Triton {_triton()} on Hopper (3.7.1 mends it)"
    return None


@functools.cache  # asked at every call of a layer, and read from disk
def _triton() -> Version:
    return Version(version("triton"))


def _ready(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """Check, then expand k and v to H heads."""
    reason = fla_unavailable(q, gate)
    if reason is not None:
        raise RuntimeError(f"form 'fla': {reason}; use the 'chunk' form")
    return expand_heads(k, q.shape[2]), expand_heads(v, q.shape[2])


def fla_linear_attention(q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
    """``chunk_linear_attn`` without its normaliser."""
    k, v = _ready(q, k, v, gate)
    from fla.ops.linear_attn import chunk_linear_attn

    return _output(chunk_linear_attn(q, k, v, scale=scale, normalize=False))


def fla_scalar_decay(q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
    """``chunk_simple_gla``: a scalar decay per head."""
    k, v = _ready(q, k, v, gate)
    from fla.ops.simple_gla import chunk_simple_gla

    return _output(chunk_simple_gla(q, k, v, g=gate.per_token(q).log_decay, scale=scale))


def fla_diagonal_decay(q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
    """``chunk_gla``: a decay per channel."""
    k, v = _ready(q, k, v, gate)
    from fla.ops.gla import chunk_gla

    return _output(chunk_gla(q, k, v, gate.log_diag, scale=scale))


def fla_delta_rule(q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
    """``chunk_delta_rule`` or ``chunk_gated_delta_rule``; they have one key for erasing and writing (w is k).

    They write ``beta_t v_t`` where our algebra writes ``v_t``, so the value handed over is ``v / beta`` (0 where
    beta is 0: then nothing may be written, and ``v`` must be 0 as the delta rule makes it).

    Raises:
        RuntimeError: ``gate.w`` is not the same tensor as ``k``.
    """
    if gate.w is not k:
        raise RuntimeError("form 'fla': its delta rule erases along the key it writes (gate.w must be k); use 'chunk'")
    beta = expand_heads(cast(Tensor, gate.beta), q.shape[2])
    k, v = _ready(q, k, v, gate)
    safe = torch.where(beta == 0, torch.ones_like(beta), beta)[..., None]
    strength_free = torch.where(beta[..., None] == 0, torch.zeros_like(v), v / safe).to(v.dtype)
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    if gate.log_decay is None:
        return _output(chunk_delta_rule(q, k, strength_free, beta.to(v.dtype), scale=scale))
    g = gate.per_token(q).log_decay
    return _output(chunk_gated_delta_rule(q, k, strength_free, g, beta.to(v.dtype), scale=scale))


def _output(result: Any) -> Tensor:
    return cast(Tensor, result[0])
