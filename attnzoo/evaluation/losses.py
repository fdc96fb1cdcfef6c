"""Loss per token index and perplexity over lengths.

Definitions (Lin et al., "Forgetting Transformer", 2025, section 4): over held-out windows of length L,
L(i) is the mean negative log-likelihood in nats of the token at index i, and P(l) = exp of the mean of
L(1) ... L(l).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Array = npt.NDArray[np.float64]


@torch.inference_mode()
def token_losses(model: nn.Module, windows: Tensor, batch_size: int = 4) -> Array:
    """Negative log-likelihood of every token of every window.

    Args:
        model: called with token ids ``[B, L]``, its output has ``logits [B, L, vocabulary]``.
        windows: ``[N, L + 1]``; index i is predicted from everything before it.
        batch_size: windows per forward pass.

    Returns:
        Nats, float64, ``[N, L]``.
    """
    rows = []
    for batch in windows.split(batch_size):
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        rows.append(loss.view(batch.shape[0], -1).double().cpu())
    return np.asarray(torch.cat(rows).numpy(), dtype=np.float64)


def moving_mean(values: Array, window: int) -> Array:
    """Centred moving mean over ``window`` positions; at the ends, over the part of the window that exists.

    Args:
        values: ``[L]``.
        window: positions averaged, >= 1.

    Returns:
        ``[L]``.
    """
    if window < 1:
        raise ValueError(f"window: expected at least 1, got {window}")
    ones = np.ones(min(window, values.size))
    total = np.convolve(values, ones, mode="same")
    return np.asarray(total / np.convolve(np.ones_like(values), ones, mode="same"), dtype=np.float64)


def perplexity_over_lengths(loss: Array) -> Array:
    """P(l) = exp of the mean of the first l values of L(i), for l = 1 ... L; ``loss`` is L(i), ``[L]``."""
    return np.asarray(np.exp(np.cumsum(loss) / np.arange(1, loss.size + 1)), dtype=np.float64)


def mean_and_error(losses: Array) -> tuple[float, float]:
    """Mean of ``losses`` ``[N, L]`` and its standard error over the N windows (nan for one window)."""
    per_window = losses.mean(1)
    error = per_window.std(ddof=1) / math.sqrt(per_window.size) if per_window.size > 1 else math.nan
    return float(per_window.mean()), float(error)
