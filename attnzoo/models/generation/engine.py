"""Generation for many sequences with continuous batching, where a step of the whole model is one CUDA graph."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Evict
from attnzoo.algebra.values import unchecked
from attnzoo.errors import NotFiniteError, check_kinds, check_least
from attnzoo.forms.caches.device_memory import size_of
from attnzoo.kernels.common.launching import power_of_2
from attnzoo.kernels.decode.plan import MOST_ROWS
from attnzoo.layer.cache import LayerCache
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.batch import Batch, StepOptions
from attnzoo.models.generation.delivery import Delivery
from attnzoo.models.generation.prefill import Prefill
from attnzoo.models.generation.proposals import Draft, ModelDraft
from attnzoo.models.generation.request import Request, check_begun, check_counts, whole_numbers
from attnzoo.models.generation.sampling import Sampling

logger = logging.getLogger(__name__)


class Generator:
    """A generator that continues many sequences at a time, each as it would be alone.

    All memory is allocated at the start, unless keys are evicted. A step draws one token of every sequence; on a GPU it
    is one CUDA graph. A new sequence joins the batch once its prompt is read, in pieces between the steps, so that a
    long one does not stop the others; a finished one leaves it.

    Args:
        model: put into evaluation mode. Its weights may change in place, but must not be replaced.
        max_sequences: B, rows of the batch; further sequences wait until one leaves.
        max_tokens: of the longest sequence, its prompt included.
        check_every: steps between two looks at what was drawn, for tokens that end a sequence. The tokens are known
            that late, and on a GPU one look later, so that it never waits.
        evict: give up keys for which no later token can lose more than this weight in all; None for none. Their memory
            is taken as it is needed, and a growing pool of keys captures the graph anew. With "offload" they go to the
            host's memory, and come back for a token that needs them; a step is no graph then.
        budget: what each layer that forgets may hold of a sequence: tokens of each head, or, as a text such as
            "96 KiB", the memory of its keys and values; "2 MiB total" is that of all layers, whose keys compete.
        kv_dtype: "fp8" keeps keys and values in 8 bits, half of the memory of 16, for rounding that is bounded
            (``docs/derivations/eight_bits.md``); sums of gates stay as they are. None for the model's dtype.
        graph: whether a step is captured as a CUDA graph; None for wherever there is a GPU.
        compile: compile the blocks' steps (`torch.compile`): fewer kernels, after some seconds at the first step.
        fuse: multiply what reads one input (q, k, v and gates; the two halves of the MLP) in one product, by copies of
            these weights (:meth:`weight_bytes`). What changes in place counts from the next sequence on that joins.

    Raises:
        TypeError, ValueError: a model or numbers of another kind, or a variant that offers no memory of fixed size.
        MemoryError: the caches or the copies do not fit into the device's memory; the message says how much they need.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_sequences: int,
        max_tokens: int,
        *,
        check_every: int = 8,
        evict: float | str | Evict | None = None,
        budget: int | str | None = None,
        kv_dtype: str | None = None,
        graph: bool | None = None,
        compile: bool = False,
        fuse: bool = False,
    ) -> None:
        if not isinstance(model, LanguageModel):
            raise TypeError(f"model: expected LanguageModel, got {type(model).__name__}")
        check_counts(max_sequences=max_sequences, max_tokens=max_tokens, check_every=check_every)
        self.device = model.embedding.weight.device
        options = StepOptions(evict, budget, kv_dtype, graph, compile, fuse).decided(self.device)
        self.model, self.max_tokens, self.check_every = model.eval(), max_tokens, check_every
        self.batch = Batch(self.model, max_sequences, max_tokens, options)
        self.prefill = Prefill(self.model, evict, budget, [cache.memory for cache in self.batch.caches])
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = [None] * max_sequences
        self.requests: dict[int, Request] = {}
        self._numbers = itertools.count()  # one that has ended may be taken out of `requests`
        self._since, self._delivery = 0, Delivery()
        self._crowded = False  # there was no room for the next sequence, which still waits, and none has left since
        self._known: dict[int, list[int]] = {}  # tokens that no step has given yet

    def bytes(self) -> int:
        """Memory of the caches."""
        return self.batch.bytes()

    def weight_bytes(self) -> int:
        """Memory of the copies of weights that ``fuse`` makes."""
        return sum(size_of(product.weight) for product in self.batch.products)

    def remember(self, limit: int) -> None:
        """Keep what is remembered of the prompts that are read; later ones with the same beginning go on from there.

        Whole pages of keys are shared: they stay where they are, and take no memory that a sequence needs. In-place
        changes of the weights discard everything.

        Args:
            limit: MiB of what is kept besides (states, gates, the tokens that fill no page); what was used longest ago
                goes first. 0 keeps nothing.

        Raises:
            ValueError: a negative number, a generator that evicts or forgets keys, where a later prompt may need what
                is gone, or one that shares its prompts.
        """
        check_kinds({"limit": limit}, {"limit": "int"})
        check_least(0, limit=limit)
        if limit and (why := self.prefill.whole()):
            raise ValueError(
                f"limit: expected 0 with {why}, whose states depend on when keys were given up, got {limit}"
            )
        if limit and self.prefill.over is not None:
            raise ValueError(f"limit: expected 0 with share, whose ranks all read a prompt or none, got {limit}")
        self.prefill.prefixes.limit = limit * 2**20
        self.prefill.prefixes.trim()

    def share(self, over: Any) -> None:
        """Read each prompt on several ranks, a part on each, see :func:`attnzoo.parallel.prefill`.

        All of them make the same calls with the same prompts, and draw the same tokens.

        Args:
            over: their process group or one-dimensional device mesh; None: this process reads alone.

        Raises:
            ValueError: a generator that evicts, forgets keys or remembers prompts.
        """
        if over is not None and (why := self.prefill.whole()):
            raise ValueError(f"over: expected None with {why}, for which one process reads a prompt whole")
        if over is not None and self.prefill.prefixes.limit:
            raise ValueError("over: expected None with remember, as a rank may remember what another has to read")
        self.prefill.over = over

    def add(
        self,
        prompt: Tensor | Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Collection[int] = (),
    ) -> int:
        """Continue a sequence; it joins the batch at the next step at which a row is free.

        Args:
            prompt: its tokens, ``[T]`` integers.
            max_new_tokens: at most so many follow.
            temperature, top_k, top_p, seed: see :class:`~attnzoo.models.generation.sampling.Sampling`.
            stop: tokens after which it ends.

        Returns:
            A number by which :meth:`step` and :meth:`run` call it.

        Raises:
            TypeError, ValueError: an empty prompt, tokens beyond the vocabulary, more than ``max_tokens`` in all, or a
                number out of its range.
        """
        if not isinstance(prompt, Tensor):
            prompt = torch.tensor(whole_numbers("prompt", prompt), dtype=torch.int64, device="cpu")
        if prompt.ndim != 1:
            raise ValueError(f"prompt: expected one sequence [T], got shape {list(prompt.shape)}")
        self.model.check_tokens("prompt", prompt[None])
        sampling = Sampling(temperature, top_k, top_p, seed)
        start = prompt.to(self.device, torch.int64, copy=True)  # as it is now
        return self._wait(start, len(prompt), prompt.tolist(), max_new_tokens, sampling, stop)

    def resume(
        self, cache: list[LayerCache], token: int, max_new_tokens: int, sampling: Sampling, stop: Collection[int] = ()
    ) -> int:
        """Continue a sequence that another loop has begun; see :meth:`add`.

        Args:
            cache: of :meth:`~attnzoo.models.decoder.LanguageModel.new_cache`, of one sequence without padding. It is
                only read, when the sequence joins the batch; until then one in pages goes on by one call at most.
            token: the one that follows, which ``cache`` has not seen.
            sampling: of the tokens after it.

        Raises:
            TypeError, ValueError: a cache of another model or device, an empty one, or one of several sequences or with
                padding; else as :meth:`add`.
        """
        check_begun(cache, self.model.attentions(), self.device)
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling: expected Sampling, got {type(sampling).__name__}")
        self.model.check_tokens("token", torch.tensor([[token]], device="cpu"))
        begun = [copy.copy(one) for one in cache]  # as they are now
        return self._wait((begun, token), cache[0].tokens, [token], max_new_tokens, sampling, stop)

    def _wait(
        self, start: Any, length: int, prompt: list[int], max_new_tokens: int, sampling: Sampling, stop: Collection[int]
    ) -> int:
        """Append a request to the waiting ones; return its number."""
        check_counts(max_new_tokens=max_new_tokens)
        if length + max_new_tokens > self.max_tokens:
            raise ValueError(
                f"max_new_tokens: expected at most {self.max_tokens - length} after {length} tokens "
                f"(max_tokens = {self.max_tokens}), got {max_new_tokens}"
            )
        ends = frozenset(whole_numbers("stop", stop))
        request = Request(next(self._numbers), start, length, prompt, max_new_tokens, sampling, ends)
        self.requests[request.id] = request
        self.waiting.append(request)
        return request.id

    @torch.no_grad()
    def cancel(self, number: int) -> None:
        """End a sequence before its time: it waits no longer, or leaves its row to another. Its known tokens stay.

        Args:
            number: as :meth:`add` gave it; a sequence that has ended stays as it is.

        Raises:
            ValueError: no such sequence.
        """
        if number not in self.requests:
            raise ValueError(f"number: expected one that add or resume gave, got {number!r}")
        request = self.requests[number]
        if request.done:
            return
        request.done, request.reading = True, None
        if request in self.waiting:
            self.waiting.remove(request)
            self._crowded = False
        elif request in self.rows:
            self._release(self.rows.index(request), request)

    @torch.no_grad()
    def step(self, draft: Draft | None = None) -> dict[int, list[int]]:
        """Draw one token of every sequence in the batch, or with a draft the proposed ones that it draws too, and one.

        Args:
            draft: called with each :class:`~attnzoo.models.generation.request.Request`, of which all tokens are
                known by then, gives up to 15 tokens that may follow. One step checks them all. The tokens are those
                that would be drawn without it, whatever it proposes.

        Returns:
            The tokens that have become known since the last step that ended, by sequence. Without any left to draw, all
            that were still on their way.

        Raises:
            TypeError, ValueError: proposed tokens that are none, or beyond the vocabulary; see :meth:`admit` too.
            MemoryError: no room for what is taken as it is needed. Before a step nothing has changed then. Keys that
                come back from the host are brought within it: no further step can follow.
            NotFiniteError: the logits after the prompt of a sequence are not finite. It has ended, the others go on.
            RuntimeError: an earlier step failed within.
        """
        self._step(draft)
        known, self._known = self._known, {}
        return known

    @unchecked()
    def _step(self, draft: Draft | None) -> None:
        if self.batch.torn:
            raise RuntimeError("step: expected a generator whose last step ended, got one that failed within it")
        self.admit()
        if draft is not None and self._speculate(draft):
            return
        running = self._running()
        if running:
            self.batch.step(*_asked(running))
            self._note(running)
        self._since += 1
        if self._since >= self.check_every or not any(self.rows):
            self._fetch(behind=self.device.type == "cuda" and any(self.rows))

    @torch.no_grad()
    def run(self, draft: Draft | None = None) -> dict[int, list[int]]:
        """Draw until every sequence has ended; the tokens that followed each prompt since the last call that ended."""
        while self.unfinished:
            self._step(draft)
        known, self._known = self._known, {}
        return known

    def stream(self, draft: Draft | None = None) -> Iterator[dict[int, list[int]]]:
        """The new tokens of each step, by sequence, until every sequence has ended."""
        while self.unfinished or self._known:
            new = self.step(draft)
            if new:
                yield new

    @property
    def unfinished(self) -> bool:
        """Whether there are tokens to draw, or drawn ones that no step has given yet."""
        return bool(self.waiting or any(self.rows) or self._delivery)

    @torch.no_grad()
    @unchecked()
    def admit(self) -> None:
        """Read waiting prompts, as each step begins, at most a piece beside other sequences; the first token that
        follows is drawn here.

        One for which there is no memory now waits until another has left.

        Raises:
            MemoryError: there is none though no sequence is in the batch.
            ValueError: a sequence cannot go on from its cache (see :meth:`resume`), and has ended.
        """
        read = 0
        for row, there in enumerate(self.rows):
            if there is not None or not self.waiting or self._crowded:
                continue
            request = self.waiting[0]
            try:
                while not self.prefill.done(request):
                    if read >= self.prefill.piece and self._running():
                        return
                    read += self.prefill.read(request)
                self.batch.begin(row, request)
                self.prefill.keep(row, request)
            except MemoryError as error:
                request.reading = None
                if not self._running():
                    raise
                self._crowded = True
                logger.info("sequence %d waits until another has left: %s", request.id, error)
                return
            except ValueError:  # as of a cache that has gone on too far: it will never be what it was
                self.waiting.popleft().done = True
                raise
            self.waiting.popleft()  # not before: without room for it, it goes on waiting
            start, request.start, request.reading = request.start, None, None
            self.rows[row], request.left = request, request.max_new_tokens
            if isinstance(start, Tensor):
                self._note([(row, request)])

    def _note(self, running: list[tuple[int, Request]]) -> None:
        """Note the tokens that ``running`` rows have drawn; rows that may draw no more leave."""
        self._delivery.add(self.batch.tokens | self.batch.broken, running)
        for row, request in running:
            request.left -= 1
            if not request.left:
                self._release(row, request)

    def _release(self, row: int, request: Request) -> None:
        self.rows[row], request.read, self._crowded = None, self.batch.rows.lengths[row], False
        request.kept = self.batch.end(row)

    def _running(self) -> list[tuple[int, Request]]:
        return [(row, request) for row, request in enumerate(self.rows) if request is not None]

    def _speculate(self, draft: Draft) -> bool:
        """A step that checks what ``draft`` proposes; False, and none, where that is nothing.

        It takes 2, 4, 8 or 16 tokens, so that few graphs and compiled blocks serve every number of proposals.
        """
        if self.batch.total:
            raise ValueError("draft: expected None with a budget of all layers (keys go after each token), got one")
        self._fetch()
        running = self._running()
        most = power_of_2(min([MOST_ROWS, *(request.left for _, request in running)]) // 2 + 1) - 1
        ahead: int | None = None
        if running and isinstance(draft, ModelDraft) and draft.joins(self.model, self.max_tokens):
            self.batch.follow(draft.model, running)
            ahead = min(draft.tokens, most) if all(request.known > 1 for _, request in running) else 0
            tokens, number = ahead + 1, dict.fromkeys((row for row, _ in running), ahead)
        else:
            offered = {row: whole_numbers("draft", draft(request))[:most] for row, request in running} if most else {}
            tokens = self.batch.proposals.offer(offered, self.model.config.vocab_size)
            number = {row: len(proposed) for row, proposed in offered.items()}
            if tokens == 1:
                return False
        kept, drawn = self.batch.check(*_asked(running), power_of_2(tokens), ahead)
        for row, request in running:
            request.left -= kept[row]
            request.proposed += number[row]
            request.accepted += kept[row] - 1
            for token in drawn[row][: kept[row]]:
                self._hand_out(row, request, token)
        return True

    def _fetch(self, behind: bool = False) -> None:
        """Hand out what was drawn; with ``behind``, but for the copy that was begun last."""
        self._since, broken = 0, list[int]()
        for row, request, token in self._delivery.receive(behind):
            if token >= 0:
                self._hand_out(row, request, token)
            elif not request.done:
                self.cancel(request.id)
                broken.append(request.id)
        if broken:
            raise NotFiniteError(broken)

    def _hand_out(self, row: int, request: Request, token: int) -> None:
        """Add a token to its sequence; what was drawn after one that ends a sequence is none of it."""
        if request.done:
            return
        request.tokens.append(token)
        self._known.setdefault(request.id, []).append(token)
        request.done = token in request.stop or len(request.tokens) == request.max_new_tokens
        if request.done and self.rows[row] is request:
            self._release(row, request)


def _asked(running: list[tuple[int, Request]]) -> tuple[list[int], int]:
    """The rows of the running requests, and the most that one of these needs of its sampler."""
    return [row for row, _ in running], max(request.sampling.needs for _, request in running)
