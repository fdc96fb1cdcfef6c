"""The decoder as a model of vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from attnzoo.models.decoder import LanguageModel
from attnzoo.models.vllm.refusals import check_layers
from attnzoo.models.vllm.served import ServedLayer
from attnzoo.models.vllm.stream import ServedStream, Step


class ServedModel(nn.Module, HasInnerState, IsHybrid):  # type: ignore[misc]
    """A :class:`~attnzoo.models.LanguageModel` whose tokens, keys and states vLLM schedules and stores.

    Args:
        vllm_config: of the engine; its `model_config.hf_config` is a
            :class:`~attnzoo.models.vllm.config.ServedConfig`.
        prefix: of the names of layers.

    Raises:
        ValueError: a layer that cannot be served; the message says why.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.model = LanguageModel(config.native())
        layers = self.model.attentions()
        check_layers(layers, dtype)
        for layer in layers:
            layer.prune = None  # vLLM computes all pairs
        of_layers = enumerate(zip(layers, config.storages(dtype), strict=True))
        self.served = nn.ModuleList(
            ServedLayer(layer, storage, vllm_config, f"{prefix}{'.' * bool(prefix)}layers.{i}")
            for i, (layer, storage) in of_layers
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """The shape of a layer's state, which is one row of bytes."""
        return ((vllm_config.model_config.hf_config.state_bytes,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """The dtype of that row."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """The function that copies a state to another page, for vLLM's prefix cache."""
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The embeddings of tokens ``[N]``, ``[N, D]``."""
        out: Tensor = self.model.embedding(input_ids)
        return out

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """The head's input ``[N, D]`` for the N tokens of a step."""
        x = inputs_embeds if input_ids is None or inputs_embeds is not None else self.embed_input_ids(input_ids)
        assert x is not None
        shape, metadata = (1, len(x)), get_forward_context().attn_metadata
        x = self.model.placed(x[None], None if self.model.positions is None else positions[None])
        steps, first = dict[int, Step](), self.model.first_values()
        for block, served in zip(self.model.blocks, cast("Iterable[ServedLayer]", self.served), strict=True):
            own = metadata[served.states.prefix] if metadata and served.states is not None else None
            if own is not None and id(own) not in steps:
                steps[id(own)] = Step.of(own, shape[1])
            step = None if own is None else steps[id(own)]
            stream = ServedStream(None, None, shape, x.device, layer=served, place=positions, step=step)
            x = block(x, cache=stream, **first)
        out: Tensor = self.model.norm(x)[0]
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The logits ``[N, vocab_size]`` of the next tokens."""
        return self.model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights of an exported folder, and return the names of the parameters."""
        given = {name.removeprefix("model."): tensor for name, tensor in weights}
        if self.model.tied:
            given.setdefault("head.weight", given["embedding.weight"])
        self.model.load_state_dict(given)
        return {f"model.{name}" for name, _ in self.model.named_parameters()}
