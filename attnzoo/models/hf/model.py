"""The decoder as a causal language model of Hugging Face."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.pruning import Evict
from attnzoo.algebra.values import reads_values
from attnzoo.layer.cache import AllOrNone
from attnzoo.layer.gates import GateProjection
from attnzoo.layer.gates.matrix import RotaryAngles
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.hf.cache import NAME, ModelCache, one_cache
from attnzoo.models.hf.config import CACHE_NAMES, AttnzooConfig
from attnzoo.models.hf.generate import LEAST, NeedsLoopError, release, request_of, run_on_engine
from attnzoo.models.hf.keywords import check_keywords
from attnzoo.models.hf.positions import read_places
from attnzoo.models.loss import IGNORED
from attnzoo.models.swap import Unfilled, by_projection
from attnzoo.precision import PreciseModule

logger = logging.getLogger(__name__)


class AttnzooForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A :class:`attnzoo.models.LanguageModel`, held as `model`, with Hugging Face's interface.

    Angles, slopes and biases of gates stay in float32 whatever dtype the weights are loaded in.

    Args:
        config: sizes and the variant of each layer.

    Raises:
        ValueError: a variant or one of its options does not exist.
    """

    config_class = AttnzooConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = list(CACHE_NAMES)
    _tied_weights_keys: ClassVar[dict[str, str]] = {"model.head.weight": "model.embedding.weight"}

    def __init__(self, config: AttnzooConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.native())
        self.gradient_checkpointing, self._recompute_every = False, 1
        self._is_stateful = not all(_gives_tokens_back(block) for block in self.model.blocks)
        self.post_init()
        # transformers 4 checks an earlier attribute by other rules
        self._keep_in_fp32_modules_strict = _precise(self.model)

    @classmethod
    def of(cls, model: LanguageModel, **options: Any) -> AttnzooForCausalLM:
        """The Hugging Face model around a decoder; `options` are options of `PretrainedConfig`, such as
        `eos_token_id`."""
        with torch.device("meta"), Unfilled():
            theirs = cls(AttnzooConfig.of(model.config, **options))
        theirs.model = model
        theirs.train(model.training)
        return theirs

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **options: Any) -> Any:
        """The model of a folder, loaded as by every `PreTrainedModel`; gates keep their weights in another `attention`.

        A gate's weights have other names where several projections are combined, as for `fox_rope` in place of `rope`.
        """
        if options.get("config") is None and not {"attention", "attention_options"} & options.keys():
            return super().from_pretrained(source, *args, **options)
        config = options.get("config")
        if config is None:
            config, options = AttnzooConfig.from_pretrained(source, return_unused_kwargs=True, **options)
        model = super().from_pretrained(
            source, *args, **{**options, "config": config, "key_mapping": options.get("key_mapping") or _places(config)}
        )
        found = model[0] if isinstance(model, tuple) else model
        if hasattr(found, "_weight_conversions"):
            del found._weight_conversions  # it would be saved under the names of before
        return model

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding, perhaps by one of another vocabulary."""
        self.model.embedding = value
        self.model.config = replace(self.model.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output head."""
        self.model.head = new_embeddings

    def _set_gradient_checkpointing(self, *args: Any, every_n_layers: int = 1, **options: Any) -> None:
        """Switch gradient checkpointing on or off, for every nth block alone where asked (transformers 5.23 and
        later)."""
        super()._set_gradient_checkpointing(*args, **options)
        self._recompute_every = every_n_layers

    def _recompute(self, block: nn.Module, x: Tensor, **arguments: Any) -> Tensor:
        """Run a block under gradient checkpointing, with one argument as reentrant checkpoints need (transformers
        4)."""
        every = self._recompute_every
        if every > 1 and next(n for n, own in enumerate(self.model.blocks) if own is block) % every:
            return cast(Tensor, block(x, **arguments))
        again = self._gradient_checkpointing_func
        if "first" in arguments and getattr(again, "keywords", {}).get("use_reentrant", True):
            raise ValueError(
                "gradient_checkpointing_kwargs: expected {'use_reentrant': False} (layers share the first one's values)"
            )
        return cast(Tensor, again(partial(block, **arguments), x))

    @torch.no_grad()
    def generate(
        self, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, engine: bool | None = None,
        evict: float | str | Evict | None = None, budget: int | str | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """`GenerationMixin.generate`, on :class:`attnzoo.models.Generator` where that can serve the call.

        The engine serves greedy and sampled continuations of prompts, padded on the left or not, by temperature,
        `top_k` and `top_p`, several of each, up to `max_new_tokens` and tokens that end a sequence; and the proposals
        of an `assistant_model` of this class, or of `prompt_lookup_num_tokens`, up to 15 at a time. Greedy tokens are
        the same, unless two logits are equal up to rounding; samples have the same distribution, but are other draws.
        One line of the log says which loop runs. The engine is kept for the next call with as many rows;
        :meth:`release_engine` frees it.

        Args:
            inputs, generation_config, args, kwargs: as in `GenerationMixin.generate`.
            engine: True for the engine alone, False for the loop of transformers alone; None for the engine on a GPU,
                where 64 tokens or more may follow and it can serve the call.
            evict, budget: rules by which the caches evict keys, see `LanguageModel.new_cache`.

        Raises:
            ValueError: `engine=True` for a call that needs the loop; the message says why. Or `evict` or `budget` for
                layers that cannot evict, beside an existing cache, or without one (`use_cache=False`).
        """
        limits = {name: x for name, x in (("evict", evict), ("budget", budget)) if x is not None}
        given = one_cache(*(kwargs.pop(name, None) for name in CACHE_NAMES))
        if limits:
            cache = ModelCache(self.model.new_cache(evict, budget))  # raises for unsuitable layers
            if given is not None:
                raise ValueError(f"{next(iter(limits))}: expected None beside {NAME}, which has its own")
        if given is not None:
            kwargs[NAME] = given
        try:
            if engine is False or (engine is None and self.device.type != "cuda"):
                why = "engine=False" if engine is False else f"on {self.device.type} (engine=True runs it)"
                raise NeedsLoopError(why)
            if args:
                raise NeedsLoopError("arguments by place: expected inputs and generation_config alone")
            call = request_of(self, inputs, generation_config, kwargs, limits)
            if engine is None and call.new < LEAST:
                raise NeedsLoopError(f"max_new_tokens: expected at least {LEAST} to be worth it, got {call.new}")
            tokens = run_on_engine(self, call)
        except NeedsLoopError as reason:
            if engine:
                raise ValueError(f"engine: expected None or False here ({reason}), got True") from reason
            logger.info("generate runs the loop of transformers: %s", reason)
            self._check_proposals(kwargs.get("assistant_model"), generation_config, kwargs, reason)
            if limits:
                kwargs[NAME] = cache
            return super().generate(inputs, generation_config, *args, **kwargs)
        logger.info("generate ran on the engine")
        return tokens

    def _check_proposals(self, helper: Any, settings: Any, given: dict[str, Any], reason: Exception) -> None:
        """Raise where a cache cannot be cropped: transformers' loop of assisted generation crops both models'
        caches."""
        look_up = "prompt_lookup_num_tokens"
        name = look_up if helper is None else "assistant_model"
        if helper is None and not given.get(look_up) and not getattr(settings, look_up, None):
            return
        for model in (self, helper):
            if getattr(model, "_is_stateful", False):
                raise ValueError(
                    f"{name}: expected layers that take rejected tokens back, as fox, alibi, rope and nope without "
                    "convolutions and shifts (engine=True takes all), got "
                    f"{getattr(model.config, 'attention', type(model).__name__)!r}"
                ) from reason

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Raise: continuous batching of transformers stores keys in its own pages, which the layers do not read.

        Raises:
            ValueError: always.
        """
        raise ValueError("continuous batching: expected attnzoo.models.Generator around model.model, which does it")

    def release_engine(self) -> None:
        """Free the engine's memory, which :meth:`generate` keeps for its next call."""
        release(self)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        """Put a new :class:`ModelCache` into ``model_kwargs``, the only kind of cache that the layers take."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation: expected None or 'dynamic' (each layer has a cache of its own), got {kind!r}"
            )
        given = model_kwargs.get(NAME) is not None
        if given and not generation_config.use_cache:
            raise ValueError(f"use_cache: expected True beside {NAME}, evict or budget, got False")
        if generation_config.use_cache and not given:
            model_kwargs[NAME] = ModelCache(self.model.new_cache())

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise the weights that were missing in a checkpoint, as the decoder does."""
        loaded: list[tuple[dict[str, Any], str, Tensor]] = [
            (owner, name, tensor)
            for part in self.model.modules()
            for owner in (part._parameters, part._buffers)
            for name, tensor in owner.items()
            if tensor is not None and getattr(tensor, "_is_hf_initialized", False)
        ]
        for owner, name, tensor in loaded:  # the decoder's reset overwrites loaded tensors: put them back
            away = torch.empty_like(tensor, device="meta")
            owner[name] = nn.Parameter(away, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else away
        try:
            self.model.reset_parameters()
        finally:
            for owner, name, tensor in loaded:
                owner[name] = tensor

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ModelCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cache: ModelCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """The logits of each next token, and with labels the loss.

        Args:
            input_ids: integers [B, T].
            attention_mask: [B, T], or [B, S + T] with S cached tokens; 0 at padding, on either side. With PEFT's
                virtual tokens it has floats 0 and 1.
            past_key_values: the cache of an earlier call.
            inputs_embeds: [B, T, D] instead of `input_ids`.
            labels: [B, T], the same tokens as `input_ids` (shifted here, unlike the decoder's targets), -100 where they
                do not count; then `logits_to_keep` must be 0.
            use_cache: return `past_key_values`; by default the configuration's `use_cache`, but never while training,
                and with One-Pass Forgetting under `torch.no_grad()` alone.
            logits_to_keep: logits of that many last tokens only, or of these positions; 0 for all.
            cu_seq_lens_q: borders [N + 1] of sequences packed into one row; without it, `position_ids` that begin
                again say where they are (`seq_idx` alone is refused).
            output_hidden_states: also return each block's input and the head's.
            output_attentions: refused: no form computes the attention matrix.
            return_dict: False returns a tuple. None of these three means the configuration's value.
            cache: the name of `past_key_values` since transformers 5.24, also in the output.
            **kwargs: `num_items_in_batch` for the loss, and `position_ids` [B, T]; others, which collators make for
                other models, are ignored.

        Raises:
            TypeError: a keyword that is nearly a parameter (`attention_masks`), or a cache of another kind or name.
            ValueError: inputs that the decoder refuses, labels of another shape, kind or vocabulary, attention matrices
                asked for, a cache beside gradient checkpointing, or positions of another shape, or that neither rise
                by one nor begin again; beside a mask, they rise by one from token to token that it keeps, and beside
                cached tokens they go on from those (read on a CPU, on a GPU with `ATTNZOO_VALIDATE=1`).
        """
        check_keywords(kwargs, _PARAMETERS)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if return_dict is None:
            return_dict = self.config.return_dict
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: expected False (no form of a layer makes the matrix), got True")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        training = self.training and torch.is_grad_enabled()
        if use_cache is None:
            # their caches record no gradient
            forgets = any(layer.forget is not None for layer in self.model.attentions())
            use_cache = getattr(self.config, "use_cache", True) and not training
            use_cache = use_cache and not (forgets and torch.is_grad_enabled())
        cache = one_cache(past_key_values, cache)
        if cache is None and use_cache:
            cache = ModelCache(self.model.new_cache())
        recomputed = self.gradient_checkpointing and training
        if recomputed and cache is not None:  # the second run would add the tokens again
            raise ValueError(f"use_cache, {NAME}: expected neither with gradient checkpointing in training")
        positions, given = kwargs.pop("position_ids", None), input_ids if inputs_embeds is None else inputs_embeds
        attention_mask, cu_seq_lens_q, origin = read_places(attention_mask, cu_seq_lens_q, positions, given, cache)
        if origin is not None and self.model.positions is not None and bool((origin != 0).any()):
            raise ValueError(f"position_ids: expected positions from 0, which are learned, got {origin.tolist()}")
        if kwargs.get("seq_idx") is not None and cu_seq_lens_q is None and positions is None:
            raise ValueError(
                "seq_idx: expected position_ids or cu_seq_lens_q beside it, which say where packed sequences start"
            )
        states: list[Tensor] | None = [] if output_hidden_states else None
        memories = None if cache is None else cache.memories
        with AllOrNone(memories or ()):
            x = self.model.hidden(
                input_ids,
                embedded=inputs_embeds,
                cu_seqlens=cu_seq_lens_q,
                attention_mask=attention_mask,
                cache=memories,
                recompute=self._recompute if recomputed else None,
                states=states,
            )  # [B, T, D]
            if labels is not None:
                self._check_labels(labels, x.shape[:2], kwargs.get("ignore_index", IGNORED))
                if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
                    raise ValueError(f"logits_to_keep: expected 0 beside labels, got {logits_to_keep}")
            rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.logits(x[:, rows])
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if cache is not None and origin is not None:
            cache.origin = origin
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=None if states is None else tuple(states),
            **{NAME: cache if use_cache else None},
        )
        return out.to_tuple() if return_dict is False else out

    def _check_labels(self, labels: Tensor, shape: torch.Size, ignored: int) -> None:
        """Raise where labels are no tokens of the vocabulary; all may be `ignored`, as in a piece of a larger batch."""
        if labels.shape != shape:
            raise ValueError(f"labels: expected [B, T] = {tuple(shape)}, got {tuple(labels.shape)}")
        if labels.dtype != torch.int64:
            raise ValueError(f"labels: expected int64 tokens, got {labels.dtype}")
        self.model.check_there("labels", labels)
        if reads_values(labels) and bool((labels != ignored).any()):
            self.model.check_tokens("labels", labels, shape, ignored)


_PARAMETERS = frozenset(inspect.signature(AttnzooForCausalLM.forward).parameters) - {"self", "kwargs"}


def _precise(model: nn.Module) -> list[str]:
    """The names of the tensors that are never rounded to 16 bits."""
    modules = [(name, part) for name, part in model.named_modules() if isinstance(part, PreciseModule)]
    return sorted({f"{path.rpartition('.')[2]}.{name}" for path, part in modules for name in part.precise})


def _gives_tokens_back(block: Any) -> bool:
    """Whether the cache of the block's layer can be cropped."""
    attention = block.attention
    carried = {part for part in attention.variant.requires if PARTS[part].carries} - {"angle"}
    windows = attention.config.conv_size or attention.config.kv_shift or attention.config.token_mix or block.mlp_mix
    gates = [part for part in attention.gate.modules() if isinstance(part, GateProjection)]
    turning = any("angle" in gate.provides and not isinstance(gate, RotaryAngles) for gate in gates)
    kept = carried or windows or turning
    return attention.variant.side == "softmax" and not kept and attention.forget is None


def _places(config: AttnzooConfig) -> dict[str, str]:
    """The names of a model's gates, by patterns of the names that these weights may have in a checkpoint."""
    with torch.device("meta"), Unfilled():
        names = LanguageModel(config.native()).state_dict()
    homes = by_projection([name for name in names if ".gate." in name])
    return {
        "^" + re.escape(f"model.{short}").replace(r"\.gate\.", r"\.gate\.(?:members\.\d+\.)?") + "$": f"model.{name}"
        for short, name in homes.items()
    }
