r"""The normalised linear readout: weights are shares of a sum of scores times decays.

.. math:: o_t = \frac{\sum_j \phi(q_t)^\top \phi(k_j)\, e^{d_{tj}} v_j}{\sum_j \phi(q_t)^\top \phi(k_j)\, e^{d_{tj}}}

Its recurrence keeps :math:`z_t = f_t z_{t-1} + \phi(k_t)` beside the state, which is one more value channel of ones.
Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025, equations 3 to 10, from which
FoX follows with :math:`e^{q^\top k}` for the product of features; the feature map elu(x) + 1 is that of Katharopoulos
et al., "Transformers are RNNs", 2020.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.readout import Readout, Scores
from attnzoo.algebra.transitions import HeadGate


def _features(x: Tensor) -> Tensor:
    """``elu(x) + 1``, which is not rounded to 0 where elu is near -1."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


class Normalised(Readout):
    """``p_tj = s_tj exp(d_tj) / sum_l s_tl exp(d_tl)`` with positive scores ``s_tj = phi(q_t)^T phi(k_j)``."""

    equations = ("oₜ = Σⱼ sₜⱼ exp(dₜⱼ) vⱼ / Σⱼ sₜⱼ exp(dₜⱼ)", "with φ(kⱼ) for kⱼ and φ(qₜ) for qₜ")
    paper = "Lin et al., 2025 (arXiv:2503.02130), equations 3 to 10"
    unpruned = "its scores have no exponential, so a decay bounds no key's share"

    def refuses(self, parts: Collection[str]) -> str:
        turning = [part for part in parts if PARTS[part].carries and not PARTS[part].decays]
        return f"{turning[0]} can make scores negative, and their sum 0" if turning else ""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return _features(q), _features(k)

    def weights(self, scores: Scores) -> Tensor:
        shares = scores.s * scores.d.exp()
        return shares / shares.sum(-1, keepdim=True)

    def slots(self, gate: HeadGate, V: int) -> tuple[int, int]:
        return 1, V + 1

    def write(self, state: Tensor, k: Tensor, v: Tensor, place: Tensor, gate: HeadGate) -> Tensor:
        more = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        return state + k[..., None, None] * more[..., None, None, :]

    def read(self, state: Tensor, q: Tensor, place: Tensor, gate: HeadGate) -> Tensor:
        sums = (q[..., None, :] @ state[..., 0, :])[..., 0, :]
        return sums[..., :-1] / sums[..., -1:]
