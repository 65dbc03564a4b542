"""The endpoints: a request is read, handed to the engine, and answered at once or as its text is written."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from ..errors import FalconSpecError, OptionError, RequestError
from ..training.chat_template import ChatTemplate
from .batch import Event, TextRequest, Ticket, Written
from .engine import CLOSED, Engine
from .protocol import Answer, Body, ChatBody, CompletionBody, error_body, event

COMPLETION_TOKENS = 16  # the protocol's default of `/v1/completions`; a chat may fill the context


class Service:
    """The endpoints of a server, whichever framework calls them.

    Args:
        engine (`Engine`): Writes the texts.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        name (`str`): Under which the model is served.
        chat_template_kwargs (`Mapping[str, Any]`): Given to the chat template, unless a request gives others.
    """

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, name: str, chat_template_kwargs: Mapping[str, Any]
    ) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.chat_template_kwargs, self.created = chat_template_kwargs, int(time.time())
        config: Any = engine.target.config.get_text_config(decoder=True)
        self._vocab_size = config.vocab_size
        self._context: int | None = getattr(config, "max_position_embeddings", None)

    async def models(self) -> dict[str, Any]:
        """The model that is served."""
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "transformers_falcon_spec"}
        return {"object": "list", "data": [model]}

    async def health(self) -> JSONResponse:
        """Whether requests are taken, and how many wait."""
        if not self.engine.is_open:
            return _refusal(RequestError(CLOSED, 503, "shutting_down"))
        return JSONResponse({"status": "ok", "num_waiting": self.engine.num_waiting})

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """The text that follows a prompt."""
        self._check_model(body)
        prompt = body.only_prompt()
        try:
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        except (TypeError, ValueError) as error:  # text that is no Unicode
            raise RequestError(f"`prompt` must be text that can be encoded, but: {error}") from None
        return await self._answer(body, ids, body.max_tokens or COMPLETION_TOKENS, request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """The next turn of a conversation."""
        self._check_model(body)
        ids = self._prompt_ids(body)
        most = body.max_completion_tokens or body.max_tokens or self._num_left(ids)
        return await self._answer(body, ids, most, request)

    def _num_left(self, ids: list[int]) -> int:
        """How many tokens the context has left behind a prompt, at least one."""
        if self._context is None:
            raise RequestError("`max_tokens` must be given, as the target's config names no length of its context.")
        return max(self._context - len(ids), 1)

    def _prompt_ids(self, body: ChatBody) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise RequestError("The target has no chat template. Use `/v1/completions`.")
        messages = [message.for_template() for message in body.messages]
        kwargs = {**self.chat_template_kwargs, **body.chat_template_kwargs}
        try:
            return list(
                ChatTemplate(self.tokenizer, kwargs).encoded(messages, add_generation_prompt=True)["input_ids"]
            )
        except OptionError as error:
            raise RequestError(str(error)) from None
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"The chat template must take these `messages`, but it says: {error}") from None

    async def _answer(self, body: Body, ids: list[int], max_tokens: int, request: Request) -> Response:
        self._check_prompt(ids, max_tokens)
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
            stream = self._stream(answer, first, events, ticket, watch)
            return StreamingResponse(stream, media_type="text/event-stream")
        self._end(ticket, watch)
        if isinstance(first, Exception):
            return _refusal(first)
        if body.stream:
            return Response(answer.last_chunks(first), media_type="text/event-stream")
        return JSONResponse(answer.whole(first))

    def _check_model(self, body: Body) -> None:
        if body.model != self.name:
            raise RequestError(
                f"`model` must be `{self.name}`, the one that is served, but it is `{body.model}`.",
                404,
                "model_not_found",
            )
        body.check()

    def _check_prompt(self, ids: list[int], max_tokens: int) -> None:
        if not ids:
            raise RequestError("The prompt must hold a token, but it is empty.")
        if not all(0 <= token_id < self._vocab_size for token_id in ids):
            raise RequestError(f"Token ids must be from 0 to {self._vocab_size - 1}, but `prompt` holds others.")
        if self._context is not None and len(ids) + max_tokens > self._context:
            raise RequestError(
                f"A prompt and its new tokens must fit into the context of {self._context} tokens, but the prompt has "
                f"{len(ids)} and {max_tokens} are asked for. Shorten it, or lower `max_tokens`.",
                code="context_length_exceeded",
            )

    async def _stream(
        self, answer: Answer, first: str, events: "asyncio.Queue[Event]", ticket: Ticket, watch: "asyncio.Task[None]"
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
    for kind in (RequestError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _handled)


async def _handled(_request: Request, error: Exception) -> JSONResponse:
    return _refusal(error)


def _refusal(error: Exception) -> JSONResponse:
    body, status = _error_of(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None  # seconds
    return JSONResponse(body, status, headers)


def _error_of(error: Exception) -> tuple[dict[str, Any], int]:
    """An error in OpenAI's form, and its status."""
    said = f": {error}" if isinstance(error, FalconSpecError) else "."
    status, code, message = 500, None, f"The text could not be written: {type(error).__name__}{said}"
    if isinstance(error, RequestError):
        status, code, message = error.status, error.code, str(error)
    elif isinstance(error, RequestValidationError):
        status, code, message = 400, "invalid_value", "; ".join(map(_sentence, error.errors()))
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    return error_body(message, status, code), status


def _sentence(found: Mapping[str, Any]) -> str:
    """What is wrong with a field."""
    name = ".".join(str(part) for part in found["loc"] if part != "body") or "the body"
    return f"`{name}`: {found['msg']}, but it is {json.dumps(found.get('input'), default=str)[:80]}"
