"""HGRN2's forget gate, which gives the keys too, and the lower bounds that the layers of a model share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.layer.gates.base import GateProjection, Sizes, Write
from attnzoo.layer.precision import PreciseModule, fill, wide
from attnzoo.layer.stream import Stream


class BoundedForgetGate(GateProjection):
    """``f_t = l + (1 - l) sigmoid(z_t)`` per channel, and ``1 - f_t`` for the key (Qin et al., 2024, HGRN2, section 3).

    ``z`` is what the layer's key projection gives. The lower bound ``l`` is 0 in a layer by itself and in the first
    layer of a model; see :class:`LowerBounds`.

    Args:
        lower_bounds: whether later layers of a model have one.

    Raises:
        ValueError: fewer key/value heads than query heads.
    """

    provides = ("log_diag",)

    def __init__(self, sizes: Sizes, *, lower_bounds: bool = True) -> None:
        super().__init__(sizes)
        self.bounded = lower_bounds
        if sizes.num_kv_heads != sizes.num_heads:
            raise ValueError(
                f"num_kv_heads: expected num_heads = {sizes.num_heads} (the gate of each head is its key), "
                f"got {sizes.num_kv_heads}"
            )
        self.shared: tuple[LowerBounds, int] | None = None  # in a tuple: the module belongs to the model, not here

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        z = wide(k)
        if self.shared is None:
            return Gate(log_diag=F.logsigmoid(z)), None
        bounds, layer = self.shared
        low = bounds()[layer].view(self.sizes.num_heads, -1)
        low = low.clamp(torch.finfo(low.dtype).tiny, 1 - torch.finfo(low.dtype).eps)  # with finite logarithms
        odds = torch.log1p(-low) - torch.logaddexp(z, low.log())  # log((1 - f) / f): no sum cancels, no exp overflows
        return Gate(log_diag=-torch.logaddexp(odds, odds.new_zeros(()))), None

    def keys(self, k: Tensor, gate: Gate) -> Tensor:
        assert gate.log_diag is not None
        return -torch.expm1(gate.log_diag).to(k.dtype)


class LowerBounds(PreciseModule):
    """Lower bounds of the forget gates, rising from 0 in the first layer: sums over the layers before of a softmax.

    Args:
        gates: of the model's layers, in order; each is told its place.

    Raises:
        ValueError: gates of different widths.
    """

    logits: Tensor

    def __init__(self, gates: Sequence[BoundedForgetGate]) -> None:
        super().__init__()
        widths = sorted({gate.sizes.num_heads * gate.sizes.head_dim for gate in gates})
        if len(widths) > 1:
            raise ValueError(f"attention: expected one width of all gates with lower bounds, got {widths}")
        self.keep("logits", torch.zeros(len(gates), widths[0]), trainable=True)
        for place, gate in enumerate(gates):
            gate.shared = (self, place)

    def reset_parameters(self) -> None:
        fill(self.logits, torch.zeros_like(self.logits))

    def forward(self) -> Tensor:
        """``[layers, H K]``, from 0 in the first row to below 1 in the last."""
        shares = wide(self.logits).softmax(0)
        return shares.cumsum(0) - shares[:1]


def lower_bounds(layers: Sequence[nn.Module]) -> LowerBounds | None:
    """The bounds that the gates of ``layers`` share that take some, or None where none does."""
    gates = [part for layer in layers for part in layer.modules() if isinstance(part, BoundedForgetGate)]
    bounded = [gate for gate in gates if gate.bounded]
    return LowerBounds(bounded) if bounded else None
