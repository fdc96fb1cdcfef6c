"""Backward pass: one kernel owns rows (dq.py), one owns keys (dkdv.py), as in FoX; nothing is added up
across programs, so the result does not depend on their order. With a gate or a sink the row kernel corrects delta by
the row sums of dS over all levels, which the key kernel then uses. On Hopper one pass does both (hopper/): there
programs add up, and delta stays as it is.

The results are gradients of the carried operands, which carry.py and blocks_backward.py turn into those of q, k, w and
beta.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.constants import GATE_FULL, GATE_NONE, KEY_UNIT, LOG2E, ROW_UNIT
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
from attnzoo.kernels.levels.head_groups import HeadGroup, head_groups
from attnzoo.kernels.levels.layout import Carried, Kept, Leaves, Levels, Tiles, Wanted, clear_tails
from attnzoo.kernels.levels.plan import pair_width
from attnzoo.kernels.path.kept_transitions import Made, places

from .blocks import block_level
from .blocks_backward import block_level_backward
from .carry import carry, carry_backward
from .decayed import decayed_level
from .decayed_backward import decayed_backward
from .dkdv import path_dkdv_portable_kernel
from .dq import path_dq_portable_kernel
from .forward import levels_descriptor, value_block
from .inverse import new_kept, tree_block
from .tree import node_gradients

Some = Tensor | None


def path_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, o: Tensor, lse: Tensor, c: Tensor | None,
    base: Tensor | None, since: Tensor | None, start: Tensor | None, scale: float, plan: Plan, wanted: Wanted, *,
    o_rest: Some = None, sink: Some = None, dlse: Some = None, log_diag: Some = None, made: Some = None,
    unrounded: bool = False,
) -> tuple[Some, Some, Tensor, Some, Some, Some, Some, Some]:  # fmt: skip
    """Launch the backward kernels on what the forward pass saved, some heads at a time; the carries are made again
    where they are not kept.

    Args:
        wanted: kernels that serve no gradient of these are not launched.
        o_rest: [B, T, H, V], what the rounding of o dropped: one pass needs it for the gradient of a gate.
        dlse: [B, H, T] float32, contiguous: gradient of the rows' log-sum-exp.
        log_diag, made: as in ``path_forward``.
        unrounded: whether dq, dk and dw are wanted in float32.

    Returns:
        dq, dk, dv, dw [B, T, G, K] and dbeta [B, T, G] in the inputs' dtypes or as said, contiguous; for a gate, column
        sums [B, H, T] of dS; with a sink, or a gate and dlse, row sums [B, H, T] of dS (otherwise they are 0); that of
        log_diag. None, or undefined, where not wanted.
    """
    T, dv = q.shape[1], v.new_empty(v.shape)
    wide = torch.float32 if unrounded else None
    dq, dk = (x.new_empty(x.shape, dtype=wide) if wanted.queries or wanted.keys else None for x in (q, k))
    dw = w.new_empty(w.shape, dtype=wide) if wanted.transitions else None
    dbeta = beta.new_empty(beta.shape) if wanted.transitions else None
    da = None if log_diag is None or dw is None else lse.new_empty(log_diag.shape)
    dkey = torch.empty_like(lse) if wanted.log_decay else None
    drow = torch.empty_like(lse) if sink is not None or (c is not None and dlse is not None) else None
    decayed = log_diag is not None
    once = plan.backward == "hopper"
    scores = torch.bfloat16 if q.dtype == torch.bfloat16 and not decayed else torch.float32  # as block_level rounds it
    tiled = once and tree_block(q.shape[3]) == head_block(q.shape[3])

    def differentiate(group: HeadGroup, there: Made | None) -> None:  # what it makes is gone before the next begins
        x = group.queries(q), group.keys(k), group.keys(w), group.keys(beta)
        p_c, p_base, p_since, p_start = group.rows(c), group.rows(base), group.rows(since), group.rows(start)
        kept: Kept | None
        if there is not None:
            kept, block, carried = there.kept, there.block, Carried(there.levels, there.block.m)
        else:
            if log_diag is None:
                kept = None if dq is None else new_kept(x[0], x[2])
                block = block_level(*x, kept)
            else:
                p_a = group.queries(log_diag)
                block, kept_decays = decayed_level(*x, p_a)
            carried = carry(block, p_start)
            if once:
                clear_tails(carried.levels, T)
        saved = group.queries(do), group.keys(v), group.queries(o), lse[group.b, group.h], p_c, p_base, p_since, p_start
        extra = group.heads(sink), group.rows(dlse), group.rows(drow), group.rows(dkey)
        p_rest = None if o_rest is None else group.queries(o_rest)
        d_block, d_levels, tiles = levels_backward(
            block, carried.levels, *saved, scale, plan, wanted, *extra, group.keys(dv), p_rest, tiled=tiled,
            scores=scores,
        )  # fmt: skip
        if dq is None or dk is None:
            return
        d_q, d_k, zero = carry_backward(block, carried, d_levels, d_block.q, d_block.k, p_start, wanted, tiles)
        d_diag = d_block.diag
        del d_block, tiles  # they are large, and what follows needs room
        d_m = node_gradients(block, carried, zero, d_levels, T, p_start) if wanted.transitions else block.m
        del block, carried, d_levels, zero
        d_w, d_beta = (None if y is None else group.keys(y) for y in (dw, dbeta))
        d_leaves, out = Leaves(d_diag, d_q, d_k, d_m), (group.queries(dq), group.keys(dk), d_w, d_beta)
        if log_diag is None:
            assert kept is not None
            block_level_backward(*x, d_leaves, kept, out)
        else:
            decayed_backward(*x, p_a, d_leaves, kept_decays, out, None if da is None else group.queries(da))

    groups = ((group, None) for group in head_groups(q, k, backward=True, one_pass=once, decayed=decayed))
    for group, there in groups if made is None else places(made, q, k, w):
        differentiate(group, there)
    return dq, dk, dv, dw, dbeta, dkey, drow, da


def levels_backward(
    block: Leaves, levels: Levels, do: Tensor, v: Tensor, o: Tensor, lse: Tensor, c: Tensor | None, base: Tensor | None,
    since: Tensor | None, start: Tensor | None, scale: float, plan: Plan, wanted: Wanted, sink: Tensor | None,
    dlse: Tensor | None, drow: Tensor | None, dkey: Tensor | None, dv: Tensor, o_rest: Tensor | None,
    unrounded: bool = False, tiled: bool = False, scores: torch.dtype = torch.float32,
) -> tuple[Leaves, Levels, Tiles | None]:  # fmt: skip
    """Gradients of the blocks (without m) and of the levels, as far as wanted; fills dv, drow and, for the gradient of
    log_decay, dkey (contiguous).

    Those of the levels' queries are in the tiles, where there are any.

    Args:
        unrounded: whether those of the carried queries are wanted in float32.
        tiled: whether tiles are, from Hopper's one pass; then those in the levels are undefined.
        scores: dtype of those of the scores within blocks.
    """
    saved, rest = (block, levels, do, v, o, lse, c, base, since, start, scale), (wanted, sink, dlse, drow, dkey, dv)
    if plan.backward == "hopper":
        from attnzoo.kernels.path.hopper.backward import launch_hopper_backward

        return launch_hopper_backward(*saved, *rest, o_rest, unrounded, tiled, scores)
    return *_launch(*saved, plan, *rest, unrounded, scores), None


def _launch(
    block: Leaves, levels: Levels, do: Tensor, v: Tensor, o: Tensor, lse: Tensor, c: Tensor | None, base: Tensor | None,
    since: Tensor | None, start: Tensor | None, scale: float, plan: Plan, wanted: Wanted, sink: Tensor | None,
    dlse: Tensor | None, drow: Tensor | None, dkey: Tensor | None, dv: Tensor, unrounded: bool, scores: torch.dtype,
) -> tuple[Leaves, Levels]:  # fmt: skip
    (B, T, H, K), (G, V), n = block.q.shape, v.shape[2:], levels.q.shape[0]
    do = addressable(do)
    gate, BV = GATE_NONE if c is None else GATE_FULL, value_block(K, V)
    rows = lse.new_empty((B, H, cdiv(T, ROW_UNIT) * ROW_UNIT, 2))
    d_key = lse.new_zeros((n + 1, B, H, T)) if gate else lse
    of_q = torch.float32 if unrounded else None
    of_block = torch.empty_like(block.q, dtype=of_q), torch.empty_like(block.k)
    d_block = Leaves(torch.empty_like(block.diag, dtype=scores), *of_block, block.m)
    d_levels = Levels(torch.empty_like(levels.q, dtype=of_q), torch.empty_like(levels.k))
    gates = (lse if c is None else c, lse if base is None else base)
    p_w, p_dlse = lse if drow is None else drow, lse if dlse is None else dlse
    row_delta_kernel[(B * H * (rows.shape[2] // 64),)](
        o, do, lse, p_dlse, rows, p_w, *gates, lse, lse if sink is None else sink, T, T, *o.stride()[:3],
        *do.stride()[:3], H=H, V=V, BV=head_block(V), BT=64, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate,
        HAS_SINK=sink is not None, HAS_DLSE=dlse is not None,
    )  # fmt: skip
    limits = (lse if since is None else since, lse if start is None else start)
    end, full = limits if since is None and start is None else key_bounds(since, start, B, T, H, T)[:2]
    sizes = (B, T, levels.q.shape[2], levels.k.shape[2], n)
    strides = (*v.stride()[:3], *do.stride()[:3])
    options = {"H": H, "REP": H // G, "K": K, "V": V, "BK": head_block(K), "BV": BV, "RU": ROW_UNIT,
               "KU": KEY_UNIT, "GATE": gate, "HAS_SINCE": since is not None, "HAS_START": start is not None,
               "PREC": dot_precision(v.dtype)}  # fmt: skip
    if wanted.queries or wanted.log_decay or wanted.sink:
        t = plan.of("dq")
        tma = t.tma and n > 0 and can_describe(v)
        p_k, p_vd = (levels_descriptor(levels.k, t.BS), tile_descriptor(v, t.BS, BV)) if tma else (levels.k, v)
        path_dq_portable_kernel[(cdiv(T, t.BT) * B * H,)](
            block.diag, block.q, block.k, levels.q, p_k, v, p_vd, do, rows, p_w, p_dlse, d_block.q, d_levels.q,
            *gates, *limits, *sizes, min(t.heads, B * H), scale, scale * LOG2E, *strides, *row_strides(since),
            **options, BT=t.BT, BS=t.BS, BP=pair_width(t, max(K, V)), HAS_SINK=sink is not None,
            HAS_DLSE=dlse is not None, TMA=tma, num_warps=t.num_warps, num_stages=t.num_stages, maxnreg=t.maxnreg,
        )  # fmt: skip
    t = plan.of("dkdv")
    path_dkdv_portable_kernel[(cdiv(T, t.BS) * B * G,)](
        block.diag, block.q, block.k, levels.q, levels.k, v, do, rows, d_block.diag, d_block.k, d_levels.k, dv, d_key,
        *gates, *limits, end, full, *sizes, min(t.heads, B * G), scale, scale * LOG2E, *strides, *dv.stride()[:3],
        *row_strides(since), **options, BT=t.BT, BS=t.BS, num_warps=t.num_warps, num_stages=t.num_stages,
        maxnreg=t.maxnreg,
    )  # fmt: skip
    if dkey is not None:
        torch.sum(d_key, 0, out=dkey)
    return d_block, d_levels
