"""The endpoints: a request is read, handed to the engine, and answered at once or as its text is written."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from ..errors import FalconSpecError, RequestError
from .batch import Event, TextRequest, Ticket, Written
from .engine import CLOSED, Engine
from .intake import Intake
from .protocol import Answer, Body, ChatBody, CompletionBody, error_body, event

COMPLETION_TOKENS = 16  # the protocol's default of `/v1/completions`; a chat may fill the context
_LATER = {"Retry-After": "1"}  # seconds
_MOST_SAID = 2_000  # characters of an error, which may hold what a request holds


class Service:
    """The endpoints of a server, whichever framework calls them.

    Args:
        engine (`Engine`): Writes the texts.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        name (`str`): Under which the model is served.
        chat_template_kwargs (`Mapping[str, Any]`): Given to the chat template, unless a request gives others.
        max_body_mib (`int`): The largest body of a request that is read, in MiB.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        chat_template_kwargs: Mapping[str, Any],
        max_body_mib: int = 8,
    ) -> None:
        self.engine, self.name, self.created = engine, name, int(time.time())
        self.intake = Intake(tokenizer, engine.target.config, name, chat_template_kwargs, max_body_mib)

    async def models(self) -> dict[str, Any]:
        """The model that is served."""
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "transformers_falcon_spec"}
        return {"object": "list", "data": [model]}

    async def health(self) -> JSONResponse:
        """Whether requests are taken, and how many wait."""
        if not self.engine.is_open:
            return refusal(RequestError(CLOSED, 503, "shutting_down"))
        return JSONResponse({"status": "ok", "num_waiting": self.engine.num_waiting})

    async def completion(self, request: Request) -> Response:
        """The text that follows a prompt."""
        body, ids = await self.intake.read(request, CompletionBody)
        return await self._answer(body, ids, body.max_tokens or COMPLETION_TOKENS, request)

    async def chat(self, request: Request) -> Response:
        """The next turn of a conversation."""
        body, ids = await self.intake.read(request, ChatBody)
        most = body.max_completion_tokens or body.max_tokens or self._num_left(ids)
        return await self._answer(body, ids, most, request)

    def _num_left(self, ids: list[int]) -> int:
        """How many tokens the context has left behind a prompt, at least one."""
        if self.intake.context is None:
            raise RequestError("`max_tokens` must be given, as the target's config names no length of its context.")
        return max(self.intake.context - len(ids), 1)

    async def _answer(self, body: Body, ids: list[int], max_tokens: int, request: Request) -> Response:
        self.intake.check_length(len(ids), max_tokens)
        request.state.num_read = len(ids)
        sampling = body.sampling(self.engine.target.generation_config)
        asked = TextRequest(tuple(ids), max_tokens, sampling, body.seed, body.stops, bool(body.stream))
        is_chat, created = isinstance(body, ChatBody), int(time.time())
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        answer = Answer(is_chat, answer_id, self.name, created, len(ids), body.has_usage)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ticket = self.engine.submit(asked, lambda new: loop.call_soon_threadsafe(events.put_nowait, new))
        watch = asyncio.create_task(self._cancel_if_left(request, ticket))
        try:
            first = await events.get()  # an error before any text has its status
        except asyncio.CancelledError:
            self._end(ticket, watch)
            raise
        if isinstance(first, str):
            stream = self._stream(answer, first, events, ticket, watch, request)
            return StreamingResponse(stream, media_type="text/event-stream")
        self._end(ticket, watch)
        if isinstance(first, Exception):
            return refusal(first)
        request.state.num_written = first.num_tokens
        if body.stream:
            return Response(answer.last_chunks(first), media_type="text/event-stream")
        return JSONResponse(answer.whole(first))

    async def _stream(
        self,
        answer: Answer,
        first: str,
        events: "asyncio.Queue[Event]",
        ticket: Ticket,
        watch: "asyncio.Task[None]",
        request: Request,
    ) -> AsyncIterator[str]:
        """The events of a stream; pieces that have come meanwhile are one."""
        piece, last, is_first = first, None, True
        try:
            while last is None:
                while not events.empty() and last is None:
                    new = events.get_nowait()
                    piece, last = (piece + new, None) if isinstance(new, str) else (piece, new)
                if piece:
                    yield answer.chunk(piece, is_first)
                    is_first = False
                if last is None:
                    new = await events.get()
                    piece, last = (new, None) if isinstance(new, str) else ("", new)
            yield answer.last_chunks(last) if isinstance(last, Written) else event(_error_of(last)[0])
        finally:
            request.state.num_written = len(ticket.text.token_ids)
            self._end(ticket, watch)

    async def _cancel_if_left(self, request: Request, ticket: Ticket) -> None:
        """Wait until nobody listens any more."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.engine.cancel(ticket)

    def _end(self, ticket: Ticket, watch: "asyncio.Task[None]") -> None:
        watch.cancel()
        self.engine.cancel(ticket)  # changes nothing once the text is written


def make_app(service: Service) -> FastAPI:
    """An application of FastAPI with the endpoints, and with errors in OpenAI's form."""
    app = FastAPI(title="transformers_falcon_spec")
    app.add_api_route("/health", service.health)
    app.add_api_route("/v1/models", service.models)
    app.add_api_route("/v1/completions", service.completion, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], response_model=None)
    add_error_handlers(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Let errors of an application be told in OpenAI's form."""
    for kind in (RequestError, HTTPException, Exception):
        app.add_exception_handler(kind, _handled)


async def _handled(_request: Request, error: Exception) -> JSONResponse:
    return refusal(error)


def refusal(error: Exception) -> JSONResponse:
    """The answer that tells an error."""
    body, status = _error_of(error)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: _LATER, 503: _LATER}.get(status)
    return JSONResponse(body, status, headers)


def _error_of(error: Exception) -> tuple[dict[str, Any], int]:
    """An error in OpenAI's form, and its status."""
    said = f": {error}" if isinstance(error, FalconSpecError) else "."
    status, code, message = 500, None, f"The text could not be written: {type(error).__name__}{said}"
    if isinstance(error, RequestError):
        status, code, message = error.status, error.code, str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    if len(message) > _MOST_SAID:
        message = f"{message[:_MOST_SAID]} .."
    return error_body(message, status, code), status
