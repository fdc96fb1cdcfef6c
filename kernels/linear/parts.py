"""What a step does to its token before the state changes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.parts import Finish, Norm

MAPS = ("identity", "silu", "relu", "elu")  # feature maps of queries and keys; elu is elu + 1


class Convolution(NamedTuple):
    """A convolution of each channel over the last n tokens, then a SiLU or nothing.

    Args:
        weight: ``[X, n]``, the latest token last.
        bias: ``[X]``, or None.
        before: the n - 1 tokens before the step, ``[B, n - 1, X]``, contiguous; the step moves it on.
        silu: whether a SiLU follows.
    """

    weight: Tensor
    bias: Tensor | None
    before: Tensor
    silu: bool = True


class DecayLogits(NamedTuple):
    """Log decays ``factor exp(log_a) log sigmoid(x)`` or, ``opposite``, of -x, which is ``-softplus(x)``.

    Args:
        logits: x without its bias, ``[B, 1, H]``, or ``[B, 1, H K]`` for a decay per channel.
        bias: of each logit, or None.
        log_a: ``[H]``, or None for 0.
        factor: at least 0.
        opposite: see above.
    """

    logits: Tensor
    bias: Tensor | None = None
    log_a: Tensor | None = None
    factor: float = 1.0
    opposite: bool = False


class RecurrentParts(NamedTuple):
    """What a whole step does to its token and its output, and how its state changes.

    Args:
        conv: of q, k and v, all of one size and kind; None for none.
        maps: feature maps of q and of k: ``identity``, ``silu``, ``relu``, ``elu`` (elu + 1).
        norm: of q and k, or what is added to the squares where they become unit vectors; None for none.
        decay: log decay of each head, [H], or what it is made of; None where nothing decays.
        writes: v is multiplied by ``softplus(logits + bias)`` of the decay, which is ``opposite``.
        diag: the same per channel, [B, 1, H K].
        beta: logits of the delta rule's strength, [B, 1, G]: with ``b = beta_factor sigmoid(beta)``,
            ``I - b k k^T`` is part of A and v is multiplied by b.
        skip: [H], how much of v is added to the output.
        finish: the norm and the gate of the output; the gate is [B, 1, H V].
        gate_first: the gate comes before the norm.
        groups: that the norm has in all, of several heads each; None for one of each head.
        scale: of q; default K ** -0.5.
    """

    conv: tuple[Convolution, Convolution, Convolution] | None = None
    maps: tuple[str, str] = ("identity", "identity")
    norm: Norm | float | None = None
    decay: Tensor | DecayLogits | None = None
    writes: bool = False
    diag: DecayLogits | None = None
    beta: Tensor | None = None
    beta_factor: float = 1.0
    skip: Tensor | None = None
    finish: Finish = Finish()
    gate_first: bool = False
    groups: int | None = None
    scale: float | None = None
