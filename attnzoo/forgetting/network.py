"""The forget network of a layer, and the layer's output with it (One-Pass Forgetting, section 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from attnzoo.algebra.pruning import Evict, QueryBounds
from attnzoo.algebra.values import as_given, records
from attnzoo.forgetting.cache import ForgettingCache, Network, Policy
from attnzoo.forgetting.fused import fused_kept, fused_student, fused_teacher, fuses, teaches
from attnzoo.forgetting.inplace import ForgettingMemory
from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.rules import Forgetting, blended, parse_budget
from attnzoo.forgetting.steps import extend_forgetting
from attnzoo.forgetting.student import Forgotten, Panel, Retention, forgetful_attention, hard_attention, kept_terms
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.pages.present_tokens import LastRows
from attnzoo.forms.options import SoftmaxOptions, check_softmax
from attnzoo.forms.protocol import Call, FormSet
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.kernels.common.untraced import untraced
from attnzoo.precision import PreciseModule, fill, wide

PAIR = 3  # features of a pair: age, logit, mean attention to the key so far
REMEMBERS = 3.0  # initial logit of retention, at age 0
DECAYS = -5.0  # softplus(-5) = 0.007: half forgotten after 100 tokens
# softplus(0.54) = 1: the initial logit falls by 1 while log age grows by 1. With a slower fall an untrained network's
# random output, not the age, would order the keys.
FADES = 0.54


@dataclass(frozen=True, eq=False)
class ForgettingTerms:
    """The terms of the training loss of one layer's call, and the share of keys it retained.

    Args:
        distillation: L_r, a scalar, or None where it was not computed.
        excess: the rows' excess over the budget ``[B, G, T]``, see :func:`~attnzoo.forgetting.rules.excess`.
        kept: expected share of its tokens that a row still sees, mean over the rows.
    """

    distillation: Tensor | None
    excess: Tensor
    kept: Tensor

    @property
    def budget(self) -> Tensor:
        """L_b of the layer alone, a scalar."""
        return self.excess.abs().sum()


class ForgetNetwork(PreciseModule):
    """The forget network of a layer; its heads share all weights but a bias per key head. It computes in at least
    float32.

    The features of a key are the directions of k and v and the logarithms of their lengths; those of a query the
    direction of q; those of a pair its age, its logit and the running mean of the attention to the key (section 2.2).
    No gradient flows into the features, so that the network's losses train nothing outside of it.

    Args:
        options: see :class:`~attnzoo.forgetting.rules.Forgetting`.
        heads: G, key heads of the layer.
        key_dim: K, channels of a key.
        value_dim: V, channels of a value.
        window: tokens that a row of the layer sees; None for all.

    Attributes:
        blend: lambda, the student's share of the output; a schedule of the training sets it before a step.
        temperature: tau, the sharpness of forgetting; set by a schedule too.
        distils: whether a training step computes L_r; set by a schedule too.
        collects: whether a call in training stores its terms; a training step switches it off after the forward pass,
            so that a checkpointed block, recomputed in the backward pass, stores none.
        terms: the loss terms of the last call in training.
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
        """The state without the terms of the last call, whose autograd graph cannot be copied."""
        return {**vars(self), "terms": None}

    def reset_parameters(self) -> None:
        """Initialise the first matrices as ``nn.Linear`` does and the last ones to 0, so that age alone orders the
        keys."""
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
        """The key heads' learned shares of the layer's budget, ``[G]`` with mean 1; None for equal shares."""
        return self.shares.softmax(0) * self.heads if self.options.learned_budget else None

    def policy(self, budget: int | str | None, evict: Evict | None, bounds: QueryBounds | None) -> Policy:
        """The rules by which a new cache of the layer evicts keys; ``bounds`` are those of later queries."""
        log_eps = None if evict is None else math.log(evict.eps)
        return Policy(self.options, *parse_budget(budget), log_eps, bounds, self.window)

    def network(self, fused: bool = False) -> Network:
        """The network in pieces, for a cache."""
        return Network(self.of_keys, self.of_rows, self.join, fused)

    def of_keys(self, k: Tensor, v: Tensor) -> Tensor:
        """The network's features ``[B, G, T, X]`` of keys ``[B, T, G, K]`` and values ``[B, T, G, V]``."""
        k, v = (wide(x.detach()).transpose(1, 2) for x in (k, v))
        keys = torch.cat([_direction(k), _direction(v), _log_length(k), _log_length(v)], -1) @ self.key.mT + self.offset
        if self.options.of_pairs:
            return keys
        hidden = F.silu(keys)
        fade = -F.logsigmoid(-(hidden @ self.fade + self.fade_bias[:, None]))  # softplus, for torch.compile
        if self.options.network == "decay":
            return fade[..., None]
        return torch.stack([hidden @ self.out + self.bias[:, None], fade], -1)

    def of_rows(self, q: Tensor) -> Tensor:
        """The network's features ``[B, G, T, X]`` of queries ``[B, T, H, K]``, with their key head's bias as the last.

        X is 0 for networks that read keys alone.
        """
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

    @untraced  # lambda and tau change at every step, and the loss terms are stored in the layer
    def run(
        self, forms: FormSet, teacher: Callable[..., Any], call: Call, policy: Policy | None = None,
        fused: bool = False,
    ) -> tuple[Tensor, ForgettingCache | None]:  # fmt: skip
        """The output ``[B, T, H, V]`` of the layer's core, and the new state where the call has one.

        In training the outputs of teacher and student are blended (section 2.3). In evaluation with lambda = 1, and
        with a cache, a key whose retention fell below the threshold is never read again (section 3).

        Args:
            forms: of the layer's variant.
            teacher: the form that reads whole sequences with all their keys.
            call: the inputs and options of the core; without a cache ``return_lse`` is one of them.
            policy: the rules by which a cache evicts keys.
            fused: whether the student runs on kernels, where it can (:mod:`attnzoo.forgetting.fused`).

        Raises:
            ValueError: a cache with lambda < 1, where the output contains the teacher's, which needs all keys.
        """
        valid = call.options.get("valid")
        if valid is None:
            return self._run(forms, teacher, call, policy, fused)
        last = LastRows.of(valid, *valid.shape)  # running sums along rows need tokens without padding between them
        q, k, v = (last.take(x) for x in (call.q, call.k, call.v))
        gate = call.gate.map(lambda part: part if part.ndim == 1 else last.take(part))
        options = {**call.options, "valid": last.take(valid)}
        o, state = self._run(forms, teacher, replace(call, q=q, k=k, v=v, gate=gate, options=options), policy, fused)
        return last.put(o), state

    def _run(
        self, forms: FormSet, teacher: Callable[..., Any], call: Call, policy: Policy | None, fused: bool
    ) -> tuple[Tensor, ForgettingCache | None]:
        """:meth:`run` for rows whose padding, if any, stands before all tokens."""
        given, options = call.options, SoftmaxOptions(**call.options)
        assert isinstance(forms, SoftmaxForms)
        fused = fused and fuses(forms, self.options)
        if policy is not None:
            if self.blend != 1:
                raise ValueError(f"cache: expected blend = 1 (the teacher needs all keys), got {self.blend:g}")
            if records(call.q, call.k, call.v):
                raise ValueError("cache: expected torch.no_grad() where keys are forgotten, got inputs with a gradient")
            with as_given(call.q):
                network = self.network(fused)
                inputs = forms, call.q, call.k, call.v, call.gate, network, policy, call.state, options
                return extend_forgetting(*inputs)
        if not self.training and self.blend == 1:
            check_softmax(options, call.q, call.gate)
            if fused:
                return fused_student(cast(Any, forms), call, self._keys(call), self.options), None
            with as_given(call.q):
                logits = Logits(forms, call.q, call.k, call.gate, options)
                retention = self.join(self.of_keys(call.k, call.v), self.of_rows(call.q))
                return hard_attention(logits, call.v, retention, self.options, given.get("sink"))[0], None
        learns = self.training and torch.is_grad_enabled()
        distils = learns and self.distils
        taught: Tensor | None = None
        if fused and (not distils or teaches(self.options)):
            check_softmax(options, call.q, call.gate)
            keys, missed = self._keys(call), None
            if distils:
                taught, missed = fused_teacher(cast(Any, forms), call, keys, self.options, self.temperature)
            elif self.blend != 1:
                with torch.no_grad():
                    taught, _ = teacher(call.q, call.k, call.v, call.gate, **given)
            found = self._fused(cast(Any, forms), call, options, keys, missed, learns)
        else:
            with torch.no_grad():
                taught, lse = teacher(call.q, call.k, call.v, call.gate, **given)
            with as_given(call.q):
                found = forgetful_attention(
                    Logits(forms, call.q, call.k, call.gate, options), call.v, lse,
                    self.join(self.of_keys(call.k, call.v), self.of_rows(call.q)), self.options, self.temperature,
                    teacher=taught if distils else None, sink=given.get("sink"),
                    shares=self.budget_shares(), losses=learns,
                )  # fmt: skip
        if self.collects and found.excess is not None and found.kept is not None:
            self.terms = ForgettingTerms(found.distillation, found.excess, found.kept)
        return found.o if taught is None else blended(taught, found.o, self.blend), None

    def _keys(self, call: Call) -> Tensor:
        """The network's features of a call's keys."""
        with as_given(call.q):
            return self.of_keys(call.k, call.v)

    def _fused(
        self, forms: AdditiveForms, call: Call, options: SoftmaxOptions, keys: Tensor, missed: Tensor | None,
        learns: bool,
    ) -> Forgotten:  # fmt: skip
        """The student's output and its losses by kernels; ``missed``: the divergences of its keys, or None."""
        o = fused_student(forms, call, keys, self.options, self.temperature)
        if not learns:
            return Forgotten(o)
        with as_given(call.q):
            kept, tokens = fused_kept(keys, self.options, self.temperature, options)
            if missed is not None:
                pairs = (tokens - self.options.window).clamp(min=0).expand(kept.shape).sum()
                missed = missed.sum() / pairs.clamp(min=1)
            return Forgotten(o, missed, *kept_terms(kept, tokens, self.options, self.budget_shares()))

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
    """Retention logits ``base_j - fade_j log(1 + age)`` with fade > 0, falling with age; base and fade
    ``[B, G, 1, T]``."""

    base: Tensor
    fade: Tensor

    def __call__(self, panel: Panel) -> Tensor:
        now = slice(panel.start, panel.stop)
        return self.base[..., now] - self.fade[..., now] * _log_age(panel, self.base)


@dataclass(frozen=True, eq=False)
class _OfDecay:
    """Retention logits of ``r = exp(-fade_j age)``, age at least 1, with a rate fade per key, ``[B, G, 1, T]``."""

    fade: Tensor

    def __call__(self, panel: Panel) -> Tensor:
        lost = self.fade[..., panel.start : panel.stop] * panel.age.clamp(min=1)
        return -lost - (-torch.expm1(-lost)).log()


@dataclass(frozen=True, eq=False)
class _OfPairs:
    """Retention logits of (query, key) pairs, on top of ``-log(1 + age)``.

    An MLP on the sum of key, query and pair features (``"pair"``), or a dot product of key and query features plus a
    linear map of the pair's (``"attention"``).
    """

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
