"""A server that speaks OpenAI's chat completions: requests with retries, at most so many a minute."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # that of `httpx` or `httpx2`

from ..errors import EndpointError, FalconSpecError, OptionError
from .answers import Prompt, RefusedPromptError, RegenerateOptions, Reply
from .chat_template import Message

RETRIED = (408, 409, 425, 429)  # and all from 500 on: the server may answer later
REFUSED = (400, 413, 422)  # the server does not take this request, but maybe others
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
_THOUGHTS = ("reasoning_content", "reasoning")  # names that servers give to thoughts
_NUM_SHOWN = 300  # characters of an answer that errors show


class RefusedRequestError(RefusedPromptError, EndpointError):
    """The server does not take one request, but maybe others."""


class UnusableEndpointError(EndpointError):
    """The server takes no request: the key, the model or the address is wrong."""


class _MayComeError(EndpointError):
    """There is no answer yet; the server may say when to ask again."""

    def __init__(self, text: str, wait_seconds: float | None = None) -> None:
        super().__init__(text)
        self.wait_seconds = wait_seconds


@dataclass
class ChatEndpoint:
    """An OpenAI-compatible server that answers prompts. Threads may share it.

    Args:
        url (`str`): Its address, such as `http://localhost:8000/v1`.
        model (`str`): The name by which the server knows the model.
        api_key (`str`, *optional*): The key, which is never shown.
        timeout_seconds (`float`): The longest time for an answer.
        num_tries (`int`): How often a request is made before it fails.
        requests_per_minute (`int`, *optional*): The most requests a minute, retries included.
        num_at_once (`int`): Requests at once.
        template_kwargs (`dict`): Arguments for the chat template, which are sent to servers that take them.
        clock, sleep: What tells the seconds, and what lets them pass.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 600.0
    num_tries: int = 6
    requests_per_minute: int | None = None
    num_at_once: int = 16
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise OptionError(
                "`endpoint` must be an address such as `http://localhost:8000/v1`, without a name or key in it, but "
                f"it is `{self.url.rpartition('@')[2]}`. A key belongs into the variable `OPENAI_API_KEY`."
            )
        base = self.url.rstrip("/").removesuffix("/chat/completions")
        self.api_key = (self.api_key or "").strip() or None
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError("The key in `OPENAI_API_KEY` must be one line of plain characters, but it is not.")
        self.url = base if base.partition("://")[2].partition("/")[2] else f"{base}/v1"
        if not 0 < self.timeout_seconds < math.inf:
            raise OptionError(f"`timeout_seconds` must be above 0, but it is {self.timeout_seconds}.")
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            raise OptionError(f"`requests_per_minute` must be at least 1, but it is {self.requests_per_minute}.")
        if self.num_at_once < 1:
            raise OptionError(f"`concurrency` must be at least 1, but it is {self.num_at_once}.")
        # A fresh client of the kind that the Hub's library has: its own one refuses to work in offline mode.
        self._client = type(get_session())(timeout=self.timeout_seconds)
        self._lock, self._next_seconds = threading.Lock(), self.clock()

    def close(self) -> None:
        """Close all connections; requests that run fail."""
        self._client.close()

    @property
    def settings(self) -> dict[str, Any]:
        """The name of the model; its server may move."""
        return {"endpoint_model": self.model}

    def batches(self, lengths: Mapping[int, int], options: RegenerateOptions) -> dict[int, list[int]]:  # noqa: ARG002
        """Each row by itself, for the server makes its own batches."""
        return {row: [row] for row in lengths}

    def answer(
        self, prompts: Sequence[Prompt], options: RegenerateOptions, seed: int
    ) -> Sequence[Reply | FalconSpecError]:
        """The answers of the server; an [`UnusableEndpointError`] if it takes no request.

        How it draws, besides seed and temperature, is its own business.
        """
        sent: dict[str, Any] = {"max_tokens": options.num_tokens, "temperature": options.temperature, "seed": seed}
        if self.template_kwargs:
            sent["chat_template_kwargs"] = dict(self.template_kwargs)
        found: list[Reply | FalconSpecError] = []
        for prompt in prompts:
            messages = [{"role": message["role"], "content": message["content"]} for message in prompt.messages]
            try:
                found.append(self.ask(messages, **sent))
            except UnusableEndpointError:
                raise
            except EndpointError as error:
                found.append(error)
        return found

    def ask(self, messages: Sequence[Message], **options: Any) -> Reply:
        """Ask for the next turn of a conversation; `options` are further fields of the request.

        Raises:
            [`EndpointError`]: the server cannot be reached, does not answer in time, answers garbage or refuses, each
                after the tries that are worth it.
        """
        body = {"model": self.model, "messages": list(messages), **options}
        failure = ""
        for number in range(self.num_tries):
            self._wait_for_turn()
            try:
                return self._post(body)
            except _MayComeError as error:
                failure = str(error)
                if number + 1 < self.num_tries:
                    backoff = FIRST_WAIT_SECONDS * 2**number if error.wait_seconds is None else error.wait_seconds
                    self.sleep(min(backoff, LONGEST_WAIT_SECONDS))
        raise EndpointError(f"`{self.url}` must answer, but in {self.num_tries} tries it did not: {failure}.")

    def _wait_for_turn(self) -> None:
        """Wait until the next request may be made; requests are spread evenly."""
        if self.requests_per_minute is None:
            return
        with self._lock:
            now = self.clock()
            start = max(now, self._next_seconds)
            self._next_seconds = start + 60 / self.requests_per_minute
        if start > now:
            self.sleep(start - now)

    def _post(self, body: Mapping[str, Any]) -> Reply:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            response = self._client.post(f"{self.url}/chat/completions", json=body, headers=headers)
        except HTTPError as error:
            raise _MayComeError(f"{type(error).__name__}: {error}") from error
        if response.status_code in RETRIED or response.is_server_error:
            raise _MayComeError(self._said(response), _retry_after(response.headers.get("retry-after")))
        if response.status_code in REFUSED:
            raise RefusedRequestError(f"`{self.url}` refuses a request: {self._said(response)}.")
        if not response.is_success:
            raise UnusableEndpointError(
                f"`{self.url}` must answer requests for the model `{self.model}`, but it does not: "
                f"{self._said(response)}. Check address, model and the key in `OPENAI_API_KEY`."
            )
        try:
            return _reply(response.json()["choices"][0])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _MayComeError(f"what it says is no chat completion: {self._said(response)}") from error

    def _said(self, response: Any) -> str:
        text = response.text.replace(self.api_key or "\0", "(key)")
        return f"status {response.status_code}, {text[:_NUM_SHOWN]!r}"


def _is_address(url: str) -> bool:
    """Whether a text is the address of a server, without a name or a password in it."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in url
    except ValueError:
        return False


def _reply(choice: Mapping[str, Any]) -> Reply:
    message = choice["message"]
    thought = next((message[name] for name in _THOUGHTS if message.get(name)), "")
    text = message.get("content") or ""
    if not isinstance(text, str) or not isinstance(thought, str) or not (text or thought or "content" in message):
        raise TypeError("an answer must be a text")
    return Reply(text, choice.get("finish_reason") != "length", thought)


def _retry_after(header: str | None) -> float | None:
    """The seconds that a server asks to wait; None where it names none, or a date."""
    return float(header) if header is not None and header.strip().isdecimal() else None
