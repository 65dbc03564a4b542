"""The server: who is let in, how a request is understood and answered, and how all of it ends."""

import asyncio
import copy
import json
import secrets
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeAlias

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template
from uvicorn.config import LOGGING_CONFIG

from ..drafters.config_fields import context_of
from ..errors import FalconSpecError, OptionError, RequestError
from ..training.chat_template import ChatTemplate, names_in
from .choice import Choice, reply_parser
from .engine import CLOSED, Engine, Event, TextRequest, Ticket, Written
from .protocol import Answer, ChatBody, CompletionBody, error_body, event

COMPLETION_TOKENS = 16  # the protocol's default of `/v1/completions`; a chat may fill the context
GRACE_SECONDS = 30  # for texts that are being written when the signal comes
NAMES_OF_THIS_MACHINE = ["localhost", "127.0.0.1"]
_MOST_FAULTS = 3  # that one answer names
Numbered: TypeAlias = tuple[int, Event]  # an event, and which of a request's texts it is of


class Service:
    """The endpoints of a server, whichever framework calls them.

    Work on texts is done on a thread of its own, so that the server goes on answering meanwhile.

    Args:
        engine (`Engine`): Writes the texts.
        tokenizer (`PreTrainedTokenizerBase`): Of the target; no other thread may use it.
        name (`str`): Under which the model is served.
        chat_template_kwargs (`Mapping[str, Any]`): Given to the chat template, unless a request gives others.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        chat_template_kwargs: Mapping[str, Any],
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.chat_template_kwargs = chat_template_kwargs
        self.created = int(time.time())
        config: Any = engine.target.config
        self.context = context_of(config)
        self._vocab_size = config.get_text_config(decoder=True).vocab_size
        self._thread = ThreadPoolExecutor(1, "falcon-spec intake")

    async def models(self) -> dict[str, Any]:
        """The model that is served."""
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "transformers_falcon_spec"}
        return {"object": "list", "data": [model]}

    async def health(self) -> dict[str, Any]:
        """Whether requests are taken, and how many wait."""
        if not self.engine.is_open:
            raise RequestError(CLOSED, 503, "shutting_down")
        return {"status": "ok", "num_waiting": self.engine.num_waiting}

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """The text that follows a prompt."""
        ids, parsers = await self._understood(body)
        return await self._answer(body, ids, parsers, body.max_tokens or COMPLETION_TOKENS, request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """The next turn of a conversation."""
        ids, parsers = await self._understood(body)
        most = body.max_completion_tokens or body.max_tokens
        if most is None and self.context is None:
            raise RequestError("`max_tokens` must be given, as the target's config names no length of its context.")
        return await self._answer(body, ids, parsers, most or max((self.context or 0) - len(ids), 1), request)

    async def _understood(self, body: ChatBody | CompletionBody) -> tuple[list[int], list[Any]]:
        """The prompt of a request, and what reads each text that follows it.

        A [`RequestError`] says why it cannot be served.
        """
        if body.model != self.name:
            raise RequestError(
                f"`model` must be `{self.name}`, the one that is served, but it is `{body.model}`.",
                404,
                "model_not_found",
            )

        body.check()
        if body.n is not None and body.n > self.engine.max_queue:
            raise RequestError(
                f"`n` must be at most {self.engine.max_queue}, as each text waits in the queue of this server, but it "
                f"is {body.n}. Ask for fewer texts, or start the server with a larger `--max_queue`."
            )
        try:
            ids, parsers = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, body)
        except (TypeError, UnicodeError):  # halves of surrogate pairs, which JSON can hold
            raise RequestError("A prompt must be text in Unicode, but it is not.") from None
        if not ids or not all(0 <= each < self._vocab_size for each in ids):
            raise RequestError(f"A prompt must hold tokens, with ids from 0 to {self._vocab_size - 1}.")
        return ids, parsers

    def _read(self, body: ChatBody | CompletionBody) -> tuple[list[int], list[Any]]:
        num_choices = body.n or 1
        if isinstance(body, ChatBody):
            ids = self._chat_ids(body)
            tools = body.shown_tools
            parsers = [reply_parser(self.tokenizer, self.engine.target, ids, tools) for _ in range(num_choices)]
            return ids, parsers

        prompt = body.only_prompt
        ids = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt
        return ids, [None] * num_choices

    def _chat_ids(self, body: ChatBody) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise RequestError("The target has no chat template. Use `/v1/completions`.")
        messages = [message.for_template() for message in body.messages]
        tools = body.shown_tools
        if tools is not None:
            self._check_can_call()
        try:
            template = ChatTemplate(self.tokenizer, {**self.chat_template_kwargs, **body.chat_template_kwargs})
            text = template.text(messages, add_generation_prompt=True, tools=tools)
        except OptionError as error:
            raise RequestError(str(error)) from None
        except Exception as error:  # noqa: BLE001  a template runs with what the request gives it
            cause = error.__cause__ or error  # what the template itself raised
            said = str(cause) or type(cause).__name__
            raise RequestError(f"The chat template must take these `messages`, but it says: {said}") from None
        return template.ids(text)

    def _check_can_call(self) -> None:
        """Refuse tools that the target is not shown, and those whose calls could not be read: [`RequestError`]."""
        lacks = None
        if "tools" not in names_in(self.tokenizer):
            lacks = "its chat template does not show them"
        elif get_response_template(self.tokenizer, self.engine.target) is None:
            lacks = "its tokenizer has no `response_template`, which says how calls are written"
        if lacks is not None:
            raise RequestError(
                f"`tools` must be left out, as the target that is served takes none: {lacks}.",
                code="unsupported_parameter",
            )

    async def _answer(
        self, body: ChatBody | CompletionBody, ids: list[int], parsers: list[Any], max_tokens: int, request: Request
    ) -> Response:
        if self.context is not None and len(ids) + max_tokens > self.context:
            raise RequestError(
                f"A prompt and its new tokens must fit into the context of {self.context} tokens, but the prompt has "
                f"{len(ids)} and {max_tokens} are asked for. Shorten it, or lower `max_tokens`.",
                code="context_length_exceeded",
            )

        is_chat = isinstance(body, ChatBody)
        asked = TextRequest(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=body.sampling(self.engine.target.generation_config),
            seed=body.seed,
            stop=body.stops,
            is_streamed=bool(body.stream),
            keeps_special_tokens=parsers[0] is not None,
            num_top=body.num_top,
            user=body.prompt_cache_key or body.user,
        )
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        choices = []
        for index, parser in enumerate(parsers):
            call_id = f"{answer_id}_{index}_tool_call"
            choices.append(Choice(index, call_id, is_chat, parser, self.engine.end_tokens))
        answer = Answer(choices, answer_id, self.name, int(time.time()), len(ids), body.has_usage)

        stream = self._events(request, asked, len(choices))
        if not body.stream:
            return await _whole(answer, stream)
        first = await anext(stream)
        if isinstance(first[1], Exception):  # before any text, so that it has its status
            await stream.aclose()
            return refusal(first[1])
        return StreamingResponse(_chunks(answer, first, stream), media_type="text/event-stream")

    async def _events(self, request: Request, asked: TextRequest, num_texts: int) -> AsyncGenerator[Numbered, None]:
        """The events of a request, each with the number of its text.

        All texts end with this, and when nobody listens any more. The first one has the seed of the request, if it
        names one, the next ones those that follow it.
        """
        events: asyncio.Queue[Numbered] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(number: int, new: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (number, new))

        tickets: list[Ticket] = []
        watch = asyncio.create_task(self._cancel_if_left(request, tickets))
        try:
            for number in range(num_texts):
                seed = None if asked.seed is None else asked.seed + number
                tickets.append(self.engine.submit(replace(asked, seed=seed), partial(tell, number)))
            while True:
                yield await events.get()
        finally:
            watch.cancel()
            for ticket in tickets:
                self.engine.cancel(ticket)  # changes nothing once the text is written

    async def _cancel_if_left(self, request: Request, tickets: Sequence[Ticket]) -> None:
        """Wait until nobody listens any more."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for ticket in tickets:
            self.engine.cancel(ticket)


async def _whole(answer: Answer, stream: AsyncGenerator[Numbered, None]) -> Response:
    """The answer at once, or the error of one of its texts."""
    written: dict[int, Written] = {}
    async with aclosing(stream):
        while len(written) < len(answer.choices):
            number, new = await anext(stream)
            if isinstance(new, Exception):
                return refusal(new)
            assert isinstance(new, Written)  # pieces are told of streams alone
            written[number] = new
    return JSONResponse(answer.whole([written[index] for index in sorted(written)]))


async def _chunks(
    answer: Answer, first: Numbered, stream: AsyncGenerator[Numbered, None]
) -> AsyncGenerator[str, None]:
    """The answer as a stream, whose first event has come."""
    written: list[Written] = []
    number, new = first
    async with aclosing(stream):
        while not isinstance(new, Exception):
            text = answer.chunks(number, new)
            if text:
                yield text
            if isinstance(new, Written):
                written.append(new)
            if len(written) == len(answer.choices):
                yield answer.end(written)
                return
            number, new = await anext(stream)
        yield event(_error_of(new)[0])


def make_app(service: Service, host: str, api_key: str | None = None) -> FastAPI:
    """An application of FastAPI with the endpoints, and with errors in OpenAI's form.

    `host` is the address at which the server listens, `api_key` what clients must send as their key.
    """

    async def check_key(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        token = "" if given is None else given.credentials
        if api_key is not None and not secrets.compare_digest(token.encode(), api_key.encode()):
            raise RequestError(
                "The header `Authorization` must be `Bearer` and the key of this server, but it is not. Give your "
                "client the key as its `api_key`.",
                401,
                "invalid_api_key",
            )

    app = FastAPI(title="transformers_falcon_spec")
    locked: dict[str, Any] = {"dependencies": [Depends(check_key)], "response_model": None}
    app.add_api_route("/health", service.health)
    app.add_api_route("/v1/models", service.models, **locked)
    app.add_api_route("/v1/completions", service.completion, methods=["POST"], **locked)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], **locked)
    add_error_handlers(app)

    is_for_this_machine = host == "localhost" or host.startswith("127.")
    if api_key is None and is_for_this_machine:  # no web page may lead its own name here
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*NAMES_OF_THIS_MACHINE, host])
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Let errors of an application be told in OpenAI's form."""
    for kind in (RequestError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, lambda _request, error: refusal(error))


def refusal(error: Exception) -> Response:
    """The answer that tells an error."""
    body, status = _error_of(error)
    later = {"Retry-After": "1"}  # seconds
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: later, 503: later}.get(status)
    return Response(json.dumps(body), status, headers, "application/json")  # escaped, whatever a request held


def _error_of(error: Exception) -> tuple[dict[str, Any], int]:
    """An error in OpenAI's form, and its status."""
    if isinstance(error, RequestError):
        return error_body(str(error), error.status, error.code), error.status
    if isinstance(error, HTTPException):
        return error_body(str(error.detail), error.status_code, None), error.status_code
    if isinstance(error, RequestValidationError):
        faults = []
        for found in error.errors()[:_MOST_FAULTS]:
            place = ".".join(str(each) for each in found["loc"][1:]) or "the body, of content-type application/json"
            faults.append(f"`{place:.80}`: {found['msg']}")
        return error_body("; ".join(faults), 400, "invalid_value"), 400

    said = f": {error}" if isinstance(error, FalconSpecError) else "."
    return error_body(f"The text could not be written: {type(error).__name__}{said}", 500, None), 500


class Server(uvicorn.Server):
    """Serves the endpoints of a [`Service`]; listens from the start, answers in `run()`.

    SIGTERM and SIGINT end it: requests that wait are refused. Texts that are being written have 30 seconds; then they
    are cancelled.

    Args:
        service (`Service`): The endpoints.
        host (`str`): The address to listen at.
        port (`int`): The port to listen at; 0 takes a free one.
        api_key (`str`, *optional*): What clients must send as their key.
    """

    def __init__(self, service: Service, host: str, port: int, api_key: str | None = None) -> None:
        logs = copy.deepcopy(LOGGING_CONFIG)
        logs["handlers"]["access"]["stream"] = "ext://sys.stderr"
        logs["loggers"]["uvicorn.error"]["level"] = "WARNING"
        app = make_app(service, host, api_key)
        super().__init__(uvicorn.Config(app, log_config=logs, timeout_graceful_shutdown=GRACE_SECONDS))
        self.service = service
        self.engine = service.engine
        self._listener = socket.create_server((host, port))

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until a signal comes, or until `should_exit` is set."""
        try:
            super().run(sockets or [self._listener])
        finally:
            self.engine.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what waits, end as uvicorn does, and then the engine, while there is still a loop to tell."""
        self.engine.drain()
        await super().shutdown(sockets)
        await asyncio.to_thread(self.engine.close)
