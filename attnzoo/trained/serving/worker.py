"""The thread in which a generator draws, and the pieces of text that it gives to the server's event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from attnzoo.data.unfolding import Unfolding
from attnzoo.errors import NotFiniteError
from attnzoo.models.generation.engine import Generator
from attnzoo.models.generation.proposals import Draft
from attnzoo.models.generation.sampling import Sampling
from attnzoo.trained.model import TrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """New text of one sequence.

    Args:
        index: the number of the sequence in its request.
        text: what follows the pieces before.
        tokens: how many tokens the sequence has drawn so far.
        cached: how many of its prompt were read with an earlier one.
        finish: "stop" or "length" at its end, else None.
    """

    index: int
    text: str
    tokens: int
    cached: int
    finish: str | None


@dataclass(frozen=True)
class WantedText:
    """One sequence of a request: its prompt, its limits, and how its tokens are drawn."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]


@dataclass(eq=False)
class Live:
    """A sequence in the generator, and where its text goes."""

    index: int
    unfolding: Unfolding
    give: Callable[[Piece | Exception], object]


class Worker:
    """A generator that only its own thread touches; the requests of a server wait for it in one queue.

    Args:
        source: the model with its tokenizer.
        generator: of the same model.
        draft: what proposes tokens to it, or None.

    Attributes:
        failed: the error that ended the thread, after which nothing more is drawn; None while it runs.
    """

    def __init__(self, source: TrainedModel, generator: Generator, draft: Draft | None = None) -> None:
        self.source, self.generator, self.draft = source, generator, draft
        self.failed: BaseException | None = None
        self._live: dict[int, Live] = {}
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="attnzoo-generator", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the step under way; what is still asked for ends with an error."""
        self._orders.put(None)
        self._thread.join()

    async def pieces(self, wanted: Sequence[WantedText]) -> AsyncGenerator[Piece, None]:
        """The text of the sequences as it is drawn, until all have ended; they are cancelled when this is closed.

        Raises:
            MemoryError: the caches have no memory left for one of them.
            RuntimeError: the generator has failed.
        """
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Piece | Exception]()
        numbers: list[int] = []

        def give(piece: Piece | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it who waits
                loop.call_soon_threadsafe(inbox.put_nowait, piece)

        self._orders.put(partial(self._add, wanted, numbers, give))
        left = len(wanted)
        try:
            while left:
                if self.failed is not None:
                    raise RuntimeError(f"the generator has failed: {self.failed}")
                piece = await inbox.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= piece.finish is not None
                yield piece
        finally:
            self._orders.put(partial(self._cancel, numbers))

    def _add(
        self, wanted: Sequence[WantedText], numbers: list[int], give: Callable[[Piece | Exception], object]
    ) -> None:
        special = self.source.decode.special
        try:
            for index, one in enumerate(wanted):
                ends = self.source.stop | {special[text] for text in one.stop if text in special}
                number = self.generator.add(one.prompt, one.max_tokens, stop=ends, **vars(one.sampling))
                numbers.append(number)
                self._live[number] = Live(index, Unfolding(self.source.decode, one.prompt, one.stop), give)
        except Exception as error:
            give(error)

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._live.pop(number, None) is not None:
                self.generator.cancel(number)
                del self.generator.requests[number]

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
            self.failed = RuntimeError("the server ends")
        except BaseException as error:
            logger.exception("the generator has failed")
            self.failed = error
        while not self._orders.empty():
            with suppress(Exception):  # of a generator that has failed
                if (order := self._orders.get()) is not None:
                    order()
        for live in self._live.values():
            live.give(RuntimeError(f"the generator has failed: {self.failed}"))

    def _obey(self) -> bool:
        """Carry out the orders so far, waiting for one while no sequence is left; False when the last has come."""
        while True:
            try:
                order = self._orders.get(block=not self.generator.unfinished)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _step(self) -> None:
        known: dict[int, list[int]] | None = None
        while known is None:
            try:
                known = self.generator.step(self.draft)
            except MemoryError as error:
                if self.generator.batch.torn:
                    raise
                running = [request for request in self.generator.rows if request is not None]
                newest = max(running, key=lambda request: request.id) if running else self.generator.waiting[0]
                self._live[newest.id].give(error)
                return self._cancel([newest.id])
            except NotFiniteError as error:
                for number in error.sequences:
                    self._live[number].give(error)
                self._cancel(error.sequences)  # and on, for what was known of the others by then
        for number in known.keys() & self._live.keys():
            self._hand_on(number, self._live[number])

    def _hand_on(self, number: int, live: Live) -> None:
        request = self.generator.requests[number]
        ended = request.tokens[-1] in request.stop
        text = live.unfolding.after(request.tokens[:-1] if ended else request.tokens, request.done)
        finish = "stop" if ended or live.unfolding.ended else "length" if request.done else None
        if finish:
            self._cancel([number])
        if text or finish:
            live.give(Piece(live.index, text, len(request.tokens), request.found, finish))
