r"""Causal softmax attention with an additive decay, in blocks of rows on PyTorch's fused kernel.

For a block of rows that starts after key p the logits are

.. math:: q_i^\top k_j + c_i + b_j, \qquad c_i = g_{p+1} + ... + g_i, \quad b_j = g_{j+1} + ... + g_p

(and :math:`b_j = -c_j` inside the block). :math:`c_i` is constant in its row, so it only moves the log-sum-exp, and
:math:`b_j` rides along as one more key channel against a query channel of ones: the fused kernel needs no mask,
and the gradient of that channel is the gradient of the gate. All sums are relative to p, so they stay
accurate at any length. The parts left of the block and inside it are merged by their log-sum-exps, and each
part's backward runs with the merged one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.transitions import block_decay, open_sums

HIDDEN = -1e30  # a logit whose exp is 0, and whose arithmetic never makes a NaN
ROWS = 512

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    first_kept: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """The last T of S tokens attend to all before them.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k: ``[B, H, S, K]``, S >= T.
        v: ``[B, H, S, V]``.
        log_decay: gates ``[B, H, S]`` <= 0, -inf allowed, or None.
        valid: keys that exist, ``[B, S]`` bool, or None for all.
        first_kept: first key that each block of ``rows`` rows may see, ``[B, H, ceil(T / rows)]``, or None.
        rows: size of a row block; default 512.

    Returns:
        ``[B, H, T, V]``. A row without any valid key is finite and means nothing.
    """
    T, S, V = q.shape[2], k.shape[2], v.shape[3]
    width = -(-max(q.shape[3] + (log_decay is not None or valid is not None), V) // 8) * 8
    if log_decay is None and valid is None and (T == S or T == 1):
        o = F.scaled_dot_product_attention(
            _widen(q, width), _widen(k, width), _widen(v, width), is_causal=T > 1, scale=1.0
        )
        return o[..., :V]
    if log_decay is None:
        log_decay = q.new_zeros(*q.shape[:2], S)
    if T == 1:
        return _one_row(q, k, v, log_decay, valid, first_kept)
    rows = min(rows or ROWS, -(-T // 8) * 8)
    return cast(Tensor, _RowBlocks.apply(q, k, v, log_decay, valid, first_kept, rows))  # type: ignore[no-untyped-call]


def _one_row(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, valid: Tensor | None, first_kept: Tensor | None
) -> Tensor:
    S = k.shape[2]
    later = torch.cat([log_decay[..., 1:], torch.zeros_like(log_decay[..., :1])], -1)
    logits = (q @ k.mT) + later.flip(-1).cumsum(-1).flip(-1)[..., None, :]
    logits = logits.clamp(min=HIDDEN)
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None, None, :], HIDDEN)
    if first_kept is not None:
        logits = logits.masked_fill(torch.arange(S, device=q.device) < first_kept[..., None], HIDDEN)
    return logits.softmax(-1) @ v


class _RowBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        valid: Tensor | None,
        first_kept: Tensor | None,
        rows: int,
    ) -> Tensor:
        V = v.shape[3]
        plan = _Plan(q, k, v, log_decay, valid, first_kept, rows)
        o, lse = plan.inside()
        for part in plan.before():
            o_part, lse_part = plan.attend(part)
            lse_part = lse_part + plan.entry[:, :, part.block]
            merged = torch.logaddexp(lse[:, :, part.block], lse_part)
            o[:, :, part.block] *= (lse[:, :, part.block] - merged).exp()[..., None]
            o[:, :, part.block] += o_part * (lse_part - merged).exp()[..., None]
            lse[:, :, part.block] = merged
        ctx.save_for_backward(q, k, v, log_decay, valid, first_kept, o, lse)
        ctx.rows = rows
        return o.flatten(2, 3)[:, :, : q.shape[2], :V].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, valid, first_kept, o, lse = ctx.saved_tensors
        T, S, K, V = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        plan = _Plan(q, k, v, log_decay, valid, first_kept, ctx.rows)
        do = plan.fill(F.pad(grads[0], (0, o.shape[-1] - V)))
        dq, dk, dv = plan.inside_backward(do, o, lse)
        for part in plan.before():
            dq_part, dk_part, dv_part = plan.attend_backward(part, do, o, lse)
            dq[:, :, part.block] += dq_part
            dk[:, :, part.first : part.stop] += dk_part
            dv[:, :, part.first : part.stop] += dv_part
        # d_tj depends on -c_j only: the row side of c has no gradient, softmax is invariant to it
        dg = -dk[:, :, :S, K].double().flip(-1).cumsum(-1).flip(-1)
        dg = torch.where(torch.isneginf(log_decay), 0.0, dg).to(log_decay.dtype)
        return (
            dq.flatten(2, 3)[:, :, :T, :K], dk[:, :, :S, :K], dv[:, :, :S, :V], dg, None, None, None,
        )  # fmt: skip


class _Part:
    """The keys ``first`` to ``stop`` that one row block sees on its left."""

    def __init__(self, block: int, first: int, stop: int) -> None:
        self.block, self.first, self.stop = block, first, stop


class _Plan:
    """Tensors widened by the bias channel and cut into row blocks, with each block's decays."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        valid: Tensor | None,
        first_kept: Tensor | None,
        rows: int,
    ) -> None:
        self.T, self.S, self.K, self.rows = q.shape[2], k.shape[2], q.shape[3], rows
        self.past = self.S - self.T
        self.width = -(-max(self.K + 1, v.shape[3]) // 8) * 8
        filler = -self.T % rows
        q = _widen(q, self.width)
        q[..., self.K] = 1.0
        self.q = self.fill(q)  # [B, H, N, C, width]
        self.k = F.pad(_widen(k, self.width), (0, 0, 0, filler))
        self.v = F.pad(_widen(v, self.width), (0, 0, 0, filler))
        gates = F.pad(log_decay, (0, filler))
        hidden = None if valid is None else F.pad(~valid, (0, filler))[:, None, :]
        self.hidden = hidden
        self.first_kept = first_kept
        self.sums = open_sums(gates.double())
        own = gates[..., self.past :].unflatten(-1, (-1, rows))  # [B, H, N, C]
        self.gates = own
        c, n = open_sums(own)
        self.entry = c.masked_fill(n > 0, HIDDEN)
        # the bias inside a block is -c_j around its middle: too long a sum, or a closed gate, is done exactly
        self.middle = (c[..., :1] + c[..., -1:]) / 2
        self.c = c
        far = 128.0 if c.dtype == torch.float32 else 4096.0
        spread = (c[..., 0] - c[..., -1]).amax(dim=(0, 1))
        self.exact = ((n[..., -1] > 0).any(0).any(0) | (spread > far)).tolist()
        if hidden is not None:
            self.own_hidden = hidden[..., self.past :].unflatten(-1, (-1, rows))

    def fill(self, x: Tensor) -> Tensor:
        """``[B, H, T, X]`` cut into row blocks ``[B, H, N, C, X]``, the last one filled up with zeros."""
        return cast(Tensor, F.pad(x, (0, 0, 0, -self.T % self.rows)).unflatten(2, (-1, self.rows)))

    def own(self, x: Tensor) -> Tensor:
        """The keys of the row blocks themselves, ``[B, H, N, C, X]``."""
        return cast(Tensor, x[:, :, self.past :].unflatten(2, (-1, self.rows)))

    def before(self) -> Iterator[_Part]:
        for n in range(self.q.shape[2]):
            stop = self.past + n * self.rows
            first = 0 if self.first_kept is None else int(self.first_kept[:, :, n].min())
            if first < stop:
                yield _Part(n, first, stop)

    def _keys(self, part: _Part) -> Tensor:
        """Keys left of a block with their decay up to it in the bias channel."""
        c, n = (x[..., part.first : part.stop] for x in self.sums)
        bias = (c[..., -1:] - c).to(self.k.dtype).masked_fill(n != n[..., -1:], HIDDEN)
        if self.hidden is not None:
            bias = bias.masked_fill(self.hidden[..., part.first : part.stop], HIDDEN)
        if self.first_kept is not None:
            index = torch.arange(part.first, part.stop, device=bias.device)
            bias = bias.masked_fill(index < self.first_kept[:, :, part.block, None], HIDDEN)
        keys = self.k[:, :, part.first : part.stop]
        keys[..., self.K] = bias
        return keys

    def attend(self, part: _Part) -> tuple[Tensor, Tensor]:
        o, lse = _forward(self.q[:, :, part.block], self._keys(part), self.v[:, :, part.first : part.stop], scale=1.0)
        return o, lse

    def attend_backward(self, part: _Part, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        n = part.block
        return cast(
            tuple[Tensor, ...],
            _backward(
                do[:, :, n].contiguous(), self.q[:, :, n], self._keys(part), self.v[:, :, part.first : part.stop],
                o[:, :, n].contiguous(), (lse - self.entry)[:, :, n].contiguous(), 0.0, False, scale=1.0,
            ),
        )  # fmt: skip

    def _own_keys(self) -> Tensor:
        keys = self.own(self.k).clone()
        bias = self.middle - self.c
        if self.hidden is not None:
            bias = bias.masked_fill(self.own_hidden, HIDDEN)
        keys[..., self.K] = bias
        return keys

    def inside(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of every block over its own keys."""
        B, H, N, C, _ = self.q.shape
        o, lse = _forward(
            self.q.flatten(1, 2), self._own_keys().flatten(1, 2), self.own(self.v).flatten(1, 2),
            is_causal=True, scale=1.0,
        )  # fmt: skip
        o, lse = o.unflatten(1, (H, N)).contiguous(), lse.unflatten(1, (H, N)) + (self.c - self.middle)
        for n in range(N):
            if self.exact[n]:
                logits = self._own_logits(n)
                lse[:, :, n] = logits.logsumexp(-1)
                o[:, :, n] = logits.softmax(-1) @ self.own(self.v)[:, :, n]
        return o, lse

    def _own_logits(self, n: int) -> Tensor:
        q, k = self.q[:, :, n, :, : self.K], self.own(self.k)[:, :, n, :, : self.K]
        logits = q @ k.mT + block_decay(self.gates[:, :, n]).between.clamp(min=HIDDEN)
        if self.hidden is not None:
            logits = logits.masked_fill(self.own_hidden[:, :, n, None, :], HIDDEN)
        return logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -torch.inf)

    def inside_backward(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq ``[B, H, N, C, width]`` and dk, dv ``[B, H, S + filler, width]`` of the blocks over their own keys."""
        B, H, N, C, _ = self.q.shape
        flat = [x.flatten(1, 2).contiguous() for x in (do, self.q, self._own_keys(), self.own(self.v), o)]
        local_lse = (lse - (self.c - self.middle)).flatten(1, 2).contiguous()
        grads = _backward(*flat, local_lse, 0.0, True, scale=1.0)
        dq, dk_own, dv_own = (x.unflatten(1, (H, N)).contiguous() for x in grads)
        for n in range(N):
            if self.exact[n]:
                p = (self._own_logits(n) - lse[:, :, n, :, None]).exp()
                v, q, k = self.own(self.v)[:, :, n], self.q[:, :, n], self.own(self.k)[:, :, n]
                delta = (do[:, :, n] * o[:, :, n]).sum(-1, keepdim=True)
                ds = p * (do[:, :, n] @ v.mT - delta)
                dq[:, :, n], dk_own[:, :, n], dv_own[:, :, n] = ds @ k, ds.mT @ q, p.mT @ do[:, :, n]
        return dq, self._at_keys(dk_own), self._at_keys(dv_own)

    def _at_keys(self, x: Tensor) -> Tensor:
        return F.pad(x.flatten(2, 3), (0, 0, self.past, 0)).contiguous()


def _widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))
