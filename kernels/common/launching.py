"""Arguments of every launch: the kind of gate, tile widths, strides, descriptors, the precision of products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.sums import power_of_2 as power_of_2
from attnzoo.kernels.common.constants import GATE_CONST, GATE_FULL, GATE_NONE
from attnzoo.kernels.common.device import float32_products


def gate_kind(log_decay: Tensor | None) -> int:
    """GATE of a launch: no gate, one per head [H], or one per token and head [B, S, H]."""
    return GATE_NONE if log_decay is None else GATE_CONST if log_decay.ndim == 1 else GATE_FULL


def head_block(dim: int) -> int:
    """Smallest tile width that holds a head dim (tensor cores need 16)."""
    return max(16, power_of_2(dim))


def cdiv(n: int, size: int) -> int:
    """The number of pieces of ``size`` that hold n."""
    return -(-n // size)


def row_strides(first: Tensor | None) -> tuple[int, int]:
    """Batch and head strides of first visible keys [B or 1, H or 1, S]; broadcast dims have stride 0."""
    if first is None:
        return 0, 0
    return first.stride(0) * (first.shape[0] > 1), first.stride(1) * (first.shape[1] > 1)


def valid_strides(valid: Tensor | None) -> tuple[int, int]:
    """Strides of valid [B, S]; 0 for what stands in for it, as strides that vary with lengths would compile anew."""
    return (0, 0) if valid is None else (valid.stride(0), valid.stride(1))


def retention_kind(retention: Tensor | None) -> int:
    """Numbers of each key in retention [B, S, G, 1 or 2]; 0 without."""
    return 0 if retention is None else retention.shape[3]


def retention_strides(retention: Tensor | None) -> tuple[int, int, int]:
    """Strides of retention [B, S, G, 1 or 2] but the last; 0 for what stands in for it."""
    return (0, 0, 0) if retention is None else (retention.stride(0), retention.stride(1), retention.stride(2))


def per_head(x: Tensor | None) -> Tensor | None:
    """A number of each head [H] as kernels read it, one beside the next; a gate of each token, or None, as it is."""
    return x if x is None or x.ndim != 1 else x.contiguous()


def addressable(x: Tensor) -> Tensor:
    """x [B, R, ...], copied where kernels cannot read it in place.

    That is where its last dim is strided, or tokens lie so far apart that offsets within a tile of 128 leave 32 bits.
    """
    near = x.shape[1] == 1 or x.stride(1) < 2**24
    return x if x.stride(-1) == 1 and near else x.contiguous()


def side_by_side(x: Tensor) -> Tensor:
    """x [B, T, ...], copied unless the numbers of a token lie side by side."""
    return x if x[0, 0].is_contiguous() else x.contiguous()


def can_describe(*xs: Tensor) -> bool:
    """Whether tensor descriptors can address these [B, R, H, D] tensors: 16-byte strides and base, no broadcast."""
    strides = [n * x.element_size() for x in xs for n in x.stride()[:3]]
    return all(n > 0 and n % 16 == 0 for n in strides) and all(x.data_ptr() % 16 == 0 for x in xs)


def describable(x: Tensor) -> Tensor:
    """x [B, R, H, D], copied where kernels cannot read it in place or tensor descriptors cannot address it.

    A contiguous view may begin between 16-byte addresses: ``contiguous()`` would give it as it is.
    """
    x = addressable(x)
    return x if can_describe(x) else x.clone(memory_format=torch.contiguous_format)


def tile_descriptor(x: Tensor, rows: int, width: int | None = None) -> Any:
    """Descriptor of x [B, R, H, D] for tiles of ``rows`` tokens of one head, ``width`` (or what holds D) wide."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from attnzoo.kernels.common.launched import descriptor

    return descriptor(TensorDescriptor, x, [1, rows, 1, width or head_block(x.shape[3])])


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of float32 products: torch's own setting decides, as for torch.matmul."""
    rounds = dtype == torch.float32 and float32_products() in ("tf32", "high", "medium")
    return "tf32" if rounds else "ieee"
