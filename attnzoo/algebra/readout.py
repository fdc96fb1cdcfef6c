"""The interface of readouts: what a variant makes of the scores and decays of its tokens.

The linear and the softmax readout have forms of their own. Every other one is a :class:`Readout`, which stands on any
:class:`~attnzoo.algebra.transitions.Transition` as they do. Heads come before time here, as in transitions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.algebra.transitions import HeadGate


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores and log-decays of C rows (queries) over S keys, the last C of which are the rows' own tokens.

    Args:
        s: scaled scores ``k_j^T R_{j+1} ... R_t q_t``, ``[B, H, C, S]``; 0 where d is -inf.
        d: log-decays ``g_{j+1} + ... + g_t``, ``[B, H, C, S]``; -inf where the row does not see the key: later tokens,
            absent ones, those before a closed gate and those of another packed sequence. Every row sees its own, at 0.
        place: the number of tokens before each key in its sequence, absent ones not counted, ``[B or 1, S]`` int64.
        gate: the parts of the rows' tokens, ``[B, H, C, ...]``.
    """

    s: Tensor
    d: Tensor
    place: Tensor
    gate: HeadGate

    @property
    def own(self) -> Tensor:
        """The mask of each row's own key, ``[C, S]``."""
        C, S = self.s.shape[-2:]
        return torch.ones(C, S, dtype=torch.bool, device=self.s.device).triu(S - C).tril(S - C)

    @property
    def row_place(self) -> Tensor:
        """The ``place`` of the rows' own tokens, ``[B or 1, C]``."""
        return self.place[:, self.s.shape[-1] - self.s.shape[-2] :]


class Readout:
    """``o_t = sum_j p_tj v_j`` with weights p of one's own. Only :meth:`weights` must be written.

    A readout that overrides :meth:`slots` has a state of that size, and its steps are :meth:`write` and :meth:`read`;
    any other keeps all keys, carried by the transition, and its steps are rows of :meth:`weights`.

    Args:
        parts: gate parts that the readout alone reads, declared with ``readout=True``.
        causal: whether rows see earlier keys only. Otherwise s and d have entries for later keys too, where d is the
            sum of ``log_decay_back`` (0 without that part) from the row up to the token before the key. There are no
            steps then.
        equations: lines of ``attnzoo show`` that make o_t of s and d.
        paper: its source.
        unpruned: why no certificate of pruning holds.
    """

    parts: tuple[str, ...] = ()
    causal: bool = True
    equations: Sequence[str] = ("oₜ = Σⱼ pₜⱼ vⱼ, with weights p of s and d",)
    paper: str = ""
    unpruned: str = "no bound of a key's weight in this readout is known"

    @property
    def stateful(self) -> bool:
        """Whether it has a state of fixed size, as those that override :meth:`slots` do."""
        return type(self).slots is not Readout.slots

    def refuses(self, parts: Collection[str]) -> str:
        """The reason why the readout cannot stand on a gate with these parts of R_t and g_t, or ""."""
        return ""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q ``[B, T, H, K]`` and k ``[B, T, G, K]`` token by token, before transitions and scale; here as they are.

        Under the identity transition the number of channels may change.
        """
        return q, k

    def weights(self, scores: Scores) -> Tensor:
        """``p``, ``[B, H, C, S]``: 0 where d is -inf."""
        raise NotImplementedError(f"{type(self).__name__}.weights: expected every readout to define it")

    def output(self, p: Tensor, v: Tensor) -> Tensor:
        """The rows' outputs ``[B, H, C, V]`` of weights p ``[B, H, C, S]`` and values ``[B, H, S, V]``: ``p v``."""
        return p @ v

    def slots(self, gate: HeadGate, V: int) -> tuple[int, int]:
        """The state's size (N, X), for V value channels: ``[B, H, K, N, X]``."""
        raise NotImplementedError(f"{type(self).__name__}.slots: expected a readout with a state to define it")

    def write(self, state: Tensor, k: Tensor, v: Tensor, place: Tensor, gate: HeadGate) -> Tensor:
        """The state ``[B, H, K, N, X]`` with one more token; the transition has moved it already.

        Args:
            k, v: of the token, ``[B, H, K]`` and ``[B, H, V]``.
            place: the number of tokens before it in its sequence, ``[B]`` int64.
            gate: its parts, ``[B, H, ...]``.
        """
        raise NotImplementedError(f"{type(self).__name__}.write: expected a readout with slots to define it")

    def read(self, state: Tensor, q: Tensor, place: Tensor, gate: HeadGate) -> Tensor:
        """The output ``[B, H, V]`` of scaled queries ``[B, H, K]``, from the state that their tokens have written."""
        raise NotImplementedError(f"{type(self).__name__}.read: expected a readout with slots to define it")


def both_ways(between: Tensor, back: Tensor) -> Tensor:
    """Log-decays between all tokens, ``[..., T, T]``: ``between`` to earlier ones, to later ones ``back``, that of the
    tokens in reverse order."""
    earlier = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).tril()
    return torch.where(earlier, between, back.flip(-1, -2))
