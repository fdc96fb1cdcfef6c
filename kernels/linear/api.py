"""A linear recurrence continued by a few tokens, as a function of tensors. No Triton here before it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.validation import check_flag, check_scale
from attnzoo.algebra.values import counted, reads_values, records
from attnzoo.kernels.common.argument_checks import check_tensors
from attnzoo.kernels.common.call_checks import kernels_unavailable

MOST_TOKENS = 64  # a chunked kernel is faster from about here on
MOST_CHANNELS = 512  # the columns of a state that one program holds must fit its registers
_AXES = {  # accepted shapes, by the names of their axes
    "k": ("B, T, G, K",), "state": ("B, H, K, V",), "valid": ("B, T",), "write": ("B, T, G", "B, T, H"),
    **{name: part.shapes for name, part in PARTS.items()}, "angle": ("B, T, H, K/2", "B, T, 1, K/2", "K/2"),
}  # fmt: skip
_SHAPES = {name: tuple(tuple(axes.split(", ")) for axes in shapes) for name, shapes in _AXES.items()}


def linear_steps(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None = None, *, scale: float | None = None,
    write: Tensor | None = None, valid: Tensor | None = None, in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``S_t = S_{t-1} A_t + v_t k_t^T``, ``o_t = S_t (scale q_t)``, token by token in one kernel, without a gradient.

    Each program keeps some columns of a head's state in registers, so that the state is read and written once however
    many tokens there are. Nothing waits for the GPU, and the call may be captured in a CUDA graph.

    Args:
        q: [B, T, H, K], the new tokens, 1 to MOST_TOKENS of them.
        k: [B, T, G, K], with G a divisor of H.
        v: [B, T, G, V].
        gate: any parts (:class:`attnzoo.Gate`): all that is given is multiplied.
        state: [B, H, K, V] float32, ``S^T`` after the tokens before; None for zeros. It stays as it is unless
            ``in_place``.
        scale: of the queries; default K ** -0.5.
        write: [B, T, G] or [B, T, H], the strength that a token writes with: ``v_t`` becomes ``write_t v_t``.
        valid: [B, T] bool, the tokens that exist, or None for all. The others leave the state as it is, whatever they
            hold; their outputs mean nothing.
        in_place: write to ``state``, which must be contiguous, and return it.

    Returns:
        o [B, T, H, V] in v's dtype, and the state after the last token [B, H, K, V] float32.

    Raises:
        ValueError: a shape, dtype, device or option is wrong, a value is (read on a CPU, on a GPU only with
            ATTNZOO_VALIDATE=1), or an input requires a gradient while gradients are recorded.
        TypeError: something that is no tensor, or no gate.
    """
    _check(q, k, v, gate, state, scale, write, valid, in_place)
    why = triton_unavailable(q, v)
    if why:
        raise ValueError(f"q, v: {why}")
    from .recurrent import Recurrence, recurrent_in_place_op, recurrent_op

    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    parts = (gate.log_decay, gate.log_diag, gate.angle, gate.w, gate.beta)
    given = Recurrence(q, k, v, *parts, write, valid, state, scale)
    if in_place:
        if state is None or not state.is_contiguous():
            got = None if state is None else f"strides {state.stride()}"
            raise ValueError(f"state: expected a contiguous one with in_place=True, got {got}")
        return recurrent_in_place_op.without_gradient(given, q).o, state
    made = recurrent_op.without_gradient(given, q)
    return made.o, made.state


def triton_unavailable(q: Tensor, v: Tensor) -> str:
    """Why the kernel cannot take these tensors, or ""."""
    if q.shape[1] > MOST_TOKENS:
        return f"it continues by 1 to {MOST_TOKENS} tokens at a time{counted(q.shape[1])}"
    return kernels_unavailable(q, v, multiple=1, most=MOST_CHANNELS)


def _check(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None, scale: float | None, write: Tensor | None,
    valid: Tensor | None, in_place: bool,
) -> None:  # fmt: skip
    if not isinstance(gate, Gate):
        raise TypeError(f"gate: expected attnzoo.Gate, got {type(gate).__name__}")
    parts: dict[str, Tensor] = {name: getattr(gate, name) for name in gate.parts}
    given: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "state": state, "write": write, "valid": valid, **parts}
    check_tensors(given, needed=("q", "k", "v"))
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q, k, v: expected 4 axes each and a token, got {[tuple(x.shape) for x in (q, k, v)]}")
    (B, T, H, K), (G, V) = q.shape, v.shape[2:]
    if G == 0 or H % G:
        raise ValueError(f"k, v: expected G heads, a divisor of H={H}, got {G}")
    sizes = {"B": B, "T": T, "H": H, "G": G, "K": K, "V": V, "K/2": K // 2, "1": 1, "n": gate.factors or 1}
    for name, shapes in _SHAPES.items():
        x = given.get(name)
        if x is not None and not any(x.shape == tuple([sizes[axis] for axis in axes]) for axes in shapes):
            wanted = " or ".join(str(tuple(sizes[axis] for axis in axes)) for axes in shapes)
            raise ValueError(f"{name}: expected {wanted} beside q {tuple(q.shape)}, got {tuple(x.shape)}")
    if v.shape[:2] != (B, T):
        raise ValueError(f"v: expected [B={B}, T={T}, G, V] as in q, got {tuple(v.shape)}")
    if (gate.w is None) != (gate.beta is None):
        raise ValueError(f"gate: expected w and beta together, got {gate.parts}")
    if gate.w is not None and gate.beta is not None and gate.w.ndim != gate.beta.ndim + 1:
        got = f"{tuple(gate.w.shape)} and {tuple(gate.beta.shape)}"
        raise ValueError(f"gate: expected an axis of factors in both w and beta or in none, got {got}")
    if gate.angle is not None and K % 2:
        raise ValueError(f"gate.angle: expected an even K, got {K}")
    for name, x in given.items():
        exact = name in parts and not PARTS[name].rounded
        if x is not None and name != "valid" and (not x.is_floating_point() or (exact and x.dtype.itemsize < 4)):
            label, wanted = f"gate.{name}" if name in parts else name, "float32" if exact else "a floating dtype"
            raise ValueError(f"{label}: expected {wanted}, got {x.dtype}")
    for name, dtype in (("state", torch.float32), ("valid", torch.bool)):
        x = given[name]
        if x is not None and x.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype}, got {x.dtype}")
    check_scale(scale)
    check_flag("in_place", in_place)
    tensors = [x for x in given.values() if x is not None]
    if records(*tensors):
        raise ValueError("a fused step has no gradient: expected torch.no_grad() or inputs that require none")
    if reads_values(q):
        for name, part in parts.items():
            if valid is not None and part.ndim > 1:  # what stands at absent tokens may be anything
                part = part.masked_fill(~valid.view(B, T, *[1] * (part.ndim - 2)), PARTS[name].neutral)
            wrong = PARTS[name].refuse(part, gate)
            if wrong:
                raise ValueError(f"gate.{name}: {wrong}")
