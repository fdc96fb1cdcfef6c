r"""Gated linear attention: a decay per key channel.

.. math:: S_t = S_{t-1}\,\mathrm{Diag}(e^{a_t}) + v_t k_t^\top, \qquad a_t \in \mathbb{R}^K,\; a_t \le 0

Softmax dual: ``wall``. Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient
Training", 2024, eq. 3 and section 4.

Inside a block the score of a pair is :math:`\sum_c q_{ic} k_{jc} e^{b_{ic} - b_{jc}}` with :math:`b` the running
sum of :math:`a`. Splitting it as :math:`(q_i e^{b_i})(k_j e^{-b_j})` overflows, so both factors are taken
relative to a token between the pair: pairs are grouped by halving the block again and again, and the token
is the middle of the group. Every exponent is then <= 0. Groups that decay little are one plain product.
"""

from typing import cast

import torch
from torch import Tensor

from attnzoo.fla_forms import fla_diagonal_decay
from attnzoo.gate import Gate
from attnzoo.linear import LinearForms
from attnzoo.transitions import Block, Transition, open_sums

TITLE = "Gated linear attention"
PAPER = "Yang et al., 2024 (arXiv:2312.06635)"
LAYER = {"gate": "low_rank", "output_norm": "rms", "output_gate": "swish"}

LEAF = 8  # tokens of the smallest group
SAFE = 16.0  # a log-decay over which exp is still accurate and far from overflow in float32


class Diagonal(Transition):
    """``R_t = Diag(exp(log_diag_t))``; ``total`` is the decay of each channel over the block."""

    def apply(self, gate: Gate, state: Tensor) -> Tensor:
        return cast(Tensor, gate.log_diag).exp()[..., None] * state

    def block(self, q: Tensor, k: Tensor, gate: Gate) -> Block:
        a = cast(Tensor, gate.log_diag)
        b, n = open_sums(a.double(), dim=-2)  # differences of float32 sums would lose digits
        last = b[..., -1:, :], n[..., -1:, :]
        return Block(
            scores=_scores(q, k, a),
            q=q * _decay((b, n), (torch.zeros_like(b[..., :1, :]), torch.zeros_like(n[..., :1, :])), q.dtype),
            k=k * _decay(last, (b, n), k.dtype),
            total=b[..., -1, :].to(a.dtype).exp() * (n[..., -1, :] == 0),
        )

    def carry(self, total: Tensor, state: Tensor) -> Tensor:
        return total[..., None] * state


def _decay(late: tuple[Tensor, Tensor], early: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """exp of the sum of gates after ``early`` up to ``late``, each given by :func:`open_sums`."""
    return (late[0] - early[0]).to(dtype).exp() * (late[1] == early[1])


def _scores(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
    """Scores of all pairs j <= i of a block; q, k, a ``[..., C, K]``, result ``[..., C, C]``."""
    C = q.shape[-2]
    size = max(LEAF, 1 << (C - 1).bit_length())
    q, k, a = (torch.nn.functional.pad(x, (0, 0, 0, size - C)) for x in (q, k, a))
    b, n = open_sums(a.double(), dim=-2)
    m = _factored_size(b, n, size)
    if m:
        out = _factored(*(x.unflatten(-2, (-1, m)) for x in (q, k, b)))
    else:
        m = LEAF
        out = _pairwise(*(x.unflatten(-2, (-1, m)) for x in (q, k, b, n)))
    while m < size:
        (_, late_q), (early_k, _) = _halves(q, m), _halves(k, m)
        (early_b, late_b), (early_n, late_n) = _halves(b, m), _halves(n, m)
        early, late = (early_b, early_n), (late_b, late_n)
        middle = early_b[..., -1:, :], early_n[..., -1:, :]
        cross = (late_q * _decay(late, middle, q.dtype)) @ (early_k * _decay(middle, early, k.dtype)).mT
        first, second = out.unflatten(-3, (-1, 2)).unbind(-3)
        out = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)
        m *= 2
    return out[..., 0, :C, :C]


def _factored_size(b: Tensor, n: Tensor, size: int) -> int:
    """The largest group whose scores can be one product of factors exp(+-SAFE/2), or 0 for none."""
    if b.is_cuda or n.any():  # reading a range off a GPU would synchronise it
        return 0
    while size >= LEAF:
        groups = b.unflatten(-2, (-1, size))
        if (groups[..., 0, :] - groups[..., -1, :]).max() <= SAFE:
            return size
        size //= 2
    return 0


def _factored(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    away = (b - (b[..., :1, :] + b[..., -1:, :]) / 2).to(q.dtype)
    return (q * away.exp()) @ (k * (-away).exp()).mT


def _pairwise(q: Tensor, k: Tensor, b: Tensor, n: Tensor) -> Tensor:
    later = torch.ones(b.shape[-2], b.shape[-2], dtype=torch.bool, device=b.device).triu(1)[..., None]
    apart = later | (n[..., :, None, :] != n[..., None, :, :])
    b = (b - b[..., :1, :]).to(q.dtype)  # relative to the group, a short sum
    pair = (b[..., :, None, :] - b[..., None, :, :]).masked_fill(apart, -torch.inf).exp()
    return torch.einsum("...ik,...jk,...ijk->...ij", q, k, pair)


def _halves(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The first and the second m tokens of every group of 2m: ``[..., groups, m, K]`` each."""
    first, second = x.unflatten(-2, (-1, 2, m)).unbind(-3)
    return first, second


_forms = LinearForms(Diagonal())
step, recurrent, parallel, chunk, extend = (
    _forms.step, _forms.recurrent, _forms.parallel, _forms.chunk, _forms.extend,
)  # fmt: skip
fla = fla_diagonal_decay
