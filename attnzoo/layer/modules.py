"""Parts of an attention layer: norms, feature maps, the short convolution, the key/value shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as every

from attnzoo.algebra.values import as_given
from attnzoo.kernels import convolution, linear, norms
from attnzoo.kernels.common.untraced import exporting
from attnzoo.kernels.linear import DecayLogits
from attnzoo.layer.dispatch import serves
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, fill, wide

UNIT_EPS = 1e-6  # repeated as a literal below: torch.compile(dynamic=True) makes symbols of global floats
PLAIN = (Tensor, nn.Parameter)


def on_kernels(impl: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels may compute a part of a layer of this ``impl`` from x and other tensors.

    On a GPU unless ``impl`` is ``"reference"``, and elsewhere where it is ``"triton"``; not while a program is
    exported, nor from tensors of another kind (sharded or quantised ones).
    """
    if impl == "reference" or not (x.is_cuda or impl == "triton"):
        return False
    return not exporting() and all(one is None or type(one) in PLAIN for one in (x, *others))


def untouched(part: nn.Module, moved: bool = False) -> bool:
    """Whether a module may be left out of a call that computes what it would: no hook waits for it or for every module,
    and nobody put a ``forward`` of their own into it; with ``moved`` accelerate's may be there, which moves weights."""
    own = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    forward = every._global_forward_hooks or every._global_forward_pre_hooks
    if own or forward or every._global_backward_hooks or every._global_backward_pre_hooks:
        return False
    return moved if "_hf_hook" in part.__dict__ else "forward" not in part.__dict__


def l2_normalize(x: Tensor, impl: str = "reference") -> Tensor:
    """``x / sqrt(|x|^2 + UNIT_EPS)`` along the last axis, in float32: of length 1, or less where x is very short."""
    if on_kernels(impl, x) and serves(impl, "L2 norms", norms.triton_unavailable(x)):
        if x.ndim == 4:
            return norms.head_norm(x, kind="l2", eps=1e-6)
        return norms.head_norm(x.flatten(2, -2), kind="l2", eps=1e-6).view(x.shape)
    x32 = wide(x)
    return (x32 * (x32.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def unit_vectors(q: Tensor, k: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """:func:`l2_normalize` of queries and keys."""
    apart = q.ndim != 4 or k.ndim != 4 or not on_kernels(impl, q, k)
    if not apart and serves(impl, "L2 norms", norms.triton_unavailable(q) or norms.triton_unavailable(k)):
        return norms.unit_vectors(q, k)
    return l2_normalize(q, impl), l2_normalize(k, impl)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``; in compiled code the derivative of torch's own assumes wrong strides."""
    return -F.logsigmoid(-x)


def product(linear: nn.Module, x: Tensor, apart: bool = True) -> tuple[Tensor, Tensor | None]:
    """The product of x with a weight, and the bias that is to be added where both come apart.

    Args:
        linear: of a user's own or with hooks: its output and None.
        apart: whether they are asked for apart.
    """
    own = isinstance(linear, GateAffine) and type(linear).forward is not GateAffine.forward
    comes_apart = hasattr(type(linear), "unbiased") and not own  # wrappers hand on attributes of what they wrap
    unbiased = getattr(linear, "unbiased", None) if apart and comes_apart and untouched(linear) else None
    return (linear(x), None) if unbiased is None else (unbiased(x), linear.bias)  # type: ignore[return-value]


def log_decays(of: DecayLogits, impl: str, steps: bool = False) -> tuple[Tensor, Tensor | None]:
    """The log decays that ``of`` describes, in at least float32, and with ``steps`` the softplus they are made of."""
    given = (of.logits, of.bias, of.log_a)
    if on_kernels(impl, *given) and serves(impl, "log decays", linear.decays_unavailable(of.logits)):
        return linear.log_decays(of, steps)
    x = wide(of.logits) if of.bias is None else wide(of.logits) + wide(of.bias)
    log = F.logsigmoid(-x if of.opposite else x)
    decay = log if of.factor == 1 else log * of.factor
    if of.log_a is not None:
        a = wide(of.log_a).exp()
        decay = decay * (a if len(a) == log.shape[-1] else a.repeat_interleave(log.shape[-1] // len(a)))
    return decay, -log if steps else None


def writes_fuse(impl: str, v: Tensor, write: Tensor) -> bool:
    """Whether a kernel multiplies values by their write strengths; a compiler does so beside what is done anyhow."""
    apart = not torch.compiler.is_compiling() and on_kernels(impl, v, write) and write.shape == v.shape[:3]
    return apart and serves(impl, "write strengths", linear.writing_unavailable(v))


def _identity(x: Tensor) -> Tensor:
    return x


def _elu_plus_one(x: Tensor) -> Tensor:  # Katharopoulos et al., 2020
    return F.relu(x) + x.clamp(max=0).exp()  # F.elu(x) + 1; see softplus for why not by F.elu


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "silu": F.silu,
    "relu": F.relu,
    "elu": _elu_plus_one,
}

CONV_ACTIVATIONS = ("silu", "identity")
ROTARY_ANGLES = ("rope", "retnet")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "swish": F.silu, "lora": _identity}


class HeadNorm(nn.Module):
    """A norm over each head's channels, or over several heads together, with a learned scale per channel.

    Args:
        heads: number of heads.
        dim: channels per head.
        kind: ``"rms"`` (root mean square) or ``"group"`` (mean and variance, as GroupNorm).
        eps: added to the mean square.
        groups: norm ``heads / groups`` heads together; None for each by itself.
        shared: one scale ``[dim]`` for all heads, instead of ``[heads, dim]``.
        bias: a learned bias per channel too, 0 at the start.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        kind: str = "rms",
        eps: float = 1e-6,
        groups: int | None = None,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.groups, self.impl = kind, eps, groups, "auto"
        self.weight = nn.Parameter(torch.ones(dim) if shared else torch.ones(heads, dim))
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if bias else None

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def fuses(self, x: Tensor, *others: Tensor | None) -> bool:
        """Whether a kernel norms x, and what is with it."""
        found = self.bias is None and on_kernels(self.impl, x, self.weight, *others)
        return found and serves(self.impl, "norms", norms.triton_unavailable(x, self.groups))

    def fused(self, x: Tensor, gate: norms.Gated | None = None, skip: norms.Skip | None = None) -> Tensor:
        """The normed x with a gate and with what is added first, by the kernel."""
        given = {"kind": self.kind, "eps": self.eps, "groups": self.groups}
        return norms.head_norm(x, self.weight, **given, gate=gate, skip=skip)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """The normed ``x [B, T, heads, dim]`` in its dtype; computed in at least float32."""
        if self.fuses(x):
            return self.fused(x)
        dtype, shape = x.dtype, x.shape
        x = wide(x)
        if self.groups is not None:
            x = x.reshape(*shape[:2], self.groups, shape[2] // self.groups * shape[3])
        if self.kind == "group":
            x = x - x.mean(-1, keepdim=True)
        x = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        x = (x if self.groups is None else x.reshape(shape)) * self.weight
        return (x if self.bias is None else x + self.bias).to(dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, kind={self.kind!r}"


class ShortConvolution(nn.Module):
    """A causal convolution over the last ``size`` tokens of each channel, then an activation (Fu et al., 2023; Mamba).

    Args:
        channels: number of channels, each convolved by itself.
        size: width in tokens.
        bias: a learned bias per channel.
        activation: ``"silu"`` or ``"identity"``.

    Raises:
        ValueError: ``size < 1``.
    """

    def __init__(self, channels: int, size: int, bias: bool = False, activation: str = "silu") -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size: expected a convolution over at least 1 token, got {size}")
        self.size, self.activation, self.impl = size, FEATURE_MAPS[activation], "auto"
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.size**-0.5), self.size**-0.5)

    def forward(self, x: Tensor, stream: Stream, name: str, up: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The convolved ``[B, T, channels]``.

        Args:
            x: ``[B, T, channels]``, or with ``up`` its low-rank input ``[B, T, rank]``.
            stream: the rows of the call.
            name: the key in the cache, which holds x.
            up: a linear map from rank to channels, applied first; a plain function, as accelerate's hooks would move a
                module.
        """
        if up is not None:
            return stream.windowed(name, x, self.size, partial(self._convolve_map, up))
        fuses = on_kernels(self.impl, x, self.weight, self.bias)
        if not fuses or not serves(self.impl, "short convolutions", self.unavailable(x)):
            return stream.windowed(name, x, self.size, self._convolve)
        if type(stream) is Stream and stream.valid is None:
            return self._fused(x, stream.continued(name, x, self.size - 1), stream.cu_seqlens)
        n = self.size - 1
        return stream.windowed(name, x, self.size, lambda full: self._fused(full[:, n:], full[:, :n]))

    def unavailable(self, x: Tensor) -> str:
        """Why no kernel convolves x, or ""."""
        if self.activation not in (F.silu, _identity):
            return f"expected a SiLU or no activation, got {self.activation}"
        return convolution.triton_unavailable(x, self.weight)

    def _fused(self, x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
        """The convolution by the kernel."""
        given = {"before": before, "cu_seqlens": cu_seqlens}
        return convolution.causal_convolution(x, self.weight, self.bias, **given, silu=self.activation is F.silu)

    def _convolve_map(self, up: Callable[[Tensor], Tensor], low: Tensor) -> Tensor:
        """The convolution of ``up`` times ``low [B, size - 1 + T, rank]``, ``[B, T, channels]``.

        Several tokens are one matrix product in at least float32, since phases sum its rounding errors.
        """
        T = low.shape[1] - self.size + 1
        if T == 1:
            return self._convolve(up(low))
        whole = up(torch.eye(low.shape[2], dtype=low.dtype, device=low.device))  # [rank, channels]
        weight = wide(self.weight).mT[:, None] * wide(whole)  # [size, rank, channels]
        windows = torch.cat([low[:, i : i + T] for i in range(self.size)], -1)
        with as_given(low):
            return self._finish(wide(windows) @ weight.flatten(0, 1))

    def _convolve(self, full: Tensor) -> Tensor:
        """The convolution of ``[B, size - 1 + T, channels]``, earlier tokens included, ``[B, T, channels]``."""
        T, bias = full.shape[1] - self.size + 1, self.bias
        weight = self.weight.to(full.dtype)
        if T == 1:  # a step: two operations instead of one per token of the window
            out = (full * weight.mT).sum(1, keepdim=True)
        else:
            first, *later = weight.unbind(1)
            start = full[:, :T]
            out = start * first if bias is None else torch.addcmul(bias.to(full.dtype), start, first)
            for i, one in enumerate(later, 1):
                out = out.addcmul(full[:, i : i + T], one)
            return self.activation(out)
        return self._finish(out)

    def _finish(self, out: Tensor) -> Tensor:
        return self.activation(out if self.bias is None else out + self.bias.to(out.dtype))

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, size={self.size}"


class Latent(nn.Module):
    """The input of the projections to keys and values in multi-head latent attention: a normed low-rank map of x.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; here a cache holds the keys and values, not this.

    Args:
        hidden_size: D.
        rank: channels of the map.
        shared: channels of every key, its first ones, that come straight from x and are the same for all heads.
        heads: of the keys.
    """

    def __init__(self, hidden_size: int, rank: int, shared: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.norm = nn.RMSNorm(rank, eps=1e-6)
        self.shared = nn.Linear(hidden_size, shared, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, rank]`` for x ``[B, T, D]``."""
        return self.norm(self.down(x))  # type: ignore[no-any-return]

    def keys(self, own: Tensor, x: Tensor) -> Tensor:
        """Whole keys ``[B, T, heads * K]`` from the channels that are each head's own, and x."""
        if self.shared is None:
            return own
        own = own.unflatten(-1, (self.heads, -1))
        shared = self.shared(x)[..., None, :].expand(*own.shape[:-1], -1)
        return torch.cat([shared, own], -1).flatten(-2)


class TokenMix(nn.Module):
    """Several mixtures of each token with the one before, ``x_t + m (x_{t-1} - x_t)`` with learned m per channel.

    Source: Peng et al., 2025, RWKV-7, section 4.1; m of channel i of D is ``1 - (i / D)^p`` at the start.

    Args:
        hidden_size: D.
        powers: p of each mixture.
    """

    def __init__(self, hidden_size: int, powers: Sequence[float]) -> None:
        super().__init__()
        self.powers = tuple(powers)
        self.weight = nn.Parameter(torch.empty(len(self.powers), hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        place = torch.arange(self.weight.shape[1]) / self.weight.shape[1]
        fill(self.weight, torch.stack([1 - place**power for power in self.powers]))

    def forward(self, x: Tensor, stream: Stream, name: str) -> list[Tensor]:
        """The mixtures of ``x [B, T, D]``, each ``[B, T, D]``."""
        before = stream.before(name, x)
        return [x.lerp(before, one) for one in self.weight.to(x.dtype)]


class ValueResidual(nn.Module):
    """The mixture of v with the first layer's v, ``v + sigmoid(.) (v_first - v)``, with a low-rank map of x inside.

    Source: Peng et al., 2025, RWKV-7, section 4.1.

    Args:
        hidden_size: D.
        rank: of the map.
        channels: of v, of all heads.
    """

    def __init__(self, hidden_size: int, rank: int, channels: int) -> None:
        super().__init__()
        self.down = GateAffine(hidden_size, rank, bias=None)
        self.up = GateAffine(rank, channels, bias=0.73)

    def reset_parameters(self) -> None:
        self.down.reset_parameters()
        self.up.reset_parameters()

    def forward(self, v: Tensor, x: Tensor, first: Sequence[Tensor] | None) -> Tensor:
        """The mixed ``v [B, T, channels]``.

        Args:
            x: the input of the projection to v, ``[B, T, D]``.
            first: the first layer's v, alone in a list.

        Raises:
            ValueError: no such list, or a v of another width.
        """
        if not first or first[0].shape != v.shape:
            got = "none" if not first else str(list(first[0].shape))
            raise ValueError(f"first: expected the first layer's values {list(v.shape)} (value_residual), got {got}")
        return v.lerp(first[0], self.up(self.down(x)).sigmoid().to(v.dtype))


class TokenShift(nn.Module):
    """Data-dependent shift: ``y_t = a_t x_{t-1} + (1 - a_t) x_t``, ``a_t = sigmoid(w h_t)`` per head.

    Source: Lin et al., 2025, FoX, section 3 and appendix A (KV-shift of the Pro block).
    """

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.proj = GateAffine(hidden_size, heads, bias=None)

    def reset_parameters(self) -> None:
        self.proj.reset_parameters()

    def forward(self, x: Tensor, hidden: Tensor, stream: Stream, name: str) -> Tensor:
        """The shifted ``x [B, T, heads * dim]``, with weights a from ``hidden [B, T, D]``."""
        known = stream.products.get(name)
        logits = self.proj(hidden) if known is None else self.proj.biased(known)
        # 1 - a and not a: 16 bits round a to 1, and nothing is left of a first token, of which norms make a whole one
        own = (-logits).sigmoid().to(x.dtype)[..., None]
        heads = (self.heads, -1)
        shifted: Tensor = stream.before(name, x).unflatten(-1, heads).lerp(x.unflatten(-1, heads), own).flatten(-2)
        return shifted


def as_built(layer: Any) -> bool:
    """Whether fused kernels may replace a layer's modules: none was replaced by the user or has hooks."""
    kinds = {
        "q_norm": HeadNorm, "k_norm": HeadNorm, "output_norm": HeadNorm, "k_shift": TokenShift, "v_shift": TokenShift,
        "q_conv": ShortConvolution, "k_conv": ShortConvolution, "v_conv": ShortConvolution,
    }  # fmt: skip
    parts = {name: part for name in kinds if (part := getattr(layer, name)) is not None}
    alone = all(untouched(part) for part in (*parts.values(), *layer.gate.modules()))
    others = (layer.token_mix, layer.value_residual, layer.bonus, getattr(layer.output_norm, "bias", None))
    plain = all(part is None for part in others) and layer.config.output_gate != "lora"
    return alone and plain and all(type(part) is kinds[name] for name, part in parts.items())
