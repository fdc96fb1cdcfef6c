"""A step of PaTH over pages: check a call and launch the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.validation import check_scale
from attnzoo.kernels.common.arguments import check_shapes, check_values, check_window
from attnzoo.kernels.common.checks import kernels_unavailable
from attnzoo.kernels.common.launching import addressable
from attnzoo.kernels.decode.api import (
    check_pages,
    check_prune,
    check_sums,
    check_table,
    check_tokens,
    refuse_gradients,
    shapes_of_sums,
)

NEAR, OPEN = ("near_k", "near_w", "near_beta"), ("open_keys", "open_factor", "base")


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
    table: Tensor,
    first: Tensor,
    length: Tensor,
    k_norm: Tensor,
    near: tuple[Tensor, Tensor, Tensor] | None = None,
    open: tuple[Tensor, Tensor, Tensor] | None = None,
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
    prune: Prune | None = None,
    logit_bound: Tensor | None = None,
    carry: bool = True,
) -> Tensor:
    """Write T new tokens of PaTH or PaTH-FoX into the pages of each sequence, in place, and attend.

        o_t = sum_{j <= t} softmax_j(scale k_j^T R_{j+1} ... R_t q_t + c_t - c_j) v_j,     R_t = I - beta_t w_t w_t^T

    So many pages are a group. A whole group holds its keys as its last token left them, and beside it stands the
    transposed product of its factors. So each live key is read once, those of the group that is not whole alone are
    written again, and pages that have been given up cost nothing. Five launches, six with ``prune``, no host
    synchronisation, no gradient; runs on Triton. The walk of a row over the products of the groups is one after the
    other.

    Args:
        q: [B, T, H, K], 1 <= T <= 16; k, w: [B, T, G, K], v: [B, T, G, V], beta: [B, T, G], of the new tokens. Head
            dims are multiples of 16 up to 128. A w has length 1 or less, and beta lies in [0, 2]. With n factors per
            token, whose product in that order is R_t, w is [B, T, G, n, K] and beta [B, T, G, n].
        keys: [P, PAGE, K], contiguous, as values: [P, PAGE, V]; changed. Keys of 16 bits are rounded once, when their
            group is whole; float16 must hold them.
        factor: of whole groups, [B, G, M, K, K] float32, transposed products; changed. M groups hold the table's N
            pages. Without ``open`` each page is a group, with its products in [P, K, K] and float32 keys.
        open: of groups of several pages, the keys [B, G, S, K] and the product [B, G, K, K] of the group that is not
            whole, float32, changed; and how many of the first groups [B] int32 have no product, as their keys stand as
            the last token of all of them left them. S is a multiple of PAGE.
        near: of groups of one page, k, w and beta of the last tokens, [B, G, 2 PAGE, K], [B, G, 2 PAGE, K] and
            [B, G, 2 PAGE] float32, that of token t at t % (2 PAGE), with an axis of n factors where w has one; changed.
        table, first, length, k_norm, log_decay, decay, page_sum, total, since, n_log, closed, count: as
            ``paged_append``; the lengths are those before the step.
        scale, window, sink, prune, logit_bound: as ``paged_attention``.
        carry: False leaves the last group as it is, for ``paged_path_carry``; for groups of several pages.

    Returns:
        [B, T, H, V] in v's dtype; rows of tokens that a sequence does not get (``count``) mean nothing.

    Raises:
        ValueError: a shape, dtype, device or option is wrong, or the kernels cannot serve the call.
        TypeError: something that is no tensor, or no number.

    Source: Yang et al., "PaTH Attention", 2025, section 3, whose tree is cut off at groups here.
    """
    sums = {"decay": decay, "page_sum": page_sum, "total": total, "since": since, "n_log": n_log, "closed": closed}
    kept = {"keys": keys, "values": values, "factor": factor, "table": table, "first": first, "length": length}
    others = {"log_decay": log_decay, "sink": sink, "logit_bound": logit_bound, "v": v, **sums}
    w, beta = _checked(k, w, beta, {**kept, "k_norm": k_norm}, near, open, count, others)
    (B, T, G, _), (P, PAGE, V), N, H = k.shape, values.shape, table.shape[2], q.shape[2]
    check_tokens("k", T)
    if H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}")
    check_sums(sums, log_decay, "log_decay")
    float32 = torch.float32
    check_shapes({
        "q": (q, (B, T, H, keys.shape[2]), None), "v": (v, (B, T, G, V), None),
        "log_decay": (log_decay, (B, T, H), float32),
        **shapes_of_sums(sums, (B, H, N), (P, PAGE, H // G), float32), "sink": (sink, (H,), None),
        "logit_bound": (logit_bound, (H,), float32),
    }, strided=("q", "v", "log_decay"))  # fmt: skip
    if not carry and open is None:
        raise ValueError("carry: expected True without open, got False")
    check_prune(prune, decay, log_decay, k_norm, n_log, logit_bound)
    check_window(window)
    check_scale(scale)
    check_values(q, w=w, beta=beta, log_decay=log_decay, sink=sink, logit_bound=logit_bound)
    check_table(table, PAGE, length, count, T)
    why = path_unavailable(keys, values) or refuse_gradients(q, k, v, w, beta, log_decay, sink)
    if why:
        raise ValueError(f"paged_path_step: {why}")
    from attnzoo.kernels.decode.op import path_step
    from attnzoo.kernels.decode.portable.path_pages import Carried

    q, k, v, w = (addressable(x) for x in (q, k, v, w))
    return path_step(
        q, v, Carried(k, w, beta, keys, factor, open, near, count), log_decay, values, table, first, length, k_norm,
        decay, page_sum, total, since, n_log, closed, sink, logit_bound,
        q.shape[3] ** -0.5 if scale is None else float(scale), window or 0, None if prune is None else prune.log_eps,
        carry,
    )  # fmt: skip


@torch.no_grad()
def paged_path_carry(
    k: Tensor, w: Tensor, beta: Tensor, *, keys: Tensor, factor: Tensor, open: tuple[Tensor, Tensor, Tensor],
    table: Tensor, first: Tensor, length: Tensor, k_norm: Tensor, count: Tensor,
) -> None:  # fmt: skip
    """Carry the groups that are not whole over new tokens, the last ``count[b]`` of T, that a step has not.

    Arguments as ``paged_path_step``; the lengths are those after these tokens. One launch, in place.

    Raises:
        ValueError, TypeError: as ``paged_path_step``.
    """
    kept = {"keys": keys, "values": keys, "factor": factor, "table": table, "first": first, "length": length}
    w, beta = _checked(k, w, beta, {**kept, "k_norm": k_norm}, None, open, count, {})
    why = path_unavailable(keys, keys)
    if why:
        raise ValueError(f"paged_path_carry: {why}")
    from attnzoo.kernels.decode.op import path_carry
    from attnzoo.kernels.decode.portable.path_pages import Carried

    k, w = (addressable(x) for x in (k, w))
    path_carry(Carried(k, w, beta, keys, factor, open, None, count), table, first, length, k_norm)


def _checked(
    k: Tensor, w: Tensor, beta: Tensor, kept: dict[str, Tensor], near: tuple[Tensor, ...] | None,
    open: tuple[Tensor, ...] | None, count: Tensor | None, others: dict[str, Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """w and beta with an axis of factors; what is carried fits."""
    if (near is None) == (open is None):
        raise ValueError(f"open: expected near or open, got {'neither' if open is None else 'both'}")
    lists = dict(zip(OPEN if near is None else NEAR, (near or open or ()), strict=True))
    keys, table = kept["keys"], kept["table"]
    pool = {"k": keys, "v": kept["values"], "table": table, "length": kept["length"]}
    named = {"w": w, "beta": beta, "first": kept["first"], "factor": kept["factor"], "k_norm": kept["k_norm"]}
    check_pages(k, pool, {**named, **lists, "count": count, **others}, "first", "keys", "values", mixed=True)
    (B, T, G, K), (P, PAGE, _), N = k.shape, keys.shape, table.shape[2]
    each, int32, float32 = tuple(w.shape[3:-1])[:1], torch.int32, torch.float32  # the factors of a token
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype | None]] = {
        "k": (k, (B, T, table.shape[1], keys.shape[2]), None), "w": (w, (B, T, G, *each, K), None),
        "beta": (beta, (B, T, G, *each), None), "first": (kept["first"], (B, G), int32),
        "k_norm": (kept["k_norm"], (B, G, N), float32), "count": (count, (B,), int32),
    }  # fmt: skip
    if open is None:
        two = (B, G, 2 * PAGE)
        wanted |= {"keys": (keys, (P, PAGE, K), float32), "factor": (kept["factor"], (P, K, K), float32)}
        shapes = ((*two, K), (*two, *each, K), (*two, *each))
        wanted |= {name: (x, shape, float32) for (name, x), shape in zip(lists.items(), shapes, strict=True)}
    else:
        S = open[0].shape[2] if open[0].ndim == 4 else 0
        if S < PAGE or S % PAGE:
            raise ValueError(f"open_keys: expected [B, G, S, K], S a multiple of {PAGE}, got {tuple(open[0].shape)}")
        wanted |= {
            "factor": (kept["factor"], (B, G, -(-N * PAGE // S), K, K), float32),
            "open_keys": (open[0], (B, G, S, K), float32), "open_factor": (open[1], (B, G, K, K), float32),
            "base": (open[2], (B,), int32),
        }  # fmt: skip
    check_shapes(wanted, strided=("k", "w", "beta"))
    return (w, beta) if each else (w[:, :, :, None], beta[..., None])


def path_unavailable(keys: Tensor, values: Tensor) -> str:
    """Why the Triton kernels cannot take pages of these keys and values, or "" if they can."""
    return kernels_unavailable(keys, values, multiple=16, most=128)
