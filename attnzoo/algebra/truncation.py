r"""Certified truncation: the chunks of a recurrence that need not be carried on to later ones.

Without a softmax a row's weights are :math:`e^{d_{tj}}` alone, so gates certify what a carried state may weigh. Keys
0..b may be dropped for row p and all later ones, and rows from p on for keys up to b, when

.. math:: \sum_{j \le b} e^{d_{pj}} \le \epsilon \qquad\text{and}\qquad \sum_{t \ge p} e^{d_{tb}} \le \epsilon:

that is the certificate of :mod:`attnzoo.algebra.pruning` with :math:`U_i = l_i = 0`, read along rows and along columns.
The first is for outputs and gradients of queries, the second for those of keys and values. A state from before the
first token counts as one more key, and one that is asked for after the last as one more row. Only :math:`|R_t| \le 1`
is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.block_decay import Decay, decay_between
from attnzoo.algebra.sums import running_sum, sum_to_the_end
from attnzoo.algebra.values import readable


def kept_chunks(decay: Decay, eps: float) -> tuple[Tensor, Tensor]:
    """The chunks that are carried on to each of N chunks, by rows and by columns.

    Args:
        decay: of gates ``[B, H, N, C]``.
        eps: the largest sum of weights ``e^d`` that may be left out.

    Returns:
        Two masks ``[B, H, N + 1, N + 1]``. Entry (n, m) is about the state before chunk n, which for n = N is the last,
        and what chunk m - 1 adds to it, which for m = 0 is the state before the first token.
    """
    with torch.no_grad():
        weights = decay_between(F.pad(decay.total, (1, 0))).exp().tril()
        keys = F.pad(decay.exit.exp().sum(-1), (1, 0), value=1.0)
        rows = F.pad(decay.entry.exp().sum(-1), (0, 1), value=1.0)
        by_rows = running_sum(weights * keys[..., None, :], -1) > eps
        by_columns = sum_to_the_end(weights * rows[..., None], -2) > eps
        return by_rows, by_columns.tril()


def carried_states(
    advance: Callable[[Tensor, int], Tensor], decay: Decay, updates: Tensor, first: Tensor, eps: float
) -> Tensor:
    """The states before each of N chunks and after the last, ``[B, H, N + 1, K, V]``, of what is kept.

    Their gradients go back over what is kept by columns. Chunks are carried on one step at a time, all together, for as
    many steps as the longest memory takes.

    Args:
        advance: ``advance(states, n)`` carries ``[B, H, M, K, V]`` over the chunks n, n + 1, ..., n + M - 1.
        updates: what each chunk adds to the state, ``[B, H, N, K, V]``.
        first: the state before the first token, ``[B, H, K, V]``.
        eps: see :func:`kept_chunks`.
    """
    by_rows, by_columns = kept_chunks(decay, eps)
    N = updates.shape[2]
    steps = N + 1
    if readable(by_rows):
        at = torch.arange(N + 1, device=by_rows.device)
        lags = at[:, None] - at
        steps = 1 + int(torch.where(by_rows.tril() | by_columns, lags, -1).amax())
    carried, found = torch.cat([first[:, :, None], updates], 2), torch.zeros_like(updates[:, :, :1])
    found = found.expand(-1, -1, N + 1, -1, -1)
    for lag in range(steps):
        rows, columns = (kept.diagonal(-lag, -2, -1)[..., None, None] for kept in (by_rows, by_columns))
        summand = carried * columns
        summand = summand + (carried * rows - summand).detach()
        found = found + F.pad(summand, (0, 0, 0, 0, lag, 0))
        if lag < N:
            carried = advance(carried[:, :, :-1], lag)
    return found
