"""What requests and answers look like in OpenAI's protocol, and what of a request is served, ignored or refused.

Source: the fields of https://platform.openai.com/docs/api-reference.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import RequestError
from .engine import Sampling, Written

MOST_SEED = 2**63 - 1
MOST_TOKENS = 2**31 - 1
LEAST_TEMPERATURE = 1e-6  # below it scores overflow, and the text is the greedy one
MOST_STOPS = 4  # as OpenAI has it
COUNTS = ("num_steps", "num_drafted", "num_accepted", "acceptance_length")
# Fields that would change the answer and are not served, with the value that asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "functions": [],
    "response_format": {"type": "text"},
}


class StreamOptions(BaseModel):
    """What a stream holds besides its text."""

    include_usage: bool = False


class Body(BaseModel):
    """The fields that both kinds of requests share. Others are ignored, unless they ask for what is not served."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-MOST_SEED - 1, le=MOST_SEED)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Refuse what is not served, in words."""
        for name, value in (self.model_extra or {}).items():
            neutral = _NEUTRAL.get(name, value)
            if value is not None and value != neutral:
                raise RequestError(
                    f"`{name}` must be left out, as this server has no such option, but it is {value!r:.80}.",
                    code="unsupported_parameter",
                )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: Any) -> Sampling:
        """How tokens are chosen: what the request leaves open is as in `defaults`, a `GenerationConfig`."""
        temperature = self.temperature
        if temperature is None:
            temperature = (defaults.temperature or 1.0) if defaults.do_sample else 0.0
        if temperature < LEAST_TEMPERATURE:
            return Sampling()

        top_p = self.top_p if self.top_p is not None else defaults.top_p
        return Sampling(temperature, 1.0 if top_p is None else top_p, defaults.top_k or 0)


class CompletionBody(Body):
    """A request for the text that follows a prompt; a list may hold one prompt alone."""

    prompt: str | list[int] | Annotated[list[str | list[int]], Field(min_length=1, max_length=1)]

    @property
    def only_prompt(self) -> str | list[int]:
        """The prompt, as text or token ids."""
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            return self.prompt[0]
        return self.prompt  # type: ignore[return-value]  # a text, or ids


class Part(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a conversation; fields of its own go to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Part] | None = None

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates take it, with its content as one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**self.model_dump(exclude_unset=True), "content": content}


class ChatBody(Body):
    """A request for the next turn of a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The answer to one request, whole or in chunks."""

    is_chat: bool
    answer_id: str
    model: str
    created: int  # in seconds since 1970
    num_prompt_tokens: int
    has_usage: bool = False  # of a stream

    def whole(self, written: Written) -> dict[str, Any]:
        """The answer at once."""
        content: dict[str, Any] = {"text": written.text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": written.text}}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, content, written.finish_reason) | {"usage": self._usage(written)}

    def chunk(self, piece: str, is_first: bool) -> str:
        """A piece of text as an event of a stream; the first one of a chat names the role."""
        role = {"role": "assistant"} if is_first else {}
        return event(self._chunk({"delta": {**role, "content": piece}} if self.is_chat else {"text": piece}))

    def last_chunks(self, written: Written) -> str:
        """The events that end a stream: why the text ended, what was asked for besides, and that this is all."""
        last = self._chunk({"delta": {}} if self.is_chat else {"text": ""}, written.finish_reason)
        usage = event({**last, "choices": [], "usage": self._usage(written)}) if self.has_usage else ""
        return f"{event(last)}{usage}data: [DONE]\n\n"

    def _chunk(self, content: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        body = self._body("chat.completion.chunk" if self.is_chat else "text_completion", content, finish_reason)
        return {**body, "usage": None} if self.has_usage else body

    def _body(self, kind: str, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": [choice]}

    def _usage(self, written: Written) -> dict[str, Any]:
        """How many tokens were read and written, and what speculation did."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": written.num_tokens,
            "total_tokens": self.num_prompt_tokens + written.num_tokens,
            "speculation": {name: getattr(written.speculation, name) for name in COUNTS},
        }


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def error_body(message: str, status: int, code: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")  # noqa: PLR2004
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
