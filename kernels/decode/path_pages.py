"""A step of PaTH over pages: check a call and launch the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.argument_checks import check_shapes, check_values
from attnzoo.kernels.common.call_checks import kernels_unavailable
from attnzoo.kernels.common.launching import addressable
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.decode.api import (
    NO_OPTIONS,
    Shapes,
    check_gates,
    check_page_options,
    check_pages,
    check_table,
    check_tokens,
    gradients_refused,
    shapes_of_gates,
    shapes_of_options,
)
from attnzoo.kernels.decode.path_state import PathGroups, PathTokens
from attnzoo.kernels.decode.state import PagedState


@torch.no_grad()
def paged_path_step(
    q: Tensor,
    v: Tensor,
    tokens: PathTokens,
    state: PagedState,
    groups: PathGroups,
    *,
    options: AttentionOptions = NO_OPTIONS,
    carry: bool = True,
) -> Tensor:
    """Write T new tokens of PaTH or PaTH-FoX into the pages of each sequence, in place, and attend.

        o_t = sum_{j <= t} softmax_j(scale k_j^T R_{j+1} ... R_t q_t + c_t - c_j) v_j,     R_t = I - beta_t w_t w_t^T

    So many pages are a group. A whole group holds its keys as its last token left them, and beside it stands the
    transposed product of its factors. So each live key is read once, those of the group that is not whole alone are
    written again, and pages that have been evicted cost nothing. Five launches, six with pruning, no host
    synchronisation, no gradient; runs on Triton. The walk of a row over the products of the groups is one after the
    other.

    Args:
        q: [B, T, H, K], 1 <= T <= 16; v: [B, T, G, V]. Head dims are multiples of 16 up to 128.
        tokens: the rest of the new tokens.
        state: as before these tokens; changed, but for the table and the first pages. Keys of 16 bits are rounded once,
            when their group is whole; float16 must hold them.
        groups: products, changed.
        options: as ``paged_attention``.
        carry: False leaves the last group as it is, for ``paged_path_carry``.

    Returns:
        [B, T, H, V] in v's dtype; rows of tokens that a sequence does not get (``counts``) mean nothing.

    Raises:
        ValueError: a shape, dtype, device or option is wrong, or the kernels cannot serve the call.
        TypeError: something that is no tensor, or no number.

    Source: Yang et al., "PaTH Attention", 2025, section 3, whose tree is cut off at groups here.
    """
    (keys, values, *_), (table, _, length), _ = state
    k, log_decay, H = tokens.k, tokens.log_decay, q.shape[2]
    others = {"log_decay": log_decay, "sink": options.sink, "logit_bound": options.logit_bound, "v": v}
    tokens = _checked(tokens, state, groups, others)
    (B, T, G, _), (_, PAGE, V) = k.shape, values.shape
    check_tokens("k", T)
    if H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}")
    check_gates(state, log_decay, "log_decay")
    check_shapes({
        "q": (q, (B, T, H, keys.shape[2]), None), "v": (v, (B, T, G, V), None),
        "log_decay": (log_decay, (B, T, H), torch.float32), **shapes_of_gates(state, H),
        **shapes_of_options(options, H),
    }, strided=("q", "v", "log_decay"))  # fmt: skip
    check_page_options(options, state)
    check_values(
        q, w=tokens.w, beta=tokens.beta, log_decay=log_decay, sink=options.sink, logit_bound=options.logit_bound
    )
    check_table(table, PAGE, length, tokens.counts, T)
    why = path_unavailable(keys, values) or gradients_refused(q, v, *tokens[:4], options.sink)
    if why:
        raise ValueError(f"paged_path_step: {why}")
    from attnzoo.kernels.decode.op import path_page_step
    from attnzoo.kernels.decode.portable.path_pages import CarriedPages

    q, v, k, w = (addressable(x) for x in (q, v, k, tokens.w))
    carried = CarriedPages(tokens._replace(k=k, w=w), state, groups)
    return path_page_step(q, v, carried, options.sink, options.of_op(q.shape[3]), carry)


@torch.no_grad()
def paged_path_carry(tokens: PathTokens, state: PagedState, groups: PathGroups) -> None:
    """Carry the groups that are not whole over new tokens, the last ``counts[b]`` of T, that a step has not.

    Arguments as ``paged_path_step``; the lengths are those after these tokens. One launch, in place.

    Raises:
        ValueError, TypeError: as ``paged_path_step``.
    """
    k, keys = tokens.k, state.pages.keys
    tokens = _checked(tokens, state, groups, {})
    why = path_unavailable(keys, keys)
    if why:
        raise ValueError(f"paged_path_carry: {why}")
    from attnzoo.kernels.decode.op import path_carry
    from attnzoo.kernels.decode.portable.path_pages import CarriedPages

    path_carry(CarriedPages(tokens._replace(k=addressable(k), w=addressable(tokens.w)), state, groups))


def _checked(tokens: PathTokens, state: PagedState, groups: PathGroups, others: dict[str, Tensor | None]) -> PathTokens:
    """The tokens, w and beta with an axis of factors; what is carried fits."""
    (k, w, beta, _, count), (factors, opened) = tokens, groups
    carried = {"factors": factors, "open_keys": opened.keys, "open_factor": opened.factor, "base": opened.base}
    named = {"w": w, "beta": beta, **carried, "count": count, **others}
    check_pages("k", k, state, named, ("k_norm", "w", "beta", *carried), mixed=True)
    (keys, _, k_norm, _), (table, first, _), _ = state
    (B, T, G, K), PAGE, N = k.shape, keys.shape[1], table.shape[2]
    each, int32, float32 = tuple(w.shape[3:-1])[:1], torch.int32, torch.float32  # the factors of a token
    S = opened.keys.shape[2] if opened.keys.ndim == 4 else 0
    if S < PAGE or S % PAGE:
        raise ValueError(f"open_keys: expected [B, G, S, K], S a multiple of {PAGE}, got {tuple(opened.keys.shape)}")
    wanted: Shapes = {
        "k": (k, (B, T, table.shape[1], keys.shape[2]), None), "w": (w, (B, T, G, *each, K), None),
        "beta": (beta, (B, T, G, *each), None), "first": (first, (B, G), int32),
        "k_norm": (k_norm, (B, G, N), float32), "count": (count, (B,), int32),
        "factors": (factors, (B, G, -(-N * PAGE // S), K, K), float32),
        "open_keys": (opened.keys, (B, G, S, K), float32), "open_factor": (opened.factor, (B, G, K, K), float32),
        "base": (opened.base, (B,), int32),
    }  # fmt: skip
    check_shapes(wanted, strided=("k", "w", "beta"))
    return tokens if each else tokens._replace(w=w[:, :, :, None], beta=beta[..., None])


def path_unavailable(keys: Tensor, values: Tensor) -> str:
    """Why the Triton kernels cannot take pages of these keys and values, or "" if they can."""
    return kernels_unavailable(keys, values, multiple=16, most=128)
