"""Hugging Face's `generate` on our generation engine: calls that it can serve, and how they run."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin

from attnzoo.kernels.decode.plan import MOST_ROWS
from attnzoo.models.generation.engine import Generator
from attnzoo.models.generation.proposals import Draft, ModelDraft, from_model, look_up
from attnzoo.models.modes import evaluating

GRADIENTS = "make_inputs_require_grad"  # hooks of transformers and PEFT, which change no output
LEAST = 64  # new tokens from which on recording a CUDA graph pays
TAKEN = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id",
    "bos_token_id", "use_cache", "transformers_version", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "num_assistant_tokens", "num_return_sequences",
}  # fmt: skip
OTHERS = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "inputs", "generation_config", "kwargs"}

_engines: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Generator]] = weakref.WeakKeyDictionary()
_busy: weakref.WeakKeyDictionary[nn.Module, threading.Lock] = weakref.WeakKeyDictionary()


class NeedsLoopError(Exception):
    """A call needs transformers' own loop; the message says why."""


@dataclass(frozen=True)
class Asked:
    """The request of a `generate` call.

    Args:
        rows: the prompts, `[B, T]`.
        prompts: the prompts' tokens without padding.
        new: the most tokens to generate.
        stop: tokens that end a sequence.
        pad: the token that fills rows after their end.
        sampling: sampling options by the names of `Generator.add`.
        limits: limits of the caches by the names of `Generator`.
        draft: the draft that proposes tokens, or None.
    """

    rows: Tensor
    prompts: list[Tensor]
    new: int
    stop: list[int]
    pad: int
    sampling: dict[str, Any]
    limits: dict[str, Any]
    draft: Draft | None = None


def request_of(
    model: Any, inputs: Tensor | None, config: GenerationConfig | None, given: Mapping[str, Any], limits: dict[str, Any]
) -> Asked:
    """The request of `model.generate(inputs, config, **given, **limits)`.

    Raises:
        NeedsLoopError: an option that only the loop of transformers supports.
    """
    given = dict(given)  # a None overrides the configuration
    helper = given.pop("assistant_model", None)
    for name in (name for name in OTHERS & given.keys() if given[name] is not None and given[name] is not False):
        raise NeedsLoopError(f"{name}: expected none, as it belongs to the loop")
    _check_model(model)
    settings, rest = model._prepare_generation_config(config, **given)
    rows = rest.pop("input_ids", inputs)
    mask = rest.pop("attention_mask", None)
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rest.get("inputs_embeds") is not None:
        raise NeedsLoopError("input_ids: expected tokens [B, T]")
    for name in (name for name, x in rest.items() if x is not None and x is not False):
        raise NeedsLoopError(f"{name}: expected none, as the engine's steps do not read it")
    neutral = GenerationConfig().to_dict()
    if hasattr(settings, "_get_default_generation_params"):  # transformers 5
        neutral |= settings._get_default_generation_params()
    for name, x in settings.to_dict().items():
        if name not in TAKEN and name[0] != "_" and x is not None and x is not False and x != neutral.get(name):
            raise NeedsLoopError(f"{name}: expected {neutral.get(name)!r}, got {x!r}")
    if settings.max_new_tokens is None:
        raise NeedsLoopError("max_new_tokens: expected a number, got None")
    if settings.use_cache is False:
        raise NeedsLoopError("use_cache: expected True, got False")
    stop = settings.eos_token_id
    stop = [] if stop is None else [int(token) for token in torch.as_tensor(stop).flatten()]
    pad = settings.pad_token_id if settings.pad_token_id is not None else (stop or [0])[0]
    if mask is None and settings.pad_token_id is not None and bool((rows == pad).any()):
        raise NeedsLoopError("attention_mask: expected one beside prompts with the padding token, got None")
    if mask is not None and (mask.shape != rows.shape or not bool(mask[:, -1].all())):
        raise NeedsLoopError("attention_mask: expected one of the prompts' shape, with padding on the left")
    prompts = list(rows) if mask is None else [row[there.bool()] for row, there in zip(rows, mask, strict=True)]
    each = settings.num_return_sequences or 1
    rows, prompts = rows.repeat_interleave(each, 0), [prompt for prompt in prompts for _ in range(each)]
    sampling, draft = _sampling(settings, model.config.vocab_size), _draft(settings, helper, type(model))
    return Asked(rows, prompts, settings.max_new_tokens, stop, pad, sampling, limits, draft)


def _draft(settings: Any, helper: Any, ours: type) -> Draft | None:
    """The draft for the settings of assisted generation, or None."""
    if helper is not None and not issubclass(type(helper), ours):
        raise NeedsLoopError(f"assistant_model: expected {ours.__name__}, got {type(helper).__name__}")
    if helper is not None:
        wanted = helper.generation_config.num_assistant_tokens or 5
        return from_model(helper.model, min(int(wanted), MOST_ROWS - 1))
    if settings.prompt_lookup_num_tokens is None:
        return None
    return look_up(min(int(settings.prompt_lookup_num_tokens), MOST_ROWS - 1), settings.max_matching_ngram_size or 2)


def _check_model(model: Any) -> None:
    """Raise where hooks, adapters or autocast change the model's `forward` or `generate`, which the engine bypasses."""
    if "prepare_inputs_for_generation" in vars(model):
        raise NeedsLoopError("prepare_inputs_for_generation: expected the model's own (adapters replace it)")
    # a graph records what a hook within the model does once, and calls it no more
    within = [part for part in model.modules() if part is model or model.device.type == "cuda"]
    if any(hasattr(part, "_hf_hook") for part in model.modules()) or any(map(_touched, within)):
        raise NeedsLoopError("hooks: expected none (weights that move between devices, and functions around modules)")
    if torch.is_autocast_enabled(model.device.type):
        raise NeedsLoopError("autocast: expected none")


def _touched(part: nn.Module) -> bool:
    """Whether hooks or a ``forward`` of its own, other than a compiled one, change what a module computes."""
    own, hooks = vars(part).get("forward"), (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    compiled = hasattr(own, "_torchdynamo_orig_callable")
    changed = any(not getattr(hook, "__name__", "").startswith(GRADIENTS) for hook in hooks)
    return changed or (own is not None and not compiled)


def _sampling(settings: Any, vocab_size: int) -> dict[str, Any]:
    if not settings.do_sample:
        return {"temperature": 0.0}
    top_k = settings.top_k if settings.top_k and settings.top_k < vocab_size else None
    top_p = 1.0 if settings.top_p is None else float(settings.top_p)
    temperature = 1.0 if settings.temperature is None else float(settings.temperature)
    if temperature <= 0:
        raise NeedsLoopError(f"temperature: expected above 0 with do_sample, got {settings.temperature}")
    if top_p == 0:  # transformers then keeps the likeliest token alone
        return {"temperature": 0.0}
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def run_on_engine(model: Any, call: Asked) -> Tensor:
    """The prompts with their continuations, `[B, T + n]`, as `generate` returns them; calls of other threads wait.

    The seeds of samples come from torch's global generator.

    Raises:
        NeedsLoopError: the model has no in-place cache, or the cache does not fit into the memory.
        NotFiniteError: the logits after a prompt are not finite.
    """
    helpers = [call.draft.model] if isinstance(call.draft, ModelDraft) else []
    try:
        # threads of a server share the model's one engine
        with _busy.setdefault(model, threading.Lock()), evaluating(model, *helpers):
            generator = _engine(model, len(call.prompts), max(map(len, call.prompts)) + call.new, call.limits)
            seeds = [0] * len(call.prompts)
            if call.sampling["temperature"]:
                seeds = torch.randint(2**31, (len(call.prompts),)).tolist()
            ids = [
                generator.add(prompt, call.new, seed=seed, stop=call.stop, **call.sampling)
                for prompt, seed in zip(call.prompts, seeds, strict=True)
            ]
            found = generator.run(call.draft)
            generator.requests.clear()
    except BaseException:
        _engines.pop(model, None)
        raise
    longest = max(map(len, found.values()))
    after = call.rows.new_full((len(ids), longest), call.pad)
    for row, number in enumerate(ids):
        after[row, : len(found[number])] = torch.tensor(found[number], dtype=after.dtype)
    return torch.cat([call.rows, after], 1)


def _engine(model: Any, rows: int, tokens: int, limits: dict[str, Any]) -> Generator:
    """The last call's engine if it can serve this call, else a new one that replaces it."""
    places = [x.data_ptr() for x in model.parameters()], _adapters(model)
    key, generator = _engines.get(model, (None, None))
    if generator is None or key != (rows, places, limits) or generator.max_tokens < tokens:
        _engines.pop(model, None)
        generator = None  # free its memory before the next one allocates
        room = -(-tokens // 256) * 256
        try:
            known = model.model.config.learned_positions or room
            generator = Generator(model.model, rows, max(tokens, min(room, known)), **limits)
        except (ValueError, MemoryError) as error:
            raise NeedsLoopError(str(error)) from error
        _engines[model] = (rows, places, limits), generator
    return generator


def _adapters(model: nn.Module) -> list[Any]:
    """The active adapters of PEFT's layers and their scales, by which a recorded graph becomes stale."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    layers = [] if peft is None else [part for part in model.modules() if isinstance(part, peft.BaseTunerLayer)]
    return [
        (x.disable_adapters, list(x.active_adapters), list(x.merged_adapters), dict(getattr(x, "scaling", {})))
        for x in layers
    ]


def release(model: nn.Module) -> None:
    """Free the memory of the last call's engine."""
    _engines.pop(model, None)
