r"""The ``sdpa`` form, which runs on PyTorch's ``scaled_dot_product_attention``, on every device that has it.

With the running sums :math:`c_t = g_1 + \dots + g_t`, a scalar decay is a longer key:

.. math:: \lambda\, k_j^\top q_t + c_t - c_j = \lambda\, [k_j, -c_j/\lambda]^\top [q_t, 1] + c_t,

and the softmax of a row does not see :math:`c_t`. The sum is split into channels of few digits that add up to it; each
has the same gradient. Query heads that share a key have channels of their own in it. The kernel adds the channels to
the scores in float32: :func:`logit_error` bounds what that costs.

Packed sequences, windows and several tokens after a cache run on :func:`torch.nn.attention.varlen.varlen_attn`, the
ragged FlashAttention kernel of the same PyTorch, where it takes them: no padding, no mask.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.sums import running_sum
from attnzoo.algebra.values import OPAQUE, counted, in_transform, reads_values
from attnzoo.forms.backends.fox_path import Additive
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.options import SoftmaxOptions, existing
from attnzoo.forms.packing import in_rows
from attnzoo.forms.protocol import Call, Kernel
from attnzoo.forms.readout import Band
from attnzoo.kernels.common.untraced import constant_in_traces
from attnzoo.precision import wide_dtype

CHANNELS = 3  # of 8 digits each: as many digits as float32 has
PARTS = frozenset({"log_decay", "angle"})  # with others, later tokens change the keys
CLOSED_AS = -80.0  # stands for lower log decays; exp of it is 2e-35
HIDDEN = 1e4  # how far the bias of an absent key is below the others
WIDTH = 8  # kernels of GPUs take head dims that are multiples of it
BUDGET, BUDGET_OF_FLOAT32 = 1e-3, 1e-5  # largest error of a logit with which "auto" takes the form
DIGITS = {torch.float16: torch.float16, torch.float64: torch.float64}  # of a channel; else those of bfloat16, as TF32


def logit_error(span: float, dtype: torch.dtype, channels: int = CHANNELS) -> float:
    """A bound of the error of a logit where the running sums span ``span``: the tokens times minus their mean gate.

    The sums are centred, so none is larger than half the span. The channels round it once; the kernel up to four times,
    in the product with q, the change of base and the difference from the maximum.
    """
    rounding = torch.finfo(wide_dtype(dtype)).eps / 2
    split = (torch.finfo(DIGITS.get(dtype, torch.bfloat16)).eps / 2) ** channels
    return span / 2 * (split + 4 * rounding)


def sdpa_kernel(forms: Additive, channels: int = CHANNELS) -> Kernel:
    """The form on ``scaled_dot_product_attention`` for whole sequences, packed or padded, and cached steps.

    Where no ragged kernel serves, packed sequences run as rows of similar length, and a window is a mask.

    Args:
        forms: the forms, which apply the gate's matrix part to q and k and extend the cache.
        channels: channels of each running sum.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Any, given: SoftmaxOptions) -> Tensor:
        """The output of ``scaled_dot_product_attention``, in the inputs' precision."""
        if given.cu_seqlens is not None:
            (H, K), (G, V) = q.shape[2:], v.shape[2:]
            longer = K if gate.log_decay is None else K + H // G * channels
            if given.valid is not None or not takes_ragged(v, H, padded(longer, V)):
                return cast(Tensor, in_rows(run, q, k, v, gate, given))
        return extend(q, k, v, gate, None, given)[0]

    def extend(
        q: Tensor, k: Tensor, v: Tensor, gate: Any, state: KVCache | None, given: SoftmaxOptions
    ) -> tuple[Tensor, KVCache]:
        if given.valid is not None:
            q, k, v = existing(given.valid, q, k, v)
        gate = forms.separated(gate, q, given.valid, None)
        q, state = forms.remember(q, k, v, gate, state, given, v.dtype)
        return attend_augmented(q.to(v.dtype), state, given, channels), state

    def refuses(call: Call) -> str:
        if in_transform():
            return OPAQUE
        if not call.q.shape[0]:  # on a GPU scaled_dot_product_attention would return None
            return f"expected at least one sequence{counted(call.q.shape)}"
        borders = call.options.get("cu_seqlens")
        if borders is not None and (borders.is_meta or torch.compiler.is_compiling()):
            return "the sdpa form reads the borders of packed sequences, which a traced call does not have"
        return ""

    return Kernel(
        run, extend, refuses, parts=PARTS, doubts=doubts,
        honours=frozenset({"scale", "window", "valid", "cu_seqlens"}),
    )  # fmt: skip


def doubts(call: Call) -> str:
    """The reason why ``auto`` does not take the form for these gates, or ""."""
    g, dtype = call.gate.log_decay, call.v.dtype
    if g is None:
        return ""
    held, most = _budget(dtype)
    if not reads_values(g):
        return f"{held}, which is not read here (impl='sdpa' runs it)"
    past, borders = None if call.state is None else call.state.log_decay, call.options.get("cu_seqlens")
    tokens = call.q.shape[1] if borders is None else int(borders.diff().max())
    tokens += 0 if call.state is None else len(call.state)
    spans = [x.detach().double().clamp(min=CLOSED_AS) for x in (g, past) if x is not None and x.numel()]
    span = -sum(float((x * tokens if x.ndim == 1 else totals(x, borders)).min()) for x in spans)
    return f"{held}, and these span more" if span > most else ""


@constant_in_traces  # numbers that a compiler takes for symbols cannot be put into words
def _budget(dtype: torch.dtype) -> tuple[str, float]:
    """The budget of ``auto`` in words, and the largest span of the running sums with which it holds."""
    budget = BUDGET if dtype.itemsize == 2 else BUDGET_OF_FLOAT32
    most = budget / logit_error(1.0, dtype)
    return f"a logit is off by at most {budget:g} where the running sums of the gates span at most {most:.0f}", most


def attend_augmented(q: Tensor, state: KVCache, given: SoftmaxOptions, channels: int) -> Tensor:
    """The output ``[B, T, H, V]`` of the last T tokens, whose queries are ``q``, over all keys of ``state``."""
    (T, H, K), (S, G) = q.shape[1:], state.k.shape[1:3]
    k, v, borders = state.k, expand_heads(state.v, G), given.cu_seqlens
    V, scale = v.shape[3], K**-0.5 if given.scale is None else given.scale
    if state.log_decay is not None or state.valid is not None:
        q, k = lengthened(q, k, bias_of(state, borders), scale, channels, borders)
    width = padded(q.shape[3], V)
    q, k, v = (F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    windowed = given.window is not None and given.window < S
    needs_mask = state.valid is None and (windowed or T not in (1, S))
    if borders is not None or (needs_mask and takes_ragged(v, H, width)):
        return attend_ragged(q, k, v, given, scale)[..., :V]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    band = Band.of(given.window, state.valid, S, q.device)
    mask = None
    if band is not None or T not in (1, S):
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        mask = mask if band is None else mask & ~band.hidden(S - T, S, 0)
    causal = mask is None and T > 1
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=G < H)
    return o.transpose(1, 2)[..., :V]


def padded(keys: int, values: int) -> int:
    """The width of a kernel's heads with so many channels in keys and values."""
    return -(-max(keys, values) // WIDTH) * WIDTH


@cache
def ragged_kernel() -> Callable[..., Tensor] | None:
    """PyTorch's attention over ragged sequences, of 2.11 and later: with a scale, windows and shared keys."""
    try:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    taken = inspect.signature(attend).parameters
    if "window_size" not in taken:
        return None
    return cast("Callable[..., Tensor]", partial(attend, enable_gqa=True) if "enable_gqa" in taken else attend)


def takes_ragged(v: Tensor, heads: int, width: int) -> bool:
    """Whether :func:`ragged_kernel` runs heads of ``width`` channels in the dtype and on the device of ``v``."""
    if not v.is_cuda or torch.version.hip or torch.compiler.is_compiling() or ragged_kernel() is None:
        return False
    like = v.new_empty(1, heads, 1, width).requires_grad_(torch.is_grad_enabled())
    return can_use_flash_attention(SDPAParams(like, like, like, None, 0.0, False, False))


def attend_ragged(q: Tensor, k: Tensor, v: Tensor, given: SoftmaxOptions, scale: float) -> Tensor:
    """The causal output ``[B, T, H, V]`` of the last T tokens over S keys, each sequence by itself, in its window."""
    (B, T), S, borders = q.shape[:2], k.shape[1], given.cu_seqlens
    if borders is None:
        of_q, of_k = (n * torch.arange(B + 1, dtype=torch.int32, device=q.device) for n in (T, S))
    else:
        of_q = of_k = borders.int()
        T = S = int(borders.diff().max())  # Python waits for a GPU here
    attend = cast("Callable[..., Tensor]", ragged_kernel())
    window = (-1 if given.window is None else given.window - 1, 0)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return attend(*flat, of_q, of_k, T, S, scale=scale, window_size=window).view_as(q)


def lengthened(
    q: Tensor, k: Tensor, bias: Tensor, scale: float, channels: int, borders: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q ``[B, T, H, K]`` and k ``[B, S, G, K]`` with channels that add ``bias [B, S, H or 1]`` to the scaled scores."""
    H, G = q.shape[2], k.shape[2]
    unit = 2.0 ** math.ceil(-math.log2(scale))  # every dtype holds it; so the channels are no larger than the sums
    bias = Channels.apply(bias / (scale * unit), k.dtype, channels, borders)  # type: ignore[no-untyped-call]
    sharing = bias.shape[2] // G or 1  # query heads that have channels of their own in a key
    own = torch.eye(sharing, dtype=q.dtype, device=q.device).repeat_interleave(channels, 1) * unit
    q = torch.cat([q, own.repeat(H // sharing, 1).expand(*q.shape[:2], -1, -1)], -1)
    return q, torch.cat([k, bias.reshape(*bias.shape[:2], -1, sharing * channels).expand(-1, -1, G, -1)], -1)


def bias_of(state: KVCache, borders: Tensor | None = None) -> Tensor:
    """The bias of each key, ``[B, S, H]`` or without gates ``[B, S, 1]``: minus its sequence's running sum, centred."""
    g, dtype = state.log_decay, torch.float32 if state.k.device.type == "mps" else torch.float64
    if g is None:
        bias = state.k.new_zeros(*state.k.shape[:2], 1, dtype=dtype)
    else:
        sums = running_sum(g.clamp(min=CLOSED_AS).to(dtype), 1)
        first, last = at_ends(sums.detach(), borders)
        bias = (first + last) / 2 - sums
    if state.valid is None:
        return bias
    return bias.where(state.valid[..., None], bias.detach().amin(1, keepdim=True) - HIDDEN)


def at_ends(sums: Tensor, borders: Tensor | None) -> tuple[Tensor, Tensor]:
    """The running sums ``[B, S, H]`` before each token's sequence and at its end; a row is one without ``borders``."""
    if borders is None:
        return torch.zeros_like(sums[:, -1:]), sums[:, -1:]
    ends, lengths = F.pad(sums, (0, 0, 1, 0)).index_select(1, borders), borders.diff()
    each = partial(torch.repeat_interleave, repeats=lengths, dim=1, output_size=sums.shape[1])
    return each(ends[:, :-1]), each(ends[:, 1:])


def totals(x: Tensor, borders: Tensor | None) -> Tensor:
    """The sum of ``x [B, S, H]`` over each token's sequence, ``[B, S or 1, H]``."""
    if borders is None:
        return x.sum(1, keepdim=True)
    first, last = at_ends(running_sum(x, 1), borders)
    return last - first


class Channels(torch.autograd.Function):
    """Numbers as sums of ``channels`` numbers of ``dtype``, along a new last axis.

    The gradients of a sequence's biases add up to 0, as softmax does not see their mean. In 16 bits those of the
    channels do not, and the gates sum that up over the tokens: so it is taken from each in proportion to its size.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, channels: int, borders: Tensor | None) -> Tensor:
        ctx.wide, ctx.borders, parts = x.dtype, borders, []
        for _ in range(channels):
            parts.append(x.to(DIGITS.get(dtype, torch.bfloat16)))
            x = x - parts[-1]
        return torch.stack(parts, -1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0][..., 0].to(ctx.wide)
        size = grad.abs()
        share = totals(grad, ctx.borders) / totals(size, ctx.borders).clamp(min=torch.finfo(size.dtype).tiny)
        # small totals beside large ones of other sequences are the rounding of these
        return grad - share.clamp(-1, 1) * size, None, None, None
