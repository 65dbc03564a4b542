"""What requests and answers look like in OpenAI's protocol, and what of a request is served, ignored or refused.

Source: the fields of https://platform.openai.com/docs/api-reference.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..core.stats import GenerationStats
from ..errors import RequestError
from .choice import Choice
from .engine import Sampling, Written

MOST_SEED = 2**63 - 1
MOST_TOKENS = 2**31 - 1
LEAST_TEMPERATURE = 1e-6  # below it scores overflow, and the text is the greedy one
MOST_STOPS = 4  # as OpenAI has it, and the next three
MOST_CHOICES = 128
MOST_TOP = 20  # likeliest tokens beside each
MOST_TOP_OF_COMPLETIONS = 5
COUNTS = ("num_steps", "num_drafted", "num_accepted", "acceptance_length")
# Fields that would change the answer and are not served, with the value that asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "functions": [],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "repetition_penalty": 1,  # from here on vLLM's
    "top_k": 0,
    "min_p": 0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "bad_words": [],
    "allowed_token_ids": [],
    "use_beam_search": False,
    "length_penalty": 1,
    "structured_outputs": {},
    "chat_template": "",
    "documents": [],
    "add_generation_prompt": True,
    "continue_final_message": False,
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
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    user: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Refuse what is not served, in words."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value != _NEUTRAL.get(name, value):
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
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_OF_COMPLETIONS)

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each; None: no probabilities."""
        return self.logprobs

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
        turn = {**self.model_dump(exclude_unset=True), "content": content}

        try:
            for call in turn.get("tool_calls") or []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])  # templates read the object
        except (TypeError, KeyError, ValueError) as error:
            raise RequestError(
                "`tool_calls` of a message must be functions with `arguments`, a JSON object in a string, but one "
                f"cannot be read: {type(error).__name__}: {error}."
            ) from None
        return turn


class ChatBody(Body):
    """A request for the next turn of a conversation."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each; None: no probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("`logprobs` must be true where `top_logprobs` are asked for, but it is not.")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the target may call; None if there are none."""
        if self.tool_choice not in (None, "auto", "none"):  # an object has no hash
            raise RequestError(
                "`tool_choice` must be `auto` or `none`, as no call can be forced upon the target here, but it is "
                f"{self.tool_choice!r:.80}.",
                code="unsupported_parameter",
            )
        return None if self.tool_choice == "none" else self.tools or None


@dataclass(frozen=True)
class Answer:
    """The answer to one request, whole or in chunks."""

    choices: list[Choice]
    answer_id: str
    model: str
    created: int  # in seconds since 1970
    num_prompt_tokens: int
    has_usage: bool = False  # of a stream

    def whole(self, written: list[Written]) -> dict[str, Any]:
        """The answer at once, of one text for each choice."""
        choices = [choice.whole(each) for choice, each in zip(self.choices, written, strict=True)]
        return self._body(choices, is_chunk=False) | self._counts(written)

    def chunks(self, index: int, new: str | Written) -> str:
        """The events of a stream for a piece of one text, or for its end; none while a parser holds it back."""
        choice = self.choices[index]
        contents = choice.chunks(new) if isinstance(new, str) else choice.last_chunks(new)
        bodies = [self._body([content], is_chunk=True) for content in contents]
        return "".join(map(event, bodies))

    def end(self, written: list[Written]) -> str:
        """The events that end a stream: what was asked for besides, and that this is all."""
        counts = event(self._body([], is_chunk=True) | self._counts(written)) if self.has_usage else ""
        return f"{counts}data: [DONE]\n\n"

    def _body(self, choices: list[dict[str, Any]], is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.choices[0].is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        no_usage = {"usage": None} if is_chunk and self.has_usage else {}
        return {**head, "choices": choices, **no_usage}

    def _counts(self, written: list[Written]) -> dict[str, Any]:
        """How many tokens were read and written, and what speculation did, in our form and in that of vLLM."""
        num_tokens = sum(each.num_tokens for each in written)
        stats = sum((each.speculation for each in written), GenerationStats())
        usage = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
            "speculation": {name: getattr(stats, name) for name in COUNTS},
        }
        metrics = {"speculative_decoding": acceptance(stats) if len(written) == 1 else None}
        return {"usage": usage, "metrics": metrics}


def acceptance(stats: GenerationStats) -> dict[str, Any]:
    """What speculation did, in the form of vLLM, which AIPerf reads.

    Source: https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/. In trees all nodes count
    as drafted, and the length of a draft is its depth, which changes from step to step.
    """
    deepest = len(stats.kept_by_depth)
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.num_accepted / max(stats.num_drafted, 1),
        "acceptance_histogram": [stats.acceptance_histogram.get(num, 0) for num in range(deepest + 1)],
        "num_spec_steps": stats.num_steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_spec_tokens": deepest,
    }


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def error_body(message: str, status: int, code: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")  # noqa: PLR2004
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
