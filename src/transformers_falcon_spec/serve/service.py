"""The server: who is let in, how a request is read within limits and answered, and how all of it ends."""

import asyncio
import hmac
import ipaddress
import logging
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from ..drafters.config_fields import context_of
from ..errors import FalconSpecError, OptionError, RequestError
from ..training.chat_template import ChatTemplate
from .engine import CLOSED, Engine, Event, TextRequest, Ticket, Written
from .protocol import Answer, AnyBody, Body, ChatBody, CompletionBody, error_body, event, parsed

_LOG = logging.getLogger(__name__)
COMPLETION_TOKENS = 16  # the protocol's default of `/v1/completions`; a chat may fill the context
BODY_SECONDS = 30  # in which the body of a request must have come
GRACE_SECONDS = 30  # for texts that are being written when the signal comes
PIECE = 1 << 16  # characters that are tokenised at once to see whether a long text can fit
OPEN_PATHS = {"/health"}  # without a key, for whoever watches over the server
_MIB = 2**20
_TOO_LONG = "context_length_exceeded"


class Service:
    """The endpoints of a server, whichever framework calls them.

    Work on texts is done on a thread of its own, so that the server goes on answering meanwhile.

    Args:
        engine (`Engine`): Writes the texts.
        tokenizer (`PreTrainedTokenizerBase`): Of the target; no other thread may use it.
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
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.chat_template_kwargs = chat_template_kwargs
        self.max_body_mib = max_body_mib
        self.created = int(time.time())
        config: Any = engine.target.config
        self.context = context_of(config)
        self._vocab_size = config.get_text_config(decoder=True).vocab_size
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, "falcon-spec intake")
        self._receiving: set[asyncio.Task[bytes]] = set()

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
        body, ids = await self._read(request, CompletionBody)
        return await self._answer(body, ids, body.max_tokens or COMPLETION_TOKENS, request)

    async def chat(self, request: Request) -> Response:
        """The next turn of a conversation."""
        body, ids = await self._read(request, ChatBody)
        most = body.max_completion_tokens or body.max_tokens
        if most is None and self.context is None:
            raise RequestError("`max_tokens` must be given, as the target's config names no length of its context.")
        return await self._answer(body, ids, most or max((self.context or 0) - len(ids), 1), request)

    def refuse_unreceived(self) -> None:
        """Wait no more for bodies that have not come."""
        for receiving in self._receiving:
            receiving.cancel()

    async def _read(self, request: Request, kind: type[AnyBody]) -> tuple[AnyBody, list[int]]:
        """What a request asks for, and its prompt; a [`RequestError`] says why it cannot be served."""
        found = request.headers.get("content-type", "")
        media = found.partition(";")[0].strip().lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise RequestError(  # any web page can send another one without asking
                f"The header `Content-Type` must be `application/json`, but it is {found!r:.80}.",
                415,
                "unsupported_media_type",
            )

        receiving = asyncio.create_task(self._received(request))
        self._receiving.add(receiving)
        receiving.add_done_callback(self._receiving.discard)

        try:
            raw = await asyncio.wait_for(receiving, BODY_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(f"The body must come within {BODY_SECONDS} seconds, but it did not.", 408) from None
        except asyncio.CancelledError:
            raise RequestError(CLOSED, 503, "shutting_down") from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, self._understood, raw, kind)

    async def _received(self, request: Request) -> bytes:
        """The body, unless it is too large."""
        limit = self.max_body_mib * _MIB
        too_large = RequestError(
            f"The body of a request must have at most {self.max_body_mib} MiB, but it has more. Shorten it, or start "
            "the server with a larger `--max_body_mib`.",
            413,
            "body_too_large",
        )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_large

        received = bytearray()
        try:
            async for piece in request.stream():
                received += piece
                if len(received) > limit:
                    raise too_large
        except ClientDisconnect:
            raise RequestError("The body must come as a whole, but the connection was closed.") from None

        return bytes(received)

    def _understood(self, raw: bytes, kind: type[AnyBody]) -> tuple[AnyBody, list[int]]:
        body = parsed(raw, kind)
        if body.model != self.name:
            raise RequestError(
                f"`model` must be `{self.name}`, the one that is served, but it is `{body.model}`.",
                404,
                "model_not_found",
            )

        body.check()
        ids = self._chat_ids(body) if isinstance(body, ChatBody) else self._prompt_ids(body.only_prompt())
        if not ids:
            raise RequestError("The prompt must hold a token, but it is empty.")

        return body, ids

    def _prompt_ids(self, prompt: str | list[Any]) -> list[int]:
        if isinstance(prompt, str):
            self._check_text(prompt)
            return list(self.tokenizer(prompt)["input_ids"])

        self._check_length(len(prompt), 1)
        if not all(type(each) is int and 0 <= each < self._vocab_size for each in prompt):
            raise RequestError(
                f"Token ids must be whole numbers from 0 to {self._vocab_size - 1}, but `prompt` holds others."
            )

        return prompt

    def _chat_ids(self, body: ChatBody) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise RequestError("The target has no chat template. Use `/v1/completions`.")
        messages = [message.for_template() for message in body.messages]
        try:
            template = ChatTemplate(self.tokenizer, {**self.chat_template_kwargs, **body.chat_template_kwargs})
            text = template.text(messages, add_generation_prompt=True)
        except OptionError as error:
            raise RequestError(str(error)) from None
        except Exception as error:  # noqa: BLE001  a template runs with what the request gives it
            cause = error.__cause__ or error  # what the template itself raised
            said = str(cause) or type(cause).__name__
            raise RequestError(f"The chat template must take these `messages`, but it says: {said}") from None

        self._check_text(text)
        return template.ids(text)

    def _check_text(self, text: str) -> None:
        """Refuse a long text that cannot fit as soon as that is known: all of it would take long to tokenise."""
        if self.context is None:
            return
        num_least = 0
        for start in range(0, len(text) - PIECE, PIECE):
            ids = self.tokenizer(text[start : start + PIECE], add_special_tokens=False)["input_ids"]
            num_least += len(ids) - self._longest_token  # which may stand across the cut
            if num_least > self.context:
                raise RequestError(
                    f"A prompt must fit into the context of {self.context} tokens, but it has {len(text)} characters, "
                    f"of which the first {start + PIECE} are more tokens than that. Shorten it.",
                    code=_TOO_LONG,
                )

    def _check_length(self, num_ids: int, max_tokens: int) -> None:
        """Refuse a prompt that does not fit into the context together with its new tokens."""
        if self.context is not None and num_ids + max_tokens > self.context:
            raise RequestError(
                f"A prompt and its new tokens must fit into the context of {self.context} tokens, but the prompt has "
                f"{num_ids} and {max_tokens} are asked for. Shorten it, or lower `max_tokens`.",
                code=_TOO_LONG,
            )

    async def _answer(self, body: Body, ids: list[int], max_tokens: int, request: Request) -> Response:
        self._check_length(len(ids), max_tokens)
        request.state.num_read = len(ids)
        sampling = body.sampling(self.engine.target.generation_config)
        asked = TextRequest(tuple(ids), max_tokens, sampling, body.seed, body.stops, bool(body.stream))
        is_chat = isinstance(body, ChatBody)
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        answer = Answer(is_chat, answer_id, self.name, int(time.time()), len(ids), body.has_usage)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ticket = self.engine.submit(asked, lambda new: loop.call_soon_threadsafe(events.put_nowait, new))
        stream = self._events(request, ticket, events)
        first = await anext(stream)  # an error before any text has its status
        if isinstance(first, str):
            return StreamingResponse(_chunks(answer, first, stream), media_type="text/event-stream")

        await stream.aclose()
        if isinstance(first, Exception):
            return refusal(first)
        if body.stream:
            return Response(answer.last_chunks(first), media_type="text/event-stream")

        return JSONResponse(answer.whole(first))

    async def _events(
        self, request: Request, ticket: Ticket, events: "asyncio.Queue[Event]"
    ) -> AsyncGenerator[Event, None]:
        """The events of a request, which ends with this, and when nobody listens any more."""
        watch = asyncio.create_task(self._cancel_if_left(request, ticket))
        try:
            while True:
                yield await events.get()
        finally:
            request.state.num_written = len(ticket.text.token_ids)
            watch.cancel()
            self.engine.cancel(ticket)  # changes nothing once the text is written

    async def _cancel_if_left(self, request: Request, ticket: Ticket) -> None:
        """Wait until nobody listens any more."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.engine.cancel(ticket)


async def _chunks(answer: Answer, first: str, stream: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
    """The answer as a stream, whose first piece has come."""
    try:
        yield answer.chunk(first, is_first=True)
        async for new in stream:
            if isinstance(new, str):
                yield answer.chunk(new, is_first=False)
                continue
            yield answer.last_chunks(new) if isinstance(new, Written) else event(_error_of(new)[0])
            break
    finally:
        await stream.aclose()


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
    later = {"Retry-After": "1"}  # seconds
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: later, 503: later}.get(status)
    return JSONResponse(body, status, headers)


def _error_of(error: Exception) -> tuple[dict[str, Any], int]:
    """An error in OpenAI's form, and its status."""
    if isinstance(error, RequestError):
        return error_body(str(error), error.status, error.code), error.status
    if isinstance(error, HTTPException):
        return error_body(str(error.detail), error.status_code, None), error.status_code
    said = f": {error}" if isinstance(error, FalconSpecError) else "."
    return error_body(f"The text could not be written: {type(error).__name__}{said}", 500, None), 500


class Front:
    """An application around another one, which lets in what may come in and logs how it was answered.

    Args:
        app (`ASGIApp`): The application with the endpoints.
        host (`str`): The address at which the server listens.
        api_key (`str`, *optional*): What clients must send as their key.
    """

    def __init__(self, app: ASGIApp, host: str, api_key: str | None = None) -> None:
        self.app = app
        self._host = host
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or whatever else a server tells an application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        start = time.perf_counter()
        state = scope.setdefault("state", {})
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            error = self._error_of(scope["path"], Headers(scope=scope))
            app = self.app if error is None else refusal(error)
            await app(scope, receive, noted)
        finally:
            _LOG.info(
                "%s %.200s %d, %.3f s, %d tokens read, %d written",
                scope["method"],
                ascii(scope["path"])[1:-1],  # no line ends from outside
                status,
                time.perf_counter() - start,
                state.get("num_read", 0),
                state.get("num_written", 0),
            )

    def _error_of(self, path: str, headers: Headers) -> RequestError | None:
        """Why a request is not let in, if it is not.

        A web page that leads its own name to this machine is not, where only this machine should ask.
        """
        if self._api_key is not None:
            given = headers.get("authorization", "").encode("latin-1")
            wanted = f"Bearer {self._api_key}".encode("latin-1")
            if path in OPEN_PATHS or hmac.compare_digest(given, wanted):
                return None

            return RequestError(
                "The header `Authorization` must be `Bearer` and the key of this server, but it is not. Give your "
                "client the key as its `api_key`.",
                401,
                "invalid_api_key",
            )

        name = headers.get("host", "")
        if not name or not _is_loopback(self._host) or _is_loopback(_host_in(name), self._host):
            return None

        return RequestError(
            f"The header `Host` must name this machine, as the server listens at {self._host} alone, but it is "
            f"{name!r:.80}. Ask `localhost`, or start the server with an `--api_key`, which lets other names in.",
            403,
            "wrong_host",
        )


def _host_in(name: str) -> str:
    """The host of a header, without its port; nothing of what is none."""
    try:
        return urlsplit(f"//{name}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str, *others: str) -> bool:
    """Whether a host is this machine's own, which no other can reach, or one of `others`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in {"localhost", *map(str.lower, others)}


class Server(uvicorn.Server):
    """Serves the endpoints of a [`Service`]; listens from the start, answers in `run()`.

    SIGTERM and SIGINT end it: requests that wait, or have not come as a whole, are refused. Texts that are being
    written have 30 seconds; then they are cancelled.

    Args:
        service (`Service`): The endpoints.
        host (`str`): The address to listen at.
        port (`int`): The port to listen at; 0 takes a free one.
        api_key (`str`, *optional*): What clients must send as their key.
    """

    def __init__(self, service: Service, host: str, port: int, api_key: str | None = None) -> None:
        app = Front(make_app(service), host, api_key)
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS))
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
        self.service.refuse_unreceived()
        await super().shutdown(sockets)
        await asyncio.to_thread(self.engine.close)
