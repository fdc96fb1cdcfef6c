"""Loss per token index and perplexity over lengths.

Definitions (Lin et al., "Forgetting Transformer", 2025, section 4.2, "Metrics"): over held-out windows of length L,
L(i) is the mean negative log-likelihood in nats of the token at index i, and P(l) = exp of the mean of
L(1) ... L(l). A loss that falls up to index i uses i tokens of context; P(l) still falls where L(i) has stopped to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnzoo.evaluation.scores import score_targets
from attnzoo.parallel import Fragments, context_parallel

TOKENS = 2**14  # tokens of a forward pass, if a window is not longer
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LossCurve:
    """Loss by position and perplexity by context length.

    Args:
        context: tokens per training sequence; None where unknown.
        windows: held-out windows that were measured.
        loss: L(i) in nats, i = 1 ... L, ``[L]``.
        error: its standard error over the windows, ``[L]``; nan for one window.
        perplexity: P(l), l = 1 ... L, ``[L]``.
    """

    context: int | None
    windows: int
    loss: Array
    error: Array
    perplexity: Array

    def around(self, index: int, width: int = 101) -> float:
        """The mean of L(i) over the ``width`` indices around ``index >= 1`` (101 in the paper) that exist."""
        first = max(0, index - 1 - width // 2)
        return float(self.loss[first : index + (width - 1) // 2].mean())


def measure_losses(model: nn.Module, windows: Tensor, context: int | None = None, over: Any = None) -> LossCurve:
    """L(i) and P(l) over held-out windows of any length, in memory O(L).

    Args:
        model: as :func:`token_losses` takes it.
        windows: token ids ``[N, L + 1]``, such as :func:`attnzoo.data.heldout_windows` gives.
        context: tokens per training sequence.
        over: as :func:`token_losses` takes it.
    """
    losses = token_losses(model, windows, max(1, TOKENS // windows.shape[1]), over)
    loss, N = losses.mean(0), len(losses)
    error = losses.std(0, ddof=1) / math.sqrt(N) if N > 1 else np.full_like(loss, math.nan)
    return LossCurve(context, N, loss, error, perplexity_over_lengths(loss))


def token_losses(model: nn.Module, windows: Tensor, batch_size: int = 4, over: Any = None) -> Array:
    """Negative log-likelihood of every token of every window.

    Args:
        model: as :func:`attnzoo.evaluation.scores.score_targets` takes it.
        windows: token ids ``[N, L + 1]``; index i is predicted from everything before it.
        batch_size: windows per forward pass.
        over: process group or one-dimensional device mesh whose ranks share every window, and which all call this with
            the same windows; None: this process alone.

    Returns:
        Nats, float64, ``[N, L]``, on every rank.
    """
    if over is None:
        rows = [score_targets(model, batch[:, :-1], batch[:, 1:])[0].cpu() for batch in windows.split(batch_size)]
    else:
        fragments, rows = Fragments.zigzag(windows.shape[1] - 1, over), []
        for batch in windows.split(batch_size):
            with context_parallel(fragments):
                nats, _ = score_targets(model, *fragments.shard(batch[:, :-1], batch[:, 1:]))
            rows.append(fragments.gather(nats).cpu())
    return np.asarray(torch.cat(rows).numpy(), dtype=np.float64)


def moving_mean(values: Array, window: int) -> Array:
    """Centred moving mean over ``window`` positions; at the ends, over the part of the window that exists.

    Args:
        values: ``[L]``.
        window: positions averaged.

    Returns:
        ``[L]``.

    Raises:
        ValueError: a window below 1.
    """
    if window < 1:
        raise ValueError(f"window: expected at least 1, got {window}")
    before = min(window // 2, values.size)
    sides = before, min((window - 1) // 2, values.size)
    total, count = (
        np.convolve(np.pad(of, sides), np.ones(sum(sides) + 1), mode="valid") for of in (values, np.ones_like(values))
    )
    return np.asarray(total / count, dtype=np.float64)


def perplexity_over_lengths(loss: Array) -> Array:
    """P(l) = exp of the mean of the first l values of L(i), for l = 1 ... L; ``loss`` is L(i), ``[L]``."""
    return np.asarray(np.exp(np.cumsum(loss) / np.arange(1, loss.size + 1)), dtype=np.float64)


def mean_and_error(losses: Array) -> tuple[float, float]:
    """Mean of ``losses`` ``[N, L]`` and its standard error over the N windows (nan for one window)."""
    per_window = losses.mean(1)
    error = per_window.std(ddof=1) / math.sqrt(per_window.size) if per_window.size > 1 else math.nan
    return float(per_window.mean()), float(error)
