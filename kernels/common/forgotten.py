"""What row kernels read of keys: their numbers beside each other, and from when on the keys of a tile are forgotten."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.forgetful_bias import load_retention, tokens_to_fall
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, retention_strides
from attnzoo.kernels.common.retention import Rule, numbers_of
from attnzoo.kernels.common.tile_loads import head_and_tile


class TiledKeys(NamedTuple):
    """Keys in tiles of BS, the last one filled with zeros.

    Attributes:
        numbers: [B, G, KIND, tiles * BS] float32, base in log2 units and fade.
        gone: [B, G, tiles] int32, the tokens, counted from the key itself, after which all keys of a tile are
            forgotten, as far as their bias, or the number of held keys, shows; 2^30 for never.
    """

    numbers: Tensor
    gone: Tensor


@launched
@triton.jit(do_not_specialize=["S"])
def retention_tiles_kernel(
    p_keep, p_numbers, p_gone, S, rule, stride_rb, stride_rs, stride_rh,
    G: tl.constexpr, KIND: tl.constexpr, HELD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Fill ``TiledKeys``; one program per tile."""
    n_s = tl.cdiv(S, BS)
    i_bg, i_s = head_and_tile(n_s)
    p_keep += (i_bg // G).to(tl.int64) * stride_rb + (i_bg % G).to(tl.int64) * stride_rh
    b_s = i_s * BS + tl.arange(0, BS)
    b_base, b_fade = load_retention(p_keep, b_s, S, stride_rs, KIND)
    p_numbers += i_bg.to(tl.int64) * KIND * n_s * BS + b_s
    tl.store(p_numbers, b_base)
    if KIND == 2:
        tl.store(p_numbers + n_s * BS, b_fade)
    gone = tokens_to_fall(b_base, b_fade, b_s < S, rule[6] if HELD else rule[5], KIND)
    tl.store(p_gone + i_bg * n_s + i_s, gone)


def tiled_keys(keys: Tensor, rule: Rule, BS: int, *, held: bool = False) -> TiledKeys:
    """``TiledKeys`` of keys [B, S, G, 1 or 2] (``retention.Retention``); ``held`` for the number of held keys."""
    (B, S, G, kind), tiles = keys.shape, cdiv(keys.shape[1], BS)
    made = TiledKeys(
        torch.empty((B, G, kind, tiles * BS), dtype=torch.float32, device=keys.device),
        torch.empty((B, G, tiles), dtype=torch.int32, device=keys.device),
    )
    retention_tiles_kernel[(tiles * B * G,)](
        keys, *made, S, numbers_of(rule, kind), *retention_strides(keys), G=G, KIND=kind, HELD=held, BS=BS, num_warps=1
    )
    return made
