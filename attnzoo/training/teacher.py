"""Targets that a run takes from another model: the outputs of its attention layers, or its logits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.models import LanguageModel, ModelOutput
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import recomputed
from attnzoo.models.loss import ALIGNED, IGNORED, divergence, head_loss
from attnzoo.precision import wide_dtype
from attnzoo.training.config import TrainConfig, check_context_parallel
from attnzoo.training.start import config_in, weights_for


def check_teacher(model: LanguageModel, config: TrainConfig) -> None:
    """Raise where a run's teacher does not fit its model; freeze all but the layers that `objective=align` trains.

    Raises:
        FileNotFoundError: neither a run nor a model folder.
        ValueError: another library's model, another vocabulary, or sizes or layers by which nothing can be aligned.
    """
    if config.teacher is None:
        return
    theirs, ours = config_in(config.teacher, "teacher"), model.config
    if config.context_parallel > 1:
        check_context_parallel(theirs, config.context_parallel, "teacher")
    sizes = ["vocab_size", *(["hidden_size", "num_layers"] if config.objective == "align" else [])]
    for name in sizes:
        if getattr(theirs, name) != getattr(ours, name):
            raise ValueError(
                f"teacher: expected a model with {name}={getattr(ours, name)}, as this one has, got "
                f"{getattr(theirs, name)} in {config.teacher!r}"
            )
    if config.objective == "align":
        changed = changed_layers(theirs, ours)
        if not changed:
            raise ValueError(f"objective=align: expected layers other than those of {config.teacher!r}, got the same")
        model.requires_grad_(False)
        for layer in changed:
            model.attentions()[layer].requires_grad_(True)


def changed_layers(theirs: ModelConfig, ours: ModelConfig) -> list[int]:
    """The numbers of the layers in which two models of equal depth differ."""
    return [number for number, (a, b) in enumerate(zip(theirs.layers(), ours.layers(), strict=True)) if a != b]


def load_teacher(config: TrainConfig) -> LanguageModel | None:
    """The teacher of a run on the CPU, with frozen weights of the run's precision; None for a run without one.

    Raises:
        ValueError: a weight is missing or of another shape, or the data's tokens are not the teacher's.
    """
    if config.teacher is None:
        return None
    with torch.device("meta"):  # first weights would move the random state
        teacher = LanguageModel(config_in(config.teacher, "teacher"))
    state, missing, _ = weights_for(teacher, config.teacher, config.data, "teacher")
    if missing:
        raise ValueError(f"teacher: expected all weights of its layers in {config.teacher!r}, found no {missing[0]}")
    teacher.load_state_dict(state, assign=True)
    if teacher.config.tie_embeddings:
        teacher.head.weight = teacher.embedding.weight
    teacher.to(torch.bfloat16 if config.mixed_precision == "pure_bf16" else torch.float32)
    return teacher.requires_grad_(False).eval()


def fingerprint(model: LanguageModel | None) -> str:
    """A digest of a model's weights; empty without one."""
    if model is None:
        return ""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def learn_from(teacher: LanguageModel, model: LanguageModel, objective: str) -> None:
    """Let a model in training mode give the loss of an objective in place of its text's; other calls stay."""
    loss: Callable[..., Tensor] = _distilled
    if objective == "align":
        loss = partial(_aligned, changed_layers(teacher.config, model.config))

    def forward(
        student: LanguageModel, input_ids: Tensor, targets: Tensor | None = None, **options: Any
    ) -> ModelOutput:
        if targets is None or not student.training:
            return LanguageModel.forward(student, input_ids, targets, **options)
        packed = {name: value for name, value in options.items() if name == "cu_seqlens"}
        return ModelOutput(None, loss(teacher, student, input_ids, targets, **packed))

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]


def _aligned(
    layers: Collection[int], teacher: LanguageModel, student: LanguageModel, input_ids: Tensor, targets: Tensor,
    **packed: Tensor,
) -> Tensor:  # fmt: skip
    """The mean over layers and counted tokens of ``|a - b|^2 / |b|^2``, b being the teacher's output of a layer and a
    the student's for the same input."""
    with torch.no_grad(), _calls(teacher, layers) as seen:
        teacher.hidden(input_ids, **packed)  # type: ignore[arg-type]
    errors = []
    for number, (given, first, aim) in seen.items():
        layer, wide = student.attentions()[number], wide_dtype(aim.dtype)
        more: dict[str, Any] = {**packed, **({} if layer.value_residual is None else {"first": first})}
        out = recomputed(layer, given, **more) if student.recompute else layer(given, **more)
        size = aim.to(wide).square().sum(-1).clamp(min=torch.finfo(wide).tiny)
        errors.append((out.to(wide) - aim.to(wide)).square().sum(-1) / size)
    counted = targets != IGNORED
    return (torch.stack(errors).mean(0) * counted).sum() / counted.sum()


@contextmanager
def _calls(model: LanguageModel, layers: Collection[int]) -> Iterator[dict[int, tuple[Tensor, Any, Tensor]]]:
    """The input, the first layer's values where layers share them, and the output of each of these attention layers, in
    a dict that a forward pass fills."""
    seen: dict[int, tuple[Tensor, Any, Tensor]] = {}

    def noting(number: int) -> Any:
        return lambda _, args, given, output: seen.__setitem__(number, (args[0], given.get("first"), output))

    with ExitStack() as hooks:
        for number in layers:
            hook = model.attentions()[number].register_forward_hook(noting(number), with_kwargs=True)
            hooks.callback(hook.remove)
        yield seen


def _distilled(
    teacher: LanguageModel, student: LanguageModel, input_ids: Tensor, targets: Tensor, **packed: Tensor
) -> Tensor:
    """The mean divergence of the student's next token from the teacher's, over the counted tokens."""
    with torch.no_grad():
        theirs = teacher.hidden(input_ids, **packed).flatten(0, 1)  # type: ignore[arg-type]
    again = recomputed if student.recompute else None
    x = student.hidden(input_ids, recompute=again, **packed).flatten(0, 1)  # type: ignore[arg-type]
    head = teacher.head.weight
    if x.is_cuda:
        head = F.pad(head, (0, 0, 0, -len(head) % ALIGNED))
    chunk = partial(divergence, head=head, cap=teacher.config.logit_softcap)
    softcap = student.config.logit_softcap
    return head_loss(x, student.head.weight, targets.flatten(), softcap=softcap, chunk=chunk, beside=(theirs,))
