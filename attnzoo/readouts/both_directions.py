r"""The softmax over earlier and later tokens, for encoders, with a forget gate in each direction.

.. math:: o_t = \sum_j \mathrm{softmax}_j(s_{tj} + d_{tj})\, v_j, \qquad
          d_{tj} = \begin{cases} g_{j+1} + \cdots + g_t & j \le t \\ h_t + \cdots + h_{j-1} & j > t \end{cases}

Each direction is FoX (Lin et al., "Forgetting Transformer", 2025), the other one in reverse order; we know of no source
for both at once. What reads a key across a transition has no such form: it would need the inverse.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.algebra.readout import Readout, Scores


class BothDirections(Readout):
    """``p_tj = softmax_j(s_tj + d_tj)`` over all tokens of the sequence."""

    parts = ("log_decay_back",)
    causal = False
    equations = ("dₜⱼ = hₜ + ⋯ + hⱼ₋₁ for j > t", "oₜ = Σⱼ softmaxⱼ(sₜⱼ + dₜⱼ) vⱼ")
    paper = "Lin et al., 2025 (arXiv:2503.02130), in each direction"
    unpruned = "its bounds hold for keys before a row alone"

    def weights(self, scores: Scores) -> Tensor:
        return (scores.s + scores.d).softmax(-1)
