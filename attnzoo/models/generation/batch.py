"""A batch of sequences with the in-place caches of all layers, and one step of the whole model as a CUDA graph."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnzoo.algebra.pruning import Evict
from attnzoo.errors import check_kinds
from attnzoo.forgetting.inplace import share_in_place
from attnzoo.forgetting.rules import parse_budget
from attnzoo.forms.caches.device_memory import GIB, check_memory, size_of
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.layer.attention import Attention
from attnzoo.layer.cache import LayerCache
from attnzoo.layer.inplace import FixedCache
from attnzoo.layer.modules import untouched
from attnzoo.models.block import DecoderBlock
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.fused import StackedMaps
from attnzoo.models.generation.fused import fuse as fused
from attnzoo.models.generation.prefill import PIECE
from attnzoo.models.generation.proposals import Proposals
from attnzoo.models.generation.request import Request
from attnzoo.models.generation.sampling import GREEDY, Samplers, Sampling

COUNTED = 64  # rows
logger = logging.getLogger(__name__)


class StepOptions(NamedTuple):
    """The options of a batch's caches and steps, as :class:`~attnzoo.models.generation.engine.Generator` takes them."""

    evict: float | str | Evict | None = None
    budget: int | str | None = None
    kv_dtype: str | None = None
    graph: bool | None = None
    compile: bool = False
    fuse: bool = False

    def decided(self, device: torch.device) -> StepOptions:
        """The options, checked, with ``graph`` decided for this device.

        Raises:
            TypeError, ValueError: options of other kinds, or a graph where there can be none.
        """
        switches = {"graph": "bool | None", "compile": "bool", "fuse": "bool"}
        check_kinds({name: getattr(self, name) for name in switches}, switches)
        if self.kv_dtype not in (None, "fp8"):
            raise ValueError(f"kv_dtype: expected 'fp8' or None, got {self.kv_dtype!r}")
        on_gpu = device.type == "cuda"
        if self.graph and not on_gpu:
            raise ValueError(f"graph: expected None or False on {device} (only a GPU has graphs), got True")
        if self.evict is None or not Evict.of(self.evict).offload:
            return self._replace(graph=on_gpu if self.graph is None else self.graph)
        why = "which keys must come back from the host is known only within a step"
        if self.graph:
            raise ValueError(f"graph: expected None or False with evict='offload' ({why}), got True")
        if on_gpu:
            logger.info("a step is no CUDA graph with evict='offload': %s", why)
        return self._replace(graph=False)


class Batch:
    """B sequences in fixed tensors, which steps change in place.

    Args:
        model: in evaluation mode.
        size: B, the number of rows.
        max_tokens: of the longest sequence, its prompt included.
        options: after :meth:`StepOptions.decided`.

    Attributes:
        rows: the rows' lengths, and which hold a sequence.
        tokens: the last token of each row, ``[B]`` int64, which is not in the caches yet.
        broken: -1 for a row whose logits after the prompt are not finite, else 0, ``[B]`` int64.
        proposals: the proposed tokens that a step of several tokens checks.
        draft: the batch of a recurrence that proposes tokens of the same rows, as a part of their steps; see
            :meth:`follow`.
        total: whether the budget is one of all layers.
        torn: whether a step failed after some layers had taken its tokens; no step can follow then.

    Raises:
        ValueError: a variant without in-place steps, or more tokens than the model has learned positions.
        MemoryError: see :class:`~attnzoo.models.generation.engine.Generator`.
    """

    def __init__(self, model: LanguageModel, size: int, max_tokens: int, options: StepOptions) -> None:
        self.model, self.device = model, model.embedding.weight.device
        if max_tokens > (known := model.config.learned_positions or max_tokens):
            raise ValueError(f"max_tokens: expected at most {known} (learned_positions), got {max_tokens}")
        self.options, self.graphed, eight_bits = options, bool(options.graph), options.kv_dtype is not None
        self.total = parse_budget(options.budget)[2]
        self._block: Callable[..., tuple[Tensor, Tensor]] = _block
        if options.compile:
            self._block = torch.compile(_block, dynamic=False)
        self.blocks, self.products = list(model.blocks), list[StackedMaps]()
        layers = self._layers(size, max_tokens)
        self.rows = BatchRows.idle(size, self.device, eight_bits)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.broken = torch.zeros_like(self.tokens)
        self.samplers, self.proposals = Samplers.empty(size, self.device), Proposals.empty(size, self.device)
        self.caches = [FixedCache.of(layer, one, self.rows, max_tokens) for layer, one in layers]
        self.torn, self.max_tokens = False, max_tokens
        self.draft: Batch | None = None
        self._ahead: int | None = None  # tokens that the draft proposes within the step; None: it has no part in it
        self._saved: list[Tensor] = []  # a draft's states within a step
        # by (sampler's needs, tokens of a step, of which the draft proposes)
        self.graphs: dict[tuple[int, int, int | None], torch.cuda.CUDAGraph] = {}
        self._places: list[int] = []
        self._longest = 1  # tokens of a step that the caches are ready for
        if self.graphed:
            self._warm_up(GREEDY, 1, 2)

    @torch.no_grad()
    def _layers(self, size: int, max_tokens: int) -> list[tuple[Attention, LayerCache]]:
        """The attention layers, each with its cache after one token; checks that the caches of all rows fit."""
        eight_bits, like = self.options.kv_dtype is not None, self.model.new_cache(*self.options[:2])
        one = functools.partial(self.model.hidden, torch.zeros(1, 1, dtype=torch.int64, device=self.device), cache=like)
        if self.options.fuse:
            self.blocks, self.products = fused(self.blocks, one)
        else:
            one()
        layers = list(zip(self.model.attentions(), like, strict=True))
        if eight_bits and not any(cache.state.grows for cache in like):
            raise ValueError("kv_dtype: expected None (no layer keeps keys), got 'fp8'")

        def needed(rows: int) -> tuple[int, int]:
            """Bytes of the caches of ``rows`` rows, and temporary bytes of a step."""
            if rows > COUNTED:  # extrapolate, as the tables of many rows might not fit
                (total, beside), (before, besides) = needed(COUNTED), needed(COUNTED - 1)
                more = rows - COUNTED
                return total + more * (total - before), beside + more * (beside - besides)
            idle = BatchRows.idle(rows, self.device, eight_bits)
            meta = [FixedCache.of(layer, one, idle, max_tokens, "meta") for layer, one in layers]
            return _bytes(meta), max(cache.workspace() for cache in meta)  # layers run one after the other

        total, beside = needed(size)
        what = f"caches of {size} sequences of {max_tokens} tokens (with {beside / GIB:.2f} GiB for a step)"
        check_memory(total + beside, self.device, what)
        return layers

    def bytes(self) -> int:
        """Bytes of the caches."""
        return _bytes(self.caches)

    def begin(self, row: int, request: Request) -> None:
        """Fill an idle row with what was read of the request's prompt, and draw the token that follows.

        Raises:
            MemoryError: its keys do not fit now; the row stays idle.
        """
        for product in self.products:
            product.refresh()
        self.samplers.set(row, request.sampling, self.model.config.vocab_size)
        try:
            if isinstance(request.start, Tensor):
                cache, logits = request.reading.cache, self.model.logits(request.reading.last)
                self.tokens[row : row + 1] = self.samplers.at(row).draw(logits, request.sampling.needs)
                self.broken[row] = logits.isfinite().all().long() - 1
            else:
                assert request.start is not None
                cache, self.tokens[row] = request.start
                self.broken[row] = 0
            if request.reading is not None and request.reading.start is not None:
                request.reading.start.share(row, request.found)
            for fixed, filled in zip(self.caches, cache, strict=True):
                fixed.admit(row, filled, request.length + request.max_new_tokens)
        except BaseException:
            for fixed in self.caches:
                fixed.clear(row)
            raise
        self.rows.begin(row, request.length)
        self._check_places()

    @torch.no_grad()
    def follow(self, model: LanguageModel, running: Sequence[tuple[int, Request]]) -> None:
        """Let ``model``, a recurrence, propose tokens of ``running`` rows; it reads what it has not seen of them.

        Raises:
            MemoryError: its states do not fit.
        """
        if self.draft is None or self.draft.model is not model:
            options = self.options._replace(evict=None, budget=None, kv_dtype=None)
            self.draft, self._longest = Batch(model, len(self.rows.lengths), self.max_tokens, options), 1
            self._check_places()
        for row, request in running:
            if self.draft.rows.lengths[row] == request.known - 1:
                continue
            *known, last = *request.prompt, *request.tokens
            self.draft.end(row)
            cache = model.new_cache()
            for piece in torch.tensor([known], device=self.device).split(PIECE, 1):
                model.hidden(piece, cache=cache)
            self.draft.begin(row, Request(row, (cache, last), len(known), [last], 1, Sampling(0.0), frozenset()))

    def end(self, row: int) -> list[list[int] | None]:
        """Free the row; return by layer how many keys each key head held, None for a layer without keys."""
        if self.draft is not None:
            self.draft.end(row)
        kept = [cache.memory.kept(row) for cache in self.caches]
        for cache in self.caches:
            cache.clear(row)
        self.rows.end(row)
        return kept

    def step(self, rows: Sequence[int], needs: int) -> None:
        """Draw the next token of ``rows``, which are all rows that hold a sequence.

        Args:
            needs: the largest :attr:`~attnzoo.models.generation.sampling.Sampling.needs` of these rows.

        Raises:
            MemoryError: see :meth:`~attnzoo.models.generation.engine.Generator.step`.
        """
        self._advance(rows, needs)
        for row in rows:
            self.rows.lengths[row] += 1

    def check(
        self, rows: Sequence[int], needs: int, tokens: int, ahead: int | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """Run a step of several tokens per row: the last token and the proposed ones.

        Args:
            ahead: how many ``draft`` proposes within the step; None where all are known.

        Returns:
            By row, how many of the drawn tokens count, and the drawn tokens.

        Raises:
            MemoryError: as :meth:`step`.
        """
        draft = None if ahead is None else self.draft
        if tokens > self._longest:
            what = f"step that checks {tokens - 1} proposed tokens of each sequence"
            saved = 0 if draft is None else ((ahead or 0) + 2) * draft.bytes()
            check_memory(max(cache.workspace(tokens) for cache in self.caches) + saved, self.device, what)
            self._longest = tokens
        self.rows.tokens, self._ahead = tokens, ahead
        try:
            self._advance(rows, needs)
            found = torch.cat([self.proposals.kept[:, None], self.proposals.drawn], 1).tolist()  # waits once
        finally:
            self.rows.tokens, self._ahead = 1, None
        for batch in [self] if draft is None else [self, draft]:
            for row in rows:
                batch.rows.lengths[row] += found[row][0]
        return [kept for kept, *_ in found], [drawn for _, *drawn in found]

    def _advance(self, rows: Sequence[int], needs: int) -> None:
        changed = [cache.ready(rows) for cache in self.caches]
        if any(changed):
            self._check_places()
        if not self.graphed:
            try:
                self._forward(needs)
            except BaseException:
                self.torn = True
                raise
            return
        key = needs, self.rows.tokens, self._ahead
        if key not in self.graphs:
            self.graphs[key] = self._captured(needs)
        self.graphs[key].replay()

    def _check_places(self) -> None:
        """Discard the CUDA graphs if tensors have been replaced since they were captured."""
        places = [x.data_ptr() for batch in (self, self.draft) if batch is not None for x in batch.tensors()]
        if places != self._places:
            self.graphs, self._places = {}, places

    def _forward(self, needs: int) -> None:
        """One step of the whole model, which changes fixed tensors in place."""
        T, tokens = self.rows.tokens, self.tokens[:, None]
        draft = None if self._ahead is None else self.draft
        if draft is not None:
            draft.propose(self.tokens, self.proposals, self._ahead or 0)
        tokens = tokens if T == 1 else torch.cat([tokens, self.proposals.given[:, : T - 1]], 1)
        x, first = self.model.placed(self.model.embedding(tokens), self.rows.places()), self.model.first_values()
        more = torch.zeros_like(x)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x, more = self._block(block, x, more, cache, **first)
        logits = self.model.logits(self.model.norm(x + more))  # [B, T, vocab]
        if T == 1 and draft is None:
            self.tokens.copy_(self.samplers.draw(logits[:, 0], needs))
            self.rows.length += self.rows.active
            if self.total:
                share_in_place([cache.memory for cache in self.caches])
            return
        self.tokens.copy_(self.proposals.judge(logits, self.samplers, self.rows.active, needs))
        for cache in self.caches if T > 1 else ():
            cache.keep(self.proposals.kept)
        self.rows.length += self.proposals.kept
        if draft is not None:
            draft.settle(self.proposals.kept)

    def propose(self, last: Tensor, proposals: Proposals, number: int) -> None:
        """Store in ``proposals`` the ``number`` likeliest tokens that follow ``last [B]``.

        Each is a step of one token. Afterwards all of them have been read; :meth:`settle` takes back those that are not
        kept, from the states before and after each step.
        """
        self.tokens.copy_(last)
        proposals.counts.fill_(number)
        self._saved = [x.new_empty(number + 2, *x.shape) for x in self.tensors()]
        for t in range(number + 2):
            for saved, x in zip(self._saved, self.tensors(), strict=True):
                saved[t] = x
            if t <= number:
                self._forward(GREEDY)
            if t < number:
                proposals.given[:, t] = self.tokens

    def settle(self, kept: Tensor) -> None:
        """Go back to the states after the first ``kept[b]`` of the tokens that :meth:`propose` read; ``[B]`` int64."""
        rows, read = torch.arange(len(kept), device=kept.device), len(self._saved[0]) - 1
        for saved, x in zip(self._saved, self.tensors(), strict=True):
            x.copy_(saved[kept, rows])
        self._saved = []
        self.rows.length += (kept - read) * self.rows.active

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the caches."""
        return (x for cache in self.caches for x in cache.tensors())

    def _warm_up(self, *needs: int) -> None:
        """Run a step with idle rows, so that functions that compile at their first call do."""
        side, active, tokens = torch.cuda.Stream(self.device), self.rows.active.clone(), self.tokens.clone()
        self.rows.active.zero_()
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(side):
            for each in needs:
                self._forward(each)
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.rows.active.copy_(active)
        self.tokens.copy_(tokens)

    def _captured(self, needs: int) -> torch.cuda.CUDAGraph:
        if self.rows.tokens > 1:
            self._warm_up(needs)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            self._forward(needs)
        return graph


def _block(block: nn.Module, x: Tensor, more: Tensor, cache: FixedCache, **first: Any) -> tuple[Tensor, Tensor]:
    """A block's output for ``x + more``, as two summands."""
    if not untouched(block):  # what was put around or into a block gets the sum
        return block(x + more, cache=cache, **first), torch.zeros_like(x)
    return cast(DecoderBlock, block).apart(x, more, cache=cache, **first)


def _bytes(caches: Sequence[FixedCache]) -> int:
    return sum(size_of(x) for cache in caches for x in cache.tensors())
