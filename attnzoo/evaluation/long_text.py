"""Long texts with few keys: a layer's output where each row reads the keys that a head holds, in memory O(T), and the
losses of a model that reads token by token through its caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.evaluation.losses import Array
from attnzoo.forgetting.network import ForgetNetwork
from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.student import Panel
from attnzoo.forms.protocol import Call
from attnzoo.forms.readout import logits_of

Score = Callable[[Tensor, int], Tensor]  # (positions of keys [B, G, n], a row) -> which go last, [B, G, n]
NEVER = 1e-30  # a retention below all others
FOR_EVER = 1e9  # the score of a key that is never evicted


def by_place(first: int) -> Score:
    """The scores of a window beside the ``first`` tokens of a text."""
    return lambda held, row: held.double().masked_fill(held < first, FOR_EVER)


def by_retention(network: ForgetNetwork, call: Call, window: int) -> Score:
    """The scores by a network of keys, which does not evict the last ``window`` tokens."""
    features, rows = network.of_keys(call.k, call.v), network.of_rows(call.q)

    def score(held: Tensor, row: int) -> Tensor:
        age = row - held
        mine = features.gather(2, held[..., None].expand(*held.shape, features.shape[3]))
        found = network.join(mine, rows)(Panel(0, held.shape[2], age[:, :, None]))[:, :, 0].sigmoid()
        return found.masked_fill(age < network.options.window, 1.0).masked_fill(age < window, FOR_EVER)

    return score


def read_few(panels: Logits, v: Tensor, budget: int, rows: int, score: Score) -> tuple[Tensor, Tensor]:
    """The output ``[B, T, H, V]`` of a layer whose heads hold few keys, and the number of keys that each row reads
    ``[T]``.

    Args:
        panels: :attr:`~attnzoo.forgetting.panels.Logits.plain` ones.
        v: ``[B, T, G, V]``.
        budget: keys that a head may hold.
        rows: rows between two evictions, at the first of which the keys of least score go.
        score: the scores.
    """
    (B, H, T), G, dtype = panels.shape, panels.heads, panels.own.dtype
    values, sink = v.to(dtype).transpose(1, 2), panels.given.sink
    held = torch.empty(B, G, 0, dtype=torch.int64, device=v.device)
    found, counts = [], []
    for start in range(0, T, rows):
        now = torch.arange(start, min(start + rows, T), device=v.device)
        room = budget - len(now)
        if held.shape[2] > room:
            held = held.gather(2, score(held, start).topk(room, -1).indices)
        counts.append(held.shape[2] + 1 + torch.arange(len(now)))
        held = torch.cat([held, now.expand(B, G, -1)], 2)
        by_query = held.repeat_interleave(H // G, 1)
        keys = panels.k.gather(2, by_query[..., None].expand(-1, -1, -1, panels.k.shape[3]))
        scores, decay = panels.q[:, :, now] @ keys.mT, None
        later = by_query[:, :, None] > now[:, None]
        if panels.sums is not None:
            sums, closed = panels.sums
            decay = (sums[:, :, now, None] - sums.gather(2, by_query)[:, :, None]).to(dtype)
            if closed is not None:
                later = later | (closed[:, :, now, None] != closed.gather(2, by_query)[:, :, None])
        a = logits_of(scores, panels.given, decay).masked_fill(later, -torch.inf)
        if sink is not None:
            a = torch.cat([a, sink.to(dtype)[:, None, None].expand(*a.shape[:-1], 1)], -1)
        of_keys = values.gather(2, held[..., None].expand(-1, -1, -1, values.shape[3])).repeat_interleave(H // G, 1)
        found.append(a.softmax(-1)[..., : held.shape[2]] @ of_keys)
    return torch.cat(found, 2).transpose(1, 2).to(v.dtype), torch.cat(counts)


@dataclass(frozen=True)
class Stepped:
    """The losses and the held keys of a model that has read windows token by token.

    Args:
        losses: nats of each token, ``[N, L]``.
        held: keys that a head held in the end, mean over heads, layers and windows.
    """

    losses: Array
    held: float


@torch.inference_mode()
def stepped_losses(model: nn.Module, windows: Tensor, budget: int | str) -> Stepped:
    """The losses of a model with One-Pass Forgetting that reads token by token through a cache with a budget.

    Keys go by the budget alone, none because its retention is below the layers' threshold, whatever the phase of the
    networks' training.

    Args:
        model: an :class:`attnzoo.models.LanguageModel` in evaluation mode.
        windows: ``[N, L + 1]``.
        budget: see :meth:`~attnzoo.models.decoder.LanguageModel.new_cache`.
    """
    whole: Any = model
    networks = [module for module in model.modules() if isinstance(module, ForgetNetwork)]
    given = [(network.options, network.blend) for network in networks]
    try:
        for network in networks:
            network.options, network.blend = replace(network.options, threshold=NEVER), 1.0
        return _stepped(whole, windows, budget)
    finally:
        for network, (options, blend) in zip(networks, given, strict=True):
            network.options, network.blend = options, blend


def _stepped(whole: Any, windows: Tensor, budget: int | str) -> Stepped:
    cache, losses = whole.new_cache(budget=budget), []
    for one, target in zip(windows[:, :-1].split(1, 1), windows[:, 1:].unbind(1), strict=True):
        logits = whole.logits(whole.hidden(one, cache=cache)[:, -1]).float()
        losses.append(F.cross_entropy(logits, target.long(), reduction="none").double().cpu())
    held = fmean(float(layer.state.settled().live.double().mean()) for layer in cache if hasattr(layer.state, "live"))
    return Stepped(np.asarray(torch.stack(losses, 1).numpy(), dtype=np.float64), held)
