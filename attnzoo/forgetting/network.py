"""The forget network of a layer, and the student that reads the keys by it (One-Pass Forgetting, section 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from attnzoo.algebra.values import as_given, records
from attnzoo.forgetting.cache import ForgettingCache, Network, Policy
from attnzoo.forgetting.inplace import ForgettingMemory
from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.rules import Forgetting, blended
from attnzoo.forgetting.steps import extend_forgetting
from attnzoo.forgetting.student import Forgotten, Panel, Retention, forgetful_attention, hard_attention
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.pages.present_tokens import LastRows
from attnzoo.forms.options import SoftmaxOptions, check_softmax
from attnzoo.forms.protocol import Call, FormSet
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.kernels.common.untraced import untraced
from attnzoo.precision import PreciseModule, fill, wide

PAIR = 3  # features of a pair: its age, its logit, the mean attention to the key so far
REMEMBERS = 3.0  # logit of retention at first, at age 0
DECAYS = -5.0  # softplus(-5) = 0.007: half forgotten after 100 tokens
FADES = 0.54  # softplus(0.54) = 1, what retention's logit loses at first while the logarithm of the age grows by 1; a
# slow fade would leave the order of the keys to what the network makes of them before it has learnt what age means


@dataclass(frozen=True, eq=False)
class ForgettingTerms:
    """What a layer's call has to add to the training loss, and what it shows.

    Args:
        distillation: L_r, or None where it was not wanted.
        budget: L_b.
        kept: expected share of its tokens that a row still sees.
    """

    distillation: Tensor | None
    budget: Tensor
    kept: Tensor


class ForgetNetwork(PreciseModule):
    """A layer's forget network, shared by its heads but for a bias per key head; in at least float32.

    The features of a key are the directions of k and v and the logarithms of their lengths; those of a query the
    direction of q; those of a pair its age, its logit and the running mean of the attention to the key (section 2.2).
    They are constants for the gradient, so that only the loss of the task trains what is outside the network.

    Args:
        options: see :class:`~attnzoo.forgetting.rules.Forgetting`.
        heads: G, key heads of the layer.
        key_dim: K, channels of a key.
        value_dim: V, channels of a value.
        window: tokens that a row of the layer sees; None for all.

    Attributes:
        blend: lambda now; a training run's schedule sets it before a step.
        temperature: tau now, likewise.
        distils: whether a training step computes L_r, likewise.
        collects: whether a call in training leaves its terms; a run's step switches it off once it has them, so that
            a block that is computed again in the backward pass leaves none.
        terms: of the last call in training.
    """

    key: Tensor
    offset: Tensor
    out: Tensor
    fade: Tensor
    fade_bias: Tensor
    query: Tensor
    pair: Tensor
    bias: Tensor
    shares: Tensor

    def __init__(
        self, options: Forgetting, heads: int, key_dim: int, value_dim: int, window: int | None = None
    ) -> None:
        super().__init__()
        G, K, V, W = heads, key_dim, value_dim, options.width
        self.options, self.heads, self.window = options, heads, window
        self.blend, self.temperature, self.distils = options.blend, options.temperature, True
        self.collects, self.terms = True, cast(ForgettingTerms | None, None)
        shapes = {"key": (W, K + V + 2), "offset": (W,)}
        if options.network != "decay":
            shapes |= {"out": (W,), "bias": (G,)}
        if not options.of_pairs:
            shapes |= {"fade": (W,), "fade_bias": (G,)}
        else:
            shapes |= {"query": (W, K), "pair": (W, PAIR) if options.network == "pair" else (PAIR,)}
        if options.learned_budget:
            shapes["shares"] = (G,)
        for name, shape in shapes.items():
            self.keep(name, torch.zeros(shape), trainable=True)
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        """Without the terms of the last call: their graph is that call's, and cannot be copied."""
        return {**vars(self), "terms": None}

    def reset_parameters(self) -> None:
        """Matrices uniform by their inputs, as ``nn.Linear``; those behind them are 0, so that at first all keys are
        alike and what goes first is what is oldest."""
        starts = {"bias": REMEMBERS, "fade_bias": DECAYS if self.options.network == "decay" else FADES}
        for name, parameter in self.named_parameters():
            if (
                name == "key"
                or (name == "pair" and parameter.ndim > 1)
                or (name == "query" and self.options.network == "pair")
            ):
                bound = parameter.shape[-1] ** -0.5
                fill(parameter, torch.empty(parameter.shape).uniform_(-bound, bound))
            else:
                fill(parameter, torch.full(parameter.shape, starts.get(name, 0.0)))

    def budget_shares(self) -> Tensor | None:
        """How the key heads divide the layer's budget, ``[G]`` with mean 1; None where all get the same."""
        return self.shares.softmax(0) * self.heads if self.options.learned_budget else None

    def network(self) -> Network:
        """The network in pieces, as a cache asks it."""
        return Network(self.of_keys, self.of_rows, self.join)

    def of_keys(self, k: Tensor, v: Tensor) -> Tensor:
        """What the network remembers of keys ``[B, T, G, K]`` and values ``[B, T, G, V]``: ``[B, G, T, X]``."""
        k, v = (wide(x.detach()).transpose(1, 2) for x in (k, v))
        keys = torch.cat([_direction(k), _direction(v), _log_length(k), _log_length(v)], -1) @ self.key.mT + self.offset
        if self.options.of_pairs:
            return keys
        hidden = F.silu(keys)
        fade = -F.logsigmoid(-(hidden @ self.fade + self.fade_bias[:, None]))  # softplus, as torch compiles it
        if self.options.network == "decay":
            return fade[..., None]
        return torch.stack([hidden @ self.out + self.bias[:, None], fade], -1)

    def of_rows(self, q: Tensor) -> Tensor:
        """What the network sees of queries ``[B, T, H, K]``, and the bias of their key head: ``[B, G, T, X]``, nothing
        where it looks at keys alone."""
        q = reduce(wide(q.detach()), "b t (g r) k -> b g t k", "mean", g=self.heads)
        if not self.options.of_pairs:
            return q[..., :0]
        bias = self.bias[:, None, None].expand(*q.shape[:-1], 1)
        return torch.cat([_direction(q) @ self.query.mT, bias], -1)

    def join(self, keys: Tensor, rows: Tensor) -> Retention:
        """The logits of retention for any panel of these keys ``[B, G, n, X]`` and queries ``[B, G, R, X]``."""
        if not self.options.of_pairs:
            parts = keys[:, :, None].unbind(-1)
            return _OfDecay(*parts) if len(parts) == 1 else _OfKeys(*parts)
        return _OfPairs(self, keys, rows)

    @untraced  # lambda and tau are other numbers at every step, and the terms of the loss are left in the layer
    def run(
        self, forms: FormSet, teacher: Callable[..., Any], call: Call, policy: Policy | None = None
    ) -> tuple[Tensor, ForgettingCache | None]:
        """What the layer's core gives, ``[B, T, H, V]``, and the state after it where one is kept.

        In training that is teacher and student blended (section 2.3). In evaluation with lambda = 1, and with a cache,
        keys are forgotten for good (section 3).

        Args:
            forms: of the layer's variant.
            teacher: the one of them that reads whole sequences, and all their keys.
            call: of the core.
            policy: by what a cache gives up keys.

        Raises:
            ValueError: a cache while a part of the teacher, which needs all keys, is in the output.
        """
        valid = call.options.get("valid")
        if valid is None:
            return self._run(forms, teacher, call, policy)
        last = LastRows.of(valid, *valid.shape)  # what runs along the rows of a panel counts none between tokens
        q, k, v = (last.take(x) for x in (call.q, call.k, call.v))
        gate = call.gate.map(lambda part: part if part.ndim == 1 else last.take(part))
        options = {**call.options, "valid": last.take(valid)}
        o, state = self._run(forms, teacher, replace(call, q=q, k=k, v=v, gate=gate, options=options), policy)
        return last.put(o), state

    def _run(
        self, forms: FormSet, teacher: Callable[..., Any], call: Call, policy: Policy | None
    ) -> tuple[Tensor, ForgettingCache | None]:
        """:meth:`run` for tokens of which those that exist stand last."""
        given = call.options
        assert isinstance(forms, SoftmaxForms)
        if policy is not None:
            if self.blend != 1:
                raise ValueError(f"cache: expected blend = 1 (the teacher needs all keys), got {self.blend:g}")
            if records(call.q, call.k, call.v):
                raise ValueError("cache: expected torch.no_grad() where keys are forgotten, got inputs with a gradient")
            with as_given(call.q):
                options = SoftmaxOptions(**given)
                inputs = forms, call.q, call.k, call.v, call.gate, self.network(), policy, call.state, options
                return extend_forgetting(*inputs)
        placed = {name: given.get(name) for name in ("scale", "valid", "cu_seqlens", "window")}
        if not self.training and self.blend == 1:
            check_softmax(SoftmaxOptions(**given), call.q, call.gate)
            with as_given(call.q):
                logits = Logits(forms, call.q, call.k, call.gate, **placed)
                retention = self.join(self.of_keys(call.k, call.v), self.of_rows(call.q))
                return hard_attention(logits, call.v, retention, self.options, given.get("sink"))[0], None
        with torch.no_grad():
            taught, lse = teacher(call.q, call.k, call.v, call.gate, **given, return_lse=True)
        learns = self.training and torch.is_grad_enabled()
        with as_given(call.q):
            found: Forgotten = forgetful_attention(
                Logits(forms, call.q, call.k, call.gate, **placed), call.v, lse,
                self.join(self.of_keys(call.k, call.v), self.of_rows(call.q)), self.options, self.temperature,
                teacher=taught if learns and self.distils else None, sink=given.get("sink"),
                shares=self.budget_shares(), losses=learns,
            )  # fmt: skip
        if self.collects and found.budget is not None and found.kept is not None:
            self.terms = ForgettingTerms(found.distillation, found.budget, found.kept)
        return blended(taught, found.o, self.blend), None

    def in_place(
        self, forms: FormSet, state: ForgettingCache, rows: BatchRows, tokens: int, device: torch.device | str
    ) -> ForgettingMemory:
        """The memory of steps that change it in place; see :meth:`attnzoo.forms.softmax.SoftmaxForms.in_place`."""
        assert isinstance(forms, SoftmaxForms)
        return ForgettingMemory.like(state, rows, tokens, device, forms, self.network())

    def extra_repr(self) -> str:
        return f"{self.options}, blend={self.blend:g}, temperature={self.temperature:g}"


@dataclass(frozen=True, eq=False)
class _OfKeys:
    """``base_j - fade_j log(1 + age)`` with fade > 0: falls with the age, whatever the key; both ``[B, G, 1, T]``."""

    base: Tensor
    fade: Tensor

    def __call__(self, panel: Panel) -> Tensor:
        now = slice(panel.start, panel.stop)
        return self.base[..., now] - self.fade[..., now] * _log_age(panel, self.base)


@dataclass(frozen=True, eq=False)
class _OfDecay:
    """The logit of ``exp(-fade_j age)``, from age 1 on: a rate per key, ``[B, G, 1, T]``."""

    fade: Tensor

    def __call__(self, panel: Panel) -> Tensor:
        lost = self.fade[..., panel.start : panel.stop] * panel.age.clamp(min=1)
        return -lost - (-torch.expm1(-lost)).log()


@dataclass(frozen=True, eq=False)
class _OfPairs:
    """An MLP on the sum of what keys, queries and pairs say, or a dot product of the first two beside the third; what
    they say is beside ``-log(1 + age)``, with which retention falls at first."""

    network: ForgetNetwork
    keys: Tensor  # [B, G, T, W]
    rows: Tensor  # [B, G, T, W + 1], the last of them the bias

    def __call__(self, panel: Panel) -> Tensor:
        network, attention, logits = self.network, panel.attention, panel.logits
        assert attention is not None
        assert logits is not None
        age = _log_age(panel, self.keys).expand(attention.shape)
        pair = torch.stack([age / 8, logits.to(age.dtype), attention.to(age.dtype)], -1)  # [B, G, R, n, PAIR]
        keys, rows = self.keys[:, :, panel.start : panel.stop], self.rows[:, :, panel.start :]
        rows, bias = rows[..., :-1], rows[..., -1:] - age
        if network.options.network == "pair":
            hidden = keys[:, :, None] + rows[:, :, :, None] + pair @ network.pair.mT
            return F.silu(hidden) @ network.out + bias
        alone = F.silu(keys) @ network.out
        together = rows @ keys.mT * keys.shape[-1] ** -0.5
        found: Tensor = together + pair @ network.pair + alone[:, :, None] + bias
        return found


def _log_age(panel: Panel, like: Tensor) -> Tensor:
    return panel.age.clamp(min=0).to(like.dtype).log1p()


def _direction(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def _log_length(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + 1e-6).log() / 2
