"""Sums of gates and lengths of keys that a cache keeps; a step reads new ones alone. Imports Triton when used."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.sums import running_sum
from attnzoo.kernels.common.argument_checks import check_tensors, check_values
from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E
from attnzoo.kernels.common.device import HAS_TRITON, device_unavailable, on_device_of
from attnzoo.kernels.common.launching import addressable


@dataclass(frozen=True, eq=False)
class GateSums:
    """The sums of S tokens' log gates that ``fox_attention`` reads, and room for more.

    ``GateSums.of(log_decay)`` adds up a prefill; ``sums.append(log_decay)`` gives the sums of all tokens so far and
    costs no more for a long past than for a short one. What is appended to stays as it is, and can be continued twice:
    the new sums share its buffers while they are the first to continue it, and copy them otherwise.

    Of the keys it keeps the longest, for pruning, if it is given them: ``GateSums.of(log_decay, k)`` and
    ``sums.append(log_decay, k)``.

    The sums equal those of one scan over all gates, up to roundings of float64 (of float32 in ``tails``). A closed gate
    (at most -1e4) adds nothing; it moves ``since``.

    Attributes:
        length: S.
        c: [B, H, room] float32, log2 sums within each unit of 64 tokens; room is a multiple of 64.
        base: [B, H, room / 64 + 1] float64, the sum before each unit.
        since: [B, H, room] int32, the first key that closed gates let each token see.
        tails: [B, H, room / 64] float64, ``log2 sum_{l <= b} 2^(-c_l)`` at the last token b of each unit, for pruning.
        state: [B, H, 3] float64: the sum within the last unit, ``sum_l 2^(c_now - c_l)``, the last closed position.
        longest: [B, G] float32, the largest ``|k|^2`` of each key head, or None.
    """

    length: int
    c: Tensor
    base: Tensor
    since: Tensor
    tails: Tensor
    state: Tensor
    _end: list[int] = field(repr=False)  # tokens that the buffers hold, whoever wrote them
    longest: Tensor | None = None

    def __len__(self) -> int:
        return self.length

    @staticmethod
    def of(log_decay: Tensor, k: Tensor | None = None) -> GateSums:
        """Sums of log_decay [B, S, H] float32, S >= 1, on a device that runs Triton; k [B, S, G, K] the keys.

        Raises:
            ImportError: Triton is not installed.
            ValueError: the shape or dtype is wrong, a gate is positive or NaN, the device does not run Triton, or a
                gradient would be expected.
        """
        _check(log_decay, k)
        why = device_unavailable(log_decay)
        if why:
            raise (ValueError if HAS_TRITON else ImportError)(f"log_decay: {why}")
        from attnzoo.kernels.common.gate_sums import gate_sums

        S = log_decay.shape[1]
        with on_device_of(log_decay):
            c, base, since, tails = gate_sums(log_decay, None, S)
        done = S // KEY_UNIT  # units that are complete
        last = log_decay[:, done * KEY_UNIT :].transpose(1, 2).double()  # [B, H, less than a unit]
        within = running_sum(last.masked_fill(is_closed(last), 0.0), -1) * LOG2E
        total = within[..., -1:] if S % KEY_UNIT else within.new_zeros((*c.shape[:2], 1))
        before = torch.exp2(tails[..., done - 1 : done] + base[..., done : done + 1]) if done else 0.0 * total
        mass = before * torch.exp2(total) + torch.exp2(total - within).sum(-1, keepdim=True)
        state = torch.cat([total, mass, since[..., -1:].double()], -1)
        since = torch.nn.functional.pad(since, (0, c.shape[2] - S))
        return GateSums(S, c, base, since, tails, state, [S], None if k is None else _longest(k, None))

    def append(self, log_decay: Tensor, k: Tensor | None = None) -> GateSums:
        """The sums with the gates of the next n tokens, log_decay [B, n, H] float32; k [B, n, G, K] their keys.

        Raises:
            ValueError: the shape, dtype or device is wrong, a gate is positive or NaN, or a gradient would be expected.
        """
        from attnzoo.kernels.common.gate_sums import append_gates

        _check(log_decay, k)
        B, H = self.c.shape[:2]
        if log_decay.shape[0] != B or log_decay.shape[2] != H or log_decay.device != self.c.device:
            raise ValueError(
                f"log_decay: expected [B={B}, n, H={H}] on {self.c.device}, "
                f"got {tuple(log_decay.shape)} on {log_decay.device}"
            )
        if self.longest is not None and k is not None and k.shape[2] != self.longest.shape[1]:
            heads = self.longest.shape[1]
            raise ValueError(f"k: expected the keys of G={heads} heads, as before, got {tuple(k.shape)}")
        end = self.length + log_decay.shape[1]
        buffers, mark = (self.c, self.base, self.since, self.tails), self._end
        if mark[0] != self.length or end > self.c.shape[2]:
            units = max(self.tails.shape[2], (end + end // 4) // KEY_UNIT + 4)
            sizes = (units * KEY_UNIT, units + 1, units * KEY_UNIT, units)
            buffers = tuple(_grown(x, size) for x, size in zip(buffers, sizes, strict=True))  # type: ignore[assignment]
            mark = [self.length]
        with on_device_of(log_decay):
            state = append_gates(log_decay, self.length, *buffers, self.state)
        mark[0] = end
        longest = None if self.longest is None or k is None else _longest(k, self.longest)
        return GateSums(end, *buffers, state, mark, longest)

    def reorder(self, index: Tensor) -> GateSums:
        """The sums of the sequences ``index`` [B'] of the batch."""
        picked = [x.index_select(0, index) for x in (self.c, self.base, self.since, self.tails, self.state)]
        c, base, since, tails, state = picked
        longest = None if self.longest is None else self.longest.index_select(0, index)
        return GateSums(self.length, c, base, since, tails, state, [self.length], longest)

    def log_decay_sums(self) -> tuple[Tensor, Tensor]:
        """Running sums [B, H, S] float64 in natural units, and the first visible keys [B, H, S]."""
        at = torch.arange(self.length, device=self.c.device)
        return (self.base[..., at // KEY_UNIT] + self.c[..., : self.length]) / LOG2E, self.since[..., : self.length]


def _check(log_decay: Tensor, k: Tensor | None) -> None:
    check_tensors({"log_decay": log_decay, "k": k}, needed=("log_decay",))
    if log_decay.ndim != 3 or log_decay.shape[1] == 0 or log_decay.dtype != torch.float32:
        got = f"{log_decay.dtype} {tuple(log_decay.shape)}"
        raise ValueError(f"log_decay: expected float32 [B, tokens >= 1, H], got {got}")
    if torch.is_grad_enabled() and log_decay.requires_grad:
        raise ValueError("log_decay: sums of a cache have no gradient: expected torch.no_grad() or a constant")
    check_values(log_decay, log_decay=log_decay)
    if k is not None and (k.ndim != 4 or k.shape[:2] != log_decay.shape[:2] or k.device != log_decay.device):
        want = f"[B={log_decay.shape[0]}, {log_decay.shape[1]}, G, K] on {log_decay.device}"
        raise ValueError(f"k: expected the keys of the same tokens, {want}, got {tuple(k.shape)} on {k.device}")


def _longest(k: Tensor, before: Tensor | None) -> Tensor:
    """The largest |k|^2 of each head of k [B, n, G, K] and of those ``before``. # [B, G] float32"""
    from attnzoo.kernels.common.pruning import norm_max

    k = addressable(k.detach())
    with on_device_of(k):
        return norm_max(k, before)


def _grown(x: Tensor, size: int) -> Tensor:
    new = x.new_zeros((*x.shape[:2], size))
    new[..., : x.shape[2]] = x
    return new
