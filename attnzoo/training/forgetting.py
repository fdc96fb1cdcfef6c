"""One-Pass Forgetting in a training run: its two phases, its loss terms, and training of the networks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnzoo.forgetting.network import ForgetNetwork
from attnzoo.forgetting.rules import Forgetting, shared_gap
from attnzoo.models.config import ModelConfig
from attnzoo.registry import get
from attnzoo.training.config import ForgettingConfig, TrainConfig

if TYPE_CHECKING:
    from attnzoo.models import LanguageModel
    from attnzoo.training.batches import TokenBatch
    from attnzoo.training.metrics import Row


@dataclass(frozen=True)
class Phase:
    """The schedule values of a layer at a step.

    Args:
        blend: lambda.
        temperature: tau.
        distillation: beta_r.
    """

    blend: float
    temperature: float
    distillation: float


def phase(step: int, config: ForgettingConfig, options: Forgetting, layer: int = 0, layers: int = 1) -> Phase:
    """The schedule values of layer ``layer`` of ``layers`` at update ``step`` (1 is the first), a pure function.

    In phase 1 lambda and tau are small and the network learns from the teacher. In phase 2 lambda moves linearly and
    tau geometrically to the values of the layer's options, and the weight of the distillation linearly to 0; the losses
    of the task and of the budget remain.
    """
    done = min(1.0, max(0, step - config.distill_steps) / max(1, config.anneal_steps))
    if config.order != "together" and layers > 1:  # each layer takes half of the time, the starts are spread
        turn = layer if config.order == "shallow_first" else layers - 1 - layer
        done = min(1.0, max(0.0, 2 * done - turn / (layers - 1)))
    blend = config.blend + (options.blend - config.blend) * done
    temperature = config.temperature * (options.temperature / config.temperature) ** done
    return Phase(blend, temperature, config.distillation * (1 - done))


def networks(model: nn.Module) -> list[ForgetNetwork]:
    """The forget networks of a model, from its first layer to its last."""
    return [module for module in model.modules() if isinstance(module, ForgetNetwork)]


def set_phase(found: Sequence[ForgetNetwork], config: ForgettingConfig, step: int) -> None:
    """Set the schedule values of each forget network at a step, before a forward pass."""
    for number, network in enumerate(found):
        now = phase(step, config, network.options, number, len(found))
        network.blend, network.temperature = now.blend, now.temperature
        network.distils, network.collects = now.distillation > 0, True


def config_now(model: LanguageModel) -> ModelConfig:
    """The model's configuration with the present schedule values as the layers' options."""
    if all(network.blend == network.options.blend for network in networks(model)):
        return model.config
    layers = []
    for spec, attention in zip(model.config.layers(), model.attentions(), strict=True):
        options, network = spec.options, attention.forget
        if network is not None:
            now = replace(network.options, blend=network.blend, temperature=network.temperature)
            options = {**options, "forgetting": asdict(now)}
        layers.append({"name": spec.name, "options": options})
    return replace(model.config, attention=layers, attention_options={})


@dataclass(frozen=True)
class Extra:
    """The terms that the layers' last call adds to the loss.

    Args:
        loss: ``beta_r L_r + beta_b L_b``, means over the layers.
        row: for the metrics: ``distillation``, ``budget`` and ``kept`` as tensors, and lambda and tau.
    """

    loss: Tensor
    row: dict[str, Any]


def taught(rows: TokenBatch, network: ForgetNetwork) -> int:
    """The number of pairs over which L_r is a mean: those older than the remember window, over all heads."""
    young = network.options.window if network.window is None else min(network.options.window, network.window)
    return rows.pairs(network.window) - rows.pairs(young)


def extra_loss(
    found: Sequence[ForgetNetwork], config: ForgettingConfig, step: int, weights: Tensor | None = None
) -> Extra | None:
    """Section 2.4's total loss without the task's loss; None where no layer has One-Pass Forgetting.

    Means over the layers, so that the weights mean the same for any number of them; layers with ``shared_budget`` have
    one budget together.

    Args:
        found: the networks.
        config: the run's configuration.
        step: the number of the update.
        weights: a factor of each layer's L_r, as the parts of a step may have different numbers of pairs.

    Raises:
        ValueError: a network whose layer was not called in training, with gradients, since :func:`set_phase`.
    """
    if not found:
        return None
    losses, kept, distilled, gaps, shared = [], [], [], [], []
    for number, network in enumerate(found):
        terms, now = network.terms, phase(step, config, network.options, number, len(found))
        if terms is None:
            raise ValueError(
                f"found: expected networks whose layers were called in training mode, with gradients, after set_phase; "
                f"network {number} has no loss terms (call set_phase before each forward pass; eval(), torch.no_grad() "
                "and checkpoint(use_reentrant=True) leave none)"
            )
        kept.append(terms.kept)
        if network.options.shared_budget:
            shared.append(terms.excess)
        else:
            gaps.append(terms.budget)
        if terms.distillation is not None:
            even = terms.distillation if weights is None else weights[number] * terms.distillation
            losses.append(now.distillation * even)
            distilled.append(terms.distillation.detach())
        network.terms, network.collects = None, False
    gaps += [len(shared) * shared_gap(shared)] if shared else []
    gap = torch.stack(gaps).sum() / len(found)
    row: dict[str, Any] = {"kept": torch.stack(kept).mean(), "budget": gap.detach()}
    row |= {"blend": sum(n.blend for n in found) / len(found)}
    row |= {"temperature": sum(n.temperature for n in found) / len(found)}
    if distilled:
        row["distillation"] = torch.stack(distilled).mean()
    distillation = torch.stack(losses).sum() / len(found) if losses else 0.0
    return Extra(config.budget * gap + distillation, row)


def shown(row: Mapping[str, Any]) -> Row:
    """The numbers of an :class:`Extra`'s row, under their names in the metrics."""
    return {f"forgetting_{name}": float(value) for name, value in row.items()}


def check_schedule(model: nn.Module, config: TrainConfig) -> None:
    """Raise where a run's settings of One-Pass Forgetting do not fit its model; freeze other weights where ``alone``.

    Raises:
        ValueError: settings without a layer with One-Pass Forgetting, or that such layers do not support.
    """
    found, settings = networks(model), config.forgetting
    if not found:
        if settings != ForgettingConfig():
            how = "model.attention_options.forgetting={}, say"
            raise ValueError(f"forgetting: expected its defaults, since no layer of the model forgets ({how})")
        return
    if settings.alone:
        if config.start_from is None:
            raise ValueError("forgetting.alone: expected false without start_from (all other weights are random)")
        model.requires_grad_(False)
        for network in found:
            network.requires_grad_(True)


def with_forgetting(source: TrainConfig | ModelConfig, options: Mapping[str, Any] | Forgetting) -> Any:
    """The configuration of a run or model with One-Pass Forgetting in its softmax layers.

    Args:
        source: the configuration of a run or of a model. A new run starts from the weights of the run (``start_from``)
            in a folder beside it, or, if that has not been run, from its own ``start_from``.
            (:func:`attnzoo.trained.exchange.recipe_of` reads it from the folder of a run or of a model.)
        options: options of :class:`~attnzoo.forgetting.rules.Forgetting`.

    Raises:
        ValueError: no layer is of the softmax side.
    """
    if isinstance(source, TrainConfig):
        folder = Path(source.output_dir)
        name = str(folder.with_name(f"{folder.name}-forgetting"))
        model = with_forgetting(source.model, options)
        start = str(folder) if (folder / "config.yaml").is_file() else source.start_from
        return replace(source, model=model, start_from=start, output_dir=name)
    given = asdict(options) if isinstance(options, Forgetting) else dict(options)
    layers = [
        {"name": spec.name, "options": {**spec.options, **({"forgetting": given} if _can(spec.name) else {})}}
        for spec in source.layers()
    ]
    if not any(_can(spec.name) for spec in source.layers()):
        names = ", ".join(sorted({spec.name for spec in source.layers()}))
        raise ValueError(f"forgetting: expected a model with a layer of the softmax side, got {names}")
    return replace(source, attention=layers, attention_options={})


def _can(name: str) -> bool:
    return get(name).side == "softmax"
