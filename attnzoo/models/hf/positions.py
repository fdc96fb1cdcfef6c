"""`position_ids`: read as borders of packed sequences, else only checked, as layers count the tokens themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.values import reads_values
from attnzoo.models.hf.cache import ModelCache


def check_shape(positions: Tensor, given: Tensor | None) -> int:
    """The number of rows of positions: 1 (for all rows) or B; raises for another shape."""
    assert given is not None
    B, T = given.shape[:2]
    if tuple(positions.shape) not in ((1, T), (B, T)):
        raise ValueError(f"position_ids: expected [B, T] = {(B, T)} or {(1, T)}, got {tuple(positions.shape)}")
    return B


def borders(positions: Tensor) -> Tensor | None:
    """The borders [N + 1] of sequences packed into one row, where positions begin again; None for one sequence per
    row."""
    starts = positions.diff(dim=-1) != 1  # [B, T - 1]
    if not bool(starts.any()):
        return None
    first = starts[0].nonzero()[:, 0] + 1
    if len(positions) > 1 or bool((positions[0, first] != 0).any()):
        raise ValueError(
            "position_ids: expected positions that rise by one, or of several sequences in one row [1, T] from 0 each, "
            f"got {_shown(positions)}"
        )
    return torch.tensor([0, *first.tolist(), positions.shape[1]], dtype=torch.int32, device=positions.device)


def check_rising(positions: Tensor, cu_seqlens: Tensor) -> None:
    """Raise where positions do not rise by one within each packed sequence.

    Raises:
        ValueError: they jump or begin again elsewhere.
    """
    if not reads_values(positions):
        return
    first = (positions.diff(dim=-1) != 1).any(0).nonzero()[:, 0] + 1
    if not bool(torch.isin(first, cu_seqlens).all()):
        raise ValueError(
            "position_ids: expected positions that rise by one between the borders cu_seq_lens_q, "
            f"{_shown(cu_seqlens)}, got {_shown(positions)}"
        )


def follow(positions: Tensor, rows: int, mask: Tensor | None, cache: ModelCache | None) -> Tensor | None:
    """The position of each row's first token `[B]`, after a check that positions rise by one from there.

    Only relative positions count, so a row may start at any. None where values cannot be read.

    Raises:
        ValueError: positions jump from one token to the next, or from the cached tokens to these.
    """
    if not reads_values(positions):
        return None
    positions = positions.expand(rows, -1)
    T = positions.shape[1]
    there = torch.ones_like(positions, dtype=torch.bool)
    if mask is not None:
        if mask.ndim != 2 or len(mask) != rows or mask.shape[1] < T:
            return None  # the layers refuse such a mask
        there = mask[:, mask.shape[1] - T :].bool()
    start = positions - (there.cumsum(1) - 1)  # [B, T], constant per row where positions rise by one
    far = torch.iinfo(torch.int64).max
    low, high = start.masked_fill(~there, far).amin(1), start.masked_fill(~there, -far).amax(1)
    some = there.any(1)
    if bool(((low != high) & some).any()):
        kept = "" if mask is None else " over the tokens that attention_mask keeps"
        raise ValueError(f"position_ids: expected positions that rise by one{kept}, got {_shown(positions)}")
    memory = None if cache is None else cache.memories[0]
    if cache is None or memory is None or memory.seen is None or len(memory.seen) != rows:
        return low.where(some, 0)
    start, known = low - memory.seen, cache.origin
    padding = memory.tokens - memory.seen  # without earlier positions, the new ones may count padding or not
    right = (start == 0) | (start == padding) if known is None else start == known
    if bool((~right & some & (memory.seen > 0)).any()):
        after = memory.seen if known is None else memory.seen + known
        raise ValueError(
            f"position_ids: expected positions that go on from the cached tokens, at {_shown(after)}, "
            f"got {_shown(positions)}"
        )
    return start.where(some, 0 if known is None else known)


def _shown(x: Tensor) -> list[int]:
    return x.tolist() if x.numel() <= 32 else list(x.shape)
