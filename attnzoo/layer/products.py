"""Products of the same rows with several weights, whose gradients of the rows are added up as they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.values import in_transform, records
from attnzoo.layer.modules import on_kernels, untouched
from attnzoo.precision import GateAffine

WHOLE = "q, k, v"
ROWS = "x"  # the name under which the rows stand beside their products
ALIGNED = 8  # numbers of 16 bits, at which each wide map's part of a row begins: 16 bytes
FILLING = "zeros"  # rows that are no map's
PADDED = 64  # numbers of which rows are a multiple, so that Inductor pads none, and what reads a part needs no copy
COPIED = 1 << 24  # numbers of weights of one product, held for its gradient, where autocast does not copy them anyhow


class _Products(torch.autograd.Function):
    """Of rows ``[..., D]`` with weights ``[X, D]``: a node and a sum in place of a node and a sum for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.device = x.device.type
        rows = x.contiguous()
        return tuple([F.linear(rows, one) for one in weights])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_autocast_enabled(ctx.device):  # now; the products need not have been under it
            with torch.autocast(ctx.device, enabled=False):
                return _Products.backward(ctx, *grads)
        x, *weights = ctx.saved_tensors
        of_x, *of_weights = ctx.needs_input_grad
        rows, dx = x.flatten(0, -2), None
        found: list[Tensor | None] = []
        for one, dy, wanted in zip(weights, grads, of_weights, strict=True):
            if dy is None:
                found.append(None)
                continue
            dy = dy.flatten(0, -2)
            found.append(torch.mm(dy.t(), rows) if wanted else None)
            if of_x:
                dx = torch.mm(dy, one) if dx is None else dx.addmm_(dy, one)
        return dx if dx is None else dx.view(x.shape), *found


def products(x: Tensor, maps: Mapping[str, nn.Module], impl: str, whole: Sequence[str] = ()) -> dict[str, Tensor]:
    """The products of rows ``x [B, T, D]`` with weights of a layer, by name; not of those that must be called.

    Thin maps, of gates, are one product. Wide ones are taken where a gradient is recorded: as one product with the thin
    ones in compiled code, whose launches take the host's time (but see ``COPIED``), and else for the sums of their
    gradients of x. The products of maps ``whole``, the first wide ones, are wanted as one tensor: where it is made, its
    name is ``WHOLE``.
    """
    weights: dict[str, Any] = {
        name: part.weight for name, part in maps.items()
        if untouched(part) and (type(part) is GateAffine or (type(part) is nn.Linear and part.bias is None))
    }  # fmt: skip
    if not weights or not on_kernels(impl, x, *weights.values()):
        return {}
    thin = [name for name, part in maps.items() if type(part) is GateAffine]
    if len(thin) < 2 or not all(name in weights for name in thin):
        thin = []
    groups: list[Sequence[str]] = [thin] if thin else []
    wide = [name for name in weights if name not in thin]
    autocast = torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64  # which it leaves as it is
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype

    def join(names: Sequence[str]) -> bool:
        """Whether wide maps may be one product, for whose gradient a copy of their weights is held."""
        kinds, numbers = {weights[name].dtype for name in names}, sum(weights[name].numel() for name in names)
        return len(kinds) == 1 and (dtype not in kinds or numbers <= COPIED)  # autocast makes one of each

    compiled = torch.compiler.is_compiling()
    whole = [*whole] if whole and set(whole) <= {*wide} and join(whole) else []
    if in_transform() or not records(x, *weights.values()):
        pass
    elif compiled:
        gates = [name for name in weights if type(maps[name]) is GateAffine]
        every = [name for name in wide if name not in gates and len(weights[name]) % ALIGNED == 0] + gates
        if len(every) > max(1, len(gates)) and join(every):
            weights[FILLING] = weights[every[0]].new_zeros(
                -sum(len(weights[name]) for name in every) % PADDED, x.shape[-1]
            )
            groups = [[*every, FILLING]]
    else:
        if whole:
            groups.append(whole)
            wide = [name for name in wide if name not in whole]
        groups += zip(wide, strict=True)  # each by itself
    if sum(map(len, groups)) < 2:
        return {}
    of = [weights[names[0]] if len(names) == 1 else torch.cat([weights[name] for name in names]) for names in groups]
    if autocast:
        x, of = x.to(dtype), [one.to(dtype) for one in of]
    if {one.dtype for one in of} != {x.dtype}:
        return {}
    alone = compiled or len(of) < 2
    made = [F.linear(x, one) for one in of] if alone else _Products.apply(x, *of)  # type: ignore[no-untyped-call]
    known: dict[str, Tensor] = {}
    for group, y in zip(groups, made, strict=True):
        if len(group) == 1:
            known[group[0]] = y
            continue
        sizes, n = [len(weights[name]) for name in group], len(whole)
        if whole and [*group[:n]] == whole:
            group, sizes = [WHOLE, *group[n:]], [sum(sizes[:n]), *sizes[n:]]
        known.update(zip(group, y.split(sizes, -1) if len(group) > 1 else (y,), strict=True))
    known.pop(FILLING, None)
    return known
