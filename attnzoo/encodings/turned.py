r"""Rotations applied before kernels without rotations: an isometry can be taken out of a product of transitions.

With :math:`P_t = \mathrm{Rot}(\theta_1) \cdots \mathrm{Rot}(\theta_t)`, which commute, and :math:`R_t =
\mathrm{Rot}(\theta_t) H_t` for any factors :math:`H_t = I - \beta_t w_t w_t^\top` after it,

.. math:: k_j^\top R_{j+1} \cdots R_t\, q_t = (P_j k_j)^\top H'_{j+1} \cdots H'_t\, (P_t q_t), \qquad
          H'_t = P_t H_t P_t^\top = I - \beta_t (P_t w_t)(P_t w_t)^\top

so q, k and w are rotated by their own token's phase, and kernels of the other factors compute the attention. Phases are
summed in float64: those of a late token are as exact as an early one's. The kernels return carried keys rotated by that
phase; the inverse rotation by the last token's phase gives the keys of the reference form.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.forms.backends.fox_path import whole_path
from attnzoo.forms.backends.rotation import turn, turn_for_cache
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.inplace_keys import CarriedMemory
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.options import SoftmaxOptions, existing
from attnzoo.forms.protocol import Call, Kernel
from attnzoo.precision import wide_dtype
from attnzoo.recurrences.complex_linear import keeps_digits, phases, rotate, rotate_all

Rest = tuple[Tensor, Tensor, Tensor, Gate]  # q, k, v and a gate without an angle


def turned(kernel: Kernel) -> Kernel:
    """A kernel of w, beta and perhaps a scalar decay, extended to gates that also have an angle.

    It takes whole sequences, packed or padded, and cached steps; any form of the variant can continue its caches.

    Raises:
        ValueError: a kernel that keeps no state.
    """
    if kernel.extend is None:
        raise ValueError("kernel: expected one that keeps a state, got one of whole sequences alone")

    @functools.wraps(kernel.run)
    def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: SoftmaxOptions) -> Any:
        rest, _, receivers = fold(q, k, v, gate, options.valid, whole=True)
        return kernel.whole(*rest, options) if receivers is None else whole_path(*rest, options, receivers)

    @functools.wraps(kernel.extend)
    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, options: SoftmaxOptions
    ) -> tuple[Any, KVCache]:
        given = v.shape[2]
        (q, k, v, gate), phase, _ = fold(q, k, v, gate, options.valid, 0 if state is None else state.k.shape[2])
        heads = v.shape[2]
        if state is not None and heads > given:
            state = replace(state, k=expand_heads(state.k, heads), v=expand_heads(state.v, heads))
        o, after = kernel.go_on(q, k, v, gate, state, options)
        values = after.v if heads == given else after.v[:, :, :: heads // given]
        return o, replace(after, k=rotate(after.k, -phase), v=values)

    def in_place(state: KVCache, rows: BatchRows, tokens: int, device: torch.device | str) -> TurnedMemory | None:
        if state.k.shape[2] != state.v.shape[2] or kernel.in_place is None:
            return None
        memory: CarriedMemory | None = kernel.in_place(state, rows, tokens, device)
        if memory is None:
            return None
        heads, K = state.k.shape[2:]
        phase = torch.zeros(len(rows.lengths), 1, heads, K // 2, dtype=torch.float64, device=device)
        return TurnedMemory(**vars(memory), phase=phase)

    parts = None if kernel.parts is None else kernel.parts | {"angle"}
    honours = kernel.takes(False, ())
    return replace(kernel, run=run, extend=extend, in_place=in_place, parts=parts, honours=honours)


def fold(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None, heads: int = 0, whole: bool = False
) -> tuple[Rest, Tensor, tuple[Tensor, ...] | None]:
    """q, k, v and the gate with its rotations applied to q, k and w, and the last token's phase.

    The phase is ``[B or 1, 1, 1 or H, K/2]`` float64. The last entry holds the tensors that receive the unrounded
    gradients of q, k and w; None where the kernel's rounding does no harm to the gradient of the angle.

    Args:
        heads: heads that k, v and w must have at least; where query heads have their own angles, each gets a copy.
        whole: whether the tokens go through kernels for whole sequences.
    """
    if valid is not None:
        q, k = existing(valid, q, k)
        gate = gate.per_token(q).neutral_where(~valid)
    angle = cast(Tensor, gate.angle)
    heads = max(heads, k.shape[2], 1 if angle.ndim == 1 else angle.shape[2])
    k, v, w, beta = (expand_heads(cast(Tensor, x), heads) for x in (k, v, gate.w, gate.beta))
    if whole:
        received = valid is None and keeps_digits(angle, v.dtype)
        done = turn(angle, q, k, w, dtype=v.dtype, received=received, balanced=received)
    else:
        done = turn_for_cache(angle, q, k, w, dtype=v.dtype)
    if done is not None:
        gate = replace(gate, angle=None, w=done.w, beta=beta)
        return (done.q, done.k, v, gate), done.phase, done.receivers
    if angle.ndim == 1:  # the same angle at every token
        angle = angle.expand(1, q.shape[1], 1, -1)
    phase, dtype = phases(angle, dim=1), wide_dtype(q.dtype)
    q, k = rotate_all(phase, q.to(dtype), k.to(dtype))
    w = rotate(w.to(dtype), phase if gate.factors is None else phase[:, :, :, None])
    return (q, k, v, replace(gate, angle=None, w=w, beta=beta)), phase[:, -1:], None


@dataclass(eq=False, kw_only=True)
class TurnedMemory(CarriedMemory):
    """The in-place keys of B sequences, each key rotated by the angle since its sequence joined.

    Args:
        phase: the total angle since each sequence joined, ``[B, 1, G, K/2]`` float64.
    """

    phase: Tensor

    def moving(self) -> dict[str, Any]:
        return {**super().moving(), "phase": self.phase.clone()}

    def take(self, call: Call, now: Tensor, there: Tensor | None = None) -> Tensor:
        angle = cast(Tensor, call.gate.angle)
        self.phase.add_(angle)
        gate = replace(call.gate, angle=self.phase[:, :, : angle.shape[2]])  # one head where all share the angle
        q, k, v, gate = fold(call.q, call.k, call.v, gate, None)[0]
        return super().take(replace(call, q=q, k=k, v=v, gate=gate), now, there)

    def admit(self, row: int, state: KVCache, tokens: int) -> None:
        super().admit(row, state, tokens)
        self.phase[row] = 0.0
