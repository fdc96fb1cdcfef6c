"""The logits of a softmax variant in panels: few keys at a time, with all rows from the first of them on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from attnzoo.algebra.block_decay import open_sums
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import first_kept_keys
from attnzoo.algebra.transitions import ClosedForm, HeadGate, heads_first, scaled_queries
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.options import NOTHING_ASKED, SoftmaxOptions, existing
from attnzoo.forms.readout import Band, logits_of
from attnzoo.forms.softmax import ROWS, SoftmaxForms
from attnzoo.precision import wide_dtype

COLUMNS = 64  # keys of a panel
WIDE = 256, 2048  # least and most keys of a panel on a GPU, where small panels cost as much as large ones
PAIRS = 2**25  # the most (row, key, query head) triples of a panel on a GPU


class Logits:
    """The teacher's logits in panels, and masks of the pairs that are visible.

    Args:
        forms: of the softmax variant.
        q: ``[B, T, H, K]``.
        k: ``[B, T, G, K]``.
        gate: of the variant.
        given: options of the call. Padding stands first or last.
    """

    def __init__(
        self, forms: SoftmaxForms, q: Tensor, k: Tensor, gate: Gate, given: SoftmaxOptions = NOTHING_ASKED
    ) -> None:
        (_, T, H, _), dtype, device = q.shape, wide_dtype(q.dtype), q.device
        valid, cu_seqlens = given.valid, given.cu_seqlens
        if valid is not None:
            q, k = existing(valid, q, k)
        self.heads, self.valid, self.columns, self.given = k.shape[2], valid, COLUMNS, given
        if q.device.type != "cpu" and isinstance(forms, AdditiveForms):  # matrix transitions need blocks of COLUMNS
            self.columns = panel_width(q.shape[0] * H * T)
        gate = forms.separated(gate, q, valid, cu_seqlens)
        local = None if isinstance(forms, AdditiveForms) else HeadGate.of(gate, q).cut(self.columns)
        if isinstance(forms, AdditiveForms):
            q, k, _, _ = forms.place(q, k, gate, None, valid)
        q, k = scaled_queries(q, given.scale), heads_first(k, H, dtype)
        self.q, self.k, self.carry = q, k, forms.transition.carry
        self.own = logits_of((q * k).sum(-1), given)  # [B, H, T], a row's score with its own key
        self.blocks: ClosedForm | None = None
        if local is not None:
            self.blocks = forms.transition.block(_cut(q, self.columns), _cut(k, self.columns), local)
        decay = gate.per_token(q.transpose(1, 2)).log_decay
        self.sums = None if decay is None else open_sums(heads_first(decay, H, dtype))
        self.position = torch.arange(T, device=device)[None] if valid is None else valid.cumsum(1) - 1
        self.segment = None
        if cu_seqlens is not None:
            self.segment = torch.searchsorted(cu_seqlens.long(), torch.arange(T, device=device), right=True)
        self.band = Band.of(given.window, valid, T, device)
        self.first: Tensor | None = None
        if given.prune is not None and decay is not None:  # near keys may be forgotten, a row's own is not
            gates, bound = heads_first(decay, H, dtype), given.logit_bound
            first = first_kept_keys(self.q, self.k, gates, given.prune, bound, lower=self.own.double(), rows=ROWS)
            self.first = first.repeat_interleave(ROWS, -1)[..., :T]

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(B, H, T)``."""
        B, H, T = self.own.shape
        return B, H, T

    @property
    def plain(self) -> bool:
        """Whether any pair's logit is that of its query and key and their decays: no transition moves keys, and rows
        see all earlier keys, without padding, packing or a window."""
        return self.blocks is None and self.valid is None and self.segment is None and self.band is None

    def panels(self) -> Iterator[tuple[int, int]]:
        """The first key and the end (exclusive) of each panel."""
        T = self.own.shape[-1]
        return ((start, min(start + self.columns, T)) for start in range(0, T, self.columns))

    def age(self, start: int, stop: int) -> Tensor:
        """Tokens from each key of a panel to each row, ``[B or 1, 1, R, n]``."""
        return (self.position[:, start:, None] - self.position[:, None, start:stop])[:, None]

    def exists(self, start: int, stop: int) -> Tensor:
        """The mask of visible (row, key) pairs of a panel, ``[B or 1, 1, R, n]`` bool."""
        T, device = self.own.shape[-1], self.own.device
        rows, keys = torch.arange(start, T, device=device)[:, None], torch.arange(start, stop, device=device)
        there = (keys <= rows)[None]
        if self.valid is not None:
            there = there & self.valid[:, start:, None] & self.valid[:, None, start:stop]
        if self.segment is not None:
            there = there & (self.segment[start:, None] == self.segment[start:stop])
        if self.band is not None:
            there = there & (keys >= self.band.starts[:, start:, None])
        return there[:, None]

    def panel(self, start: int, stop: int, there: Tensor) -> Tensor:
        """The logits ``s_tj + d_tj`` of a panel, ``[B, H, R, n]``; -inf for pairs that are not visible
        (:meth:`exists`)."""
        if self.blocks is None:
            scores = self.q[:, :, start:] @ self.k[:, :, start:stop].mT
        else:
            scores = self.carried(start // self.columns, self.blocks)[0]
            scores = scores[:, :, : self.shape[2] - start, : stop - start]
        decay = None
        if self.sums is not None:
            sums, closed = self.sums
            decay = (sums[..., start:, None] - sums[..., None, start:stop]).to(scores.dtype)
            if closed is not None:
                decay = decay.masked_fill(closed[..., start:, None] != closed[..., None, start:stop], -torch.inf)
        return logits_of(scores, self.given, decay).masked_fill(~there, -torch.inf)

    def pruned(self, a: Tensor, start: int, stop: int) -> Tensor:
        """The logits ``a`` of a panel, -inf where ``prune`` certifies that a row can do without the keys."""
        if self.first is None:
            return a
        keys = torch.arange(start, stop, device=a.device)
        return a.masked_fill(keys < self.first[..., start:, None], -torch.inf)

    def carried(self, n: int, blocks: ClosedForm) -> tuple[Tensor, Tensor]:
        """The scores of block n's keys with all rows from its first on, and its keys carried to the end,
        ``[B, H, K, C]``."""
        rows = [blocks.scores[:, :, n]]
        keys = blocks.k[:, :, n].mT  # [B, H, K, C], the layout of a state, for carry
        for m in range(n + 1, blocks.q.shape[2]):
            rows.append(blocks.q[:, :, m] @ keys)
            keys = self.carry(cast(Tensor, blocks.total)[:, :, m], keys)
        return torch.cat(rows, 2), keys


def panel_width(rows: int) -> int:
    """The keys of a panel on a GPU, a multiple of ``COLUMNS``, for ``rows`` rows over all sequences and query heads."""
    least, most = WIDE
    return max(least, min(most, PAIRS // rows // COLUMNS * COLUMNS))


def _cut(x: Tensor, size: int) -> Tensor:
    """``[B, H, T, K]`` in blocks ``[B, H, N, size, K]``, the last one filled up with zeros."""
    return rearrange(F.pad(x, (0, 0, 0, -x.shape[2] % size)), "b h (n c) k -> b h n c k", c=size)
