r"""RoPE: keys and queries turned by an angle that grows with position.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top \mathrm{Rot}(\theta_{j+1}) \cdots \mathrm{Rot}(\theta_t)\, q_t
          = \lambda\, (\mathrm{Rot}(\phi_j) k_j)^\top (\mathrm{Rot}(\phi_t) q_t), \; \phi_t = \theta_1 + ... + \theta_t

Rotations commute, so each key is turned once, by its own phase. Linear dual: complex linear attention.
Source: Su et al., "RoFormer", 2021, eq. 14-16.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.backends.rotation import turn, turn_for_cache
from attnzoo.forms.caches.state import KVCache
from attnzoo.precision import wide_dtype
from attnzoo.recurrences.complex_linear import keeps_digits, phases, rotate_all

TITLE = "RoPE"
PAPER = "Su et al., 2021 (arXiv:2104.09864)"
EQUATIONS = (
    "ℓₜⱼ = λ kⱼᵀ Rot(θⱼ₊₁ + ⋯ + θₜ) qₜ",
    "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ",
)
LAYER = {"gate": "rotary"}


class Rotated(AdditiveForms):
    """RoPE's forms: keys and queries are rotated by their absolute phase; an angle ``[K/2]`` is multiplied by the
    position."""

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate:
        if gate.angle is not None and valid is None and cu_seqlens is None:
            return gate
        if gate.angle is None or gate.angle.ndim > 1:
            return super().separated(gate, q, valid, cu_seqlens)
        return replace(super().separated(replace(gate, angle=None), q, valid, cu_seqlens), angle=gate.angle)

    def place(
        self, q: Tensor, k: Tensor, gate: Gate, state: KVCache | None, valid: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        angle = gate.angle
        if angle is None:
            return super().place(q, k, gate, state, valid)
        shared = angle if angle.ndim == 1 else None
        if dtype is not None and state is None and valid is None:
            k = k if shared is not None else expand_heads(k, max(k.shape[2], angle.shape[2]))
            done = turn_for_cache(angle, q, k, dtype=dtype)
            if done is not None:
                return done.q, done.k, done.phase, shared
        if shared is None:
            phase = phases(angle, dim=1)  # [B, T, 1 or H, K/2]
        elif valid is None and q.shape[1] == 1:
            phase = shared.double().view(1, 1, 1, -1)
        else:
            T, f64 = q.shape[1], torch.float64
            position = torch.arange(1, T + 1, dtype=f64, device=q.device)[None] if valid is None else valid.cumsum(1)
            phase = position[..., None, None] * shared.double()  # [1 or B, T, 1, K/2]
        if state is not None and state.phase is not None:
            phase = phase + state.phase
        if phase.shape[2] > 1:
            k = expand_heads(k, q.shape[2])
        dtype = wide_dtype(q.dtype)
        q, k = rotate_all(phase, q.to(dtype), k.to(dtype))
        return q, k, phase[:, -1:], shared

    def rounded(
        self, q: Tensor, k: Tensor, gate: Gate, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Gate, tuple[Tensor, ...] | None]:
        angle = gate.angle
        if angle is None:
            return super().rounded(q, k, gate, dtype)
        if angle.ndim > 1:
            k = expand_heads(k, max(k.shape[2], angle.shape[2]))
        done = turn(angle, q, k, dtype=dtype, received=keeps_digits(angle, dtype))
        if done is None:
            return q, k, gate, None
        return done.q, done.k, replace(gate, angle=None), done.receivers


FORMS = Rotated()
