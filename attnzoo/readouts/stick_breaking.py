r"""The stick-breaking readout: from the newest key on, each takes a share of what those after it have left.

.. math:: p_{tj} = \sigma(z_{tj}) \prod_{j < l < t} \big(1 - \sigma(z_{tl})\big), \qquad z_{tj} = s_{tj} + d_{tj}

A row does not see its own token, and its weights add up to less than 1. Source: Tan et al., "Scaling Stick-Breaking
Attention", 2024 (arXiv:2410.17980), section 2, there without a gate (d = 0).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.readout import Readout, Scores
from attnzoo.algebra.sums import sum_to_the_end


class StickBreaking(Readout):
    """``log p_tj = log sigmoid(z_tj) + sum_{j < l < t} log(1 - sigmoid(z_tl))``."""

    equations = ("oₜ = Σⱼ σ(zₜⱼ) (Πₗ 1 − σ(zₜₗ)) vⱼ", "with l between j and t, and z the sum of s and d")
    paper = "Tan et al., 2024 (arXiv:2410.17980)"
    unpruned = "what a row's later keys leave depends on its query, so no decay bounds it"

    def weights(self, scores: Scores) -> Tensor:
        z = (scores.s + scores.d).masked_fill(scores.own, -float("inf"))
        after = sum_to_the_end(F.pad(F.logsigmoid(-z[..., 1:]), (0, 1)), -1)
        return (F.logsigmoid(z) + after).exp()
