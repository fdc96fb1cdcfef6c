"""The softmax readout: parallel and cached-stepping forms, with keys carried by any transition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.pruning import Prune, first_kept_keys
from attnzoo.algebra.transitions import HeadGate, Transition, compute_dtype, heads_first
from attnzoo.forms.cache import KVCache, append, append_valid, grown
from attnzoo.forms.rowblocks import block_weights, causal_attention

ROWS = 128


def _check_logit_bound(logit_bound: Tensor | None, prune: Prune | None, q: Tensor) -> None:
    if logit_bound is None:
        return
    if prune is None:
        raise ValueError("logit_bound: expected None without prune (nothing else reads it), got a tensor")
    if logit_bound.shape != q.shape[2:3] or not logit_bound.is_floating_point():
        got = f"{logit_bound.dtype} {tuple(logit_bound.shape)}"
        raise ValueError(f"logit_bound: expected a floating tensor of shape [H={q.shape[2]}], got {got}")


def on_packed(attend: Callable[..., Tensor], valid: Tensor, *rows: Tensor | None) -> Tensor:
    """``attend(*rows, cu_seqlens)`` on the valid tokens alone, as packed sequences; zeros elsewhere.

    Args:
        attend: takes each of ``rows`` as ``[1, tokens, ...]`` and the borders ``[B + 1]``; gives ``[1, tokens, ...]``.
        valid: ``[B, T]`` bool.
        rows: ``[B, T, ...]`` or None.
    """
    borders = F.pad(valid.sum(1).cumsum(0), (1, 0)).int()
    o = attend(*(None if x is None else x[valid][None] for x in rows), borders)
    out = o.new_zeros(*valid.shape, *o.shape[2:])
    out[valid] = o[0]
    return out


class SoftmaxForms(ABC):
    r"""``o_t = sum_j softmax_j(s_tj + d_tj) v_j``.

    All forms take q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]``, the gate and ``scale`` (default
    ``1/sqrt(K)``), and give ``[B, T, H, V]`` in v's dtype. ``prune`` skips blocks of keys whose weight is
    certified to be at most ``prune.eps`` in every row; it needs a scalar decay.
    """

    def parallel(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None, *, prune: Prune | None = None
    ) -> Tensor:
        """All tokens at once, in blocks of rows: memory O(T), no T x T matrix."""
        return self.extend(q, k, v, gate, None, scale, prune=prune)[0]

    def recurrent(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None) -> Tensor:
        """Token by token with a KV cache; softmax attention has no state of finite size."""
        state: KVCache | None = None
        outputs = []
        for t in range(q.shape[1]):
            now = slice(t, t + 1)
            o, state = self.extend(q[:, now], k[:, now], v[:, now], gate.slice(t, t + 1), state, scale)
            outputs.append(o)
        return torch.cat(outputs, 1)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: KVCache | None = None,
        scale: float | None = None,
        *,
        valid: Tensor | None = None,
        prune: Prune | None = None,
        logit_bound: Tensor | None = None,
    ) -> tuple[Tensor, KVCache]:
        """Continue from ``state`` (None: empty) with one token or many.

        Args:
            state: what an earlier call gave.
            valid: ``[B, T]`` bool; a token where it is false is never attended to and moves nothing. Its own
                output is finite and means nothing.
            prune: see the class.
            logit_bound: ``[H]``, no ``|s_tj|`` may exceed it; ``prune`` certifies by it besides the measured norms.

        Returns:
            The output ``[B, T, H, V]`` and the cache with the new tokens.

        Raises:
            ValueError: ``prune`` without a scalar decay, or a ``logit_bound`` that nothing reads or of another shape.
        """
        if valid is not None:
            gate = gate.per_token(q).neutral_where(~valid)
        if prune is not None and gate.log_decay is None:
            raise ValueError("prune: expected None (nothing decays without log_decay), got " + repr(prune))
        _check_logit_bound(logit_bound, prune, q)
        return self._extend(q, k, v, gate, state, scale, valid, prune, logit_bound)

    @abstractmethod
    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: KVCache | None,
        scale: float | None,
        valid: Tensor | None,
        prune: Prune | None,
        logit_bound: Tensor | None,
    ) -> tuple[Tensor, KVCache]:
        """:meth:`extend` with its arguments checked."""


class AdditiveForms(SoftmaxForms):
    """Encodings that are a bias on the logits, or a rotation of q and k that can be done beforehand."""

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: KVCache | None,
        scale: float | None,
        valid: Tensor | None,
        prune: Prune | None,
        logit_bound: Tensor | None,
    ) -> tuple[Tensor, KVCache]:
        q, state = self._remember(q, k, v, gate, state, valid)
        H, dtype = q.shape[2], compute_dtype(q)
        scaled = heads_first(q, H, dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
        keys, values = heads_first(state.k, H, dtype), heads_first(state.v, H, dtype)
        decay = None if state.log_decay is None else heads_first(state.log_decay, H, dtype)
        first_kept = None
        if prune is not None:
            first_kept = first_kept_keys(scaled, keys, cast(Tensor, decay), prune, logit_bound, rows=ROWS)
        o = causal_attention(scaled, keys, values, decay, state.valid, first_kept, rows=ROWS)
        return o.transpose(1, 2).to(v.dtype), state

    def triton(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, scale: float | None = None, *,
        valid: Tensor | None = None, prune: Prune | None = None, logit_bound: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The fused kernel (``attnzoo.kernels.fox``), in the inputs' own precision."""
        return self.extend_triton(q, k, v, gate, None, scale, valid=valid, prune=prune, logit_bound=logit_bound)[0]

    def triton_refuses(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, valid: Tensor | None
    ) -> str:
        """Why :meth:`extend_triton` cannot serve a call, or ""."""
        from attnzoo.kernels.fox import triton_unavailable

        if state is not None and (valid is not None or state.valid is not None):
            return "the triton form serves padding only in whole sequences, without a cache"
        return triton_unavailable(q, v)

    def extend_triton(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: KVCache | None = None,
        scale: float | None = None,
        *,
        valid: Tensor | None = None,
        prune: Prune | None = None,
        logit_bound: Tensor | None = None,
    ) -> tuple[Tensor, KVCache]:
        """:meth:`extend` on the fused kernel; with ``valid`` the rows run as packed sequences, from an empty state.

        Raises:
            ValueError: ``valid`` together with a state.
        """
        from attnzoo.kernels.fox import fox_attention

        if valid is not None and state is not None:
            raise ValueError("valid: expected None with a state (the kernel packs whole sequences)")
        if valid is not None:
            gate = gate.per_token(q).neutral_where(~valid)
        q, state = self._remember(q, k, v, gate, state, valid)
        q, k, g = q.to(v.dtype), state.k.to(v.dtype), state.log_decay
        options: dict[str, Any] = {"scale": scale, "prune": prune, "logit_bound": logit_bound, "impl": "triton"}
        if valid is None:
            constant = g is not None and g.stride()[:2] == (0, 0)  # one decay per head, expanded over the tokens
            g = g[0, 0] if g is not None and constant else g
            return fox_attention(q, k, state.v, log_decay=g, **options), state

        def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, borders: Tensor) -> Tensor:
            return fox_attention(q, k, v, log_decay=g, cu_seqlens=borders, **options)

        return on_packed(attend, valid, q, k, v, g), state

    def _remember(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, valid: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """q in its place, and the cache with the new tokens."""
        q, k, phase = self._place(q, k, gate, state)
        new = KVCache(k, v, gate.per_token(q).log_decay, valid, phase)
        if state is None:
            return q, new
        if k.shape[2] != state.k.shape[2]:
            state = replace(state, k=expand_heads(state.k, k.shape[2]))
            new = replace(new, k=expand_heads(k, state.k.shape[2]))
        return q, grown(state, new)

    def _place(self, q: Tensor, k: Tensor, gate: Gate, state: KVCache | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k with their matrix transitions folded in, and the cache's new phase."""
        return q, k, None


@dataclass(frozen=True)
class CarriedForms(SoftmaxForms):
    """Encodings whose keys must be carried past every transition, in blocks of rows.

    A row block computes its own scores in closed form; for earlier keys the queries are carried back to the
    start of the block, and the keys have been carried up to there.

    Args:
        transition: the matrix part of the gate.
    """

    transition: Transition

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Gate,
        state: KVCache | None,
        scale: float | None,
        valid: Tensor | None,
        prune: Prune | None,
        logit_bound: Tensor | None,
    ) -> tuple[Tensor, KVCache]:
        B, T, H, K = q.shape
        G, dtype = k.shape[2], compute_dtype(q)
        gate = gate.per_token(q)
        past = KVCache(k[:, :0], v[:, :0]) if state is None else state
        P = len(past)
        log_decay = append(past.log_decay, gate.log_decay)
        new = KVCache(k, cast(Tensor, append(past.v, v)), log_decay, append_valid(state, valid, k))
        scaled = heads_first(q, H, dtype) * (K**-0.5 if scale is None else scale)
        keys, values = heads_first(k, H, dtype), heads_first(new.v, H, dtype)
        carried = heads_first(past.k, H, dtype).mT  # [B, H, K, S]: laid out as a state, to be carried as one
        local = HeadGate.of(gate, q)
        decay = torch.zeros(B, H, P + T, dtype=dtype, device=q.device)
        if log_decay is not None:
            decay = heads_first(log_decay, H, dtype)
        first_kept = None
        if prune is not None:
            all_keys = torch.cat([carried.mT, keys], 2)
            first_kept = first_kept_keys(scaled, all_keys, decay, prune, logit_bound, rows=ROWS)
        outputs = []
        for n, start in enumerate(range(0, T, ROWS)):
            stop = min(start + ROWS, T)
            rows = local.slice(start, stop)
            kept = None if first_kept is None else first_kept[:, :, n]
            args = (
                scaled[:, :, start:stop], keys[:, :, start:stop], values[:, :, : P + stop], rows,
                decay[:, :, : P + stop], carried, None if new.valid is None else new.valid[:, : P + stop], kept,
            )  # fmt: skip
            if torch.is_grad_enabled():
                o, carried = checkpoint(self._rows, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                o, carried = self._rows(*args)
            outputs.append(o)
        step = 1 if gate.log_diag is not None or gate.angle is not None else H // G
        new = KVCache(carried.mT[:, ::step].transpose(1, 2), new.v, log_decay, new.valid)
        return torch.cat(outputs, 2).transpose(1, 2).to(v.dtype), new

    def _rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: HeadGate,
        decay: Tensor,
        carried: Tensor,
        valid: Tensor | None,
        first_kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """One block of C rows over ``carried`` ``[B, H, K, P]`` and itself: the output and the new ``carried``."""
        block = self.transition.block(q, k, gate)
        scores = torch.cat([block.q @ carried, block.scores], -1)
        weights = block_weights(scores, decay, None if valid is None else valid[:, None], first_kept)
        carried = self.transition.carry(cast(Tensor, block.total), carried)
        return weights @ v, torch.cat([carried, block.k.mT], -1)
