"""The web application: a part of OpenAI's interface over a worker's texts."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from attnzoo.errors import NotFiniteError
from attnzoo.files import json_object
from attnzoo.trained.serving.asked import CompletionRequest, FieldError, Reader
from attnzoo.trained.serving.worker import Piece, Worker

LARGEST = 2**24  # bytes of a request's body
GONE = 499  # a client that has gone, whom no answer reaches


@dataclass(frozen=True)
class Answer:
    """The texts of one request, as bodies of OpenAI's form.

    Args:
        asked: the request.
        model: the model's name.
        chat: whether the texts are messages.
    """

    asked: CompletionRequest
    model: str
    chat: bool
    head: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        kind, prefix = ("chat.completion", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        object.__setattr__(self, "head", {**head, "model": self.model})

    def usage(self, last: Iterable[Piece]) -> dict[str, Any]:
        """The counts of tokens, after the last piece of each sequence."""
        read = sum({id(one.prompt): len(one.prompt) for one in self.asked.wanted}.values())
        new, cached = sum(piece.tokens for piece in last), sum(piece.cached for piece in last)
        counts = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """The body with all texts."""
        texts, last = [""] * len(self.asked.wanted), dict[int, Piece]()
        async for piece in pieces:
            texts[piece.index] += piece.text
            last[piece.index] = piece
        said = [{"message": {"role": "assistant", "content": text}} if self.chat else {"text": text} for text in texts]
        choices = [_choice(index, each, last[index].finish) for index, each in enumerate(said)]
        return {**self.head, "choices": choices, "usage": self.usage(last.values())}

    async def events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncGenerator[str, None]:
        """Server-sent events, one for each piece, and at an error one that says so."""
        head = {**self.head, "object": f"{self.head['object']}.chunk"} if self.chat else self.head
        last = dict[int, Piece]()
        if self.chat:
            for index in range(len(self.asked.wanted)):
                yield _event(
                    {**head, "choices": [_choice(index, {"delta": {"role": "assistant", "content": ""}}, None)]}
                )
        try:
            async for piece in _after(first, pieces):
                last[piece.index] = piece
                said = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
                yield _event({**head, "choices": [_choice(piece.index, said, piece.finish)]})
        except (MemoryError, RuntimeError, NotFiniteError) as error:
            yield _event(_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))
        if self.asked.usage:
            yield _event({**head, "choices": [], "usage": self.usage(last.values())})
        yield "data: [DONE]\n\n"


def _choice(index: int, said: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _after(first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in pieces:
        yield piece


def _error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    line = " ".join(message.split())
    return {"error": {"message": line, "type": kind, "param": param, "code": int(status)}}


def _refusal(status: int, message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(_error(status, message, param), status)


async def _fields(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise HTTPException(413, f"body: expected at most {LARGEST} bytes")
    return json_object(bytes(body), "body")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What the work gives; it is cancelled, and ClientDisconnect raised, when the client goes before it has ended."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


def application(worker: Worker, reader: Reader) -> Starlette:
    """The application, which starts the worker and ends it.

    Args:
        worker: not started yet.
        reader: of requests to the worker's model.
    """

    async def answer(request: Request, read: Callable[[dict[str, Any]], CompletionRequest], chat: bool) -> Response:
        fields = await _fields(request)
        asked = read(fields)
        name = fields.get("model") or reader.name
        if name != reader.name:
            return _refusal(404, f"model: expected {reader.name!r}, got {name!r}", "model")
        if worker.failed is not None:
            raise RuntimeError(f"the generator has failed: {worker.failed}")
        said, pieces = Answer(asked, reader.name, chat), worker.pieces(asked.wanted)
        try:
            if not asked.stream:
                return JSONResponse(await _unless_gone(request, said.whole(pieces)))
            first = await _unless_gone(request, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        return StreamingResponse(
            said.events(first, pieces), media_type="text/event-stream", background=BackgroundTask(pieces.aclose)
        )

    async def completions(request: Request) -> Response:
        return await answer(request, reader.completion, chat=False)

    async def chat(request: Request) -> Response:
        return await answer(request, reader.chat, chat=True)

    async def models(_: Request) -> Response:
        each = {"id": reader.name, "object": "model", "owned_by": "attnzoo", "max_model_len": reader.limit}
        return JSONResponse({"object": "list", "data": [each]})

    async def health(_: Request) -> Response:
        if worker.failed is not None:
            return _refusal(503, f"the generator has failed: {worker.failed}")
        return JSONResponse({"status": "ok"})

    routes = {
        "/v1/completions": (completions, "POST"), "/v1/chat/completions": (chat, "POST"),
        "/v1/models": (models, "GET"), "/health": (health, "GET"),
    }  # fmt: skip

    def refused(_: Request, error: Any) -> Response:
        if isinstance(error, FieldError):
            return _refusal(400, str(error), error.name)
        if isinstance(error, ValueError):  # the body is no JSON object
            return _refusal(400, str(error), "body")
        if isinstance(error, ClientDisconnect):
            return Response(status_code=GONE)
        if isinstance(error, HTTPException):
            known = f": expected one of {', '.join(routes)}" if error.status_code == 404 else ""
            return _refusal(error.status_code, f"{error.detail}{known}")
        return _refusal(503, str(error))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.close()

    kinds = (ValueError, ClientDisconnect, HTTPException, MemoryError, RuntimeError, NotFiniteError)
    app = Starlette(
        routes=[Route(path, serve, methods=[method]) for path, (serve, method) in routes.items()],
        exception_handlers=dict.fromkeys(kinds, refused),
        lifespan=lifespan,
    )
    app.state.worker = worker
    return app
