"""What is never rounded to 16 bits: sums, and as parameters angles, slopes, decays, step sizes, biases of gates.

An angle is multiplied by the position, and a log-decay by the distance: the rounding of either grows with the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of reference computations on inputs of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()  # written out: a call less at each use


class PreciseModule(nn.Module):
    """A module that keeps some of its own tensors in at least float32, whatever dtype the model is cast to.

    ``.to(torch.bfloat16)``, ``.half()`` and their like move such a tensor to the device they name and leave its dtype;
    ``.double()`` makes it float64, and ``load_state_dict(assign=True)`` of a checkpoint in 16 bits widens its numbers.
    Weight decay spares them. FSDP casts all parameters of a group alike: give gates a group of their own
    (docs/how-to/many_gpus.md).
    """

    def __init__(self) -> None:
        super().__init__()
        self._least: dict[str, torch.dtype] = {}

    @property
    def precise(self) -> tuple[str, ...]:
        """The names of the module's tensors that ``.to(dtype)`` never rounds."""
        return tuple(self._least)

    def keep(self, name: str, value: Tensor, *, trainable: bool = False, least: torch.dtype = torch.float32) -> None:
        """Register ``value`` as a parameter (without weight decay) or as a buffer.

        Args:
            name: name of the attribute.
            value: initial values; :func:`fill` restores them in ``reset_parameters``.
            trainable: whether it is a parameter, not a buffer.
            least: the narrowest dtype that it may have.
        """
        value = value.to(torch.promote_types(torch.get_default_dtype(), least))
        self._least[name] = least
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept: list[tuple[Tensor, torch.dtype]] = []
        for name, least in self._least.items():
            own = getattr(self, name)
            kept += [(x, least) for x in (own, own.grad if own.is_leaf else None) if x is not None]

        def at_least(x: Tensor) -> Tensor:
            out = fn(x)
            for own, least in kept:
                if own is x and torch.promote_types(out.dtype, least) != out.dtype:
                    return x.to(device=out.device, dtype=least)
            return out

        return super()._apply(at_least, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the weights; with ``assign=True`` widen the checkpoint's tensors that are kept precise."""
        for name, least in self._least.items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and torch.promote_types(given.dtype, least) != given.dtype:
                # in place, as hooks expect; load_state_dict has copied the dictionary
                state_dict[prefix + name] = given.detach().to(torch.promote_types(given.dtype, least))
        super()._load_from_state_dict(state_dict, prefix, *args)


class GateAffine(PreciseModule):
    """A linear map inside a gate, whose bias stays in at least float32.

    It is no ``nn.Linear``, so that scripts which reinitialise those leave the gates' initial values alone.

    Args:
        inputs: number of channels of x.
        outputs: number of logits.
        bias: initial biases; None for a map without a bias.
        std: standard deviation of normal initial weights; None for the uniform ones of ``nn.Linear``.
    """

    bias: Tensor  # or None, as in nn.Linear

    def __init__(self, inputs: int, outputs: int, *, bias: float | None = 0.0, std: float | None = 0.02) -> None:
        super().__init__()
        self.in_features, self.out_features, self.start, self.std = inputs, outputs, bias, std
        plain = nn.Linear(inputs, outputs, bias is not None)
        self.weight = plain.weight
        self.register_parameter("bias", None)
        if bias is not None:
            self.keep("bias", plain.bias.detach(), trainable=True)

    def reset_parameters(self) -> None:
        """Restore the initial distribution of weights and biases."""
        if self.std is None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        else:
            nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None and self.start is not None:
            nn.init.constant_(self.bias, self.start)

    def forward(self, x: Tensor) -> Tensor:
        """``W x + b``; with a bias in at least float32, added to the product in float32 where x has 16 bits.

        Args:
            x: ``[..., inputs]``.
        """
        bias = self.bias
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if bias is None or (x.dtype == bias.dtype and not autocast):
            return F.linear(x, self.weight, bias)
        return self.biased(self.unbiased(x))

    def biased(self, product: Tensor) -> Tensor:
        """``W x + b`` of the product ``W x``."""
        bias = self.bias
        return product if bias is None else product + bias

    def unbiased(self, x: Tensor) -> Tensor:
        """``W x``, in the dtype of x."""
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


LinearMap = nn.Linear | GateAffine


@torch.no_grad()
def fill(target: Tensor, values: Tensor) -> None:
    """Write ``values`` into a parameter or buffer on any device, also a sharded one."""
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        values = distribute_tensor(values.to(target.device, target.dtype), target.device_mesh, target.placements)
    target.copy_(values)
