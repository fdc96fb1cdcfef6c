"""The attention layer of every variant: what a call of its parts computes, from projections to output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.pruning import Evict, QueryBounds, may_prune
from attnzoo.forgetting.cache import Policy
from attnzoo.forms.caches.inplace import Memory
from attnzoo.forms.factors import sub_tokens, token_outputs
from attnzoo.forms.options import LinearOptions, Options, SoftmaxOptions, check_borders
from attnzoo.forms.protocol import REFERENCE, Call
from attnzoo.kernels import linear
from attnzoo.kernels.norms import Gated, Skip
from attnzoo.layer import fused_paged, fused_recurrent
from attnzoo.layer.assembly import AttentionParts
from attnzoo.layer.bounds import check_bounded, eviction, largest_score, query_bounds
from attnzoo.layer.cache import LayerCache, Owner
from attnzoo.layer.checks import check_cache, evicts
from attnzoo.layer.convolved import convolved, one_convolution
from attnzoo.layer.dispatch import chosen, run
from attnzoo.layer.gates.base import GateProjection, Keyed, Strength
from attnzoo.layer.gates.matrix import by_factor
from attnzoo.layer.inplace import FixedCache
from attnzoo.layer.modules import ACTIVATIONS, HeadNorm, TokenShift, unit_vectors, untouched, writes_fuse
from attnzoo.layer.products import ROWS, WHOLE, products
from attnzoo.layer.projected import Projected
from attnzoo.layer.rows import check_hidden, rows_of_call
from attnzoo.layer.shifted import by_groups
from attnzoo.layer.stream import OwnCore, Stream
from attnzoo.precision import GateAffine
from attnzoo.recurrences.complex_linear import rotate_all

WHOLE_STEPS: dict[str, Any] = {"matrix": fused_recurrent, "pages": fused_paged}  # fused steps by memory


class Attention(AttentionParts):
    """``attn(x) -> y``, both ``[B, T, D]``; :func:`~attnzoo.layer.build.build_attention` chooses the parts.

    Args:
        variant: the variant that its core computes.
        config: sizes and parts of the layer.
        gate_options: options of the gate projection, by name.
        prune, impl, forgetting, keep_carries: as ``acp``, ``impl``, ``forgetting`` and ``keep_carries`` there.

    Raises:
        TypeError: ``config`` is no AttentionConfig.
        ValueError: an unknown name, or parts that do not serve the variant.
    """

    @property
    def evicts(self) -> bool:
        """Whether a cache of this layer may evict keys: by forget gates, or behind a window."""
        return evicts(self.variant, self.config)

    def new_cache(self, evict: float | str | Evict | None = None, budget: int | str | None = None) -> LayerCache:
        """An empty cache for this layer, to be handed to every call of one generation.

        Args:
            evict: evict keys whose total weight in any later row is at most this (None: evict none). The weights of
                QK-norm must bound later queries; ``"offload"`` needs no bound, moves keys to the host's memory and
                brings them back for a row that needs them. See :class:`attnzoo.Evict`.
            budget: for a layer with One-Pass Forgetting: the number of keys that each key head may hold, or, as a text
                such as "96 KiB", the memory of the keys and values of all its heads for one sequence. A call that ends
                above the budget evicts the keys of least retention. None: no budget. "2 MiB total" is the budget of all
                layers of a model, which this layer alone may fill.

        Raises:
            ValueError: ``evict`` for a layer that needs all its keys or whose later queries have no bound; ``budget``
                for a layer without One-Pass Forgetting.
        """
        check_cache(self.variant, self.config, None if self.forget is None else self.forget.options, evict, budget)
        check_bounded(self, evict)
        return LayerCache(owner=Owner(self), evict=None if evict is None else Evict.of(evict), budget=budget)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: LayerCache | FixedCache | None = None,
        first: list[Tensor] | None = None,
    ) -> Tensor:
        """The layer's output ``[B, T, D]``.

        Args:
            x: ``[B, T, D]``; ``[1, T, D]`` with ``cu_seqlens``.
            cu_seqlens: borders ``[N + 1]`` of sequences packed into one row; tokens see their own sequence alone, and
                the output is packed too. The rows of a cache are these N sequences.
            attention_mask: ``[B, T]``, nonzero for tokens, zero for padding on either side; With S cached tokens
                ``[B, S + T]`` is accepted too, where only the last T may be zero (on a CPU others raise). Outputs at
                padding are 0.
            first: of a model whose later layers have ``value_residual``, one list for all layers of a call, empty at
                the first, which puts its v there.
            cache: from :meth:`new_cache`; it is extended in place, so that each call continues the sequences of the
                calls before. A :class:`~attnzoo.layer.inplace.FixedCache` takes one token of each of its sequences.

        Raises:
            TypeError, ValueError: arguments of the wrong kind, shape or value, each named.
        """
        check_hidden(x, self.config.hidden_size, self.q_proj)
        if not torch.compiler.is_compiling() and self._starts is not None and self.training:
            self.look_at_starts()
        if isinstance(cache, FixedCache):
            return self._step(x, cu_seqlens, attention_mask, cache, first)
        stream, packing = rows_of_call(self, x, cu_seqlens, attention_mask, cache)
        rows = x if packing is None else packing.unpack(x)
        if stream.valid is not None:
            rows = rows.masked_fill(~stream.valid[..., None], 0.0)
        projected = self._project(rows, stream, first)
        o, state = self._core(projected, stream)
        y = self._output(projected, o)
        if stream.valid is not None:
            y = y.masked_fill(~stream.valid[..., None], 0.0)
        if packing is not None:
            y = packing.pack(y, x.shape[1])
        if cache is not None:
            stream.commit(self, rows, state)
        return y

    def project(self, x: Tensor, cu_seqlens: Tensor | None = None, first: list[Tensor] | None = None) -> Projected:
        """q, k, v and gate of the core for hidden states ``x [B, T, D]``; borders ``[N + 1]`` for packed sequences, and
        ``first`` as in :meth:`forward`."""
        check_hidden(x, self.config.hidden_size, self.q_proj)
        check_borders(cu_seqlens, x)
        return self._project(x, Stream(None, None, (x.shape[0], x.shape[1]), x.device, cu_seqlens), first)

    def logit_bound(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """The bound of every ``|s_tj|`` by the weights of QK-norm, ``[H]`` float32.

        None without QK-norm, and where a device map keeps the weights on the host or the disk.

        Args:
            dtype: the dtype that q and k are rounded to.
        """
        return largest_score(self, dtype)

    def _core(self, projected: Projected, stream: Stream) -> tuple[Tensor, Any]:
        """The core's output ``[B, T, H, V]`` and the state after the call."""
        q, gate, cache = projected.q, projected.gate, stream.cache
        bound = None if self.prune is None or self.variant.side == "linear" else self._bound(stream, q)
        options = self._options(projected.write, stream.valid, stream.cu_seqlens, bound)
        if self.forget is not None and cache is None:  # asked before the form is chosen, as not every form has it
            options = replace(options, return_lse=True)  # type: ignore[type-var]
        state = None if cache is None else cache.state
        if state is None and cache is not None and cache.evict is not None and self.forget is None:
            forms: Any = self.variant.form_set
            empty = forms.store.new(q, projected.k, projected.v, gate)
            state = replace(empty, evict=eviction(self, cache.evict, empty.pool, q.dtype))
        call = Call(q, projected.k, projected.v, gate, state, cache is not None, options)
        form = self._form(call)
        if self.keep_carries and form == "triton" and cache is None:
            call = replace(call, options=replace(options, keep_carries=True))  # type: ignore[type-var]
        if isinstance(stream, OwnCore):
            return stream.run(self.variant, form, call, self.keys_per_token), None
        if self.config.training_groups is not None and self.training and cache is None:
            o, state = by_groups(self._whole, call, self.config.training_groups * self.keys_per_token), None
        elif self.forget is None:
            o, state = run(self.variant, form, call, checked=not self._makes_all())
        else:
            teacher = self.variant.forms["parallel" if form == REFERENCE else form]
            policy = None if cache is None else self._policy(cache, call)
            o, state = self.forget.run(self.variant.form_set, teacher, call, policy, fused=form == "triton")
        if self.keys_per_token > 1 and state is not None:  # the state counts sub-tokens
            state = replace(state, tokens=len(state) - stream.shape[1] * (self.keys_per_token - 1))
        return o, state

    def _whole(self, call: Call) -> Tensor:
        """The core's output of a call without a state."""
        o: Tensor = run(self.variant, self._form(call), call, checked=not self._makes_all())[0]
        return o

    def _form(self, call: Call) -> str:
        """The name of the form that serves a call, logged where it differs from the last call's."""
        if torch.compiler.is_compiling():
            return chosen(self.variant, self._impl, call)
        place = f" on {call.q.device.type}"
        last = (self.picked or "").removesuffix(place)
        form = chosen(self.variant, self._impl, call, last)
        if form != last:
            self.picked = form + place
        return form

    def _makes_all(self) -> bool:
        """Whether only this package's own parts make the core's inputs, so that they need no checks."""
        own = len(self._own_gate) > 0 and self._own_gate[0] is self.gate and self.variant.own
        return own and os.environ.get("ATTNZOO_VALIDATE") != "1"

    def _bound(self, stream: Stream, q: Tensor) -> Tensor | None:
        """The :meth:`logit_bound` of a call; a cache stores it, as it depends on the weights alone, and whole sequences
        of too few keys to prune have no use for it."""
        cache = stream.cache
        if cache is None:
            tokens = q.shape[1]
            use = isinstance(stream, OwnCore) or may_prune(tokens, tokens, rows=1)
            return self.logit_bound(q.dtype) if use else None
        if cache.bound is None:
            cache.bound = self.logit_bound(q.dtype)
        return cache.bound

    def _policy(self, cache: LayerCache, call: Call) -> Policy:
        """The rules by which the cache of a layer with One-Pass Forgetting evicts keys."""
        assert self.forget is not None
        if cache.state is not None:
            policy: Policy = cache.state.policy
            return policy
        bounds = None if cache.evict is None else self.query_bounds(call.q.dtype)
        return self.forget.policy(cache.budget, cache.evict, bounds)

    def _step(
        self, x: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, cache: FixedCache,
        first: list[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """The output ``[B, T, D]`` of an in-place step, with operations that a CUDA graph can record."""
        if cu_seqlens is not None or attention_mask is not None:
            raise ValueError("cu_seqlens, attention_mask: expected None with a cache of fixed size, got a tensor")
        cache.check(x)
        whole = WHOLE_STEPS[cache.memory.whole_steps] if cache.whole and first is None else None
        if whole is not None and (x.shape[1] == 1 or not whole.ONE_TOKEN):
            y: Tensor = whole.step(self, x, cache)
            return y
        projected = self._project(x, cache.stream(x), first)
        options = self._options(projected.write, None, None, cache.bound)
        call = Call(projected.q, projected.k, projected.v, projected.gate, None, True, options)
        o: Tensor = cache.memory.step(call, lambda call: run(self.variant, chosen(self.variant, self.impl, call), call))
        return self._output(projected, o)

    def whole_steps(self, memory: Memory, dtype: torch.dtype) -> bool:
        """Whether fused kernels over ``memory`` compute a step but for the products with weights, for x in
        ``dtype``."""
        own = getattr(self.rows, "__func__", None) is Attention.rows
        whole = WHOLE_STEPS.get(memory.whole_steps) if own else None
        return whole is not None and whole.serves(self, memory, dtype)

    def step_options(self, bound: Tensor | None) -> Options:
        """The core's options in a fused step; ``bound`` is the logit bound."""
        return self._options(None, None, None, bound)

    def _options(
        self, write: Strength, valid: Tensor | None, cu_seqlens: Tensor | None, bound: Tensor | None
    ) -> Options:
        """The options of the core in a call."""
        if self.keys_per_token > 1:
            valid = None if valid is None else valid.repeat_interleave(self.keys_per_token, 1)
            cu_seqlens = None if cu_seqlens is None else cu_seqlens * self.keys_per_token
        if self.variant.side == "softmax":
            return SoftmaxOptions(
                prune=self.prune, logit_bound=bound, sink=self.sinks, valid=valid, cu_seqlens=cu_seqlens,
                **self.core_options,
            )  # fmt: skip
        if isinstance(write, str):
            return LinearOptions(self.scale, valid, cu_seqlens, delta_rule=True)
        return LinearOptions(self.scale, valid, cu_seqlens, write, prune=self.prune)

    def _output(self, projected: Projected, o: Tensor) -> Tensor:
        """The layer's output ``[B, T, D]`` from the core's, ``[B, T, H, V]``."""
        v = projected.values
        if self.keys_per_token > 1:
            o = token_outputs(o, self.keys_per_token)
        norm, act, first = self.output_norm, self.config.output_gate, self.config.gate_before_norm
        logits = projected.logits
        if logits is None and self.output_gate is not None:
            logits = self.output_gate(projected.of_gate)
        y: Tensor
        whole = None if norm is None else self._whole_norm(o, v, logits)
        if whole is not None:
            gate = None if logits is None else Gated(logits, act == "swish", first)
            y = self.o_proj(whole.fused(o, gate, None if self.skip is None else Skip(v, self.skip)).flatten(2))
            return y
        if self.skip is not None:
            o = o.addcmul(self.skip[:, None], expand_heads(v, o.shape[2])).to(o.dtype)
        gated = None if logits is None else ACTIVATIONS[act](logits)
        if gated is not None and first:
            o, gated = o * gated.reshape(o.shape), None
        if norm is not None:
            o = norm(o)
        if projected.bonus is not None:
            o = o + projected.bonus
        o = o.flatten(2)
        if gated is not None:
            o = o * gated
        y = self.o_proj(o)
        return y

    def _whole_norm(self, o: Tensor, v: Tensor, logits: Tensor | None) -> HeadNorm | None:
        """The output norm where one kernel computes all between the core and the output projection, else None."""
        norm = self.output_norm
        if type(norm) is not HeadNorm or not norm.fuses(o, logits, v, self.skip) or not untouched(norm):
            return None
        if self.bonus is not None or self.config.output_gate == "lora":
            return None
        shape = *o.shape[:2], o.shape[2] * o.shape[3]
        return norm if logits is None or logits.shape == shape else None

    def query_bounds(self, dtype: torch.dtype) -> QueryBounds | None:
        """Bounds of later query rows by the weights of QK-norm; None without it."""
        return query_bounds(self, dtype)

    def rows(self, x: Tensor, stream: Stream, mixed: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of x ``[B, T, D]``, or of a mixture each, after projections and short convolutions,
        ``[B, T, heads * dim]``."""
        if mixed is not None:
            q, k, v = self.q_proj(mixed[0]), self.k_proj(mixed[1]), self.v_proj(mixed[2])
        else:
            inner = x if self.latent is None else self.latent(x)
            known = stream.products if stream.products.get(ROWS) is x else {}  # a subclass may give rows of its own
            if WHOLE in known:
                return convolved((self.q_conv, self.k_conv, self.v_conv), known[WHOLE], stream)
            q = known["q"] if "q" in known else self.q_proj(x)
            k = known["k"] if "k" in known else self.k_proj(inner)
            v = known["v"] if "v" in known else self.v_proj(inner)
        if self.latent is not None:
            k = self.latent.keys(k, x)
        of_q, of_k, of_v = self.q_conv, self.k_conv, self.v_conv
        if of_q is not None and of_k is not None and of_v is not None:
            q, k, v = of_q(q, stream, "q"), of_k(k, stream, "k"), of_v(v, stream, "v")
        return q, k, v

    def _maps_of(self, mixed: Sequence[Tensor] | None) -> dict[str, nn.Module]:
        """The maps that read the hidden states themselves, by the names of their products."""
        shifts = {"k_shift": self.k_shift, "v_shift": self.v_shift}
        thin = {name: one.proj for name, one in shifts.items() if type(one) is TokenShift and untouched(one)}
        if isinstance(self.gate, GateProjection) and untouched(self.gate):
            thin.update(self.gate.maps)  # `|=` breaks graphs of torch 2.7
        maps: dict[str, nn.Module] = {name: one for name, one in thin.items() if type(one) is GateAffine}
        if mixed is None:
            maps["q"] = self.q_proj
            if self.latent is None:
                maps["k"], maps["v"] = self.k_proj, self.v_proj
            if self.output_gate is not None:
                maps["output_gate"] = self.output_gate
        return maps

    def _project(self, x: Tensor, stream: Stream, first: list[Tensor] | None = None) -> Projected:
        config, (of_q, of_k, of_v), (map_q, map_k) = self.config, self._heads, self._maps
        mixed = None if self.token_mix is None else self.token_mix(x, stream, "mix")
        if x.is_cuda or self._impl == "triton":
            together = self.q_conv is not None and one_convolution((self.q_conv, self.k_conv, self.v_conv), x, stream)
            whole = ("q", "k", "v") if together else ()
            stream.products.update(products(x, self._maps_of(mixed), self._impl, whole))
            stream.products[ROWS] = x
        q, k, v = self.rows(x, stream, mixed)
        if self.value_residual is not None:
            v = self.value_residual(v, x if mixed is None else mixed[2], first)
        elif first is not None and not first:
            first.append(v)
        if self.k_shift is not None and self.v_shift is not None:
            k, v = self.k_shift(k, x, stream, "k_shift"), self.v_shift(v, x, stream, "v_shift")
        rows = stream.shape
        q, k, v = q.reshape(*rows, *of_q), k.reshape(*rows, *of_k), v.reshape(*rows, *of_v)
        q, k = q if map_q is None else map_q(q), k if map_k is None else map_k(k)
        if config.query_correction:
            assert self.correction is not None
            q = q - (self.correction[:, None] * k).to(q.dtype)
        if config.qk_norm == "l2":
            q, k = unit_vectors(q, k, self._impl)
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rotary is not None:
            phase = stream.positions()[..., None, None] * self.angle_on(q.device)
            q, k = rotate_all(phase, q, k)
        if self._factors > 1:
            k, v = by_factor(k, 2, self._factors), by_factor(v, 2, self._factors)
        if config.num_qk_heads == 1:  # views: kernels that take strides read the one head
            q, k = q.expand(-1, -1, config.num_heads, -1), k.expand(-1, -1, config.num_heads, *k.shape[3:])
        elif config.num_qk_heads is not None:
            q, k = expand_heads(q, config.num_heads), expand_heads(k, config.num_heads)
        if config.qk_bias:
            assert self.q_bias is not None
            assert self.k_bias is not None
            q, k = q + self.q_bias.to(q.dtype), k + self.k_bias.to(k.dtype)
        made = self.gate(x, k, stream)
        if not isinstance(made, tuple):
            theirs = f"{type(self.gate).__name__}.forward"
            raise TypeError(f"gate: expected {theirs} to return (gate, write strength or None), got {made!r}")
        gate, write = made
        if isinstance(write, Keyed):
            k, write = write.keys, write.strength
        if stream.valid is not None and gate.w is not None:  # w of padding is not a unit vector
            gate = gate.neutral_where(~stream.valid)
        values = v
        bonus = None
        if self.bonus is not None:
            bonus = (q * expand_heads(k, q.shape[2]) * self.bonus).sum(-1, keepdim=True).to(v.dtype)
            bonus = bonus * expand_heads(v, q.shape[2])
        if self.keys_per_token > self._factors:
            k, v, write = self.gate.written(k, v, gate, write, stream)
        if self.keys_per_token > 1:
            q, k, v, gate = sub_tokens(q, k, v, gate)
        if isinstance(write, Tensor) and writes_fuse(self._impl, v, write):
            v, write = linear.written_values(v, write), None
        of_gate = x if mixed is None else mixed[-1]
        logits = stream.products.get("output_gate")
        return Projected(q.to(v.dtype), k.to(v.dtype), v, gate, write, values, of_gate, bonus, logits)
