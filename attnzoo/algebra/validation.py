"""Checks of a form's inputs; :mod:`attnzoo.algebra.values` decides whether tensor values are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.values import reads_values

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GATE_FLOATS = (torch.float32, torch.float64)


def check_inputs(
    name: str,
    requires: Sequence[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gate,
    scale: float | None = None,
    valid: Tensor | None = None,
) -> None:
    """Raise where the inputs of variant ``name`` do not fit together.

    Raises:
        TypeError: an argument that is not what it should be, or a wrong dtype.
        ValueError: a missing or surplus gate part, a wrong shape or device, or a value out of range.
    """
    for label, x in (("q", q), ("k", k), ("v", v)):
        check_dense(label, x)
        if x.ndim != 4:
            raise ValueError(f"{label}: expected 4 axes [B, T, heads, channels], got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{label}: expected a floating dtype, got {x.dtype}")
        _same("dtype", label, x.dtype, "q", q.dtype)
        _same("device", label, x.device, "q", q.device)
    if not isinstance(gate, Gate):
        raise TypeError(f"gate: expected attnzoo.Gate, got {type(gate).__name__}")
    B, T, H, K = q.shape
    G = k.shape[2]
    if T < 1:
        raise ValueError(f"q: expected at least one token, got shape {tuple(q.shape)}")
    if H % max(G, 1) or G < 1:
        raise ValueError(f"k: expected a number of heads that divides q's {H}, got {G}")
    if K < 1:
        raise ValueError(f"q: expected at least one channel, got shape {tuple(q.shape)}")
    _shape("k", k, (B, T, G, K), "[B, T, G, K]")
    _shape("v", v, (B, T, G, v.shape[3]), "[B, T, G, V]")
    check_parts(name, requires, gate)
    _check_gate(gate, q, G)
    check_scale(scale)
    if valid is not None:
        check_dense("valid", valid, "[B, T] or None")
        _shape("valid", valid, (B, T), "[B, T]")
        if valid.dtype != torch.bool:
            raise TypeError(f"valid: expected torch.bool (True where a token exists), got {valid.dtype}")
        _same("device", "valid", valid.device, "q", q.device)
    if reads_values(q):
        check_values(gate if valid is None else gate.neutral_where(~valid))


def check_dense(label: str, x: object, expected: str = "") -> None:
    """Raise where ``x`` is not a dense tensor.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{label}: expected a tensor{expected and f' {expected}'}, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{label}: expected a dense tensor, got one of layout {x.layout}")


def check_flag(name: str, value: object) -> None:
    """Raise where the option ``name`` is not a bool; 0, 1 and None are refused.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_scale(scale: object, name: str = "scale") -> None:
    """Raise where the scale, or another option of this ``name``, is neither None nor a positive finite number, which
    certificates and kernels assume.

    Raises:
        TypeError: something else, a tensor among them.
        ValueError: NaN, infinite, or not above 0.
    """
    if scale is None or isinstance(scale, (torch.SymFloat, torch.SymInt)):
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{name}: expected a float or None, got {type(scale).__name__}")
    if not 0 < scale <= sys.float_info.max:  # an int may be too large for a float
        raise ValueError(f"{name}: expected a positive finite number or None, got {scale}")


def check_window(window: object) -> None:
    """Raise where the window is neither None nor a whole number of tokens, the row's own token included.

    Raises:
        TypeError: something else.
        ValueError: a number below 1.
    """
    if window is not None and (isinstance(window, bool) or not isinstance(window, (int, torch.SymInt))):
        raise TypeError(f"window: expected a number of tokens or None, got {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 (the row itself), got {window}")


def check_rising(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise where borders of packed sequences do not rise from 0 to the number of tokens; their values are read.

    Raises:
        ValueError: other borders.
    """
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != tokens or borders != sorted(borders):
        raise ValueError(f"cu_seqlens: expected borders rising from 0 to T = {tokens}, got {borders}")


def check_parts(name: str, requires: Sequence[str], gate: Gate) -> None:
    """Raise where the gate's parts are not exactly those that variant ``name`` needs.

    Raises:
        ValueError: a missing or a surplus part.
    """
    needed = ", ".join(requires) or "no part"
    for part in requires:
        if part not in gate.parts:
            raise ValueError(f"gate: {name!r} needs {part} (it takes {needed}), got {_parts(gate)}")
    for part in gate.parts:
        if part not in requires:
            raise ValueError(f"gate: {name!r} has no use for {part} (it takes {needed}), got {_parts(gate)}")


def _parts(gate: Gate) -> str:
    return f"Gate({', '.join(gate.parts)})"


def _check_gate(gate: Gate, q: Tensor, G: int) -> None:
    B, T, H, K = q.shape
    for name in gate.parts:
        check_dense(f"gate.{name}", getattr(gate, name))
    several = gate.factors is not None
    sizes = {"B": B, "T": T, "H": H, "G": G, "K": K, "K/2": K // 2, "n": gate.factors or 1}
    for name in gate.parts:
        x, part = getattr(gate, name), PARTS[name]
        if K % 2 and "K/2" in part.shapes[0]:
            raise ValueError(f"gate.{name}: expected an even number of key channels to turn in pairs, got K={K}")
        shapes = (part.shapes[1 if several else 0],) if part.factored else part.shapes
        accepted = {shape: _sizes(shape, sizes, x) for shape in shapes}
        if tuple(x.shape) not in accepted.values():
            near = {shape: size for shape, size in accepted.items() if len(size) == x.ndim} or accepted
            expected = " or ".join(f"[{shape}] = {size}" for shape, size in near.items())
            raise ValueError(f"gate.{name}: expected {expected}, got {tuple(x.shape)}")
        allowed = (*GATE_FLOATS, q.dtype) if part.rounded else GATE_FLOATS
        if x.dtype not in allowed:
            raise TypeError(f"gate.{name}: expected float32 (or float64), got {x.dtype}")
        _same("device", f"gate.{name}", x.device, "q", q.device)


def _sizes(shape: str, sizes: Mapping[str, int], x: Tensor) -> tuple[int, ...]:
    """The expected size of each named axis; an axis that may also be 1 is 1 where it is 1 in ``x``, and one of another
    name is as long as it is."""
    expected = []
    for number, axis in enumerate(shape.split(", ")):
        name, _, other = axis.partition(" or ")
        one = other == "1" and x.ndim > number and x.shape[number] == 1
        free = x.shape[number] if x.ndim > number else 0
        expected.append(1 if one else sizes.get(name, free))
    return tuple(expected)


def _shape(label: str, x: Tensor, expected: tuple[int, ...], axes: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{label}: expected {axes} = {expected}, got {tuple(x.shape)}")


def _same(what: str, label: str, got: object, other: str, expected: object) -> None:
    if got != expected:
        error = TypeError if what == "dtype" else ValueError
        raise error(f"{label}: expected the {what} of {other}, {expected}, got {got}")


def check_values(gate: Gate) -> None:
    """Raise where a gate has values out of range.

    Raises:
        ValueError: log gates above 0 or NaN, angles that are not finite, beta outside [0, 2], or w longer than 1
            where beta is not 0 (by more than 1e-3, or 2e-2 in 16 bits).
    """
    with torch.no_grad():
        for name in gate.parts:
            wrong = PARTS[name].refuse(getattr(gate, name), gate)
            if wrong:
                raise ValueError(f"gate.{name}: {wrong}")
