"""The loss of a trained model whose layers hold a limited number of keys, by rules of eviction.

With every rule a head holds at most M keys, the row's own included. Where the next row would not fit, it evicts the
keys of the least scores: one, or M / 16 where that is more. So all rules are compared at equal memory. Weights are
computed densely, for windows of some thousand tokens; beyond that ``window``, ``sinks`` and the retention of networks
of keys take memory O(T) (:mod:`attnzoo.evaluation.long_text`).

Rules, each in its simplest faithful form: ``window`` and ``sinks`` (the first 4 tokens and the last M - 4; Xiao et al.,
"Efficient Streaming Language Models with Attention Sinks", 2024) go by position; ``h2o`` by the sum of the attention to
a key so far, half of M being the last tokens (Zhang et al., "H2O", 2023); ``snapkv`` by that of the last 16 rows, which
are kept themselves (Li et al., "SnapKV", 2024, without its pooling over neighbours, and at every row in place of once);
``retention`` by the retention of the layer's forget network; ``utility`` by the contributions to this row and later
ones, the target of forget networks (it looks ahead). ``retrieval`` holds all keys and reads at most
M: blocks of M / 8 keys, the row's own and the earlier ones whose mean key has the largest product with the query (Lu et
al., "MoBA", 2025, without its training).
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
from attnzoo.evaluation.long_text import FOR_EVER, Score, by_place, by_retention, read_few
from attnzoo.evaluation.losses import Array, token_losses
from attnzoo.forgetting.network import ForgetNetwork
from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.rules import Forgetting, least
from attnzoo.forgetting.student import remembered_of, retention_of
from attnzoo.forgetting.target import log_of_nothing, pooled
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call, FormSet
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.layer.attention import Attention

RULES = ("window", "sinks", "h2o", "snapkv", "retrieval", "retention", "utility")
BY_ATTENTION = ("h2o", "snapkv")
UNLIMITED = ("certified", "forgets")  # rules without a budget
OF_NETWORKS = ("retention", "forgets")  # rules by the layers' forget networks
_BY_PLACE = {"window": 0, "sinks": 4}  # rules by position -> number of first tokens held
OBSERVED = 16
BLOCKS = 8  # blocks that ``retrieval`` reads
DENSE = 2**13  # tokens up to which a window's weights are computed densely
ROUNDS = 16  # M / ROUNDS keys are evicted at a time
PAIRS = {"cpu": 2**21, "cuda": 2**25}  # (row, key) pairs of a pass, if a window has no more
KEYS = 1024  # keys per chunk of the utility


@dataclass(frozen=True, eq=False)
class _Seen:
    """The inputs of a rule that scores the keys before row t."""

    t: int
    budget: int
    age: Tensor  # age of each key in tokens, [T]
    total: Tensor  # sum of earlier rows' weights per key, mean over a group's heads, [B, G, T]
    last: Tensor  # weights of each of the last rows, [B, G, rows, T]
    given: Tensor | None  # scores computed beforehand, [B, G, T, T]
    window: int  # last tokens that the forget network never evicts


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
    """The utility of each key at each row, ``[B, G, T, T]``: a soft maximum of its contributions to that and later
    rows.

    Args:
        logits: ``[B, H, T, T]``, -inf where a row sees nothing.
        v: ``[B, T, G, V]``.
    """
    T, found = logits.shape[-1], []
    # one sequence at a time, to bound the memory
    for a, values in zip(logits, v.to(logits.dtype).transpose(1, 2), strict=True):
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
    """The mask of keys that each row sees, ``[B, G, T, T]`` bool: at most ``budget``, its own included.

    Args:
        logits: the teacher's logits ``[B, H, T, T]``, -inf for pairs that are not visible.
        rule: one of :data:`RULES`.
        budget: M.
        given: scores of ``retention`` and ``utility`` ``[B, G, T, T]``; other rules compute theirs.
        heads: G.
        window: the last tokens, which these two rules do not evict while they are fewer than half of M.

    Raises:
        ValueError: an unknown rule, or a budget below 1.
    """
    if rule not in RULES:
        raise unknown("rule", rule, RULES)
    if budget < 1:
        raise ValueError(f"budget: expected at least 1 (the row's own key), got {budget}")
    B, H, T, _ = logits.shape
    step, index, there = max(1, budget // ROUNDS), torch.arange(T, device=logits.device), _visible(logits, heads)
    if rule == "retrieval":
        return there & _retrieved(logits, budget, heads)
    if rule in _BY_PLACE:
        first, begins = min(_BY_PLACE[rule], budget - 1), index // step * step
        oldest = (begins + step).clamp(max=T) - (budget - first)  # last tokens beside the first ones
        return there & ((index < first) | (index >= oldest[:, None]))
    held = torch.zeros(B, heads, T, dtype=torch.bool, device=logits.device)
    total, last, rows = logits.new_zeros(B, heads, T), logits.new_zeros(B, heads, 0, T), []
    for start in range(0, T, step):
        stop = min(start + step, T)
        held = held & there[:, :, start]  # keys that no later row sees take no room
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


def blocks_of(budget: int) -> int:
    """The keys of a block of ``retrieval``."""
    return max(1, budget // BLOCKS)


def _retrieved(logits: Tensor, budget: int, heads: int) -> Tensor:
    """The mask of keys that each row retrieves, ``[B, G, T, T]`` bool, some of them perhaps not visible."""
    T, size = logits.shape[-1], blocks_of(budget)
    block = torch.arange(T, device=logits.device) // size
    blocks = F.pad(logits, (0, -T % size), value=-torch.inf).unflatten(-1, (-1, size))
    seen = blocks > -torch.inf
    mean = blocks.masked_fill(~seen, 0.0).sum(-1) / seen.sum(-1)  # the logit of the mean key; nan if it sees none
    mean = mean.unflatten(1, (heads, -1)).mean(2).nan_to_num(-torch.inf)
    earlier = torch.arange(mean.shape[-1], device=logits.device) < block[:, None]
    best = mean.masked_fill(~earlier, -torch.inf).topk(min(budget // size - 1, mean.shape[-1]), -1).indices
    chosen = torch.zeros_like(mean, dtype=torch.bool).scatter(-1, best, True) & earlier
    return chosen.repeat_interleave(size, -1)[..., :T] | (block == block[:, None])


def _visible(logits: Tensor, heads: int) -> Tensor:
    """The mask of keys that causality and the model's window allow, ``[B, G, T, T]`` bool."""
    seen: Tensor = (logits > -torch.inf).unflatten(1, (heads, -1)).any(2).tril()
    return seen


class Limited(nn.Module):
    """A replacement of a layer's forget network that limits the keys which the layer holds.

    Args:
        layer: the layer.
        rule: one of :data:`RULES`, ``certified`` (eviction by :func:`attnzoo.algebra.pruning.evictable` with ``eps``)
            or ``forgets`` (the retention of the forget network, without a limit).
        budget: M.
        eps: eps of ``certified``.
        long: do without the weights of all pairs, where the rule can; ``last`` is None then.

    Attributes:
        held: per sequence of all calls, the mean number of keys that a row sees.
        late: the same mean over the last quarter of the rows.
        last: mask of the keys that the rows of the last call saw, ``[B, G, T, T]``.
    """

    def __init__(self, layer: Attention, rule: str, budget: int = 0, eps: float = 1e-4, long: bool = False) -> None:
        super().__init__()
        self.layer = (layer,)  # a tuple keeps torch from registering the layer here
        self.network = layer.forget
        self.rule, self.budget, self.eps, self.long = rule, budget, eps, long
        self.held: list[float] = []
        self.late: list[float] = []
        self.last: Tensor | None = None

    def run(
        self, forms: FormSet, teacher: Any, call: Call, policy: Any = None, fused: bool = False
    ) -> tuple[Tensor, None]:
        """The layer's core, as :meth:`attnzoo.forgetting.network.ForgetNetwork.run`, without kernels."""
        given = call.options
        assert isinstance(forms, SoftmaxForms)
        panels = Logits(forms, call.q, call.k, call.gate, SoftmaxOptions(**given))
        (_, H, T), G = panels.shape, panels.heads
        if self.long and panels.plain and (score := self._score(call)) is not None:
            return self._long(call, panels, score), None
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

    def _score(self, call: Call) -> Score | None:
        """The scores of a rule that needs no weights; None for others."""
        network = self.network
        if self.rule in _BY_PLACE:
            return by_place(min(_BY_PLACE[self.rule], self.budget - 1))
        if self.rule == "retention" and isinstance(network, ForgetNetwork) and not network.options.of_pairs:
            return by_retention(network, call, min(network.options.window, self.budget // 2))
        return None

    def _long(self, call: Call, panels: Logits, score: Score) -> Tensor:
        """:meth:`run` in memory O(T)."""
        o, count = read_few(panels, call.v, self.budget, max(1, self.budget // ROUNDS), score)
        seen = count.double()
        self.held += [seen.mean().item()] * len(o)
        self.late += [seen[len(seen) * 3 // 4 :].mean().item()] * len(o)
        return o

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
        """The mask of keys that no row from row t on needs, ``[B, G, T, T]``."""
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
def limited(
    model: nn.Module, rule: str, budget: int = 0, eps: float = 1e-4, long: bool = False
) -> Iterator[list[Limited]]:
    """A context in which a rule limits all softmax layers of a model; yields their :class:`Limited`, first to last."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, Attention) and m.variant.side == "softmax"]
    before = [layer.forget for layer in layers]
    now = [Limited(layer, rule, budget, eps, long) for layer in layers]
    try:
        for layer, one in zip(layers, now, strict=True):
            layer.forget = one
        yield now
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.forget = was


def knows(model: nn.Module, rule: str) -> bool:
    """Whether a model has softmax layers, each with the gate or network that the rule needs."""
    layers = [m for m in model.modules() if isinstance(m, Attention) and m.variant.side == "softmax"]
    if rule in OF_NETWORKS:
        return bool(layers) and all(layer.forget is not None for layer in layers)
    if rule == "certified":
        return bool(layers) and all(layer.variant.prunable and layer.config.qk_norm != "none" for layer in layers)
    return bool(layers)


@torch.inference_mode()
def ages_of_forgetting(model: nn.Module, tokens: Tensor, rule: str = "forgets", budget: int = 0) -> list[Tensor]:
    """The number of rows that saw each token before a layer evicted it.

    Args:
        model: in evaluation mode.
        tokens: one text, integers ``[T]``.
        rule: the rule of eviction; the default needs layers with One-Pass Forgetting.
        budget: keys that a head may hold, where the rule has a limit.

    Returns:
        Per layer, first to last, ``[G, T]`` int64; -1 for tokens that were never evicted.

    Raises:
        ValueError: a layer lacks the gate or network of the rule.
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
    """One point of the curve of loss against memory.

    Args:
        rule: the rule of eviction.
        budget: keys that each head could hold; 0 for no limit.
        held: keys that a row saw, mean over rows, heads and layers.
        loss: nats per token.
        late: keys that a row of the last quarter saw, mean over rows, heads and layers.
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
        skip: number of first tokens of each window that the mean leaves out, as no rule changes them.
        batch_size: windows per forward pass; None for as many as :data:`PAIRS` says.
    """
    points = []
    batch_size = batch_size or max(
        1, PAIRS["cpu" if windows.device.type == "cpu" else "cuda"] // (windows.shape[1] - 1) ** 2
    )
    for rule in rules:
        for budget in [0] if rule in UNLIMITED else budgets:
            with limited(model, rule, budget, eps, windows.shape[1] - 1 > DENSE) as layers:
                losses: Array = token_losses(model, windows, batch_size)
            held, late = (fmean(x for layer in layers for x in getattr(layer, name)) for name in ("held", "late"))
            points.append(Point(rule, budget, held, float(losses[:, skip:].mean()), late))
    return points
