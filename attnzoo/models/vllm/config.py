"""The configuration of an exported folder as vLLM reads it."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch

from attnzoo.forms.backends.sdpa import CHANNELS, WIDTH
from attnzoo.models.config import ModelConfig
from attnzoo.models.hf.config import AttnzooConfig
from attnzoo.models.vllm.storage import Storage, layers_of, storages_of


class ServedConfig(AttnzooConfig):
    """The fields of an exported `config.json`, and what vLLM asks beside them.

    Args:
        gate_channels: channels of a key for each running sum of log decays (`--hf-overrides`).
        **options: of :class:`~attnzoo.models.hf.AttnzooConfig`.
    """

    def __init__(self, gate_channels: int = CHANNELS, **options: Any) -> None:
        super().__init__(**options)
        self.gate_channels = gate_channels

    def storages(self, dtype: torch.dtype = torch.float32) -> tuple[Storage, ...]:
        """The storage of each layer, with weights in ``dtype``."""
        return _storages(json.dumps(asdict(self.native())), dtype, self.gate_channels)

    @property
    def num_key_value_heads(self) -> int:
        """Heads of the keys, the same in all layers that have keys."""
        return max(storage.kv_heads for storage in self.storages()) or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of the keys and values in vLLM's pages, as many as its kernels take."""
        return width_of(max(storage.key_dim for storage in self.storages()) or WIDTH)

    @property
    def state_bytes(self) -> int:
        """The bytes of the largest layer's state."""
        return max(storage.bytes for storage in self.storages(torch.float32))

    @property
    def layer_types(self) -> list[str] | None:
        """The kinds of all layers (`attention`) where none has a state; None where vLLM reads `layers_block_type`."""
        return None if self.state_bytes else self.layers_block_type

    @property
    def layers_block_type(self) -> list[str]:
        """`attention` for each layer with keys, `mamba` for others."""
        return ["attention" if storage.kv_heads else "mamba" for storage in self.storages()]


def width_of(channels: int) -> int:
    """The least head dim of vLLM's attention here that holds so many channels."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return -(-channels // WIDTH) * WIDTH
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    return min((size for size in sizes if size >= channels), default=channels)


@lru_cache(maxsize=8)
def _storages(fields: str, dtype: torch.dtype, channels: int) -> tuple[Storage, ...]:
    config = ModelConfig(**json.loads(fields))
    return storages_of(layers_of(config, dtype), channels, config.mlp_mix)
