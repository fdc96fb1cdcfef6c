"""HGRN2's forget gate, which also makes the keys, and the lower bounds that a model's layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.sums import running_sum
from attnzoo.kernels.linear import DecayLogits
from attnzoo.layer.gates.base import GateProjection, Keyed, Sizes, Write
from attnzoo.layer.modules import log_decays
from attnzoo.layer.stream import Stream
from attnzoo.precision import PreciseModule, fill, wide


class BoundedForgetGate(GateProjection):
    """``f_t = l + (1 - l) sigmoid(z_t)`` per channel, and ``1 - f_t`` for the key (Qin et al., 2024, HGRN2, section 3).

    ``z`` is the output of the layer's key projection. The lower bound ``l`` is 0 in a layer by itself and in the first
    layer of a model; see :class:`LowerBounds`.

    Args:
        lower_bounds: whether later layers of a model have a lower bound.

    Raises:
        ValueError: fewer key/value heads than query heads.
    """

    provides = ("log_diag",)
    makes_keys = True
    place: Tensor

    def __init__(self, sizes: Sizes, *, lower_bounds: bool = True) -> None:
        super().__init__(sizes)
        self.bounded = lower_bounds
        if sizes.num_kv_heads != sizes.num_heads:
            raise ValueError(
                f"num_kv_heads: expected num_heads = {sizes.num_heads} (the gate of each head is its key), "
                f"got {sizes.num_kv_heads}"
            )
        self.shared: tuple[LowerBounds] | None = None  # a tuple keeps torch from registering the model's module here
        self.register_buffer("place", None, persistent=False)  # a tensor, so that layers share a compiled graph

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        if self.shared is None:
            return self._keyed(log_decays(DecayLogits(k.flatten(2)), self.impl)[0].view(k.shape), k)
        z = wide(k)
        [bounds] = self.shared
        low = bounds().index_select(0, self.place).view(self.sizes.num_heads, -1)
        low = low.clamp(torch.finfo(low.dtype).tiny, 1 - torch.finfo(low.dtype).eps)  # keeps the logarithms finite
        odds = torch.log1p(-low) - torch.logaddexp(z, low.log())  # log((1 - f) / f) without cancellation or overflow
        return self._keyed(-torch.logaddexp(odds, odds.new_zeros(())), k)

    @staticmethod
    def _keyed(log_diag: Tensor, k: Tensor) -> tuple[Gate, Write]:
        return Gate(log_diag=log_diag), Keyed(-torch.expm1(log_diag).to(k.dtype))


class LowerBounds(PreciseModule):
    """Lower bounds of the layers' forget gates: the running sum, over earlier layers, of a learned softmax.

    Args:
        gates: the gates of the model's layers, in order; each gets its index.

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
        self.gates = tuple(gates)  # a tuple keeps torch from registering the layers' modules here
        for gate in gates:
            gate.shared = (self,)
        self._tell_places(self.logits.device)

    def reset_parameters(self) -> None:
        fill(self.logits, torch.zeros_like(self.logits))
        for place, gate in enumerate(self.gates):
            fill(gate.place, torch.tensor([place]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the weights, and set the gates' indices, which no checkpoint holds, where the model was made on the meta
        device."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._tell_places(state_dict.get(f"{prefix}logits", self.logits).device)

    def _tell_places(self, device: torch.device) -> None:
        for place, gate in enumerate(self.gates):
            told = gate.place is None or gate.place.is_meta
            gate.place = torch.tensor([place], device=device if told else gate.place.device)

    def forward(self) -> Tensor:
        """The lower bounds ``[layers, H K]``, rising from 0 in the first layer to below 1 in the last."""
        shares = wide(self.logits).softmax(0)
        return running_sum(shares, 0) - shares[:1]


def lower_bounds(layers: Sequence[nn.Module]) -> LowerBounds | None:
    """The lower bounds shared by the gates of ``layers`` that take bounds; None where no gate does."""
    gates = [part for layer in layers for part in layer.modules() if isinstance(part, BoundedForgetGate)]
    bounded = [gate for gate in gates if gate.bounded]
    return LowerBounds(bounded) if bounded else None
