"""HGRN2's forget gate, which gives the keys too, and the lower bounds that the layers of a model share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.sums import running_sum
from attnzoo.layer.gates.base import GateProjection, Sizes, Write
from attnzoo.layer.stream import Stream
from attnzoo.precision import PreciseModule, fill, wide


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
    place: Tensor

    def __init__(self, sizes: Sizes, *, lower_bounds: bool = True) -> None:
        super().__init__(sizes)
        self.bounded = lower_bounds
        if sizes.num_kv_heads != sizes.num_heads:
            raise ValueError(
                f"num_kv_heads: expected num_heads = {sizes.num_heads} (the gate of each head is its key), "
                f"got {sizes.num_kv_heads}"
            )
        self.shared: tuple[LowerBounds] | None = None  # in a tuple: the module belongs to the model, not here
        self.register_buffer("place", None, persistent=False)  # among them; a tensor, so that layers share a graph

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        z = wide(k)
        if self.shared is None:
            return Gate(log_diag=F.logsigmoid(z)), None
        [bounds] = self.shared
        low = bounds().index_select(0, self.place).view(self.sizes.num_heads, -1)
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
        self.gates = tuple(gates)  # in a tuple: they belong to the layers
        for gate in gates:
            gate.shared = (self,)
        self._tell_places(self.logits.device)

    def reset_parameters(self) -> None:
        fill(self.logits, torch.zeros_like(self.logits))
        for place, gate in enumerate(self.gates):
            fill(gate.place, torch.tensor([place]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also restore the gates' places, which no checkpoint holds, where the model was made on the meta device."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._tell_places(state_dict.get(f"{prefix}logits", self.logits).device)

    def _tell_places(self, device: torch.device) -> None:
        for place, gate in enumerate(self.gates):
            told = gate.place is None or gate.place.is_meta
            gate.place = torch.tensor([place], device=device if told else gate.place.device)

    def forward(self) -> Tensor:
        """``[layers, H K]``, from 0 in the first row to below 1 in the last."""
        shares = wide(self.logits).softmax(0)
        return running_sum(shares, 0) - shares[:1]


def lower_bounds(layers: Sequence[nn.Module]) -> LowerBounds | None:
    """The bounds that the gates of ``layers`` share that take some, or None where none does."""
    gates = [part for layer in layers for part in layer.modules() if isinstance(part, BoundedForgetGate)]
    bounded = [gate for gate in gates if gate.bounded]
    return LowerBounds(bounded) if bounded else None
