"""Launch of the one-pass backward for Hopper (``backward_kernel``), with the kernels before and after it (``pair``)."""

from __future__ import annotations

from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, ROW_UNIT
from attnzoo.kernels.common.hopper.descriptors import gluon_descriptor, plain_descriptor
from attnzoo.kernels.common.key_bounds import key_bounds
from attnzoo.kernels.common.launching import cdiv, describable, head_block, row_strides
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.levels.hopper.backward_kernel import path_bwd_hopper_kernel
from attnzoo.kernels.levels.layout import Leaves, Levels, QueryGradientTiles
from attnzoo.kernels.levels.operands import LevelGradients, LevelRows
from attnzoo.kernels.levels.plan import one_pass_tiles, pair_warps

from .pair import path_finish_kernel, path_pair_kernel


def levels_backward_hopper(
    x: LevelRows, grads: LevelGradients, plan: Plan
) -> tuple[Leaves, Levels, QueryGradientTiles | None]:
    """The gradients that ``portable.backward.levels_backward`` returns, by one Gluon pass; where the plan chose it.

    ``clear_tails`` has set the levels' tails to zero before. The gradient of the levels' queries is added up in
    float32, in memory of its own and in no fixed order.
    """
    block, levels, v, o, lse, gated, o_rest, sink, options = x
    (do, dlse, dv, row_sums, columns, wanted, _, tiled, _), scale = grads, options.scale
    (B, T, H, K), (G, V), n = block.q.shape, v.shape[2:], levels.q.shape[0]
    do = describable(do)
    t, BK, BV, Tq = one_pass_tiles(gated.first_computed is not None), head_block(K), head_block(V), levels.q.shape[2]
    gate, (c, base, *limits) = x.gate, gated.pointers(lse)
    Tp, Tx = (cdiv(rows, ROW_UNIT) * ROW_UNIT for rows in (T, Tq))
    rows, delta = lse.new_empty((B * H, Tp)), lse.new_empty((B * H, Tp))
    sums = lse.new_zeros((B * H, Tp // 2)) if gate else lse
    d_key = columns if columns is not None else lse.new_empty((B, H, T)) if gate else lse
    dq_tiles = lse.new_empty((n * B * H * Tx * BK // 256, 256))  # dq of the levels in float32, tile by tile
    own = lse.new_empty((B, G, Tp, BV))
    d_block, d_levels = grads.like(block, levels)
    gates = (c, base)
    end = full = cut = lse
    if gated.bounded:
        bounds = key_bounds(*gated[2:], B, T, H, T)
        end, full, cut = bounds.end, bounds.full, bounds.cut
    flags = {"GATE": gate, "HAS_START": gated.first_computed is not None, "RU": ROW_UNIT}
    bounded = {"HAS_SINCE": gated.first_visible is not None, "REP": H // G, "H": H, "BK": BK, **flags}
    p_w, extra = lse if row_sums is None else row_sums, (lse if dlse is None else dlse, lse if sink is None else sink)
    path_pair_kernel[(Tp // KEY_UNIT * B * G,)](
        block.diag, block.q, block.k, v, o, o if o_rest is None else o_rest, do, lse, rows, delta, d_block.diag,
        d_block.q, d_block.k, own, dq_tiles, sums, d_key, p_w, *extra, *gates, *limits, B, T, Tq, n, scale,
        options.scale2, *v.stride()[:3], *o.stride()[:3], *do.stride()[:3], *row_strides(gated.first_visible), K=K, V=V,
        BV=BV, C=KEY_UNIT, HAS_REST=o_rest is not None, HAS_SINK=sink is not None, HAS_DLSE=dlse is not None,
        PREC="ieee", **bounded, num_warps=pair_warps(H // G, K),
    )  # fmt: skip
    heads = cdiv(B * G, cdiv(B * G, t.heads))  # at a time, as many each time
    path_bwd_hopper_kernel[(Tp // t.BS * B * G,)](
        gluon_descriptor(levels.q.flatten(0, 1), t.BT), gluon_descriptor(levels.k.flatten(0, 1), t.BS),
        gluon_descriptor(v, t.BS), gluon_descriptor(do, t.BT), plain_descriptor(rows, [1, t.BT]),
        plain_descriptor(delta, [1, t.BT]), plain_descriptor(dq_tiles, [t.BT * BK // 256, 256]),
        gluon_descriptor(d_levels.k.flatten(0, 1), t.BS), gluon_descriptor(dv, t.BS), own, sums, d_key, *gates,
        *limits, cut, end, full, B, T, Tq, n, heads, scale, scale * LOG2E, *row_strides(gated.first_visible), BV=BV,
        BT=t.BT, BS=t.BS, KU=KEY_UNIT, STAGES=t.num_stages, **bounded, num_warps=t.num_warps, maxnreg=t.maxnreg,
    )  # fmt: skip
    M = t.BT // 16
    if (wanted.queries and not tiled) or wanted.log_decay:
        path_finish_kernel[(Tp // ROW_UNIT * B * H,)](
            dq_tiles, d_levels.q, sums, p_w, d_key, limits[1], B, T, Tq, 0 if tiled else n, scale, H=H, K=K, BK=BK,
            BT=t.BT, M=M, N=t.num_warps // M, HAS_ROW=row_sums is not None, **flags, num_warps=8,
        )  # fmt: skip
    tiles = QueryGradientTiles(dq_tiles, scale, t.num_warps) if tiled else None
    return d_block, d_levels, tiles
