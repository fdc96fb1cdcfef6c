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

from attnzoo.algebra.transitions import ClosedForm, HeadGate, Transition, open_sums
from attnzoo.forms.fla import FLA_DIAGONAL_DECAY
from attnzoo.forms.linear import LinearForms

TITLE = "Gated linear attention"
PAPER = "Yang et al., 2024 (arXiv:2312.06635)"
EQUATIONS = (
    "Sₜ = Sₜ₋₁ Diag(exp(aₜ)) + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ Diag(exp(aⱼ₊₁ + ⋯ + aₜ)) qₜ) vⱼ",
)
LAYER = {"gate": "low_rank", "output_norm": "rms", "output_gate": "swish"}

LEAF = 2  # tokens of the smallest group
SAFE = 16.0  # a log-decay over which exp is still accurate and far from overflow in float32


class Diagonal(Transition):
    """``R_t = Diag(exp(log_diag_t))``; ``total`` is the decay of each channel over the block."""

    width = 1

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return cast(Tensor, gate.log_diag).exp()[..., None] * state

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        sums = open_sums(cast(Tensor, gate.log_diag), dim=-2)
        b, n = sums
        total = b[..., -1, :].to(q.dtype).exp()
        return ClosedForm(
            scores=_scores(q, k, *sums),
            q=q * (b.to(q.dtype).exp() if n is None else b.to(q.dtype).exp() * (n == 0)),
            k=k * _decay(_at(sums, -1), sums, k.dtype),
            total=total if n is None else total * (n[..., -1, :] == 0),
        )

    def carry(self, total: Tensor | None, state: Tensor) -> Tensor:
        return cast(Tensor, total)[..., None] * state


Sums = tuple[Tensor, Tensor | None]  # what open_sums gives


def _at(sums: Sums, token: int) -> Sums:
    """The sums of one token, with its axis kept."""
    b, n = sums
    index = torch.full((1,), token % b.shape[-2], device=b.device)  # made there, not copied there
    return b.index_select(-2, index), None if n is None else n.index_select(-2, index)


def _decay(late: Sums, early: Sums, dtype: torch.dtype) -> Tensor:
    """exp of the sum of gates after ``early`` up to ``late``."""
    decay = (late[0] - early[0]).to(dtype).exp()
    return decay if late[1] is None or early[1] is None else decay * (late[1] == early[1])


def _scores(q: Tensor, k: Tensor, b: Tensor, n: Tensor | None) -> Tensor:
    """Scores of all pairs j <= i of a block; q, k and the sums ``[..., C, K]``, result ``[..., C, C]``."""
    C = q.shape[-2]
    size = max(LEAF, 1 << (C - 1).bit_length())
    if size > C:
        q, k = (torch.nn.functional.pad(x, (0, 0, 0, size - C)) for x in (q, k))
        b, n = _repeat_last(b, size - C), None if n is None else _repeat_last(n, size - C)
    m = _factored_size(b, n, size)
    if m:
        out = _factored(_groups(q, m), _groups(k, m), _groups(b, m))
    else:
        m = LEAF
        out = _pairwise(_groups(q, m), _groups(k, m), _groups(b, m), None if n is None else _groups(n, m))
    while m < size:
        (_, late_q), (early_k, _), (early_b, late_b) = (_halves(x, m) for x in (q, k, b))
        early_n, late_n = (None, None) if n is None else _halves(n, m)
        middle = _at((early_b, early_n), -1)
        late = _decay((late_b, late_n), middle, q.dtype)
        early = _decay(middle, (early_b, early_n), q.dtype)
        cross = (late_q * late) @ (early_k * early).mT
        first, second = out.unflatten(-3, (-1, 2)).unbind(-3)
        out = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)
        m *= 2
    return out[..., 0, :C, :C]


def _factored_size(b: Tensor, n: Tensor | None, size: int) -> int:
    """The largest group whose scores can be one product of factors exp(+-SAFE/2), or 0 for none."""
    if n is not None or b.is_cuda:  # reading a range off a GPU would synchronise it
        return 0
    while size >= LEAF:
        groups = _groups(b, size)
        if (groups[..., 0, :] - groups[..., -1, :]).max() <= SAFE:
            return size
        size //= 2
    return 0


def _factored(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    away = (b - (b[..., :1, :] + b[..., -1:, :]) / 2).to(q.dtype)
    grow = away.exp()
    return (q * grow) @ (k / grow).mT


def _pairwise(q: Tensor, k: Tensor, b: Tensor, n: Tensor | None) -> Tensor:
    pair = (b[..., :, None, :] - b[..., None, :, :]).to(q.dtype).clamp(max=0)  # j <= i only; the rest is not read
    if n is not None:
        pair = pair.masked_fill(n[..., :, None, :] != n[..., None, :, :], -torch.inf)
    return torch.einsum("...ik,...jk,...ijk->...ij", q, k, pair.exp())


def _repeat_last(x: Tensor, times: int) -> Tensor:
    return torch.cat([x, *[x[..., -1:, :]] * times], -2)


def _groups(x: Tensor, m: int) -> Tensor:
    return cast(Tensor, x.unflatten(-2, (-1, m)))


def _halves(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The first and the second m tokens of every group of 2m: ``[..., groups, m, K]`` each."""
    first, second = x.unflatten(-2, (-1, 2, m)).unbind(-3)
    return first, second


FORMS = LinearForms(Diagonal(), kernels={"fla": FLA_DIAGONAL_DECAY})
