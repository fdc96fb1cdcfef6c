r"""The log-linear readout: a weight for each level of the past, in stretches that double with their age.

.. math:: o_t = \sum_j \mu_t^{(\ell(t, j))}\, s_{tj}\, e^{d_{tj}}\, v_j

With tokens counted from 0, :math:`\ell(t, j)` is the number of binary digits of t xor j: 0 is the token itself, and
level l holds up to :math:`2^{l-1}` tokens, as in a Fenwick tree. One state per level gives the same: with token t the
levels below its lowest digit 1 are added up to the level above. Over L levels all that is older is in the last. Source:
Guo et al., "Log-Linear Attention", 2025 (arXiv:2506.04761), section 3; there the weights are called lambda.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.readout import Readout, Scores
from attnzoo.algebra.transitions import HeadGate


class LogLinear(Readout):
    """``p_tj = mu_t[level(t, j)] s_tj exp(d_tj)``, with mu the gate part ``levels``."""

    parts = ("levels",)
    equations = ("oₜ = Σⱼ μₜ[n] sₜⱼ exp(dₜⱼ) vⱼ", "with n the number of binary digits of t xor j")
    paper = "Guo et al., 2025 (arXiv:2506.04761)"
    unpruned = "its weights are no shares of a sum, so no mass can be bounded"

    def weights(self, scores: Scores) -> Tensor:
        levels = cast(Tensor, scores.gate.levels)  # [B, H, C, L]
        apart = scores.row_place[..., :, None] ^ scores.place[..., None, :]
        level = torch.frexp(apart.double()).exponent.long().clamp(max=levels.shape[-1] - 1)[:, None]
        return levels.gather(-1, level.expand(scores.s.shape)) * scores.s * scores.d.exp()

    def slots(self, gate: HeadGate, V: int) -> tuple[int, int]:
        return cast(Tensor, gate.levels).shape[-1], V

    def write(self, state: Tensor, k: Tensor, v: Tensor, place: Tensor, gate: HeadGate) -> Tensor:
        L = state.shape[-2]
        index = torch.arange(L, device=place.device)
        full = place[:, None] % (1 << index) == 0  # [B, L]: levels that this token's place completes
        above = index == full.sum(1, keepdim=True).clamp(max=L - 1)
        full, above = (x[:, None, None, :, None] for x in (full, above))
        merged = torch.where(full, 0, state) + above * torch.where(full, state, 0).sum(-2, keepdim=True)
        own = k[..., None] * v[..., None, :]  # [B, H, K, V]
        return torch.cat([merged[..., :1, :] + own[..., None, :], merged[..., 1:, :]], -2)

    def read(self, state: Tensor, q: Tensor, place: Tensor, gate: HeadGate) -> Tensor:
        return torch.einsum("bhk,bhknv,bhn->bhv", q, state, cast(Tensor, gate.levels))
