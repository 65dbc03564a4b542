"""Reading a request within limits: its body is received, parsed and checked, and its prompt becomes token ids."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..drafters.config_fields import context_of
from ..errors import OptionError, RequestError
from ..training.chat_template import ChatTemplate
from .engine import CLOSED
from .protocol import Body, ChatBody, CompletionBody, wrong_field

BODY_SECONDS = 30  # in which the body of a request must have come
MOST_ERRORS = 3  # that one answer names
PIECE = 1 << 16  # characters that are tokenised at once to see whether a long text can fit
_MIB = 2**20
_TOO_LONG = "context_length_exceeded"

AnyBody = TypeVar("AnyBody", ChatBody, CompletionBody)


class Intake:
    """Reads requests. Work on texts is done on a thread of its own, so that the server goes on answering meanwhile.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the target; no other thread may use it.
        config (`PretrainedConfig`): Of the target.
        name (`str`): Under which the model is served.
        chat_template_kwargs (`Mapping[str, Any]`): Given to the chat template, unless a request gives others.
        max_body_mib (`int`): The largest body that is read, in MiB.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        name: str,
        chat_template_kwargs: Mapping[str, Any],
        max_body_mib: int,
    ) -> None:
        self.tokenizer, self.name, self.chat_template_kwargs = tokenizer, name, chat_template_kwargs
        self._max_body_mib = max_body_mib
        text_config: Any = config.get_text_config(decoder=True)
        self._vocab_size = text_config.vocab_size
        self.context = context_of(config)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, "falcon-spec intake")
        self._receiving: set[asyncio.Task[bytes]] = set()

    async def read(self, request: Request, kind: type[AnyBody]) -> tuple[AnyBody, list[int]]:
        """What a request asks for, and its prompt.

        Raises:
            [`RequestError`]: the request cannot be served; it says why.
        """
        _check_type(request)
        receiving = asyncio.create_task(self._received(request))
        self._receiving.add(receiving)
        receiving.add_done_callback(self._receiving.discard)
        try:
            await asyncio.wait([receiving], timeout=BODY_SECONDS)
            if not receiving.done():
                raise RequestError(f"The body must come within {BODY_SECONDS} seconds, but it did not.", 408)
        finally:
            receiving.cancel()
        if receiving.cancelled():
            raise RequestError(CLOSED, 503, "shutting_down")

        raw = receiving.result()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._understood, raw, kind)

    def refuse_unreceived(self) -> None:
        """Wait no more for bodies that have not come."""
        for receiving in self._receiving:
            receiving.cancel()

    async def _received(self, request: Request) -> bytes:
        limit = self._max_body_mib * _MIB
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise self._too_large()

        received = bytearray()
        try:
            async for piece in request.stream():
                received += piece
                if len(received) > limit:
                    raise self._too_large()
        except ClientDisconnect:
            raise RequestError("The body must come as a whole, but the connection was closed.") from None
        return bytes(received)

    def _too_large(self) -> RequestError:
        return RequestError(
            f"The body of a request must have at most {self._max_body_mib} MiB, but it has more. Shorten it, or start "
            "the server with a larger `--max_body_mib`.",
            413,
            "body_too_large",
        )

    def _understood(self, raw: bytes, kind: type[AnyBody]) -> tuple[AnyBody, list[int]]:
        body = _parsed(raw, kind)
        self._check_model(body)
        body.check()
        ids = self._chat_ids(body) if isinstance(body, ChatBody) else self._prompt_ids(body.only_prompt())
        if not ids:
            raise RequestError("The prompt must hold a token, but it is empty.")
        return body, ids

    def _check_model(self, body: Body) -> None:
        if body.model != self.name:
            raise RequestError(
                f"`model` must be `{self.name}`, the one that is served, but it is `{body.model}`.",
                404,
                "model_not_found",
            )

    def _prompt_ids(self, prompt: str | list[Any]) -> list[int]:
        if isinstance(prompt, str):
            self._check_text(prompt)
            return list(self.tokenizer(prompt)["input_ids"])

        self.check_length(len(prompt), 1)
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

    def check_length(self, num_ids: int, max_tokens: int) -> None:
        """Refuse a prompt that does not fit into the context together with its new tokens."""
        if self.context is not None and num_ids + max_tokens > self.context:
            raise RequestError(
                f"A prompt and its new tokens must fit into the context of {self.context} tokens, but the prompt has "
                f"{num_ids} and {max_tokens} are asked for. Shorten it, or lower `max_tokens`.",
                code=_TOO_LONG,
            )


def _check_type(request: Request) -> None:
    """Refuse a body that is not said to be JSON: any web page can send such a one without asking."""
    found = request.headers.get("content-type", "")
    kind = found.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(
            f"The header `Content-Type` must be `application/json`, but it is {found!r:.80}.",
            415,
            "unsupported_media_type",
        )


def _parsed(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:  # no JSON, nested too deeply, text that is no Unicode
        raise RequestError(
            f"The body must be JSON in UTF-8 without a byte order mark, but there is a fault: {error}.",
            code="invalid_json",
        ) from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = [wrong_field(found) for found in error.errors(include_url=False)[:MOST_ERRORS]]
        raise RequestError("; ".join(faults)) from None
