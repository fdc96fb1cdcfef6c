"""`position_ids` and masks: read as borders of packed sequences, else only checked, as layers count the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.algebra.values import has_values, reads_values
from attnzoo.models.hf.cache import ModelCache


class Places(NamedTuple):
    """The places of a call's tokens, as the decoder takes them.

    Args:
        mask: of tokens and padding, ``[B, T]`` or with the cached tokens before them; None where all are tokens.
        cu_seqlens: borders ``[N + 1]`` of sequences packed into one row, or None.
        origin: the position of each row's first token, ``[B]``; None where it is not known.
    """

    mask: Tensor | None
    cu_seqlens: Tensor | None
    origin: Tensor | None


def read_places(
    mask: Tensor | None, cu_seqlens: Tensor | None, positions: Tensor | None, given: Tensor | None,
    cache: ModelCache | None,
) -> Places:  # fmt: skip
    """The places of the tokens ``given`` (or of their embeddings), by the mask, borders and positions of a call.

    Raises:
        ValueError: a mask of other numbers than 0 and 1, or positions of another shape, or that do not fit.
    """
    mask = _whole(mask)
    empty = cache is None or cache.get_seq_length() == 0
    if empty and (positions is not None or cu_seqlens is not None) and _is_full(mask):
        mask = None  # collators also pass a mask beside packed sequences
    if positions is None:
        return Places(mask, cu_seqlens, None)
    rows = check_shape(positions, given)
    if mask is None and cu_seqlens is None and empty:
        cu_seqlens = borders(positions)
    if cu_seqlens is None:
        return Places(mask, None, follow(positions, rows, mask, cache))
    check_rising(positions, cu_seqlens)
    return Places(mask, cu_seqlens, None)


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


def _is_full(mask: Tensor | None) -> bool:
    """Whether a mask [B, T] has no padding; also read on a GPU, since it decides what is refused beside it."""
    return mask is not None and mask.ndim == 2 and has_values(mask) and bool(mask.all())


def _whole(mask: Tensor | None) -> Tensor | None:
    """A token mask of floats 0 and 1 as bools; other masks are refused."""
    if mask is None or not mask.is_floating_point():
        return mask
    # read on a GPU, too, as masks of floats that other models add to the logits have the same shape
    if has_values(mask) and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"attention_mask: expected 1 for tokens and 0 for padding, got {mask.unique().tolist()}")
    return mask == 1


def _shown(x: Tensor) -> list[int]:
    return x.tolist() if x.numel() <= 32 else list(x.shape)
