"""Forward and backward pass of PaTH: transitions and carries, some heads at a time, and attention over levels.

Kernels of the blocks (``portable/blocks.py``, with decays of the channels ``portable/decayed.py``) give scores within
blocks and carried operands, ``portable/carry.py`` those of the levels; ``levels/`` attends. The backward goes the same
way in reverse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.launching import cdiv, head_block
from attnzoo.kernels.common.plans import Plan, launcher
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.levels.head_groups import HeadGroup, head_groups
from attnzoo.kernels.levels.layout import Carried, Kept, Leaves, clear_tails, tree_block
from attnzoo.kernels.levels.operands import LevelGradients, gates_of, rows_of
from attnzoo.kernels.levels.plan import BACKWARD, FORWARD
from attnzoo.kernels.levels.portable.prune import block_starts
from attnzoo.kernels.path.kept_transitions import Made, kept_places
from attnzoo.kernels.path.operands import PathBackward, PathOperands
from attnzoo.kernels.path.portable.blocks import block_level
from attnzoo.kernels.path.portable.blocks_backward import block_level_backward
from attnzoo.kernels.path.portable.carry import carry, carry_backward
from attnzoo.kernels.path.portable.decayed import decayed_level
from attnzoo.kernels.path.portable.decayed_backward import decayed_backward
from attnzoo.kernels.path.portable.inverse import new_kept
from attnzoo.kernels.path.portable.tree import node_gradients

Some = Tensor | None


def path_forward(
    given: PathOperands, rows: RowGates, tails: Some, plan: Plan, o_rest: Some = None, kept: Some = None
) -> tuple[Tensor, Tensor, Some]:
    """Launch the forward kernels. Shapes as in ``path_attention``; last dims contiguous.

    Args:
        rows: gate sums and first visible keys.
        tails: of ``gate_sums``; None without a gate.
        o_rest: [B, T, H, V] in q's dtype, contiguous, filled with what the rounding of o dropped.
        kept: a buffer of ``kept_transitions.kept_bytes`` that is filled for the backward pass, or None.

    Returns:
        o [B, T, H, V] in q's dtype; lse [B, H, T] float32, log2-sum-exp in the frame of the row unit; the first
        computed key of each row unit [B, H, ceil(T / ROW_UNIT)] int32, or None without pruning and window.
    """
    q, k, v, w, beta, _, sink, log_diag, options = given
    B, T, H, _ = q.shape
    o, lse = q.new_empty((B, T, H, v.shape[3])), q.new_empty((B, H, T), dtype=torch.float32)
    start, first, window = None, rows.first_visible, options.window
    if window and first is not None:  # keys outside of the window need no carries either
        start = (first[..., ::ROW_UNIT] // KEY_UNIT * KEY_UNIT).repeat(B // first.shape[0], H // first.shape[1], 1)
    elif options.bound:
        start = torch.empty((B, H, cdiv(T, ROW_UNIT)), dtype=torch.int32, device=q.device)
    rows = rows._replace(first_computed=start)

    def carry_and_attend(group: HeadGroup, there: Made | None) -> None:
        p_q, p_k, p_start = group.queries(q), group.keys(k), group.rows(start)
        if log_diag is None:
            own = (None, None) if there is None else (there.kept, there.block)
            block = block_level(p_q, p_k, group.keys(w), group.keys(beta), *own)
        else:
            block, _ = decayed_level(p_q, p_k, group.keys(w), group.keys(beta), group.queries(log_diag))
        if options.bound:
            assert p_start is not None
            assert tails is not None
            p_options = options._replace(logit_bound=group.heads(options.logit_bound))
            out = None if window else p_start
            found = block_starts(p_q, p_k, block, gates_of(group, rows), group.rows(tails), p_options, out)
            if window:
                torch.maximum(p_start, found, out=p_start)
        levels = carry(block, p_start, None if there is None else there.levels).levels
        if there is not None:
            clear_tails(levels, T)
        made = o, lse, rows, o_rest
        launcher(FORWARD[plan.forward])(rows_of(group, block, levels, group.keys(v), made, sink, options), plan)

    groups = ((group, None) for group in head_groups(q, k, backward=False, decayed=log_diag is not None))
    for group, there in groups if kept is None else kept_places(kept, q, k, w):
        carry_and_attend(group, there)
    return o, lse, start


class PathSums(NamedTuple):
    """Results of the backward pass, None or undefined where they are not wanted.

    Attributes:
        q, k, v, w, beta, log_diag: gradients in the inputs' dtypes, or as said; contiguous.
        columns: for a gate, sums [B, H, T] of dS over each key's column.
        sums: with a sink, or a gate and dlse, sums [B, H, T] of dS over rows (otherwise they are 0).
    """

    q: Some
    k: Some
    v: Tensor
    w: Some
    beta: Some
    log_diag: Some
    columns: Some
    sums: Some


def path_backward(x: PathBackward, plan: Plan) -> PathSums:
    """Launch the backward kernels on what the forward pass saved; carries are made again where they are not kept.

    Kernels are launched only where they serve a gradient that is wanted.

    Args:
        x: with dlse [B, H, T] float32, contiguous, or None.
    """
    (q, k, v, w, beta, _, sink, log_diag, options), made, wanted, dlse = x.given, x.made, x.wanted, x.dlse
    T, dv, lse, rows = q.shape[1], v.new_empty(v.shape), made.lse, made.rows
    wide = torch.float32 if x.unrounded else None
    dq, dk = (y.new_empty(y.shape, dtype=wide) if wanted.queries or wanted.keys else None for y in (q, k))
    dw = w.new_empty(w.shape, dtype=wide) if wanted.transitions else None
    dbeta = beta.new_empty(beta.shape) if wanted.transitions else None
    da = None if log_diag is None or dw is None else lse.new_empty(log_diag.shape)
    columns = torch.empty_like(lse) if wanted.log_decay else None
    sums = torch.empty_like(lse) if sink is not None or (rows.c is not None and dlse is not None) else None
    decayed = log_diag is not None
    once = plan.one_pass
    scores = torch.bfloat16 if q.dtype == torch.bfloat16 and not decayed else torch.float32  # as block_level rounds it
    tiled = once and tree_block(q.shape[3]) == head_block(q.shape[3])

    def differentiate(group: HeadGroup, there: Made | None) -> None:  # what it makes is gone before the next begins
        p_x = group.queries(q), group.keys(k), group.keys(w), group.keys(beta)
        p_start = group.rows(rows.first_computed)
        kept: Kept | None
        if there is not None:
            kept, block, carried = there.kept, there.block, Carried(there.levels, there.block.m)
        else:
            if log_diag is None:
                kept = None if dq is None else new_kept(p_x[0], p_x[2])
                block = block_level(*p_x, kept)
            else:
                p_a = group.queries(log_diag)
                block, kept_decays = decayed_level(*p_x, p_a)
            carried = carry(block, p_start)
            if once:
                clear_tails(carried.levels, T)
        results = made.o, lse, rows, made.o_rest
        d_block, d_levels, tiles = launcher(BACKWARD[plan.backward])(
            rows_of(group, block, carried.levels, group.keys(v), results, sink, options),
            LevelGradients(
                group.queries(x.do), group.rows(dlse), group.keys(dv), group.rows(sums), group.rows(columns), wanted,
                tiled=tiled, scores=scores,
            ),
            plan,
        )  # fmt: skip
        if dq is None or dk is None:
            return
        d_q, d_k, zero = carry_backward(block, carried, d_levels, d_block.q, d_block.k, p_start, wanted, tiles)
        d_diag = d_block.diag
        del d_block, tiles  # they are large, and the next kernels need the memory
        d_m = node_gradients(block, carried, zero, d_levels, T, p_start) if wanted.transitions else block.m
        del block, carried, d_levels, zero
        d_w, d_beta = (None if y is None else group.keys(y) for y in (dw, dbeta))
        d_leaves, out = Leaves(d_diag, d_q, d_k, d_m), (group.queries(dq), group.keys(dk), d_w, d_beta)
        if log_diag is None:
            assert kept is not None
            block_level_backward(*p_x, d_leaves, kept, out)
        else:
            decayed_backward(*p_x, p_a, d_leaves, kept_decays, out, None if da is None else group.queries(da))

    groups = ((group, None) for group in head_groups(q, k, backward=True, one_pass=once, decayed=decayed))
    for group, there in groups if made.kept is None else kept_places(made.kept, q, k, w):
        differentiate(group, there)
    return PathSums(dq, dk, dv, dw, dbeta, da, columns, sums)


def path_starts(given: PathOperands, rows: RowGates, tails: Tensor) -> Tensor:
    """``block_starts`` of all heads, by itself: without attention."""
    q, k, options = given.q, given.k, given.options
    start = torch.empty((q.shape[0], q.shape[2], cdiv(q.shape[1], ROW_UNIT)), dtype=torch.int32, device=q.device)
    for group in head_groups(q, k, backward=False):
        p_q, p_k = group.queries(q), group.keys(k)
        block = None
        if options.bound == "tail":
            block = block_level(p_q, p_k, group.keys(given.w), group.keys(given.beta))
        p_options = options._replace(logit_bound=group.heads(options.logit_bound))
        block_starts(p_q, p_k, block, gates_of(group, rows), group.rows(tails), p_options, group.rows(start))
    return start
