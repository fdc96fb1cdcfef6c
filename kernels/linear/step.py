"""A whole step of a linear recurrence, from the products with weights to the normed and gated output of each head."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.validation import check_flag, check_scale
from attnzoo.errors import unknown
from attnzoo.kernels.common.argument_checks import check_shapes, check_tensors
from attnzoo.kernels.common.parts import Norm
from attnzoo.kernels.linear.api import triton_unavailable
from attnzoo.kernels.linear.parts import MAPS, DecayLogits, RecurrentParts

NO_PARTS = RecurrentParts()


@torch.no_grad()
def linear_step(
    q: Tensor, k: Tensor, v: Tensor, *, state: Tensor, active: Tensor, parts: RecurrentParts = NO_PARTS
) -> Tensor:
    """``S <- S A + v k^T`` with one new token of each sequence, in place, and what comes before and after it.

    q, k and v are convolved, q and k mapped and normed; the state decays, is erased along k and written to; the output
    ``S (scale q)`` is normed and gated. One launch, a second where heads share a norm, or q and k, or v. Each state is
    read and written once. No host synchronisation and no gradient; all that happens in between is float32.

    Args:
        q: [B, 1, H', K], k: [B, 1, G', K], v: [B, 1, G, V], of one dtype, each with its heads side by side; their
            numbers divide H.
        state: [B, H, K, V] float32, contiguous.
        active: [B] int32, 0 for sequences that get no token: nothing of them changes, and their output is 0.
        parts: what is done to the token and its output, and how the state changes.

    Returns:
        [B, 1, H, V] in the dtype of v.

    Raises:
        ValueError: a shape, a dtype, a device or an option is wrong, or no kernel can run here.
        TypeError: something that is no tensor, or no part.
    """
    conv, maps, norm, decay, writes, diag, beta, _, skip, finish, gate_first, groups, scale = parts
    rows = {"q": q, "k": k, "v": v, "state": state}
    check_tensors({**rows, "active": active, "beta": beta, "skip": skip}, needed=(*rows, "active"))
    for name, x in rows.items():
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 axes, got shape {tuple(x.shape)}")
    (B, T, HQ, K), HK, (G, V), H = q.shape, k.shape[2], v.shape[2:], state.shape[1]
    if T != 1:
        raise ValueError(f"q: expected one token of each sequence, got T={T}")
    for name, heads in (("q", HQ), ("k", HK), ("v", G)):
        if not heads or H % heads:
            raise ValueError(f"{name}: expected a divisor of the state's H={H} heads, got {heads}")
    if not isinstance(maps, tuple | list) or len(maps) != 2:
        raise ValueError(f"maps: expected two names, of the maps of q and of k, got {maps!r}")
    for name in maps:
        if name not in MAPS:
            raise unknown("maps", name, MAPS)
    for name, flag in (("writes", writes), ("gate_first", gate_first)):
        check_flag(name, flag)
    if norm is not None and not isinstance(norm, Norm | float | int):
        raise TypeError(f"norm: expected a Norm, a number or None, got {norm!r}")
    for name, given, able in (("decay", decay, DecayLogits | Tensor), ("diag", diag, DecayLogits)):
        if given is not None and not isinstance(given, able):
            raise TypeError(f"{name}: expected a Decay{' or a tensor' * (name == 'decay')} or None, got {given!r}")
    if writes and not (isinstance(decay, DecayLogits) and decay.opposite):
        raise ValueError("writes: expected False unless the decay is made of a softplus (opposite), got True")
    if groups is not None and (groups < 1 or H % groups):
        raise ValueError(f"groups: expected a divisor of H={H}, or None, got {groups}")
    check_scale(scale)
    side = {"q": (q, HQ * K), "k": (k, HK * K), "v": (v, G * V)}
    size = 0 if conv is None else conv[0].weight.shape[-1]
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype | None]] = {
        "q": (q, (B, 1, HQ, K), None), "k": (k, (B, 1, HK, K), q.dtype), "v": (v, (B, 1, G, V), q.dtype),
        "state": (state, (B, H, K, V), torch.float32), "active": (active, (B,), torch.int32),
        "beta": (beta, (B, 1, G), None), "skip": (skip, (H,), None), "finish.gate": (finish.gate, (B, 1, H * V), None),
        "finish.scale": (finish.scale, _shape(finish.scale, H, V), None),
    }  # fmt: skip
    if isinstance(norm, Norm):
        wanted |= {"norm.q": (norm.q, _shape(norm.q, HQ, K), None), "norm.k": (norm.k, _shape(norm.k, HK, K), None)}
    if isinstance(decay, Tensor):
        wanted["decay"] = decay, (H,), None
    for name, made, channels in (("decay", decay, H), ("diag", diag, H * K)):
        if isinstance(made, DecayLogits):
            wanted |= {
                f"{name}.logits": (made.logits, (B, 1, channels), None), f"{name}.bias": (made.bias, (channels,), None),
                f"{name}.log_a": (made.log_a, (H,), None),
            }  # fmt: skip
    for (name, (_, X)), one in zip(side.items(), conv or (), strict=False):
        wanted |= {
            f"conv.{name}.weight": (one.weight, (X, size), None), f"conv.{name}.bias": (one.bias, (X,), None),
            f"conv.{name}.before": (one.before, (B, size - 1, X), None),
        }  # fmt: skip
    check_tensors({name: x for name, (x, _, _) in wanted.items()})
    check_shapes(wanted, strided=("q", "k", "v", "beta", "finish.gate", "decay.logits", "diag.logits"))
    for name in ("q", "k", "v", "beta", "finish.gate", "decay.logits", "diag.logits"):
        given = wanted[name][0] if name in wanted else None
        if given is not None and not given[0, 0].is_contiguous():
            raise ValueError(f"{name}: expected the numbers of a token side by side, got strides {given.stride()}")
    kinds = {(one.silu, one.bias is None) for one in conv or ()}
    if len(kinds) > 1:
        raise ValueError("conv: expected biases for q, k and v or for none, and one activation, got several kinds")
    why = triton_unavailable(q, v)
    if why:
        raise ValueError(f"q, v: {why}")
    from .whole import whole_step

    return whole_step(q, k, v, state, active, parts)


def _shape(scale: Tensor | None, heads: int, dim: int) -> tuple[int, ...]:
    """The shape of a norm's scale: [heads, dim] of each head, [dim] of one for all."""
    return (dim,) if scale is not None and scale.ndim == 1 else (heads, dim)
