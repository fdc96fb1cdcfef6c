"""What the ops say of their rows: the first key that each may see without gates, its log-sum-exp, what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, ROW_UNIT


def since_without_gate(doc: Tensor | None, window: int, S: int, device: torch.device) -> Tensor | None:
    """First visible keys [1, 1, S] int32 of S positions where no gate closes, or None if all see every key before them.

    Args:
        doc: [S] int32, first position of each token's segment, or None.
        window: visible keys per row, 0 for no window.
    """
    if window > 0:
        since = (torch.arange(S, device=device, dtype=torch.int32) - (window - 1)).clamp_(min=0)
        return (since if doc is None else torch.maximum(since, doc)).view(1, 1, S)
    return None if doc is None else doc.view(1, 1, S)


def since_of_closed(log_decay: Tensor, S: int) -> Tensor:
    """First visible keys [1, H, S] int32 of S positions by constant gates [H]: with a closed one a row sees itself."""
    own = torch.arange(S, device=log_decay.device, dtype=torch.int32)
    return (own * is_closed(log_decay)[:, None])[None]


def row_lse(lse: Tensor, log_decay: Tensor | None, c: Tensor | None, base: Tensor | None, S: int) -> Tensor:
    """The rows' log-sum-exp [B, T, H] in natural units, from log2 in the frame of each row unit [B, H, T].

    Args:
        log_decay: [B, S, H] with its sums c and base from ``gate_sums``, [H] without, or None.
    """
    T = lse.shape[2]
    row = torch.arange(T, device=lse.device)
    at, ref = row + (S - T), row // ROW_UNIT * ROW_UNIT + (S - T)
    x = lse.double()
    if c is not None and base is not None:
        x = x + base[..., at // KEY_UNIT] + c[..., at] - base[..., ref // KEY_UNIT] - c[..., ref]
    elif log_decay is not None:
        x = x + (at - ref) * log_decay.masked_fill(is_closed(log_decay), 0.0).double()[:, None] * LOG2E
    return (x / LOG2E).float().transpose(1, 2).contiguous()


def kept_of_forward(
    lse: Tensor, c: Tensor | None, base: Tensor | None, since: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a forward operator keeps of gates and rows, empty where it does not apply: an operator returns no None.

    Args:
        lse: float32, on the device of them all.
        c: float32.
        base: float64.
        since: int32.
        start: int32.
    """
    return (
        lse.new_empty(0) if c is None else c,
        lse.new_empty(0, dtype=torch.float64) if base is None else base,
        lse.new_empty(0, dtype=torch.int32) if since is None else since,
        lse.new_empty(0, dtype=torch.int32) if start is None else start,
    )


def fake_of_forward(
    q: Tensor, v: Tensor, S: int, return_lse: bool, *, log_decay: Tensor | None, bands: bool, starts: bool, rest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors like those that a forward operator returns: o, row_lse, lse, c, base, since, start, o_rest.

    Args:
        q: [B, T, H, K]; v: [B, S, G, V].
        log_decay: [B, S, H], [H] or None.
        bands: whether a window or packing bounds what rows see.
        starts, rest: whether there are first keys of row units, and what the rounding of o drops.
    """
    (B, T, H, _), i32 = q.shape, torch.int32
    n_u = (S + KEY_UNIT - 1) // KEY_UNIT
    o, lse = q.new_empty((B, T, H, v.shape[3])), q.new_empty((B, H, T), dtype=torch.float32)
    gates, constant = (log_decay is not None and log_decay.ndim == n for n in (3, 1))
    since: tuple[int, ...] = (B, H, S) if gates else (1, H, S) if constant else (1, 1, S) if bands else (0,)
    return (
        o, lse.new_empty((B, T, H) if return_lse else (0,)), lse,
        lse.new_empty((B, H, n_u * KEY_UNIT) if gates else (0,)),
        lse.new_empty((B, H, n_u + 1) if gates else (0,), dtype=torch.float64), lse.new_empty(since, dtype=i32),
        lse.new_empty((B, H, (T + ROW_UNIT - 1) // ROW_UNIT) if starts else (0,), dtype=i32),
        torch.empty_like(o) if rest else q.new_empty(0),
    )  # fmt: skip
