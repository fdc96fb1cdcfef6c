r"""The ``sdpa`` form, which runs on PyTorch's ``scaled_dot_product_attention``, on every device that has it.

With the running sums :math:`c_t = g_1 + \dots + g_t`, a scalar decay is a longer key:

.. math:: \lambda\, k_j^\top q_t + c_t - c_j = \lambda\, [k_j, -c_j/\lambda]^\top [q_t, 1] + c_t,

and the softmax of a row does not see :math:`c_t`. The sum is split into channels of few digits that add up to it; each
has the same gradient. Query heads that share a key have channels of their own in it. The kernel adds the channels to
the scores in float32: :func:`logit_error` bounds what that costs.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

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
    rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    split = (torch.finfo(DIGITS.get(dtype, torch.bfloat16)).eps / 2) ** channels
    return span / 2 * (split + 4 * rounding)


def sdpa_kernel(forms: Additive, channels: int = CHANNELS) -> Kernel:
    """The form on ``scaled_dot_product_attention`` for whole sequences, packed or padded, and cached steps.

    Packed sequences run as rows of similar length, and a window is a mask.

    Args:
        forms: the forms, which apply the gate's matrix part to q and k and extend the cache.
        channels: channels of each running sum.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Any, given: SoftmaxOptions) -> Tensor:
        """The output of ``scaled_dot_product_attention``, in the inputs' precision."""
        if given.cu_seqlens is not None:
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
    past = None if call.state is None else call.state.log_decay
    tokens = 1 if g.ndim > 1 else call.q.shape[1] + (0 if call.state is None else len(call.state))
    spans = [x.detach().double().clamp(min=CLOSED_AS) for x in (g, past) if x is not None and x.numel()]
    span = -sum(float((x * tokens if x.ndim == 1 else x.sum(1)).min()) for x in spans)
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
    k, v = state.k, expand_heads(state.v, G)
    V, scale = v.shape[3], K**-0.5 if given.scale is None else given.scale
    if state.log_decay is not None or state.valid is not None:
        q, k = lengthened(q, k, bias_of(state), scale, channels)
    width = -(-max(q.shape[3], V) // WIDTH) * WIDTH
    q, k, v = (F.pad(x, (0, width - x.shape[3])).transpose(1, 2) for x in (q, k, v))
    band = Band.of(given.window, state.valid, S, q.device)
    mask = None
    if band is not None or T not in (1, S):
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        mask = mask if band is None else mask & ~band.hidden(S - T, S, 0)
    causal = mask is None and T > 1
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=G < H)
    return o.transpose(1, 2)[..., :V]


def lengthened(q: Tensor, k: Tensor, bias: Tensor, scale: float, channels: int) -> tuple[Tensor, Tensor]:
    """q ``[B, T, H, K]`` and k ``[B, S, G, K]`` with channels that add ``bias [B, S, H or 1]`` to the scaled scores."""
    H, G = q.shape[2], k.shape[2]
    unit = 2.0 ** math.ceil(-math.log2(scale))  # every dtype holds it; so the channels are no larger than the sums
    bias = Channels.apply(bias / (scale * unit), k.dtype, channels)  # type: ignore[no-untyped-call]
    sharing = bias.shape[2] // G or 1  # query heads that have channels of their own in a key
    own = torch.eye(sharing, dtype=q.dtype, device=q.device).repeat_interleave(channels, 1) * unit
    q = torch.cat([q, own.repeat(H // sharing, 1).expand(*q.shape[:2], -1, -1)], -1)
    return q, torch.cat([k, bias.reshape(*bias.shape[:2], -1, sharing * channels).expand(-1, -1, G, -1)], -1)


def bias_of(state: KVCache) -> Tensor:
    """The bias of each key, ``[B, S, H]``, or ``[B, S, 1]`` without gates: minus the running sum, centred."""
    g, dtype = state.log_decay, torch.float32 if state.k.device.type == "mps" else torch.float64
    if g is None:
        bias = state.k.new_zeros(*state.k.shape[:2], 1, dtype=dtype)
    else:
        sums = running_sum(g.clamp(min=CLOSED_AS).to(dtype), 1)
        bias = sums[:, -1:].detach() / 2 - sums
    if state.valid is None:
        return bias
    return bias.where(state.valid[..., None], bias.detach().amin(1, keepdim=True) - HIDDEN)


class Channels(torch.autograd.Function):
    """Numbers as sums of ``channels`` numbers of ``dtype``, along a new last axis.

    The gradients of a row's biases add up to 0, as softmax does not see their mean. In 16 bits those of the channels do
    not, and the gates sum that up over the tokens: so it is taken from each in proportion to its size.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
        ctx.wide, parts = x.dtype, []
        for _ in range(channels):
            parts.append(x.to(DIGITS.get(dtype, torch.bfloat16)))
            x = x - parts[-1]
        return torch.stack(parts, -1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0][..., 0].to(ctx.wide)
        size = grad.abs()
        share = grad.sum(1, keepdim=True) / size.sum(1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
        return grad - share * size, None, None
