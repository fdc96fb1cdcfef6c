r"""Causal softmax attention with an additive decay, in blocks of rows on PyTorch's fused kernel.

For a block of rows that starts after key p the logits are

.. math:: q_i^\top k_j + c_i + b_j, \qquad c_i = g_{p+1} + ... + g_i, \quad b_j = g_{j+1} + ... + g_p

(and :math:`b_j = -c_j` inside the block). :math:`c_i` is constant in its row, so it only moves the log-sum-exp, and
:math:`b_j` rides along as one more key channel against a query channel of ones: the fused kernel needs no mask,
and the gradient of that channel is the gradient of the gate. All sums are relative to p, so they stay
accurate at any length. So is the gradient of a gate, which sums up the pairs on whose way it lies: a channel of ones in
the keys, against zeros, gives the sums of rows. The parts left of the block and inside it are merged by their
log-sum-exps, and each part's backward runs with the merged one. Heads with closed or strong gates see few keys; they
take plain operations, and so do windows. The fused kernel has first derivatives only: where a gradient is to have a
gradient itself, it comes from plain operations too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.pruning import Prune, first_kept_keys, keys_behind_closed
from attnzoo.algebra.sums import running_sum, sum_to_the_end
from attnzoo.algebra.values import in_transform, readable, records
from attnzoo.forms.options import NOTHING_ASKED, SoftmaxOptions
from attnzoo.forms.readout import Band, block_bias, block_logits, later_keys, least_logit, readout

SIZES = (1024, 128)  # rows per fused block
CALM = 20.0  # largest log-decay over a block for the fused kernel
PLAIN = 128  # rows per block in plain operations
LANES = 16  # with fewer keys PyTorch's CPU kernels ignore NaN in the maximum of the logits


def _fused(name: str) -> Callable[..., Any] | None:
    """A private fused CPU kernel of PyTorch, or None where this version does not have it."""
    return getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}", None)


_forward, _backward = _fused(""), _fused("_backward")


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, valid: Tensor | None = None,
    first_kept: Tensor | None = None, rows: int = SIZES[-1], *, band: Band | None = None,
    given: SoftmaxOptions = NOTHING_ASKED,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention of the last T of S tokens to all tokens up to each.

    On a CPU each head uses the block size that its decay allows. In float32, keys whose weight is certified to be below
    the square of the rounding error are skipped: they do not change the sum, and their tiny exponentials are slow.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k: ``[B, H, S, K]``, S >= T.
        v: ``[B, H, S, V]``.
        log_decay: gates ``[B, H, S]`` <= 0, closed ones too, or None.
        valid: keys that exist, ``[B, S]`` bool, or None for all.
        first_kept: first computed key of each block of ``rows`` rows, ``[B, H, ceil(T / rows)]``, or None.
        rows: rows per block of ``first_kept``.
        band: which keys a window lets the S tokens see, or None for all.
        given: options of the call.

    Returns:
        o ``[B, H, T, V]``, and the log-sum-exp ``[B, H, T]`` or None. Rows without a visible key are finite but
        arbitrary.
    """
    B, H, T, _ = q.shape
    S, V, with_lse = k.shape[2], v.shape[3], given.return_lse or given.sink is not None
    capped = given.softcap is not None  # PyTorch's kernels have no softcap
    plain = log_decay is None and valid is None and T in (1, S) and band is None and not with_lse and not capped
    # a compiled graph serves other lengths
    plain = plain and (q.is_cuda or torch.compiler.is_compiling() or S >= LANES)
    if plain and not in_transform("Jvp"):  # PyTorch's own kernel has no forward derivative
        q, k, v = _of_one_width(q, k, v)
        causal = True if T > 1 else False  # noqa: SIM210  a plain bool where T is symbolic
        if q.numel() and records(q, k, v) and _on_fused(q):
            return cast(Tensor, _Whole.apply(q, k, v, causal))[..., :V], None  # type: ignore[no-untyped-call]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)
        return o if o.shape[-1] == V else o[..., :V], None
    if log_decay is None:
        log_decay = q.new_zeros(B, H, S)
    if T <= 2 * PLAIN or capped or band is not None or not q.numel() or not _on_fused(q):
        there = None if valid is None else valid[:, None]
        return _plain_rows(q, k, v, log_decay, there, first_kept, rows, band, given)
    # [1, B H, ...]: each head may have its own size of blocks
    q, k, v, log_decay = (x.flatten(0, 1)[None] for x in (q, k, v, log_decay))
    valid = None if valid is None else valid.repeat_interleave(H, 0)[None]
    kept = None if first_kept is None else first_kept.flatten(0, 1)[None]
    sizes = _block_sizes(log_decay[..., S - T :], SIZES if kept is None else (rows,))
    out, lses = q.new_zeros(1, B * H, T, V), q.new_zeros(1, B * H, T) if with_lse else None
    for calm in sizes.unique().tolist():
        index = (sizes == calm).nonzero()[:, 0]
        whole = len(index) == B * H
        q_, k_, v_, g_ = (x if whole else x[:, index] for x in (q, k, v, log_decay))
        there = valid if valid is None or whole else valid[:, index]
        size = calm or (PLAIN if kept is None else rows)
        first = _first_felt(q_, k_, g_, size)
        if kept is not None:
            first = torch.maximum(first, kept[:, index])
        if calm:
            o, lse = _RowBlocks.apply(q_, k_, v_, g_, there, first, size, with_lse)  # type: ignore[no-untyped-call]
        else:
            o, lse = _plain_rows(q_, k_, v_, g_, there, first, size, given=given)
        out = o if whole else out.index_copy(1, index, o)
        if lses is not None and lse is not None:
            lses = lse if whole else lses.index_copy(1, index, lse)
    return out.view(B, H, T, V), None if lses is None else lses.view(B, H, T)


def _first_felt(q: Tensor, k: Tensor, log_decay: Tensor, rows: int) -> Tensor:
    """The first key of each row block whose weight is not certified to be negligible.

    In float64 only closed gates hide keys, so that a row's sum does not depend on later rows, bit for bit.
    """
    if q.dtype == torch.float64:
        return keys_behind_closed(log_decay, torch.arange(k.shape[2] - q.shape[2], k.shape[2], rows, device=q.device))
    return first_kept_keys(q, k, log_decay, Prune(eps=torch.finfo(q.dtype).eps ** 2), rows=rows, cols=1)


def _block_sizes(gates: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows per block for each head of gates ``[1, heads, T]``: the largest size with log-decays up to ``CALM``, or
    0."""
    loss = -gates[0].detach()
    size = loss.new_zeros(loss.shape[:1], dtype=torch.long)
    for rows in sorted(sizes):
        blocks = F.pad(loss, (0, -loss.shape[-1] % rows)).unflatten(-1, (-1, rows)).sum(-1)
        size = torch.where(blocks.amax(-1) <= CALM, rows, size)
    return size


def _plain_rows(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, valid: Tensor | None, first_kept: Tensor | None, rows: int,
    band: Band | None = None, given: SoftmaxOptions = NOTHING_ASKED,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention by row blocks in plain operations, for any gates and device; the backward pass computes blocks
    again."""
    T, S = q.shape[2], k.shape[2]
    if first_kept is None and band is None and T <= 2 * PLAIN:  # a single block
        return _plain_block(q, k, v, log_decay, valid, None, None, given)
    if first_kept is None:
        rows = PLAIN if band is not None else 2 * PLAIN
    outputs, lses = [], []
    for n, start in enumerate(range(0, T, rows)):
        stop = min(start + rows, T)
        row, end = S - T + start, S - T + stop
        kept = None if first_kept is None else first_kept[..., n]
        first = int(kept.min()) if kept is not None and kept.numel() and readable(kept) else 0
        if band is not None:
            first = max(first, band.first(row))
        args = (
            q[:, :, start:stop], k[:, :, first:end], v[:, :, first:end], log_decay[..., first:end],
            None if valid is None else valid[..., first:end], None if kept is None else kept - first,
            None if band is None else band.hidden(row, end, first), given,
        )  # fmt: skip
        again = T > 2 * PLAIN and records(q, k, v, log_decay) and not in_transform()
        o, lse = checkpoint(_plain_block, *args, use_reentrant=False) if again else _plain_block(*args)
        outputs.append(o)
        lses.append(lse)
    return torch.cat(outputs, 2), None if lses[0] is None else torch.cat(cast(list[Tensor], lses), 2)


def _plain_block(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, valid: Tensor | None, first_kept: Tensor | None,
    hidden: Tensor | None, given: SoftmaxOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    bias = block_bias(log_decay, q.shape[2], valid, first_kept, hidden)
    if given.softcap is not None or k.shape[2] < LANES or not q.numel() or not _on_fused(q):
        return readout(block_logits(q @ k.mT, bias, given), v, given)
    block = _Block.apply if records(q, k, v, bias) else _biased
    o, lse = block(*_of_one_width(q, k, v), bias)
    return o[..., : v.shape[3]], lse if given.return_lse or given.sink is not None else None


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The attention and log-sum-exp of a block of rows by the fused kernel, with a bias from ``block_bias``."""
    C, S = bias.shape[-2:]
    if 1 < C < S:
        bias = bias.masked_fill(later_keys(C, S, q.device), -torch.inf)
    return cast("tuple[Tensor, Tensor]", cast(Any, _forward)(q, k, v, is_causal=C == S, attn_mask=bias, scale=1.0))


class _Block(torch.autograd.Function):
    """The autograd function of :func:`_biased`; its backward pass is in plain operations."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, bias)
        return _biased(q, k, v, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (q, k, v, bias), (do, dlse) = ctx.saved_tensors, grads
        p, dp = block_logits(q @ k.mT, bias, NOTHING_ASKED).softmax(-1), do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True) + dlse[..., None])
        return ds @ k, ds.mT @ q, p.mT @ do, ds


class _Whole(torch.autograd.Function):
    """The autograd function of attention by the fused kernel, all rows at once, without gates."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        o, lse = cast(Any, _forward)(q, k, v, is_causal=causal, scale=1.0)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return cast(Tensor, o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_twice(ctx, _open_rows, (q, k, v), grads), None
        return *cast(Any, _backward)(grads[0].contiguous(), q, k, v, o, lse, 0.0, ctx.causal, scale=1.0), None


def _open_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    return _plain_rows(q, k, v, q.new_zeros(k.shape[:3]), None, None, PLAIN)


def _twice(
    ctx: Any, form: Callable[..., Sequence[Tensor | None]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs`` through ``form``, differentiable again; None where no gradient is needed."""
    own = [x.view_as(x) for x in inputs]  # views, as one input may be computed from another
    outputs = [x for x in form(*own) if x is not None]
    asked = [n for n in range(len(own)) if ctx.needs_input_grad[n]]
    found = torch.autograd.grad(outputs, [own[n] for n in asked], grads[: len(outputs)], create_graph=True)
    by_place = dict(zip(asked, found, strict=True))
    return tuple(by_place.get(n) for n in range(len(own)))


class _RowBlocks(torch.autograd.Function):
    """The autograd function of row blocks on the fused kernel, for finite gates with log-decays up to ``CALM`` per
    block."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, valid: Tensor | None, first_kept: Tensor,
        rows: int, with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        plan = _Plan(q, k, v, log_decay, valid, first_kept, rows, with_lse)
        o, lse = plan.inside()
        for n, first, stop in plan.before():
            o_part, lse_part = plan.attend(n, first, stop)
            merged = torch.logaddexp(lse[:, :, n], lse_part)
            o[:, :, n] *= (lse[:, :, n] - merged).exp()[..., None]
            o[:, :, n] += o_part * (lse_part - merged).exp()[..., None]
            lse[:, :, n] = merged
        ctx.save_for_backward(q, k, v, log_decay, valid, first_kept, o, lse)
        ctx.rows, ctx.with_lse = rows, with_lse
        o, lse = o.flatten(2, 3)[:, :, : q.shape[2], : v.shape[3]], lse.flatten(2)[..., : q.shape[2]]
        return o.contiguous(), lse.clone() if with_lse else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, valid, first_kept, o, lse = ctx.saved_tensors
        T, S, K, V = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        if torch.is_grad_enabled():

            def plain(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor | None]:
                given = SoftmaxOptions(return_lse=ctx.with_lse)
                return _plain_rows(q, k, v, log_decay, valid, first_kept, ctx.rows, given=given)

            return *_twice(ctx, plain, (q, k, v, log_decay), grads), None, None, None, None
        plan = _Plan(q, k, v, log_decay, valid, first_kept, ctx.rows, ctx.with_lse)
        do = plan.rows_of(F.pad(grads[0], (0, o.shape[-1] - V)))
        if ctx.with_lse:
            # the kernel subtracts sum(do * o) per row; a further channel of value 0 adds dlse to it
            o = o.clone()
            o[..., V] = -plan.rows_of(grads[1][..., None])[..., 0]
            do[..., V] = 1.0
        dq, dk, dv = plan.inside_backward(do, o, lse)
        dg = plan.within(-dk[..., K])
        for n, first, stop in plan.before():
            dq_part, dk_part, dv_part = plan.attend_backward(n, first, stop, do, o, lse)
            dg[:, :, first + 1 : stop] += running_sum(dk_part[..., K], -1, torch.float64)[..., :-1]
            dq[:, :, n] += dq_part
            dk[:, :, first:stop] += dk_part
            dv[:, :, first:stop] += dv_part
        dq = dq.flatten(2, 3)
        dg[:, :, plan.past :] += plan.within(F.pad(dq[..., K + 1], (plan.past, 0)))[:, :, plan.past :]
        dg = dg[..., :S].to(log_decay.dtype)
        return dq[:, :, :T, :K], dk[:, :, :S, :K], dv[:, :, :S, :V], dg, None, None, None, None


class _Plan:
    """Tensors widened by the bias channel and cut into row blocks, with the decays of each block."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, valid: Tensor | None, first_kept: Tensor, rows: int,
        with_lse: bool,
    ) -> None:  # fmt: skip
        self.T, self.K, self.rows, self.first_kept = q.shape[2], q.shape[3], rows, first_kept
        self.past = k.shape[2] - self.T
        width = -(-max(self.K + 2, v.shape[3] + with_lse) // 8) * 8
        filler = -self.T % rows
        q = _widen(q, width)
        q[..., self.K] = 1.0
        self.q = self.rows_of(q)  # [B, H, N, C, width]
        self.k = F.pad(_widen(k, width), (0, 0, 0, filler))
        self.k[..., self.K + 1] = 1.0
        self.v = F.pad(_widen(v, width), (0, 0, 0, filler))
        # keys before a closed gate are already skipped by first_kept, so it may count as open
        gates = log_decay.masked_fill(is_closed(log_decay), 0.0)
        self.c = running_sum(F.pad(gates, (0, filler)), -1, torch.float64)
        self.hidden = None if valid is None else F.pad(~valid, (0, filler)).expand(self.c.shape)
        start = F.pad(self.c, (1, 0))[..., self.past : -1 : rows, None]
        self.entry = (self.c[..., self.past :].unflatten(-1, (-1, rows)) - start).to(q.dtype)  # [B, H, N, C]

    def rows_of(self, x: Tensor) -> Tensor:
        """``[B, H, T, X]`` cut into row blocks ``[B, H, N, C, X]``, the last one filled up with zeros."""
        return rearrange(F.pad(x, (0, 0, 0, -self.T % self.rows)), "b h (n c) x -> b h n c x", c=self.rows)

    def own(self, x: Tensor) -> Tensor:
        """The part of x at the row blocks' own keys, ``[B, H, N, C, ...]``."""
        return rearrange(x[:, :, self.past :], "b h (n c) ... -> b h n c ...", c=self.rows)

    def within(self, x: Tensor) -> Tensor:
        """The sum of ``x [B, H, S + filler]`` from each key of a row block to its last, in float64; 0 before them."""
        blocks = x[..., self.past :].double().unflatten(-1, (-1, self.rows))
        return F.pad(sum_to_the_end(blocks, -1).flatten(-2), (self.past, 0))

    def before(self) -> Iterator[tuple[int, int, int]]:
        """Yield (block, first key, end) of the keys before each block."""
        for n, first in enumerate(self.first_kept.amin(dim=(0, 1)).tolist()):
            stop = self.past + n * self.rows
            if first < stop:
                yield n, first, stop

    def _keys(self, n: int, first: int, stop: int) -> Tensor:
        """The keys before block n, with their decay up to it in the bias channel."""
        bias = (self.c[..., stop - 1 : stop] - self.c[..., first:stop]).to(self.k.dtype)
        if self.hidden is not None:
            bias = bias.masked_fill(self.hidden[..., first:stop], least_logit(bias.dtype))
        number = torch.arange(first, stop, device=bias.device)
        bias = bias.masked_fill(number < self.first_kept[:, :, n, None], least_logit(bias.dtype))
        keys = self.k[:, :, first:stop]
        keys[..., self.K] = bias
        return keys

    def attend(self, n: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        o, lse = cast(Any, _forward)(self.q[:, :, n], self._keys(n, first, stop), self.v[:, :, first:stop], scale=1.0)
        return o, lse + self.entry[:, :, n]

    def attend_backward(self, n: int, first: int, stop: int, do: Tensor, o: Tensor, lse: Tensor) -> Any:
        keys, values = self._keys(n, first, stop), self.v[:, :, first:stop]
        out, local = o[:, :, n].contiguous(), (lse - self.entry)[:, :, n].contiguous()
        return cast(Any, _backward)(
            do[:, :, n].contiguous(), self.q[:, :, n], keys, values, out, local, 0.0, False, scale=1.0
        )

    def _own_keys(self) -> Tensor:
        keys, bias = self.own(self.k).clone(), -self.entry
        if self.hidden is not None:
            bias = bias.masked_fill(self.own(self.hidden), least_logit(bias.dtype))
        keys[..., self.K] = bias
        return keys

    def inside(self) -> tuple[Tensor, Tensor]:
        """The output ``[B, H, N, C, width]`` and log-sum-exp ``[B, H, N, C]`` of every block over its own keys."""
        shape = self.q.shape[1:3]
        flat = (x.flatten(1, 2) for x in (self.q, self._own_keys(), self.own(self.v)))
        o, lse = cast(Any, _forward)(*flat, is_causal=True, scale=1.0)
        return o.unflatten(1, shape).contiguous(), lse.unflatten(1, shape) + self.entry

    def inside_backward(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients dq ``[B, H, N, C, width]``, dk and dv ``[B, H, S + filler, width]`` of the blocks' own keys."""
        flat = (do, self.q, self._own_keys(), self.own(self.v), o, lse - self.entry)
        grads = cast(Any, _backward)(*(x.flatten(1, 2).contiguous() for x in flat), 0.0, True, scale=1.0)
        dq, dk, dv = (x.unflatten(1, self.q.shape[1:3]).contiguous() for x in grads)
        return dq, F.pad(dk.flatten(2, 3), (0, 0, self.past, 0)), F.pad(dv.flatten(2, 3), (0, 0, self.past, 0))


def _on_fused(q: Tensor) -> bool:
    """Whether PyTorch's fused CPU kernel may be called by its own name."""
    return _forward is not None and _backward is not None and readable(q) and not in_transform()


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors with as many channels as the widest has, in whole groups of 8."""
    K, V = q.shape[-1], v.shape[-1]
    width = -(-max(K, V) // 8) * 8
    if K == V == width and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return q, k, v
    return _widen(q, width), _widen(k, width), _widen(v, width)


def _widen(x: Tensor, width: int) -> Tensor:
    """x with zeros up to ``width`` channels, neighbours in memory: PyTorch's fused CPU kernel does not read strides of
    channels."""
    if x.shape[-1] != width:
        x = F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
