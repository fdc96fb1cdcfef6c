"""The ``fla`` forms, which run on the chunk kernels of flash-linear-attention where these are correct.

The library is imported lazily; every form raises ``UnavailableError`` with the reason where the kernels do not serve.
The kernels subtract sums of gates, where -inf would give NaN. So a closed gate is passed as ``CLOSED_AS``, whose
exponential is below the rounding of float32.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.values import OPAQUE, in_transform, records
from attnzoo.errors import UnavailableError
from attnzoo.forms.backends import fla_delta, fla_kernels, fla_pairs, fla_steps
from attnzoo.forms.backends.fla_tuning import all_tiles, will_run
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.options import LinearOptions, existing
from attnzoo.forms.protocol import Call, Kernel
from attnzoo.kernels.common.device import (
    HAS_TRITON,
    LEAST_CAPABILITY,
    NO_TRITON,
    installed_triton,
    interpreted,
    machine,
)
from attnzoo.kernels.common.together import compile_together
from attnzoo.kernels.common.untraced import cached_in_traces, untraced

logger = logging.getLogger("attnzoo.fla")


def _version() -> str:
    for name in ("fla-core", "flash-linear-attention"):  # the kernels alone, or the whole library
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def outdated(version: str) -> str:
    """The reason why a version of flash-linear-attention does not serve, or "".

    Before 0.6 results of packed sequences are wrong beside an empty one, and on Hopper the backward pass of a scalar
    decay is refused with Triton 3.4 or later, or wrong.
    """
    if not version or Version(version).release >= (0, 6):
        return ""
    return f"expected flash-linear-attention 0.6 or later, got {version} (pip install -U 'attnzoo[fla]')"


def miscompiling(triton: str) -> str:
    """The version of Triton if it miscompiles the backward pass of a scalar decay on Hopper, else ""."""
    return triton if triton and Version("3.4") <= Version(triton) < Version("3.7.1") else ""


INSTALLED = importlib.util.find_spec("fla") is not None
VERSION = _version()  # read at import, as compilers cannot trace it; "" if not installed or unknown
OUTDATED = outdated(VERSION)
MISCOMPILING = miscompiling(installed_triton())
DEVICE = "cuda"  # the device of its kernels
CLOSED_AS = -80.0  # exp of it is 2e-35
LEAST_CHANNELS = 16  # least channels of a product on tensor cores
LEAST_ON_HOPPER = 64  # ptxas 12.8 (Triton 3.6 and 3.7) miscompiles narrower tiles
MOST_DELTA_CHANNELS = 256


def fla_unavailable(call: Call) -> str:
    """The reason why flash-linear-attention cannot serve a call, or "".

    Its delta-rule kernels take 16-bit inputs only.
    """
    q, gate = call.q, call.gate
    if gate.factors is not None:
        return f"its delta rule has one factor per token, got {gate.factors} (sub-tokens of one each it does serve)"
    if gate.w is not None and not call.options.get("delta_rule"):
        return (
            "its delta rule erases along the key it writes, with the strength it writes with (gate='delta' in a layer, "
            "delta_rule=True in a form)"
        )
    if q.device.type != DEVICE:
        return f"flash-linear-attention needs CUDA tensors, got {q.device.type}"
    if not INSTALLED:
        return "flash-linear-attention is not installed (pip install 'attnzoo[fla]')"
    if OUTDATED:
        return OUTDATED
    if VERSION and (why := _broken()):
        return why
    if not HAS_TRITON:
        return f"flash-linear-attention runs on triton: {NO_TRITON}"
    where = machine(q.device)
    if q.is_cuda and not where.rocm and where.capability < LEAST_CAPABILITY:
        return f"Triton compiles for compute capability >= 8.0, got {where.capability}"
    if in_transform():
        return OPAQUE
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"flash-linear-attention takes float16, bfloat16 or float32, got {q.dtype}"
    if q.dtype == torch.bfloat16 and interpreted():
        return "the Triton interpreter computes bfloat16 wrongly (unset TRITON_INTERPRET)"
    if min(q.shape[3], call.v.shape[3]) < LEAST_CHANNELS:
        return f"its kernels take K and V from {LEAST_CHANNELS}, got {q.shape[3]} and {call.v.shape[3]} (larger heads)"
    if q.dtype != torch.float32 and (q.shape[3] % 2 or call.v.shape[3] % 2):
        return f"Triton miscompiles its 16-bit kernels of odd K or V, got {q.shape[3]} and {call.v.shape[3]}"
    if gate.w is not None and q.dtype == torch.float32:
        return "its delta-rule kernels do not take float32 (bfloat16 and float16 they do, under autocast too)"
    if gate.w is not None and q.shape[3] > MOST_DELTA_CHANNELS:
        return f"its delta-rule kernels take K up to {MOST_DELTA_CHANNELS}, got {q.shape[3]} (smaller heads)"
    return ""


@cached_in_traces
def _broken() -> str:
    """The reason why flash-linear-attention, which imports transformers if installed, cannot be imported, or ""."""
    try:
        importlib.import_module("fla")
    except Exception as error:  # errors of other packages
        return f"flash-linear-attention cannot be imported: {error!r} (pip install -U 'attnzoo[fla]')"
    return ""


def _hopper(q: Tensor) -> bool:
    return q.is_cuda and machine(q.device).hopper


def _per_token(gate: Gate) -> bool:
    """Whether there is a scalar decay per token; a constant per head has other kernels, without its gradient."""
    g = gate.log_decay
    return g is not None and (g.ndim == 3 or g.requires_grad or gate.w is not None)


@dataclass(frozen=True, eq=False)
class Prepared:
    """The inputs of an operation of flash-linear-attention.

    Args:
        q: ``[B, T, H, K]``; k and v have H heads as well (in :mod:`~attnzoo.forms.backends.chunks` perhaps fewer), v
            with its write strength.
        gate: neutral at padding, where q, k and v are 0.
        options: options by that library's names: scale, initial_state ``[B, H, K, V]``, output_final_state and
            cu_seqlens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    options: dict[str, Any]


Operation = Callable[[Prepared], tuple[Tensor, Tensor | None]]  # inputs -> output, and the last state or None


def fla_kernel(operation: Operation) -> Kernel:
    """The form that runs an operation on whole sequences, packed or padded, and after a state."""

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: LinearOptions) -> Tensor:
        """The output of flash-linear-attention's chunk kernels; see :class:`~attnzoo.forms.options.LinearOptions`."""
        o: Tensor = _run(operation, Call(q, k, v, gate), given)[0]
        return o

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: RecurrentState | None, given: LinearOptions
    ) -> tuple[Tensor, RecurrentState]:
        """The output after a state, and the new state."""
        o, matrix = _run(operation, Call(q, k, v, gate, state, keeps_state=True), given)
        seen = 0 if state is None else len(state)
        return o, RecurrentState(cast(Tensor, matrix), seen + q.shape[1])

    honours = frozenset(LinearOptions.__match_args__) - {"prune"}
    return Kernel(run, extend, fla_unavailable, explain=_explained, honours=honours)


@untraced  # like the library's functions: one graph break, not one in the midst of its kernels
def _apart(operation: Operation, call: Call, given: LinearOptions) -> tuple[Tensor, Tensor | None]:
    return _run(operation, call, given)


def _run(operation: Operation, call: Call, given: LinearOptions) -> tuple[Tensor, Tensor | None]:
    q, k, v, gate = call.q, call.k, call.v, call.gate
    compiling = torch.compiler.is_compiling()
    if compiling and not _is_op(given.cu_seqlens):
        return _apart(operation, call, given)
    reason = fla_unavailable(Call(q, k, v, gate, options=given))
    if reason:
        raise UnavailableError(f"form 'fla': {reason}; use the 'chunk' form")
    ready = prepared_inputs(call, given, q.shape[2])
    q, v = ready.q, ready.v
    if given.cu_seqlens is not None:
        ready.options["cu_seqlens"] = _int64(given.cu_seqlens)
    if compiling:
        return operation(ready)
    will_run(shape := fla_steps.described(q, v))
    kind = operation, shape, q.device, records(q, k, v), given.cu_seqlens is None, call.state is None
    if kind not in _compiled:
        _compiled.add(kind)
        if q.is_cuda and not all_tiles():
            compile_together(lambda: operation(ready))
    return operation(ready)


def _is_op(cu_seqlens: Tensor | None) -> bool:
    """Whether the library's operation is run as an op of torch: that of packed sequences reads their borders on the
    CPU."""
    return cu_seqlens is None and fla_steps.known(VERSION)


_compiled: set[tuple[Any, ...]] = set()  # kinds of calls whose kernels were compiled together


def prepared_inputs(call: Call, given: LinearOptions, heads: int) -> Prepared:
    """The inputs of an operation, with k and v in ``heads`` heads at least."""
    q, k, v, gate, write = call.q, call.k, call.v, call.gate, given.write
    if given.valid is not None:
        q, k, v = existing(given.valid, q, k, v)
        gate = gate.per_token(q).neutral_where(~given.valid)
        write = None if write is None else existing(given.valid, write)[0]
    dtype = v.dtype
    k, v = expand_heads(k, heads), expand_heads(v, heads)
    if write is not None:
        v = (v * expand_heads(write, v.shape[2])[..., None]).to(dtype)
    options = {
        "scale": given.scale, "cu_seqlens": given.cu_seqlens,
        "initial_state": None if call.state is None else call.state.matrix.float(),
        "output_final_state": call.keeps_state,
    }  # fmt: skip
    return Prepared(q, k, v, gate, options)


def _narrow(q: Tensor, v: Tensor) -> bool:
    """Whether q or v has fewer channels than the kernels are correct for."""
    return _hopper(q) and min(q.shape[3], v.shape[3]) < LEAST_ON_HOPPER


def widened(operation: Operation, x: Prepared, channels: int) -> tuple[Tensor, Tensor | None]:
    """The operation on q, k and v padded with zeros to at least ``channels`` channels."""
    K, V = x.q.shape[3], x.v.shape[3]
    of_k, of_v = max(0, channels - K), max(0, channels - V)
    q, k, v = F.pad(x.q, (0, of_k)), F.pad(x.k, (0, of_k)), F.pad(x.v, (0, of_v))
    a, scale, state = x.gate.log_diag, x.options["scale"], x.options["initial_state"]
    gate = x.gate if a is None else replace(x.gate, log_diag=F.pad(a, (0, of_k)))
    options = x.options | {
        "scale": K**-0.5 if scale is None else scale,
        "initial_state": None if state is None else F.pad(state, (0, of_v, 0, of_k)),
    }
    o, last = operation(Prepared(q, k, v, gate, options))
    return o[..., :V], None if last is None else last[..., :K, :V].contiguous()


def of_any_width(operation: Operation) -> Operation:
    """An operation of flash-linear-attention, with channels padded where they are fewer than its kernels take."""

    @functools.wraps(operation)
    def run(x: Prepared) -> tuple[Tensor, Tensor | None]:
        return widened(operation, x, LEAST_ON_HOPPER) if _narrow(x.q, x.v) else operation(x)

    return run


@of_any_width
def scalar_decay(x: Prepared) -> tuple[Tensor, Tensor | None]:
    """The output by ``chunk_simple_gla``, for a scalar decay per head and token, one per head, or none."""
    if _goes_around(x):
        return diagonal_decay(x)
    g = x.gate.log_decay
    if g is None:
        return _op("chunk_simple_gla", x)
    kind = "g" if _per_token(x.gate) else "g_gamma"
    g = _finite(x.gate.per_token(x.q).log_decay if kind == "g" else g)
    return _op("chunk_simple_gla", x, **{kind: g})


@of_any_width
def diagonal_decay(x: Prepared) -> tuple[Tensor, Tensor | None]:
    """The output by ``chunk_gla``, for a decay per channel and perhaps a scalar decay."""
    return _op("chunk_gla", x, g=_channels(x))


@of_any_width
def delta_rule(x: Prepared) -> tuple[Tensor, Tensor | None]:
    """The output by ``chunk_delta_rule`` or ``chunk_gated_delta_rule``, with w = k and beta as the write strength."""
    if _goes_around(x) or (_miscompiled(x.gate, x.q) and not _mended(x.q, x.v)):
        return channel_delta_rule(x)
    beta = expand_heads(cast(Tensor, x.gate.beta), x.q.shape[2])
    g = x.gate.per_token(x.q).log_decay
    if g is None:
        return _op("chunk_delta_rule", x, beta=beta)
    return _op("chunk_gated_delta_rule", x, g=_finite(g), beta=beta)


@of_any_width
def channel_delta_rule(x: Prepared) -> tuple[Tensor, Tensor | None]:
    """The output by ``chunk_kda``, for the delta rule with a decay per channel and perhaps a scalar decay."""
    beta = expand_heads(cast(Tensor, x.gate.beta), x.q.shape[2])
    if torch.is_grad_enabled() and fla_pairs.serves(x.q) and fla_pairs.register():
        H, K = _numbers(x.q.shape[2:])
        fla_pairs.proven((H, H, K), x.q.dtype, x.q.device)  # not in a backward pass
    return _op("chunk_kda", x, g=_channels(x), beta=beta)


def _miscompiled(gate: Gate, q: Tensor) -> bool:
    """Whether the gradients of a scalar decay would be wrong by flash-linear-attention's own kernels."""
    return bool(MISCOMPILING) and gate.log_diag is None and _per_token(gate) and torch.is_grad_enabled() and _hopper(q)


def _detour(gate: Gate, q: Tensor) -> str:
    """The reason why a scalar decay must run on the kernels for a decay per channel, or ""."""
    if not _miscompiled(gate, q) or (gate.w is not None and fla_delta.register()):
        return ""
    return (
        f"Triton {MISCOMPILING} miscompiles flash-linear-attention's backward of a scalar decay on Hopper: its kernels "
        "with a decay per channel run instead, which take longer; 3.7.1 mends it, which torch 2.12.1 and later bring"
    )


def _mended(q: Tensor, v: Tensor) -> bool:
    G, H, K, V = _numbers(fla_delta.heads_of(q, v))
    return fla_delta.proven((G, H, K, V), q.dtype, q.device)


def _numbers(sizes: Sequence[int]) -> list[int]:
    """The sizes as numbers, where a compiler may have symbols for them."""
    return [len(range(n)) for n in sizes]


def _goes_around(x: Prepared) -> bool:
    """Whether a scalar decay must run on the kernels for a decay per channel; the reason is logged once per process."""
    slow = _detour(x.gate, x.q)
    if slow:
        _warn(slow)
    return bool(slow)


def _explained(call: Call) -> tuple[str, str]:
    slow, how = _detour(call.gate, call.q), []
    if slow:
        how.append("a decay per channel")
    if _narrow(call.q, call.v):
        how.append(f"heads padded to {LEAST_ON_HOPPER} channels")
    if _replaced(call.gate, call.q):
        how.append("one backward kernel of ours")
    return ", ".join(["chunks", *how]) if how else "", slow


def _replaced(gate: Gate, q: Tensor) -> bool:
    """Whether the library is offered a kernel of ours for the gradients of a delta rule: it is taken once proven."""
    if gate.w is None or not torch.is_grad_enabled():
        return False
    if gate.log_diag is None and not _detour(gate, q):
        return _miscompiled(gate, q) and not fla_kernels.asked_for("tilelang")
    return fla_pairs.serves(q) and fla_pairs.register()


@cached_in_traces
def _warn(what: str) -> None:
    logger.warning("%s", what)


def _op(name: str, x: Prepared, **gates: Tensor) -> tuple[Tensor, Tensor | None]:
    """An operation of flash-linear-attention; where it is compiled or a gradient is recorded, as an op of torch."""
    operation, given = fla_steps.OPERATIONS[name], x.options
    if not _is_op(given["cu_seqlens"]):
        return operation.library(x.q, x.k, x.v, **gates, **given)
    if torch.compiler.is_compiling() or records(x.q, x.k, x.v, given["initial_state"], *gates.values()):
        return operation(x.q, x.k, x.v, **gates, **given)
    return operation.inferred(x.q, x.k, x.v, **gates, **given)


def _channels(x: Prepared) -> Tensor:
    """The decay of each channel, including the scalar decay, ``[B, T, H, K]``."""
    g, a = x.gate.per_token(x.q).log_decay, x.gate.log_diag
    if g is None:
        return _finite(a)
    g = _finite(g)[..., None]
    return g.expand(x.q.shape).contiguous() if a is None else _finite(_finite(a) + g)


def _finite(log: Tensor | None) -> Tensor:
    return F.threshold(cast(Tensor, log).float(), CLOSED_AS, CLOSED_AS)  # clamp has no single backward kernel


_converted: tuple[weakref.ref[Tensor], int, Tensor] | None = None


def _int64(borders: Tensor) -> Tensor:
    """The borders as int64; cached, as the library reads each new tensor of borders on the CPU."""
    global _converted
    if borders.dtype == torch.int64:
        return borders
    if _converted is None or _converted[0]() is not borders or _converted[1] != borders._version:
        _converted = weakref.ref(borders), borders._version, borders.long()
    return _converted[2]


FLA_SCALAR_DECAY = fla_kernel(scalar_decay)
FLA_DIAGONAL_DECAY = fla_kernel(diagonal_decay)
FLA_DELTA_RULE = fla_kernel(delta_rule)
