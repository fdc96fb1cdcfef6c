"""The softmax readout: parallel and cached-stepping forms, with keys carried by any transition."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import first_kept_keys, may_prune
from attnzoo.algebra.transitions import HeadGate, Transition, heads_first, scaled_queries
from attnzoo.algebra.values import in_transform, readable, records
from attnzoo.forms.caches.inplace import BatchRows, Memory
from attnzoo.forms.caches.state import KVCache, append, append_valid, check_copy
from attnzoo.forms.caches.stores import CarriedKeys, KeyStore
from attnzoo.forms.options import SoftmaxOptions, check_prune, check_softmax, existing, separated
from attnzoo.forms.packing import in_rows
from attnzoo.forms.protocol import REFERENCE, Call, Forms
from attnzoo.forms.readout import Band, attend_with_sink, block_bias, block_logits, block_lse, readout
from attnzoo.kernels.common.constants import KEY_UNIT

ROWS = 128

COMPILES_CHECKPOINTS = Version(torch.__version__) >= Version("2.13")  # earlier compilers fail on the checkpoints below

Output = Tensor | tuple[Tensor, Tensor]  # o, or (o, lse) with return_lse


@dataclass(frozen=True)
class SoftmaxForms(Forms):
    r"""The forms of ``o_t = sum_j softmax_j(s_tj + d_tj) v_j`` for one transition.

    All forms take q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]``, the gate and, by keyword, what
    :class:`~attnzoo.forms.options.SoftmaxOptions` lists, and give ``[B, T, H, V]`` in v's dtype.

    A row block computes its own scores in closed form. For earlier keys, its queries are carried back to the start of
    the block, to which those keys have been carried.

    Args:
        transition: the matrix part of the gate.
        store: the store of cached keys.
        kernels: forms beside ``recurrent`` and ``parallel``.
    """

    REFERENCES = ("recurrent", "parallel")
    OPTIONS = SoftmaxOptions
    STATE = KVCache
    OF_KERNELS = ("keep_carries",)
    transition: Transition
    store: KeyStore = field(default=CarriedKeys(), kw_only=True)

    def parallel(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Output:
        """The output of all tokens in blocks of rows, in memory O(T) without a T x T matrix."""
        given = SoftmaxOptions(**options)
        self.check(q, k, v, gate, given)
        return self.whole(REFERENCE, q, k, v, gate, given)

    def recurrent(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, **options: Any) -> Output:
        """The output token by token with a KV cache, as softmax attention has no state of fixed size."""
        given = SoftmaxOptions(**options)
        self.check(q, k, v, gate, given)
        q, k, v, gate = self._ready(q, k, v, gate, given)
        state: KVCache | None = None
        step, rows = given, []
        for t in range(q.shape[1]):
            now = slice(t, t + 1)
            if given.valid is not None:
                step = replace(given, valid=given.valid[:, now])
            o, lse, state = self._attend(q[:, now], k[:, now], v[:, now], gate.slice(t, t + 1), state, step)
            rows.append((o, lse))
        return self._output(*joined_blocks(rows), given, v.dtype)

    def check(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: SoftmaxOptions) -> None:
        check_prune(options.prune, gate, self.transition)
        check_softmax(options, q, gate)
        self.transition.check(gate)

    def whole(self, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: SoftmaxOptions) -> Output:
        if form in self.kernels:
            return cast(Output, super().whole(form, q, k, v, gate, options))
        if options.cu_seqlens is not None and readable(options.cu_seqlens):
            return cast(Output, in_rows(partial(self.whole, form), q, k, v, gate, options))
        if options.valid is not None or options.cu_seqlens is not None:
            q, k, v, gate = self._ready(q, k, v, gate, options)
        o, lse = self._attend_whole(q, k, v, gate, options)
        return self._output(o, lse, options, v.dtype)

    def go_on(
        self, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Any, options: SoftmaxOptions
    ) -> tuple[Any, Any]:
        if not getattr(state, "in_pages", False):
            return super().go_on(form, q, k, v, gate, state, options)
        state.check(q, k, v, gate)
        call = Call(q, k, v, gate, state, True, options)
        if form != REFERENCE and state.stores:
            return self.store.step(self, call, options)
        rows, new = self.store.extend(self, call, options)
        if rows is None:
            return super().go_on(form, q, k, v, gate, None, options)[0], new
        return self._output(*rows, options, v.dtype), new

    def refuses(self, form: str, call: Call) -> str:
        if form != REFERENCE and getattr(call.state, "in_pages", False):
            if call.state.stores:
                return self.store.refuses(form, call)
            call = replace(call, state=None)
        return super().refuses(form, call)

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, options: SoftmaxOptions
    ) -> tuple[Output, KVCache]:
        if options.valid is not None or options.cu_seqlens is not None:
            q, k, v, gate = self._ready(q, k, v, gate, options)
        o, lse, state = self._attend(q, k, v, gate, state, options)
        return self._output(o, lse, options, v.dtype), state

    def in_place(
        self, state: Any, rows: BatchRows, tokens: int, device: torch.device | str, paged: bool | None = None
    ) -> Memory:
        """An in-place memory for steps of a batch.

        Args:
            state: the state of one sequence that has seen a token, for shapes and dtypes.
            rows: the rows of the batch.
            tokens: tokens of the longest sequence.
            device: device of the memory; ``"meta"`` to measure its size.
            paged: whether keys lie in pages; None: where they can, with the variant's kernel.

        Raises:
            ValueError: ``paged`` for keys that transitions carry; False, or no kernel, for a state in pages.
        """
        return self.store.in_place(self, state, rows, tokens, device, paged)

    def _ready(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: SoftmaxOptions
    ) -> tuple[Tensor, Tensor, Tensor, Gate]:
        """The inputs with zeros and neutral gates at padding."""
        gate = self.separated(gate, q, options.valid, options.cu_seqlens)
        if options.valid is not None:
            q, k, v = existing(options.valid, q, k, v)
        return q, k, v, gate

    def _output(self, o: Tensor, lse: Tensor | None, options: SoftmaxOptions, dtype: torch.dtype) -> Output:
        """A form's return value, from the output ``[B, H, T, V]`` and log-sum-exp over keys, without the sink."""
        if options.sink is not None:
            o, lse = attend_with_sink(o, lse, options.sink)
        o = o.transpose(1, 2).to(dtype)
        return (o, cast(Tensor, lse).transpose(1, 2)) if options.return_lse else o

    def separated(self, gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate:
        """The gate with neutral parts at padding, and closed at borders of packed sequences."""
        return separated(gate, q, valid, cu_seqlens)

    def place(
        self, q: Tensor, k: Tensor, gate: Gate, state: Any, valid: Tensor | None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """q and k after the rotation by their absolute phase, the cache's new phase, and the angle of all new tokens.

        With ``dtype``, the dtype of a kernel, q and k may be rounded to it.
        """
        return q, k, None, None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: KVCache | None, options: SoftmaxOptions
    ) -> tuple[Tensor, Tensor | None, KVCache]:
        """The output ``[B, H, T, V]`` without the sink, the log-sum-exp ``[B, H, T]`` if needed, and the new state."""
        (B, T, H, _), G, scaled = q.shape, k.shape[2], scaled_queries(q, options.scale)
        dtype = scaled.dtype
        gate = gate.per_token(q)
        past = KVCache(k[:, :0], v[:, :0]) if state is None else state
        P = len(past)
        check_copy(state, T)
        log_decay = append(past.log_decay, gate.log_decay)
        new = KVCache(
            k, cast(Tensor, append(past.v, v)), log_decay, append_valid(state, options.valid, k), carried=True
        )
        keys, values = heads_first(k, H, dtype), heads_first(new.v, H, dtype)
        carried = heads_first(past.k, H, dtype).mT  # [B, H, K, S], the layout of a state, for carry
        local = HeadGate.of(gate, q)
        decay = torch.zeros(B, H, P + T, dtype=dtype, device=q.device)
        if log_decay is not None:
            decay = heads_first(log_decay, H, dtype)
        band = Band.of(options.window, new.valid, P + T, q.device)
        first_kept, prune = None, options.prune
        if prune is not None and may_prune(T, P + T, ROWS):
            lower = None
            if prune.bound == "tail":
                lower = self._near_lse(scaled, keys, local, decay, carried, new.valid, band, options)
            everything = torch.cat([carried.mT, keys], 2)
            first_kept = first_kept_keys(
                scaled, everything, decay, prune, options.logit_bound, lower=lower, rows=ROWS
            )  # fmt: skip
        again = T > 1 and not in_transform()  # recomputing a single row would save little memory
        again = again and records(scaled, keys, values, decay, carried, *(getattr(local, part) for part in local.parts))
        again = again and (COMPILES_CHECKPOINTS or not torch.compiler.is_compiling())
        outputs = []
        for n, start in enumerate(range(0, T, ROWS)):
            stop = min(start + ROWS, T)
            rows = local.slice(start, stop)
            kept = None if first_kept is None else first_kept[:, :, n]
            args = (
                scaled[:, :, start:stop], keys[:, :, start:stop], values[:, :, : P + stop], rows,
                decay[:, :, : P + stop], carried, None if new.valid is None else new.valid[:, : P + stop], kept,
                band, options,
            )  # fmt: skip
            if again:
                o, lse, carried = checkpoint(self._rows, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                o, lse, carried = self._rows(*args)
            outputs.append((o, lse))
        step = 1 if gate.per_query_head else H // G
        new = replace(new, k=carried.mT[:, ::step].transpose(1, 2))
        return *joined_blocks(outputs), new

    def _attend_whole(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: SoftmaxOptions
    ) -> tuple[Tensor, Tensor | None]:
        """The output and log-sum-exp of :meth:`_attend` for whole sequences, without a state."""
        T, H = q.shape[1:3]
        given = q, k, v, *(getattr(gate, part) for part in gate.parts)
        traced = in_transform() or torch.compiler.is_compiling()  # a compiled graph serves other lengths than one block
        if traced or T > ROWS or records(*given):
            return self._attend(q, k, v, gate, None, options)[:2]
        local = HeadGate.of(gate, q)
        scaled = scaled_queries(q, options.scale)
        dtype = scaled.dtype
        decay = scaled.new_zeros(*scaled.shape[:3]) if local.log_decay is None else local.log_decay
        valid, hidden = options.valid, None
        if options.window is not None and options.window < T:
            hidden = cast(Band, Band.of(options.window, valid, T, q.device)).hidden(0, T, 0)
        scores = self.transition.scores(scaled, heads_first(k, H, dtype), local)
        bias = block_bias(decay, T, None if valid is None else valid[:, None], None, hidden)
        return readout(block_logits(scores, bias, options), heads_first(v, H, dtype), options)

    @torch.no_grad()
    def _near_lse(
        self, q: Tensor, k: Tensor, gate: HeadGate, decay: Tensor, carried: Tensor, valid: Tensor | None,
        band: Band | None, given: SoftmaxOptions,
    ) -> Tensor:  # fmt: skip
        """The log-sum-exp ``[B, H, T]`` of each row over its own unit of ``KEY_UNIT`` keys and the unit before.

        PaTH's kernels prune by it. The arguments are those of ``_rows`` for all tokens.
        """
        T, P = q.shape[2], carried.shape[-1]
        before, found = carried[..., -KEY_UNIT:].mT, []
        for start in range(0, T, KEY_UNIT):
            stop = min(start + KEY_UNIT, T)
            block = self.transition.block(q[:, :, start:stop], k[:, :, start:stop], gate.slice(start, stop))
            first, end = P + start - before.shape[2], P + stop
            scores = torch.cat([block.q @ before.mT, block.scores], -1)
            found.append(block_lse(scores, decay[..., first:end], first, valid, band, given))
            before = block.k
        return torch.cat(found, -1)

    def _rows(
        self, q: Tensor, k: Tensor, v: Tensor, gate: HeadGate, decay: Tensor, carried: Tensor, valid: Tensor | None,
        first_kept: Tensor | None, band: Band | None, given: SoftmaxOptions,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """The output, log-sum-exp and new ``carried`` of a block of C rows over ``carried`` ``[B, H, K, P]`` and
        itself."""
        block = self.transition.block(q, k, gate)
        P, C = carried.shape[-1], q.shape[2]
        first = 0 if band is None else min(band.first(P), P)
        scores = torch.cat([block.q @ carried[..., first:], block.scores], -1)
        bias = block_bias(
            decay[..., first:], C, None if valid is None else valid[:, None, first:],
            None if first_kept is None else first_kept - first,
            None if band is None else band.hidden(P, P + C, first),
        )  # fmt: skip
        o, lse = readout(block_logits(scores, bias, given), v[:, :, first:], given)
        if P:
            carried = self.transition.carry(cast(Tensor, block.total), carried)
        return o, lse, torch.cat([carried, block.k.mT], -1)


def joined_blocks(blocks: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """The concatenated outputs and log-sum-exps of blocks of rows."""
    o, lse = zip(*blocks, strict=True)
    return torch.cat(o, 2), None if lse[0] is None else torch.cat(lse, 2)
