r"""A decay per channel as a transition, exact for gates of any strength.

Inside a block the score of a pair is :math:`\sum_c q_{ic} k_{jc} e^{b_{ic} - b_{jc}}` with :math:`b` the running
sum of :math:`a`. Splitting it as :math:`(q_i e^{b_i})(k_j e^{-b_j})` overflows, so both factors are taken
relative to a token between the pair: pairs are grouped by halving the block again and again, and the token
is the middle of the group. Every exponent is then <= 0. Groups that decay little are one plain product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import open_sums
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.transitions import ClosedForm, HeadGate, Transition, with_own_scores

LEAF = 2  # tokens of the smallest group
SAFE = 16.0  # a log-decay over which exp is still accurate and far from overflow in float32


class Diagonal(Transition):
    """``R_t = Diag(exp(log_diag_t))``; ``total`` is the decay of each channel over the block."""

    parts = ("log_diag",)
    width = 1
    symbol = PARTS["log_diag"].factor

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return cast(Tensor, gate.log_diag).exp()[..., None] * state

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        sums = Sums(*open_sums(cast(Tensor, gate.log_diag), dim=-2))
        end = sums.at(-1)
        from_start = sums.decay(q.dtype)
        return ClosedForm(
            scores=with_own_scores(_scores(q, k, sums), q, k),
            q=q * from_start,
            k=k * end.decay(k.dtype, since=sums),
            total=end.decay(q.dtype)[..., 0, :],
        )

    def carry(self, total: Tensor | None, state: Tensor) -> Tensor:
        return cast(Tensor, total)[..., None] * state


class Sums(NamedTuple):
    """Running sums of the open gates ``[..., C, K]`` and running counts of the closed ones (None where no gate is
    closed)."""

    open: Tensor
    closed: Tensor | None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Sums:
        return Sums(fn(self.open), None if self.closed is None else fn(self.closed))

    def at(self, token: int) -> Sums:
        """The sums at one token, with the token axis kept at size 1."""
        return self.map(lambda x: x.narrow(-2, token % x.shape[-2], 1))

    def halves(self, m: int) -> tuple[Sums, Sums]:
        """The sums at the first m and at the last m tokens of every group of 2m."""
        return self.map(lambda x: halves(x, m)[0]), self.map(lambda x: halves(x, m)[1])

    def decay(self, dtype: torch.dtype, since: Sums | None = None) -> Tensor:
        """The decay, exp of the sum of the gates, from the block's start or from after the tokens ``since`` up to these
        tokens."""
        decay = (self.open if since is None else self.open - since.open).to(dtype).exp()
        if self.closed is None:
            return decay
        return decay * (self.closed == (0 if since is None else cast(Tensor, since.closed)))


def _scores(q: Tensor, k: Tensor, sums: Sums) -> Tensor:
    """The scores ``[..., C, C]`` of all pairs j <= i of a block; q, k and the sums are ``[..., C, K]``."""
    C, size = int(q.shape[-2]), LEAF  # a number under torch.jit.trace, too
    while size < C:
        size *= 2
    if size > C:
        q, k = (torch.nn.functional.pad(x, (0, 0, 0, size - C)) for x in (q, k))
        sums = sums.map(lambda x: torch.cat([x, *[x[..., -1:, :]] * (size - C)], -2))
    m = _factored_size(sums, size)
    if m:
        out = _factored(_groups(q, m), _groups(k, m), _groups(sums.open, m))
    else:
        m = LEAF
        out = _pairwise(_groups(q, m), _groups(k, m), sums.map(lambda x: _groups(x, LEAF)))
    while m < size:
        _, late_q = halves(q, m)
        early_k, _ = halves(k, m)
        early, late = sums.halves(m)
        middle = early.at(-1)
        cross = (late_q * late.decay(q.dtype, since=middle)) @ (early_k * middle.decay(k.dtype, since=early)).mT
        first, second = out.unflatten(-3, (-1, 2)).unbind(-3)
        out = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)
        m *= 2
    return out[..., 0, :C, :C]


def _factored_size(sums: Sums, size: int) -> int:
    """The largest group whose scores can be one product of factors exp(+-SAFE/2), or 0 for none."""
    if sums.closed is not None or not sums.open.numel():  # closed gates, or values that must not be read
        return 0
    while size >= LEAF:
        groups = _groups(sums.open, size)
        if (groups[..., 0, :] - groups[..., -1, :]).max() <= SAFE:
            return size
        size //= 2
    return 0


def _factored(q: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """Scores of groups as one product, with all decays relative to halfway between the first and the last sum."""
    grow = (sums - (sums[..., :1, :] + sums[..., -1:, :]) / 2).to(q.dtype).exp()
    return (q * grow) @ (k / grow).mT


def _pairwise(q: Tensor, k: Tensor, sums: Sums) -> Tensor:
    """Scores of groups with the decay of every pair written out."""
    pair = (sums.open[..., :, None, :] - sums.open[..., None, :, :]).to(q.dtype)
    earlier = torch.ones(pair.shape[-3:-1], dtype=torch.bool, device=pair.device).tril(-1)
    pair = pair.masked_fill(~earlier[..., None], 0.0)  # the decay from a token to itself is 0; pairs j > i are not read
    if sums.closed is not None:
        pair = pair.masked_fill(sums.closed[..., :, None, :] != sums.closed[..., None, :, :], -torch.inf)
    return torch.einsum("...ik,...jk,...ijk->...ij", q, k, pair.exp())


def _groups(x: Tensor, m: int) -> Tensor:
    return cast(Tensor, x.unflatten(-2, (-1, m)))


def halves(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The first m and the last m tokens of every group of 2m: ``[..., groups, m, K]`` each."""
    first, second = x.unflatten(-2, (-1, 2, m)).unbind(-3)
    return first, second
