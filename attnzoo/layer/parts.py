"""Parts of an attention layer: norms, feature maps, the short convolution, the key/value shift."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.layer.precision import wide
from attnzoo.layer.stream import Stream


def l2_normalize(x: Tensor) -> Tensor:
    """Unit vectors along the last axis, computed in float32; a zero vector stays zero."""
    return F.normalize(wide(x), dim=-1, eps=1e-6).to(x.dtype)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,  # Katharopoulos et al., 2020
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "swish": F.silu}


class HeadNorm(nn.Module):
    """Normalise each head's channels; one learnable scale per channel of every head.

    Args:
        heads: number of heads.
        dim: channels per head.
        kind: ``"rms"`` (root mean square) or ``"group"`` (mean and variance, as GroupNorm with one group per head).
        eps: added to the mean square.
    """

    def __init__(self, heads: int, dim: int, kind: str = "rms", eps: float = 1e-6) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(heads, dim))
        self.weight._no_weight_decay = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, heads, dim]``, same shape and dtype out; computed in at least float32."""
        dtype = x.dtype
        x = wide(x)
        if self.kind == "group":
            x = x - x.mean(-1, keepdim=True)
        return (F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight).to(dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, kind={self.kind!r}"


class ShortConvolution(nn.Module):
    """A causal convolution over the last ``size`` tokens of each channel, then SiLU (Fu et al., 2023; Mamba).

    Raises:
        ValueError: ``size < 1``.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size: expected a convolution over at least 1 token, got {size}")
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.size**-0.5), self.size**-0.5)

    def forward(self, x: Tensor, stream: Stream, name: str) -> Tensor:
        """``[B, T, channels]``, same shape out; ``name`` is its key in the cache."""
        return stream.windowed(name, x, self.size, self._convolve)

    def _convolve(self, full: Tensor) -> Tensor:
        T = full.shape[1] - self.size + 1
        weight = self.weight.to(full.dtype)
        if T == 1:  # a step: two kernels in place of two per token of the window
            return F.silu((full * weight.mT).sum(1, keepdim=True))
        out = full[:, :T] * weight[:, 0]
        for i in range(1, self.size):
            out = out + full[:, i : i + T] * weight[:, i]
        return F.silu(out)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, size={self.size}"


class Shift(nn.Module):
    """Data-dependent shift: ``y_t = a_t x_{t-1} + (1 - a_t) x_t``, ``a_t = sigmoid(w h_t)`` per head.

    Source: Lin et al., 2025, FoX, section 3 and appendix A (KV-shift of the Pro block).
    """

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.proj = nn.Linear(hidden_size, heads, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.proj.weight, std=0.02)

    def forward(self, x: Tensor, hidden: Tensor, stream: Stream, name: str) -> Tensor:
        """x ``[B, T, heads * dim]``, hidden ``[B, T, D]``; same shape as x out."""
        a = self.proj(hidden).sigmoid().to(x.dtype)[..., None]
        before, now = (y.unflatten(-1, (self.heads, -1)) for y in (stream.before(name, x), x))
        shifted: Tensor = now.lerp(before, a).flatten(-2)
        return shifted
