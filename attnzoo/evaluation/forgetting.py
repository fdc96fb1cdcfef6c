"""What a trained model loses when its layers may hold only so many keys, by rules that say which key goes first.

Every rule works on the same rows: a head holds at most M keys, the row's own among them. Where the next row would not
fit it gives up the keys of the least scores, for good: one, or room for M / 16 rows where that is more, by all rules
alike. So all are compared at equal memory. Weights are computed densely: for windows of some thousand tokens.

Rules, each in its simplest faithful form: ``window`` and ``sinks`` (the first 4 tokens and the last M - 4; Xiao et al.,
"Efficient Streaming Language Models with Attention Sinks", 2024) go by position; ``h2o`` by the sum of the attention to
a key so far, half of M being the last tokens (Zhang et al., "H2O", 2023); ``snapkv`` by that of the last 16 rows, which
are kept themselves (Li et al., "SnapKV", 2024, without its pooling over neighbours, and at every row in place of once);
``retention`` by what the layer's own forget network says; ``utility`` by what this row and later ones will need, which
networks learn to say (it looks ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.pruning import negligible
from attnzoo.algebra.sums import running_sum
from attnzoo.errors import unknown
from attnzoo.evaluation.losses import Array, token_losses
from attnzoo.forgetting.network import ForgetNetwork
from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.rules import Forgetting, least
from attnzoo.forgetting.student import remembered_of, retention_of
from attnzoo.forgetting.target import log_of_nothing, pooled
from attnzoo.forms.protocol import Call, FormSet
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.layer.attention import Attention

RULES = ("window", "sinks", "h2o", "snapkv", "retention", "utility")
BY_ATTENTION = ("h2o", "snapkv")
UNLIMITED = ("certified", "forgets")  # rules without a budget
OF_NETWORKS = ("retention", "forgets")  # rules that ask the layers' forget networks
_BY_PLACE = {"window": 0, "sinks": 4}  # and the first tokens that are kept beside the last ones
OBSERVED = 16
ROOM = 16  # M is so many times the number of rows for which room is made at a time
PAIRS = {"cpu": 2**21, "cuda": 2**25}  # of a row and a key, in a pass, if a window has no more
KEYS = 1024  # of which what later rows need is found at a time
FOR_EVER = 1e9  # the score of what a rule never gives up


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a rule may look at when it scores the keys before row t."""

    t: int
    budget: int
    age: Tensor  # of each key, [T]
    total: Tensor  # of the weights that rows so far gave to each key, mean over a group's heads, [B, G, T]
    last: Tensor  # that of each of the last rows, [B, G, rows, T]
    given: Tensor | None  # scores that were known beforehand, [B, G, T, T]
    window: int  # that the forget network never gives up


def _h2o(seen: _Seen) -> Tensor:
    return seen.total.masked_fill(seen.age < seen.budget // 2, FOR_EVER)


def _snapkv(seen: _Seen) -> Tensor:
    return seen.last.sum(2).masked_fill(seen.age < min(OBSERVED, seen.budget // 2), FOR_EVER)


def _given(seen: _Seen) -> Tensor:
    assert seen.given is not None
    recent = seen.age < min(seen.window, seen.budget // 2)
    return seen.given[:, :, seen.t].masked_fill(recent, FOR_EVER)


_SCORES: dict[str, Callable[[_Seen], Tensor]] = {
    "h2o": _h2o, "snapkv": _snapkv, "retention": _given, "utility": _given
}  # fmt: skip


def needed(logits: Tensor, v: Tensor) -> Tensor:
    """What each row and later ones need of each key, ``[B, G, T, T]``: its contributions, softly their maximum.

    Args:
        logits: ``[B, H, T, T]``, -inf where a row sees nothing.
        v: ``[B, T, G, V]``.
    """
    T, found = logits.shape[-1], []
    for a, values in zip(logits, v.to(logits.dtype).transpose(1, 2), strict=True):  # few of them fit into memory
        a = a.unflatten(0, (values.shape[0], -1))  # [G, R, T, T]
        output = (a.softmax(-1) @ values[:, None]).square().sum((1, 3))
        of_rows = least(output).log()[..., None]
        of_keys = least(values.square().sum(-1)).log()[:, None]
        lse, need = a.logsumexp(-1, keepdim=True), a.new_zeros(a.shape[0], T, T)
        for start in range(0, T, KEYS):
            keys, rows = slice(start, start + KEYS), slice(start, T)
            there = torch.ones(T - start, of_keys[..., keys].shape[-1], dtype=torch.bool, device=a.device).tril()
            log_s = (2 * (a[:, :, rows, keys] - lse[:, :, rows])).logsumexp(1) + of_keys[..., keys] - of_rows[:, rows]
            log_s = log_s.clamp_(min=log_of_nothing(log_s))
            need[:, rows, keys] = pooled(log_s[None], there, Forgetting(), 1.0)[0].masked_fill_(~there, 0.0)
        found.append(need)
    return torch.stack(found)


def held_keys(
    logits: Tensor, rule: str, budget: int, given: Tensor | None = None, *, heads: int, window: int = 1
) -> Tensor:
    """Which keys each row sees, ``[B, G, T, T]`` bool: at most ``budget``, its own among them.

    Args:
        logits: the teacher's, ``[B, H, T, T]``, -inf where a row sees nothing.
        rule: one of :data:`RULES`.
        budget: M.
        given: scores of ``retention`` and ``utility`` ``[B, G, T, T]``; the other rules find theirs.
        heads: G.
        window: the last tokens, which these two do not give up while they are less than half of M.

    Raises:
        ValueError: an unknown rule, or a budget below 1.
    """
    if rule not in (*_BY_PLACE, *_SCORES):
        raise unknown("rule", rule, RULES)
    if budget < 1:
        raise ValueError(f"budget: expected at least 1 (the row's own key), got {budget}")
    B, H, T, _ = logits.shape
    step, index, there = max(1, budget // ROOM), torch.arange(T, device=logits.device), _visible(logits, heads)
    if rule in _BY_PLACE:
        first, begins = min(_BY_PLACE[rule], budget - 1), index // step * step
        oldest = (begins + step).clamp(max=T) - (budget - first)  # beside the first ones
        return there & ((index < first) | (index >= oldest[:, None]))
    held = torch.zeros(B, heads, T, dtype=torch.bool, device=logits.device)
    total, last, rows = logits.new_zeros(B, heads, T), logits.new_zeros(B, heads, 0, T), []
    for start in range(0, T, step):
        stop = min(start + step, T)
        held = held & there[:, :, start]  # what no row sees any more takes no room
        if stop > budget:
            score = _SCORES[rule](_Seen(start, budget, start - index, total, last, given, window))
            best = score.masked_fill(~held, -torch.inf).topk(budget - (stop - start), -1).indices
            held = held & torch.zeros_like(held).scatter(-1, best, True)
        now = (held[:, :, None] | (index >= start)) & there[:, :, start:stop]  # [B, G, rows, T]
        rows.append(now)
        if rule in BY_ATTENTION:
            a = logits[:, :, start:stop].masked_fill(~now.repeat_interleave(H // heads, 1), -torch.inf)
            weights = a.softmax(-1).unflatten(1, (heads, -1)).mean(2)
            total, last = total + weights.sum(2), torch.cat([last, weights], 2)[:, :, -OBSERVED:]
        held = now[:, :, -1]
    return torch.cat(rows, 2)


def _visible(logits: Tensor, heads: int) -> Tensor:
    """The keys that the model itself lets a row see, ``[B, G, T, T]`` bool: not what is beyond its own window."""
    seen: Tensor = (logits > -torch.inf).unflatten(1, (heads, -1)).any(2).tril()
    return seen


class Limited(nn.Module):
    """Stands in the place of a layer's forget network while what it may hold is limited.

    Args:
        layer: whose place it is.
        rule: one of :data:`RULES`, ``certified`` (what :func:`attnzoo.algebra.pruning.evictable` leaves, with ``eps``)
            or ``forgets`` (what the forget network has not forgotten, without a limit).
        budget: M.
        eps: of ``certified``.

    Attributes:
        held: by sequence of all calls, the mean number of keys that a row sees.
        late: likewise, of the last quarter of the rows.
        last: which keys the rows of the last call saw, ``[B, G, T, T]``.
    """

    def __init__(self, layer: Attention, rule: str, budget: int = 0, eps: float = 1e-4) -> None:
        super().__init__()
        self.layer = (layer,)  # in a tuple: no part of this module
        self.network = layer.forget
        self.rule, self.budget, self.eps = rule, budget, eps
        self.held: list[float] = []
        self.late: list[float] = []
        self.last: Tensor | None = None

    def run(self, forms: FormSet, teacher: Any, call: Call, policy: Any = None) -> tuple[Tensor, None]:
        """The layer's core, as :meth:`attnzoo.forgetting.network.ForgetNetwork.run`."""
        given = call.options
        assert isinstance(forms, SoftmaxForms)
        placed = {name: given.get(name) for name in ("scale", "valid", "cu_seqlens", "window")}
        panels = Logits(forms, call.q, call.k, call.gate, **placed)
        (_, H, T), G = panels.shape, panels.heads
        a = torch.cat([
            F.pad(panels.panel(start, stop, panels.exists(start, stop)), (0, 0, start, 0), value=-torch.inf)
            for start, stop in panels.panels()
        ], -1)  # fmt: skip
        held = self._held(call, panels, a)
        seen = held.sum(-1).double()
        self.held += seen.mean((1, 2)).tolist()
        self.late += seen[..., T * 3 // 4 :].mean((1, 2)).tolist()
        self.last = held
        a = a.masked_fill(~held.repeat_interleave(H // G, 1), -torch.inf)
        if (sink := given.get("sink")) is not None:
            a = torch.cat([a, sink.to(a.dtype)[:, None, None].expand(*a.shape[:-1], 1)], -1)
        values = expand_heads(call.v, H).to(a.dtype).transpose(1, 2)
        return (a.softmax(-1)[..., :T] @ values).transpose(1, 2).to(call.v.dtype), None

    def _held(self, call: Call, panels: Logits, a: Tensor) -> Tensor:
        G, T = panels.heads, a.shape[-1]
        if self.rule == "certified":
            return ~self._certified(call) & _visible(a, G)
        scores, window = None, 1
        if self.rule in OF_NETWORKS:
            scores, window = self._retention(call, panels)
            if self.rule == "forgets":
                assert isinstance(self.network, ForgetNetwork)
                return (scores >= self.network.options.threshold) & _visible(a, G)
        if self.rule == "utility":
            scores = needed(a, call.v)
        return held_keys(a, self.rule, min(self.budget, T), scores, heads=G, window=window)

    def _retention(self, call: Call, panels: Logits) -> tuple[Tensor, int]:
        network = self.network
        if not isinstance(network, ForgetNetwork):
            raise ValueError(f"rule: expected a layer that forgets for {self.rule!r}, got one without forgetting")
        join, found = network.join(network.of_keys(call.k, call.v), network.of_rows(call.q)), []
        for start, stop in panels.panels():
            there = panels.exists(start, stop)
            x, age, _ = retention_of(panels, panels.panel(start, stop, there), start, stop, join, network.options)
            found.append(F.pad(remembered_of(x, age, there, network.options), (0, 0, start, 0)))
        return torch.cat(found, -1), network.options.window

    def _certified(self, call: Call) -> Tensor:
        """Which keys no row needs from row t on, ``[B, G, T, T]``."""
        [layer] = self.layer
        bounds, g = layer.query_bounds(call.q.dtype), call.gate.per_token(call.q).log_decay
        if bounds is None or g is None:
            raise ValueError("rule: expected a decay and QK-norm for 'certified', got a layer without one of them")
        c = running_sum(g.double().transpose(1, 2), -1)
        longest = call.k.double().norm(dim=-1).cummax(1).values.transpose(1, 2)
        longest = longest.repeat_interleave(c.shape[1] // longest.shape[1], 1)
        tails = torch.logcumsumexp(-c, -1)
        log_eps = torch.tensor(self.eps).log().item()
        rows = [negligible(longest, tails, c[..., t], log_eps, bounds) for t in range(c.shape[-1])]
        gone: Tensor = torch.stack(rows, 2).unflatten(1, (call.k.shape[2], -1)).all(2)
        return gone


@contextmanager
def limited(model: nn.Module, rule: str, budget: int = 0, eps: float = 1e-4) -> Iterator[list[Limited]]:
    """All softmax layers of a model hold what a rule leaves them, inside the ``with``; gives them, first to last."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, Attention) and m.variant.side == "softmax"]
    before = [layer.forget for layer in layers]
    now = [Limited(layer, rule, budget, eps) for layer in layers]
    try:
        for layer, one in zip(layers, now, strict=True):
            layer.forget = one
        yield now
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.forget = was


def knows(model: nn.Module, rule: str) -> bool:
    """Whether every softmax layer of a model has what a rule goes by, and there is one."""
    layers = [m for m in model.modules() if isinstance(m, Attention) and m.variant.side == "softmax"]
    if rule in OF_NETWORKS:
        return bool(layers) and all(layer.forget is not None for layer in layers)
    if rule == "certified":
        return bool(layers) and all(layer.variant.prunable and layer.config.qk_norm != "none" for layer in layers)
    return bool(layers)


@torch.inference_mode()
def ages_of_forgetting(model: nn.Module, tokens: Tensor, rule: str = "forgets", budget: int = 0) -> list[Tensor]:
    """How many rows saw each token before a layer had done with it.

    Args:
        model: in evaluation mode.
        tokens: of one text, integers ``[T]``.
        rule: by which keys go; the default needs softmax layers that forget.
        budget: keys that a head may hold, where the rule has a limit.

    Returns:
        By layer, first to last, ``[G, T]`` int64; of a token that was never forgotten, -1.

    Raises:
        ValueError: a layer does not know the rule.
    """
    with limited(model, rule, budget) as layers:
        model(tokens[None].to(next(model.parameters()).device))
    found = []
    for layer in layers:
        assert layer.last is not None
        seen = layer.last[0].sum(-2)
        found.append(seen.masked_fill(layer.last[0, :, -1], -1))
    return found


@dataclass(frozen=True)
class Point:
    """One point of the picture of loss against memory.

    Args:
        rule: by which keys went.
        budget: keys that each head could hold; 0 for no limit.
        held: keys that a row saw, mean over rows, heads and layers.
        loss: nats per token.
        late: keys that a row of the last quarter saw, likewise.
    """

    rule: str
    budget: int
    held: float
    loss: float
    late: float


def loss_within(
    model: nn.Module, windows: Tensor, rules: Sequence[str], budgets: Sequence[int], *, eps: float = 1e-4,
    skip: int = 0, batch_size: int | None = None,
) -> list[Point]:  # fmt: skip
    """The loss on held-out windows for each rule and budget; ``certified`` and ``forgets`` have one point each.

    Args:
        model: in evaluation mode.
        windows: ``[N, L + 1]``.
        skip: leave the first tokens of each window out of the mean, which no rule touches.
        batch_size: windows per forward pass; None for as many as :data:`PAIRS` says.
    """
    points = []
    batch_size = batch_size or max(
        1, PAIRS["cpu" if windows.device.type == "cpu" else "cuda"] // (windows.shape[1] - 1) ** 2
    )
    for rule in rules:
        for budget in [0] if rule in UNLIMITED else budgets:
            with limited(model, rule, budget, eps) as layers:
                losses: Array = token_losses(model, windows, batch_size)
            held, late = (fmean(x for layer in layers for x in getattr(layer, name)) for name in ("held", "late"))
            points.append(Point(rule, budget, held, float(losses[:, skip:].mean()), late))
    return points
