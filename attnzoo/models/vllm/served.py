"""A layer's keys and state in vLLM's pages, and the core that reads them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention as PagedAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from attnzoo.algebra.gate import expand_heads
from attnzoo.forms.backends.sdpa import CLOSED_AS, lengthened
from attnzoo.forms.protocol import Call
from attnzoo.layer.attention import Attention
from attnzoo.models.vllm.linear import recur
from attnzoo.models.vllm.storage import PHASE, SUMS, Storage
from attnzoo.models.vllm.stream import ServedStream
from attnzoo.precision import wide
from attnzoo.recurrences.complex_linear import rotate_all
from attnzoo.registry.variant import Variant


class States(nn.Module, MambaBase):  # type: ignore[misc]
    """The state of one layer for all requests, one row of bytes in each of vLLM's pages.

    Args:
        storage: the tensors in it.
        size: bytes of a row, the same for all layers.
        prefix: the name by which vLLM finds it.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, storage: Storage, size: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.storage, self.size, self.prefix = storage, size, prefix
        self.kv_cache = (torch.tensor([]),)
        self.tensors: dict[str, Tensor] = {}
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        rows = self.kv_cache[0]
        self.tensors = {
            slot.name: rows[:, at : at + slot.bytes].view(slot.dtype).unflatten(1, slot.shape)
            for slot, at in self.storage.places()
        }


class ServedLayer(nn.Module):
    """The core of one layer in vLLM.

    Args:
        layer: the layer whose core it is.
        storage: its keys and state.
        vllm_config: of the engine.
        prefix: of the names by which vLLM finds its parts.
    """

    def __init__(self, layer: Attention, storage: Storage, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, settings = layer.config, vllm_config.model_config.hf_config
        self.scale = config.key_dim**-0.5 if layer.scale is None else layer.scale
        self.channels, self.kv_heads, self.impl = settings.gate_channels, storage.kv_heads, layer.impl
        self.states = States(storage, settings.state_bytes, vllm_config, f"{prefix}.state") if storage.slots else None
        self.paged: PagedAttention | None = None
        if storage.kv_heads:
            parts = {} if layer.sinks is None else {"sinks": layer.sinks}
            self.paged = PagedAttention(
                config.num_heads, settings.head_dim, self.scale, storage.kv_heads,
                cache_config=vllm_config.cache_config, per_layer_sliding_window=config.window,
                logits_soft_cap=config.softcap, prefix=f"{prefix}.attn", **parts,
            )  # fmt: skip

    def core(self, stream: ServedStream, variant: Variant, form: str, call: Call, keys_per_token: int) -> Tensor:
        """The output ``[1, N, H, V]``: of a recurrence, or of vLLM's attention, whose keys are rotated and hold the
        sums of the gates."""
        if variant.side == "linear":
            return recur(stream, variant, self.impl, call, keys_per_token)
        q, k, v, gate, place = call.q, expand_heads(call.k, self.kv_heads), call.v, call.gate, stream.place + 1
        H, V, dtype = q.shape[2], v.shape[3], v.dtype
        if gate.angle is not None:
            shared = gate.angle.ndim == 1
            phase = place[:, None, None] * gate.angle.double() if shared else stream.running(PHASE, gate.angle[0])
            q, k = rotate_all(phase[None], wide(q), wide(k))
        q, k, v = q.to(dtype), k.to(dtype), expand_heads(v, self.kv_heads)
        if gate.log_decay is not None:
            g = gate.log_decay.clamp(min=CLOSED_AS)
            sums = place[:, None] * g.double() if g.ndim == 1 else stream.running(SUMS, g[0])
            q, k = lengthened(q, k, -sums[None], self.scale, self.channels)
        paged = cast(Any, self.paged)
        q, k, v = (F.pad(x[0], (0, paged.head_size - x.shape[3])).flatten(1) for x in (q, k, v))
        o: Tensor = paged(q, k, v)
        return cast(Tensor, o.unflatten(-1, (H, -1)))[None, ..., :V]
