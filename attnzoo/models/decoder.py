"""The decoder: embeddings, blocks of norms, attention and MLP, a final norm and a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.pruning import Evict
from attnzoo.algebra.values import reads_values
from attnzoo.errors import NotFiniteError, check_kinds, check_least
from attnzoo.layer.attention import Attention
from attnzoo.layer.cache import AllOrNone, LayerCache, share_budget
from attnzoo.layer.gates.hgrn2 import lower_bounds
from attnzoo.layer.modules import TokenMix
from attnzoo.layer.rows import positions_of, shared_context
from attnzoo.models.block import DecoderBlock, build_norm, shares_values
from attnzoo.models.config import ModelConfig
from attnzoo.models.loss import IGNORED, capped, chunk_loss, head_loss
from attnzoo.models.modes import evaluating
from attnzoo.parallel.context import context_parallel
from attnzoo.precision import LinearMap, PreciseModule, wide


@dataclass(frozen=True)
class ModelOutput:
    """The output of a model's call.

    Args:
        logits: `[B, T, vocab_size]`; None where they were not computed.
        loss: mean cross-entropy in nats over the targets that count; None without targets.
    """

    logits: Tensor | None
    loss: Tensor | None = None


torch.export.register_dataclass(ModelOutput)


class LanguageModel(nn.Module):
    """A decoder-only language model; `config.attention` says which variant each layer runs.

    Linear and embedding weights are N(0, initializer_range^2) and biases 0, except for parameters that a
    `PreciseModule` keeps in float32 (biases of gates), which are initialised by their own module. With
    `recompute = True` a block keeps only its input for the backward pass and computes the rest again; this is refused
    beside a cache, which the first computation has changed.

    Args:
        config: sizes and the variant of each layer.

    Raises:
        TypeError: `config` is no ModelConfig.
        ValueError: a variant or one of its options does not exist, or layers do not fit each other.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config: expected ModelConfig, got {type(config).__name__}")
        self.config = config
        self.recompute = False
        self.chunk_loss = chunk_loss
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(n, config.hidden_size) if (n := config.learned_positions) else None
        self.embedding_norm = build_norm(config) if config.embedding_norm else None
        self.blocks = nn.ModuleList(DecoderBlock(config, layer) for layer in config.layers())
        self.lower_bounds = lower_bounds(self.attentions())
        self.share_values = shares_values(config.layers(), self.attentions())
        self.norm = build_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights anew, from torch's global random state."""
        for block in self._blocks():
            block.attention.reset_parameters()
        if self.lower_bounds is not None:
            self.lower_bounds.reset_parameters()
        tied = self.head if self.config.tie_embeddings else None
        for module in self.modules():
            precise = module.precise if isinstance(module, PreciseModule) else ()
            if isinstance(module, nn.RMSNorm | nn.LayerNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)
            if isinstance(module, TokenMix):
                module.reset_parameters()
            if isinstance(module, LinearMap | nn.Embedding) and module is not tied and "weight" not in precise:
                nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, LinearMap) and module.bias is not None and "bias" not in precise:
                nn.init.zeros_(module.bias)
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one parameter, which the configuration asks for but a user may have
        changed."""
        return getattr(self.head, "weight", None) is self.embedding.weight

    def untie(self, head: Tensor) -> None:
        """Replace the tied head by `head`, and set `config.tie_embeddings` to False."""
        self.config = replace(self.config, tie_embeddings=False)
        self.head.weight = nn.Parameter(head)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        tied = self.tied
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied and not self.tied:  # to_empty makes two parameters
            self.head.weight = self.embedding.weight
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as every module does; tied embeddings stay tied.

        Raises:
            ValueError: the embeddings are tied, but `state_dict` has different matrices for embedding and head.
        """
        tied = self.tied
        embedding, head = (cast(Tensor, state_dict.get(f"{name}.weight")) for name in ("embedding", "head"))
        plain = all(type(x) in (Tensor, nn.Parameter) for x in (embedding, head))  # not sharded
        checked = tied and plain and embedding is not head and not (embedding.is_meta or head.is_meta)
        if checked and embedding.shape == head.shape and not torch.equal(embedding.to(head), head):
            raise ValueError("head.weight: expected the embedding (config.tie_embeddings), got another matrix")
        found = super().load_state_dict(state_dict, strict, assign)
        if tied and not self.tied:
            self.head.weight = self.embedding.weight
        return found

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        with_logits: bool = True,
    ) -> ModelOutput:
        """The logits of each next token, and with targets the loss.

        Args:
            input_ids: integers [B, T].
            targets: integers [B, T]; `targets[b, t]` is the token that position t should predict (the one after it:
                nothing is shifted here), or -100 where it does not count.
            cu_seqlens: int [N + 1], starts of the sequences packed into a batch of one.
            attention_mask: [B, T], 0 at padding.
            cache: from `new_cache`; extended in place, so that calls continue a sequence. A call that fails does not
                change it.
            with_logits: False, with targets, returns the loss alone and never holds the logits of all tokens.

        Raises:
            TypeError, ValueError: arguments of other kinds, shapes or values than these, each named.
        """
        if targets is not None:
            self.check_tokens("input_ids", input_ids)
            self.check_tokens("targets", targets, input_ids.shape, IGNORED)
        with AllOrNone.of(cache, len(self.blocks)):
            again = self.recompute and cache is None and torch.is_grad_enabled()
            x = self.hidden(
                input_ids,
                cu_seqlens=cu_seqlens,
                attention_mask=attention_mask,
                cache=cache,
                recompute=recomputed if again else None,
            )
            if targets is not None and not with_logits:
                softcap, each = self.config.logit_softcap, self.chunk_loss
                loss = head_loss(x.flatten(0, 1), self.head.weight, targets.flatten(), softcap=softcap, chunk=each)
                return ModelOutput(None, loss)
            logits = self.logits(x)  # [B, T, vocab]
            if targets is None:
                return ModelOutput(logits)
            exact = wide(logits.flatten(0, 1))
            loss = F.cross_entropy(exact, targets.flatten().long(), ignore_index=IGNORED)
            return ModelOutput(logits, loss)

    def hidden(
        self,
        input_ids: Tensor | None = None,
        *,
        embedded: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        recompute: Callable[..., Tensor] | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """The head's input [B, T, D], the hidden states after the last norm, by the arguments of :meth:`forward` and
        these.

        Args:
            embedded: [B, T, D] instead of `input_ids`.
            recompute: `recompute(block, x, **arguments)` runs a block and computes it again in the backward pass
                instead of keeping its intermediate tensors, as `torch.utils.checkpoint.checkpoint` does; None keeps
                them.
            states: a list to which each block's input and the result are appended.

        Raises:
            ValueError: shapes or dtypes other than these.
        """
        if embedded is None:
            self.check_tokens("input_ids", input_ids)
            embedded = self.embedding(input_ids)
        with AllOrNone.of(cache, len(self.blocks)):
            places = None
            if self.positions is not None:
                earliest = cache[0] if cache else None
                places = positions_of(self.attentions()[0], embedded, cu_seqlens, attention_mask, earliest)
            x, first = self.placed(embedded, places), self.first_values()  # [B, T, D]
            for index, block in enumerate(self.blocks):
                if states is not None:
                    states.append(x)
                given = {"cu_seqlens": cu_seqlens, "attention_mask": attention_mask, "cache": cache and cache[index]}
                given |= first
                x = block(x, **given) if recompute is None else recompute(block, x, **given)
            share_budget(cache or [])
            x = cast(Tensor, self.norm(x))
        if states is not None:
            states.append(x)
        return x

    def placed(self, embedded: Tensor, places: Tensor | None) -> Tensor:
        """The first block's input [B, T, D]: embeddings times their scale, plus learned vectors of their positions, and
        normed where the configuration says so.

        Args:
            embedded: [B, T, D].
            places: positions of the tokens, [B, T]; None where none are learned.

        Raises:
            ValueError: a position beyond the learned ones (read on a CPU, on a GPU with `ATTNZOO_VALIDATE=1`).
        """
        if self.config.embedding_scale != 1:  # rounded to the dtype, as Gemma's is
            embedded = embedded * embedded.new_full((), self.config.embedding_scale)
        if self.positions is not None and places is not None:
            known = self.positions.num_embeddings
            if reads_values(places) and int(places.max()) >= known:
                raise ValueError(
                    f"input_ids: expected at most {known} tokens (learned_positions), got {int(places.max()) + 1}"
                )
            embedded = embedded + cast(Tensor, self.positions(places))
        return embedded if self.embedding_norm is None else cast(Tensor, self.embedding_norm(embedded))

    def first_values(self) -> dict[str, Any]:
        """The argument by which the blocks of one call share the first layer's values; none where no layer reads
        them."""
        return {"first": []} if self.share_values else {}

    def logits(self, x: Tensor) -> Tensor:
        """The logits [..., vocab] of the head's input [..., D], bounded where the configuration says so."""
        return capped(self.head(x), self.config.logit_softcap)

    def check_tokens(
        self, name: str, tokens: Tensor | None, shape: torch.Size | None = None, ignored: int | None = None
    ) -> None:
        """Raise where `tokens` are not integers [B, T], T >= 1, of the vocabulary; `ignored` may be some of them, not
        all.

        Raises:
            TypeError, ValueError: other tokens; the message names the argument `name`.
        """
        if not isinstance(tokens, Tensor):
            raise TypeError(f"{name}: expected integers [B, T], got {type(tokens).__name__}")
        if tokens.ndim != 2 or tokens.shape[1] == 0 or (shape is not None and tokens.shape != shape):
            expected = "[B, T] with at least one token" if shape is None else str(list(shape))
            raise ValueError(f"{name}: expected shape {expected}, got {list(tokens.shape)}")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name}: expected int64 or int32 tokens, got {tokens.dtype}")
        self.check_there(name, tokens)
        if not reads_values(tokens):
            return
        if ignored is not None:
            tokens = tokens[tokens != ignored]
            if not tokens.numel():
                raise ValueError(f"{name}: expected at least one that counts, got {ignored} alone")
        if not tokens.numel():
            return
        size = self.config.vocab_size
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= size:
            raise ValueError(f"{name}: expected tokens from 0 to {size - 1}, got {low if low < 0 else high}")

    def check_there(self, name: str, tokens: Tensor) -> None:
        """Raise where `tokens` is no dense tensor on a device that fits the model's: both meta or neither.

        Raises:
            ValueError: another tensor; the message names the argument `name`.
        """
        if tokens.layout != torch.strided:
            raise ValueError(f"{name}: expected a dense tensor, got {tokens.layout}")
        if tokens.is_meta and not self.embedding.weight.is_meta:
            raise ValueError(f"{name}: expected tokens, got a tensor of the meta device, which has none")

    def new_cache(self, evict: float | str | Evict | None = None, budget: int | str | None = None) -> list[LayerCache]:
        """An empty cache for one batch of sequences, one entry per layer.

        Args:
            evict: evict keys of the layers with forget gates or a window; other layers hold all their keys. See
                :meth:`attnzoo.layer.attention.Attention.new_cache`.
            budget: tokens or memory that each layer with One-Pass Forgetting may hold, see there; or, as "2 MiB total",
                the memory of the keys and values of all these layers for one sequence, for which the keys of all heads
                and layers compete when a call of the model ends.

        Raises:
            ValueError: no layer can evict, or one that should has no bound of later scores (QK-norm or a softcap).
        """
        layers = self.attentions()
        if budget is not None and not any(layer.forget is not None for layer in layers):
            raise ValueError(f"budget: expected None (a budget is for layers with forget=...), got {budget!r}")
        if evict is not None and not any(layer.evicts for layer in layers):
            names = ", ".join(sorted({layer.variant.name for layer in layers}))
            raise ValueError(f"evict: expected None (all layers, {names}, need what they keep), got {evict!r}")
        given = [(evict if layer.evicts else None, budget if layer.forget is not None else None) for layer in layers]
        return [layer.new_cache(*each) for layer, each in zip(layers, given, strict=True)]

    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [block.attention for block in self._blocks()]

    def _blocks(self) -> list[DecoderBlock]:
        return cast("list[DecoderBlock]", list(self.blocks))

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        evict: float | str | Evict | None = None,
        budget: int | str | None = None,
    ) -> Tensor:
        """The sequences with sampled continuations, by one cached step per token.

        Args:
            input_ids: prompts of one length, integers [B, T].
            max_new_tokens: tokens to generate per sequence.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: sample among the k likeliest; None for all.
            generator: the source of random draws; None for torch's global one.
            evict, budget: as :meth:`new_cache` takes them.

        Returns:
            The prompts with their continuations, [B, T + max_new_tokens].

        Raises:
            TypeError, ValueError: an empty prompt, tokens beyond the vocabulary, or a number out of its range.
            NotFiniteError: the logits after a prompt are not finite; later ones are not looked at.
        """
        self.check_tokens("input_ids", input_ids)
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
        check_kinds(options, {"max_new_tokens": "int", "temperature": "float", "top_k": "int | None"})
        check_least(0, max_new_tokens=max_new_tokens, temperature=temperature)
        if top_k is not None and not 1 <= top_k <= self.config.vocab_size:
            raise ValueError(f"top_k: expected 1 to vocab_size = {self.config.vocab_size}, got {top_k}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected torch.Generator or None, got {type(generator).__name__}")
        with evaluating(self):
            cache, step, tokens = self.new_cache(evict, budget), input_ids, [input_ids]
            for _ in range(max_new_tokens):
                logits = self.logits(self.hidden(step, cache=cache)[:, -1]).float()  # [B, vocab]
                if step is input_ids and (broken := (~logits.isfinite().all(-1)).nonzero().flatten().tolist()):
                    raise NotFiniteError(broken)
                step = sample_token(logits, temperature, top_k, generator)
                tokens.append(step)
        return torch.cat(tokens, dim=1)


def sample_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """A token sampled from each row of the logits [B, vocab], [B, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    logits = logits - logits.amax(dim=-1, keepdim=True)  # a small temperature then overflows to -inf, never inf
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def recomputed(block: nn.Module, x: Tensor, **arguments: Any) -> Tensor:
    """A block's output for x, computed again in the backward pass instead of keeping its intermediate tensors."""
    context = shared_context()
    if context is not None:  # the backward pass may run in another thread, outside of the block of code
        arguments["context_fn"] = lambda: (nullcontext(), context_parallel(*context))
    return cast(Tensor, checkpoint(block, x, use_reentrant=False, **arguments))
