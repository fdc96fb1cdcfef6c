"""The checks of an engine's settings before vLLM starts, and what it says then."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CacheConfig, CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from attnzoo.errors import unknown
from attnzoo.forms.backends.sdpa import BUDGET, BUDGET_OF_FLOAT32, logit_error
from attnzoo.models.vllm.config import ServedConfig
from attnzoo.models.vllm.refusals import check_layers
from attnzoo.models.vllm.storage import layers_of

logger = init_logger(f"vllm.{__name__}")  # whose lines vLLM shows


class AtStart(VerifyAndUpdateConfig):  # type: ignore[misc]
    """The checks of an engine's settings, before vLLM starts."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what cannot be served, run without CUDA graphs, bound the memory that vLLM takes on a CPU, and say the
        error of the gates' channels.

        Raises:
            ValueError: a layer or a setting that cannot be served; the message names it.
        """
        model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
        for name, size in (
            ("tensor-parallel-size", parallel.tensor_parallel_size),
            ("pipeline-parallel-size", parallel.pipeline_parallel_size),
            ("decode-context-parallel-size", parallel.decode_context_parallel_size),
        ):
            if size != 1:
                raise ValueError(f"--{name}: expected 1 (the decoder's weights are not split), got {size}")
        for name, given in (
            ("quantization", model.quantization),
            ("speculative-config", vllm_config.speculative_config and vllm_config.speculative_config.method),
        ):
            if given is not None:
                raise ValueError(f"--{name}: expected none, got {given!r}")
        overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
        for name in overrides.keys() - vars(ServedConfig()).keys():
            raise unknown("name", name, sorted(vars(ServedConfig())), of="--hf-overrides")
        channels = model.hf_config.gate_channels
        if not isinstance(channels, int) or not 1 <= channels <= 8:
            raise ValueError(f"gate_channels: expected a number of channels from 1 to 8, got {channels!r}")
        known, tokens = model.hf_config.learned_positions, model.max_model_len
        if known and tokens > known:
            raise ValueError(f"--max-model-len: expected at most {known} (learned_positions), got {tokens}")
        layers = layers_of(model.hf_config.native())
        check_layers(layers, model.dtype)
        if any("log_decay" in layer.variant.requires and layer.variant.side == "softmax" for layer in layers):
            if cache.cache_dtype.startswith("fp8"):
                raise ValueError(f"--kv-cache-dtype: expected auto (the keys hold sums), got {cache.cache_dtype!r}")
            logger.info(said(model.dtype, channels, tokens))
        if any(layer.prune is not None or layer.impl != "auto" for layer in layers if layer.variant.side == "softmax"):
            logger.info("acp, and impl of softmax layers, are not used: vLLM's attention computes all pairs")
        if current_platform.is_cpu() and cache.kv_cache_memory_bytes is None:
            bound_memory(cache)
        vllm_config.model_config.enforce_eager = True
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def bound_memory(cache: CacheConfig) -> None:
    """Give keys and states a quarter of the memory that is free, where no setting says how much they get; vLLM would
    refuse to start unless 92% of a CPU's memory is free."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    if cache.gpu_memory_utilization == CacheConfig().gpu_memory_utilization:
        cache.kv_cache_memory_bytes = get_memory_node_info().available_memory // 4
        given = f"{cache.kv_cache_memory_bytes / 2**30:.2g} GiB, a quarter of the free memory"
        logger.info("keys and states get %s (--kv-cache-memory-bytes, or VLLM_CPU_KVCACHE_SPACE in GiB)", given)


def said(dtype: torch.dtype, channels: int, tokens: int) -> str:
    """A line about the error of logits whose log decays ride in ``channels`` channels of keys in ``dtype``."""
    budget = BUDGET if dtype.itemsize == 2 else BUDGET_OF_FLOAT32
    span = budget / (2 * logit_error(1.0, dtype, channels))  # the sums in pages are not centred
    return (
        f"log decays ride in {channels} channels of {str(dtype).removeprefix('torch.')} keys: a logit is off by at "
        f"most {budget:g} where they sum to at least -{span:.4g} over a request, a mean of -{span / tokens:.2g} over "
        f"{tokens} tokens, and in proportion beyond"
    )
