"""From when on the keys of a tile are all forgotten: what row kernels ask of a tile before they compute its biases."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.forgetful_bias import load_retention, tokens_to_fall
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, retention_strides
from attnzoo.kernels.common.retention import Rule, numbers_of
from attnzoo.kernels.common.tile_loads import head_and_tile


@launched
@triton.jit(do_not_specialize=["S"])
def retention_gone_kernel(
    p_keep, p_gone, S, rule, stride_rb, stride_rs, stride_rh,
    G: tl.constexpr, KIND: tl.constexpr, HELD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Tokens [B, G, S / BS] from each tile of keys on, after which all have fallen as far as counts."""
    i_bg, i_s = head_and_tile(tl.cdiv(S, BS))
    p_keep += (i_bg // G).to(tl.int64) * stride_rb + (i_bg % G).to(tl.int64) * stride_rh
    b_s = i_s * BS + tl.arange(0, BS)
    b_base, b_fade = load_retention(p_keep, b_s, S, stride_rs, KIND)
    gone = tokens_to_fall(b_base, b_fade, b_s < S, rule[6] if HELD else rule[5], KIND)
    tl.store(p_gone + i_bg * tl.cdiv(S, BS) + i_s, gone)


def tokens_until_gone(keys: Tensor, rule: Rule, BS: int, *, held: bool = False) -> Tensor:
    """Tokens after which all keys of a tile are forgotten, as far as their bias, or the number of held keys, shows.

    Args:
        keys: [B, S, G, 1 or 2], see ``retention.Retention``.
        BS: keys of a tile.
        held: whether as far as the number of held keys shows.

    Returns:
        [B, G, ceil(S / BS)] int32, counted from the key itself; 2^30 for never.
    """
    (B, S, G, kind), tiles = keys.shape, cdiv(keys.shape[1], BS)
    gone = torch.empty((B, G, tiles), dtype=torch.int32, device=keys.device)
    retention_gone_kernel[(tiles * B * G,)](
        keys, gone, S, numbers_of(rule, kind), *retention_strides(keys), G=G, KIND=kind, HELD=held, BS=BS,
        num_warps=1,
    )  # fmt: skip
    return gone
