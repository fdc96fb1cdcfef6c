"""Backward pass: one kernel owns rows (dq.py), one owns keys (dkdv.py), as in FoX; nothing is added up
across programs, so the result does not depend on their order. With a gate or a sink the row kernel corrects delta by
the row sums of dS over all levels, which the key kernel then uses. On Hopper one pass does both (hopper/): there
programs add up, and delta stays as it is.

The results are gradients of the carried operands, from which a family makes those of its own.
"""

from __future__ import annotations

import torch

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.key_bounds import key_bounds
from attnzoo.kernels.common.launching import (
    addressable,
    can_describe,
    cdiv,
    dot_precision,
    head_block,
    row_strides,
    tile_descriptor,
)
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.row_delta import row_delta_kernel
from attnzoo.kernels.levels.layout import Leaves, Levels, QueryGradientTiles
from attnzoo.kernels.levels.operands import LevelGradients, LevelRows
from attnzoo.kernels.levels.plan import pair_width

from .dkdv import path_dkdv_portable_kernel
from .dq import path_dq_portable_kernel
from .forward import levels_descriptor, value_block


def levels_backward(
    x: LevelRows, grads: LevelGradients, plan: Plan
) -> tuple[Leaves, Levels, QueryGradientTiles | None]:
    """Gradients of the blocks (without m) and of the levels, as far as wanted; fills dv and the sums of dS.

    Those of the levels' queries are in the tiles, where there are any.
    """
    block, levels, v, o, lse, gated, _, sink, given = x
    (B, T, H, K), (G, V), n = block.q.shape, v.shape[2:], levels.q.shape[0]
    do, dlse, dv, sums, columns, wanted, *_ = grads
    do = addressable(do)
    gate, BV, (c, base, *limits) = x.gate, value_block(K, V), gated.pointers(lse)
    rows = lse.new_empty((B, H, cdiv(T, ROW_UNIT) * ROW_UNIT, 2))
    d_key = lse.new_zeros((n + 1, B, H, T)) if gate else lse
    d_block, d_levels = grads.like(block, levels)
    gates = (c, base)
    p_w, p_dlse = lse if sums is None else sums, lse if dlse is None else dlse
    row_delta_kernel[(B * H * (rows.shape[2] // 64),)](
        o, do, lse, p_dlse, rows, p_w, *gates, lse, lse if sink is None else sink, T, T, *o.stride()[:3],
        *do.stride()[:3], H=H, V=V, BV=head_block(V), BT=64, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate,
        HAS_SINK=sink is not None, HAS_DLSE=dlse is not None,
    )  # fmt: skip
    end, full = key_bounds(*gated[2:], B, T, H, T)[:2] if gated.bounded else limits
    sizes = (B, T, levels.q.shape[2], levels.k.shape[2], n)
    strides = (*v.stride()[:3], *do.stride()[:3])
    options = {"H": H, "REP": H // G, "K": K, "V": V, "BK": head_block(K), "BV": BV, "RU": ROW_UNIT,
               "KU": KEY_UNIT, "GATE": gate, "PREC": dot_precision(v.dtype), **gated.flags}  # fmt: skip
    if wanted.queries or wanted.log_decay or wanted.sink:
        t = plan.of("dq")
        tma = t.tma and n > 0 and can_describe(v)
        p_k, p_vd = (levels_descriptor(levels.k, t.BS), tile_descriptor(v, t.BS, BV)) if tma else (levels.k, v)
        path_dq_portable_kernel[(cdiv(T, t.BT) * B * H,)](
            block.diag, block.q, block.k, levels.q, p_k, v, p_vd, do, rows, p_w, p_dlse, d_block.q, d_levels.q,
            *gates, *limits, *sizes, min(t.heads, B * H), given.scale, given.scale2, *strides,
            *row_strides(gated.first_visible), **options, BT=t.BT, BS=t.BS, BP=pair_width(t, max(K, V)),
            HAS_SINK=sink is not None, HAS_DLSE=dlse is not None, TMA=tma, num_warps=t.num_warps,
            num_stages=t.num_stages, maxnreg=t.maxnreg,
        )  # fmt: skip
    t = plan.of("dkdv")
    path_dkdv_portable_kernel[(cdiv(T, t.BS) * B * G,)](
        block.diag, block.q, block.k, levels.q, levels.k, v, do, rows, d_block.diag, d_block.k, d_levels.k, dv, d_key,
        *gates, *limits, end, full, *sizes, min(t.heads, B * G), given.scale, given.scale2, *strides, *dv.stride()[:3],
        *row_strides(gated.first_visible), **options, BT=t.BT, BS=t.BS, num_warps=t.num_warps, num_stages=t.num_stages,
        maxnreg=t.maxnreg,
    )  # fmt: skip
    if columns is not None:
        torch.sum(d_key, 0, out=columns)
    return d_block, d_levels, None
