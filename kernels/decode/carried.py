"""A step of PaTH over pages: check a call and launch the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.arguments import check_scale, check_values, check_window
from attnzoo.kernels.common.checks import kernels_unavailable
from attnzoo.kernels.decode.api import check_pages, check_shapes, refuse_gradients
from attnzoo.kernels.decode.plan import MOST_ROWS


@torch.no_grad()
def paged_path_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    factor: Tensor,
    near_k: Tensor,
    near_w: Tensor,
    near_beta: Tensor,
    table: Tensor,
    first: Tensor,
    length: Tensor,
    k_norm: Tensor,
    log_decay: Tensor | None = None,
    decay: Tensor | None = None,
    page_sum: Tensor | None = None,
    total: Tensor | None = None,
    since: Tensor | None = None,
    n_log: Tensor | None = None,
    closed: Tensor | None = None,
    count: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """Write T new tokens of PaTH or PaTH-FoX into the pages of each sequence, in place, and attend.

        o_t = sum_{j <= t} softmax_j(scale k_j^T R_{j+1} ... R_t q_t + c_t - c_j) v_j,     R_t = I - beta_t w_t w_t^T

    A page holds its keys as its last token left them, and beside it stands the transposed product of its factors. So
    each live key is read once, those of the page that is not whole alone are written again, and pages that have been
    given up cost nothing. Six or seven launches, no host synchronisation, no gradient; runs on Triton. The walk of a
    row over the products of its pages is one after the other; groups of pages make it as much shorter.

    Args:
        q: [B, T, H, K], 1 <= T <= 16; k, w: [B, T, G, K], v: [B, T, G, V], beta: [B, T, G], of the new tokens. Head
            dims are multiples of 16 up to 128. A w has length 1 or less, and beta lies in [0, 2]. With n factors per
            token, whose product in that order is R_t, w is [B, T, G, n, K] and beta [B, T, G, n].
        keys: [P, PAGE, K] float32, contiguous, as values: [P, PAGE, V]; changed.
        factor: [P, K, K] float32, transposed products; changed.
        near_k, near_w: [B, G, 2 PAGE, K] float32, near_beta: [B, G, 2 PAGE] float32, what came with the last tokens,
            that of token t at t % (2 PAGE), with an axis of n factors where w has one; changed.
        table, first, length, k_norm, log_decay, decay, page_sum, total, since, n_log, closed, count: as
            ``paged_append``; the lengths are those before the step.
        scale, window, sink: as ``paged_attention``.
        group: where that many pages (from a multiple of it on) were whole before the step, their products are those
            from the start of the page to the end of the last of them, and not of the page alone. 0: no such groups.

    Returns:
        [B, T, H, V] in v's dtype; rows of tokens that a sequence does not get (``count``) mean nothing.

    Raises:
        ValueError: a shape, dtype, device or option is wrong, or the kernels cannot serve the call.
        TypeError: something that is no tensor, or no number.

    Source: Yang et al., "PaTH Attention", 2025, section 3, whose tree is cut off at pages here.
    """
    sums = {"decay": decay, "page_sum": page_sum, "total": total, "since": since, "n_log": n_log, "closed": closed}
    pool = {"k": keys, "v": values, "table": table, "length": length}
    near = {"near_k": near_k, "near_w": near_w, "near_beta": near_beta}
    others = {"w": w, "beta": beta, "factor": factor, **near, "first": first, "k_norm": k_norm, "log_decay": log_decay}
    others |= {"count": count, "sink": sink, **sums}
    check_pages(k, pool, others, "first", "keys", "values", mixed=True)
    (B, T, G, K), (P, PAGE, V), N, H = k.shape, values.shape, table.shape[2], q.shape[2]
    if not 1 <= T <= MOST_ROWS:
        raise ValueError(f"k: expected 1 to {MOST_ROWS} tokens, got T={T}")
    if H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}")
    missing = [name for name, x in sums.items() if (x is None) != (log_decay is None)]
    if missing:
        want = "a tensor with log_decay" if log_decay is not None else "None without log_decay"
        raise ValueError(f"{missing[0]}: expected {want}")
    int32, float32, float64, two = torch.int32, torch.float32, torch.float64, (B, G, 2 * PAGE)
    each = tuple(w.shape[3:-1])[:1]  # the factors of a token
    check_shapes({
        "q": (q, (B, T, H, K), None), "v": (v, (B, T, G, V), None),
        "k": (k, (B, T, table.shape[1], keys.shape[2]), None),
        "w": (w, (B, T, G, *each, K), None), "beta": (beta, (B, T, G, *each), None), "first": (first, (B, G), int32),
        "keys": (keys, (P, PAGE, K), float32), "factor": (factor, (P, K, K), float32),
        "near_k": (near_k, (*two, K), float32), "near_w": (near_w, (*two, *each, K), float32),
        "near_beta": (near_beta, (*two, *each), float32),
        "k_norm": (k_norm, (B, G, N), float32), "log_decay": (log_decay, (B, T, H), float32),
        "decay": (decay, (P, PAGE, H // G), float32), "page_sum": (page_sum, (B, H, N), float64),
        "total": (total, (B, H), float64), "since": (since, (B, H), int32), "n_log": (n_log, (B, H, N), float64),
        "closed": (closed, (B, H, N), torch.int64), "count": (count, (B,), int32), "sink": (sink, (H,), None),
    }, strided=("q", "k", "v", "w", "beta", "log_decay"))  # fmt: skip
    if isinstance(group, bool) or not isinstance(group, int) or group < 0 or group == 1:
        raise ValueError(f"group: expected a number of pages from 2 on, or 0, got {group!r}")
    check_window(window)
    check_scale(scale)
    check_values(q, w=w, beta=beta, log_decay=log_decay, sink=sink)
    why = path_unavailable(keys, values) or refuse_gradients(q, k, v, w, beta, sink)
    if why:
        raise ValueError(f"paged_path_step: {why}")
    from attnzoo.kernels.decode.op import path_step

    w, beta = w if each else w[:, :, :, None], beta if each else beta[..., None]
    q, k, v, w = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, w))
    return path_step(
        q, k, v, w, beta, log_decay, count, keys, values, factor, (near_k, near_w, near_beta), table, first, length,
        k_norm, decay, page_sum, total, since, n_log, closed, sink, K**-0.5 if scale is None else float(scale),
        window or 0, group,
    )  # fmt: skip


def path_unavailable(keys: Tensor, values: Tensor) -> str:
    """Why the Triton kernels cannot take pages of these keys and values, or "" if they can."""
    return kernels_unavailable(keys, values, multiple=16, most=128)
